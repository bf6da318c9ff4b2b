"""LLaVA-OneVision (arXiv:2408.03326): SigLIP on tiles of an image, an MLP, and a Qwen2.

The published layout is written; that which transformers 5 saves, with shorter names of the tower, is read too. Presets
have the published numbers.
"""

import re
from collections.abc import Mapping
from typing import Any

import attrs

from lf.models import spec
from lf.models.layouts import Alias
from lf.models.llm import qwen
from lf.models.llm.fields import number, whole
from lf.models.vision.projector import Anyres
from lf.models.vision.siglip import Siglip
from lf.models.vlm import Vlm
from lf.models.vlms import shared
from lf.models.weights import Carried, WeightMap

NAMES = {"fc1": "multi_modal_projector.linear_1", "fc2": "multi_modal_projector.linear_2"}
TOWER = "vision_tower.vision_model."


@attrs.frozen(kw_only=True)
class LlavaOnevision(Vlm):
    """A LLaVA-OneVision: an image is its whole and its tiles, a video frames of a quarter of the tokens."""


def from_hf(config: Mapping[str, Any]) -> LlavaOnevision:
    """Returns the model that a config.json of model_type `llava_onevision` states.

    Raises ValueError where lf cannot have it.
    """
    shared.check_fixed(
        config,
        "config",
        projector_hidden_act="gelu",
        multimodal_projector_bias=True,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    ratio = str(config.get("vision_aspect_ratio", "anyres_max_9"))
    most = re.fullmatch(r"anyres_max_(\d+)", ratio)
    if most is None:
        raise ValueError(f"vision_aspect_ratio = {ratio!r} is not anyres_max_ and a number; lf cuts images so alone")
    fields, text = shared.part(config, "vision_config"), shared.text_of(config)
    pinpoints = config.get("image_grid_pinpoints")
    if not isinstance(pinpoints, list) or not all(isinstance(size, list) and len(size) == 2 for size in pinpoints):
        raise ValueError(f"image_grid_pinpoints = {pinpoints!r:.80} must be a list of heights and widths; correct it")
    return LlavaOnevision(
        vision=_read_vision(fields),
        projector=Anyres(
            width=text.hidden, pinpoints=tuple((int(h), int(w)) for h, w in pinpoints), most=int(most.group(1))
        ),
        text=text,
        image_token=_token(config, "image_token", 151646),
        video_token=_token(config, "video_token", 151647),
    )


def _token(config: Mapping[str, Any], name: str, default: int) -> int:
    old, new = config.get(f"{name}_index"), config.get(f"{name}_id")
    return whole({name: new if old is None else old}, name, default, least=0)


def _read_vision(fields: Mapping[str, Any]) -> Siglip:
    shared.check_fixed(fields, "vision_config", num_channels=3, hidden_act="gelu_pytorch_tanh", attention_dropout=0.0)
    shared.check_fixed(fields, "vision_config", vision_use_head=False)
    return Siglip(
        width=whole(fields, "hidden_size"),
        depth=whole(fields, "num_hidden_layers"),
        mlp=whole(fields, "intermediate_size"),
        heads=whole(fields, "num_attention_heads"),
        image=whole(fields, "image_size"),
        patch=whole(fields, "patch_size"),
        eps=number(fields, "layer_norm_eps", 1e-6, above=0.0),
    )


@spec.hf_config.register
def _(cfg: LlavaOnevision) -> dict[str, Any]:
    v, p = cfg.vision, cfg.projector
    if (
        type(v) is not Siglip
        or not isinstance(p, Anyres)
        or p != Anyres(width=cfg.text.hidden, pinpoints=p.pinpoints, most=p.most)
    ):
        raise ValueError(
            f"every llava_onevision model has a Siglip and an Anyres(width={cfg.text.hidden}); this one has {v} and "
            f"{p}: set them so, or take a Vlm"
        )
    return {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "model_type": "llava_onevision",
        "text_config": shared.text_config(cfg.text),
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": v.width,
            "num_hidden_layers": v.depth,
            "intermediate_size": v.mlp,
            "num_attention_heads": v.heads,
            "image_size": v.image,
            "patch_size": v.patch,
            "layer_norm_eps": v.eps,
            "hidden_act": "gelu_pytorch_tanh",
            "vision_use_head": False,
        },
        "image_grid_pinpoints": [list(size) for size in p.pinpoints],
        "vision_aspect_ratio": f"anyres_max_{p.most}",
        "image_token_index": cfg.image_token,
        "video_token_index": cfg.video_token,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "tie_word_embeddings": cfg.text.tied,
    }


@spec.weight_map.register
def _(cfg: LlavaOnevision) -> WeightMap:
    table = shared.weight_map(cfg, TOWER, NAMES, lambda name: f"language_model.{name}", newline="image_newline")
    aliases = [Alias(name.replace(TOWER, "vision_tower."), name) for name in table.by_hf if name.startswith(TOWER)]
    return WeightMap((*table.rules, *aliases, Carried("vision_tower.*.position_ids")))


_PINPOINTS = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))


def _llava(text: qwen.Qwen2) -> LlavaOnevision:
    text = attrs.evolve(text, max_length=32768)
    return LlavaOnevision(
        vision=Siglip(image=384, depth=26),
        projector=Anyres(width=text.hidden, pinpoints=_PINPOINTS),
        text=text,
        image_token=151646,
        video_token=151647,
    )


# Published decoders have some rows of the vocabulary more than their Qwen2.
llava_onevision_0_5b = _llava(attrs.evolve(qwen.qwen2_0_5b, vocab=152000))
llava_onevision_7b = _llava(attrs.evolve(qwen.qwen2_7b, vocab=152128))
llava_onevision_72b = _llava(attrs.evolve(qwen.qwen2_72b, vocab=152128))
llava_onevision_tiny = LlavaOnevision(
    vision=Siglip(width=32, depth=2, mlp=48, heads=4, image=16, patch=4),
    projector=Anyres(width=48, pinpoints=((16, 16), (16, 32), (32, 16), (32, 32))),
    text=qwen.qwen2_tiny,
    image_token=127,
    video_token=128,
)
"""Tens of thousands of parameters, for tests."""
