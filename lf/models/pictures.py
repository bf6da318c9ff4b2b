"""Pictures at the size that a model takes them, which what makes them ready for training must know too.

Shapes: B pictures, C channels, H height, W width, I pixels of a side.
"""

import torch.nn.functional as F
from torch import Tensor


def resize_with_pad(images_BCHW: Tensor, size: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    """Returns images [B, C, I, I]: scaled bilinearly to fit the square as they are, the rest `low` on both sides.

    Values go from `low` to `high`. Sizes and their rounding are those of openpi's `resize_with_pad_torch`,
    which fails for strips that would have no pixel left; here they keep one.
    """
    height, width = images_BCHW.shape[-2:]
    ratio = max(height / size, width / size)
    inside = max(1, int(height / ratio)), max(1, int(width / ratio))
    images = F.interpolate(images_BCHW, size=inside, mode="bilinear", align_corners=False).clamp(low, high)
    top, left = (size - inside[0]) // 2, (size - inside[1]) // 2
    return F.pad(images, (left, size - inside[1] - left, top, size - inside[0] - top), value=low)
