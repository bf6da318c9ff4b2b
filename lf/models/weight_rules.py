"""The rules of a weight table: which box of which Hugging Face tensor is which box of which lf tensor, as data.

Everything that is done with tensors and files follows from them (`lf.models.weights`). A new kind of rule is a frozen
record with `hf_names` and `pieces` registered for it.
"""

import fnmatch
import functools
from collections.abc import Iterator, Mapping, Sequence

import attrs
from torch import Tensor

from lf.models.hf_folder import few
from lf.models.spec import Part, Placed, no_rule

Shape = tuple[int, ...]
"""Extents of a tensor."""


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
        values = [_as_hf(part, tensor[slices(part.lf_at, part.size)]) for part in parts]
        if len(values) == 1:
            made[name] = values[0]
        else:
            made[name] = tensor.new_empty(shapes[name])
            for part, value in zip(parts, values, strict=True):
                made[name][slices(part.hf_at, tuple(value.shape))] = value
    return made


def whole(name: str, shape: Shape) -> Placed:
    """Returns the place of a tensor that one rank holds whole."""
    origin = (0,) * len(shape)
    return Placed(name=name, shape=shape, parts=(Part(at=origin, local=origin, size=shape),))


def held_shape(placed: Placed) -> Shape:
    """Returns the shape of this rank's tensor without padding; no rows where it holds nothing but padding."""
    stops = [ends(part.local, part.size) for part in placed.parts]
    return tuple(max(dim) for dim in zip(*stops, strict=True)) if stops else (0, *placed.shape[1:])


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
    both = [name for name in weights.by_hf if is_carried(weights, name)]
    if both:
        raise ValueError(f"weight map: {few(both)} stand in a rule and match a Carried pattern; narrow the pattern")
    for rule in weights.rules:
        if isinstance(rule, Duplicate) and not isinstance(weights.by_hf.get(rule.of), LfRule):
            raise ValueError(
                f"weight map: {rule.hf} is a duplicate of {rule.of}, which no rule maps to lf; name one that is"
            )


def is_carried(weights: WeightMap, name: str) -> bool:
    """Returns whether an HF tensor is carried."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in weights.carried)


def _rows(shape: Shape, blocks: Sequence[tuple[str, int, int]]) -> Iterator[Piece]:
    row = 0
    rest = (0,) * (len(shape) - 1)
    for name, first, rows in blocks:
        yield Piece(name, (first, *rest), (row, *rest), (rows, *shape[1:]), tuple(range(len(shape))))
        row += rows


def slices(at: Shape, size: Shape) -> tuple[slice, ...]:
    """Returns the index of a box."""
    return tuple(slice(first, first + extent) for first, extent in zip(at, size, strict=True))


def ends(at: Shape, size: Shape) -> Shape:
    """Returns the index after the last one, in each dimension."""
    return tuple(first + extent for first, extent in zip(at, size, strict=True))


def _as_hf(piece: Piece, box: Tensor) -> Tensor:
    lone = [dim for dim in range(box.ndim) if dim not in piece.axes]
    return box.permute((*lone, *piece.axes)).reshape([box.shape[axis] for axis in piece.axes])
