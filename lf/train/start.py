"""What a run starts from (a Hugging Face folder, or a checkpoint of lf), and what it exports."""

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf.config import code_of, from_json, load_classes, load_function, to_json
from lf.data.acting import ActingFacts
from lf.devices.device import Device
from lf.models import hf, weights
from lf.models.hf_folder import STEMS, open_folder, parse_config
from lf.models.hf_save import Source, load_source, save_folder
from lf.models.layouts import fitted, fitted_to
from lf.models.lora import added, sides
from lf.models.spec import Ctx, ModelConfig, Placed, build_model, named_tensors, paths, robot_files, weight_map
from lf.parallel.config import MegatronParallel, resolve
from lf.train.checkpoint import Skipped, open_latest
from lf.train.comm import process_group
from lf.train.folder import ACTING, SOURCE
from lf.train.names import EMA, WEIGHT, base_shapes, key, weight_shapes
from lf.train.reader import Reader
from lf.train.state import Published, initial_value


@attrs.frozen(kw_only=True, eq=False)
class Start:
    """A model, its weights, and what an export needs to look like the folder that they came from."""

    model: ModelConfig
    """The model."""
    published: Published | None
    """Its weights; None draws them."""
    source: Source | None
    """The Hugging Face folder that they came from, None for a model of the run's own."""


def open_start(init: str, model: ModelConfig | None, family: str = "", stems: Sequence[str] = STEMS) -> Start:
    """Returns what a run starts from: `init`, or random weights of `model` where it is empty.

    `family` is `FILE.py:NAME` of a family outside lf, a function from the fields of a config.json to a model; `stems`
    is how the weight files of a folder may start. Raises ValueError where nothing says what the model is,
    CheckpointError where a run folder has no good checkpoint.
    """
    reader = load_function(family) if family else None
    if not init:
        if model is None:
            raise ValueError("model = None and init is empty, so there is nothing to train; set model, or init=FOLDER")
        return Start(model=model, published=None, source=None)
    path = Path(init).expanduser()
    if (path / "checkpoints").is_dir():
        return from_checkpoint(path, newest(path)[0], model)
    found = model if model is not None else hf.read_config(path, reader)
    folder = open_folder(path, stems=stems)
    table = fitted_to(weight_map(found), folder)
    return Start(
        model=found,
        published=Published(
            check=functools.partial(weights.check, table, folder),
            read=functools.partial(weights.read, table, folder),
            differing=functools.partial(weights.differing, table, folder),
        ),
        source=_restated(weights.remember(table, folder), model),
    )


def open_saved(folder: Path, family: str = "", config_file: str = "") -> Start:
    """Returns what a Hugging Face or run folder holds, for a process that has loaded no config. Else as `open_start`.

    `config_file` is executed first, for a model whose class is in it; no file of the folder is executed unasked.
    """
    if config_file:
        load_classes(config_file)
    return open_start(str(folder), None, family)


def _restated(source: Source, model: ModelConfig | None) -> Source:
    """Returns a source whose config.json states `model`; None is the model that it states already."""
    if model is None or not source.config:
        return source
    return attrs.evolve(source, config=hf.config_bytes(model, source.config))


def newest(folder: Path) -> tuple[Reader, tuple[Skipped, ...]]:
    """Returns the newest good checkpoint of a run folder, and what was passed over. Raises as `open_start` does."""
    opened = open_latest(folder)
    if opened.reader is None:
        raise ValueError(f"{folder} has no complete checkpoint; give a run folder that has one, or an HF folder")
    return opened.reader, opened.skipped


def from_checkpoint(folder: Path, reader: Reader, model: ModelConfig | None = None, *, averaged: bool = False) -> Start:
    """Returns what an open checkpoint of a run folder holds; `model` overrules the one that it states.

    With `averaged`, weights that have a running average are that average. Adapters are merged into the weights.
    """
    found = model if model is not None else _saved_model(folder, reader)

    def check(shapes: Mapping[str, tuple[int, ...]], compare: bool) -> None:
        saved = base_shapes(weight_shapes(reader))
        if saved != dict(shapes):
            wrong = sorted(n for n in saved.keys() | shapes.keys() if saved.get(n) != shapes.get(n))
            told = ", ".join(f"{n}: {saved.get(n)} saved, {shapes.get(n)} in the model" for n in wrong[:3])
            raise ValueError(f"{reader.path} has other tensors than the model ({len(wrong)}: {told}); set model=None")

    source = folder / SOURCE
    return Start(
        model=found,
        published=Published(check=check, read=functools.partial(_read, reader, averaged), differing=lambda *_: []),
        source=_restated(load_source(source), model) if source.is_dir() else None,
    )


def _saved_model(folder: Path, reader: Reader) -> ModelConfig:
    text = reader.fact("model", str)
    try:
        model: ModelConfig = from_json(text, source=str(reader.path), kind=ModelConfig)
    except ValueError as error:
        for file in (file for file in code_of(text, folder) if file.stem not in sys.modules):
            raise ValueError(
                f"{error}\nIts class may be in {file}, and no code of a folder is executed unasked. If you trust that "
                f"file, name it: --config-file {file} (generate.py, convert.py), or train.py --cfg a file "
                "that imports it"
            ) from error
        raise
    return model


def _read(reader: Reader, averaged: bool, placed: Placed) -> Tensor:
    def stored(name: str) -> str:
        mean = key(EMA, name)
        return mean if averaged and mean in reader.manifest.tensors else key(WEIGHT, name)

    def read(name: str, at: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return reader.read(stored(name), at, size)

    out = torch.zeros(weights.held_shape(placed), dtype=reader.dtype(stored(placed.name)))
    a = stored(sides(placed.name)[0])
    for part in placed.parts:
        where = tuple(slice(first, first + n) for first, n in zip(part.local, part.size, strict=True))
        out[where] = read(placed.name, part.at, part.size)
        if placed.name.endswith(".weight") and a in reader.names:
            rank, scale = reader.shape(a)[0], reader.fact("lora_scale", float)
            out[where] += added(placed.name, part, read, rank, scale)
    return out


def local_context(model: ModelConfig, device: Device) -> Ctx:
    """Returns the context of a whole model in float32 in this process; torch.distributed must be up."""
    if "torch" in paths(model):
        return Ctx(device=device)
    from lf.parallel.megatron import make_context

    return make_context(MegatronParallel(), resolve(MegatronParallel(), 1), device, torch.float32)


def load_model(start: Start, ctx: Ctx, seed: int = 0) -> nn.Module:
    """Returns the model of a context with its published weights; where there are none, `seed` draws them."""
    model = build_model(start.model, ctx).to(ctx.device.torch_type)
    held = _held(model, ctx)
    if start.published is not None:
        start.published.check({placed.name: placed.shape for _, placed in held}, True)
    with torch.no_grad():
        for tensor, placed in held:
            tensor.copy_(initial_value(start.model, seed, placed, tensor, start.published))
    return model


def stated_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the global shape of every tensor of a model, by canonical name; it is built without memory."""
    from lf.devices.cpu import cpu

    with contextlib.nullcontext() if dist.is_initialized() else process_group(cpu):
        ctx = attrs.evolve(local_context(model, cpu), meta=True)
        with torch.device("meta"):
            return {placed.name: placed.shape for _, placed in _held(build_model(model, ctx), ctx)}


def _held(model: nn.Module, ctx: Ctx) -> list[tuple[Tensor, Placed]]:
    """Returns each parameter and persistent buffer with its place in the global tensors."""
    if ctx.groups is None:
        return [(tensor, weights.whole(name, tuple(tensor.shape))) for name, tensor in named_tensors(model).items()]
    from lf.parallel.megatron import placements

    return placements(model, ctx)


def export(
    model: ModelConfig,
    get: Callable[[str], Tensor],
    path: Path,
    *,
    source: Source | None,
    files: Mapping[str, bytes],
    eos: int | None = None,
    write: bool,
) -> None:
    """Writes the weights as a Hugging Face folder; every rank calls it, the one with `write` writes.

    Keys, dtypes, files and config.json are the source's where there is one. `files` are the tokenizer's and those of
    `acting_files`, and `eos` is
    its end-of-text token, which a config.json that is made here names. A config.json among `files` is taken instead.
    """
    names = [kept.name for kept in source.tensors] if source else []
    tensors = weights.export(fitted(weight_map(model), names), get, source)
    if not write:
        for _ in tensors:
            pass
        return
    config = (source.config if source else b"") or hf.config_bytes(model, eos=eos)
    kept = (
        {name: content for name, content in source.files if ACTING not in files or not _scales(name)} if source else {}
    )
    ours = {**kept, **files}
    config = ours.pop("config.json", config)
    save_folder(path, tensors, config=config, files=ours, source=source, stem=hf.stem(model))


def _scales(name: str) -> bool:
    """Returns whether a file scales a robot's numbers: that of another robot must not stay."""
    return name == ACTING or name.startswith(("policy_preprocessor", "policy_postprocessor"))


def acting_files(model: ModelConfig, source: Source | None, facts: ActingFacts | None) -> dict[str, bytes]:
    """Returns what an export of a robot policy has besides weights and tokenizer, by name; nothing without `facts`."""
    if facts is None or facts.normalisers.actions is None:
        return {}
    state, actions = facts.normalisers.state, facts.normalisers.actions
    config = (source.config if source else b"") or hf.config_bytes(model)
    more = robot_files(
        model,
        parse_config(Path("config.json"), config),
        None if state is None else (state.shift, state.scale),
        (actions.shift, actions.scale),
        any(facts.normalisers.delta),
    )
    return {ACTING: to_json(facts).encode(), **more}
