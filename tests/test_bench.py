"""The benchmark at sizes of no meaning: both sides compute the same, and the report holds together."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

import lf
from lf.data.loader import read_rows
from lf.devices.cpu import cpu
from lf.models.embodied.pi05 import pi05_tiny
from lf.models.media import media_flops
from lf.models.spec import IGNORE, fake_batch
from lf.plan.work import Rates
from lf.train.parity import difference
from scripts.benchmarks import diffusion, layouts, loader, megatron, peers, pi05, ratios, vlm
from scripts.benchmarks.pi05_plain import PlainPi05
from tests.workers import Workers

ROOT = Path(__file__).parents[1]
TINY = peers.Peers(lengths=(16, 24), tokens=48, hidden=24, layers=2, vocab=61, pairs=3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_both_sides_train_alike(one_process: None, tmp_path: Path, family: ratios.Family) -> None:
    model = ratios.peer_model(family, TINY)
    run = lf.Run(model=model, data=lf.TextData(paths=("unused",)), optim=lf.AdamW(lr=1e-2, eps=1e-3, clip=0.5))
    ours, theirs = peers.megatron_side(run, tmp_path), peers.transformers_side(run, tmp_path)
    losses = []
    for _ in range(4):
        (loss, norm), (their_loss, their_norm) = (step(fake_batch(model, 2, 24, seed=3)) for step in (ours, theirs))
        assert loss == pytest.approx(their_loss, rel=1e-5)
        assert norm == pytest.approx(their_norm, rel=1e-4)
        losses.append(loss)
    assert losses[-1] < losses[0]


def test_every_case_gets_a_ratio(one_process: None) -> None:
    found = list(peers.compare_peers(TINY))
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


@pytest.mark.full
def test_context_parallel_diffusion_is_compared_with_one_process() -> None:
    sizes = "--layers 2 --heads 2 --size 3 4 4 --text 6 --pairs 1 --threads 2"
    ran = run_script("diffusion", "--json", *sizes.split())
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()][-4:]
    assert [line["model"] for line in lines] == [
        f"{kind} cp2 {how}" for kind in ("wan", "qwen_image") for how in ("gather", "ulysses")
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


def test_the_plain_pi05_computes_what_openpi_recorded() -> None:
    golden = ROOT / "tests/golden/pi05"
    given, told, stored = (load_file(golden / f"{name}.safetensors") for name in ("inputs", "outputs", "weights"))
    model = PlainPi05(pi05_tiny)
    params = dict(model.named_parameters())
    model.load_state_dict({name: stored[name] for name in params})
    batch = {
        "images": torch.stack([given["image.0"], given["image.1"]], 1),
        "cameras": torch.stack([given["image_mask.0"], given["image_mask.1"]], 1),
        "prompt": given["tokens"],
        "words": given["token_mask"],
    }
    velocity = model(batch, told["x_t"], given["time"])
    (told["u_t"] - velocity).square().mean().backward()
    made = {"v_t": velocity.detach(), "sampled_actions": model.sample(batch, given["sample_noise"])}
    grads = {name: param.grad for name, param in params.items() if param.grad is not None}
    made |= {f"grad.{name}": grad for name, grad in grads.items()}
    made |= {f"gradnorm.{name}": grad.norm() for name, grad in grads.items()}
    wanted = {name for name in told if name.startswith("grad")} | {"v_t", "sampled_actions"}
    assert len(wanted) > 90
    off = {name: difference(made.get(name), told[name]) for name in sorted(wanted)}
    assert all(value is not None and value <= 2e-5 for value in off.values()), off


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pi05_trains_and_samples_alike_on_both_sides(one_process: None, dtype: str) -> None:
    cfg = attrs.evolve(pi05_tiny, counted="openpi", cameras=("a", "b", "c"))
    args = pi05.Pi05Bench(dtype=dtype, rows=2)
    run = attrs.evolve(pi05.bench_run(args, cfg), optim=lf.AdamW(lr=1e-2, eps=1e-3, clip=0.5))
    first = pi05.first_weights(cfg)
    near = 1e-5 if dtype == "float32" else 2e-2
    ours, module = pi05.lf_model(run, cfg, cpu, first)
    theirs, plain = pi05.plain_model(run, cfg, cpu, first)
    samples = pi05.samplers(cfg, module, plain, cpu)
    losses = []
    for kind in ("full", "robot"):
        batch, *_ = pi05.batches(cfg, kind, 2, 1)
        assert batch["lf"]["images"].shape[1] == (3 if kind == "full" else 2)
        for a, b in zip(*(sample(batch) for sample in samples), strict=True):
            assert a == pytest.approx(b, rel=10 * near)
        for _ in range(3):
            (loss, norm), (their_loss, their_norm) = ours(batch), theirs(batch)
            assert loss == pytest.approx(their_loss, rel=near)
            assert norm == pytest.approx(their_norm, rel=10 * near)
            losses.append(loss)
    assert losses[2] < losses[0]


def test_the_loader_reads_what_a_plain_loop_reads(tmp_path: Path) -> None:
    args = loader.LoaderBench(size=(32, 48), episodes=2, length=12, rows=4, pairs=2)
    rows = loader.open_rows(loader.make_dataset(tmp_path / "toy", args, 6), tmp_path / "cache")
    plain = loader.plain_frames(rows, range(len(rows)), {})
    ours = [row["images"][key] for row in read_rows(rows, range(len(rows))) for key in loader.CAMERAS]
    assert len(plain) == 48
    assert all((a.transpose(1, 2, 0) == b).all() for a, b in zip(ours, plain, strict=True))
    assert len({frame.tobytes() for frame in plain}) == 48
    for part in loader.waits(rows, 4, 3):
        assert 0.0 <= part < 1.0


def test_each_distance_of_key_frames_gets_a_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = loader.LoaderBench(size=(32, 48), episodes=2, length=12, rows=4, pairs=2, json=True)
    assert loader.compare_loader(args) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["model"] for line in lines] == ["gap 2", "gap 30"]
    assert all(min(line["ours"], line["peer"], line["low"]) > 0 and line["rows"] == 4 for line in lines)


def test_each_case_of_pi05_gets_a_ratio(
    one_process: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(pi05.SIZES, "small", attrs.evolve(pi05_tiny, cameras=("a", "b", "c"), prompt=24))
    monkeypatch.setattr(pi05, "process_group", lambda device: contextlib.nullcontext())
    assert pi05.compare_pi05(pi05.Pi05Bench(pairs=2, json=True)) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    cases = [("sample full", 1), ("train full", 2), ("sample robot", 1), ("train robot", 2)]
    assert [(line["model"], line["rows"]) for line in lines] == cases
    monkeypatch.setattr(pi05.PlainPi05, "sample", lambda self, batch, noise: noise)
    assert pi05.compare_pi05(pi05.Pi05Bench(pairs=2)) == 1
    assert "sample full: loss" in capsys.readouterr().err


def test_diffusers_trains_alike_and_packing_leaves_out_the_padding(one_process: None) -> None:
    args = diffusion.DiffusionBench(layers=2, heads=1, size=(3, 4, 4), text=6, pairs=1)
    found = list(diffusion.compare(args))
    assert [r.model for r, _ in found] == [f"{kind} {case}" for kind in args.kinds for case in ("diffusers", "padded")]
    for r, _ in found:
        assert 0 < r.low <= r.ratio <= r.high
    # Sizes of 48, 24, 24 and 8 tokens in four rows of 48; a picture has one frame, and the last 24.
    assert [round(padding, 3) for _, padding in found] == [0.0, round(1 - 104 / 192, 3), 0.0, round(1 - 120 / 192, 3)]
    # And it goes on alike: the second step sees weights that both have updated.
    cfg = diffusion.model_of("wan", args)
    first, run = diffusion.first_weights(cfg), diffusion.bench_run(cfg, 2)
    rows = diffusion.rows_of(cfg, [(3, 4, 4)] * 2, 0)
    batch = diffusion.spec.collate(cfg, rows, rows[0])
    ours, theirs = diffusion.lf_side(run, cfg, first), diffusion.diffusers_side(run, cfg, first)
    for _ in range(3):
        (loss, norm), (other, their_norm) = ours(batch), theirs(batch)
        assert loss == pytest.approx(other, rel=1e-5)
        assert norm == pytest.approx(their_norm, rel=1e-3)


SMALL = vlm.VlmBench(length=128, rows=2, hidden=48, layers=2, vocab=101, pairs=1, micro=2, steps=1, wall=1)
COSTS = vlm.Costs(packs=Rates(matrices=1e-10, causal=1e-10), images=Rates(towers=1e-10), forward=(0.25, 0.5))


def test_a_qwen2_5_vl_trains_as_transformers_does(one_process: None) -> None:
    cfg = vlm.model_of(SMALL)
    run = attrs.evolve(
        vlm.run_of(cfg, 2, lf.MegatronParallel(micro_batch=2)), optim=lf.AdamW(lr=1e-2, eps=1e-3, clip=0.5)
    )
    ours, theirs = peers.both_sides(run)
    samples = [vlm.Sample(sides=(10, 4), tokens=128), vlm.Sample(sides=(18,), tokens=128)]
    batch = vlm.batch_of(cfg, [[sample] for sample in samples], 128, 0)
    losses = []
    for _ in range(3):
        (loss, norm), (their_loss, their_norm) = ours(batch), theirs(batch)
        assert loss == pytest.approx(their_loss, rel=1e-5)
        assert norm == pytest.approx(their_norm, rel=1e-4)
        losses.append(loss)
    assert losses[-1] < losses[0]
    found = vlm.beside_transformers(SMALL)
    assert 0 < found.low <= found.ratio <= found.high


def test_packs_fill_rows_and_images_fit_them() -> None:
    cfg = vlm.model_of(SMALL)
    for number, pack in enumerate(vlm.packs_of(128, 6, 0)):
        row = vlm.row_of(cfg, pack, 128, number)
        assert sum(row["lengths"]) == 128
        assert (row["tokens"] == cfg.image_token).sum() * 4 == sum(media.patches for media in row["media"])
        # The label of a token is the next one of its own document, and no image is learnt.
        ends = set(np.cumsum(row["lengths"]) - 1)
        for at in np.flatnonzero(row["labels"] != IGNORE).tolist():
            assert at not in ends
            assert row["labels"][at] == row["tokens"][at + 1] != cfg.image_token


def test_a_replay_is_what_is_worked_out_by_hand() -> None:
    """Two stages and two micro-batches of packs of 4 s; a quarter of packs and a half of images is forward."""
    decode, encode = [[4.0, 4.0]], [[[2.0, 2.0], [0.0]]]
    # The second stage begins at 0.5 + 2, goes forward and backward once and ends at 4.5; the first goes backward for
    # 1.5 + 2 until 8, and once more.
    first = vlm.replayed(decode, encode, COSTS, "first stage", 2)
    assert first.seconds == 9.5
    assert first.bubble == first.idle == pytest.approx(1 - 6.0 / 9.5)
    # Apart each rank has an image, of 2 s, and the second stage is always busy between 0.5 and 4.5.
    assert vlm.replayed(decode, encode, COSTS, "apart", 2).seconds == 2.0 + 4.5 + 1.5
    # Even stages of 6 s leave the first one with a quarter of the layers; the second one is busy from 2.25 to 8.25.
    assert vlm.replayed(decode, encode, COSTS, "evened", 2).seconds == pytest.approx(8.25 + 0.75)
    alone = vlm.replayed(decode * 2, encode * 2, COSTS, "first stage", 1)
    assert (alone.seconds, alone.bubble, alone.idle) == (12.0, 0.0, 0.0)


def test_even_packs_and_images_apart_leave_ranks_less_idle() -> None:
    found = vlm.replay_steps(attrs.evolve(SMALL, replicas=4, stages=2, micro=6, steps=2, length=512), COSTS)
    assert list(found) == list(vlm.CASES)
    for where in vlm.WHERE:
        assert found[where, True].seconds <= found[where, False].seconds
    assert found["apart", True].seconds < found["evened", True].seconds < found["first stage", True].seconds
    assert all(step.bubble <= step.idle + 1e-9 for step in found.values())


def test_costs_are_fitted_to_what_calls_take(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call takes as many seconds as it has operations, they are what the config says."""

    def counted(call: Callable[[], torch.Tensor]) -> tuple[float, float]:
        with FlopCounterMode(display=False) as forward:
            loss = call()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
        return forward.get_total_flops(), backward.get_total_flops()

    monkeypatch.setattr(vlm, "_timed", counted)
    cfg, costs = vlm.model_of(SMALL), vlm.measured(SMALL)
    assert costs.packs.matrices == pytest.approx(1.0)
    assert costs.forward[0] == pytest.approx(1 / 3)
    # Attention is not counted on a CPU.
    sample = vlm.Sample(sides=(4, 14), tokens=128)
    for found, media in zip(vlm.image_costs(costs, cfg, [sample]), sample.media, strict=True):
        assert 0.6 < found / media_flops(cfg, media) < 1.0
