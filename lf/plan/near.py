"""Which other layouts of the same ranks would fit in a memory, the nearest first."""

import itertools
import math
from collections.abc import Iterator, Sequence

import attrs

from lf.models.spec import blocks
from lf.parallel.config import MegatronParallel
from lf.plan.estimate import CHOICES, Job, layout_of, load_of, micro_batches, stage_memory

TRIES = 3000
"""Most layouts that are looked at, nearest first."""

KNOBS = ("tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch", "recompute")
"""What may change."""


@attrs.frozen(kw_only=True)
class Option:
    """A layout that fits."""

    changes: tuple[tuple[str, object], ...]
    """The fields of `parallel` that differ from the run's, with their values."""
    peak: int
    """Bytes of the rank that needs most."""


def peak(job: Job, limit: float = math.inf) -> int:
    """Returns the bytes of the rank that needs most; where they are above `limit`, perhaps those of another one."""
    layout, most = layout_of(job), 0
    for stage in range(layout.pp):
        most = max(most, stage_memory(job, attrs.evolve(layout, pp_rank=stage), job.parallel.recompute).peak)
        if most > limit:
            break
    return most


def nearest(job: Job, memory: float, count: int = 3) -> tuple[Option, ...]:
    """Returns up to `count` layouts that fit in `memory` bytes a rank, those with the least changes first."""
    found: list[Option] = []
    for new in itertools.islice(candidates(job), TRIES):
        mine = changes(job, new)
        # More changes than one that fits already are no news.
        if any(set(option.changes) < set(mine) for option in found):
            continue
        most = peak(new, memory)
        if most <= memory:
            found.append(Option(changes=mine, peak=most))
        if len(found) == count:
            break
    return tuple(found)


def changes(old: Job, new: Job) -> tuple[tuple[str, object], ...]:
    """Returns the fields of `parallel` that differ, with their new values."""
    return tuple(
        (name, value)
        for (name, value), before in zip(_settings(new), _settings(old), strict=True)
        if value != before[1]
    )


def _settings(job: Job) -> list[tuple[str, object]]:
    """Returns the fields of a run's `parallel` by name; where towers are spread apart, the decoder's are `text`'s."""
    own = [(field.name, getattr(job.parallel, field.name)) for field in attrs.fields(MegatronParallel)]
    if job.vision is None:
        return own
    text = [(name if name == "micro_batch" else f"text.{name}", value) for name, value in own]
    return [*text, ("vision.recompute", job.vision.recompute)]


def candidates(job: Job) -> Iterator[Job]:
    """Yields the job in the other layouts of its ranks that the rules allow, by distance."""
    old = job.parallel
    rows = sorted({old.micro_batch, *(2**i for i in range(old.micro_batch.bit_length()) if 2**i < old.micro_batch)})
    made = [(_distance(job, new), at, new) for at, new in enumerate(grid(job, sorted({1, old.vpp}), rows))]
    for _, _, new in sorted(made, key=lambda each: each[:2]):
        if new != job and allowed(new):
            yield new


def grid(job: Job, chunks: Sequence[int], rows: Sequence[int]) -> Iterator[Job]:
    """Yields the job in layouts whose degrees divide the ranks: powers of two, and any number of stages."""
    old, towers = job.parallel, [job.vision]
    if job.vision is not None and job.vision.recompute == "none":
        towers.append(attrs.evolve(job.vision, recompute="full"))
    powers = [2**i for i in range(job.world.bit_length()) if job.world % 2**i == 0]
    layers, experts = _sizes(job)
    values = itertools.product(
        [n for n in powers if n <= 64],
        [n for n in range(1, min(job.world, layers) + 1) if job.world % n == 0],
        chunks,
        [n for n in powers if n <= 64],
        [n for n in powers if n <= 256] if experts else [1],
        sorted({1, old.etp}),
        rows,
        CHOICES,
    )
    for each in values:
        new = dict(zip(KNOBS, each, strict=True))
        if job.world % (new["tp"] * new["pp"] * new["cp"]) or (new["vpp"] > 1 and new["pp"] == 1):
            continue
        same = new["pp"] == old.pp and new["vpp"] == old.vpp
        spread = attrs.evolve(old, **new, sp=old.sp or new["tp"] > old.tp, stages=old.stages if same else ())
        yield from (attrs.evolve(job, parallel=spread, vision=vision) for vision in towers)


def _distance(before: Job, after: Job) -> float:
    """Returns how much a layout differs: a doubling counts one, more recomputation less."""
    old, new = before.parallel, after.parallel
    doubled = sum(abs(math.log2(getattr(new, name) / getattr(old, name))) for name in ("tp", "pp", "cp", "ep", "etp"))
    rows, chunks = math.log2(old.micro_batch / new.micro_batch), abs(math.log2(new.vpp / old.vpp))
    again = abs(CHOICES.index(new.recompute) - CHOICES.index(old.recompute)) + (after.vision != before.vision)
    return doubled + 0.75 * rows + 0.75 * chunks + 0.5 * again + (new.sp != old.sp) + 2 * (new.stages != old.stages)


def allowed(job: Job) -> bool:
    """Returns whether the rules allow a job's layout, and every data parallel rank has rows of its own."""
    try:
        layout = layout_of(job)
    except ValueError:
        return False
    return micro_batches(job, layout) * layout.dp * job.parallel.micro_batch <= job.batch


def _sizes(job: Job) -> tuple[int, bool]:
    """Returns the layers of the model, and whether it has experts."""
    alone = attrs.evolve(job, parallel=MegatronParallel(), vision=None, media=(), world=1)
    layout = layout_of(alone)
    found = blocks(job.model, layout, load_of(alone, layout, "none"))
    layers = {layer for block in found for layer in block.layers}
    return len(layers), any(weight.expert for block in found for weight in block.weights)
