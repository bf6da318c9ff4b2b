"""The weight table of a family: rules between lf's canonical tensors and Hugging Face's, read in both directions.

A rule says, as data, which box of which HF tensor is which box of one lf tensor (`pieces`). Everything else follows:
reading any box by slice, writing HF tensors, shapes, and that a rule can be inverted. A new kind of rule is a frozen
record with `hf_names` and `pieces` registered for it.
"""

import fnmatch
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from lf.models.hf_folder import DTYPES, HfFolder, few
from lf.models.hf_save import Source, source_of
from lf.models.spec import Part, Placed, no_rule

Shape = tuple[int, ...]
"""Extents of a tensor."""

_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32")
_COMPARED = 1 << 22  # Elements of a duplicate that are compared at a time.


@attrs.frozen
class Piece:
    """A box of an HF tensor that is a box of an lf tensor.

    HF dimension i is lf dimension `axes[i]`; lf dimensions that `axes` leaves out have extent 1 in the box.
    """

    hf: str
    """The HF tensor."""
    hf_at: Shape
    """First index of the box in the HF tensor."""
    lf_at: Shape
    """First index of the box in the lf tensor."""
    size: Shape
    """Extent of the box, in lf's dimensions."""
    axes: Shape
    """The lf dimension of each HF dimension."""


@attrs.frozen
class Rule:
    """One line of a weight table: the type says how tensors correspond."""


@attrs.frozen
class LfRule(Rule):
    """A rule that makes one lf tensor."""

    lf: str
    """Canonical lf name."""


@attrs.frozen
class Same(LfRule):
    """One HF tensor, unchanged."""

    hf: str
    """The HF tensor."""


@attrs.frozen
class Stack(LfRule):
    """HF tensors one below the other, along dimension 0 (gate and up projection)."""

    hf: tuple[str, ...]
    """The HF tensors, top first."""
    rows: tuple[int, ...] = attrs.field(default=(), kw_only=True)
    """Rows of each; empty when they are equal."""


@attrs.frozen
class FusedQkv(LfRule):
    """Query, key and value projection in megatron-core's order: for each key-value head its queries, key and value.

    With G key-value heads, r = heads / G and head width d, the weight is [G * (r + 2) * d, hidden] and the bias
    [G * (r + 2) * d].
    """

    q: str
    """HF tensor of the queries, [heads * d, ...]."""
    k: str
    """HF tensor of the keys, [G * d, ...]."""
    v: str
    """HF tensor of the values, [G * d, ...]."""
    heads: int = attrs.field(kw_only=True)
    """Query heads."""
    kv_heads: int = attrs.field(kw_only=True)
    """Key-value heads; divides `heads`."""
    head_dim: int = attrs.field(kw_only=True)
    """Width of a head."""

    def __attrs_post_init__(self) -> None:
        if self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"{self.lf}: heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")


@attrs.frozen
class Carried(Rule):
    """HF tensors that no module holds (buffers, unused heads); an export writes them as the source had them."""

    hf: str
    """Glob pattern of the names; matching nothing is no error."""


@attrs.frozen
class Unused(Carried):
    """One HF tensor that no module holds and that public loaders insist on: zeros where no source has it."""

    shape: Shape
    """Its shape."""


@attrs.frozen
class Duplicate(Rule):
    """An HF tensor that may be stored though it equals another (the head of a tied model).

    Import checks that they are equal; export writes it where the source had it.
    """

    hf: str
    """The HF tensor."""
    of: str
    """The HF tensor that it equals."""


@attrs.frozen
class WeightMap:
    """The rules of a model. Raises ValueError for names that two rules claim."""

    rules: tuple[Rule, ...]
    """One for each lf tensor, and those for HF tensors without one."""

    def __attrs_post_init__(self) -> None:
        _check_rules(self)

    @functools.cached_property
    def by_lf(self) -> dict[str, LfRule]:
        """The rule that makes each lf tensor."""
        return {rule.lf: rule for rule in self.rules if isinstance(rule, LfRule)}

    @functools.cached_property
    def by_hf(self) -> dict[str, Rule]:
        """The rule that claims each HF tensor by name; carried patterns are not among them."""
        return {name: rule for rule in self.rules for name in hf_names(rule)}

    @functools.cached_property
    def carried(self) -> tuple[str, ...]:
        """The patterns of carried tensors."""
        return tuple(rule.hf for rule in self.rules if isinstance(rule, Carried))


@functools.singledispatch
def hf_names(rule: Rule) -> tuple[str, ...]:
    """Returns the HF tensors that a rule claims by name."""
    raise no_rule(hf_names, rule)


@hf_names.register
def _(rule: Same | Duplicate) -> tuple[str, ...]:
    return (rule.hf,)


@hf_names.register
def _(rule: Stack) -> tuple[str, ...]:
    return rule.hf


@hf_names.register
def _(rule: FusedQkv) -> tuple[str, ...]:
    return (rule.q, rule.k, rule.v)


@hf_names.register
def _(rule: Carried) -> tuple[str, ...]:
    return ()


@functools.singledispatch
def pieces(rule: LfRule, shape: Shape) -> tuple[Piece, ...]:
    """Returns the boxes that make an lf tensor of this shape; they cover each HF tensor exactly once.

    Raises ValueError when no HF tensors could make that shape.
    """
    raise no_rule(pieces, rule)


@pieces.register
def _(rule: Same, shape: Shape) -> tuple[Piece, ...]:
    origin = (0,) * len(shape)
    return (Piece(rule.hf, origin, origin, shape, tuple(range(len(shape)))),)


@pieces.register
def _(rule: Stack, shape: Shape) -> tuple[Piece, ...]:
    rows = rule.rows or (shape[0] // len(rule.hf),) * len(rule.hf)
    if len(rows) != len(rule.hf) or sum(rows) != shape[0]:
        raise ValueError(
            f"{rule.lf} has {shape[0]} rows, which are not made of {len(rule.hf)} tensors of {list(rows)} rows"
        )
    return tuple(_rows(shape, [(name, 0, extent) for name, extent in zip(rule.hf, rows, strict=True)]))


@pieces.register
def _(rule: FusedQkv, shape: Shape) -> tuple[Piece, ...]:
    d, ratio = rule.head_dim, rule.heads // rule.kv_heads
    if shape[0] != rule.kv_heads * (ratio + 2) * d:
        raise ValueError(
            f"{rule.lf} has {shape[0]} rows; {rule.heads} heads, {rule.kv_heads} kv_heads and head_dim {d} make "
            f"{rule.kv_heads * (ratio + 2) * d}"
        )
    blocks = []
    for group in range(rule.kv_heads):
        blocks += [(rule.q, group * ratio * d, ratio * d), (rule.k, group * d, d), (rule.v, group * d, d)]
    return tuple(_rows(shape, blocks))


@functools.singledispatch
def lf_shape(rule: LfRule, shapes: Mapping[str, Shape]) -> Shape:
    """Returns the shape of the lf tensor that HF tensors of these shapes make: their rows one below the other.

    A rule that joins them in another way registers its own answer. Only `pieces` says whether the shapes fit.
    """
    first, *rest = (shapes[name] for name in hf_names(rule))
    return (first[0] + sum(shape[0] for shape in rest), *first[1:]) if rest else first


def hf_shapes(rule: LfRule, shape: Shape) -> dict[str, Shape]:
    """Returns the shape of each HF tensor that makes an lf tensor of this shape."""
    shapes: dict[str, list[int]] = {}
    for piece in pieces(rule, shape):
        extents = shapes.setdefault(piece.hf, [0] * len(piece.axes))
        for dim, axis in enumerate(piece.axes):
            extents[dim] = max(extents[dim], piece.hf_at[dim] + piece.size[axis])
    return {name: tuple(extents) for name, extents in shapes.items()}


def to_hf(rule: LfRule, tensor: Tensor) -> dict[str, Tensor]:
    """Returns the HF tensors that a whole lf tensor (or its gradient) holds; they may be views of it."""
    shape = tuple(tensor.shape)
    found: dict[str, list[Piece]] = {}
    for piece in pieces(rule, shape):
        found.setdefault(piece.hf, []).append(piece)
    shapes = hf_shapes(rule, shape)
    made = {}
    for name, parts in found.items():
        values = [_as_hf(part, tensor[_box(part.lf_at, part.size)]) for part in parts]
        if len(values) == 1:
            made[name] = values[0]
        else:
            made[name] = tensor.new_empty(shapes[name])
            for part, value in zip(parts, values, strict=True):
                made[name][_box(part.hf_at, tuple(value.shape))] = value
    return made


def whole(name: str, shape: Shape) -> Placed:
    """Returns the place of a tensor that one rank holds whole."""
    origin = (0,) * len(shape)
    return Placed(name=name, shape=shape, parts=(Part(at=origin, local=origin, size=shape),))


def held_shape(placed: Placed) -> Shape:
    """Returns the shape of this rank's tensor without padding; no rows where it holds nothing but padding."""
    ends = [_ends(part.local, part.size) for part in placed.parts]
    return tuple(max(dim) for dim in zip(*ends, strict=True)) if ends else (0, *placed.shape[1:])


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
    every = pieces(rule, placed.shape)
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
                values = folder.read(piece.hf, box)
                # torch does not ask this of numbers of one byte.
                wide = values.float() if values.is_floating_point() and values.itemsize == 1 else values
                if not bool(torch.isfinite(wide).all()):
                    raise ValueError(
                        f"{folder.path}: {piece.hf} has values that are not finite; the file is damaged, or the "
                        "training that wrote it has diverged: take another copy, or an earlier one"
                    )
                out[_box(local, size)] = _as_lf(piece, values, size)
    return out


def lf_shapes(weights: WeightMap, folder: HfFolder) -> dict[str, Shape]:
    """Returns the global shape of every lf tensor that the folder has all HF tensors for."""
    found = {name: folder.shape(name) for name in folder.names}
    return {lf: lf_shape(rule, found) for lf, rule in weights.by_lf.items() if found.keys() >= set(hf_names(rule))}


def check(
    weights: WeightMap,
    folder: HfFolder,
    shapes: Mapping[str, Shape] | None = None,
    share: tuple[int, int] = (0, 1),
) -> None:
    """Raises ValueError unless the folder and the model account for each other, tensor by tensor.

    `shapes` are the global shapes of all lf tensors of the model; None takes what the folder makes of them. Every HF
    tensor must be claimed by a rule, every rule find its HF tensors, every lf tensor have its rule, every shape agree,
    every dtype be one that holds plain values and every stored duplicate equal its original. Reads nothing but
    duplicates, a few rows at a time: part `share[0]` of `share[1]` of their rows, where ranks divide the work.
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
            if name not in weights.by_hf and not _is_carried(weights, name)
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
            if isinstance(rule, Duplicate)
            and {rule.hf, rule.of} <= names
            and not _equal(folder, rule.hf, rule.of, share)
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
        kind = type(rule).__name__ if rule else "Carried" if _is_carried(weights, name) else "unclaimed"
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


def _check_rules(weights: WeightMap) -> None:
    for kind, names in (
        ("lf", [rule.lf for rule in weights.rules if isinstance(rule, LfRule)]),
        ("HF", [name for rule in weights.rules for name in hf_names(rule)]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(
                f"weight map: {len(twice)} {kind} tensors stand in two rules: {few(twice)}; keep one of them"
            )
    both = [name for name in weights.by_hf if _is_carried(weights, name)]
    if both:
        raise ValueError(f"weight map: {few(both)} stand in a rule and match a Carried pattern; narrow the pattern")
    for rule in weights.rules:
        if isinstance(rule, Duplicate) and not isinstance(weights.by_hf.get(rule.of), LfRule):
            raise ValueError(
                f"weight map: {rule.hf} is a duplicate of {rule.of}, which no rule maps to lf; name one that is"
            )


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


def _is_carried(weights: WeightMap, name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in weights.carried)


def _rows(shape: Shape, blocks: Sequence[tuple[str, int, int]]) -> Iterator[Piece]:
    row = 0
    rest = (0,) * (len(shape) - 1)
    for name, first, rows in blocks:
        yield Piece(name, (first, *rest), (row, *rest), (rows, *shape[1:]), tuple(range(len(shape))))
        row += rows


def _box(at: Shape, size: Shape) -> tuple[slice, ...]:
    return tuple(slice(first, first + extent) for first, extent in zip(at, size, strict=True))


def _ends(at: Shape, size: Shape) -> Shape:
    return tuple(first + extent for first, extent in zip(at, size, strict=True))


def _overlap(part: Part, piece: Piece) -> tuple[Shape, Shape]:
    at = tuple(max(a, b) for a, b in zip(part.at, piece.lf_at, strict=True))
    ends = zip(_ends(part.at, part.size), _ends(piece.lf_at, piece.size), at, strict=True)
    return at, tuple(max(0, min(a, b) - first) for a, b, first in ends)


def _as_hf(piece: Piece, box: Tensor) -> Tensor:
    lone = [dim for dim in range(box.ndim) if dim not in piece.axes]
    return box.permute((*lone, *piece.axes)).reshape([box.shape[axis] for axis in piece.axes])


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


def _equal(folder: HfFolder, one: str, other: str, share: tuple[int, int]) -> bool:
    """Returns whether two tensors are equal in one of `share[1]` equal shares of their rows."""
    if folder.shape(one) != folder.shape(other):
        return False
    if not folder.shape(one):
        return torch.equal(folder.read(one), folder.read(other))
    (rows, *rest), (number, count) = folder.shape(one), share
    wide = torch.promote_types(folder.dtype(one), folder.dtype(other))
    few = max(1, _COMPARED // max(1, math.prod(rest)))
    start, stop = rows * number // count, rows * (number + 1) // count
    for first in range(start, stop, few):
        box = (slice(first, min(first + few, stop)), *(slice(0, extent) for extent in rest))
        if not torch.equal(folder.read(one, box).to(wide), folder.read(other, box).to(wide)):
            return False
    return True
