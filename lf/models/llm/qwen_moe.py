"""The Qwen families with experts: Qwen1.5-MoE and Qwen2-MoE (one architecture, `Qwen2Moe`), Qwen3-MoE and Qwen3-Coder.

Presets have the numbers of the config.json of the published base models (Qwen3-Coder: of the Instruct models). lf
computes a router's logits in fp32, which transformers does for none of them.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from lf.models import spec
from lf.models.decoder import Attention, DecoderConfig, Experts, Mlp, Norm
from lf.models.layers.rope import Rope
from lf.models.llm import dense
from lf.models.llm.fields import agreed, flag, number, whole
from lf.models.llm.rules import ExpertNames, weight_map
from lf.models.weights import WeightMap

QWEN2_MOE = dense.Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    qkv_bias=True,
    windows=True,
    experts=True,
    required=("num_key_value_heads", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
)
QWEN3_MOE = dense.Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    qk_norm=True,
    experts=True,
    required=("num_key_value_heads", "head_dim", "num_experts_per_tok", "moe_intermediate_size"),
    biases=("attention_bias",),
)
NAMES = ExpertNames(shared="shared_expert")


@attrs.frozen(kw_only=True)
class Qwen2Moe(DecoderConfig):
    """A Qwen1.5-MoE or Qwen2-MoE: softmax routing beside a gated shared expert (arXiv:2407.10671)."""


@attrs.frozen(kw_only=True)
class Qwen3Moe(DecoderConfig):
    """A Qwen3 with experts, Coder included: softmax routing, no shared expert (arXiv:2505.09388)."""


def from_hf(config: Mapping[str, Any]) -> Qwen2Moe | Qwen3Moe:
    """Returns the model that a config.json of model_type `qwen2_moe` or `qwen3_moe` states.

    Raises ValueError where lf cannot have it.
    """
    kind = config.get("model_type")
    if kind == QWEN2_MOE.model_type:
        if not flag(config, "qkv_bias", True):
            raise ValueError("qkv_bias = False, but every qwen2_moe model that lf trains has these biases")
        base = dense.read(config, QWEN2_MOE, Qwen2Moe)
        shared = whole(config, "shared_expert_intermediate_size")
        return attrs.evolve(base, experts=_read_experts(config, base.layers, shared))
    if kind == QWEN3_MOE.model_type:
        return read_qwen3_moe(config, QWEN3_MOE)
    raise ValueError(f"model_type = {kind!r} is not {QWEN2_MOE.model_type} or {QWEN3_MOE.model_type}; correct it")


def read_qwen3_moe(config: Mapping[str, Any], family: dense.Family) -> Qwen3Moe:
    """Returns the Qwen3 with experts that a config.json states, of a family that is one; raises as `from_hf` does."""
    # transformers ignores the window unless it is switched on.
    switched = flag(config, "use_sliding_window", False)
    window = config.get("sliding_window") if switched else None
    other = dense.read({**config, "sliding_window": window}, family, Qwen3Moe)
    return attrs.evolve(other, experts=_read_experts(config, other.layers, 0))


def _read_experts(config: Mapping[str, Any], layers: int, shared: int) -> Experts:
    # transformers 5 saves the number under another name than the published models have.
    counts = {"num_": config.get("num_experts"), "num_local_": config.get("num_local_experts")}
    count = agreed({where: {"experts": value} for where, value in counts.items()}, "experts")
    step = whole(config, "decoder_sparse_step", 1)
    only = config.get("mlp_only_layers") or []
    if not isinstance(only, list) or any(type(layer) is not int for layer in only):
        raise ValueError(f"mlp_only_layers = {only!r} must be a list of layers; correct it")
    return Experts(
        count=whole({"num_experts": count}, "num_experts"),
        top_k=whole(config, "num_experts_per_tok"),
        width=whole(config, "moe_intermediate_size"),
        renormalise=flag(config, "norm_topk_prob", False),
        shared=shared,
        shared_gate=bool(shared),
        dense=tuple(layer for layer in range(layers) if layer in only or (layer + 1) % step),
        balance_coef=number(config, "router_aux_loss_coef", 1e-3, least=0.0),
    )


def write(cfg: DecoderConfig, family: dense.Family) -> dict[str, Any]:
    """Returns the config.json of a Qwen with experts; raises ValueError where the family's cannot state it."""
    fields, e = dense.write(cfg, family), cfg.experts
    assert e is not None
    dense.check_routing(
        e, family.model_type, score="softmax", scale=1.0, groups=1, bias=False, shared_gate=family is QWEN2_MOE
    )
    if family is not QWEN2_MOE:
        dense.check_routing(e, family.model_type, shared=0)
    more = {"shared_expert_intermediate_size": e.shared, "qkv_bias": True} if family is QWEN2_MOE else {}
    return (
        fields
        | more
        | {
            "num_experts": e.count,
            "num_experts_per_tok": e.top_k,
            "moe_intermediate_size": e.width,
            "norm_topk_prob": e.renormalise,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(e.dense),
            "output_router_logits": False,
            "router_aux_loss_coef": e.balance_coef,
        }
    )


@spec.hf_config.register
def _(cfg: Qwen2Moe) -> dict[str, Any]:
    return write(cfg, QWEN2_MOE)


@spec.hf_config.register
def _(cfg: Qwen3Moe) -> dict[str, Any]:
    return write(cfg, QWEN3_MOE)


@spec.weight_map.register
def _(cfg: Qwen2Moe | Qwen3Moe) -> WeightMap:
    return weight_map(cfg, NAMES)


def _qwen2_moe(
    hidden: int, layers: int, heads: tuple[int, int], width: int, experts: Experts, *, max_length: int
) -> Qwen2Moe:
    return Qwen2Moe(
        vocab=151936,
        hidden=hidden,
        layers=layers,
        attention=Attention(heads=heads[0], kv_heads=heads[1], head_dim=hidden // heads[0], qkv_bias=True),
        mlp=Mlp(width=width),
        experts=experts,
        norm=Norm(eps=1e-6),
        rope=Rope(theta=1e6),
        max_length=max_length,
    )


def _qwen3_moe(
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    width: int,
    experts: tuple[int, int],
    *,
    theta: float = 1e6,
    max_length: int = 40960,
) -> Qwen3Moe:
    return Qwen3Moe(
        vocab=151936,
        hidden=hidden,
        layers=layers,
        attention=Attention(heads=heads[0], kv_heads=heads[1], head_dim=128, qk_norm=True),
        mlp=Mlp(width=width),
        experts=Experts(count=experts[0], top_k=8, width=experts[1]),
        norm=Norm(eps=1e-6),
        rope=Rope(theta=theta),
        max_length=max_length,
    )


def _gated(count: int, top_k: int, width: int, shared: int) -> Experts:
    return Experts(count=count, top_k=top_k, width=width, renormalise=False, shared=shared, shared_gate=True)


qwen1_5_moe_a2_7b = _qwen2_moe(2048, 24, (16, 16), 5632, _gated(60, 4, 1408, 5632), max_length=8192)
qwen2_57b_a14b = _qwen2_moe(3584, 28, (28, 4), 18944, _gated(64, 8, 2560, 20480), max_length=131072)

qwen3_30b_a3b = _qwen3_moe(2048, 48, (32, 4), 6144, (128, 768))
qwen3_235b_a22b = _qwen3_moe(4096, 94, (64, 4), 12288, (128, 1536))
qwen3_coder_30b_a3b = _qwen3_moe(2048, 48, (32, 4), 5472, (128, 768), theta=1e7, max_length=262144)
qwen3_coder_480b_a35b = _qwen3_moe(6144, 62, (96, 8), 8192, (160, 2560), theta=1e7, max_length=262144)

qwen2_moe_tiny = Qwen2Moe(
    vocab=131,
    hidden=48,
    layers=2,
    attention=Attention(heads=4, kv_heads=2, head_dim=12, qkv_bias=True),
    mlp=Mlp(width=96),
    experts=_gated(8, 2, 24, 40),
    rope=Rope(theta=1e6),
    max_length=256,
)
qwen3_moe_tiny = Qwen3Moe(
    vocab=131,
    hidden=48,
    layers=2,
    attention=Attention(heads=4, kv_heads=2, head_dim=16, qk_norm=True),
    mlp=Mlp(width=96),
    experts=Experts(count=8, top_k=2, width=24),
    rope=Rope(theta=1e6),
    max_length=256,
)
"""Tens of thousands of parameters, for tests."""
