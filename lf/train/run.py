"""From a config to a job: everything that can be wrong with a run is found here, before its first step."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs
import torch
import torch.distributed as dist

from lf.config import from_json, read_text, resume_changes, to_json
from lf.data.config import DataConfig, HfTokenizer, TokenizerConfig
from lf.data.hf_tokenizer import Tokenizer
from lf.data.source import DataCtx, Rows, open_data
from lf.data.split import check_split
from lf.data.tokenizer import open_tokenizer
from lf.devices.detect import require
from lf.devices.device import Device
from lf.models.hf_save import Source, store_source
from lf.models.spec import Ctx, Layout, ModelConfig, check_layout, check_model, hf_config, paths, type_name, weight_map
from lf.parallel.config import MegatronParallel, resolve
from lf.train.checkpoint import CheckpointError, check_all_read, distributed, open_latest
from lf.train.comm import Comm, together
from lf.train.config import Run
from lf.train.loop import Job
from lf.train.reader import Reader
from lf.train.schedule import check_schedule
from lf.train.sinks import open_progress, open_sinks
from lf.train.start import SOURCE, export, from_checkpoint, open_start
from lf.train.state import Engine, Published, TrainState

TOKENIZER = "tokenizer"
"""Folder, in a run folder, of the tokenizer's files."""


@contextlib.contextmanager
def process_group(device: Device) -> Iterator[Comm]:
    """Brings torch.distributed up, from torchrun's environment or for one process, and gives the ranks' exchange."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device.set_local_rank(int(os.environ.get("LOCAL_RANK", "0")))
    # Small objects go through the host, so an accelerator's group has gloo for CPU tensors beside its own backend.
    backend = "gloo" if device.backend == "gloo" else f"cpu:gloo,{device.torch_type}:{device.backend}"
    if world > 1:
        # Ranks wait for each other while rank 0 writes an export or a checkpoint is hashed.
        dist.init_process_group(backend, timeout=datetime.timedelta(hours=2))
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield distributed()
    finally:
        dist.destroy_process_group()


def cache_dir() -> Path:
    """Returns the folder of what is built once and kept for every run: token ids and tokenizers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lf"


def check_run(run: Run, model: ModelConfig, device: Device, world: int) -> Layout:
    """Returns the layout of a run; raises ValueError for what cannot work, with the cure.

    Raises NotImplementedError for a model that could not be exported at the end.
    """
    weight_map(model)
    hf_config(model)
    path = "megatron" if isinstance(run.parallel, MegatronParallel) else "torch"
    if path not in paths(model):
        known = {"megatron": "MegatronParallel", "torch": "TorchParallel"}
        cure = " or ".join(f"lf.{known[name]}(...)" for name in paths(model))
        raise ValueError(
            f"parallel = {type(run.parallel).__name__}: {type_name(model)} does not train there; set parallel to {cure}"
        )
    if run.precision.params == "bfloat16":
        if path == "torch":
            raise ValueError(
                "precision.params = 'bfloat16' needs float32 main weights, which the torch path does not keep yet; "
                "set precision.params to float32"
            )
        require(device, "bf16", "precision.params", "set precision.params to float32")
    check_schedule(run.optim.schedule, run.steps)
    return resolve(run.parallel, world)


def open_job(run: Run, folder: Path, config_file: Path, device: Device, comm: Comm, say: Callable[[str], None]) -> Job:
    """Returns the job of a run on this rank, at the step that its folder has reached.

    Raises ValueError for what is wrong with the run or its data, CheckpointError for what is wrong with its folder.
    """
    lock = contextlib.ExitStack()
    if folder.is_dir():
        _on_first(comm, lambda: lock.enter_context(_locked(folder)))
    _check_folder(run, folder, say)
    opened = open_latest(folder, comm=comm)
    for skipped in opened.skipped:
        say(f"skipped {skipped.path}: {skipped.reason}")
    if opened.reader is None:
        start = open_start(run.init, run.model)
    else:
        start = attrs.evolve(from_checkpoint(folder, opened.reader), published=None)
    layout = check_run(run, start.model, device, comm.world)
    tokenizer = _tokenizer(run, folder, resumed=opened.reader is not None)
    check_split(run.data, run.eval.data)
    rows = _open(run.data, "data", run.seed, start.model, tokenizer)
    check_layout(start.model, layout, rows.describe().get("length", 1))
    # Held-out rows are packed in one way, so that held-out losses compare between seeds.
    held_out = None if run.eval.data is None else _open(run.eval.data, "eval.data", 0, start.model, tokenizer)
    engine, layout = _engine(run, start.model, layout, device, start.published)
    if opened.reader is not None:
        engine = _restored(engine, opened.reader, comm)
        say(f"resumed from {opened.reader.path}")
    else:
        whole = attrs.evolve(run, model=start.model)

        def make_folder() -> None:
            lock.enter_context(_locked(folder))
            _write_folder(whole, folder, config_file, start.source, tokenizer)

        lock.close()
        _on_first(comm, make_folder)
    files, eos = ({}, None) if tokenizer is None else (tokenizer.files, tokenizer.eos)

    def save_hf(state: TrainState, name: str) -> None:
        weights, write = engine.weights(state), comm.rank == 0
        export(start.model, weights, folder / name, source=start.source, files=files, eos=eos, write=write)

    return Job(
        run=run,
        model=start.model,
        folder=folder,
        engine=engine,
        rows=rows,
        eval_rows=held_out,
        layout=layout,
        device=device,
        comm=comm,
        sinks=open_sinks(folder, run.log, rank=comm.rank, step=engine.state.step, config={"run": to_json(run)}),
        progress=open_progress(run.steps, engine.state.step, rank=comm.rank),
        say=say,
        meta={"model": to_json(start.model)},
        export=save_hf,
        lock=lock,
    )


def _on_first(comm: Comm, work: Callable[[], None]) -> None:
    """Calls `work` on rank 0; where it fails, every rank raises the same error instead of waiting for it."""
    together(comm, lambda: None, lambda _: work(), CheckpointError)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the run folder, which the system gives back when the process dies; one process may train in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is training in {folder}; wait until it has ended, or choose another --out"
            ) from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # A disk without locks.
                raise
        yield


def _check_folder(run: Run, folder: Path, say: Callable[[str], None]) -> None:
    """Raises ValueError unless the folder is new or holds this run, up to what a resume may change."""
    saved = folder / "config.json"
    if not saved.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} is no run folder: it has files but no config.json; choose another --out")
        return
    old = from_json(read_text(saved), source=str(saved), kind=Run)
    # A run that takes its model from `init` has saved the one that it found there.
    wanted = attrs.evolve(run, model=old.model) if run.init and run.model is None else run
    allowed, refused = resume_changes(old, wanted)
    if refused:
        lines = "\n".join(f"  {path}: {was} -> {now}" for path, was, now in refused)
        raise ValueError(
            f"{folder} holds a run with another config, and a resume may not change\n{lines}\n"
            "choose another --out, or train with the config that is there"
        )
    for path, was, now in allowed:
        say(f"resume changes {path}: {was} -> {now}")


def _tokenizer(run: Run, folder: Path, *, resumed: bool) -> Tokenizer | None:
    kept = folder / TOKENIZER
    if resumed and kept.is_dir():
        config: TokenizerConfig = HfTokenizer(path=str(kept))
    elif run.tokenizer is not None:
        config = run.tokenizer
    elif run.init:
        inside = Path(run.init).expanduser() / TOKENIZER
        config = HfTokenizer(path=str(inside) if inside.is_dir() else run.init)
    else:
        return None
    return open_tokenizer(config, run.data, DataCtx(seed=run.seed, cache_dir=cache_dir()))


def _open(data: DataConfig, path: str, seed: int, model: ModelConfig, tokenizer: Tokenizer | None) -> Rows:
    rows = open_data(data, DataCtx(seed=seed, cache_dir=cache_dir(), tokenizer=tokenizer, path=path))
    facts = dict(rows.describe())
    if tokenizer is not None:
        facts["vocab"] = max(facts.get("vocab", 0), tokenizer.vocab)
    check_model(model, facts)
    return rows


def _engine(
    run: Run, model: ModelConfig, layout: Layout, device: Device, published: Published | None
) -> tuple[Engine, Layout]:
    dtype = getattr(torch, run.precision.params)
    if isinstance(run.parallel, MegatronParallel):
        from lf.parallel.megatron import make_context
        from lf.train.megatron_step import megatron_engine

        ctx = make_context(run.parallel, layout, device, dtype)
        return megatron_engine(run, model, ctx, published), ctx.layout
    from lf.train.fsdp_step import torch_engine

    layout = attrs.evolve(layout, dp_rank=dist.get_rank())
    return torch_engine(run, model, Ctx(device=device, dtype=dtype, layout=layout), published), layout


def _restored(engine: Engine, reader: Reader, comm: Comm) -> Engine:
    engine.restore(engine.state, reader)
    check_all_read(reader, comm=comm)
    return attrs.evolve(engine, state=attrs.evolve(engine.state, step=reader.step, tokens=reader.meta["tokens"]))


def _write_folder(
    run: Run, folder: Path, config_file: Path, source: Source | None, tokenizer: Tokenizer | None
) -> None:
    """Makes the run folder, whole or not at all: a run that is killed meanwhile starts again with the same command."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    if source is not None:
        store_source(source, part / SOURCE)
    if tokenizer is not None:
        # Some published tokenizers say what ends a text in the model's config.json alone.
        eos = json.dumps({"eos_token_id": tokenizer.eos}).encode()
        write_files(part / TOKENIZER, {**tokenizer.files, "config.json": eos})
    if config_file.suffix == ".py":
        shutil.copyfile(config_file, part / config_file.name)
    (part / "config.json").write_text(to_json(run))
    if folder.is_dir():
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # Of a run that saved nothing: an empty folder.
        folder.rmdir()
    part.rename(folder)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files by name into a folder, which is made where it is not there."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
