"""What a checkpoint holds of a run's state, on both train paths: every tensor, and nothing that is not asked for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import lf
from lf.devices.cpu import cpu
from lf.models import spec
from lf.models.decoder import Mlp
from lf.models.llm.qwen import Qwen3
from lf.models.spec import Ctx, fake_text_batch, named_tensors
from lf.models.toy import Toy, ToyModel
from lf.models.weights import Same, WeightMap
from lf.train import checkpoint
from lf.train.checkpoint import CheckpointError, Piece, box_piece, check_all_read, open_checkpoint, open_latest, save
from lf.train.fsdp_step import torch_engine
from lf.train.start import from_checkpoint, load_model
from lf.train.state import Engine, TrainState
from tests.cases import DENSE, megatron, run_of
from tests.workers import Workers

SMALL = attrs.evolve(DENSE, vocab=40, hidden=32, layers=1, mlp=Mlp(width=32))


class Averaging(ToyModel):
    """Counts what it sees, and uses one layer for some rows alone."""

    def __init__(self, cfg: Toy) -> None:
        super().__init__(cfg)
        self.rare = nn.Linear(cfg.hidden, cfg.hidden)
        self.register_buffer("batches", torch.tensor(0))
        self.register_buffer("any", torch.tensor(False))
        self.register_buffer("mean", torch.zeros(2, cfg.hidden).t())
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSH = self.embed(tokens_BS)
        if self.training:
            self.batches += 1
            self.any |= True
            self.mean += x_BSH.detach().mean((0, 1))[:, None]
        if (tokens_BS == 0).any():
            x_BSH = x_BSH + self.rare(x_BSH)
        return self.head(x_BSH)


@attrs.frozen(kw_only=True)
class Average(Toy):
    """Its config."""


@attrs.frozen(kw_only=True)
class Forgetful(Average):
    """The same with a weight map that leaves a buffer out."""


@spec.build_model.register
def _(cfg: Average, ctx: Ctx) -> nn.Module:
    return Averaging(cfg)


@spec.weight_map.register
def _(cfg: Average) -> WeightMap:
    names = named_tensors(Averaging(cfg))
    return WeightMap(rules=tuple(Same(lf=name, hf=name) for name in names))


@spec.weight_map.register
def _(cfg: Forgetful) -> WeightMap:
    return WeightMap(
        rules=(
            *(Same(lf=name, hf=name) for name in named_tensors(Averaging(cfg)) if name != "mean"),
            Same(lf="gone", hf="gone"),
        )
    )


@attrs.frozen(kw_only=True)
class Buffered(Qwen3):
    """A decoder with buffers of its own."""


@spec.build_model.register
def _(cfg: Buffered, ctx: Ctx) -> nn.Module:
    model = spec.build_model.dispatch(Qwen3)(cfg, ctx)
    model.register_buffer("batches", torch.tensor(3))
    model.decoder.layers[0].register_buffer("mean", torch.arange(4.0))
    return model


@spec.weight_map.register
def _(cfg: Buffered) -> WeightMap:
    table = spec.weight_map.dispatch(Qwen3)(cfg)
    names = ("batches", "decoder.layers.0.mean")
    return attrs.evolve(table, rules=(*table.rules, *(Same(lf=name, hf=name) for name in names)))


def toy_engine(cfg: Toy, **changes: Any) -> Engine:
    return torch_engine(run_of(cfg, parallel=lf.TorchParallel()), cfg, Ctx(device=cpu), **changes)


def tensors(engine: Engine, state: TrainState) -> dict[tuple[str, tuple[int, ...], int], Tensor]:
    return {(piece.name, piece.at, piece.start): piece.data.clone() for piece in engine.pieces(state)}


def stepped(engine: Engine, vocab: int) -> TrainState:
    return engine.step(engine.state, [fake_text_batch(vocab, 2, 8, 0)])[0]


@pytest.fixture(scope="module", params=["torch", "megatron"])
def path(request: pytest.FixtureRequest, one_process: None) -> tuple[Engine, list[Piece]]:
    """Gives an engine of each path and its pieces after a step."""
    engine = toy_engine(Toy(vocab=40)) if request.param == "torch" else megatron(run_of(SMALL))[0]
    pieces = [attrs.evolve(piece, data=piece.data.clone()) for piece in engine.pieces(stepped(engine, 40))]
    return engine, pieces


def kind_of(piece: Piece) -> str:
    return piece.name.split("/")[0]


def without(*kinds: str) -> Callable[[list[Piece]], list[Piece]]:
    return lambda pieces: [piece for piece in pieces if kind_of(piece) not in kinds]


def first(kind: str, *instead: Callable[[Piece], Tensor]) -> Callable[[list[Piece]], list[Piece]]:
    """Gives a change that takes the first piece of a kind away, or puts a whole tensor in its place."""

    def change(pieces: list[Piece]) -> list[Piece]:
        one = next(piece for piece in pieces if kind_of(piece) == kind)
        rest = [piece for piece in pieces if piece.name != one.name]
        return rest + [box_piece(one.name, make(one)) for make in instead]

    return change


FAULTS: dict[str, tuple[Callable[[list[Piece]], list[Piece]], str]] = {
    "no moments": (
        without("exp_avg", "exp_avg_sq", "step"),
        r"exp_avg/\S+ is missing in the checkpoint and float32 \[",
    ),
    "one kind": (without("exp_avg_sq"), r"exp_avg_sq/\S+ is missing in the checkpoint and float32 \["),
    "one moment": (first("exp_avg"), r"exp_avg/\S+ is missing in the checkpoint and float32 \["),
    "a weight": (first("weight"), r"weight/\S+ is missing in the checkpoint"),
    "a short moment": (
        first("exp_avg", lambda piece: torch.zeros(2)),
        r"exp_avg/\S+ is float32 \[2\] in the checkpoint and float32 \[\d+, \d+\] in this run",
    ),
    "a wide moment": (
        first("exp_avg", lambda piece: torch.zeros(piece.shape, dtype=torch.float64)),
        r"exp_avg/\S+ is float64 .* in the checkpoint and float32",
    ),
    "a counter with a shape": (
        first("step", lambda piece: torch.zeros(1)),
        r"step/\S+ is float32 \[1\] in the checkpoint and float32 \[\] in this run",
    ),
    "an unknown kind": (
        lambda pieces: [*pieces, box_piece(pieces[0].name.replace("weight", "velocity"), torch.zeros(2))],
        r"velocity/\S+ is float32 \[2\] in the checkpoint and missing in this run",
    ),
    "an unknown name": (lambda pieces: [*pieces, box_piece("stray", torch.zeros(2))], "stray is float32"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_checkpoint_with_other_state_is_refused(path: tuple[Engine, list[Piece]], tmp_path: Path, case: str) -> None:
    engine, pieces = path
    change, message = FAULTS[case]
    folder = save(tmp_path, 1, change(pieces), {})
    with pytest.raises(CheckpointError, match=message) as caught:
        engine.restore(engine.state, open_checkpoint(folder))
    assert f"{folder} is not the state of this run at step 1" in str(caught.value)


def test_what_was_saved_is_read_back_whole(path: tuple[Engine, list[Piece]], tmp_path: Path) -> None:
    engine, pieces = path
    stepped(engine, 40)
    reader = open_checkpoint(save(tmp_path, 1, pieces, {}))
    engine.restore(engine.state, reader)
    check_all_read(reader)
    back = tensors(engine, engine.state)
    assert len(back) == len(pieces)
    assert all(torch.equal(back[piece.name, piece.at, piece.start], piece.data) for piece in pieces)


@pytest.mark.parametrize("kind", ["torch", "megatron"])
@pytest.mark.usefixtures("one_process")
def test_before_the_first_step_there_are_no_moments(tmp_path: Path, kind: str) -> None:
    engine, other = (toy_engine(Toy(vocab=40)) if kind == "torch" else megatron(run_of(SMALL))[0] for _ in range(2))
    folder = save(tmp_path, 0, engine.pieces(engine.state), {})
    other.restore(other.state, open_checkpoint(folder))
    assert {kind_of(piece) for piece in other.pieces(other.state)} == {"weight"}
    save(tmp_path, 0, engine.pieces(stepped(engine, 40)), {})
    with pytest.raises(CheckpointError, match=r"exp_avg/\S+ is float32 .* in the checkpoint and missing in this run"):
        other.restore(other.state, open_checkpoint(folder))


def test_meta_that_no_run_wrote_is_named(tmp_path: Path) -> None:
    for meta in ({}, {"tokens": "5", "model": 1}):
        reader = open_checkpoint(save(tmp_path, 1, [], meta))
        with pytest.raises(CheckpointError, match="step_1 has no tokens of type int"):
            reader.fact("tokens", int)
        with pytest.raises(CheckpointError, match="step_1 has no model of type str"):
            from_checkpoint(tmp_path, reader)


@pytest.mark.usefixtures("one_process")
def test_persistent_buffers_are_saved_restored_exported_and_started_from(tmp_path: Path) -> None:
    cfg = Average(vocab=40)
    engine = toy_engine(cfg)
    state = stepped(engine, 40)
    model = state.chunks[0]
    assert model.batches == 1
    reader = open_checkpoint(save(tmp_path, 1, engine.pieces(state), {}))
    assert "weight/scratch" not in reader.names
    assert torch.equal(reader.read("weight/mean"), model.mean)
    other = toy_engine(cfg)
    other.restore(other.state, reader)
    check_all_read(reader)
    for read in (other.state.chunks[0], load_model(from_checkpoint(tmp_path, reader, cfg), Ctx(device=cpu))):
        assert (int(read.batches), bool(read.any)) == (1, True)
        assert torch.equal(read.mean, model.mean)
        assert torch.equal(read.rare.weight, model.rare.weight)
    assert torch.equal(other.weights(other.state)("mean"), model.mean)


@pytest.mark.usefixtures("one_process")
def test_a_tensor_that_an_export_would_lose_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"Forgetful .*\(2 tensors\): it has no rule for mean, a rule for gone, not in"
    ):
        toy_engine(Forgetful(vocab=40))


@pytest.mark.usefixtures("one_process")
def test_buffers_of_the_megatron_path_are_saved_restored_and_exported(tmp_path: Path) -> None:
    cfg = Buffered(**{field.name: getattr(SMALL, field.name) for field in attrs.fields(Qwen3)})
    engine, other = megatron(run_of(cfg))[0], megatron(run_of(cfg))[0]
    state = stepped(engine, 40)
    held = named_tensors(state.chunks[0].module)
    held["batches"].fill_(7)
    held["decoder.layers.0.mean"].fill_(0.5)
    reader = open_checkpoint(save(tmp_path, 1, engine.pieces(state), {}))
    assert int(reader.read("weight/batches")) == 7
    other.restore(other.state, reader)
    check_all_read(reader)
    whole = other.weights(other.state)
    assert (whole("batches").dtype, int(whole("batches"))) == (torch.int64, 7)
    assert torch.equal(whole("decoder.layers.0.mean"), torch.full((4,), 0.5))


def rare_step(both: bool) -> tuple[int, dict[str, Tensor]]:
    """Trains on rows of which the first rank's alone use every layer; gives its number of pieces, and its tensors."""
    import torch.distributed as dist

    engine = toy_engine(Average(vocab=40))
    rows = []
    for rank in range(2):
        batch = fake_text_batch(40, 2, 8, rank)
        tokens = batch["tokens"].clamp(min=1)
        tokens[:, 0] = rank
        rows.append({**batch, "tokens": tokens})
    start = engine.state.chunks[0].rare.weight.detach().clone()
    state, _ = engine.step(engine.state, rows if both else [rows[dist.get_rank()]])
    assert not torch.equal(state.chunks[0].rare.weight, start)
    return len(tensors(engine, state)), dict(named_tensors(state.chunks[0]))


def test_a_layer_that_one_rank_alone_uses_is_trained_alike_on_all(workers: Workers) -> None:
    ((reference, alone),) = workers.run(1, rare_step, True)
    (saved, mine), (nothing, theirs) = workers.run(2, rare_step, False)
    assert (saved, nothing) == (reference, 0)
    assert (int(alone["batches"]), int(mine["batches"])) == (2, 1)
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name
        if name not in ("batches", "mean"):
            assert torch.allclose(value, alone[name], atol=1e-6), name


def empty_rank(folder: str) -> tuple[bool, bool]:
    """Saves and restores a model of whose vocabulary the second of two ranks has padding only."""
    comm = checkpoint.distributed()
    run = run_of(attrs.evolve(SMALL, vocab_multiple=128), parallel=lf.MegatronParallel(tp=2))
    engine, other = megatron(run)[0], megatron(run)[0]
    state = stepped(engine, 40)
    save(Path(folder), 1, engine.pieces(state), {}, comm=comm)
    reader = open_latest(Path(folder), comm=comm).reader
    assert reader is not None
    other.restore(other.state, reader)
    check_all_read(reader, comm=comm)
    saved, back = tensors(engine, state), tensors(other, other.state)
    same = saved.keys() == back.keys() and all(torch.equal(value, back[name]) for name, value in saved.items())
    return same, reader.shape("weight/embedding.word_embeddings.weight") == (40, 32)


def test_a_rank_that_holds_only_padding_saves_and_restores(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, empty_rank, str(tmp_path)) == [(True, True)] * 2
