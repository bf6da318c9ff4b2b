"""What a LeRobot dataset (v2.1 or v3.0) says about itself, in one form for both versions.

The layouts are those of github.com/huggingface/lerobot: 0.3.3 wrote v2.1 (a file for each episode), 0.4 and later write
v3.0 (files that several episodes share).
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from lf.data.lerobot_files import (
    brief,
    column_names,
    get,
    get_float,
    get_int,
    get_texts,
    numbered,
    place,
    read_json,
    read_lines,
    read_table,
)

V21, V30 = "v2.1", "v3.0"

_MOST_FPS, _MOST_DIMS = 1e6, 1 << 40

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
        return self.is_numeric and len(self.shape) == 1

    @property
    def is_numeric(self) -> bool:
        """Whether its dtype is one of numbers, as numpy names them."""
        if self.is_camera or not self.dtype.isidentifier():
            return False
        try:
            return np.dtype(self.dtype).kind in "fiub"
        except TypeError:
            return False


@attrs.frozen(kw_only=True)
class Clip:
    """Where the frames of an episode lie in a video."""

    file: str
    """Path of the video below the dataset."""
    start: float
    """Time of the episode's first frame in it, in seconds."""
    end: float | None = None
    """Time at which the episode ends in it, in seconds; None where the format does not say."""


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
    last: int
    """Number of the frame after its last one, as the metadata says it."""
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
    if not isinstance(version, str) or version not in _LAYOUTS:
        raise ValueError(f"{file}: codebase_version is {brief(version)}; lf reads {V21} and {V30}, so convert it")
    fps, features = _fps(info, file), _features(info, file)
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


def _fps(info: Mapping[str, Any], file: Path) -> float:
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps < _MOST_FPS:
        raise ValueError(f"{file}: fps is {brief(fps)}; give the frames a second, above 0 and below {_MOST_FPS:g}")
    return float(fps)


def _features(info: Mapping[str, Any], file: Path) -> dict[str, Feature]:
    stated = info.get("features")
    if not isinstance(stated, dict):
        raise ValueError(
            f'{file}: features is {brief(stated)}, and must be an object such as {{"action": {{"dtype": "float32", '
            '"shape": [6], "names": null}}; mend the file'
        )
    return {key: _feature(key, value, f"{file}: features.{key}") for key, value in stated.items()}


def _feature(key: str, value: Any, where: str) -> Feature:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {brief(value)}, and must be an object with dtype and shape; mend the file")
    dtype, shape = value.get("dtype"), value.get("shape")
    if not isinstance(dtype, str):
        raise ValueError(f"{where}.dtype is {brief(dtype)}, and must be a text such as 'float32' or 'video'; mend it")
    if not isinstance(shape, list) or not all(isinstance(n, int) and 0 <= n < _MOST_DIMS for n in shape):
        raise ValueError(f"{where}.shape is {brief(shape)}, and must be a list of whole numbers such as [6]; mend it")
    info = value.get("info")
    info = info if isinstance(info, dict) else {}
    try:
        names = tuple(_flat(value.get("names")))
    except RecursionError:
        raise ValueError(f"{where}.names is nested too deeply; give a list of texts, or null") from None
    return Feature(
        key=key,
        dtype=dtype,
        shape=tuple(shape),
        names=names if len(names) == math.prod(shape) else (),
        depth=bool(info.get("video.is_depth_map") or info.get("is_depth_map")),
    )


def _flat(names: Any) -> list[str]:
    if isinstance(names, Mapping):
        names = list(names.values())
    if isinstance(names, (list, tuple)):
        return [text for name in names for text in _flat(name)]
    return [] if names is None else [str(names)]


def _tasks_v21(root: Path) -> list[tuple[int, str]]:
    file = root / "meta" / "tasks.jsonl"
    return [(get_int(line, "task_index", file), _task(get(line, "task", file), file)) for line in read_lines(file)]


def _tasks_v30(root: Path) -> list[tuple[int, str]]:
    file = root / "meta" / "tasks.parquet"
    table = read_table(file)
    # The task is the index of a pandas table, so its column is named as the writer pleased.
    texts = [name for name in table.column_names if name != "task_index"]
    if "task_index" not in table.column_names or len(texts) != 1:
        raise ValueError(f"{file} has columns {table.column_names}; it must have task_index and one of texts")
    return [
        (get_int(row, "task_index", file), _task(row[texts[0]], file))
        for row in table.select(["task_index", texts[0]]).to_pylist()
    ]


def _task(text: Any, file: Path) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{file}: a task is {brief(text)}, and must be a text; mend it")
    return text


def _templates(root: Path, info: Mapping[str, Any], videos: Sequence[str]) -> tuple[Path, Any, Any]:
    data, video = _LAYOUTS[info["codebase_version"]]
    source, video = root / "meta" / "info.json", info.get("video_path") or video
    if len(videos) > 1 and "{video_key}" not in str(video):
        raise ValueError(
            f"{source}: video_path is {brief(video)}, which is one file for all {len(videos)} cameras; put "
            "{video_key} into it"
        )
    return source, info.get("data_path") or data, video


def _episodes_v21(root: Path, info: Mapping[str, Any], features: Mapping[str, Feature]) -> Iterable[Episode]:
    file = root / "meta" / "episodes.jsonl"
    videos = [key for key, feature in features.items() if feature.dtype == "video"]
    source, data, video = _templates(root, info, videos)
    chunk = info.get("chunks_size") or 1000
    if not isinstance(chunk, int) or not 0 < chunk < _MOST_DIMS:
        raise ValueError(f"{source}: chunks_size is {brief(chunk)}, and must be a whole number above 0; mend it")
    first = 0
    for row in sorted(read_lines(file), key=lambda row: get_int(row, "episode_index", file)):
        index, length = get_int(row, "episode_index", file), get_int(row, "length", file)
        at = {"episode_index": index, "episode_chunk": index // chunk}
        yield Episode(
            index=index,
            length=length,
            tasks=get_texts(row, "tasks", file),
            first=first,
            last=first + length,
            file=place(data, source, **at),
            clips={key: Clip(file=place(video, source, video_key=key, **at), start=0.0) for key in videos},
        )
        first += length


def _episodes_v30(root: Path, info: Mapping[str, Any], features: Mapping[str, Feature]) -> Iterable[Episode]:
    videos = [key for key, feature in features.items() if feature.dtype == "video"]
    source, data, video = _templates(root, info, videos)
    files = numbered(root, "meta/episodes/*/*.parquet")
    if not files:
        raise ValueError(f"{root / 'meta' / 'episodes'} has no Parquet file; fetch it")
    for file in files:
        for row in read_table(file, [name for name in column_names(file) if not name.startswith("stats/")]).to_pylist():
            yield Episode(
                index=get_int(row, "episode_index", file),
                length=get_int(row, "length", file),
                tasks=get_texts(row, "tasks", file),
                first=get_int(row, "dataset_from_index", file),
                last=get_int(row, "dataset_to_index", file),
                file=place(data, source, **_pointer(row, "data", file)),
                clips={
                    key: Clip(
                        file=place(video, source, video_key=key, **_pointer(row, f"videos/{key}", file)),
                        start=get_float(row, f"videos/{key}/from_timestamp", file),
                        end=get_float(row, f"videos/{key}/to_timestamp", file),
                    )
                    for key in videos
                },
            )


def _pointer(row: Mapping[str, Any], prefix: str, file: Path) -> dict[str, int]:
    return {name: get_int(row, f"{prefix}/{name}", file) for name in ("chunk_index", "file_index")}


Recorded = Mapping[str, Mapping[str, np.ndarray[Any, np.dtype[Any]]]]
"""Recorded statistics: feature, then statistic, then its array; `count` has shape [1]."""


def episode_stats(meta: Meta) -> dict[int, Recorded]:
    """Returns the statistics that the dataset records of each episode; empty for an episode without any."""
    if meta.version == V21:
        file = meta.root / "meta" / "episodes_stats.jsonl"
        return {get_int(row, "episode_index", file): _arrays(get(row, "stats", file), file) for row in read_lines(file)}
    found: dict[int, Recorded] = {}
    for file in numbered(meta.root, "meta/episodes/*/*.parquet"):
        names = [name for name in column_names(file) if name.startswith("stats/")]
        for row in read_table(file, ["episode_index", *names]).to_pylist():
            stats: dict[str, dict[str, Any]] = {}
            for name in names:
                feature, statistic = name.removeprefix("stats/").rsplit("/", 1)
                if row[name] is not None:
                    stats.setdefault(feature, {})[statistic] = row[name]
            found[get_int(row, "episode_index", file)] = _arrays(stats, file)
    return found


def recorded_stats(meta: Meta, episodes: Sequence[int] | None = None) -> Recorded:
    """Returns the statistics that the dataset records, merged over `episodes` in v2.1 (None: all).

    v3.0 records those of the whole dataset. Its `std` and quantiles may be wrong: writers average the quantiles of
    episodes, and some squared pixels in 8 bits. lf trains on statistics of its own. Raises ValueError without any.
    """
    if meta.version == V30:
        file = meta.root / "meta" / "stats.json"
        return _arrays(read_json(file), file)
    every = episode_stats(meta)
    missing = [index for index in (meta.episodes if episodes is None else episodes) if index not in every]
    if missing:
        raise ValueError(
            f"{meta.root / 'meta' / 'episodes_stats.jsonl'} has no statistics of {len(missing)} episodes, such as "
            f"{missing[:5]}"
        )
    try:
        return merge_recorded([every[index] for index in (meta.episodes if episodes is None else episodes)])
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"{meta.root / 'meta' / 'episodes_stats.jsonl'}: statistics of episodes do not fit together ({error}); "
            "compute them again"
        ) from error


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


def _arrays(stats: Any, file: Path) -> Recorded:
    def array(key: str, name: str, value: Any) -> np.ndarray[Any, np.dtype[Any]]:
        try:
            found = np.asarray(value)
        except ValueError:
            found = np.array("")
        if found.dtype.kind not in "fiub":
            raise ValueError(f"{file}: the {name} of {key} is {brief(value)}, and must be numbers; compute it again")
        return found

    if not isinstance(stats, dict) or not all(isinstance(one, dict) for one in stats.values()):
        raise ValueError(f"{file}: the statistics are {brief(stats)}, and must be an object for each feature; mend it")
    return {
        key: {name: array(key, name, value) for name, value in one.items() if name in STATISTICS}
        for key, one in stats.items()
    }
