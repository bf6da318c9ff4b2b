"""Episodes of an environment's expert, as recordings to train on."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from lf.acting.env import Environment
from lf.acting.policy import Observation
from lf.data.lerobot_record import Take

IMAGE_KEY, STATE_KEY, ACTION_KEY = "observation.images.{}", "observation.state", "action"
"""Names of features, as LeRobot's datasets have them."""

_PERSISTENCE = 0.8
"""Share of the disturbance of a step that is left in the next."""


def demonstrations(env: Environment, seeds: Iterable[int], *, noise: float = 0.0) -> Iterator[Take]:
    """Yields the episodes of `seeds` in which the expert succeeds; the others are left out.

    What is executed is the expert's action with a disturbance, a slowly changing normal one of deviation `noise` (in
    units of the action), and what is recorded is the expert's own. So the recordings show how to come back from states
    that a policy drifts into and the expert would not (DART, arXiv:1703.09327).

    A row has what the robot saw, and the action that was right then. Episodes are functions of seed and noise.
    Raises ValueError where the environment has no expert, or it never succeeds.
    """
    if env.expert is None:
        raise ValueError(f"{env.name} has no expert; record episodes of another environment, or of a person")
    tried = kept = 0
    for seed in seeds:
        tried += 1
        take, success = _episode(env, seed, noise)
        if success:
            kept += 1
            yield take
    if tried and not kept:
        raise ValueError(f"the expert of {env.name} succeeds in none of {tried} episodes; lower noise = {noise}")


def _episode(env: Environment, seed: int, noise: float) -> tuple[Take, bool]:
    assert env.expert is not None
    rng = np.random.default_rng([seed, 1])
    seen: list[Observation] = [env.reset(seed)]
    actions: list[NDArray[np.float32]] = []
    drift, success = rng.normal(0.0, noise, env.action_dims), False
    for _ in range(env.max_steps):
        actions.append(env.expert())
        step = env.step((actions[-1] + drift).astype(np.float32))
        drift = _PERSISTENCE * drift + np.sqrt(1 - _PERSISTENCE**2) * rng.normal(0.0, noise, env.action_dims)
        if step.done:
            success = step.success
            break
        seen.append(step.observation)
    seen = seen[: len(actions)]
    take = Take(
        values={STATE_KEY: np.stack([o.state for o in seen]), ACTION_KEY: np.stack(actions)},
        pictures={IMAGE_KEY.format(name): [o.images[name] for o in seen] for name in env.cameras},
        task=seen[0].task,
    )
    return take, success
