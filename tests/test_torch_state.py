"""What the torch path saves under each strategy, where it comes back, the running average, units, and refusals."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import lf
from lf.devices.cpu import cpu
from lf.models import spec
from lf.models.layers.recompute import recompute
from lf.models.spec import Ctx, ShardSpec, fake_text_batch
from lf.models.toy import Toy, ToyModel
from lf.parallel import torch_units
from lf.parallel.config import resolve
from lf.parallel.torch_dp import share
from lf.parallel.torch_units import compile_units, units, wide_modules, wide_names
from lf.train import checkpoint
from lf.train.checkpoint import check_all_read, open_checkpoint, save
from lf.train.convert import export_folder
from lf.train.reader import Reader
from lf.train.run import check_run
from tests.cases import off, run_of
from tests.test_fsdp_step import GATE, MODELS, ODD, P, batches, engine_of, whole_pieces
from tests.test_pi05 import checkpoint as published
from tests.test_pi05 import small_run as robot_run
from tests.test_train import corpus, go, metrics, small_run, tensors  # noqa: F401
from tests.test_train_state import Average
from tests.workers import Workers

ADAM = lf.AdamW(lr=1e-3, eps=1e-3, ema=0.9)
PLACES: dict[str, tuple[int, lf.TorchParallel]] = {
    "ddp": (1, P()),
    "zero1": (2, P(strategy="zero1")),
    "fsdp": (2, P(strategy="fsdp")),
    "hsdp": (4, P(strategy="hsdp", replicas=2)),
    "fsdp on 4": (4, P(strategy="fsdp")),
}


def saved(folder: str, model: str, parallel: lf.TorchParallel, precision: lf.Precision) -> tuple[int, int, Any]:
    """Saves the state after a step; gives the elements that this rank saved, those of all, and the next weights."""
    engine, layout = engine_of(MODELS[model], parallel, optim=ADAM, precision=precision)
    micro = batches(MODELS[model], 1, layout)
    state, _ = engine.step(engine.state, micro)
    save(Path(folder), 1, engine.pieces(state), {}, comm=checkpoint.distributed())
    mine = sum(piece.data.numel() for piece in engine.pieces(state))
    total = sum(tensor.numel() for tensor in whole_pieces(engine, state).values())
    return mine, total, next_weights(engine, state, micro)


def next_weights(engine: Any, state: Any, micro: Any) -> dict[str, Tensor]:
    state, _ = engine.step(state, micro)
    return whole_pieces(engine, state)


def restored(
    folder: str, model: str, parallel: lf.TorchParallel, precision: lf.Precision
) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    """Restores; gives the elements that this rank read, all that it then holds, and what the next step makes of it."""
    engine, layout = engine_of(MODELS[model], parallel, optim=ADAM, precision=precision)
    read = 0
    inner = Reader.read

    def counted(self: Reader, name: str, at: Any = None, size: Any = None) -> Tensor:
        nonlocal read
        found = inner(self, name, at, size)
        read += found.numel()
        return found

    reader = open_checkpoint(Path(folder) / "checkpoints" / "step_1")
    Reader.read = counted  # type: ignore[method-assign]
    try:
        engine.restore(engine.state, reader)
    finally:
        Reader.read = inner  # type: ignore[method-assign]
    check_all_read(reader, comm=checkpoint.distributed())
    state = attrs.evolve(engine.state, step=1)
    held = whole_pieces(engine, state)
    return read, held, next_weights(engine, state, batches(MODELS[model], 1, layout))


MOVES = [
    *(("toy", a, b, "float32") for a, b in (("ddp", "fsdp"), ("fsdp", "zero1"), ("zero1", "hsdp"), ("hsdp", "ddp"))),
    *(("pi05", a, b, "bfloat16") for a, b in (("fsdp", "zero1"), ("zero1", "fsdp"))),
    *(("toy", a, a, "float32") for a in ("zero1", "fsdp")),
]
ALL_MOVES = [(m, a, b, p) for m in MODELS for a in PLACES for b in PLACES for p in ("float32", "bfloat16")]


@pytest.mark.parametrize(
    ("model", "origin", "target", "params"),
    [*MOVES, *(pytest.param(*move, marks=pytest.mark.full) for move in ALL_MOVES if move not in MOVES)],
)
def test_a_checkpoint_moves_between_strategies(
    workers: Workers, tmp_path: Path, model: str, origin: str, target: str, params: Any
) -> None:
    precision = lf.Precision(params=params)
    (world, parallel), (world_, parallel_) = PLACES[origin], PLACES[target]
    before = workers.run(world, saved, str(tmp_path), model, parallel, precision)
    total = before[0][1]
    if parallel.strategy in ("zero1", "fsdp"):
        # Each rank saves its own share.
        assert all(0.2 * total / world < mine < 2.0 * total / world for mine, _, _ in before)
    assert sum(mine for mine, _, _ in before) == total
    after = workers.run(world_, restored, str(tmp_path), model, parallel_, precision)
    reader = open_checkpoint(tmp_path / "checkpoints/step_1")
    for read, held, following in after:
        assert held.keys() == set(reader.names)
        assert all(torch.equal(tensor, reader.read(name)) for name, tensor in held.items())
        if parallel_.strategy == "fsdp":
            assert read < 0.8 * total
        for name, tensor in following.items():
            expected = before[0][2][name]
            if origin == target:
                assert torch.equal(tensor, expected), name
            elif params == "float32" and not name.startswith("exp_avg_sq/"):
                assert off(tensor, expected) <= GATE, name


WALK = [(1, P()), (2, P(strategy="fsdp")), (2, P(strategy="zero1")), (4, P(strategy="hsdp", replicas=2)), (2, P())]


def test_a_run_goes_on_under_any_other_strategy(workers: Workers, corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    base = small_run(corpus, "toy", steps=len(WALK), save=lf.Save(keep=9), optim=lf.AdamW(lr=1e-3, eps=1e-3, ema=0.5))
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    workers.run(1, go, base, whole, tmp_path)
    for step, (world, parallel) in enumerate(WALK, 1):
        run = attrs.evolve(base, parallel=attrs.evolve(parallel, micro_batch=1))
        workers.run(world, go, run, moved, tmp_path, step if step < len(WALK) else 0)
    for ours, reference in zip(metrics(moved), metrics(whole), strict=True):
        assert all(ours[key] == pytest.approx(reference[key], rel=1e-5) for key in ours), (ours, reference)
    for name, value in tensors(moved, len(WALK)).items():
        assert off(value, tensors(whole, len(WALK))[name]) <= 1e-5, name


@pytest.mark.parametrize("params", ["float32", "bfloat16"])
def test_a_cut_run_resumes_bit_for_bit(workers: Workers, corpus: Path, tmp_path: Path, params: Any) -> None:  # noqa: F811
    run = small_run(
        corpus,
        "toy",
        steps=4,
        parallel=P(strategy="fsdp", micro_batch=1),
        precision=lf.Precision(params=params),
        optim=lf.AdamW(lr=1e-2, ema=0.5),
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    workers.run(2, go, run, whole, tmp_path)
    workers.run(2, go, run, cut, tmp_path, 3)
    workers.run(2, go, run, cut, tmp_path)
    assert metrics(cut) == metrics(whole)
    reference = tensors(whole, 4)
    assert all(torch.equal(value, reference[name]) for name, value in tensors(cut, 4).items())


@pytest.mark.parametrize("mean", [True, False])
def test_exports_have_the_average_or_the_weights(
    workers: Workers,
    corpus: Path,  # noqa: F811
    tmp_path: Path,
    mean: bool,
) -> None:
    from safetensors.torch import load_file

    run = small_run(
        corpus,
        "toy",
        steps=2,
        parallel=P(strategy="zero1", micro_batch=1),
        optim=lf.AdamW(lr=1e-2, ema=0.5),
        save=lf.Save(averaged=mean),
    )
    workers.run(2, go, run, tmp_path / "run", tmp_path)
    state, exported = tensors(tmp_path / "run", 2), load_file(tmp_path / "run/hf/model.safetensors")
    for name, tensor in exported.items():
        assert torch.equal(tensor, state[f"{'ema' if mean else 'weight'}/{name}"]), name
        assert not torch.equal(tensor, state[f"{'weight' if mean else 'ema'}/{name}"]), name
    export_folder(tmp_path / "run", tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in again.items())


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_the_average_is_one_of_weights_and_held_out_losses_are_its_own(strategy: Any) -> None:
    engine, layout = engine_of(ODD, P(strategy=strategy), optim=lf.AdamW(lr=1e-2, ema=0.75))
    plain, _ = engine_of(ODD, P(strategy=strategy), optim=lf.AdamW(lr=1e-2))
    micro, state = batches(ODD, 8, layout), engine.state
    expected = whole(engine, state, "weight")
    for _ in range(3):
        state, _ = engine.step(state, micro)
        now = whole(engine, state, "weight")
        expected = {name: 0.75 * mean + 0.25 * now[name] for name, mean in expected.items()}
    found = whole(engine, state, "ema")
    assert found.keys() == expected.keys()
    assert all(torch.allclose(mean, expected[name], atol=1e-7) for name, mean in found.items())
    before = whole_pieces(engine, state)
    loss = engine.evaluate(state, [micro])["loss"]
    after = whole_pieces(engine, state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
    with torch.no_grad():
        for name, param in plain.state.chunks[0].named_parameters():
            share(param).local.copy_(found[name])
    assert loss == plain.evaluate(plain.state, [micro])["loss"]
    # The next step starts from the weights, not from the average.
    assert all(torch.equal(tensor, now[name]) for name, tensor in whole(engine, state, "weight").items())
    assert engine.step(state, micro)[1].loss != loss


def whole(engine: Any, state: Any, kind: str) -> dict[str, Tensor]:
    found = whole_pieces(engine, state).items()
    return {name.removeprefix(f"{kind}/"): tensor.clone() for name, tensor in found if name.startswith(f"{kind}/")}


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_an_evaluation_between_two_steps_changes_no_bit(strategy: Any) -> None:
    ends = []
    for evaluated in (False, True):
        engine, layout = engine_of(ODD, P(strategy=strategy), optim=lf.AdamW(lr=1e-2))
        micro, state = batches(ODD, 4, layout), engine.state
        for _ in range(3):
            state, _ = engine.step(state, micro)
            if evaluated:
                engine.evaluate(state, [micro])
        ends.append(whole_pieces(engine, state))
    assert all(torch.equal(tensor, ends[0][name]) for name, tensor in ends[1].items())


@pytest.mark.parametrize(("world", "parallel"), [(2, P(strategy="fsdp")), (2, P(strategy="zero1"))])
def test_published_weights_are_cut_as_they_are_read(
    workers: Workers, tmp_path: Path, world: int, parallel: lf.TorchParallel
) -> None:
    published(tmp_path / "start", "openpi")
    run = robot_run(init=str(tmp_path / "start"), eval=lf.Eval(), steps=1, optim=lf.Sgd(lr=1e-3), save=lf.Save())
    workers.run(1, go, run, tmp_path / "one", tmp_path)
    workers.run(world, go, attrs.evolve(run, parallel=parallel), tmp_path / "more", tmp_path)
    expected = tensors(tmp_path / "one", 1)
    for name, tensor in tensors(tmp_path / "more", 1).items():
        assert off(tensor, expected[name]) <= GATE, name


@pytest.mark.usefixtures("one_process")
def test_an_evaluation_that_fails_leaves_the_weights_alone() -> None:
    engine, layout = engine_of(ODD, P(), optim=ADAM)
    micro = batches(ODD, 8, layout)
    state, _ = engine.step(engine.state, micro)
    before = whole_pieces(engine, state)
    silent = {**micro[0], "labels": torch.full_like(micro[0]["labels"], spec.IGNORE)}
    with pytest.raises(ValueError, match="no position to score"):
        engine.evaluate(state, [[silent]])
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole_pieces(engine, state).items())


class Choosing(ToyModel):
    """A unit of which only some rows use the second half, and a unit that none uses."""

    def __init__(self, cfg: Toy) -> None:
        super().__init__(cfg)
        self.unused = nn.Linear(cfg.hidden, cfg.hidden)
        self.layers[1] = Half(cfg.hidden)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSH = self.embed(tokens_BS)
        x_BSH = self.layers[1](x_BSH + self.layers[0](x_BSH), bool((tokens_BS == 0).any()))
        return self.head(x_BSH)


class Half(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)
        self.two = nn.Linear(width, width)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.two(self.one(x)) if both else self.one(x)


@attrs.frozen(kw_only=True)
class Choice(Toy):
    """Its config."""


@spec.build_model.register
def _(cfg: Choice, ctx: Ctx) -> nn.Module:
    return Choosing(cfg)


@spec.weight_map.register
def _(cfg: Choice) -> Any:
    from lf.models.weights import Same, WeightMap

    return WeightMap(rules=tuple(Same(lf=name, hf=name) for name in spec.named_tensors(Choosing(cfg))))


@spec.shard_spec.register
def _(cfg: Choice) -> ShardSpec:
    return ShardSpec(fsdp_units=("layers.*", "unused"))


class Skipping(Choosing):
    """A layer that only some rows go through at all."""

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSH = self.embed(tokens_BS)
        x_BSH = x_BSH + self.layers[0](x_BSH)
        return self.head(self.unused(x_BSH) if bool((tokens_BS == 0).any()) else x_BSH)


@attrs.frozen(kw_only=True)
class Skip(Choice):
    """Its config."""


@spec.build_model.register
def _(cfg: Skip, ctx: Ctx) -> nn.Module:
    return Skipping(cfg)


@spec.shard_spec.register
def _(cfg: Skip) -> ShardSpec:
    return ShardSpec(fsdp_units=("layers.*",))


def choose(cfg: Toy, parallel: lf.TorchParallel) -> dict[str, Tensor]:
    """Trains on four micro-batches of which the first alone uses every parameter."""
    engine, layout = engine_of(cfg, parallel, optim=lf.AdamW(lr=1e-2, eps=1e-3))
    rows = []
    for i in range(4):
        batch = fake_text_batch(40, 1, 8, i)
        tokens = batch["tokens"].clamp(min=1)
        tokens[:, 0] = min(i, 1)
        rows.append({**batch, "tokens": tokens})
    state = engine.state
    for _ in range(2):
        state, _ = engine.step(state, rows[layout.dp_rank :: layout.dp])
    return whole_pieces(engine, state)


@pytest.mark.parametrize(
    "cfg", [Choice(vocab=40), Average(vocab=40), Skip(vocab=40)], ids=["unit", "root", "whole layer"]
)
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_parameters_without_a_gradient_hang_nothing(workers: Workers, cfg: Toy, strategy: Any) -> None:
    (alone,) = workers.run(1, choose, cfg, P())
    for found in workers.run(2, choose, cfg, P(strategy=strategy), timeout=60.0):
        assert found.keys() == alone.keys()
        for name, tensor in found.items():
            # Buffers count what the first rank has seen.
            if name not in ("weight/batches", "weight/mean"):
                assert off(tensor.float(), alone[name].float()) <= GATE, name


def few(folder: str) -> bool:
    """Returns whether zero1 works where a rank has nothing to train."""
    engine, layout = engine_of(Toy(vocab=40, layers=0), P(strategy="zero1"), optim=ADAM)
    state, _ = engine.step(engine.state, [fake_text_batch(40, 2, 8, layout.dp_rank)])
    save(Path(folder), 1, engine.pieces(state), {}, comm=checkpoint.distributed())
    engine.restore(state, open_checkpoint(Path(folder) / "checkpoints/step_1"))
    return bool(engine.state.average) == bool(list(engine.pieces(state)))


@pytest.mark.full
def test_a_rank_may_have_nothing_to_train(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(4, few, str(tmp_path)) == [True] * 4


MODEL = ToyModel(Toy(vocab=11, hidden=4))


def test_units_are_named_part_by_part() -> None:
    assert list(units(MODEL, Toy(), "fsdp_units", ("layers.*", "h*"))) == ["layers.0", "layers.1", "head"]
    assert list(units(MODEL, Toy(), "fsdp_units", ("*",))) == ["embed", "layers", "head"]


def test_a_pattern_that_names_nothing_is_an_error() -> None:
    for pattern in ("layers.*.mlp", "blocks.*"):
        with pytest.raises(ValueError, match=r"Toy: fsdp_units has '.*', which names nothing in the model; names"):
            units(MODEL, Toy(), "fsdp_units", (pattern,))
    with pytest.raises(ValueError, match=r"float32 has 'norm\.\*'"):
        wide_names(MODEL, Toy(), ShardSpec(float32=("norm.*",)))


def test_what_stays_float32_is_gathered_by_outermost_module() -> None:
    def found(*patterns: str) -> list[str]:
        return list(wide_modules(MODEL, Toy(), wide_names(MODEL, Toy(), ShardSpec(float32=patterns))))

    assert found("layers.*", "head.weight") == ["layers.0", "layers.1", "head"]
    with pytest.raises(ValueError, match=r"float32 names \['layers.0.bias'\], and their module holds others too"):
        found("layers.0.bias")


class Scaled(ToyModel):
    def __init__(self, cfg: Toy) -> None:
        super().__init__(cfg)
        self.scale = nn.Parameter(torch.ones(()))


@attrs.frozen(kw_only=True)
class Scale(Toy):
    """A family with a parameter that is a single number."""


@spec.build_model.register
def _(cfg: Scale, ctx: Ctx) -> nn.Module:
    return Scaled(cfg)


@spec.weight_map.register
def _(cfg: Scale) -> Any:
    from lf.models.weights import Same, WeightMap

    return WeightMap(rules=tuple(Same(lf=name, hf=name) for name in spec.named_tensors(Scaled(cfg))))


@pytest.mark.usefixtures("one_process")
def test_a_parameter_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cuts tensors along their first axis, and scale of .*Scale is a single"):
        engine_of(Scale(vocab=40), P(strategy="fsdp"))


@pytest.mark.usefixtures("one_process")
def test_a_torch_that_is_too_old_for_fsdp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params")
    with pytest.raises(ValueError, match=r"parallel.strategy = 'fsdp' needs torch 2.13 or newer, and this is"):
        engine_of(ODD, P(strategy="fsdp"))


@pytest.mark.parametrize(
    ("parallel", "world", "message"),
    [
        (P(replicas=2), 4, "parallel.replicas = 2 is for hsdp, and parallel.strategy = 'ddp'"),
        (P(strategy="hsdp"), 4, "parallel.replicas = 1 must be 2 or more"),
        (P(strategy="hsdp", replicas=3), 4, "parallel.replicas = 3 must be 2 or more and divide the world of 4"),
    ],
)
def test_replicas_are_checked(parallel: lf.TorchParallel, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(parallel, world)


def test_averages_are_refused_where_nothing_keeps_them() -> None:
    from tests.cases import DENSE

    with pytest.raises(ValueError, match=r"optim.ema = 0.9 is for the torch path"):
        check_run(run_of(DENSE, optim=lf.AdamW(ema=0.9)), DENSE, cpu, 1)


def counted(module: nn.Module) -> list[int]:
    """Counts the forwards of a module."""
    calls: list[int] = []
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any) -> Any:
        calls.append(1)
        return inner(*args)

    module.forward = forward
    return calls


def test_recompute_runs_a_unit_again_in_the_backward_only() -> None:
    layer, x = nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    calls = counted(layer)
    recompute(layer)
    with torch.no_grad():
        layer(x)
    assert len(calls) == 1
    layer(x).square().sum().backward()
    assert len(calls) == 3


def losses(parallel: lf.TorchParallel, say: Callable[[str], None]) -> list[float]:
    from lf.train.fsdp_step import torch_engine

    run = run_of(ODD, parallel=parallel)
    engine = torch_engine(run, ODD, Ctx(device=cpu), say=say)
    state, found = engine.state, []
    for _ in range(2):
        state, metrics = engine.step(state, batches(ODD, 8, spec.Layout()))
        found.append(metrics.loss)
    return found


@pytest.mark.usefixtures("one_process")
def test_compiled_units_give_the_same_losses_and_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    lines: list[str] = []
    for strategy in ("ddp", "fsdp"):
        expected = losses(P(), lines.append)
        assert losses(P(compile=True, recompute=True, strategy=strategy), lines.append) == pytest.approx(expected)
    assert len(graphs) > 2
    assert lines == []


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("where", ["everywhere", "on the model"])
def test_where_compile_fails_a_line_says_so_once(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    inner = torch.compile

    def compiler(function: Any) -> Any:
        if where == "on the model" and function is torch_units._probe:
            return function
        return inner(function, backend=broken)

    monkeypatch.setattr(torch, "compile", compiler)
    torch._dynamo.reset()
    lines: list[str] = []
    expected = losses(P(), lines.append)
    assert losses(P(compile=True), lines.append) == expected
    (line,) = lines
    assert line.startswith("parallel.compile: torch.compile fails on ")
    assert "no compiler here" in line
    assert line.endswith("which runs as it is")


def test_an_error_of_the_module_itself_is_not_taken_for_one_of_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    layer, lines = nn.Linear(4, 4), []
    compile_units([layer], "cpu", lines.append)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.ones(2, 3))
    assert lines == []


@pytest.mark.full
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("parallel", [P(compile=True), P(compile=True, strategy="fsdp", recompute=True)])
def test_the_real_compiler_gives_the_same_losses(parallel: lf.TorchParallel) -> None:
    lines: list[str] = []
    expected = losses(P(), lines.append)
    assert losses(parallel, lines.append) == pytest.approx(expected, rel=1e-5)
    assert lines == []
