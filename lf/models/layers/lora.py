"""A linear layer with a low-rank adapter beside it (LoRA, arXiv:2106.09685).

Shapes: I inputs, O outputs, R rank; x is [..., I].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LoraLinear(nn.Module):
    """`x W^T + b + scale * (x A^T) B^T`, with A `lora_a` [R, I] and B `lora_b` [O, R].

    `weight` and `bias` are those of the layer that it takes the place of, under the same names. A and B have the
    weight's type and device, and no values yet.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = base.weight, base.bias, scale
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., O]."""
        return self.rows_from(x, 0)

    def rows_from(self, x: Tensor, first: int) -> Tensor:
        """Returns the outputs from `first` on, [..., O - first]."""
        bias = None if self.bias is None else self.bias[first:]
        out = F.linear(x, self.weight[first:], bias)
        return torch.add(out, F.linear(F.linear(x, self.lora_a), self.lora_b[first:]), alpha=self.scale)


def rows_from(linear: nn.Module, x: Tensor, first: int) -> Tensor:
    """Returns the outputs of a linear layer from `first` on, its adapter's among them; the others are not computed."""
    if isinstance(linear, LoraLinear):
        return linear.rows_from(x, first)
    assert isinstance(linear, nn.Linear)
    return F.linear(x, linear.weight[first:], None if linear.bias is None else linear.bias[first:])
