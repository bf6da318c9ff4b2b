"""The rule of a weight table for experts: many small Hugging Face matrices are one lf tensor."""

from collections.abc import Mapping

import attrs

from lf.models.layouts import shaped
from lf.models.weights import LfRule, Piece, Shape, hf_names, lf_shape, pieces


@attrs.frozen
class StackedExperts(LfRule):
    """Matrices of all experts in one tensor: [E, F, H] of one matrix an expert, [E, M, F, H] of M of them."""

    hf: tuple[tuple[str, ...], ...]
    """The HF tensors of each expert."""

    def __attrs_post_init__(self) -> None:
        if len({len(names) for names in self.hf}) != 1:
            raise ValueError(f"{self.lf}: every expert must have the same number of matrices")


@hf_names.register
def _(rule: StackedExperts) -> tuple[str, ...]:
    return tuple(name for names in rule.hf for name in names)


@pieces.register
def _(rule: StackedExperts, shape: Shape) -> tuple[Piece, ...]:
    experts, matrices = len(rule.hf), len(rule.hf[0])
    lead = (experts,) if matrices == 1 else (experts, matrices)
    if shape[:-2] != lead:
        raise ValueError(f"{rule.lf} is {list(shape)}, but {experts} experts of {matrices} matrices make {[*lead]} ...")
    size, axes = (*(1 for _ in lead), *shape[-2:]), (len(lead), len(lead) + 1)
    return tuple(
        Piece(name, (0, 0), (*(expert, matrix)[: len(lead)], 0, 0), size, axes)
        for expert, names in enumerate(rule.hf)
        for matrix, name in enumerate(names)
    )


@lf_shape.register
def _(rule: StackedExperts, shapes: Mapping[str, Shape]) -> Shape:
    matrices = len(rule.hf[0])
    return (len(rule.hf), *((matrices,) if matrices > 1 else ()), *shapes[rule.hf[0][0]])


@attrs.frozen
class FusedExperts(LfRule):
    """Matrices of all experts in one HF tensor too, those of an expert beside each other.

    Upright it is [E, M * F, H], transposed [E, H, M * F]; here [E, M, F, H], or [E, F, H] of one matrix an expert.
    """

    hf: str
    """The HF tensor."""
    matrices: int = attrs.field(kw_only=True)
    """M."""
    size: tuple[int, int] = attrs.field(kw_only=True)
    """F and H."""
    transposed: bool = attrs.field(default=True, kw_only=True)
    """Whether the HF tensor is transposed."""


@hf_names.register
def _(rule: FusedExperts) -> tuple[str, ...]:
    return (rule.hf,)


@pieces.register
def _(rule: FusedExperts, shape: Shape) -> tuple[Piece, ...]:
    f, h = rule.size
    lead = (shape[0], rule.matrices)[: 1 + (rule.matrices > 1)]
    if shape != (*lead, f, h):
        raise ValueError(f"{rule.lf} is {list(shape)}, but its experts make {[*lead, f, h]}")
    axes = (0, len(lead), len(lead) + 1)
    made = []
    for m in range(rule.matrices):
        at = (0, 0, m * f) if rule.transposed else (0, m * f, 0)
        lf_at, size = (0, *(m,) * (len(lead) - 1), 0, 0), (shape[0], *(1,) * (len(lead) - 1), f, h)
        made.append(Piece(rule.hf, at, lf_at, size, (axes[0], axes[2], axes[1]) if rule.transposed else axes))
    return tuple(made)


@lf_shape.register
def _(rule: FusedExperts, shapes: Mapping[str, Shape]) -> Shape:
    lead = (shapes[rule.hf][0], rule.matrices)[: 1 + (rule.matrices > 1)]
    return (*lead, *rule.size)


@shaped.register
def _(rule: FusedExperts, shapes: Mapping[str, Shape]) -> LfRule:
    f, h = rule.size
    upright = (rule.matrices * f, h)
    stored = shapes.get(rule.hf, ())[1:]
    return attrs.evolve(rule, transposed=False) if stored == upright != upright[::-1] else rule
