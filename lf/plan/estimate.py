"""What a run needs on N ranks, stage by stage: memory, traffic, operations, waiting. Nothing is built and nothing runs.

Ranks of a pipeline stage are alike, so the work grows with the stages and not with the ranks.
"""

from collections.abc import Sequence
from typing import Literal

import attrs

from lf.models.media import Media, media_flops
from lf.models.spec import Block, Layout, Load, ModelConfig, blocks, check_layout, flops
from lf.parallel.config import Hetero, MegatronParallel, resolve
from lf.plan.buffers import Buffer, bucket_limit, buffers, in_order
from lf.plan.pipeline import check_passes, idle, most_held, round_size

Choice = Literal["none", "selective", "full"]
"""What the backward makes again, as `MegatronParallel.recompute` says it."""
CHOICES: tuple[Choice, ...] = ("none", "selective", "full")

MAIN = 4
"""Bytes of a gradient, and of a main weight beside a parameter of fewer bytes."""


@attrs.frozen(kw_only=True)
class Job:
    """The facts of a run that a plan rests on."""

    model: ModelConfig
    """The model."""
    parallel: MegatronParallel
    """How it is spread; where images are encoded apart, how the decoder is."""
    vision: MegatronParallel | None = None
    """How towers are, where images are encoded apart (`Hetero`)."""
    world: int
    """Ranks."""
    batch: int
    """Rows of a step over all ranks."""
    length: int
    """Tokens of a row."""
    itemsize: int = 4
    """Bytes of a parameter and of an activation."""
    state: float = 8.0
    """Bytes that the optimiser keeps of a trained number, besides its main weight."""
    packed: bool = True
    """Whether rows may hold several documents."""
    cpu: bool = False
    """Whether the ranks are CPUs."""
    media: tuple[Media, ...] = ()
    """Images and videos of the row that has most of them, by which memory is planned."""
    usual: float = 1.0
    """Share of them that rows have on average, 0 to 1: for operations, and for all that is of a whole step's images."""
    known: str = ""
    """Where `media` is known from."""


@attrs.frozen(kw_only=True)
class Memory:
    """Bytes of a rank of one stage."""

    parameters: int
    """Parameters, with the padding of their buffer."""
    gradients: int
    """The float32 gradient buffer."""
    optimizer: int
    """This rank's share of main weights and of the optimiser's state."""
    activations: int
    """What forwards have kept when most micro-batches are in flight, outputs that wait for a gradient included."""
    working: int
    """What the part that needs most holds besides while it runs, less what is given back by then."""

    @property
    def peak(self) -> int:
        """Bytes of all of them together; the allocator's and the libraries' own come on top."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.working


@attrs.frozen(kw_only=True)
class Traffic:
    """What a rank sends of one kind in a step."""

    axis: str
    """The ranks that take part: a degree of parallelism, `dp` with the ranks of cp, or the stages' `ends`; `mp` is tp
    and pp together, a `replica` all ranks that share a model, `apart` those of them that encode an image together."""
    op: str
    """The collective."""
    ranks: int
    """How many take part."""
    calls: int
    """Calls of a step."""
    size: int
    """Bytes of all calls: of whole tensors, before a reduce-scatter and after an all-gather."""

    @property
    def wire(self) -> float:
        """Bytes that leave a rank in a ring."""
        share = (self.ranks - 1) / self.ranks
        return self.size * {"send": 1.0, "all_reduce": 2 * share}.get(self.op, share)


@attrs.frozen(kw_only=True)
class Stage:
    """A pipeline stage: what each of its ranks holds and does."""

    first: int
    """Its first rank; its ranks follow each other."""
    ranks: int
    """How many ranks it has."""
    holds: tuple[str, ...]
    """What each of its chunks holds."""
    elements: int
    """Parameters of a rank, without the padding of the buffer."""
    in_flight: int
    """Most micro-batches (times chunks) that it holds at once."""
    memory: dict[str, Memory]
    """Bytes by choice of recompute."""
    traffic: tuple[Traffic, ...]
    """What a rank sends in a step."""
    pieces: tuple[tuple[str, int], ...]
    """Its largest pieces with their bytes, largest first."""
    forward: tuple[float, ...]
    """Operations of a forward of each chunk."""
    backward: tuple[float, ...]
    """Operations of a backward of each chunk, with what is made again."""
    apart: float
    """Operations of a step before and after the pipeline runs: images that are encoded apart."""


@attrs.frozen(kw_only=True)
class Plan:
    """What a run needs."""

    job: Job
    """The facts."""
    layout: Layout
    """The resolved degrees."""
    micro_batches: int
    """Micro-batches of a rank in a step."""
    parameters: int
    """Parameters of the model, without padding."""
    flops: float
    """Operations of a step over all ranks, without recomputation (`lf.models.spec.flops`), those of images included."""
    media_flops: float
    """Those of images until they are tokens."""
    bubble: float
    """Share of the ranks' time that they wait for other stages, 0 to 1."""
    stages: tuple[Stage, ...]
    """The stages."""


def modules(parallel: MegatronParallel, choice: Choice) -> tuple[str, ...]:
    """Returns what a choice of recompute makes again, as `Load.recompute` says it."""
    return {"none": (), "full": ("full",), "selective": tuple(parallel.recompute_modules)}[choice]


def load_of(job: Job, layout: Layout, choice: Choice) -> Load:
    """Returns what a rank computes at a time."""
    return Load(
        rows=job.parallel.micro_batch,
        length=job.length,
        itemsize=job.itemsize,
        recompute=modules(job.parallel, choice),
        packed=job.packed,
        cpu=job.cpu,
        media=job.media,
        usual=job.usual,
        media_again=(job.vision.recompute if job.vision else choice) == "full",
        micro=micro_batches(job, layout),
    )


def parallel_of(job: Job) -> MegatronParallel | Hetero:
    """Returns how a job is spread, as a run says it."""
    if job.vision is None:
        return job.parallel
    rows, text = job.parallel.micro_batch, attrs.evolve(job.parallel, micro_batch=1)
    return Hetero(micro_batch=rows, vision=job.vision, text=text)


def layout_of(job: Job) -> Layout:
    """Returns the layout of a job; raises ValueError with the cure where it cannot be."""
    layout = resolve(parallel_of(job), job.world)
    check_layout(job.model, layout, job.length)
    return layout


def micro_batches(job: Job, layout: Layout) -> int:
    """Returns the micro-batches of a rank; the interleaved schedule takes them in rounds of one for each stage."""
    rounds = round_size(layout.pp, layout.vpp)
    return -(-job.batch // (job.parallel.micro_batch * layout.dp * rounds)) * rounds


def plan(job: Job) -> Plan:
    """Returns the plan of a job; raises ValueError, with the cure, where its layout cannot be or is too large."""
    layout = layout_of(job)
    micro = micro_batches(job, layout)
    check_passes(layout.pp, layout.vpp, micro)
    stages = tuple(stage_of(job, attrs.evolve(layout, pp_rank=rank), micro) for rank in range(layout.pp))
    alone, one = Layout(), attrs.evolve(job, media=())
    whole = blocks(job.model, alone, load_of(one, alone, "none"))
    images = job.batch * job.usual * sum(media_flops(job.model, item) for item in job.media)
    return Plan(
        job=job,
        layout=layout,
        micro_batches=micro,
        parameters=sum(w.size - w.padding for w in in_order(whole) if not w.frozen),
        flops=flops(job.model, job.batch, job.length) + images,
        media_flops=images,
        bubble=idle([s.forward for s in stages], [s.backward for s in stages], micro, max(s.apart for s in stages)),
        stages=stages,
    )


def stage_memory(job: Job, layout: Layout, choice: Choice) -> Memory:
    """Returns the memory of a rank of the stage `layout.pp_rank`."""
    found = blocks(job.model, layout, load_of(job, layout, choice))
    return _memory(job, layout, found, _chunk_buffers(job, layout, found))


def stage_of(job: Job, layout: Layout, micro: int, choices: Sequence[Choice] = CHOICES) -> Stage:
    """Returns the stage `layout.pp_rank`, its memory by some choices of recompute, the job's own among them."""
    by_choice = {choice: blocks(job.model, layout, load_of(job, layout, choice)) for choice in choices}
    mine = by_choice[job.parallel.recompute]
    held, ranks = _chunk_buffers(job, layout, mine), job.world // layout.pp
    return Stage(
        first=layout.pp_rank * ranks,
        ranks=ranks,
        holds=tuple(map(_holds, _by_chunk(mine, layout.vpp))),
        elements=sum(buffer.elements for buffer in held),
        in_flight=sum(most_held(layout.pp_rank, layout.pp, micro, (1.0,) * layout.vpp)),
        memory={choice: _memory(job, layout, found, held) for choice, found in by_choice.items()},
        traffic=traffic(layout, mine, held, micro),
        pieces=_pieces(job, layout, mine, held),
        forward=_operations(mine, layout.vpp, backward=False),
        backward=_operations(mine, layout.vpp, backward=True),
        apart=sum(3 * block.forward + block.again for block in mine if block.step),
    )


def _chunk_buffers(job: Job, layout: Layout, found: Sequence[Block]) -> tuple[Buffer, ...]:
    ranks = layout.dp * layout.cp
    expert_ranks = layout.dp * layout.tp * layout.cp // (layout.ep * layout.etp)
    overlap = job.parallel.overlap and max(ranks, expert_ranks) > 1
    made: list[Buffer] = []
    for chunk, inside in enumerate(_by_chunk(found, layout.vpp)):
        limit = bucket_limit(overlap=overlap, ranks=layout.dp, stage=layout.pp_rank, chunk=chunk)
        made += buffers(inside, job.itemsize, ranks, expert_ranks, limit)
    return tuple(made)


def _by_chunk(found: Sequence[Block], chunks: int) -> list[list[Block]]:
    """Returns the blocks of each chunk of the stage."""
    made: list[list[Block]] = [[] for _ in range(chunks)]
    for block in found:
        made[block.chunk].append(block)
    return made


def _memory(job: Job, layout: Layout, found: Sequence[Block], held: Sequence[Buffer]) -> Memory:
    return Memory(
        parameters=sum(buffer.padded * buffer.itemsize for buffer in held) + _frozen(job, found),
        gradients=sum(buffer.padded * MAIN for buffer in held),
        optimizer=sum(_optimizer(job, buffer) for buffer in held),
        activations=sum(size for _, size in _kept(found, _worst(job, layout, found))),
        working=max(size for _, size in _working(found, _worst(job, layout, found))),
    )


def _working(found: Sequence[Block], held: Sequence[int]) -> list[tuple[str, int]]:
    """Returns the bytes that each block holds besides while it runs, less what the last parts of its chunk have freed.

    The output layer's backward is done before that of the layers, and what it has kept is gone. So is all that is of
    micro-batches when what works for the whole step goes backward.
    """
    pipeline = sum(size for _, size in _kept([block for block in found if not block.step], held))
    made: list[tuple[str, int]] = []
    # What the parts without layers that follow have kept, by chunk.
    freed: dict[int, int] = {}
    for block in reversed(found):
        gone = pipeline if block.step else freed.get(block.chunk, 0) if block.layers else 0
        made.append((block.name, max(0, block.working - gone)))
        if not block.layers:
            freed[block.chunk] = freed.get(block.chunk, 0) + sum(size for _, size in block.saved)
    return made[::-1]


def _frozen(job: Job, found: Sequence[Block]) -> int:
    weights = [(weight, block.count) for block in found for weight in block.weights if weight.frozen]
    return sum(weight.size * (weight.itemsize or job.itemsize) * count for weight, count in weights)


def _optimizer(job: Job, buffer: Buffer) -> int:
    main = MAIN if buffer.itemsize < MAIN else 0
    return round(buffer.padded / buffer.ranks * (main + job.state))


def _worst(job: Job, layout: Layout, found: Sequence[Block]) -> tuple[int, ...]:
    """Returns the micro-batches in flight of each chunk when they hold most."""
    one, passes = (1,) * layout.vpp, [block for block in found if not block.step]
    alone = [sum(size for _, size in _kept(inside, one)) for inside in _by_chunk(passes, layout.vpp)]
    return most_held(layout.pp_rank, layout.pp, micro_batches(job, layout), alone)


def _kept(found: Sequence[Block], held: Sequence[int]) -> list[tuple[str, int]]:
    """Returns the bytes of what forwards have kept, by name, with so many micro-batches in flight of each chunk."""
    kept = [
        (f"{block.name}: {name}", size * (1 if block.step else block.count * held[block.chunk]))
        for block in found
        for name, size in block.saved
    ]
    sent = [
        ("hand-over: output", message.size * held[block.chunk])
        for block in found
        for message in block.messages
        if message.op == "send"
    ]
    return kept + sent


def _pieces(job: Job, layout: Layout, found: Sequence[Block], held: Sequence[Buffer]) -> tuple[tuple[str, int], ...]:
    """Returns the largest pieces of the memory of a rank."""
    sizes: dict[str, int] = {}
    for name, size in _kept(found, _worst(job, layout, found)):
        sizes[name] = sizes.get(name, 0) + size
    for block in found:
        for weight in block.weights:
            name = f"{block.name}: {weight.name}" + ("" if weight.frozen else ", its gradient")
            each = weight.size * ((weight.itemsize or job.itemsize) + (0 if weight.frozen else MAIN))
            sizes[name] = sizes.get(name, 0) + each * block.count
    sizes["main weights and state of the optimiser"] = sum(_optimizer(job, buffer) for buffer in held)
    largest, size = max(_working(found, _worst(job, layout, found)), key=lambda pair: pair[1])
    sizes[f"{largest}: working memory"] = size
    return tuple(sorted(((n, s) for n, s in sizes.items() if s), key=lambda pair: -pair[1]))


def _holds(inside: Sequence[Block]) -> str:
    """Returns what the blocks of a chunk are, in words."""
    layers = sorted({layer for block in inside for layer in block.layers})
    names = [block.name for block in inside if block.weights and not block.layers]
    span = f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else "".join(f"layer {layer}" for layer in layers)
    start = [name for name in names if name == "embedding"]
    return ", ".join([*start, *([span] if span else []), *(name for name in names if name not in start)])


def _operations(found: Sequence[Block], chunks: int, *, backward: bool) -> tuple[float, ...]:
    total = [0.0] * chunks
    for block in (block for block in found if not block.step):
        total[block.chunk] += block.count * (2 * block.forward + block.again if backward else block.forward)
    return tuple(total)


def traffic(layout: Layout, found: Sequence[Block], held: Sequence[Buffer], micro: int) -> tuple[Traffic, ...]:
    """Returns what a rank sends in a step, scalars left out, in a fixed order."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}

    def add(axis: str, op: str, size: int, calls: int) -> None:
        if size and calls and _ranks(layout, axis) > 1:
            before = sums.get((axis, op), (0, 0))
            sums[axis, op] = (before[0] + calls, before[1] + size * calls)

    for block in found:
        for message in block.messages:
            add(message.axis, message.op, message.size, message.calls * (1 if block.step else block.count * micro))
    for buffer in held:
        axis = "expert dp" if buffer.expert else "dp"
        for size in buffer.buckets:
            add(axis, "reduce_scatter", size * MAIN, 1)
            add(axis, "all_gather", size * buffer.itemsize, 1)
    weights = [weight for inside in _by_chunk(found, layout.vpp) for weight in in_order(inside)]
    add("tp", "all_reduce", sum(weight.size for weight in weights if weight.summed) * MAIN, 1)
    for weight in weights:
        if weight.tied:
            add("ends", "all_reduce", weight.size * MAIN, 1)
    return tuple(
        Traffic(axis=axis, op=op, ranks=_ranks(layout, axis), calls=calls, size=size)
        for (axis, op), (calls, size) in sorted(sums.items())
    )


def _ranks(layout: Layout, axis: str) -> int:
    """Returns how many ranks take part in a collective of an axis."""
    special = {
        "dp": layout.dp * layout.cp,
        "expert dp": layout.dp * layout.tp * layout.cp // (layout.ep * layout.etp),
        "ends": min(2, layout.pp),
        "etp*ep": layout.etp * layout.ep,
        "mp": layout.tp * layout.pp,
        "replica": layout.tp * layout.cp * layout.pp,
    }
    return special.get(axis) or int(getattr(layout, axis))


def worst(plan: Plan) -> tuple[int, int]:
    """Returns the stage whose ranks need most memory, and their peak in bytes."""
    peaks = [stage.memory[plan.job.parallel.recompute].peak for stage in plan.stages]
    most = max(peaks)
    return peaks.index(most), most
