"""The only training loop: data, step, evaluation, reports, checkpoints, signals. It never asks which path it is on."""

import contextlib
import functools
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
import torch.distributed as dist

from lf.data.loader import Fetched, eval_rows, prefetch, step_rows
from lf.data.source import Row, Rows
from lf.devices.device import Device
from lf.models.hf_folder import few
from lf.models.spec import Batch, Layout, ModelConfig, collate, flops
from lf.train import checkpoint
from lf.train.background import Background, check_memory, own_group, snapshot
from lf.train.comm import Comm, told
from lf.train.config import Run
from lf.train.even import dealer, exchanges, leave
from lf.train.folder import HF, check_room
from lf.train.meter import Timing, add_timing, eval_line, line, report_step, to_json
from lf.train.names import WEIGHT, key
from lf.train.profile import profile_window
from lf.train.sinks import Progress, Sinks
from lf.train.state import Engine, Metrics, TrainState
from lf.train.step import NonFiniteError, NothingToScoreError

T = TypeVar("T")

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
    evaluated: int
    """Last step that the run folder has a held-out loss of."""
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


@attrs.frozen(kw_only=True, eq=False)
class _Aside:
    """What happens beside the steps."""

    signals: Callable[[], int]
    """Returns the first signal that asks the run to end, 0 without one."""
    saving: Background
    """Where a checkpoint is written that does not hold the steps up."""
    comm: Comm
    """The exchange of the ranks' threads that write it."""
    dealing: Comm
    """The exchange of held-out rows."""


class _StoppedError(Exception):
    """All ranks stop at the same point: `signal` was caught by one of them, or 0 and `fault` is what went wrong."""

    def __init__(self, number: int, fault: Exception | None) -> None:
        super().__init__(number, fault)
        self.signal, self.fault = number, fault


_FAULT = 1000
"""What ranks agree on, in place of a signal's number, when one of them cannot go on."""


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], int]]:
    """Gives a function that returns the first SIGTERM, SIGINT or SIGHUP since the start, 0 without one.

    A second Ctrl-C interrupts at once: what was saved before stays whole. A SIGHUP that is ignored (nohup) stays so.
    """
    caught = 0

    def note(number: int, frame: object) -> None:
        nonlocal caught
        caught = caught or number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield lambda: caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _next(job: Job, source: Iterator[T], aside: _Aside) -> T | None:
    """Returns the next item on this rank, None after the last one.

    Every rank calls it at once. Raises _StoppedError on all of them when one has caught a signal or has no way on, be
    it that a checkpoint could not be written meanwhile.
    """
    item: T | None = None
    fault: Exception | None = None
    try:
        aside.saving.check()
        item = next(source, None)
    except Exception as error:
        fault = error
    flag = torch.tensor(_FAULT if fault else aside.signals(), device=job.device.torch_type)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if number := int(flag.item()):
        raise _StoppedError(number % _FAULT, fault)
    return item


def _collated(job: Job, groups: Sequence[Sequence[Row | None]], like: Row) -> list[Batch]:
    return [collate(job.model, group, like) for group in groups]


def _comm(job: Job, own: bool) -> contextlib.AbstractContextManager[Comm]:
    """Gives the exchange of the ranks, or one of a thread's own."""
    return own_group(job.comm) if own else contextlib.nullcontext(job.comm)


@attrs.frozen(kw_only=True, eq=False)
class _Made:
    """What a rank trains on at a step."""

    batches: list[Batch]
    """Its micro-batches."""
    idle: float | None
    """The share of the ranks' time that they wait for the slowest, as planned."""


@contextlib.contextmanager
def _ahead(job: Job) -> Iterator[Iterator[Fetched[_Made]]]:
    """Gives what this rank trains on at each step that is left, made in a thread ahead of it."""
    run, like = job.run, job.rows.row(0, 0)
    apart = exchanges(run, job.rows)
    with _comm(job, apart) as comm:
        deal = dealer(run, job.model, job.rows, job.layout, comm)

        def make(step: int) -> _Made:
            dealt = deal(step_rows(step, run.batch))
            return _Made(batches=_collated(job, dealt.micro, like), idle=dealt.idle)

        steps = range(job.engine.state.step + 1, run.steps + 1)
        with (
            prefetch(make, steps, leave=functools.partial(leave, comm), meets=apart) as read,
            _beside(job, read, steps, apart) as feed,
        ):
            yield feed


def _beside(
    job: Job, read: Iterator[Fetched[_Made]], steps: range, apart: bool
) -> contextlib.AbstractContextManager[Iterator[Fetched[_Made]]]:
    """Gives the steps of a feed with what the engine does ahead, of one step beside the one that runs."""
    ahead = job.engine.ahead
    if ahead is None:
        return contextlib.nullcontext(read)

    def make(step: int) -> _Made:
        made = next(read).value
        return attrs.evolve(made, batches=ahead(made.batches))

    # Where what is read waits for other ranks, so does this.
    return prefetch(make, steps, depth=1, meets=apart)


def train(job: Job) -> Ended:
    """Runs the steps that are left, saves and exports, and returns how it ended."""
    run, held_out = job.run, job.eval_rows
    with (
        job.lock,
        contextlib.closing(job.sinks),
        contextlib.closing(job.progress),
        _signals() as signals,
        profile_window(run.profile, job.folder, rank=job.comm.rank) as begin,
        _ahead(job) as feed,
        _comm(job, run.save.background) as comm,
        _comm(job, held_out is not None and exchanges(run, held_out)) as dealing,
        Background() as saving,
    ):
        ended = _steps(job, feed, begin, _Aside(signals=signals, saving=saving, comm=comm, dealing=dealing))
        if ended.signal:
            name = signal.Signals(ended.signal).name
            job.say(f"{name}: step {ended.state.step} of {run.steps} is saved; the same command goes on from there")
        else:
            job.export(ended.state, HF)
        return ended


def _steps(job: Job, feed: Iterator[Fetched[_Made]], begin: Callable[[int], None], aside: _Aside) -> Ended:
    run, state = job.run, job.engine.state
    saved = state.step or -1
    window: tuple[Timing, ...] | None = None
    loss: float | None = None
    try:
        if state.step:
            loss = _follow(job, state, aside, resumed=True)
        while (fetched := _next(job, feed, aside)) is not None:
            begin(fetched.step)
            started = time.perf_counter()
            state, metrics = job.engine.step(state, fetched.value.batches)
            if window is None:
                # Only now the optimiser has all its state.
                check_room(job.folder, job.engine.pieces(state), _saves_left(job, state), job.comm)
                if run.save.background:
                    check_memory(job.engine.pieces(state), job.comm)
            window = _report(job, state, metrics, window, fetched, time.perf_counter() - started)
            if state.step == run.steps or _due(state.step, run.save.every):
                _save(job, state, aside)
                saved = state.step
            loss = _follow(job, state, aside, resumed=False)
    except (_StoppedError, NonFiniteError, NothingToScoreError) as stop:
        # What was trained since the last checkpoint is good: all ranks are here, and nothing is half done.
        aside.saving.wait()
        if saved != state.step:
            _save(job, state, aside)
            aside.saving.wait()
        if isinstance(stop, NonFiniteError) and stop.line:
            job.sinks.write(stop.line)
        if not isinstance(stop, _StoppedError):
            raise
        if stop.signal:
            return Ended(state=state, signal=stop.signal, eval_loss=None)
        # Whichever rank prints first, it says what went wrong.
        faults = job.comm.gather(f"rank {job.comm.rank}: {told(stop.fault)}" if stop.fault else "")
        first = job.comm.broadcast(next(filter(None, faults)) if faults else "")
        raise stop.fault or checkpoint.CheckpointError(
            f"another rank could not go on after step {state.step}, which is saved; {first}"
        ) from None
    return Ended(state=state, signal=0, eval_loss=loss)


def _follow(job: Job, state: TrainState, aside: _Aside, *, resumed: bool) -> float | None:
    """Does what is due after a step when its checkpoint is whole; returns the held-out loss, None where none is due.

    A run that resumes makes up for what it was killed in, and repeats nothing but the closing evaluation.
    """
    run, step = job.run, state.step
    last, loss, again = step == run.steps, None, resumed and job.evaluated >= step
    evaluates, exports = last or (_due(step, run.eval.every) and not again), _due(step, run.save.export_every)
    if evaluates or exports:
        aside.saving.wait()
    if evaluates:
        loss = _evaluate(job, state, aside, write=not again)
    if exports and not last:
        name = f"{HF}_step_{step}"
        if not resumed or not job.comm.broadcast((job.folder / name).is_dir()):
            _check_weights(job, state)
            job.export(state, name)
    return loss


def _saves_left(job: Job, state: TrainState) -> int:
    """Returns how many more checkpoints will lie on the disk at once, this one included."""
    run, left = job.run, job.run.steps - state.step
    planned = left // run.save.every + 1 if run.save.every else 1
    there = job.comm.broadcast(len(checkpoint.complete(job.folder).found) if job.comm.rank == 0 else 0)
    return int(min(planned, max(1, run.save.keep + 1 - there)))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _report(
    job: Job,
    state: TrainState,
    metrics: Metrics,
    window: tuple[Timing, ...] | None,
    fetched: Fetched[_Made],
    seconds: float,
) -> tuple[Timing, ...]:
    run, length = job.run, job.rows.describe().get("length", 0)
    timing = Timing(
        seconds=seconds + fetched.wait,
        data_seconds=fetched.wait,
        tokens=metrics.tokens,
        flops=flops(job.model, run.batch, length) + metrics.media_flops if length else 0.0,
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
        idle=fetched.value.idle,
    )
    job.sinks.write(to_json(report))
    job.progress.update(state.step, f"loss {metrics.loss:.4f}")
    if state.step in (1, run.steps) or _due(state.step, run.log.every):
        job.say(line(report, run.steps))
    return window


def _evaluate(job: Job, state: TrainState, aside: _Aside, *, write: bool) -> float | None:
    """Returns the held-out loss, None without held-out data."""
    if job.eval_rows is None:
        return None
    like = job.eval_rows.row(0, 0)
    deal = dealer(job.run, job.model, job.eval_rows, job.layout, aside.dealing)
    wanted = eval_rows(job.eval_rows, job.run.batch, job.run.eval.batches)
    source = (_collated(job, deal(numbers).micro, like) for numbers in wanted)
    values = job.engine.evaluate(state, iter(lambda: _next(job, source, aside), None))
    loss = values.pop("loss")
    if write:
        job.sinks.write(eval_line(state.step, loss, values))
    job.say(f"step {state.step}/{job.run.steps}  held-out loss {loss:.4f}")
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"step {state.step}: the held-out loss is {loss}. Go on from an older checkpoint with a lower optim.lr, or "
            "look at the held-out data",
            {},
        )
    return loss


def _check_weights(job: Job, state: TrainState) -> None:
    """Raises NonFiniteError on every rank where the last update has left a weight that is not finite."""
    weights = (piece for piece in job.engine.pieces(state) if piece.name.startswith(key(WEIGHT, "")))
    rows = job.comm.gather({piece.name for piece in weights if not bool(torch.isfinite(piece.data).all())})
    bad = job.comm.broadcast(sorted(set().union(*rows)) if rows else [])
    if bad:
        raise NonFiniteError(
            f"step {state.step} has left {len(bad)} weights that are not finite ({few(bad)}), so it is not "
            "saved; lower optim.lr, or clip gradients, and give the command again",
            {},
        )


def _save(job: Job, state: TrainState, aside: _Aside) -> None:
    """Saves a state, or begins to with `save.background`: then the save before has ended, and the state may change."""
    _check_weights(job, state)
    save = job.run.save
    aside.saving.wait()
    pieces = snapshot(job.engine.pieces(state), job.comm) if save.background else job.engine.pieces(state)

    def write() -> None:
        meta = {**job.meta, "tokens": state.tokens}
        checkpoint.save(job.folder, state.step, pieces, meta, comm=aside.comm, reread=save.background)
        checkpoint.prune(job.folder, save.keep, comm=aside.comm)

    if save.background:
        aside.saving.start(write)
    else:
        write()
