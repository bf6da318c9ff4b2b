"""A cache of latents on a disk: shards of safetensors that are appended to, and an index that ends them.

A cache is a folder of `plan.json` (what is encoded, and by what), `empty.safetensors`, `rows-00000.safetensors` and so
on and, when all is there, `index.json`. Row n of the cache has the tensors `n.latents`, `n.text` and perhaps
`n.condition`, `n.image`, `n.references.0` and so on; an edit has its own `n.empty`, as its pictures are in it. The
header of a shard says, as JSON, what its rows are. A shard appears whole, by one rename, so a killed run goes on behind
the last one. The index has the sha256 of every file.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lf.data.cache import key_of, sha256_of
from lf.data.clips import Planned
from lf.data.encode import json_file
from lf.data.files import TextFile, file_digests
from lf.storage import locked, sync

PLAN, INDEX, EMPTY = "plan.json", "index.json", "empty.safetensors"
FORMAT = 3
_AGAIN = (
    "copy the cache again, or remove index.json, {} and the shards behind it, and run prepare.py latents again, which "
    "makes them anew"
)


def write_cache(
    folder: Path,
    planned: Sequence[Planned],
    facts: Mapping[str, Any],
    empty: Callable[[], Tensor],
    encode: Callable[[Planned], Mapping[str, Tensor]],
    *,
    shard_mb: float,
    say: Callable[[int], None],
) -> int:
    """Encodes what a cache lacks of a plan, one medium at a time, and ends it; returns how many rows were there before.

    `say` is told the rows that are there after each shard. A cache that is ended is read again, and compared with its
    index. Raises ValueError where the folder holds another plan, lacks a file in between or is written by another
    process; OSError where it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        done = [row for shard in _shards(folder) for row in _rows_of(shard)]
        _keep_plan(folder, planned, facts, done)
        if (folder / INDEX).exists():
            check_files(folder, read_index(folder), None)
            return len(planned)
        if not (folder / EMPTY).exists():
            _save(folder / EMPTY, {"empty": empty()}, [])
        before = len(done)
        for rows in _grouped(planned[before:], encode, shard_mb):
            named = [(f"{len(done) + at}.{name}", t) for at, (_, made) in enumerate(rows) for name, t in made.items()]
            records = [_record(one, made) for one, made in rows]
            file = folder / f"rows-{len(_shards(folder)):05d}.safetensors"
            _save(file, dict(named), records)
            done += records
            say(len(done))
        files = [
            {"file": file.name, "bytes": file.stat().st_size, "sha256": sha256_of(file), "rows": len(_rows_of(file))}
            for file in (folder / EMPTY, *_shards(folder))
        ]
        index = {"format": FORMAT, "facts": dict(facts), "files": files, "rows": done}
        _write(folder / INDEX, json.dumps({**index, "sha256": key_of(index)}))
    return before


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / "lock", wait=False))
        except BlockingIOError as error:
            raise ValueError(
                f"another process writes {folder}; wait until it has ended, or give another folder"
            ) from error
        yield


def _keep_plan(
    folder: Path, planned: Sequence[Planned], facts: Mapping[str, Any], done: Sequence[Mapping[str, Any]]
) -> None:
    """Writes what a cache is of, or raises ValueError where the folder, with the rows `done`, is of something else."""
    rows = [[*one.media.told, one.fps, *attrs.astuple(one.bucket), one.digest] for one in planned]
    told = {"format": FORMAT, "facts": dict(facts), "rows": len(rows), "media": key_of(rows)}
    file = folder / PLAN
    if not file.exists():
        others = sorted(p.name for p in folder.iterdir() if p.name != "lock" and not p.name.endswith(".partial"))
        if others:
            raise ValueError(f"{folder} holds {', '.join(others[:3])} and no {PLAN}; give a new folder")
        _write(file, json.dumps(told))
        return
    have = json_file(file, "make the cache again")
    wrong = [name for name in told if have.get(name) != told[name]]
    if wrong:
        was = {row["id"]: row.get("media") for row in done}
        changed = [one.media.name for one in planned if was.get(one.media.name) not in (None, one.digest)]
        bytes_of = f"; the bytes of {', '.join(changed[:3])} are others" if changed else ""
        raise ValueError(
            f"{folder} was begun with other {' and '.join(wrong)} (media, their bytes, captions, buckets or encoder "
            f"differ{bytes_of}); give a new folder, or remove it"
        )


def _grouped(
    planned: Sequence[Planned], encode: Callable[[Planned], Mapping[str, Tensor]], shard_mb: float
) -> Iterator[list[tuple[Planned, Mapping[str, Tensor]]]]:
    held: list[tuple[Planned, Mapping[str, Tensor]]] = []
    size = 0
    for one in planned:
        made = encode(one)
        held.append((one, made))
        size += sum(tensor.nbytes for tensor in made.values())
        if size >= shard_mb * 1e6:
            yield held
            held, size = [], 0
    if held:
        yield held


def _record(one: Planned, made: Mapping[str, Tensor]) -> dict[str, Any]:
    return {
        **dict(zip(("id", "caption", "references"), one.media.told, strict=True)),
        "media": one.digest,
        "fps": one.fps,
        "bucket": [one.bucket.frames, one.bucket.height, one.bucket.width],
        "shapes": {name: list(tensor.shape) for name, tensor in made.items()},
    }


def _save(file: Path, tensors: dict[str, Tensor], records: Sequence[Mapping[str, Any]]) -> None:
    with _whole(file) as partial:
        save_file(tensors, partial, {"rows": json.dumps(records)})


def _write(file: Path, text: str) -> None:
    with _whole(file) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """Gives the path to write a file to, which then becomes the file; raises OSError where that fails."""
    partial = file.with_name(f"{file.name}.partial")
    try:
        yield partial
        sync(partial)
        partial.rename(file)
        sync(file.parent)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{file} cannot be written ({error}); make room on its disk, and give the same command again, which goes on"
        ) from error


def _shards(folder: Path) -> list[Path]:
    """Returns the shards in order; raises ValueError where one lacks in between."""
    shards = sorted(folder.glob("rows-*.safetensors"))
    for number, shard in enumerate(shards):
        wanted = folder / f"rows-{number:05d}.safetensors"
        if shard != wanted:
            raise ValueError(f"{wanted} is missing; {_AGAIN.format(wanted.name)}")
    return shards


def _rows_of(shard: Path) -> list[dict[str, Any]]:
    told = (open_shard(shard).metadata() or {}).get("rows", "")
    try:
        return json.loads(told)
    except ValueError as error:
        raise ValueError(f"{shard} does not say what its rows are ({error}); {_AGAIN.format(shard.name)}") from error


def open_shard(file: Path) -> Any:
    """Returns an open file of a cache; raises ValueError for one that cannot be read."""
    try:
        return safe_open(file, "pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} cannot be read ({error}); {_AGAIN.format(file.name)}") from error


def read_index(folder: Path) -> dict[str, Any]:
    """Returns the index of a cache; raises ValueError where it was changed."""
    index = json_file(folder / INDEX, "make the cache again")
    told = {name: value for name, value in index.items() if name != "sha256"}
    if index.get("format") != FORMAT or index.get("sha256") != key_of(told):
        raise ValueError(f"{folder / INDEX} was changed or is of another format; make the cache again")
    return index


def check_files(folder: Path, index: Mapping[str, Any], cache_dir: Path | None) -> None:
    """Raises ValueError, with the first of them, where files of an ended cache are not what they were.

    Their hashes are those that `cache_dir` keeps, as `file_digests` says; None reads every file.
    """
    files = [folder / one["file"] for one in index["files"]]
    for file, one in zip(files, index["files"], strict=True):
        if not file.is_file() or file.stat().st_size != one["bytes"]:
            raise ValueError(f"{file} is missing or not of {one['bytes']} bytes; {_AGAIN.format(file.name)}")
    texts = [TextFile(path=file, name=file.name, listed=True) for file in files]
    digests = [sha256_of(file) for file in files] if cache_dir is None else file_digests(texts, cache_dir)
    for file, one, found in zip(files, index["files"], digests, strict=True):
        if found != one["sha256"]:
            raise ValueError(f"{file} has other bytes than when it was made; {_AGAIN.format(file.name)}")
