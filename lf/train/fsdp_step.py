"""The torch path: every rank computes the whole model on its rows, and a strategy says who keeps which weights."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf.models.initialise import cut, seed_of
from lf.models.lora import adapt, first_values, weight_of
from lf.models.spec import Batch, Ctx, ModelConfig, forward, loss_terms, named_tensors, weight_map
from lf.parallel.config import TorchParallel
from lf.parallel.torch_dp import Spread, built, cuts, prepare, replicate, shard, share
from lf.parallel.torch_units import Say
from lf.train import torch_state
from lf.train.config import Run
from lf.train.optim import Groups, check_parts, freeze, make_optimizer, param_groups, set_rate
from lf.train.state import Engine, Published, TrainState, check_names, initial_value
from lf.train.step import Mechanics, Pass, evaluation, to_device, train_step, weighted_loss

Adapter = Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, Tensor]]
"""Returns the tensors that adapters start from, whole and by canonical name, given all global shapes of the model."""


def torch_engine(
    run: Run,
    cfg: ModelConfig,
    ctx: Ctx,
    published: Published | None = None,
    say: Say = warnings.warn,
    adapter: Adapter | None = None,
) -> Engine:
    """Returns the torch path of a run: model with weights, optimiser and step on this rank.

    `ctx.dtype` is what the model computes in; main weights are float32. `say` is told what does not go as asked.
    """
    assert isinstance(run.parallel, TorchParallel)
    spread = _spread(run, run.parallel, cfg, ctx, published, say, adapter)
    decay = run.optim.ema
    optimizer = make_optimizer(run.optim, _groups(run, spread))
    mechanics = torch_mechanics(run.seed, cfg, ctx, spread, decay)
    plain = evaluation(cfg, mechanics)

    def evaluate(state: TrainState, steps: Iterable[Sequence[Batch]]) -> dict[str, float]:
        with torch_state.averaged(state.average, spread, decay):
            return plain(state, steps)

    return Engine(
        state=TrainState(
            chunks=(spread.module,), optimizer=optimizer, average=torch_state.start_average(spread, decay)
        ),
        step=train_step(run, cfg, mechanics),
        evaluate=evaluate,
        pieces=lambda state: torch_state.pieces(state, spread),
        restore=lambda state, reader: torch_state.restore(state, reader, spread),
        weights=lambda state: torch_state.weights(state, spread, average=bool(decay) and run.save.averaged),
    )


def _spread(
    run: Run,
    parallel: TorchParallel,
    cfg: ModelConfig,
    ctx: Ctx,
    published: Published | None,
    say: Say,
    adapter: Adapter | None,
) -> Spread:
    """Returns the model with its first weights, as the strategy spreads it."""
    model = built(cfg, ctx, parallel)
    held = named_tensors(model)
    check_names(cfg, held)
    if published is not None:
        published.check({name: tuple(tensor.shape) for name, tensor in held.items()}, True)
    if run.adapt is not None:
        adapt(model, run.adapt, weight_map(cfg))
    # Beside adapters, only what is trained can have a learning rate of its own.
    parts = [name for name, param in model.named_parameters() if run.adapt is None or param.requires_grad]
    check_parts(run.optim, parts)
    freeze(model.named_parameters(), run.optim)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}
    start = {} if adapter is None else adapter(shapes)
    prepare(model, cfg, ctx, parallel, say)
    if cuts(parallel):
        spread = shard(model, cfg, ctx, parallel)
        _set_weights(model, cfg, run.seed, published, start)
    else:
        _set_weights(model, cfg, run.seed, published, start)
        spread = replicate(model, cfg, ctx, parallel)
    _share_buffers(model)
    return spread


@torch.no_grad()
def _set_weights(
    model: nn.Module, cfg: ModelConfig, seed: int, published: Published | None, start: Mapping[str, Tensor]
) -> None:
    for name, tensor in named_tensors(model).items():
        part = share(tensor)
        if name in start or weight_of(name):
            whole = start[name] if name in start else first_values(name, part.shape, seed)
            part.local.copy_(cut(whole, part.placed(name), part.local))
        # A buffer starts as the module made it.
        elif published is not None or isinstance(tensor, nn.Parameter):
            part.local.copy_(initial_value(cfg, seed, part.placed(name), part.local, published))


def _groups(run: Run, spread: Spread) -> Groups:
    """Returns the parameter groups of all ranks, each with the parameters that this rank keeps."""
    groups = param_groups(spread.module.named_parameters(), run.optim)
    kept = [[name for name in group["names"] if name in spread.main] for group in groups]
    return [
        {**group, "params": [spread.main[name] for name in names], "names": names}
        for group, names in zip(groups, kept, strict=True)
    ]


def torch_mechanics(seed: int, cfg: ModelConfig, ctx: Ctx, spread: Spread, decay: float) -> Mechanics:
    """Returns how the torch path runs micro-batches and updates weights, and their average, on this rank."""

    def run(state: TrainState, work: Pass) -> list[dict[str, float]]:
        done = []
        if work.train:
            spread.begin()
        for i, batch in enumerate(to_device(batch, ctx.device.torch_type) for batch in work.micro):
            torch.manual_seed(seed_of(seed, work.step, "dropout", *batch["ids"]))
            if work.train:
                spread.micro(i == len(work.micro) - 1)
            with torch.set_grad_enabled(work.train):
                terms = loss_terms(cfg, forward(cfg, spread.module, batch), batch)
            if work.train:
                weighted_loss(cfg, terms, work.weights).backward()
            done.append({name: value.detach() for name, value in terms.items()})
        if work.train:
            spread.finish()
            _share_buffers(spread.module)
        return [{name: float(value) for name, value in terms.items()} for terms in done]

    def update(state: TrainState, rate: float, scale: float) -> None:
        if scale != 1.0:
            torch._foreach_mul_(_gradients(spread), scale)
        set_rate(state.optimizer, rate)
        state.optimizer.step()
        spread.publish()
        torch_state.move_average(state.average, spread, decay)

    return Mechanics(layout=ctx.layout, group=None, run=run, norm=lambda state: _norm(spread), update=update)


def _gradients(spread: Spread) -> list[Tensor]:
    """Returns this rank's share of every gradient."""
    grads = (spread.main[name].grad for name in spread.trained if name in spread.main)
    return [share(grad).local for grad in grads if grad is not None]


def _norm(spread: Spread) -> float:
    """Returns the norm of the gradients of all ranks, each number counted once."""
    world = dist.get_world_size()
    own = float(nn.utils.get_total_norm(_gradients(spread)))
    if spread.copies == world:
        return own
    # On the host, where every backend has float64. Groups of ranks that keep the same count once.
    total = torch.tensor(own, dtype=torch.float64).square()
    dist.all_reduce(total)
    return math.sqrt(float(total) / spread.copies)


@torch.no_grad()
def _share_buffers(model: nn.Module) -> None:
    """Gives every rank the persistent buffers of the first, which are those that are saved, in one message."""
    buffers = list(torch_state.buffers(model).values())
    if not buffers:
        return
    parts = [buffer.contiguous().view(-1).view(torch.uint8) for buffer in buffers]
    flat = torch.cat(parts)
    dist.broadcast(flat, 0)
    for buffer, part in zip(buffers, torch.split(flat, [part.numel() for part in parts]), strict=True):
        # A part may lie at any byte, and another type needs its own alignment.
        buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
