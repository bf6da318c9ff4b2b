"""Ranks as threads, and small training states, for the checkpoint tests."""

import copy
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lf.train.checkpoint import Comm, Piece, box_piece, save
from lf.train.reader import Reader

T = TypeVar("T")


def on_ranks(world: int, job: Callable[[Comm], T]) -> list[T | Exception]:
    """Runs a job on `world` threads that are ranks to each other; gives each one's value or exception."""
    barrier = threading.Barrier(world, timeout=60)
    slots: list[Any] = [None] * world
    results: list[Any] = [None] * world

    def comm(rank: int) -> Comm:
        def gather(value: Any) -> list[Any] | None:
            slots[rank] = copy.deepcopy(value)
            barrier.wait()
            rows = list(slots) if rank == 0 else None
            barrier.wait()
            return rows

        def broadcast(value: Any) -> Any:
            if rank == 0:
                slots[0] = value
            barrier.wait()
            got = copy.deepcopy(slots[0])
            barrier.wait()
            return got

        return Comm(rank=rank, world=world, gather=gather, broadcast=broadcast)

    def run(rank: int) -> None:
        try:
            results[rank] = job(comm(rank))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def save_on_ranks(run: Path, step: int, pieces: Sequence[Sequence[Piece]], meta: dict[str, Any]) -> list[Any]:
    """Saves with one thread for each list of pieces."""
    return on_ranks(len(pieces), lambda comm: save(run, step, pieces[comm.rank], meta, comm=comm))


def state(value: int) -> dict[str, Tensor]:
    """A small state that differs for each value."""
    gen = torch.Generator().manual_seed(value)
    return {
        "weight/a": torch.randn(4, 3, generator=gen).bfloat16(),
        "exp_avg/a": torch.randn(4, 3, generator=gen),
        "step": torch.tensor(value),
    }


def save_state(run: Path, step: int, value: int | None = None) -> Path:
    """Saves `state(value)`, by default of the step, in one process."""
    value = step if value is None else value
    return save(run, step, [box_piece(*item) for item in state(value).items()], {"value": value})


def holds(reader: Reader, value: int) -> bool:
    """Whether a reader gives exactly `state(value)`."""
    want = state(value)
    same = [equal(reader.read(name), tensor) for name, tensor in want.items()]
    return all(same) and reader.names == tuple(sorted(want)) and reader.meta == {"value": value}


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, type and bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    raw = [t.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (a, b)]
    return torch.equal(*raw)


def names(run: Path) -> set[str]:
    """The names in a run's checkpoint folder, without the lock."""
    return {path.name for path in (run / "checkpoints").iterdir()} - {".lock"}
