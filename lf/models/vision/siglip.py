"""SigLIP's vision tower (arXiv:2303.15343) without a pooling head, in plain torch.

Shapes: B images, I pixels of a side, Q patches of a side, S = Q * Q patches, W width, N heads.
"""

from collections.abc import Sequence

import attrs
import torch.nn.functional as F
from torch import Tensor, nn

from lf.models.layers.shared import SharedModule
from lf.models.media import Grid
from lf.models.ranges import above, least
from lf.models.vision.tower import (
    Tower,
    TowerModule,
    VisionConfig,
    build_tower,
    patch_rows,
    tower_flops,
    tower_of,
    tower_rules,
    unused,
)
from lf.models.weights import Rule, Same, Stack


@attrs.frozen(kw_only=True)
class Siglip(VisionConfig):
    """Sizes of a SigLIP vision tower; the defaults are those of So400m/14 at 224 pixels."""

    image: int = attrs.field(default=224, validator=least(1))
    """Pixels of a side of an image; what is left of it beyond whole patches is not seen."""
    eps: float = attrs.field(default=1e-6, validator=above(0.0))
    """Added to the variance in the norms."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.image < self.patch:
            raise ValueError(
                f"vision.image = {self.image} must be at least vision.patch = {self.patch}; change one of them"
            )

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return (self.image // self.patch) ** 2


def patches(images_B3II: Tensor, size: int) -> Tensor:
    """Returns each patch as a row [B, S, 3 * size * size], in the order of a convolution's weight."""
    rows, channels, pixels, _ = images_B3II.shape
    side = pixels // size
    images_B3II = images_B3II[..., : side * size, : side * size]
    split = images_B3II.reshape(rows, channels, side, size, side, size).permute(0, 2, 4, 1, 3, 5)
    return split.reshape(rows, side * side, channels * size * size)


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its size, as one matrix product, and learnt positions."""

    def __init__(self, cfg: Siglip) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, cfg.width, cfg.patch, cfg.patch)
        self.position = nn.Embedding(cfg.tokens, cfg.width)

    def forward(self, patches_BSF: Tensor) -> Tensor:
        """Returns [B, S, W]."""
        return patch_rows(self.patch, patches_BSF) + self.position.weight


class SiglipLayer(SharedModule):
    """One layer: full attention and a GELU MLP, each after its LayerNorm."""

    def __init__(self, cfg: Siglip) -> None:
        super().__init__()
        self.head = cfg.width // cfg.heads
        self.norm1 = nn.LayerNorm(cfg.width, cfg.eps)
        self.qkv = nn.Linear(cfg.width, 3 * cfg.width)
        self.out = nn.Linear(cfg.width, cfg.width)
        self.norm2 = nn.LayerNorm(cfg.width, cfg.eps)
        self.fc1 = nn.Linear(cfg.width, cfg.mlp)
        self.fc2 = nn.Linear(cfg.mlp, cfg.width)

    def forward(self, x_BSW: Tensor) -> Tensor:
        """Returns [B, S, W]."""
        heads = self.widen(self.qkv, self.norm1(x_BSW), 3).unflatten(-1, (3, -1, self.head))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
        x_BSW = x_BSW + self.narrow(self.out, F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x_BSW + self.narrow(self.fc2, F.gelu(self.widen(self.fc1, self.norm2(x_BSW)), approximate="tanh"))


class _Parts(TowerModule):
    def __init__(self, cfg: Siglip) -> None:
        super().__init__()
        self.tokens = cfg.tokens
        self.embed = PatchEmbedding(cfg)
        self.layers = nn.ModuleList(SiglipLayer(cfg) for _ in range(cfg.depth))
        self.norm = nn.LayerNorm(cfg.width, cfg.eps)


class SiglipTower(_Parts):
    """Patches, layers and the last norm."""

    def forward(self, images_B3II: Tensor) -> Tensor:  # type: ignore[override]
        """Returns [B, S, W] of images with values from -1 to 1."""
        x_BSW = self.embed(patches(images_B3II, self.embed.patch.kernel_size[0])).to(self.norm.weight.dtype)
        for layer in self.layers:
            x_BSW = layer(x_BSW)
        out: Tensor = self.norm(x_BSW)
        return out


class SiglipFeatures(_Parts):
    """The tower of vision-language models, which takes what the last layer gives, before the norm."""

    def forward(self, patches_NF: Tensor, grids: Sequence[Grid]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Returns the features [N, W] of all patches."""
        x_BSW = self.embed(patches_NF.unflatten(0, (-1, self.tokens)))
        for layer in self.layers:
            x_BSW = self.run(layer, x_BSW)
        return x_BSW.flatten(0, 1), ()


@tower_of.register
def _(cfg: Siglip) -> Tower:
    return Tower(width=cfg.width, numbers=3 * cfg.patch**2, side=cfg.image // cfg.patch)


@build_tower.register
def _(cfg: Siglip) -> TowerModule:
    return SiglipFeatures(cfg)


@unused.register
def _(cfg: Siglip) -> tuple[str, ...]:
    return ("norm.weight", "norm.bias")


@tower_rules.register
def _(cfg: Siglip, lf: str, hf: str) -> list[Rule]:
    return siglip_rules(cfg, lf, hf)


@tower_flops.register
def _(cfg: Siglip, grid: Grid) -> float:
    return grid[0] * siglip_flops(cfg)


def siglip_rules(cfg: Siglip, lf: str, hf: str) -> list[Rule]:
    """Returns the weight table of a tower under the prefix `lf` here and `hf` in transformers' SiglipVisionModel."""
    names = {
        "embed.patch.weight": "embeddings.patch_embedding.weight",
        "embed.patch.bias": "embeddings.patch_embedding.bias",
        "embed.position.weight": "embeddings.position_embedding.weight",
        "norm.weight": "post_layernorm.weight",
        "norm.bias": "post_layernorm.bias",
    }
    rules: list[Rule] = []
    for i in range(cfg.depth):
        ours, theirs = f"layers.{i}", f"encoder.layers.{i}"
        for kind in ("weight", "bias"):
            for one, other in (("norm1", "layer_norm1"), ("norm2", "layer_norm2"), ("out", "self_attn.out_proj")):
                names[f"{ours}.{one}.{kind}"] = f"{theirs}.{other}.{kind}"
            for one in ("fc1", "fc2"):
                names[f"{ours}.{one}.{kind}"] = f"{theirs}.mlp.{one}.{kind}"
            qkv = tuple(f"{hf}{theirs}.self_attn.{part}_proj.{kind}" for part in "qkv")
            rules.append(Stack(f"{lf}{ours}.qkv.{kind}", qkv))
    return [*rules, *(Same(lf + one, hf + other) for one, other in names.items())]


def siglip_flops(cfg: Siglip) -> float:
    """Returns the floating point operations of the forward of one image."""
    layer = 4 * cfg.width**2 + 2 * cfg.width * cfg.mlp + 2 * cfg.tokens * cfg.width
    return 2.0 * cfg.tokens * (cfg.depth * layer + 3 * cfg.patch**2 * cfg.width)


def siglip_init(cfg: Siglip) -> dict[str, float]:
    """Returns the standard deviation of the first values of each kind of matrix, by its name in the tower."""
    return {
        "embed.patch.weight": (3 * cfg.patch**2) ** -0.5,
        "embed.position.weight": cfg.width**-0.5,
        "fc2.weight": cfg.mlp**-0.5,
        "*": cfg.width**-0.5,
    }
