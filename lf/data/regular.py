"""Whether a path is a file that can be read to its end: opening a pipe or a device may wait for ever."""

import stat
from pathlib import Path

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def kind_fault(path: Path) -> str:
    """Returns what a path is instead of a regular file, with the cure; empty for one, and for what is not there."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"it cannot be looked at ({error.strerror}); mend the path"
    if stat.S_ISREG(mode):
        return ""
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
    return f"it is {kind}, and must be a regular file; put the file there"
