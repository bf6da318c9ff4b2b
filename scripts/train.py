"""Trains the model of a config file. `python scripts/train.py --help` lists the flags."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lf import config
from lf.launch import parse, split_name


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 done, 1 error, 2 bad usage or config, 143 after SIGTERM, 130 after Ctrl-C."""
    first = os.environ.get("RANK", "0") == "0"

    def say(text: str) -> None:
        if first:
            print(text, flush=True)

    try:
        launch, base, run = parse(argv, quiet=not first)
    except ValueError as error:
        say(f"error: {error}")
        return 2
    for path, old, new in config.diff(base, run):
        say(f"override {path}: {old} -> {new}")

    from lf.devices.detect import apply_env, detect, render_env
    from lf.train.loop import train
    from lf.train.run import connect, open_job
    from lf.train.summary import summary

    device = detect(launch.device)
    say(render_env(apply_env(device)) or f"device {device.name}")
    comm = connect(device)
    folder, file = Path(launch.out), split_name(launch.cfg)[0]
    try:
        job = open_job(run, folder=folder, config_file=file, device=device, comm=comm, say=say)
    except ValueError as error:
        say(f"error: {error}")
        return 2
    ended = train(job)
    job.progress.close()
    job.sinks.close()
    if first and not ended.signal:
        say(summary(job, ended))
    return 128 + ended.signal if ended.signal else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
