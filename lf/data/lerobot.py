"""LeRobot datasets (v2.1, v3.0) as rows that are found by index: one for each frame of the chosen episodes.

Everything is checked when a dataset is opened, once for a content: rows and frame times then lie in the cache, mapped
from disk, and only frames are decoded while training. Windows never cross an episode: a step before its start or after
its end repeats the first or the last frame, and is marked as padding.

Shapes: R rows (frames of all episodes), E episodes, T steps of a window, S actions of a chunk, D dims,
H height, W width.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.config import to_json
from lf.data.augment import Images, augmented
from lf.data.cache import build_once, key_of
from lf.data.config import Camera, LeRobotData
from lf.data.hf_tokenizer import Tokenizer
from lf.data.lerobot_choose import (
    Most,
    Prompt,
    check_keys,
    check_prompts,
    choose_cameras,
    choose_episodes,
    window_steps,
)
from lf.data.lerobot_meta import read_meta
from lf.data.lerobot_scan import Scan
from lf.data.lerobot_store import Pictures, build_store, content_key, open_pictures, read_pictures
from lf.data.normalise import (
    Floats,
    Normalisers,
    check_normalisers,
    encode_actions,
    fit,
    normalise,
    read_normalisers,
    to_delta,
)
from lf.data.outline import outline
from lf.data.video import Decoders
from lf.plan.order import permutation

_FORMAT = 1
_MOST_THREADS = 8


@attrs.frozen(kw_only=True, eq=False)
class LeRobotRows:
    """The rows of a LeRobot dataset. `open_lerobot` makes them."""

    cfg: LeRobotData
    """What was asked for."""
    name: str
    """Name of the dataset's folder."""
    fps: float
    """Frames a second."""
    episodes: NDArray[np.int64]
    """[E] episode_index of each episode, ascending."""
    starts: NDArray[np.int64]
    """[E + 1] first row of each episode, and their number."""
    columns: Mapping[str, NDArray[Any]]
    """[R, D] values of each feature that rows need, mapped from disk."""
    tasks: Mapping[int, str]
    """Tasks by task_index."""
    pictures: Mapping[str, Pictures]
    """Frames of each feature that fills a camera."""
    cameras: tuple[Camera, ...]
    """The cameras of a row."""
    steps: Mapping[str, tuple[int, ...]]
    """Steps of every window, in frames from the row's own, by the path of its field in the config."""
    normalisers: Normalisers
    """How states and actions are scaled; what a checkpoint holds, and evaluation and serving use."""
    content: int
    """Hash of the rows, the pictures, the tasks and the normalisers."""
    order: Callable[[int], NDArray[np.int64]]
    """[R] the row that stands at each place of an epoch."""
    decoders: Decoders
    """Open videos."""
    prompt: Prompt | None = None
    """Gives the token ids of what a policy reads; None where rows have no prompt."""
    augment: Callable[[Images, str], dict[str, Any]] | None = None
    """Returns the pictures of the row with an id as training sees them; None leaves them as they are."""

    def __len__(self) -> int:
        """Returns the rows of one epoch."""
        return int(self.starts[-1])

    @property
    def threads(self) -> int:
        """How many rows are worth reading at once."""
        return min(_MOST_THREADS, os.cpu_count() or 1) if self.pictures else 1

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        """Returns the row at a place of an epoch; its `id` begins with `epoch:index`.

        It is as `frame_row` gives it, but for pictures that are changed at random, all of one camera in one way.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of an epoch of {len(self)} rows")
        row = self.frame_row(int(self.order(epoch)[index]))
        ident = f"{epoch}:{index} {row['id']}"
        if self.augment is not None and "images" in row:
            row["images"] = self.augment(row["images"], ident)
        return {**row, "id": ident}

    def frame_row(self, row: int) -> dict[str, Any]:
        """Returns the row of a frame, counted from 0 over the episodes in ascending order:

        - `images`: uint8 [3, H, W] (RGB) by camera, or [T, 3, H, W] where the camera has a window; a camera that the
          dataset lacks is left out.
        - `image_mask`: by camera, whether the dataset has it. `image_is_pad`: bool [T] by camera with a window.
        - `state`: float32 [D], or [T, D] with `state_is_pad` bool [T]; scaled. `state_raw`: [D], that of the frame.
        - `actions`: float32 [S, D], scaled, and `action_is_pad` bool [S], the steps beyond the episode's end.
        - `task`: the instruction. `prompt`: int64 ids of what a policy reads of it, where the run has a tokenizer.
        - `fps`: frames (and actions) a second.
        - each extra field under its name, with `<name>_is_pad` bool [T] where it has a window.
        - `episode`, `frame` (in the episode), `timestamp` (seconds in the episode) and `id`.
        """
        at = int(np.searchsorted(self.starts, row, side="right")) - 1
        frame, episode = row - int(self.starts[at]), int(self.episodes[at])
        out: dict[str, Any] = self._pictures(at, frame)
        for number, signal in enumerate(self.cfg.extra):
            out |= self._window(signal.name, (signal.key,), f"extra[{number}]", at, frame)
        if self.cfg.state:
            out |= self._window("state", self.cfg.state, "state", at, frame)
            out["state_raw"] = self._values(self.cfg.state, row)
            out["state"] = normalise(self.normalisers.state, out["state"], "state")
        if self.cfg.actions:
            places, out["action_is_pad"] = self.place(self.steps["actions"], at, frame)
            raw = self._values(self.cfg.actions, places)
            out["actions"] = encode_actions(self.normalisers, raw, out.get("state_raw"))
        task = self.tasks[int(self.columns["task_index"][row, 0])]
        if self.prompt is not None:
            out["prompt"] = prompt_ids(self.prompt, self.normalisers, task, out.get("state_raw"))
        return {
            **out,
            "task": task,
            "fps": self.fps,
            "episode": episode,
            "frame": frame,
            "timestamp": float(self.columns["timestamp"][row, 0]),
            "id": f"{self.name}/{episode}/{frame}",
        }

    def describe(self) -> dict[str, int]:
        """Returns `rows`, `episodes`, `cameras`, `state_dims`, `action_dims`, `length` (of a chunk) and `content`."""
        return {
            "rows": len(self),
            "episodes": len(self.episodes),
            "cameras": len(self.cameras),
            "state_dims": self.width(self.cfg.state),
            "action_dims": self.width(self.cfg.actions),
            "length": self.cfg.chunk,
            "content": int(key_of(self.content, to_json(self.normalisers))[:15], 16),
        }

    def scaled(self, norms: Normalisers, where: str) -> "LeRobotRows":
        """Returns the rows with other normalisers, which `where` names; raises ValueError where they do not fit."""
        check_normalisers(norms, state=self.width(self.cfg.state), actions=self.width(self.cfg.actions), where=where)
        return attrs.evolve(self, normalisers=norms)

    def width(self, keys: Sequence[str]) -> int:
        """Returns how many dims features have together."""
        return sum(self.columns[key].shape[1] for key in keys)

    def state_blocks(self) -> Iterator[Floats]:
        """Yields the raw states [N, D] of each episode."""
        for start, end in zip(self.starts, self.starts[1:], strict=False):
            yield self._values(self.cfg.state, slice(int(start), int(end)))

    def action_blocks(self) -> Iterator[Floats]:
        """Yields the raw actions [N, D] of each episode, once each.

        With differences, yields those of all chunks of the episode, without their padding.
        """
        delta = self.cfg.normalise.delta
        for start, end in zip(self.starts, self.starts[1:], strict=False):
            actions = self._values(self.cfg.actions, slice(int(start), int(end)))
            if not any(delta):
                yield actions
                continue
            states = self._values(self.cfg.state, slice(int(start), int(end)))
            for step in range(min(self.cfg.chunk, len(actions))):
                yield to_delta(actions[step:, None], states[: len(states) - step], delta)[:, 0]

    def _values(self, keys: Sequence[str], rows: Any) -> NDArray[Any]:
        return np.concatenate([self.columns[key][rows] for key in keys], axis=-1)

    def place(self, steps: Sequence[int], at: int, frame: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Returns the rows of a window's steps, and which of them are padding."""
        start, length = int(self.starts[at]), int(self.starts[at + 1] - self.starts[at])
        wanted = frame + np.asarray(steps, np.int64)
        inside = np.clip(wanted, 0, length - 1)
        return start + inside, wanted != inside

    def _window(self, name: str, keys: Sequence[str], field: str, at: int, frame: int) -> dict[str, Any]:
        steps = self.steps[field]
        rows, is_pad = self.place(steps or (0,), at, frame)
        values = self._values(keys, rows)
        return {name: values, f"{name}_is_pad": is_pad} if steps else {name: values[0]}

    def _pictures(self, at: int, frame: int) -> dict[str, Any]:
        images, mask, pads = {}, {}, {}
        for number, camera in enumerate(self.cameras):
            mask[camera.name] = bool(camera.key)
            steps = self.steps[f"cameras[{number}]"]
            rows, is_pad = self.place(steps or (0,), at, frame)
            if steps:
                pads[camera.name] = is_pad
            if camera.key:
                pixels = np.moveaxis(read_pictures(self.pictures[camera.key], self.decoders, at, rows), -1, 1)
                images[camera.name] = pixels if steps else pixels[0]
        return {"images": images, "image_mask": mask, "image_is_pad": pads} if self.cameras else {}


@outline.register
def _(rows: LeRobotRows, epoch: int, index: int) -> dict[str, Any]:
    """All rows of a dataset are alike."""
    return {"id": f"{epoch}:{index} {rows.name}"}


def open_lerobot(
    cfg: LeRobotData,
    *,
    prompt: Prompt | None = None,
    most: Most | None = None,
    seed: int,
    cache_dir: Path,
    where: str,
    training: bool = True,
) -> LeRobotRows:
    """Returns the rows of a LeRobot dataset, auditing it first unless `cache_dir` holds its content already.

    They are not scaled yet: that is `LeRobotRows.scaled`. `prompt` gives the token ids of a task, `most` how many there
    may be. `where` names the config in errors. Unless they are for `training`, pictures are as they were recorded.
    Raises ValueError, naming dataset, episode, feature and file, for everything that training on it would stumble over.
    """
    meta = read_meta(Path(cfg.path).expanduser())
    episodes = choose_episodes(meta, cfg.episodes, where)
    cameras = choose_cameras(meta, cfg.cameras, where)
    keys = check_keys(meta, cfg, where)
    check_prompts(meta, episodes, cfg.state, prompt, most or Most(data=cfg.max_prompt, where=where))
    steps = window_steps(cfg, cameras, meta.fps, where)
    want = Scan(
        meta=meta,
        keys=keys,
        cameras=tuple(dict.fromkeys(camera.key for camera in cameras if camera.key)),
        tolerance=cfg.tolerance,
    )
    folder = cache_dir / "robot" / content_key(want, episodes, cache_dir)
    lengths = [meta.episodes[number].length for number in episodes]
    facts = build_once(folder, lambda temporary: build_store(temporary, want, episodes))
    return LeRobotRows(
        cfg=cfg,
        name=meta.name,
        fps=meta.fps,
        episodes=np.array(episodes, np.int64),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        columns={key: np.load(folder / file, mmap_mode="r") for key, file in facts["columns"].items()},
        tasks=meta.tasks,
        pictures={key: open_pictures(want, key, episodes, folder, name) for key, name in facts["pictures"].items()},
        cameras=cameras,
        steps=steps,
        normalisers=Normalisers(),
        content=int(folder.name[:15], 16),
        order=functools.lru_cache(maxsize=2)(functools.partial(permutation, sum(lengths), seed)),
        decoders=Decoders(),
        prompt=prompt,
        augment=functools.partial(augmented, cfg.augment, seed) if training and cfg.augment is not None else None,
    )


def make_prompt(text: Callable[[str, Floats], str] | None, tokenizer: Tokenizer | None, where: str) -> Prompt | None:
    """Returns what gives token ids, of the task alone without `text`; None without a tokenizer.

    They begin as the tokenizer's template has it: Pi0.5 was trained with a begin-of-text token, by openpi and LeRobot.
    Raises ValueError where `text` is there and no tokenizer.
    """
    if tokenizer is None:
        if text is not None:
            raise ValueError(f"{where}: the model reads tasks as text, which needs a tokenizer; set tokenizer, or init")
        return None
    start, encode, spell = tokenizer.start, tokenizer.encode_batch, text or (lambda task, state: task)
    return lambda task, state: np.array([*start, *encode([spell(task, state)])[0]], np.int64)


def prompt_ids(prompt: Prompt, norms: Normalisers, task: str, state: Floats | None) -> NDArray[np.int64]:
    """Returns the token ids of what a policy reads of a task and a raw state [D], None for rows without one."""
    seen = np.zeros(0, np.float32) if state is None else normalise(norms.state, state, "state")
    return prompt(task, seen)


def fit_rows(parts: Sequence[LeRobotRows], cache_dir: Path, where: str) -> Normalisers:
    """Returns the normalisers of datasets that are trained on together, each frame counting once.

    They are computed once for a content. Raises ValueError where `normalise` does not fit them.
    """
    first = parts[0]
    how = first.cfg.normalise
    if how.file:
        norms = read_normalisers(Path(how.file).expanduser())
        if how.delta and how.delta != norms.delta:
            raise ValueError(f"{where}.normalise.delta = {how.delta}, and {how.file} has {norms.delta}; leave it empty")
        return norms
    for part in parts:
        dims = [part.width(part.cfg.state), part.width(part.cfg.actions)]
        if how.delta and len(how.delta) != dims[1]:
            raise ValueError(f"{where}.normalise.delta has {len(how.delta)} entries for {dims[1]} dims of actions")
        if any(how.delta) and max(i for i, on in enumerate(how.delta) if on) >= dims[0]:
            raise ValueError(f"{where}.normalise.delta = {how.delta} needs dims that the state, of {dims[0]}, lacks")
    chunk = first.cfg.chunk if any(how.delta) else 0
    fields = [[list(part.cfg.state), list(part.cfg.actions)] for part in parts]
    folder = cache_dir / "robot_stats" / key_of(_FORMAT, [part.content for part in parts], chunk, to_json(how), fields)
    names = ", ".join(dict.fromkeys(part.name for part in parts))

    def build(temporary: Path) -> Mapping[str, Any]:
        norms = fit(
            (how.state, how.actions),
            how.delta,
            [part.state_blocks for part in parts if part.cfg.state],
            [part.action_blocks for part in parts if part.cfg.actions],
            f"{where} ({names})",
        )
        (temporary / "normalisers.json").write_text(to_json(norms), encoding="utf-8")
        return {}

    build_once(folder, build)
    return read_normalisers(folder / "normalisers.json")


def check_alike(parts: Sequence[LeRobotRows], where: str) -> None:
    """Raises ValueError, with the names of the datasets, where they cannot be mixed."""
    first = parts[0]
    for part in parts[1:]:
        facts = {
            "fps": (first.fps, part.fps),
            "dims of the state": (first.width(first.cfg.state), part.width(part.cfg.state)),
            "dims of the actions": (first.width(first.cfg.actions), part.width(part.cfg.actions)),
            "chunk": (first.cfg.chunk, part.cfg.chunk),
            "normalise": (first.cfg.normalise, part.cfg.normalise),
            "cameras": ([camera.name for camera in first.cameras], [camera.name for camera in part.cameras]),
            "windows": (first.steps, part.steps),
            "extra": ([signal.name for signal in first.cfg.extra], [signal.name for signal in part.cfg.extra]),
        }
        wrong = [f"{name} {old!r} and {new!r}" for name, (old, new) in facts.items() if old != new]
        if wrong:
            raise ValueError(
                f"{where}: the datasets {first.name} and {part.name} differ in {'; '.join(wrong)}; what is "
                'mixed must be alike (a camera that one lacks has key="" there; resample what has another fps)'
            )
