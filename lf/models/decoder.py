"""A decoder-only language model, composed of frozen parts and built on megatron-core's GPTModel.

Shapes: B rows of a micro-batch, S positions of a row, V vocabulary, N documents of a micro-batch.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
from attrs.validators import and_, ge, gt, le
from torch import Tensor, nn

from lf.models import spec
from lf.models.layers.rope import DynamicScaling, Rope


@attrs.frozen(kw_only=True)
class AttentionConfig:
    """The attention of a layer: the type says which kind."""


@attrs.frozen(kw_only=True)
class Attention(AttentionConfig):
    """Softmax attention with grouped key and value heads (GQA, arXiv:2305.13245)."""

    heads: int = attrs.field(validator=ge(1))
    """Query heads."""
    kv_heads: int = attrs.field(validator=ge(1))
    """Key and value heads; divides `heads`."""
    head_dim: int = attrs.field(validator=ge(2))
    """Width of a head; need not be hidden / heads."""
    qkv_bias: bool = False
    """Whether query, key and value projections have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head before the rotation."""
    window: int = attrs.field(default=0, validator=ge(0))
    """Keys that a query sees, itself included; 0 sees all before it."""
    window_layers: tuple[int, ...] = ()
    """Layers (from 0) that `window` holds for."""
    dropout: float = attrs.field(default=0.0, validator=and_(ge(0.0), le(1.0)))
    """Dropout on the attention weights."""

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"attention.heads = {self.heads} must be a multiple of attention.kv_heads = {self.kv_heads}"
            )
        if bool(self.window) != bool(self.window_layers):
            raise ValueError(
                f"attention.window = {self.window} and attention.window_layers = {self.window_layers} go together: "
                "set both, or neither"
            )


@attrs.frozen(kw_only=True)
class MlpConfig:
    """The feed-forward part of a layer: the type says which kind."""


@attrs.frozen(kw_only=True)
class Mlp(MlpConfig):
    """Gated feed-forward layer (SwiGLU and kin, arXiv:2002.05202)."""

    width: int = attrs.field(validator=ge(1))
    """Width between the two projections."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """Function of the gate."""


@attrs.frozen(kw_only=True)
class Norm:
    """RMSNorm (arXiv:1910.07467)."""

    eps: float = attrs.field(default=1e-6, validator=gt(0.0))
    """Added to the mean square."""


@attrs.frozen(kw_only=True)
class DecoderConfig(spec.ModelConfig):
    """A decoder-only language model; families are subclasses."""

    vocab: int = attrs.field(validator=ge(2))
    """Token ids; the head has this many outputs, whatever the padding."""
    hidden: int = attrs.field(validator=ge(1))
    """Width of the residual stream."""
    layers: int = attrs.field(validator=ge(1))
    """Decoder layers."""
    attention: AttentionConfig
    """Attention of every layer."""
    mlp: MlpConfig
    """Feed-forward part of every layer."""
    norm: Norm = Norm()
    """Norms of the layers and of the end."""
    rope: Rope = Rope()
    """Rotary position embedding."""
    max_length: int = attrs.field(default=4096, validator=ge(1))
    """Longest sequence that the model is meant for, in tokens."""
    tied: bool = False
    """Whether the head is the embedding."""
    vocab_multiple: int = attrs.field(default=1, validator=ge(1))
    """The embedding is padded to a multiple of this many rows; padded rows never enter the loss."""
    init_std: float = attrs.field(default=0.02, validator=gt(0.0))
    """Standard deviation of the initial weights."""


@spec.build_model.register
def _(cfg: DecoderConfig, ctx: spec.Ctx) -> nn.Module:
    from lf.models.gpt import build_gpt

    return build_gpt(cfg, ctx)


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
    a, m = cfg.attention, cfg.mlp
    assert isinstance(a, Attention)
    assert isinstance(m, Mlp)
    for name, value, axis in (
        ("model.attention.heads", a.heads, "tp"),
        ("model.attention.kv_heads", a.kv_heads, "tp"),
        ("model.mlp.width", m.width, "tp"),
    ):
        if value % getattr(layout, axis):
            raise ValueError(
                f"parallel.{axis} = {getattr(layout, axis)} does not divide {name} = {value}; lower parallel.{axis}"
            )
    chunks = layout.pp * layout.vpp
    if layout.stages and sum(layout.stages) != cfg.layers:
        raise ValueError(
            f"parallel.stages = {layout.stages} has {sum(layout.stages)} layers, but model.layers = {cfg.layers}"
        )
    if not layout.stages and cfg.layers < chunks:
        raise ValueError(
            f"model.layers = {cfg.layers} cannot fill parallel.pp * parallel.vpp = {chunks} chunks; lower one of them"
        )
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
    if layout.cp > 1 and layout.cp_kind == "ulysses" and a.kv_heads % (layout.tp * layout.cp):
        raise ValueError(
            f"parallel.cp_kind = 'ulysses' needs tp * cp = {layout.tp * layout.cp} to divide "
            f"model.attention.kv_heads = {a.kv_heads}; use cp_kind = 'gather', or lower cp"
        )
    if layout.cp > 1 and isinstance(cfg.rope.scaling, DynamicScaling):
        raise ValueError(
            "dynamic rope scaling follows the longest sequence, which a context parallel rank does not see; "
            "set parallel.cp to 1"
        )


@spec.slice_batch.register
def _(cfg: DecoderConfig, batch: spec.Batch, layout: spec.Layout) -> spec.Batch:
    """The micro-batch becomes one packed row; a rank has pieces r and 2 cp - 1 - r of its 2 cp equal pieces.

    So every rank has as many early tokens, which see little, as late ones, which see much. Pipeline stages take every
    micro-batch packed, because they agree on one shape.
    """
    if layout.cp == 1:
        return {**batch, "packed": layout.pp > 1}
    cut = {name: batch[name].reshape(2 * layout.cp, -1) for name in ("tokens", "labels", "positions") if name in batch}
    mine = [layout.cp_rank, 2 * layout.cp - 1 - layout.cp_rank]
    own = {name: pieces[mine].reshape(1, -1) for name, pieces in cut.items()}
    return {**batch, **own, "count": batch["count"] / layout.cp, "packed": True}


@spec.forward.register
def _(cfg: DecoderConfig, model: nn.Module, batch: spec.Batch) -> spec.Output:
    # A micro-batch whose rows hold several documents runs as one packed row, so that no token sees another document.
    packed = batch.get("packed", False) or len(batch["lengths"]) > batch["tokens"].shape[0]
    shape = (1, -1) if packed else batch["tokens"].shape
    labels = batch.get("labels")
    return model(
        input_ids=batch["tokens"].reshape(shape),
        position_ids=batch["positions"].reshape(shape),
        attention_mask=None,
        labels=None if labels is None else labels.reshape(shape),
        packed_seq_params=_packing(batch["lengths"], batch["tokens"].device) if packed else None,
    )


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
    return {"lm": (batch["labels"] != spec.IGNORE).sum()}


@spec.loss_terms.register
def _(cfg: DecoderConfig, output: spec.Output, batch: spec.Batch) -> dict[str, Tensor]:
    return {"lm": output.sum()}


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
        spec.InitRule(pattern="*.linear_proj.weight", kind="normal", std=residual),
        spec.InitRule(pattern="*.linear_fc2.weight", kind="normal", std=residual),
        spec.InitRule(pattern="*.weight", kind="normal", std=cfg.init_std),
    )


@spec.flops.register
def _(cfg: DecoderConfig, rows: int, length: int) -> float:
    """Two operations a multiply-add, three passes; causal attention counts the half that is not masked."""
    a, m = cfg.attention, cfg.mlp
    assert isinstance(a, Attention)
    assert isinstance(m, Mlp)
    linear = cfg.hidden * a.head_dim * (2 * a.heads + 2 * a.kv_heads) + 3 * cfg.hidden * m.width
    scores = 2 * a.heads * a.head_dim * (length + 1) / 2
    return 6.0 * rows * length * (cfg.layers * (linear + scores) + cfg.vocab * cfg.hidden)
