"""The rows and pictures of chosen LeRobot episodes in the cache: audited and written once for a content, then mapped.

Shapes: R rows (frames of all episodes), E episodes, T frames asked for, H height, W width.
"""

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.data.cache import build_once, key_of
from lf.data.files import TextFile, file_digests
from lf.data.lerobot_scan import Scan, Scanned, locate, scan
from lf.data.lerobot_spans import places
from lf.data.picture import decode_picture
from lf.data.video import Decoders, Pixels

_FORMAT = 2
_ENDS = 1 << 16
_SHOWN = 5
_SETTLED_NS = 2_000_000_000


@attrs.frozen(kw_only=True, eq=False)
class Pictures:
    """The frames of one camera, encoded."""

    files: tuple[Path, ...]
    """[E] video of each episode; the one file of all pictures where they are no videos."""
    ticks: NDArray[np.int64]
    """[R] presentation time of each row's frame in its video; else where its picture ends in the file."""
    is_video: bool
    """Whether they are videos."""


def read_pictures(pictures: Pictures, decoders: Decoders, at: int, rows: NDArray[np.int64]) -> Pixels:
    """Returns the frames [T, H, W, 3] of some rows of episode number `at`."""
    if pictures.is_video:
        return decoders.frames(pictures.files[at], pictures.ticks[rows].tolist())
    found = []
    with pictures.files[0].open("rb") as file:
        for row in rows.tolist():
            start = int(pictures.ticks[row - 1]) if row else 0
            file.seek(start)
            found.append(decode_picture(file.read(int(pictures.ticks[row]) - start), str(pictures.files[0])))
    return np.stack(found)


def content_key(want: Scan, episodes: Sequence[int], cache_dir: Path) -> str:
    """Returns a hash of everything that decides what the rows are.

    Of a video it takes the size and both ends, which hold the container's table of every frame's size and time.
    """
    meta = want.meta
    chosen = [meta.episodes[number] for number in episodes]
    data = sorted(file for file in set(locate(meta, episodes).values()) if (meta.root / file).is_file())
    videos = sorted({clip.file for episode in chosen for key, clip in episode.clips.items() if key in want.cameras})
    listed = [TextFile(path=meta.root / file, name=file, listed=True) for file in data]
    return key_of(
        _FORMAT,
        [meta.version, meta.fps, want.tolerance, list(want.keys), list(want.cameras)],
        sorted(meta.tasks.items()),
        [attrs.asdict(meta.features[key]) for key in (*want.keys, *want.cameras)],
        [attrs.asdict(episode) for episode in chosen],
        [data, file_digests(listed, cache_dir) if listed else []],
        [[key, number, attrs.astuple(place)] for (key, number), place in places(meta, want.cameras, episodes).items()],
        [videos, _ends_of([meta.root / file for file in videos], cache_dir)],
    )


def _ends_of(paths: Sequence[Path], cache_dir: Path) -> list[str]:
    """Returns a hash of the size and the ends of each file, cached under their paths, sizes and times."""
    stats = [path.stat() if path.is_file() else None for path in paths]
    newest = max((max(stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats if stat), default=0)
    # A file that changed so lately may change once more and keep its time.
    if not paths or None in stats or newest > time.time_ns() - _SETTLED_NS:
        return [_ends(path) for path in paths]
    seen = [
        [str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        for path, stat in zip(paths, stats, strict=True)
        if stat
    ]
    facts = build_once(cache_dir / "video_ends" / key_of(seen), lambda _: {"sha256": [_ends(path) for path in paths]})
    return [str(digest) for digest in facts["sha256"]]


def _ends(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        digest = hashlib.sha256(str(size).encode())
        for at in (0, max(0, size - _ENDS)):
            file.seek(at)
            digest.update(file.read(_ENDS))
    return digest.hexdigest()


def build_store(folder: Path, want: Scan, episodes: Sequence[int]) -> Mapping[str, Any]:
    """Writes the columns, frame times and pictures of the episodes; raises ValueError for what is fatal in them."""
    lengths = [want.meta.episodes[number].length for number in episodes]
    fatal: list[str] = []
    columns: dict[str, NDArray[Any]] = {}
    ticks: dict[str, NDArray[np.int64]] = {}
    at = 0
    for found in scan(want, episodes):
        fatal += [finding.show(str(want.meta.root)) for finding in found.findings if finding.level == "fatal"]
        if len(fatal) > _SHOWN:
            break
        if fatal:
            continue
        end = at + found.episode.length
        for key, values in found.columns.items():
            if key not in columns:
                shape, file = (sum(lengths), values.shape[1]), folder / f"column_{len(columns)}.npy"
                columns[key] = np.lib.format.open_memmap(file, "w+", values.dtype, shape)
            columns[key][at:end] = values
        for number, key in enumerate(want.cameras):
            ticks.setdefault(key, np.zeros(sum(lengths), np.int64))
            ticks[key][at:end] = found.ticks[key] if key in found.ticks else _store(folder, number, found, key)
        at = end
    if fatal:
        more = "" if len(fatal) <= _SHOWN else f"\n... and more; `prepare.py check {want.meta.root}` lists all"
        raise ValueError("\n".join(fatal[:_SHOWN]) + more)
    for number, key in enumerate(want.cameras):
        np.save(folder / f"ticks_{number}.npy", ticks[key])
    for values in columns.values():
        assert isinstance(values, np.memmap)
        values.flush()
    return {
        "columns": {key: f"column_{number}.npy" for number, key in enumerate(columns)},
        "pictures": {key: str(number) for number, key in enumerate(want.cameras)},
    }


def _store(folder: Path, number: int, found: Scanned, key: str) -> NDArray[np.int64]:
    """Appends the pictures of an episode to the camera's file, and returns where each ends."""
    ends = []
    with (folder / f"pictures_{number}.bin").open("ab") as out:
        for data in found.pictures[key]:
            out.write(data)
            ends.append(out.tell())
    return np.array(ends, np.int64)


def open_pictures(want: Scan, key: str, episodes: Sequence[int], folder: Path, number: str) -> Pictures:
    """Returns the pictures of a camera; `number` is what `build_store` called it."""
    feature = want.meta.features[key]
    is_video = feature.dtype == "video"
    return Pictures(
        files=tuple(want.meta.root / want.meta.episodes[index].clips[key].file for index in episodes)
        if is_video
        else (folder / f"pictures_{number}.bin",),
        ticks=np.load(folder / f"ticks_{number}.npy", mmap_mode="r"),
        is_video=is_video,
    )
