"""Which rows a rank takes at a step, by turns or by what they cost, and a thread that fetches them ahead.

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

from lf.data.outline import outline
from lf.data.source import Row, Rows, locate
from lf.plan.balance import Caps, Item, deal

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


@attrs.frozen(kw_only=True)
class Share:
    """What a data parallel rank takes of the rows of a step."""

    micro_batch: int
    """Rows of a micro-batch; None, a row of weight zero, fills what is missing at its end."""
    dp: int = 1
    """Ranks that have rows of their own."""
    dp_rank: int = 0
    """This one."""
    rounds: int = 1
    """Every rank gets the same number of micro-batches, a multiple of this."""

    def filled(self, groups: Iterable[Sequence[Row]]) -> list[list[Row | None]]:
        """Returns micro-batches with None where rows are missing."""
        return [[*group, *[None] * (self.micro_batch - len(group))] for group in groups]


@attrs.frozen(kw_only=True)
class Dealt:
    """What a rank got of the rows of a step."""

    micro: list[list[Row | None]]
    """Its micro-batches."""
    idle: float | None = None
    """The share of the ranks' time that they wait for the slowest, as planned, 0 to 1; None where nothing is."""


Price = Callable[[Row], Item]
"""Returns what a row, or its outline, costs; raises ValueError for one that is over a cap alone."""


def step_rows(step: int, batch: int) -> range:
    """Returns the numbers of the rows of a step; steps count from 1, rows from 0 over all epochs."""
    return range((step - 1) * batch, step * batch)


def eval_rows(rows: Rows, batch: int, batches: int = 0) -> Iterator[range]:
    """Yields the numbers of the rows of each global batch of an evaluation.

    An evaluation takes each row of epoch 0 once, or the first `batches` global batches of it (0 takes all).
    """
    starts = range(0, len(rows), batch)
    for start in starts[:batches] if batches else starts:
        yield range(start, min(start + batch, len(rows)))


def turns(rows: int, share: Share) -> list[list[int]]:
    """Returns the micro-batches of a rank, of so many rows in order: micro-batch m of all goes to rank m % `dp`."""
    size = share.micro_batch
    count = -(-rows // (size * share.dp * share.rounds)) * share.rounds
    starts = [(turn * share.dp + share.dp_rank) * size for turn in range(count)]
    return [list(range(min(start, rows), min(start + size, rows))) for start in starts]


def by_turns(rows: Rows, wanted: Sequence[int], share: Share) -> Dealt:
    """Returns what a rank gets of the rows of these numbers, in their order."""
    return Dealt(micro=_read(rows, wanted, turns(len(wanted), share), share))


def by_cost(rows: Rows, wanted: Sequence[int], share: Share, price: Price, caps: Caps) -> Dealt:
    """Returns what a rank gets of the rows of these numbers when loads are even, from their outlines alone."""
    items = [price(outline(rows, *locate(rows, k))) for k in wanted]
    plan = deal(items, share.dp, caps, share.rounds)
    return Dealt(micro=_read(rows, wanted, plan.groups[share.dp_rank], share), idle=plan.idle)


def _read(rows: Rows, wanted: Sequence[int], groups: Sequence[Sequence[int]], share: Share) -> list[list[Row | None]]:
    found = iter(read_rows(rows, [wanted[at] for group in groups for at in group]))
    return share.filled([[next(found) for _ in group] for group in groups])


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
def prefetch(
    make: Callable[[int], T],
    steps: Iterable[int],
    depth: int = 2,
    leave: Callable[[], None] = lambda: None,
    *,
    meets: bool = False,
) -> Iterator[Iterator[Fetched[T]]]:
    """Gives an iterator over `make(step)` for each of `steps`, made in order in a thread, at most `depth` ahead.

    An exception in the thread is raised in the caller, with its traceback. On leaving the context the thread ends,
    after the one item that it may be making. `meets` says that `make` waits for other ranks: the thread then calls
    `leave` where it ends before the last step, so that theirs do not wait for it, and after an error nobody waits for
    the thread.
    """
    slots = threading.Semaphore(depth)
    stop = threading.Event()
    made: queue.SimpleQueue[tuple[int, T] | BaseException | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for step in steps:
                slots.acquire()
                if stop.is_set():
                    if meets:
                        leave()
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
    joins = not meets
    try:
        yield fetch()
        joins = True
    finally:
        stop.set()
        slots.release()
        if joins:
            thread.join()
