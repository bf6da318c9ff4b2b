"""Puts episodes together as a LeRobot v3.0 dataset: several of them a file, with statistics of each and of the whole.

The layout is that of github.com/huggingface/lerobot 0.4. Statistics of numbers are computed here, in float64.

Shapes: N frames of an episode, D dims.
"""

import json
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.data.lerobot_files import place
from lf.data.lerobot_meta import STATISTICS, V30, Recorded, merge_recorded
from lf.data.video import append_videos, joinable

DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"

INDEX_TYPES = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}
"""Columns that every dataset has, and their types."""
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
"""Quantiles that a dataset records."""


@attrs.frozen(kw_only=True)
class Limits:
    """How large files may grow. An episode is never cut, so one that is larger gets a file of its own."""

    chunk: int = 1000
    """Files in a folder."""
    data_mb: float = 100.0
    """Megabytes of a file of rows."""
    video_mb: float = 200.0
    """Megabytes of a video."""


DEFAULT_LIMITS = Limits()

_SLOWEST, _FASTEST = 1e-3, 1e3


@attrs.frozen(kw_only=True, eq=False)
class Part:
    """An episode on its way into a dataset."""

    length: int
    """Frames."""
    tasks: tuple[str, ...]
    """Its tasks."""
    table: Any
    """pyarrow table of its rows, without the columns that number them."""
    task_of_row: tuple[str, ...]
    """Task of each row."""
    times: NDArray[np.float32]
    """[N] seconds from the start of the episode."""
    videos: Mapping[str, Path]
    """Video of each camera, of this episode alone."""
    stats: Recorded
    """Statistics of its cameras."""


def assemble(
    root: Path,
    parts: Callable[[Path], Iterator[Part]],
    features: Mapping[str, Any],
    *,
    fps: float,
    robot: str,
    limits: Limits,
) -> None:
    """Writes what `parts(folder for temporary files)` yields as a dataset whose info.json has `features`.

    `features` are looked at when all parts are there. `root` appears whole or not at all. Raises ValueError, with the
    values, for what a reader would refuse.
    """
    # Times are held to 0.1 ms: frames that are closer than 1 ms could hardly be told apart.
    if not _SLOWEST <= fps <= _FASTEST:
        raise ValueError(f"{root}: fps is {fps:g}; give the frames a second, from {_SLOWEST:g} to {_FASTEST:g}")
    for name, size in (("data_mb", limits.data_mb), ("video_mb", limits.video_mb), ("chunk", limits.chunk)):
        if not 0 < size < float("inf"):
            raise ValueError(f"{root}: {name} is {size:g}; it must be a number above 0")
    check_text(robot, f"{root}: robot")
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ValueError(f"{root} is there already; give a folder that is not, so that nothing is mixed up")
    root.parent.mkdir(parents=True, exist_ok=True)
    temporary = root.with_name(f".{root.name}.{uuid.uuid4().hex}")
    work = temporary / "work"
    work.mkdir(parents=True)
    try:
        _write(temporary, parts(work), features, fps, robot, limits)
        shutil.rmtree(work)
        if root.is_dir():
            root.rmdir()
        temporary.rename(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_text(text: str, where: str) -> None:
    """Raises ValueError for what is no UTF-8 text, as terminals pass on bytes of another alphabet."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} is {text!a}, which is no UTF-8 text ({error.reason}); write it anew") from None


def check_finite(values: NDArray[Any], where: str) -> None:
    """Raises ValueError for numbers [N, D] or [N] that are not all finite."""
    wide = values.reshape(len(values), -1)
    bad = np.argwhere(~np.isfinite(wide))
    if len(bad):
        frame, dim = bad[0].tolist()
        raise ValueError(
            f"{where}: dim {dim} is {wide[frame, dim]} at frame {frame}, as {values.dtype} "
            f"({len(set(bad[:, 0].tolist()))} such frames); mend them, or leave the episode or the feature out"
        )


def _write(
    root: Path, parts: Iterator[Part], features: Mapping[str, Any], fps: float, robot: str, limits: Limits
) -> None:
    tasks: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    kept: dict[str, list[NDArray[Any]]] = {}
    pictures: list[Recorded] = []
    data, videos = _DataFiles(root, limits), _VideoFiles(root, limits, fps)
    first = 0
    with data:
        for number, part in enumerate(parts):
            if part.length < 1:
                raise ValueError(f"episode {number} has no frame; leave it out")
            for task in dict.fromkeys((*part.tasks, *part.task_of_row)):
                check_text(task, f"episode {number}: task")
                tasks.setdefault(task, len(tasks))
            table, columns = _numbered(part, number, first, [tasks[task] for task in part.task_of_row])
            row: dict[str, Any] = {"episode_index": number, "tasks": list(part.tasks), "length": part.length}
            row |= {f"data/{name}": value for name, value in data.add(table).items()}
            row |= {"dataset_from_index": first, "dataset_to_index": first + part.length}
            row |= {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0}
            for key, values in columns.items():
                check_finite(values, f"episode {number}, {key}")
                kept.setdefault(key, []).append(values)
                row |= {f"stats/{key}/{name}": value.tolist() for name, value in number_stats(values).items()}
            for key, stats in part.stats.items():
                row |= {f"stats/{key}/{name}": value.tolist() for name, value in stats.items()}
            pictures.append(part.stats)
            rows.append(row)
            videos.add(number, part, rows)
            first += part.length
    videos.close(rows)
    if not rows:
        raise ValueError(f"there is no episode to write to {root.name}; give at least one")
    whole = {key: number_stats(np.concatenate(values)) for key, values in kept.items()}
    _write_meta(root, rows, tasks, whole | dict(merge_recorded(pictures)), features, fps, robot, limits)


def _numbered(part: Part, number: int, first: int, tasks: Sequence[int]) -> tuple[Any, dict[str, NDArray[Any]]]:
    import pyarrow as pa

    steps = np.arange(part.length)
    columns: dict[str, NDArray[Any]] = {
        "timestamp": part.times.astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(part.length, number),
        "index": first + steps,
        "task_index": np.array(tasks, np.int64),
    }
    table = part.table
    for key, values in columns.items():
        table = table.append_column(key, pa.array(values, pa.from_numpy_dtype(np.dtype(INDEX_TYPES[key]))))
    numbers = {}
    for key in table.column_names:
        column = table[key].combine_chunks()
        flat = column.flatten() if pa.types.is_nested(column.type) and not pa.types.is_struct(column.type) else column
        if pa.types.is_primitive(flat.type):
            numbers[key] = flat.to_numpy(zero_copy_only=False).reshape(len(table), -1)
    return table, numbers


class _DataFiles:
    """Files of rows, closed when the next episode would make them too large; one row group an episode."""

    def __init__(self, root: Path, limits: Limits) -> None:
        self._root, self._limits = root, limits
        self._number, self._size = -1, 0.0
        self._writer: Any = None

    def __enter__(self) -> "_DataFiles":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, table: Any) -> dict[str, int]:
        """Writes the rows of an episode, and returns where they are."""
        import pyarrow.parquet as pq

        size = table.nbytes / 1e6
        if self._writer is None or self._size + size > self._limits.data_mb:
            self.__exit__()
            self._number, self._size = self._number + 1, 0.0
            path = self._root / place(DATA_PATH, self._root, **self._at())
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(path, table.schema)
        self._writer.write_table(table)
        self._size += size
        return self._at()

    def _at(self) -> dict[str, int]:
        return {"chunk_index": self._number // self._limits.chunk, "file_index": self._number % self._limits.chunk}


class _VideoFiles:
    """Videos that episodes share, each closed when the next episode would make it too large or does not fit."""

    def __init__(self, root: Path, limits: Limits, fps: float) -> None:
        self._root, self._limits, self._fps = root, limits, fps
        self._numbers: dict[str, int] = {}
        self._held: dict[str, list[tuple[int, int, Path]]] = {}

    def add(self, number: int, part: Part, rows: list[dict[str, Any]]) -> None:
        """Takes the videos of an episode; what is full is written, and its episodes' rows say where they are."""
        for key, path in part.videos.items():
            held = self._held.setdefault(key, [])
            size = sum(one.stat().st_size for _, _, one in held) + path.stat().st_size
            if held and (size / 1e6 > self._limits.video_mb or not joinable(held[0][2], path)):
                self._flush(key, rows)
            self._held[key].append((number, part.length, path))

    def close(self, rows: list[dict[str, Any]]) -> None:
        """Writes what is left."""
        for key in self._held:
            self._flush(key, rows)

    def _flush(self, key: str, rows: list[dict[str, Any]]) -> None:
        held, self._held[key] = self._held[key], []
        number = self._numbers.get(key, 0)
        self._numbers[key] = number + 1
        at = {"chunk_index": number // self._limits.chunk, "file_index": number % self._limits.chunk}
        path = self._root / place(VIDEO_PATH, self._root, video_key=key, **at)
        path.parent.mkdir(parents=True, exist_ok=True)
        starts = append_videos(path, [part for _, _, part in held])
        for (episode, length, _), start in zip(held, starts, strict=True):
            span = {"from_timestamp": float(start), "to_timestamp": float(start) + length / self._fps}
            rows[episode] |= {f"videos/{key}/{name}": value for name, value in {**at, **span}.items()}


def number_stats(values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Returns the statistics [D] of numbers [N, D], computed in float64, and their count [1]."""
    wide = values.astype(np.float64)
    quantiles = np.quantile(wide, list(QUANTILES.values()), axis=0)
    return {
        "min": wide.min(0),
        "max": wide.max(0),
        "mean": wide.mean(0),
        "std": wide.std(0),
        "count": np.array([len(wide)]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


def _write_meta(
    root: Path,
    rows: list[dict[str, Any]],
    tasks: Mapping[str, int],
    stats: Recorded,
    features: Mapping[str, Any],
    fps: float,
    robot: str,
    limits: Limits,
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    meta = root / "meta"
    (meta / "episodes" / "chunk-000").mkdir(parents=True)
    # A statistic that some episodes lack is left out: a column has no holes.
    names = [name for name in rows[0] if all(name in row for row in rows)]
    table = pa.Table.from_pylist([{name: row[name] for name in names} for row in rows])
    pq.write_table(table, meta / "episodes" / "chunk-000" / "file-000.parquet")
    pq.write_table(_task_table(tasks), meta / "tasks.parquet")
    listed = {
        key: {name: stats[key][name].tolist() for name in STATISTICS if name in stats[key]} for key in sorted(stats)
    }
    (meta / "stats.json").write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
    indexes = {key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in INDEX_TYPES.items()}
    has_video = any(feature["dtype"] == "video" for feature in features.values())
    info = {
        "codebase_version": V30,
        "robot_type": robot or None,
        "total_episodes": len(rows),
        "total_frames": rows[-1]["dataset_to_index"],
        "total_tasks": len(tasks),
        "chunks_size": limits.chunk,
        "data_files_size_in_mb": limits.data_mb,
        "video_files_size_in_mb": limits.video_mb,
        "fps": int(fps) if fps == int(fps) else fps,
        "splits": {"train": f"0:{len(rows)}"},
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if has_video else None,
        "features": {**{key: value for key, value in features.items() if key not in indexes}, **indexes},
    }
    (meta / "info.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")


def _task_table(tasks: Mapping[str, int]) -> Any:
    """Returns the table of tasks; other readers take the task from its pandas index."""
    import pyarrow as pa

    ordered = sorted(tasks.items(), key=lambda item: item[1])
    table = pa.table(
        {"task_index": pa.array([n for _, n in ordered], pa.int64()), "task": [text for text, _ in ordered]}
    )
    column = {"metadata": None, "field_name": None}
    pandas = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [
            {**column, "name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"},
            {**column, "name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"},
        ],
        "pandas_version": "2.0.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})
