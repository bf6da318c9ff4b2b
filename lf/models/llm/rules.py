"""The weight map of any decoder: which tensors of a Hugging Face checkpoint are which of lf's.

Families name their experts in different words; all else is alike.
"""

import functools
from collections.abc import Iterator

import attrs

from lf.models.decoder import DecoderConfig
from lf.models.decoder_facts import is_sparse, mtp_depth
from lf.models.expert_weights import StackedExperts
from lf.models.parts import Attention, AttentionConfig, Experts, Mla
from lf.models.spec import type_name
from lf.models.weights import Carried, Duplicate, FusedQkv, Rule, Same, Stack, WeightMap


@attrs.frozen(kw_only=True)
class ExpertNames:
    """What a family calls the parts of a layer with experts, below the layer's own name."""

    layer: str = "mlp"
    """The whole."""
    gate: str = "gate_proj"
    """An expert's gate."""
    up: str = "up_proj"
    """The projection beside it."""
    down: str = "down_proj"
    """The projection back."""
    bias: str = "gate.e_score_correction_bias"
    """The bias on the choice."""
    shared: str = "shared_experts"
    """The expert of all tokens."""
    shared_gate: str = "shared_expert_gate"
    """Its gate."""


def weight_map(cfg: DecoderConfig, names: ExpertNames = ExpertNames()) -> WeightMap:
    """Returns the map between canonical names and those of transformers; biases, norms and further heads included."""
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        Same("decoder.final_layernorm.weight", "model.norm.weight"),
        Carried("*.rotary_emb.inv_freq"),
    ]
    for layer in range(cfg.layers):
        rules += _layer(cfg, layer, f"decoder.layers.{layer}", f"model.layers.{layer}", names)
    head = "model.embed_tokens.weight" if cfg.tied else "lm_head.weight"
    if cfg.tied:
        rules.append(Duplicate("lm_head.weight", head))
    else:
        rules.append(Same("output_layer.weight", head))
    for depth in range(mtp_depth(cfg)):
        layer = cfg.layers + depth
        lf, hf = f"mtp.layers.{depth}", f"model.layers.{layer}"
        rules += _layer(cfg, layer, f"{lf}.transformer_layer", hf, names)
        rules += [Same(f"{lf}.{part}.weight", f"{hf}.{part}.weight") for part in ("enorm", "hnorm", "eh_proj")]
        rules.append(Same(f"{lf}.final_layernorm.weight", f"{hf}.shared_head.norm.weight"))
        rules.append(Duplicate(f"{hf}.embed_tokens.weight", "model.embed_tokens.weight"))
        rules.append(Duplicate(f"{hf}.shared_head.head.weight", head))
    return WeightMap(tuple(rules))


def _layer(cfg: DecoderConfig, layer: int, lf: str, hf: str, names: ExpertNames) -> Iterator[Rule]:
    yield Same(f"{lf}.input_layernorm.weight", f"{hf}.input_layernorm.weight")
    yield from attention_rules(cfg.attention, f"{lf}.self_attention", f"{hf}.self_attn")
    yield Same(f"{lf}.pre_mlp_layernorm.weight", f"{hf}.post_attention_layernorm.weight")
    if is_sparse(cfg, layer):
        assert cfg.experts is not None
        yield from _experts(cfg.experts, f"{lf}.mlp", f"{hf}.{names.layer}", names)
    else:
        yield from _mlp(f"{lf}.mlp", f"{hf}.mlp")


def _mlp(lf: str, hf: str) -> Iterator[Rule]:
    yield Stack(f"{lf}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"))
    yield Same(f"{lf}.linear_fc2.weight", f"{hf}.down_proj.weight")


def _experts(experts: Experts, lf: str, hf: str, names: ExpertNames) -> Iterator[Rule]:
    each = [f"{hf}.experts.{i}" for i in range(experts.count)]
    yield Same(f"{lf}.router.weight", f"{hf}.gate.weight")
    if experts.bias:
        yield Same(f"{lf}.router.expert_bias", f"{hf}.{names.bias}")
    pairs = tuple((f"{expert}.{names.gate}.weight", f"{expert}.{names.up}.weight") for expert in each)
    yield StackedExperts(f"{lf}.experts.gate_up", pairs)
    yield StackedExperts(f"{lf}.experts.down", tuple((f"{expert}.{names.down}.weight",) for expert in each))
    if experts.shared:
        yield from _mlp(f"{lf}.shared_experts", f"{hf}.{names.shared}")
    if experts.shared_gate:
        yield Same(f"{lf}.shared_experts.gate_weight", f"{hf}.{names.shared_gate}.weight")


@functools.singledispatch
def attention_rules(attention: AttentionConfig, lf: str, hf: str) -> list[Rule]:
    """Returns the rules of an attention, given its names on both sides; a new kind registers its own."""
    raise NotImplementedError(
        f"attention_rules has no rule for {type_name(attention)}; add one with @attention_rules.register"
    )


@attention_rules.register
def _(attention: Attention, lf: str, hf: str) -> list[Rule]:
    def qkv(part: str) -> FusedQkv:
        return FusedQkv(
            f"{lf}.linear_qkv.{part}",
            *(f"{hf}.{head}_proj.{part}" for head in "qkv"),
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
        )

    rules: list[Rule] = [qkv("weight"), Same(f"{lf}.linear_proj.weight", f"{hf}.o_proj.weight")]
    if attention.qkv_bias:
        rules.append(qkv("bias"))
    if attention.qk_norm:
        rules += [Same(f"{lf}.{head}_layernorm.weight", f"{hf}.{head}_norm.weight") for head in "qk"]
    return rules


@attention_rules.register
def _(attention: Mla, lf: str, hf: str) -> list[Rule]:
    pairs = {
        "linear_kv_down_proj": "kv_a_proj_with_mqa",
        "kv_layernorm": "kv_a_layernorm",
        "linear_kv_up_proj": "kv_b_proj",
        "linear_proj": "o_proj",
        "linear_q_up_proj": "q_b_proj" if attention.q_rank else "q_proj",
    }
    if attention.q_rank:
        pairs |= {"linear_q_down_proj": "q_a_proj", "q_layernorm": "q_a_layernorm"}
    return [Same(f"{lf}.{ours}.weight", f"{hf}.{theirs}.weight") for ours, theirs in pairs.items()]
