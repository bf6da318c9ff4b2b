"""Trains the model of a config file. `python scripts/train.py --help` lists the flags."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lf.devices.detect import apply_env, detect, early_env, render_env

if TYPE_CHECKING:
    from lf.train.loop import Ended, Job

RANK = int(os.environ.get("RANK", "0"))


def say(text: str) -> None:
    """Prints a line on rank 0."""
    if RANK == 0:
        print(text, flush=True)


def fail(error: Exception, code: int) -> int:
    """Prints an error, on every rank that has it, and returns the exit code."""
    print(f"rank {RANK}: error: {error}" if RANK else f"error: {error}", file=sys.stderr, flush=True)
    return code


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 error, 2 bad usage or config, 143 after SIGTERM, 130 after Ctrl-C."""
    early = early_env()
    from lf import config
    from lf.launch import parse, split_name

    try:
        launch, base, run = parse(argv, quiet=RANK != 0)
        device = detect(launch.device)
    except ValueError as error:
        return fail(error, 2)
    for path, old, new in config.diff(base, run):
        say(f"override {path}: {old} -> {new}")
    say(f"device {device.name}\n{render_env((*early, *apply_env(device)))}".rstrip())

    from lf.train.loop import FAULTS, train
    from lf.train.run import open_job, process_group

    opened = False
    try:
        with process_group(device) as comm:
            job = open_job(run, Path(launch.out), split_name(launch.cfg)[0], device, comm, say)
            opened = True
            ended = train(job)
            return 128 + ended.signal if ended.signal else close(job, ended)
    except FAULTS as error:
        return fail(error, 2 if isinstance(error, ValueError) and not opened else 1)


def close(job: "Job", ended: "Ended") -> int:
    """Says and draws on rank 0 what a finished run has come to."""
    from lf.train.plot import plot_runs
    from lf.train.summary import summary

    if RANK == 0:
        say(summary(job, ended))
        try:
            plot_runs([job.folder], job.folder / "loss.png")
        except ValueError as error:
            say(f"no loss.png: {error}")
        say(f"run folder {job.folder}: metrics.jsonl, checkpoints/, hf/, loss.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
