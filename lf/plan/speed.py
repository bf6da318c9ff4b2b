"""How long a step takes by declared facts of the devices, and which layouts of the same ranks are fastest.

The times are for ranking layouts, not for promises: matrices run at one share of the peak, collectives in rings.
"""

import itertools
import math

import attrs

from lf.plan.estimate import Job, Stage, layout_of, micro_batches, stage_of
from lf.plan.near import allowed, changes, grid

CHUNKS, ROWS = (1, 2), (1, 2, 4)
"""Chunks of a stage and rows of a micro-batch that a search tries, besides the run's own."""


@attrs.frozen(kw_only=True)
class Devices:
    """What is declared of the ranks and of what joins them."""

    tflops: float = 400.0
    """What a rank's matrices reach, in 10^12 operations a second: a share of its peak."""
    fast: float = 200.0
    """What a rank sends to ranks of its node, in 10^9 bytes a second."""
    slow: float = 25.0
    """What a rank sends to ranks of other nodes, in 10^9 bytes a second."""
    node: int = 8
    """Ranks of a node, neighbours in number."""
    latency: float = 10.0
    """Time of a call besides its bytes, in 10^-6 seconds."""


@attrs.frozen(kw_only=True)
class Timed:
    """A layout that fits, with its time."""

    job: Job
    """The job in this layout."""
    changes: tuple[tuple[str, object], ...]
    """Where it differs from the run's."""
    seconds: float
    """Time of a step."""
    peak: int
    """Bytes of the rank that needs most."""


def spans(job: Job) -> dict[str, int]:
    """Returns how many neighbours in number the ranks of each axis lie within."""
    p = layout_of(job)
    return {
        "tp": p.tp,
        "cp": p.tp * p.cp,
        "dp": p.tp * p.cp * p.dp,
        "etp": p.etp,
        "ep": p.etp * p.ep,
        "etp*ep": p.etp * p.ep,
        "expert dp": p.tp * p.cp * p.dp,
        "pp": job.world,
        "ends": job.world,
        "mp": job.world,
        "replica": job.world,
        "apart": p.apart if p.apart and p.tp * p.cp % p.apart == 0 else job.world,
    }


def sending(job: Job, stage: Stage, devices: Devices) -> tuple[float, float, float]:
    """Returns the seconds that a rank's collectives take in a step: within micro-batches, and the reduction and the
    gathering of the distributed optimiser."""
    reach, times = spans(job), [0.0, 0.0, 0.0]
    for each in stage.traffic:
        rate = 1e9 * (devices.fast if reach[each.axis] <= devices.node else devices.slow)
        after = each.axis in ("dp", "expert dp")
        kind = (1 if each.op == "reduce_scatter" else 2) if after else 0
        times[kind] += each.wire / rate + each.calls * devices.latency * 1e-6 * math.log2(each.ranks)
    return times[0], times[1], times[2]


def step_seconds(job: Job, stages: tuple[Stage, ...], devices: Devices) -> float:
    """Returns the seconds of a step whose slowest stages are among `stages`.

    The slowest stage sets the pace, and filling and draining the pipeline costs (p - 1) / v more passes of it. With
    overlap the distributed optimiser's collectives hide behind one micro-batch: the last backward, the first forward.
    """
    layout = layout_of(job)
    micro, slowest, exposed, apart = micro_batches(job, layout), 0.0, 0.0, 0.0
    for stage in stages:
        forward, backward = (sum(times) / (devices.tflops * 1e12) for times in (stage.forward, stage.backward))
        within, reduce, gather = sending(job, stage, devices)
        slowest = max(slowest, forward + backward + within / micro)
        if job.parallel.overlap:
            reduce, gather = max(0.0, reduce - backward), max(0.0, gather - forward)
        exposed, apart = max(exposed, reduce + gather), max(apart, stage.apart / (devices.tflops * 1e12))
    return (micro + (layout.pp - 1) / layout.vpp) * slowest + exposed + apart


def search(job: Job, devices: Devices, memory: float = 0.0, count: int = 5) -> tuple[Timed, ...]:
    """Returns the fastest layouts of the job's ranks that fit in `memory` bytes a rank (0: any), the fastest first.

    Tensor and expert tensor parallel ranks stay within a node. Of a pipeline the first two stages and the last are
    looked at: none has more layers, more in flight, or more beside its layers.
    """
    old, found = job.parallel, []
    chunks, rows = sorted({*CHUNKS, old.vpp}), sorted({*ROWS, old.micro_batch})
    for new in itertools.chain([job], (each for each in grid(job, chunks, rows) if each != job)):
        parallel = new.parallel
        if max(parallel.tp, parallel.etp) > devices.node or not allowed(new):
            continue
        layout = layout_of(new)
        stages, most = [], 0
        for rank in sorted({0, min(1, layout.pp - 1), layout.pp - 1}):
            at = attrs.evolve(layout, pp_rank=rank)
            stages.append(stage_of(new, at, micro_batches(new, layout), (parallel.recompute,)))
            most = max(most, stages[-1].memory[parallel.recompute].peak)
            if memory and most > memory:
                break
        if not memory or most <= memory:
            seconds = step_seconds(new, tuple(stages), devices)
            found.append(Timed(job=new, changes=changes(job, new), seconds=seconds, peak=most))
    return tuple(sorted(found, key=lambda each: (each.seconds, each.peak))[:count])
