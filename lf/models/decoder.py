"""A decoder-only language model, composed of frozen parts and built on megatron-core's GPTModel.

Shapes: B rows of a micro-batch, S positions of a row, V vocabulary, N documents of a micro-batch.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from lf.models import spec
from lf.models.decoder_facts import coefficients, decoder_flops, mtp_depth, mtp_term
from lf.models.decoder_layout import check_decoder_layout, decoder_slice
from lf.models.hf_folder import few
from lf.models.layers.rope import Rope
from lf.models.parts import Attention as Attention
from lf.models.parts import AttentionConfig as AttentionConfig
from lf.models.parts import Experts as Experts
from lf.models.parts import Mla as Mla
from lf.models.parts import Mlp as Mlp
from lf.models.parts import MlpConfig as MlpConfig
from lf.models.parts import Mtp as Mtp
from lf.models.parts import Norm as Norm
from lf.models.ranges import above, least, within
from lf.models.work import RowWork, pack_work, row_work


@attrs.frozen(kw_only=True)
class DecoderConfig(spec.ModelConfig):
    """A decoder-only language model; families are subclasses."""

    vocab: int = attrs.field(validator=least(2))
    """Token ids; the head has this many outputs, whatever the padding."""
    hidden: int = attrs.field(validator=least(1))
    """Width of the residual stream."""
    layers: int = attrs.field(validator=within(1, 10_000))
    """Decoder layers."""
    attention: AttentionConfig
    """Attention of every layer."""
    mlp: MlpConfig
    """Feed-forward part of every layer that has no experts."""
    experts: Experts | None = None
    """Experts in place of the `mlp`, in the layers that have them; None for none."""
    mtp: Mtp | None = None
    """Heads that predict further tokens while training; None for none."""
    norm: Norm = Norm()
    """Norms of the layers and of the end."""
    rope: Rope = Rope()
    """Rotary position embedding."""
    max_length: int = attrs.field(default=4096, validator=least(1))
    """Longest sequence that the model is meant for, in tokens."""
    tied: bool = False
    """Whether the head is the embedding."""
    vocab_multiple: int = attrs.field(default=1, validator=least(1))
    """The embedding is padded to a multiple of this many rows; padded rows never enter the loss."""
    init_std: float = attrs.field(default=0.02, validator=above(0.0))
    """Standard deviation of the initial weights."""

    def __attrs_post_init__(self) -> None:
        # Further heads are layers after the last; they may be dense, and windows are for the layers alone.
        named = {"attention.window_layers": (getattr(self.attention, "window_layers", ()), 0)}
        if self.experts is not None:
            named["experts.dense"] = (self.experts.dense, mtp_depth(self))
        for name, (layers, more) in named.items():
            end = self.layers + more - 1
            wrong = [layer for layer in layers if not 0 <= layer <= end]
            if wrong:
                raise ValueError(
                    f"{name} has {few(wrong)}, and must lie in 0 .. {end}, since layers = {self.layers}"
                    f"{f' and mtp.depth = {more}' if more else ''}; correct it"
                )


@spec.build_model.register
def _(cfg: DecoderConfig, ctx: spec.Ctx) -> nn.Module:
    from lf.models.gpt import build_gpt

    return build_gpt(cfg, ctx)


@spec.blocks.register
def _(cfg: DecoderConfig, layout: spec.Layout, load: spec.Load) -> tuple[spec.Block, ...]:
    from lf.models.decoder_costs import decoder_blocks

    return decoder_blocks(cfg, layout, load)


@spec.paths.register
def _(cfg: DecoderConfig) -> tuple[spec.Path, ...]:
    return ("megatron",)


@spec.check_model.register
def _(cfg: DecoderConfig, data: Mapping[str, int]) -> None:
    if data.get("vocab", 0) > cfg.vocab:
        raise ValueError(
            f"model.vocab = {cfg.vocab}, but the data has token id {data['vocab'] - 1}; the model needs "
            f"model.vocab >= {data['vocab']}, or the tokenizer is another model's"
        )
    if data.get("length", 0) > cfg.max_length:
        raise ValueError(
            f"data.seq_len = {data['length']} is longer than model.max_length = {cfg.max_length}; "
            "shorten the rows or raise model.max_length"
        )


@spec.check_layout.register
def _(cfg: DecoderConfig, layout: spec.Layout, length: int) -> None:
    check_decoder_layout(cfg, layout, length)


@spec.slice_batch.register
def _(cfg: DecoderConfig, batch: spec.Batch, layout: spec.Layout) -> spec.Batch:
    return decoder_slice(cfg, batch, layout)


@spec.forward.register
def _(cfg: DecoderConfig, model: nn.Module, batch: spec.Batch) -> spec.Output:
    return model(**decoder_inputs(cfg, batch))


def is_packed(batch: spec.Batch) -> bool:
    """Returns whether a micro-batch runs as one packed row.

    One whose rows hold several documents does, so that no token sees another document.
    """
    return bool(batch.get("packed")) or len(batch["lengths"]) > batch["tokens"].shape[0]


def decoder_inputs(cfg: DecoderConfig, batch: spec.Batch) -> dict[str, Any]:
    """Returns what the decoder's module takes of a micro-batch, by argument."""
    packed = is_packed(batch)
    shape = (1, -1) if packed else batch["tokens"].shape

    def shaped(name: str) -> Tensor | None:
        return batch[name].reshape(*batch[name].shape[:-2], *shape) if name in batch else None

    return {
        "input_ids": shaped("tokens"),
        "position_ids": shaped("positions"),
        "labels": shaped("labels"),
        "packing": _packing(batch["lengths"], batch["tokens"].device) if packed else None,
        "pool": shaped("pool"),
        "pools": batch.get("pools", 1),
        "ahead": tuple((shaped(f"tokens{d}"), shaped(f"labels{d}")) for d in range(1, mtp_depth(cfg) + 1)),
    }


def _packing(lengths: tuple[int, ...], device: torch.device) -> Any:
    from lf.models.layers.attention import Packed

    # A copy that blocks would wait for all work that the device has queued.
    ends = torch.tensor((0, *itertools.accumulate(lengths)), dtype=torch.int32).to(device, non_blocking=True)
    longest = max(lengths)
    return Packed(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=lengths,
    )


@spec.loss_weights.register
def _(cfg: DecoderConfig, batch: spec.Batch) -> dict[str, Tensor]:
    """Returns targets for the language model and each further head, and what the routers' losses are means over."""
    weights = {"lm": (batch["labels"] != spec.IGNORE).sum()}
    for d in range(1, mtp_depth(cfg) + 1):
        if f"labels{d}" in batch:
            weights[mtp_term(d)] = (batch[f"labels{d}"] != spec.IGNORE).sum()
    return {**weights, **{name: torch.tensor(weight) for name, weight in batch.get("pool_weights", {}).items()}}


@spec.loss_terms.register
def _(cfg: DecoderConfig, output: spec.Output, batch: spec.Batch) -> dict[str, Tensor]:
    return {name: losses.sum() for name, losses in output.items()} if isinstance(output, dict) else {"lm": output.sum()}


@spec.loss_coefficients.register
def _(cfg: DecoderConfig) -> dict[str, float]:
    return coefficients(cfg)


@spec.collate.register
def _(cfg: DecoderConfig, rows: Sequence[Mapping[str, Any] | None], like: Mapping[str, Any]) -> spec.Batch:
    return spec.text_batch(rows, like, cfg.vocab)


@spec.fake_batch.register
def _(cfg: DecoderConfig, rows: int, length: int, seed: int) -> spec.Batch:
    return spec.fake_text_batch(cfg.vocab, rows, length, seed)


@spec.init_rules.register
def _(cfg: DecoderConfig) -> tuple[spec.InitRule, ...]:
    """Normal weights, with those that write to the residual stream scaled by its depth (GPT-2's rule)."""
    residual = cfg.init_std / (2 * cfg.layers) ** 0.5
    return (
        spec.InitRule(pattern="*norm.weight", kind="ones"),
        spec.InitRule(pattern="*.bias", kind="zeros"),
        spec.InitRule(pattern="*.expert_bias", kind="zeros"),
        spec.InitRule(pattern="*.linear_proj.weight", kind="normal", std=residual),
        spec.InitRule(pattern="*.linear_fc2.weight", kind="normal", std=residual),
        spec.InitRule(pattern="*.experts.down", kind="normal", std=residual),
        spec.InitRule(pattern="*.experts.gate_up", kind="normal", std=cfg.init_std),
        spec.InitRule(pattern="*weight", kind="normal", std=cfg.init_std),
    )


@spec.flops.register
def _(cfg: DecoderConfig, rows: int, length: int) -> float:
    return decoder_flops(cfg, rows, length)


@row_work.register
def _(cfg: DecoderConfig, row: Mapping[str, Any]) -> RowWork:
    return RowWork(kinds=pack_work(cfg, row["lengths"]), tokens=sum(row["lengths"]))
