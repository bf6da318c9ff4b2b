"""Flow matching: where the times of training come from, what each counts, and the way from noise to a sample.

A time is the noise's share sigma, from 0 (data) to 1 (noise): x = (1 - sigma) * data + sigma * noise, and the target is
noise - data (arXiv:2209.03003). Times are Python floats until they become fp32 tensors; nothing here is rounded to
less, so a thousand times stay a thousand.
"""

import functools
import math
from statistics import NormalDist
from typing import Literal

import attrs
import torch
from attrs.validators import and_, ge, gt, le, lt
from torch import Tensor

from lf.models.spec import no_rule

Weighting = Literal["none", "sigma_sqrt", "cosmap", "bell", "min_snr"]
"""What the squared error at a time counts: `none` one; `sigma_sqrt` and `cosmap` as in arXiv:2403.03206; `bell` a
Gaussian around the middle that is 0 at both ends and 1 on average (DiffSynth's); `min_snr` that of arXiv:2303.09556."""

_BELL_END = math.exp(-0.5)
_BELL_MEAN = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - _BELL_END


@attrs.frozen(kw_only=True)
class Sampler:
    """How times are distributed before they are shifted: the type says which way."""


@attrs.frozen(kw_only=True)
class Uniform(Sampler):
    """All times alike."""


@attrs.frozen(kw_only=True)
class LogitNormal(Sampler):
    """The logistic function of normal draws (arXiv:2403.03206)."""

    mean: float = 0.0
    """Mean of the normal draws; more than 0 draws more noise."""
    std: float = attrs.field(default=1.0, validator=gt(0.0))
    """Standard deviation of the normal draws."""


@attrs.frozen(kw_only=True)
class Mode(Sampler):
    """Heavy tails around a mode in the middle (arXiv:2403.03206)."""

    scale: float = attrs.field(default=1.29, validator=and_(ge(-1.0), le(2.0 / (math.pi - 2.0))))
    """How much the middle is preferred, where the map stays monotone; less than 0 prefers the ends."""


@attrs.frozen(kw_only=True)
class Shift:
    """How times move towards noise: sigma becomes f * sigma / (1 + (f - 1) * sigma), and the type gives f."""


@attrs.frozen(kw_only=True)
class ConstantShift(Shift):
    """One factor for all samples."""

    factor: float = attrs.field(default=1.0, validator=gt(0.0))
    """The factor; 1 moves nothing."""


@attrs.frozen(kw_only=True)
class TokenShift(Shift):
    """A factor exp(m) that grows with a sample's tokens: m is a line through two points (arXiv:2403.03206, Flux)."""

    tokens: tuple[int, int] = (256, 4096)
    """Tokens of the two points."""
    log_factor: tuple[float, float] = (0.5, 1.15)
    """m at the two points."""

    def __attrs_post_init__(self) -> None:
        if not 0 < self.tokens[0] < self.tokens[1]:
            raise ValueError(f"shift.tokens = {self.tokens} must rise from above 0; correct it")


@attrs.frozen(kw_only=True)
class Flow:
    """How a model is trained to denoise."""

    sampler: Sampler = Uniform()
    """How times are distributed."""
    shift: Shift = ConstantShift()
    """How they move towards noise."""
    low: float = attrs.field(default=0.0, validator=and_(ge(0.0), lt(1.0)))
    """Least time; what is drawn is the distribution between `low` and `high`."""
    high: float = attrs.field(default=1.0, validator=and_(gt(0.0), le(1.0)))
    """Largest time."""
    weighting: Weighting = "none"
    """What the squared error at a time counts."""
    gamma: float = attrs.field(default=5.0, validator=gt(0.0))
    """Bound on the signal-to-noise ratio of `min_snr`."""
    caption_dropout: float = attrs.field(default=0.0, validator=and_(ge(0.0), lt(1.0)))
    """Part of the samples that see the empty caption, for guidance."""

    def __attrs_post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"flow.low = {self.low} must be below flow.high = {self.high}; change one of them")


@attrs.frozen(kw_only=True)
class Sampling:
    """How samples are made."""

    steps: int = attrs.field(default=50, validator=ge(1))
    """Euler steps."""
    guidance: float = attrs.field(default=5.0, validator=ge(1.0))
    """Weight of the caption against the empty one (arXiv:2207.12598); 1 needs no empty caption."""
    shift: Shift = ConstantShift(factor=5.0)
    """How the times of the steps move towards noise."""
    terminal: float = attrs.field(default=0.0, validator=and_(ge(0.0), lt(1.0)))
    """Time that the last step starts from, to which the others are stretched; 0 leaves them."""
    keep_norm: bool = False
    """Whether the guided velocity of a token is as long as that with the caption."""


def high_part(flow: Flow, boundary: float) -> Flow:
    """Returns the flow of the expert of times from `boundary` on."""
    return attrs.evolve(flow, low=_inside(boundary))


def low_part(flow: Flow, boundary: float) -> Flow:
    """Returns the flow of the expert of times below `boundary`."""
    return attrs.evolve(flow, high=_inside(boundary))


def _inside(boundary: float) -> float:
    if not 0.0 < boundary < 1.0:
        raise ValueError(
            f"boundary = {boundary} must lie between 0 and 1: it is the noise's share where the experts meet, 0.875 in "
            "Wan2.2 T2V and 0.9 in I2V"
        )
    return boundary


@functools.singledispatch
def quantile(sampler: Sampler, part: float) -> float:
    """Returns the unshifted time below which a part (0 to 1) of the draws lie."""
    raise no_rule(quantile, sampler)


@quantile.register
def _(sampler: Uniform, part: float) -> float:
    return part


@quantile.register
def _(sampler: LogitNormal, part: float) -> float:
    if not 0.0 < part < 1.0:
        return part
    x = NormalDist(sampler.mean, sampler.std).inv_cdf(part)
    return 1.0 / (1.0 + math.exp(-x)) if x > -700.0 else 0.0


@quantile.register
def _(sampler: Mode, part: float) -> float:
    rest = 1.0 - part
    return 1.0 - rest - sampler.scale * (math.cos(math.pi * rest / 2.0) ** 2 - 1.0 + rest)


def part_below(sampler: Sampler, time: float) -> float:
    """Returns the part of the draws below an unshifted time: the inverse of `quantile`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if quantile(sampler, middle) < time else (low, middle)
    return low if time < 1.0 else 1.0


@functools.singledispatch
def shift_factor(shift: Shift, tokens: int) -> float:
    """Returns the factor by which the times of a sample of so many tokens move."""
    raise no_rule(shift_factor, shift)


@shift_factor.register
def _(shift: ConstantShift, tokens: int) -> float:
    return shift.factor


@shift_factor.register
def _(shift: TokenShift, tokens: int) -> float:
    (a, b), (x, y) = shift.tokens, shift.log_factor
    return math.exp(x + (y - x) * (tokens - a) / (b - a))


def shifted(time: float, factor: float) -> float:
    """Returns a time moved towards noise."""
    return factor * time / (1.0 + (factor - 1.0) * time)


def time_of(flow: Flow, tokens: int, part: float) -> float:
    """Returns the time of a uniform draw `part` from 0 to 1, for a sample of so many tokens.

    It is the distribution of `flow` given that the time lies between `low` and `high`, not one of its own between them.
    """
    factor = shift_factor(flow.shift, tokens)
    low, high = (part_below(flow.sampler, shifted(edge, 1.0 / factor)) for edge in (flow.low, flow.high))
    drawn = shifted(quantile(flow.sampler, low + (high - low) * part), factor)
    return min(max(drawn, flow.low), flow.high)


def weight_of(flow: Flow, time: float) -> float:
    """Returns what the squared error of the velocity counts at a time.

    `min_snr` bounds the weight of the error of the data, min(SNR, gamma) with SNR = ((1 - sigma) / sigma)^2; that error
    is sigma times the velocity's.
    """
    if flow.weighting == "sigma_sqrt":
        return max(time, 1e-3) ** -2.0
    if flow.weighting == "cosmap":
        return 2.0 / (math.pi * (1.0 - 2.0 * time + 2.0 * time**2))
    if flow.weighting == "bell":
        return (math.exp(-2.0 * (time - 0.5) ** 2) - _BELL_END) / _BELL_MEAN
    if flow.weighting == "min_snr":
        return min((1.0 - time) ** 2, flow.gamma * time**2)
    return 1.0


def noisy(data: Tensor, noise: Tensor, time: Tensor) -> Tensor:
    """Returns the straight path from data (time 0) to noise (time 1); at time 0 it is the data to the bit."""
    return (1.0 - time) * data + time * noise


def schedule(sampling: Sampling, tokens: int) -> tuple[float, ...]:
    """Returns the times of Euler steps, from 1 to 0, for samples of so many tokens."""
    factor = shift_factor(sampling.shift, tokens)
    times = [shifted(1.0 - i / sampling.steps, factor) for i in range(sampling.steps)]
    if sampling.terminal and len(times) > 1:
        stretch = (1.0 - sampling.terminal) / (1.0 - times[-1])
        times = [1.0 - (1.0 - time) * stretch for time in times]
    return (*times, 0.0)


def time_embedding(time: Tensor, width: int) -> Tensor:
    """Returns cosines, then sines, of times of 0 to 1000 at frequencies 10000^(-2i / width): fp32 [..., width].

    It is computed in fp64: at a frequency of 1, fp32 would leave three decimals of an angle of a thousand.
    """
    half = width // 2
    steps = torch.arange(half, dtype=torch.float64, device=time.device)
    angle = time[..., None].double() * torch.exp(-math.log(10000.0) / half * steps)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float()
