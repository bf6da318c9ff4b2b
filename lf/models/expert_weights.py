"""The rule of a weight table for experts: many small Hugging Face matrices are one lf tensor."""

from collections.abc import Mapping

import attrs

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
