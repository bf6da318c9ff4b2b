"""Trains the model of a config file. `python scripts/train.py --help` lists the flags."""

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from lf.devices.detect import apply_env, detect, early_env, render_env
from lf.terminal import prepare, say

if TYPE_CHECKING:
    from lf.devices.device import Device
    from lf.train.comm import Comm
    from lf.train.config import Run

RANK = int(os.environ.get("RANK", "0"))


def fail(error: Exception, code: int) -> int:
    """Prints an error, on every rank that has it, and returns the exit code."""
    print(f"rank {RANK}: error: {error}" if RANK else f"error: {error}", file=sys.stderr, flush=True)
    return code


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 error, 2 bad usage or config, 143 after SIGTERM, 130 after Ctrl-C."""
    try:
        return train(argv)
    except KeyboardInterrupt:  # before the first step, or a second Ctrl-C
        return fail(RuntimeError("interrupted; what was saved before is whole"), 130)


def train(argv: list[str]) -> int:
    """Trains, and returns the exit code."""
    early = early_env()
    from lf import config
    from lf.launch import parse

    try:
        launch, base, cfg = parse(argv, quiet=RANK != 0)
        device = detect(launch.device)
    except ValueError as error:
        return fail(error, 2)
    for path, old, new in config.diff(base, cfg):
        say(f"override {path}: {config.brief(old)} -> {config.brief(new)}")
    say(f"device {device.name}\n{render_env((*early, *apply_env(device)))}".rstrip())

    from lf.train.comm import process_group

    try:
        with process_group(device) as comm:
            return run(cfg, Path(launch.out), device, comm)
    except (ValueError, OSError) as error:
        return fail(error, 2 if isinstance(error, ValueError) else 1)


def run(cfg: "Run", out: Path, device: "Device", comm: "Comm") -> int:
    """Runs a job between ranks that are connected, and returns the exit code.

    What goes wrong is printed here: once this rank has left, the others fail too, and their messages come second.
    """
    from lf.config import loaded_files
    from lf.train import loop
    from lf.train.run import open_job
    from lf.train.summary import close

    job = None
    try:
        job = open_job(cfg, out, loaded_files(), device, comm, say)
        ended = loop.train(job)
        if not ended.signal:
            close(job, ended)
        return 128 + ended.signal if ended.signal else 0
    except loop.FAULTS as error:
        return fail(error, 2 if isinstance(error, ValueError) and job is None else 1)
    except Exception:
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    prepare()
    sys.exit(main(sys.argv[1:]))
