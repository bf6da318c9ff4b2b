"""The torch path: every rank holds the whole model and sums gradients with the others."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from lf.models.initialise import seed_of
from lf.models.spec import Ctx, ModelConfig, build_model, forward, loss_terms
from lf.models.weights import whole
from lf.train.config import Run
from lf.train.names import WEIGHT, key, kinds_by_name
from lf.train.optim import (
    check_parts,
    freeze,
    make_optimizer,
    param_groups,
    restore_state,
    set_rate,
    state_tensors,
)
from lf.train.reader import Reader
from lf.train.shards import Piece, box_piece
from lf.train.state import Engine, Published, TrainState, initial_value
from lf.train.step import Mechanics, Pass, evaluation, to_device, train_step, weighted_loss


def torch_engine(run: Run, cfg: ModelConfig, ctx: Ctx, published: Published | None = None) -> Engine:
    """Returns the torch path of a run: model with weights, optimiser and step on this rank."""
    model = build_model(cfg, ctx).to(ctx.device.torch_type)
    if published is not None:
        published.check({name: tuple(param.shape) for name, param in model.named_parameters()})
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(initial_value(cfg, run.seed, whole(name, tuple(param.shape)), param, published))
    check_parts(run.optim, dict(model.named_parameters()).keys())
    freeze(model.named_parameters(), run.optim)
    mechanics = torch_mechanics(run.seed, cfg, ctx)
    return Engine(
        state=TrainState(
            chunks=(model,), optimizer=make_optimizer(run.optim, param_groups(model.named_parameters(), run.optim))
        ),
        step=train_step(run, cfg, mechanics),
        evaluate=evaluation(cfg, mechanics),
        pieces=_pieces,
        restore=_restore,
        weights=lambda state: dict(state.chunks[0].named_parameters()).__getitem__,
    )


def torch_mechanics(seed: int, cfg: ModelConfig, ctx: Ctx) -> Mechanics:
    """Returns how the torch path runs micro-batches and updates weights on this rank."""

    def run(state: TrainState, work: Pass) -> list[dict[str, float]]:
        (model,) = state.chunks
        done = []
        if work.train:
            state.optimizer.zero_grad()
        for batch in (to_device(batch, ctx.device.torch_type) for batch in work.micro):
            torch.manual_seed(seed_of(seed, work.step, "dropout", *batch["ids"]))
            with torch.set_grad_enabled(work.train):
                terms = loss_terms(cfg, forward(cfg, model, batch), batch)
            if work.train:
                weighted_loss(cfg, terms, work.weights).backward()
            done.append({name: value.detach() for name, value in terms.items()})
        if work.train:
            _sum_gradients(model)
        return [{name: float(value) for name, value in terms.items()} for terms in done]

    def norm(state: TrainState) -> float:
        grads = [param.grad for param in state.chunks[0].parameters() if param.grad is not None]
        return float(nn.utils.get_total_norm(grads))

    def update(state: TrainState, rate: float, scale: float) -> None:
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in state.chunks[0].parameters() if p.grad is not None], scale)
        set_rate(state.optimizer, rate)
        state.optimizer.step()

    return Mechanics(layout=ctx.layout, group=None, run=run, norm=norm, update=update)


def _sum_gradients(model: nn.Module) -> None:
    """Sums the gradients over the ranks in one message; a parameter that this rank did not use counts as zero."""
    params = [param for param in model.parameters() if param.requires_grad]
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    grads = [param.grad for param in params if param.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))


def _pieces(state: TrainState) -> Iterator[Piece]:
    if dist.get_rank() == 0:
        for name, param in state.chunks[0].named_parameters():
            for kind, tensor in {WEIGHT: param.detach(), **state_tensors(state.optimizer, param)}.items():
                yield box_piece(key(kind, name), tensor.contiguous())


def _restore(state: TrainState, reader: Reader) -> None:
    kinds = kinds_by_name(reader)
    with torch.no_grad():
        for name, param in state.chunks[0].named_parameters():
            param.copy_(reader.read(key(WEIGHT, name)))
            read = {kind: reader.read(key(kind, name)) for kind in kinds.get(name, ())}
            if read:
                restore_state(state.optimizer, param, read)
