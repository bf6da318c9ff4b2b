"""Parts of towers and projectors whose matrices several ranks share (Megatron-LM, arXiv:1909.08053, section 3).

Each rank has all weights and computes with its own heads and its own part of the inner width. Inputs and outputs of
attention and MLPs are whole on every rank; the outputs are sums over the ranks.

The gradient of what is whole is the sum of those of all ranks: each starts its backward from the part of the gradient
that came to it, be it none, and a sum in the forward is a sum in the backward. So the gradient of every weight, shared
or not, is the sum over the ranks too, and nothing is counted twice.

Shapes: N patches, W width, I inner width, both those of all ranks.
"""

from typing import Any

import attrs
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


@attrs.frozen(kw_only=True, eq=False)
class Share:
    """A rank's place among those that share matrices."""

    group: Any
    """The process group of these ranks."""
    rank: int
    """This rank's place in it."""
    size: int
    """How many they are; they divide all heads and inner widths."""

    def part(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Returns this rank's part of a tensor, which shares its memory."""
        return whole.chunk(self.size, dim)[self.rank]

    def add(self, part: Tensor) -> None:
        """Makes a tensor the sum of those of all ranks."""
        dist.all_reduce(part, group=self.group)


class SharedModule(nn.Module):
    """An attention, an MLP or a projector."""

    share: Share | None = None
    """Where others have a part of its matrices, this rank's place among them."""

    def widen(self, linear: nn.Module, x_NW: Tensor, parts: int = 1) -> Tensor:
        """Returns this rank's columns of a linear layer [N, I / ranks]; `parts` layers may lie in one."""
        if self.share is None:
            out: Tensor = linear(x_NW)
            return out
        assert isinstance(linear, nn.Linear)
        weights = [self.share.part(part) for part in linear.weight.chunk(parts)]
        biases = [None] * parts if linear.bias is None else [self.share.part(part) for part in linear.bias.chunk(parts)]
        pairs = zip(weights, biases, strict=True)
        return torch.cat([F.linear(x_NW, weight, bias) for weight, bias in pairs], dim=-1)

    def narrow(self, linear: nn.Module, x_NI: Tensor) -> Tensor:
        """Returns a linear layer's whole output [N, W] for this rank's part of its input [N, I / ranks]."""
        if self.share is None:
            out: Tensor = linear(x_NI)
            return out
        assert isinstance(linear, nn.Linear)
        total = summed(F.linear(x_NI, self.share.part(linear.weight, 1)), self.share)
        return total if linear.bias is None else total + linear.bias


def set_share(module: nn.Module, share: Share | None) -> None:
    """Makes every shared part of a module compute with this rank's share alone; None is the whole."""
    for part in module.modules():
        if isinstance(part, SharedModule):
            part.share = share


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> Tensor:
        ctx.share = share
        total = x.clone(memory_format=torch.contiguous_format)
        share.add(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Summed.apply(grad, ctx.share), None


def summed(x: Tensor, share: Share) -> Tensor:
    """Returns the sum over the ranks, each of which has a gradient of its own of it."""
    total: Tensor = _Summed.apply(x, share)
    return total
