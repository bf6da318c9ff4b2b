"""Audits a whole LeRobot dataset: ranges, pointers, counts, times, values and recorded statistics.

Opening for training makes the same checks of what it needs, and stops at what is fatal; this lists everything.
"""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import numpy as np

from lf.data.lerobot_files import brief
from lf.data.lerobot_meta import V21, Feature, Meta, Recorded, episode_stats, read_meta, recorded_stats
from lf.data.lerobot_scan import Finding, Scan, Scanned, check_camera, scan
from lf.data.normalise import CONSTANT, Stats, compute_stats
from lf.data.video import index_video


@attrs.frozen(kw_only=True)
class Audit:
    """What an audit found."""

    dataset: str
    """The folder."""
    version: str
    """`v2.1` or `v3.0`, empty where the metadata cannot be read."""
    episodes: int
    """Episodes that the metadata lists."""
    frames: int
    """Rows that were read."""
    findings: tuple[Finding, ...]
    """What is wrong, or worth knowing."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return all(finding.level == "note" for finding in self.findings)


def audit(root: Path, episodes: Sequence[int] | None = None, decode: Literal["ends", "all"] = "ends") -> Audit:
    """Returns everything that is wrong with a dataset, or with some of its episodes. Never raises for a bad dataset.

    The first and the last frame of every episode are decoded, or all of them; the times of all frames are checked.
    """
    try:
        meta = read_meta(root)
    except ValueError as error:
        finding = Finding(level="fatal", message=str(error))
        return Audit(dataset=str(root), version="", episodes=0, frames=0, findings=(finding,))
    unknown = sorted(set(episodes or ()) - meta.episodes.keys())
    findings = [
        Finding(level="fatal", message="it is not in the table of episodes; leave it out", episode=number)
        for number in unknown
    ]
    findings += [*_check_meta(meta), *_check_features(meta)]
    chosen = [number for number in meta.episodes if episodes is None or number in episodes]
    want = Scan(
        meta=meta,
        keys=tuple(feature.key for feature in meta.features.values() if feature.is_number),
        cameras=tuple(feature.key for feature in meta.cameras if not check_camera(feature)),
        decode=decode,
    )
    kept: dict[str, list[Any]] = {}
    recorded, read = _recorded_of_episodes(meta, findings), 0
    for found in scan(want, chosen):
        findings += found.findings
        findings += _check_episode_stats(found, recorded.get(found.episode.index, {}))
        read += found.episode.length if found.columns else 0
        for key, values in found.columns.items():
            if values.dtype.kind == "f" and np.isfinite(values).all():
                kept.setdefault(key, []).append(values)
    whole = read == sum(episode.length for episode in meta.episodes.values())
    findings += _check_values(meta, kept, whole)
    if episodes is None:
        findings += _check_files(meta)
    return Audit(
        dataset=str(root), version=meta.version, episodes=len(meta.episodes), frames=read, findings=tuple(findings)
    )


def to_json(found: Audit) -> dict[str, Any]:
    """Returns an audit as one JSON object."""
    return {**attrs.asdict(found), "ok": found.ok}


def _check_meta(meta: Meta) -> Iterator[Finding]:
    counts = {
        "total_episodes": len(meta.episodes),
        "total_frames": sum(episode.length for episode in meta.episodes.values()),
        "total_tasks": len(meta.tasks),
    }
    for name, count in counts.items():
        if meta.info.get(name) != count:
            message = f"{name} is {meta.info.get(name)}, and the tables have {count}; correct it"
            yield Finding(level="wrong", message=message, file="meta/info.json")
    if meta.version != V21 and meta.task_rows != tuple(range(len(meta.task_rows))):
        message = (
            "task_index is not the number of the row, by which other readers find a task; sort and number the table"
        )
        yield Finding(level="wrong", message=message, feature="task_index", file="meta")
    numbers = list(meta.episodes)
    if numbers != list(range(len(numbers))):
        missing = sorted(set(range(max(numbers, default=0))) - set(numbers))
        told = f"episodes are not numbered from 0 on: {missing[:5]} are missing"
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        yield Finding(level="wrong", message=told + more, file="meta")
    for before, after in itertools.pairwise(meta.episodes.values()):
        due = before.first + before.length
        if after.first != due:
            kind = "overlaps the one before" if after.first < due else "leaves a gap"
            message = f"it starts at frame {after.first} of the dataset, which {kind}; it should at {due}"
            yield Finding(level="wrong", message=message, episode=after.index, file="meta")
    for episode in meta.episodes.values():
        if episode.last != episode.first + episode.length:
            message = f"dataset_to_index is {episode.last}, and dataset_from_index {episode.first} plus length "
            message += f"{episode.length} is {episode.first + episode.length}; correct it"
            yield Finding(level="wrong", message=message, episode=episode.index, file="meta")
        if not episode.tasks:
            message = "its list of tasks is empty; list those of its rows"
            yield Finding(level="wrong", message=message, episode=episode.index, file="meta")
        if not set(episode.tasks) <= set(meta.tasks.values()):
            message = f"its tasks {episode.tasks} are not all in the table of tasks; add them"
            yield Finding(level="wrong", message=message, episode=episode.index, file="meta")


def _check_features(meta: Meta) -> Iterator[Finding]:
    for feature in meta.features.values():
        if not (feature.is_camera or feature.is_numeric or feature.dtype == "string"):
            message = (
                f"its dtype is {brief(feature.dtype)}, which is none of numbers, string, image or video; correct it"
            )
            yield Finding(level="wrong", message=message, feature=feature.key, file="meta/info.json")
            continue
        reason = check_camera(feature) if feature.is_camera else ""
        if reason or not (feature.is_camera or feature.is_number or feature.dtype == "string"):
            message = reason or f"it has shape {feature.shape}, and lf reads vectors"
            yield Finding(level="note", message=f"{message}; it is left out", feature=feature.key)


def _check_files(meta: Meta) -> Iterator[Finding]:
    """Yields files that no episode points at, and videos that have more or fewer frames than their episodes."""
    data = {episode.file for episode in meta.episodes.values()}
    lengths: dict[tuple[str, str], int] = {}
    for episode in meta.episodes.values():
        for key, clip in episode.clips.items():
            lengths[clip.file, key] = lengths.get((clip.file, key), 0) + episode.length
    videos = {file for file, _ in lengths}
    for folder, suffix, known in (("data", ".parquet", data), ("videos", ".mp4", videos)):
        for path in sorted((meta.root / folder).rglob(f"*{suffix}")):
            file = path.relative_to(meta.root).as_posix()
            if file not in known:
                yield Finding(
                    level="wrong", message="no episode points at it; remove it, or list its episodes", file=file
                )
    if meta.version == V21:
        return
    for (file, key), length in lengths.items():
        try:
            frames = len(index_video(meta.root / file).pts)
        except (ValueError, OSError):
            continue
        if frames != length:
            message = f"the video has {frames} frames, and its episodes have {length}"
            yield Finding(level="wrong", message=message, feature=key, file=file)


def _recorded_of_episodes(meta: Meta, findings: list[Finding]) -> dict[int, Recorded]:
    try:
        return episode_stats(meta)
    except ValueError as error:
        findings.append(Finding(level="wrong", message=str(error), file="meta"))
        return {}


def _check_episode_stats(found: Scanned, stats: Recorded) -> Iterator[Finding]:
    for key, values in found.columns.items():
        if key in stats and np.isfinite(values).all():
            wrong = _differences(stats[key], values.min(0), values.max(0), values.astype(np.float64).mean(0))
            if wrong:
                message = f"its recorded statistics are not those of its rows ({wrong}); compute them again"
                yield Finding(level="wrong", message=message, episode=found.episode.index, feature=key)


def _differences(stats: Any, low: Any, high: Any, mean: Any) -> str:
    """Returns what differs more than float32 sums may: extremes by rounding, means by a part of the range."""
    spread = np.maximum(np.asarray(high, np.float64) - low, np.maximum(np.abs(low), np.abs(high)) * 1e-3) + 1e-6
    for name, value, part in (("min", low, 1e-5), ("max", high, 1e-5), ("mean", mean, 1e-2)):
        if name not in stats:
            continue
        have = np.asarray(stats[name], np.float64).reshape(-1)
        if have.shape != np.shape(value):
            return f"{name} has {have.size} dims, and the feature {np.size(value)}"
        off = np.abs(have - value) > part * spread
        if off.any():
            dim = int(np.flatnonzero(off)[0])
            return f"{name} of dim {dim} is {have[dim]:.6g}, and the rows have {float(np.asarray(value)[dim]):.6g}"
    return ""


def _check_values(meta: Meta, kept: dict[str, list[Any]], whole: bool) -> Iterator[Finding]:
    """Yields what the values of all rows say, beside the statistics that the dataset records of itself."""
    try:
        recorded: Recorded = recorded_stats(meta)
    except ValueError as error:
        yield Finding(level="wrong", message=f"{error}; lf does without, other readers do not", file="meta")
        recorded = {}
    for key, parts in kept.items():
        stats = compute_stats(lambda parts=parts: parts, key)  # type: ignore[misc]
        yield from _check_constant(meta.features.get(key), key, stats)
        if not whole or key not in recorded:
            continue
        wrong = _differences(recorded[key], *(np.array(value) for value in (stats.min, stats.max, stats.mean)))
        if wrong:
            message = f"the recorded statistics are not those of the rows ({wrong}); compute them again"
            yield Finding(level="wrong", message=message, feature=key, file="meta")
        yield from _check_spread(key, recorded[key], stats)
    for feature in meta.cameras:
        if feature.key in recorded and np.any(np.asarray(recorded[feature.key].get("std", 1.0)) < 0.02):
            std = [round(float(x), 4) for x in np.ravel(recorded[feature.key]["std"])]
            message = (
                f"the recorded standard deviation of its pixels is {std}, too small to be true; do not divide by it"
            )
            yield Finding(level="note", message=message, feature=feature.key, file="meta")


def _check_constant(feature: Feature | None, key: str, stats: Stats) -> Iterator[Finding]:
    still = [
        dim
        for dim, (low, high) in enumerate(zip(stats.min, stats.max, strict=True))
        if high - low <= CONSTANT * max(1.0, abs(low + high) / 2)
    ]
    if still and key != "timestamp" and stats.count > 1:
        names = [feature.names[dim] for dim in still] if feature and feature.names else still
        message = f"{len(still)} of {len(stats.min)} dims never move: {', '.join(map(str, names[:8]))}"
        yield Finding(level="note", message=f"{message}; they are scaled by 1", feature=key)


def _check_spread(key: str, recorded: Any, stats: Stats) -> Iterator[Finding]:
    ranges = np.maximum(np.array(stats.max) - np.array(stats.min), 1e-6)
    for name, value in (("std", stats.std), ("q01", stats.q01), ("q99", stats.q99)):
        have = np.asarray(recorded.get(name, value), np.float64).reshape(-1)
        off = np.abs(have - np.array(value)) / ranges if have.shape == np.shape(value) else np.zeros(1)
        if off.max() > 0.01:
            dim = int(off.argmax())
            message = (
                f"the recorded {name} of {int((off > 0.01).sum())} of {len(off)} dims is off by more than 1 % of the"
            )
            message += f" range (dim {dim}: {have[dim]:.6g}, and the rows have {value[dim]:.6g}); lf computes its own"
            yield Finding(level="note", message=message, feature=key, file="meta")
