"""Which rows a rank takes at a step, and a thread that fetches them ahead.

Row k of a run, counted from 0 over all epochs, belongs to step `k // batch + 1`. Nothing is remembered between steps:
a resume, on any number of ranks, is a call with the next step.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import attrs

from lf.data.source import Row, Rows, locate

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Fetched(Generic[T]):
    """What was made for a step."""

    step: int
    """The step."""
    value: T
    """What `make` returned."""
    wait: float
    """Seconds that the caller waited for it."""


def step_rows(step: int, batch: int) -> range:
    """Returns the numbers of the rows of a step; steps count from 1, rows from 0 over all epochs."""
    return range((step - 1) * batch, step * batch)


def micro_batches(
    rows: Rows, *, step: int, batch: int, micro_batch: int, dp: int, dp_rank: int, rounds: int = 1
) -> list[list[Row | None]]:
    """Returns the micro-batches that a data parallel rank takes at a step.

    Micro-batch m of the step is its rows from m * `micro_batch` on, and goes to rank m % `dp`. Every rank gets the same
    number of micro-batches, a multiple of `rounds`, all of `micro_batch` rows; None, a row of weight zero, fills what
    is missing at the end.
    """
    return _share(rows, step_rows(step, batch), micro_batch, dp, dp_rank, rounds)


def eval_batches(
    rows: Rows, *, batch: int, micro_batch: int, dp: int, dp_rank: int, rounds: int = 1, batches: int = 0
) -> Iterator[list[list[Row | None]]]:
    """Yields the micro-batches of a rank for each global batch of an evaluation.

    An evaluation takes each row of epoch 0 once, or the first `batches` global batches of it (0 takes all). Every rank
    gets as many batches, dealt and filled as in `micro_batches`.
    """
    starts = range(0, len(rows), batch)
    for start in starts[:batches] if batches else starts:
        yield _share(rows, range(start, min(start + batch, len(rows))), micro_batch, dp, dp_rank, rounds)


def _share(rows: Rows, wanted: range, micro_batch: int, dp: int, dp_rank: int, rounds: int) -> list[list[Row | None]]:
    turns = -(-len(wanted) // (micro_batch * dp * rounds)) * rounds
    starts = [(turn * dp + dp_rank) * micro_batch for turn in range(turns)]
    places = [at for start in starts for at in range(start, start + micro_batch)]
    found = read_rows(rows, [wanted[at] for at in places if at < len(wanted)])
    # What is missing is missing at the end of the step, and so at the end of every rank's part of it.
    filled: list[Row | None] = [*found, *[None] * (len(places) - len(found))]
    return [filled[at : at + micro_batch] for at in range(0, len(places), micro_batch)]


def read_rows(rows: Rows, wanted: Sequence[int]) -> list[Row]:
    """Returns rows of a run by their numbers, counted from 0 over all epochs.

    A source that has `threads` is read by so many threads at once.
    """
    threads = min(getattr(rows, "threads", 1), len(wanted))
    if threads < 2:
        return [rows.row(*locate(rows, k)) for k in wanted]
    with ThreadPoolExecutor(threads, "lf-rows") as pool:
        return list(pool.map(lambda k: rows.row(*locate(rows, k)), wanted))


@contextlib.contextmanager
def prefetch(make: Callable[[int], T], steps: Iterable[int], depth: int = 2) -> Iterator[Iterator[Fetched[T]]]:
    """Gives an iterator over `make(step)` for each of `steps`, made in order in a thread, at most `depth` ahead.

    An exception in the thread is raised in the caller, with its traceback. On leaving the context the thread ends,
    after the one item that it may be making.
    """
    slots = threading.Semaphore(depth)
    stop = threading.Event()
    made: queue.SimpleQueue[tuple[int, T] | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for step in steps:
                slots.acquire()
                if stop.is_set():
                    return
                made.put((step, make(step)))
            made.put(None)
        except BaseException as error:
            made.put(error)

    def fetch() -> Iterator[Fetched[T]]:
        while True:
            start = time.perf_counter()
            item = made.get()
            wait = time.perf_counter() - start
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            slots.release()
            yield Fetched(step=item[0], value=item[1], wait=wait)

    thread = threading.Thread(target=work, name="lf-prefetch", daemon=True)
    thread.start()
    try:
        yield fetch()
    finally:
        stop.set()
        slots.release()
        thread.join()
