"""What a run starts from (a Hugging Face folder, or a checkpoint of lf), and what it exports."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import torch
from torch import Tensor

from lf.config import from_json
from lf.models import hf, weights
from lf.models.hf_folder import open_folder
from lf.models.hf_save import Source, load_source, save_folder
from lf.models.spec import ModelConfig, Placed, weight_map
from lf.train.checkpoint import CheckpointError, open_latest
from lf.train.reader import Reader
from lf.train.state import Published

SOURCE = "source"
"""Folder, beside the checkpoints, of what is remembered of an imported Hugging Face folder."""


@attrs.frozen(kw_only=True, eq=False)
class Start:
    """A model, its weights, and what an export needs to look like the folder that they came from."""

    model: ModelConfig
    """The model."""
    published: Published | None
    """Its weights; None draws them."""
    source: Source | None
    """The Hugging Face folder that they came from, None for a model of the run's own."""


def open_start(init: str, model: ModelConfig | None) -> Start:
    """Returns what a run starts from: `init`, or random weights of `model` where it is empty.

    Raises ValueError where neither says what the model is, or where they disagree about its tensors.
    """
    if not init:
        if model is None:
            raise ValueError("model = None and init is empty, so there is nothing to train; set model, or init=FOLDER")
        return Start(model=model, published=None, source=None)
    path = Path(init).expanduser()
    if (path / "checkpoints").is_dir():
        return _from_checkpoint(path, model)
    found = model if model is not None else hf.read_config(path)
    folder = open_folder(path)
    table = weight_map(found)
    return Start(
        model=found,
        published=Published(
            check=functools.partial(weights.check, table, folder), read=functools.partial(weights.read, table, folder)
        ),
        source=weights.remember(table, folder),
    )


def _from_checkpoint(path: Path, model: ModelConfig | None) -> Start:
    reader = open_latest(path).reader
    if reader is None:
        raise ValueError(f"init = {path} has no complete checkpoint; give a run folder that has one, or an HF folder")
    found = model if model is not None else from_json(reader.meta["model"], source=str(reader.path))

    def check(shapes: Mapping[str, tuple[int, ...]]) -> None:
        saved = {n.removeprefix("weight/"): reader.shape(n) for n in reader.names if n.startswith("weight/")}
        if saved != dict(shapes):
            wrong = sorted(n for n in saved.keys() | shapes.keys() if saved.get(n) != shapes.get(n))
            told = ", ".join(f"{n}: {saved.get(n)} saved, {shapes.get(n)} in the model" for n in wrong[:3])
            raise ValueError(f"init = {reader.path} has other tensors than the model ({len(wrong)}: {told}); set model=None")

    source = path / SOURCE
    return Start(
        model=found,
        published=Published(check=check, read=functools.partial(read_placed, reader, "weight")),
        source=load_source(source) if source.is_dir() else None,
    )


def read_placed(reader: Reader, kind: str, placed: Placed) -> Tensor:
    """Returns this rank's tensor of a kind (`weight`, `exp_avg`, ...) from a checkpoint, without padding."""
    boxes = [(part, reader.read(f"{kind}/{placed.name}", part.at, part.size)) for part in placed.parts]
    if len(boxes) == 1:
        return boxes[0][1]
    out = torch.zeros([max(p.local[i] + p.size[i] for p, _ in boxes) for i in range(len(placed.shape))])
    out = out.to(boxes[0][1].dtype)
    for part, box in boxes:
        out[tuple(slice(a, a + n) for a, n in zip(part.local, part.size, strict=True))] = box
    return out


def export(
    model: ModelConfig,
    get: Callable[[str], Tensor],
    path: Path,
    *,
    source: Source | None,
    files: Mapping[str, bytes],
    write: bool,
) -> None:
    """Writes the weights as a Hugging Face folder; every rank calls it, the one with `write` writes.

    Keys, dtypes and files are the source's where there is one. `files` are the tokenizer's.
    """
    tensors = weights.export(weight_map(model), get, source)
    if not write:
        for _ in tensors:
            pass
        return
    kept = dict(source.files) if source else {}
    save_folder(path, tensors, config=hf.config_bytes(model, source), files={**kept, **files}, source=source)


__all__ = ["SOURCE", "CheckpointError", "Start", "export", "open_start", "read_placed"]
