"""The step of the Megatron path: megatron-core's schedules and distributed optimiser, lf's loss.

Every rank counts the weight of its rows, one small all-reduce makes the weight of the global batch, and each
micro-batch's backward starts from `coefficient * sum / weight`. megatron-core only sums gradients, so the number of
micro-batches, the padding and the ranks leave the gradient alone.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf.models.initialise import seed_of
from lf.models.spec import Batch, Ctx, ModelConfig, Placed, build_model, forward, loss_terms
from lf.parallel.config import MegatronParallel
from lf.parallel.megatron import distributed_optimizer, owned_range, placements, wrap
from lf.train.config import Run
from lf.train.optim import make_optimizer, param_groups, restore_state, state_tensors
from lf.train.reader import Reader
from lf.train.schedule import factor
from lf.train.shards import Piece, box_piece
from lf.train.state import (
    Engine,
    Metrics,
    Published,
    Reduce,
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


def megatron_engine(run: Run, ctx: Ctx, published: Published | None = None) -> Engine:
    """Returns the Megatron path of a run: model with weights, optimiser and step on this rank."""
    assert run.model is not None
    assert isinstance(run.parallel, MegatronParallel)
    model = build_model(run.model, ctx)
    chunk = wrap(model, ctx, overlap=run.parallel.overlap)
    make = functools.partial(make_optimizer, run.optim)
    optimizer = distributed_optimizer(make, param_groups(model.named_parameters(), run.optim), [chunk], ctx)
    held = placements(model, ctx)
    if published is not None:
        published.check({placed.name: placed.shape for _, placed in held})
    with torch.no_grad():
        for param, placed in held:
            value = initial_value(run.model, run.seed, placed, param, published)
            param.copy_(value)
            if (owned := owned_range(optimizer, param)) is not None:
                start, stop, shard = owned
                shard.copy_(value.flatten()[start:stop])
    reduce = _sum_over(ctx.groups.dp_cp)
    cfg, device = run.model, ctx.device.torch_type
    return Engine(
        state=TrainState(chunks=(chunk,), optimizer=optimizer),
        step=megatron_step(run, ctx),
        evaluate=lambda state, steps: evaluate(cfg, state.chunks[0], steps, reduce, device),
        pieces=lambda state: _pieces(state, ctx),
        restore=lambda state, reader: _restore(state, reader, ctx),
        weights=lambda state: _weights(state, ctx),
    )


def _sum_over(group: Any) -> Reduce:
    def reduce(values: Tensor) -> Tensor:
        dist.all_reduce(values, group=group)
        return values

    return reduce


def megatron_step(run: Run, ctx: Ctx) -> TrainStep:
    """Returns the step of a run on this rank. It changes model and optimiser in place and returns a new state."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

    assert run.model is not None
    cfg, optim, device = run.model, run.optim, ctx.device.torch_type
    reduce = _sum_over(ctx.groups.dp_cp)

    def finalize(chunks: list[nn.Module], tokens: Tensor | None, **kwargs: Any) -> None:
        # Gradients are divided already: megatron's own division by tokens stays off.
        finalize_model_grads(chunks, None, **kwargs)

    def step(state: TrainState, batches: Iterable[Batch]) -> tuple[TrainState, Metrics]:
        micro = [to_device(batch, device) for batch in batches]
        weights = total_weights(cfg, micro, reduce, device)
        (model,) = state.chunks
        model.config.finalize_model_grads_func = finalize
        model.config.no_sync_func = model.no_sync if model.ddp_config.overlap_grad_reduce else None
        model.zero_grad_buffer()
        state.optimizer.zero_grad()
        done: list[Mapping[str, Tensor]] = forward_backward_no_pipelining(
            forward_step_func=_forward_step(cfg, weights, (run.seed, state.step + 1), ctx),
            data_iterator=iter(micro),
            model=model,
            num_microbatches=len(micro),
            seq_length=0,
            micro_batch_size=0,
            pg_collection=ctx.groups,
        )
        loss, terms = combine(cfg, done, weights, reduce)
        state.optimizer.prepare_grads()
        norm = float(state.optimizer.get_grad_norm())
        check_finite(state.step + 1, loss, norm, micro, done)
        rate = optim.lr * factor(optim.schedule, state.step + 1, run.steps)
        _update(state.optimizer, rate, optim.clip, norm)
        count = int(reduce(torch.tensor(sum(batch["count"] for batch in micro), device=device)).item())
        metrics = Metrics(loss=loss, terms=terms, grad_norm=norm, lr=rate, tokens=count)
        return attrs.evolve(state, step=state.step + 1, tokens=state.tokens + count), metrics

    return step


def _forward_step(cfg: ModelConfig, weights: Mapping[str, float], seed: tuple[int, int], ctx: Ctx) -> Any:
    """Returns what megatron's schedules call for each micro-batch: the output, and the function to its loss."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    def run(batches: Iterator[Batch], model: nn.Module) -> tuple[Any, Callable[[Any], Any]]:
        batch = next(batches)
        layout = ctx.layout
        model_parallel_cuda_manual_seed(
            seed_of(*seed, "dropout", *batch["ids"]) % 2**31,
            tp_rank=layout.tp_rank,
            ep_rank=layout.ep_rank,
            etp_rank=layout.etp_rank,
        )

        def loss(output: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            terms = loss_terms(cfg, output, batch)
            none = torch.zeros((), dtype=torch.int, device=ctx.device.torch_type)
            return weighted_loss(cfg, terms, weights), none, {k: v.detach() for k, v in terms.items()}

        return forward(cfg, model, batch), loss

    return run


def _update(optimizer: Any, rate: float, clip: float, norm: float) -> None:
    """Clips the gradients, whose norm is given, and steps."""
    if clip and norm > clip:
        torch._foreach_mul_([p.grad for p in optimizer.get_parameters() if p.grad is not None], clip / (norm + 1e-6))
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_factor", 1.0)
    optimizer.step_with_ready_grads()


def _cut(kind: str, placed: Placed, start: int, stop: int, tensor: Tensor) -> Iterator[Piece]:
    """Gives the pieces of a global tensor that `tensor`, elements [start, stop) of this rank's flattened one, covers.

    Parts lie one after the other in the rank's tensor. The pieces share the tensor's memory.
    """
    at, flat = 0, tensor.view(-1)
    for part in placed.parts:
        size = math.prod(part.size)
        first, last = max(start, at), min(stop, at + size)
        if first < last:
            yield Piece(
                name=f"{kind}/{placed.name}",
                shape=placed.shape,
                at=part.at,
                size=part.size,
                start=first - at,
                stop=last - at,
                data=flat[first - start : last - start],
            )
        at += size


def _shards(state: TrainState, ctx: Ctx) -> Iterator[tuple[Placed, int, int, nn.Parameter]]:
    for chunk in state.chunks:
        for param, placed in placements(chunk.module, ctx):
            if (owned := owned_range(state.optimizer, param)) is not None:
                yield placed, *owned


def _pieces(state: TrainState, ctx: Ctx) -> Iterator[Piece]:
    for placed, start, stop, shard in _shards(state, ctx):
        if placed.owner:
            yield from _cut("weight", placed, start, stop, shard.detach())
            for kind, tensor in state_tensors(state.optimizer.optimizer, shard).items():
                if tensor.ndim:
                    yield from _cut(kind, placed, start, stop, tensor)
                elif start == 0:
                    yield box_piece(f"{kind}/{placed.name}", tensor)


def _restore(state: TrainState, reader: Reader, ctx: Ctx) -> None:
    kinds = kinds_by_name(reader)
    with torch.no_grad():
        for placed, start, stop, shard in _shards(state, ctx):
            read = {}
            for kind in kinds.get(placed.name, ["weight"]):
                name = f"{kind}/{placed.name}"
                if kind != "weight" and reader.shape(name) == ():
                    read[kind] = reader.read(name)
                    continue
                read[kind] = torch.zeros_like(shard)
                for piece in _cut(kind, placed, start, stop, read[kind]):
                    reader.fill(piece)
            shard.copy_(read.pop("weight"))
            if read:
                restore_state(state.optimizer.optimizer, shard, read)
        state.optimizer._copy_main_params_to_model_params()
        for chunk in state.chunks:
            chunk.start_param_sync(force_sync=True)


def _weights(state: TrainState, ctx: Ctx) -> Callable[[str], Tensor]:
    for chunk in state.chunks:
        chunk.start_param_sync(force_sync=True)
    held = {placed.name: (param, placed) for c in state.chunks for param, placed in placements(c.module, ctx)}

    def whole(name: str) -> Tensor:
        param, placed = held[name]
        return param.detach()[tuple(slice(0, n) for n in placed.shape)]

    return whole
