"""How the features of images and videos enter a decoder: in place of embeddings, and added after its first layers.

Shapes: S positions of this rank between the matrices, B rows, H width, M media tokens of this rank, L levels.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from lf.models.layers.experts import SparseLayer


@attrs.frozen(kw_only=True, eq=False)
class Features:
    """What this rank's part of the row has of images and videos."""

    slots: Tensor
    """Where they go [M]: places in the flattened [S, B]."""
    rows: Tensor
    """What stands there instead of the token's embedding [M, H]."""
    levels: Tensor | None = None
    """What is added there to the output of each of the first layers [L, M, H]."""


def placed(states_SBH: Tensor, features: Features) -> Tensor:
    """Returns the embeddings with the features in their places; the tokens there get no gradient."""
    flat = states_SBH.flatten(0, 1)
    return flat.index_copy(0, features.slots, features.rows.to(flat.dtype)).view(states_SBH.shape)


def touched(states: Tensor, params: Sequence[Tensor]) -> Tensor:
    """Returns the states, and lets the backward give zero gradients to parameters that no feature came from.

    Data parallel ranks wait for the gradient of every parameter, whether a micro-batch has images or not.
    """
    trained = [param for param in params if param.requires_grad]
    out: Tensor = _Touch.apply(states, *trained) if trained and torch.is_grad_enabled() else states
    return out


class _Touch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(*params)
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(torch.zeros_like(param) for param in ctx.saved_tensors)


class _AddsLevel:
    """A layer that adds its level's features to its output.

    They come as megatron-core's context of a layer, their places as its mask, so that recomputation has them too.
    """

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        """Returns the states [S, B, H] and the context."""
        states, context = super().forward(*args, **kwargs)  # type: ignore[misc]
        if context is None:
            return states, None
        level: Any = context[self.layer_number - 1]  # type: ignore[attr-defined]
        flat = states.flatten(0, 1).index_add(0, kwargs["context_mask"], level.to(states.dtype))
        return flat.view(states.shape), context


class LevelLayer(_AddsLevel, TransformerLayer):
    """A decoder layer that adds its level's features."""


class LevelSparseLayer(_AddsLevel, SparseLayer):
    """A decoder layer with experts that adds its level's features."""
