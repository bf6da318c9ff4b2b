"""One long-lived group of worker processes for tests that need several ranks: a start costs seconds, a job none.

A job is a module-level function of a test file or of this folder; it runs on the first `n` workers at once, with
torch.distributed up between them (gloo), and its results come back in the order of the ranks.
"""

import gc
import itertools
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def _serve(pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from tests.gloo import share_device

    torch.set_num_threads(1)
    share_device()
    for number in itertools.count(1):
        try:
            job = pipe.recv()
        except EOFError:
            return
        store, rank, world, function, args = job
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        try:
            dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
            pipe.send(("done", function(*args)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        if number % 16 == 0:
            # Engines hold their process groups in cycles, and a group has two threads: a long session runs out.
            gc.collect()


class Workers:
    """Starts workers as jobs ask for them and keeps them until `close`."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._alive: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory()
        self._jobs = 0

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        """Returns what `function(*args)` gives on each of `world` ranks; raises with the first rank's traceback."""
        while len(self._alive) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, sys.path), daemon=True)
            process.start()
            self._alive.append((process, ours))
        self._jobs += 1
        store = str(Path(self._folder.name) / f"store{self._jobs}")
        for rank, (_, pipe) in enumerate(self._alive[:world]):
            pipe.send((store, rank, world, function, args))
        answers = []
        for _, pipe in self._alive[:world]:
            if not pipe.poll(timeout):
                self.close()
                raise TimeoutError(f"{function.__name__} on {world} ranks took more than {timeout:g} s")
            answers.append(pipe.recv())
        failed = [f"rank {rank}: {text}" for rank, (word, text) in enumerate(answers) if word == "failed"]
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return [value for _, value in answers]

    def close(self) -> None:
        """Ends all workers."""
        for process, pipe in self._alive:
            pipe.close()
            process.kill()
            process.join()
        self._alive.clear()
