"""How ranks agree: objects gathered on rank 0, one answer for all, and a failure of one that is told to all."""

import contextlib
import datetime
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import attrs

from lf.devices.device import Device

T = TypeVar("T")
U = TypeVar("U")


@attrs.frozen(kw_only=True)
class Comm:
    """The exchange of small objects between ranks. Both functions are called by all ranks, in the same order."""

    rank: int
    """This rank."""
    world: int
    """Number of ranks."""
    gather: Callable[[Any], list[Any] | None]
    """Gives the objects of all ranks, in order, to rank 0 and None to the others."""
    broadcast: Callable[[Any], Any]
    """Gives rank 0's object to all."""
    group: Any = None
    """Their process group of torch.distributed, None where that is the default one."""


ALONE = Comm(rank=0, world=1, gather=lambda value: [value], broadcast=lambda value: value)
"""A single process."""


PATIENCE = datetime.timedelta(hours=2)
"""How long ranks wait for each other: one of them may write an export, or all hash a checkpoint, meanwhile."""


def distributed(group: Any = None) -> Comm:
    """Returns the exchange of the ranks of torch.distributed, which must be up, in a process group of all ranks."""
    from torch import distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()

    def gather(value: Any) -> list[Any] | None:
        rows: list[Any] | None = [None] * world if rank == 0 else None
        dist.gather_object(value, rows, dst=0, group=group)
        return rows

    def broadcast(value: Any) -> Any:
        row = [value]
        dist.broadcast_object_list(row, src=0, group=group)
        return row[0]

    return Comm(rank=rank, world=world, gather=gather, broadcast=broadcast, group=group)


def together(comm: Comm, work: Callable[[], T], finish: Callable[[list[T]], U], failed: type[Exception]) -> U:
    """Calls `work` on every rank, then `finish` on rank 0 with their values in order; returns its value on every rank.

    When a call fails anywhere, every rank raises `failed` with one text that says where and why.
    """
    mine: T | None = None
    fault, cause = "", None
    try:
        mine = work()
    except Exception as error:
        fault, cause = told(error), error
    rows = comm.gather((mine, fault))
    answer: tuple[U | None, str] = (None, fault)
    if rows is not None:
        faults = [f"rank {rank}: {text}" if comm.world > 1 else text for rank, (_, text) in enumerate(rows) if text]
        more = f"; and {len(faults) - 3} more ranks" if len(faults) > 3 else ""
        answer = (None, "; ".join(faults[:3]) + more)
        if not faults:
            try:
                answer = (finish([value for value, _ in rows]), "")
            except Exception as error:
                answer, cause = (None, told(error)), error
    value: U
    value, fault = comm.broadcast(answer)
    if fault:
        raise failed(fault) from cause
    return value


def over_ranks(mine: dict[str, T]) -> dict[str, T]:
    """Returns what all ranks have by name; those that have the same name have the same."""
    from torch import distributed as dist

    everyone: list[dict[str, T]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    return {name: value for found in everyone for name, value in found.items()}


def told(error: Exception) -> str:
    """Returns what an error says in one clause: the path first where the system gives one, never an empty text."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = str(error)
    if not text or isinstance(error, (KeyError, AttributeError, TypeError, MemoryError)):
        return f"{type(error).__name__}: {text}"
    return text


_LOST = re.compile(
    r"gloo.*(?:[Cc]onnection (?:closed|reset|refused|timed out)|[Bb]roken pipe|[Rr]ead error|[Ww]rite error)"
    r"|(?:[Cc]onnection (?:closed|reset)|[Bb]roken pipe).*(?:by|from) (?:remote )?peer"
    r"|NCCL.*remote process (?:has )?exited",
    re.DOTALL,
)


def lost(error: BaseException) -> str:
    """Returns what to tell of an error by which torch.distributed says that another rank is gone; empty for others."""
    if not isinstance(error, RuntimeError) or not _LOST.search(str(error)):
        return ""
    first = re.sub(r"^\[\S*/(\S+)\] ", r"\1: ", str(error)).split(". ")[0].splitlines()[0]
    return (
        f"another rank is gone, and the ranks cannot go on without it ({first}). If it printed an error, that is why; "
        "if not, it was killed, by hand or for want of memory. torchrun's report has its number. What was saved is "
        "whole, and the same command goes on from there"
    )


@contextlib.contextmanager
def process_group(device: Device) -> Iterator[Comm]:
    """Brings torch.distributed up, from torchrun's environment or for one process, and gives the ranks' exchange."""
    from torch import distributed as dist

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device.set_local_rank(int(os.environ.get("LOCAL_RANK", "0")))
    # Small objects go through the host, so an accelerator's group has gloo for CPU tensors beside its own backend.
    backend = "gloo" if device.backend == "gloo" else f"cpu:gloo,{device.torch_type}:{device.backend}"
    if world > 1:
        dist.init_process_group(backend, timeout=PATIENCE)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    try:
        yield distributed()
    finally:
        dist.destroy_process_group()
