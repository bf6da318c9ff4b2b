"""What the vision-language families share: reading and writing the parts of a config.json, and their weight maps."""

from collections.abc import Callable, Mapping
from typing import Any

from lf.models import hf, spec
from lf.models.decoder import DecoderConfig
from lf.models.layouts import renamed
from lf.models.llm.fields import flag
from lf.models.vision.projector import Anyres
from lf.models.vision.tower import tower_of, tower_rules
from lf.models.vlm import Vlm
from lf.models.weights import Rule, Same, WeightMap


def part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns an object of a config.json; raises ValueError where it is none."""
    value = config.get(key)
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} = {value!r:.80} must be an object; take the file from the published checkpoint")
    return value


def text_fields(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """Returns the decoder's fields, with what the file says beside them of tied weights; raises for another type."""
    fields = dict(part(config, "text_config"))
    stated = fields.get("model_type", model_type)
    if stated != model_type:
        raise ValueError(f"text_config.model_type = {stated!r} is not {model_type}; lf reads no other decoder here")
    tied = config.get("tie_word_embeddings")
    if tied is None:
        tied = flag(fields, "tie_word_embeddings", False)
    return {**fields, "tie_word_embeddings": tied}


def text_of(config: Mapping[str, Any]) -> DecoderConfig:
    """Returns the decoder that `text_config` states, of any family that lf reads; raises ValueError for others."""
    fields = part(config, "text_config")
    text = hf.known_reader(fields)(text_fields(config, str(fields.get("model_type"))))
    if not isinstance(text, DecoderConfig):
        raise ValueError(f"text_config states a {spec.type_name(text)}, which is no decoder; correct its model_type")
    return text


def text_config(text: DecoderConfig) -> dict[str, Any]:
    """Returns `text_config` of a decoder, as its own family writes it."""
    return {name: value for name, value in spec.hf_config(text).items() if name != "architectures"}


def check_fixed(fields: Mapping[str, Any], where: str, **wanted: Any) -> None:
    """Raises ValueError where a file states something else than what every model of a family has."""
    for key, value in wanted.items():
        if fields.get(key) is not None and fields[key] != value:
            raise ValueError(
                f"{where}.{key} = {fields[key]!r}, but every such model has {value!r} in lf; use a checkpoint with it"
            )


def weight_map(
    cfg: Vlm,
    vision: str,
    projector: Mapping[str, str],
    text: Callable[[str], str],
    *more: Rule,
    levels: str = "",
    newline: str = "projector.newline",
) -> WeightMap:
    """Returns the map of a family: the tower below `vision`, and the decoder's names as `text` makes them.

    `projector` has transformers' name of each module of the projector by lf's; `levels` is the name of those of the
    tower's levels, with the level's number for `{}`.
    """
    made = renamed(spec.weight_map(cfg.text), text)
    pairs = {f"projector.{ours}": theirs for ours, theirs in projector.items()}
    for level in range(tower_of(cfg.vision).levels):
        own = levels.format(level)
        pairs |= {
            f"projector.levels.{level}.{ours}": own + theirs.rpartition(".")[2] for ours, theirs in projector.items()
        }
    rules: list[Rule] = [
        Same(f"{ours}.{kind}", f"{theirs}.{kind}")
        for ours, theirs in pairs.items()
        for kind in (("weight",) if ours.endswith("norm") and cfg.projector.norm == "rms" else ("weight", "bias"))
        if cfg.projector.norm != "none" or not ours.endswith("norm")
    ]
    if isinstance(cfg.projector, Anyres):
        rules.append(Same("projector.newline", newline))
    return WeightMap((*tower_rules(cfg.vision, "vision.", vision), *rules, *made.rules, *more))
