"""The frozen parts that decoders are composed of."""

from typing import Literal

import attrs
from attrs.validators import and_

from lf.models.ranges import above, least, within


def _even(instance: object, attribute: "attrs.Attribute[int]", value: int) -> None:
    if value % 2:
        raise ValueError(
            f"{type(instance).__name__}.{attribute.name} = {value} must be even, since dims are rotated in pairs; "
            "correct it"
        )


@attrs.frozen(kw_only=True)
class AttentionConfig:
    """The attention of a layer: the type says which kind."""


@attrs.frozen(kw_only=True)
class Attention(AttentionConfig):
    """Softmax attention with grouped key and value heads (GQA, arXiv:2305.13245)."""

    heads: int = attrs.field(validator=least(1))
    """Query heads."""
    kv_heads: int = attrs.field(validator=least(1))
    """Key and value heads; divides `heads`."""
    head_dim: int = attrs.field(validator=least(2))
    """Width of a head; need not be hidden / heads."""
    qkv_bias: bool = False
    """Whether query, key and value projections have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are normalised before the rotation."""
    qk_norm_over: Literal["head", "all"] = "head"
    """What `qk_norm` normalises over: each head by itself, or all heads together."""
    window: int = attrs.field(default=0, validator=least(0))
    """Keys that a query sees, itself included; 0 sees all before it."""
    window_layers: tuple[int, ...] = ()
    """Layers (from 0) that `window` holds for."""
    dropout: float = attrs.field(default=0.0, validator=within(0.0, 1.0))
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
class Mla(AttentionConfig):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values come from one narrow vector.

    Each head's query and key is a part without position beside a part that is rotated, in adjacent pairs; the rotated
    part of the keys is one for all heads. Tensor parallel ranks each have the down-projections whole.
    """

    heads: int = attrs.field(validator=least(1))
    """Heads."""
    q_rank: int = attrs.field(default=0, validator=least(0))
    """Width of the vector that queries come from; 0 projects the hidden state at once."""
    kv_rank: int = attrs.field(validator=least(1))
    """Width of the vector that keys and values come from."""
    nope_dim: int = attrs.field(validator=least(1))
    """Width of a head's query and key without position."""
    rope_dim: int = attrs.field(validator=and_(least(2), _even))
    """Width of a head's query and key that is rotated."""
    v_dim: int = attrs.field(validator=least(1))
    """Width of a head's value."""
    latent_eps: float = attrs.field(default=1e-6, validator=above(0.0))
    """Added to the mean square of the narrow vectors."""
    dropout: float = attrs.field(default=0.0, validator=within(0.0, 1.0))
    """Dropout on the attention weights."""


@attrs.frozen(kw_only=True)
class MlpConfig:
    """The feed-forward part of a layer: the type says which kind."""


@attrs.frozen(kw_only=True)
class Mlp(MlpConfig):
    """Gated feed-forward layer (SwiGLU and kin, arXiv:2002.05202)."""

    width: int = attrs.field(validator=least(1))
    """Width between the two projections."""
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    """Function of the gate."""


@attrs.frozen(kw_only=True)
class Norm:
    """RMSNorm (arXiv:1910.07467)."""

    eps: float = attrs.field(default=1e-6, validator=above(0.0))
    """Added to the mean square."""


@attrs.frozen(kw_only=True)
class Experts:
    """Mixture of experts: each token goes to a few of many gated feed-forward layers.

    A router scores the experts in fp32. `balance` adds a loss that keeps their loads even, E / k * sum(f * P) for each
    layer, with f the share of tokens that have an expert among their top k and P the mean of its score:
    `sequence` over each row of data (DeepSeek-V3, arXiv:2412.19437), `switch` over each micro-batch (arXiv:2101.03961),
    `global` with f over all micro-batches of the step so far, of all data parallel ranks (arXiv:2501.11873). A row's
    loss does not depend on how rows are spread; `switch` depends on the micro-batches. `global` depends on how many
    micro-batches are under way at once: a backward starts before the loads of later ones are known. So its numbers
    compare on equal micro-batches at the same data parallel degree only. `capacity` drops tokens, rank by rank, so its
    numbers compare on equal micro-batches only.
    """

    count: int = attrs.field(validator=least(1))
    """Experts of a layer."""
    top_k: int = attrs.field(validator=least(1))
    """Experts that a token goes to."""
    width: int = attrs.field(validator=least(1))
    """Width between the two projections of an expert."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """What makes scores of the router's logits."""
    renormalise: bool = True
    """Whether the scores that a token keeps are divided by their sum."""
    scale: float = attrs.field(default=1.0, validator=above(0.0))
    """Factor of the routed experts' output."""
    groups: int = attrs.field(default=1, validator=least(1))
    """Groups of experts, of which a token may use `group_top_k`."""
    group_top_k: int = attrs.field(default=1, validator=least(1))
    """Groups that a token may use."""
    group_rank: Literal["max", "top2"] = "top2"
    """What ranks a group: its best score (DeepSeek-V2), or the sum of its two best (DeepSeek-V3)."""
    bias: bool = False
    """Whether a bias is added to the scores when experts are chosen (arXiv:2408.15664)."""
    bias_rate: float = attrs.field(default=1e-3, validator=least(0.0))
    """How far a step moves the bias, up for experts with few tokens and down for the others; 0 leaves it."""
    shared: int = attrs.field(default=0, validator=least(0))
    """Width of the expert that every token goes to, 0 for none; several of them are one wide expert."""
    shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a learned sigmoid of the token."""
    dense: tuple[int, ...] = ()
    """Layers (from 0) that have the model's `mlp` instead."""
    balance: Literal["none", "sequence", "switch", "global"] = "none"
    """Which loss keeps the loads even."""
    balance_coef: float = attrs.field(default=1e-3, validator=least(0.0))
    """Factor of that loss, for each layer."""
    z_coef: float = attrs.field(default=0.0, validator=least(0.0))
    """Factor, for each layer, of the mean squared log-sum-exp of the router's logits (arXiv:2202.08906); 0 for none."""
    capacity: float = attrs.field(default=0.0, validator=least(0.0))
    """Most tokens of an expert, as a multiple of an even load; tokens beyond are dropped. 0 drops none."""
    pad: bool = False
    """Whether every expert gets exactly `capacity` tokens, padded where it has fewer."""
    dispatch: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach the experts of other ranks; it changes no number."""

    def __attrs_post_init__(self) -> None:
        if self.count % self.groups:
            raise ValueError(f"experts.count = {self.count} must be a multiple of experts.groups = {self.groups}")
        if self.group_top_k > self.groups:
            raise ValueError(
                f"experts.group_top_k = {self.group_top_k} must not be more than experts.groups = {self.groups}"
            )
        allowed = self.count // self.groups * self.group_top_k
        if self.top_k > allowed:
            raise ValueError(
                f"experts.top_k = {self.top_k}, but a token may use {allowed} of experts.count = {self.count}; lower "
                "top_k, or raise count or group_top_k"
            )
        if self.groups > 1 and self.group_rank == "top2" and self.count // self.groups < 2:
            raise ValueError(
                f"experts.groups = {self.groups} leaves one expert a group, which has no two best scores; lower groups"
            )
        if self.shared_gate and not self.shared:
            raise ValueError("experts.shared_gate = True without a shared expert; set experts.shared, or no gate")
        if self.pad and not self.capacity:
            raise ValueError("experts.pad = True without a capacity; set experts.capacity, or pad to False")


@attrs.frozen(kw_only=True)
class Mtp:
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437): heads that predict further tokens while training.

    Head d joins the state of the head before it with the embedding of the d-th next token, and runs one more layer.
    """

    depth: int = attrs.field(default=1, validator=least(1))
    """Heads."""
    coef: float = attrs.field(default=0.3, validator=least(0.0))
    """Factor of the mean of the heads' losses."""
