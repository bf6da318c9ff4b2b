"""The dense Qwen families: Qwen1.5, Qwen2 and Qwen2.5 (one architecture, `Qwen2`) and Qwen3.

A preset has the numbers of the config.json of the published model of that very name, so Qwen2.5 presets are the base
models; Instruct checkpoints of one size differ in `max_length` and `norm.eps`, which `from_hf` reads.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from lf.models import spec
from lf.models.decoder import Attention, DecoderConfig, Mlp, Norm
from lf.models.layers.rope import Rope
from lf.models.llm import dense
from lf.models.weights import WeightMap

QWEN2 = dense.Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    qkv_bias=True,
    windows=True,
    required=("num_key_value_heads",),
)
QWEN3 = dense.Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    qk_norm=True,
    windows=True,
    required=("num_key_value_heads", "head_dim"),
    biases=("attention_bias",),
)


@attrs.frozen(kw_only=True)
class Qwen2(DecoderConfig):
    """A Qwen1.5, Qwen2 or Qwen2.5: biases on query, key and value (arXiv:2407.10671)."""


@attrs.frozen(kw_only=True)
class Qwen3(DecoderConfig):
    """A dense Qwen3: no biases, queries and keys normalised per head (arXiv:2505.09388)."""


def from_hf(config: Mapping[str, Any]) -> Qwen2 | Qwen3:
    """Returns the model that a config.json of model_type `qwen2` or `qwen3` states.

    Raises ValueError where lf cannot have it.
    """
    kind = config.get("model_type")
    if kind == QWEN2.model_type:
        return dense.read(config, QWEN2, Qwen2)
    if kind == QWEN3.model_type:
        return dense.read(config, QWEN3, Qwen3)
    raise ValueError(f"model_type = {kind!r} is not {QWEN2.model_type} or {QWEN3.model_type}; correct it")


@spec.hf_config.register
def _(cfg: Qwen2) -> dict[str, Any]:
    return dense.write(cfg, QWEN2)


@spec.hf_config.register
def _(cfg: Qwen3) -> dict[str, Any]:
    return dense.write(cfg, QWEN3)


@spec.weight_map.register
def _(cfg: Qwen2) -> WeightMap:
    return dense.weight_map(cfg)


@spec.weight_map.register
def _(cfg: Qwen3) -> WeightMap:
    return dense.weight_map(cfg)


def _qwen2(
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    width: int,
    vocab: int,
    *,
    max_length: int = 32768,
    theta: float = 1e6,
    eps: float = 1e-6,
    tied: bool = False,
) -> Qwen2:
    return Qwen2(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        attention=Attention(heads=heads[0], kv_heads=heads[1], head_dim=hidden // heads[0], qkv_bias=True),
        mlp=Mlp(width=width),
        norm=Norm(eps=eps),
        rope=Rope(theta=theta),
        max_length=max_length,
        tied=tied,
    )


def _qwen3(
    hidden: int,
    layers: int,
    heads: tuple[int, int],
    width: int,
    *,
    vocab: int = 151936,
    head_dim: int = 128,
    max_length: int = 40960,
    tied: bool = False,
) -> Qwen3:
    return Qwen3(
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        attention=Attention(heads=heads[0], kv_heads=heads[1], head_dim=head_dim, qk_norm=True),
        mlp=Mlp(width=width),
        norm=Norm(eps=1e-6),
        rope=Rope(theta=1e6),
        max_length=max_length,
        tied=tied,
    )


qwen1_5_0_5b = _qwen2(1024, 24, (16, 16), 2816, 151936, tied=True)
qwen1_5_1_8b = _qwen2(2048, 24, (16, 16), 5504, 151936)
qwen1_5_4b = _qwen2(2560, 40, (20, 20), 6912, 151936, theta=5e6)
qwen1_5_7b = _qwen2(4096, 32, (32, 32), 11008, 151936)
qwen1_5_14b = _qwen2(5120, 40, (40, 40), 13696, 152064)
qwen1_5_32b = _qwen2(5120, 64, (40, 8), 27392, 152064)
qwen1_5_72b = _qwen2(8192, 80, (64, 64), 24576, 152064)
qwen1_5_110b = _qwen2(8192, 80, (64, 8), 49152, 152064)

qwen2_0_5b = _qwen2(896, 24, (14, 2), 4864, 151936, max_length=131072, tied=True)
qwen2_1_5b = _qwen2(1536, 28, (12, 2), 8960, 151936, max_length=131072, tied=True)
qwen2_7b = _qwen2(3584, 28, (28, 4), 18944, 152064, max_length=131072)
qwen2_72b = _qwen2(8192, 80, (64, 8), 29568, 152064, max_length=131072, eps=1e-5)

qwen2_5_0_5b = _qwen2(896, 24, (14, 2), 4864, 151936, tied=True)
qwen2_5_1_5b = _qwen2(1536, 28, (12, 2), 8960, 151936, max_length=131072, tied=True)
qwen2_5_3b = _qwen2(2048, 36, (16, 2), 11008, 151936, tied=True)
qwen2_5_7b = _qwen2(3584, 28, (28, 4), 18944, 152064, max_length=131072)
qwen2_5_14b = _qwen2(5120, 48, (40, 8), 13824, 152064, max_length=131072, eps=1e-5)
qwen2_5_32b = _qwen2(5120, 64, (40, 8), 27648, 152064, max_length=131072, eps=1e-5)
qwen2_5_72b = _qwen2(8192, 80, (64, 8), 29568, 152064, max_length=131072, eps=1e-5)

qwen3_0_6b = _qwen3(1024, 28, (16, 8), 3072, tied=True)
qwen3_1_7b = _qwen3(2048, 28, (16, 8), 6144, tied=True)
qwen3_4b = _qwen3(2560, 36, (32, 8), 9728, tied=True)
qwen3_8b = _qwen3(4096, 36, (32, 8), 12288)
qwen3_14b = _qwen3(5120, 40, (40, 8), 17408)
qwen3_32b = _qwen3(5120, 64, (64, 8), 25600)

qwen2_tiny = _qwen2(48, 2, (6, 2), 96, 131, max_length=256, tied=True)
qwen3_tiny = _qwen3(48, 2, (4, 2), 96, vocab=131, head_dim=16, max_length=256)
"""Tens of thousands of parameters, for tests."""
