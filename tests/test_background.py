"""Checkpoints that are written beside the training: what they hold, when they count, and how they fail."""

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

import lf
from lf.devices.cpu import cpu
from lf.devices.device import Memory
from lf.models.toy import Toy
from lf.train import background, checkpoint, shards
from lf.train.background import Background, check_memory, own_group, snapshot
from lf.train.checkpoint import CheckpointError, box_piece, open_latest, save
from lf.train.loop import FAULTS, train
from lf.train.run import open_job
from tests.saving import holds, names, on_ranks, save_state, state
from tests.test_run_faults import Tripping, rows_run
from tests.test_train import metrics, small_run, tensors
from tests.workers import Workers

BESIDE = lf.Save(every=1, keep=9, background=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        words = " ".join(f"word{(i * j) % 17} = {j}" for j in range(5, 40))
        (folder / f"{i:02}.txt").write_text(f"document {i}\n{words}\n")
    return folder


def step_of(path: Path) -> int:
    """Returns the step whose shard is written."""
    return int(path.parent.name.removeprefix("step_").split(".")[0])


def held_up(run: lf.Run, folder: Path, cache: Path, stop_at: int = 0) -> tuple[list[str], int]:
    """Trains on this rank; returns what happened, in order, and the signal that ended it.

    A shard of a step is written only when the next step is done, if there is one that does not wait for it.
    """
    os.environ["XDG_CACHE_HOME"] = str(cache)
    right, news, done = shards.write_shard, threading.Condition(), []
    job = open_job(run, folder, (), cpu, checkpoint.distributed(), lambda text: None)
    last = stop_at or run.steps

    def step(before: Any, batches: Any) -> Any:
        after = job.engine.step(before, batches)
        with news:
            done.append(f"step {after[0].step}")
            news.notify_all()
        if after[0].step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        return after

    def write(path: Path, shard: shards.Shard) -> str:
        number = step_of(path)
        with news:
            assert number == last or news.wait_for(lambda: f"step {number + 1}" in done, 60)
        digest = right(path, shard)
        with news:
            done.append(f"written {number}")
        return digest

    checkpoint.write_shard = write  # type: ignore[attr-defined]
    try:
        ended = train(attrs.evolve(job, engine=attrs.evolve(job.engine, step=step)))
    finally:
        checkpoint.write_shard = right  # type: ignore[attr-defined]
    return done, ended.signal


def plainly(run: lf.Run, folder: Path, cache: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(cache)
    train(open_job(run, folder, (), cpu, checkpoint.distributed(), lambda text: None))


def files(folder: Path) -> dict[str, bytes]:
    """Returns the shards of all checkpoints of a run, and its export, by path."""
    found = [*folder.glob("checkpoints/step_*/rank_*"), *folder.glob("hf/*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.parametrize(("kind", "world"), [("dense", 1), ("experts", 2), ("toy", 2)])
def test_training_goes_on_meanwhile_and_every_byte_is_that_of_a_save_that_waits(
    workers: Workers, corpus: Path, tmp_path: Path, kind: str, world: int
) -> None:
    waits = small_run(corpus, kind, steps=4, eval=lf.Eval(), save=lf.Save(every=1, keep=9))
    beside = attrs.evolve(waits, save=BESIDE)
    workers.run(world, plainly, waits, tmp_path / "waits", tmp_path)
    for done, _ in workers.run(world, held_up, beside, tmp_path / "beside", tmp_path):
        assert done == [
            "step 1",
            "step 2",
            "written 1",
            "step 3",
            "written 2",
            "step 4",
            "written 3",
            "written 4",
        ]
    expected, found = files(tmp_path / "waits"), files(tmp_path / "beside")
    assert sum(name.startswith("checkpoints") for name in expected) == 4 * world
    assert found == expected
    assert all(not checkpoint.verify(path) for path in (tmp_path / "beside" / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("kind", ["dense", "toy"])
def test_a_signal_waits_for_the_save_that_goes_on_and_the_resume_is_bit_exact(
    workers: Workers, corpus: Path, tmp_path: Path, kind: str
) -> None:
    run = small_run(corpus, kind, steps=4, eval=lf.Eval(), save=BESIDE)
    workers.run(1, plainly, run, tmp_path / "whole", tmp_path)
    rare = attrs.evolve(run, save=attrs.evolve(BESIDE, every=2))
    ((done, number),) = workers.run(1, held_up, rare, tmp_path / "cut", tmp_path, 3)
    assert done == ["step 1", "step 2", "step 3", "written 2", "written 3"]
    assert number == signal.SIGTERM
    assert names(tmp_path / "cut") == {"step_2", "step_3"}
    workers.run(1, plainly, run, tmp_path / "cut", tmp_path)
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    reference = tensors(tmp_path / "whole", 4)
    for name, value in tensors(tmp_path / "cut", 4).items():
        assert torch.equal(value, reference[name]), name


def failing(run: lf.Run, folder: Path, rank: int, damage: bool) -> tuple[str, list[int]]:
    """Trains while a shard of step 2 cannot be written on one rank; returns the error and the steps that were done."""
    right, steps = shards.write_shard, []
    job = open_job(run, folder, (), cpu, checkpoint.distributed(), lambda text: None)

    def write(path: Path, shard: shards.Shard) -> str:
        if step_of(path) != 2 or dist.get_rank() != rank:
            return right(path, shard)
        if not damage:
            raise OSError(errno.ENOSPC, "No space left on device")
        digest = right(path, shard)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return digest

    def step(before: Any, batches: Any) -> Any:
        after = job.engine.step(before, batches)
        steps.append(after[0].step)
        for thread in threading.enumerate():
            if thread.name == "lf-background":
                thread.join(60)
        return after

    checkpoint.write_shard = write  # type: ignore[attr-defined]
    try:
        train(attrs.evolve(job, engine=attrs.evolve(job.engine, step=step)))
    except FAULTS as error:
        return f"{type(error).__name__}: {error}", steps
    finally:
        checkpoint.write_shard = right  # type: ignore[attr-defined]
    return "", steps


@pytest.mark.parametrize(("rank", "damage"), [(0, False), (1, False), (1, True)])
def test_a_save_that_fails_on_one_rank_ends_all_after_the_step_that_goes_on(
    workers: Workers, tmp_path: Path, rank: int, damage: bool
) -> None:
    run = attrs.evolve(rows_run(Tripping()), save=BESIDE)
    for text, steps in workers.run(2, failing, run, tmp_path / "run", rank, damage):
        assert text.startswith(
            f"CheckpointError: cannot save {tmp_path / 'run' / 'checkpoints' / 'step_2'}: rank {rank}"
        )
        assert ("it does not hold the bytes that were saved" if damage else "No space left on device") in text
        assert steps == [1, 2, 3]
    assert names(tmp_path / "run") == {"step_1"}
    assert checkpoint.latest(tmp_path / "run").step == 1  # type: ignore[union-attr]


def test_a_save_that_fails_at_the_end_is_an_error_too(workers: Workers, tmp_path: Path) -> None:
    run = attrs.evolve(rows_run(Tripping()), save=BESIDE, steps=2)
    ((text, steps),) = workers.run(1, failing, run, tmp_path / "run", 0, False)
    assert "step_2: No space left on device" in text
    assert steps == [1, 2]
    assert not (tmp_path / "run" / "hf").exists()


def test_a_process_killed_while_it_writes_beside_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_state(tmp_path, 1)

    def cut(path: Path, shard: shards.Shard) -> str:
        path.write_bytes(shard.head)
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    monkeypatch.setattr(checkpoint, "write_shard", cut)
    child = os.fork()
    if child == 0:
        try:
            with Background() as saving:
                saving.start(lambda: save_state(tmp_path, 2))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert any(".tmp-" in name for name in names(tmp_path))
    opened = open_latest(tmp_path)
    assert opened.reader is not None
    assert opened.skipped == ()
    assert holds(opened.reader, 1)
    monkeypatch.undo()
    save_state(tmp_path, 2)
    assert names(tmp_path) == {"step_1", "step_2"}


def test_one_piece_of_work_at_a_time() -> None:
    first, order = threading.Event(), []
    with Background() as saving:
        saving.start(lambda: (first.wait(60), order.append("first")))
        saving.check()
        assert order == []
        threading.Timer(0.01, first.set).start()
        saving.start(lambda: order.append("second"))
        assert order[0] == "first"
    assert order == ["first", "second"]


def test_a_failure_is_raised_every_time_and_nothing_starts_after_it() -> None:
    saving = Background()
    saving.start(lambda: 1 / 0)
    later: list[int] = []
    for ask in (saving.wait, saving.check, lambda: saving.start(lambda: later.append(1))):
        with pytest.raises(ZeroDivisionError):
            ask()
    assert later == []


def test_an_error_waits_and_an_interrupt_does_not() -> None:
    for error, waits in ((ValueError, True), (KeyboardInterrupt, False)):
        go, ended = threading.Event(), threading.Event()
        saving = Background()
        saving.start(lambda go=go, ended=ended: (go.wait(60), ended.set()))
        if waits:
            threading.Timer(0.01, go.set).start()
        with pytest.raises(error), saving:
            raise error
        assert ended.is_set() == waits
        go.set()


def test_a_copy_is_that_of_its_moment_and_a_failure_to_make_it_is_told_to_all() -> None:
    tensor = torch.arange(6.0)
    (kept,) = snapshot([box_piece("a", tensor)], checkpoint.ALONE)
    tensor.zero_()
    assert kept.data.tolist() == [0, 1, 2, 3, 4, 5]
    made = attrs.evolve(kept, data=torch.empty(6, device="meta"), make=lambda: torch.ones(6))
    (whole,) = snapshot([made], checkpoint.ALONE)
    assert whole.data.tolist() == [1] * 6

    def pieces(rank: int) -> Any:
        yield kept
        if rank == 1:
            raise MemoryError

    for error in on_ranks(2, lambda comm: snapshot(pieces(comm.rank), comm)):
        assert isinstance(error, CheckpointError)
        assert "rank 1: MemoryError" in str(error)


def test_a_host_without_memory_for_the_copies_of_its_ranks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = [box_piece("a", torch.zeros(25))]
    for total, fits in ((2 * 1100, True), (2 * 1100 - 1, False), (None, True)):
        memory = Memory(used=10, peak=1000, total=total)
        monkeypatch.setattr(background, "cpu", attrs.evolve(cpu, memory=lambda memory=memory: memory))
        for answer in on_ranks(2, lambda comm: check_memory(pieces, comm)):
            assert (answer is None) == fits
            if not fits:
                assert "save.background needs a copy of 200 bytes" in str(answer)
                assert "set save.background to False" in str(answer)


def crowded(run: lf.Run, folder: Path) -> str:
    job = open_job(run, folder, (), cpu, checkpoint.distributed(), lambda text: None)
    true = background.cpu
    background.cpu = attrs.evolve(cpu, memory=lambda: Memory(used=1, peak=1, total=2))
    try:
        train(job)
    except CheckpointError as error:
        return str(error)
    finally:
        background.cpu = true
    return ""


def test_a_run_whose_host_is_too_small_stops_after_its_first_step(workers: Workers, tmp_path: Path) -> None:
    run = attrs.evolve(rows_run(Tripping()), model=Toy(vocab=257), save=BESIDE)
    for text in workers.run(2, crowded, run, tmp_path / "run"):
        assert "save.background needs" in text
    assert checkpoint.latest(tmp_path / "run") is None


def apart() -> list[int]:
    """Gathers in the background while this thread gathers too."""
    comm = checkpoint.distributed()
    found: list[int] = []
    with own_group(comm) as own, Background() as saving:
        saving.start(lambda: found.extend(own.broadcast([own.gather(i + own.rank) for i in range(20)])[-1]))
        for i in range(20):
            assert comm.broadcast(i if comm.rank == 0 else None) == i
    return found


def test_threads_talk_in_a_group_of_their_own(workers: Workers) -> None:
    assert workers.run(2, apart) == [[19, 20], [19, 20]]


def test_a_file_that_reads_back_otherwise_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = shards.write_shard
    save_state(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "write_shard", lambda path, shard: right(path, shard)[::-1])
    pieces = [box_piece(name, tensor) for name, tensor in state(2).items()]
    with pytest.raises(CheckpointError, match=r"step_2.*it does not hold the bytes that were saved"):
        save(tmp_path, 2, pieces, {"value": 2}, reread=True)
    assert names(tmp_path) == {"step_1"}
