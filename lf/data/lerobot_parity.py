"""Compares lf's reading of a LeRobot dataset with what the official reader returned for it.

A golden folder has `config.json` (the windows of each variant), `meta.json` (the official reader's metadata),
`samples.json` and `samples.safetensors` (items, named variant/key, pictures averaged over blocks of pixels), and
`stats.safetensors` (the recorded statistics, merged as the official reader merges them).

Shapes: N samples, T steps of a window, H height, W width.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lf.data.config import Camera, LeRobotData, Normalise, Signal
from lf.data.lerobot import LeRobotRows, open_lerobot
from lf.data.lerobot_meta import Meta, read_meta, recorded_stats

TOLERANCES = {"images": 2e-3, "stats": 1e-9}
"""Largest difference of pictures (absolute, in [0, 1]) and of merged statistics (over the largest); else none."""

_INTEGERS = ("episode_index", "frame_index", "index", "task_index")

Outputs = dict[str, float | None]
"""Difference by name; None where lf cannot produce what was recorded."""


def compare_dataset(folder: Path, data: Path, cache_dir: Path) -> dict[str, Any]:
    """Returns the comparison as one JSON object: `folder`, `family`, `outputs`, `grads` (none), `ok`.

    Raises ValueError for a dataset that cannot be read.
    """
    from safetensors.numpy import load_file

    config, meta = _json(folder / "config.json"), _json(folder / "meta.json")
    known, recorded = read_meta(data), load_file(folder / "samples.safetensors")
    samples = _json(folder / "samples.json")
    outputs: Outputs = {f"meta/{name}": value for name, value in _compare_meta(known, meta).items()}
    for name, value in load_file(folder / "stats.safetensors").items():
        outputs[f"stats/{name}"] = _compare_stat(known, name, value, meta["loaded"]["episodes"])
    for variant, entry in config["variants"].items():
        windows = entry["delta_timestamps"] if isinstance(entry, Mapping) else {}
        wanted = {name.split("/", 1)[1]: value for name, value in recorded.items() if name.startswith(f"{variant}/")}
        steps = {key: [round(second * known.fps) for second in seconds] for key, seconds in windows.items()}
        outputs[f"{variant}/delta_indices"] = float((steps or None) != meta["delta_indices"][variant])
        cfg = _config(data, known, meta["loaded"]["episodes"], windows, wanted)
        found = _compare_items(cfg, cache_dir, wanted, samples["samples"], range(len(samples["samples"])))
        outputs |= {f"{variant}/{name}": value for name, value in found.items()}
        if "subset" in samples:
            part = _config(data, known, samples["subset"]["episodes"], windows, wanted)
            listed = samples["subset"]["samples"]
            placed = [{**samples["samples"][one["sample"]], "position": one["position"]} for one in listed]
            found = _compare_items(part, cache_dir, wanted, placed, [one["sample"] for one in listed])
            outputs |= {f"subset {variant}/{name}": value for name, value in found.items()}
        if "video_queries" in samples["samples"][0]:
            outputs[f"{variant}/video_queries"] = _compare_queries(known, cfg, cache_dir, samples["samples"], variant)
    cameras = {feature.key for feature in known.cameras}

    def good(name: str, value: float | None) -> bool:
        limit = TOLERANCES["stats"] if name.startswith("stats/") else 0.0
        limit = TOLERANCES["images"] if name.split("/", 1)[-1] in cameras else limit
        return value is not None and value <= limit

    return {
        "folder": str(folder),
        "family": f"lerobot {known.version}",
        "outputs": outputs,
        "grads": {},
        "ok": bool(outputs) and all(good(name, value) for name, value in outputs.items()),
    }


def _json(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))


def _config(
    data: Path, known: Meta, episodes: Any, windows: Mapping[str, Any], wanted: Mapping[str, Any]
) -> LeRobotData:
    """Returns the config whose rows hold what was recorded; a camera of which only the mask was is not read."""
    numbers = [key for key in wanted if key in known.features and not known.features[key].is_camera]
    cameras = [feature.key for feature in known.cameras if feature.key in wanted]
    masked = [
        feature.key for feature in known.cameras if f"{feature.key}_is_pad" in wanted and feature.key not in wanted
    ]
    return LeRobotData(
        path=str(data),
        episodes=None if episodes is None else tuple(episodes),
        cameras=tuple(
            Camera(name=key, key=key if key in cameras else "", seconds=tuple(windows.get(key, ())))
            for key in (*cameras, *masked)
        ),
        state=(),
        actions=(),
        extra=tuple(
            Signal(name=f"golden {key}", key=key, seconds=tuple(windows.get(key, ())))
            for key in dict.fromkeys((*numbers, *_INTEGERS, "timestamp"))
        ),
        normalise=Normalise(state="none", actions="none"),
    )


def _open(cfg: LeRobotData, cache_dir: Path) -> LeRobotRows:
    return open_lerobot(cfg, seed=0, cache_dir=cache_dir, where="data")


def _compare_items(
    cfg: LeRobotData,
    cache_dir: Path,
    wanted: Mapping[str, NDArray[Any]],
    samples: Sequence[Mapping[str, Any]],
    chosen: Sequence[int],
) -> Outputs:
    """Returns the differences of some samples; `chosen` are their places in the recorded arrays."""
    rows = _open(cfg, cache_dir)
    found = [_item(rows, sample) for sample in samples]
    differences = {key: _worst([item.get(key) for item in found], value[chosen]) for key, value in wanted.items()}
    return {
        **differences,
        "task": float(any(item["task"] != sample["task"] for item, sample in zip(found, samples, strict=True))),
        "position": float(max(abs(_row(rows, sample) - sample["position"]) for sample in samples)),
    }


def _row(rows: LeRobotRows, sample: Mapping[str, Any]) -> int:
    at = int(np.flatnonzero(rows.episodes == sample["episode_index"])[0])
    return int(rows.starts[at]) + int(sample["frame_index"])


def _item(rows: LeRobotRows, sample: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row as the official reader gives it: cameras in [0, 1], channels first, and numbers of one dim bare."""
    row = rows.frame_row(_row(rows, sample))
    item: dict[str, Any] = {"task": row["task"]}
    for name, value in row.items():
        if name.startswith("golden "):
            bare = value.shape == (1,) and not name.endswith("_is_pad")
            item[name.removeprefix("golden ")] = value[0] if bare else value
    item |= row.get("images", {})
    item |= {f"{name}_is_pad": is_pad for name, is_pad in row.get("image_is_pad", {}).items()}
    return item


def _worst(found: list[Any], recorded: NDArray[Any]) -> float | None:
    worst = 0.0
    for value, reference in zip(found, recorded, strict=True):
        if value is None:
            return None
        if np.asarray(value).dtype == np.uint8 and reference.dtype == np.float32:
            value = _average(value, reference.shape)
        elif np.asarray(value).dtype != reference.dtype or np.shape(value) != reference.shape:
            return None
        worst = max(worst, float(np.abs(np.asarray(value, np.float64) - reference.astype(np.float64)).max()))
    return worst


def _average(pixels: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Returns [..., H, W] pixels in [0, 1], averaged over blocks so that they have `shape`."""
    *lead, height, width = pixels.shape
    high, wide = height // shape[-2], width // shape[-1]
    blocks = (pixels / np.float32(255)).reshape(*lead, shape[-2], high, shape[-1], wide)
    return blocks.astype(np.float64).mean(axis=(-3, -1)).astype(np.float32)


def _compare_meta(known: Meta, meta: Mapping[str, Any]) -> Outputs:
    """Returns 0 for each fact that is the official reader's, and 1 for another one."""
    paths = {
        str(number): {
            "data": known.episodes[int(number)].file,
            **{key: clip.file for key, clip in known.episodes[int(number)].clips.items()},
        }
        for number in meta["paths_of_loaded_episodes"]
    }
    facts: dict[str, Any] = {
        "codebase_version": known.version,
        "robot_type": known.robot or None,
        "fps": known.fps,
        "camera_keys": [feature.key for feature in known.cameras],
        "video_keys": [feature.key for feature in known.cameras if feature.dtype == "video"],
        "image_keys": [feature.key for feature in known.cameras if feature.dtype == "image"],
        "tasks": {str(number): task for number, task in known.tasks.items()},
        "paths_of_loaded_episodes": paths,
    }
    names = ("total_episodes", "total_frames", "total_tasks", "chunks_size", "data_path", "video_path")
    facts |= {name: known.info.get(name) for name in names}
    found = {name: float(value != meta[name]) for name, value in facts.items()}
    shapes = {key: [feature.dtype, list(feature.shape)] for key, feature in known.features.items()}
    stated = {key: [value["dtype"], list(value["shape"])] for key, value in meta["features"].items()}
    return {**found, "features": float(shapes != stated), "episodes": float(_episodes(known) != _stated(known, meta))}


def _episodes(known: Meta) -> list[Any]:
    return [
        [
            one.index,
            list(one.tasks),
            one.length,
            one.first,
            one.first + one.length,
            {key: clip.start for key, clip in one.clips.items()},
        ]
        for one in known.episodes.values()
    ]


def _stated(known: Meta, meta: Mapping[str, Any]) -> list[Any]:
    keys = [feature.key for feature in known.cameras if feature.dtype == "video"]
    return [
        [
            *(row[name] for name in ("episode_index", "tasks", "length", "dataset_from_index", "dataset_to_index")),
            {key: row.get(f"videos/{key}/from_timestamp", 0.0) for key in keys},
        ]
        for row in meta["episodes"]
    ]


def _compare_stat(known: Meta, name: str, value: NDArray[Any], loaded: list[int] | None) -> float | None:
    scope, feature, statistic = name.split("/")
    stats = recorded_stats(known, loaded if scope == "dataset.stats" else None)
    found = stats.get(feature, {}).get(statistic)
    if found is None or found.shape != value.shape:
        return None
    exact = statistic in ("min", "max", "count")
    scale = 1.0 if exact else max(float(np.abs(value).max()), 1e-7)
    difference = float(np.abs(found.astype(np.float64) - value.astype(np.float64)).max()) / scale
    # What must be equal has no tolerance.
    return None if exact and difference else difference


def _compare_queries(
    known: Meta, cfg: LeRobotData, cache_dir: Path, samples: Sequence[Mapping[str, Any]], variant: str
) -> float:
    """Returns the largest difference, in seconds, of the times in a video that the official reader asked for.

    It is infinite where the file is another one. The official times hold a float32 timestamp.
    """
    rows, worst = _open(cfg, cache_dir), 0.0
    steps = {camera.name: rows.steps[f"cameras[{number}]"] or (0,) for number, camera in enumerate(rows.cameras)}
    for sample in samples:
        at = int(np.flatnonzero(rows.episodes == sample["episode_index"])[0])
        asked = {query["path"]: query["timestamps"] for query in sample["video_queries"][variant]}
        for key, clip in known.episodes[sample["episode_index"]].clips.items():
            found, _ = rows.place(steps.get(key, (0,)), at, sample["frame_index"])
            times = clip.start + rows.columns["timestamp"][found, 0].astype(np.float64)
            if len(asked.get(clip.file, ())) != len(times):
                return float("inf")
            worst = max(worst, float(np.abs(times - asked[clip.file]).max()))
    return worst
