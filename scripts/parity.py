"""Compares models with the numbers that public implementations recorded: one JSON line a golden folder."""

import functools
import os
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
    """Golden folders: a checkpoint with io.safetensors; weights, inputs and outputs.safetensors; samples (--data)."""
    data: Path | None = None
    """The LeRobot dataset that golden folders of samples are about."""
    device: str = ""
    """Name of the device; empty takes the best one that is there."""
    tp: int = 1
    """Tensor parallel ranks; this script starts all ranks that are wanted, unless torchrun did."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert parallel ranks."""


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    args = tyro.cli(Args, args=argv, prog="parity.py")
    from lf.data.lerobot_parity import compare_dataset
    from lf.devices.detect import detect
    from lf.parallel.config import MegatronParallel, resolve
    from lf.parallel.megatron import make_context
    from lf.train import comm, parity, parity_layout, ranks

    if (data := args.data) is not None:
        with tempfile.TemporaryDirectory() as cache:
            return parity.report(args.folders, lambda folder: compare_dataset(folder, data, Path(cache)))
    parallel, wanted = MegatronParallel(tp=args.tp, pp=args.pp, ep=args.ep), args.pp * max(args.tp, args.ep)
    if wanted > 1 and os.environ.get("WORLD_SIZE", "1") == "1":
        return ranks.start_ranks(main, argv, wanted)
    try:
        device = detect(args.device)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with comm.process_group(device) as group:
        ctx = make_context(parallel, resolve(parallel, group.world), device, torch.float32)
        shared = functools.partial(parity_layout.compare_layout, parallel=parallel, ctx=ctx)
        compare = shared if group.world > 1 else functools.partial(parity.compare, ctx=ctx)
        return parity.report(args.folders, lambda folder: parity.to_json(compare(folder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
