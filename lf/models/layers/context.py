"""Moving a packed sequence between context parallel ranks.

Where late tokens see more than early ones (`even` is False), each of the C ranks has pieces r and 2C - 1 - r of the 2C
equal pieces of a sequence of T tokens; where all see the same, each has slice r of C. Shapes: T tokens, N heads, D head
width.
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


def _order(parts: list[Tensor], even: bool) -> Tensor:
    """Returns the whole sequence from every rank's pieces."""
    if even:
        return torch.cat(parts)
    halves = [part.chunk(2) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in reversed(halves)])


def _own(whole: Tensor, rank: int, ranks: int, even: bool) -> Tensor:
    """Returns a rank's pieces of the whole sequence."""
    if even:
        return whole.chunk(ranks)[rank]
    return torch.cat([whole[first:last] for first, last in pieces(rank, ranks, whole.shape[0])])


class GatherSequence(torch.autograd.Function):
    """From a rank's pieces [T / C, ...] to the whole sequence [T, ...]; gradients are summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, even: bool = False) -> Tensor:
        """Returns the whole sequence."""
        ctx.group, ctx.even = group, even
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return _order(parts, even)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Returns the gradient of this rank's pieces."""
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return _own(total, ctx.group.rank(), ctx.group.size(), ctx.even), None, None


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


def heads_for_sequence(x_TND: Tensor, group: Any, even: bool = False) -> Tensor:
    """Returns the whole sequence [T, N / C, D] of this rank's share of the heads, from its pieces with all heads."""
    blocks = torch.stack(x_TND.chunk(group.size(), dim=1))
    return _order(list(_Exchange.apply(blocks, group)), even)


def sequence_for_heads(x_TND: Tensor, group: Any, even: bool = False) -> Tensor:
    """Returns this rank's pieces with all heads [T / C, N, D], from the whole sequence of its share of the heads."""
    ranks = group.size()
    blocks = torch.stack([_own(x_TND, rank, ranks, even) for rank in range(ranks)])
    return torch.cat(list(_Exchange.apply(blocks, group)), dim=1)
