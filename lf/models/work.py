"""What packs and images take of a rank: operations by kind, from their lengths and grids alone.

The kinds are those that a device does at different speeds: `calls` (packs or images), `matrices` (operations of those
that every token goes through), `experts` (of routed experts), `causal`, `window` and `full` (of attention's pairs),
`patches` (their number), `towers` (operations of towers and projectors). `lf.plan.work` makes seconds of them.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from lf.models.decoder_facts import attention_flops, attention_weights, is_sparse, mlp_weights
from lf.models.media import Media, media_flops
from lf.models.parts import Attention
from lf.models.spec import ModelConfig, no_rule

if TYPE_CHECKING:
    from lf.models.decoder import DecoderConfig


@attrs.frozen(kw_only=True)
class RowWork:
    """What a row takes of a rank."""

    kinds: Mapping[str, float]
    """Work of forward and backward, by kind."""
    tokens: int = 0
    """Its tokens, padding included."""


@functools.singledispatch
def row_work(cfg: ModelConfig, row: Mapping[str, Any]) -> RowWork:
    """Returns what a row takes, or what its outline (`lf.data.outline`) says of it: sizes are read, and no values."""
    raise no_rule(row_work, cfg)


def added(*parts: Mapping[str, float]) -> dict[str, float]:
    """Returns the work of several parts together."""
    kinds = dict.fromkeys(kind for part in parts for kind in part)
    return {kind: sum(part.get(kind, 0.0) for part in parts) for kind in kinds}


def pairs(lengths: Sequence[int], window: int = 0) -> int:
    """Returns the pairs of a position and one that it sees, itself included; a `window` counts itself, 0 is causal."""
    if not window:
        return sum(length * (length + 1) // 2 for length in lengths)
    full = [min(length, window) for length in lengths]
    return sum(n * (n + 1) // 2 + (length - n) * window for n, length in zip(full, lengths, strict=True))


def pack_work(cfg: "DecoderConfig", lengths: Sequence[int]) -> dict[str, float]:
    """Returns the work of forward and backward of a pack of documents of `lengths` tokens in the decoder.

    Two operations a multiply-add and three passes, as `decoder_flops` counts; a window's pairs are counted as such.
    """
    tokens, a, e = sum(lengths), cfg.attention, cfg.experts
    sparse = sum(is_sparse(cfg, layer) for layer in range(cfg.layers))
    experts = sparse * cfg.hidden * e.top_k * 3 * e.width if e is not None else 0
    mlps = sum(mlp_weights(cfg, layer, active=True) for layer in range(cfg.layers))
    matrices = mlps - experts + cfg.layers * attention_weights(a, cfg.hidden) + cfg.vocab * cfg.hidden
    window, windows = (a.window, len(a.window_layers)) if isinstance(a, Attention) else (0, 0)
    pair = 6.0 * attention_flops(a, 1)
    return {
        "calls": 1.0,
        "matrices": 6.0 * tokens * matrices,
        "experts": 6.0 * tokens * experts,
        "causal": pair * pairs(lengths) * (cfg.layers - windows),
        "window": pair * pairs(lengths, window) * windows,
    }


def media_work(cfg: ModelConfig, media: Media) -> dict[str, float]:
    """Returns the work of forward and backward of an image or a video until it is tokens."""
    return {"calls": 1.0, "patches": float(media.patches), "towers": media_flops(cfg, media)}
