"""Orders as functions of integers: permutations, and how the rows of a mixture alternate between its parts.

Nothing here depends on a generator's state or on a library's random stream, so an order stays what it is for ever.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import isfinite, lcm

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the splitmix64 output of each state `x`, elementwise, modulo 2**64.

    A bijection on 64-bit integers (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    """
    z = x + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def hash_keys(*keys: int) -> int:
    """Returns a 64-bit hash of the integers `keys`; their order matters."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = splitmix64(state ^ splitmix64(np.array([key % 2**64], np.uint64)))
    return int(state[0])


def permutation(n: int, *keys: int) -> NDArray[np.int64]:
    """Returns a permutation of `range(n)` that `keys` (seed, epoch, purpose ...) alone decide.

    Entry i is sorted by `splitmix64(hash(keys) + i * golden)`. No two tie, since splitmix64 is a bijection.
    """
    states = np.arange(n, dtype=np.uint64) * _GOLDEN + np.array([hash_keys(*keys)], np.uint64)
    return np.argsort(splitmix64(states)).astype(np.int64)


def integer_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns integers in the exact proportions of the decimal numbers `weights`, 0.1 to 0.3 being 1 to 3."""
    if not all(map(isfinite, weights)):
        raise ValueError(f"the weights of a mixture are {tuple(weights)}; they must be finite numbers")
    fractions = [Fraction(repr(float(weight))) for weight in weights]
    unit = lcm(*(fraction.denominator for fraction in fractions))
    return tuple(int(fraction * unit) for fraction in fractions)


def deal(k: int, weights: Sequence[int]) -> tuple[int, int]:
    """Returns which part row `k` of a mixture belongs to, and how many earlier rows that part has.

    The parts are halved again and again. At each halving the left half has round(k * share) of the first k rows, in
    exact integers (Bresenham's line), so any row is found in O(parts) without looking at another one. After K rows a
    part's count differs from K * weight / sum(weights) by at most half the number of halvings: 0.5 for two parts, 1 for
    up to four, 1.5 for up to eight.
    """
    low, high = 0, len(weights)
    while high - low > 1:
        middle = (low + high) // 2
        left, total = sum(weights[low:middle]), sum(weights[low:high])
        before, after = ((2 * rows * left + total) // (2 * total) for rows in (k, k + 1))
        if after > before:
            high, k = middle, before
        else:
            low, k = middle, k - before
    return low, k
