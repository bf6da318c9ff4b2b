"""Compares a model that is spread over ranks with the numbers that a public implementation recorded for it.

Every rank reads its own slices of the checkpoint, so this proves the weight map, the layout and the step at once.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from lf.data.config import DataConfig
from lf.models import weights
from lf.models.hf_folder import open_folder
from lf.models.layouts import fitted_to
from lf.models.recorded import recorded_rows
from lf.models.spec import (
    Batch,
    Ctx,
    ModelConfig,
    collate,
    forward,
    golden,
    has_rule,
    slice_batch,
    type_name,
    weight_map,
)
from lf.parallel.config import MegatronParallel
from lf.parallel.groups import megatron_globals
from lf.parallel.megatron import owned_range, placements
from lf.train.config import Run, Sgd
from lf.train.megatron_step import _cut, _schedule, megatron_engine
from lf.train.parity import Parity, by_term, judge, named_outputs
from lf.train.shards import Piece
from lf.train.start import open_start
from lf.train.state import Engine
from lf.train.step import Pass


def compare_layout(folder: Path, parallel: MegatronParallel, ctx: Ctx) -> Parity:
    """Returns how far a model in a layout is from a golden folder; every rank calls it and gets the same answer.

    Raises ValueError for an unknown family, and for one whose recordings are no rows of text.
    """
    start = open_start(str(folder), None)
    if has_rule(golden, start.model):
        raise ValueError(f"{type_name(start.model)} is compared in one process alone; leave out --tp, --pp and --ep")
    run = Run(model=start.model, data=DataConfig(), optim=Sgd(lr=1.0, clip=0.0), parallel=parallel)
    engine = megatron_engine(run, start.model, ctx, start.published)
    recorded = load_file(folder / "io.safetensors")
    micro = _micro_batches(start.model, recorded, ctx)
    logits = _logits(start.model, engine, micro, ctx, len(recorded["input_ids"]))
    engine.state.optimizer.step_with_ready_grads = lambda: True
    _, metrics = engine.step(engine.state, micro)
    by_name = _gradients(engine, ctx)
    table = fitted_to(weight_map(start.model), open_folder(folder))
    grads = dict(weights.export(table, lambda name: by_name[name]))
    means = {name: torch.tensor(value) for name, value in metrics.terms.items()}
    return judge(folder, recorded, named_outputs(start.model, logits, means), grads)


def _micro_batches(cfg: ModelConfig, recorded: Mapping[str, Tensor], ctx: Ctx) -> list[Batch]:
    """Returns this rank's rows, a micro-batch each; ranks without a row get one of weight zero."""
    made: list[dict[str, Any] | None] = [*recorded_rows(cfg, recorded)]
    like = recorded_rows(cfg, recorded)[0]
    made += [None] * (-len(made) % ctx.layout.dp)
    return [collate(cfg, [row], like) for row in made[ctx.layout.dp_rank :: ctx.layout.dp]]


def _logits(cfg: ModelConfig, engine: Engine, micro: list[Batch], ctx: Ctx, rows: int) -> dict[str, Tensor]:
    """Returns the logits of every row by loss term, on every rank."""
    layout = ctx.layout
    cut = [slice_batch(cfg, batch, layout) for batch in micro]
    seen: list[Mapping[str, Tensor]] = []

    def step(batches: Iterator[Batch], model: nn.Module) -> tuple[Any, Any]:
        batch = {name: value for name, value in next(batches).items() if not name.startswith("labels")}

        def keep(output: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            seen.append({name: value.cpu() for name, value in by_term(output).items()})
            return torch.zeros(()), torch.zeros((), dtype=torch.int), {}

        return forward(cfg, model, batch), keep

    work = Pass(step=0, micro=tuple(cut), weights={}, train=False)
    with megatron_globals(ctx), torch.no_grad():
        _schedule(engine.state, work, step, ctx)
    everyone: list[Any] = [None] * dist.get_world_size()
    holds = layout.pp_rank == layout.pp - 1 and layout.tp_rank == 0
    dist.all_gather_object(everyone, (layout.dp_rank, seen) if holds else None)
    by_rank = dict(found for found in everyone if found is not None)
    return {
        name: torch.cat([by_rank[i % layout.dp][i // layout.dp][name] for i in range(rows)]) for name in by_rank[0][0]
    }


def _gradients(engine: Engine, ctx: Ctx) -> dict[str, Tensor]:
    """Returns the gradient of every weight by canonical name, put together from the ranks' shares; zero for biases."""
    pieces: list[Piece] = []
    frozen: dict[str, tuple[int, ...]] = {}
    for param, placed in (pair for chunk in engine.state.chunks for pair in placements(chunk.module, ctx)):
        if not param.requires_grad:
            frozen[placed.name] = placed.shape
        elif (owned := owned_range(engine.state.optimizer, param)) is not None:
            start, stop, shard = owned
            assert shard.grad is not None
            pieces += _cut("grad", placed, start, stop, shard.grad.cpu())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (pieces, frozen))
    whole: dict[str, Tensor] = {}
    for held, still in everyone:
        whole |= {name: torch.zeros(shape) for name, shape in still.items()}
        for piece in held:
            grad = whole.setdefault(piece.name.removeprefix("grad/"), torch.zeros(piece.shape))
            box = grad[tuple(slice(at, at + n) for at, n in zip(piece.at, piece.size, strict=True))]
            flat = box.clone().view(-1)
            flat[piece.start : piece.stop] = piece.data
            box.copy_(flat.view_as(box))
    return whole
