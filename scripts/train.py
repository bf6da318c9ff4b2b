"""Trains the model of a config file. `python scripts/train.py --help` lists the flags."""

import os
import sys
from pathlib import Path

from lf.devices.detect import apply_env, detect, render_env
from lf.devices.kunlun import kunlun, kunlun_found

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
    if kunlun_found():
        apply_env(kunlun)  # The vendor's runtime reads it together with torch, which the config imports.
    from lf import config
    from lf.launch import parse, split_name

    try:
        launch, base, run = parse(argv, quiet=RANK != 0)
        device = detect(launch.device)
    except ValueError as error:
        return fail(error, 2)
    for path, old, new in config.diff(base, run):
        say(f"override {path}: {old} -> {new}")
    apply_env(device)
    say(f"device {device.name}\n{render_env(device.env)}".rstrip())

    from lf.train.loop import FAULTS, train
    from lf.train.run import open_job, process_group
    from lf.train.summary import summary

    with process_group(device) as comm:
        try:
            job = open_job(run, Path(launch.out), split_name(launch.cfg)[0], device, comm, say)
        except FAULTS as error:
            return fail(error, 2 if isinstance(error, ValueError) else 1)
        try:
            ended = train(job)
        except FAULTS as error:
            return fail(error, 1)
        if ended.signal:
            return 128 + ended.signal
        say(summary(job, ended))
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
