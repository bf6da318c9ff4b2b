"""What a robot shows a policy, and what a policy answers: plain arrays in the robot's own units.

Shapes: h, w pixels of a picture, d dims of the state, H steps of an action chunk, a dims of an action.
"""

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray


@attrs.frozen(kw_only=True, eq=False)
class Observation:
    """What a robot sees at one moment."""

    images: Mapping[str, NDArray[np.uint8]]
    """[h, w, 3] (RGB) by the policy's names of cameras; a camera that the robot lacks is left out."""
    state: NDArray[np.float32]
    """[d] the robot's state, not scaled."""
    task: str
    """The instruction."""


@attrs.frozen(kw_only=True, eq=False)
class Policy:
    """A robot model with all that it needs to act."""

    cameras: tuple[str, ...]
    """Names of the cameras it can use."""
    state_dims: int
    """d."""
    action_dims: int
    """a."""
    horizon: int
    """H."""
    fps: float
    """Actions a second."""
    act: Callable[[Sequence[Observation], Sequence[int]], list[NDArray[np.float32]]]
    """Returns the action chunk [H, a], not scaled, of each observation, given a seed for the noise of each.

    A chunk is a function of its observation and seed alone, whatever others are in the batch.
    """
