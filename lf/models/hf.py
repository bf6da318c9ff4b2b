"""Hugging Face folders as models: which reader reads which config.json, and what an export's config.json is."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from lf.models import spec
from lf.models.hf_folder import parse_config

Reader = Callable[[Mapping[str, Any]], spec.ModelConfig]
"""A function from the fields of a config.json to a model."""

READERS: Mapping[str, str] = {
    "llama": "lf.models.llm.llama:from_hf",
    "qwen2": "lf.models.llm.qwen:from_hf",
    "qwen3": "lf.models.llm.qwen:from_hf",
}
"""`model_type` (transformers) or `_class_name` (diffusers) of a config.json, and the function that reads it."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_config(folder: str | Path, extra: str = "") -> spec.ModelConfig:
    """Returns the model that a folder's config.json states.

    `extra` is `file.py:reader`, a function outside lf that reads this config.json instead of one of `READERS`. Raises
    ValueError, with the file's path, where the file is missing or broken, its type is unknown, or lf cannot have the
    model.
    """
    file = _config_file(folder)
    config = parse_config(file, file.read_bytes())
    try:
        cfg = _reader(config, extra)(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if not isinstance(cfg, spec.ModelConfig):
        raise ValueError(f"{file}: the reader {extra} returned a {spec.type_name(cfg)}; it must return a ModelConfig")
    return cfg


def config_bytes(cfg: spec.ModelConfig, source: str | Path | None = None, extra: str = "") -> bytes:
    """Returns the config.json of an export.

    A run that started from the folder `source` gives that folder's own bytes, as long as they state the model. Where
    the model was changed on the way, its fields replace the folder's and the rest stays. `quantization_config` goes,
    since lf exports no quantised weights. Without a source the file is made from the model alone.
    """
    if source is None:
        return _dump(spec.hf_config(cfg))
    file = _config_file(source)
    content = file.read_bytes()
    started = read_config(source, extra)
    if type(started) is not type(cfg):
        return _dump(spec.hf_config(cfg))
    changed = {} if started == cfg or spec.hf_config(started) == (ours := spec.hf_config(cfg)) else ours
    stated = parse_config(file, content)
    if not changed and "quantization_config" not in stated:
        return content
    kept = {key: value for key, value in stated.items() if key != "quantization_config"}
    return _dump(kept | {key: value for key, value in changed.items() if key not in TOKEN_IDS})


def _dump(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _config_file(folder: str | Path) -> Path:
    file = Path(folder) / "config.json"
    if not file.parent.is_dir():
        raise ValueError(f"{file.parent} is not a folder; give the local folder of a Hugging Face checkpoint")
    if not file.is_file():
        raise ValueError(f"{file} is missing; give a Hugging Face folder, which has a config.json beside its weights")
    return file


def _reader(config: Mapping[str, Any], extra: str) -> Reader:
    if extra:
        return _outside(extra)
    kind = config.get("model_type", config.get("_class_name"))
    if not isinstance(kind, str) or kind not in READERS:
        stated = "no model_type (or _class_name)" if kind is None else f"model_type = {kind!r}, which lf does not know"
        raise ValueError(
            f"{stated}; it knows {', '.join(sorted(READERS))}. Give a folder of these, or a reader of your own as "
            "file.py:reader (--family)"
        )
    module, _, name = READERS[kind].partition(":")
    reader: Reader = getattr(importlib.import_module(module), name)
    return reader


def _outside(extra: str) -> Reader:
    path, _, name = extra.rpartition(":")
    file = Path(path).resolve()
    if not path or not name or not file.is_file():
        raise ValueError(f"the reader {extra!r} must be file.py:reader, an existing Python file and a function in it")
    reader: Reader | None = getattr(_module(file), name, None)
    if reader is None or not callable(reader):
        raise ValueError(f"{file} has no function {name}; --family wants the one that reads config.json")
    return reader


def _module(file: Path) -> ModuleType:
    # A file that is loaded already is taken as it is: loading it again would make its classes twice.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("__file__") == str(file):
            return module
    found = importlib.util.spec_from_file_location(f"lf_family_{file.stem}", file)
    if found is None or found.loader is None:
        raise ValueError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    try:
        found.loader.exec_module(module)
    except Exception as error:
        del sys.modules[found.name]
        raise ValueError(f"{file} cannot be loaded ({type(error).__name__}: {error})") from error
    return module
