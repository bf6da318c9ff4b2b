"""What packs and images take of a rank: operations by kind from their lengths and grids alone, and seconds from a fit.

Shapes: N measurements, R ranks, K kinds of `KINDS`.
"""

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.models.decoder import DecoderConfig
from lf.models.decoder_facts import attention_flops, attention_weights, is_sparse, mlp_weights
from lf.models.media import Media, media_flops
from lf.models.parts import Attention
from lf.models.spec import ModelConfig

KINDS = ("calls", "matrices", "experts", "causal", "window", "patches", "towers")
"""Kinds of work: packs or images; operations of matrices that all tokens go through, of routed experts, of the pairs of
causal and of windowed causal attention; patches; operations of towers and projectors."""


@attrs.frozen(kw_only=True)
class Rates:
    """What a unit of each kind of work costs, in seconds."""

    calls: float = 0.0
    """A pack, or an image."""
    matrices: float = 0.0
    """An operation of a matrix that every token goes through."""
    experts: float = 0.0
    """An operation of a routed expert."""
    causal: float = 0.0
    """An operation of causal attention."""
    window: float = 0.0
    """An operation of attention within a window."""
    patches: float = 0.0
    """A patch, besides its operations."""
    towers: float = 0.0
    """An operation of a tower or a projector."""

    def seconds(self, work_K: NDArray[np.float64]) -> float:
        """Returns the cost of some work."""
        return float(work_K @ np.array(attrs.astuple(self)))


def even_rates(tflops: float = 1.0) -> Rates:
    """Returns the rates of a device that does every operation equally fast: what to take before a measurement."""
    second = 1e-12 / tflops
    return Rates(matrices=second, experts=second, causal=second, window=second, towers=second)


def pairs(lengths: Sequence[int], window: int = 0) -> int:
    """Returns the pairs of a position and one that it sees, itself included; a `window` counts itself, 0 is causal."""
    if not window:
        return sum(length * (length + 1) // 2 for length in lengths)
    full = [min(length, window) for length in lengths]
    return sum(n * (n + 1) // 2 + (length - n) * window for n, length in zip(full, lengths, strict=True))


def pack_work(cfg: DecoderConfig, lengths: Sequence[int]) -> NDArray[np.float64]:
    """Returns the work [K] of forward and backward of a pack of documents of `lengths` tokens in the decoder.

    Two operations a multiply-add and three passes, as `decoder_flops` counts; a window's pairs are counted as such.
    """
    tokens, a = sum(lengths), cfg.attention
    pair = attention_flops(a, 1)
    windows = len(a.window_layers) if isinstance(a, Attention) else 0
    e = cfg.experts
    routed = [
        cfg.hidden * e.top_k * 3 * e.width if e is not None and is_sparse(cfg, layer) else 0
        for layer in range(cfg.layers)
    ]
    every = sum(mlp_weights(cfg, layer, active=True) for layer in range(cfg.layers)) - sum(routed)
    matrices = every + cfg.layers * attention_weights(a, cfg.hidden) + cfg.vocab * cfg.hidden
    seen = pairs(lengths, a.window) if isinstance(a, Attention) and windows else 0
    return np.array(
        [
            1.0,
            6.0 * tokens * matrices,
            6.0 * tokens * sum(routed),
            6.0 * pair * pairs(lengths) * (cfg.layers - windows),
            6.0 * pair * seen * windows,
            0.0,
            0.0,
        ]
    )


def media_work(cfg: ModelConfig, media: Media) -> NDArray[np.float64]:
    """Returns the work [K] of forward and backward of an image or a video until it is tokens."""
    return np.array([1.0, 0.0, 0.0, 0.0, 0.0, float(media.patches), media_flops(cfg, media)])


def fit(work_NRK: NDArray[np.float64], seconds_N: NDArray[np.float64]) -> Rates:
    """Returns the rates that explain measured times best in the sense of least squares, none below 0.

    A time is that of the slowest of its R ranks, which wait for each other; R = 1 where each rank is timed alone. Which
    rank that is follows from the rates, so they are fitted again until it does not change. Kinds without any work stay
    0. Raises ValueError where the measurements cannot tell kinds apart.
    """
    work, seconds = np.asarray(work_NRK, np.float64), np.asarray(seconds_N, np.float64)
    if work.ndim != 3 or work.shape[2] != len(KINDS) or len(work) != len(seconds):
        raise ValueError(f"work of shape {work.shape} for {len(seconds)} times; give [N, R, {len(KINDS)}] and [N]")
    used = np.flatnonzero(work.any(axis=(0, 1)))
    scale = work.mean(axis=(0, 1))[used]
    columns = work[:, :, used] / scale
    rates, slowest = np.ones(len(used)), np.full(len(work), -1)
    for _ in range(50):
        found = (columns @ rates).argmax(axis=1)
        if np.array_equal(found, slowest):
            break
        slowest = found
        table = columns[np.arange(len(work)), slowest]
        if np.linalg.matrix_rank(table) < len(used):
            names = ", ".join(KINDS[kind] for kind in used)
            raise ValueError(
                f"{len(work)} measurements do not tell the costs of {names} apart; measure packs of more different "
                "lengths, or leave out the kinds that always grow together"
            )
        rates = _least_squares(table, seconds)
    return Rates(**dict(zip((KINDS[kind] for kind in used), (rates / scale).tolist(), strict=True)))


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
