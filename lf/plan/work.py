"""Seconds of some work by kind, and the rates of a device that measured times tell."""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from attrs.validators import ge
from numpy.typing import NDArray

Work = Mapping[str, float]
"""How much there is of each kind of work: `lf.models.work` counts it."""


@attrs.frozen(kw_only=True)
class Rates:
    """What work takes, in seconds of a unit of each kind; a kind of 0 costs nothing."""

    steps: float = attrs.field(default=0.0, validator=ge(0.0))
    """A step, whatever its rows."""
    calls: float = attrs.field(default=0.0, validator=ge(0.0))
    """A row, an image or a video, however large."""
    matrices: float = attrs.field(default=0.0, validator=ge(0.0))
    """An operation of the matrices that every token goes through."""
    experts: float = attrs.field(default=0.0, validator=ge(0.0))
    """An operation of routed experts."""
    causal: float = attrs.field(default=0.0, validator=ge(0.0))
    """An operation of causal attention's pairs."""
    window: float = attrs.field(default=0.0, validator=ge(0.0))
    """The same of attention within a window."""
    full: float = attrs.field(default=0.0, validator=ge(0.0))
    """The same of attention to everything."""
    patches: float = attrs.field(default=0.0, validator=ge(0.0))
    """A patch of an image or a video."""
    towers: float = attrs.field(default=0.0, validator=ge(0.0))
    """An operation of towers and projectors."""


def even_rates() -> Rates:
    """Returns the rates of a device that does 1e12 operations of each kind a second: what to take unmeasured."""
    each = 1e-12
    return Rates(matrices=each, experts=each, causal=each, window=each, full=each, towers=each)


def seconds(rates: Rates, work: Work) -> float:
    """Returns how long some work takes; raises ValueError for a kind that `Rates` does not have."""
    kinds = attrs.asdict(rates)
    if unknown := sorted(work.keys() - kinds.keys()):
        told = f"{', '.join(unknown)}, which are none of {', '.join(kinds)}"
        raise ValueError(f"work of the kinds {told}; use one of them")
    return sum(kinds[kind] * amount for kind, amount in work.items())


def fit(work: Sequence[Sequence[Work]], measured: Sequence[float]) -> Rates:
    """Returns the rates that explain measured times best in the sense of least squares, none below 0.

    `work` is that of each rank, for each time: a time is that of the slowest of its ranks, which wait for each other.
    Give one rank where each is timed alone. Which rank is slowest follows from the rates, so they are fitted again
    until it does not change. Kinds that always grow together get one rate. Raises ValueError where the measurements
    cannot tell others apart.
    """
    if len(work) != len(measured) or len({len(ranks) for ranks in work}) != 1:
        raise ValueError(
            f"{len(measured)} times for {len(work)} steps of {sorted({len(ranks) for ranks in work})} ranks; give a "
            "time for each step, and every step the same ranks"
        )
    kinds = sorted({kind for ranks in work for one in ranks for kind, amount in one.items() if amount})
    every = np.array([[[one.get(kind, 0.0) for kind in kinds] for one in ranks] for ranks in work])
    means = every.mean(axis=(0, 1))
    same = _first_alike(every / means)
    heads = sorted(set(same))
    scale = np.array([means[np.equal(same, head)].sum() for head in heads])
    table, times = every[..., heads] / means[heads], np.array(measured, np.float64)
    rates, slowest = np.ones(len(heads)), np.full(len(work), -1)
    for _ in range(50):
        found = (table @ rates).argmax(axis=1)
        if np.array_equal(found, slowest):
            break
        slowest = found
        rows = table[np.arange(len(work)), slowest]
        if np.linalg.matrix_rank(rows) < len(heads):
            raise ValueError(
                f"{len(work)} measurements do not tell the costs of {', '.join(kinds[k] for k in heads)} apart; "
                "measure rows of more different lengths, or more of them"
            )
        rates = _least_squares(rows, times)
    each = dict(zip(heads, (rates / scale).tolist(), strict=True))
    return Rates(**{kind: each[head] for kind, head in zip(kinds, same, strict=True)})


def _first_alike(table: NDArray[np.float64]) -> list[int]:
    """Returns the first column that equals each column of the last axis."""
    kinds = range(table.shape[-1])
    return [next(j for j in kinds if np.allclose(table[..., j], table[..., k])) for k in kinds]


def _least_squares(table_NK: NDArray[np.float64], seconds_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the least squares solution without negative entries (Lawson and Hanson, 1974, chapter 23)."""
    kinds = table_NK.shape[1]
    x, free = np.zeros(kinds), np.zeros(kinds, bool)
    close = 1e-10 * np.abs(table_NK.T @ seconds_N).max()
    while not free.all():
        slope = np.where(free, -np.inf, table_NK.T @ (seconds_N - table_NK @ x))
        if slope.max() <= close:
            break
        free[slope.argmax()] = True
        while True:
            trial = np.zeros(kinds)
            trial[free] = np.linalg.lstsq(table_NK[:, free], seconds_N, rcond=None)[0]
            low = free & (trial <= 0)
            if not low.any():
                break
            x = x + (x[low] / (x[low] - trial[low])).min() * (trial - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = trial
    return x
