"""Balance of skewed lengths over ranks: planned over a step, by a greedy for each micro-batch, and not at all."""

import json
from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from lf.models.decoder import DecoderConfig
from lf.models.llm.qwen import qwen3_8b
from lf.models.media import Media
from lf.models.vlms.qwen_vl import qwen2_5_vl_7b
from lf.models.work import media_work, pack_work
from lf.plan.balance import Evenness, Item, Spread, evenness, groups, spread
from lf.plan.work import even_rates, seconds

TRACES = ("chat", "long tail", "two kinds", "images")


@attrs.frozen(kw_only=True)
class BalanceBench:
    """Spreads samples of skewed lengths, and images of skewed sizes, over ranks, and compares the heaviest rank.

    Costs are operations. `turns` takes samples as they come; `greedy` levels each micro-batch on top of those before,
    heaviest first to the lightest rank with room, with up to 20 exchanges; `ours` plans the whole step.
    """

    ranks: int = 32
    """Ranks."""
    micro: int = 8
    """Micro-batches of a rank."""
    rows: int = 4
    """Samples of a micro-batch."""
    steps: int = 5
    """Steps, of which the mean is shown."""


@attrs.frozen(kw_only=True)
class Row:
    """The makespans of a step over its lower bound."""

    turns: float
    greedy: float
    ours: float
    idle: tuple[float, float, float]
    """The ranks' idle share of each."""


def lengths(trace: str, count: int, rng: np.random.Generator) -> list[int]:
    """Returns lengths of samples in tokens, or sides of images in patches."""
    if trace == "chat":
        made = rng.lognormal(6.3, 1.0, count)
    elif trace == "long tail":
        made = 200 * (1 + rng.pareto(1.1, count))
    elif trace == "two kinds":
        made = np.where(rng.random(count) < 0.1, rng.uniform(12000, 16000, count), rng.uniform(100, 800, count))
    else:
        return (2 * np.clip(rng.lognormal(2.6, 0.6, count), 2, 64).astype(int)).tolist()
    return np.clip(made, 16, 32768).astype(int).tolist()


def made_items(trace: str, count: int, rng: np.random.Generator) -> list[Item]:
    """Returns the samples of a trace with their operations as seconds of a device of 1 teraflop a second."""
    rates = even_rates()
    if trace == "images":
        pictures = [Media(grids=((1, side, side),)) for side in lengths(trace, count, rng)]
        return [Item(cost=seconds(rates, media_work(qwen2_5_vl_7b, each))) for each in pictures]
    text: DecoderConfig = qwen3_8b
    sizes = lengths(trace, count, rng)
    return [Item(cost=seconds(rates, pack_work(text, [size])), tokens=size) for size in sizes]


def in_turn(count: int, ranks: int, micro: int) -> Spread:
    """Returns the spread of items dealt in their order, a micro-batch to each rank in turn: what no balancing is."""
    each = -(-count // (ranks * micro))
    turns = [divmod(i // each, ranks) for i in range(count)]
    return Spread(ranks=tuple(rank for _, rank in turns), micro=tuple(turn for turn, _ in turns))


def greedy(
    items: Sequence[Item], ranks: int, micro: int, batches: Sequence[Sequence[int]], ratio: float = 1.2
) -> Spread:
    """Returns a spread that levels each micro-batch by itself, on top of what the ranks have from earlier ones.

    `batches` are the items of each micro-batch over all ranks. Heaviest first to the rank with the least work whose
    tokens stay below `ratio` of the mean, or else just to the one with the least work; then at most 20 times an item
    moves, or two change places, between the heaviest and the lightest rank, until they are within 5 per cent.
    """
    load = np.zeros(ranks)
    rank_of, micro_of = [0] * len(items), [0] * len(items)
    for at, batch in enumerate(batches[:micro]):
        tokens = np.zeros(ranks)
        cap = ratio * sum(items[i].tokens for i in batch) / ranks
        for i in sorted(batch, key=lambda i: -items[i].cost):
            fits = tokens + items[i].tokens <= cap
            to = int(np.where(fits, load, np.inf).argmin()) if fits.any() else int(load.argmin())
            rank_of[i], micro_of[i] = to, at
            load[to] += items[i].cost
            tokens[to] += items[i].tokens
        for _ in range(20):
            if not _level(items, batch, rank_of, load):
                break
    return Spread(ranks=tuple(rank_of), micro=tuple(micro_of))


def _level(items: Sequence[Item], batch: Sequence[int], rank_of: list[int], load: np.ndarray) -> bool:
    most, least = int(load.argmax()), int(load.argmin())
    gap = float(load[most] - load[least])
    here = sorted((i for i in batch if rank_of[i] == most), key=lambda i: items[i].cost)
    there = sorted((i for i in batch if rank_of[i] == least), key=lambda i: items[i].cost)
    if not here or gap <= 0.05 * load.mean():
        return False
    ways: list[tuple[float, int | None]] = [(items[here[-1]].cost, None)]
    if there:
        ways.append((items[here[-1]].cost - items[there[0]].cost, there[0]))
    moved, back = min(ways, key=lambda way: abs(gap - 2 * way[0]))
    if abs(gap - 2 * moved) >= gap:
        return False
    rank_of[here[-1]] = least
    if back is not None:
        rank_of[back] = most
    load[most] -= moved
    load[least] += moved
    return True


def compared(args: BalanceBench, trace: str) -> Iterator[Row]:
    """Gives each step's makespans over the lower bound."""
    for step in range(args.steps):
        each = args.ranks * args.rows
        items = made_items(trace, each * args.micro, np.random.default_rng(step))
        batches = [range(at * each, (at + 1) * each) for at in range(args.micro)]
        ways = [
            in_turn(len(items), args.ranks, args.micro),
            greedy(items, args.ranks, args.micro, batches),
            spread(items, args.ranks, args.micro),
        ]
        found: list[Evenness] = [evenness(items, where, args.ranks) for where in ways]
        assert all(sum(map(len, groups(where, args.ranks))) == len(items) for where in ways)
        turns, level, ours = (one.makespan / one.bound for one in found)
        yield Row(turns=turns, greedy=level, ours=ours, idle=tuple(one.idle for one in found))  # type: ignore[arg-type]


def show_balance(args: BalanceBench, as_json: bool) -> None:
    """Prints the mean of each trace."""
    if not as_json:
        print(f"\n{args.ranks} ranks, {args.micro} micro-batches of {args.rows} samples, mean of {args.steps} steps")
        print(
            f"{'makespan / bound':18}{'turns':>8}{'greedy':>8}{'ours':>8}   idle %{'turns':>7}{'greedy':>8}{'ours':>8}"
        )
    for trace in TRACES:
        rows = list(compared(args, trace))
        over = [float(np.mean([getattr(row, name) for row in rows])) for name in ("turns", "greedy", "ours")]
        idle = np.mean([row.idle for row in rows], axis=0).tolist()
        if as_json:
            print(json.dumps({"trace": trace, "over_bound": over, "idle": idle}))
        else:
            text = "".join(f"{value:8.3f}" for value in over)
            print(f"{trace:18}{text}{'':9}{''.join(f'{100 * value:8.1f}' for value in idle)}")
