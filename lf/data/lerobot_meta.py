"""What a LeRobot dataset (v2.1 or v3.0) says about itself, in one form for both versions.

The layouts are those of github.com/huggingface/lerobot: 0.3.3 wrote v2.1 (a file for each episode), 0.4 and later write
v3.0 (files that several episodes share).
"""

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
import numpy as np

V21, V30 = "v2.1", "v3.0"

STATISTICS = ("min", "max", "mean", "std", "count", "q01", "q10", "q50", "q90", "q99")
"""Statistics that a dataset may record of a feature."""

_LAYOUTS = {
    V21: (
        "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    ),
    V30: (
        "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    ),
}


@attrs.frozen(kw_only=True)
class Feature:
    """A column of the dataset, or a camera."""

    key: str
    """Its name."""
    dtype: str
    """`video`, `image`, `string`, or the numpy name of its numbers."""
    shape: tuple[int, ...]
    """Shape of one frame; images are (height, width, channels)."""
    names: tuple[str, ...] = ()
    """Names of its dims, where the dataset has one for each."""
    depth: bool = False
    """Whether it is a camera of depths, not of colours."""

    @property
    def is_camera(self) -> bool:
        """Whether a frame of it is a picture."""
        return self.dtype in ("video", "image")

    @property
    def is_number(self) -> bool:
        """Whether a frame of it is a vector of numbers, or a number."""
        return not self.is_camera and self.dtype != "string" and len(self.shape) == 1


@attrs.frozen(kw_only=True)
class Clip:
    """Where the frames of an episode lie in a video."""

    file: str
    """Path of the video below the dataset."""
    start: float
    """Time of the episode's first frame in it, in seconds."""


@attrs.frozen(kw_only=True)
class Episode:
    """One episode, as the metadata has it."""

    index: int
    """episode_index."""
    length: int
    """Frames."""
    tasks: tuple[str, ...]
    """Its tasks."""
    first: int
    """Number of its first frame, counted over the whole dataset."""
    file: str
    """Path of the Parquet file, below the dataset, that should hold its rows."""
    clips: Mapping[str, Clip]
    """Its part of a video, for each video feature."""


@attrs.frozen(kw_only=True)
class Meta:
    """A dataset's description of itself."""

    root: Path
    """Folder of the dataset."""
    version: str
    """`v2.1` or `v3.0`."""
    fps: float
    """Frames a second."""
    robot: str
    """Kind of robot, empty where it is not said."""
    features: Mapping[str, Feature]
    """Columns and cameras, by name."""
    tasks: Mapping[int, str]
    """Tasks by task_index."""
    task_rows: tuple[int, ...]
    """task_index of each row of the table of tasks, in its order."""
    episodes: Mapping[int, Episode]
    """Episodes by episode_index, ascending."""
    info: Mapping[str, Any]
    """info.json as it is."""

    @property
    def name(self) -> str:
        """What errors and row ids call the dataset."""
        return self.root.name

    @property
    def cameras(self) -> tuple[Feature, ...]:
        """The features that are pictures."""
        return tuple(feature for feature in self.features.values() if feature.is_camera)


def read_meta(root: Path) -> Meta:
    """Returns the description of a dataset. Raises ValueError, with the file, for what is missing or malformed."""
    file = root / "meta" / "info.json"
    info = read_json(file)
    version = info.get("codebase_version")
    if version not in _LAYOUTS:
        raise ValueError(f"{file}: codebase_version is {version!r}; lf reads {V21} and {V30}, so convert the dataset")
    try:
        fps = float(info["fps"])
        features = {key: _feature(key, value) for key, value in info["features"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: fps or features are malformed ({error!r}); mend the file") from error
    if not 0 < fps < float("inf"):
        raise ValueError(f"{file}: fps is {info['fps']}; give the frames a second")
    read_tasks, read_episodes = (_tasks_v21, _episodes_v21) if version == V21 else (_tasks_v30, _episodes_v30)
    tasks = read_tasks(root)
    if len({index for index, _ in tasks}) != len(tasks):
        raise ValueError(f"{root / 'meta'}: two tasks have one task_index; give each its own")
    episodes = sorted(read_episodes(root, info, features), key=lambda episode: episode.index)
    twice = {a.index for a, b in itertools.pairwise(episodes) if a.index == b.index}
    if twice:
        raise ValueError(f"{root / 'meta'}: episodes {sorted(twice)} are listed twice; keep one line of each")
    return Meta(
        root=root,
        version=version,
        fps=fps,
        robot=str(info.get("robot_type") or ""),
        features=features,
        tasks=dict(sorted(tasks)),
        task_rows=tuple(index for index, _ in tasks),
        episodes={episode.index: episode for episode in episodes},
        info=info,
    )


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ValueError with the file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; give the folder of a LeRobot dataset, whole") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, and must hold an object; fetch it again")
    return value


def read_table(file: Path, columns: Sequence[str] | None = None) -> Any:
    """Returns a pyarrow table of a Parquet file; raises ValueError with the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as parquet:
            missing = set(columns or ()).difference(parquet.schema_arrow.names)
            if missing:
                raise ValueError(f"it has no column {', '.join(sorted(missing))}")
            return parquet.read(columns=None if columns is None else list(columns))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; fetch it, or leave out the episodes that need it") from None
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{file} cannot be read as Parquet ({error}); fetch it again") from error


def numbered(root: Path, pattern: str) -> list[Path]:
    """Returns the files that match a glob pattern below a folder, sorted by the numbers in their names."""

    def key(path: Path) -> tuple[tuple[int, str], ...]:
        parts = re.split(r"(\d+)", path.relative_to(root).as_posix())
        return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)

    return sorted(root.glob(pattern), key=key)


def _feature(key: str, value: Mapping[str, Any]) -> Feature:
    info = value.get("info") or {}
    shape = tuple(int(n) for n in value["shape"])
    names = tuple(_flat(value.get("names")))
    return Feature(
        key=key,
        dtype=str(value["dtype"]),
        shape=shape,
        names=names if len(names) == int(np.prod(shape)) else (),
        depth=bool(info.get("video.is_depth_map") or info.get("is_depth_map")),
    )


def _flat(names: Any) -> list[str]:
    if isinstance(names, Mapping):
        names = list(names.values())
    if isinstance(names, (list, tuple)):
        return [text for name in names for text in _flat(name)]
    return [] if names is None else [str(names)]


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error}); fetch it") from error
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found.append(dict(json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}:{number} is not a JSON object ({error}); fetch the file again") from error
    return found


def _tasks_v21(root: Path) -> list[tuple[int, str]]:
    file = root / "meta" / "tasks.jsonl"
    return [(int(_get(line, "task_index", file)), str(_get(line, "task", file))) for line in _lines(file)]


def _tasks_v30(root: Path) -> list[tuple[int, str]]:
    file = root / "meta" / "tasks.parquet"
    table = read_table(file)
    # The task is the index of a pandas table, so its column is named as the writer pleased.
    texts = [name for name in table.column_names if name != "task_index"]
    if "task_index" not in table.column_names or len(texts) != 1:
        raise ValueError(f"{file} has columns {table.column_names}; it must have task_index and one of texts")
    return list(zip(map(int, table["task_index"].to_pylist()), map(str, table[texts[0]].to_pylist()), strict=True))


def _get(row: Mapping[str, Any], key: str, file: Path) -> Any:
    if key not in row or row[key] is None:
        raise ValueError(f"{file}: a row has no {key} (it has {', '.join(row)}); fetch the file again")
    return row[key]


def place(template: Any, file: Path, **fields: Any) -> str:
    """Returns the path, below the dataset, that a template of info.json gives; raises ValueError if it leads out."""
    try:
        path = str(template).format(**fields)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise ValueError(f"{file}: the path template {template!r} is malformed ({error!r}); mend it") from error
    return inside(path, f"{file}: the path template {template!r}")


def inside(path: str, where: str) -> str:
    """Returns a path below the dataset; raises ValueError with `where` for one that leads outside it."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts:
        raise ValueError(f"{where} leads to {path!r}, outside the dataset; mend it")
    return str(parts)


def _templates(root: Path, info: Mapping[str, Any]) -> tuple[Path, str, str]:
    data, video = _LAYOUTS[info["codebase_version"]]
    return root / "meta" / "info.json", info.get("data_path") or data, info.get("video_path") or video


def _episodes_v21(root: Path, info: Mapping[str, Any], features: Mapping[str, Feature]) -> Iterable[Episode]:
    file = root / "meta" / "episodes.jsonl"
    source, data, video = _templates(root, info)
    videos = [key for key, feature in features.items() if feature.dtype == "video"]
    first = 0
    for row in sorted(_lines(file), key=lambda row: int(_get(row, "episode_index", file))):
        index, length = int(row["episode_index"]), int(_get(row, "length", file))
        at = {"episode_index": index, "episode_chunk": index // int(info.get("chunks_size") or 1000)}
        yield Episode(
            index=index,
            length=length,
            tasks=tuple(map(str, row.get("tasks") or ())),
            first=first,
            file=place(data, source, **at),
            clips={key: Clip(file=place(video, source, video_key=key, **at), start=0.0) for key in videos},
        )
        first += length


def _episodes_v30(root: Path, info: Mapping[str, Any], features: Mapping[str, Feature]) -> Iterable[Episode]:
    source, data, video = _templates(root, info)
    videos = [key for key, feature in features.items() if feature.dtype == "video"]
    files = numbered(root, "meta/episodes/*/*.parquet")
    if not files:
        raise ValueError(f"{root / 'meta' / 'episodes'} has no Parquet file; fetch it")
    for file in files:
        for row in read_table(file, [name for name in _columns(file) if not name.startswith("stats/")]).to_pylist():
            yield Episode(
                index=int(_get(row, "episode_index", file)),
                length=int(_get(row, "length", file)),
                tasks=tuple(map(str, row.get("tasks") or ())),
                first=int(_get(row, "dataset_from_index", file)),
                file=place(data, source, **_pointer(row, "data", file)),
                clips={
                    key: Clip(
                        file=place(video, source, video_key=key, **_pointer(row, f"videos/{key}", file)),
                        start=float(_get(row, f"videos/{key}/from_timestamp", file)),
                    )
                    for key in videos
                },
            )


def _pointer(row: Mapping[str, Any], prefix: str, file: Path) -> dict[str, int]:
    return {name: int(_get(row, f"{prefix}/{name}", file)) for name in ("chunk_index", "file_index")}


def _columns(file: Path) -> list[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return list(pq.read_schema(file).names)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read as Parquet ({error}); fetch it again") from error


Recorded = Mapping[str, Mapping[str, np.ndarray[Any, np.dtype[Any]]]]
"""Recorded statistics: feature, then statistic, then its array; `count` has shape [1]."""


def episode_stats(meta: Meta) -> dict[int, Recorded]:
    """Returns the statistics that the dataset records of each episode; empty for an episode without any."""
    if meta.version == V21:
        file = meta.root / "meta" / "episodes_stats.jsonl"
        return {int(_get(row, "episode_index", file)): _arrays(_get(row, "stats", file)) for row in _lines(file)}
    found: dict[int, Recorded] = {}
    for file in numbered(meta.root, "meta/episodes/*/*.parquet"):
        names = [name for name in _columns(file) if name.startswith("stats/")]
        for row in read_table(file, ["episode_index", *names]).to_pylist():
            stats: dict[str, dict[str, Any]] = {}
            for name in names:
                feature, statistic = name.removeprefix("stats/").rsplit("/", 1)
                if row[name] is not None:
                    stats.setdefault(feature, {})[statistic] = row[name]
            found[int(row["episode_index"])] = _arrays(stats)
    return found


def recorded_stats(meta: Meta, episodes: Sequence[int] | None = None) -> Recorded:
    """Returns the statistics that the dataset records, merged over `episodes` in v2.1 (None: all).

    v3.0 records those of the whole dataset. Its `std` and quantiles may be wrong: writers average the quantiles of
    episodes, and some squared pixels in 8 bits. lf trains on statistics of its own. Raises ValueError without any.
    """
    if meta.version == V30:
        return _arrays(read_json(meta.root / "meta" / "stats.json"))
    every = episode_stats(meta)
    missing = [index for index in (meta.episodes if episodes is None else episodes) if index not in every]
    if missing:
        raise ValueError(
            f"{meta.root / 'meta' / 'episodes_stats.jsonl'} has no statistics of {len(missing)} episodes, such as "
            f"{missing[:5]}"
        )
    return merge_recorded([every[index] for index in (meta.episodes if episodes is None else episodes)])


def merge_recorded(parts: Sequence[Recorded]) -> Recorded:
    """Returns recorded statistics of several episodes as those of all; quantiles are averaged, as LeRobot does."""
    merged: dict[str, dict[str, Any]] = {}
    for key in sorted(set.intersection(*(set(part) for part in parts)) if parts else ()):
        stats = [part[key] for part in parts]
        counts = np.stack([stat["count"] for stat in stats]).astype(np.float64)
        shaped = counts.reshape(-1, *[1] * stats[0]["mean"].ndim)
        means = np.stack([stat["mean"] for stat in stats])
        total = shaped.sum(0)
        mean = (means * shaped).sum(0) / total
        variance = ((np.stack([stat["std"] for stat in stats]) ** 2 + (means - mean) ** 2) * shaped).sum(0) / total
        merged[key] = {
            "min": np.stack([stat["min"] for stat in stats]).min(0),
            "max": np.stack([stat["max"] for stat in stats]).max(0),
            "mean": mean,
            "std": np.sqrt(variance),
            "count": np.stack([stat["count"] for stat in stats]).sum(0),
        }
        for name in STATISTICS[5:]:
            if all(name in stat for stat in stats):
                merged[key][name] = (np.stack([stat[name] for stat in stats]) * shaped).sum(0) / total
    return merged


def _arrays(stats: Mapping[str, Mapping[str, Any]]) -> Recorded:
    return {
        key: {name: np.asarray(value) for name, value in one.items() if name in STATISTICS}
        for key, one in stats.items()
    }
