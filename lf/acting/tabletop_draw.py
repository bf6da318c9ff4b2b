"""The picture of a tabletop from above, drawn from where things are: rectangles with smooth edges.

A pixel's share in a rectangle is read off its distance to the edge.

Shapes: n blocks, S pixels of a side.
"""

from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

PALETTE: Mapping[str, tuple[int, int, int]] = {
    "red": (224, 48, 40),
    "green": (40, 196, 72),
    "blue": (40, 84, 232),
    "yellow": (232, 182, 40),
}
"""Colours that blocks may have."""
BLOCK = 0.026
"""Half the edge of a cube, in metres."""
BAR = (0.04, 0.01)
"""Half the width and depth of the pusher, in metres."""
LINE = 0.36
"""y of the line that a block is pushed over, in metres."""

_SIDE = 0.48
_NEAR = -0.02
"""The picture shows a square of the table: x from -_SIDE / 2, y from _NEAR."""
_TABLE, _BEYOND, _PUSHER = (128, 126, 122), (150, 156, 152), (24, 24, 28)


@attrs.frozen(kw_only=True, eq=False)
class Scene:
    """Where everything is, in metres and radians."""

    pusher: tuple[float, float]
    """Its x and y."""
    blocks_n3: NDArray[np.float64]
    """x, y and yaw of each block."""
    colours: tuple[str, ...]
    """Colours of the blocks."""
    named: int
    """The block that the instruction names."""


def draw(scene: Scene, size: int) -> NDArray[np.uint8]:
    """Returns the picture [S, S, 3] (RGB) of a scene; its upper edge is the far side."""
    canvas = np.empty((size, size, 3), np.float32)
    canvas[:] = _TABLE
    far = _NEAR + _SIDE
    _rectangle(canvas, (0.0, (LINE + far) / 2), (_SIDE, (far - LINE) / 2), 0.0, _BEYOND)
    for (x, y, yaw), colour in zip(scene.blocks_n3, scene.colours, strict=True):
        shade = np.array(PALETTE[colour], np.float32)
        _rectangle(canvas, (x, y), (BLOCK, BLOCK), yaw, shade * 0.7)
        _rectangle(canvas, (x, y), (BLOCK * 0.75, BLOCK * 0.75), yaw, shade)
    _rectangle(canvas, scene.pusher, BAR, 0.0, _PUSHER)
    return np.rint(canvas).astype(np.uint8)


def _rectangle(
    canvas: NDArray[np.float32],
    centre: tuple[float, float],
    half: tuple[float, float],
    yaw: float,
    colour: tuple[int, int, int] | NDArray[np.float32],
) -> None:
    """Paints a turned rectangle over what is there."""
    size = len(canvas)
    scale = size / _SIDE
    column, row = (centre[0] + _SIDE / 2) * scale, (_NEAR + _SIDE - centre[1]) * scale
    reach = np.hypot(*half) * scale + 1
    top, bottom = (int(np.clip(v, 0, size)) for v in (row - reach, row + reach + 1))
    left, right = (int(np.clip(v, 0, size)) for v in (column - reach, column + reach + 1))
    if top >= bottom or left >= right:
        return
    y = (row - 0.5 - np.arange(top, bottom, dtype=np.float32))[:, None]
    x = (np.arange(left, right, dtype=np.float32) + 0.5 - column)[None]
    cos, sin = np.cos(yaw), np.sin(yaw)
    along = np.abs(cos * x + sin * y) - half[0] * scale
    across = np.abs(cos * y - sin * x) - half[1] * scale
    share = np.clip(0.5 - np.maximum(along, across), 0, 1)[..., None]
    part = canvas[top:bottom, left:right]
    part += share * (np.asarray(colour, np.float32) - part)
