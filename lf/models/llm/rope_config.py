"""The rotary embedding in config.json, read and written in both dialects of transformers.

Old (up to 4.x): `rope_theta` and `rope_scaling`, whose type is under `type` or `rope_type`. New (5.x):
`rope_parameters`, with `rope_theta` in it.
"""

import functools
from collections.abc import Mapping
from typing import Any

from lf.models.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)
from lf.models.llm.fields import agreed, flag, number, whole
from lf.models.spec import no_rule

DEFAULT_THETA = 10000.0
"""Base of the rotary frequencies where a config.json names none, as in transformers."""

ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
"""Keys of each known rope type, besides those of every type."""
SHARED = (
    *("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("mrope_section", "mrope_interleaved"),
)
"""Keys that may stand in either table or beside them."""


def read_rope(config: Mapping[str, Any], max_length: int, *, sections: bool = False) -> Rope:
    """Returns the rotary embedding that a config.json states in the old dialect, the new one, or both.

    `sections` says whether it turns by three positions, as the decoders of some vision-language models do. Raises
    ValueError where it does otherwise, where dialects disagree, where the rope type is unknown and where a key is not
    one of its type.
    """
    tables: dict[str, Mapping[str, Any]] = {}
    for name in ("rope_scaling", "rope_parameters"):
        table = config.get(name)
        if isinstance(table, Mapping):
            tables[name] = table
        elif table is not None:
            raise ValueError(f"{name} = {table!r} must be an object such as {{'rope_type': 'linear', 'factor': 2.0}}")
    stated = {"": config} | {f"{name}.": table for name, table in tables.items()}
    shared = {key: agreed(stated, key) for key in SHARED}
    scalings = {name: _read_scaling(name, {**table, **shared}, max_length) for name, table in tables.items()}
    if len(set(scalings.values())) > 1:
        raise ValueError(
            f"rope_scaling = {dict(tables['rope_scaling'])} and rope_parameters = {dict(tables['rope_parameters'])} "
            "disagree; they are the old and the new way to say the same thing: keep the right one and delete the other"
        )
    stated_sections = read_sections(shared, sections)
    return Rope(
        sections=stated_sections,
        interleaved=flag(shared, "mrope_interleaved", False) and bool(stated_sections),
        theta=number(shared, "rope_theta", DEFAULT_THETA, above=1.0),
        fraction=number(shared, "partial_rotary_factor", 1.0, above=0.0, most=1.0),
        scaling=next(iter(scalings.values()), NoScaling()),
    )


def read_sections(shared: Mapping[str, Any], wanted: bool) -> tuple[int, ...]:
    """Returns the sections of a rope that turns by three positions, () of one that does not; `wanted` says which."""
    stated = shared.get("mrope_section")
    if (stated is not None) != wanted:
        raise ValueError(
            f"mrope_section = {stated!r}, but the decoder of this model_type turns by "
            f"{'three positions: add it' if wanted else 'one position: delete it, or correct the model_type'}"
        )
    if stated is not None and (not isinstance(stated, list) or any(type(part) is not int for part in stated)):
        raise ValueError(f"mrope_section = {stated!r} must be a list of three whole numbers; correct it")
    return tuple(stated or ())


def write_rope(rope: Rope, max_length: int, *, sections: bool = False) -> dict[str, Any]:
    """Returns `rope_parameters` (new dialect), `rope_theta` and `rope_scaling` (old dialect) of a rotary embedding.

    Raises ValueError unless it turns by three positions where `sections` says so, and by one elsewhere.
    """
    if bool(rope.sections) != sections:
        raise ValueError(
            f"rope.sections = {rope.sections}, but this family's decoders turn by {'three' if sections else 'one'} "
            "positions; set it so, or take a family that fits"
        )
    if isinstance(rope.scaling, DynamicScaling) and rope.scaling.original != max_length:
        raise ValueError(
            f"rope.scaling.original = {rope.scaling.original} must equal max_length = {max_length}: with dynamic "
            "scaling, config.json says both with max_position_embeddings"
        )
    scaling = scaling_fields(rope.scaling)
    if rope.fraction != 1.0:
        scaling["partial_rotary_factor"] = rope.fraction
    if sections:
        scaling["mrope_section"] = list(rope.sections)
    if rope.interleaved:
        scaling["mrope_interleaved"] = True
    return {
        "rope_parameters": {"rope_theta": rope.theta, **scaling},
        "rope_theta": rope.theta,
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
    }


@functools.singledispatch
def scaling_fields(scaling: RopeScaling) -> dict[str, Any]:
    """Returns a rope scaling in the words of config.json: `rope_type` and the keys of that type."""
    raise no_rule(scaling_fields, scaling)


@scaling_fields.register
def _(scaling: NoScaling) -> dict[str, Any]:
    return {"rope_type": "default"}


@scaling_fields.register
def _(scaling: LinearScaling) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": scaling.factor}


@scaling_fields.register
def _(scaling: DynamicScaling) -> dict[str, Any]:
    return {"rope_type": "dynamic", "factor": scaling.factor}


@scaling_fields.register
def _(scaling: Llama3Scaling) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
        "original_max_position_embeddings": scaling.original,
    }


@scaling_fields.register
def _(scaling: YarnScaling) -> dict[str, Any]:
    fields = {
        "rope_type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
    }
    derived = {key: getattr(scaling, key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    return fields | {key: value for key, value in derived.items() if value is not None}


def _read_scaling(name: str, table: Mapping[str, Any], max_length: int) -> RopeScaling:
    kind = _rope_type(name, table)
    known = ("type", "rope_type", *ROPE_KEYS[kind], *SHARED)
    unknown = [f"{key} = {value!r}" for key, value in table.items() if key not in known and value is not None]
    if unknown:
        raise ValueError(
            f"{name} has {', '.join(unknown)}, but the keys of rope_type {kind!r} are {', '.join(known)}; "
            "correct the type, or delete the key"
        )
    named = {f"{name}.{key}": value for key, value in table.items()}

    def positive(key: str, default: float | None = None) -> float:
        return number(named, f"{name}.{key}", default, above=0.0)

    def optional(key: str) -> float | None:
        return number(named, f"{name}.{key}") if table.get(key) else None

    original = whole(table, "original_max_position_embeddings", max_length)
    if kind == "linear":
        return LinearScaling(factor=positive("factor"))
    if kind == "dynamic":
        if original != max_length:
            raise ValueError(
                f"original_max_position_embeddings = {original} must equal max_position_embeddings = {max_length}, "
                "from which dynamic scaling starts; delete it, or correct max_position_embeddings"
            )
        return DynamicScaling(factor=positive("factor"), original=original)
    if kind == "llama3":
        return Llama3Scaling(
            factor=positive("factor"),
            low=positive("low_freq_factor"),
            high=positive("high_freq_factor"),
            original=original,
        )
    if kind == "yarn":
        return YarnScaling(
            factor=positive("factor", max_length / original),
            original=original,
            beta_fast=optional("beta_fast") or 32.0,
            beta_slow=optional("beta_slow") or 1.0,
            attention_factor=None if table.get("attention_factor") is None else positive("attention_factor"),
            mscale=optional("mscale"),
            mscale_all_dim=optional("mscale_all_dim"),
            truncate=flag(named, f"{name}.truncate", True),
        )
    return NoScaling()


def _rope_type(name: str, table: Mapping[str, Any]) -> str:
    kinds = {key: table[key] for key in ("rope_type", "type") if table.get(key) is not None}
    # Older files of vision-language models name the sections as a type of its own.
    kinds = {key: "default" if value == "mrope" else value for key, value in kinds.items()}
    kind = next(iter(kinds.values()), "default")
    if any(other != kind for other in kinds.values()):
        raise ValueError(f"{name}.rope_type = {kind!r} and {name}.type = {kinds['type']!r} disagree; delete one")
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise ValueError(f"{name}.rope_type = {kind!r} is not known to lf; it knows {', '.join(ROPE_KEYS)}")
    return kind
