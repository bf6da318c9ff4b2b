"""The pipeline schedules as orders of passes: what a stage has in flight, and how long it waits.

Plain: one forward, one backward ("PipeDream-Flush", arXiv:2006.09503). Interleaved: several chunks a stage, in rounds
of one micro-batch for each stage (arXiv:2104.04473). They are the orders of megatron-core's schedules.
"""

import functools
from collections.abc import Callable, Sequence

Pass = tuple[bool, int, int]
"""Whether it is a forward, the chunk of the stage, and the micro-batch."""

MOST_PASSES = 10_000_000
"""Passes of all stages that are replayed; more would take minutes and gigabytes."""


def round_size(pp: int, vpp: int) -> int:
    """Returns the micro-batches of a round, of which a rank takes whole ones: `pp` where stages have several chunks."""
    return pp if vpp > 1 else 1


@functools.cache
def order(stage: int, pp: int, vpp: int, micro: int) -> tuple[Pass, ...]:
    """Returns the passes of a stage in order. With several chunks, `micro` is a multiple of `pp`."""
    size = round_size(pp, vpp)
    table = [
        (chunk, at) for first in range(0, micro, size) for chunk in range(vpp) for at in range(first, first + size)
    ]
    warmup = (pp - stage - 1) * 2 + (vpp - 1) * pp if vpp > 1 else pp - stage - 1
    warmup = min(warmup, len(table))
    forward = [(True, chunk, at) for chunk, at in table]
    backward = [(False, vpp - 1 - chunk, at) for chunk, at in table]
    steady = [each for pair in zip(forward[warmup:], backward, strict=False) for each in pair]
    return (*forward[:warmup], *steady, *backward[len(table) - warmup :])


def _enough(pp: int, vpp: int, micro: int) -> int:
    """Returns micro-batches after which a schedule only repeats itself, at most `micro` and with its remainder."""
    return min(micro, 4 * pp + (micro - 4 * pp) % round_size(pp, vpp))


def check_passes(pp: int, vpp: int, micro: int) -> None:
    """Raises ValueError for a schedule with more passes than `MOST_PASSES`."""
    passes = 2 * pp * vpp * _enough(pp, vpp, micro)
    if passes > MOST_PASSES:
        raise ValueError(
            f"parallel.pp = {pp} with parallel.vpp = {vpp} and {micro} micro-batches makes a schedule of {passes:,} "
            f"passes, and a plan replays at most {MOST_PASSES:,}; lower pp, vpp or batch"
        )


def most_held(stage: int, pp: int, micro: int, sizes: Sequence[float]) -> tuple[int, ...]:
    """Returns the micro-batches in flight of each chunk of a stage when together they hold most.

    `sizes` is what one micro-batch of each chunk holds.
    """
    vpp = len(sizes)
    passes = order(stage, pp, vpp, _enough(pp, vpp, micro))
    now, most, end = 0.0, -1.0, 0
    for at, (forward, chunk, _) in enumerate(passes):
        now += sizes[chunk] if forward else -sizes[chunk]
        if now > most:
            most, end = now, at + 1
    held = [0] * vpp
    for forward, chunk, _ in passes[:end]:
        held[chunk] += 1 if forward else -1
    return tuple(held)


def idle(
    forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]], micro: int, apart: float = 0.0
) -> float:
    """Returns the share of the ranks' time that they wait for each other in a step (the bubble), 0 to 1.

    `forward` and `backward` [stage][chunk] are the times of a pass of a micro-batch; sending takes none. `apart` is
    what every rank works for while no pipeline runs.
    """
    pp, vpp = len(forward), len(forward[0])
    few = _enough(pp, vpp, micro)
    total = makespan(forward, backward, few)
    if few < micro:
        step = round_size(pp, vpp)
        total += (micro - few) / step * (total - makespan(forward, backward, few - step))
    busy, whole = micro * sum(map(sum, [*forward, *backward])) + pp * apart, pp * (total + apart)
    return max(0.0, 1.0 - busy / whole) if whole else 0.0


def makespan(forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]], micro: int) -> float:
    """Returns what `replay` does where all micro-batches take as long: `forward` and `backward` as for `idle`."""

    def length(stage: int, each: Pass) -> float:
        return (forward if each[0] else backward)[stage][each[1]]

    return replay(len(forward), len(forward[0]), micro, length)


def replay(pp: int, vpp: int, micro: int, length: Callable[[int, Pass], float]) -> float:
    """Returns the time from the first pass to the last; each starts when its stage and what it needs are ready.

    `length` is the time of a pass of a stage; sending takes none.
    """
    orders = [order(stage, pp, vpp, micro) for stage in range(pp)]
    at, clock = [0] * pp, [0.0] * pp
    done: dict[tuple[bool, int, int], float] = {}
    moved = True
    while moved:
        moved = False
        for stage in range(pp):
            while at[stage] < len(orders[stage]):
                each = orders[stage][at[stage]]
                is_forward, chunk, batch = each
                place = chunk * pp + stage
                ready = _ready(done, is_forward, place, batch, pp * vpp - 1)
                if ready is None:
                    break
                clock[stage] = max(clock[stage], ready) + length(stage, each)
                done[is_forward, place, batch] = clock[stage]
                at[stage] += 1
                moved = True
    assert all(at[stage] == len(orders[stage]) for stage in range(pp)), "the orders wait for each other"
    return max(clock)


def _ready(
    done: dict[tuple[bool, int, int], float], is_forward: bool, place: int, batch: int, last: int
) -> float | None:
    """Returns when a pass of a chunk (by its place in the model) has what it needs, None where it is not made yet."""
    if is_forward:
        return 0.0 if place == 0 else done.get((True, place - 1, batch))
    return done.get((True, place, batch) if place == last else (False, place + 1, batch))
