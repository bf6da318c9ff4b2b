"""The Megatron path: megatron-core's schedules and distributed optimiser under lf's loss."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf.models.hf_folder import few
from lf.models.initialise import seed_of
from lf.models.spec import (
    Accounted,
    Batch,
    Ctx,
    ModelConfig,
    Placed,
    build_model,
    forward,
    loss_terms,
    named_tensors,
    text_errors,
    type_name,
)
from lf.parallel.config import Hetero, megatron_part
from lf.parallel.groups import megatron_globals
from lf.parallel.megatron import chunk_contexts, distributed_optimizer, owned_range, placements, wrap
from lf.train.comm import distributed, over_ranks, together
from lf.train.config import OptimConfig, Run
from lf.train.manifest import CheckpointError
from lf.train.names import WEIGHT, Kind, check_state, key
from lf.train.optim import (
    check_parts,
    freeze,
    make_optimizer,
    param_groups,
    restore_state,
    start_state,
    state_tensors,
)
from lf.train.reader import Reader
from lf.train.shards import Piece, box_piece
from lf.train.state import Engine, Published, TrainState, check_names, initial_value
from lf.train.step import Mechanics, Pass, evaluation, to_device, train_step, weighted_loss

if TYPE_CHECKING:
    from lf.train.decoupled import Apart


def megatron_engine(run: Run, cfg: ModelConfig, ctx: Ctx, published: Published | None = None) -> Engine:
    """Returns the Megatron path of a run: model with weights, optimiser and step on this rank."""
    parallel = megatron_part(run.parallel)
    assert parallel is not None
    with megatron_globals(ctx):
        models = [build_model(cfg, each) for each in chunk_contexts(ctx)]
    _freeze(models, run.optim, ctx)
    with megatron_globals(ctx):
        chunks = [
            wrap(model, each, overlap=parallel.overlap) for model, each in zip(models, chunk_contexts(ctx), strict=True)
        ]
        named = [pair for chunk in chunks for pair in chunk.module.named_parameters()]
        make = functools.partial(make_optimizer, run.optim)
        optimizer = distributed_optimizer(make, param_groups(named, run.optim), chunks, ctx)
    state = TrainState(chunks=tuple(chunks), optimizer=optimizer)
    _set_weights(cfg, run.seed, state, ctx, published)
    apart = _images_apart(run, cfg, chunks, ctx)
    mechanics = megatron_mechanics(run.seed, cfg, ctx, apart)
    return Engine(
        state=state,
        step=train_step(run, cfg, mechanics),
        evaluate=evaluation(cfg, mechanics),
        pieces=lambda state: _pieces(state, ctx),
        restore=lambda state, reader: _restore(state, reader, ctx, apart),
        weights=lambda state: _weights(state, ctx),
        ahead=None if apart is None else apart.ahead,
    )


def _images_apart(run: Run, cfg: ModelConfig, chunks: Sequence[Any], ctx: Ctx) -> "Apart | None":
    if not isinstance(run.parallel, Hetero):
        return None
    from lf.train.decoupled import apart

    return apart(cfg, chunks, run.optim, ctx, recompute=run.parallel.vision.recompute == "full")


def _freeze(models: list[nn.Module], optim: OptimConfig, ctx: Ctx) -> None:
    """Marks what `optim.freeze` names; raises ValueError, on every rank, where it matches nothing or leaves nothing."""
    if not optim.freeze:
        return
    named = [[(placed.name, tensor) for tensor, placed in placements(model, ctx)] for model in models]
    own = [[(name, tensor) for name, tensor in pairs if isinstance(tensor, nn.Parameter)] for pairs in named]
    check_parts(optim, over_ranks({name: True for pairs in own for name, _ in pairs}).keys())
    for pairs in own:
        freeze(pairs, optim)
    idle = any(not any(param.requires_grad for _, param in pairs) for pairs in own)
    if stages := sorted(over_ranks({str(ctx.layout.pp_rank): True} if idle else {})):
        with text_errors(ctx.layout.apart):
            raise ValueError(
                f"optim.freeze = {optim.freeze} leaves nothing to train on pipeline stage {', '.join(stages)}; lower "
                "parallel.pp or vpp, or narrow it"
            )


def _set_weights(cfg: ModelConfig, seed: int, state: TrainState, ctx: Ctx, published: Published | None) -> None:
    held = [pair for chunk in state.chunks for pair in placements(chunk.module, ctx)]
    shapes = over_ranks({placed.name: placed.shape for _, placed in held})
    check_names(cfg, shapes)
    if published is not None:
        _check_published(published, shapes)
    copies, differing = ctx.groups.dp_cp.size(), list[str]()
    for tensor, placed in held:
        if published is None and not isinstance(tensor, nn.Parameter):
            continue  # A buffer starts as the module made it.
        value = initial_value(cfg, seed, placed, tensor, published)
        _set(tensor, owned_range(state.optimizer, tensor), value)
        if published is not None and placed.owner:
            differing += published.differing(placed, value, (placed.replica, copies))
        del value  # While the next one is read it would be in memory beside it.
    if published is not None:
        _check_copies(differing)


def _check_copies(differing: list[str]) -> None:
    """Raises ValueError on every rank where one has found tensors that are stored twice with different values."""

    def tell(rows: list[list[str]]) -> None:
        if found := sorted({pair for row in rows for pair in row}):
            raise ValueError(
                f"the weights do not fit the model: {len(found)} stored twice with different values: {few(found)}; "
                "give a folder whose copies are equal, or whose config.json does not say that they are"
            )

    together(distributed(), lambda: differing, tell, ValueError)


@torch.no_grad()
def _set(tensor: Tensor, owned: tuple[int, int, Tensor] | None, value: Tensor) -> None:
    """Sets a tensor, and the share of it that this rank's optimiser owns."""
    tensor.copy_(value)
    if owned is not None:
        start, stop, shard = owned
        shard.copy_(value.flatten()[start:stop])


def _check_published(published: Published, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ValueError on every rank where the weights do not fit, of which no values are read for it."""

    def fault() -> str:
        try:
            published.check(shapes, False)
        except ValueError as error:
            return str(error)
        return ""

    def first(faults: list[str]) -> None:
        if found := next(filter(None, faults), ""):
            raise ValueError(found)

    together(distributed(), fault, first, ValueError)


def megatron_mechanics(seed: int, cfg: ModelConfig, ctx: Ctx, apart: "Apart | None" = None) -> Mechanics:
    """Returns how the Megatron path runs micro-batches and updates weights on this rank.

    With `apart`, images are encoded before the pipeline runs.
    """

    def run(state: TrainState, work: Pass) -> list[dict[str, float]]:
        if work.train:
            for chunk in state.chunks:
                chunk.zero_grad_buffer()
            state.optimizer.zero_grad()
        accounted = _accounted(state)
        for module in accounted:
            module.start_pass(work.weights)
        with megatron_globals(ctx), torch.set_grad_enabled(work.train):
            if apart is None:
                done = _schedule(state, work, _forward_step(seed, cfg, work, ctx), ctx)
            else:
                done = _around(state, work, _forward_step(seed, cfg, work, ctx), apart)
        terms = _from_last_stage([{name: float(value) for name, value in terms.items()} for terms in done], ctx)
        return _with_own_terms(terms, accounted, work, ctx) if work.train else terms

    def norm(state: TrainState) -> float:
        with megatron_globals(ctx):
            state.optimizer.prepare_grads()
            return float(state.optimizer.get_grad_norm())

    def update(state: TrainState, rate: float, scale: float) -> None:
        if scale != 1.0:
            torch._foreach_mul_([p.grad for p in state.optimizer.get_parameters() if p.grad is not None], scale)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        state.optimizer.step_with_ready_grads()
        with torch.no_grad():
            for module in _accounted(state):
                module.after_update()

    return Mechanics(layout=ctx.layout, group=ctx.groups.dp_cp, run=run, norm=norm, update=update)


def _accounted(state: TrainState) -> list[Accounted]:
    return [chunk.module for chunk in state.chunks if isinstance(chunk.module, Accounted)]


def _with_own_terms(
    done: list[dict[str, float]], accounted: list[Accounted], work: Pass, ctx: Ctx
) -> list[dict[str, float]]:
    """Returns the micro-batches' terms with those that modules keep themselves, all under the first micro-batch.

    Tensor parallel ranks and pipeline stages each have a share of them.
    """
    names = sorted(work.weights.keys() - done[0].keys())
    if not names:
        return done
    row = torch.zeros(len(names), dtype=torch.float64)
    for terms in (module.own_terms() for module in accounted):
        row += torch.tensor([float(terms.get(name, 0.0)) for name in names], dtype=torch.float64)
    dist.all_reduce(row, group=ctx.groups.mp)
    totals = [dict(zip(names, row.tolist(), strict=True)), *[dict.fromkeys(names, 0.0)] * (len(done) - 1)]
    return [{**terms, **own} for terms, own in zip(done, totals, strict=True)]


def _around(state: TrainState, work: Pass, forward_step: Any, apart: "Apart") -> list[dict[str, Tensor]]:
    """Returns what `_schedule` does, with the images of all micro-batches encoded before and gone backward after."""
    from lf.train import decoupled

    exchange = decoupled.begin(apart, work.micro, train=work.train)
    numbers = itertools.count()

    def step(batches: Iterator[Batch], model: Any) -> Any:
        if not model.module.pre_process:
            return forward_step(batches, model)
        batch = decoupled.features(exchange, next(batches), next(numbers), apart.replica.rank)
        return forward_step(iter([batch]), model)

    def finalize(*args: Any, **kwargs: Any) -> None:
        decoupled.end(apart, exchange)
        _finalize(*args, **kwargs)

    images = ("patches", "states")
    text = [{name: value for name, value in batch.items() if name not in images} for batch in work.micro]
    done = _schedule(state, attrs.evolve(work, micro=tuple(text)), step, apart.ctx, finalize)
    exchange.finish()
    return done


def _schedule(
    state: TrainState, work: Pass, forward_step: Any, ctx: Ctx, finalize: Callable[..., None] | None = None
) -> list[dict[str, Tensor]]:
    """Runs all micro-batches forward, and backward too when training; returns each one's terms on the last stage."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    chunks, layout, device = list(state.chunks), ctx.layout, ctx.device.torch_type
    micro = [to_device(batch, device) for batch in work.micro]
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize or _finalize
    config = chunks[0].config
    if chunks[0].ddp_config.overlap_grad_reduce:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    common: dict[str, Any] = {
        "forward_step_func": forward_step,
        "num_microbatches": len(micro),
        # Pipeline stages agree on one shape beforehand: a packed micro-batch.
        "seq_length": micro[0]["tokens"].numel() * layout.cp if layout.pp > 1 else 0,
        "micro_batch_size": 1,
        "forward_only": not work.train,
        "pg_collection": ctx.groups,
    }
    if layout.pp == 1:
        return schedules.forward_backward_no_pipelining(data_iterator=iter(micro), model=chunks, **common)
    common["p2p_communicator"] = P2PCommunicator(ctx.groups.pp, config)
    if layout.vpp == 1:
        return schedules.forward_backward_pipelining_without_interleaving(
            data_iterator=iter(micro), model=chunks, **common
        )
    return schedules.forward_backward_pipelining_with_interleaving(
        data_iterator=[iter(micro) for _ in chunks], model=chunks, **common
    )


def _finalize(chunks: list[nn.Module], tokens: Tensor | None, **kwargs: Any) -> None:
    from megatron.core.distributed import finalize_model_grads

    # Gradients are divided already: megatron's own division by tokens stays off.
    finalize_model_grads(chunks, None, **kwargs)


def _from_last_stage(done: list[dict[str, float]], ctx: Ctx) -> list[dict[str, float]]:
    """Returns the terms of the micro-batches on every pipeline stage."""
    if ctx.layout.pp == 1:
        return done
    shared = [done]
    dist.broadcast_object_list(shared, group=ctx.groups.pp, group_src=ctx.layout.pp - 1)
    return shared[0]


def _forward_step(seed: int, cfg: ModelConfig, work: Pass, ctx: Ctx) -> Any:
    """Returns what megatron's schedules call for each micro-batch: the output, and the function to its loss."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    def run(batches: Iterator[Batch], model: nn.Module) -> tuple[Any, Callable[[Any], Any]]:
        batch = next(batches)
        layout = ctx.layout
        model_parallel_cuda_manual_seed(
            seed_of(seed, work.step, "dropout", *batch["ids"]) % 2**31,
            tp_rank=layout.tp_rank,
            ep_rank=layout.ep_rank,
            etp_rank=layout.etp_rank,
        )

        def loss(output: Any) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
            terms = loss_terms(cfg, output, batch)
            none = torch.zeros((), dtype=torch.int, device=ctx.device.torch_type)
            return weighted_loss(cfg, terms, work.weights), none, {k: v.detach() for k, v in terms.items()}

        return forward(cfg, model, batch), loss

    return run


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
                name=key(kind, placed.name),
                shape=placed.shape,
                at=part.at,
                size=part.size,
                start=first - at,
                stop=last - at,
                data=flat[first - start : last - start],
            )
        at += size


def _held(state: TrainState, ctx: Ctx) -> Iterator[tuple[Placed, int, int, Tensor]]:
    """Gives what this rank keeps of each tensor: its share of the trained ones, frozen ones and buffers whole."""
    for chunk in state.chunks:
        for tensor, placed in placements(chunk.module, ctx):
            owned = owned_range(state.optimizer, tensor) if tensor.requires_grad else (0, tensor.numel(), tensor)
            if owned is not None:
                yield placed, *owned


def _kinds(state: TrainState, placed: Placed, tensor: Tensor) -> dict[str, Tensor]:
    """Returns a tensor of `_held` and what the optimiser keeps for it, by kind; each like the tensor, or a number."""
    found = {WEIGHT: tensor.detach(), **state_tensors(state.optimizer.optimizer, tensor)}
    for kind, kept in found.items():
        if kept.ndim and kept.shape != tensor.shape:
            raise ValueError(
                f"{type_name(state.optimizer.optimizer)} keeps {kind} of shape {tuple(kept.shape)} for a share of "
                f"{placed.name} of shape {tuple(tensor.shape)}; on the Megatron path state must be a number or have "
                "the shape of its parameter"
            )
    return found


def _pieces(state: TrainState, ctx: Ctx) -> Iterator[Piece]:
    every = (tensor for chunk in state.chunks for tensor in named_tensors(chunk.module).values())
    frozen = {id(tensor) for tensor in every if not tensor.requires_grad}
    for placed, start, stop, tensor in _held(state, ctx):
        if not placed.owner or (placed.replica and id(tensor) in frozen):
            continue
        for kind, kept in _kinds(state, placed, tensor).items():
            if kind == WEIGHT or kept.ndim:
                yield from _cut(kind, placed, start, stop, kept)
            elif start == 0 and placed.parts and not any(placed.parts[0].at):
                yield box_piece(key(kind, placed.name), kept)


def _restore(state: TrainState, reader: Reader, ctx: Ctx, apart: "Apart | None") -> None:
    optimizer = state.optimizer.optimizer
    if reader.step:
        start_state(optimizer)
    mine: dict[str, Kind] = {}
    for placed, _, _, tensor in _held(state, ctx):
        for kind, kept in _kinds(state, placed, tensor).items():
            shape = placed.shape if kind == WEIGHT or kept.ndim else ()
            mine[key(kind, placed.name)] = (shape, kept.dtype)
    check_state(reader, over_ranks(mine))

    @torch.no_grad()
    def fill() -> None:
        for placed, start, stop, tensor in _held(state, ctx):
            read = {}
            for kind, kept in _kinds(state, placed, tensor).items():
                if kind != WEIGHT and not kept.ndim:
                    read[kind] = reader.read(key(kind, placed.name))
                    continue
                read[kind] = torch.zeros(kept.shape, dtype=kept.dtype)
                for piece in _cut(kind, placed, start, stop, read[kind]):
                    reader.fill(piece)
            tensor.copy_(read.pop(WEIGHT))
            restore_state(optimizer, tensor, read)

    together(distributed(), fill, lambda _: None, CheckpointError)
    state.optimizer._copy_main_params_to_model_params()
    for chunk in state.chunks:
        chunk.start_param_sync(force_sync=True)
    if apart is not None:
        apart.copy(apart.tensors)


def _weights(state: TrainState, ctx: Ctx) -> Callable[[str], Tensor]:
    """Returns a function to whole tensors: rank 0 puts them together from the ranks that own parts of them."""
    for chunk in state.chunks:
        chunk.start_param_sync(force_sync=True)
    pairs = [pair for chunk in state.chunks for pair in placements(chunk.module, ctx)]
    mine = {placed.name: (tensor.detach(), placed) for tensor, placed in pairs if placed.owner and not placed.replica}
    everyone: list[dict[str, tuple[Placed, torch.dtype]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {name: (placed, tensor.dtype) for name, (tensor, placed) in mine.items()})
    holders: dict[str, list[tuple[int, Placed, torch.dtype]]] = {}
    for rank, held in enumerate(everyone):
        for name, (placed, dtype) in held.items():
            holders.setdefault(name, []).append((rank, placed, dtype))

    def whole(name: str) -> Tensor:
        _, first, dtype = holders[name][0]
        if dist.get_rank():
            for rank, placed, _ in holders[name]:
                if rank == dist.get_rank():
                    for part in placed.parts:
                        dist.send(mine[name][0][_box(part.local, part.size)].contiguous(), 0)
            return torch.empty(first.shape, device="meta")
        out = torch.empty(first.shape, dtype=dtype, device=ctx.device.torch_type)
        for rank, placed, _ in holders[name]:
            for part in placed.parts:
                piece = out.new_empty(part.size)
                if rank:
                    dist.recv(piece, rank)
                else:
                    piece = mine[name][0][_box(part.local, part.size)]
                out[_box(part.at, part.size)] = piece
        return out

    return whole


def _box(at: tuple[int, ...], size: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(first, first + extent) for first, extent in zip(at, size, strict=True))
