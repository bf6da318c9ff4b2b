"""Hugging Face folders as models: which reader reads which config.json, and what an export's config.json is."""

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lf.models import spec
from lf.models.hf_folder import STEMS, open_folder, parse_config

Reader = Callable[[Mapping[str, Any]], spec.ModelConfig]
"""A function from the fields of a config.json to a model."""

READERS: Mapping[str, str] = {
    "lf_toy": "lf.models.toy:from_hf",
    "lf_vlm": "lf.models.vlms.own:from_hf",
    "deepseek_v2": "lf.models.llm.deepseek:from_hf",
    "deepseek_v3": "lf.models.llm.deepseek:from_hf",
    "kimi_k2": "lf.models.llm.deepseek:from_hf",
    "internvl": "lf.models.vlms.internvl:from_hf",
    "kimi_k25": "lf.models.vlms.kimi:from_hf",
    "llama": "lf.models.llm.llama:from_hf",
    "llava_onevision": "lf.models.vlms.llava:from_hf",
    "minimax_m2": "lf.models.llm.minimax:from_hf",
    "qwen2": "lf.models.llm.qwen:from_hf",
    "qwen2_moe": "lf.models.llm.qwen_moe:from_hf",
    "qwen2_5_vl": "lf.models.vlms.qwen_vl:from_hf",
    "qwen3": "lf.models.llm.qwen:from_hf",
    "qwen3_moe": "lf.models.llm.qwen_moe:from_hf",
    "qwen3_vl": "lf.models.vlms.qwen_vl:from_hf",
    "qwen3_vl_moe": "lf.models.vlms.qwen_vl:from_hf",
    "pi05": "lf.models.embodied.pi05:from_hf",
    "WanTransformer3DModel": "lf.models.diffusion.wan:from_hf",
    "WanModel": "lf.models.diffusion.wan:from_original",
    "QwenImageTransformer2DModel": "lf.models.diffusion.qwen_image:from_hf",
}
"""What a config.json says it is, and the function that reads it."""

_KINDS = ("_class_name", "reference_class", "model_type", "type", "model")
"""Where diffusers, golden folders, transformers and LeRobot say what a model is; Wan's own release has the first, and a
`model_type` that says what the model does."""

_OPEN = ("WanModel",)
"""Kinds whose config.json leaves something open that the names of the tensors say."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@functools.singledispatch
def settled(cfg: spec.ModelConfig, names: tuple[str, ...]) -> spec.ModelConfig:
    """Returns the model of a folder with the tensors `names`, where its config.json alone leaves something open."""
    return cfg


def read_config(folder: str | Path, reader: Reader | None = None) -> spec.ModelConfig:
    """Returns the model that a folder's config.json states.

    `reader` reads the config.json of a family outside lf instead of one of `READERS`. Raises ValueError, with the
    file's path, where the file is missing or broken, its type is unknown, or lf cannot have the model.
    """
    file = _config_file(folder)
    config = parse_config(file, file.read_bytes())
    try:
        cfg = (reader or known_reader(config))(config)
        if reader is None and _kind(config) in _OPEN:
            cfg = settled(cfg, open_folder(file.parent).names)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: its reader cannot read it ({type(error).__name__}: {error})") from error
    if not isinstance(cfg, spec.ModelConfig):
        raise ValueError(f"{file}: its reader returned a {spec.type_name(cfg)}; it must return a ModelConfig")
    return cfg


def config_bytes(cfg: spec.ModelConfig, original: bytes = b"", eos: int | None = None) -> bytes:
    """Returns the config.json of an export.

    `original` is the config.json of the folder that the weights came from, empty without one. It is returned as it is
    when it states the model. Where the model was changed on the way, the model's fields replace those of `original`,
    and the rest stays. Otherwise the file is made from the model alone, `eos` being the id of every special token.
    """
    ours = spec.hf_config(cfg)
    stated = parse_config(Path("config.json"), original) if original else {}
    if _other_layout(stated, cfg):
        # Weights keep the names of their layout, whose config.json states their sizes.
        return original
    if not stated or _kind(stated) != _kind(ours):
        return _dump(ours | {key: stated.get(key, eos) for key in TOKEN_IDS if key in ours})
    if _kind(ours) in READERS and spec.hf_config(known_reader(stated)(stated)) == ours:
        return original
    merged = stated | {key: value for key, value in ours.items() if key not in TOKEN_IDS}
    return original if merged == stated else _dump(merged)


def stem(cfg: spec.ModelConfig) -> str:
    """Returns how the weight files of an export without a source start: as transformers' do, or diffusers'."""
    return STEMS[1] if "_class_name" in spec.hf_config(cfg) else STEMS[0]


def _other_layout(stated: Mapping[str, Any], cfg: spec.ModelConfig) -> bool:
    """Returns whether a config.json is that of another published layout of the model's family."""
    kind = _kind(stated)
    if not isinstance(kind, str) or kind not in _OPEN:
        return False
    return type(known_reader(stated)(stated)) is type(cfg)


def _dump(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _config_file(folder: str | Path) -> Path:
    file = Path(folder) / "config.json"
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent} is not a folder; give the local folder of a Hugging Face checkpoint")
    others = {
        "model_index.json": "a whole diffusers pipeline; give the folder of its model, transformer/",
        "adapter_config.json": "a PEFT adapter; give the model that it is for (a run starts from it by adapt.start)",
    }
    for name, told in others.items():
        if not file.is_file() and (file.parent / name).is_file():
            raise ValueError(f"{file.parent} is {told}")
    if not file.is_file():
        raise ValueError(f"{file} is missing; give a Hugging Face folder, which has a config.json beside its weights")
    return file


def _kind(config: Mapping[str, Any]) -> Any:
    stated = [config[key] for key in _KINDS if key in config]
    # openpi's converter names the towers of a policy but not the policy; a Pi0 has other tensors, which refuses it.
    return stated[0] if stated else "pi05" if "paligemma_variant" in config else None


def known_reader(config: Mapping[str, Any]) -> Reader:
    """Returns lf's reader of a config.json; raises ValueError where it has none."""
    kind = _kind(config)
    if not isinstance(kind, str) or kind not in READERS:
        stated = "no model_type (or _class_name)" if kind is None else f"model_type = {kind!r}, which lf does not know"
        raise ValueError(
            f"{stated}; it knows {', '.join(sorted(READERS))}. Give a folder of these, or a reader of your own as "
            "file.py:reader (--family)"
        )
    module, _, name = READERS[kind].partition(":")
    reader: Reader = getattr(importlib.import_module(module), name)
    return reader
