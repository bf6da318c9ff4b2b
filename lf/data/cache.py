"""Folders that are built once and then only read, however many processes want them at the same moment."""

import errno
import hashlib
import json
import shutil
import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lf.storage import locked, sync

_META = "meta.json"


def key_of(*parts: Any) -> str:
    """Returns a cache key: the sha256 of JSON values."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def build_once(folder: Path, build: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the facts that `build` returned for `folder`, building it first where it is missing or broken.

    `build` fills an empty temporary folder. Its facts (JSON) and the sizes of its files go into `meta.json`, and one
    rename makes it `folder`. Processes of one host wait for each other on a file lock, which the kernel drops when its
    holder dies. Hosts that share the disk but not the lock each build, and the first rename wins. A killed build leaves
    nothing that counts as complete.
    """
    meta = _read_meta(folder)
    if meta is not None:
        return meta
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f"{folder.name}.lock")
    with locked(lock, wait=True) as held:
        if not held:
            raise ValueError(f"{lock}: the file system gives no file locks; put the cache on one that does")
        meta = _read_meta(folder)
        return _build(folder, build) if meta is None else meta


def _build(folder: Path, build: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    # The lock is this host's alone, and so is every temporary folder that carries its name.
    prefix = f".{folder.name}.{socket.gethostname()}."
    for dead in folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(dead, ignore_errors=True)
    temporary = folder.with_name(prefix + uuid.uuid4().hex)
    temporary.mkdir()
    try:
        meta = {"facts": build(temporary), "files": {path.name: path.stat().st_size for path in temporary.iterdir()}}
        (temporary / _META).write_text(json.dumps(meta), encoding="utf-8")
        for path in temporary.iterdir():
            sync(path)
        _rename(temporary, folder)
    except OSError as error:
        error.add_note(f"while building the cache folder {folder}")
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    facts = _read_meta(folder)
    assert facts is not None, folder
    return facts


def _read_meta(folder: Path) -> dict[str, Any] | None:
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        if all((folder / name).stat().st_size == size for name, size in meta["files"].items()):
            return dict(meta["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _rename(temporary: Path, folder: Path) -> None:
    if folder.exists() and _read_meta(folder) is None:
        broken = folder.with_name(f"{temporary.name}.broken")
        folder.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)
    try:
        temporary.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or _read_meta(folder) is None:
            raise
    sync(folder.parent)
