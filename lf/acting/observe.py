"""An observation as the row that the data loader makes of the same frame, so that a policy sees what it was trained on.

Shapes: h, w pixels of a picture, d dims of the state, H steps of an action chunk, a dims of an action.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lf.acting.policy import MOST_SIDE, Observation
from lf.data.acting import ActingFacts
from lf.data.lerobot import prompt_ids
from lf.data.lerobot_choose import Prompt
from lf.data.normalise import normalise

_FAR = 1e18
"""Scaled states from here on have squares that float32 does not hold."""


def state_dims(facts: ActingFacts) -> int:
    """Returns how many dims the state has, 0 where the policy reads none."""
    return 0 if facts.normalisers.state is None else len(facts.normalisers.state.shift)


def action_dims(facts: ActingFacts) -> int:
    """Returns how many dims an action has, 0 where the data had none."""
    return 0 if facts.normalisers.actions is None else len(facts.normalisers.actions.shift)


def check_observation(facts: ActingFacts, seen: Observation) -> None:
    """Raises ValueError, with the cure, for an observation that the policy cannot act on."""
    have = ", ".join(facts.cameras)
    unknown = sorted(set(seen.images) - set(facts.cameras))
    if unknown:
        raise ValueError(
            f"the observation has the camera {unknown[0]}, and the policy was trained with {have or 'none'}; map the "
            "robot's names to these, and leave other cameras out"
        )
    if facts.cameras and not seen.images:
        raise ValueError(f"the observation has no picture; give at least one of {have}")
    for name, picture in seen.images.items():
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3 or not picture.size:
            raise ValueError(
                f"the picture of {name} is {picture.dtype} {list(picture.shape)}; give uint8 [height, width, 3] (RGB)"
            )
        if max(picture.shape) > MOST_SIDE:
            raise ValueError(
                f"the picture of {name} is {list(picture.shape)}; a side may have {MOST_SIDE} pixels at most"
            )
    state, dims = seen.state, state_dims(facts)
    if state.shape != (dims,) or state.dtype.kind not in "fiu":
        raise ValueError(
            f"the state is {state.dtype} {list(state.shape)}, and the policy was trained with float32 [{dims}]; give "
            "the dims of the data, in its order"
        )
    if not np.isfinite(state).all():
        wrong = np.flatnonzero(~np.isfinite(state)).tolist()
        raise ValueError(f"dims {wrong} of the state are not finite ({state[wrong[0]]}); leave the observation out")


def _scaled(facts: ActingFacts, state: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        scaled = normalise(facts.normalisers.state, state, "state")
    far = np.flatnonzero(~(np.abs(scaled) < _FAR))
    if len(far):
        raise ValueError(
            f"dims {far.tolist()} of the state are far from all that the policy was trained with ({state[far[0]]:g}); "
            "give the units of the data"
        )
    return scaled


def observed_row(facts: ActingFacts, prompt: Prompt | None, seen: Observation, ident: str) -> dict[str, Any]:
    """Returns the row of a dataset (`LeRobotRows.frame_row`) whose frame is the observation; its actions are zeros.

    Raises ValueError as `check_observation` does.
    """
    check_observation(facts, seen)
    out: dict[str, Any] = {
        # torch takes no array that cannot be written to, as those of messages and of videos are.
        "images": {
            name: np.moveaxis(np.require(seen.images[name], requirements="W"), -1, 0)
            for name in facts.cameras
            if name in seen.images
        },
        "image_mask": {name: name in seen.images for name in facts.cameras},
        "image_is_pad": {},
        "actions": np.zeros((facts.chunk, action_dims(facts)), np.float32),
        "action_is_pad": np.zeros(facts.chunk, np.bool_),
        "task": seen.task,
        "fps": facts.fps,
        "id": ident,
    }
    state = None
    if facts.normalisers.state is not None:
        with np.errstate(over="ignore"):
            state = out["state_raw"] = seen.state.astype(np.float32)
        out["state"] = _scaled(facts, state)
    if prompt is not None:
        out["prompt"] = prompt_ids(prompt, facts.normalisers, seen.task, state)
    return out
