"""Where the lines of a run go: `metrics.jsonl` always, TensorBoard and Weights & Biases on request; and a bar."""

import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

from lf.train.config import Log


@attrs.frozen(kw_only=True)
class Sinks:
    """What takes the lines of a run."""

    write: Callable[[Mapping[str, Any]], None]
    """Takes one line: a flat dict with `step`, and None for what is unknown."""
    close: Callable[[], None]
    """Writes what is pending and closes."""


@attrs.frozen(kw_only=True)
class Progress:
    """A bar on the terminal, or nothing where there is no terminal."""

    update: Callable[[int, str], None]
    """Shows the number of finished steps and a short note."""
    close: Callable[[], None]
    """Takes the bar away."""


def cut_lines(path: Path, step: int) -> None:
    """Removes from a metrics file the lines beyond a step and a torn last line; atomic, and nothing is done to no file.

    Raises ValueError, with file and line number, for a broken line elsewhere.
    """
    if not path.exists():
        return
    lines = path.read_bytes().splitlines()
    kept: list[bytes] = []
    for number, text in enumerate(lines, 1):
        try:
            keep = json.loads(text)["step"] <= step
        except (ValueError, KeyError, TypeError, RecursionError):
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number} is not a line of metrics; repair or remove it, then resume") from None
        if keep:
            kept.append(text)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(b"".join(text + b"\n" for text in kept))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def last_evaluation(path: Path) -> int:
    """Returns the last step that a metrics file has an evaluation of, 0 without one."""
    lines = [json.loads(text) for text in path.read_bytes().splitlines()] if path.exists() else []
    return max((line["step"] for line in lines if "eval_loss" in line), default=0)


def _jsonl(path: Path, step: int) -> Sinks:
    cut_lines(path, step)
    file = path.open("a", encoding="utf-8")

    def write(record: Mapping[str, Any]) -> None:
        try:
            file.write(json.dumps(dict(record), allow_nan=False) + "\n")
            file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error

    return Sinks(write=write, close=file.close)


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in record.items() if key != "step" and isinstance(value, int | float)}


def _tensorboard(folder: Path, step: int) -> Sinks:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(record: Mapping[str, Any]) -> None:
        for key, value in _numbers(record).items():
            writer.add_scalar(key, value, record["step"])

    return Sinks(write=write, close=writer.close)


def _wandb(folder: Path, project: str, config: Mapping[str, Any]) -> Sinks:
    import wandb

    name = folder / "wandb_id"
    if not name.exists():
        name.write_text(uuid.uuid4().hex)
    run = wandb.init(
        project=project, name=folder.name, id=name.read_text(), dir=str(folder), config=dict(config), resume="allow"
    )

    def write(record: Mapping[str, Any]) -> None:
        run.log(_numbers(record), step=record["step"])

    return Sinks(write=write, close=run.finish)


def check_sinks(log: Log) -> None:
    """Raises ValueError where the package of a sink is missing."""
    for wanted, setting, package in (
        (log.tensorboard, "log.tensorboard = True", "tensorboard"),
        (log.wandb, f"log.wandb = {log.wandb!r}", "wandb"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            raise ValueError(f"{setting} needs the package {package}, which is not installed; pip install 'lf[log]'")


def open_sinks(folder: Path, log: Log, *, rank: int, step: int, config: Mapping[str, Any]) -> Sinks:
    """Returns the sinks of a run folder, ready to go on after `step` (0 for a new run); only rank 0 writes.

    `config` is the run as JSON, shown beside the curves of Weights & Biases. `check_sinks` comes first.
    """
    if rank != 0:
        return Sinks(write=lambda record: None, close=lambda: None)
    folder.mkdir(parents=True, exist_ok=True)
    sinks = [_jsonl(folder / "metrics.jsonl", step)]
    if log.tensorboard:
        sinks.append(_tensorboard(folder, step))
    if log.wandb:
        sinks.append(_wandb(folder, log.wandb, config))

    def write(record: Mapping[str, Any]) -> None:
        for sink in sinks:
            sink.write(record)

    def close() -> None:
        for sink in sinks:
            sink.close()

    return Sinks(write=write, close=close)


def open_progress(steps: int, step: int, *, rank: int) -> Progress:
    """Returns a bar over the steps on standard error where that is a terminal, from rank 0; else one that does nothing.

    Lines printed while it stands appear above it.
    """
    if rank != 0 or not sys.stderr.isatty():
        return Progress(update=lambda step, note: None, close=lambda: None)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        refresh_per_second=2,
        transient=True,
        redirect_stdout=sys.stdout.isatty(),  # A file or pipe gets its lines as they are.
    )
    task = bar.add_task("", total=steps, completed=step)
    bar.start()
    return Progress(update=lambda step, note: bar.update(task, completed=step, description=note), close=bar.stop)
