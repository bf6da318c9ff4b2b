"""Wan video transformers as torch modules (arXiv:2503.20314, github.com/Wan-Video/Wan2.1 and Wan2.2).

Tokens of a clip attend to each other, then to its text and, in Wan2.1 I2V, to embeddings of its first frame. Every norm
is scaled, shifted and gated by the time of its token. Queries and keys are normalised over all heads together.

Shapes: T tokens of a micro-batch, K text tokens, I image embeddings, P numbers of a patch, W width, N heads, D head
width, R runs of tokens of one time.
"""

import math
from typing import Literal

import attrs
import torch
import torch.nn.functional as F
from attrs.validators import ge
from torch import Tensor, nn

from lf.models.diffusion.flow import ConstantShift, Flow
from lf.models.diffusion.latent import LatentModel, Space
from lf.models.diffusion.layers import (
    TIMES,
    TORCH,
    Attention,
    GeluMlp,
    LatentModule,
    Layers,
    Modulation,
    TimeMlp,
    WideLayerNorm,
    type_of,
)
from lf.models.diffusion.packed import (
    Grid,
    Packing,
    add_gated,
    attend,
    grid_angles,
    held,
    modulate,
    plain_norm,
    rope_table,
    rotate_pairs,
    span,
)


@attrs.frozen(kw_only=True)
class Wan(LatentModel):
    """A Wan transformer; the defaults are those of Wan2.1 T2V 14B."""

    layers: int = attrs.field(default=40, validator=ge(1))
    """Blocks."""
    heads: int = attrs.field(default=40, validator=ge(1))
    """Heads."""
    mlp: int = attrs.field(default=13824, validator=ge(1))
    """Width inside the feed-forward network."""
    in_channels: int = attrs.field(default=16, validator=ge(1))
    """Channels that go in: those of a latent and, in I2V, of mask and first frame."""
    out_channels: int = attrs.field(default=16, validator=ge(1))
    """Channels of a latent."""
    patch: Grid = (1, 2, 2)
    """Size of a patch along frames, rows and columns."""
    text: int = attrs.field(default=512, validator=ge(1))
    """Most text embeddings of a sample."""
    text_dim: int = attrs.field(default=4096, validator=ge(1))
    """Width of a text embedding."""
    padding: Literal["zeros", "masked"] = "zeros"
    """What attention sees of a text shorter than `text`: zeros behind it, as the published models were trained and as
    diffusers samples, or the text alone."""
    image_dim: int = attrs.field(default=0, validator=ge(0))
    """Width of an embedding of the first frame; 0 where the model reads none (all but Wan2.1 I2V)."""
    sinusoids: int = attrs.field(default=256, validator=ge(2))
    """Width of the time's sinusoids; even."""
    most: int = attrs.field(default=1024, validator=ge(1))
    """Most patches along an axis."""
    flow: Flow = Flow(shift=ConstantShift(factor=5.0))
    """How it is trained to denoise."""

    def __attrs_post_init__(self) -> None:
        if self.head_dim % 2 or self.sinusoids % 2:
            raise ValueError(f"head_dim = {self.head_dim} and sinusoids = {self.sinusoids} must be even; change them")
        if self.in_channels < self.out_channels or min(self.patch) < 1 or len(self.patch) != 3:
            raise ValueError(
                f"in_channels = {self.in_channels} must be out_channels = {self.out_channels} or more, and patch = "
                f"{self.patch} three numbers from 1; change them"
            )

    @property
    def axes(self) -> Grid:
        """Dims of a head that turn by the frame, the row and the column of a token."""
        side = 2 * (self.head_dim // 6)
        return self.head_dim - 2 * side, side, side

    @property
    def space(self) -> Space:
        """What goes in. Frames may be given where no channels beside the latents say what is."""
        return Space(
            channels=self.out_channels,
            patch=self.patch,
            channels_first=False,
            text_dim=self.text_dim,
            text=self.text,
            pad_text=self.padding == "zeros",
            condition=self.in_channels - self.out_channels,
            image_dim=self.image_dim,
            given=self.in_channels == self.out_channels,
            most=self.most,
        )


class SelfAttention(nn.Module):
    """Attention of all tokens of a sample to each other."""

    def __init__(self, layers: Layers, width: int, heads: int, eps: float) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.q, self.k, self.v = (layers.column(width, width) for _ in range(3))
        self.q_norm, self.k_norm = layers.norm(width, eps), layers.norm(width, eps)
        self.core = Attention(layers.exchange)
        self.out = layers.row(width, width)

    def forward(self, x_TW: Tensor, table: Tensor, packing: Packing) -> Tensor:
        """Returns [T, W]; `table` is that of `rope_table`."""
        projected = self.q_norm(self.q(x_TW)), self.k_norm(self.k(x_TW)), self.v(x_TW)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in projected)
        stream = rotate_pairs(q, table), rotate_pairs(k, table), v
        (found,) = self.core([stream], [packing.lengths], packing.place)
        return self.out(found)


class CrossAttention(nn.Module):
    """Attention of each token to its sample's text, and to its image where there is one; they have one query."""

    def __init__(self, layers: Layers, width: int, heads: int, eps: float, image: bool) -> None:
        super().__init__()
        self.head_dim, self.image = width // heads, image
        self.q, self.out = layers.column(width, width), layers.row(width, width)
        self.k, self.v = layers.column_of_whole(width, width), layers.column_of_whole(width, width)
        self.q_norm, self.k_norm = layers.norm(width, eps), layers.norm(width, eps)
        if image:
            self.image_k, self.image_v = layers.column_of_whole(width, width), layers.column_of_whole(width, width)
            self.image_k_norm = layers.norm(width, eps)

    def forward(self, x_TW: Tensor, text_KW: Tensor, image_IW: Tensor | None, packing: Packing) -> Tensor:
        """Returns [T, W]."""

        def split(t: Tensor) -> Tensor:
            return t.unflatten(-1, (-1, self.head_dim))

        # Every rank has the keys of all texts: they are few, so queries stay where they are.
        q, lengths = split(self.q_norm(self.q(x_TW))), held(packing.lengths, packing.place)
        k, v = split(self.k_norm(self.k(text_KW))), split(self.v(text_KW))
        out = attend(q, k, v, lengths, packing.texts)
        if image_IW is not None:
            k, v = split(self.image_k_norm(self.image_k(image_IW))), split(self.image_v(image_IW))
            out = out + attend(q, k, v, lengths, packing.images)
        return self.out(out)


class WanBlock(nn.Module):
    """Self-attention, cross-attention and a feed-forward network; the first and the last are modulated by the time."""

    def __init__(self, layers: Layers, width: int, heads: int, mlp: int, eps: float, image: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.table = layers.sliced(Modulation(6, width))
        self.self_attention = SelfAttention(layers, width, heads, eps)
        self.cross_norm = layers.sliced(WideLayerNorm(width, eps))
        self.cross_attention = CrossAttention(layers, width, heads, eps, image)
        self.mlp = GeluMlp(layers, width, mlp, width)

    def forward(
        self,
        x_TW: Tensor,
        time_R6W: Tensor,
        runs: tuple[int, ...],
        table: Tensor,
        text_KW: Tensor,
        image_IW: Tensor | None,
        packing: Packing,
    ) -> Tensor:
        """Returns x after the block, in its dtype; `runs` are those of x. Sums of gated branches are made in fp32."""
        kind = x_TW.dtype
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.table(time_R6W)
        h = modulate(plain_norm(x_TW, self.eps), shift, scale, runs).to(kind)
        h = self.self_attention(h, table, packing)
        x_TW = add_gated(x_TW.to(gate.dtype), h.to(gate.dtype), gate, runs).to(kind)
        x_TW = x_TW + self.cross_attention(self.cross_norm(x_TW), text_KW, image_IW, packing)
        h = self.mlp(modulate(plain_norm(x_TW, self.eps), mlp_shift, mlp_scale, runs).to(kind))
        return add_gated(x_TW.to(gate.dtype), h.to(gate.dtype), mlp_gate, runs).to(kind)


class PatchEmbedding(nn.Module):
    """The convolution over patches as one matrix product; the weight is stored as that of the convolution."""

    def __init__(self, channels: int, width: int, patch: Grid) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels, *patch))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, tokens_TP: Tensor) -> Tensor:
        """Returns [T, W] of tokens whose channels come last."""
        weight = self.weight.permute(0, 2, 3, 4, 1).flatten(1)
        return F.linear(tokens_TP.to(weight.dtype), weight, self.bias)


class ImageEmbedding(nn.Module):
    """Makes image embeddings as wide as the model."""

    def __init__(self, image: int, width: int) -> None:
        super().__init__()
        self.norm_in, self.norm_out = WideLayerNorm(image, 1e-5), WideLayerNorm(width, 1e-5)
        self.mlp = GeluMlp(TORCH, image, image, width, exact=True)

    def forward(self, image_ID: Tensor) -> Tensor:
        """Returns [I, W]."""
        return self.norm_out(self.mlp(self.norm_in(image_ID.to(type_of(self.mlp)))))


class WanModel(LatentModule):
    """The module of `Wan`."""

    def __init__(self, cfg: Wan, layers: Layers) -> None:
        super().__init__(layers)
        self.cfg, width = cfg, cfg.width
        self.patch = layers.sliced(PatchEmbedding(cfg.in_channels, width, cfg.patch))
        self.time = TimeMlp(cfg.sinusoids, width)
        self.time_mod = layers.spread(width, 6 * width)
        self.text = GeluMlp(TORCH, cfg.text_dim, width, width)
        self.image = ImageEmbedding(cfg.image_dim, width) if cfg.image_dim else None
        self.blocks = nn.ModuleList(
            WanBlock(layers, width, cfg.heads, cfg.mlp, cfg.eps, bool(cfg.image_dim)) for _ in range(cfg.layers)
        )
        self.table = layers.sliced(Modulation(2, width))
        self.out = layers.sliced(nn.Linear(width, cfg.out_channels * math.prod(cfg.patch)))

    def forward(
        self,
        tokens_TP: Tensor,
        time_R: Tensor,
        text_KD: Tensor,
        packing: Packing,
        condition_TP: Tensor | None = None,
        image_ID: Tensor | None = None,
    ) -> Tensor:
        """Returns the velocity [T, P] in fp32 of noisy tokens, given the time (0 to 1) of each run of them.

        Tokens and condition are those of `packing.place`, texts and images those of all samples.
        """
        x_TW = self.patch(self.slice(self._with_condition(tokens_TP, condition_TP)))
        runs = self.own(packing.run_lengths, packing.place)
        time_RW = self.time(time_R * TIMES)
        time_R6W = self.time_mod(F.silu(time_RW)).unflatten(-1, (6, -1))
        text_KW = self.text(text_KD.to(type_of(self.text)))
        image_IW = self.image(image_ID) if self.image is not None and image_ID is not None else None
        origin = (0, 0, 0)
        table = rope_table(grid_angles(self.cfg.axes, origin, grid, x_TW.device) for (grid,) in packing.grids)
        table = table[:, slice(*span(sum(packing.lengths), packing.place))]
        for block in self.blocks:
            x_TW = block(x_TW, time_R6W, runs, table, text_KW, image_IW, packing)
        shift, scale = self.table(self.layers.enter(time_RW)[:, None])
        h = modulate(plain_norm(x_TW, self.cfg.eps), shift, scale, runs)
        return self.layers.leave(self.out(h.to(type_of(self.out))).float())

    def _with_condition(self, tokens_TP: Tensor, condition_TP: Tensor | None) -> Tensor:
        """Returns tokens with the channels of the condition behind their own, place by place."""
        if condition_TP is None:
            return tokens_TP
        parts = (t.unflatten(-1, (math.prod(self.cfg.patch), -1)) for t in (tokens_TP, condition_TP))
        return torch.cat(tuple(parts), dim=-1).flatten(-2)


# A config that is read back from JSON imports this file alone, and needs the family's rules.
import lf.models.diffusion.wan  # noqa: E402, F401
