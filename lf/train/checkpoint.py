"""Saves training state, finds it again, and keeps only what is needed. Nothing is pickled.

A save writes into a temporary folder, flushes every file to the disk, writes the manifest last and renames once: a
folder called `step_<n>` is whole unless somebody damaged it later. `lf.train.manifest` describes the format,
`lf.train.reader` reads it back at any layout, `lf.train.shards` has the pieces that go in. All ranks must see the same
folder.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import attrs

from lf.storage import locked, sync
from lf.train.comm import ALONE, Comm, distributed, together
from lf.train.manifest import (
    CheckpointError,
    Entry,
    File,
    Manifest,
    UnreadableError,
    canonical,
    check_files,
    file_name,
    read_error,
    read_manifest,
    write_manifest,
)
from lf.train.reader import Reader, open_checkpoint
from lf.train.shards import Piece, Shard, Stored, box_piece, dtype_name, file_sha256, layout, tiling_fault, write_shard

__all__ = [
    "ALONE",
    "CheckpointError",
    "Comm",
    "Found",
    "Listing",
    "Opened",
    "Piece",
    "Reader",
    "Skipped",
    "UnreadableError",
    "box_piece",
    "check_all_read",
    "complete",
    "distributed",
    "latest",
    "on_first",
    "open_checkpoint",
    "open_latest",
    "prune",
    "save",
    "verify",
]

_FINISHED = re.compile(r"step_(0|[1-9]\d*)(\.old)?")
_TEMPORARY = re.compile(r"step_\d+\.tmp-[0-9a-f]+")

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class _Row:
    """A piece without its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: Stored


def _folder(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def _temporary(folder: Path, step: int) -> Path:
    return folder / f"step_{step}.tmp-{secrets.token_hex(4)}"


def save(
    run_dir: Path,
    step: int,
    pieces: Iterable[Piece],
    meta: Mapping[str, Any],
    *,
    comm: Comm = ALONE,
    reread: bool = False,
) -> Path:
    """Saves a training state as `checkpoints/step_<step>/` of a run, all ranks together, and returns that folder.

    Each rank gives its pieces; together they must hold every element of every tensor once, so a replica is given by
    one rank only. `meta` is plain JSON; rank 0's is kept. A checkpoint of the same step is replaced, and can be found
    until the new one can. With `reread`, each rank reads its file again and compares before the checkpoint counts. When
    any rank fails, all raise CheckpointError, nothing of the attempt stays, and the checkpoints that were there are as
    they were.
    """
    folder = _folder(run_dir)
    target = folder / f"step_{step}"
    shard = Shard(head=b"", pieces=(), stored=(), size=0)
    tensors: dict[str, Entry] = {}

    def plan() -> tuple[int, list[_Row]]:
        nonlocal shard
        shard = layout(tuple(pieces), comm.rank)
        rows = zip(shard.pieces, shard.stored, strict=True)
        return shard.size, [_Row(name=p.name, dtype=dtype_name(p), shape=p.shape, stored=at) for p, at in rows]

    with contextlib.ExitStack() as cleanup:

        def begin(plans: list[tuple[int, list[_Row]]]) -> str:
            nonlocal tensors
            _check_step_and_meta(step, meta)
            tensors = _table(row for _, rows in plans for row in rows)
            folder.mkdir(parents=True, exist_ok=True)
            sync(run_dir)
            if cleanup.enter_context(_locked(folder)):
                _remove_temporary(folder)
            _check_space(folder, sum(size for size, _ in plans))
            temporary = _temporary(folder, step)
            cleanup.callback(shutil.rmtree, temporary, ignore_errors=True)
            temporary.mkdir()
            return temporary.name

        try:
            temporary = folder / together(comm, plan, begin, CheckpointError)

            def write() -> File:
                path = temporary / file_name(comm.rank)
                if not temporary.is_dir():
                    raise CheckpointError(f"{temporary} is not there; all ranks must see the same run folder")
                with _disk_full_explained(path, shard.size):
                    file = File(bytes=shard.size, sha256=write_shard(path, shard))
                if reread:
                    _check_hash(path, file.sha256)
                return file

            def finish(files: list[File]) -> None:
                manifest = Manifest(step=step, meta=dict(meta), files=tuple(files), tensors=tensors)
                with _disk_full_explained(temporary, sum(file.bytes for file in files)):
                    write_manifest(temporary, manifest)
                check_files(temporary, manifest.files)
                _publish(temporary, target)

            together(comm, write, finish, CheckpointError)
        except CheckpointError as error:
            raise CheckpointError(f"cannot save {target}: {error}") from error
    return target


def _check_step_and_meta(step: int, meta: Mapping[str, Any]) -> None:
    if step < 0:
        raise ValueError(f"step is {step}; it counts from 0")
    try:
        kept = json.loads(canonical(dict(meta))) == dict(meta)
    except (TypeError, ValueError) as error:
        raise ValueError(f"meta is not plain JSON ({error})") from error
    if not kept:
        raise ValueError("meta does not come back from JSON as it went in; use lists for tuples and text for keys")


def _table(rows: Iterable[_Row]) -> dict[str, Entry]:
    found: dict[str, list[_Row]] = {}
    for row in rows:
        found.setdefault(row.name, []).append(row)
    table = {}
    for name, same in found.items():
        kinds = {(row.dtype, row.shape): row.stored.file for row in same}
        if len(kinds) > 1:
            views = ", ".join(f"{dtype} {list(shape)} on rank {file}" for (dtype, shape), file in kinds.items())
            raise ValueError(f"the pieces of {name} disagree about the tensor: {views}")
        fault = tiling_fault(same[0].shape, [row.stored for row in same])
        if fault:
            raise ValueError(
                f"the pieces of {name} (shape {list(same[0].shape)}) do not hold each element once: {fault}"
            )
        table[name] = Entry(dtype=same[0].dtype, shape=same[0].shape, pieces=tuple(row.stored for row in same))
    return table


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CheckpointError(_too_small(folder, needed, free))


def _too_small(path: Path, needed: int, free: int) -> str:
    return (
        f"{path} needs {needed} bytes, and {free} bytes are free on that disk; "
        "free some space, keep fewer checkpoints (save.keep), or choose another run folder (--out)"
    )


@contextlib.contextmanager
def _disk_full_explained(path: Path, needed: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent).free
        raise CheckpointError(f"{error.strerror}: {_too_small(path, needed, free)}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Holds the folder's lock, which the system drops when the process dies; gives False where files have no locks."""
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(locked(folder / ".lock", wait=False))
        except BlockingIOError as error:
            raise CheckpointError(
                f"another process is writing checkpoints in {folder}; stop it, or choose another run folder (--out)"
            ) from error
        yield held


def _publish(temporary: Path, target: Path) -> None:
    old = target.with_name(f"{target.name}.old")
    if target.exists():
        if _is_damaged(target):
            _discard(target)
        else:
            if old.exists():
                _discard(old)
            os.replace(target, old)
    try:
        os.replace(temporary, target)
    except OSError:
        if old.exists():
            os.replace(old, target)
        raise
    sync(target.parent)
    if old.exists():
        _discard(old)


def _is_damaged(path: Path) -> bool:
    try:
        read_manifest(path)
    except UnreadableError:
        raise
    except CheckpointError:
        return True
    return False


def _discard(path: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that a half-removed one is never taken for a whole one."""
    trash = path.with_name(f"{path.name.removesuffix('.old')}.tmp-{secrets.token_hex(4)}")
    os.replace(path, trash)
    shutil.rmtree(trash, ignore_errors=True)


def _remove_temporary(folder: Path) -> None:
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


@attrs.frozen(kw_only=True)
class Found:
    """A complete checkpoint."""

    step: int
    """Its step."""
    path: Path
    """Its folder."""


@attrs.frozen(kw_only=True)
class Skipped:
    """A folder that is called like a checkpoint and is none."""

    path: Path
    """The folder."""
    reason: str
    """What is wrong with it."""


@attrs.frozen(kw_only=True)
class Listing:
    """The checkpoints of a run."""

    found: tuple[Found, ...]
    """The complete ones, newest first: the manifest is sound, and all files are there with the right sizes."""
    skipped: tuple[Skipped, ...]
    """The others, newest first."""


def _candidates(run_dir: Path) -> list[Found]:
    """Returns the folders of a run that are called like checkpoints, newest first. Raises OSError.

    At equal steps the one that a second save replaces comes last: it counts when the new one is not there.
    """
    folder = _folder(run_dir)
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    matches = [match for match in map(_FINISHED.fullmatch, names) if match]
    ordered = sorted(matches, key=lambda match: (-int(match[1]), match[0]))
    return [Found(step=int(match[1]), path=folder / match[0]) for match in ordered]


def complete(run_dir: Path) -> Listing:
    """Returns the complete checkpoints of a run and the others; file contents are not hashed. Raises OSError."""
    found: dict[int, Found] = {}
    skipped = []
    for one in _candidates(run_dir):
        if one.step in found:
            continue
        try:
            _check(one)
            found[one.step] = one
        except CheckpointError as error:
            skipped.append(Skipped(path=one.path, reason=str(error)))
    return Listing(found=tuple(found.values()), skipped=tuple(skipped))


def latest(run_dir: Path) -> Found | None:
    """Returns the newest complete checkpoint of a run, None without one; file contents are not hashed."""
    return next(iter(complete(run_dir).found), None)


def prune(run_dir: Path, keep: int, *, comm: Comm = ALONE) -> tuple[Path, ...]:
    """Removes all but the newest `keep` complete checkpoints of a run, and what dead saves left behind.

    All ranks call it together, after a save. Before anything goes, the hashes of the checkpoints that stay are
    verified, newest first, until one is good; when none is, the newest good one among the others stays too, and when
    there is no such one, all stay. Damaged folders are left to the user. Returns what was removed.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least 1 checkpoint must stay")
    found = on_first(comm, lambda: complete(run_dir)).found
    doomed = found[keep:]
    if doomed:
        good = next((one for one in found if _is_good(one.path, comm)), None)
        doomed = tuple(one for one in doomed if good is not None and one != good)

    def remove() -> None:
        folder = _folder(run_dir)
        if not folder.is_dir():
            return
        with _locked(folder) as held:
            for one in doomed:
                _discard(one.path)
            for one in found:
                old = one.path.with_name(f"{one.path.name}.old")
                if old.exists():
                    _discard(old)
            if held:
                _remove_temporary(folder)

    on_first(comm, remove)
    return tuple(one.path for one in doomed)


def _is_good(path: Path, comm: Comm) -> bool:
    try:
        return not verify(path, comm=comm)
    except CheckpointError:  # That of verify, which all ranks raise together.
        return False


def verify(path: Path, *, comm: Comm = ALONE) -> str:
    """Returns what is wrong with a checkpoint, an empty text when every byte is as it was saved.

    All ranks call it together; each hashes its share of the files. Raises CheckpointError on all of them where a file
    is there and the system does not give it: nobody knows whether that checkpoint is good.
    """
    return _verify(path, None, comm)


def _verify(path: Path, step: int | None, comm: Comm) -> str:
    def work() -> list[str]:
        try:
            manifest = read_manifest(path) if step is None else _check(Found(step=step, path=path))
            for index in range(comm.rank, len(manifest.files), comm.world):
                _check_hash(path / file_name(index), manifest.files[index].sha256)
        except UnreadableError:
            raise
        except CheckpointError as error:
            return [str(error)]
        return []

    def finish(rows: list[list[str]]) -> str:
        return "; ".join(dict.fromkeys(fault for row in rows for fault in row))

    return together(comm, work, finish, CheckpointError)


def _check_hash(path: Path, sha256: str) -> None:
    try:
        same = file_sha256(path) == sha256
    except OSError as error:
        raise read_error(path, error) from error
    if not same:
        raise CheckpointError(f"{path} is damaged: it does not hold the bytes that were saved")


def on_first(comm: Comm, work: Callable[[], T]) -> T:
    """Returns what `work` gives on rank 0; where it fails, every rank raises the same CheckpointError."""
    return together(comm, lambda: None, lambda _: work(), CheckpointError)


def _check(found: Found) -> Manifest:
    """Returns the manifest of a checkpoint; raises CheckpointError where its folder has the name of another step."""
    manifest = read_manifest(found.path)
    if manifest.step != found.step:
        raise CheckpointError(f"{found.path} holds step {manifest.step}; give the folder its name back")
    return manifest


@attrs.frozen(kw_only=True, eq=False)
class Opened:
    """What a run resumes from."""

    reader: Reader | None
    """The newest good checkpoint, None when the run has none yet."""
    skipped: tuple[Skipped, ...]
    """Newer folders that were passed over: print them."""


def open_latest(run_dir: Path, *, comm: Comm = ALONE) -> Opened:
    """Returns the newest checkpoint of a run of which every byte is as it was saved, and what was passed over.

    Only what is missing or damaged is passed over. All ranks call it together. Raises CheckpointError when the run has
    checkpoints and none of them is good, and when the system does not give a file of one that would be used: that one
    may be whole, and a run must not go back for a wrong permission or a disk that is away.
    """
    skipped: list[Skipped] = []
    for one in on_first(comm, lambda: _candidates(run_dir)):
        fault = _verify(one.path, one.step, comm)
        if not fault:
            return Opened(reader=open_checkpoint(one.path), skipped=tuple(skipped))
        skipped.append(Skipped(path=one.path, reason=fault))
    if skipped:
        reasons = "\n".join(f"  {one.reason}" for one in skipped)
        raise CheckpointError(
            f"no checkpoint in {_folder(run_dir)} can be used:\n{reasons}\n"
            "remove that folder to start from the beginning"
        )
    return Opened(reader=None, skipped=())


def check_all_read(reader: Reader, *, comm: Comm = ALONE) -> None:
    """Raises CheckpointError on all ranks when a checkpoint has tensors of which no rank has read anything."""

    def finish(rows: list[tuple[str, ...]]) -> None:
        left = sorted(set(rows[0]).intersection(*rows[1:]))
        if left:
            more = f" and {len(left) - 5} more" if len(left) > 5 else ""
            raise CheckpointError(
                f"{reader.path} has state that this run does not read back: {', '.join(left[:5])}{more}; "
                "resume with the config that saved it, or choose another --out"
            )

    together(comm, reader.unread, finish, CheckpointError)
