"""Trains the model of a config file. `python scripts/train.py --help` lists the flags."""

import os
import sys
import traceback
from pathlib import Path

from lf.devices.detect import apply_env, detect, early_env, render_env
from lf.terminal import prepare, say

RANK = int(os.environ.get("RANK", "0"))


def fail(error: Exception, code: int) -> int:
    """Prints an error, on every rank that has it, and returns the exit code."""
    print(f"rank {RANK}: error: {error}" if RANK else f"error: {error}", file=sys.stderr, flush=True)
    return code


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 error, 2 bad usage or config, 143, 130, 129 after SIGTERM, SIGINT, SIGHUP."""
    try:
        return train(argv)
    except KeyboardInterrupt:  # before the first step, or a second Ctrl-C
        return fail(RuntimeError("interrupted; what was saved before is whole"), 130)
    except (ValueError, OSError) as error:
        return fail(error, 2)


def train(argv: list[str]) -> int:
    """Trains, and returns the exit code; raises ValueError for bad usage or config."""
    early = early_env()
    from lf import config
    from lf.launch import parse

    launch, base, cfg = parse(argv, quiet=RANK != 0)
    device = detect(launch.device)
    for path, old, new in config.diff(base, cfg):
        say(f"override {path}: {config.brief(old)} -> {config.brief(new)}")
    say(f"device {device.name}\n{render_env((*early, *apply_env(device)))}".rstrip())
    from lf.train import comm, loop, run, summary

    job = None
    with comm.process_group(device) as group:
        try:
            job = run.open_job(cfg, Path(launch.out), config.loaded_files(), device, group, say)
            ended = loop.train(job)
            if not ended.signal:
                summary.close(job, ended)
            return 128 + ended.signal if ended.signal else 0
        except loop.FAULTS as error:  # Told here: once this rank has left the group, the others fail too.
            return fail(error, 2 if isinstance(error, ValueError) and job is None else 1)
        except Exception as error:
            gone = comm.lost(error)
            if gone:
                return fail(RuntimeError(gone), 1)
            traceback.print_exc()
            return 1


if __name__ == "__main__":
    prepare()
    sys.exit(main(sys.argv[1:]))
