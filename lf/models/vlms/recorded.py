"""The recorded inputs of public vision-language models as rows of lf's: for parity alone."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from torch import Tensor

from lf.models.media import Media
from lf.models.recorded import recorded_rows
from lf.models.vision.projector import Anyres, tiling, tokens_of
from lf.models.vision.siglip import patches
from lf.models.vlm import Vlm

KINDS: tuple[tuple[Literal["image", "video"], str, str], ...] = (
    ("image", "pixel_values", "image_grid_thw"),
    ("video", "pixel_values_videos", "video_grid_thw"),
)


def vlm_rows(cfg: Vlm, recorded: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Returns the recorded rows with their images and videos: each goes to the row whose tokens it fills."""
    rows = recorded_rows.dispatch(object)(cfg, recorded)
    pools = {kind: _media(cfg, recorded, kind, pixels, grids) for kind, pixels, grids in KINDS if pixels in recorded}
    made = []
    for row in rows:
        own: list[tuple[Media, np.ndarray]] = []
        for kind, pool in pools.items():
            token = cfg.image_token if kind == "image" else cfg.video_token
            left = int((row["tokens"] == token).sum())
            while left > 0 and pool:
                own.append(pool.pop(0))
                left -= tokens_of(cfg.projector, own[-1][0])
        made.append(
            row
            | {"media": tuple(item for item, _ in own), "patches": np.concatenate([_NONE, *(rows for _, rows in own)])}
        )
    return made


_NONE = np.zeros(0, np.float32)


def _media(
    cfg: Vlm, recorded: Mapping[str, Tensor], kind: Literal["image", "video"], pixels: str, grids: str
) -> list[tuple[Media, np.ndarray]]:
    values = recorded[pixels].cpu().float()
    if grids not in recorded:
        return _tiles(cfg, values, recorded.get("image_sizes"))
    seconds = recorded.get("second_per_grid_ts")
    found, at = [], 0
    for number, grid in enumerate(recorded[grids].tolist()):
        step = float(seconds[number]) if kind == "video" and seconds is not None else 1.0
        item = Media(grids=(tuple(grid),), kind=kind, seconds=step)
        found.append((item, values[at : at + item.patches].flatten().numpy()))
        at += item.patches
    return found


def _tiles(cfg: Vlm, pixels: Tensor, sizes: Tensor | None) -> list[tuple[Media, np.ndarray]]:
    """Returns the media of tiles [..., 3, I, I]: one each, or with `sizes` the first tiles of each row."""
    patch = cfg.vision.patch
    side = pixels.shape[-1] // patch
    grid = (1, side, side)
    if sizes is None:
        return [(Media(grids=(grid,)), patches(tile[None], patch).numpy().reshape(-1)) for tile in pixels]
    found = []
    for row, (height, width) in zip(pixels, sizes.tolist(), strict=True):
        assert isinstance(cfg.projector, Anyres)
        rows, columns = tiling(cfg.projector, (height, width))
        item = Media(grids=(grid,) * (1 + rows * columns), size=(height, width))
        found.append((item, patches(row[: len(item.grids)], patch).numpy().reshape(-1)))
    return found
