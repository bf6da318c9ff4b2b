"""Random crops, rotations and colours of camera pictures, for training alone.

What is drawn is a function of (seed, sample id, camera): neither ranks nor resumes change it, and an epoch draws anew.

Shapes: T pictures of one camera, H height, W width.
"""

import fnmatch
import math
from collections.abc import Mapping

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from lf.data.cache import key_of
from lf.data.config import Augment
from lf.models.pictures import resize_with_pad

Images = Mapping[str, NDArray[np.uint8]]
"""Pictures by camera: [3, H, W], or [T, 3, H, W]."""

openpi = Augment(size=224, crop=0.95, rotate=5.0, brightness=0.3, contrast=0.4, saturation=0.5, steady=("*wrist*",))
"""What openpi trains Pi0 and Pi0.5 with: `preprocess_observation` of its `model.py` for where pixels come from and for
draws of each sample, and the colours of its PyTorch port."""


@attrs.frozen(kw_only=True)
class Drawn:
    """What happens to the pictures of one camera in one sample."""

    down: float
    """Where the window stands, from -1 (top) to 1 (bottom)."""
    right: float
    """The same from left to right."""
    degrees: float
    """By which angle the picture is turned, against the clock."""
    brightness: float
    """Factor on all values."""
    contrast: float
    """Factor on the distance from the mean of the picture."""
    saturation: float
    """Factor on the distance from the pixel's grey."""


def augmented(cfg: Augment, seed: int, images: Images, ident: str) -> dict[str, NDArray[np.uint8]]:
    """Returns the pictures of a sample as training sees them; those of a window change together."""
    return {
        camera: _augment(cfg, pixels, drawn(cfg, seed, ident, camera), moves(cfg, camera))
        for camera, pixels in images.items()
    }


def drawn(cfg: Augment, seed: int, ident: str, camera: str) -> Drawn:
    """Returns what is drawn for a camera of a sample, uniformly in the ranges of `cfg`."""
    one = np.random.default_rng(int(key_of("augment", seed, ident, camera), 16)).uniform(-1.0, 1.0, 6).tolist()
    return Drawn(
        down=one[0],
        right=one[1],
        degrees=cfg.rotate * one[2],
        brightness=1.0 + cfg.brightness * one[3],
        contrast=1.0 + cfg.contrast * one[4],
        saturation=1.0 + cfg.saturation * one[5],
    )


def moves(cfg: Augment, camera: str) -> bool:
    """Returns whether a camera's pictures are cropped and turned."""
    steady = any(fnmatch.fnmatchcase(camera, pattern) for pattern in cfg.steady)
    return not steady and (cfg.crop < 1.0 or cfg.rotate > 0.0)


def _augment(cfg: Augment, pixels: NDArray[np.uint8], how: Drawn, move: bool) -> NDArray[np.uint8]:
    images = torch.from_numpy(np.ascontiguousarray(pixels)).reshape(-1, *pixels.shape[-3:])
    if cfg.size and images.shape[-2:] != (cfg.size, cfg.size):
        images = resize_with_pad(images.float(), cfg.size, 0.0, 255.0).round().byte()
    if move or cfg.brightness or cfg.contrast or cfg.saturation:
        x = images.float() / 255.0
        x = moved(x, cfg.crop, how) if move else x
        images = (coloured(x, how) * 255.0).round().byte()
    made: NDArray[np.uint8] = images.numpy()
    return made.reshape(*pixels.shape[:-2], *made.shape[-2:])


def moved(images_T3HW: Tensor, crop: float, how: Drawn) -> Tensor:
    """Returns a window of the pictures at their whole size again, turned about its centre; what was outside is black.

    The window has `int(crop * H)` rows and `int(crop * W)` columns. Pixels are sampled once, bilinearly, where crop,
    resizing and rotation together say, so the corners of a turned window show what lies beside it.
    """
    height, width = images_T3HW.shape[-2:]
    rows, columns = int(height * crop), int(width * crop)
    angle = math.radians(how.degrees)
    # In units of half a side, as affine_grid has them; a turn keeps angles in pixels.
    across, down = columns / width, rows / height
    cos, sin = math.cos(angle), math.sin(angle)
    theta = torch.tensor(
        [
            [across * cos, -across * sin * height / width, how.right * (1.0 - across)],
            [down * sin * width / height, down * cos, how.down * (1.0 - down)],
        ]
    )
    grid = F.affine_grid(theta.expand(len(images_T3HW), 2, 3), list(images_T3HW.shape), align_corners=False)
    return F.grid_sample(images_T3HW, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def coloured(images_T3HW: Tensor, how: Drawn) -> Tensor:
    """Returns pictures with values from 0 to 1 in other colours: brightness, then contrast, then saturation."""
    x = images_T3HW * how.brightness
    # numpy adds up in one order whatever the threads.
    mean = torch.from_numpy(x.numpy().mean(axis=(1, 2, 3), keepdims=True, dtype=np.float64)).float()
    x = (x - mean) * how.contrast + mean
    grey = x.mean(dim=1, keepdim=True)
    return ((x - grey) * how.saturation + grey).clamp(0.0, 1.0)
