"""Samples of any sizes one after the other in one sequence, without padding: patches, positions, attention, modulation.

Shapes: T tokens of a micro-batch, C channels, F frames, Y rows and X columns of a latent, f, y and x those of its grid
of patches, P numbers of a patch and channel, N heads, D head width, W width, R runs of tokens of one time, K keys.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Grid = tuple[int, int, int]
"""Patches of a latent along frames, rows and columns."""

Place = tuple[int, int]
"""A rank's number, from 0, among so many that each have an equal slice of a sequence."""


@attrs.frozen(kw_only=True)
class Packing:
    """Where samples begin and end, in numbers that Python can read without waiting for a device."""

    grids: tuple[tuple[Grid, ...], ...]
    """The latents of each sample: the one that is made, then those that it is made from."""
    texts: tuple[int, ...]
    """Tokens of each sample's text."""
    images: tuple[int, ...] = ()
    """Embeddings of each sample's image, for models that read some."""
    runs: tuple[tuple[int, ...], ...]
    """Tokens of each run of one time, of each sample."""
    place: Place = (0, 1)
    """Which slice of the tokens the batch has; all else is that of the whole sequence."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample."""
        return tuple(sum(map(math.prod, grids)) for grids in self.grids)

    @property
    def run_lengths(self) -> tuple[int, ...]:
        """Tokens of each run, of all samples."""
        return tuple(run for runs in self.runs for run in runs)

    @property
    def first_runs(self) -> tuple[int, ...]:
        """Number of the first run of each sample, whose time is that of the sample."""
        starts, at = [], 0
        for runs in self.runs:
            starts.append(at)
            at += len(runs)
        return tuple(starts)


def span(total: int, place: Place) -> tuple[int, int]:
    """Returns first and last token of a rank's slice of a sequence, whose length its ranks divide."""
    size = total // place[1]
    return place[0] * size, (place[0] + 1) * size


def held(lengths: tuple[int, ...], place: Place) -> tuple[int, ...]:
    """Returns how many tokens of each part of a sequence are in a rank's slice of it, 0 where it has none."""
    first, last = span(sum(lengths), place)
    ends = list(itertools.accumulate(lengths))
    return tuple(max(0, min(last, end) - max(first, end - n)) for n, end in zip(lengths, ends, strict=True))


def slice_of(x: Tensor, place: Place) -> Tensor:
    """Returns a rank's slice of a sequence."""
    return x[slice(*span(len(x), place))]


def patchify(latent_CFYX: Tensor, patch: Grid, channels_first: bool) -> Tensor:
    """Returns a latent as tokens [f*y*x, P*C]; within a token channels come last, or first where that is asked."""
    c, f, y, x = latent_CFYX.shape
    a, b, d = patch
    split = latent_CFYX.reshape(c, f // a, a, y // b, b, x // d, d)
    order = (1, 3, 5, 0, 2, 4, 6) if channels_first else (1, 3, 5, 2, 4, 6, 0)
    return split.permute(order).reshape(f // a * (y // b) * (x // d), -1)


def unpatchify(tokens_TP: Tensor, grid: Grid, patch: Grid, channels_first: bool) -> Tensor:
    """Returns the latent [C, F, Y, X] that `patchify` was given."""
    if channels_first:
        split = tokens_TP.reshape(*grid, -1, *patch).permute(3, 0, 4, 1, 5, 2, 6)
    else:
        split = tokens_TP.reshape(*grid, *patch, -1).permute(6, 0, 3, 1, 4, 2, 5)
    return split.flatten(5, 6).flatten(3, 4).flatten(1, 2)


def grid_of(shape: Sequence[int], patch: Grid) -> Grid:
    """Returns the grid of a latent of the shape [C, F, Y, X]."""
    f, y, x = (extent // size for extent, size in zip(shape[1:], patch, strict=True))
    return f, y, x


def angles(axes: Sequence[int], positions: Sequence[Tensor], theta: float = 10000.0) -> Tensor:
    """Returns the rotary angles [..., D / 2] in fp64 of positions on several axes, which broadcast.

    Each axis turns the next `axes[i]` dims of a head, in pairs of neighbours, at theta^(-2j / axes[i]).
    """
    parts = []
    for dims, position in zip(axes, positions, strict=True):
        steps = torch.arange(0, dims, 2, dtype=torch.float64, device=position.device) / dims
        parts.append(position[..., None].double() * theta**-steps)
    shape = torch.broadcast_shapes(*(part.shape[:-1] for part in parts))
    return torch.cat([part.expand(*shape, -1) for part in parts], dim=-1)


def grid_angles(axes: Sequence[int], starts: Grid, grid: Grid, device: torch.device) -> Tensor:
    """Returns the angles [f*y*x, D / 2] of a grid whose positions on the axes begin at `starts`."""
    f, y, x = (torch.arange(start, start + extent, device=device) for start, extent in zip(starts, grid, strict=True))
    return angles(axes, (f[:, None, None], y[:, None], x)).flatten(0, 2)


def rope_table(parts: Iterable[Tensor]) -> Tensor:
    """Returns cosine and sine, fp32 [2, T, 1, D / 2], of angles that follow each other."""
    angle = torch.cat(list(parts))[:, None]
    return torch.stack((angle.cos(), angle.sin())).float()


def rotate_pairs(x_TND: Tensor, table: Tensor) -> Tensor:
    """Returns x with each pair of neighbouring dims turned by its token's angle, in x's dtype; computed in fp32."""
    return _RotatePairs.apply(x_TND, table[0], table[1])


class _RotatePairs(torch.autograd.Function):
    """The rotation, whose backward turns back and keeps nothing but the table, which all layers share."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, -sin), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    a, b = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pairs = out.unflatten(-1, (-1, 2))
    pairs[..., 0] = a * cos - b * sin
    pairs[..., 1] = a * sin + b * cos
    return out


def attend(q_TND: Tensor, k_KND: Tensor, v_KND: Tensor, queries: tuple[int, ...], keys: tuple[int, ...]) -> Tensor:
    """Returns the attention [T, N * D] of each sample's queries to all of its own keys.

    Samples of one size go in one call. No call has a mask, so every device takes its fused attention. A sample may have
    no queries.
    """
    if len(set(queries)) == 1 and len(set(keys)) == 1:
        q, k, v = (t.unflatten(0, (len(queries), -1)).transpose(1, 2) for t in (q_TND, k_KND, v_KND))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)
    out = []
    for part in zip(q_TND.split(queries), k_KND.split(keys), v_KND.split(keys), strict=True):
        if not len(part[0]):
            continue
        q, k, v = (t.transpose(0, 1)[None] for t in part)
        out.append(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))
    return torch.cat(out)


def interleave(streams: Sequence[Tensor], lengths: Sequence[tuple[int, ...]]) -> Tensor:
    """Returns packed sequences as one: of each sample first the part of the first one, then that of the next."""
    if len(streams) == 1:
        return streams[0]
    parts = zip(*(stream.split(own) for stream, own in zip(streams, lengths, strict=True)), strict=True)
    return torch.cat([part for sample in parts for part in sample])


def separate(joint: Tensor, lengths: Sequence[tuple[int, ...]]) -> tuple[Tensor, ...]:
    """Returns the sequences that `interleave` was given."""
    if len(lengths) == 1:
        return (joint,)
    parts = joint.split([n for sample in zip(*lengths, strict=True) for n in sample])
    return tuple(torch.cat(parts[i :: len(lengths)]) for i in range(len(lengths)))


def modulate(x_TW: Tensor, shift_RW: Tensor, scale_RW: Tensor, runs: tuple[int, ...]) -> Tensor:
    """Returns x * (1 + scale) + shift, each run of tokens with its own scale and shift.

    Runs are taken one by one, or all at once where they are equally long: no tensor of every token's scale is made.
    """
    factor_RW = 1.0 + scale_RW
    if len(set(runs)) == 1:
        x = x_TW.unflatten(0, (len(runs), -1))
        return torch.addcmul(shift_RW[:, None], x, factor_RW[:, None]).flatten(0, 1)
    parts = zip(x_TW.split(runs), shift_RW, factor_RW, strict=True)
    return torch.cat([torch.addcmul(shift, x, factor) for x, shift, factor in parts])


def add_gated(x_TW: Tensor, branch_TW: Tensor, gate_RW: Tensor, runs: tuple[int, ...]) -> Tensor:
    """Returns x + branch * gate, each run of tokens with its own gate; a tensor of its own, as FSDP wants of a unit."""
    if len(runs) == 1:
        return torch.addcmul(x_TW, branch_TW, gate_RW)
    parts = zip(x_TW.split(runs), branch_TW.split(runs), gate_RW, strict=True)
    return torch.cat([torch.addcmul(x, branch, gate) for x, branch, gate in parts])


def plain_norm(x_TW: Tensor, eps: float) -> Tensor:
    """Returns x normalised to mean 0 and variance 1, without weights, in fp32 or wider."""
    wide = torch.promote_types(x_TW.dtype, torch.float32)
    return F.layer_norm(x_TW.to(wide), (x_TW.shape[-1],), eps=eps)
