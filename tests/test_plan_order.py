"""Orders of rows are permutations that never change, and mixtures keep their proportions."""

from collections import Counter
from math import ceil, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf.plan.order import deal, hash_keys, integer_weights, permutation, splitmix64

quick = settings(max_examples=50, derandomize=True, deadline=None)


def test_splitmix64_gives_the_published_stream() -> None:
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = np.array([1234567], np.uint64) + np.arange(3, dtype=np.uint64) * golden
    assert splitmix64(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_orders_are_what_they_always_were() -> None:
    assert permutation(10, 1, 2).tolist() == [7, 5, 2, 8, 0, 6, 3, 9, 1, 4]
    assert permutation(0, 1).tolist() == []
    assert hash_keys(1, 2) != hash_keys(2, 1)


@quick
@given(st.integers(0, 300), st.lists(st.integers(0, 2**70), max_size=4))
def test_permutation_holds_every_index_once(n: int, keys: list[int]) -> None:
    order = permutation(n, *keys)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))
    assert permutation(n, *keys).tolist() == order.tolist()


def test_permutations_are_spread_evenly() -> None:
    counts = Counter(tuple(permutation(4, seed, epoch).tolist()) for seed in range(48) for epoch in range(100))
    assert len(counts) == 24
    chi2 = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert chi2 < 49.7  # 0.999 quantile, 23 degrees of freedom


@quick
@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9))
def test_deal_counts_up_in_each_part_and_keeps_proportions(weights: list[float]) -> None:
    shares = integer_weights(weights)
    total, counts = sum(shares), [0] * len(shares)
    bound = ceil(log2(len(shares))) / 2
    for k in range(400):
        part, index = deal(k, shares)
        assert index == counts[part]
        counts[part] += 1
        assert max(abs(count * total - (k + 1) * share) for count, share in zip(counts, shares, strict=True)) <= (
            bound * total
        )


def test_deal_is_exact_far_out() -> None:
    shares = integer_weights([0.1, 0.3])
    assert shares == (1, 3)
    assert Counter(deal(k, shares)[0] for k in range(10**18, 10**18 + 400)) == {0: 100, 1: 300}
    assert deal(4 * 10**18, shares)[1] in (10**18, 3 * 10**18)


def test_weights_must_be_finite() -> None:
    with pytest.raises(ValueError, match="finite"):
        integer_weights([1.0, float("inf")])
