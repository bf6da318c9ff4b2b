"""Data parallelism of the torch path: who keeps which weights, and how gradients become sums over the ranks.

`ddp` keeps everything on every rank. `zero1` (ZeRO stage 1, arXiv:1910.02054) gives each parameter to one rank, which
alone keeps its float32 weights and its optimiser state. `fsdp` cuts every parameter along its first axis with torch's
FSDP2 (`fully_shard`); `hsdp` does so within each of several groups of ranks that hold the same.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lf.models.spec import Ctx, ModelConfig, Part, Placed, build_model, shard_spec, type_name
from lf.parallel.config import TorchParallel
from lf.parallel.torch_units import Say, compile_units, recompute, units, wide_modules, wide_names


@attrs.frozen(kw_only=True, eq=False)
class Spread:
    """A model as a strategy spreads it. All ranks call the functions together."""

    module: nn.Module
    """The module whose forward is called."""
    main: Mapping[str, nn.Parameter]
    """The float32 weights that this rank keeps, by canonical name, DTensors where they are cut. The optimiser updates
    those that require a gradient."""
    trained: tuple[str, ...]
    """Names of the parameters that are trained, those of other ranks too."""
    saves: bool
    """Whether this rank saves what it keeps whole."""
    copies: int
    """How many ranks keep each number of `main`."""
    begin: Callable[[], None]
    """Forgets all gradients."""
    micro: Callable[[bool], None]
    """Is told before each micro-batch whether it is the last one of the step."""
    finish: Callable[[], None]
    """Puts the gradients of the step, summed over the ranks, into those of `main` that are trained."""
    publish: Callable[[], None]
    """Makes the model compute with what `main` holds now."""
    whole: Callable[[str, Tensor | None], Tensor]
    """Returns the whole of a tensor that lies like the parameter of that name, on rank 0 at least."""


@attrs.frozen(kw_only=True, eq=False)
class Share:
    """What a rank has of a tensor."""

    local: Tensor
    """Its elements, in the memory of the tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    at: tuple[int, ...]
    """First index of the share in the whole tensor."""
    first: bool | None
    """Whether this rank is the first that has this share; None where the tensor is not cut."""

    def placed(self, name: str) -> Placed:
        """Returns the place of the share under a canonical name."""
        size = tuple(self.local.shape)
        part = Part(at=self.at, local=(0,) * len(size), size=size)
        return Placed(name=name, shape=self.shape, parts=(part,) if self.local.numel() or not self.cut else ())

    @property
    def cut(self) -> bool:
        """Whether other ranks have other parts of the tensor."""
        return self.first is not None


@torch.no_grad()
def share(tensor: Tensor) -> Share:
    """Returns what this rank has of a tensor. Nothing is copied or sent."""
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        return Share(local=tensor.detach(), shape=shape, at=(0,) * len(shape), first=None)
    mesh, placements = tensor.device_mesh, tensor.placements
    _, at = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    place = mesh.get_coordinate()
    assert place is not None
    first = all(not i for i, placement in zip(place, placements, strict=True) if isinstance(placement, Replicate))
    return Share(local=tensor.to_local(), shape=tuple(tensor.shape), at=tuple(at), first=first)


def like(tensor: Tensor, local: Tensor) -> Tensor:
    """Returns a tensor that lies like another one, given this rank's elements."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor.from_local(
        local.to(tensor.device),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def built(cfg: ModelConfig, ctx: Ctx, parallel: TorchParallel) -> nn.Module:
    """Returns the module in float32 before it is spread: on the device, or without memory where it will be cut.

    A module with buffers is built on the CPU before it is cut: buffers start as the module makes them.
    """
    ctx = attrs.evolve(ctx, dtype=torch.float32)
    if not cuts(parallel):
        return build_model(cfg, ctx).to(ctx.device.torch_type)
    with torch.device("meta"):
        model = build_model(cfg, attrs.evolve(ctx, meta=True))
    if any(True for _ in model.buffers()):
        with torch.device("cpu"):
            model = build_model(cfg, ctx)
    return model


def cuts(parallel: TorchParallel) -> bool:
    """Returns whether a strategy cuts parameters."""
    return parallel.strategy in ("fsdp", "hsdp")


def prepare(model: nn.Module, cfg: ModelConfig, ctx: Ctx, parallel: TorchParallel, say: Say) -> None:
    """Makes the units of a module compile their forward, and make activations again, as `parallel` says."""
    if not parallel.compile and not parallel.recompute:
        return
    spec = shard_spec(cfg)
    if parallel.compile:
        found = units(model, cfg, "fsdp_units", spec.fsdp_units)
        compile_units(list(found.values()), ctx.device.torch_type, say)
    if parallel.recompute:
        for module in units(model, cfg, "recompute_units", spec.recompute_units).values():
            recompute(module)


def replicate(model: nn.Module, cfg: ModelConfig, ctx: Ctx, parallel: TorchParallel) -> Spread:
    """Returns a module that computes whole on every rank (`ddp`, `zero1`). Its weights are set already.

    Gradients are added up in float32, in one buffer for all, and summed over the ranks once a step.
    """
    rank, zero = dist.get_rank(), parallel.strategy == "zero1"
    params = dict(model.named_parameters())
    trained = tuple(name for name, param in params.items() if param.requires_grad)
    owner = _owners(params, dist.get_world_size()) if zero else dict.fromkeys(params, rank)
    main = _narrowed(model, cfg, ctx.dtype, {name for name, of in owner.items() if of == rank})
    order = sorted(trained, key=owner.__getitem__)
    sizes = [params[name].numel() for name in order]
    flat = torch.zeros(sum(sizes), device=ctx.device.torch_type)
    views = {name: view.view_as(params[name]) for name, view in zip(order, torch.split(flat, sizes), strict=True)}
    segments: list[tuple[int, Tensor]] = []
    for of in sorted({owner[name] for name in order} if zero else ()):
        starts = [sum(sizes[:i]) for i, name in enumerate(order) if owner[name] == of]
        stop = starts[0] + sum(n for n, name in zip(sizes, order, strict=True) if owner[name] == of)
        segments.append((of, flat[starts[0] : stop]))

    for name in trained:
        params[name].register_post_accumulate_grad_hook(functools.partial(_add_up, views[name]))

    def begin() -> None:
        flat.zero_()
        for name in trained:
            params[name].grad = None

    def finish() -> None:
        if zero:
            _wait(dist.reduce(segment, of, async_op=True) for of, segment in segments)
        else:
            dist.all_reduce(flat)
        for name in trained:
            if name in main:
                main[name].grad = views[name]

    @torch.no_grad()
    def publish() -> None:
        if not zero:
            for name in trained:
                if main[name] is not params[name]:
                    params[name].copy_(main[name])
            return
        for name in trained:
            if name in main:
                views[name].copy_(main[name])
        _wait(dist.broadcast(segment, of, async_op=True) for of, segment in segments)
        for name in trained:
            if main.get(name) is not params[name]:
                params[name].copy_(views[name])

    @torch.no_grad()
    def whole(name: str, mine: Tensor | None) -> Tensor:
        if not zero:
            assert mine is not None
            return mine.detach()
        out = torch.empty(params[name].shape, device=flat.device) if mine is None else mine.detach().contiguous()
        dist.broadcast(out, owner[name])
        return out

    return Spread(
        module=model,
        main=main,
        trained=trained,
        saves=zero or rank == 0,
        copies=1 if zero else dist.get_world_size(),
        begin=begin,
        micro=lambda last: None,
        finish=finish,
        publish=publish,
        whole=whole,
    )


def _owners(params: Mapping[str, nn.Parameter], world: int) -> dict[str, int]:
    """Returns the rank that keeps each parameter: large ones first, each to the rank that has least so far.

    Whole parameters, because an optimiser may need them whole. Those that are trained are dealt out for themselves:
    they weigh several times as much.
    """
    owner: dict[str, int] = {}
    for kind in (True, False):
        load = [0] * world
        names = [name for name, param in params.items() if param.requires_grad == kind]
        for name in sorted(names, key=lambda name: -params[name].numel()):
            owner[name] = load.index(min(load))
            load[owner[name]] += params[name].numel()
    return owner


def _narrowed(model: nn.Module, cfg: ModelConfig, dtype: torch.dtype, keep: Collection[str]) -> dict[str, nn.Parameter]:
    """Changes the parameters of a float32 module to what they compute in; returns the float32 ones that are kept."""
    wide = None if dtype == torch.float32 else wide_names(model, cfg, shard_spec(cfg))
    main = {}
    for name, param in model.named_parameters():
        kept = param
        if wide is not None and name not in wide and param.is_floating_point():
            kept = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
            param.data = param.detach().to(dtype)
        if name in keep:
            main[name] = kept
    return main


@torch.no_grad()
def _add_up(total: Tensor, param: Tensor) -> None:
    assert param.grad is not None
    total.add_(param.grad)
    param.grad = None


def _wait(works: Any) -> None:
    for work in list(works):
        work.wait()


def shard(model: nn.Module, cfg: ModelConfig, ctx: Ctx, parallel: TorchParallel) -> Spread:
    """Returns a module whose parameters are cut over the ranks (`fsdp`, `hsdp`); its weights are yet to be set.

    Gradients are added up whole on each rank over the micro-batches, and summed over the ranks and cut in the last
    one's backward. Every rank must call the same units in the same order; within a unit, parameters may go unused.
    """
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ValueError(
            f"parallel.strategy = {parallel.strategy!r} needs torch 2.13 or newer, and this is {torch.__version__}; "
            "update torch, or set it to ddp or zero1"
        )
    for name, param in model.named_parameters():
        if not param.ndim:
            raise ValueError(
                f"parallel.strategy = {parallel.strategy!r} cuts tensors along their first axis, and {name} of "
                f"{type_name(cfg)} is a single number; give it the shape [1], or set the strategy to ddp or zero1"
            )
    spec, kind = shard_spec(cfg), ctx.device.torch_type
    across = dist.get_world_size() // parallel.replicas
    if parallel.strategy == "hsdp":
        mesh = init_device_mesh(kind, (parallel.replicas, across), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(kind, (across,), mesh_dim_names=("shard",))
    narrow = MixedPrecisionPolicy()
    wide: dict[str, nn.Module] = {}
    if ctx.dtype != torch.float32:
        wide = wide_modules(model, cfg, wide_names(model, cfg, spec))
        narrow = MixedPrecisionPolicy(param_dtype=ctx.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    cut = units(model, cfg, "fsdp_units", spec.fsdp_units)
    # Inner ones first: a unit takes what none inside of it has taken.
    for name, module in reversed(list(model.named_modules())):
        if name in wide:
            fully_shard(module, mesh=mesh)
        elif name in cut or not name:
            fully_shard(module, mesh=mesh, mp_policy=narrow)
    assert isinstance(model, FSDPModule)
    root: FSDPModule = model
    model.to_empty(device=kind) if _on_meta(model) else model.to(kind)
    for module in _cut_modules(model):
        # lf's loss is divided already, so gradients are sums.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    root.set_reduce_scatter_unused_params(True)
    main = dict(model.named_parameters())
    trained = tuple(name for name, param in main.items() if param.requires_grad)

    def begin() -> None:
        for name in trained:
            main[name].grad = None

    def finish() -> None:
        for name in trained:
            if main[name].grad is None:
                main[name].grad = torch.zeros_like(main[name])

    def publish() -> None:
        # What is still gathered holds the weights of before.
        for module in _cut_modules(model):
            module.reshard()

    def whole(name: str, mine: Tensor | None) -> Tensor:
        assert isinstance(mine, DTensor)
        return mine.full_tensor().detach()

    return Spread(
        module=model,
        main=main,
        trained=trained,
        saves=dist.get_rank() == 0,
        copies=parallel.replicas,
        begin=begin,
        micro=root.set_requires_gradient_sync,
        finish=finish,
        publish=publish,
        whole=whole,
    )


def _on_meta(model: nn.Module) -> bool:
    return any(param.is_meta for param in model.parameters())


def _cut_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
