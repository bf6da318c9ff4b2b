"""What layouts a decoder can have, and each rank's part of a micro-batch.

Shapes: B rows of a micro-batch, S positions of a row.
"""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lf.models import spec
from lf.models.decoder_facts import (
    BALANCE,
    ROUTER_Z,
    coefficients,
    is_sparse,
    kv_heads,
    mtp_depth,
    rope_width,
    sparse_layers,
)
from lf.models.layers.rope import DynamicScaling, rotated_dims
from lf.models.parts import Attention, Mla, Mlp

if TYPE_CHECKING:
    from lf.models.decoder import DecoderConfig


def check_decoder_layout(cfg: "DecoderConfig", layout: spec.Layout, length: int) -> None:
    """Raises ValueError, with the cure, where a layout does not fit the model and rows of `length`."""
    rotated_dims(cfg.rope, rope_width(cfg.attention))
    for name, value, axis in _shared(cfg):
        if value % getattr(layout, axis):
            raise ValueError(
                f"parallel.{axis} = {getattr(layout, axis)} does not divide {name} = {value}; lower parallel.{axis}"
            )
    _check_experts(cfg, layout)
    chunks = layout.pp * layout.vpp
    if layout.stages and sum(layout.stages) != cfg.layers:
        raise ValueError(
            f"parallel.stages = {layout.stages} has {sum(layout.stages)} layers, but model.layers = {cfg.layers}"
        )
    if not layout.stages and cfg.layers < chunks:
        raise ValueError(
            f"model.layers = {cfg.layers} cannot fill parallel.pp * parallel.vpp = {chunks} chunks; lower one of them"
        )
    _check_sequence(cfg, layout, length)


def _shared(cfg: "DecoderConfig") -> Iterator[tuple[str, int, str]]:
    """Gives what tensor and expert parallel ranks share out evenly: its name, its size, and the axis."""
    attention, mlp, experts = cfg.attention, cfg.mlp, cfg.experts
    assert isinstance(attention, (Attention, Mla))
    assert isinstance(mlp, Mlp)
    yield "model.attention.heads", attention.heads, "tp"
    if isinstance(attention, Attention):
        yield "model.attention.kv_heads", attention.kv_heads, "tp"
    if not all(is_sparse(cfg, layer) for layer in range(cfg.layers)):
        yield "model.mlp.width", mlp.width, "tp"
    if experts is not None:
        yield "model.experts.count", experts.count, "ep"
        yield "model.experts.width", experts.width, "etp"
        yield "model.experts.shared", experts.shared, "tp"


def _check_experts(cfg: "DecoderConfig", layout: spec.Layout) -> None:
    if not sparse_layers(cfg) and layout.ep * layout.etp > 1:
        raise ValueError(
            f"parallel.ep = {layout.ep} and parallel.etp = {layout.etp} share out experts, but the model has none; "
            "set both to 1"
        )
    if layout.tp > 1 and not layout.sp and (sparse_layers(cfg) or isinstance(cfg.attention, Mla)):
        what = "experts" if sparse_layers(cfg) else "latent attention"
        raise ValueError(
            f"parallel.tp = {layout.tp} without parallel.sp: a model with {what} needs tensor parallel ranks to share "
            "the sequence; set parallel.sp to True"
        )


def _check_sequence(cfg: "DecoderConfig", layout: spec.Layout, length: int) -> None:
    pieces = (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1)
    if length % pieces and layout.cp == 1:
        raise ValueError(
            f"rows of {length} tokens cannot be shared by parallel.tp = {layout.tp} ranks (parallel.sp); "
            f"make data.seq_len a multiple of {pieces}, or set parallel.sp to False"
        )
    if length % pieces:
        raise ValueError(
            f"rows of {length} tokens cannot be cut in {pieces} equal pieces, two for each of parallel.cp = {layout.cp}"
            f" ranks (times parallel.tp with parallel.sp); make data.seq_len a multiple of {pieces}"
        )
    heads = kv_heads(cfg.attention)
    if layout.cp > 1 and layout.cp_kind == "ulysses" and heads % (layout.tp * layout.cp):
        raise ValueError(
            f"parallel.cp_kind = 'ulysses' needs tp * cp = {layout.tp * layout.cp} to divide "
            f"model.attention.{'kv_heads' if isinstance(cfg.attention, Attention) else 'heads'} = {heads}; use "
            "cp_kind = 'gather', or lower cp"
        )
    if layout.cp > 1 and isinstance(cfg.rope.scaling, DynamicScaling):
        raise ValueError(
            "dynamic rope scaling follows the longest sequence, which a context parallel rank does not see; "
            "set parallel.cp to 1"
        )


def decoder_slice(cfg: "DecoderConfig", batch: spec.Batch, layout: spec.Layout) -> spec.Batch:
    """Returns a rank's part of a micro-batch, with what its further heads and routers need.

    With context parallel ranks the micro-batch becomes one packed row, and a rank has pieces r and 2 cp - 1 - r of its
    2 cp equal pieces, so that every rank has as many early tokens, which see little, as late ones, which see much.
    Pipeline stages take every micro-batch packed, because they agree on one shape.
    """
    batch = {**batch, **_ahead(cfg, batch), **_pools(cfg, batch, layout)}
    if layout.cp == 1:
        return {**batch, "packed": layout.pp > 1}
    shape = batch["tokens"].shape
    mine = [layout.cp_rank, 2 * layout.cp - 1 - layout.cp_rank]
    own = {
        name: value.reshape(*value.shape[:-2], 2 * layout.cp, -1)[..., mine, :].reshape(*value.shape[:-2], 1, -1)
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.shape[-2:] == shape
    }
    return {**batch, **own, "count": batch["count"] / layout.cp, "packed": True}


def _ahead(cfg: "DecoderConfig", batch: spec.Batch) -> dict[str, Tensor]:
    """Returns the tokens and labels that further heads see, [B, S] each: those d positions on in the same document.

    They are taken from the whole micro-batch, so that no rank has to ask another for the tokens after its piece.
    """
    if not mtp_depth(cfg) or "labels" not in batch:
        return {}
    tokens, labels = batch["tokens"].flatten(), batch["labels"].flatten()
    ends = torch.tensor(list(itertools.accumulate(batch["lengths"])), device=tokens.device)
    at = torch.arange(len(tokens), device=tokens.device)
    end = ends[torch.searchsorted(ends, at, right=True)]
    made = {}
    for d in range(1, mtp_depth(cfg) + 1):
        inside, there = at + d < end, (at + d).clamp(max=len(at) - 1)
        made[f"tokens{d}"] = torch.where(inside, tokens[there], 0).view_as(batch["tokens"])
        made[f"labels{d}"] = torch.where(inside, labels[there], spec.IGNORE).view_as(batch["labels"])
    return made


def _pools(cfg: "DecoderConfig", batch: spec.Batch, layout: spec.Layout) -> dict[str, Any]:
    """Returns which balance loss each token belongs to, -1 for padding, how many there are, and their weights.

    Weights are this rank's share: context parallel ranks have the same rows.
    """
    if not sparse_layers(cfg) or "real" not in batch:
        return {}
    assert cfg.experts is not None
    (rows, length), real = batch["tokens"].shape, batch["real"]
    by_row = cfg.experts.balance == "sequence"
    pool = torch.full((rows, length), -1)
    for row, count in enumerate(real):
        pool[row, :count] = row if by_row else 0
    tokens = sum(real)
    balance = {"sequence": sum(n > 0 for n in real), "switch": tokens > 0}.get(cfg.experts.balance, tokens)
    weights = {BALANCE: float(balance) / layout.cp, ROUTER_Z: tokens / layout.cp}
    wanted = coefficients(cfg)
    return {
        "pool": pool.to(batch["tokens"].device),
        "pools": rows if by_row else 1,
        "pool_weights": {name: weight for name, weight in weights.items() if name in wanted},
    }
