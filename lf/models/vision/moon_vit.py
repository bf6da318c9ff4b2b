"""MoonViT-3D, the tower of Kimi-K2.5: pictures of any size in their own shape, videos as a whole.

Patches come row by row; all frames of a video attend to each other. Rows and columns take turns in rotating the pairs
of a head, columns first.

Shapes: N patches, F numbers of a patch, W width, D head width.
"""

from collections.abc import Sequence

import attrs
import torch
import torch.nn.functional as F
from attrs.validators import ge
from torch import Tensor, nn

from lf.models.layers.shared import SharedModule
from lf.models.media import Grid
from lf.models.vision.tower import (
    Tower,
    TowerModule,
    TurnedConfig,
    attend,
    build_tower,
    frequencies,
    patch_rows,
    places,
    resampled,
    tower_flops,
    tower_of,
)


@attrs.frozen(kw_only=True)
class MoonVision(TurnedConfig):
    """Sizes of a MoonViT; the defaults are those of Kimi-K2.5."""

    side: int = attrs.field(default=64, validator=ge(1))
    """Rows and columns of the table of positions, which is resampled."""
    frames: int = attrs.field(default=4, validator=ge(1))
    """Most frames of a video."""


@tower_of.register
def _(cfg: MoonVision) -> Tower:
    return Tower(width=cfg.width, numbers=3 * cfg.patch**2)


class _Positions(nn.Module):
    def __init__(self, cfg: MoonVision) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(cfg.side, cfg.side, cfg.width))
        self.frames = cfg.frames

    def forward(self, grids: Sequence[Grid]) -> Tensor:
        """Returns what is added to each patch [N, W] in fp32: by place, and in videos by frame."""
        learnt = {
            size: resampled(self.weight, *size, "bicubic", corners=False).flatten(0, 1)
            for size in {(h, w) for _, h, w in grids}
        }
        return torch.cat([self._of(learnt[h, w], t) for t, h, w in grids])

    def _of(self, learnt: Tensor, frames: int) -> Tensor:
        if frames == 1:
            return learnt
        if frames > self.frames:
            raise ValueError(
                f"a video of {frames} frames, but the tower has positions for vision.frames = {self.frames}; cut the "
                "video into pieces"
            )
        width = learnt.shape[-1]
        turns = 1e4 ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.arange(frames, dtype=torch.float32)[:, None] * turns
        times = torch.cat((angles.sin(), angles.cos()), dim=-1).to(learnt.device, non_blocking=True)
        return (learnt[None] + times[:, None]).flatten(0, 1)


class _PatchEmbed(nn.Module):
    def __init__(self, cfg: MoonVision) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, cfg.width, cfg.patch, cfg.patch)
        self.pos_emb = _Positions(cfg)


class _Mlp(SharedModule):
    def __init__(self, cfg: MoonVision) -> None:
        super().__init__()
        self.fc0 = nn.Linear(cfg.width, cfg.mlp)
        self.fc1 = nn.Linear(cfg.mlp, cfg.width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what a GELU MLP makes of x."""
        return self.narrow(self.fc1, F.gelu(self.widen(self.fc0, x), approximate="tanh"))


class _Block(SharedModule):
    def __init__(self, cfg: MoonVision) -> None:
        super().__init__()
        self.head = cfg.width // cfg.heads
        self.norm0 = nn.LayerNorm(cfg.width, 1e-5)
        self.wqkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.wo = nn.Linear(cfg.width, cfg.width)
        self.norm1 = nn.LayerNorm(cfg.width, 1e-5)
        self.mlp = _Mlp(cfg)

    def forward(self, x_NW: Tensor, angles: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns [N, W]."""
        q, k, v = self.widen(self.wqkv, self.norm0(x_NW), 3).unflatten(-1, (3, -1, self.head)).unbind(1)
        x_NW = x_NW + self.narrow(self.wo, attend(_turned(q, angles), _turned(k, angles), v, lengths))
        out: Tensor = x_NW + self.mlp(self.norm1(x_NW))
        return out


def _turned(x_NhD: Tensor, angles: Tensor) -> Tensor:
    """Returns heads with their adjacent pairs turned, in fp32, in x's dtype."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, other = x_NhD.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((one * cos - other * sin, other * cos + one * sin), dim=-1).flatten(-2).to(x_NhD.dtype)


class _Encoder(nn.Module):
    def __init__(self, cfg: MoonVision) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(cfg) for _ in range(cfg.depth))
        self.final_layernorm = nn.LayerNorm(cfg.width, 1e-5)


class MoonTower(TowerModule):
    """MoonViT-3D; its tensors have the published names below `vision_tower`."""

    def __init__(self, cfg: MoonVision) -> None:
        super().__init__()
        self.cfg = cfg
        self.patch_embed = _PatchEmbed(cfg)
        self.encoder = _Encoder(cfg)

    def forward(self, patches_NF: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the features [N, W] of all patches of all frames."""
        cfg = self.cfg
        turns = frequencies(cfg.width // cfg.heads)
        angles = (places(grids, 1).flip(-1)[:, None].float() * turns[:, None]).flatten(1)
        angles = angles.to(patches_NF.device, non_blocking=True)
        x_NW = patch_rows(self.patch_embed.proj, patches_NF)
        x_NW = x_NW + self.patch_embed.pos_emb(grids).to(x_NW.dtype)
        for block in self.encoder.blocks:
            x_NW = self.run(block, x_NW, angles, [t * h * w for t, h, w in grids])
        return self.encoder.final_layernorm(x_NW), ()


@build_tower.register
def _(cfg: MoonVision) -> TowerModule:
    return MoonTower(cfg)


@tower_flops.register
def _(cfg: MoonVision, grid: Grid) -> float:
    t, h, w = grid
    layer = 4 * cfg.width**2 + 2 * cfg.width * cfg.mlp + 2 * t * h * w * cfg.width
    return 2.0 * t * h * w * (cfg.depth * layer + 3 * cfg.patch**2 * cfg.width)
