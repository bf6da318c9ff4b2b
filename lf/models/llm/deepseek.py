"""The DeepSeek families with latent attention: V2 and V2-Lite, V3 with its further head, and Kimi-K2 (text).

Presets have the numbers of the published config.json. V3 and Kimi-K2 are one architecture; the published Kimi-K2 has a
model_type of its own.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from lf.models import spec
from lf.models.decoder import DecoderConfig, Experts, Mla, Mlp, Mtp, Norm
from lf.models.decoder_facts import mtp_depth
from lf.models.layers.rope import Rope, YarnScaling
from lf.models.llm import dense
from lf.models.llm.fields import agreed, flag, number, whole
from lf.models.llm.rope_config import read_rope, write_rope
from lf.models.llm.rules import weight_map
from lf.models.weights import WeightMap

Kind = TypeVar("Kind", bound=DecoderConfig)

REQUIRED = (
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts"),
    *("num_experts_per_tok", "moe_intermediate_size"),
)
V2 = dense.Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    required=REQUIRED,
    biases=("attention_bias", "mlp_bias"),
    experts=True,
)
V3 = dense.Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    required=REQUIRED,
    biases=("attention_bias",),
    experts=True,
)
K2 = attrs.evolve(V3, model_type="kimi_k2")


@attrs.frozen(kw_only=True)
class DeepseekV2(DecoderConfig):
    """A DeepSeek-V2 or V2-Lite: latent attention, softmax routing by groups' best scores (arXiv:2405.04434)."""


@attrs.frozen(kw_only=True)
class DeepseekV3(DecoderConfig):
    """A DeepSeek-V3: latent attention, sigmoid routing with a bias on the choice, a further head (arXiv:2412.19437)."""


@attrs.frozen(kw_only=True)
class KimiK2(DeepseekV3):
    """The text model of Kimi-K2: DeepSeek-V3's architecture with more experts and fewer heads (arXiv:2507.20534)."""


def from_hf(config: Mapping[str, Any]) -> DeepseekV2 | DeepseekV3:
    """Returns the model that a config.json of model_type `deepseek_v2`, `deepseek_v3` or `kimi_k2` states.

    Raises ValueError where lf cannot have it.
    """
    kind = config.get("model_type")
    if kind == V2.model_type:
        return _read(config, V2, DeepseekV2, _read_v2_routing(config))
    if kind == V3.model_type:
        return _read(config, V3, DeepseekV3, _read_v3_routing(config))
    if kind == K2.model_type:
        return _read(config, K2, KimiK2, _read_v3_routing(config))
    raise ValueError(f"model_type = {kind!r} is not {V2.model_type}, {V3.model_type} or {K2.model_type}; correct it")


def _read(config: Mapping[str, Any], family: dense.Family, kind: type[Kind], routing: Mapping[str, Any]) -> Kind:
    dense.check_config(config, family)
    heads = whole(config, "num_attention_heads")
    _check_same(config, family, {"num_key_value_heads": heads, "moe_layer_freq": 1, "rope_interleave": True})
    layers, width = whole(config, "num_hidden_layers"), whole(config, "moe_intermediate_size")
    max_length = whole(config, "max_position_embeddings")
    rope = read_rope(config, max_length)
    if rope.fraction != 1.0:
        raise ValueError(f"partial_rotary_factor = {rope.fraction}: qk_rope_head_dim says what is rotated; delete it")
    # transformers 5 has another name for it than the published models.
    depths = {key: config.get(key) for key in ("num_nextn_predict_layers", "num_mtp_layers")}
    depth = agreed({f"{key}: ": {"heads": value} for key, value in depths.items()}, "heads")
    return kind(
        vocab=whole(config, "vocab_size"),
        hidden=whole(config, "hidden_size"),
        layers=layers,
        attention=Mla(
            heads=heads,
            q_rank=whole(config, "q_lora_rank") if config.get("q_lora_rank") is not None else 0,
            kv_rank=whole(config, "kv_lora_rank"),
            nope_dim=whole(config, "qk_nope_head_dim"),
            rope_dim=whole(config, "qk_rope_head_dim"),
            v_dim=whole(config, "v_head_dim"),
            dropout=number(config, "attention_dropout", 0.0, least=0.0, most=1.0),
        ),
        mlp=Mlp(width=whole(config, "intermediate_size"), activation=dense.activation(config)),
        experts=Experts(
            count=whole(config, "n_routed_experts"),
            top_k=whole(config, "num_experts_per_tok"),
            width=width,
            scale=number(config, "routed_scaling_factor", 1.0, above=0.0),
            shared=whole(config, "n_shared_experts") * width,
            dense=tuple(range(min(whole(config, "first_k_dense_replace", 0, least=0), layers))),
            balance_coef=number(config, "aux_loss_alpha", 1e-3, least=0.0),
            **routing,
        ),
        mtp=Mtp(depth=whole({"num_nextn_predict_layers": depth}, "num_nextn_predict_layers")) if depth else None,
        norm=Norm(eps=number(config, "rms_norm_eps", above=0.0)),
        rope=rope,
        max_length=max_length,
        tied=flag(config, "tie_word_embeddings", False),
        init_std=number(config, "initializer_range", 0.02, above=0.0),
    )


def _check_same(config: Mapping[str, Any], family: dense.Family, wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if config.get(key) is not None and config[key] != value:
            raise ValueError(
                f"{key} = {config[key]!r}, but lf's {family.model_type} has {key} = {value!r}; use a checkpoint that "
                "has it"
            )


def _read_v2_routing(config: Mapping[str, Any]) -> dict[str, Any]:
    # transformers renormalises in no V2 model, whatever config.json says.
    _check_same(config, V2, {"scoring_func": "softmax", "norm_topk_prob": False})
    method = config.get("topk_method") or "greedy"
    if method == "greedy":
        return {"renormalise": False, "group_rank": "max"}
    if method != "group_limited_greedy":
        raise ValueError(f"topk_method = {method!r} is not greedy or group_limited_greedy; correct it")
    groups, kept = whole(config, "n_group"), whole(config, "topk_group")
    return {"renormalise": False, "groups": groups, "group_top_k": kept, "group_rank": "max"}


def _read_v3_routing(config: Mapping[str, Any]) -> dict[str, Any]:
    _check_same(config, V3, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    return {
        "score": "sigmoid",
        "bias": True,
        "renormalise": flag(config, "norm_topk_prob", True),
        "groups": whole(config, "n_group", 1),
        "group_top_k": whole(config, "topk_group", 1),
    }


def _write(cfg: DecoderConfig, family: dense.Family) -> dict[str, Any]:
    """Returns the config.json; raises ValueError where it cannot state the model."""
    name, a, e, mlp = family.model_type, cfg.attention, cfg.experts, cfg.mlp
    dense.check_extras(cfg, experts=True, mtp=family is not V2, name=name)
    if type(a) is not Mla or type(mlp) is not Mlp or a.latent_eps != 1e-6 or cfg.rope.fraction != 1.0:
        raise ValueError(
            f"every {name} model has attention Mla with latent_eps = 1e-6, an Mlp, and rope.fraction = 1.0; this one "
            f"has {a}, {mlp} and rope.fraction = {cfg.rope.fraction}"
        )
    assert e is not None
    dense.check_routing(e, name, shared_gate=False, dense=tuple(range(len(e.dense))))
    if not e.shared or e.shared % e.width:
        raise ValueError(f"experts.shared = {e.shared} must be a multiple of experts.width = {e.width}, not 0")
    return {
        "architectures": [family.architecture],
        "model_type": name,
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.hidden,
        "intermediate_size": mlp.width,
        "moe_intermediate_size": e.width,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.heads,
        "q_lora_rank": a.q_rank or None,
        "kv_lora_rank": a.kv_rank,
        "qk_nope_head_dim": a.nope_dim,
        "qk_rope_head_dim": a.rope_dim,
        "v_head_dim": a.v_dim,
        "n_routed_experts": e.count,
        "n_shared_experts": e.shared // e.width,
        "num_experts_per_tok": e.top_k,
        "routed_scaling_factor": e.scale,
        "first_k_dense_replace": len(e.dense),
        "moe_layer_freq": 1,
        "aux_loss_alpha": e.balance_coef,
        "hidden_act": dense.activation_name(mlp),
        "max_position_embeddings": cfg.max_length,
        "initializer_range": cfg.init_std,
        "rms_norm_eps": cfg.norm.eps,
        "attention_dropout": a.dropout,
        "tie_word_embeddings": cfg.tied,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **dict.fromkeys(family.biases, False),
        **write_rope(cfg.rope, cfg.max_length),
    }


@spec.hf_config.register
def _(cfg: DeepseekV2) -> dict[str, Any]:
    fields, e = _write(cfg, V2), cfg.experts
    assert e is not None
    dense.check_routing(e, V2.model_type, score="softmax", bias=False, renormalise=False)
    if e.groups > 1:
        dense.check_routing(e, V2.model_type, group_rank="max")
    return fields | {
        "topk_method": "group_limited_greedy" if e.groups > 1 else "greedy",
        "n_group": e.groups,
        "topk_group": e.group_top_k,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
    }


@spec.hf_config.register
def _(cfg: DeepseekV3) -> dict[str, Any]:
    fields, e = _write(cfg, K2 if isinstance(cfg, KimiK2) else V3), cfg.experts
    assert e is not None
    dense.check_routing(e, V3.model_type, score="sigmoid", bias=True, group_rank="top2")
    return fields | {
        "topk_method": "noaux_tc",
        "n_group": e.groups,
        "topk_group": e.group_top_k,
        "scoring_func": "sigmoid",
        "norm_topk_prob": e.renormalise,
        "rope_interleave": True,
        "num_nextn_predict_layers": mtp_depth(cfg),
    }


@spec.weight_map.register
def _(cfg: DeepseekV2 | DeepseekV3) -> WeightMap:
    return weight_map(cfg)


def _yarn(factor: float, mscale: float, beta_fast: float = 32.0) -> YarnScaling:
    return YarnScaling(factor=factor, original=4096, beta_fast=beta_fast, mscale=mscale, mscale_all_dim=mscale)


def _mla(heads: int, q_rank: int) -> Mla:
    return Mla(heads=heads, q_rank=q_rank, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)


_V2_ROUTING = Experts(
    count=160,
    top_k=6,
    width=1536,
    renormalise=False,
    scale=16.0,
    groups=8,
    group_top_k=3,
    group_rank="max",
    shared=2 * 1536,
    dense=(0,),
)
_V3_ROUTING = Experts(
    count=256,
    top_k=8,
    width=2048,
    score="sigmoid",
    scale=2.5,
    groups=8,
    group_top_k=4,
    bias=True,
    shared=2048,
    dense=(0, 1, 2),
)

deepseek_v2 = DeepseekV2(
    vocab=102400,
    hidden=5120,
    layers=60,
    attention=_mla(128, 1536),
    mlp=Mlp(width=12288),
    experts=_V2_ROUTING,
    rope=Rope(theta=1e4, scaling=_yarn(40.0, 0.707)),
    max_length=163840,
)
deepseek_v2_lite = attrs.evolve(
    deepseek_v2,
    hidden=2048,
    layers=27,
    attention=_mla(16, 0),
    mlp=Mlp(width=10944),
    experts=Experts(count=64, top_k=6, width=1408, renormalise=False, group_rank="max", shared=2 * 1408, dense=(0,)),
)
deepseek_v3 = DeepseekV3(
    vocab=129280,
    hidden=7168,
    layers=61,
    attention=_mla(128, 1536),
    mlp=Mlp(width=18432),
    experts=_V3_ROUTING,
    mtp=Mtp(),
    rope=Rope(theta=1e4, scaling=_yarn(40.0, 1.0)),
    max_length=163840,
)
kimi_k2 = KimiK2(
    vocab=163840,
    hidden=7168,
    layers=61,
    attention=_mla(64, 1536),
    mlp=Mlp(width=18432),
    experts=attrs.evolve(_V3_ROUTING, count=384, groups=1, group_top_k=1, scale=2.827, dense=(0,)),
    rope=Rope(theta=5e4, scaling=_yarn(32.0, 1.0, beta_fast=1.0)),
    max_length=131072,
)

_V3_TINY = attrs.evolve(_V3_ROUTING, count=8, top_k=3, width=16, groups=4, group_top_k=2, shared=16, dense=(0,))
_TINY = Mla(heads=4, q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, v_dim=12)
deepseek_v2_tiny = attrs.evolve(
    deepseek_v2,
    vocab=131,
    hidden=48,
    layers=2,
    attention=attrs.evolve(_TINY, q_rank=0),
    mlp=Mlp(width=80),
    experts=attrs.evolve(_V2_ROUTING, count=8, top_k=2, width=16, groups=4, group_top_k=2, scale=2.0, shared=32),
    rope=Rope(theta=1e4, scaling=attrs.evolve(_yarn(4.0, 0.707), original=32)),
    max_length=256,
)
deepseek_v3_tiny = attrs.evolve(
    deepseek_v3,
    vocab=131,
    hidden=48,
    layers=2,
    attention=_TINY,
    mlp=Mlp(width=80),
    experts=_V3_TINY,
    rope=Rope(theta=1e4, scaling=attrs.evolve(_yarn(4.0, 1.0), original=32)),
    max_length=256,
)
kimi_k2_tiny = KimiK2(
    **{
        field.name: getattr(deepseek_v3_tiny, field.name)
        for field in attrs.fields(DeepseekV3)
        if field.name not in ("mtp", "experts")
    },
    experts=attrs.evolve(_V3_TINY, groups=1, group_top_k=1, scale=2.827),
)
"""Tens of thousands of parameters, for tests."""
