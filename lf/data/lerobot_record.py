"""Writes recorded episodes, arrays in memory or frames one by one, as a LeRobot v3.0 dataset.

Statistics of pictures are those of up to 100 frames an episode, spread evenly.

Shapes: N frames of an episode, D dims, H height, W width.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.data.lerobot_write import (
    DEFAULT_LIMITS,
    INDEX_TYPES,
    QUANTILES,
    Limits,
    Part,
    assemble,
    check_finite,
    check_text,
)
from lf.data.video import Pixels, write_video

_SAMPLED = 100


@attrs.frozen(kw_only=True, eq=False)
class Take:
    """An episode to be written."""

    values: Mapping[str, NDArray[Any]]
    """[N, D] or [N] numbers of each feature, a row a frame."""
    pictures: Mapping[str, Iterable[Pixels]] = {}
    """N frames [H, W, 3] (RGB) of each camera."""
    task: str
    """The instruction."""
    source: str = ""
    """What errors call it besides its number, such as its file."""


def write_dataset(
    root: Path,
    takes: Iterable[Take],
    *,
    fps: float,
    robot: str = "",
    names: Mapping[str, Sequence[str]] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    codec: str = "libx264",
    crf: int = 23,
) -> None:
    """Writes episodes as a dataset, each as it comes; `names` are those of the dims of features.

    `root` must not be there yet, and appears whole or not at all. The numbers of all episodes are held in memory, the
    pictures of none. Raises ValueError for episodes that are not alike, or whose features differ in length.
    """
    with_names = names or {}
    shapes: dict[str, dict[str, Any]] = {}

    def parts(work: Path) -> Iterator[Part]:
        for number, take in enumerate(takes):
            where = f"{take.source}, episode {number}" if take.source else f"episode {number}"
            part, features = _encode(work, number, where, take, Fraction(fps).limit_denominator(100_000), codec, crf)
            for key, feature in features.items():
                feature["names"] = list(with_names[key]) if key in with_names else feature["names"]
            if shapes and features != shapes:
                raise ValueError(f"{where} has features {features}, and those before {shapes}; make them alike")
            shapes.update(features)
            yield part

    assemble(root, parts, shapes, fps=fps, robot=robot, limits=limits)


def picture_stats(counts: NDArray[np.int64], frames: int) -> dict[str, NDArray[Any]]:
    """Returns the statistics [3, 1, 1] of pixels in [0, 1], and how many frames there were [1].

    `counts` [3, 256] are the pixels of each channel by their value, so the statistics are exact.
    """
    levels = np.arange(256) / 255
    total = counts.sum(1)
    mean = (counts * levels).sum(1) / total
    found = {
        "min": levels[(counts > 0).argmax(1)],
        "max": levels[255 - (counts[:, ::-1] > 0).argmax(1)],
        "mean": mean,
        "std": np.sqrt((counts * (levels - mean[:, None]) ** 2).sum(1) / total),
    }
    ends = np.cumsum(counts, axis=1)
    for name, q in QUANTILES.items():
        place = (total - 1) * q
        below, above = ((ends > np.array(rank)[:, None]).argmax(1) for rank in (np.floor(place), np.ceil(place)))
        found[name] = levels[below] + (levels[above] - levels[below]) * (place - np.floor(place))
    return {"count": np.array([frames]), **{name: value.reshape(3, 1, 1) for name, value in found.items()}}


def _encode(
    work: Path, number: int, where: str, take: Take, fps: Fraction, codec: str, crf: int
) -> tuple[Part, dict[str, dict[str, Any]]]:
    """Returns an episode with its videos in `work`, and its features as info.json states them."""
    check_text(take.task, f"{where}: task")
    for key in (*take.values, *take.pictures):
        _check_name(key, where)
    twice = sorted(take.values.keys() & take.pictures.keys())
    if twice:
        raise ValueError(f"{where}: {twice[0]} is a feature of numbers and a camera; give each its own name")
    lengths = {key: len(values) for key, values in take.values.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"{where}: its features have {lengths or 'no'} frames; they must have as many")
    length = next(iter(lengths.values()))
    table, features = _table(where, take)
    videos, stats = {}, {}
    for key, frames in take.pictures.items():
        videos[key] = work / f"{key}.{number}.mp4"
        stats[key], features[key] = _encode_camera(videos[key], frames, length, fps, codec, crf, f"{where}, {key}")
    part = Part(
        length=length,
        tasks=(take.task,),
        table=table,
        task_of_row=(take.task,) * length,
        times=(np.arange(length) / float(fps)).astype(np.float32),
        videos=videos,
        stats=stats,
    )
    return part, features


def _check_name(key: str, where: str) -> None:
    if key in INDEX_TYPES or key in ("", ".", "..") or "/" in key or "\0" in key:
        raise ValueError(
            f"{where}, {key}: a feature cannot be called that, as it names a folder: it may not be empty, . or .., "
            f"have a '/', or be one of {', '.join(INDEX_TYPES)}; rename or drop it"
        )
    check_text(key, f"{where}: the name of a feature")


def _table(where: str, take: Take) -> tuple[Any, dict[str, dict[str, Any]]]:
    import pyarrow as pa

    columns, features = {}, {}
    for key, values in take.values.items():
        if values.ndim not in (1, 2) or 0 in values.shape[1:] or values.dtype.kind not in "fiub":
            raise ValueError(
                f"{where}, {key}: {values.dtype} {values.shape} cannot be a feature; it must be numbers [N, D] or [N]"
            )
        with np.errstate(over="ignore"):  # what overflows is refused with its place
            flat = values.astype(np.float32) if values.dtype.kind == "f" else values
        check_finite(flat, f"{where}, {key}")
        dims = flat.shape[1] if flat.ndim == 2 else 1
        array = pa.array(np.ascontiguousarray(flat).reshape(-1))
        columns[key] = array if dims == 1 else pa.FixedSizeListArray.from_arrays(array, dims)
        features[key] = {"dtype": flat.dtype.name, "shape": [dims], "names": None}
    return pa.table(columns), features


def _encode_camera(
    path: Path, frames: Iterable[Pixels], length: int, fps: Fraction, codec: str, crf: int, where: str
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    chosen = set(np.linspace(0, length - 1, min(length, _SAMPLED)).round().astype(int).tolist())
    counts = np.zeros((3, 256), np.int64)
    size = (0, 0)

    def watched() -> Iterator[Pixels]:
        nonlocal size
        for number, frame in enumerate(frames):
            size = (frame.shape[0], frame.shape[1])
            yield frame
            if number in chosen:
                counts[:] += [np.bincount(frame[..., channel].ravel(), minlength=256) for channel in range(3)]

    count = write_video(path, watched(), fps, codec=codec, crf=crf)
    if count != length:
        raise ValueError(f"{where}: there are {count} frames for {length} rows; give one a row")
    info = {"video.height": size[0], "video.width": size[1], "video.codec": codec, "video.pix_fmt": "yuv420p"}
    info |= {"video.is_depth_map": False, "video.fps": float(fps), "video.channels": 3, "has_audio": False}
    feature = {"dtype": "video", "shape": [*size, 3], "names": ["height", "width", "channels"], "info": info}
    return picture_stats(counts, len(chosen)), feature
