"""From a config to a job: everything that can be wrong with a run is found here, before its first step."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from lf.config import to_json
from lf.data.config import DataConfig, HfTokenizer, TokenizerConfig
from lf.data.hf_tokenizer import Tokenizer
from lf.data.normalise import Normalisers
from lf.data.source import DataCtx, Row, Rows, acting_of, normalisers_of, open_data, robot_names
from lf.data.split import check_split
from lf.data.tokenizer import open_tokenizer
from lf.devices.detect import require
from lf.devices.device import Device
from lf.models.hf import stem
from lf.models.hf_folder import STEMS
from lf.models.hf_save import check_target
from lf.models.layouts import fitted
from lf.models.lora import merged
from lf.models.media import media_rules, takes_media
from lf.models.peft import FILES as ADAPTER_FILES
from lf.models.peft import read_adapter, save_adapter
from lf.models.spec import (
    Ctx,
    Layout,
    ModelConfig,
    check_layout,
    check_model,
    collate,
    has_rule,
    hf_config,
    named_tensors,
    paths,
    prompt,
    prompt_limit,
    type_name,
    weight_map,
)
from lf.models.weights import WeightMap
from lf.parallel.config import Hetero, megatron_part, resolve
from lf.train.chats import files_beside
from lf.train.checkpoint import CheckpointError, check_all_read, latest, on_first, open_latest
from lf.train.comm import Comm, together
from lf.train.config import Run
from lf.train.even import check_balance
from lf.train.folder import (
    ADAPTER,
    HF,
    METRICS,
    TOKENIZER,
    check_place,
    check_room,
    check_same_data,
    check_same_run,
    held,
    make,
    update,
)
from lf.train.loop import Job
from lf.train.profile import check_window
from lf.train.reader import Reader
from lf.train.schedule import check_schedule
from lf.train.sinks import check_sinks, last_evaluation, open_progress, open_sinks
from lf.train.start import Start, acting_files, export, from_checkpoint, open_start
from lf.train.state import Engine, TrainState

MOST_ROWS = 2**31
"""Rows of a step, beyond which a number is a slip."""


def cache_dir() -> Path:
    """Returns the folder of what is built once and kept for every run: token ids and tokenizers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lf"


def check_run(run: Run, model: ModelConfig, device: Device, world: int) -> Layout:
    """Returns the layout of a run; raises ValueError for what cannot work, with the cure.

    Raises NotImplementedError for a model that could not be exported at the end.
    """
    if max(run.batch, run.parallel.micro_batch) > MOST_ROWS:
        raise ValueError(
            f"batch = {run.batch} and parallel.micro_batch = {run.parallel.micro_batch}: a step has at most "
            f"{MOST_ROWS} rows; take fewer"
        )
    weight_map(model)
    hf_config(model)
    path = "torch" if megatron_part(run.parallel) is None else "megatron"
    if path not in paths(model):
        known = {"megatron": "MegatronParallel", "torch": "TorchParallel"}
        cure = " or ".join(f"lf.{known[name]}(...)" for name in paths(model))
        raise ValueError(
            f"parallel = {type(run.parallel).__name__}: {type_name(model)} does not train there; set parallel to {cure}"
        )
    if isinstance(run.parallel, Hetero) and not takes_media(model):
        raise ValueError(
            f"parallel = Hetero: {type_name(model)} has no images to encode; set parallel to what parallel.text is"
        )
    if run.precision.params == "bfloat16":
        require(device, "bf16", "precision.params", "set precision.params to float32")
    if path == "megatron" and run.optim.rates:
        raise ValueError(
            "optim.rates are for the torch path, and parallel is a MegatronParallel; leave them empty, or set parallel "
            "to lf.TorchParallel(...) where the model trains there"
        )
    if path == "megatron" and run.optim.ema:
        raise ValueError(
            f"optim.ema = {run.optim.ema} is for the torch path, and parallel is a MegatronParallel; set ema to 0, or "
            "parallel to lf.TorchParallel(...) where the model trains there"
        )
    if run.adapt is not None:
        _check_adapt(run, path)
    if run.balance is not None:
        check_balance(model)
    check_schedule(run.optim.schedule, run.steps)
    check_window(run.profile, run.steps)
    check_sinks(run.log)
    return resolve(run.parallel, world)


def _check_adapt(run: Run, path: str) -> None:
    if path == "megatron":
        raise ValueError(
            "adapt is for the torch path, and parallel is a MegatronParallel; set adapt to None, or parallel to "
            "lf.TorchParallel(...) where the model trains there"
        )
    if run.optim.freeze:
        raise ValueError(
            f"adapt freezes all but its adapters and adapt.full, and optim.freeze = {run.optim.freeze}; leave it empty"
        )


def open_job(
    run: Run, folder: Path, files: Sequence[Path], device: Device, comm: Comm, say: Callable[[str], None]
) -> Job:
    """Returns the job of a run on this rank, at the step that its folder has reached.

    `files` are the config files that were executed. Raises ValueError for what is wrong with the run or its data,
    CheckpointError for what is wrong with its folder.
    """
    check_place(folder)
    lock = contextlib.ExitStack()
    on_first(comm, functools.partial(_hold, folder, lock))
    opened = open_latest(folder, comm=comm)
    for skipped in opened.skipped:
        say(f"skipped {skipped.path}: {skipped.reason}")
    reader = opened.reader
    check_same_run(run, folder, reader, say)
    start = open_start(run.init, run.model) if reader is None else from_checkpoint(folder, reader)
    layout = check_run(run, start.model, device, comm.world)
    inputs = _open_inputs(run, folder, reader, start, layout)
    whole = attrs.evolve(run, model=start.model)
    meta = _meta(whole, inputs)
    if reader is not None:
        check_same_data(reader, meta)
    _check_alike(comm, {**meta, "held-out data": None if inputs.eval_rows is None else inputs.eval_rows.describe()})
    with _memory_explained(device):
        engine, layout = _engine(run, start, layout, device, reader is None, say)
    if reader is not None:
        engine = _restored(engine, reader, comm)
        say(f"resumed from {reader.path}")
    check_room(folder, engine.pieces(engine.state), 1, comm)
    kept = dict(start.source.files) if start.source else {}
    beside = {**inputs.tokenizer_files, **acting_files(start.model, start.source, acting_of(inputs.rows))}
    check_target(folder / HF, [*kept, *beside])
    check_target(folder / ADAPTER, ADAPTER_FILES)
    if reader is None:
        on_first(comm, functools.partial(_make, whole, folder, files, start, inputs, lock))
    else:
        on_first(comm, functools.partial(update, whole, folder, files))
    sinks = open_sinks(folder, run.log, rank=comm.rank, step=engine.state.step, config={"run": meta["run"]})
    return Job(
        run=run,
        model=start.model,
        folder=folder,
        engine=engine,
        rows=inputs.rows,
        eval_rows=inputs.eval_rows,
        evaluated=comm.broadcast(last_evaluation(folder / METRICS) if comm.rank == 0 else 0),
        layout=layout,
        device=device,
        comm=comm,
        sinks=sinks,
        progress=open_progress(run.steps, engine.state.step, rank=comm.rank),
        say=say,
        meta=meta,
        export=_exporter(run, folder, start, engine, beside, inputs.tokenizer, comm),
        lock=lock,
    )


def _hold(folder: Path, lock: contextlib.ExitStack) -> None:
    # A folder that is not there yet is locked when it is made, so that a run that is refused leaves nothing.
    if folder.is_dir():
        lock.enter_context(held(folder))


def _make(
    run: Run, folder: Path, files: Sequence[Path], start: Start, inputs: "_Inputs", lock: contextlib.ExitStack
) -> None:
    """Makes the folder of a new run, and locks it."""
    lock.close()
    lock.enter_context(held(folder))
    if latest(folder) is not None:
        raise CheckpointError(f"another process has begun to train in {folder}; give the same command again")
    make(run, folder, files, start.source, inputs.tokenizer)


def _exporter(
    run: Run,
    folder: Path,
    start: Start,
    engine: Engine,
    files: Mapping[str, bytes],
    tokenizer: Tokenizer | None,
    comm: Comm,
) -> Callable[[TrainState, str], None]:
    """Returns what writes the weights of a state below the run's folder; `files` go beside them."""

    def save_hf(state: TrainState, name: str) -> None:
        get = engine.weights(state)
        if run.adapt is not None:
            if run.save.lora != "merged":
                place = folder / name.replace(HF, ADAPTER, 1)
                _save_adapter(run, start, state, get, place, write=comm.rank == 0)
            if run.save.lora == "adapter":
                return
            get = merged(get, named_tensors(state.chunks[0]), run.adapt.scale)
        export(
            start.model,
            get,
            folder / name,
            source=start.source,
            files=files,
            eos=None if tokenizer is None else tokenizer.eos,
            write=comm.rank == 0,
        )

    return save_hf


@contextlib.contextmanager
def _memory_explained(device: Device) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch has a type of its own for this on accelerators only
        if "allocate" not in str(error) and "out of memory" not in str(error):
            raise
        raise ValueError(
            f"the model does not fit into the memory of {device.name} ({str(error).splitlines()[0]}); take a smaller "
            "one, or share it between more ranks"
        ) from error


@attrs.frozen(kw_only=True, eq=False)
class _Inputs:
    """What a run reads."""

    tokenizer: Tokenizer | None
    """The tokenizer, None for data without text."""
    rows: Rows
    """Training rows."""
    eval_rows: Rows | None
    """Held-out rows."""

    @property
    def normalisers(self) -> str | None:
        """How robot data is scaled, as JSON: what evaluation and serving read back; None without such data."""
        found = normalisers_of(self.rows)
        return None if found is None else to_json(found)

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]:
        """Files of the tokenizer by name."""
        return {} if self.tokenizer is None else self.tokenizer.files

    @property
    def tokenizer_facts(self) -> dict[str, Any]:
        """What a resume must find again."""
        return {} if self.tokenizer is None else {"sha256": self.tokenizer.fingerprint, "eos": self.tokenizer.eos}


def _open_inputs(run: Run, folder: Path, reader: Reader | None, start: Start, layout: Layout) -> _Inputs:
    model, tokenizer = start.model, _tokenizer(run, folder, reader)
    check_split(run.data, run.eval.data)
    rows = _open(run.data, "data", run.seed, model, tokenizer, training=True)
    check_layout(model, layout, rows.describe().get("length", 1))
    # Held-out rows are packed in one way, so that held-out losses compare between seeds.
    norms = normalisers_of(rows)
    eval_rows = None
    if run.eval.data is not None:
        eval_rows = _open(run.eval.data, "eval.data", 0, model, tokenizer, norms, training=False)
    if tokenizer is not None:
        files = {**tokenizer.files, **files_beside(model, start.source, run.data, tokenizer)}
        tokenizer = attrs.evolve(tokenizer, files=files)
    return _Inputs(tokenizer=tokenizer, rows=rows, eval_rows=eval_rows)


def open_reading(run: Run, model: ModelConfig) -> tuple[Rows, Tokenizer | None]:
    """Returns the training rows and the tokenizer of a new run, for what reads as it does without training."""
    tokenizer = _tokenizer(run, Path(), None)
    return _open(run.data, "data", run.seed, model, tokenizer, training=False), tokenizer


def _meta(run: Run, inputs: _Inputs) -> dict[str, Any]:
    """Returns what every checkpoint of a run says besides its tensors, the tokens apart."""
    return {
        "model": to_json(run.model),
        "run": to_json(run),
        # What exports have: the Megatron path's are the weights that compute, the torch path's the main weights.
        "params": run.precision.params if megatron_part(run.parallel) else "float32",
        "averaged": run.optim.ema > 0 and run.save.averaged,
        "lora_scale": None if run.adapt is None else run.adapt.scale,
        "tokenizer": inputs.tokenizer_facts,
        "data": inputs.rows.describe(),
        "normalisers": inputs.normalisers,
        "acting": None if (acting := acting_of(inputs.rows)) is None else to_json(acting),
    }


def _check_alike(comm: Comm, mine: Mapping[str, Any]) -> None:
    """Raises CheckpointError on every rank unless all have the same run, tokenizer and data."""

    def compare(everyone: list[Mapping[str, Any]]) -> None:
        for rank, other in enumerate(everyone):
            for name, value in everyone[0].items():
                if other[name] != value:
                    raise CheckpointError(
                        f"rank {rank} has another {name} than rank 0:\n  {other[name]}\n  {value}\n"
                        "give every rank the same config, files and packages"
                    )

    together(comm, lambda: mine, compare, CheckpointError)


def _tokenizer(run: Run, folder: Path, reader: Reader | None) -> Tokenizer | None:
    kept = folder / TOKENIZER
    if reader is not None:
        if not reader.fact("tokenizer", dict):
            return None
        # The run goes on with the tokenizer that it began with, even if today another one would be trained.
        config: TokenizerConfig = HfTokenizer(path=str(kept))
    elif run.tokenizer is not None:
        config = run.tokenizer
    elif run.init:
        inside = Path(run.init).expanduser() / TOKENIZER
        # Robot policies are published without one, and data that needs one says so.
        if not any(inside.parent.glob("tokenizer*")):
            return None
        config = HfTokenizer(path=str(inside) if inside.is_dir() else run.init)
    else:
        return None
    return open_tokenizer(config, run.data, DataCtx(seed=run.seed, cache_dir=cache_dir()))


def _open(
    data: DataConfig,
    path: str,
    seed: int,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
    normalisers: Normalisers | None = None,
    *,
    training: bool,
) -> Rows:
    ctx = DataCtx(
        seed=seed,
        cache_dir=cache_dir(),
        tokenizer=tokenizer,
        prompt=functools.partial(prompt, model) if has_rule(prompt, model) else None,
        prompt_limit=prompt_limit(model),
        media=media_rules(model),
        path=path,
        normalisers=normalisers,
        training=training,
    )
    rows = open_data(data, ctx)
    if not len(rows):
        raise ValueError(f"{path} has no rows; give it samples")
    facts = dict(rows.describe())
    if tokenizer is not None:
        facts["vocab"] = max(facts.get("vocab", 0), tokenizer.vocab)
    names = robot_names(rows)
    try:
        check_model(model, facts)
        # What a model refuses in every row is found here, and not by the thread that fetches the first step.
        _check_row(model, rows.row(0, 0), f"{path} = {type_name(data)}")
    except ValueError as error:
        raise ValueError(f"{path} ({names}): {error}" if names else str(error)) from error
    return rows


def _check_row(model: ModelConfig, row: Row, where: str) -> None:
    try:
        collate(model, [row], row)
    except KeyError as error:
        raise ValueError(
            f"{where}: its rows have no {error}, which {type_name(model)} reads; give data of the model's kind"
        ) from error


def _engine(
    run: Run,
    start: Start,
    layout: Layout,
    device: Device,
    first: bool,
    say: Callable[[str], None],
) -> tuple[Engine, Layout]:
    """Returns the engine, with its first weights where the run is `first` begun."""
    dtype, model, published = getattr(torch, run.precision.params), start.model, start.published if first else None
    if (parallel := megatron_part(run.parallel)) is not None:
        from lf.parallel.megatron import make_context
        from lf.train.megatron_step import megatron_engine

        ctx = make_context(parallel, layout, device, dtype)
        return megatron_engine(run, model, ctx, published), ctx.layout
    from lf.train.fsdp_step import torch_engine

    layout = attrs.evolve(layout, dp_rank=dist.get_rank())
    adapter = None
    if first and run.adapt is not None and run.adapt.start:
        adapter = functools.partial(read_adapter, run.adapt, _table(start), run.seed)
    return torch_engine(run, model, Ctx(device=device, dtype=dtype, layout=layout), published, say, adapter), layout


def _table(start: Start) -> WeightMap:
    """Returns the weight table in the names of what the run started from."""
    names = [kept.name for kept in start.source.tensors] if start.source else []
    return fitted(weight_map(start.model), names)


def _save_adapter(
    run: Run, start: Start, state: TrainState, get: Callable[[str], Tensor], path: Path, *, write: bool
) -> None:
    assert run.adapt is not None
    (model,) = state.chunks
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    names = list(named_tensors(model))
    table, diffusers = _table(start), stem(start.model) == STEMS[1]
    save_adapter(path, run.adapt, table, names, trained, get, base=run.init, diffusers=diffusers, write=write)


def _restored(engine: Engine, reader: Reader, comm: Comm) -> Engine:
    engine.restore(engine.state, reader)
    check_all_read(reader, comm=comm)
    return attrs.evolve(engine, state=attrs.evolve(engine.state, step=reader.step, tokens=reader.fact("tokens", int)))
