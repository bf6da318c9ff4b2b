"""Families with experts or latent attention: config.json both ways, refusals, weight maps, presets and their sizes."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lf.models import hf, spec, weights
from lf.models.decoder import Attention, DecoderConfig, Experts, Mla, Mlp, Mtp, Norm
from lf.models.decoder_facts import mtp_depth, parameters
from lf.models.layers.rope import NoScaling, Rope, YarnScaling
from lf.models.llm import deepseek, minimax, qwen_moe
from tests.moe_cases import LATENT

GOLDEN = Path(__file__).parent / "golden" / "hf"
NAMES = ("qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "deepseek_v3_mtp", "kimi_k2", "minimax_m2")
MODULES = (qwen_moe, deepseek, minimax)
PRESETS: dict[str, DecoderConfig] = {
    name: value for module in MODULES for name, value in vars(module).items() if isinstance(value, DecoderConfig)
}
TINY = {name: cfg for name, cfg in PRESETS.items() if name.endswith("_tiny")}

# Totals that Hugging Face shows for the published checkpoints, without further heads and the routers' biases.
PUBLISHED = {
    "qwen1_5_moe_a2_7b": 14_315_784_192,
    "qwen2_57b_a14b": 57_408_658_944,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_coder_30b_a3b": 30_532_122_624,
    "qwen3_coder_480b_a35b": 480_154_875_392,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_404_352,
    "kimi_k2": 1_026_408_209_408,
    "minimax_m2": 228_689_748_992,
}


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / name / "config.json").read_text())


def from_hf(config: dict[str, Any]) -> spec.ModelConfig:
    return hf.known_reader(config)(config)


def meta_model(config: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = copy.deepcopy(config)
    kind = {"kimi_k2": "deepseek_v3"}.get(fields["model_type"], fields["model_type"])
    del fields["model_type"]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields))


def test_golden_configs_are_read() -> None:
    read = {name: hf.read_config(GOLDEN / name) for name in NAMES}
    assert read["qwen3_moe"] == qwen_moe.Qwen3Moe(
        vocab=128,
        hidden=48,
        layers=2,
        attention=Attention(heads=4, kv_heads=2, head_dim=16, qk_norm=True),
        mlp=Mlp(width=64),
        experts=Experts(count=8, top_k=3, width=24),
        rope=Rope(theta=1e6),
        max_length=256,
    )
    assert read["deepseek_v3_mtp"] == deepseek.DeepseekV3(
        vocab=128,
        hidden=48,
        layers=2,
        attention=LATENT,
        mlp=Mlp(width=80),
        experts=Experts(
            count=8,
            top_k=4,
            width=16,
            score="sigmoid",
            scale=2.5,
            groups=4,
            group_top_k=2,
            bias=True,
            shared=16,
            dense=(0,),
        ),
        mtp=Mtp(),
        rope=Rope(
            theta=1e4, scaling=YarnScaling(factor=8.0, original=32, beta_fast=16.0, mscale=1.0, mscale_all_dim=1.0)
        ),
        max_length=256,
    )
    v2 = read["deepseek_v2"]
    assert isinstance(v2, deepseek.DeepseekV2)
    assert v2.experts is not None
    assert (v2.experts.group_rank, v2.experts.renormalise, v2.experts.shared) == ("max", False, 32)
    mini = read["minimax_m2"]
    assert isinstance(mini, minimax.MiniMaxM2)
    assert mini.rope == Rope(theta=5e6, fraction=0.5)
    assert mini.attention == Attention(heads=4, kv_heads=2, head_dim=16, qk_norm=True, qk_norm_over="all")


def test_layers_without_experts_are_read() -> None:
    base = golden("qwen3_moe") | {"num_hidden_layers": 5}
    for change, dense in (
        ({"mlp_only_layers": [1, 4]}, (1, 4)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (0, 2, 3, 4)),
    ):
        cfg = from_hf(base | change)
        assert isinstance(cfg, DecoderConfig)
        assert cfg.experts is not None
        assert cfg.experts.dense == dense


def test_both_names_of_the_number_of_experts_are_read() -> None:
    base = golden("qwen3_moe")
    hub = {key: value for key, value in base.items() if key != "num_local_experts"} | {"num_experts": 8}
    assert from_hf(hub) == from_hf(base) == from_hf(base | hub)


AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "initializer_range": 0.02,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "max_position_embeddings": 196608,
        "model_type": "minimax_m2",
        "mtp_transformer_layers": 1,
        "num_attention_heads": 48,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    },
}


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_configs_in_the_words_of_the_published_models_are_read(name: str) -> None:
    assert from_hf(AS_PUBLISHED[name]) == PRESETS[name]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts twice": ("qwen3_moe", {"num_experts": 4}, r"num_experts = 4 and num_local_experts = 8 disagree"),
    "no experts": ("qwen3_moe", {"num_local_experts": None}, r"num_experts is missing"),
    "too many": ("qwen3_moe", {"num_experts_per_tok": 9}, r"experts.top_k = 9, but a token may use 8"),
    "dense layers": ("qwen2_moe", {"mlp_only_layers": "0"}, r"mlp_only_layers = '0' must be a list"),
    "shared": ("qwen2_moe", {"shared_expert_intermediate_size": None}, r"shared_expert_intermediate_size missing"),
    "score": ("deepseek_v3", {"scoring_func": "softmax"}, r"scoring_func = 'softmax', but lf's deepseek_v3"),
    "frequency": ("deepseek_v3", {"moe_layer_freq": 2}, r"moe_layer_freq = 2"),
    "pairs": ("deepseek_v3", {"rope_interleave": False}, r"rope_interleave = False"),
    "groups": ("deepseek_v3", {"n_group": 3}, r"experts.count = 8 must be a multiple of experts.groups = 3"),
    "v2 renormalised": ("deepseek_v2", {"norm_topk_prob": True}, r"norm_topk_prob = True"),
    "v2 method": ("deepseek_v2", {"topk_method": "random"}, r"topk_method = 'random' is not greedy"),
    "bias": ("deepseek_v2", {"attention_bias": True}, r"attention_bias = True"),
    "heads": ("deepseek_v3", {"num_key_value_heads": 2}, r"num_key_value_heads = 2"),
    "minimax score": ("minimax_m2", {"scoring_func": "softmax"}, r"scoring_func = 'softmax'"),
    "minimax rotary": ("minimax_m2", {"rotary_dim": 16}, r"partial_rotary_factor = 1.0 and .*0.5 disagree"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_lf_cannot_have_is_refused(case: str, tmp_path: Path) -> None:
    name, change, said = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(golden(name) | change))
    with pytest.raises(ValueError, match=said):
        hf.read_config(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_go_to_config_json_and_back(name: str) -> None:
    back = from_hf(json.loads(json.dumps(spec.hf_config(PRESETS[name]))))
    assert back == PRESETS[name]
    assert type(back) is type(PRESETS[name])


def test_every_preset_has_its_published_size() -> None:
    trunks = {name: attrs.evolve(cfg, mtp=None) for name, cfg in PRESETS.items() if name not in TINY}
    assert {name: parameters(cfg) for name, cfg in trunks.items()} == PUBLISHED
    assert parameters(deepseek.deepseek_v3) - PUBLISHED["deepseek_v3"] == 11_610_067_968
    assert all(parameters(cfg) < 100_000 for cfg in TINY.values())


@pytest.mark.parametrize("name", NAMES)
def test_an_export_keeps_the_config_it_started_from(name: str) -> None:
    original = (GOLDEN / name / "config.json").read_bytes()
    cfg = hf.read_config(GOLDEN / name)
    assert hf.config_bytes(cfg, original) == original


@st.composite
def experts(draw: Callable[..., Any], layers: int, **fixed: Any) -> Experts:
    groups = draw(st.sampled_from([1, 2, 4])) if "groups" not in fixed else fixed["groups"]
    count = groups * draw(st.integers(2, 4))
    kept = draw(st.integers(1, groups))
    made: dict[str, Any] = {
        "count": count,
        "groups": groups,
        "group_top_k": kept,
        "top_k": draw(st.integers(1, count // groups * kept)),
        "width": draw(st.integers(1, 9)),
        "renormalise": draw(st.booleans()),
        "balance_coef": draw(st.sampled_from([0.001, 0.01])),
    }
    return Experts(**{**made, **fixed})


@st.composite
def models(draw: Callable[..., Any]) -> DecoderConfig:
    kind = draw(
        st.sampled_from(
            [
                *(qwen_moe.Qwen2Moe, qwen_moe.Qwen3Moe, minimax.MiniMaxM2),
                *(deepseek.DeepseekV2, deepseek.DeepseekV3, deepseek.KimiK2),
            ]
        )
    )
    layers, kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads, head_dim = kv_heads * draw(st.integers(1, 3)), 4 * draw(st.integers(1, 4))
    dense = tuple(layer for layer in range(layers) if draw(st.booleans()))
    width = draw(st.integers(1, 9))
    shared = width * draw(st.integers(1, 2))
    yarn = YarnScaling(factor=4.0, original=16, beta_fast=16.0, mscale=1.0, mscale_all_dim=0.7)
    base: dict[str, Any] = {
        "vocab": draw(st.integers(2, 99)),
        "hidden": heads * draw(st.integers(1, 9)),
        "layers": layers,
        "mlp": Mlp(width=draw(st.integers(1, 50))),
        "norm": Norm(eps=draw(st.sampled_from([1e-6, 1e-5]))),
        "rope": Rope(theta=draw(st.floats(100.0, 1e7)), scaling=draw(st.sampled_from([NoScaling(), yarn]))),
        "max_length": draw(st.integers(20, 99)),
        "tied": draw(st.booleans()),
    }
    attention = Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    if kind is qwen_moe.Qwen2Moe:
        base["attention"] = attrs.evolve(attention, qkv_bias=True)
        base["experts"] = draw(experts(layers, groups=1, shared=shared, shared_gate=True, dense=dense))
    elif kind is qwen_moe.Qwen3Moe:
        base["attention"] = attrs.evolve(attention, qk_norm=True)
        base["experts"] = draw(experts(layers, groups=1, dense=dense))
    elif kind is minimax.MiniMaxM2:
        base["attention"] = attrs.evolve(attention, qk_norm=True, qk_norm_over="all")
        base["experts"] = draw(experts(layers, groups=1, score="sigmoid", bias=True, renormalise=True, width=width))
        base["mlp"] = Mlp(width=width)
        base["rope"] = attrs.evolve(base["rope"], fraction=0.5)
    else:
        rank = draw(st.sampled_from([0, 8]))
        base["attention"] = Mla(heads=heads, q_rank=rank, kv_rank=12, nope_dim=6, rope_dim=4, v_dim=head_dim)
        fixed = {"width": width, "shared": shared, "dense": tuple(range(draw(st.integers(0, layers))))}
        fixed["scale"] = draw(st.sampled_from([1.0, 2.5]))
        v2 = kind is deepseek.DeepseekV2
        routing = {"renormalise": False, "group_rank": "max"} if v2 else {"score": "sigmoid", "bias": True}
        base["experts"] = draw(experts(layers, **fixed, **routing))
        if not v2:
            base["mtp"] = draw(st.sampled_from([None, Mtp(), Mtp(depth=2)]))
    return kind(**base)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cfg=models())
def test_any_model_goes_to_config_json_and_back(cfg: DecoderConfig) -> None:
    config = json.loads(json.dumps(spec.hf_config(cfg)))
    assert from_hf(config) == cfg
    assert from_hf({key: value for key, value in config.items() if key != "rope_parameters"}) == cfg


@settings(max_examples=15, deadline=None, derandomize=True)
@given(cfg=models())
def test_transformers_builds_the_same_model(cfg: DecoderConfig) -> None:
    config = spec.hf_config(cfg)
    model = meta_model(config)
    trunk = attrs.evolve(cfg, mtp=None)
    assert sum(tensor.numel() for tensor in model.parameters()) == parameters(trunk)
    # What transformers makes of it and saves again is the same model.
    again = json.loads(model.config.to_json_string(use_diff=True)) | {"model_type": config["model_type"]}
    assert from_hf(again) == cfg
    # The weight map claims every tensor of the model, and with the right shapes. In memory transformers stacks experts.
    table = spec.weight_map(trunk)
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if ".experts." not in name}
    named = {name.replace("block_sparse_moe", "mlp"): name for name in table.by_hf if ".experts." not in name}
    assert set(named) == set(state) | ({"lm_head.weight"} if cfg.tied else set())
    shapes = {named[name]: shape for name, shape in state.items()}
    for rule in table.by_lf.values():
        if ".experts." not in rule.lf:
            for name, shape in weights.hf_shapes(rule, weights.lf_shape(rule, shapes)).items():
                assert shape == shapes[name]


@pytest.mark.parametrize("depth", [1, 2])
def test_further_heads_have_the_names_of_the_layers_after_the_last(depth: int) -> None:
    cfg = attrs.evolve(deepseek.deepseek_v3_tiny, mtp=Mtp(depth=depth))
    table = spec.weight_map(cfg)
    last = f"model.layers.{cfg.layers + depth - 1}"
    assert table.by_hf[f"{last}.enorm.weight"] == weights.Same(
        f"mtp.layers.{depth - 1}.enorm.weight", f"{last}.enorm.weight"
    )
    assert table.by_hf[f"{last}.shared_head.norm.weight"].lf == f"mtp.layers.{depth - 1}.final_layernorm.weight"
    assert table.by_hf[f"{last}.embed_tokens.weight"] == weights.Duplicate(
        f"{last}.embed_tokens.weight", "model.embed_tokens.weight"
    )
    assert mtp_depth(cfg) == depth


def changed(cfg: DecoderConfig, **change: Any) -> DecoderConfig:
    assert cfg.experts is not None
    return attrs.evolve(cfg, experts=attrs.evolve(cfg.experts, **change))


@pytest.mark.parametrize(
    ("cfg", "said"),
    [
        (attrs.evolve(qwen_moe.qwen3_moe_tiny, experts=None), r"experts = None, but every qwen3_moe model has them"),
        (changed(qwen_moe.qwen3_moe_tiny, shared=8), r"experts.shared = 8, but every qwen3_moe"),
        (changed(qwen_moe.qwen2_moe_tiny, scale=2.0), r"experts.scale = 2.0, but every qwen2_moe"),
        (attrs.evolve(qwen_moe.qwen3_moe_tiny, mtp=Mtp()), r"mtp is set, but qwen3_moe models have no further heads"),
        (attrs.evolve(deepseek.deepseek_v2_tiny, mtp=Mtp()), r"mtp is set, but deepseek_v2"),
        (changed(deepseek.deepseek_v3_tiny, dense=(1,)), r"experts.dense = \(1,\), but every deepseek_v3"),
        (
            changed(deepseek.deepseek_v3_tiny, shared=24),
            r"experts.shared = 24 must be a multiple of experts.width = 16",
        ),
        (changed(deepseek.deepseek_v3_tiny, bias=False), r"experts.bias = False, but every deepseek_v3"),
        (attrs.evolve(minimax.minimax_m2_tiny, mlp=Mlp(width=25)), r"mlp.width must be experts.width = 24"),
        (
            attrs.evolve(
                deepseek.deepseek_v3_tiny, attention=attrs.evolve(deepseek.deepseek_v3_tiny.attention, latent_eps=1e-5)
            ),
            r"latent_eps = 1e-6",
        ),
    ],
)
def test_what_config_json_cannot_state_is_refused(cfg: DecoderConfig, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        spec.hf_config(cfg)
