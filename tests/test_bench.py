"""The benchmark at sizes of no meaning: both sides compute the same, and the report holds together."""

import json
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import torch.distributed as dist

import lf
from lf.models.spec import fake_batch
from scripts import bench
from scripts.benchmarks import layouts, megatron, ratios
from tests.workers import Workers

ROOT = Path(__file__).parents[1]
TINY = bench.Peers(lengths=(16, 24), tokens=48, hidden=24, layers=2, vocab=61, pairs=3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_both_sides_train_alike(one_process: None, tmp_path: Path, family: ratios.Family) -> None:
    model = ratios.peer_model(family, TINY)
    run = lf.Run(model=model, data=lf.TextData(paths=("unused",)), optim=lf.AdamW(lr=1e-2, eps=1e-3, clip=0.5))
    ours, theirs = bench.megatron_side(run, tmp_path), bench.transformers_side(run, tmp_path)
    losses = []
    for _ in range(4):
        (loss, norm), (their_loss, their_norm) = (step(fake_batch(model, 2, 24, seed=3)) for step in (ours, theirs))
        assert loss == pytest.approx(their_loss, rel=1e-5)
        assert norm == pytest.approx(their_norm, rel=1e-4)
        losses.append(loss)
    assert losses[-1] < losses[0]


def test_every_case_gets_a_ratio(one_process: None) -> None:
    found = list(bench.compare_peers(TINY))
    assert [(r.model, r.length, r.rows) for r in found] == [
        ("llama", 16, 3),
        ("llama", 24, 2),
        ("qwen3", 16, 3),
        ("qwen3", 24, 2),
    ]
    for r in found:
        assert 0 < r.low <= r.ratio <= r.high
        assert min(r.ours, r.peer, r.cpu_ratio) > 0


def test_ratios_are_medians_of_pairs() -> None:
    pairs = [((2.0, 1.0), (1.0, 3.0)), ((1.0, 1.0), (3.0, 1.0)), ((4.0, 1.0), (6.0, 2.0))]
    found = ratios.summarise(pairs, "llama", 10, 2)
    assert attrs.astuple(found) == ("llama", 10, 2, 10.0, 20 / 3, 1.5, 0.5, 3.0, 2.0)


@pytest.mark.parametrize(("ours", "said"), [((2.0001, 1.0), "loss 2.0001"), ((2.0, float("nan")), "gradient norm nan")])
def test_sides_that_disagree_are_not_timed(ours: tuple[float, float], said: str) -> None:
    steps = []

    def side(answer: tuple[float, float]) -> ratios.Step:
        return lambda batch: (steps.append(batch), answer)[1]

    with pytest.raises(ratios.DisagreementError, match=said):
        ratios.measure(side(ours), side((2.0, 1.0)), [{}, {}], "tiny")
    assert len(steps) == 2


def test_the_two_sides_take_turns() -> None:
    turns: list[str] = []
    sides = [lambda batch, name=name: (turns.append(name), (1.0, 1.0))[1] for name in "AB"]
    assert len(ratios.measure(*sides, [{}, {}, {}], "tiny")) == 2
    assert turns == list("ABABAB")


def run_script(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/bench.py", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("command", "world"),
    [
        (("peers",), 1),
        pytest.param(("megatron", "--processes", "2", "--layouts"), 2, marks=pytest.mark.full),
    ],
)
def test_the_script_prints_a_json_line_a_case(command: tuple[str, ...], world: int) -> None:
    sizes = "--hidden 24 --layers 1 --vocab 61 --tokens 32 --lengths 16 32 --families qwen3 --pairs 2 --threads 1"
    ran = run_script(*command, *sizes.split(), "--json")
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(line["model"], line["length"], line["rows"]) for line in lines] == [
        ("qwen3", 16, 2 * world),
        ("qwen3", 32, world),
    ]
    assert {field.name for field in attrs.fields(ratios.Ratio)} == lines[0].keys()


@pytest.mark.full
def test_the_script_prints_what_each_layout_costs() -> None:
    sizes = "--hidden 24 --layers 2 --vocab 61 --tokens 64 --lengths 16 --pairs 2 --threads 2"
    ran = run_script("megatron", "--processes", "--json", *sizes.split())
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(line["model"], line["length"], line["rows"]) for line in lines] == [
        (name, 16, 4) for name in layouts.LAYOUTS
    ]
    assert all(0 < line["low"] <= line["ratio"] <= line["high"] for line in lines)


def first_step(layout: layouts.Layout, alone: bool) -> tuple[float, float, float]:
    run = layouts.run_of(layout, TINY, 4)
    micro = layouts.micro_batches(run, 16, seed=1)
    assert len(micro) == {"dp2": 2, "ep2": 2, "pp2": 4}.get(layout, 1)
    if alone:
        run = attrs.evolve(run, parallel=lf.MegatronParallel(micro_batch=run.parallel.micro_batch))
    return layouts.Trainer(run).step(micro)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_a_layout_is_compared_with_the_same_step(workers: Workers, layout: layouts.Layout) -> None:
    ((loss, norm, _),) = workers.run(1, first_step, layout, True)
    for found in workers.run(2, first_step, layout, False):
        ratios.check_same(found[:2], (loss, norm), layout)
        assert found[2] > 0


def test_an_unknown_command_is_bad_usage() -> None:
    ran = run_script("nobody")
    assert ran.returncode == 2
    assert "peers" in ran.stderr


def alike(family: ratios.Family) -> list[tuple[float, float, float, float]]:
    """Trains both sides on the rows of this rank; returns loss and norm of lf and of its peer by step."""
    world, rank = dist.get_world_size(), dist.get_rank()
    model = ratios.peer_model(family, TINY)
    run = lf.Run(
        model=model,
        data=lf.TextData(paths=("unused",)),
        batch=2 * world,
        optim=lf.AdamW(lr=1e-2, eps=1e-3, clip=0.5),
        parallel=lf.MegatronParallel(micro_batch=2),
    )
    ours, engine, ctx = megatron.lf_side(run)
    theirs = megatron.plain_side(run, engine, ctx)
    batch = fake_batch(model, 2, 24, seed=rank)
    return [(*ours(batch), *theirs(batch)) for _ in range(4)]


@pytest.mark.parametrize(("family", "world"), [("llama", 1), ("qwen3", 2)])
def test_megatrons_own_modules_train_alike(workers: Workers, family: ratios.Family, world: int) -> None:
    for steps in workers.run(world, alike, family):
        for loss, norm, their_loss, their_norm in steps:
            assert loss == pytest.approx(their_loss, rel=1e-5)
            assert norm == pytest.approx(their_norm, rel=1e-4)
        assert steps[-1][0] < steps[0][0]
