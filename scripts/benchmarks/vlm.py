"""A small Qwen2.5-VL beside a plain transformers loop, and what images apart and even loads save where sizes differ."""

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import torch

import lf
from lf.devices.cpu import cpu
from lf.models.decoder import Attention, DecoderConfig, Mlp
from lf.models.layers.rope import Rope
from lf.models.llm.qwen import Qwen2
from lf.models.media import Media, media_tokens
from lf.models.spec import IGNORE, Batch, Layout, collate, forward, loss_terms, slice_batch
from lf.models.vision.qwen_vit import Qwen25Vision
from lf.models.vision.tower import tower_of
from lf.models.vlms.qwen_vl import PROJECTOR2_5, Qwen25Vl
from lf.models.work import added, media_work, pack_work
from lf.plan.balance import Caps, Item, Spread, evenness, spread
from lf.plan.packing import filled, plan_whole
from lf.plan.pipeline import Pass, replay
from lf.plan.work import Rates, Work, fit, seconds
from lf.train.comm import process_group
from lf.train.start import load_model, local_context, open_start
from scripts.benchmarks.balance import BalanceBench, in_turn, lengths, show_balance
from scripts.benchmarks.layouts import ask, ranks
from scripts.benchmarks.peers import both_sides
from scripts.benchmarks.ratios import DisagreementError, Ratio, check_same, head, measure, show, summarise

Where = Literal["first stage", "evened", "apart"]
WHERE: tuple[Where, ...] = ("first stage", "evened", "apart")
"""Who encodes: the first pipeline stage; the same with so many layers fewer that stages are as heavy on average; all
ranks (`lf.Hetero`)."""
ROOM = 0.75
"""Largest share of a row that the images of a sample have."""


@attrs.frozen(kw_only=True)
class VlmBench:
    """Trains a small Qwen2.5-VL, and plans steps on rows whose images and texts have skewed sizes.

    First in lf and in a plain transformers loop, in turn: equal weights, rows, fp32, SDPA, fused AdamW and clipping.
    Then the passes of a step are replayed with times measured here, of images encoded by the first stage or apart, of
    packs dealt by turns or evened out; four processes take the steps too. Last the heaviest rank over its lower bound
    on more traces. Exit code 1 when two sides disagree about the first step.
    """

    length: int = 512
    """Tokens of a row."""
    rows: int = 2
    """Rows of a step beside transformers."""
    hidden: int = 384
    """Width of the decoder, a multiple of 24; the tower has two thirds of it."""
    layers: int = 4
    """Layers of the decoder, and of the tower."""
    vocab: int = 8192
    """Token ids."""
    pairs: int = 5
    """Timed pairs of steps beside transformers."""
    replicas: int = 2
    """Data parallel replicas of the replay."""
    stages: int = 2
    """Pipeline stages of each, which divide the layers."""
    micro: int = 4
    """Micro-batches of a replica, of one row each."""
    steps: int = 3
    """Steps that are replayed, of which the mean is shown."""
    wall: int = 2
    """Steps that processes take, of which the fastest is shown; 0 leaves them out."""
    threads: int = 0
    """Threads of torch; 0 leaves torch's own choice."""
    json: bool = False
    """Print a JSON line a case in place of the tables."""


def model_of(args: VlmBench) -> Qwen25Vl:
    """Returns the model that is measured, in the proportions of the published ones."""
    width, half = args.hidden * 2 // 3, args.hidden // 12
    side = 3 * half // 8
    text = Qwen2(
        vocab=args.vocab,
        hidden=args.hidden,
        layers=args.layers,
        attention=Attention(heads=6, kv_heads=2, head_dim=args.hidden // 6, qkv_bias=True),
        mlp=Mlp(width=args.hidden * 8 // 3),
        rope=Rope(theta=1e6, sections=(half - 2 * side, side, side)),
        tied=True,
        max_length=args.length,
    )
    vision = Qwen25Vision(width=width, depth=args.layers, mlp=width * 8 // 3, heads=4, full=(args.layers - 1,))
    ids = {"image_token": 1, "video_token": 2, "start_token": 3, "end_token": 4}
    return Qwen25Vl(vision=vision, projector=PROJECTOR2_5, text=text, **ids)


@attrs.frozen(kw_only=True)
class Sample:
    """A text with images in front."""

    sides: tuple[int, ...]
    """Patches of a side of each image, which is square."""
    tokens: int
    """Tokens of both."""

    @property
    def media(self) -> tuple[Media, ...]:
        """Its images."""
        return tuple(Media(grids=((1, side, side),)) for side in self.sides)


Pack = Sequence[Sample]
"""Samples of a row."""


def drawn(length: int, count: int, rng: np.random.Generator, images: tuple[int, int] = (0, 3)) -> list[Sample]:
    """Returns samples of so many images; sizes are those of the traces, cut off where a row ends."""
    made = []
    for text in lengths("chat", count, rng):
        sides, used = [], 0
        for side in lengths("images", int(rng.integers(images[0], images[1] + 1)), rng):
            room = int(ROOM * length) - used - 2
            if room > 0:
                # A token is of two by two patches.
                sides.append(min(side, 2 * math.isqrt(room)))
                used += sides[-1] ** 2 // 4 + 2
        made.append(Sample(sides=tuple(sides), tokens=used + min(max(text // 4, 8), length - used)))
    return made


def packs_of(length: int, count: int, seed: int) -> list[list[Sample]]:
    """Returns packed rows of samples."""
    samples = drawn(length, 4 * count, np.random.default_rng(seed))
    plan = plan_whole(np.array([sample.tokens for sample in samples]), length, seed)
    rows = [plan.documents[a:b].tolist() for a, b in zip(plan.bounds, plan.bounds[1:], strict=False)]
    return [[samples[i] for i in row] for row in rows[:count]]


def row_of(cfg: Qwen25Vl, pack: Pack, length: int, seed: int) -> dict[str, Any]:
    """Returns a pack as a row of random tokens and patches, filled up with a text that is not learnt."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(5, cfg.text.vocab, length + 1)
    labels, at = tokens[1:].copy(), 0
    for sample in pack:
        begin = at
        for media in sample.media:
            count = media_tokens(cfg, media)
            tokens[at], tokens[at + 1 : at + 1 + count], tokens[at + 1 + count] = 3, 1, 4
            labels[max(at - 1, 0) : at + 1 + count] = IGNORE
            at += count + 2
        at = begin + sample.tokens
        labels[at - 1] = IGNORE
    labels[at:] = IGNORE
    media_all = tuple(media for sample in pack for media in sample.media)
    patches = rng.standard_normal((sum(media.patches for media in media_all), tower_of(cfg.vision).numbers), np.float32)
    return {
        "tokens": tokens[:-1],
        "labels": labels,
        "lengths": document_lengths(pack, length),
        "real": at,
        "id": f"pack:{seed}",
        "media": media_all,
        "patches": patches,
    }


def document_lengths(pack: Pack, length: int) -> tuple[int, ...]:
    """Returns the tokens of the documents of a row, what fills it up included."""
    return filled([sample.tokens for sample in pack], length)


def batch_of(cfg: Qwen25Vl, packs: Sequence[Pack], length: int, seed: int) -> Batch:
    """Returns packs as a micro-batch."""
    rows = [row_of(cfg, pack, length, seed * len(packs) + at) for at, pack in enumerate(packs)]
    return collate(cfg, rows, rows[0])


def run_of(cfg: Qwen25Vl, batch: int, parallel: Any) -> lf.Run:
    """Returns a run whose data is never opened."""
    return lf.Run(model=cfg, data=lf.TextData(paths=("unused",)), batch=batch, parallel=parallel)


def beside_transformers(args: VlmBench) -> Ratio:
    """Returns how fast lf is beside transformers on rows of one sample each; torch.distributed must be up."""
    cfg = model_of(args)
    ours, theirs = both_sides(run_of(cfg, args.rows, lf.MegatronParallel(micro_batch=args.rows)))
    batches = []
    for seed in range(1 + args.pairs):
        samples = drawn(args.length, args.rows, np.random.default_rng(seed), (1, 3))
        packs = [[attrs.evolve(sample, tokens=args.length)] for sample in samples]
        batches.append(batch_of(cfg, packs, args.length, seed))
    pairs = measure(ours, theirs, batches, "qwen2.5-vl")
    return summarise(pairs, "qwen2.5-vl", args.length, args.rows)


@attrs.frozen(kw_only=True)
class Costs:
    """What forward and backward of packs and of images take on one rank, measured."""

    packs: Rates
    """Seconds of a decoder's work by kind."""
    images: Rates
    """Seconds of a tower's work by kind."""
    forward: tuple[float, float]
    """Share of the forward in both."""


def measured(args: VlmBench) -> Costs:
    """Returns costs fitted to this machine's processor times; torch.distributed must be up."""
    cfg, n = model_of(args), args.length
    module: Any = load_model(open_start("", cfg), local_context(cfg, cpu))
    encoder = module.encoder()
    packs = [((n,), n), ((n // 2,) * 2, n), ((n // 8,) * 8, n), ((n // 2,), n // 2), ((n // 4,) * 2, n // 2)]
    sides = [(4,) * 16, (4,) * 4, (8,) * 8, (16,) * 2, (16,), (24,)]

    def decode(own: tuple[int, ...], length: int) -> Callable[[], torch.Tensor]:
        row = row_of(cfg, [Sample(sides=(), tokens=each) for each in own], length, 0)
        batch = slice_batch(cfg, collate(cfg, [row], row), Layout())
        return lambda: sum(loss_terms(cfg, forward(cfg, module, batch), batch).values(), torch.zeros(()))

    def encode(own: tuple[int, ...]) -> Callable[[], torch.Tensor]:
        row = row_of(cfg, [Sample(sides=own, tokens=10_000)], 10_000, 0)
        return lambda: encoder.encode(torch.from_numpy(row["patches"]), row["media"])[0].sum()

    text, parts = _fitted([pack_work(cfg.text, own) for own, _ in packs], [decode(*each) for each in packs])
    images, shares = _fitted(
        [added(*(media_work(cfg, media) for media in Sample(sides=own, tokens=0).media)) for own in sides],
        [encode(own) for own in sides],
    )
    return Costs(packs=text, images=images, forward=(parts, shares))


def _fitted(works: Sequence[Work], calls: Sequence[Callable[[], torch.Tensor]]) -> tuple[Rates, float]:
    """Returns the rates that explain the times of calls with their backward, and the share of the forward."""
    times = [min((_timed(call) for _ in range(3)), key=sum) for call in calls]
    rates = fit([[work] for work in works], [sum(each) for each in times])
    return rates, sum(first for first, _ in times) / sum(map(sum, times))


def _timed(call: Callable[[], torch.Tensor]) -> tuple[float, float]:
    start = time.process_time()
    loss = call()
    middle = time.process_time()
    loss.backward()
    return middle - start, time.process_time() - middle


@attrs.frozen(kw_only=True)
class StepTimes:
    """How a step goes."""

    seconds: float
    """From its first pass to its last, on the slowest replica."""
    bubble: float
    """Share of their replica's time that ranks wait for others of it, on average."""
    idle: float
    """Share of the step that ranks wait, for other replicas too, on average."""


def replayed(
    decode: Sequence[Sequence[float]],
    encode: Sequence[Sequence[Sequence[float]]],
    costs: Costs,
    where: Where,
    stages: int,
) -> StepTimes:
    """Returns the replay of a step; sending takes no time.

    `decode` [replica][micro-batch] has the seconds of packs, `encode` [replica][micro-batch] those of each image.
    """
    texts, towers = sum(map(sum, decode)), sum(sum(map(sum, replica)) for replica in encode)
    first = 1.0 / stages
    if where == "evened" and stages > 1:
        first = max(0.0, (texts + towers) / stages - towers) / texts
    spans, busy = [], []
    for packs, images in zip(decode, encode, strict=True):

        def length(stage: int, each: Pass, packs: Any = packs, images: Any = images) -> float:
            ahead, _, micro = each
            text, tower = (part if ahead else 1.0 - part for part in costs.forward)
            share = first if stage == 0 else (1.0 - first) / (stages - 1)
            return packs[micro] * share * text + sum(images[micro]) * tower * (stage == 0 and where != "apart")

        items = [Item(cost=cost) for micro in images for cost in micro] if where == "apart" else []
        apart = evenness(items, spread(items, stages), stages).makespan
        spans.append(apart + replay(stages, 1, len(packs), length))
        busy.append((sum(packs) + sum(map(sum, images))) / stages)
    return StepTimes(
        seconds=max(spans),
        bubble=statistics.mean(1.0 - done / span for done, span in zip(busy, spans, strict=True)),
        idle=1.0 - statistics.mean(busy) / max(spans),
    )


def placed(costs: Costs, cfg: Qwen25Vl, packs: Sequence[Pack], args: VlmBench, *, even: bool) -> Spread:
    """Returns where the packs of a step go: dealt by turns, or evened out by their costs."""
    if not even:
        return in_turn(len(packs), args.replicas, args.micro)
    items = [Item(cost=pack_cost(costs, cfg, pack, args.length) + sum(image_costs(costs, cfg, pack))) for pack in packs]
    return spread(items, args.replicas, args.micro, Caps(items=1))


def pack_cost(costs: Costs, cfg: Qwen25Vl, pack: Pack, length: int) -> float:
    """Returns the seconds of a pack in the decoder."""
    text: DecoderConfig = cfg.text
    return seconds(costs.packs, pack_work(text, document_lengths(pack, length)))


def image_costs(costs: Costs, cfg: Qwen25Vl, pack: Pack) -> list[float]:
    """Returns the seconds of each image of a pack."""
    return [seconds(costs.images, media_work(cfg, media)) for sample in pack for media in sample.media]


def dealt(where: Spread, packs: Sequence[Pack], args: VlmBench) -> list[list[Pack]]:
    """Returns the pack of each replica and micro-batch."""
    at = {(rank, micro): pack for rank, micro, pack in zip(where.ranks, where.micro, packs, strict=True)}
    return [[at[rank, micro] for micro in range(args.micro)] for rank in range(args.replicas)]


CASES: tuple[tuple[Where, bool], ...] = tuple((where, even) for where in WHERE for even in (False, True))
"""Who encodes, and whether packs are evened out."""


def replay_steps(args: VlmBench, costs: Costs) -> dict[tuple[Where, bool], StepTimes]:
    """Returns the mean of the replayed steps of each case."""
    cfg = model_of(args)
    found: dict[tuple[Where, bool], list[StepTimes]] = {case: [] for case in CASES}
    for step in range(args.steps):
        packs = packs_of(args.length, args.replicas * args.micro, step)
        for where, even in CASES:
            ways = dealt(placed(costs, cfg, packs, args, even=even), packs, args)
            decode = [[pack_cost(costs, cfg, pack, args.length) for pack in replica] for replica in ways]
            encode = [[image_costs(costs, cfg, pack) for pack in replica] for replica in ways]
            found[where, even].append(replayed(decode, encode, costs, where, args.stages))
    return {
        case: StepTimes(
            **{name: statistics.mean(getattr(one, name) for one in steps) for name in attrs.asdict(steps[0])}
        )
        for case, steps in found.items()
    }


def walls(args: VlmBench, costs: Costs) -> Iterator[tuple[tuple[Where, bool], float]]:
    """Gives the seconds of a step of processes, one for each rank, of each case that needs no uneven layers.

    Raises DisagreementError where a case has another loss or other gradients than the first one.
    """
    cfg = model_of(args)
    packs = packs_of(args.length, args.replicas * args.micro, 0)
    text = lf.MegatronParallel(pp=args.stages)
    made = {id(pack): batch_of(cfg, [pack], args.length, at) for at, pack in enumerate(packs)}
    reference: tuple[float, float] | None = None
    with ranks(args.replicas * args.stages, 1) as pipes:
        for where, even in (case for case in CASES if case[0] != "evened"):
            ask(pipes, run_of(cfg, len(packs), text if where == "first stage" else lf.Hetero(text=text)))
            ways = dealt(placed(costs, cfg, packs, args, even=even), packs, args)
            # Micro-batch m of a step is that of replica m % replicas.
            micro = [made[id(replica[at])] for at in range(args.micro) for replica in ways]
            ((loss, norm, _), *_) = ask(pipes, micro)
            reference = reference or (loss, norm)
            check_same((loss, norm), reference, f"{where}, {'evened out' if even else 'by turns'}")
            times = []
            for _ in range(args.wall):
                start = time.perf_counter()
                ask(pipes, micro)
                times.append(time.perf_counter() - start)
            yield (where, even), min(times)


def show_steps(args: VlmBench) -> None:
    """Measures and prints the replay, and beside it what processes take."""
    with process_group(cpu):
        costs = measured(args)
    found = replay_steps(args, costs)
    took = dict(walls(args, costs)) if args.wall else {}
    if not args.json:
        print(
            f"\n{args.replicas} replicas of {args.stages} stages, {args.micro} micro-batches of {args.length} tokens, "
            f"mean of {args.steps} steps"
        )
        print(f"{'images':14}{'packs':>12}{'replayed s':>12}{'bubble %':>10}{'idle %':>8}{'wall s':>8}")
    for (where, even), step in found.items():
        packs, wall = "evened out" if even else "by turns", took.get((where, even))
        if args.json:
            print(json.dumps({"images": where, "packs": packs, **attrs.asdict(step), "wall": wall}), flush=True)
            continue
        shares = f"{100 * step.bubble:10.1f}{100 * step.idle:8.1f}"
        print(f"{where:14}{packs:>12}{step.seconds:12.3f}{shares}{'' if wall is None else f'{wall:8.2f}'}", flush=True)


def compare_vlm(args: VlmBench) -> int:
    """Measures, prints, and returns the exit code."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if not args.json:
        print(f"fp32 on a CPU, threads {torch.get_num_threads()}, {args.pairs} pairs")
    head(args.json)
    try:
        with process_group(cpu):
            show(beside_transformers(args), args.json)
        show_steps(args)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    show_balance(BalanceBench(), args.json)
    return 0
