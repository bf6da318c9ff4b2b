"""The run folder: its names, who holds it, which run it holds, and how it is made whole or not at all."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from lf.config import from_json, read_text, resume_changes, to_json
from lf.data.hf_tokenizer import Tokenizer
from lf.models.hf_save import Source, store_source
from lf.storage import locked
from lf.train.comm import Comm, together
from lf.train.config import Run
from lf.train.manifest import CheckpointError
from lf.train.names import WEIGHT, key
from lf.train.reader import Reader
from lf.train.shards import Piece

CONFIG = "config.json"
"""The run."""
METRICS = "metrics.jsonl"
"""One line a step."""
TOKENIZER = "tokenizer"
"""Folder of the tokenizer's files."""
SOURCE = "source"
"""Folder of what is remembered of an imported Hugging Face folder."""
HF = "hf"
"""The export at the end."""
ADAPTER = "adapter"
"""The adapters at the end, where a run trains some."""
ACTING = "acting.json"
"""What acting needs to know of the robot, in an export (`lf.data.acting`)."""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the run folder, which the system gives back when the process dies; one process may train in it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder.with_name(f".{folder.name}.lock"), wait=False))
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is training in {folder}; wait until it has ended, or choose another --out"
            ) from error
        yield


def check_place(folder: Path) -> None:
    """Raises ValueError unless the folder is new, empty or a run folder."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose another --out")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is no run folder: it has files but no {CONFIG}; choose another --out")


def check_same_run(run: Run, folder: Path, reader: Reader | None, say: Callable[[str], None]) -> None:
    """Raises ValueError unless the folder is new or holds this run, up to what a resume may change.

    The run of a checkpoint is the one that made it, whatever has become of the folder's config.json since.
    """
    saved = folder / CONFIG
    if reader is not None:
        old = from_json(reader.fact("run", str), source=str(reader.path), kind=Run)
        if run.steps < reader.step:
            raise ValueError(
                f"steps = {run.steps}, but {reader.path} has done {reader.step}; set steps to at least that, or choose "
                "another --out"
            )
    elif saved.is_file() and _begun(folder):
        old = from_json(read_text(saved), source=str(saved), kind=Run)
    else:
        return
    allowed, refused = resume_changes(old, _as_saved(run, old))
    if refused:
        lines = "\n".join(f"  {path}: {was} -> {now}" for path, was, now in refused)
        raise ValueError(
            f"{folder} holds a run with another config, and a resume may not change\n{lines}\n"
            "choose another --out, or train with the config that is there"
        )
    for path, was, now in allowed:
        say(f"resume changes {path}: {was} -> {now}")


def _begun(folder: Path) -> bool:
    """Returns whether the run of a folder has done a step: one that has not holds nothing that another could lose."""
    metrics = folder / METRICS
    return metrics.is_file() and metrics.stat().st_size > 0


def check_same_data(reader: Reader, now: Mapping[str, Any]) -> None:
    """Raises CheckpointError where the data or the tokenizer are no longer those that a checkpoint was trained on."""
    for name, cure in (
        ("tokenizer", f"put the files of {reader.path.parent.parent / TOKENIZER} back as they were"),
        ("data", "put the files back as they were"),
    ):
        was = reader.fact(name, dict)
        if was != now[name]:
            raise CheckpointError(
                f"the {name} of the run has changed since {reader.path} was saved:\n  {was}\n  {now[name]}\n{cure}, or "
                "choose another --out (with --init to keep the weights)"
            )


def check_room(folder: Path, pieces: Iterable[Piece], saves: int, comm: Comm) -> None:
    """Raises CheckpointError on every rank unless the disk has room for some more checkpoints and an export.

    `pieces` are those of a checkpoint on this rank.
    """

    def count() -> int:
        sizes = [(piece.data.nbytes, piece.name.startswith(key(WEIGHT, ""))) for piece in pieces]
        return sum(size * (saves + exported) for size, exported in sizes)

    def check(sizes: list[int]) -> None:
        place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        needed, free = sum(sizes), shutil.disk_usage(place).free
        if free < needed:
            raise CheckpointError(
                f"{saves} more checkpoint{'s' if saves > 1 else ''} and an export need {needed} bytes or more, and the "
                f"disk of {place} has {free} free; free some space, keep fewer (save.keep), or choose another --out"
            )

    together(comm, count, check, CheckpointError)


def _as_saved(run: Run, old: Run) -> Run:
    """Returns the run with its model filled in: one that takes it from `init` has saved the one that it found there."""
    return attrs.evolve(run, model=old.model) if run.init and run.model is None else run


def make(run: Run, folder: Path, files: Sequence[Path], source: Source | None, tokenizer: Tokenizer | None) -> None:
    """Makes the run folder of a run without checkpoints; a run that is killed meanwhile starts again.

    `files` are the config files that were executed. A folder that is new appears whole; in one that holds this run,
    each part is replaced. Nothing else in it is touched.
    """
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
    for file in files:
        shutil.copyfile(file, part / file.name)
    (part / CONFIG).write_text(to_json(run), encoding="utf-8")
    if not (folder / CONFIG).is_file():
        if folder.is_dir():
            folder.rmdir()
        part.rename(folder)
        return
    for entry in part.iterdir():
        target = folder / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        entry.replace(target)
    part.rmdir()


def update(run: Run, folder: Path, files: Sequence[Path]) -> None:
    """Writes what a resume may have changed: config.json, and the copies of the config files."""
    contents = {CONFIG: to_json(run).encode(), **{file.name: file.read_bytes() for file in files}}
    for name, content in contents.items():
        target = folder / name
        if not target.is_file() or target.read_bytes() != content:
            part = folder / f".{name}.part"
            part.write_bytes(content)
            os.replace(part, target)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes files by name into a folder, which is made where it is not there."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
