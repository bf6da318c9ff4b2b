"""Statistics are exact however the data is cut, and every scaling can be undone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf.config import to_json
from lf.data.normalise import (
    Kind,
    Normaliser,
    Normalisers,
    check_normalisers,
    compute_stats,
    decode_actions,
    encode_actions,
    fit,
    make_normaliser,
    merge,
    normalise,
    read_normalisers,
    restore,
    tally,
)

KINDS: tuple[Kind, ...] = ("none", "mean_std", "min_max", "quantile")
Array = np.ndarray[Any, np.dtype[np.float32]]

floats = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 1.0, 1e-44, -3e38])


@st.composite
def cut_data(draw: st.DrawFn) -> tuple[Array, list[Array]]:
    """[N, 2] values, and the same in another order and in pieces."""
    rows = draw(st.lists(st.tuples(floats, floats), min_size=1, max_size=30))
    mixed = draw(st.permutations(rows))
    cuts = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    whole = np.array(rows, np.float32).reshape(-1, 2)
    return whole, np.split(np.array(mixed, np.float32).reshape(-1, 2), cuts)


@settings(max_examples=40, deadline=None)
@given(cut_data())
def test_statistics_do_not_depend_on_cuts_and_order_and_are_those_of_numpy(data: tuple[Array, list[Array]]) -> None:
    whole, pieces = data
    stats = compute_stats(lambda: [whole], "x")
    assert stats == compute_stats(lambda: [piece for piece in pieces if len(piece)], "x")
    wide = whole.astype(np.float64)
    scale = np.abs(wide).max(0) + 1e-300
    assert stats.count == len(whole)
    assert stats.min == tuple(wide.min(0) + 0.0)
    assert stats.max == tuple(wide.max(0) + 0.0)
    for name, value in (
        ("mean", wide.mean(0)),
        ("q01", np.quantile(wide, 0.01, 0)),
        ("q99", np.quantile(wide, 0.99, 0)),
    ):
        assert np.all(np.abs(np.array(getattr(stats, name)) - value) <= 1e-12 * scale), name
    assert np.all(np.abs(np.array(stats.std) - (wide / scale).std(0) * scale) <= 1e-7 * scale)


def test_merged_tallies_are_the_tally_of_all() -> None:
    values = np.random.default_rng(0).standard_normal((300, 3)).astype(np.float32)
    one, both = tally(values), merge(tally(values[:7]), tally(values[7:]))
    assert (one.count, one.sums, one.squares) == (both.count, both.sums, both.squares)
    assert (one.buckets == both.buckets).all()


def test_quantiles_of_parts_are_not_averaged() -> None:
    parts = [np.zeros((99, 1), np.float32), np.arange(101, dtype=np.float32)[:, None]]
    stats = compute_stats(lambda: parts, "x")
    assert stats.q99 == (float(np.quantile(np.concatenate(parts).astype(np.float64), 0.99)),)
    assert stats.q99 != (np.mean([np.quantile(part, 0.99) for part in parts]),)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_no_statistics(value: float) -> None:
    with pytest.raises(ValueError, match="of dim 1 is not finite"):
        compute_stats(lambda: [np.array([[0.0, value]], np.float32)], "x")


def test_no_frame_has_no_statistics() -> None:
    with pytest.raises(ValueError, match="the state has no frame"):
        compute_stats(list, "the state")


def odd_data() -> Array:
    """[N, D]: plain, constant, of range 1e-7, with an outlier, a gripper, one that hardly moves, one far off."""
    rng = np.random.default_rng(1)
    n = 1000
    plain = rng.standard_normal(n)
    outlier = np.where(np.arange(n) == 3, 1e6, plain)
    gripper = np.where(np.arange(n) < 4, 1.0, 0.0)
    hardly = np.where(np.arange(n) < 4, 3.0, rng.uniform(0, 1e-4, n))
    far = 1e4 + rng.uniform(0, 1e-4, n)
    return np.stack([plain, np.full(n, 5.0), rng.uniform(0, 1e-7, n), outlier, gripper, hardly, far], 1).astype(
        np.float32
    )


@pytest.mark.parametrize("kind", KINDS)
def test_odd_dims_stay_bounded_and_come_back(kind: Kind) -> None:
    values = odd_data()
    norm = make_normaliser(kind, compute_stats(lambda: [values], "x"))
    scaled = normalise(norm, values, "x")
    assert np.isfinite(scaled).all()
    if kind != "none":
        assert np.abs(scaled).max() <= 101
        assert (scaled[:, 1] == 0).all()
        assert norm.scale[1] == norm.scale[2] == norm.scale[6] == 1.0
    if kind == "min_max":
        assert scaled[:, 0].min() == pytest.approx(-1)
        assert scaled[:, 0].max() == pytest.approx(1)
    if kind == "quantile":
        assert set(scaled[:, 4]) == {-1.0, 1.0}
        assert np.mean(np.abs(scaled[:, 0]) <= 1) == pytest.approx(0.98)
    step = np.array(norm.scale) * np.spacing(np.abs(scaled).max(0)) + np.spacing(np.abs(values).max(0))
    assert np.all(np.abs(restore(norm, scaled, "x") - values) <= step)


def test_a_dim_that_was_constant_may_move_later() -> None:
    norm = make_normaliser("mean_std", compute_stats(lambda: [np.full((9, 1), 2.0, np.float32)], "x"))
    assert normalise(norm, np.array([2.5], np.float32), "x") == 0.5


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_not_above_zero_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match=r"scale of dims \[1\] is .*zero range"):
        Normaliser(kind="min_max", shift=(0.0, 0.0), scale=(1.0, scale))


def test_absent_and_foreign_statistics_are_errors() -> None:
    norm = Normaliser(kind="none", shift=(0.0, 0.0), scale=(1.0, 1.0))
    with pytest.raises(ValueError, match="no statistics of the state"):
        normalise(None, np.zeros(2, np.float32), "state")
    with pytest.raises(ValueError, match="3 dims cannot be scaled by statistics of 2"):
        normalise(norm, np.zeros(3, np.float32), "state")
    with pytest.raises(ValueError, match=r"run\.json has no statistics of the actions, and rows have 2"):
        check_normalisers(Normalisers(state=norm), state=2, actions=2, where="run.json")
    with pytest.raises(ValueError, match="statistics of 2 dims of the actions, and rows have 7"):
        check_normalisers(Normalisers(actions=norm), state=0, actions=7, where="run.json")


def test_actions_that_never_change_are_refused() -> None:
    still = np.zeros((5, 2), np.float32)
    with pytest.raises(ValueError, match=r"data \(toy\): all 2 dims of the actions have zero range"):
        fit(("none", "min_max"), (), [], [lambda: [still]], "data (toy)")


def test_normalisers_are_json_that_reads_back_equal(tmp_path: Any) -> None:
    values = odd_data()
    norms = fit(("mean_std", "quantile"), (True,) + (False,) * 6, [lambda: [values]], [lambda: [values * 3]], "x")
    path = tmp_path / "normalisers.json"
    path.write_text(to_json(norms))
    assert read_normalisers(path) == norms
    path.write_text(to_json(norms).replace("scale", "scaling"))
    with pytest.raises(ValueError, match=r"normalisers\.json"):
        read_normalisers(path)
    with pytest.raises(ValueError, match="holds no normalisers that can be read"):
        read_normalisers(tmp_path / "absent.json")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.booleans(), min_size=3, max_size=3))
def test_chunks_with_differences_come_back(seed: int, delta: list[bool]) -> None:
    rng = np.random.default_rng(seed)
    state, actions = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4), (2, 5, 3)))
    norm = Normaliser(kind="min_max", shift=(0.1, 0.2, 0.3), scale=(2.0, 3.0, 4.0))
    norms = Normalisers(actions=norm, delta=tuple(delta))
    model = encode_actions(norms, actions, state)
    expected = actions - np.where(delta, state[:, None, :3], 0)
    assert np.allclose(restore(norm, model, "x"), expected, atol=1e-6)
    assert np.allclose(decode_actions(norms, model, state), actions, atol=1e-6)


def test_differences_need_the_same_dims_in_the_state() -> None:
    norm = Normaliser(kind="none", shift=(0.0, 0.0), scale=(1.0, 1.0))
    norms = Normalisers(actions=norm, delta=(False, True))
    for state in (None, np.zeros(1, np.float32)):
        with pytest.raises(ValueError, match="needs 2 dims of actions and at least 2 of the state"):
            encode_actions(norms, np.zeros((3, 2), np.float32), state)
