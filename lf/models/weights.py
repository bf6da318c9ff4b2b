"""Weights through the table of a family: read by slice, checked, reported and written, in both directions.

The rules of the table are records (`lf.models.weight_rules`, whose names may be imported from here).
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lf.models.hf_folder import DTYPES, HfFolder, few
from lf.models.hf_save import Source, source_of
from lf.models.spec import Part, Placed
from lf.models.weight_rules import (
    Carried,
    Duplicate,
    FusedQkv,
    LfRule,
    Piece,
    Rule,
    Same,
    Shape,
    Stack,
    Unused,
    WeightMap,
    ends,
    held_shape,
    hf_names,
    hf_shapes,
    is_carried,
    lf_shape,
    pieces,
    slices,
    to_hf,
    whole,
)

__all__ = [
    "Carried",
    "Duplicate",
    "FusedQkv",
    "LfRule",
    "Piece",
    "Rule",
    "Same",
    "Shape",
    "Stack",
    "Unused",
    "WeightMap",
    "check",
    "differing",
    "export",
    "held_shape",
    "hf_names",
    "hf_shapes",
    "lf_shape",
    "lf_shapes",
    "pieces",
    "read",
    "remember",
    "report",
    "stored_dtype",
    "to_hf",
    "whole",
]

_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32")
_COMPARED = 1 << 22  # Elements of a duplicate that are compared at a time.
_Boxes = tuple[Piece, tuple[slice, ...], Shape, Shape]
"""What `_boxes` gives."""


def stored_dtype(rule: LfRule, folder: HfFolder) -> torch.dtype:
    """Returns the dtype that holds every value of the HF tensors that make an lf tensor."""
    return functools.reduce(torch.promote_types, (folder.dtype(name) for name in hf_names(rule)))


def read(
    weights: WeightMap,
    folder: HfFolder,
    placed: Placed,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns this rank's tensor without padding, reading only the slices that its boxes need.

    `dtype` is what floating tensors become (None keeps the stored one); integers keep theirs. Raises ValueError,
    naming the HF tensor, for values that are not finite.
    """
    rule = weights.by_lf[placed.name]
    stored = stored_dtype(rule, folder)
    out = torch.zeros(held_shape(placed), dtype=dtype if dtype is not None and stored.is_floating_point else stored)
    for piece, box, local, size in _boxes(pieces(rule, placed.shape), placed):
        values = folder.read(piece.hf, box)
        # torch does not ask this of numbers of one byte.
        wide = values.float() if values.is_floating_point() and values.itemsize == 1 else values
        if not bool(torch.isfinite(wide).all()):
            raise ValueError(
                f"{folder.path}: {piece.hf} has values that are not finite; the file is damaged, or the training that "
                "wrote it has diverged: take another copy, or an earlier one"
            )
        out[slices(local, size)] = _as_lf(piece, values, size)
    return out


def differing(
    weights: WeightMap, folder: HfFolder, placed: Placed, value: Tensor, share: tuple[int, int] = (0, 1)
) -> list[str]:
    """Returns the duplicates that differ from `value`, what `read` gives for `placed`, padded or not.

    Reads nothing but duplicates, a few rows at a time: part `share[0]` of `share[1]` of their rows, where as many ranks
    hold the same boxes.
    """
    rule = weights.by_lf[placed.name]
    stored = [each for each in weights.rules if isinstance(each, Duplicate) and each.hf in folder.entries]
    doubles = [each for each in stored if each.of in hf_names(rule)]
    found = []
    for double in doubles:
        every = [piece for piece in pieces(rule, placed.shape) if piece.hf == double.of]
        if not all(
            _same(folder.read(double.hf, box), value[slices(local, size)], piece, size)
            for piece, box, local, size in _cut(_boxes(every, placed), share)
        ):
            found.append(f"{double.hf} and {double.of} in {folder.path}")
    return found


def _cut(boxes: Iterable[_Boxes], share: tuple[int, int]) -> Iterator[_Boxes]:
    """Gives one of `share[1]` equal shares of boxes, a few rows at a time."""
    number, count = share
    for piece, box, local, size in boxes:
        if not box:
            if number == 0:
                yield piece, box, local, size
            continue
        axis = piece.axes[0]
        rows, few = size[axis], max(1, _COMPARED * size[axis] // max(1, math.prod(size)))
        stop = rows * (number + 1) // count
        for first in range(rows * number // count, stop, few):
            extent, start = min(few, stop - first), box[0].start + first
            yield (
                piece,
                (slice(start, start + extent), *box[1:]),
                (*local[:axis], local[axis] + first, *local[axis + 1 :]),
                (*size[:axis], extent, *size[axis + 1 :]),
            )


def _same(double: Tensor, value: Tensor, piece: Piece, size: Shape) -> bool:
    wide = torch.promote_types(double.dtype, value.dtype)
    return torch.equal(_as_lf(piece, double, size).to(wide), value.to(wide))


def _boxes(every: Iterable[Piece], placed: Placed) -> Iterator[_Boxes]:
    """Gives what pieces have in common with a rank's boxes: slices of the HF tensor, first index here, extent in lf."""
    for part in placed.parts:
        for piece in every:
            at, size = _overlap(part, piece)
            if min(size, default=1) > 0:
                start = tuple(a - p for a, p in zip(at, piece.lf_at, strict=True))
                box = tuple(
                    slice(first + start[axis], first + start[axis] + size[axis])
                    for first, axis in zip(piece.hf_at, piece.axes, strict=True)
                )
                local = tuple(mine + a - p for mine, a, p in zip(part.local, at, part.at, strict=True))
                yield piece, box, local, size


def lf_shapes(weights: WeightMap, folder: HfFolder) -> dict[str, Shape]:
    """Returns the global shape of every lf tensor that the folder has all HF tensors for."""
    found = {name: folder.shape(name) for name in folder.names}
    return {lf: lf_shape(rule, found) for lf, rule in weights.by_lf.items() if found.keys() >= set(hf_names(rule))}


def check(
    weights: WeightMap,
    folder: HfFolder,
    shapes: Mapping[str, Shape] | None = None,
    compare: bool = True,
) -> None:
    """Raises ValueError unless the folder and the model account for each other, tensor by tensor.

    `shapes` are the global shapes of all lf tensors of the model; None takes what the folder makes of them. Every HF
    tensor must be claimed by a rule, every rule find its HF tensors, every lf tensor have its rule, every shape agree,
    every dtype be one that holds plain values and, with `compare`, every stored duplicate equal its original. Reads
    nothing but duplicates and their originals, a few rows at a time; `differing` spares those who read originals
    anyway to read them twice.
    """
    model = lf_shapes(weights, folder) if shapes is None else shapes
    names = set(folder.names)
    optional = {rule.hf for rule in weights.rules if isinstance(rule, Duplicate)}
    wanted: dict[str, Shape] = {}
    wrong = []
    for lf, shape in model.items():
        if lf in weights.by_lf:
            try:
                wanted |= hf_shapes(weights.by_lf[lf], tuple(shape))
            except ValueError as error:
                wrong.append(str(error))
    wrong += [
        f"{name} in {folder.entries[name].file} is {list(folder.shape(name))}, the model needs {list(shape)}"
        for name, shape in wanted.items()
        if name in names and folder.shape(name) != shape
    ]
    faults = {
        "missing in the folder": [name for name in weights.by_hf if name not in names and name not in optional],
        "unexpected in the folder": [
            f"{name} in {folder.entries[name].file}"
            for name in folder.names
            if name not in weights.by_hf and not is_carried(weights, name)
        ],
        "of the wrong shape": wrong,
        f"not stored as {', '.join(_PLAIN)}, so perhaps quantised": [
            f"{name} in {folder.entries[name].file} is {folder.entries[name].dtype}"
            for name in wanted
            if name in names and name not in folder.quantisation.scales and folder.entries[name].dtype not in _PLAIN
        ],
        "in the model without a rule": [lf for lf in model if lf not in weights.by_lf],
        "in a rule but not in the model": [lf for lf in weights.by_lf if shapes is not None and lf not in model],
        "stored twice with different values": [
            f"{rule.hf} and {rule.of}"
            for rule in weights.rules
            if compare
            and isinstance(rule, Duplicate)
            and {rule.hf, rule.of} <= names
            and not _equal(folder, rule.hf, rule.of)
        ],
    }
    if any(faults.values()):
        lines = [f"  {len(found)} {kind}: {few(found)}" for kind, found in faults.items() if found]
        raise ValueError(
            f"{folder.path}: the weights do not fit the model; nothing was loaded.\n"
            + "\n".join(lines)
            + "\nGive the folder whose config.json describes these weights; for a new layout add rules to the family's "
            "weight map."
        )


def report(weights: WeightMap, folder: HfFolder) -> list[dict[str, Any]]:
    """Returns one JSON object for each tensor of an imported or exported folder: key, rule, lf, shape, dtype, file.

    A quantised tensor also has `waived`: why its bytes do not come back.
    """
    rows = []
    for name, entry in folder.entries.items():
        rule = weights.by_hf.get(name)
        kind = type(rule).__name__ if rule else "Carried" if is_carried(weights, name) else "unclaimed"
        row: dict[str, Any] = {
            "key": name,
            "rule": "Scale" if name in folder.quantisation.unused else kind,
            "lf": rule.lf if isinstance(rule, LfRule) else None,
            "shape": list(entry.shape),
            "dtype": entry.dtype,
            "file": entry.file,
        }
        if name in folder.quantisation.scales:
            row["waived"] = f"dequantised with {folder.quantisation.scales[name].name}; exported as BF16"
        elif name in folder.quantisation.unused:
            row["waived"] = "belongs to the quantised form; not exported"
        rows.append(row)
    return rows


def remember(weights: WeightMap, folder: HfFolder) -> Source:
    """Returns what an export needs to give an imported folder back; carried tensors stay in the folder.

    `hf_save.store_source` makes it outlive the folder.
    """
    return source_of(folder, {name for name in folder.names if name not in weights.by_hf})


def export(
    weights: WeightMap,
    get: Callable[[str], Tensor],
    source: Source | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields every HF tensor with its name, calling `get` once for each lf tensor (its whole value, on any device).

    With a source: its keys in its order with its dtypes, carried and duplicate tensors included. Without: the keys of
    the rules in their order with the dtypes that `get` gives, unused ones as zeros. `dtype` replaces that of floating
    tensors, except carried ones. Calls are the same on every rank, so `get` may be a collective.
    """
    if source is None:
        for lf, rule in weights.by_lf.items():
            for name, tensor in to_hf(rule, get(lf)).items():
                yield name, _cast(name, tensor, dtype, tensor.dtype)
        for unused in weights.rules:
            if isinstance(unused, Unused):
                yield unused.hf, torch.zeros((), dtype=dtype).expand(unused.shape)
        return
    _check_source(weights, source)
    uses = Counter(_original(weights, kept.name) for kept in source.tensors if not kept.carried)
    made: dict[str, Tensor] = {}
    for kept in source.tensors:
        stored = DTYPES[kept.dtype]
        if kept.carried:
            assert source.carried is not None
            yield kept.name, source.carried.read(kept.name).to(stored)
            continue
        name = _original(weights, kept.name)
        if name not in made:
            maker = weights.by_hf[name]
            assert isinstance(maker, LfRule)
            made |= to_hf(maker, get(maker.lf))
        uses[name] -= 1
        yield kept.name, _cast(name, made[name] if uses[name] else made.pop(name), dtype, stored)


def _check_source(weights: WeightMap, source: Source) -> None:
    held = {kept.name for kept in source.tensors if not kept.carried}
    optional = {rule.hf for rule in weights.rules if isinstance(rule, Duplicate)}
    unknown = sorted(held - weights.by_hf.keys())
    missing = sorted(weights.by_hf.keys() - held - optional)
    if unknown or missing:
        raise ValueError(
            f"the source has {len(unknown)} tensors that the weight map does not name ({few(unknown)}) and lacks "
            f"{len(missing)} that it does ({few(missing)}): export the model that was imported, or give no source"
        )


def _original(weights: WeightMap, name: str) -> str:
    rule = weights.by_hf[name]
    return rule.of if isinstance(rule, Duplicate) else name


def _overlap(part: Part, piece: Piece) -> tuple[Shape, Shape]:
    at = tuple(max(a, b) for a, b in zip(part.at, piece.lf_at, strict=True))
    stops = zip(ends(part.at, part.size), ends(piece.lf_at, piece.size), at, strict=True)
    return at, tuple(max(0, min(a, b) - first) for a, b, first in stops)


def _as_lf(piece: Piece, box: Tensor, size: Shape) -> Tensor:
    order = sorted(range(len(piece.axes)), key=lambda dim: piece.axes[dim])
    return box.permute(order).reshape(size)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype | None, stored: torch.dtype) -> Tensor:
    cast = tensor.to(dtype if dtype is not None and stored.is_floating_point else stored)
    if cast.dtype != tensor.dtype and bool((tensor.isfinite() & ~cast.to(tensor.dtype).isfinite()).any()):
        raise ValueError(
            f"{name} has values up to {float(tensor.abs().max()):.3g}, and {cast.dtype}, in which it is to be stored, "
            f"ends at {torch.finfo(cast.dtype).max:.3g}; start from a copy of the source folder in bfloat16 or float32"
        )
    return cast


def _equal(folder: HfFolder, one: str, other: str) -> bool:
    """Returns whether two tensors are equal; reads them a few rows at a time."""
    if folder.shape(one) != folder.shape(other):
        return False
    if not folder.shape(one):
        return torch.equal(folder.read(one), folder.read(other))
    rows, *rest = folder.shape(one)
    wide = torch.promote_types(folder.dtype(one), folder.dtype(other))
    few = max(1, _COMPARED // max(1, math.prod(rest)))
    for first in range(0, rows, few):
        box = (slice(first, min(first + few, rows)), *(slice(0, extent) for extent in rest))
        if not torch.equal(folder.read(one, box).to(wide), folder.read(other, box).to(wide)):
            return False
    return True
