"""What the dense decoders of Hugging Face share: their config.json both ways, their weight map, their size.

A family states what it fixes as a `Family`; `llama.py` and `qwen.py` hold the families.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import attrs

from lf.models.decoder import Attention, DecoderConfig, Experts, Mlp, Norm
from lf.models.layers.rope import Rope
from lf.models.llm.fields import flag, number, whole
from lf.models.llm.rope_config import read_rope, write_rope
from lf.models.llm.rules import weight_map as weight_map

Kind = TypeVar("Kind", bound=DecoderConfig)

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
"""Keys that the config.json of every family must have."""

ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Functions of the gate by their names in config.json; the first name of each is the one written."""


@attrs.frozen(kw_only=True)
class Family:
    """What one family of dense decoders fixes, whatever the size."""

    model_type: str
    """Its name in config.json."""
    architecture: str
    """Its class in transformers."""
    qkv_bias: bool = False
    """Whether query, key and value projections have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    qk_norm_over: Literal["head", "all"] = "head"
    """What queries and keys are normalised over."""
    windows: bool = False
    """Whether its config.json can state a sliding window."""
    fraction: bool = False
    """Whether its config.json can state that a part of a head is rotated."""
    experts: bool = False
    """Whether it has experts."""
    sections: bool = False
    """Whether its rope turns by three positions."""
    required: tuple[str, ...] = ()
    """Keys that its config.json must have, besides the sizes."""
    biases: tuple[str, ...] = ()
    """Keys of its config.json that would add biases which lf has no place for."""


def read(config: Mapping[str, Any], family: Family, kind: type[Kind]) -> Kind:
    """Returns the config that a config.json states; raises ValueError naming the key, its value, the rule and the cure.

    Keys that change no number in transformers are ignored, among them `pretraining_tp`.
    """
    check_config(config, family)
    hidden, layers = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    heads, max_length = whole(config, "num_attention_heads"), whole(config, "max_position_embeddings")
    head_dim = _head_dim(config, hidden, heads)
    window, window_layers = _windows(config, family, layers)
    return kind(
        vocab=whole(config, "vocab_size"),
        hidden=hidden,
        layers=layers,
        attention=Attention(
            heads=heads,
            kv_heads=whole(config, "num_key_value_heads", heads),
            head_dim=head_dim,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            qk_norm_over=family.qk_norm_over,
            window=window,
            window_layers=window_layers,
            dropout=number(config, "attention_dropout", 0.0, least=0.0, most=1.0),
        ),
        mlp=Mlp(width=whole(config, "intermediate_size"), activation=activation(config)),
        norm=Norm(eps=number(config, "rms_norm_eps", above=0.0)),
        rope=_whole_head(read_rope(config, max_length, sections=family.sections), family),
        max_length=max_length,
        tied=flag(config, "tie_word_embeddings", False),
        init_std=number(config, "initializer_range", 0.02, above=0.0),
    )


def write(cfg: DecoderConfig, family: Family) -> dict[str, Any]:
    """Returns the config.json of a model, with the rope in the new dialect (transformers 5) and the old one (4.5x).

    Raises ValueError where the family's config.json cannot state the model. Token ids are null: they belong to the
    tokenizer.
    """
    attention, mlp = _parts(cfg)
    _check_fixed(cfg, attention, family)
    check_extras(cfg, experts=family.experts, mtp=False, name=family.model_type)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.hidden,
        "intermediate_size": mlp.width,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": activation_name(mlp),
        "max_position_embeddings": cfg.max_length,
        "initializer_range": cfg.init_std,
        "rms_norm_eps": cfg.norm.eps,
        "attention_dropout": attention.dropout,
        "tie_word_embeddings": cfg.tied,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    windows = _window_fields(attention, cfg.layers) if family.windows else {}
    return (
        config
        | dict.fromkeys(family.biases, False)
        | windows
        | write_rope(cfg.rope, cfg.max_length, sections=family.sections)
    )


def check_extras(cfg: DecoderConfig, *, experts: bool, mtp: bool, name: str) -> None:
    """Raises ValueError unless a model has experts where its family does, and further heads only where it can."""
    if (cfg.experts is not None) != experts:
        raise ValueError(
            f"experts = {'None' if cfg.experts is None else 'Experts(...)'}, but every {name} model has "
            f"{'them' if experts else 'none'}; set it so, or take a family that fits"
        )
    if cfg.mtp is not None and not mtp:
        raise ValueError(f"mtp is set, but {name} models have no further heads; set mtp to None")


def check_routing(experts: Experts, name: str, **fixed: Any) -> None:
    """Raises ValueError where experts differ from what every model of a family has."""
    for key, value in fixed.items():
        if getattr(experts, key) != value:
            raise ValueError(
                f"experts.{key} = {getattr(experts, key)!r}, but every {name} model has {key} = {value!r}; set it so, "
                "or take a family that fits"
            )


def check_config(config: Mapping[str, Any], family: Family) -> None:
    """Raises ValueError where a config.json lacks a key, has another head, or adds biases."""
    missing = [key for key in (*REQUIRED, *family.required) if config.get(key) is None]
    if missing:
        raise ValueError(
            f"{', '.join(missing)} missing; a {family.model_type} config.json must have "
            f"{'it' if len(missing) == 1 else 'them'}: take the file from the published checkpoint"
        )
    architectures = config.get("architectures") or [family.architecture]
    if not isinstance(architectures, list) or not any(str(name).endswith("ForCausalLM") for name in architectures):
        raise ValueError(
            f"architectures = {architectures!r} is not a language model with a head ({family.architecture}); "
            "lf trains no other head of this family"
        )
    for key in family.biases:
        if flag(config, key, False):
            raise ValueError(
                f"{key} = True adds biases that lf's {family.model_type} has no place for; only {key} = false is "
                "trained: use a checkpoint without them"
            )
    if config.get("per_layer_config"):
        raise ValueError("per_layer_config makes layers differ, which lf's dense decoders cannot; use a uniform model")


def _check_fixed(cfg: DecoderConfig, attention: Attention, family: Family) -> None:
    for key in ("qkv_bias", "qk_norm", "qk_norm_over"):
        if getattr(attention, key) != getattr(family, key):
            raise ValueError(
                f"attention.{key} = {getattr(attention, key)}, but every {family.model_type} model has "
                f"{key} = {getattr(family, key)}; set it so, or take a family that fits"
            )
    if attention.window and not family.windows:
        raise ValueError(
            f"attention.window = {attention.window}, but {family.model_type} models have no sliding window; "
            "set window = 0 and window_layers = (), or take a family that has it (qwen2, qwen3)"
        )
    _whole_head(cfg.rope, family)


def _whole_head(rope: Rope, family: Family) -> Rope:
    if rope.fraction != 1.0 and not family.fraction:
        raise ValueError(
            f"a rotated part of {rope.fraction} (partial_rotary_factor, rope.fraction), but {family.model_type} models "
            "rotate the whole head, and transformers would not do otherwise; set it to 1.0 or delete it"
        )
    return rope


def _parts(cfg: DecoderConfig) -> tuple[Attention, Mlp]:
    attention, mlp = cfg.attention, cfg.mlp
    if type(attention) is not Attention or type(mlp) is not Mlp:
        raise ValueError(
            f"{type(cfg).__name__} has attention of type {type(attention).__name__} and mlp of type "
            f"{type(mlp).__name__}, but a dense decoder has Attention and Mlp; register this question for its family"
        )
    return attention, mlp


def _head_dim(config: Mapping[str, Any], hidden: int, heads: int) -> int:
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(
            f"hidden_size = {hidden} must be a multiple of num_attention_heads = {heads} where head_dim is not given; "
            "add head_dim or correct them"
        )
    return whole(config, "head_dim", hidden // heads)


def activation_name(mlp: Mlp) -> str:
    """Returns config.json's name of the function of the gate."""
    return next(name for name, function in ACTIVATIONS.items() if function == mlp.activation)


def activation(config: Mapping[str, Any]) -> Literal["silu", "gelu", "gelu_tanh"]:
    """Returns the function of the gate that a config.json names; raises ValueError for one that lf does not know."""
    name = config.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"hidden_act = {name!r} is not known to lf; it knows {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, tuple[int, ...]]:
    kinds = config.get("layer_types")
    known = ("full_attention", "sliding_attention")
    if kinds is not None and (
        not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds)
    ):
        raise ValueError(
            f"layer_types = {kinds!r} must be a list of num_hidden_layers = {layers} entries, each {' or '.join(known)}"
        )
    switched = flag(config, "use_sliding_window", not family.windows)
    if switched and family.windows and "sliding_window" not in config:
        raise ValueError("use_sliding_window = True without sliding_window; add it, null where no layer has a window")
    window = whole(config, "sliding_window") if switched and config.get("sliding_window") is not None else 0
    if kinds is None:
        first = whole(config, "max_window_layers", least=0) if window and family.windows else 0
        sliding = tuple(range(first, layers)) if window else ()
    else:
        sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    if sliding and not family.windows:
        raise ValueError(
            f"sliding_window = {config.get('sliding_window')!r}, but {family.model_type} models have none; set it to "
            "null, or name the model_type that has one"
        )
    if sliding and not window:
        raise ValueError(
            f"layer_types has sliding_attention, but use_sliding_window = {config.get('use_sliding_window')!r} and "
            f"sliding_window = {config.get('sliding_window')!r} switch the window off; correct the one or the other"
        )
    return (window, sliding) if sliding else (0, ())


def _window_fields(attention: Attention, layers: int) -> dict[str, Any]:
    sliding = set(attention.window_layers)
    first = min(sliding, default=layers)
    return {
        "use_sliding_window": bool(sliding),
        "sliding_window": attention.window or None,
        "max_window_layers": first if sliding == set(range(first, layers)) else layers,
        "layer_types": ["sliding_attention" if layer in sliding else "full_attention" for layer in range(layers)],
    }
