"""The Llama family: Llama 2, 3, 3.1 and 3.2 (text).

Presets have the numbers of the config.json of the published base models; Llama 3.3 70B equals Llama 3.1 70B.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from lf.models import spec
from lf.models.decoder import Attention, DecoderConfig, Mlp, Norm
from lf.models.layers.rope import Llama3Scaling, Rope
from lf.models.llm import dense
from lf.models.weights import WeightMap

FAMILY = dense.Family(model_type="llama", architecture="LlamaForCausalLM", biases=("attention_bias", "mlp_bias"))


@attrs.frozen(kw_only=True)
class Llama(DecoderConfig):
    """A Llama: grouped-query attention without biases, SwiGLU, RMSNorm (arXiv:2307.09288, arXiv:2407.21783)."""


def from_hf(config: Mapping[str, Any]) -> Llama:
    """Returns the model that a config.json of model_type `llama` states; raises ValueError where lf cannot have it."""
    return dense.read(config, FAMILY, Llama)


@spec.hf_config.register
def _(cfg: Llama) -> dict[str, Any]:
    attention = cfg.attention
    if isinstance(attention, Attention) and cfg.hidden % attention.heads:
        raise ValueError(
            f"hidden = {cfg.hidden} must be a multiple of attention.heads = {attention.heads}: transformers refuses "
            "other llama models; change one of them"
        )
    return dense.write(cfg, FAMILY) | {"pretraining_tp": 1}


@spec.weight_map.register
def _(cfg: Llama) -> WeightMap:
    return dense.weight_map(cfg)


def _llama(
    *,
    vocab: int,
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    width: int,
    max_length: int,
    theta: float = 500000.0,
) -> Llama:
    return Llama(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        attention=Attention(heads=heads[0], kv_heads=heads[1], head_dim=hidden // heads[0]),
        mlp=Mlp(width=width),
        norm=Norm(eps=1e-5),
        rope=Rope(theta=theta),
        max_length=max_length,
    )


def _llama2(hidden: int, layers: int, heads: tuple[int, int], width: int) -> Llama:
    return _llama(vocab=32000, hidden=hidden, layers=layers, heads=heads, width=width, max_length=4096, theta=10000.0)


def _llama3(hidden: int, layers: int, heads: tuple[int, int], width: int) -> Llama:
    return _llama(vocab=128256, hidden=hidden, layers=layers, heads=heads, width=width, max_length=8192)


def _long(short: Llama, factor: float, tied: bool = False) -> Llama:
    rope = attrs.evolve(short.rope, scaling=Llama3Scaling(factor=factor, low=1.0, high=4.0, original=8192))
    return attrs.evolve(short, rope=rope, max_length=131072, tied=tied)


llama2_7b = _llama2(4096, 32, (32, 32), 11008)
llama2_13b = _llama2(5120, 40, (40, 40), 13824)
llama2_70b = _llama2(8192, 80, (64, 8), 28672)
llama3_8b = _llama3(4096, 32, (32, 8), 14336)
llama3_70b = _llama3(8192, 80, (64, 8), 28672)
llama3_1_8b = _long(llama3_8b, 8.0)
llama3_1_70b = _long(llama3_70b, 8.0)
llama3_1_405b = _long(_llama3(16384, 126, (128, 8), 53248), 8.0)
llama3_2_1b = _long(_llama3(2048, 16, (32, 8), 8192), 32.0, tied=True)
llama3_2_3b = _long(_llama3(3072, 28, (24, 8), 8192), 32.0, tied=True)

llama_tiny = _llama(vocab=131, hidden=48, layers=2, heads=(6, 2), width=96, max_length=256, theta=10000.0)
llama3_1_tiny = attrs.evolve(
    llama_tiny, rope=Rope(theta=500000.0, scaling=Llama3Scaling(factor=8.0, low=1.0, high=4.0, original=16)), tied=True
)
"""Tens of thousands of parameters, for tests."""
