"""Balance: every cap holds, loads are near the least possible, and costs are what a fit of measured times says."""

import itertools
import json
import math
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lf
from lf.data.loader import Share, turns
from lf.devices.cpu import cpu
from lf.models.decoder_facts import decoder_flops
from lf.models.media import Media, media_flops
from lf.models.parts import Attention
from lf.models.spec import Layout
from lf.models.work import media_work, pack_work, pairs
from lf.plan.balance import Caps, Item, Spread, evenness, groups, lower_bound, spread
from lf.plan.work import Rates, even_rates, fit, seconds
from scripts.benchmarks.balance import TRACES, BalanceBench, compared, greedy, in_turn, show_balance
from scripts.benchmarks.rates import explained, timed
from tests.cases import DENSE, ragged, run_of
from tests.moe_cases import SOFTMAX
from tests.vlm_cases import MODELS


class Listed(list[dict[str, Any]]):
    """Rows that are a list."""

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        return self[index]


COSTS = st.lists(st.integers(0, 40), min_size=1, max_size=24)


def items(costs: list[int]) -> list[Item]:
    return [Item(cost=float(cost), tokens=cost, memory=3 * cost) for cost in costs]


def least(costs: list[int], ranks: int) -> int:
    """Returns the least makespan, by trying every spread."""
    ways = itertools.product(range(ranks), repeat=len(costs))
    return min(max(sum(c for c, at in zip(costs, way, strict=True) if at == r) for r in range(ranks)) for way in ways)


@given(COSTS, st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_every_item_has_a_place_and_no_cap_is_passed(costs: list[int], ranks: int, micro: int) -> None:
    bins, most = ranks * micro, max(costs)
    caps = Caps(tokens=2 * most + sum(costs) // bins, items=2 * (-(-len(costs) // bins)))
    found = spread(items(costs), ranks, micro, caps)
    assert found == spread(items(costs), ranks, micro, caps)
    held: dict[tuple[int, int], list[int]] = {}
    for cost, rank, at in zip(costs, found.ranks, found.micro, strict=True):
        assert 0 <= rank < ranks
        assert 0 <= at < micro
        held.setdefault((rank, at), []).append(cost)
    assert all(sum(own) <= caps.tokens and len(own) <= caps.items for own in held.values())
    loads = [[sum(held.get((rank, at), [])) for at in range(micro)] for rank in range(ranks)]
    assert all(own == sorted(own, reverse=True) for own in loads)
    assert sorted(i for own in groups(found, ranks) for i in own) == list(range(len(costs)))


@given(COSTS, st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_loads_are_between_the_bound_and_a_half_more(costs: list[int], ranks: int) -> None:
    even = evenness(items(costs), spread(items(costs), ranks), ranks)
    assert even.bound <= even.makespan + 1e-9
    # Heaviest first is at most 4/3 of the least makespan (Graham, 1969), which is at most twice the bound.
    assert even.makespan <= (4 / 3) * max(2 * sum(costs) / ranks, max(costs), even.bound) + 1e-9
    assert 0 <= even.idle < 1
    assert even.lockstep == pytest.approx(even.makespan)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=50, deadline=None)
def test_small_cases_are_near_the_exact_solution(costs: list[int], ranks: int) -> None:
    best = least(costs, ranks)
    found = evenness(items(costs), spread(items(costs), ranks), ranks)
    assert lower_bound(costs, ranks) <= best
    assert best <= found.makespan <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


def test_most_small_cases_are_solved_exactly() -> None:
    rng = np.random.default_rng(0)
    cases = [([int(n) for n in rng.integers(1, 100, 8)], int(rng.integers(2, 4))) for _ in range(20)]
    ratios = []
    for costs, ranks in cases:
        ratios.append(evenness(items(costs), spread(items(costs), ranks), ranks).makespan / least(costs, ranks))
    assert max(ratios) <= 1.1
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 12


def test_where_room_is_short_sizes_decide() -> None:
    """Costs ask for 4 + 1 and 3 + 2 tokens against 5 a micro-batch; heaviest first alone would find no room."""
    sizes = [2, 2, 3, 3]
    packs = [Item(cost=1.0 + i, tokens=size) for i, size in enumerate(reversed(sizes))]
    assert sorted(spread(packs, 2, caps=Caps(tokens=5)).ranks) == [0, 0, 1, 1]
    tight = [Item(cost=cost, tokens=size) for cost, size in ((9.0, 2), (8.0, 2), (7.0, 2), (1.0, 3), (1.0, 3))]
    found = spread(tight, 2, caps=Caps(tokens=6))
    held = [sum(tight[i].tokens for i in own) for own in groups(found, 2)]
    assert sorted(held) == [6, 6]


@pytest.mark.parametrize(
    ("packs", "caps", "said"),
    [
        ([Item(cost=1.0, tokens=9)], Caps(tokens=8), "item 0, .* is over .* alone; raise the cap"),
        ([Item(cost=1.0, memory=9)] * 3, Caps(memory=10), "found no room for item 2, .* take more micro-batches"),
        ([Item(cost=1.0)] * 3, Caps(items=1), "found no room for item 2"),
    ],
)
def test_what_has_no_place_is_refused_with_the_cure(packs: list[Item], caps: Caps, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spread(packs, 2, caps=caps)


def test_nothing_to_spread_is_no_load() -> None:
    assert evenness([], spread([], 2), 2).makespan == 0.0


def test_what_is_dealt_in_turn_is_what_the_loader_deals() -> None:
    assert in_turn(6, 2, 3) == Spread(ranks=(0, 1, 0, 1, 0, 1), micro=(0, 0, 1, 1, 2, 2))
    for count in (1, 11, 12):
        where = in_turn(count, 2, 3)
        held = [turns(count, Share(micro_batch=-(-count // 6), dp=2, dp_rank=rank)) for rank in range(2)]
        assert [where.ranks[i] for own in held for group in own for i in group] == [
            rank for rank, own in enumerate(held) for group in own for _ in group
        ]
        assert all(where.micro[i] == at for own in held for at, group in enumerate(own) for i in group)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=5), st.integers(1, 70))
def test_pairs_are_those_of_the_mask(lengths: list[int], window: int) -> None:
    at = [np.subtract.outer(np.arange(n), np.arange(n)) for n in lengths]
    assert pairs(lengths) == sum(int((d >= 0).sum()) for d in at)
    assert pairs(lengths, window) == sum(int(((d >= 0) & (d < window)).sum()) for d in at)


@pytest.mark.parametrize("cfg", [DENSE, attrs.evolve(DENSE, experts=SOFTMAX)])
def test_the_work_of_one_document_is_the_operations_of_the_decoder(cfg: Any) -> None:
    work = pack_work(cfg, [48])
    assert math.isclose(work["matrices"] + work["experts"] + work["causal"], decoder_flops(cfg, 1, 48), rel_tol=1e-12)
    assert bool(work["experts"]) == (cfg is not DENSE)


def test_a_window_and_short_documents_make_attention_cheaper() -> None:
    assert isinstance(DENSE.attention, Attention)
    windowed = attrs.evolve(DENSE, attention=attrs.evolve(DENSE.attention, window=8, window_layers=(0,)))
    whole, cut, halves = pack_work(DENSE, [64]), pack_work(windowed, [64]), pack_work(DENSE, [32, 32])
    assert cut["causal"] == pytest.approx(whole["causal"] * (DENSE.layers - 1) / DENSE.layers)
    assert cut["window"] == pytest.approx(whole["causal"] / DENSE.layers * pairs([64], 8) / pairs([64]))
    assert halves["matrices"] == whole["matrices"]
    assert halves["causal"] < whole["causal"] / 1.9


def test_an_image_takes_what_its_tower_does() -> None:
    cfg, image = MODELS["windows"], Media(grids=((1, 4, 6),))
    work = media_work(cfg, image)
    assert seconds(even_rates(), work) == pytest.approx(media_flops(cfg, image) / 1e12)
    assert work["patches"] == 24


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_fit_finds_the_rates_of_measured_steps(ranks: int) -> None:
    true = Rates(calls=3e-3, matrices=1e-12, experts=4e-12, causal=6e-12)
    cfgs, rng = [attrs.evolve(DENSE, experts=attrs.evolve(SOFTMAX, top_k=1)), DENSE], np.random.default_rng(1)
    work = [
        [pack_work(cfgs[n % 2], rng.integers(100, 4000, rng.integers(1, 8)).tolist()) for _ in range(ranks)]
        for n in range(60)
    ]
    times = np.array([max(seconds(true, one) for one in step) for step in work])
    found = fit(work, times.tolist())
    for name, value in attrs.asdict(true).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-4), name
    noisy = fit(work, (times * rng.normal(1.0, 0.02, len(times))).tolist())
    predicted = np.array([max(seconds(noisy, one) for one in step) for step in work])
    assert np.abs(predicted / times - 1).mean() < 0.02


def test_a_rate_is_never_negative() -> None:
    work = [[{"calls": 1.0, "matrices": float(n)}] for n in range(8)]
    found = fit(work, [10.0 - n for n in range(8)])
    assert found == Rates(calls=found.calls)
    assert found.calls == pytest.approx(6.5)


def test_kinds_that_grow_together_share_a_rate() -> None:
    work = [[{"calls": 1.0, "matrices": 8.0 * n, "experts": 2.0 * n, "causal": float(n * n)}] for n in range(1, 9)]
    found = fit(work, [0.5 + 3.0 * n + 0.25 * n * n for n in range(1, 9)])
    near = {"calls": 0.5, "matrices": 0.3, "experts": 0.3, "causal": 0.25}
    assert {name: getattr(found, name) for name in near} == pytest.approx(near)


def test_measurements_that_say_too_little_are_refused_with_the_cure() -> None:
    work = [[{"matrices": float(n), "experts": float(n % 3), "causal": float(n + n % 3)}] for n in range(8)]
    with pytest.raises(ValueError, match="causal, experts, matrices apart; measure rows of more different lengths"):
        fit(work, [float(n) for n in range(8)])
    with pytest.raises(ValueError, match=r"2 times for 8 steps of \[1\] ranks; give a time for each step"):
        fit(work, [1.0, 2.0])


def test_rates_are_those_of_the_times_of_a_run_s_own_rows() -> None:
    """A clock that a step turns on by what its rows take, of one to three micro-batches."""
    true, now, sizes = Rates(steps=0.5, calls=1e-3, matrices=2e-9, causal=5e-9), [0.0], []
    rows = ragged(DENSE, 30, 24, 1)

    def step(state: None, batches: list[Any]) -> tuple[None, None]:
        sizes.append(len(batches))
        for batch in batches:
            at = iter(batch["lengths"])
            for _ in batch["ids"]:
                row = [next(at)]
                while sum(row) < 24:
                    row.append(next(at))
                now[0] += seconds(true, pack_work(DENSE, row))
        now[0] += true.steps
        return None, None

    job: Any = SimpleNamespace(
        run=run_of(DENSE, parallel=lf.MegatronParallel(micro_batch=2)),
        model=DENSE,
        rows=Listed(rows),
        layout=Layout(),
        device=cpu,
        engine=SimpleNamespace(state=None, step=step),
    )
    work, times = timed(job, 12, clock=lambda: now[0])
    assert sizes == [1, 2, 3] * 5
    found = fit([[one] for one in work], times)
    assert explained(found, work, times) < 1e-6
    assert found.causal == pytest.approx(true.causal, rel=1e-6)
    assert found.steps == pytest.approx(true.steps, rel=1e-6)


@pytest.mark.parametrize("trace", TRACES)
def test_skewed_traces_come_within_a_few_per_cent_of_the_bound(trace: str) -> None:
    for row in compared(BalanceBench(ranks=4, micro=4, rows=3), trace):
        assert 1 - 1e-9 <= row.ours <= 1.03
        assert row.ours <= min(row.greedy, row.turns) + 1e-9


def test_the_greedy_keeps_the_length_of_ranks_in_bounds_where_it_can() -> None:
    packs = items([9, 8, 7, 1, 1, 1])
    found = greedy(packs, 2, 1, [[0, 1, 2, 3, 4, 5]], ratio=1.2)
    assert max(sum(packs[i].tokens for i in own) for own in groups(found, 2)) <= 1.2 * 27 / 2


def test_the_benchmark_prints_a_line_for_each_trace(capsys: pytest.CaptureFixture[str]) -> None:
    args = BalanceBench(ranks=2, micro=2, rows=2, steps=2)
    show_balance(args, False)
    _, head, _, *lines = capsys.readouterr().out.splitlines()
    assert "2 ranks, 2 micro-batches of 2 samples" in head
    assert [line[:18].strip() for line in lines] == list(TRACES)
    show_balance(args, True)
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["trace"] for line in found] == list(TRACES)
    assert all(turns >= ours >= 1 - 1e-9 for turns, _, ours in (line["over_bound"] for line in found))
