"""The dense families: config.json both ways, refusals, weight maps, presets and their published sizes."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lf.config import load_function
from lf.models import hf, spec, weights
from lf.models.decoder import Attention, DecoderConfig, Experts, Mla, Mlp, Norm
from lf.models.decoder_facts import parameters
from lf.models.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from lf.models.llm import deepseek, llama, qwen
from lf.models.toy import Toy

GOLDEN = Path(__file__).parent / "golden" / "hf"
GOLDEN_NAMES = ("llama", "llama31", "qwen2", "qwen3")
PRESETS: dict[str, DecoderConfig] = {
    name: value for module in (llama, qwen) for name, value in vars(module).items() if isinstance(value, DecoderConfig)
}
TINY = {name: cfg for name, cfg in PRESETS.items() if name.endswith("_tiny")}

# Totals that Hugging Face shows for the published checkpoints.
PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_1_8b": 8_030_261_248,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
    "qwen1_5_0_5b": 463_987_712,
    "qwen1_5_1_8b": 1_836_828_672,
    "qwen1_5_4b": 3_950_369_280,
    "qwen1_5_7b": 7_721_324_544,
    "qwen1_5_14b": 14_167_290_880,
    "qwen1_5_32b": 32_512_218_112,
    "qwen1_5_72b": 72_287_920_128,
    "qwen1_5_110b": 111_209_914_368,
    "qwen2_0_5b": 494_032_768,
    "qwen2_1_5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen2_72b": 72_706_203_648,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_72b": 72_706_203_648,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
}


def from_hf(config: dict[str, Any]) -> DecoderConfig:
    return {"llama": llama.from_hf}.get(config["model_type"], qwen.from_hf)(config)


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


def meta_model(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = copy.deepcopy(config)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))


def old_dialect(config: dict[str, Any]) -> dict[str, Any]:
    config = copy.deepcopy(config)
    table = config.pop("rope_parameters")
    config["rope_theta"] = table.pop("rope_theta")
    kind = table.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **table}
    return config


def test_golden_configs_are_read() -> None:
    read = {name: hf.read_config(GOLDEN / name) for name in GOLDEN_NAMES}
    assert read["llama"] == llama.Llama(
        vocab=128,
        hidden=48,
        layers=2,
        attention=Attention(heads=6, kv_heads=2, head_dim=8),
        mlp=Mlp(width=96),
        norm=Norm(eps=1e-5),
        rope=Rope(theta=10000.0),
        max_length=256,
    )
    assert read["llama31"].rope == Rope(
        theta=500000.0, scaling=Llama3Scaling(factor=8.0, low=1.0, high=4.0, original=16)
    )
    assert type(read["qwen2"]) is qwen.Qwen2
    assert read["qwen2"].tied
    assert read["qwen2"].attention == Attention(heads=6, kv_heads=2, head_dim=8, qkv_bias=True)
    assert type(read["qwen3"]) is qwen.Qwen3
    assert read["qwen3"].attention == Attention(heads=4, kv_heads=2, head_dim=16, qk_norm=True)
    assert read["qwen3"].rope == Rope(theta=1e6)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_both_dialects_say_the_same(name: str) -> None:
    new = golden(name)
    old = old_dialect(new)
    assert from_hf(old) == from_hf(new) == from_hf(old | new)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"type": "linear", "factor": 2}, LinearScaling(factor=2.0)),
        ({"type": "dynamic", "factor": 2.0}, DynamicScaling(factor=2.0, original=256)),
        ({"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}, DynamicScaling(factor=2.0, original=256)),
        (YARN, YarnScaling(factor=4.0, original=64)),
        (YARN | {"factor": None}, YarnScaling(factor=4.0, original=64)),
        (
            YARN | {"mscale": 0, "beta_fast": None, "truncate": False},
            YarnScaling(factor=4.0, original=64, truncate=False),
        ),
        (
            YARN | {"mscale": 0.7, "mscale_all_dim": 0.8, "attention_factor": 1, "beta_fast": 16, "beta_slow": 2},
            YarnScaling(
                factor=4.0,
                original=64,
                mscale=0.7,
                mscale_all_dim=0.8,
                attention_factor=1.0,
                beta_fast=16.0,
                beta_slow=2.0,
            ),
        ),
        ({"rope_type": "yarn", "factor": 4.0}, YarnScaling(factor=4.0, original=256)),
        ({"rope_type": "default"}, NoScaling()),
        (None, NoScaling()),
    ],
)
def test_old_scalings_are_read(table: dict[str, Any] | None, expected: RopeScaling) -> None:
    config = old_dialect(golden("llama")) | {"rope_theta": 7e4, "rope_scaling": table}
    assert llama.from_hf(config).rope == Rope(theta=7e4, scaling=expected)


def test_theta_defaults_as_in_transformers() -> None:
    config = golden("llama")
    del config["rope_parameters"]
    assert llama.from_hf(config).rope == Rope(theta=10000.0)


def test_original_length_may_stand_beside_the_rope() -> None:
    config = golden("llama31")
    config["original_max_position_embeddings"] = config["rope_parameters"].pop("original_max_position_embeddings")
    assert llama.from_hf(config) == llama.from_hf(golden("llama31"))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "theta twice": ("llama", {"rope_theta": 5e5}, r"rope_theta = 500000.0 and rope_parameters.rope_theta = 10000.0"),
    "scaling twice": (
        "llama31",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        r"rope_scaling = .*linear.* and rope_parameters = .*llama3.* disagree",
    ),
    "scaling against none": (
        "llama",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        r"rope_scaling = .*linear.* and rope_parameters = .*default.* disagree",
    ),
    "type twice": (
        "llama",
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
        r"rope_scaling.rope_type = 'yarn' and rope_scaling.type = 'linear' disagree",
    ),
    "rope type": (
        "llama",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        r"'longrope' is not known to lf; it knows default, linear, dynamic, llama3, yarn",
    ),
    "rope type that is no name": ("llama", {"rope_parameters": {"rope_type": ["yarn"]}}, r"\['yarn'\] is not known"),
    "rope key": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
        r"mrope_section = \[2, 1, 1\]",
    ),
    "scaling without type": ("llama", {"rope_scaling": {"factor": 4.0}, "rope_parameters": None}, r"factor = 4.0"),
    "rope a layer type": ("llama", {"rope_parameters": {"full_attention": {}}}, r"full_attention = \{\}"),
    "rope no object": ("llama", {"rope_parameters": [1]}, r"rope_parameters = \[1\]"),
    "llama3 incomplete": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        r"rope_parameters.low_freq_factor is missing",
    ),
    "factor": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        r"rope_parameters.factor = 0 must be a number greater than 0",
    ),
    "original of dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}},
        r"= 64 must equal max_position_embeddings = 256",
    ),
    "original twice": ("llama31", {"original_max_position_embeddings": 32}, r"= 32 and .*= 16 disagree"),
    "partial rotation": ("llama", {"partial_rotary_factor": 0.5}, r"part of 0.5 .* llama models rotate the whole head"),
    "activation": ("llama", {"hidden_act": "relu2"}, r"hidden_act = 'relu2' .* silu, swish, gelu, gelu_pytorch_tanh"),
    "attention bias": ("llama", {"attention_bias": True}, r"attention_bias = True"),
    "qwen3 attention bias": ("qwen3", {"attention_bias": True}, r"attention_bias = True"),
    "mlp bias": ("llama", {"mlp_bias": True}, r"mlp_bias = True"),
    "other head": ("qwen2", {"architectures": ["Qwen2ForSequenceClassification"]}, r"Qwen2ForSequenceClassification"),
    "layers that differ": ("qwen3", {"per_layer_config": {"0": {}}}, r"per_layer_config"),
    "llama window": ("llama", {"sliding_window": 64}, r"sliding_window = 64, but llama models have none"),
    "layer types": ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, r"chunked_attention"),
    "layer types too few": ("qwen2", {"layer_types": ["full_attention"]}, r"num_hidden_layers = 2 entries"),
    "window off": (
        "qwen2",
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
        r"use_sliding_window = False and sliding_window = 64 switch the window off",
    ),
    "layer types of types": (
        "qwen2",
        {"layer_types": ["full_attention", {}]},
        r"each full_attention or sliding_attention",
    ),
    "window nowhere": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 0},
        r"sliding_window = 0 must be a whole",
    ),
    "head width": ("llama", {"head_dim": None, "num_attention_heads": 5}, r"hidden_size = 48 must be a multiple of"),
    "groups": ("llama", {"num_key_value_heads": 4}, r"heads = 6 must be a multiple of attention.kv_heads = 4"),
    "negative dropout": (
        "llama",
        {"attention_dropout": -0.5},
        r"attention_dropout = -0.5 must be a number at least 0 and at most 1; correct it",
    ),
    "rotated more than the head": (
        "minimax_m2",
        {"rotary_dim": 32, "rope_parameters": None},
        r"partial_rotary_factor = 2.0 must be a number greater than 0 and at most 1",
    ),
    "negative coefficient": (
        "qwen3_moe",
        {"router_aux_loss_coef": -1},
        r"router_aux_loss_coef = -1 must be a number at least 0; correct it",
    ),
    "too many layers": ("llama", {"num_hidden_layers": 10001}, r"Llama.layers = 10001 must be from 1 to 10000"),
    "text for a number": ("llama", {"hidden_size": "48"}, r"hidden_size = '48' must be a whole number, at least 1"),
    "fraction for a whole": ("llama", {"num_hidden_layers": 2.5}, r"num_hidden_layers = 2.5 must be a whole number"),
    "flag for a number": ("llama", {"vocab_size": True}, r"vocab_size = True must be a whole number"),
    "not finite": ("llama", {"rms_norm_eps": float("nan")}, r"rms_norm_eps = nan must be a number greater than 0"),
    "text for a flag": ("llama", {"tie_word_embeddings": "yes"}, r"tie_word_embeddings = 'yes' must be true or false"),
    "missing": ("llama", {"hidden_size": None, "rms_norm_eps": None}, r"hidden_size, rms_norm_eps missing"),
    "missing heads": ("qwen2", {"num_key_value_heads": None}, r"num_key_value_heads missing; a qwen2 config.json"),
    "missing head width": ("qwen3", {"head_dim": None}, r"head_dim missing; a qwen3 config.json"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_lf_cannot_have_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, change, said = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(golden(name) | change))
    with pytest.raises(ValueError, match=said) as caught:
        hf.read_config(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


@pytest.mark.parametrize(
    "change",
    [
        {"pretraining_tp": 4},
        {"use_cache": False},
        {"sliding_window": None},
        {"hidden_act": "swish"},
        {"head_dim": None},
        {"attention_bias": None},
        {"architectures": None},
    ],
)
def test_what_changes_no_number_is_ignored(change: dict[str, Any]) -> None:
    assert llama.from_hf(golden("llama") | change) == llama.from_hf(golden("llama"))


def test_a_window_of_no_stated_width_is_refused() -> None:
    config = golden("qwen2") | {"use_sliding_window": True}
    del config["sliding_window"]
    with pytest.raises(ValueError, match="use_sliding_window = True without sliding_window"):
        qwen.from_hf(config)


def test_windows_are_read_as_transformers_reads_them() -> None:
    from transformers import AutoConfig

    base = golden("qwen2") | {"num_hidden_layers": 4, "layer_types": None}
    cases = [
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 9},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1},
        {
            "use_sliding_window": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ]
    for case in cases:
        theirs = AutoConfig.for_model(**(base | case))
        attention = qwen.from_hf(base | case).attention
        assert isinstance(attention, Attention)
        sliding = tuple(i for i, kind in enumerate(theirs.layer_types) if kind == "sliding_attention")
        assert attention.window_layers == sliding
        assert attention.window == (theirs.sliding_window if sliding else 0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_go_to_config_json_and_back(name: str) -> None:
    cfg = PRESETS[name]
    config = json.loads(json.dumps(spec.hf_config(cfg)))
    back = from_hf(config)
    assert back == cfg
    assert type(back) is type(cfg)
    assert from_hf({key: value for key, value in config.items() if key != "rope_parameters"}) == cfg
    assert from_hf({key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}) == cfg


@st.composite
def models(draw: Callable[..., Any]) -> DecoderConfig:
    kind, family = draw(
        st.sampled_from([(llama.Llama, llama.FAMILY), (qwen.Qwen2, qwen.QWEN2), (qwen.Qwen3, qwen.QWEN3)])
    )
    kv_heads, ratio, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(2, 8))
    heads, layers, max_length = kv_heads * ratio, draw(st.integers(1, 4)), draw(st.integers(8, 99))
    sliding = tuple(i for i in range(layers) if family.windows and draw(st.booleans()))
    factor, original = draw(st.floats(1.0, 9.0)), draw(st.integers(4, 99))
    scaling = draw(
        st.sampled_from(
            [
                NoScaling(),
                LinearScaling(factor=factor),
                DynamicScaling(factor=factor, original=max_length),
                Llama3Scaling(factor=factor, low=1.5, high=3.0, original=original),
                YarnScaling(factor=factor, original=original, attention_factor=1.25, truncate=False),
                YarnScaling(factor=factor, original=original, beta_fast=30.0, mscale=0.7, mscale_all_dim=0.5),
            ]
        )
    )
    return kind(
        vocab=draw(st.integers(2, 99)),
        hidden=heads * draw(st.integers(1, 9)),
        layers=layers,
        attention=Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            window=5 if sliding else 0,
            window_layers=sliding,
            dropout=draw(st.sampled_from([0.0, 0.1])),
        ),
        mlp=Mlp(width=draw(st.integers(1, 50)), activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"]))),
        norm=Norm(eps=draw(st.sampled_from([1e-6, 1e-5]))),
        rope=Rope(theta=draw(st.floats(100.0, 1e7)), scaling=scaling),
        max_length=max_length,
        tied=draw(st.booleans()),
        init_std=draw(st.floats(1e-3, 1.0)),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cfg=models())
def test_any_model_goes_to_config_json_and_back(cfg: DecoderConfig) -> None:
    config = json.loads(json.dumps(spec.hf_config(cfg)))
    assert from_hf(config) == cfg
    assert from_hf({key: value for key, value in config.items() if key != "rope_parameters"}) == cfg


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cfg=models())
def test_transformers_builds_the_same_model(cfg: DecoderConfig) -> None:
    model = meta_model(spec.hf_config(cfg))
    assert type(model).__name__ == spec.hf_config(cfg)["architectures"][0]
    assert sum(tensor.numel() for tensor in model.parameters()) == parameters(cfg)
    # What transformers makes of it and saves again is the same model.
    assert from_hf(json.loads(model.config.to_json_string(use_diff=True))) == cfg
    # The weight map claims every tensor of the model, and with the right shapes.
    table = spec.weight_map(cfg)
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert set(table.by_hf) == set(state) | ({"lm_head.weight"} if cfg.tied else set())
    for rule in table.by_lf.values():
        for name, shape in weights.hf_shapes(rule, lf_shape(rule, state)).items():
            assert shape == state[name]


def lf_shape(rule: weights.LfRule, state: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    shapes = [state[name] for name in weights.hf_names(rule)]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@pytest.mark.parametrize("name", ["llama3_1_8b", "qwen2_5_72b", "qwen3_0_6b", *TINY])
def test_parameters_are_those_of_transformers(name: str) -> None:
    model = meta_model(spec.hf_config(PRESETS[name]))
    assert sum(tensor.numel() for tensor in model.parameters()) == parameters(PRESETS[name])


def test_every_preset_has_its_published_size() -> None:
    assert {name: parameters(cfg) for name, cfg in PRESETS.items() if name not in TINY} == PUBLISHED
    assert all(parameters(cfg) < 100_000 for cfg in TINY.values())


def test_canonical_names_are_those_of_the_decoder() -> None:
    table = spec.weight_map(attrs.evolve(qwen.qwen3_tiny, layers=1))
    assert set(table.by_lf) == {
        "embedding.word_embeddings.weight",
        "decoder.layers.0.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.self_attention.k_layernorm.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "decoder.layers.0.mlp.linear_fc2.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }
    assert table.by_lf["decoder.layers.0.mlp.linear_fc1.weight"] == weights.Stack(
        "decoder.layers.0.mlp.linear_fc1.weight",
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    )
    assert table.by_lf["decoder.layers.0.self_attention.linear_qkv.weight"] == weights.FusedQkv(
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        heads=4,
        kv_heads=2,
        head_dim=16,
    )
    tied = spec.weight_map(qwen.qwen2_tiny)
    assert "decoder.layers.1.self_attention.linear_qkv.bias" in tied.by_lf
    assert "output_layer.weight" not in tied.by_lf
    assert tied.by_hf["lm_head.weight"] == weights.Duplicate("lm_head.weight", "model.embed_tokens.weight")


NUMBERS: list[tuple[type, dict[str, Any], str]] = [
    (
        Attention,
        {"heads": 4, "kv_heads": 2, "head_dim": 16, "dropout": -0.5},
        "Attention.dropout = -0.5 must be from",
    ),
    (Mla, {"heads": 0, "kv_rank": 8, "nope_dim": 8, "rope_dim": 8, "v_dim": 8}, "Mla.heads = 0 must be at least 1"),
    (Mla, {"heads": 2, "kv_rank": 8, "nope_dim": 8, "rope_dim": 7, "v_dim": 8}, "Mla.rope_dim = 7 must be even"),
    (Norm, {"eps": float("nan")}, "Norm.eps = nan must be greater than 0; correct it"),
    (Rope, {"fraction": 1.5}, "Rope.fraction = 1.5 must be greater than 0 and at most 1; correct it"),
    (
        Experts,
        {"count": 8, "top_k": 2, "width": 8, "z_coef": -1.0},
        "Experts.z_coef = -1.0 must be at least 0;",
    ),
]


@pytest.mark.parametrize(("part", "fields", "said"), NUMBERS)
def test_a_number_out_of_range_is_named_with_its_field_and_rule(part: type, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        part(**fields)


def test_layers_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"attention.window_layers has 2, and must lie in 0 .. 1, since layers = 2;"):
        other(qwen.qwen3_tiny, window=4, window_layers=(0, 2))
    for name, layers, told in (("qwen3_moe", (7,), "7"), ("qwen3_moe", (0, -1), "-1")):
        cfg = hf.read_config(GOLDEN / name, None)
        assert isinstance(cfg, DecoderConfig)
        assert cfg.experts is not None
        with pytest.raises(ValueError, match=rf"experts.dense has {told}, and must lie in 0 .. 1, since layers = 2;"):
            attrs.evolve(cfg, experts=attrs.evolve(cfg.experts, dense=layers))
    headed = deepseek.deepseek_v3_tiny
    assert headed.experts is not None
    attrs.evolve(headed, experts=attrs.evolve(headed.experts, dense=(headed.layers,)))
    with pytest.raises(ValueError, match=r"experts.dense has 10, 11, 12, 13, 14 and 15 more, .* and mtp.depth = 1;"):
        attrs.evolve(headed, experts=attrs.evolve(headed.experts, dense=tuple(range(10, 30))))


def other(cfg: DecoderConfig, **change: Any) -> DecoderConfig:
    return attrs.evolve(cfg, attention=attrs.evolve(cfg.attention, **change))


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        (
            other(llama.llama_tiny, qkv_bias=True),
            r"attention.qkv_bias = True, but every llama model has qkv_bias = False",
        ),
        (other(qwen.qwen2_tiny, qkv_bias=False), r"attention.qkv_bias = False, but every qwen2"),
        (other(qwen.qwen3_tiny, qk_norm=False), r"attention.qk_norm = False, but every qwen3"),
        (other(llama.llama_tiny, window=4, window_layers=(0,)), r"attention.window = 4, but llama models have no"),
        (other(llama.llama_tiny, heads=10, head_dim=8), r"hidden = 48 must be a multiple of attention.heads = 10"),
        (attrs.evolve(qwen.qwen3_tiny, rope=Rope(fraction=0.5)), r"part of 0.5"),
        (
            attrs.evolve(qwen.qwen3_tiny, rope=Rope(scaling=DynamicScaling(factor=2.0, original=64))),
            r"rope.scaling.original = 64 must equal max_length = 256",
        ),
    ],
)
def test_what_config_json_cannot_state_is_refused(cfg: DecoderConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spec.hf_config(cfg)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is missing"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[1]", "list"),
        (b"{}", r"no model_type .*it knows .*llama, .*qwen2, .*qwen3"),
        (b'{"model_type": "mistral"}', r"model_type = 'mistral', which lf does not know; it knows .*llama"),
        (b'{"model_type": ["llama"]}', r"model_type = \['llama'\], which lf does not know"),
    ],
)
def test_broken_folders_are_refused_with_their_path(content: bytes | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=said) as caught:
        hf.read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="/absent is not a folder"):
        hf.read_config(tmp_path / "absent")


MINE = """
import attrs
from lf.models.llm.llama import Llama, from_hf

@attrs.frozen(kw_only=True)
class Mine(Llama):
    extra: int = 0

def reader(config):
    base = from_hf(config)
    return Mine(**{field.name: getattr(base, field.name) for field in attrs.fields(Llama)}, extra=config["extra"])

def wrong(config):
    return 3
"""


def test_a_reader_outside_lf_extends_the_table(tmp_path: Path) -> None:
    file = tmp_path / "outside_family.py"
    file.write_text(MINE)
    (tmp_path / "config.json").write_text(json.dumps(golden("llama") | {"model_type": "mine", "extra": 7}))
    cfg = hf.read_config(tmp_path, load_function(f"{file}:reader"))
    assert type(cfg).__name__ == "Mine"
    assert cfg.extra == 7
    # Its class is made once, and inherits what it does not change.
    assert hf.read_config(tmp_path, load_function(f"{file}:reader")) == cfg
    assert spec.hf_config(cfg)["model_type"] == "llama"
    with pytest.raises(ValueError, match=r"'mine', which lf does not know.*--family"):
        hf.read_config(tmp_path)
    with pytest.raises(
        ValueError, match=r"config\.json: its reader returned a builtins\.int; it must return a ModelCo"
    ):
        hf.read_config(tmp_path, load_function(f"{file}:wrong"))
    with pytest.raises(ValueError, match=r"outside_family\.py has no function absent"):
        load_function(f"{file}:absent")
    with pytest.raises(ValueError, match=r"'nowhere\.py:reader' must be FILE\.py:NAME"):
        load_function("nowhere.py:reader")
    (tmp_path / "broken_family.py").write_text("def reader(:")
    with pytest.raises(ValueError, match=r"broken_family\.py:1: SyntaxError"):
        load_function(f"{tmp_path / 'broken_family.py'}:reader")


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_an_export_keeps_the_config_it_started_from(name: str) -> None:
    original = (GOLDEN / name / "config.json").read_bytes()
    cfg = hf.read_config(GOLDEN / name)
    assert hf.config_bytes(cfg, original) == original
    assert hf.config_bytes(attrs.evolve(cfg, vocab_multiple=64), original, eos=9) == original
    made = json.loads(hf.config_bytes(cfg))
    assert made == spec.hf_config(cfg)
    assert made["eos_token_id"] is None


def test_an_export_of_a_changed_model_states_the_change() -> None:
    stated = old_dialect(golden("qwen3"))
    cfg = qwen.from_hf(stated)
    longer = attrs.evolve(
        cfg, max_length=1024, rope=attrs.evolve(cfg.rope, scaling=YarnScaling(factor=4.0, original=256))
    )
    written = json.loads(hf.config_bytes(longer, json.dumps(stated).encode(), eos=9))
    assert qwen.from_hf(written) == longer
    assert (written["bos_token_id"], written["eos_token_id"], written["dtype"]) == (1, 2, "float32")


def test_an_export_without_a_folder_names_the_tokens_of_the_tokenizer() -> None:
    made = json.loads(hf.config_bytes(qwen.qwen3_tiny, eos=9))
    assert made == spec.hf_config(qwen.qwen3_tiny) | dict.fromkeys(hf.TOKEN_IDS, 9)
    # The config.json of another family keeps nothing but its token ids.
    other_kind = json.dumps(golden("llama") | {"eos_token_id": [5, 6]}).encode()
    made = json.loads(hf.config_bytes(qwen.qwen3_tiny, other_kind, eos=9))
    assert made == spec.hf_config(qwen.qwen3_tiny) | {"bos_token_id": 1, "eos_token_id": [5, 6], "pad_token_id": 0}


def test_a_config_that_no_reader_knows_is_compared_key_by_key() -> None:
    ours = spec.hf_config(Toy()) | {"more": 1}
    original = json.dumps(ours).encode()
    assert hf.config_bytes(Toy(), original) == original
    assert json.loads(hf.config_bytes(Toy(hidden=8), original)) == ours | {"hidden": 8}
