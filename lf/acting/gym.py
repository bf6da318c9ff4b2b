"""Any gymnasium environment as one that policies act in; which of its observations is what is told by `GymMap`.

Shapes: h, w pixels of a picture, d dims of the state, a dims of an action.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.acting.env import Environment, Step, checked_action
from lf.acting.film import side_by_side
from lf.acting.policy import Observation


@attrs.frozen(kw_only=True)
class GymMap:
    """What the parts of a gymnasium observation are. A key with slashes leads into nested dicts; "" is all of it."""

    images: tuple[tuple[str, str], ...] = ()
    """(camera, key) of each picture, uint8 [h, w, 3]."""
    state: tuple[str, ...] = ()
    """Keys of numbers that are the state, one after the other."""
    task: str
    """The instruction."""
    success: str = ""
    """Key of the info whose truth is success; without one an episode succeeds where it is `terminated`."""


def from_gym(env: Any, mapping: GymMap, *, name: str, fps: float, max_steps: int) -> Environment:
    """Returns a `gymnasium.Env` as an environment; its actions must be a Box [a], and are cut to the bounds of it.

    `max_steps` is the limit, and an episode that the environment cuts off has failed. The pictures for people are those
    of `render()` where its mode is rgb_array, and the cameras' otherwise. Raises ValueError where the mapping does not
    fit the first observation.
    """
    shape = getattr(env.action_space, "shape", None)
    if not hasattr(env.action_space, "low") or shape is None or len(shape) != 1:
        raise ValueError(f"{name}: its actions are {env.action_space}; a Box of one axis is expected, so wrap it")
    world = _World(env, mapping, name)
    first = world.reset(0)
    return Environment(
        name=name,
        cameras={camera: (image.shape[0], image.shape[1]) for camera, image in first.images.items()},
        state_dims=len(first.state),
        action_dims=shape[0],
        fps=fps,
        max_steps=max_steps,
        tasks=(mapping.task,),
        reset=world.reset,
        step=world.step,
        view=world.view,
        close=env.close,
    )


class _World:
    """The environment and what it showed last."""

    def __init__(self, env: Any, mapping: GymMap, name: str) -> None:
        self._env, self._map, self._name = env, mapping, name
        self._running = False
        self._seen: Observation | None = None

    def reset(self, seed: int) -> Observation:
        raw, _ = self._env.reset(seed=seed)
        self._running = True
        return self._observe(raw)

    def step(self, action: NDArray[np.float32]) -> Step:
        space = self._env.action_space
        values = checked_action(action, space.shape[0], self._name)
        if not self._running:
            raise ValueError(f"{self._name}: no episode is running; call reset(seed) first")
        raw, _, terminated, truncated, info = self._env.step(np.clip(values, space.low, space.high).astype(space.dtype))
        success = self._success(info, bool(terminated))
        done = success or bool(terminated or truncated)
        self._running = not done
        return Step(observation=self._observe(raw), success=success, done=done)

    def view(self) -> NDArray[np.uint8]:
        if self._env.render_mode == "rgb_array":
            return side_by_side({"view": np.asarray(self._env.render(), np.uint8)}, 1)
        if self._seen is None or not self._seen.images:
            raise ValueError(f"{self._name} has no camera, and render_mode = {self._env.render_mode}; take rgb_array")
        return side_by_side(self._seen.images)

    def _success(self, info: Mapping[str, Any], terminated: bool) -> bool:
        if not self._map.success:
            return terminated
        if self._map.success not in info:
            raise ValueError(
                f"{self._name}: its info has no {self._map.success!r}; it has {', '.join(info) or 'nothing'}"
            )
        return bool(info[self._map.success])

    def _observe(self, raw: Any) -> Observation:
        images = {camera: np.asarray(_at(raw, key, self._name)) for camera, key in self._map.images}
        for camera, image in images.items():
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise ValueError(
                    f"{self._name}: {camera} is {image.dtype} {list(image.shape)}; uint8 [h, w, 3] is expected"
                )
        parts = [np.asarray(_at(raw, key, self._name), np.float32).reshape(-1) for key in self._map.state]
        state = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        self._seen = Observation(images=images, state=state, task=self._map.task)
        return self._seen


def _at(raw: Any, key: str, name: str) -> Any:
    for part in key.split("/") if key else ():
        if not isinstance(raw, Mapping) or part not in raw:
            have = ", ".join(map(str, raw)) if isinstance(raw, Mapping) else f"no keys, being a {type(raw).__name__}"
            raise ValueError(
                f"{name}: its observation has no {key!r}: at {part!r} there are {have}; correct the mapping"
            )
        raw = raw[part]
    return raw
