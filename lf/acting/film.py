"""Videos of episodes.

Shapes: h, w pixels of a picture.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lf.data.video import import_av, write_video

Pixels = NDArray[np.uint8]

_REST = 0.5
"""Seconds for which the last picture of an episode stays."""


def side_by_side(images: Mapping[str, Pixels], least: int = 256) -> Pixels:
    """Returns pictures [h, w, 3] beside each other, enlarged by a whole number to `least` rows, and of even sizes."""
    rows = max(image.shape[0] for image in images.values())
    level = [np.pad(image, ((0, rows - image.shape[0]), (0, 0), (0, 0))) for image in images.values()]
    whole = np.concatenate(level, axis=1)
    times = -(-least // rows)
    whole = whole.repeat(times, axis=0).repeat(times, axis=1)
    return np.pad(whole, ((0, whole.shape[0] % 2), (0, whole.shape[1] % 2), (0, 0)))


def check_film(path: Path) -> None:
    """Raises ValueError for a path where no film can be written, or without what writes one."""
    import_av()
    if path.suffix != ".mp4":
        raise ValueError(f"{path} is no name of a video; give one that ends in .mp4")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file that ends in .mp4")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise ValueError(f"{path} cannot be written, as {above} is a file; give a path in a folder")
    if not os.access(path if path.exists() else above, os.W_OK):
        raise ValueError(f"{path} cannot be written, as {path if path.exists() else above} may not be changed")


def write_film(path: Path, episodes: Mapping[int, Sequence[Pixels]], fps: float) -> None:
    """Writes pictures of episodes, [h, w, 3] by seed, one episode after the other, as an mp4."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def frames() -> Iterator[Pixels]:
        for seed in sorted(episodes):
            yield from episodes[seed]
            yield from [episodes[seed][-1]] * max(1, round(_REST * fps))

    write_video(path, frames(), Fraction(fps).limit_denominator(100_000))
