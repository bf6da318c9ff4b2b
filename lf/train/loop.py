"""The only training loop: data, step, evaluation, reports, checkpoints, signals. It never asks which path it is on."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from lf.data.loader import Fetched, eval_batches, micro_batches, prefetch
from lf.data.source import Row, Rows
from lf.devices.device import Device
from lf.models.spec import Batch, Layout, ModelConfig, collate, flops
from lf.train import checkpoint
from lf.train.comm import Comm
from lf.train.config import Run
from lf.train.meter import Timing, add_timing, eval_line, line, report_step, to_json
from lf.train.profile import profile_window
from lf.train.sinks import Progress, Sinks
from lf.train.state import Engine, Metrics, TrainState
from lf.train.step import NonFiniteError

FAULTS = (ValueError, NotImplementedError, OSError, checkpoint.CheckpointError, NonFiniteError)
"""What can go wrong with a run through no fault of lf: the message says what, and no traceback is needed."""


@attrs.frozen(kw_only=True, eq=False)
class Job:
    """Everything a run needs on this rank, opened and checked."""

    run: Run
    """The run."""
    model: ModelConfig
    """The model, resolved."""
    folder: Path
    """The run folder."""
    engine: Engine
    """The train path."""
    rows: Rows
    """Training data."""
    eval_rows: Rows | None
    """Held-out data."""
    layout: Layout
    """Degrees of parallelism, and this rank's place."""
    device: Device
    """The device."""
    comm: Comm
    """How the ranks exchange small objects."""
    sinks: Sinks
    """Where the lines of the run go."""
    progress: Progress
    """The bar on the terminal."""
    say: Callable[[str], None]
    """Prints a line, on rank 0."""
    meta: dict[str, Any]
    """What every checkpoint says besides its tensors."""
    lock: contextlib.ExitStack
    """Holds the run folder until it is closed."""
    export: Callable[[TrainState, str], None]
    """Writes a Hugging Face folder of that name into the run folder; every rank calls it."""


@attrs.frozen(kw_only=True, eq=False)
class Ended:
    """How a run ended."""

    state: TrainState
    """The last state."""
    signal: int
    """The signal that ended it, 0 when it is done."""
    eval_loss: float | None
    """The last held-out loss."""


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Gives a function that returns the first SIGTERM or SIGINT since the start, 0 without one.

    A second Ctrl-C interrupts at once: what was saved before stays whole.
    """
    caught = 0

    def note(number: int, frame: object) -> None:
        nonlocal caught
        caught = caught or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _agreed(number: int, device: str) -> int:
    """Returns the largest signal that any rank has caught, so that all stop after the same step."""
    flag = torch.tensor(number, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return int(flag.item())


def _collated(job: Job, groups: Sequence[Sequence[Row | None]], like: Row) -> list[Batch]:
    return [collate(job.model, group, like) for group in groups]


def _share(job: Job) -> dict[str, int]:
    return {
        "batch": job.run.batch,
        "micro_batch": job.run.parallel.micro_batch,
        "dp": job.layout.dp,
        "dp_rank": job.layout.dp_rank,
        # The interleaved schedule takes micro-batches in rounds of one for each stage.
        "rounds": job.layout.pp if job.layout.vpp > 1 else 1,
    }


def train(job: Job) -> Ended:
    """Runs the steps that are left, saves and exports, and returns how it ended."""
    run, like = job.run, job.rows.row(0, 0)

    def make(step: int) -> list[Batch]:
        return _collated(job, micro_batches(job.rows, step=step, **_share(job)), like)

    with (
        job.lock,
        contextlib.closing(job.sinks),
        contextlib.closing(job.progress),
        _signals() as signals,
        profile_window(run.profile, job.folder, rank=job.comm.rank) as begin,
        prefetch(make, range(job.engine.state.step + 1, run.steps + 1)) as feed,
    ):
        ended = _steps(job, feed, begin, signals)
        if ended.signal:
            name = signal.Signals(ended.signal).name
            job.say(f"{name}: step {ended.state.step} of {run.steps} is saved; the same command goes on from there")
        else:
            job.export(ended.state, "hf")
        return ended


def _steps(
    job: Job, feed: Iterator[Fetched[list[Batch]]], begin: Callable[[int], None], signals: Callable[[], int]
) -> Ended:
    run, state = job.run, job.engine.state
    window: tuple[Timing, ...] | None = None
    loss: float | None = None
    for fetched in feed:
        begin(fetched.step)
        started = time.perf_counter()
        state, metrics = job.engine.step(state, fetched.value)
        window = _report(job, state, metrics, window, fetched, time.perf_counter() - started)
        last = state.step == run.steps
        if last or _due(state.step, run.eval.every):
            loss = _evaluate(job, state, write=True)
        caught = _agreed(signals(), job.device.torch_type)
        if last or caught or _due(state.step, run.save.every):
            _save(job, state)
        if _due(state.step, run.save.export_every) and not last:
            job.export(state, f"hf_step_{state.step}")
        if caught:
            return Ended(state=state, signal=caught, eval_loss=loss)
    if window is None:
        loss = _evaluate(job, state, write=False)
    return Ended(state=state, signal=0, eval_loss=loss)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _report(
    job: Job,
    state: TrainState,
    metrics: Metrics,
    window: tuple[Timing, ...] | None,
    fetched: Fetched[list[Batch]],
    seconds: float,
) -> tuple[Timing, ...]:
    run, length = job.run, job.rows.describe().get("length", 0)
    timing = Timing(
        seconds=seconds + fetched.wait,
        data_seconds=fetched.wait,
        tokens=metrics.tokens,
        flops=flops(job.model, run.batch, length) if length else 0.0,
    )
    window = add_timing(window, timing)
    report = report_step(
        window,
        timing,
        step=state.step,
        steps=run.steps,
        loss=metrics.loss,
        terms=metrics.terms,
        grad_norm=metrics.grad_norm,
        lr=metrics.lr,
        tokens=state.tokens,
        devices=job.comm.world,
        peak=job.device.peak(run.precision.params),
        memory=job.device.memory(),
    )
    job.sinks.write(to_json(report))
    job.progress.update(state.step, f"loss {metrics.loss:.4f}")
    if state.step in (1, run.steps) or _due(state.step, run.log.every):
        job.say(line(report, run.steps))
    return window


def _evaluate(job: Job, state: TrainState, *, write: bool) -> float | None:
    """Returns the held-out loss, None without held-out data; a run that had ended before writes no second line."""
    if job.eval_rows is None:
        return None
    like = job.eval_rows.row(0, 0)
    batches = eval_batches(job.eval_rows, batches=job.run.eval.batches, **_share(job))
    values = job.engine.evaluate(state, (_collated(job, rows, like) for rows in batches))
    loss = values.pop("loss")
    if write:
        job.sinks.write(eval_line(state.step, loss, values))
    job.say(f"step {state.step}/{job.run.steps}  held-out loss {loss:.4f}")
    return loss


def _save(job: Job, state: TrainState) -> None:
    checkpoint.save(
        job.folder,
        state.step,
        job.engine.pieces(state),
        {**job.meta, "tokens": state.tokens},
        comm=job.comm,
    )
    checkpoint.prune(job.folder, job.run.save.keep, comm=job.comm)
