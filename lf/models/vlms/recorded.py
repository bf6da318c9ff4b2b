"""The recorded inputs of public vision-language models as rows of lf's: for parity alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from lf.models.recorded import recorded_rows
from lf.models.vision.projector import media_tokens
from lf.models.vision.tower import Media
from lf.models.vlm import Vlm


def vlm_rows(cfg: Vlm, recorded: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Returns the recorded rows with their images and videos: each goes to the row whose tokens it fills."""
    rows = recorded_rows.dispatch(object)(cfg, recorded)
    pools = {
        kind: _media(cfg, recorded, kind, pixels, grids)
        for kind, pixels, grids in (
            ("image", "pixel_values", "image_grid_thw"),
            ("video", "pixel_values_videos", "video_grid_thw"),
        )
        if pixels in recorded
    }
    made = []
    for row in rows:
        own: list[tuple[Media, np.ndarray]] = []
        for kind, pool in pools.items():
            token = cfg.image_token if kind == "image" else cfg.video_token
            left = int((row["tokens"] == token).sum())
            while left > 0 and pool:
                own.append(pool.pop(0))
                left -= media_tokens(cfg.projector, own[-1][0])
        made.append(
            row
            | {"media": tuple(item for item, _ in own), "patches": np.concatenate([rows for _, rows in own] or [_NONE])}
        )
    return made


_NONE = np.zeros(0, np.float32)


def _media(
    cfg: Vlm, recorded: Mapping[str, Tensor], kind: Any, pixels: str, grids: str
) -> list[tuple[Media, np.ndarray]]:
    values = recorded[pixels].cpu().float().numpy().reshape(-1)
    seconds = recorded.get("second_per_grid_ts")
    found, at = [], 0
    numbers = values.size // int(recorded[grids].prod(1).sum())
    for number, grid in enumerate(recorded[grids].tolist()):
        step = float(seconds[number]) if kind == "video" and seconds is not None else 1.0
        item = Media(grids=(tuple(grid),), kind=kind, seconds=step)
        found.append((item, values[at : at + item.patches * numbers]))
        at += item.patches * numbers
    return found
