"""Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL, dense and with experts (arXiv:2511.21631).

Presets have the numbers of the published Instruct models. A Qwen3-VL with experts is published with its experts'
matrices transposed; transformers saves them upright, and lf reads both.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from lf.models import spec
from lf.models.decoder import DecoderConfig, Experts, Norm
from lf.models.expert_weights import FusedExperts, StackedExperts
from lf.models.layers.rope import Rope
from lf.models.llm import dense, qwen, qwen_moe
from lf.models.llm.fields import whole
from lf.models.vision.projector import Projector
from lf.models.vision.qwen_vit import Qwen3Vision, Qwen25Vision
from lf.models.vlm import Vlm
from lf.models.vlms import shared
from lf.models.weights import Rule, WeightMap

TEXT2_5 = attrs.evolve(qwen.QWEN2, model_type="qwen2_5_vl_text", sections=True)
TEXT3 = attrs.evolve(qwen.QWEN3, model_type="qwen3_vl_text", sections=True)
TEXT3_MOE = attrs.evolve(qwen_moe.QWEN3_MOE, model_type="qwen3_vl_moe_text", sections=True)
MERGER2_5 = {"norm": "visual.merger.ln_q", "fc1": "visual.merger.mlp.0", "fc2": "visual.merger.mlp.2"}
MERGER3 = {
    "norm": "model.visual.merger.norm",
    "fc1": "model.visual.merger.linear_fc1",
    "fc2": "model.visual.merger.linear_fc2",
}


@attrs.frozen(kw_only=True)
class QwenVl(Vlm):
    """What the families have besides the model: the tokens around an image."""

    image_token: int = 151655
    """Token id that stands where an image's features go, once for each."""
    video_token: int = 151656
    """The same of a video."""
    start_token: int = 151652
    """Token id before an image."""
    end_token: int = 151653
    """Token id after an image."""


@attrs.frozen(kw_only=True)
class Qwen25Vl(QwenVl):
    """A Qwen2.5-VL: a windowed tower, a patch merger, a Qwen2.5 that turns by three positions one after the other."""


@attrs.frozen(kw_only=True)
class Qwen3Vl(QwenVl):
    """A Qwen3-VL: a tower with levels, patch mergers, a Qwen3 that turns by three positions in turns."""


@attrs.frozen(kw_only=True)
class Qwen3VlMoe(Qwen3Vl):
    """A Qwen3-VL whose decoder has experts."""


def from_hf(config: Mapping[str, Any]) -> QwenVl:
    """Returns the model that a config.json of model_type `qwen2_5_vl`, `qwen3_vl` or `qwen3_vl_moe` states.

    Raises ValueError where lf cannot have it.
    """
    kind = config.get("model_type")
    vision = shared.part(config, "vision_config")
    ids: dict[str, Any] = {
        ours: whole(config, theirs, attrs.fields_dict(QwenVl)[ours].default, least=0) for ours, theirs in TOKENS.items()
    }
    if kind == "qwen2_5_vl":
        # The published files state the decoder beside the tower instead of in an object of its own.
        beside = {**config, "model_type": TEXT2_5.model_type, "architectures": None}
        nested = {"text_config": beside, **config}
        text2 = dense.read(shared.text_fields(nested, TEXT2_5.model_type), TEXT2_5, qwen.Qwen2)
        return Qwen25Vl(vision=_read_vision2_5(vision, text2), projector=PROJECTOR2_5, text=text2, **ids)
    if kind == "qwen3_vl":
        text3 = dense.read(shared.text_fields(config, TEXT3.model_type), TEXT3, qwen.Qwen3)
        return Qwen3Vl(vision=_read_vision3(vision, text3), text=text3, **ids)
    if kind == "qwen3_vl_moe":
        # transformers renormalises the scores in every one of them, and not all files say so.
        fields = {"norm_topk_prob": True, **shared.text_fields(config, TEXT3_MOE.model_type)}
        shared.check_fixed(fields, "text_config", norm_topk_prob=True)
        moe = qwen_moe.read_qwen3_moe(fields, TEXT3_MOE)
        return Qwen3VlMoe(vision=_read_vision3(vision, moe), text=moe, **ids)
    raise ValueError(f"model_type = {kind!r} is not qwen2_5_vl, qwen3_vl or qwen3_vl_moe; correct it")


PROJECTOR2_5 = Projector(norm="rms")
TOKENS = {
    "image_token": "image_token_id",
    "video_token": "video_token_id",
    "start_token": "vision_start_token_id",
    "end_token": "vision_end_token_id",
}


def _read_sizes(fields: Mapping[str, Any], text: DecoderConfig) -> dict[str, int]:
    shared.check_fixed(fields, "vision_config", out_hidden_size=text.hidden, in_channels=3, in_chans=3)
    shared.check_fixed(fields, "vision_config", spatial_merge_size=2)
    return {
        "width": whole(fields, "hidden_size"),
        "depth": whole(fields, "depth"),
        "mlp": whole(fields, "intermediate_size"),
        "heads": whole(fields, "num_heads"),
        "patch": whole(fields, "patch_size"),
        "frames": whole(fields, "temporal_patch_size", 2),
    }


def _layers(fields: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = fields.get(key)
    if not isinstance(value, list) or any(type(layer) is not int for layer in value):
        raise ValueError(f"vision_config.{key} = {value!r} must be a list of layers; correct it")
    return tuple(value)


def _read_vision2_5(fields: Mapping[str, Any], text: DecoderConfig) -> Qwen25Vision:
    shared.check_fixed(fields, "vision_config", hidden_act="silu")
    return Qwen25Vision(
        **_read_sizes(fields, text),
        window=whole(fields, "window_size"),
        full=_layers(fields, "fullatt_block_indexes"),
        rate=float(whole(fields, "tokens_per_second", 4)),
    )


def _read_vision3(fields: Mapping[str, Any], text: DecoderConfig) -> Qwen3Vision:
    shared.check_fixed(fields, "vision_config", hidden_act="gelu_pytorch_tanh")
    places = whole(fields, "num_position_embeddings")
    side = round(places**0.5)
    if side**2 != places:
        raise ValueError(f"vision_config.num_position_embeddings = {places} must be a square number; correct it")
    return Qwen3Vision(**_read_sizes(fields, text), side=side, levels=_layers(fields, "deepstack_visual_indexes"))


def _write_vision(cfg: Qwen25Vl | Qwen3Vl) -> dict[str, Any]:
    v = cfg.vision
    assert isinstance(v, Qwen25Vision | Qwen3Vision)
    made: dict[str, Any] = {
        "depth": v.depth,
        "hidden_size": v.width,
        "intermediate_size": v.mlp,
        "num_heads": v.heads,
        "patch_size": v.patch,
        "temporal_patch_size": v.frames,
        "spatial_merge_size": v.merge,
        "out_hidden_size": cfg.text.hidden,
        "in_channels": 3,
        "initializer_range": 0.02,
    }
    if isinstance(v, Qwen25Vision):
        return made | {
            "model_type": "qwen2_5_vl",
            "hidden_act": "silu",
            "window_size": v.window,
            "fullatt_block_indexes": list(v.full),
            "tokens_per_second": int(v.rate),
        }
    return made | {
        "model_type": "qwen3_vl_moe" if isinstance(cfg, Qwen3VlMoe) else "qwen3_vl",
        "hidden_act": "gelu_pytorch_tanh",
        "num_position_embeddings": v.side**2,
        "deepstack_visual_indexes": list(v.levels),
    }


def _write(cfg: Qwen25Vl | Qwen3Vl, model_type: str, architecture: str, text: Mapping[str, Any]) -> dict[str, Any]:
    vision, projector = (Qwen25Vision, PROJECTOR2_5) if isinstance(cfg, Qwen25Vl) else (Qwen3Vision, Projector())
    if type(cfg.vision) is not vision or cfg.projector != projector or cfg.vision.merge != 2:
        raise ValueError(
            f"every {model_type} model has a {vision.__name__} with merge = 2 and {projector}; this one has "
            f"{cfg.vision} and {cfg.projector}: set them so, or take a Vlm"
        )
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": {name: value for name, value in text.items() if name != "architectures"},
        "vision_config": _write_vision(cfg),
        "tie_word_embeddings": cfg.text.tied,
        **{theirs: getattr(cfg, ours) for ours, theirs in TOKENS.items()},
    }


@spec.hf_config.register
def _(cfg: Qwen25Vl) -> dict[str, Any]:
    return _write(cfg, "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", dense.write(cfg.text, TEXT2_5))


@spec.hf_config.register
def _(cfg: Qwen3Vl) -> dict[str, Any]:
    return _write(cfg, "qwen3_vl", "Qwen3VLForConditionalGeneration", dense.write(cfg.text, TEXT3))


@spec.hf_config.register
def _(cfg: Qwen3VlMoe) -> dict[str, Any]:
    if cfg.text.experts is not None:
        dense.check_routing(cfg.text.experts, "qwen3_vl_moe", renormalise=True)
    return _write(cfg, "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", qwen_moe.write(cfg.text, TEXT3_MOE))


@spec.weight_map.register
def _(cfg: Qwen25Vl) -> WeightMap:
    return shared.weight_map(cfg, "visual.", MERGER2_5, lambda name: name)


@spec.weight_map.register
def _(cfg: Qwen3Vl) -> WeightMap:
    return shared.weight_map(
        cfg,
        "model.visual.",
        MERGER3,
        lambda name: name.replace("model.", "model.language_model.", 1),
        levels="model.visual.deepstack_merger_list.{}.",
    )


@spec.weight_map.register
def _(cfg: Qwen3VlMoe) -> WeightMap:
    made = spec.weight_map.dispatch(Qwen3Vl)(cfg)
    return WeightMap(tuple(_fused(cfg, rule) for rule in made.rules))


def _fused(cfg: Qwen3VlMoe, rule: Rule) -> Rule:
    """Returns the rule of a layer's experts, which are one tensor here, as published: transposed."""
    e = cfg.text.experts
    if not isinstance(rule, StackedExperts) or e is None:
        return rule
    name = rule.hf[0][0].partition("experts.")[0] + "experts."
    two = len(rule.hf[0]) == 2
    return FusedExperts(
        rule.lf,
        name + ("gate_up_proj" if two else "down_proj"),
        matrices=2 if two else 1,
        size=(e.width, cfg.text.hidden) if two else (cfg.text.hidden, e.width),
    )


_ROPE2_5 = Rope(theta=1e6, sections=(16, 24, 24))
_ROPE3 = Rope(theta=5e6, sections=(24, 20, 20), interleaved=True)
_SMALL3 = Qwen3Vision(width=1024, depth=24, mlp=4096, levels=(5, 11, 17))


def _vl2_5(text: qwen.Qwen2, mlp: int) -> Qwen25Vl:
    text = attrs.evolve(text, rope=_ROPE2_5, norm=Norm(eps=1e-6), max_length=128000)
    return Qwen25Vl(vision=Qwen25Vision(mlp=mlp), projector=PROJECTOR2_5, text=text)


def _vl3(text: qwen.Qwen3, vision: Qwen3Vision) -> Qwen3Vl:
    return Qwen3Vl(vision=vision, text=attrs.evolve(text, rope=_ROPE3, max_length=262144))


def _vl3_moe(text: qwen_moe.Qwen3Moe) -> Qwen3VlMoe:
    return Qwen3VlMoe(vision=Qwen3Vision(), text=attrs.evolve(text, rope=_ROPE3, max_length=262144))


qwen2_5_vl_3b = _vl2_5(qwen.qwen2_5_3b, 3420)
qwen2_5_vl_7b = _vl2_5(qwen.qwen2_5_7b, 3420)
qwen2_5_vl_32b = _vl2_5(qwen.qwen2_5_32b, 3456)
qwen2_5_vl_72b = _vl2_5(qwen.qwen2_5_72b, 3456)

qwen3_vl_2b = _vl3(qwen.qwen3_1_7b, _SMALL3)
qwen3_vl_4b = _vl3(qwen.qwen3_4b, _SMALL3)
qwen3_vl_8b = _vl3(qwen.qwen3_8b, Qwen3Vision())
qwen3_vl_32b = _vl3(qwen.qwen3_32b, Qwen3Vision())
qwen3_vl_30b_a3b = _vl3_moe(qwen_moe.qwen3_30b_a3b)
qwen3_vl_235b_a22b = _vl3_moe(qwen_moe.qwen3_235b_a22b)

_TOKENS: dict[str, Any] = {"image_token": 127, "video_token": 128, "start_token": 129, "end_token": 130}
_TINY3 = Rope(theta=1e4, sections=(4, 2, 2), interleaved=True)
qwen2_5_vl_tiny = Qwen25Vl(
    vision=Qwen25Vision(width=32, depth=2, mlp=40, heads=2, patch=4, window=16, full=(1,)),
    projector=PROJECTOR2_5,
    text=attrs.evolve(qwen.qwen2_tiny, rope=Rope(theta=1e4, sections=(2, 1, 1))),
    **_TOKENS,
)
qwen3_vl_tiny = Qwen3Vl(
    vision=Qwen3Vision(width=24, depth=3, mlp=32, heads=2, patch=4, side=6, levels=(0, 1)),
    text=attrs.evolve(qwen.qwen3_tiny, rope=_TINY3),
    **_TOKENS,
)
qwen3_vl_moe_tiny = Qwen3VlMoe(
    vision=qwen3_vl_tiny.vision,
    # Experts whose two matrices are no square tell apart the layouts that a folder may have.
    text=attrs.evolve(
        qwen_moe.qwen3_moe_tiny, rope=_TINY3, experts=Experts(count=8, top_k=2, width=20, renormalise=True)
    ),
    **_TOKENS,
)
"""Tens of thousands of parameters, for tests."""
