"""Rotary position embedding (RoPE, arXiv:2104.09864) with the length scalings of published models, computed here.

Shapes: B rows of a micro-batch, S positions of a row, H heads, D width of a head, R = rotated dims of a head.
"""

import functools
import math
from typing import Any

import attrs
import torch
from attrs.validators import optional
from torch import Tensor
from torch.autograd.function import once_differentiable

from lf.models.ranges import above, least
from lf.models.spec import no_rule


@attrs.frozen(kw_only=True)
class RopeScaling:
    """How frequencies change beyond the length of pre-training: the type says which way."""


@attrs.frozen(kw_only=True)
class NoScaling(RopeScaling):
    """The plain frequencies."""


@attrs.frozen(kw_only=True)
class LinearScaling(RopeScaling):
    """Position interpolation (arXiv:2306.15595): every frequency is divided."""

    factor: float = attrs.field(validator=above(0.0))
    """Divisor of the frequencies."""


@attrs.frozen(kw_only=True)
class DynamicScaling(RopeScaling):
    """NTK-aware scaling whose base grows with the longest sequence of the batch; none up to `original`."""

    factor: float = attrs.field(validator=above(0.0))
    """How fast the base grows."""
    original: int = attrs.field(validator=least(1))
    """Length of pre-training, in tokens."""


@attrs.frozen(kw_only=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's scaling: long waves are divided, short ones kept, those between are blended (arXiv:2407.21783)."""

    factor: float = attrs.field(validator=above(0.0))
    """Divisor of the low frequencies."""
    low: float = attrs.field(default=1.0, validator=above(0.0))
    """A wave that turns less often than this within `original` tokens is divided."""
    high: float = attrs.field(default=4.0, validator=above(0.0))
    """A wave that turns more often than this within `original` tokens is kept."""
    original: int = attrs.field(default=8192, validator=least(1))
    """Length of pre-training, in tokens."""

    def __attrs_post_init__(self) -> None:
        if self.high <= self.low:
            raise ValueError(f"rope.scaling.high = {self.high} must be greater than rope.scaling.low = {self.low}")


@attrs.frozen(kw_only=True)
class YarnScaling(RopeScaling):
    """YaRN (arXiv:2309.00071): a ramp between divided and kept frequencies, and a temperature on attention."""

    factor: float = attrs.field(validator=above(0.0))
    """Divisor of the low frequencies."""
    original: int = attrs.field(validator=least(1))
    """Length of pre-training, in tokens."""
    beta_fast: float = attrs.field(default=32.0, validator=above(0.0))
    """Turns within `original` tokens from which a frequency is kept."""
    beta_slow: float = attrs.field(default=1.0, validator=above(0.0))
    """Turns within `original` tokens up to which a frequency is divided."""
    attention_factor: float | None = attrs.field(default=None, validator=optional(above(0.0)))
    """Multiplies cosine and sine; None derives it from `factor`, `mscale` and `mscale_all_dim`."""
    mscale: float | None = attrs.field(default=None, validator=optional(above(0.0)))
    """Weight of log(factor) in the numerator of the derived attention factor; used with `mscale_all_dim` only."""
    mscale_all_dim: float | None = attrs.field(default=None, validator=optional(above(0.0)))
    """Weight of log(factor) in the denominator of the derived attention factor; used with `mscale` only."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded outwards to whole dims."""

    def __attrs_post_init__(self) -> None:
        if self.beta_fast < self.beta_slow:
            raise ValueError(
                f"rope.scaling.beta_fast = {self.beta_fast} must not be less than "
                f"rope.scaling.beta_slow = {self.beta_slow}"
            )


@attrs.frozen(kw_only=True)
class Rope:
    """Rotary position embedding of queries and keys, in half-split pairs: dim i turns with dim i + R/2."""

    theta: float = attrs.field(default=10000.0, validator=above(1.0))
    """Base of the frequencies."""
    fraction: float = attrs.field(default=1.0, validator=above(0.0, 1.0))
    """Part of a head that is rotated, from its first dim on; 1.0 is the whole head."""
    scaling: RopeScaling = NoScaling()
    """What happens beyond the length of pre-training."""
    sections: tuple[int, ...] = ()
    """How many of the R/2 frequencies turn by time, by row and by column; empty where tokens have one position."""
    interleaved: bool = False
    """Whether the three take turns (Qwen3-VL), time having what is left; else they follow each other (Qwen2-VL)."""

    def __attrs_post_init__(self) -> None:
        if self.sections and (len(self.sections) != 3 or min(self.sections) < 0):
            raise ValueError(f"rope.sections = {self.sections} must be three numbers: of time, rows and columns")
        _, rows, columns = self.sections or (0, 1, 1)
        if self.interleaved and max(3 * rows - 1, 3 * columns) > sum(self.sections):
            raise ValueError(
                f"rope.interleaved = True with rope.sections = {self.sections}: rows and columns must each have at "
                "most a third of the frequencies; correct them, or set interleaved to False"
            )


def rotated_dims(rope: Rope, head_dim: int) -> int:
    """Returns how many dims of a head are rotated; raises ValueError where they do not make pairs."""
    rot = int(head_dim * rope.fraction)
    if rot < 2 or rot % 2:
        raise ValueError(
            f"rope.fraction = {rope.fraction} of attention.head_dim = {head_dim} rotates {rot} dims; "
            "it must be an even number, at least 2: change the fraction or the head_dim"
        )
    if rope.sections and sum(rope.sections) != rot // 2:
        raise ValueError(
            f"rope.sections = {rope.sections} are {sum(rope.sections)} frequencies, but {rot} rotated dims have "
            f"{rot // 2}; correct them"
        )
    return rot


def inverse_frequencies(rope: Rope, head_dim: int, length: int) -> tuple[Tensor, float]:
    """Returns the frequencies as fp32 [R/2] on the CPU, in radians a token, and the factor on cosine and sine.

    `length` is the longest sequence of the batch in tokens; dynamic scaling alone depends on it.
    """
    return scaled_frequencies(rope.scaling, rope.theta, rotated_dims(rope, head_dim), length)


def rope_table(rope: Rope, head_dim: int, positions_BS: Tensor, longest: int) -> Tensor:
    """Returns cosine and sine of every position as fp32 [2, S, B, 1, R], both multiplied by the attention factor.

    Positions may be [3, B, S], of time, row and column, where the rope has sections. `longest` is the longest sequence
    of the batch in tokens; it is a plain number so that no device is waited for.
    """
    frequencies, factor = inverse_frequencies(rope, head_dim, longest)
    # A copy that blocks would wait for all work that the device has queued.
    frequencies = frequencies.to(positions_BS.device, non_blocking=True)
    if positions_BS.ndim == 3:
        which = axes(rope, len(frequencies)).to(positions_BS.device, non_blocking=True)
        angles_SB = positions_BS.permute(2, 1, 0).float()[..., which] * frequencies
    else:
        angles_SB = positions_BS.t().float()[..., None] * frequencies
    angles = torch.cat((angles_SB, angles_SB), dim=-1)[:, :, None]
    return torch.stack((angles.cos(), angles.sin())) * factor


def axes(rope: Rope, count: int) -> Tensor:
    """Returns which position turns each of `count` frequencies: 0 time, 1 row, 2 column.

    Contiguous sections are Qwen2-VL's (arXiv:2409.12191), interleaved ones Qwen3-VL's (arXiv:2511.21631).
    """
    if not rope.sections:
        return torch.zeros(count, dtype=torch.int64)
    if not rope.interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(rope.sections))
    at = torch.arange(count)
    turn = at % 3
    return torch.where(at < 3 * torch.tensor((0, *rope.sections[1:]))[turn], turn, 0)


def rotate(x_SBHD: Tensor, table: Tensor) -> Tensor:
    """Returns x with the first R dims of each head turned by its position and the rest untouched, in x's dtype.

    Cosine and sine are rounded to x's dtype first, as transformers does.
    """
    return _Rotate.apply(x_SBHD, *table.to(x_SBHD.dtype))


class _Rotate(torch.autograd.Function):
    """The rotation, with a backward that turns back: autograd's own makes twice as many passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin.roll(sin.shape[-1] // 2, dims=-1)), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rot = cos.shape[-1]
    half = rot // 2
    out = x * cos if rot == x.shape[-1] else torch.cat((x[..., :rot] * cos, x[..., rot:]), dim=-1)
    out[..., :half].sub_(x[..., half:rot] * sin[..., :half])
    out[..., half:rot].add_(x[..., :half] * sin[..., half:])
    return out


@functools.singledispatch
def scaled_frequencies(scaling: RopeScaling, theta: float, rot: int, length: int) -> tuple[Tensor, float]:
    """Returns what `inverse_frequencies` does, for `rot` rotated dims; a new scaling registers its rule here."""
    raise no_rule(scaled_frequencies, scaling)


def _powers(theta: float, rot: int) -> Tensor:
    return theta ** (torch.arange(0, rot, 2, dtype=torch.float32) / rot)


@scaled_frequencies.register
def _(scaling: NoScaling, theta: float, rot: int, length: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(theta, rot), 1.0


@scaled_frequencies.register
def _(scaling: LinearScaling, theta: float, rot: int, length: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(theta, rot) / scaling.factor, 1.0


@scaled_frequencies.register
def _(scaling: DynamicScaling, theta: float, rot: int, length: int) -> tuple[Tensor, float]:
    if rot == 2:
        raise ValueError("dynamic rope scaling needs more than 2 rotated dims; use linear scaling or a wider head")
    stretch = scaling.factor * max(length, scaling.original) / scaling.original - (scaling.factor - 1)
    return 1.0 / _powers(theta * stretch ** (rot / (rot - 2)), rot), 1.0


@scaled_frequencies.register
def _(scaling: Llama3Scaling, theta: float, rot: int, length: int) -> tuple[Tensor, float]:
    plain = 1.0 / _powers(theta, rot)
    turns = scaling.original / (2 * math.pi / plain)
    keep = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0.0, 1.0)
    return (1 - keep) * plain / scaling.factor + keep * plain, 1.0


@scaled_frequencies.register
def _(scaling: YarnScaling, theta: float, rot: int, length: int) -> tuple[Tensor, float]:
    def dim_with(turns: float) -> float:
        return rot * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_with(scaling.beta_fast), dim_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rot - 1)
    if low == high:
        high += 0.001
    keep = 1 - ((torch.arange(rot // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    powers = _powers(theta, rot)
    frequencies = 1.0 / (scaling.factor * powers) * (1 - keep) + 1.0 / powers * keep
    return frequencies, _yarn_attention_factor(scaling)


def _yarn_weight(scaling: YarnScaling, mscale: float) -> float:
    return 0.1 * mscale * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _yarn_attention_factor(scaling: YarnScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _yarn_weight(scaling, scaling.mscale) / _yarn_weight(scaling, scaling.mscale_all_dim)
    return _yarn_weight(scaling, 1.0)


def latent_scale(rope: Rope, width: int) -> float:
    """Returns the factor on query-key products of latent attention, whose heads rotate only a part of `width` dims.

    YaRN's temperature then has to reach the other part too (`mscale_all_dim`, DeepSeek-V2's modeling_deepseek.py).
    """
    scaling, scale = rope.scaling, width**-0.5
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim:
        scale *= _yarn_weight(scaling, scaling.mscale_all_dim) ** 2
    return scale
