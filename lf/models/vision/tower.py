"""What vision towers have in common: the questions lf asks of one, pictures as packed rows of patches, and their parts.

Pictures of any sizes lie one after the other in one call; each attends to itself alone, so a call equals one call for
each. Towers are plain torch modules with the tensor names of transformers, for both train paths.

Shapes: N patches of all pictures, F numbers of a patch, W width, D head width; letters after a name are its dims, with
`heads` for N heads.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lf.models.layers.fused import rms_norm
from lf.models.layers.rope import rotate
from lf.models.media import Grid
from lf.models.ranges import least
from lf.models.spec import no_rule
from lf.models.weights import Rule, Same


@attrs.frozen(kw_only=True)
class VisionConfig:
    """A vision tower: the type says which; the default sizes are those of SigLIP's So400m/14."""

    width: int = attrs.field(default=1152, validator=least(1))
    """Width of the residual stream."""
    depth: int = attrs.field(default=27, validator=least(1))
    """Layers."""
    mlp: int = attrs.field(default=4304, validator=least(1))
    """Width inside the MLP."""
    heads: int = attrs.field(default=16, validator=least(1))
    """Heads; divides `width`."""
    patch: int = attrs.field(default=14, validator=least(1))
    """Pixels of a side of a patch."""

    def __attrs_post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"vision.width = {self.width} must be a multiple of vision.heads = {self.heads}; change one of them"
            )


@attrs.frozen(kw_only=True)
class TurnedConfig(VisionConfig):
    """A tower whose rows and columns turn a half of each head; width / heads is a multiple of 4."""

    def __attrs_post_init__(self) -> None:
        if self.width % (4 * self.heads):
            raise ValueError(
                f"vision.width = {self.width} must be a multiple of 4 * vision.heads = {4 * self.heads}: rows and "
                "columns rotate a half of each head, in pairs; change one of them"
            )


@attrs.frozen(kw_only=True)
class Tower:
    """What composition must know of a tower."""

    width: int
    """Width of a patch's features."""
    numbers: int
    """Numbers of a patch: channels * frames * rows * columns, in this order."""
    block: int = 1
    """Patches arrive, and leave, in blocks of so many rows and columns; 1 is row by row."""
    levels: int = 0
    """Inner layers whose features go into the decoder's first layers too (deepstack, arXiv:2406.04334)."""
    side: int = 0
    """Patches of a picture's side where only one size fits; 0 takes any."""
    frames: Literal["one", "apart", "timed"] = "one"
    """What a video's frames are to a decoder with three positions: one picture, or pictures apart, or timed."""
    rate: float = 1.0
    """Positions of a second, where frames are timed."""


@functools.singledispatch
def tower_of(cfg: VisionConfig) -> Tower:
    """Returns what composition must know of a tower."""
    raise no_rule(tower_of, cfg)


@functools.singledispatch
def build_tower(cfg: VisionConfig) -> "TowerModule":
    """Returns the module of a tower; works on the meta device."""
    raise no_rule(build_tower, cfg)


@functools.singledispatch
def tower_rules(cfg: VisionConfig, lf: str, hf: str) -> list[Rule]:
    """Returns the weight table of a tower under the prefix `lf` here and `hf` there: by default the same names."""
    with torch.device("meta"):
        return [Same(lf + name, hf + name) for name, _ in build_tower(cfg).named_parameters()]


@functools.singledispatch
def tower_flops(cfg: VisionConfig, grid: Grid) -> float:
    """Returns the floating point operations of the forward of one picture."""
    raise no_rule(tower_flops, cfg)


@functools.singledispatch
def unused(cfg: VisionConfig) -> tuple[str, ...]:
    """Returns the tensors that published towers hold and no feature depends on: they are never trained."""
    return ()


class TowerModule(nn.Module):
    """A tower: `forward` takes patches [N, F] and their grids, and returns features [N, W] and those of its levels."""

    again = False
    """Whether the backward makes each layer's activations again."""

    def forward(self, patches_NF: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the features of all patches, in their order, and those of each level."""
        raise NotImplementedError

    def run(self, layer: Callable[..., Tensor], *args: Any) -> Tensor:
        """Returns what a layer makes of its arguments, remembering it or not."""
        if self.again and torch.is_grad_enabled():
            made: Tensor = checkpoint(layer, *args, use_reentrant=False)
            return made
        return layer(*args)


def attend(q_NhD: Tensor, k_NhD: Tensor, v_NhD: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns the full attention [N, h * D] of each of the segments of `lengths` to itself.

    Equal ones that follow each other go together.
    """
    runs = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
    sizes = [length * count for length, count in runs]
    out = []
    for (length, count), *part in zip(runs, *(t.split(sizes) for t in (q_NhD, k_NhD, v_NhD)), strict=True):
        q, k, v = (t.unflatten(0, (count, length)).transpose(1, 2) for t in part)
        out.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1).flatten(1))
    return torch.cat(out)


def places(grids: Sequence[Grid], block: int) -> Tensor:
    """Returns row and column of every patch [N, 2], in blocks of `block` rows and columns; 1 is row by row."""
    found = []
    for t, h, w in grids:
        at = torch.cartesian_prod(torch.arange(h), torch.arange(w))
        shape = (h // block, block, w // block, block, 2)
        found.append(at.view(shape).transpose(1, 2).reshape(1, h * w, 2).expand(t, -1, -1).reshape(-1, 2))
    return torch.cat(found)


def block_order(grids: Sequence[Grid], block: int) -> Tensor:
    """Returns the places [N], row by row, of patches in blocks of `block` rows and columns."""
    found, at = [], 0
    for t, h, w in grids:
        rows, columns = places([(t, h, w)], block).unbind(1)
        frames = torch.arange(t).repeat_interleave(h * w)
        found.append(at + frames * h * w + rows * w + columns)
        at += t * h * w
    return torch.cat(found)


def frequencies(head: int, theta: float = 1e4) -> Tensor:
    """Returns the head / 4 frequencies that rows and columns each have, in radians a patch."""
    return theta ** -(torch.arange(0, head // 2, 2, dtype=torch.float32) / (head // 2))


def turned(x_NhD: Tensor, table: Tensor) -> Tensor:
    """Returns heads with dim i turned with dim i + D / 2, in fp32, in x's dtype.

    `table` has cosine and sine of each patch's angles, the D / 2 twice, as fp32 [2, N, 1, D].
    """
    return rotate(x_NhD.float(), table).to(x_NhD.dtype)


def resampled(table_PPW: Tensor, height: int, width: int, mode: str, *, corners: bool) -> Tensor:
    """Returns a square table of learnt positions at another size [height, width, W], as torch's interpolate would.

    `mode` is `bilinear` or `bicubic`. Both are a matrix for rows and one for columns, which every device multiplies
    the same way each time.
    """

    def taps(size: int) -> Tensor:
        eye = torch.eye(table_PPW.shape[0])[None, None]
        made = F.interpolate(eye, (size, eye.shape[-1]), mode=mode, align_corners=corners)[0, 0]
        return made.to(table_PPW.device, non_blocking=True)

    rows = torch.einsum("hp,pqw->hqw", taps(height), table_PPW.float())
    return torch.einsum("vq,hqw->hvw", taps(width), rows)


class Rms(nn.Module):
    """RMSNorm (arXiv:1910.07467), in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised rows in x's dtype."""
        return rms_norm(x.float(), None, self.eps).to(x.dtype) * self.weight


def patch_rows(proj: nn.Module, patches_NF: Tensor) -> Tensor:
    """Returns what a convolution whose stride is its size makes of patches [N, W], as one matrix product."""
    assert isinstance(proj, nn.Conv2d | nn.Conv3d)
    return F.linear(patches_NF.to(proj.weight.dtype), proj.weight.flatten(1), proj.bias)
