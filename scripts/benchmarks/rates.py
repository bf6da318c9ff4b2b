"""What each kind of work takes: steps of a run's own rows are timed, and rates fitted to the times."""

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import attrs
from attrs.validators import ge

import lf
from lf import config
from lf.data.loader import read_rows
from lf.devices.detect import apply_env, detect, early_env
from lf.launch import split_name
from lf.models.spec import collate
from lf.models.work import added, row_work
from lf.plan.pipeline import round_size
from lf.plan.work import Rates, Work, fit, seconds
from lf.train.comm import process_group
from lf.train.loop import FAULTS, Job
from lf.train.run import open_job


@attrs.frozen(kw_only=True)
class RatesBench:
    """Times steps of a run, and prints the rates that explain the times: what `lf.Balance(rates=...)` takes.

    Steps have one, two or three micro-batches of the run's own rows, the same on all data parallel ranks. Start as many
    ranks as the layout needs, by torchrun. Nothing is kept of the run.
    """

    cfg: str
    """The config: FILE.py (its value `cfg`), FILE.py:NAME for another value, or the config.json of a run."""
    device: str = ""
    """Name of the device; empty takes the best one that is there."""
    steps: int = attrs.field(default=48, validator=ge(1))
    """Steps that are timed; three more come before."""
    json: bool = False
    """Print JSON in place of Python."""


def timed(job: Job, steps: int, clock: Callable[[], float] = time.perf_counter) -> tuple[list[Work], list[float]]:
    """Returns the work and the seconds of some steps; three come before, one of each number of micro-batches."""
    size, state, like = job.run.parallel.micro_batch, job.engine.state, job.rows.row(0, 0)
    rounds = round_size(job.layout.pp, job.layout.vpp)
    work: list[Work] = []
    times: list[float] = []
    at = 0
    for step in range(3 + steps):
        count = size * rounds * (1 + step % 3)
        rows = read_rows(job.rows, range(at, at + count))
        at += count
        batches = [collate(job.model, rows[i : i + size], like) for i in range(0, count, size)]
        started = clock()
        state, _ = job.engine.step(state, batches)
        job.device.synchronize()
        times.append(clock() - started)
        work.append(added({"steps": 1.0}, *(row_work(job.model, row).kinds for row in rows)))
    return work[3:], times[3:]


def explained(rates: Rates, work: list[Work], times: list[float]) -> float:
    """Returns the mean error of the times that rates make of some work, over the mean time."""
    return sum(abs(seconds(rates, one) - each) for one, each in zip(work, times, strict=True)) / sum(times)


def measure_rates(args: RatesBench) -> int:
    """Measures and prints, on rank 0; returns the exit code."""
    early_env()
    run = config.load(*split_name(args.cfg))
    if not isinstance(run, lf.Run):
        print(f"error: {args.cfg} is a {type(run).__name__}; give a Run", file=sys.stderr)
        return 2
    run = attrs.evolve(run, steps=max(run.steps, args.steps + 3), eval=lf.Eval(), log=lf.Log(), save=lf.Save())
    device = detect(args.device)
    apply_env(device)
    with process_group(device) as comm, tempfile.TemporaryDirectory() as folder:
        try:
            job = open_job(run, Path(comm.broadcast(folder)) / "run", (), device, comm, lambda text: None)
            with job.lock, contextlib.closing(job.sinks), contextlib.closing(job.progress):
                work, times = timed(job, args.steps)
            rates = fit([[one] for one in work], times)
        except FAULTS as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        off = explained(rates, work, times)
        if comm.rank == 0:
            known = {name: value for name, value in attrs.asdict(rates).items() if value}
            told = f"lf.Rates({', '.join(f'{name}={value:.4g}' for name, value in known.items())})"
            line = json.dumps({"rates": known, "off": off})
            print(line if args.json else f"{told}\ntimes are off by {100 * off:.1f}%")
    return 0
