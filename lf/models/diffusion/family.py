"""What lf asks of every model of latents on both train paths: its module, its units, its layouts, each rank's part.

On the Megatron path a micro-batch is one sequence of T tokens. Context parallel ranks each have a slice of it, and
between the matrices tensor parallel ranks with `sp` each a slice of that one. Attention is not causal, so all slices
have as much to do, and follow each other. A sample of weight 0 fills the sequence up to what divides.

Shapes: T tokens, P numbers of a patch, K text tokens, R runs of tokens of one time.
"""

import fnmatch
import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from lf.models import spec
from lf.models.diffusion.latent import LatentModel
from lf.models.diffusion.layers import TORCH, Attention, GeluMlp, LatentModule, Layers
from lf.models.diffusion.packed import Packing, slice_of
from lf.models.layers.recompute import recompute

TOKENS = ("latents", "noised", "condition", "noise", "sigma", "weight")
"""What a batch has of each token."""
RECOMPUTED: dict[str, type[nn.Module]] = {"core_attn": Attention, "mlp": GeluMlp}
"""Modules of a block that can be made again for themselves."""


@attrs.frozen(kw_only=True)
class Family:
    """What must be known of a family to build and to share out its models."""

    module: Callable[[Any, Layers], LatentModule]
    """Makes the module of a config. Its blocks are `blocks`."""
    wide: tuple[str, ...]
    """Glob patterns of the tensors that compute in float32 in a bfloat16 model; `*` matches dots too."""
    unused: tuple[str, ...] = ()
    """Tensors that no output depends on. Published checkpoints hold them, so the model does; they are never trained
    and no rank waits for their gradients."""
    shared: tuple[tuple[str, int], ...]
    """What tensor parallel ranks share out evenly: its name and its size."""


@functools.singledispatch
def family_of(cfg: LatentModel) -> Family:
    """Returns what must be known of a model's family."""
    raise spec.no_rule(family_of, cfg)


@spec.paths.register
def _(cfg: LatentModel) -> tuple[spec.Path, ...]:
    return ("torch", "megatron")


@spec.build_model.register
def _(cfg: LatentModel, ctx: spec.Ctx) -> nn.Module:
    if ctx.groups is None:
        with torch.device("meta"):
            model = _typed(cfg, TORCH, ctx)
        return model if ctx.meta else model.to_empty(device=ctx.device.torch_type)
    from lf.models.diffusion.megatron import megatron_layers

    with torch.device("meta" if ctx.meta else ctx.device.torch_type):
        model = _typed(cfg, megatron_layers(cfg, ctx), ctx)
    _recompute(model, dict(ctx.options))
    return model


def _typed(cfg: LatentModel, layers: Layers, ctx: spec.Ctx) -> LatentModule:
    """Returns a module whose parameters have their types; those that no output depends on are frozen."""
    family = family_of(cfg)
    model = family.module(cfg, layers).to(ctx.dtype)
    for name, param in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in family.wide):
            param.data = param.data.float()
    for name in family.unused:
        model.get_parameter(name).requires_grad_(False)
    return model


def _recompute(model: LatentModule, options: dict[str, Any]) -> None:
    blocks = list(model.get_submodule("blocks").children())
    if options.get("recompute_granularity") == "full":
        for block in blocks:
            recompute(block)
    for name in options.get("recompute_modules", ()):
        if name not in RECOMPUTED:
            raise ValueError(
                f"parallel.recompute_modules has {name!r}, and of a diffusion model {' and '.join(RECOMPUTED)} can be "
                "made again; remove it, or set parallel.recompute to full"
            )
        for module in (module for block in blocks for module in block.modules()):
            if isinstance(module, RECOMPUTED[name]):
                recompute(module)


@spec.shard_spec.register
def _(cfg: LatentModel) -> spec.ShardSpec:
    return spec.ShardSpec(fsdp_units=("blocks.*",), recompute_units=("blocks.*",), float32=family_of(cfg).wide)


@spec.check_layout.register
def _(cfg: LatentModel, layout: spec.Layout, length: int) -> None:
    """Rows of any length fit: a sample of weight 0 fills up the sequence."""
    for axis in ("pp", "vpp", "ep", "etp"):
        if getattr(layout, axis) > 1:
            raise ValueError(
                f"parallel.{axis} = {getattr(layout, axis)}, and {spec.type_name(cfg)} has no "
                f"{'pipeline stages' if axis in ('pp', 'vpp') else 'experts'}; set it to 1, and raise tp, cp or the "
                "number of ranks in its place"
            )
    if layout.stages:
        raise ValueError(
            f"parallel.stages = {layout.stages}: {spec.type_name(cfg)} has no pipeline stages; leave it empty"
        )
    for name, size in family_of(cfg).shared:
        if size % layout.tp:
            raise ValueError(f"parallel.tp = {layout.tp} does not divide {name} = {size}; lower parallel.tp")
    if layout.cp_kind == "ulysses" and cfg.heads % (layout.tp * layout.cp):
        raise ValueError(
            f"parallel.cp_kind = 'ulysses' needs tp * cp = {layout.tp * layout.cp} to divide model.heads = {cfg.heads};"
            " use cp_kind = 'gather', or lower cp"
        )


@spec.slice_batch.register
def _(cfg: LatentModel, batch: spec.Batch, layout: spec.Layout) -> spec.Batch:
    """Texts and images stay whole, and so does what says where samples begin."""
    batch = filled(batch, layout.cp * (layout.tp if layout.sp else 1))
    if layout.cp == 1:
        return batch
    place = layout.cp_rank, layout.cp
    return {
        **batch,
        **{name: slice_of(batch[name], place) for name in TOKENS if name in batch},
        "packing": attrs.evolve(batch["packing"], place=place),
        "samples": batch["samples"] / layout.cp,
        "count": batch["count"] / layout.cp,
    }


def filled(batch: spec.Batch, pieces: int) -> spec.Batch:
    """Returns a batch whose tokens and text tokens can be cut in equal pieces; a sample of weight 0 may be added."""
    packing: Packing = batch["packing"]
    tokens, texts = sum(packing.lengths), sum(packing.texts)
    if not tokens % pieces and not texts % pieces:
        return batch
    # A sample has one token of each at least.
    more, text = pieces - tokens % pieces, pieces - texts % pieces

    def longer(name: str, count: int) -> dict[str, Tensor]:
        if name not in batch:
            return {}
        value: Tensor = batch[name]
        return {name: torch.cat((value, value.new_zeros(count, *value.shape[1:])))}

    added: dict[str, Tensor] = {}
    for name in TOKENS:
        added |= longer(name, more)
    for name, count in (("text", text), ("image", 1), ("time", 1)):
        added |= longer(name, count)
    # Which captions are dropped is settled, so nobody asks for the empty one any more.
    rest = {name: value for name, value in batch.items() if name not in ("empty", "empties")}
    return {
        **rest,
        **added,
        "packing": attrs.evolve(
            packing,
            grids=(*packing.grids, ((1, 1, more),)),
            texts=(*packing.texts, text),
            images=(*packing.images, 1) if packing.images else (),
            runs=(*packing.runs, (more,)),
        ),
        "clean": (*batch["clean"], False),
        "real": (*batch["real"], False),
    }
