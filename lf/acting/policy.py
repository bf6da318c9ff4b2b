"""What a robot shows a policy, and what a policy answers: plain arrays in the robot's own units.

Shapes: h, w pixels of a picture, d dims of the state, H steps of an action chunk, a dims of an action.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

MOST_SIDE = 8192
"""Pixels that a side of a picture may have."""


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

    The noise of a chunk is a function of its seed alone, and the chunk of its observation and seed, whatever others are
    in the batch; numbers agree to the rounding of matrix products, which may differ with the size of the batch.
    """


def fingerprint(seen: Observation) -> str:
    """Returns a hash of everything in an observation."""
    digest = hashlib.sha256()
    parts: list[tuple[str, NDArray[Any]]] = [(name, seen.images[name]) for name in sorted(seen.images)]
    for name, values in (*parts, ("state", seen.state.astype(np.float32))):
        digest.update(f"{name}\0{values.shape}\0".encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    digest.update(seen.task.encode(errors="surrogatepass"))
    return digest.hexdigest()
