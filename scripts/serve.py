"""Serves a robot policy over websocket to openpi's clients: `python scripts/serve.py RUN`."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import attrs
import tyro

from lf.acting.server import Serving
from lf.terminal import prepare


@attrs.frozen(kw_only=True)
class Args(Serving):
    """Answers the observations of robots with actions, in the message format of openpi's clients."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Run folder of a robot policy, of which the newest checkpoint is taken, or the hf/ of one."""
    device: str = ""
    """Name of the device (cpu, cuda, kunlun ...); empty takes the best one that is there."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the policy computes in."""
    averaged: Literal["auto", "yes", "no"] = "auto"
    """Whether to take the running average of the weights; auto does as the exports of the run."""
    config_file: str = ""
    """Python file to execute first, where the model's class is in it; no file of FOLDER is executed unasked."""


def main(argv: list[str]) -> int:
    """Returns the exit code: 1 error, 2 bad usage, 143 after SIGTERM, 130 after Ctrl-C."""
    args = tyro.cli(Args, args=argv, prog="serve.py")
    from lf.acting.load import load_policy
    from lf.acting.server import serve
    from lf.train.loop import FAULTS

    try:
        policy = load_policy(
            args.folder,
            device=args.device,
            averaged={"auto": None, "yes": True, "no": False}[args.averaged],
            config_file=args.config_file,
            dtype=args.dtype,
            say=lambda text: print(text, flush=True),
        )
        number = serve(policy, args, lambda text: print(text, flush=True))
    except FAULTS as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before it listens for signals
        number = signal.SIGINT
    return 128 + number


if __name__ == "__main__":
    prepare()
    sys.exit(main(sys.argv[1:]))
