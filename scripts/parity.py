"""Compares models with the numbers that public implementations recorded: one JSON line a golden folder."""

import json
import sys
import tempfile
from pathlib import Path

import attrs
import torch
import tyro


@attrs.frozen(kw_only=True)
class Args:
    """Compares models with recorded numbers. Exit code 1 when any folder is off, 2 for a folder that lf cannot read."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Golden folders: a checkpoint folder with io.safetensors beside it, or weights, inputs and outputs.safetensors;
    with --data, samples of a dataset."""
    data: Path | None = None
    """The LeRobot dataset that golden folders of samples are about."""
    device: str = ""
    """Name of the device; empty takes the best one that is there."""


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    args = tyro.cli(Args, args=argv, prog="parity.py")
    if args.data is not None:
        return _compare_data(args.folders, args.data)
    from lf.devices.detect import detect
    from lf.parallel.config import MegatronParallel, resolve
    from lf.parallel.megatron import make_context
    from lf.train.parity import compare, to_json
    from lf.train.run import process_group

    device, code = detect(args.device), 0
    with process_group(device):
        ctx = make_context(MegatronParallel(), resolve(MegatronParallel(), 1), device, torch.float32)
        for folder in args.folders:
            try:
                line = to_json(compare(folder, ctx))
                code = max(code, int(not line["ok"]))
            except (ValueError, OSError) as error:
                line, code = {"folder": str(folder), "error": str(error), "ok": False}, 2
            print(json.dumps(line))
    return code


def _compare_data(folders: tuple[Path, ...], data: Path) -> int:
    from lf.data.lerobot_parity import compare_dataset

    code = 0
    with tempfile.TemporaryDirectory() as cache:
        for folder in folders:
            try:
                line = compare_dataset(folder, data, Path(cache))
                code = max(code, int(not line["ok"]))
            except (ValueError, OSError) as error:
                line, code = {"folder": str(folder), "error": str(error), "ok": False}, 2
            print(json.dumps(line))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
