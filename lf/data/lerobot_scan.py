"""Reads the rows and videos of LeRobot episodes, and says what is wrong with them: for opening and for auditing alike.

Shapes: N frames of an episode, D dims of a feature.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.data.lerobot_files import numbered, read_table
from lf.data.lerobot_meta import V21, Episode, Feature, Meta
from lf.data.lerobot_spans import Place, places, span_faults
from lf.data.picture import picture_fault
from lf.data.regular import kind_fault
from lf.data.video import Decoder, VideoIndex, index_video, nearest

Level = Literal["fatal", "wrong", "note"]
"""`fatal`: training on it would be wrong, so opening refuses. `wrong`: lf reads past it, other readers may not.
`note`: worth knowing."""

INDEXES = ("episode_index", "frame_index", "index", "task_index", "timestamp")
"""Columns that every dataset has."""

Columns = dict[str, NDArray[Any]]


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that is wrong, or worth knowing."""

    level: Level
    """How bad it is."""
    message: str
    """What is wrong, with values, and what to do."""
    episode: int | None = None
    """The episode, where it is one."""
    feature: str = ""
    """The feature or camera, where it is one."""
    file: str = ""
    """Path below the dataset, where it is one file."""

    def show(self, dataset: str) -> str:
        """Returns it as one line that names dataset, episode, feature and file."""
        places = [dataset]
        places += [f"episode {self.episode}"] if self.episode is not None else []
        places += [part for part in (self.feature, self.file) if part]
        return f"{', '.join(places)}: {self.message}"


@attrs.frozen(kw_only=True, eq=False)
class Scanned:
    """An episode as it is on disk."""

    episode: Episode
    """What the metadata says."""
    columns: Columns
    """[N, D] values of each column that could be read."""
    pictures: Mapping[str, list[bytes]]
    """Encoded pictures of each camera of kind `image`."""
    ticks: Mapping[str, NDArray[np.int64]]
    """[N] presentation time of each row's frame in the video of each camera, in the ticks of its file."""
    findings: tuple[Finding, ...]
    """What is wrong with it."""


@attrs.frozen(kw_only=True, eq=False)
class Scan:
    """What is asked of a dataset."""

    meta: Meta
    """The dataset."""
    keys: tuple[str, ...]
    """Features of numbers to read, besides those that every dataset has."""
    cameras: tuple[str, ...]
    """Cameras to read."""
    tolerance: float = 1e-4
    """Seconds by which a timestamp may miss its frame."""
    decode: Literal["none", "ends", "all"] = "none"
    """Which frames of each episode to decode, too: none, the first and the last, or all."""


def scan(want: Scan, episodes: Sequence[int]) -> Iterator[Scanned]:
    """Yields the episodes as they are on disk, in the order given, with what is wrong with each."""
    index = functools.lru_cache(maxsize=256)(index_video)
    pictures = tuple(key for key in want.cameras if want.meta.features[key].dtype == "image")
    videos = tuple(key for key in want.cameras if want.meta.features[key].dtype == "video")
    columns = (*INDEXES, *(key for key in want.keys if key not in INDEXES), *pictures)
    read = functools.lru_cache(maxsize=2)(functools.partial(_rows_of_file, want.meta, columns))
    files, spans = locate(want.meta, episodes), places(want.meta, videos, episodes)
    for number in episodes:
        episode = want.meta.episodes[number]
        table, findings = _rows_of_episode(want.meta, episode, files[number], read)
        values: Columns = {}
        images: dict[str, list[bytes]] = {}
        ticks: dict[str, NDArray[np.int64]] = {}
        if table is not None:
            for key in columns:
                if key in pictures:
                    images[key] = [one and one.get("bytes") for one in table[key].to_pylist()]
                    findings += _check_pictures(images[key], episode, want.meta.features[key])
                else:
                    values |= _column(table[key], want.meta, key, episode, findings)
            findings += _check_rows(want, episode, values)
        for key in videos:
            found = _clip(want, episode, key, values.get("timestamp"), spans[key, number], index, findings)
            ticks |= {} if found is None else {key: found}
        yield Scanned(episode=episode, columns=values, pictures=images, ticks=ticks, findings=tuple(findings))


def locate(meta: Meta, episodes: Sequence[int]) -> dict[int, str]:
    """Returns the file, below the dataset, that holds the rows of each episode; the one it should be where none does.

    Some converters closed a file too late, and left episodes in the file after the one that they are said to be in.
    """
    named = {number: meta.episodes[number].file for number in episodes}
    if meta.version == V21:
        return named
    held = {file: _episodes_in(meta.root / file) for file in dict.fromkeys(named.values())}
    lost = {number for number, file in named.items() if number not in held[file]}
    if not lost:
        return named
    for path in numbered(meta.root, "data/*/*.parquet"):
        file = path.relative_to(meta.root).as_posix()
        here = held[file] if file in held else _episodes_in(path)
        named |= dict.fromkeys(lost & here, file)
    return named


def _episodes_in(path: Path) -> set[int]:
    """Returns the episodes that have rows in a file; none for a file that is not there or cannot be read."""
    import pyarrow.compute as pc

    try:
        return set(pc.unique(read_table(path, ["episode_index"])["episode_index"]).to_pylist())
    except ValueError:
        return set()


def _rows_of_file(meta: Meta, columns: tuple[str, ...], file: str) -> Any:
    return read_table(meta.root / file, columns)


def _rows_of_episode(meta: Meta, episode: Episode, file: str, read: Callable[[str], Any]) -> tuple[Any, list[Finding]]:
    """Returns the rows of a file that carry the episode's number, and what is wrong with them as a whole."""
    import pyarrow as pa
    import pyarrow.compute as pc

    def fault(level: Level, message: str) -> Finding:
        return Finding(level=level, message=message, episode=episode.index, file=episode.file)

    if not (meta.root / file).exists():
        return None, [fault("fatal", "the file of its rows is not there; fetch it, or leave the episode out")]
    try:
        table = read(file)
        found = table.filter(pc.equal(table["episode_index"], episode.index))
    except (ValueError, pa.ArrowException) as error:
        return None, [fault("fatal", str(error))]
    if len(found) != episode.length:
        message = f"the table of episodes says {episode.length} frames, and there are {len(found)} rows"
        return None, [fault("fatal", f"{message}; fetch the file again, or leave the episode out")]
    if file != episode.file:
        return found, [fault("wrong", f"its rows are in {file}; correct data/file_index of the episode")]
    return found, []


def _column(column: Any, meta: Meta, key: str, episode: Episode, findings: list[Finding]) -> Columns:
    import pyarrow as pa
    import pyarrow.compute as pc

    def fault(message: str) -> Columns:
        findings.append(Finding(level="fatal", message=message, episode=episode.index, feature=key, file=episode.file))
        return {}

    column = column.combine_chunks()
    kind, feature = column.type, meta.features.get(key)
    if feature is not None and not feature.is_number:
        return fault(f"info.json says {feature.dtype} {list(feature.shape)}, and it must be a vector of numbers")
    nested = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind)
    flat = column.flatten() if nested else column
    dims = feature.shape[0] if feature else 1
    wrong = column.null_count or flat.null_count or len(flat) != len(column) * dims
    ragged = nested and not wrong and np.any(np.asarray(pc.list_value_length(column)) != dims)
    is_number = pa.types.is_integer(flat.type) or pa.types.is_floating(flat.type) or pa.types.is_boolean(flat.type)
    if wrong or ragged or not is_number:
        return fault(
            f"its rows are not all {dims} numbers (type {kind}); mend the file, or leave the episode out",
        )
    values = flat.to_numpy(zero_copy_only=False).reshape(len(column), dims)
    dtype = np.dtype(feature.dtype) if feature else values.dtype
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # what overflows is found as a number that is not finite
            return {key: values.astype(np.float32, copy=False)}
    with np.errstate(invalid="ignore"):
        exact = values.astype(dtype, copy=False)
    changed = np.argwhere(exact != values)
    if len(changed):
        frame, dim = changed[0]
        return fault(
            f"its rows are {values.dtype}, and info.json says {dtype}, which would make {values[frame, dim]} of frame "
            f"{frame}, dim {dim}, {exact[frame, dim]}; correct the dtype in info.json"
        )
    return {key: exact}


def _check_rows(want: Scan, episode: Episode, columns: Columns) -> Iterator[Finding]:
    def fault(level: Level, feature: str, message: str) -> Finding:
        return Finding(level=level, message=message, episode=episode.index, feature=feature, file=episode.file)

    steps = np.arange(episode.length)
    for key, first in (("frame_index", 0), ("index", episode.first)):
        if key in columns:
            at = np.flatnonzero(columns[key][:, 0] != first + steps)
            if len(at):
                values = f"{columns[key][at[0], 0]} at frame {at[0]}, where {first + at[0]} belongs"
                yield fault("fatal" if key == "frame_index" else "wrong", key, f"it is {values}; number the rows again")
    if "timestamp" in columns:
        yield from _check_times(want, columns["timestamp"][:, 0].astype(np.float64), fault)
    if "task_index" in columns:
        numbers = {int(number) for number in np.unique(columns["task_index"])}
        if not numbers <= want.meta.tasks.keys():
            message = f"tasks {sorted(numbers - want.meta.tasks.keys())} are not in the table of tasks; add them to it"
            yield fault("fatal", "task_index", message)
        elif episode.tasks and {want.meta.tasks[number] for number in numbers} != set(episode.tasks):
            yield fault("wrong", "task_index", f"its rows have other tasks than its metadata {episode.tasks}")
    for key in want.keys:
        if key in columns and columns[key].dtype.kind == "f" and not np.isfinite(columns[key]).all():
            frame, dim = np.argwhere(~np.isfinite(columns[key]))[0]
            many = int((~np.isfinite(columns[key])).any(axis=1).sum())
            message = f"dim {dim} is {columns[key][frame, dim]} at frame {frame} ({many} such frames)"
            yield fault("fatal", key, f"{message}; mend them, or leave the episode out")


def _check_times(
    want: Scan, times: NDArray[np.float64], fault: Callable[[Level, str, str], Finding]
) -> Iterator[Finding]:
    if not np.isfinite(times).all():
        yield fault("fatal", "timestamp", "there are timestamps that are not finite; mend them")
        return
    gaps = np.diff(times) - 1 / want.meta.fps
    at = int(np.abs(gaps).argmax()) if len(gaps) else 0
    # float32 holds the times, so two of them may be off by half a unit in the last place each.
    slack = want.tolerance + float(np.spacing(np.float32(times.max(initial=0))))
    if len(gaps) and abs(gaps[at]) > slack:
        message = (
            f"frames {at} and {at + 1} are {times[at + 1] - times[at]:.6g} s apart, and {want.meta.fps:g} fps means"
        )
        many = f"{int((np.abs(gaps) > slack).sum())} such gaps"
        yield fault(
            "fatal", "timestamp", f"{message} {1 / want.meta.fps:.6g} ({many}); record fps and times as they are"
        )


def _check_pictures(pictures: Sequence[bytes | None], episode: Episode, feature: Feature) -> Iterator[Finding]:
    def faults() -> Iterator[tuple[int, str]]:
        for frame, data in enumerate(pictures):
            why = picture_fault(data, feature.shape[:2]) if data else "it is not in the row"
            if why:
                yield frame, why

    wrong = list(faults())
    if wrong:
        frame, why = wrong[0]
        message = f"the picture of frame {frame}: {why} ({len(wrong)} such frames); mend them, or leave the episode out"
        yield Finding(level="fatal", message=message, episode=episode.index, feature=feature.key, file=episode.file)


def _clip(
    want: Scan,
    episode: Episode,
    key: str,
    times: NDArray[Any] | None,
    place: Place,
    index: Callable[[Path], VideoIndex],
    findings: list[Finding],
) -> NDArray[np.int64] | None:
    clip, feature = episode.clips[key], want.meta.features[key]

    def add(level: Level, message: str) -> None:
        findings.append(Finding(level=level, message=message, episode=episode.index, feature=key, file=clip.file))

    wrong = kind_fault(want.meta.root / clip.file)
    if wrong:
        add("fatal", wrong)
        return None
    if not (want.meta.root / clip.file).exists():
        add("fatal", "the video is not there; fetch it, or leave the episode or the camera out")
        return None
    try:
        video = index(want.meta.root / clip.file)
    except ValueError as error:
        add("fatal", str(error))
        return None
    if (video.height, video.width) != feature.shape[:2]:
        add("wrong", f"the video is {video.height} x {video.width}, and info.json says {feature.shape[:2]}; correct it")
    if want.meta.version == V21 and len(video.pts) != episode.length:
        add("fatal", f"the video has {len(video.pts)} frames, and the table {episode.length}; record or cut it again")
        return None
    if times is None or not np.isfinite(times).all():
        return None
    found, off = nearest(video, clip.start + times[:, 0].astype(np.float64))
    worst = int(off.argmax())
    # A time in float32 and its frame differ by up to half a unit in the last place, which is no fault of either.
    slack = want.tolerance + float(np.spacing(np.float32(times.max(initial=0))))
    if off[worst] > slack:
        at = clip.start + float(times[worst, 0])
        add(
            "fatal",
            f"frame {worst}, at {at:.6f} s of the video, is {off[worst]:.6f} s from the nearest of its frames "
            f"(tolerance {want.tolerance:g}, {int((off > slack).sum())} such frames); mend the times or leave it out",
        )
        return None
    spanned = int(found[-1] - found[0]) + 1
    if spanned != episode.length or np.any(np.diff(found) != 1):
        add("fatal", f"the video has {spanned} frames for the {episode.length} rows of the table; record it again")
        return None
    spans = span_faults(want.meta, key, episode.index, place, video, int(found[0]))
    for level, message in spans:
        add(level, message)
    if any(level == "fatal" for level, _ in spans):
        return None
    ticks = video.pts[found]
    if want.decode != "none":
        _check_decodes(want.meta.root / clip.file, ticks if want.decode == "all" else ticks[[0, -1]], add)
    return ticks


def _check_decodes(path: Path, ticks: NDArray[np.int64], add: Callable[[Level, str], None]) -> None:
    decoder = None
    try:
        decoder = Decoder(path)
        for tick in ticks.tolist():
            decoder.frame(tick)
    except ValueError as error:
        add("fatal", str(error))
    finally:
        if decoder is not None:
            decoder.close()


def check_camera(feature: Feature) -> str:
    """Returns why a feature cannot be a camera of rows, empty where it can."""
    if not feature.is_camera:
        return f"it is a feature of {feature.dtype}, not a camera"
    if feature.depth:
        return "it is a camera of depths, which lf does not read"
    return ""
