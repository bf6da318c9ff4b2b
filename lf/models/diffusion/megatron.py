"""What a diffusion transformer is built from on the Megatron path, where ranks share its matrices and its sequence.

Shapes: T tokens, W width, N heads, D head width.
"""

import functools
from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    all_gather_last_dim_from_tensor_parallel_region,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from lf.models import spec
from lf.models.diffusion.latent import LatentModel
from lf.models.diffusion.layers import Exchange, LatentModule, Layers, Norm
from lf.models.diffusion.packed import Place, held
from lf.models.layers.context import GatherSequence, heads_for_sequence, sequence_for_heads
from lf.models.layers.fused import rms_norm
from lf.models.layers.megatron import config_fields
from lf.models.layers.norm import HeadsNorm


def megatron_layers(cfg: LatentModel, ctx: spec.Ctx) -> Layers:
    """Returns the layers of a rank."""
    tp, cp, sp = ctx.groups.tp, ctx.groups.cp, ctx.layout.sp
    config, whole = (
        TransformerConfig(
            num_layers=cfg.layers,
            hidden_size=cfg.width,
            num_attention_heads=cfg.heads,
            sequence_parallel=shared,
            **config_fields(ctx),
        )
        for shared in (sp, False)
    )
    column, row = (_alone(kind) for kind in (ctx.layers.column_parallel_linear(), ctx.layers.row_parallel_linear()))

    def sliced(module: nn.Module) -> nn.Module:
        for param in module.parameters():
            param.sequence_parallel = sp  # type: ignore[attr-defined]
        return module

    def place(of: Place) -> Place:
        return (of[0] * tp.size() + tp.rank(), of[1] * tp.size()) if sp else of

    cut = {"gather_output": False}
    kinds = {"gather": _gathered, "ulysses": _exchanged}
    return Layers(
        column=functools.partial(_linear, column, config, tp, cut),
        column_of_whole=functools.partial(_linear, column, whole, tp, cut),
        row=functools.partial(_linear, row, config, tp, {"input_is_parallel": True}),
        # TransformerEngine multiplies float32 matrices in TF32, and some of these stay float32.
        spread=functools.partial(_linear, _SpreadForSlices if sp else _Spread, whole, tp, cut),
        norm=lambda width, eps: Norm(width, eps) if tp.size() == 1 else _AllHeadsNorm(config, width, eps, 1, tp),
        head_norm=lambda width, eps: _HeadNorm(width, eps, tp),
        sliced=sliced,
        enter=(lambda x: copy_to_tensor_model_parallel_region(x, group=tp)) if sp else _same,
        leave=(lambda x: gather_from_sequence_parallel_region(x, False, group=tp)) if sp else _same,
        place=place,
        exchange=kinds[ctx.layout.cp_kind](cp) if cp.size() > 1 else Exchange(),
        config=config,
        group=tp,
    )


def _same(x: Tensor) -> Tensor:
    return x


def _linear(kind: Any, config: Any, group: Any, own: Mapping[str, Any], width: int, out: int) -> nn.Module:
    made: nn.Module = kind(
        width,
        out,
        config=config,
        init_method=config.init_method,
        bias=True,
        skip_bias_add=False,
        is_expert=False,
        tp_group=group,
        **own,
    )
    return made


@functools.cache
def _alone(kind: Any) -> Any:
    """Returns a linear layer of megatron-core's or TransformerEngine's that gives its output without a second value."""

    class Alone(kind):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = super().forward(x)[0]
            return made

    return Alone


class _Spread(_alone(ColumnParallelLinear)):  # type: ignore[misc]
    """Every rank gets all outputs, and goes on to do with them what all others do."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = gather_from_tensor_model_parallel_region(super().forward(x), group=self.tp_group)
        return made


class _SpreadForSlices(_alone(ColumnParallelLinear)):  # type: ignore[misc]
    """Every rank gets all outputs, for its own tokens: so gradients are summed."""

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = all_gather_last_dim_from_tensor_parallel_region(super().forward(x), group=self.tp_group)
        return made


class _AllHeadsNorm(HeadsNorm):
    """RMSNorm over the last dimension, of which each rank has its own heads."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns x of the same shape, normalised."""
        return super().forward(x[..., None, :])[..., 0, :]


class _HeadNorm(Norm):
    """RMSNorm of each head; every rank has the weight for its own heads, so its gradients are summed."""

    def __init__(self, width: int, eps: float, group: Any) -> None:
        super().__init__(width, eps)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Returns x of the same shape and dtype, normalised."""
        weight = copy_to_tensor_model_parallel_region(self.weight, group=self.group)
        return rms_norm(x, weight.to(x.dtype), self.eps)


def _gathered(group: Any) -> Exchange:
    """Queries stay where they are, and every rank gets all keys and values."""
    return Exchange(held=held, keys=lambda x_TND: GatherSequence.apply(x_TND, group, True))


def _exchanged(group: Any) -> Exchange:
    """Each rank gets the whole sequence of its share of the heads (DeepSpeed-Ulysses, arXiv:2309.14509)."""
    mine = functools.partial(heads_for_sequence, group=group, even=True)
    return Exchange(queries=mine, keys=mine, back=functools.partial(sequence_for_heads, group=group, even=True))


def placed(model: LatentModule, dp_cp: Any) -> dict[str, Any]:
    """Returns the place of every weight by name: tensor parallel ranks share the axis that its layer has marked."""
    made, tp = {}, model.layers.group
    for name, tensor in spec.named_tensors(model).items():
        shared = getattr(tensor, "tensor_model_parallel", False)
        axes = [(tensor.partition_dim, tp.rank(), tp.size())] if shared else []  # type: ignore[attr-defined]
        replica = (0, 0 if shared else tp.rank(), dp_cp.rank())
        made[name] = ShardedTensor.from_rank_offsets(name, tensor, *axes, replica_id=replica)
    return made
