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

    `build` fills an empty temporary folder. Its facts (JSON) and the sha256 of its files go into `meta.json`, and one
    rename makes it `folder`. Every call reads the files once to compare them, a second or two for each GB: a byte that
    changed on the disk is found here, and not trained on. Processes of one host wait for each other on a file lock,
    which the kernel drops when its holder dies. Hosts that share the disk but not the lock each build, and the first
    rename wins. A killed build leaves nothing that counts as complete.
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
        facts = dict(build(temporary))
        files = {path.name: sha256_of(path) for path in temporary.iterdir()}
        meta = {"facts": facts, "files": files, "sha256": key_of(facts, files)}
        (temporary / _META).write_text(json.dumps(meta), encoding="utf-8")
        for path in temporary.iterdir():
            sync(path)
        _rename(temporary, folder)
    except OSError as error:
        # Writes to an open file name no path.
        told = f"{error.strerror}, while the cache was built"
        raise OSError(error.errno, told, error.filename or str(folder)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    made = _read_meta(folder)
    if made is None:
        raise ValueError(f"{folder}: the files do not hold what was just written to them; check the disk that it is on")
    return made


def _read_meta(folder: Path) -> dict[str, Any] | None:
    try:
        meta = json.loads((folder / _META).read_text(encoding="utf-8"))
        facts, files = meta["facts"], meta["files"]
        if key_of(facts, files) == meta["sha256"] and all(sha256_of(folder / name) == files[name] for name in files):
            return dict(facts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def sha256_of(path: Path) -> str:
    """Returns the sha256 of the bytes of a file, as hexadecimal digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
