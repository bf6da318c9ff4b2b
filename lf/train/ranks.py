"""Several ranks on this machine for a script that was started as one process."""

import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
from collections.abc import Callable, Sequence


def start_ranks(main: Callable[[list[str]], int], argv: Sequence[str], world: int) -> int:
    """Returns the largest exit code of `world` processes that each run one rank; one that dies ends the others."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=_rank, args=(main, list(argv), rank, world, port)) for rank in range(world)]
    for process in ranks:
        process.start()
    while waited := [process.sentinel for process in ranks if process.exitcode is None]:
        multiprocessing.connection.wait(waited)
        if any(process.exitcode not in (None, 0, 1, 2) for process in ranks):
            for process in ranks:
                process.kill()
    return max(abs(process.exitcode or 0) for process in ranks)


def _rank(main: Callable[[list[str]], int], argv: list[str], rank: int, world: int, port: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    sys.exit(main(argv))
