"""A run on robot data: it resumes bit for bit, its checkpoint holds the scaling, and held-out rows are scaled alike."""

import functools
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lf
from lf.config import from_json
from lf.data.normalise import Normalisers
from lf.data.source import DataCtx, normalisers_of, open_data
from lf.models import spec
from lf.models.embodied.pi05 import pi05_tiny
from lf.models.weights import Same, WeightMap
from lf.train import checkpoint
from lf.train.loop import FAULTS
from tests.data_tools import context
from tests.robot_tools import CAMERAS, Toy, change_column, write_v21
from tests.test_train import go, metrics, tensors
from tests.workers import Workers


@attrs.frozen(kw_only=True)
class Reach(spec.ModelConfig):
    """A policy of one layer: it sees the state and how bright the camera is."""

    state: int = 3
    actions: int = 2
    chunk: int = 3


class ReachModel(nn.Module):
    def __init__(self, cfg: Reach) -> None:
        super().__init__()
        self.head = nn.Linear(cfg.state + 1, cfg.chunk * cfg.actions)

    def forward(self, seen_BD: Tensor) -> Tensor:
        return self.head(seen_BD)


@spec.build_model.register
def _(cfg: Reach, ctx: spec.Ctx) -> nn.Module:
    return ReachModel(cfg)


@spec.forward.register
def _(cfg: Reach, model: nn.Module, batch: spec.Batch) -> Tensor:
    return model(batch["seen"]).unflatten(1, (cfg.chunk, cfg.actions))


@spec.loss_weights.register
def _(cfg: Reach, batch: spec.Batch) -> dict[str, Tensor]:
    return {"mse": batch["real"].sum() * cfg.actions}


@spec.loss_terms.register
def _(cfg: Reach, output: Tensor, batch: spec.Batch) -> dict[str, Tensor]:
    return {"mse": ((output - batch["actions"]) ** 2 * batch["real"][..., None]).sum()}


@spec.collate.register
def _(cfg: Reach, rows: Sequence[Mapping[str, Any] | None], like: Mapping[str, Any]) -> spec.Batch:
    full = [like if row is None else row for row in rows]
    light = [np.append(row["state"], row["images"]["front"].mean() / 255) for row in full]
    real = [row is not None and ~row["action_is_pad"] for row in rows]
    return {
        "seen": torch.tensor(np.array(light), dtype=torch.float32),
        "actions": torch.tensor(np.stack([row["actions"] for row in full])),
        "real": torch.tensor(np.array([np.broadcast_to(one, cfg.chunk) for one in real])),
        "ids": tuple("padding" if row is None else row["id"] for row in rows),
        "count": sum(row is not None for row in rows),
    }


@spec.init_rules.register
def _(cfg: Reach) -> tuple[spec.InitRule, ...]:
    return (spec.InitRule(pattern="*", kind="normal", std=0.1),)


@spec.weight_map.register
def _(cfg: Reach) -> WeightMap:
    return WeightMap(rules=tuple(Same(lf=name, hf=name) for name in ("head.weight", "head.bias")))


@spec.hf_config.register
def _(cfg: Reach) -> dict[str, Any]:
    return {"model_type": "reach"}


@spec.flops.register
def _(cfg: Reach, rows: int, length: int) -> float:
    return 6.0 * rows * (cfg.state + 1) * cfg.chunk * cfg.actions


@spec.shard_spec.register
def _(cfg: Reach) -> spec.ShardSpec:
    return spec.ShardSpec()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_v21(tmp_path / "toy", Toy(cameras=CAMERAS[:1]))


def run_on(root: Path, **changes: Any) -> lf.Run:
    data = lf.LeRobotData(
        path=str(root),
        episodes=(0, 1, 2),
        cameras=(lf.Camera(name="front", key=CAMERAS[0]),),
        chunk=3,
        normalise=lf.Normalise(state="mean_std", actions="quantile", delta=(True, False)),
    )
    run = lf.Run(
        model=Reach(),
        data=data,
        batch=4,
        optim=lf.AdamW(lr=1e-2),
        parallel=lf.TorchParallel(micro_batch=2),
        steps=6,
        eval=lf.Eval(data=attrs.evolve(data, episodes=(3,)), every=3),
        log=lf.Log(every=1),
        save=lf.Save(every=2),
    )
    return attrs.evolve(run, **changes)


def test_a_run_resumes_bit_for_bit_and_keeps_its_scaling(workers: Workers, root: Path, tmp_path: Path) -> None:
    run, whole, cut = run_on(root), tmp_path / "whole", tmp_path / "cut"
    workers.run(1, go, run, whole, tmp_path)
    ((_, number),) = workers.run(1, go, run, cut, tmp_path, 3)
    assert number == signal.SIGTERM
    workers.run(1, go, run, cut, tmp_path)
    assert metrics(cut) == metrics(whole)
    for name, value in tensors(whole, 6).items():
        assert torch.equal(value, tensors(cut, 6)[name]), name
    assert metrics(whole)[-1]["eval_loss"] > 0
    reader = checkpoint.open_checkpoint(whole / "checkpoints" / "step_6")
    saved = from_json(reader.meta["normalisers"], kind=Normalisers)
    ctx = DataCtx(seed=0, cache_dir=tmp_path / "lf")
    assert saved == normalisers_of(open_data(run.data, ctx))
    # Alone, the held-out episode would have another scaling.
    assert run.eval.data is not None
    assert saved != normalisers_of(open_data(run.eval.data, ctx))
    held_out = open_data(run.eval.data, attrs.evolve(ctx, normalisers=saved))
    assert normalisers_of(held_out) == saved


def refused(run: lf.Run, folder: Path, cache: Path) -> str:
    try:
        go(run, folder, cache)
    except FAULTS as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_resume_on_changed_recordings_is_refused(workers: Workers, root: Path, tmp_path: Path) -> None:
    run, folder = run_on(root, steps=2, eval=lf.Eval()), tmp_path / "run"
    workers.run(1, go, run, folder, tmp_path)
    change_column(root / "data/chunk-000/episode_000001.parquet", "action", lambda values: values + 1)
    (text,) = workers.run(1, refused, attrs.evolve(run, steps=3), folder, tmp_path)
    assert text.startswith("CheckpointError: the data of the run has changed")


def test_pi05_trains_on_a_dataset(workers: Workers, tmp_path: Path) -> None:
    root = write_v21(tmp_path / "toy", Toy())
    base, left = pi05_tiny.cameras
    cameras = (lf.Camera(name=base, key=CAMERAS[0]), lf.Camera(name=left))
    data = lf.LeRobotData(path=str(root), cameras=cameras, chunk=4, max_prompt=60)
    run = lf.Run(
        model=attrs.evolve(pi05_tiny, vocab=300, prompt=60, horizon=4),
        tokenizer=lf.TrainedBpe(vocab=300),
        data=data,
        batch=8,
        optim=lf.AdamW(lr=3e-3),
        parallel=lf.TorchParallel(micro_batch=8),
        steps=40,
        eval=lf.Eval(data=data, every=2),
    )
    workers.run(1, go, run, tmp_path / "run", tmp_path)
    losses = [line["eval_loss"] for line in metrics(tmp_path / "run") if "eval_loss" in line]
    assert losses[-1] < 0.9 * losses[0], losses


def test_a_row_has_the_prompt_that_the_policy_reads(tmp_path: Path) -> None:
    root = write_v21(tmp_path / "toy", Toy(cameras=()))
    model = attrs.evolve(pi05_tiny, vocab=300)
    data = lf.LeRobotData(path=str(root), normalise=lf.Normalise(state="min_max"))
    ctx = context(tmp_path, prompt=functools.partial(spec.prompt, model))
    row = open_data(data, ctx).row(0, 0)
    text = spec.prompt(model, row["task"], row["state"])
    assert bytes(row["prompt"].tolist()).decode() == text
    assert text.startswith(f"Task: {row['task']}, State: ")
    with pytest.raises(
        ValueError, match=r"toy, episode 1: the prompt of the task 'push the block' has up to 50 tokens"
    ):
        open_data(attrs.evolve(data, max_prompt=40), ctx)
    with pytest.raises(ValueError, match="data: the model reads tasks as text, which needs a tokenizer"):
        open_data(data, attrs.evolve(ctx, tokenizer=None))
