"""Kimi-K2.5: MoonViT-3D, a patch merger, and the decoder of Kimi-K2 (arXiv:2507.20534).

The published layout is written; that which transformers 5 saves, with other names here and there, is read too. The
preset has the published numbers. Published experts are quantised to four bits, which lf does not read.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from lf.models import spec
from lf.models.layers.rope import Rope, YarnScaling
from lf.models.layouts import Alias
from lf.models.llm import deepseek
from lf.models.llm.fields import agreed, number, whole
from lf.models.vision.moon_vit import MoonVision
from lf.models.vision.projector import Projector
from lf.models.vlm import Vlm
from lf.models.vlms import shared
from lf.models.weights import WeightMap

NAMES = {"norm": "mm_projector.pre_norm", "fc1": "mm_projector.proj.0", "fc2": "mm_projector.proj.2"}
PROJECTOR = Projector(eps=1e-5, mean=True)
VISION = {
    "width": ("hidden_size", "vt_hidden_size"),
    "depth": ("num_hidden_layers", "vt_num_hidden_layers"),
    "mlp": ("intermediate_size", "vt_intermediate_size"),
    "heads": ("num_attention_heads", "vt_num_attention_heads"),
    "patch": ("patch_size",),
    "side": ("pos_emb_height", "init_pos_emb_height"),
    "frames": ("pos_emb_time", "init_pos_emb_time"),
}
"""The tower's sizes in transformers' files and in the published one."""


@attrs.frozen(kw_only=True)
class KimiK25(Vlm):
    """A Kimi-K2.5: pictures of any size, videos whose frames become one picture."""

    start_token: int = 163602
    """Token id before an image."""
    end_token: int = 163604
    """Token id after an image."""


def from_hf(config: Mapping[str, Any]) -> KimiK25:
    """Returns the model that a config.json of model_type `kimi_k25` states; raises ValueError where lf cannot."""
    fields, text = shared.part(config, "vision_config"), shared.text_of(config)
    sizes = {ours: _either(fields, names, getattr(MoonVision(), ours)) for ours, names in VISION.items()}
    columns = _either(fields, ("pos_emb_width", "init_pos_emb_width"), sizes["side"])
    if columns != sizes["side"]:
        raise ValueError(f"vision_config has a table of {sizes['side']} x {columns} positions; lf's are square")
    shared.check_fixed(fields, "vision_config", merge_kernel_size=[2, 2], hidden_act="gelu_pytorch_tanh")
    shared.check_fixed(fields, "vision_config", merge_type="sd2_tpool", video_attn_type="spatial_temporal")
    shared.check_fixed(config, "config", projection_hidden_size=sizes["width"])
    eps = number({**fields, **config}, "projection_layer_norm_eps", number(fields, "projector_ln_eps", 1e-5), above=0.0)
    image = _either(config, ("image_token_id", "media_placeholder_token_id"), 163605)
    video = whole(config, "video_token_id", image, least=0)
    return KimiK25(
        vision=MoonVision(**sizes),
        projector=attrs.evolve(PROJECTOR, eps=eps),
        text=text,
        image_token=image,
        # transformers names an id beyond the vocabulary where videos have the token of images.
        video_token=video if video < text.vocab else image,
        start_token=whole(config, "vision_start_token_id", 163602, least=0),
        end_token=whole(config, "vision_end_token_id", 163604, least=0),
    )


def _either(fields: Mapping[str, Any], names: tuple[str, ...], default: int) -> int:
    stated = agreed({f"{name}: ": {"size": fields.get(name)} for name in names}, "size")
    return whole({names[0]: stated}, names[0], default)


@spec.hf_config.register
def _(cfg: KimiK25) -> dict[str, Any]:
    v = cfg.vision
    if type(v) is not MoonVision or attrs.evolve(cfg.projector, eps=PROJECTOR.eps) != PROJECTOR:
        raise ValueError(
            f"every kimi_k25 model has a MoonVision and {PROJECTOR}; this one has {v} and {cfg.projector}: set them "
            "so, or take a Vlm"
        )
    return {
        "architectures": ["Kimi_K25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": shared.text_config(cfg.text),
        "vision_config": {
            "model_type": "kimi_k25_vision",
            **{names[0]: getattr(v, ours) for ours, names in VISION.items()},
            "pos_emb_width": v.side,
            "merge_kernel_size": [2, 2],
            "hidden_act": "gelu_pytorch_tanh",
        },
        "projection_hidden_size": v.width,
        "projection_layer_norm_eps": cfg.projector.eps,
        "image_token_id": cfg.image_token,
        "video_token_id": cfg.video_token,
        "vision_start_token_id": cfg.start_token,
        "vision_end_token_id": cfg.end_token,
        "tie_word_embeddings": cfg.text.tied,
    }


@spec.weight_map.register
def _(cfg: KimiK25) -> WeightMap:
    table = shared.weight_map(cfg, "vision_tower.", NAMES, lambda name: f"language_model.{name}")
    return WeightMap((*table.rules, *_aliases(table)))


def _aliases(table: WeightMap) -> Iterator[Alias]:
    """Gives the names that transformers saves."""
    for name in table.by_hf:
        other = name.replace("language_model.model.layers.", "language_model.model.blocks.")
        other = other.replace("vision_tower.patch_embed.proj.", "vision_tower.encoder.patch_embed.proj.")
        other = other.replace("mm_projector.pre_norm.", "model.mm_projector.pre_norm.")
        if other != name:
            yield Alias(other, name)


kimi_k2_5 = KimiK25(
    vision=MoonVision(),
    projector=PROJECTOR,
    text=attrs.evolve(
        deepseek.kimi_k2,
        rope=Rope(
            theta=5e4,
            scaling=YarnScaling(factor=64.0, original=4096, beta_fast=32.0, mscale=1.0, mscale_all_dim=1.0),
        ),
        max_length=262144,
    ),
    image_token=163605,
    video_token=163605,
)
kimi_k2_5_tiny = KimiK25(
    vision=MoonVision(width=32, depth=2, mlp=48, heads=2, patch=4, side=6),
    projector=PROJECTOR,
    text=deepseek.kimi_k2_tiny,
    image_token=127,
    video_token=127,
    start_token=128,
    end_token=129,
)
"""Tens of thousands of parameters, for tests."""
