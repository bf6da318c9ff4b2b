"""What is asked of a disk beyond reading and writing: that bytes are on it, and that one process writes at a time."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def flush(file: IO[bytes]) -> None:
    """Waits until what was written to an open file is on the disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Holds a lock on a file of this name, which the system gives back when the process dies.

    Gives False, and holds nothing, where the disk has no locks. Raises BlockingIOError where another process holds it
    and `wait` is False, OSError where the file cannot be made.
    """
    with open(path, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            held = False
        try:
            yield held
        finally:
            if held:  # A child that was forked meanwhile would keep it.
                fcntl.flock(file, fcntl.LOCK_UN)
