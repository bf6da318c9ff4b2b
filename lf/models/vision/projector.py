"""From a tower's features to the decoder's width: MLPs, patch mergers and pixel shuffle are one module here.

Shapes: N patches, W the tower's width, M tokens, H the decoder's width, L levels.
"""

import math
from collections.abc import Sequence
from typing import Literal

import attrs
import torch
import torch.nn.functional as F
from attrs.validators import ge, gt
from torch import Tensor, nn

from lf.models.layers.shared import SharedModule
from lf.models.media import Grid, Media
from lf.models.vision.tower import Rms, Tower, block_order


@attrs.frozen(kw_only=True)
class Projector:
    """Joins blocks of patches into tokens: a norm, and two linear layers with GELU between.

    With `merge` 1 it is an MLP (LLaVA), with the norm over each patch a patch merger (Qwen-VL, Kimi), with the norm
    over the block what follows a pixel shuffle (InternVL). Levels of a tower have one each, with the norm over the
    block (Qwen3-VL).
    """

    merge: int = attrs.field(default=2, validator=ge(1))
    """Rows and columns of patches that make a token."""
    norm: Literal["none", "layer", "rms"] = "layer"
    """The norm."""
    over: Literal["patch", "block"] = "patch"
    """What it normalises."""
    eps: float = attrs.field(default=1e-6, validator=gt(0.0))
    """Added to the variance."""
    width: int = attrs.field(default=0, validator=ge(0))
    """Width between the linear layers; 0 takes that of a block."""
    mean: bool = False
    """Whether the frames of a video become one, their mean (Kimi)."""


@attrs.frozen(kw_only=True)
class Anyres(Projector):
    """LLaVA-OneVision's (arXiv:2408.03326): tiles are laid together again, cropped to the image, each row ended.

    An image has a picture of the whole first, then its tiles, row by row; a video has a picture a frame, and each a
    quarter of the tokens.
    """

    merge: int = attrs.field(default=1, validator=ge(1))
    """Rows and columns of patches that make a token."""
    norm: Literal["none", "layer", "rms"] = "none"
    """The norm."""
    pinpoints: tuple[tuple[int, int], ...] = ((384, 384),)
    """Heights and widths in pixels that an image may be resized to before it is cut into tiles."""
    most: int = attrs.field(default=9, validator=ge(1))
    """Tiles from which on an image's tokens are shrunk to about as many tokens as these have."""


class Merger(SharedModule):
    """One projector."""

    def __init__(self, cfg: Projector, width: int, out: int, over: str) -> None:
        super().__init__()
        self.over, self.block = over, width * cfg.merge**2
        size = width if over == "patch" else self.block
        if cfg.norm != "none":
            self.norm: nn.Module = nn.LayerNorm(size, cfg.eps) if cfg.norm == "layer" else Rms(size, cfg.eps)
        self.fc1 = nn.Linear(self.block, cfg.width or self.block)
        self.fc2 = nn.Linear(cfg.width or self.block, out)

    def forward(self, x_NW: Tensor) -> Tensor:
        """Returns tokens [M, H] of patches block by block."""
        norm = getattr(self, "norm", nn.Identity())
        x = norm(x_NW).view(-1, self.block) if self.over == "patch" else norm(x_NW.reshape(-1, self.block))
        return self.narrow(self.fc2, F.gelu(self.widen(self.fc1, x)))


class ProjectorModule(Merger):
    """The projector of a tower's last layer, those of its levels, and the end of a row of tiles."""

    def __init__(self, cfg: Projector, tower: Tower, out: int) -> None:
        super().__init__(cfg, tower.width, out, cfg.over)
        self.cfg, self.tower = cfg, tower
        if tower.levels:
            self.levels = nn.ModuleList(Merger(cfg, tower.width, out, "block") for _ in range(tower.levels))
        if isinstance(cfg, Anyres):
            self.newline = nn.Parameter(torch.zeros(out))

    def project(self, x_NW: Tensor, levels: Sequence[Tensor], media: Sequence[Media]) -> tuple[Tensor, Tensor | None]:
        """Returns the tokens of all media [M, H], and those of the levels [L, M, H], None where there are none."""
        grids = [grid for item in media for grid in item.grids]
        if self.cfg.mean:
            x_NW, grids = self._mean(x_NW, grids)
        if self.cfg.merge > 1 and self.tower.block == 1:
            x_NW = x_NW[block_order(grids, self.cfg.merge).to(x_NW.device, non_blocking=True)]
        tokens = self(x_NW)
        if isinstance(self.cfg, Anyres):
            tokens = self._laid(tokens, media)
        if not levels:
            return tokens, None
        return tokens, torch.stack([own(level) for own, level in zip(self.levels, levels, strict=True)])

    def _mean(self, x_NW: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, list[Grid]]:
        if all(t == 1 for t, _, _ in grids):
            return x_NW, list(grids)
        parts = x_NW.split([t * h * w for t, h, w in grids])
        means = [part.unflatten(0, (t, -1)).float().mean(0) for part, (t, _, _) in zip(parts, grids, strict=True)]
        return torch.cat(means).to(x_NW.dtype), [(1, h, w) for _, h, w in grids]

    def _laid(self, tokens_MH: Tensor, media: Sequence[Media]) -> Tensor:
        assert isinstance(self.cfg, Anyres)
        made = []
        counts = [sum(picture_tokens(self.cfg, grid) for grid in item.grids) for item in media]
        for item, tokens in zip(media, tokens_MH.split(counts), strict=True):
            if item.kind == "video":
                side = item.grids[0][1]
                frames = tokens.unflatten(0, (-1, side, side)).permute(0, 3, 1, 2)
                half = F.interpolate(frames, (-(-side // 2),) * 2, mode="bilinear")
                made += [half.permute(0, 2, 3, 1).flatten(0, 2), self.newline[None]]
            elif len(item.grids) == 1:
                made += [tokens, self.newline[None]]
            else:
                made += self._image(self.cfg, item, tokens)
        return torch.cat(made)

    def _image(self, cfg: Anyres, item: Media, tokens: Tensor) -> list[Tensor]:
        side = item.grids[0][1]
        rows, columns = tiles(cfg, item)
        top, left, height, width = crop(rows * side, columns * side, item.size)
        whole = tokens[side**2 :].view(rows, columns, side, side, -1).transpose(1, 2)
        whole = whole.reshape(rows * side, columns * side, -1)[top : top + height, left : left + width]
        shrunk = shrunken(cfg, side, height, width)
        if shrunk != (height, width):
            whole = F.interpolate(whole.permute(2, 0, 1)[None], shrunk, mode="bilinear")[0].permute(1, 2, 0)
        ends = self.newline.expand(whole.shape[0], 1, -1)
        return [tokens[: side**2], torch.cat((whole, ends), dim=1).flatten(0, 1)]


def picture_tokens(cfg: Projector, grid: Grid) -> int:
    """Returns the tokens of one picture."""
    t, h, w = grid
    return (1 if cfg.mean else t) * (h // cfg.merge) * (w // cfg.merge)


def tokens_of(cfg: Projector, media: Media) -> int:
    """Returns the tokens that an image or a video takes in the decoder's row."""
    pictures = sum(picture_tokens(cfg, grid) for grid in media.grids)
    if not isinstance(cfg, Anyres):
        return pictures
    if media.kind == "video":
        return len(media.grids) * (-(-media.grids[0][1] // 2)) ** 2 + 1
    if len(media.grids) == 1:
        return pictures + 1
    side = media.grids[0][1]
    rows, columns = tiles(cfg, media)
    _, _, height, width = crop(rows * side, columns * side, media.size)
    height, width = shrunken(cfg, side, height, width)
    return side**2 + height * (width + 1)


def tiles(cfg: Anyres, media: Media) -> tuple[int, int]:
    """Returns rows and columns of an image's tiles; raises ValueError where it has another number of them."""
    rows, columns = tiling(cfg, media.size)
    if len(media.grids) != 1 + rows * columns:
        raise ValueError(
            f"an image of {media.size[0]} x {media.size[1]} pixels has {len(media.grids)} pictures, but the whole and "
            f"{rows} x {columns} tiles are {1 + rows * columns}; cut it as projector.pinpoints say"
        )
    return rows, columns


def tiling(cfg: Anyres, size: tuple[int, int]) -> tuple[int, int]:
    """Returns rows and columns of the tiles of an image of `size` pixels: those that waste least (LLaVA-NeXT)."""
    height, width = size

    def waste(pinpoint: tuple[int, int]) -> tuple[int, int]:
        scale = min(pinpoint[1] / width, pinpoint[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return -kept, pinpoint[0] * pinpoint[1] - kept

    best = min(cfg.pinpoints, key=waste)
    tile = min(min(pinpoint) for pinpoint in cfg.pinpoints)
    return best[0] // tile, best[1] // tile


def crop(height: int, width: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Returns top, left, height and width of what an image of `size` fills of tokens laid out for its padded size."""
    if size[1] / size[0] > width / height:
        padding = (height - int(round(size[0] * (width / size[1]), 7))) // 2
        return padding, 0, height - 2 * padding, width
    padding = (width - int(round(size[1] * (height / size[0]), 7))) // 2
    return 0, padding, height, width - 2 * padding


def shrunken(cfg: Anyres, side: int, height: int, width: int) -> tuple[int, int]:
    """Returns height and width of an image's tokens after the shrinking."""
    ratio = math.sqrt(height * width / (cfg.most * side**2))
    return (int(height // ratio), int(width // ratio)) if ratio > 1.1 else (height, width)
