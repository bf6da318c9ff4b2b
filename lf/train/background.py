"""Checkpoints that are written beside the training: one at a time, in a thread, from a copy of the tensors.

The copy lies in memory of the host: as many bytes as this rank saves. Ranks that write talk to each other in a process
group of their own, since the groups of the training are in use meanwhile.
"""

import collections
import contextlib
import platform
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Self

import attrs

from lf.devices.cpu import cpu
from lf.train.comm import Comm, together
from lf.train.manifest import CheckpointError
from lf.train.shards import Piece


class Background:
    """Does one piece of work at a time in a thread. As a context, it is left when the work that goes on has ended."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begins a piece of work when the one before has ended; raises what that one raised."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._fault = error

        self._thread = threading.Thread(target=run, name="lf-background", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raises what work that has ended raised; does not wait for work that goes on."""
        if self._thread is None or not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Waits until the work has ended, and raises what it raised, every time that it is asked."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            raise self._fault

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.wait()
        elif self._thread is not None and issubclass(kind, Exception):  # An interrupt does not wait.
            self._thread.join()


def snapshot(pieces: Iterable[Piece], comm: Comm) -> list[Piece]:
    """Returns pieces with the values of this moment, in memory of the host; raises CheckpointError on every rank."""
    found: list[Piece] = []

    def copy() -> None:
        for piece in pieces:
            values = piece.data.detach() if piece.make is None else piece.make()
            found.append(attrs.evolve(piece, data=values.to("cpu", copy=True), make=None))

    together(comm, copy, lambda _: None, CheckpointError)
    return found


def check_memory(pieces: Iterable[Piece], comm: Comm) -> None:
    """Raises CheckpointError on every rank unless each host has memory for a copy of what its ranks save.

    It comes on top of the most that each process has taken so far, and so after a whole step. A host whose memory
    cannot be told is left alone.
    """

    def count() -> tuple[str, int, int, int | None]:
        memory = cpu.memory()
        return platform.node(), sum(piece.data.nbytes for piece in pieces), memory.peak, memory.total

    def check(rows: list[tuple[str, int, int, int | None]]) -> None:
        copies: collections.Counter[str] = collections.Counter()
        peaks: collections.Counter[str] = collections.Counter()
        for host, size, peak, _ in rows:
            copies[host] += size
            peaks[host] += peak
        for host, _, _, total in rows:
            if total is not None and copies[host] + peaks[host] > total:
                raise CheckpointError(
                    f"save.background needs a copy of {copies[host]} bytes in the memory of {host}, whose processes "
                    f"have taken up to {peaks[host]} of its {total}; set save.background to False, or use more hosts"
                )

    together(comm, count, check, CheckpointError)


@contextlib.contextmanager
def own_group(comm: Comm) -> Iterator[Comm]:
    """Gives an exchange of the same ranks in a process group of its own, for another thread."""
    if comm.world == 1:
        yield comm
        return
    from torch import distributed as dist

    from lf.train.comm import PATIENCE, distributed

    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    yield distributed(group)
    # Not after an error: a thread of another rank may be in it still, and it ends with the process.
    dist.destroy_process_group(group)
