"""Facts that follow from a decoder's config: widths, which layers have experts, loss terms, operations."""

import math
from typing import TYPE_CHECKING

from lf.models.parts import Attention, AttentionConfig, Mla, Mlp

if TYPE_CHECKING:
    from lf.models.decoder import DecoderConfig

BALANCE, ROUTER_Z = "balance", "router_z"
"""Loss terms of the routers, as means over their layers."""


def mtp_term(depth: int) -> str:
    """Returns the loss term of a multi-token prediction head; heads count from 1."""
    return f"mtp{depth}"


def kv_heads(attention: AttentionConfig) -> int:
    """Returns the key and value heads of an attention."""
    assert isinstance(attention, (Attention, Mla))
    return attention.kv_heads if isinstance(attention, Attention) else attention.heads


def rope_width(attention: AttentionConfig) -> int:
    """Returns the dims of a head that the rotary embedding is made for."""
    assert isinstance(attention, (Attention, Mla))
    return attention.head_dim if isinstance(attention, Attention) else attention.rope_dim


def query_key_width(attention: AttentionConfig) -> int:
    """Returns the width of a head's query and key."""
    assert isinstance(attention, (Attention, Mla))
    return attention.head_dim if isinstance(attention, Attention) else attention.nope_dim + attention.rope_dim


def mtp_depth(cfg: "DecoderConfig") -> int:
    """Returns the number of multi-token prediction heads."""
    return cfg.mtp.depth if cfg.mtp else 0


def is_sparse(cfg: "DecoderConfig", layer: int) -> bool:
    """Returns whether a layer (from 0; heads of multi-token prediction follow the last) has experts."""
    return cfg.experts is not None and layer not in cfg.experts.dense


def sparse_layers(cfg: "DecoderConfig") -> int:
    """Returns how many layers have experts, those of the multi-token prediction heads included."""
    return sum(is_sparse(cfg, layer) for layer in range(cfg.layers + mtp_depth(cfg)))


def coefficients(cfg: "DecoderConfig") -> dict[str, float]:
    """Returns the factor of each loss term but the first."""
    found: dict[str, float] = {}
    if cfg.mtp:
        found |= {mtp_term(d): cfg.mtp.coef / cfg.mtp.depth for d in range(1, cfg.mtp.depth + 1)}
    if cfg.experts and cfg.experts.balance != "none":
        found[BALANCE] = cfg.experts.balance_coef * sparse_layers(cfg)
    if cfg.experts and cfg.experts.z_coef:
        found[ROUTER_Z] = cfg.experts.z_coef * sparse_layers(cfg)
    return found


def attention_weights(attention: AttentionConfig, hidden: int) -> int:
    """Returns the elements of the matrices of one attention."""
    if isinstance(attention, Attention):
        return hidden * attention.head_dim * 2 * (attention.heads + attention.kv_heads)
    assert isinstance(attention, Mla)
    a, wide = attention, attention.heads * query_key_width(attention)
    query = a.q_rank * (hidden + wide) if a.q_rank else hidden * wide
    keys = hidden * (a.kv_rank + a.rope_dim) + a.kv_rank * a.heads * (a.nope_dim + a.v_dim)
    return query + keys + a.heads * a.v_dim * hidden


def mlp_weights(cfg: "DecoderConfig", layer: int, *, active: bool) -> int:
    """Returns the elements of the matrices of a layer's feed-forward part; `active` counts those a token meets."""
    assert isinstance(cfg.mlp, Mlp)
    e = cfg.experts
    if e is None or not is_sparse(cfg, layer):
        return 3 * cfg.hidden * cfg.mlp.width
    routed = (e.top_k if active else e.count) * 3 * e.width
    return cfg.hidden * (routed + e.count + 3 * e.shared + e.shared_gate)


def attention_flops(attention: AttentionConfig, length: int) -> float:
    """Returns the multiply-adds of a token's scores and values: of causal attention the half that is not masked."""
    assert isinstance(attention, (Attention, Mla))
    values = attention.head_dim if isinstance(attention, Attention) else attention.v_dim
    return attention.heads * (query_key_width(attention) + values) * (length + 1) / 2


def decoder_flops(cfg: "DecoderConfig", rows: int, length: int) -> float:
    """Returns the operations of forward and backward: two a multiply-add, three passes, experts that a token meets."""
    heads = mtp_depth(cfg)
    layers = range(cfg.layers + heads)
    linear = attention_weights(cfg.attention, cfg.hidden) + attention_flops(cfg.attention, length)
    each = [linear + mlp_weights(cfg, layer, active=True) for layer in layers]
    output = (1 + heads) * cfg.vocab * cfg.hidden + heads * 2 * cfg.hidden * cfg.hidden
    return 6.0 * rows * length * (sum(each) + output)


def parameters(cfg: "DecoderConfig") -> int:
    """Returns the number of trained parameters, without padded rows of the vocabulary."""
    a, h = cfg.attention, cfg.hidden
    heads = mtp_depth(cfg)
    if isinstance(a, Attention):
        normed = 2 if a.qk_norm_over == "head" else a.heads + a.kv_heads
        small = a.head_dim * ((a.heads + 2 * a.kv_heads) * a.qkv_bias + normed * a.qk_norm)
    else:
        assert isinstance(a, Mla)
        small = a.q_rank + a.kv_rank
    layers = range(cfg.layers + heads)
    each = [attention_weights(a, h) + small + 2 * h + mlp_weights(cfg, layer, active=False) for layer in layers]
    return sum(each) + heads * (2 * h * h + 3 * h) + h + cfg.vocab * h * (1 if cfg.tied else 2)


def padded_vocab(cfg: "DecoderConfig", tp: int) -> int:
    """Returns the rows of the embedding over all tensor parallel ranks."""
    multiple = math.lcm(cfg.vocab_multiple, tp)
    return -(-cfg.vocab // multiple) * multiple
