"""Data parallelism of the torch path: who keeps which weights, and how gradients become sums over the ranks.

`ddp` keeps everything on every rank. `zero1` (ZeRO stage 1, arXiv:1910.02054) gives each parameter to one rank, which
alone keeps its float32 weights and its optimiser state. `fsdp` cuts every parameter along its first axis with torch's
FSDP2 (`fully_shard`); `hsdp` does so within each of several groups of ranks that hold the same.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from lf.models.layers.recompute import recompute
from lf.models.spec import Ctx, ModelConfig, Part, Placed, build_model, shard_spec, type_name
from lf.parallel.config import TorchParallel
from lf.parallel.torch_units import Say, compile_units, units, wide_modules, wide_names

BUCKET = 2**23
"""Gradients that are sent at once, where ranks keep whole parameters."""


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

    Gradients are added up in float32 over the micro-batches, and summed over the ranks once a step, beside the last
    backward.
    """
    rank, zero = dist.get_rank(), parallel.strategy == "zero1"
    params = dict(model.named_parameters())
    trained = tuple(name for name, param in params.items() if param.requires_grad)
    owner = _owners(params, dist.get_world_size()) if zero else dict.fromkeys(params, 0)
    main = _narrowed(model, cfg, ctx.dtype, {name for name, of in owner.items() if not zero or of == rank})
    sums = _Sums(_buckets(params, trained, owner), zero)

    def finish() -> None:
        sums.finish()
        for name in trained:
            if name in main:
                main[name].grad = sums.views[name]

    @torch.no_grad()
    def publish() -> None:
        if zero:
            # The room of the gradients, which are of no use any more, takes the weights.
            for name in trained:
                if name in main:
                    sums.views[name].copy_(main[name])
            _wait(dist.broadcast(bucket.sums, bucket.owner, async_op=True) for bucket in sums.buckets)
        for name in trained:
            if main.get(name) is not params[name]:
                params[name].copy_(sums.views[name] if zero else main[name])

    @torch.no_grad()
    def whole(name: str, mine: Tensor | None) -> Tensor:
        if not zero:
            assert mine is not None
            return mine.detach()
        out = torch.empty_like(params[name], dtype=torch.float32) if mine is None else mine.detach().contiguous()
        dist.broadcast(out, owner[name])
        return out

    return Spread(
        module=model,
        main=main,
        trained=trained,
        saves=zero or rank == 0,
        copies=1 if zero else dist.get_world_size(),
        begin=sums.begin,
        micro=sums.micro,
        finish=finish,
        publish=publish,
        whole=whole,
    )


@attrs.frozen(kw_only=True, eq=False)
class _Bucket:
    """Gradients that are sent together."""

    params: Mapping[str, nn.Parameter]
    """Whose they are."""
    owner: int
    """The rank that needs them, where not all do."""
    sums: Tensor
    """Room for their sums, one after the other."""


def _buckets(params: Mapping[str, nn.Parameter], trained: Sequence[str], owner: Mapping[str, int]) -> list[_Bucket]:
    """Returns the trained parameters in buckets of one owner each, roughly in the order of their gradients."""
    made, filling = [], dict[int, list[str]]()
    for name in reversed(trained):
        names = filling.setdefault(owner[name], [])
        names.append(name)
        if sum(params[each].numel() for each in names) >= BUCKET:
            made.append((owner[name], filling.pop(owner[name])))
    return [
        _Bucket(
            params={name: params[name] for name in names},
            owner=of,
            sums=torch.zeros(sum(params[name].numel() for name in names), device=params[names[0]].device),
        )
        for of, names in (*made, *filling.items())
    ]


class _Sums:
    """Adds the gradients of a step up and sends each bucket as soon as it is whole.

    All ranks send the buckets in one order, whichever gradients come first or never, so that none waits for another.
    """

    def __init__(self, buckets: Sequence[_Bucket], zero: bool) -> None:
        self.buckets, self.zero, self.last = buckets, zero, False
        self.views: dict[str, Tensor] = {}
        self.left: list[int] = []
        self.works: list[Any] = []
        for i, bucket in enumerate(buckets):
            sizes = [param.numel() for param in bucket.params.values()]
            for (name, param), view in zip(bucket.params.items(), torch.split(bucket.sums, sizes), strict=True):
                self.views[name] = view.view_as(param)
                if param.dtype != view.dtype or dist.get_world_size() > 1:
                    param.register_post_accumulate_grad_hook(functools.partial(self._add, i, self.views[name]))

    def begin(self) -> None:
        """Forgets all gradients."""
        self.left, self.works = [len(bucket.params) for bucket in self.buckets], []
        for bucket in self.buckets:
            bucket.sums.zero_()
            for name, param in bucket.params.items():
                # Autograd itself adds to a gradient that is there, in place.
                param.grad = self.views[name] if param.dtype == bucket.sums.dtype else None

    def micro(self, last: bool) -> None:
        """Is told whether the next backward is the last one of the step."""
        self.last = last

    @torch.no_grad()
    def _add(self, i: int, total: Tensor, param: Tensor) -> None:
        if param.dtype != total.dtype:
            assert param.grad is not None
            total.add_(param.grad)
            param.grad = None
        self.left[i] -= self.last
        while len(self.works) < len(self.buckets) and not self.left[len(self.works)]:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self.works)]
        if self.zero:
            self.works.append(dist.reduce(bucket.sums, bucket.owner, async_op=True))
        else:
            self.works.append(dist.all_reduce(bucket.sums, async_op=True))

    def finish(self) -> None:
        """Sends what is left, and waits until all sums are there."""
        while len(self.works) < len(self.buckets):
            self._send()
        _wait(self.works)


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


def _wait(works: Any) -> None:
    for work in list(works):
        work.wait()


def shard(model: nn.Module, cfg: ModelConfig, ctx: Ctx, parallel: TorchParallel) -> Spread:
    """Returns a module whose parameters are cut over the ranks (`fsdp`, `hsdp`); its weights are yet to be set.

    Gradients are added up whole on each rank over the micro-batches, and summed over the ranks and cut in the last
    one's backward. Every rank must call the same units in the same order; within a unit, parameters may go unused.
    """
    _check_cuts(model, cfg, parallel)
    root = _cut(model, cfg, ctx, parallel)
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


def _check_cuts(model: nn.Module, cfg: ModelConfig, parallel: TorchParallel) -> None:
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


def _cut(model: nn.Module, cfg: ModelConfig, ctx: Ctx, parallel: TorchParallel) -> FSDPModule:
    """Cuts the parameters of a module, in place, and returns it; on the meta device before, they get memory."""
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
    found = units(model, cfg, "fsdp_units", spec.fsdp_units)
    # Inner ones first: a unit takes what none inside of it has taken.
    for name, module in reversed(list(model.named_modules())):
        if name in wide:
            fully_shard(module, mesh=mesh)
        elif name in found or not name:
            fully_shard(module, mesh=mesh, mp_policy=narrow)
    if any(param.is_meta for param in model.parameters()):
        model.to_empty(device=kind)
    for module in _cut_modules(model):
        # lf's loss is divided already, so gradients are sums.
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_unused_params(True)
    return model


def _cut_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
