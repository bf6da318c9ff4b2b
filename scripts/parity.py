"""Compares models with the numbers that public implementations recorded: one JSON line a golden folder."""

import json
import sys
from pathlib import Path

import attrs
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@attrs.frozen(kw_only=True)
class Args:
    """Compares models with recorded numbers. Exit code 1 when any folder is off, 2 for a folder that lf cannot read."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Golden folders: a checkpoint folder with io.safetensors beside it."""
    device: str = ""
    """Name of the device; empty takes the best one that is there."""


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    args = tyro.cli(Args, args=argv, prog="parity.py")
    from lf.devices.detect import detect
    from lf.parallel.config import MegatronParallel, resolve
    from lf.parallel.megatron import make_context
    from lf.train.parity import compare, to_json
    from lf.train.run import connect

    device = detect(args.device)
    connect(device)
    ctx = make_context(MegatronParallel(), resolve(MegatronParallel(), 1), device, torch.float32)
    code = 0
    for folder in args.folders:
        try:
            parity = compare(folder, ctx)
        except ValueError as error:
            print(json.dumps({"folder": str(folder), "error": str(error), "ok": False}))
            code = 2
            continue
        print(json.dumps(to_json(parity)))
        code = code or int(not parity.ok)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
