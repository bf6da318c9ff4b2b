"""What an environment is: a simulator, or a robot, as a record of functions that hold one episode at a time.

Shapes: h, w pixels of a picture, d dims of the state, a dims of an action.
"""

import traceback
from collections.abc import Callable, Mapping

import attrs
import numpy as np
from attrs.validators import ge
from numpy.typing import NDArray

from lf.acting.policy import Observation


@attrs.frozen(kw_only=True, eq=False)
class Step:
    """What came of an action."""

    observation: Observation
    """What the robot sees now."""
    success: bool
    """Whether the task is done."""
    done: bool
    """Whether the episode ends here, in success or because success is out of reach."""


@attrs.frozen(kw_only=True, eq=False)
class Environment:
    """A world that a policy acts in. An episode is a function of its seed and of the actions alone."""

    name: str
    """What results are reported under."""
    cameras: Mapping[str, tuple[int, int]]
    """(h, w) of each camera."""
    state_dims: int
    """d."""
    action_dims: int
    """a."""
    fps: float
    """Actions a second."""
    max_steps: int = attrs.field(validator=ge(1))
    """Actions after which an episode has failed."""
    tasks: tuple[str, ...]
    """The instructions that episodes have; that of seed s is number s modulo their count."""
    reset: Callable[[int], Observation]
    """Starts the episode of a seed, whatever was before."""
    step: Callable[[NDArray[np.float32]], Step]
    """Takes an action [a], in the environment's units, and lasts 1 / fps seconds. Raises ValueError for one that is of
    another shape or not finite, and before an episode was started or after it ended."""
    view: Callable[[], NDArray[np.uint8]]
    """Returns a picture [h, w, 3] (RGB) of the scene for people, of even sizes."""
    expert: Callable[[], NDArray[np.float32]] | None = None
    """Returns the action [a] that a script which knows all takes now; None where there is no such script."""
    close: Callable[[], None] = lambda: None
    """Frees what the simulator holds."""


def told_error(error: Exception) -> str:
    """Returns what an environment raised as text, with the line of code that did."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def checked_action(action: NDArray[np.float32], dims: int, where: str) -> NDArray[np.float64]:
    """Returns an action [a] as float64; raises ValueError for one that is of another shape or not finite."""
    values = np.asarray(action, np.float64)
    if values.shape != (dims,) or not np.isfinite(values).all():
        raise ValueError(
            f"{where}: an action of shape {list(values.shape)} with values {values.ravel()[:8].tolist()}; "
            f"{dims} finite numbers are expected, so correct the policy"
        )
    return values
