"""The torch path: every rank holds the whole model and sums gradients with the others."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf.models.initialise import seed_of
from lf.models.spec import Ctx, ModelConfig, build_model, forward, loss_terms, named_tensors
from lf.models.weights import whole
from lf.train.comm import distributed, together
from lf.train.config import Run
from lf.train.manifest import CheckpointError
from lf.train.names import WEIGHT, check_state, key
from lf.train.optim import (
    check_parts,
    freeze,
    make_optimizer,
    param_groups,
    restore_state,
    set_rate,
    start_state,
    state_tensors,
)
from lf.train.reader import Reader
from lf.train.shards import Piece, box_piece
from lf.train.state import Engine, Published, TrainState, check_names, initial_value
from lf.train.step import Mechanics, Pass, evaluation, to_device, train_step, weighted_loss


def torch_engine(run: Run, cfg: ModelConfig, ctx: Ctx, published: Published | None = None) -> Engine:
    """Returns the torch path of a run: model with weights, optimiser and step on this rank."""
    model = build_model(cfg, ctx).to(ctx.device.torch_type)
    held = named_tensors(model)
    check_names(cfg, held)
    if published is not None:
        published.check({name: tuple(tensor.shape) for name, tensor in held.items()}, (0, 1))
    with torch.no_grad():
        for name, tensor in held.items():
            # A buffer starts as the module made it.
            if published is not None or isinstance(tensor, nn.Parameter):
                tensor.copy_(initial_value(cfg, run.seed, whole(name, tuple(tensor.shape)), tensor, published))
    _share_buffers(model)
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
        weights=lambda state: named_tensors(state.chunks[0]).__getitem__,
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
            _share_buffers(model)
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


@torch.no_grad()
def _share_buffers(model: nn.Module) -> None:
    """Gives every rank the persistent buffers of the first, which are those that are saved, in one message."""
    buffers = [tensor for tensor in named_tensors(model).values() if not isinstance(tensor, nn.Parameter)]
    if not buffers:
        return
    parts = [buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers]
    flat = torch.cat(parts)
    dist.broadcast(flat, 0)
    for buffer, part in zip(buffers, torch.split(flat, [part.numel() for part in parts]), strict=True):
        # A part may lie at any byte, and another type needs its own alignment.
        buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _kept(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Gives everything that is saved, by its name in a checkpoint."""
    for name, tensor in named_tensors(state.chunks[0]).items():
        yield key(WEIGHT, name), tensor.detach()
        for kind, kept in state_tensors(state.optimizer, tensor).items():
            yield key(kind, name), kept


def _pieces(state: TrainState) -> Iterator[Piece]:
    if dist.get_rank() == 0:
        for name, tensor in _kept(state):
            yield box_piece(name, tensor.contiguous())


def _restore(state: TrainState, reader: Reader) -> None:
    if reader.step:
        start_state(state.optimizer)
    check_state(reader, {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in _kept(state)})

    @torch.no_grad()
    def fill() -> None:
        for name, tensor in named_tensors(state.chunks[0]).items():
            tensor.copy_(reader.read(key(WEIGHT, name)))
            kinds = state_tensors(state.optimizer, tensor)
            restore_state(state.optimizer, tensor, {kind: reader.read(key(kind, name)) for kind in kinds})

    together(distributed(), fill, lambda _: None, CheckpointError)
