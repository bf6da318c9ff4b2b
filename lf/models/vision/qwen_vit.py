"""The vision towers of Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL (arXiv:2511.21631).

Patches come in blocks of `merge` rows and columns, as their public image processors lay them out. Rows and columns
rotate a half of each head; frames of a video attend to themselves alone.

Shapes: N patches, F numbers of a patch, W width, D head width.
"""

import itertools
from collections.abc import Sequence

import attrs
import torch
import torch.nn.functional as F
from attrs.validators import ge
from torch import Tensor, nn

from lf.models.layers.shared import SharedModule
from lf.models.media import Grid
from lf.models.vision.tower import (
    Rms,
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
    turned,
)


@attrs.frozen(kw_only=True)
class QwenVision(TurnedConfig):
    """What both towers have."""

    frames: int = attrs.field(default=2, validator=ge(1))
    """Frames of a patch; an image counts as that many alike."""
    merge: int = attrs.field(default=2, validator=ge(1))
    """Rows and columns of a block of patches."""

    @property
    def numbers(self) -> int:
        """Numbers of a patch."""
        return 3 * self.frames * self.patch**2


@attrs.frozen(kw_only=True)
class Qwen25Vision(QwenVision):
    """Qwen2.5-VL's tower: most layers attend within windows; RMSNorm and gated MLPs."""

    width: int = attrs.field(default=1280, validator=ge(1))
    """Width of the residual stream."""
    depth: int = attrs.field(default=32, validator=ge(1))
    """Layers."""
    mlp: int = attrs.field(default=3420, validator=ge(1))
    """Width inside the MLP."""
    window: int = attrs.field(default=112, validator=ge(1))
    """Pixels of a side of a window."""
    full: tuple[int, ...] = (7, 15, 23, 31)
    """Layers (from 0) that see their whole frame."""
    rate: float = 2.0
    """Positions of a second of video, in the decoder."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.window < self.patch * self.merge:
            raise ValueError(
                f"vision.window = {self.window} pixels hold no block of {self.patch * self.merge} (patch * merge); "
                "raise it"
            )


@attrs.frozen(kw_only=True)
class Qwen3Vision(QwenVision):
    """Qwen3-VL's tower: learnt positions, resampled; features of inner layers go to the decoder too."""

    patch: int = attrs.field(default=16, validator=ge(1))
    """Pixels of a side of a patch."""
    side: int = attrs.field(default=48, validator=ge(1))
    """Rows and columns of the table of positions."""
    levels: tuple[int, ...] = (8, 16, 24)
    """Layers (from 0) whose features go to the decoder's first layers, one each."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if any(not 0 <= level < self.depth for level in self.levels):
            raise ValueError(f"vision.levels = {self.levels} must lie in 0 .. {self.depth - 1} (vision.depth); correct")


@tower_of.register
def _(cfg: Qwen25Vision) -> Tower:
    return Tower(width=cfg.width, numbers=cfg.numbers, block=cfg.merge, frames="timed", rate=cfg.rate)


@tower_of.register
def _(cfg: Qwen3Vision) -> Tower:
    return Tower(width=cfg.width, numbers=cfg.numbers, block=cfg.merge, levels=len(cfg.levels), frames="apart")


class _Attention(SharedModule):
    def __init__(self, cfg: QwenVision) -> None:
        super().__init__()
        self.head = cfg.width // cfg.heads
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.proj = nn.Linear(cfg.width, cfg.width)

    def forward(self, x_NW: Tensor, table: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns [N, W]."""
        q, k, v = self.widen(self.qkv, x_NW, 3).unflatten(-1, (3, -1, self.head)).unbind(1)
        return self.narrow(self.proj, attend(turned(q, table), turned(k, table), v, lengths))


class _Gated(SharedModule):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner)
        self.up_proj = nn.Linear(width, inner)
        self.down_proj = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what SwiGLU makes of x."""
        return self.narrow(self.down_proj, F.silu(self.widen(self.gate_proj, x)) * self.widen(self.up_proj, x))


class _Plain(SharedModule):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(width, inner)
        self.linear_fc2 = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Returns what a GELU MLP makes of x."""
        return self.narrow(self.linear_fc2, F.gelu(self.widen(self.linear_fc1, x), approximate="tanh"))


class _Block(nn.Module):
    def __init__(self, cfg: QwenVision, *, gated: bool) -> None:
        super().__init__()
        self.norm1: nn.Module = Rms(cfg.width, 1e-6) if gated else nn.LayerNorm(cfg.width, 1e-6)
        self.norm2: nn.Module = Rms(cfg.width, 1e-6) if gated else nn.LayerNorm(cfg.width, 1e-6)
        self.attn = _Attention(cfg)
        self.mlp = _Gated(cfg.width, cfg.mlp) if gated else _Plain(cfg.width, cfg.mlp)

    def forward(self, x_NW: Tensor, table: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns [N, W]."""
        x_NW = x_NW + self.attn(self.norm1(x_NW), table, lengths)
        out: Tensor = x_NW + self.mlp(self.norm2(x_NW))
        return out


class _PatchEmbed(nn.Module):
    def __init__(self, cfg: QwenVision, *, bias: bool) -> None:
        super().__init__()
        size = (cfg.frames, cfg.patch, cfg.patch)
        self.proj = nn.Conv3d(3, cfg.width, size, size, bias=bias)


def _table(cfg: QwenVision, grids: Sequence[Grid], device: torch.device) -> Tensor:
    """Returns cosine and sine [2, N, 1, D] of the angles of each patch: those of its row, then those of its column."""
    angles = (places(grids, cfg.merge)[..., None].float() * frequencies(cfg.width // cfg.heads)).flatten(1)
    angles = angles.to(device, non_blocking=True).repeat(1, 2)[:, None]
    return torch.stack((angles.cos(), angles.sin()))


def _frames(grids: Sequence[Grid]) -> list[int]:
    return [h * w for t, h, w in grids for _ in range(t)]


class Qwen25Tower(TowerModule):
    """Qwen2.5-VL's tower; its tensors have the names below transformers' `visual`."""

    def __init__(self, cfg: Qwen25Vision) -> None:
        super().__init__()
        self.cfg = cfg
        self.patch_embed = _PatchEmbed(cfg, bias=False)
        self.blocks = nn.ModuleList(_Block(cfg, gated=True) for _ in range(cfg.depth))

    def forward(self, patches_NF: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the features [N, W]; patches of a window lie together where layers attend within windows."""
        cfg, device = self.cfg, patches_NF.device
        order, windows = window_order(grids, cfg.merge, cfg.window // cfg.patch // cfg.merge)
        order, back = order.to(device, non_blocking=True), order.argsort().to(device, non_blocking=True)
        frames, table = _frames(grids), _table(cfg, grids, device)
        ordered = table[:, order]
        x_NW = patch_rows(self.patch_embed.proj, patches_NF)
        for full, blocks in itertools.groupby(enumerate(self.blocks), lambda item: item[0] in cfg.full):
            if not full:
                x_NW = x_NW[order]
            for _, block in blocks:
                x_NW = self.run(block, x_NW, table if full else ordered, frames if full else windows)
            if not full:
                x_NW = x_NW[back]
        return x_NW, ()


def window_order(grids: Sequence[Grid], merge: int, side: int) -> tuple[Tensor, list[int]]:
    """Returns the places of all patches window by window [N], and the patches of each window.

    Patches come in blocks of `merge` rows and columns; a window has `side` blocks a side, fewer at the edges. Windows
    of one size follow each other.
    """
    windows, at = [], 0
    for t, h, w in grids:
        rows, columns = h // merge, w // merge
        blocks = torch.arange(t * rows * columns).view(t, rows, columns)
        for frame, row, column in itertools.product(range(t), range(0, rows, side), range(0, columns, side)):
            window = blocks[frame, row : row + side, column : column + side].flatten()
            windows.append((at + window[:, None] * merge**2 + torch.arange(merge**2)).flatten())
        at += t * h * w
    windows.sort(key=len)
    return torch.cat(windows), [len(window) for window in windows]


class Qwen3Tower(TowerModule):
    """Qwen3-VL's tower; its tensors have the names below transformers' `visual`."""

    def __init__(self, cfg: Qwen3Vision) -> None:
        super().__init__()
        self.cfg = cfg
        self.patch_embed = _PatchEmbed(cfg, bias=True)
        self.pos_embed = nn.Embedding(cfg.side**2, cfg.width)
        self.blocks = nn.ModuleList(_Block(cfg, gated=False) for _ in range(cfg.depth))

    def forward(self, patches_NF: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the features [N, W] of the last layer and of each level."""
        cfg, lengths = self.cfg, _frames(grids)
        table = _table(cfg, grids, patches_NF.device)
        x_NW = patch_rows(self.patch_embed.proj, patches_NF)
        x_NW = x_NW + self._positions(grids).to(x_NW.dtype)
        levels = {}
        for layer, block in enumerate(self.blocks):
            x_NW = self.run(block, x_NW, table, lengths)
            if layer in cfg.levels:
                levels[layer] = x_NW
        return x_NW, tuple(levels[layer] for layer in cfg.levels)

    def _positions(self, grids: Sequence[Grid]) -> Tensor:
        cfg = self.cfg
        table = self.pos_embed.weight.unflatten(0, (cfg.side, cfg.side))
        sizes = {
            size: resampled(table, *size, "bilinear", corners=True)
            .unflatten(1, (-1, cfg.merge))
            .unflatten(0, (-1, cfg.merge))
            .transpose(1, 2)
            .flatten(0, 3)
            for size in {(h, w) for _, h, w in grids}
        }
        return torch.cat([sizes[h, w].repeat(t, 1) for t, h, w in grids])


@build_tower.register
def _(cfg: Qwen25Vision) -> TowerModule:
    return Qwen25Tower(cfg)


@build_tower.register
def _(cfg: Qwen3Vision) -> TowerModule:
    return Qwen3Tower(cfg)


@tower_flops.register
def _(cfg: QwenVision, grid: Grid) -> float:
    t, h, w = grid
    gates = 3 if isinstance(cfg, Qwen25Vision) else 2
    seen = [h * w] * cfg.depth
    if isinstance(cfg, Qwen25Vision):
        window = min(h * w, (cfg.window // cfg.patch) ** 2)
        seen = [h * w if layer in cfg.full else window for layer in range(cfg.depth)]
    layers = cfg.depth * (4 * cfg.width**2 + gates * cfg.width * cfg.mlp) + 2 * cfg.width * sum(seen)
    return 2.0 * t * h * w * (layers + cfg.numbers * cfg.width)
