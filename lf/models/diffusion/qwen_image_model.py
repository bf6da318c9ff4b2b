"""Qwen-Image transformers as torch modules (arXiv:2508.02324): text and image are two streams with one attention.

Pictures that the sample is made from follow it in the image stream, each with its own number on the frame axis. Rows
and columns are counted from the middle of a picture; texts go on along the diagonal from half of the largest side.

Shapes: T image tokens of a micro-batch, K text tokens, P numbers of a patch, W width, N heads, D head width, R runs of
image tokens of one time, B samples.
"""

import attrs
import torch
import torch.nn.functional as F
from attrs.validators import ge
from torch import Tensor, nn

from lf.models.diffusion.flow import Flow, LogitNormal, Sampling, TokenShift
from lf.models.diffusion.latent import LatentModel, Space
from lf.models.diffusion.layers import (
    TIMES,
    Attention,
    GeluMlp,
    LatentModule,
    Layers,
    Norm,
    Stream,
    TimeMlp,
    type_of,
)
from lf.models.diffusion.packed import (
    Grid,
    Packing,
    add_gated,
    angles,
    grid_angles,
    modulate,
    plain_norm,
    rope_table,
    rotate_pairs,
    span,
)

MOST = 4096
"""Positions on an axis."""
SINUSOIDS = 256
"""Width of the time's sinusoids."""

Time = tuple[Tensor, Tensor]
"""What modulates: of each run of image tokens [R, W], and of each sample [B, W]."""
Runs = tuple[tuple[int, ...], tuple[int, ...]]
"""How many tokens of x each run has, and how many of the text each sample."""


@attrs.frozen(kw_only=True)
class QwenImage(LatentModel):
    """A Qwen-Image transformer; the defaults are those of the published one."""

    layers: int = attrs.field(default=60, validator=ge(1))
    """Blocks."""
    heads: int = attrs.field(default=24, validator=ge(1))
    """Heads."""
    channels: int = attrs.field(default=16, validator=ge(1))
    """Channels of a latent."""
    patch: int = attrs.field(default=2, validator=ge(1))
    """Size of a patch along rows and columns."""
    text: int = attrs.field(default=1024, validator=ge(1))
    """Most text embeddings of a sample; those of an edit hold its pictures too."""
    text_dim: int = attrs.field(default=3584, validator=ge(1))
    """Width of a text embedding."""
    axes: Grid = (16, 56, 56)
    """Dims of a head that turn by the picture, the row and the column of a token."""
    edit: bool = False
    """Whether rows may have references."""
    clean_references: bool = False
    """Whether references are modulated as of time 0 (Qwen-Image-Edit-2511), not as of the sample's."""
    flow: Flow = Flow(sampler=LogitNormal(), shift=TokenShift(tokens=(256, 8192), log_factor=(0.5, 0.9)))
    """How it is trained to denoise."""
    sampling: Sampling = Sampling(
        guidance=4.0, shift=TokenShift(tokens=(256, 8192), log_factor=(0.5, 0.9)), terminal=0.02, keep_norm=True
    )
    """How samples are made: as diffusers' pipelines do."""

    def __attrs_post_init__(self) -> None:
        if sum(self.axes) != self.head_dim or any(axis % 2 for axis in self.axes):
            raise ValueError(f"axes = {self.axes} must be even and add up to head_dim = {self.head_dim}; change them")

    @property
    def space(self) -> Space:
        """What goes in."""
        return Space(
            channels=self.channels,
            patch=(1, self.patch, self.patch),
            channels_first=True,
            text_dim=self.text_dim,
            text=self.text,
            references=self.edit,
            clean_references=self.clean_references,
            # Rows and columns are counted from the middle, and a text goes on from half of the largest side.
            most=MOST - self.text,
        )


class Side(nn.Module):
    """What one stream does around the attention: modulation, its projections and its feed-forward network."""

    def __init__(self, layers: Layers, width: int, head_dim: int, eps: float, silent: bool = False) -> None:
        super().__init__()
        self.head_dim, self.eps, self.silent = head_dim, eps, silent
        self.mod = layers.spread(width, 6 * width)
        self.q, self.k, self.v = (layers.column(width, width) for _ in range(3))
        self.out = layers.row(width, width)
        self.q_norm, self.k_norm = layers.head_norm(head_dim, eps), layers.head_norm(head_dim, eps)
        self.mlp = GeluMlp(layers, width, 4 * width, width)

    def parts(self, time_RW: Tensor) -> tuple[Tensor, ...]:
        """Returns shift, scale and gate of the attention, then those of the network, each [R, W] in fp32."""
        return self.mod(F.silu(time_RW).to(type_of(self.mod))).float().chunk(6, dim=-1)

    def stream(self, x_TW: Tensor, parts: tuple[Tensor, ...], table: Tensor, runs: tuple[int, ...]) -> Stream:
        """Returns query, key and value; a silent stream has no query."""
        h = modulate(plain_norm(x_TW, self.eps), parts[0], parts[1], runs).to(x_TW.dtype)

        def turned(layer: nn.Module, norm: nn.Module) -> Tensor:
            return rotate_pairs(norm(layer(h).unflatten(-1, (-1, self.head_dim))), table)

        k, v = turned(self.k, self.k_norm), self.v(h).unflatten(-1, (-1, self.head_dim))
        return None if self.silent else turned(self.q, self.q_norm), k, v

    def after(self, x_TW: Tensor, out_TW: Tensor, parts: tuple[Tensor, ...], runs: tuple[int, ...]) -> Tensor:
        """Returns x with the attention's result and then the network's; sums are made in fp32."""
        _, _, gate, shift, scale, mlp_gate = parts
        x_TW, kind = x_TW.float(), x_TW.dtype
        x_TW = add_gated(x_TW, self.out(out_TW).float(), gate, runs)
        h = modulate(plain_norm(x_TW, self.eps), shift, scale, runs).to(kind)
        return add_gated(x_TW, self.mlp(h).float(), mlp_gate, runs).to(kind)


class QwenBlock(nn.Module):
    """Both streams and their attention to each other; after the last block nobody reads the text's."""

    def __init__(self, layers: Layers, cfg: QwenImage, last: bool) -> None:
        super().__init__()
        self.image = Side(layers, cfg.width, cfg.head_dim, cfg.eps)
        self.text = Side(layers, cfg.width, cfg.head_dim, cfg.eps, silent=last)
        self.core = Attention(layers.exchange)

    def forward(
        self, x_TW: Tensor, text_KW: Tensor, time: Time, tables: tuple[Tensor, Tensor], runs: Runs, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        """Returns both streams after the block; `runs` are those of x, and of the text those of each sample."""
        image_parts, text_parts = self.image.parts(time[0]), self.text.parts(time[1])
        seen = self.image.stream(x_TW, image_parts, tables[0], runs[0])
        said = self.text.stream(text_KW, text_parts, tables[1], runs[1])
        *text_out, image_out = self.core([said, seen], [packing.texts, packing.lengths], packing.place)
        x_TW = self.image.after(x_TW, image_out, image_parts, runs[0])
        return x_TW, self.text.after(text_KW, text_out[0], text_parts, runs[1]) if text_out else text_KW


class QwenImageModel(LatentModule):
    """The module of `QwenImage`."""

    def __init__(self, cfg: QwenImage, layers: Layers) -> None:
        super().__init__(layers)
        self.cfg, width, numbers = cfg, cfg.width, cfg.channels * cfg.patch**2
        self.patch = layers.sliced(nn.Linear(numbers, width))
        self.text_norm = layers.sliced(Norm(cfg.text_dim, 1e-6))
        self.text = layers.sliced(nn.Linear(cfg.text_dim, width))
        self.time = TimeMlp(SINUSOIDS, width)
        self.blocks = nn.ModuleList(QwenBlock(layers, cfg, i == cfg.layers - 1) for i in range(cfg.layers))
        self.out_mod = layers.spread(width, 2 * width)
        self.out = layers.sliced(nn.Linear(width, numbers))

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

        A sample's time is that of its first run. Tokens are those of `packing.place`, texts those of all samples.
        Condition and image are those of other families, and None.
        """
        kind, cfg, place = type_of(self.patch), self.cfg, packing.place
        x_TW = self.patch(self.slice(tokens_TP).to(kind))
        text_KW = self.text(self.text_norm(self.slice(text_KD, place).to(kind)))
        time_RW = self.time(time_R * TIMES)
        firsts = torch.tensor(packing.first_runs, device=time_RW.device)
        time_BW = time_RW[firsts]
        runs = self.own(packing.run_lengths, place), self.own(packing.texts, place)
        tables = position_tables(cfg, packing, x_TW.device)
        for block in self.blocks:
            x_TW, text_KW = block(x_TW, text_KW, (time_RW, time_BW), tables, runs, packing)
        scale, shift = self.out_mod(F.silu(time_BW).to(kind)).float().chunk(2, dim=-1)
        h = modulate(plain_norm(x_TW, cfg.eps), shift, scale, self.own(packing.lengths, place))
        return self.layers.leave(self.out(h.to(kind)).float())


def position_tables(cfg: QwenImage, packing: Packing, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the rotary tables of a rank's image tokens and text tokens."""
    pictures, texts = [], []
    for grids, length in zip(packing.grids, packing.texts, strict=True):
        for number, grid in enumerate(grids):
            middle = (number, -(grid[1] - grid[1] // 2), -(grid[2] - grid[2] // 2))
            pictures.append(grid_angles(cfg.axes, middle, grid, device))
        first = max(max(grid[1:]) // 2 for grid in grids)
        along = torch.arange(first, first + length, device=device)
        texts.append(angles(cfg.axes, (along, along, along)))
    made = (rope_table(pictures), packing.lengths), (rope_table(texts), packing.texts)
    image, text = (table[:, slice(*span(sum(lengths), packing.place))] for table, lengths in made)
    return image, text


# A config that is read back from JSON imports this file alone, and needs the family's rules.
import lf.models.diffusion.qwen_image  # noqa: E402, F401
