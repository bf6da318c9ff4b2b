"""Moving a packed sequence between context parallel ranks.

Each of the C ranks has pieces r and 2C - 1 - r of the 2C equal pieces of a sequence of T tokens. Shapes: T tokens,
N heads, D head width.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def pieces(rank: int, ranks: int, length: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns first and last token of the two pieces that a rank has of a sequence of `length` tokens."""
    size = length // (2 * ranks)
    late = 2 * ranks - 1 - rank
    return (rank * size, (rank + 1) * size), (late * size, (late + 1) * size)


def _order(parts: list[Tensor]) -> Tensor:
    """Returns the whole sequence from every rank's two pieces."""
    halves = [part.chunk(2) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)])


def _own(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns a rank's two pieces of the whole sequence."""
    return torch.cat([whole[first:last] for first, last in pieces(rank, ranks, whole.shape[0])])


class GatherSequence(torch.autograd.Function):
    """From a rank's pieces [T / C, ...] to the whole sequence [T, ...]; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Returns the whole sequence."""
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return _order(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Returns the gradient of this rank's pieces."""
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return _own(total, ctx.group.rank(), ctx.group.size()), None


class _Exchange(torch.autograd.Function):
    """Rank i's block j goes to rank j as its block i: its own transpose."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = torch.empty_like(blocks)
        dist.all_to_all_single(out, blocks.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad.contiguous(), group=ctx.group)
        return out, None


def heads_for_sequence(x_TND: Tensor, group: Any) -> Tensor:
    """Returns the whole sequence [T, N / C, D] of this rank's share of the heads, from its pieces with all heads."""
    blocks = torch.stack(x_TND.chunk(group.size(), dim=1))
    return _order(list(_Exchange.apply(blocks, group)))


def sequence_for_heads(x_TND: Tensor, group: Any) -> Tensor:
    """Returns this rank's pieces with all heads [T / C, N, D], from the whole sequence of its share of the heads."""
    ranks = group.size()
    blocks = torch.stack([_own(x_TND, rank, ranks) for rank in range(ranks)])
    return torch.cat(list(_Exchange.apply(blocks, group)), dim=1)
