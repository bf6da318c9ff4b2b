"""How megatron-core's distributed optimiser lays parameters out in buckets, and what a rank keeps of them."""

import math
from collections.abc import Sequence

import attrs

from lf.models.spec import Block, Weight

ALIGNED, BUCKET = 64, 128
"""Elements that the start of a parameter, and the end of a bucket, are rounded up to."""


@attrs.frozen(kw_only=True)
class Buffer:
    """The parameters of a model chunk that one group of ranks shares, in one type."""

    itemsize: int
    """Bytes of a parameter."""
    expert: bool
    """Whether they belong to experts."""
    ranks: int
    """Ranks that share them: each updates its part."""
    elements: int
    """Parameters, without padding."""
    buckets: tuple[int, ...]
    """Elements of each bucket, with padding."""

    @property
    def padded(self) -> int:
        """Elements of all buckets."""
        return sum(self.buckets)


def buffers(blocks: Sequence[Block], itemsize: int, ranks: int, expert_ranks: int, limit: int) -> tuple[Buffer, ...]:
    """Returns the buffers of one model chunk; a bucket ends when it has `limit` elements, 0 for one bucket."""
    sorts: dict[tuple[bool, int], list[Weight]] = {}
    for weight in (weight for weight in in_order(blocks) if not weight.frozen):
        sorts.setdefault((weight.expert, weight.itemsize or itemsize), []).append(weight)
    return tuple(
        Buffer(
            itemsize=size,
            expert=expert,
            ranks=expert_ranks if expert else ranks,
            elements=sum(weight.size for weight in weights),
            buckets=_buckets(weights, expert_ranks if expert else ranks, limit),
        )
        for (expert, size), weights in sorts.items()
    )


def in_order(blocks: Sequence[Block]) -> list[Weight]:
    """Returns the parameters of one model chunk in the order of the module: layer by layer."""
    before: list[Weight] = []
    after: list[Weight] = []
    layers: dict[int, list[Weight]] = {}
    for block in blocks:
        if not block.layers:
            (after if layers else before).extend(block.weights)
        for layer in block.layers:
            layers.setdefault(layer, []).extend(block.weights)
    return [*before, *(weight for layer in sorted(layers) for weight in layers[layer]), *after]


def _buckets(weights: Sequence[Weight], ranks: int, limit: int) -> tuple[int, ...]:
    """Returns the sizes of the buckets: filled from the last parameter on, a tied one alone."""
    divisor, found, start, end = math.lcm(ranks, BUCKET), [], 0, 0

    def close() -> int:
        found.append(-(-end // divisor) * divisor - start)
        return start + found[-1]

    for weight in reversed(weights):
        if weight.tied and end > start:
            start = end = close()
        end = -(-end // ALIGNED) * ALIGNED + weight.size
        if weight.tied or (limit and end - start >= limit):
            start = end = close()
    if end > start:
        close()
    return tuple(found)


def bucket_limit(*, overlap: bool, ranks: int, stage: int, chunk: int) -> int:
    """Returns the elements at which a bucket ends, 0 for never: only the first chunk of the first stage has several."""
    return max(40_000_000, 1_000_000 * ranks) if overlap and stage == chunk == 0 else 0
