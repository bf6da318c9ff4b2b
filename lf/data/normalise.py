"""Statistics of robot data, and the scaling of states and actions that is made of them.

The sums are exact integers, so statistics do not depend on how the data is cut, ordered or merged: they are the true
ones, rounded once. Quantiles are those of all values (order statistics, linear in between), never means of quantiles.

A scaling is affine, y = (x - shift) / scale, for each dim:

    mean_std   shift = mean                  scale = standard deviation (of the population)
    min_max    shift = (min + max) / 2       scale = (max - min) / 2, which maps to [-1, 1]
    quantile   shift = (q01 + q99) / 2       scale = (q99 - q01) / 2, which maps the inner 98 % to [-1, 1]
    none       shift = 0                     scale = 1

A dim is constant where twice the scale is at most 1e-6 of max(1, |shift|): it gets scale 1, so it is 0 for as long as
it does not move. In `quantile`, a dim whose inner 98 % take up less than 2 % of its whole range (a switch, a joint that
hardly moves) is scaled as in `min_max`. So no value of the data is further than 101 from 0.

Shapes: N frames, T steps of a window, S actions of a chunk, D dims.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.config import from_json

Kind = Literal["none", "mean_std", "min_max", "quantile"]
"""How a feature is scaled."""

Floats = NDArray[np.float32]

CONSTANT = 1e-6
"""A dim that spreads less than this part of max(1, |shift|) is constant."""

NARROW = 0.02
"""A dim whose inner 98 % take up less than this part of its range is scaled by its range."""

_UNIT = 200  # Sums are in units of 2**-200, below the smallest float32 (2**-149).
_EXPONENTS = 300
_LOWEST = -150
_BLOCK = 1 << 18


def _finite(_: object, attribute: "attrs.Attribute[tuple[float, ...]]", value: tuple[float, ...]) -> None:
    if not all(map(math.isfinite, value)):
        raise ValueError(f"{attribute.name} = {value} must be finite; compute the normalisers from sound data")


def _positive(_: object, attribute: "attrs.Attribute[tuple[float, ...]]", value: tuple[float, ...]) -> None:
    wrong = [i for i, x in enumerate(value) if not 0 < x < math.inf]
    if wrong:
        raise ValueError(
            f"{attribute.name} of dims {wrong} is {[value[i] for i in wrong]}, and must be finite and above 0 (zero "
            "range); compute the normalisers from the data, which gives constant dims 1"
        )


@attrs.frozen(kw_only=True)
class Stats:
    """The statistics of a feature, one number a dim."""

    count: int
    """Frames, or steps of chunks, that were counted."""
    min: tuple[float, ...]
    """Smallest values."""
    max: tuple[float, ...]
    """Largest values."""
    mean: tuple[float, ...]
    """Means."""
    std: tuple[float, ...]
    """Standard deviations of the population."""
    q01: tuple[float, ...]
    """Quantiles at 0.01."""
    q99: tuple[float, ...]
    """Quantiles at 0.99."""


@attrs.frozen(kw_only=True)
class Normaliser:
    """An affine map of each dim."""

    kind: Kind
    """What it was made by."""
    shift: tuple[float, ...] = attrs.field(validator=_finite)
    """What becomes 0."""
    scale: tuple[float, ...] = attrs.field(validator=_positive)
    """What becomes 1 away from it."""

    def __attrs_post_init__(self) -> None:
        if len(self.shift) != len(self.scale):
            raise ValueError(f"shift has {len(self.shift)} dims and scale {len(self.scale)}; they must be as many")


@attrs.frozen(kw_only=True)
class Normalisers:
    """What turns raw states and actions into a model's and back: train, evaluate and serve hold the same."""

    state: Normaliser | None = None
    """That of the state; None where rows have none."""
    actions: Normaliser | None = None
    """That of the actions, or of their differences to the state; None where rows have none."""
    delta: tuple[bool, ...] = ()
    """Which dims of the actions are differences to the state of the row's frame; empty for none."""


@attrs.frozen(kw_only=True, eq=False)
class Tally:
    """What is counted in one pass: everything that statistics need but the last digits of quantiles."""

    count: int
    """Frames."""
    sums: tuple[int, ...]
    """[D] sums of x, in units of 2**-200."""
    squares: tuple[int, ...]
    """[D] sums of x * x, in units of 2**-400."""
    buckets: NDArray[np.int64]
    """[D, 65536] frames by the upper half of their ordered bits."""


def tally(values: Floats) -> Tally:
    """Returns the tally of [N, D] values. Raises ValueError for values that are not finite."""
    dims = values.shape[1]
    if not np.isfinite(values).all():
        frame, dim = np.argwhere(~np.isfinite(values))[0]
        raise ValueError(f"value {values[frame, dim]} of dim {dim} is not finite; mend or leave out its episode")
    mantissa, exponent = np.frexp(values.astype(np.float64))
    whole = np.ldexp(mantissa, 24)
    high = np.floor(whole / 4096)
    low = whole - high * 4096
    bins = (exponent - _LOWEST + np.arange(dims) * _EXPONENTS).ravel()

    def add(weights: NDArray[np.float64]) -> list[list[int]]:
        # Every weight is an integer below 2**25, so up to 2**28 of them add up exactly in float64.
        sums = np.bincount(bins, weights.ravel(), dims * _EXPONENTS)
        return [[int(x) for x in row] for row in sums.reshape(dims, _EXPONENTS)]

    first, squares = add(whole), [add(high * high), add(2 * high * low), add(low * low)]
    spread = (np.arange(dims, dtype=np.int64) << 16) + (_ordered(values) >> np.uint32(16)).astype(np.int64)
    return Tally(
        count=len(values),
        sums=tuple(sum(x << (e + _LOWEST - 24 + _UNIT) for e, x in enumerate(row) if x) for row in first),
        squares=tuple(
            sum(
                x << (2 * (e + _LOWEST - 24 + _UNIT) + shift)
                for shift, part in zip((24, 12, 0), squares, strict=True)
                for e, x in enumerate(part[dim])
                if x
            )
            for dim in range(dims)
        ),
        buckets=np.bincount(spread.ravel(), minlength=dims << 16).reshape(dims, 1 << 16).astype(np.int64),
    )


def merge(left: Tally, right: Tally) -> Tally:
    """Returns the tally of the frames of both."""
    return Tally(
        count=left.count + right.count,
        sums=tuple(a + b for a, b in zip(left.sums, right.sums, strict=True)),
        squares=tuple(a + b for a, b in zip(left.squares, right.squares, strict=True)),
        buckets=left.buckets + right.buckets,
    )


def compute_stats(read: Callable[[], Iterable[Floats]], where: str) -> Stats:
    """Returns the statistics of the frames that `read` gives, in blocks [N, D]; it is called twice.

    Memory is that of a block and of the tally. Raises ValueError with `where` when there is no frame.
    """
    total: Tally | None = None
    for block in _blocks(read()):
        part = tally(block)
        total = part if total is None else merge(total, part)
    if total is None:
        raise ValueError(f"{where} has no frame to compute statistics from; give it samples")
    n = total.count
    means = [Fraction(x, n << _UNIT) for x in total.sums]
    variances = [Fraction(x, n << (2 * _UNIT)) - mean * mean for x, mean in zip(total.squares, means, strict=True)]
    low, q01, q99, high = _quantiles(total, _blocks(read()), (0.0, 0.01, 0.99, 1.0))
    return Stats(
        count=n,
        min=low,
        max=high,
        mean=tuple(float(x) for x in means),
        std=tuple(math.sqrt(x) for x in variances),
        q01=q01,
        q99=q99,
    )


def _blocks(parts: Iterable[Floats]) -> Iterator[Floats]:
    """Yields blocks that are large enough to be counted at little cost, and small enough to be held."""
    held: list[Floats] = []
    for part in parts:
        held.extend(part[at : at + _BLOCK] for at in range(0, len(part), _BLOCK))
        if sum(map(len, held)) >= _BLOCK:
            yield np.concatenate(held)
            held = []
    if held:
        yield np.concatenate(held)


def _ordered(values: Floats) -> NDArray[np.uint32]:
    """Returns integers in the order of the values; zeros of both signs are one value."""
    bits = (values.astype(np.float32) + np.float32(0)).view(np.uint32)
    return np.where(bits >> np.uint32(31), ~bits, bits | np.uint32(1 << 31))


def _value(ordered: int) -> float:
    bits = ordered & 0x7FFFFFFF if ordered >> 31 else ~ordered & 0xFFFFFFFF
    return float(np.array(bits, np.uint32).view(np.float32))


def _quantiles(total: Tally, blocks: Iterable[Floats], at: Sequence[float]) -> list[tuple[float, ...]]:
    places = [(total.count - 1) * q for q in at]
    ranks = sorted({rank for place in places for rank in (math.floor(place), math.ceil(place))})
    ends = np.cumsum(total.buckets, axis=1)
    wanted = np.stack([np.searchsorted(row, ranks, side="right") for row in ends])
    fine = {
        (dim, int(bucket)): np.zeros(1 << 16, np.int64) for dim, row in enumerate(wanted) for bucket in np.unique(row)
    }
    for block in blocks:
        ordered = _ordered(block)
        upper = ordered >> np.uint32(16)
        for (dim, bucket), counts in fine.items():
            lower = ordered[upper[:, dim] == bucket, dim] & np.uint32(0xFFFF)
            counts += np.bincount(lower, minlength=1 << 16)

    def order_statistic(dim: int, rank: int) -> float:
        bucket = int(np.searchsorted(ends[dim], rank, side="right"))
        before = int(ends[dim, bucket - 1]) if bucket else 0
        lower = int(np.searchsorted(np.cumsum(fine[dim, bucket]), rank - before, side="right"))
        return _value(bucket << 16 | lower)

    def quantile(dim: int, place: float) -> float:
        below, above = order_statistic(dim, math.floor(place)), order_statistic(dim, math.ceil(place))
        return below + (above - below) * (place - math.floor(place))

    return [tuple(quantile(dim, place) for dim in range(len(ends))) for place in places]


def make_normaliser(kind: Kind, stats: Stats) -> Normaliser:
    """Returns the scaling of a kind; the formulas and the rule for constant dims are at the top of this file."""

    def middle(low: Sequence[float], high: Sequence[float]) -> list[tuple[float, float]]:
        return [((a + b) / 2, (b - a) / 2) for a, b in zip(low, high, strict=True)]

    ranges = middle(stats.min, stats.max)
    if kind == "none":
        pairs = [(0.0, 1.0)] * len(ranges)
    elif kind == "mean_std":
        pairs = list(zip(stats.mean, stats.std, strict=True))
    elif kind == "min_max":
        pairs = ranges
    else:
        inner = middle(stats.q01, stats.q99)
        pairs = [part if part[1] >= NARROW * whole[1] else whole for part, whole in zip(inner, ranges, strict=True)]
    return Normaliser(
        kind=kind,
        shift=tuple(shift for shift, _ in pairs),
        scale=tuple(1.0 if 2 * scale <= CONSTANT * max(1.0, abs(shift)) else scale for shift, scale in pairs),
    )


def normalise(norm: Normaliser | None, values: Floats, where: str) -> Floats:
    """Returns scaled values [..., D] in float32. Raises ValueError without a normaliser, or with one of other dims."""
    shift, scale = _pair(norm, values, where)
    return ((values.astype(np.float64) - shift) / scale).astype(np.float32)


def restore(norm: Normaliser | None, values: Floats, where: str) -> Floats:
    """Returns what `normalise` was given [..., D]; raises as it does."""
    shift, scale = _pair(norm, values, where)
    return (values.astype(np.float64) * scale + shift).astype(np.float32)


def encode_actions(norms: Normalisers, actions: Floats, state: Floats | None) -> Floats:
    """Returns actions [..., S, D] as a model sees them; `state` [..., E] is the raw one of the row's frame."""
    return normalise(norms.actions, to_delta(actions, state, norms.delta), "actions")


def decode_actions(norms: Normalisers, actions: Floats, state: Floats | None) -> Floats:
    """Returns raw actions [..., S, D] of a model's; `state` [..., E] is the raw one they were asked for at."""
    raw = restore(norms.actions, actions, "actions")
    return raw if not any(norms.delta) else raw + _base(raw, state, norms.delta)


def to_delta(actions: Floats, state: Floats | None, delta: Sequence[bool]) -> Floats:
    """Returns actions [..., S, D] whose dims in `delta` are differences to `state` [..., E], dim by dim."""
    return actions if not any(delta) else actions - _base(actions, state, delta)


def _base(actions: Floats, state: Floats | None, delta: Sequence[bool]) -> Floats:
    last = max((i for i, on in enumerate(delta) if on), default=0)
    dims = 0 if state is None else state.shape[-1]
    if len(delta) != actions.shape[-1] or state is None or dims <= last:
        raise ValueError(
            f"delta = {tuple(delta)} needs {len(delta)} dims of actions and at least {last + 1} of the state, and "
            f"there are {actions.shape[-1]} and {dims}; say True only for dims that the state has, too"
        )
    base = np.zeros((*state.shape[:-1], 1, len(delta)), np.float32)
    on = np.flatnonzero(np.asarray(delta))
    base[..., 0, on] = state[..., on]
    return base


def _pair(norm: Normaliser | None, values: Floats, where: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if norm is None:
        raise ValueError(
            f"there are no statistics of the {where}; take the normalisers that the model was trained with"
        )
    if values.shape[-1:] != (len(norm.shift),):
        raise ValueError(
            f"{where} of {values.shape[-1]} dims cannot be scaled by statistics of {len(norm.shift)}; "
            "take the normalisers of this very robot"
        )
    return np.asarray(norm.shift), np.asarray(norm.scale)


def read_normalisers(path: Path) -> Normalisers:
    """Returns the normalisers that `lf.config.to_json` wrote to a file; raises ValueError naming what is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} holds no normalisers that can be read ({error}); give a JSON file of them") from error
    found = from_json(text, source=str(path), kind=Normalisers)
    assert isinstance(found, Normalisers)
    return found


def check_normalisers(norms: Normalisers, *, state: int, actions: int, where: str) -> None:
    """Raises ValueError where rows of so many dims (0 for none) lack statistics, or have some of other dims."""
    for name, norm, dims in (("state", norms.state, state), ("actions", norms.actions, actions)):
        found = None if norm is None else len(norm.shift)
        if dims and found is None:
            raise ValueError(f"{where} has no statistics of the {name}, and rows have {dims} dims of it; add them")
        if dims and found != dims:
            raise ValueError(f"{where} has statistics of {found} dims of the {name}, and rows have {dims}")
    if norms.delta and len(norms.delta) != actions:
        raise ValueError(
            f"{where}.delta has {len(norms.delta)} entries, and the actions {actions} dims; give one a dim"
        )


def fit(
    kinds: tuple[Kind, Kind],
    delta: tuple[bool, ...],
    state: Sequence[Callable[[], Iterable[Floats]]],
    actions: Sequence[Callable[[], Iterable[Floats]]],
    where: str,
) -> Normalisers:
    """Returns the normalisers of data in several parts, each frame counting once.

    `kinds` are those of state and actions; `state` and `actions` give the blocks [N, D] of each part, and are empty
    where rows have none. Raises ValueError for actions that never change.
    """

    def one(kind: Kind, parts: Sequence[Callable[[], Iterable[Floats]]], name: str) -> Normaliser | None:
        if not parts:
            return None
        stats = compute_stats(lambda: itertools.chain.from_iterable(part() for part in parts), f"{where}: the {name}")
        if name == "actions" and stats.count > 1 and stats.min == stats.max:
            raise ValueError(
                f"{where}: all {len(stats.min)} dims of the actions have zero range over {stats.count} frames: there "
                "is no motion to learn; leave the dataset out, or name the feature that moves"
            )
        return make_normaliser(kind, stats)

    return Normalisers(state=one(kinds[0], state, "state"), actions=one(kinds[1], actions, "actions"), delta=delta)
