"""The checkpoint layout of pairs that nobody publishes: lf's own, stated in its config.json.

`model_type` is `lf_vlm`. `text_config` is the config.json of the decoder's family, with `mrope_section` and
`mrope_interleaved` where it turns by three positions; `vision_config` and `projector_config` have the fields of lf's
records beside their `type`. Tensors are the tower's below `vision_tower.`, the projector's below `projector.`, and the
decoder's, in the names of its family, below `language_model.`.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import attrs

from lf.models import hf, spec
from lf.models.decoder import DecoderConfig
from lf.models.layers.rope import Rope
from lf.models.llm.fields import flag, whole
from lf.models.llm.rope_config import read_sections
from lf.models.vision.projector import Anyres, Projector
from lf.models.vlm import Vlm
from lf.models.vlms import shared
from lf.models.weights import WeightMap

TOWERS: Mapping[str, str] = {
    "intern_vit": "lf.models.vision.intern_vit:InternVision",
    "moon_vit": "lf.models.vision.moon_vit:MoonVision",
    "qwen2_5_vision": "lf.models.vision.qwen_vit:Qwen25Vision",
    "qwen3_vision": "lf.models.vision.qwen_vit:Qwen3Vision",
    "siglip": "lf.models.vision.siglip:Siglip",
}
"""Towers by their `type`, and their records."""

PROJECTORS: Mapping[str, type[Projector]] = {"projector": Projector, "anyres": Anyres}


def from_hf(config: Mapping[str, Any]) -> Vlm:
    """Returns the model that a config.json of lf's own layout states; raises ValueError where lf cannot have it."""
    vision, projector = shared.part(config, "vision_config"), shared.part(config, "projector_config")
    return Vlm(
        vision=_record(_tower(vision.get("type")), vision, "vision_config"),
        projector=_record(_known(PROJECTORS, projector.get("type"), "projector_config"), projector, "projector_config"),
        text=_read_text(shared.part(config, "text_config")),
        image_token=whole(config, "image_token_id", least=0),
        video_token=whole(config, "video_token_id", least=0),
    )


def own_config(cfg: Vlm) -> dict[str, Any]:
    """Returns the config.json; raises ValueError for a tower outside lf, which no reader would know."""
    rope = cfg.text.rope
    plain = attrs.evolve(cfg.text, rope=attrs.evolve(rope, sections=(), interleaved=False))
    turned = {"mrope_section": list(rope.sections), "mrope_interleaved": rope.interleaved} if rope.sections else {}
    kinds = {_tower(name): name for name in TOWERS}
    if type(cfg.vision) not in kinds:
        raise ValueError(
            f"vision is a {spec.type_name(cfg.vision)}, which lf's own layout has no name for; it knows "
            f"{', '.join(TOWERS)}: register hf_config for a subclass of Vlm of your own"
        )
    names = {kind: name for name, kind in PROJECTORS.items()}
    return {
        "architectures": ["LfVlm"],
        "model_type": "lf_vlm",
        "text_config": {**spec.hf_config(plain), **turned},
        "vision_config": {"type": kinds[type(cfg.vision)], **_plain(cfg.vision)},
        "projector_config": {"type": names[type(cfg.projector)], **_plain(cfg.projector)},
        "image_token_id": cfg.image_token,
        "video_token_id": cfg.video_token,
        "tie_word_embeddings": cfg.text.tied,
    }


def own_weights(cfg: Vlm) -> WeightMap:
    """Returns the weight table."""
    modules = {name: f"projector.{name}" for name in ("norm", "fc1", "fc2")}
    return shared.weight_map(
        cfg, "vision_tower.", modules, lambda name: f"language_model.{name}", levels="projector.levels.{}."
    )


def _read_text(fields: Mapping[str, Any]) -> DecoderConfig:
    rest = {name: value for name, value in fields.items() if name not in ("mrope_section", "mrope_interleaved")}
    text = hf.known_reader(rest)(rest)
    if not isinstance(text, DecoderConfig):
        raise ValueError(f"text_config states a {spec.type_name(text)}, which is no decoder; correct its model_type")
    sections = read_sections(fields, "mrope_section" in fields)
    interleaved = flag(fields, "mrope_interleaved", False)
    rope: Rope = attrs.evolve(text.rope, sections=sections, interleaved=interleaved)
    return attrs.evolve(text, rope=rope)


def _tower(name: Any) -> Any:
    module, _, kind = _known(TOWERS, name, "vision_config").partition(":")
    return getattr(importlib.import_module(module), kind)


def _known(table: Mapping[str, Any], name: Any, where: str) -> Any:
    if name not in table:
        raise ValueError(f"{where}.type = {name!r} is not known to lf; it knows {', '.join(table)}")
    return table[name]


def _record(kind: Any, fields: Mapping[str, Any], where: str) -> Any:
    given = {name: _tuples(value) for name, value in fields.items() if name != "type"}
    unknown = sorted(given.keys() - attrs.fields_dict(kind).keys())
    if unknown:
        raise ValueError(f"{where} has {', '.join(unknown)}, which {kind.__name__} has not; delete or correct them")
    return kind(**given)


def _plain(record: Any) -> dict[str, Any]:
    return {name: _lists(value) for name, value in attrs.asdict(record, recurse=False).items()}


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
