"""Saves that die, disks that fill up, files that are cut or changed."""

import errno
import io
import json
import os
import random
import shutil
import signal
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, FrameType
from typing import Any

import pytest
import torch

from lf.train import checkpoint, manifest, shards
from lf.train.checkpoint import (
    CheckpointError,
    Comm,
    Piece,
    box_piece,
    complete,
    latest,
    open_checkpoint,
    open_latest,
    prune,
    save,
    verify,
)
from lf.train.manifest import digest
from tests.saving import equal, holds, names, on_ranks, save_state, state

CHANGES_THE_DISK = frozenset({"open", "write", "flush", "fsync", "close", "mkdir", "replace", "unlink", "rmdir"})


def _at_call(k: int, act: Callable[[], None]) -> Callable[[FrameType, str, Any], None]:
    """Gives a profile function that acts right before the k-th call (from 0) that may change the disk."""
    seen = 0

    def hook(frame: FrameType, event: str, called: Any) -> None:
        nonlocal seen
        if event != "c_call" or not isinstance(called, BuiltinFunctionType) or called.__name__ not in CHANGES_THE_DISK:
            return
        if called.__module__ not in ("posix", "_io", "io", "fcntl") and not isinstance(called.__self__, io.IOBase):
            return
        seen += 1
        if seen > k:
            sys.setprofile(None)
            act()

    return hook


def _dies_at(k: int, job: Callable[[], object]) -> bool:
    """Runs a job in a child process that ends at once before its k-th change to the disk; False when it got through."""
    child = os.fork()
    if child == 0:
        try:
            sys.setprofile(_at_call(k, lambda: os._exit(9)))
            job()
            sys.setprofile(None)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def _deaths(job: Callable[[], object], reset: Callable[[], None]) -> Iterator[int]:
    """Kills a job at each point in turn, on a fresh folder; gives the number of the point after each death."""
    for k in range(1000):
        reset()
        if not _dies_at(k, job):
            return
        yield k
    raise AssertionError("the job has no end")


@pytest.fixture
def small_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", 16)


def _fresh(run: Path, steps: dict[int, int]) -> None:
    shutil.rmtree(run, ignore_errors=True)
    for step, value in steps.items():
        save_state(run, step, value)


def _newest_value(run: Path) -> int:
    """The value of the newest checkpoint, of which every tensor is right and nothing was skipped."""
    opened = open_latest(run)
    assert opened.reader is not None
    assert opened.skipped == ()
    value = int(opened.reader.meta["value"])
    assert holds(opened.reader, value)
    return value


@pytest.mark.usefixtures("small_writes")
def test_a_save_that_dies_anywhere_leaves_the_older_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    found = []
    for _ in _deaths(lambda: save_state(tmp_path, 2), lambda: _fresh(tmp_path, {1: 1})):
        found.append(_newest_value(tmp_path))
        assert verify(tmp_path / "checkpoints" / "step_1") == ""
        assert names(tmp_path) - {"step_1", "step_2"} == {name for name in names(tmp_path) if ".tmp-" in name}
        save_state(tmp_path, 2, value=5)
        assert names(tmp_path) == {"step_1", "step_2"}
        assert _newest_value(tmp_path) == 5
    assert found == sorted(found)
    assert set(found) == {1, 2}
    assert len(found) > 20


@pytest.mark.usefixtures("small_writes")
def test_a_replacement_that_dies_anywhere_leaves_one_of_both(tmp_path: Path) -> None:
    found = []
    for _ in _deaths(lambda: save_state(tmp_path, 2, value=3), lambda: _fresh(tmp_path, {2: 2})):
        found.append(_newest_value(tmp_path))
        save_state(tmp_path, 2, value=4)
        assert names(tmp_path) == {"step_2"}
        assert _newest_value(tmp_path) == 4
    assert found == sorted(found)
    assert set(found) == {2, 3}


def test_a_removal_that_dies_anywhere_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    left = []
    for _ in _deaths(lambda: prune(tmp_path, 1), lambda: _fresh(tmp_path, {1: 1, 2: 2, 3: 3})):
        assert _newest_value(tmp_path) == 3
        assert complete(tmp_path).skipped == ()
        left.append(len(complete(tmp_path).found))
        prune(tmp_path, 1)
        assert names(tmp_path) == {"step_3"}
    assert set(left) == {3, 2, 1}


def _raise_full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.usefixtures("small_writes")
def test_a_call_that_fails_anywhere_raises_and_leaves_nothing(tmp_path: Path) -> None:
    failed = kept_old = 0
    for k in range(1000):
        _fresh(tmp_path, {1: 1, 2: 2})
        error = None
        sys.setprofile(_at_call(k, _raise_full))
        try:
            save_state(tmp_path, 2, value=3)
            if sys.getprofile() is not None:
                break
        except CheckpointError as caught:
            error = caught
        finally:
            sys.setprofile(None)
        failed += error is not None
        assert holds(open_checkpoint(tmp_path / "checkpoints" / "step_1"), 1)
        kept = _newest_value(tmp_path)
        if error is not None:
            kept_old += kept == 2
            assert "No space left on device" in str(error)
            assert not any(".tmp-" in name for name in names(tmp_path))
        save_state(tmp_path, 3)
        prune(tmp_path, 3)
        assert names(tmp_path) == {"step_1", "step_2", "step_3"}
    assert failed > 20
    assert kept_old > 20


def test_a_killed_process_loses_at_most_the_save_it_was_in(tmp_path: Path) -> None:
    big = torch.arange(2_000_000, dtype=torch.float32)
    rng = random.Random(0)
    inside = 0
    for _ in range(4):
        child = os.fork()
        if child == 0:
            try:
                for step in range(1000):
                    save(tmp_path, step, [box_piece("a", big + step)], {"value": step})
                    prune(tmp_path, 2)
            finally:
                os._exit(1)
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            time.sleep(0.002)
            if latest(tmp_path) and any((tmp_path / "checkpoints").glob("*.tmp-*/rank_00000.safetensors")):
                break
        time.sleep(rng.random() * 0.01)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        inside += any(".tmp-" in name for name in names(tmp_path))
        opened = open_latest(tmp_path)
        assert opened.reader is not None
        assert opened.skipped == ()
        assert equal(opened.reader.read("a"), big + opened.reader.meta["value"])
        save(tmp_path, opened.reader.step + 1, [box_piece("a", big)], {"value": 0})
        assert not any(".tmp-" in name for name in names(tmp_path))
    assert inside > 0


Usage = namedtuple("Usage", "total used free")


def test_a_disk_that_is_too_small_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = save_state(tmp_path, 1)
    needed = (old / "rank_00000.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(9, 9, needed - 1))
    monkeypatch.setattr(checkpoint, "write_shard", None)
    with pytest.raises(
        CheckpointError, match=f"step_2: .* needs {needed} bytes, and {needed - 1} bytes are free.*save.keep"
    ):
        save_state(tmp_path, 2)
    assert names(tmp_path) == {"step_1"}
    assert _newest_value(tmp_path) == 1


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_rank_that_fails_fails_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    save_state(tmp_path, 1)
    right = shards.write_shard

    def write(path: Path, shard: shards.Shard) -> str:
        if path.name == f"rank_{bad:05d}.safetensors":
            path.write_bytes(shard.head)
            raise OSError(errno.ENOSPC, "No space left on device")
        return right(path, shard)

    def job(comm: Comm) -> Path:
        return save(tmp_path, 2, [box_piece(f"a{comm.rank}", torch.ones(3))], {}, comm=comm)

    monkeypatch.setattr(checkpoint, "write_shard", write)
    for error in on_ranks(3, job):
        assert isinstance(error, CheckpointError)
        assert f"rank {bad}: No space left on device" in str(error)
        assert f"rank_{bad:05d}.safetensors needs" in str(error)
        assert "are free on that disk; free some space" in str(error)
    assert names(tmp_path) == {"step_1"}
    monkeypatch.undo()
    assert on_ranks(3, job) == [tmp_path / "checkpoints" / "step_2"] * 3


def test_a_rank_whose_pieces_cannot_be_made_stops_all(tmp_path: Path) -> None:
    def pieces(rank: int) -> Iterator[Piece]:
        yield box_piece(f"a{rank}", torch.ones(3))
        if rank == 1:
            raise ArithmeticError("no such state")

    for error in on_ranks(2, lambda comm: save(tmp_path, 2, pieces(comm.rank), {}, comm=comm)):
        assert isinstance(error, CheckpointError)
        assert "rank 1: no such state" in str(error)
    assert latest(tmp_path) is None


def test_a_rank_that_sees_another_folder_is_told(tmp_path: Path) -> None:
    def job(comm: Comm) -> Path:
        return save(tmp_path / str(comm.rank), 2, [box_piece(f"a{comm.rank}", torch.ones(3))], {}, comm=comm)

    for error in on_ranks(2, job):
        assert "rank 1: " in str(error)
        assert "all ranks must see the same run folder" in str(error)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/run/checkpoints: Not a directory"):
        save_state(tmp_path / "run", 1)


def test_a_file_that_is_cut_anywhere_is_seen_by_its_size(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    path = save_state(tmp_path, 2)
    for name in ("manifest.json", "rank_00000.safetensors"):
        whole = (path / name).read_bytes()
        for size in range(len(whole)):
            (path / name).write_bytes(whole[:size])
            newest = latest(tmp_path)
            assert newest is not None
            assert newest.step == 1
            with pytest.raises(CheckpointError, match=str(path / name)):
                open_checkpoint(path)
        (path / name).write_bytes(whole)
        assert _newest_value(tmp_path) == 2


def test_a_changed_byte_anywhere_is_seen_before_it_is_used(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    path = save_state(tmp_path, 2)
    for name in ("manifest.json", "rank_00000.safetensors"):
        whole = (path / name).read_bytes()
        for place in range(len(whole)):
            (path / name).write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
            assert str(path) in verify(path)
            if place % 40 == 0:
                opened = open_latest(tmp_path)
                assert opened.reader is not None
                assert opened.reader.step == 1
                (skipped,) = opened.skipped
                assert skipped.path == path
                assert str(path) in skipped.reason
        (path / name).write_bytes(whole)


def test_all_ranks_agree_on_what_to_skip(tmp_path: Path) -> None:
    for step in (1, 2):
        shares = [[box_piece(name, tensor)] for name, tensor in state(step).items()]
        on_ranks(3, lambda comm, s=step, p=shares: save(tmp_path, s, p[comm.rank], {"value": s}, comm=comm))  # type: ignore[misc]
    file = tmp_path / "checkpoints" / "step_2" / "rank_00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x99")
    for opened in on_ranks(2, lambda comm: open_latest(tmp_path, comm=comm)):
        assert not isinstance(opened, Exception)
        assert opened.reader is not None
        assert holds(opened.reader, 1)
        assert [one.reason for one in opened.skipped] == [
            f"{file} is damaged: it does not hold the bytes that were saved"
        ]


def test_no_good_checkpoint_is_an_error_that_lists_all(tmp_path: Path) -> None:
    first, second = save_state(tmp_path, 1), save_state(tmp_path, 2)
    (first / "rank_00000.safetensors").unlink()
    (second / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_latest(tmp_path)
    assert f"{first / 'rank_00000.safetensors'}: No such file or directory" in str(caught.value)
    assert f"{second} is no complete checkpoint: {second / 'manifest.json'}: No such file" in str(caught.value)
    assert "remove that folder to start from the beginning" in str(caught.value)


def test_another_version_or_format_is_named(tmp_path: Path) -> None:
    path = save_state(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    for change, message in (
        ({"version": 2}, "is damaged"),
        ({"version": 2, "sha256": digest(2, manifest["body"])}, "has version 2 of the checkpoint format, and this lf"),
        ({"format": "other"}, "is not the manifest of an lf checkpoint"),
        ({"body": {"step": 1}}, "is damaged"),
        ({"body": None}, "is damaged"),
    ):
        (path / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)
    for text in ("[]", "3", '{"format": "lf checkpoint", "version": 1, "body": NaN}'):
        (path / "manifest.json").write_text(text)
        with pytest.raises(CheckpointError, match="manifest"):
            open_checkpoint(path)


def test_a_checkpoint_of_a_newer_lf_is_neither_passed_over_nor_replaced(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    path = save_state(tmp_path, 2)
    manifest = json.loads((path / "manifest.json").read_text())
    newer = {**manifest, "version": 2, "sha256": digest(2, manifest["body"])}
    (path / "manifest.json").write_text(json.dumps(newer))
    with pytest.raises(CheckpointError, match="has version 2"):
        open_latest(tmp_path)
    with pytest.raises(CheckpointError, match="has version 2"):
        save_state(tmp_path, 2)
    assert json.loads((path / "manifest.json").read_text())["version"] == 2


def test_a_pipe_is_no_manifest(tmp_path: Path) -> None:
    path = save_state(tmp_path, 1)
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    with pytest.raises(CheckpointError, match="no regular file"):
        open_checkpoint(path)


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the body of a manifest and gives it the hash of what it says then."""
    file = path / "manifest.json"
    outer = json.loads(file.read_text())
    change(outer["body"])
    outer["sha256"] = manifest.digest(outer["version"], outer["body"])
    file.write_text(json.dumps(outer))


def _put(*place: Any) -> Callable[[dict[str, Any]], None]:
    """Gives a change of a body: all but the last of `place` say where, the last is what stands there afterwards."""

    def change(body: dict[str, Any]) -> None:
        at: Any = body
        for key in place[:-2]:
            at = at[key]
        at[place[-2]] = place[-1]

    return change


TENSOR = ("tensors", "exp_avg/a")
PIECE = (*TENSOR, "pieces", 0)

HOSTILE = {
    "the step is text": (_put("step", "1"), "expected int @ body.step"),
    "the step is a bool": (_put("step", True), "expected int @ body.step"),
    "the step is negative": (_put("step", -1), "step is -1"),
    "meta is a list": (_put("meta", []), "body.meta"),
    "files are a mapping": (_put("files", {}), "expected tuple @ body.files"),
    "a size is negative": (_put("files", 0, "bytes", -1), "has -1 bytes"),
    "a hash is short": (_put("files", 0, "sha256", "ab"), "hash 'ab'"),
    "tensors are a list": (_put("tensors", []), "body.tensors"),
    "a field too many": (_put(*TENSOR, "more", 1), "extra fields found"),
    "a field too few": (lambda body: body["tensors"]["exp_avg/a"].pop("shape"), "required field missing"),
    "an unknown dtype": (_put(*TENSOR, "dtype", "F8_E4M3"), "exp_avg/a: dtype is 'F8_E4M3'"),
    "the shape is text": (_put(*TENSOR, "shape", "43"), "shape"),
    "an extent is a float": (_put(*TENSOR, "shape", [4.0, 3]), "body.tensors\\['exp_avg/a'\\].shape"),
    "an extent is negative": (_put(*TENSOR, "shape", [-4, -3]), r"no tensor has the shape \[-4, -3\]"),
    "a huge extent beside none": (_put(*TENSOR, "shape", [0, 10**30]), "no tensor has the shape"),
    "too many dimensions": (_put(*TENSOR, "shape", [1] * 65), "no tensor has the shape"),
    "a shape larger than the file": (_put(*TENSOR, "shape", [4, 3 * 2**40]), "no rank gives"),
    "no pieces": (_put(*TENSOR, "pieces", []), "exp_avg/a: no rank gives 12 of its 12 elements"),
    "an empty piece": (_put(*PIECE, "stop", 0), "exp_avg/a: no rank gives 12 of its 12 elements"),
    "a hole": (_put(*PIECE, "stop", 11), "exp_avg/a: no rank gives 1 of its 12 elements"),
    "an overlap": (lambda body: _twice(body["tensors"]["exp_avg/a"]["pieces"]), "ranks 0 and 0 both give the box"),
    "a box of too few dimensions": (_put(*PIECE, "at", [0]), "are not all inside"),
    "a box outside": (_put(*PIECE, "at", [1, 0]), "are not all inside"),
    "a box before the start": (_put(*PIECE, "at", [-1, 0]), "are not all inside"),
    "elements beyond the box": (_put(*PIECE, "stop", 13), "are not all inside"),
    "a file that is not listed": (_put(*PIECE, "file", 1), "the file of rank 1, and there are 1 files"),
    "a negative file": (_put(*PIECE, "file", -1), "the file of rank -1"),
    "bytes beyond the file": (_put(*PIECE, "offset", 2**40), "a piece lies at bytes"),
    "bytes before the file": (_put(*PIECE, "offset", -8), r"a piece lies at bytes \[-8"),
    "bytes off the grid": (_put(*PIECE, "offset", 9), "its elements have 4"),
    "bytes of another tensor": (
        lambda body: _put(
            "tensors", "weight/a", "pieces", 0, "offset", body["tensors"]["exp_avg/a"]["pieces"][0]["offset"]
        )(body),
        "weight/a and exp_avg/a both lie at byte",
    ),
}


def _twice(rows: list[Any]) -> None:
    rows += rows


@pytest.mark.parametrize("case", HOSTILE)
def test_a_manifest_that_lies_is_refused_and_passed_over(tmp_path: Path, case: str) -> None:
    change, message = HOSTILE[case]
    save_state(tmp_path, 1)
    path = save_state(tmp_path, 2)
    forge(path, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert f"{path / 'manifest.json'} does not follow version 1" in str(caught.value)
    opened = open_latest(tmp_path)
    assert opened.reader is not None
    assert holds(opened.reader, 1)
    (skipped,) = opened.skipped
    assert skipped.path == path


def test_a_manifest_that_was_not_changed_passes_the_forger(tmp_path: Path) -> None:
    path = save_state(tmp_path, 2)
    forge(path, lambda body: None)
    assert holds(open_checkpoint(path), 2)


def test_a_manifest_that_is_deeper_than_python_goes_is_passed_over(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    path = save_state(tmp_path, 2)
    for text in ("[" * 200_000, '{"body": ' + "[" * 50_000 + "]" * 50_000 + "}"):
        (path / "manifest.json").write_text(text)
        opened = open_latest(tmp_path)
        assert opened.reader is not None
        assert opened.reader.step == 1


UNREADABLE = {
    "manifest": (Path, "read_bytes", "manifest.json"),
    "size": (Path, "stat", "rank_00000.safetensors"),
    "content": (checkpoint, "file_sha256", "rank_00000.safetensors"),
}


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("what", UNREADABLE)
def test_what_the_system_does_not_give_is_no_reason_to_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, what: str
) -> None:
    for step in (1, 2, 3):
        save_state(tmp_path, step)
    file = tmp_path / "checkpoints" / "step_2" / UNREADABLE[what][2]
    owner, name, _ = UNREADABLE[what]
    right = getattr(owner, name)

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == file:
            raise OSError(code, os.strerror(code))
        return right(path, *args, **kwargs)

    monkeypatch.setattr(owner, name, refuse)
    assert open_latest(tmp_path).reader is not None  # A newer one is good.
    shutil.rmtree(tmp_path / "checkpoints" / "step_3")
    for error in on_ranks(2, lambda comm: open_latest(tmp_path, comm=comm)):
        assert isinstance(error, CheckpointError)
        assert f"{file.parent} cannot be read: {file}: {os.strerror(code)}" in str(error)
        assert "go on from an older checkpoint" in str(error)
    # What may be whole is neither replaced nor the reason to remove an older one.
    prune(tmp_path, 1)
    assert names(tmp_path) == {"step_1", "step_2"}
    if what != "content":
        with pytest.raises(CheckpointError, match="cannot be read"):
            save_state(tmp_path, 2)


def test_a_folder_of_checkpoints_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_state(tmp_path, 1).parent

    def refuse(_: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match=f"{path}: Permission denied"):
        open_latest(tmp_path)


def test_a_shard_that_vanishes_or_shrinks_after_opening_is_named(tmp_path: Path) -> None:
    path = save_state(tmp_path, 1)
    reader = open_checkpoint(path)
    file = path / "rank_00000.safetensors"
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=f"{file} cannot be read"):
        reader.read("weight/a")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file} cannot be read"):
        reader.read("weight/a")
