"""Compares models with the numbers that public implementations recorded: one JSON line a golden folder.

With --tp, --pp or --ep each model is loaded in pieces, by as many processes as that takes; torchrun may start them, or
this script does.
"""

import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
from pathlib import Path

import attrs
import torch
import tyro


@attrs.frozen(kw_only=True)
class Args:
    """Compares models with recorded numbers. Exit code 1 when any folder is off, 2 for a folder that lf cannot read."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Golden folders: a checkpoint folder with io.safetensors beside it, or weights, inputs and outputs.safetensors."""
    device: str = ""
    """Name of the device; empty takes the best one that is there."""
    tp: int = 1
    """Tensor parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    ep: int = 1
    """Expert parallel ranks."""


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    args = tyro.cli(Args, args=argv, prog="parity.py")
    from lf.parallel.config import MegatronParallel

    parallel = MegatronParallel(tp=args.tp, pp=args.pp, ep=args.ep)
    world = args.pp * max(args.tp, args.ep)
    if world > 1 and os.environ.get("WORLD_SIZE", "1") == "1":
        return _start(argv, world)
    from lf.devices.detect import detect
    from lf.parallel.config import resolve
    from lf.parallel.megatron import make_context
    from lf.train.parity import compare, to_json
    from lf.train.run import process_group

    device, code = detect(args.device), 0
    with process_group(device) as comm:
        ctx = make_context(parallel, resolve(parallel, comm.world), device, torch.float32)
        for folder in args.folders:
            try:
                if comm.world > 1:
                    from lf.train.parity_layout import compare_layout

                    line = to_json(compare_layout(folder, parallel, ctx))
                else:
                    line = to_json(compare(folder, ctx))
                code = max(code, int(not line["ok"]))
            except (ValueError, OSError) as error:
                line, code = {"folder": str(folder), "error": str(error), "ok": False}, 2
            if comm.rank == 0:
                print(json.dumps(line))
    return code


def _start(argv: list[str], world: int) -> int:
    """Returns the largest exit code of `world` processes that each run one rank; one that dies ends the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_rank, args=(argv, rank, world, port)) for rank in range(world)]
    for process in ranks:
        process.start()
    while waited := [process.sentinel for process in ranks if process.exitcode is None]:
        multiprocessing.connection.wait(waited)
        if any(process.exitcode not in (None, 0, 1, 2) for process in ranks):
            for process in ranks:
                process.kill()
    return max(abs(process.exitcode or 0) for process in ranks)


def _rank(argv: list[str], rank: int, world: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    sys.exit(main(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
