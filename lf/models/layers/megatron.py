"""The layer backends of the Megatron path: torch's own layers, or TransformerEngine's."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from lf.devices.device import Device
from lf.models.layers.attention import TorchAttention
from lf.models.layers.fused import swiglu
from lf.models.layers.norm import TorchNorm as TorchNorm
from lf.models.spec import Ctx


class TorchLinear(nn.Module):
    """A linear layer that every tensor parallel rank has whole, for its own part of the sequence; it has no bias."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **unused: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Returns the product and no bias."""
        return F.linear(x, self.weight), None


class TorchProvider(BackendSpecProvider):
    """Layers that need nothing but torch: CPUs, Kunlun, and GPUs without TransformerEngine run them."""

    def column_parallel_linear(self) -> type:
        """Returns the linear layer that is split by output."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Returns the linear layer that is split by input."""
        return RowParallelLinear

    def linear(self) -> type:
        """Returns the linear layer that every tensor parallel rank has whole."""
        return TorchLinear

    def fuse_layernorm_and_linear(self) -> bool:
        """Returns whether a norm and the linear after it are one module."""
        return False

    def column_parallel_layer_norm_linear(self) -> type | None:
        """Returns the module of a norm and a linear, None where there is none."""
        return None

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        """Returns the norm."""
        return TorchNorm

    def core_attention(self) -> type:
        """Returns the attention between the projections."""
        return TorchAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> tuple[type, Any]:
        """Returns the module of the experts and its parts."""
        return SequentialMLP, MLPSubmodules(
            linear_fc1=ColumnParallelLinear, activation_func=swiglu, linear_fc2=RowParallelLinear
        )

    def activation_func(self) -> Callable[[Tensor], Tensor]:
        """Returns the function between a gated layer's projections, for configs whose activation is SiLU."""
        return swiglu


def provider(device: Device, dtype: torch.dtype) -> BackendSpecProvider:
    """Returns the layer backend of a device for parameters of a dtype: TransformerEngine's where it fits, else torch's.

    TransformerEngine multiplies float32 matrices in TF32, and its fused attention takes 16-bit types only, so float32
    runs on torch's layers everywhere.
    """
    if "transformer_engine" not in device.capabilities or dtype == torch.float32:
        return TorchProvider()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def duplicated_linear(layers: Any, config: Any, width: int, out: int) -> Any:
    """Returns a projection that every tensor parallel rank has whole, for its own part of the sequence."""
    return layers.linear()(
        width,
        out,
        parallel_mode="duplicated",
        config=config,
        init_method=config.init_method,
        bias=False,
        skip_bias_add=False,
        skip_weight_param_allocation=False,
        is_expert=False,
    )


def is_te(layers: BackendSpecProvider) -> bool:
    """Returns whether a layer backend is TransformerEngine's."""
    return bool(layers.fuse_layernorm_and_linear())


def config_fields(ctx: Ctx) -> dict[str, Any]:
    """Returns what megatron-core's config of every model of a rank has."""
    return {
        "params_dtype": ctx.dtype,
        "pipeline_dtype": ctx.dtype,
        "bf16": ctx.dtype == torch.bfloat16,
        "tensor_model_parallel_size": ctx.layout.tp,
        "context_parallel_size": ctx.layout.cp,
        # lf draws weights from (seed, name) and divides by the weight of the global batch itself. megatron-core's
        # initialisation still runs, because it is what marks the parameters that tensor parallel ranks share.
        "init_method": _keep,
        "output_layer_init_method": _keep,
        "embedding_init_method": _keep,
        # It is then torch's default device that decides where tensors are made, instead of the current card.
        "use_cpu_initialization": not is_te(ctx.layers),
        "init_model_with_meta_device": ctx.meta,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "transformer_impl": "transformer_engine" if is_te(ctx.layers) else "local",
    }


def _keep(weight: Tensor) -> Tensor:
    return weight
