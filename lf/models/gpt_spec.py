"""DecoderConfig to megatron-core's words: its config, and the modules of each layer."""

import functools
from typing import Any

import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from lf.models.decoder import DecoderConfig
from lf.models.decoder_facts import is_sparse, kv_heads, mtp_depth, query_key_width
from lf.models.layers.experts import SparseLayer
from lf.models.layers.media import LevelLayer, LevelSparseLayer
from lf.models.layers.megatron import config_fields, is_te
from lf.models.layers.mla import LatentAttention
from lf.models.layers.norm import HeadsNorm
from lf.models.layers.rope import latent_scale
from lf.models.parts import Attention, AttentionConfig, Mla, Mlp
from lf.models.spec import Ctx, Layout, type_name

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}
"""Functions of the gate by the name that configs use."""


def transformer_config(cfg: DecoderConfig, ctx: Ctx) -> TransformerConfig:
    """Returns megatron-core's config of a decoder on this rank; it never leaves the modules built from it."""
    attention, mlp, layout = cfg.attention, cfg.mlp, ctx.layout
    assert isinstance(attention, (Attention, Mla))
    assert isinstance(mlp, Mlp)
    return TransformerConfig(
        num_layers=cfg.layers,
        hidden_size=cfg.hidden,
        ffn_hidden_size=mlp.width,
        num_attention_heads=attention.heads,
        num_query_groups=kv_heads(attention),
        kv_channels=query_key_width(attention),
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS[mlp.activation],
        use_te_activation_func=_has_swiglu(mlp, ctx),
        normalization="RMSNorm",
        layernorm_epsilon=cfg.norm.eps,
        attention_dropout=attention.dropout,
        hidden_dropout=0.0,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=stage_layout(cfg, layout) if layout.pp > 1 else None,
        # Batched sends to the next and the previous stage meet on one rank when there are two, and gloo mixes them up.
        overlap_p2p_comm=layout.vpp > 1,
        batch_p2p_comm=layout.vpp == 1,
        cp_comm_type="a2a" if layout.cp_kind == "ulysses" else "all_gather",
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        sequence_parallel=layout.sp,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        **config_fields(ctx),
        **_attention_fields(cfg),
        **_expert_fields(cfg),
        **{name: value for name, value in ctx.options if name != "recompute_modules"},
        **_recompute_fields(cfg, ctx),
    )


RECOMPUTED = {
    "moe": "experts",
    "shared_experts": "a shared expert",
    "moe_act": "experts",
    "mla_up_proj": "latent attention",
}
"""What a model must have for a part of it to be made again."""


def _recompute_fields(cfg: DecoderConfig, ctx: Ctx) -> dict[str, Any]:
    """Returns which modules megatron-core makes again; latent attention is lf's own, and asks `_recomputed` itself."""
    e, modules = cfg.experts, _recomputed(ctx)
    has = {"experts": e is not None, "a shared expert": e is not None and e.shared > 0}
    has["latent attention"] = isinstance(cfg.attention, Mla)
    for name in modules:
        if not has.get(RECOMPUTED.get(name, ""), True):
            raise ValueError(
                f"parallel.recompute_modules has {name!r}, but the model has no {RECOMPUTED[name].removeprefix('a ')}; "
                "remove it"
            )
    return {"recompute_modules": [name for name in modules if name != "mla_up_proj"]} if modules else {}


def _recomputed(ctx: Ctx) -> tuple[str, ...]:
    return tuple(dict(ctx.options).get("recompute_modules", ()))


def _attention_fields(cfg: DecoderConfig) -> dict[str, Any]:
    a = cfg.attention
    if not isinstance(a, Attention):
        return {}
    # This flag lets megatron-core sum the gradients of norms that tensor parallel ranks share.
    fields: dict[str, Any] = {"qk_layernorm": a.qk_norm and a.qk_norm_over == "head", "add_qkv_bias": a.qkv_bias}
    if a.window:
        flags = [int(layer in a.window_layers) for layer in range(cfg.layers + mtp_depth(cfg))]
        fields |= {"window_size": (a.window - 1, 0), "window_attn_skip_freq": flags}
    return fields


def _expert_fields(cfg: DecoderConfig) -> dict[str, Any]:
    """Returns what megatron-core's dispatchers and shared expert read; lf's router does the rest itself."""
    e = cfg.experts
    if e is None:
        return {}
    return {
        "num_moe_experts": e.count,
        "moe_ffn_hidden_size": e.width,
        "moe_router_topk": e.top_k,
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": e.dispatch,
        "moe_shared_expert_intermediate_size": e.shared or None,
        "moe_shared_expert_gate": e.shared_gate,
        "moe_expert_capacity_factor": e.capacity or None,
        "moe_pad_expert_input_to_capacity": e.pad,
    }


def stage_layout(cfg: DecoderConfig, layout: Layout) -> list[list[str]]:
    """Returns what each pipeline chunk holds, in megatron-core's words and in the order of the layers."""
    chunks = layout.pp * layout.vpp
    counts = layout.stages or [cfg.layers // chunks + (i < cfg.layers % chunks) for i in range(chunks)]
    stages = [["decoder"] * count for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _has_swiglu(mlp: Mlp, ctx: Ctx) -> bool:
    """Returns whether the layer backend brings the activation: lf's own has SwiGLU and nothing else."""
    return mlp.activation == "silu" and not is_te(ctx.layers)


def layer_spec(cfg: DecoderConfig, ctx: Ctx, layer: int, levels: int = 0) -> ModuleSpec:
    """Returns the modules of a decoder layer (from 0) from the layer backend.

    The first `levels` layers add features of images and videos to their output.
    """
    fused, sparse = is_te(ctx.layers), is_sparse(cfg, layer)
    norm = ctx.layers.layer_norm(rms_norm=True, for_qk=False)
    assert isinstance(cfg.mlp, Mlp)
    dense, shared = _mlp_submodules(cfg.mlp, ctx, fused), _mlp_submodules(cfg.mlp, ctx, fused=False)
    inside = fused and isinstance(cfg.attention, Attention)
    names = {"self_attention.linear_qkv.layer_norm_": "input_layernorm."} if inside else {}
    if fused and not sparse:
        names["mlp.linear_fc1.layer_norm_"] = "pre_mlp_layernorm."
    kinds = (LevelLayer, LevelSparseLayer) if layer < levels else (TransformerLayer, SparseLayer)
    return ModuleSpec(
        module=kinds[sparse],
        params={"part": cfg.experts, "shared": shared} if sparse else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=IdentityOp if inside else norm,
            self_attention=attention_spec(cfg.attention, cfg, ctx),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if fused and not sparse else norm,
            mlp=IdentityOp if sparse else ModuleSpec(module=MLP, submodules=dense),
            mlp_bda=get_bias_dropout_add,
            # TransformerEngine keeps a norm inside the linear after it; the canonical names keep it apart.
            sharded_state_dict_keys_map=names,
        ),
    )


def _column(ctx: Ctx, fused: bool) -> Any:
    return ctx.layers.column_parallel_layer_norm_linear() if fused else ctx.layers.column_parallel_linear()


def _mlp_submodules(mlp: Mlp, ctx: Ctx, fused: bool) -> MLPSubmodules:
    return MLPSubmodules(
        linear_fc1=_column(ctx, fused),
        activation_func=ctx.layers.activation_func() if _has_swiglu(mlp, ctx) else None,
        linear_fc2=ctx.layers.row_parallel_linear(),
    )


@functools.singledispatch
def attention_spec(attention: AttentionConfig, cfg: DecoderConfig, ctx: Ctx) -> ModuleSpec:
    """Returns the modules of an attention; a new kind registers its own."""
    raise NotImplementedError(
        f"attention_spec has no rule for {type_name(attention)}; add one with @attention_spec.register"
    )


@attention_spec.register
def _(attention: Attention, cfg: DecoderConfig, ctx: Ctx) -> ModuleSpec:
    layers = ctx.layers

    def norm(heads: int) -> Any:
        if not attention.qk_norm:
            return IdentityOp
        if attention.qk_norm_over == "head":
            return layers.layer_norm(rms_norm=True, for_qk=True)
        return ModuleSpec(module=HeadsNorm, params={"heads": heads, "group": ctx.groups.tp})

    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=_column(ctx, is_te(ctx.layers)),
            core_attention=layers.core_attention(),
            linear_proj=layers.row_parallel_linear(),
            q_layernorm=norm(attention.heads),
            k_layernorm=norm(attention.kv_heads),
        ),
    )


@attention_spec.register
def _(attention: Mla, cfg: DecoderConfig, ctx: Ctx) -> ModuleSpec:
    scale = latent_scale(cfg.rope, query_key_width(attention))
    return ModuleSpec(
        module=LatentAttention,
        params={"part": attention, "layers": ctx.layers, "scale": scale, "again": _recomputed(ctx)},
    )
