"""Reads and writes config.json of Pi0.5: LeRobot's fields, openpi's, and sizes that no published variant has.

LeRobot's `PI05Config` and openpi's converter name towers by variant (`gemma_2b`). A tower of another size is written
out under `vision`, `vlm` or `action_expert`, with the keys below.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import attrs

from lf.models.embodied.pi05_model import CAMERAS, VOCAB, Pi05
from lf.models.embodied.robot import Times
from lf.models.layers.gemma import Gemma
from lf.models.llm.fields import number, whole
from lf.models.vision.siglip import Siglip

VARIANTS: Mapping[str, Gemma] = {
    "gemma_2b": Gemma(width=2048, depth=18, mlp=16384),
    "gemma_300m": Gemma(width=1024, depth=18, mlp=4096),
}
"""The towers that published configs name."""

TOWER = {
    "width": "width",
    "depth": "depth",
    "mlp": "mlp_dim",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "eps": "rms_norm_eps",
    "theta": "rope_theta",
}
"""Fields of `Gemma` and their keys; those of numbers that are no sizes have defaults."""
VISION = {
    "width": "hidden_size",
    "depth": "num_layers",
    "mlp": "mlp_dim",
    "heads": "num_heads",
    "image": "image_size",
    "patch": "patch_size",
    "eps": "layer_norm_eps",
}
"""Fields of `Siglip` and their keys; those of numbers that are no sizes have defaults."""

T = TypeVar("T", Gemma, Siglip)

_IMAGES, _STATE = "observation.images.", "observation.state"


def from_hf(config: Mapping[str, Any]) -> Pi05:
    """Returns the policy that a config.json states; raises ValueError where lf cannot have it."""
    if whole(config, "n_obs_steps", 1) != 1:
        raise ValueError(f"n_obs_steps = {config['n_obs_steps']}, but a policy of lf sees one; set it to 1")
    times = Times(
        alpha=number(config, "time_sampling_beta_alpha", 1.5, above=0.0),
        beta=number(config, "time_sampling_beta_beta", 1.0, above=0.0),
        scale=number(config, "time_sampling_scale", 0.999, above=0.0),
        offset=number(config, "time_sampling_offset", 0.001, least=0.0),
    )
    return Pi05(
        vision=_vision(config),
        vlm=_tower(config, "vlm", "paligemma_variant", "gemma_2b"),
        expert=_tower(config, "action_expert", "action_expert_variant", "gemma_300m"),
        vocab=whole(config, "vocab_size", VOCAB),
        cameras=_cameras(config),
        prompt=_first(config, ("tokenizer_max_length", "max_token_len"), 200),
        horizon=_first(config, ("chunk_size", "action_horizon"), 50),
        # A padded width stands beside the robot's own where both are stated.
        dims=_first(config, ("max_action_dim", "action_dim"), 32),
        times=times,
        periods=(number(config, "min_period", 4e-3, above=0.0), number(config, "max_period", 4.0, above=0.0)),
        steps=_first(config, ("num_inference_steps",), 10),
    )


def to_hf(cfg: Pi05) -> dict[str, Any]:
    """Returns the config.json of a policy, in LeRobot's fields."""
    image = [3, cfg.vision.image, cfg.vision.image]
    features = {f"{_IMAGES}{name}": {"type": "VISUAL", "shape": image} for name in cfg.cameras}
    return {
        "type": "pi05",
        "n_obs_steps": 1,
        "chunk_size": cfg.horizon,
        "n_action_steps": cfg.horizon,
        "max_state_dim": cfg.dims,
        "max_action_dim": cfg.dims,
        "num_inference_steps": cfg.steps,
        "time_sampling_beta_alpha": cfg.times.alpha,
        "time_sampling_beta_beta": cfg.times.beta,
        "time_sampling_scale": cfg.times.scale,
        "time_sampling_offset": cfg.times.offset,
        "min_period": cfg.periods[0],
        "max_period": cfg.periods[1],
        "image_resolution": image[1:],
        "tokenizer_max_length": cfg.prompt,
        "input_features": {**features, _STATE: {"type": "STATE", "shape": [cfg.dims]}},
        "output_features": {"action": {"type": "ACTION", "shape": [cfg.dims]}},
        **_named(cfg.vlm, "vlm", "paligemma_variant"),
        **_named(cfg.expert, "action_expert", "action_expert_variant"),
        **({} if cfg.vision == Siglip() else {"vision": _sizes(cfg.vision, VISION)}),
        **({} if cfg.vocab == VOCAB else {"vocab_size": cfg.vocab}),
    }


def _tower(config: Mapping[str, Any], key: str, variant: str, default: str) -> Gemma:
    if key in config:
        return _read_sizes(config, key, TOWER, Gemma)
    name = config.get(variant) or default
    if name not in VARIANTS:
        raise ValueError(
            f"{variant} = {name!r}, lf knows {', '.join(VARIANTS)}; write the sizes out under {key}: "
            f"{', '.join(TOWER.values())}"
        )
    return VARIANTS[name]


def _vision(config: Mapping[str, Any]) -> Siglip:
    if "vision" in config:
        return _read_sizes(config, "vision", VISION, Siglip)
    pixels = config.get("image_resolution") or [224, 224]
    if not isinstance(pixels, list) or len(pixels) != 2 or type(pixels[0]) is not int or pixels[0] != pixels[1]:
        raise ValueError(f"image_resolution = {pixels!r} must be a list of two equal whole numbers; correct it")
    return Siglip(image=pixels[0])


def _read_sizes(config: Mapping[str, Any], key: str, names: Mapping[str, str], kind: type[T]) -> T:
    fields = config[key]
    if not isinstance(fields, Mapping):
        raise ValueError(f"{key} = {fields!r} must be an object with {', '.join(names.values())}")
    read: dict[str, Any] = {}
    for field in attrs.fields(kind):
        if field.type is float:
            read[field.name] = number(fields, names[field.name], field.default, above=0.0)
        else:
            read[field.name] = whole(fields, names[field.name])
    try:
        return kind(**read)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _sizes(cfg: Gemma | Siglip, names: Mapping[str, str]) -> dict[str, Any]:
    return {key: getattr(cfg, field) for field, key in names.items()}


def _named(cfg: Gemma, key: str, variant: str) -> dict[str, Any]:
    found = [name for name, known in VARIANTS.items() if known == cfg]
    return {variant: found[0]} if found else {key: _sizes(cfg, TOWER)}


def _first(config: Mapping[str, Any], keys: tuple[str, ...], default: int) -> int:
    stated = [key for key in keys if config.get(key) is not None]
    return whole(config, stated[0]) if stated else default


def _cameras(config: Mapping[str, Any]) -> tuple[str, ...]:
    features = config.get("input_features") or {}
    if not isinstance(features, Mapping) or not all(isinstance(value, Mapping) for value in features.values()):
        raise ValueError(
            f"input_features = {features!r} must be an object from names to objects with a type; correct it"
        )
    found = tuple(name.removeprefix(_IMAGES) for name, value in features.items() if value.get("type") == "VISUAL")
    count = whole(config, "num_cameras", len(CAMERAS))
    return found or (*CAMERAS, *(f"camera_{i}" for i in range(len(CAMERAS), count)))[:count]
