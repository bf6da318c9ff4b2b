"""Seconds of some work by kind, and the rates of a device that measured times tell."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Work = Mapping[str, float]
"""How much there is of each kind of work: `lf.models.work` counts it."""
Rates = Mapping[str, float]
"""Seconds of a unit of each kind; others cost nothing."""


def even_rates(tflops: float = 1.0) -> dict[str, float]:
    """Returns the rates of a device that does every operation equally fast: what to take before a measurement."""
    return dict.fromkeys(("matrices", "experts", "causal", "window", "towers"), 1e-12 / tflops)


def seconds(rates: Rates, work: Work) -> float:
    """Returns how long some work takes."""
    return sum(rates.get(kind, 0.0) * amount for kind, amount in work.items())


def fit(work: Sequence[Sequence[Work]], measured: Sequence[float]) -> dict[str, float]:
    """Returns the rates that explain measured times best in the sense of least squares, none below 0.

    `work` is that of each rank, for each time: a time is that of the slowest of its ranks, which wait for each other.
    Give one rank where each is timed alone. Which rank is slowest follows from the rates, so they are fitted again
    until it does not change. Raises ValueError where the measurements cannot tell kinds apart.
    """
    if len(work) != len(measured) or len({len(ranks) for ranks in work}) != 1:
        raise ValueError(
            f"{len(measured)} times for {len(work)} steps of {sorted({len(ranks) for ranks in work})} ranks; give a "
            "time for each step, and every step the same ranks"
        )
    kinds = sorted({kind for ranks in work for one in ranks for kind, amount in one.items() if amount})
    table = np.array([[[one.get(kind, 0.0) for kind in kinds] for one in ranks] for ranks in work])
    scale, times = table.mean(axis=(0, 1)), np.array(measured, np.float64)
    rates, slowest = np.ones(len(kinds)), np.full(len(work), -1)
    for _ in range(50):
        found = (table / scale @ rates).argmax(axis=1)
        if np.array_equal(found, slowest):
            break
        slowest = found
        rows = table[np.arange(len(work)), slowest] / scale
        if np.linalg.matrix_rank(rows) < len(kinds):
            raise ValueError(
                f"{len(work)} measurements do not tell the costs of {', '.join(kinds)} apart; measure packs of more "
                "different lengths, or leave out kinds that always grow together"
            )
        rates = _least_squares(rows, times)
    return dict(zip(kinds, (rates / scale).tolist(), strict=True))


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
