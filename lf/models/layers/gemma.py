"""Gemma layers in plain torch, with the adaptive norms of flow-matching action experts.

Gemma is arXiv:2403.08295; adaptive norms are those of DiT (arXiv:2212.09748) on RMSNorm, as openpi's `adaRMS` has them.

Shapes: B rows, S positions, K keys, W width, N heads, G key-value heads, r = N / G, D head width, C condition width.
"""

import math
from collections.abc import Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf.models.layers.fused import geglu, rms_norm
from lf.models.layers.lora import rows_from
from lf.models.layers.rope import Rope, rope_table, rotate
from lf.models.ranges import above, least

Keys = tuple[Tensor, Tensor]
"""The keys and values [B, S, G, D] of one layer, keys already turned by their positions."""


@attrs.frozen(kw_only=True)
class Gemma:
    """Sizes of a Gemma tower."""

    width: int = attrs.field(validator=least(1))
    """Width of the residual stream."""
    depth: int = attrs.field(validator=least(1))
    """Layers."""
    mlp: int = attrs.field(validator=least(1))
    """Width inside the MLP."""
    heads: int = attrs.field(default=8, validator=least(1))
    """Query heads."""
    kv_heads: int = attrs.field(default=1, validator=least(1))
    """Key-value heads; divides `heads`."""
    head_dim: int = attrs.field(default=256, validator=least(2))
    """Width of a head; even."""
    eps: float = attrs.field(default=1e-6, validator=above(0.0))
    """Added to the mean square in the norms."""
    theta: float = attrs.field(default=1e4, validator=above(1.0))
    """Base of the rotary position embedding."""

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2:
            raise ValueError(
                f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}, and head_dim = "
                f"{self.head_dim} even; change them"
            )


def positions(valid_BS: Tensor) -> Tensor:
    """Returns the position [B, S] of each token: padding takes none, so what follows it goes on where it began."""
    return valid_BS.long().cumsum(1) - 1


def rope_of(cfg: Gemma, positions_BS: Tensor) -> Tensor:
    """Returns cosine and sine of the positions as fp32 [2, B, S, 1, D], which the layers of a tower share."""
    return rope_table(Rope(theta=cfg.theta), cfg.head_dim, positions_BS, positions_BS.shape[1]).transpose(1, 2)


def attend(q_BSND: Tensor, k_BKGD: Tensor, v_BKGD: Tensor, seen_BK: Tensor) -> Tensor:
    """Returns the attention [B, S, N * D] of every query to the keys that are `seen`, of which a row needs one.

    The queries of a group of heads stand below each other in one long sequence: keys are not repeated, and a mask of
    keys alone is as long as a row.
    """
    rows, length, heads, dim = q_BSND.shape
    groups = k_BKGD.shape[2]
    q = q_BSND.reshape(rows, length, groups, heads // groups, dim).transpose(1, 2).flatten(2, 3)
    k, v = k_BKGD.transpose(1, 2), v_BKGD.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_BK[:, None, None])
    return out.unflatten(2, (length, heads // groups)).transpose(1, 2).reshape(rows, length, heads * dim)


class GemmaNorm(nn.Module):
    """RMSNorm whose weight counts from 1. It takes a condition, which it ignores, and gives no gate."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x_BSW: Tensor, cond_BC: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the normalised x in its dtype, and None."""
        return rms_norm(x_BSW.to(self.weight.dtype), 1.0 + self.weight, self.eps).to(x_BSW.dtype), None


class AdaptiveNorm(nn.Module):
    """RMSNorm whose scale, shift and gate are a linear function of a condition."""

    def __init__(self, width: int, eps: float, cond: int) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(cond, 3 * width)

    def forward(self, x_BSW: Tensor, cond_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the modulated x, and the gate [B, 1, W] of the branch that takes it, both in x's dtype."""
        return self.modulated(x_BSW, self.modulation(cond_BC))

    def modulation(self, cond_BC: Tensor) -> Tensor:
        """Returns scale, shift and gate one after the other [B, 1, 3 * W]."""
        return self.dense(cond_BC.to(self.dense.weight.dtype))[:, None]

    def modulated(self, x_BSW: Tensor, modulation: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what `forward` does, given what `modulation` returned, of which one row may do for all."""
        scale, shift, gate = modulation.chunk(3, dim=-1)
        normed = rms_norm(x_BSW.to(scale.dtype), None, self.eps)
        return torch.addcmul(shift, normed, 1.0 + scale).to(x_BSW.dtype), gate.to(x_BSW.dtype)


class GemmaMlp(nn.Module):
    """GeGLU with the tanh approximation of GELU (arXiv:2002.05202)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x_BSW: Tensor) -> Tensor:
        """Returns [B, S, W]."""
        return self.down(geglu(self.gate_up(x_BSW)))


class GemmaLayer(nn.Module):
    """One layer; `cond` is the width of the condition, 0 for plain norms."""

    def __init__(self, cfg: Gemma, cond: int = 0) -> None:
        super().__init__()
        self.cfg = cfg
        self.input_norm = _norm(cfg, cond)
        self.qkv = nn.Linear(cfg.width, (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim, bias=False)
        self.out = nn.Linear(cfg.heads * cfg.head_dim, cfg.width, bias=False)
        self.mlp_norm = _norm(cfg, cond)
        self.mlp = GemmaMlp(cfg.width, cfg.mlp)

    def forward(
        self,
        x_BSW: Tensor,
        table: Tensor,
        seen_BK: Tensor,
        before: Keys | None = None,
        cond_BC: Tensor | None = None,
        keys_only: bool = False,
    ) -> tuple[Tensor, Keys]:
        """Returns x after the layer, and the layer's own keys and values; with `keys_only` x is returned as it came.

        Every position attends to the keys `before` and to all of its own tokens, where `seen_BK` says so.
        """
        cfg = self.cfg
        h_BSW, gate = self.input_norm(x_BSW, cond_BC)
        if keys_only:
            heads = rows_from(self.qkv, h_BSW, cfg.heads * cfg.head_dim).unflatten(-1, (-1, cfg.head_dim))
            k, v = heads.chunk(2, dim=2)
            return x_BSW, (rotate(k, table), v)
        q, k, v = self.projected(h_BSW, table)
        keys, values = (k, v) if before is None else (torch.cat((before[0], k), 1), torch.cat((before[1], v), 1))
        x_BSW = _add(x_BSW, self.out(attend(q, keys, values, seen_BK)), gate)
        h_BSW, gate = self.mlp_norm(x_BSW, cond_BC)
        return _add(x_BSW, self.mlp(h_BSW), gate), (k, v)

    def projected(self, h_BSW: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries [B, S, N, D], keys and values [B, S, G, D] of normalised x, turned by their positions."""
        cfg = self.cfg
        heads = self.qkv(h_BSW).unflatten(-1, (-1, cfg.head_dim))
        turned, v = heads.split((cfg.heads + cfg.kv_heads, cfg.kv_heads), dim=2)
        q, k = rotate(turned, table).split((cfg.heads, cfg.kv_heads), dim=2)
        return q, k, v

    def modulations(self, cond_BC: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what a condition makes of the layer's two adaptive norms, each [B, 1, 3 * W]."""
        assert isinstance(self.input_norm, AdaptiveNorm)
        assert isinstance(self.mlp_norm, AdaptiveNorm)
        return self.input_norm.modulation(cond_BC), self.mlp_norm.modulation(cond_BC)

    def denoised(
        self, x_BSW: Tensor, table: Tensor, seen_BK: Tensor, room: Keys, modulations: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Returns x after a layer of adaptive norms, given what `modulations` returned. For inference.

        `room` has the keys and values [B, K, G, D] of earlier tokens, and at its end room for those of x.
        """
        assert isinstance(self.input_norm, AdaptiveNorm)
        assert isinstance(self.mlp_norm, AdaptiveNorm)
        h_BSW, gate = self.input_norm.modulated(x_BSW, modulations[0])
        q, k, v = self.projected(h_BSW, table)
        room[0][:, -k.shape[1] :].copy_(k)
        room[1][:, -v.shape[1] :].copy_(v)
        x_BSW = _add(x_BSW, self.out(attend(q, *room, seen_BK)), gate)
        h_BSW, gate = self.mlp_norm.modulated(x_BSW, modulations[1])
        return _add(x_BSW, self.mlp(h_BSW), gate)


class GemmaTower(nn.Module):
    """Layers and a final norm; embeddings come from outside."""

    def __init__(self, cfg: Gemma, cond: int = 0) -> None:
        super().__init__()
        self.cfg = cfg
        self.layers = nn.ModuleList(GemmaLayer(cfg, cond) for _ in range(cfg.depth))
        self.norm = _norm(cfg, cond)

    def forward(
        self,
        x_BSW: Tensor,
        positions_BS: Tensor,
        seen_BK: Tensor,
        before: Sequence[Keys] = (),
        cond_BC: Tensor | None = None,
        keys_only: bool = False,
    ) -> tuple[Tensor | None, list[Keys]]:
        """Returns the normalised hidden states [B, S, W], and each layer's keys and values.

        `before` has the keys and values of earlier tokens for each layer; `seen_BK` covers them and the own tokens.
        With `keys_only` there are no hidden states: of the last layer only keys and values are computed.
        """
        table, made, last = rope_of(self.cfg, positions_BS), [], len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            earlier = before[i] if before else None
            x_BSW, keys = layer(x_BSW, table, seen_BK, earlier, cond_BC, keys_only and i == last)
            made.append(keys)
        return None if keys_only else self.norm(x_BSW, cond_BC)[0], made


def _norm(cfg: Gemma, cond: int) -> nn.Module:
    return AdaptiveNorm(cfg.width, cfg.eps, cond) if cond else GemmaNorm(cfg.width, cfg.eps)


def _add(x: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
    return x + branch if gate is None else torch.addcmul(x, branch, gate)


def tower_flops(cfg: Gemma, length: int, keys: int, cond: int = 0, keys_only: bool = False) -> float:
    """Returns the floating point operations of the forward of one row of `length` tokens that see `keys` keys."""
    projections = cfg.width * (2 * cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim + 3 * cfg.width * cfg.mlp
    attention = 2 * keys * cfg.heads * cfg.head_dim
    layers, rest = cfg.depth, 0
    if keys_only:
        layers, rest = cfg.depth - 1, length * cfg.width * 2 * cfg.kv_heads * cfg.head_dim
    return 2.0 * (layers * length * (projections + attention) + rest + (2 * cfg.depth + 1) * cond * 3 * cfg.width)


def scaled_embedding(table: nn.Embedding, tokens_BS: Tensor) -> Tensor:
    """Returns the embeddings [B, S, W] multiplied by the root of their width, as Gemma has them."""
    return table(tokens_BS) * math.sqrt(table.embedding_dim)
