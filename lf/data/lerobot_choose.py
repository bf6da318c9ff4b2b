"""Holds what a config asks of a LeRobot dataset against what the dataset has."""

from collections.abc import Callable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.data.config import Camera, LeRobotData
from lf.data.lerobot_meta import Meta
from lf.data.lerobot_scan import check_camera

Prompt = Callable[[str, NDArray[np.float32]], NDArray[np.int64]]
"""Gives the token ids of what a policy reads, from the task and the scaled state [D]."""


@attrs.frozen(kw_only=True)
class Most:
    """How many tokens a prompt may have; 0 sets no limit."""

    data: int = 0
    """What the data's config allows."""
    model: int = 0
    """What the model takes."""
    where: str = "data"
    """Where the data's config stands in the run."""


_SHOWN = 5

_TAKEN = frozenset(
    (
        *("state", "state_raw", "state_is_pad", "actions", "action_is_pad", "images", "image_mask", "image_is_pad"),
        *("task", "prompt", "fps", "episode", "frame", "timestamp", "id"),
    )
)


def choose_episodes(meta: Meta, wanted: Sequence[int] | None, where: str) -> tuple[int, ...]:
    """Returns the episodes to take, ascending; raises ValueError for none, unknown ones, or one that is named twice."""
    chosen = tuple(meta.episodes) if wanted is None else tuple(sorted(wanted))
    unknown = sorted(set(chosen) - meta.episodes.keys())
    if not chosen:
        raise ValueError(
            f"{where}.episodes is empty, or {meta.root} has no episode; name at least one, or None for all"
        )
    if unknown:
        have = f"{len(meta.episodes)} from {min(meta.episodes)} to {max(meta.episodes)}" if meta.episodes else "none"
        raise ValueError(
            f"{where}.episodes: {meta.root} has no episodes {unknown[:_SHOWN]} (it has {have}); leave them out"
        )
    stated = meta.info.get("total_episodes")
    if wanted is None and isinstance(stated, int) and stated > len(chosen):
        raise ValueError(
            f"{meta.root}: info.json says {stated} episodes, and the table of episodes has {len(chosen)}; fetch the "
            f"rest, or name those to take in {where}.episodes"
        )
    if len(set(chosen)) != len(chosen):
        raise ValueError(f"{where}.episodes = {tuple(wanted or ())} names an episode twice; name each once")
    empty = [number for number in chosen if meta.episodes[number].length < 1]
    if empty:
        raise ValueError(f"{meta.root}: episodes {empty[:_SHOWN]} have no frame; leave them out of {where}.episodes")
    return chosen


def choose_cameras(meta: Meta, wanted: Sequence[Camera] | None, where: str) -> tuple[Camera, ...]:
    """Returns the cameras of rows; raises ValueError for a key that is no camera there, or a name used twice."""
    if wanted is None:
        wanted = [Camera(name=feature.key, key=feature.key) for feature in meta.cameras]
    have = ", ".join(feature.key for feature in meta.cameras) or "none"
    for number, camera in enumerate(wanted):
        feature = meta.features.get(camera.key)
        reason = (
            "" if not camera.key else "the dataset has no such feature" if feature is None else check_camera(feature)
        )
        if reason:
            raise ValueError(
                f"{where}.cameras[{number}].key = {camera.key!r}: {reason}; the cameras of {meta.root} are: {have} "
                '(key="" is a camera that the dataset lacks)'
            )
    if len({camera.name for camera in wanted}) != len(wanted):
        raise ValueError(f"{where}.cameras: two have one name; give each its own")
    return tuple(wanted)


def check_keys(meta: Meta, cfg: LeRobotData, where: str) -> tuple[str, ...]:
    """Returns the features of numbers that rows need; raises ValueError for one that is none, or a name in use."""
    fields = [("state", key) for key in cfg.state] + [("actions", key) for key in cfg.actions]
    fields += [(f"extra[{number}].key", signal.key) for number, signal in enumerate(cfg.extra)]
    numbers = [feature.key for feature in meta.features.values() if feature.is_number]
    for field, key in fields:
        if key not in numbers:
            feature = meta.features.get(key)
            have = "has no such feature"
            if feature is not None:
                have = f"has it as something else than a vector ({feature.dtype} {list(feature.shape)})"
            raise ValueError(f"{where}.{field}: {meta.root} {have}: {key!r}; its vectors are: {', '.join(numbers)}")
    names = [signal.name for signal in cfg.extra]
    clash = sorted(_TAKEN.intersection(names) | {name for name in names if names.count(name) > 1})
    if clash:
        raise ValueError(f"{where}.extra: the names {clash} are taken; choose others")
    return tuple(dict.fromkeys(key for _, key in fields))


def check_prompts(meta: Meta, episodes: Sequence[int], state: Sequence[str], prompt: Prompt | None, most: Most) -> None:
    """Raises ValueError, with the episode, for a task whose prompt may have more tokens than are allowed.

    A policy may write the state of each frame into it: `state` are its features, and it is taken to be the longest of
    those whose dims are all alike.
    """
    if most.data and prompt is None:
        raise ValueError(
            f"{most.where}.max_prompt = {most.data} counts tokens, and the run has no tokenizer; set one, or 0"
        )
    limits = [(most.data, f"{most.where}.max_prompt"), (most.model, "model.prompt")]
    limit, field = min(((count, name) for count, name in limits if count), default=(0, ""))
    if not limit or prompt is None:
        return
    first: dict[str, int] = {}
    for number in episodes:
        for task in meta.episodes[number].tasks or meta.tasks.values():
            first.setdefault(task, number)
    longest = _longest_state(prompt, sum(meta.features[key].shape[0] for key in state))
    count, task = max((len(prompt(task, longest)), task) for task in first)
    if count > limit:
        raise ValueError(
            f"{meta.root}, episode {first[task]}: the prompt of the task {task!r} has up to {count} tokens, and "
            f"{field} is {limit}; shorten it, or raise {field}"
        )


def _longest_state(prompt: Prompt, dims: int) -> NDArray[np.float32]:
    """Returns the scaled state [D] that takes most tokens, of those in the middle of each bin of a policy and beyond.

    Where a tokenizer splits at blanks, numbers do not depend on their neighbours, and no other state takes more.
    """
    levels = (np.arange(-1, 257) + 0.5) / 128 - 1.0
    states = [np.full(dims, level, np.float32) for level in levels] if dims else [np.zeros(0, np.float32)]
    return max(states, key=lambda state: len(prompt("", state)))


def window_steps(cfg: LeRobotData, cameras: Sequence[Camera], fps: float, where: str) -> dict[str, tuple[int, ...]]:
    """Returns the steps of every window, in frames, by the path of its field; empty for a field without one.

    Raises ValueError for a time that is further than the tolerance from a whole number of frames.
    """

    def steps(field: str, seconds: Sequence[float]) -> tuple[int, ...]:
        found = tuple(round(second * fps) for second in seconds)
        for number, (second, step) in enumerate(zip(seconds, found, strict=True)):
            # The small part allows what a decimal number cannot say, no more.
            if not abs(second * fps - step) / fps <= cfg.tolerance * (1 + 1e-9):
                raise ValueError(
                    f"{where}.{field}[{number}] = {second} is no whole number of frames at {fps:g} fps (the nearest is "
                    f"{step / fps:.6g}, tolerance {cfg.tolerance:g}); give multiples of {1 / fps:.6g}"
                )
        return found

    return {
        "state": steps("state_seconds", cfg.state_seconds),
        "actions": tuple(range(cfg.chunk)),
        **{f"cameras[{i}]": steps(f"cameras[{i}].seconds", one.seconds) for i, one in enumerate(cameras)},
        **{f"extra[{i}]": steps(f"extra[{i}].seconds", one.seconds) for i, one in enumerate(cfg.extra)},
    }
