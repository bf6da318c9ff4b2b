"""InternVL 3.5 (arXiv:2508.18265) and its kin, in the layout of transformers: InternViT, a pixel shuffle, any decoder.

Presets have the numbers of the published models whose names end in `-HF`. A video is a list of tiles here, one or more
a frame; its token is that of images.
"""

from collections.abc import Mapping
from typing import Any

import attrs

from lf.models import spec
from lf.models.decoder import DecoderConfig
from lf.models.llm import qwen, qwen_moe
from lf.models.llm.fields import flag, number, whole
from lf.models.vision.intern_vit import InternVision, intern_vit_0_3b, intern_vit_6b
from lf.models.vision.projector import Projector
from lf.models.vlm import Vlm
from lf.models.vlms import shared
from lf.models.weights import WeightMap

NAMES = {
    "norm": "multi_modal_projector.layer_norm",
    "fc1": "multi_modal_projector.linear_1",
    "fc2": "multi_modal_projector.linear_2",
}


@attrs.frozen(kw_only=True)
class InternVl(Vlm):
    """An InternVL: each tile has the tokens of a quarter of its patches."""


def projector(text: DecoderConfig) -> Projector:
    """Returns the pixel shuffle before a decoder."""
    return Projector(over="block", eps=1e-5, width=text.hidden)


def from_hf(config: Mapping[str, Any]) -> InternVl:
    """Returns the model that a config.json of model_type `internvl` states; raises ValueError where lf cannot."""
    shared.check_fixed(config, "config", downsample_ratio=0.5, projector_hidden_act="gelu", vision_feature_layer=-1)
    shared.check_fixed(config, "config", vision_feature_select_strategy="default")
    text = shared.text_of(config)
    image = whole(config, "image_token_id", least=0)
    return InternVl(
        vision=_read_vision(shared.part(config, "vision_config")),
        projector=projector(text),
        text=text,
        image_token=image,
        video_token=image,
    )


def _read_vision(fields: Mapping[str, Any]) -> InternVision:
    shared.check_fixed(
        fields,
        "vision_config",
        hidden_act="gelu",
        num_channels=3,
        use_mask_token=False,
        use_absolute_position_embeddings=True,
        use_mean_pooling=True,
        attention_dropout=0.0,
        hidden_dropout_prob=0.0,
        projection_dropout=0.0,
    )
    norm = fields.get("norm_type", "layer_norm")
    if norm not in ("layer_norm", "rms_norm"):
        raise ValueError(f"vision_config.norm_type = {norm!r} is not layer_norm or rms_norm; correct it")
    return InternVision(
        width=whole(fields, "hidden_size"),
        depth=whole(fields, "num_hidden_layers"),
        mlp=whole(fields, "intermediate_size"),
        heads=whole(fields, "num_attention_heads"),
        image=_square(fields, "image_size"),
        patch=_square(fields, "patch_size"),
        norm="layer" if norm == "layer_norm" else "rms",
        eps=number(fields, "layer_norm_eps", 1e-6, above=0.0),
        qkv_bias=flag(fields, "attention_bias", False),
        qk_norm=flag(fields, "use_qk_norm", False),
    )


def _square(fields: Mapping[str, Any], key: str) -> int:
    value = fields.get(key)
    sides = {value} if isinstance(value, int) else set(value) if isinstance(value, list) else set()
    if len(sides) != 1:
        raise ValueError(f"vision_config.{key} = {value!r} must be one number, or two equal ones; lf's are square")
    return whole({key: sides.pop()}, key)


@spec.hf_config.register
def _(cfg: InternVl) -> dict[str, Any]:
    v = cfg.vision
    if type(v) is not InternVision or cfg.projector != projector(cfg.text) or cfg.image_token != cfg.video_token:
        raise ValueError(
            f"every internvl model has an InternVision, {projector(cfg.text)} and one token for images and videos; "
            f"this one has {v}, {cfg.projector}, {cfg.image_token} and {cfg.video_token}: set them so, or take a Vlm"
        )
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        "model_type": "internvl",
        "text_config": shared.text_config(cfg.text),
        "vision_config": {
            "model_type": "internvl_vision",
            "hidden_size": v.width,
            "num_hidden_layers": v.depth,
            "intermediate_size": v.mlp,
            "num_attention_heads": v.heads,
            "image_size": [v.image, v.image],
            "patch_size": [v.patch, v.patch],
            "norm_type": "layer_norm" if v.norm == "layer" else "rms_norm",
            "layer_norm_eps": v.eps,
            "attention_bias": v.qkv_bias,
            "use_qk_norm": v.qk_norm,
            "hidden_act": "gelu",
            "num_channels": 3,
            "use_absolute_position_embeddings": True,
            "use_mean_pooling": True,
            "use_mask_token": False,
        },
        "downsample_ratio": 0.5,
        "image_seq_length": (v.image // v.patch // 2) ** 2,
        "image_token_id": cfg.image_token,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": cfg.text.tied,
    }


@spec.weight_map.register
def _(cfg: InternVl) -> WeightMap:
    return shared.weight_map(cfg, "vision_tower.", NAMES, lambda name: f"language_model.{name}")


def _internvl(text: DecoderConfig, vision: InternVision = intern_vit_0_3b) -> InternVl:
    text = attrs.evolve(text, tied=False)
    return InternVl(vision=vision, projector=projector(text), text=text, image_token=151671, video_token=151671)


internvl3_5_1b = _internvl(qwen.qwen3_0_6b)
internvl3_5_2b = _internvl(qwen.qwen3_1_7b)
internvl3_5_4b = _internvl(qwen.qwen3_4b)
internvl3_5_8b = _internvl(qwen.qwen3_8b)
internvl3_5_14b = _internvl(qwen.qwen3_14b)
internvl3_5_38b = _internvl(qwen.qwen3_32b, intern_vit_6b)
internvl3_5_30b_a3b = _internvl(qwen_moe.qwen3_30b_a3b)
internvl3_5_241b_a28b = _internvl(qwen_moe.qwen3_235b_a22b, intern_vit_6b)
internvl_tiny = InternVl(
    vision=InternVision(width=32, depth=2, mlp=48, heads=4, image=16, patch=4),
    projector=projector(qwen.qwen3_tiny),
    text=qwen.qwen3_tiny,
    image_token=127,
    video_token=127,
)
"""Tens of thousands of parameters, for tests."""
