"""Locks on files, and waiting until files are on the disk."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from lf import storage
from lf.data.cache import build_once
from lf.storage import flush, locked, sync


def test_a_lock_is_held_once_and_given_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, wait=False) as held:
        assert held
        with pytest.raises(BlockingIOError), locked(path, wait=False):
            pytest.fail("held twice")
    with pytest.raises(ArithmeticError), locked(path, wait=True):
        raise ArithmeticError
    with locked(path, wait=False) as held:
        assert held


def test_a_child_that_goes_on_does_not_keep_a_lock(tmp_path: Path) -> None:
    path, (ours, theirs) = tmp_path / "lock", os.pipe()
    with locked(path, wait=False):
        child = os.fork()
        if child == 0:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
    try:
        with locked(path, wait=False) as held:
            assert held
    finally:
        os.close(theirs)
        os.waitpid(child, 0)
        os.close(ours)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_a_disk_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*args: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    if code == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(code)), locked(tmp_path / "lock", wait=False):
            pytest.fail("not held")
        return
    with locked(tmp_path / "lock", wait=False) as held:
        assert not held
    with pytest.raises(ValueError, match="gives no file locks; put the cache on one that does"):
        build_once(tmp_path / "key", lambda _: pytest.fail("built without a lock"))


def test_files_and_folders_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(storage.os, "fsync", lambda handle: waited.append(os.fstat(handle).st_ino))
    with (tmp_path / "a").open("wb") as file:
        file.write(b"abc")
        flush(file)
        assert (tmp_path / "a").read_bytes() == b"abc"
    sync(tmp_path / "a")
    sync(tmp_path)
    inode = (tmp_path / "a").stat().st_ino
    assert waited == [inode, inode, tmp_path.stat().st_ino]
