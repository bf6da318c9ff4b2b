"""The script that solves the tabletop: it knows where everything is, and remembers nothing.

So its action is a function of the scene alone, and there is a right one for every scene that a policy may get into.
"""

import numpy as np
from numpy.typing import NDArray

from lf.acting.tabletop_draw import Scene

SPEED = 0.25
"""Metres a second of the pusher in x, and in y, at most."""

_GAIN = 2.5
"""Metres a second for each metre that is missing."""
_HOME = 0.04
"""y at which the pusher goes sideways, in metres: nearer than all blocks."""
_ALIGNED, _OFF = 0.012, 0.032
"""Metres beside the block up to which the pusher goes on at full speed, and from which it goes home."""


def expert_action(scene: Scene) -> NDArray[np.float32]:
    """Returns the velocity [2] that brings the pusher before the named block, and then the block over the line."""
    x, y = scene.pusher
    beside = scene.blocks_n3[scene.named, 0] - x
    ahead = float(np.clip((_OFF - abs(beside)) / (_OFF - _ALIGNED), 0, 1))
    forward = ahead * SPEED + (1 - ahead) * _GAIN * (_HOME - y)
    return np.clip([_GAIN * beside, forward], -SPEED, SPEED).astype(np.float32)
