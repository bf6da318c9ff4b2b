"""The step of the torch path: every rank holds the whole model and sums gradients with the others.

Weights of the loss are counted over the global batch before the first forward, so each backward starts from
`coefficient * sum / weight` and the ranks' gradients only have to be added.
"""

from collections.abc import Iterable, Iterator

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf.models.initialise import seed_of
from lf.models.spec import Batch, Ctx, build_model, forward, loss_terms
from lf.models.weights import whole
from lf.train.config import Run
from lf.train.optim import make_optimizer, param_groups, restore_state, state_tensors
from lf.train.reader import Reader
from lf.train.schedule import factor
from lf.train.shards import Piece, box_piece
from lf.train.state import (
    Engine,
    Metrics,
    Published,
    TrainState,
    TrainStep,
    check_finite,
    combine,
    evaluate,
    initial_value,
    kinds_by_name,
    to_device,
    total_weights,
    weighted_loss,
)


def _sum(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


def torch_engine(run: Run, ctx: Ctx, published: Published | None = None) -> Engine:
    """Returns the torch path of a run: model with weights, optimiser and step on this rank."""
    assert run.model is not None
    cfg, device = run.model, ctx.device.torch_type
    model = build_model(cfg, ctx).to(device)
    if published is not None:
        published.check({name: tuple(param.shape) for name, param in model.named_parameters()})
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(initial_value(cfg, run.seed, whole(name, tuple(param.shape)), param, published))
    optimizer = make_optimizer(run.optim, param_groups(model.named_parameters(), run.optim))
    return Engine(
        state=TrainState(chunks=(model,), optimizer=optimizer),
        step=torch_step(run, ctx),
        evaluate=lambda state, steps: evaluate(cfg, state.chunks[0], steps, _sum, device),
        pieces=_pieces,
        restore=_restore,
        weights=lambda state: dict(state.chunks[0].named_parameters()).__getitem__,
    )


def torch_step(run: Run, ctx: Ctx) -> TrainStep:
    """Returns the step of a run on this rank. It changes model and optimiser in place and returns a new state."""
    assert run.model is not None
    cfg, optim, device = run.model, run.optim, ctx.device.torch_type

    def step(state: TrainState, batches: Iterable[Batch]) -> tuple[TrainState, Metrics]:
        micro = [to_device(batch, device) for batch in batches]
        weights = total_weights(cfg, micro, _sum, device)
        (model,) = state.chunks
        state.optimizer.zero_grad()
        done = []
        for batch in micro:
            torch.manual_seed(seed_of(run.seed, state.step + 1, "dropout", *batch["ids"]))
            terms = loss_terms(cfg, forward(cfg, model, batch), batch)
            weighted_loss(cfg, terms, weights).backward()
            done.append({name: value.detach() for name, value in terms.items()})
        loss, reported = combine(cfg, done, weights, _sum)
        norm = _reduce_gradients(model)
        check_finite(state.step + 1, loss, norm, micro, done)
        if optim.clip and norm > optim.clip:
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], optim.clip / (norm + 1e-6))
        rate = optim.lr * factor(optim.schedule, state.step + 1, run.steps)
        for group in state.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_factor", 1.0)
        state.optimizer.step()
        count = int(_sum(torch.tensor(sum(batch["count"] for batch in micro), device=device)).item())
        metrics = Metrics(loss=loss, terms=reported, grad_norm=norm, lr=rate, tokens=count)
        return attrs.evolve(state, step=state.step + 1, tokens=state.tokens + count), metrics

    return step


def _reduce_gradients(model: nn.Module) -> float:
    """Sums the gradients over the ranks in one message and returns their norm."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    flat = _sum(torch.cat([grad.flatten().float() for grad in grads]))
    for grad, total in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
        grad.copy_(total.view_as(grad))
    return float(flat.norm())


def _pieces(state: TrainState) -> Iterator[Piece]:
    if dist.get_rank() == 0:
        for name, param in state.chunks[0].named_parameters():
            for kind, tensor in {"weight": param.detach(), **state_tensors(state.optimizer, param)}.items():
                yield box_piece(f"{kind}/{name}", tensor.contiguous())


def _restore(state: TrainState, reader: Reader) -> None:
    kinds = kinds_by_name(reader)
    with torch.no_grad():
        for name, param in state.chunks[0].named_parameters():
            read = {kind: reader.read(f"{kind}/{name}") for kind in kinds.get(name, ["weight"])}
            param.copy_(read.pop("weight"))
            if read:
                restore_state(state.optimizer, param, read)
