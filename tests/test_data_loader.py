"""The rows of a step are the same on any number of ranks, after a resume and through the prefetch."""

import itertools
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf.data.config import Mixture, TextData, Weighted
from lf.data.loader import Share, by_turns, eval_rows, prefetch, step_rows
from lf.data.source import Rows, locate, open_data
from tests.data_tools import context, write

quick = settings(max_examples=60, derandomize=True, deadline=None)
sizes = st.integers(1, 7)


@attrs.frozen(kw_only=True)
class Counted:
    """Rows whose id is their number over all epochs."""

    count: int

    def __len__(self) -> int:
        return self.count

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        assert 0 <= index < self.count
        return {"id": epoch * self.count + index}

    def describe(self) -> dict[str, int]:
        return {"rows": self.count}


def dealt(per_rank: list[list[list[Any]]]) -> list[Any]:
    """Ids in global order: micro-batch m is turn m // dp of rank m % dp."""
    turns = zip(*per_rank, strict=True)
    return [row and row["id"] for turn in turns for micro in turn for row in micro]


def shares(rows: Rows, wanted: range, micro_batch: int, dp: int) -> list[list[list[Any]]]:
    """The micro-batches of each rank."""
    return [by_turns(rows, wanted, Share(micro_batch=micro_batch, dp=dp, dp_rank=rank)).micro for rank in range(dp)]


def step_ids(rows: Rows, step: int, batch: int, micro_batch: int, dp: int) -> list[Any]:
    return dealt(shares(rows, step_rows(step, batch), micro_batch, dp))


@quick
@given(sizes, sizes, sizes, sizes, st.integers(1, 5))
def test_a_step_is_the_same_rows_on_any_number_of_ranks(
    count: int, step: int, batch: int, micro_batch: int, dp: int
) -> None:
    ids = step_ids(Counted(count=count), step, batch, micro_batch, dp)
    assert ids[:batch] == list(step_rows(step, batch))
    assert all(row is None for row in ids[batch:])
    assert len(ids) % (micro_batch * dp) == 0
    assert len(ids) - batch < micro_batch * dp


def text_rows(folder: Path, seed: int = 0) -> Rows:
    lines = "\n".join(f'{{"text": "document {n} {"x" * (n * 7 % 23)}"}}' for n in range(23))
    text = TextData(paths=(str(write(folder / "a.jsonl", lines)),), seq_len=32)
    other = TextData(paths=(str(write(folder / "b.txt", "y" * 200)),), seq_len=32)
    return open_data(Mixture(parts=(Weighted(data=text, weight=3.0), Weighted(data=other))), context(folder, seed=seed))


def test_resume_at_any_step_on_other_ranks_gives_the_unbroken_order(tmp_path: Path) -> None:
    def run(first: int, last: int, dp: int) -> list[Any]:
        rows = text_rows(tmp_path)  # opened anew: nothing is remembered
        steps = range(first, last + 1)
        return [id for step in steps for id in step_ids(rows, step, 6, 2, dp) if id is not None]

    rows = text_rows(tmp_path)
    unbroken = [rows.row(*locate(rows, k))["id"] for k in range(15 * 6)]
    assert len(rows) * 3 < 15 * 6
    for stop in range(1, 15):
        assert run(1, stop, 1 + stop % 3) + run(stop + 1, 15, 1 + (stop + 1) % 3) == unbroken
    assert run(1, 5, 2) + run(6, 10, 1) + run(11, 15, 2) == unbroken
    other = text_rows(tmp_path, seed=1)
    assert [other.row(*locate(other, k))["id"] for k in range(90)] != unbroken


@quick
@given(st.integers(1, 40), sizes, sizes, st.integers(1, 4))
def test_evaluation_takes_each_row_once_and_every_rank_as_often(
    count: int, batch: int, micro_batch: int, dp: int
) -> None:
    rows = Counted(count=count)
    batches = list(eval_rows(rows, batch))
    assert len(batches) == -(-count // batch)
    ids = [dealt(shares(rows, wanted, micro_batch, dp)) for wanted in batches]
    assert [id for batch_ids in ids for id in batch_ids if id is not None] == list(range(count))
    assert list(eval_rows(rows, batch, 2)) == batches[:2]


# Prefetch


def fetcher_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lf-prefetch"]


def test_prefetch_keeps_order_and_works_ahead_within_its_bound() -> None:
    made: list[int] = []

    def make(step: int) -> int:
        made.append(step)
        return step * 10

    with prefetch(make, range(5, 12), depth=2) as fetched:
        first = next(fetched)
        assert (first.step, first.value) == (5, 50)
        deadline = time.monotonic() + 10
        while len(made) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert made == [5, 6, 7]
        assert [(item.step, item.value) for item in fetched] == [(step, step * 10) for step in range(6, 12)]
    assert not fetcher_threads()


def test_prefetch_tells_how_long_the_caller_waited() -> None:
    def make(step: int) -> int:
        time.sleep(0.2 if step == 1 else 0.0)
        return step

    with prefetch(make, range(3)) as fetched:
        next(fetched)
        assert next(fetched).wait > 0.1
        time.sleep(0.1)
        assert next(fetched).wait < 0.1


def test_prefetch_raises_what_the_thread_raised_where_it_did() -> None:
    def broken_source(step: int) -> int:
        if step == 3:
            raise ValueError("a.jsonl:3: not JSON")
        return step

    with prefetch(broken_source, itertools.count(1)) as fetched:
        assert [next(fetched).value, next(fetched).value] == [1, 2]
        with pytest.raises(ValueError, match=r"a\.jsonl:3") as caught:
            next(fetched)
        assert "broken_source" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert list(fetched) == []
    assert not fetcher_threads()


@pytest.mark.parametrize("taken", [0, 1, 4])
def test_prefetch_ends_its_thread_when_left_early(taken: int) -> None:
    def leave() -> None:
        with prefetch(lambda step: step, itertools.count()) as fetched:
            for _ in range(taken):
                next(fetched)
            assert fetcher_threads()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave()
    assert not fetcher_threads()


def test_after_an_error_nobody_waits_for_a_thread_that_meets_others() -> None:
    begun, others, left = threading.Event(), threading.Event(), threading.Event()

    def make(step: int) -> bool:
        begun.set()
        return others.wait(timeout=20)

    def fail() -> None:
        with prefetch(make, itertools.count(), leave=left.set, meets=True):
            assert begun.wait(timeout=20)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    (thread,) = fetcher_threads()
    assert not left.is_set()
    others.set()
    assert left.wait(timeout=20)
    thread.join()


@attrs.frozen(kw_only=True)
class Slow(Counted):
    """Rows that are read by two threads at once, or not at all; what is read is told."""

    both: threading.Barrier
    told: threading.Semaphore
    threads: int = 2

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        self.both.wait(timeout=20)
        self.told.release()
        return super().row(epoch, index)


def test_rows_are_read_several_at_once_while_a_step_is_computed() -> None:
    rows = Slow(count=8, both=threading.Barrier(2), told=threading.Semaphore(0))

    def make(step: int) -> list[list[Any]]:
        return by_turns(rows, step_rows(step, 2), Share(micro_batch=2)).micro

    with prefetch(make, range(1, 5), depth=1) as fetched:
        for step in range(1, 4):
            assert [row["id"] for row in next(fetched).value[0]] == [2 * step - 2, 2 * step - 1]
            for _ in range(2 if step > 1 else 4):
                # The step ends only when both rows of the next one are read: without a thread that fetches, never.
                assert rows.told.acquire(timeout=20)
