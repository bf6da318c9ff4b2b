"""DecoderConfig to megatron-core's GPTModel: the config, the layer spec, and what lf does otherwise.

Shapes: S positions, B rows, P rows of the output layer.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from lf.models.decoder import Attention, DecoderConfig, Mlp
from lf.models.layers.loss import token_losses
from lf.models.layers.rope import DynamicScaling, rope_table
from lf.models.spec import IGNORE, Ctx, Layout

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""Functions of the gate by the name that configs use."""


def transformer_config(cfg: DecoderConfig, ctx: Ctx) -> TransformerConfig:
    """Returns megatron-core's config of a decoder on this rank; it never leaves the modules built from it."""
    attention, mlp, layout = cfg.attention, cfg.mlp, ctx.layout
    assert isinstance(attention, Attention)
    assert isinstance(mlp, Mlp)
    windowed: dict[str, Any] = {}
    if attention.window:
        flags = [int(layer in attention.window_layers) for layer in range(cfg.layers)]
        windowed = {"window_size": (attention.window - 1, 0), "window_attn_skip_freq": flags}
    return TransformerConfig(
        num_layers=cfg.layers,
        hidden_size=cfg.hidden,
        ffn_hidden_size=mlp.width,
        num_attention_heads=attention.heads,
        num_query_groups=attention.kv_heads,
        kv_channels=attention.head_dim,
        qk_layernorm=attention.qk_norm,
        add_qkv_bias=attention.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[mlp.activation],
        use_te_activation_func=_has_swiglu(mlp, ctx),
        normalization="RMSNorm",
        layernorm_epsilon=cfg.norm.eps,
        attention_dropout=attention.dropout,
        hidden_dropout=0.0,
        params_dtype=ctx.dtype,
        pipeline_dtype=ctx.dtype,
        bf16=ctx.dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=stage_layout(cfg, layout) if layout.pp > 1 else None,
        # Batched sends to the next and the previous stage meet on one rank when there are two, and gloo mixes them up.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        context_parallel_size=layout.cp,
        cp_comm_type="a2a" if layout.cp_kind == "ulysses" else "all_gather",
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sp,
        # lf draws weights from (seed, name) and divides by the weight of the global batch itself. megatron-core's
        # initialisation still runs, because it is what marks the parameters that tensor parallel ranks share.
        init_method=_keep,
        output_layer_init_method=_keep,
        embedding_init_method=_keep,
        # It is then torch's default device that decides where tensors are made, instead of the current card.
        use_cpu_initialization=not _is_te(ctx),
        init_model_with_meta_device=ctx.meta,
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        transformer_impl="transformer_engine" if _is_te(ctx) else "local",
        **windowed,
        **dict(ctx.options),
    )


def _keep(weight: Tensor) -> Tensor:
    return weight


def stage_layout(cfg: DecoderConfig, layout: Layout) -> list[list[str]]:
    """Returns what each pipeline chunk holds, in megatron-core's words and in the order of the layers."""
    chunks = layout.pp * layout.vpp
    counts = layout.stages or [cfg.layers // chunks + (i < cfg.layers % chunks) for i in range(chunks)]
    stages = [["decoder"] * count for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _is_te(ctx: Ctx) -> bool:
    return bool(ctx.layers.fuse_layernorm_and_linear())


def _has_swiglu(mlp: Mlp, ctx: Ctx) -> bool:
    """Returns whether the layer backend brings the activation: lf's own has SwiGLU and nothing else."""
    return mlp.activation == "silu" and not _is_te(ctx)


def layer_spec(cfg: DecoderConfig, ctx: Ctx) -> ModuleSpec:
    """Returns the modules of one decoder layer from the layer backend."""
    layers = ctx.layers
    fused = _is_te(ctx)
    norm = layers.layer_norm(rms_norm=True, for_qk=False)
    qk_norm = layers.layer_norm(rms_norm=True, for_qk=True)
    column = layers.column_parallel_layer_norm_linear() if fused else layers.column_parallel_linear()
    assert isinstance(cfg.attention, Attention)
    assert isinstance(cfg.mlp, Mlp)
    activation = layers.activation_func() if _has_swiglu(cfg.mlp, ctx) else None
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if fused else norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=column,
                    core_attention=layers.core_attention(),
                    linear_proj=layers.row_parallel_linear(),
                    q_layernorm=qk_norm if cfg.attention.qk_norm else IdentityOp,
                    k_layernorm=qk_norm if cfg.attention.qk_norm else IdentityOp,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused else norm,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(
                    linear_fc1=column, activation_func=activation, linear_fc2=layers.row_parallel_linear()
                ),
            ),
            mlp_bda=get_bias_dropout_add,
            # TransformerEngine keeps a norm inside the linear after it; the canonical names keep it apart.
            sharded_state_dict_keys_map={
                "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
                "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
            }
            if fused
            else {},
        ),
    )


class Gpt(GPTModel):
    """megatron-core's GPTModel with lf's rotary table and a loss that never sees padded vocabulary."""

    def __init__(self, cfg: DecoderConfig, ctx: Ctx) -> None:
        config = transformer_config(cfg, ctx)
        chunk = ctx.chunk if ctx.layout.vpp > 1 else None
        block = TransformerBlockSubmodules(
            layer_specs=[layer_spec(cfg, ctx)] * get_num_layers_to_build(config, chunk, ctx.layout.pp_rank),
            layer_norm=ctx.layers.layer_norm(rms_norm=True),
        )
        super().__init__(
            config,
            block,
            vocab_size=padded_vocab(cfg, ctx.layout.tp),
            max_sequence_length=cfg.max_length,
            pre_process=ctx.pre,
            post_process=ctx.post,
            share_embeddings_and_output_weights=cfg.tied,
            position_embedding_type="none",
            pg_collection=ctx.groups,
            vp_stage=chunk,
        )
        self.cfg = cfg
        self.unpadded = {"embedding.word_embeddings.weight": cfg.vocab, "output_layer.weight": cfg.vocab}

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Returns the loss of every position [B, S]; without labels the logits [B, S, V], padded vocabulary cut off."""
        out = super().forward(*args, labels=labels, **kwargs)
        return out[..., : self.cfg.vocab] if labels is None and self.post_process else out

    def _preprocess(self, input_ids: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        made = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        assert isinstance(self.cfg.attention, Attention)
        # Only dynamic scaling asks for the longest position, and reading it makes an accelerator wait.
        dynamic = isinstance(self.cfg.rope.scaling, DynamicScaling)
        longest = int(position_ids.max()) + 1 if dynamic else 0
        table = rope_table(self.cfg.rope, self.cfg.attention.head_dim, position_ids, longest)
        return (made[0], table.to(self.config.params_dtype), *made[2:])

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Returns the fp32 cross entropy of every position [B, S] from labels [B, S] and logits [S, B, P]."""
        return token_losses(logits, labels, self.cfg.vocab, IGNORE, self.pg_collection.tp)


def padded_vocab(cfg: DecoderConfig, tp: int) -> int:
    """Returns the rows of the embedding over all tensor parallel ranks."""
    multiple = math.lcm(cfg.vocab_multiple, tp)
    return -(-cfg.vocab // multiple) * multiple


def build_gpt(cfg: DecoderConfig, ctx: Ctx) -> Gpt:
    """Returns the decoder of this rank, its weights not yet set."""
    with torch.device("meta" if ctx.meta else ctx.device.torch_type):
        return Gpt(cfg, ctx)
