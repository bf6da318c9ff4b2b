"""Trains the model of a config file. `python scripts/train.py --help` lists the flags."""

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lf.devices.detect import apply_env, detect, early_env, render_env

if TYPE_CHECKING:
    from lf.train.loop import Ended, Job

RANK = int(os.environ.get("RANK", "0"))


def say(text: str) -> None:
    """Prints a line on rank 0; nobody may be reading any more, which is no reason to stop a run."""
    if RANK == 0:
        try:
            print(text, flush=True)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def fail(error: Exception, code: int) -> int:
    """Prints an error, on every rank that has it, and returns the exit code."""
    print(f"rank {RANK}: error: {error}" if RANK else f"error: {error}", file=sys.stderr, flush=True)
    return code


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 error, 2 bad usage or config, 143 after SIGTERM, 130 after Ctrl-C."""
    try:
        return run(argv)
    except KeyboardInterrupt:  # before the first step, or a second Ctrl-C
        return fail(RuntimeError("interrupted; what was saved before is whole"), 130)


def run(argv: list[str]) -> int:
    """Trains, and returns the exit code."""
    early = early_env()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # A terminal may know fewer letters than the texts have.
    from lf import config
    from lf.launch import parse

    try:
        launch, base, cfg = parse(argv, quiet=RANK != 0)
        device = detect(launch.device)
    except ValueError as error:
        return fail(error, 2)
    for path, old, new in config.diff(base, cfg):
        say(f"override {path}: {old} -> {new}")
    say(f"device {device.name}\n{render_env((*early, *apply_env(device)))}".rstrip())

    from lf.train.loop import FAULTS, train
    from lf.train.run import open_job, process_group

    opened = False
    try:
        with process_group(device) as comm:
            job = open_job(cfg, Path(launch.out), config.loaded_files(), device, comm, say)
            opened = True
            ended = train(job)
            return 128 + ended.signal if ended.signal else close(job, ended)
    except FAULTS as error:
        return fail(error, 2 if isinstance(error, ValueError) and not opened else 1)


def close(job: "Job", ended: "Ended") -> int:
    """Says and draws on rank 0 what a finished run has come to."""
    from lf.train.plot import plot_runs
    from lf.train.summary import summary

    if RANK:
        return 0
    done = ["metrics.jsonl", "checkpoints/", "hf/"]
    # The run is done and saved: what is shown of it can fail without making it a failure.
    try:
        say(summary(job, ended))
    except (ValueError, OSError, RuntimeError) as error:
        say(f"no summary: {error}")
    try:
        plot_runs([job.folder], job.folder / "loss.png")
        done.append("loss.png")
    except (ValueError, OSError, RuntimeError) as error:
        say(f"no loss.png: {error}")
    say(f"run folder {job.folder}: {', '.join(done)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
