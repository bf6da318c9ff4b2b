"""Turns a Hugging Face folder into a checkpoint of lf and back, offline and tensor by tensor.

What an import writes, and what `init` and an export read:

    checkpoints/step_0/   the weights under canonical names, as `lf.train.checkpoint` saves them
    source/               what an export needs to give the imported folder back
    tokenizer/            the tokenizer's files, where the folder has them, and its config.json
    report.json           one object for each tensor of the folder: key, rule, lf, shape, dtype, file

An export has a `report.json` of the same form beside its weights.
"""

import json
import math
from pathlib import Path
from typing import Any, get_args

import attrs
import torch
from torch import Tensor

from lf.config import from_json, load_classes, load_function, to_json
from lf.data.acting import ActingFacts
from lf.data.hf_tokenizer import FILES, read_tokenizer
from lf.data.processor_files import FILES as PROCESSORS
from lf.models import hf, weights
from lf.models.hf_folder import HfFolder, few, open_folder
from lf.models.hf_save import new_folder, store_source
from lf.models.layouts import fitted, fitted_to
from lf.models.lora import merged
from lf.models.spec import weight_map
from lf.models.weights import WeightMap
from lf.train.checkpoint import CheckpointError, Skipped, save
from lf.train.config import Precision
from lf.train.folder import SOURCE, TOKENIZER, write_files
from lf.train.names import EMA, WEIGHT, base_shapes, key, weight_shapes
from lf.train.reader import Reader
from lf.train.shards import Piece
from lf.train.start import acting_files, export, from_checkpoint, newest, stated_shapes

REPORT = "report.json"
"""File of a converted folder that accounts for every tensor."""


@attrs.frozen(kw_only=True)
class Converted:
    """What a conversion did."""

    read: Path
    """The folder that the weights came from."""
    rows: list[dict[str, Any]]
    """What `report.json` says of each tensor on the Hugging Face side."""
    skipped: tuple[Skipped, ...] = ()
    """Newer checkpoints that are damaged, so that an older one was exported: print them."""


def import_folder(src: Path, dst: Path, family: str = "") -> Converted:
    """Writes the weights of a Hugging Face folder as a checkpoint of lf, which `init` and `export_folder` take.

    One tensor is in memory at a time; FP8 weights are dequantised to float32. `family` is as in `open_start`. `dst`
    appears when it is complete. Raises ValueError where folder and model do not fit or `dst` has something in it,
    CheckpointError and OSError where it cannot be written.
    """
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise ValueError(f"{dst} is no empty folder; choose another one, or remove it first")
    model = hf.read_config(src, load_function(family) if family else None)
    folder = open_folder(src)
    table = fitted_to(weight_map(model), folder)
    weights.check(table, folder, stated_shapes(model))
    source, rows = weights.remember(table, folder), weights.report(table, folder)
    tokenizer = {name: content for name, content in source.files if name in FILES}
    with new_folder(dst, ()) as made:
        store_source(source, made / SOURCE)
        if tokenizer:
            # Some tokenizers have no file of their own that names the end-of-text token.
            write_files(made / TOKENIZER, {**tokenizer, "config.json": source.config})
        write_files(made, {REPORT: _json(rows)})
        pieces = (_piece(table, folder, *named) for named in weights.lf_shapes(table, folder).items())
        save(made, 0, pieces, {"model": to_json(model), "tokens": 0})
    return Converted(read=src, rows=rows)


def export_folder(src: Path, dst: Path, family: str = "", config_file: str = "") -> Converted:
    """Writes the newest good checkpoint of a run folder, or of an imported one, as a Hugging Face folder.

    It is what the run itself exports at that step, adapters merged into the weights: keys, dtypes, split into files,
    config.json and tokenizer are those of the folder that the weights came from, if there is one. One shard is in
    memory at a time. `family` and `config_file` are as in `open_saved`. Raises ValueError where `src` is no such folder
    or saving to `dst` would lose something, CheckpointError where no checkpoint is good.
    """
    if not (src / "checkpoints").is_dir():
        raise ValueError(f"{src} has no checkpoints; give a run folder of lf, or a folder that an import wrote")
    if family:
        load_function(family)
    if config_file:
        load_classes(config_file)
    reader, skipped = newest(src)
    dtype = _trained_dtype(reader)
    start = from_checkpoint(src, reader)
    table = weight_map(start.model)
    shapes = weight_shapes(reader)
    left = [name for name in base_shapes(shapes) if name not in table.by_lf]
    if left:
        raise ValueError(
            f"{reader.path} holds {len(left)} weights that this model does not have: {few(left)}; export it "
            "with the lf, or the config file, that saved it"
        )

    def get(name: str) -> Tensor:
        # A bfloat16 run of the Megatron path saves its float32 main weights and exports those that compute.
        mean = key(EMA, name)
        tensor = reader.read(mean if reader.meta.get("averaged") and mean in reader.names else key(WEIGHT, name))
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    kept = src / TOKENIZER
    files = {name: (kept / name).read_bytes() for name in (*FILES, *PROCESSORS) if (kept / name).is_file()}
    eos = read_tokenizer(kept).eos if files and start.source is None else None
    adapted = len(shapes) > len(base_shapes(shapes))
    whole = merged(get, shapes, reader.fact("lora_scale", float)) if adapted else get
    text = reader.meta.get("acting")
    facts = from_json(text, source=str(reader.path), kind=ActingFacts) if isinstance(text, str) else None
    beside = {**files, **acting_files(start.model, start.source, facts)}
    export(start.model, whole, dst, source=start.source, files=beside, eos=eos, write=True)
    made = open_folder(dst)
    rows = weights.report(fitted(table, made.names), made)
    write_files(dst, {REPORT: _json(rows)})
    return Converted(read=reader.path, rows=rows, skipped=skipped)


def _trained_dtype(reader: Reader) -> torch.dtype | None:
    """Returns what the weights of a run compute in, None for an import, whose tensors keep their own."""
    if "params" not in reader.meta:
        return None
    name = reader.fact("params", str)
    if name not in get_args(attrs.fields(Precision).params.type):
        raise CheckpointError(f"{reader.path} has params = {name!r} in meta, which lf does not train in")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _piece(table: WeightMap, folder: HfFolder, name: str, shape: tuple[int, ...]) -> Piece:
    placed = weights.whole(name, shape)
    size = math.prod(shape)
    return Piece(
        name=key(WEIGHT, name),
        shape=shape,
        at=(0,) * len(shape),
        size=shape,
        start=0,
        stop=size,
        data=torch.empty(size, dtype=weights.stored_dtype(table.by_lf[name], folder), device="meta"),
        make=lambda: weights.read(table, folder, placed).view(-1),
    )


def _json(rows: list[dict[str, Any]]) -> bytes:
    return (json.dumps(rows, indent=1) + "\n").encode()
