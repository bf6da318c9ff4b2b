"""InternViT (arXiv:2312.14238), the tower of the InternVL models: 0.3B and 6B, on tiles of one or of any size.

Patches come row by row. A class token sees them and is left out of the features.

Shapes: N patches, F numbers of a patch, W width, P patches of the side that positions were learnt for.
"""

from collections.abc import Sequence
from typing import Literal

import attrs
import torch
import torch.nn.functional as F
from attrs.validators import ge, gt
from torch import Tensor, nn

from lf.models.layers.shared import SharedModule, summed
from lf.models.media import Grid
from lf.models.vision.tower import (
    Rms,
    Tower,
    TowerModule,
    VisionConfig,
    attend,
    build_tower,
    patch_rows,
    resampled,
    tower_flops,
    tower_of,
)


@attrs.frozen(kw_only=True)
class InternVision(VisionConfig):
    """Sizes of an InternViT; the defaults are those of the one of 0.3B parameters."""

    width: int = attrs.field(default=1024, validator=ge(1))
    """Width of the residual stream."""
    depth: int = attrs.field(default=24, validator=ge(1))
    """Layers."""
    mlp: int = attrs.field(default=4096, validator=ge(1))
    """Width inside the MLP."""
    image: int = attrs.field(default=448, validator=ge(1))
    """Pixels of a side of a tile, a multiple of `patch`; tiles of other sizes have resampled positions."""
    norm: Literal["layer", "rms"] = "layer"
    """The norms."""
    eps: float = attrs.field(default=1e-6, validator=gt(0.0))
    """Added to the variance in the norms."""
    qkv_bias: bool = True
    """Whether query, key and value projections have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised over all heads together."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.image % self.patch:
            raise ValueError(
                f"vision.image = {self.image} must be a multiple of vision.patch = {self.patch}; change one of them"
            )


intern_vit_0_3b = InternVision()
intern_vit_6b = InternVision(width=3200, depth=45, mlp=12800, heads=25, norm="rms", qkv_bias=False, qk_norm=True)


@tower_of.register
def _(cfg: InternVision) -> Tower:
    return Tower(width=cfg.width, numbers=3 * cfg.patch**2)


class _Patches(nn.Module):
    def __init__(self, cfg: InternVision) -> None:
        super().__init__()
        self.projection = nn.Conv2d(3, cfg.width, cfg.patch, cfg.patch)


class _Embeddings(nn.Module):
    def __init__(self, cfg: InternVision) -> None:
        super().__init__()
        self.side = cfg.image // cfg.patch
        self.cls_token = nn.Parameter(torch.zeros(1, 1, cfg.width))
        self.patch_embeddings = _Patches(cfg)
        self.position_embeddings = nn.Parameter(torch.zeros(1, self.side**2 + 1, cfg.width))

    def forward(self, patches_NF: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Returns the class token and the patches of every frame of every picture, one after the other."""
        x_NW = patch_rows(self.patch_embeddings.projection, patches_NF)
        places = self.position_embeddings[0]
        table = places[1:].unflatten(0, (self.side, self.side))
        sizes = {(h, w) for _, h, w in grids}
        learnt = {
            size: places[1:]
            if size == (self.side, self.side)
            else resampled(table, *size, "bicubic", corners=False).flatten(0, 1).to(x_NW.dtype)
            for size in sizes
        }
        first = self.cls_token[0] + places[:1]
        parts = []
        for frame, (h, w) in zip(x_NW.split([h * w for h, w in _frames(grids)]), _frames(grids), strict=True):
            parts += [first, frame + learnt[h, w]]
        return torch.cat(parts)


def _frames(grids: Sequence[Grid]) -> list[tuple[int, int]]:
    return [(h, w) for t, h, w in grids for _ in range(t)]


class _Attention(SharedModule):
    def __init__(self, cfg: InternVision) -> None:
        super().__init__()
        self.head = cfg.width // cfg.heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(cfg.width, cfg.width, cfg.qkv_bias) for _ in range(3))
        self.projection_layer = nn.Linear(cfg.width, cfg.width)
        # Public code has this epsilon here whatever that of the other norms is.
        self.q_norm, self.k_norm = (Rms(cfg.width, 1e-6) if cfg.qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x_NW: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns [N, W]."""
        q, k, v = (self.widen(proj, x_NW) for proj in (self.q_proj, self.k_proj, self.v_proj))
        rows = (self._normed(self.q_norm, q), self._normed(self.k_norm, k), v)
        q, k, v = (row.unflatten(-1, (-1, self.head)) for row in rows)
        return self.narrow(self.projection_layer, attend(q, k, v, lengths))

    def _normed(self, norm: nn.Module, x: Tensor) -> Tensor:
        if self.share is None or not isinstance(norm, Rms):
            out: Tensor = norm(x)
            return out
        rows = x.float()
        mean = summed(rows.square().sum(-1, keepdim=True), self.share) / len(norm.weight)
        return (rows * (mean + norm.eps).rsqrt()).to(x.dtype) * self.share.part(norm.weight)


class _Mlp(SharedModule):
    def __init__(self, cfg: InternVision) -> None:
        super().__init__()
        self.fc1 = nn.Linear(cfg.width, cfg.mlp)
        self.fc2 = nn.Linear(cfg.mlp, cfg.width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what a GELU MLP makes of x."""
        return self.narrow(self.fc2, F.gelu(self.widen(self.fc1, x)))


class _Layer(nn.Module):
    def __init__(self, cfg: InternVision) -> None:
        super().__init__()
        kind = nn.LayerNorm if cfg.norm == "layer" else Rms
        self.layernorm_before: nn.Module = kind(cfg.width, cfg.eps)
        self.attention = _Attention(cfg)
        self.lambda_1 = nn.Parameter(torch.ones(cfg.width))
        self.layernorm_after: nn.Module = kind(cfg.width, cfg.eps)
        self.mlp = _Mlp(cfg)
        self.lambda_2 = nn.Parameter(torch.ones(cfg.width))

    def forward(self, x_NW: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns [N, W]."""
        x_NW = x_NW + self.lambda_1 * self.attention(self.layernorm_before(x_NW), lengths)
        out: Tensor = x_NW + self.lambda_2 * self.mlp(self.layernorm_after(x_NW))
        return out


class _Encoder(nn.Module):
    def __init__(self, cfg: InternVision) -> None:
        super().__init__()
        self.layer = nn.ModuleList(_Layer(cfg) for _ in range(cfg.depth))


class InternTower(TowerModule):
    """InternViT; its tensors have the names below transformers' `vision_tower`."""

    def __init__(self, cfg: InternVision) -> None:
        super().__init__()
        self.embeddings = _Embeddings(cfg)
        self.encoder = _Encoder(cfg)

    def forward(self, patches_NF: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the features [N, W] of all patches."""
        lengths = [1 + h * w for h, w in _frames(grids)]
        x_NW = self.embeddings(patches_NF, grids)
        for layer in self.encoder.layer:
            x_NW = self.run(layer, x_NW, lengths)
        return torch.cat([frame[1:] for frame in x_NW.split(lengths)]), ()


@build_tower.register
def _(cfg: InternVision) -> TowerModule:
    return InternTower(cfg)


@tower_flops.register
def _(cfg: InternVision, grid: Grid) -> float:
    t, h, w = grid
    seen = 1 + h * w
    layer = 4 * cfg.width**2 + 2 * cfg.width * cfg.mlp + 2 * seen * cfg.width
    return 2.0 * t * (seen * cfg.depth * layer + h * w * 3 * cfg.patch**2 * cfg.width)
