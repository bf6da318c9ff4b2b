"""The MiniMax-M2 family: queries and keys normalised over all heads, half of a head rotated, experts in every layer.

The preset has the numbers of the published config.json, which M2.1 and later share; its `num_mtp_modules` heads are
not in the published weights.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from lf.models import spec
from lf.models.decoder import Attention, DecoderConfig, Experts, Mlp, Norm
from lf.models.layers.rope import Rope
from lf.models.llm import dense
from lf.models.llm.fields import number, whole
from lf.models.llm.rules import ExpertNames, weight_map
from lf.models.weights import WeightMap

FAMILY = dense.Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    qk_norm=True,
    qk_norm_over="all",
    fraction=True,
    experts=True,
    required=("num_key_value_heads", "head_dim", "num_experts_per_tok", "num_local_experts"),
)
NAMES = ExpertNames(layer="block_sparse_moe", gate="w1", up="w3", down="w2", bias="e_score_correction_bias")


@attrs.frozen(kw_only=True)
class MiniMaxM2(DecoderConfig):
    """A MiniMax-M2: sigmoid routing with a bias on the choice."""


def from_hf(config: Mapping[str, Any]) -> MiniMaxM2:
    """Returns the model that a config.json of model_type `minimax_m2` states.

    Raises ValueError where lf cannot have it.
    """
    for key, value in {"scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer"}.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} = {config[key]!r}, but lf's minimax_m2 has {value!r}, as transformers has")
    if config.get("shared_intermediate_size"):
        raise ValueError("shared_intermediate_size: lf's minimax_m2 has no shared expert, as transformers has none")
    stated = {**config}
    if config.get("rotary_dim") is not None:
        part = whole(config, "rotary_dim") / whole(config, "head_dim")
        # The published models state the rotated part in dims.
        stated["partial_rotary_factor"] = part
    base = dense.read(stated, FAMILY, MiniMaxM2)
    experts = Experts(
        count=whole(config, "num_local_experts"),
        top_k=whole(config, "num_experts_per_tok"),
        width=whole(config, "intermediate_size"),
        score="sigmoid",
        bias=True,
        balance_coef=number(config, "router_aux_loss_coef", 1e-3, least=0.0),
    )
    return attrs.evolve(base, experts=experts)


@spec.hf_config.register
def _(cfg: MiniMaxM2) -> dict[str, Any]:
    fields, e = dense.write(cfg, FAMILY), cfg.experts
    assert e is not None
    fixed = {"score": "sigmoid", "renormalise": True, "scale": 1.0, "groups": 1, "bias": True, "shared": 0, "dense": ()}
    dense.check_routing(e, FAMILY.model_type, **fixed)
    if not isinstance(cfg.mlp, Mlp) or cfg.mlp.width != e.width:
        raise ValueError(f"mlp.width must be experts.width = {e.width}: config.json has one number for both")
    assert isinstance(cfg.attention, Attention)
    return fields | {
        "rotary_dim": round(cfg.rope.fraction * cfg.attention.head_dim),
        "num_local_experts": e.count,
        "num_experts_per_tok": e.top_k,
        "scoring_func": "sigmoid",
        "output_router_logits": False,
        "router_aux_loss_coef": e.balance_coef,
    }


@spec.weight_map.register
def _(cfg: MiniMaxM2) -> WeightMap:
    return weight_map(cfg, NAMES)


minimax_m2 = MiniMaxM2(
    vocab=200064,
    hidden=3072,
    layers=62,
    attention=Attention(heads=48, kv_heads=8, head_dim=128, qk_norm=True, qk_norm_over="all"),
    mlp=Mlp(width=1536),
    experts=Experts(count=256, top_k=8, width=1536, score="sigmoid", bias=True),
    norm=Norm(eps=1e-6),
    rope=Rope(theta=5e6, fraction=0.5),
    max_length=196608,
)

minimax_m2_tiny = attrs.evolve(
    minimax_m2,
    vocab=131,
    hidden=48,
    layers=2,
    attention=Attention(heads=4, kv_heads=2, head_dim=16, qk_norm=True, qk_norm_over="all"),
    mlp=Mlp(width=24),
    experts=Experts(count=8, top_k=3, width=24, score="sigmoid", bias=True),
    max_length=256,
)
"""Tens of thousands of parameters, for tests."""
