"""Core attention on torch's scaled_dot_product_attention, in megatron-core's interface.

Shapes: S queries, K keys, B rows, N heads, G key heads, D head width, T tokens of a packed micro-batch. Values may be
narrower than keys.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from lf.models.layers.context import GatherSequence, heads_for_sequence, pieces, sequence_for_heads


@dataclasses.dataclass
class Packed(PackedSeqParams):
    """megatron-core's description of a packed micro-batch, with the lengths where Python can read them."""

    lengths: tuple[int, ...] = ()
    """Tokens of each document, in order."""


class TorchAttention(MegatronModule):
    """Causal or full attention with grouped heads, sliding windows, packed documents and a key-value cache."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        *,
        pg_collection: Any,
    ) -> None:
        super().__init__(config=config)
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        self.exchange = cp_comm_type == "a2a"
        self.attn_mask_type = attn_mask_type
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: int | None = config.window_size[0] if windowed else None
        self.cache: list[Tensor] | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Packed | None = None,
    ) -> Tensor:
        """Returns [S, B, N*D] from query [S, B, N, D] and key, value [K, B, G, D]; packed: [T, N*D] from [T, N, D]."""
        causal = (self.attn_mask_type if attn_mask_type is None else attn_mask_type) != AttnMaskType.no_mask
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params.lengths, causal)
        if self.cache is not None:
            if self.cache:
                key, value = torch.cat([self.cache[0], key]), torch.cat([self.cache[1], value])
            self.cache[:] = [key, value]
        return self._attend(query, key, value, causal)

    def _packed(self, q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, lengths: tuple[int, ...], causal: bool) -> Tensor:
        ranks = self.cp_group.size()
        if ranks == 1:
            return self._documents(q_TND, k_TGD, v_TGD, ((0, q_TND.shape[0]),), lengths, causal)
        if self.exchange:
            q, k, v = (heads_for_sequence(t, self.cp_group) for t in (q_TND, k_TGD, v_TGD))
            out = self._documents(q, k, v, ((0, q.shape[0]),), lengths, causal)
            return sequence_for_heads(out.unflatten(1, (q.shape[1], -1)), self.cp_group).flatten(1)
        k, v = (GatherSequence.apply(t, self.cp_group) for t in (k_TGD, v_TGD))
        mine = pieces(self.cp_group.rank(), ranks, k.shape[0])
        return self._documents(q_TND, k, v, mine, lengths, causal)

    def _documents(
        self,
        q_TND: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        held: tuple[tuple[int, int], ...],
        lengths: tuple[int, ...],
        causal: bool,
    ) -> Tensor:
        """Returns the attention of the queries of the spans `held` of a sequence to their own documents."""
        out, at = [], 0
        ends = list(itertools.accumulate(lengths))
        for first, last in held:
            for begin, end in zip([0, *ends], ends, strict=False):
                start, stop = max(first, begin), min(last, end)
                if start < stop:
                    keys = slice(begin, stop if causal else end)
                    queries = slice(at, at + stop - start)
                    q, k, v = (t.unsqueeze(1) for t in (q_TND[queries], k_TGD[keys], v_TGD[keys]))
                    out.append(self._attend(q, k, v, causal).squeeze(1))
                    at += stop - start
        return torch.cat(out)

    def _attend(self, q_SBND: Tensor, k_KBGD: Tensor, v_KBGD: Tensor, causal: bool) -> Tensor:
        queries, keys = q_SBND.shape[0], k_KBGD.shape[0]
        mask = None
        if causal and (self.window is not None or 1 < queries < keys):
            at = torch.arange(keys - queries, keys, device=q_SBND.device)[:, None]
            seen = torch.arange(keys, device=q_SBND.device)[None]
            mask = (seen <= at) if self.window is None else (seen <= at) & (seen >= at - self.window)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_KBGD, v_KBGD))
        width = v.shape[-1]
        if width < q.shape[-1]:
            # torch's fused attention takes one width only; without it all scores would be kept.
            v = F.pad(v, (0, q.shape[-1] - width))
        dropout = self.dropout if self.training else 0.0
        # Heads differ between tensor parallel ranks, so their dropout must too: it draws from the ranks' own states.
        draws = get_cuda_rng_tracker().fork() if dropout > 0 else contextlib.nullcontext()
        with draws:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout,
                is_causal=causal and mask is None and queries > 1,
                scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out[..., :width].permute(2, 0, 1, 3).flatten(2)


@contextlib.contextmanager
def key_value_cache(model: nn.Module) -> Iterator[bool]:
    """Lets every attention of a model keep the keys and values it has seen, until the block ends.

    Gives whether the model has such attention; TransformerEngine's keeps nothing.
    """
    cores = [m for m in model.modules() if isinstance(m, TorchAttention)]
    for core in cores:
        core.cache = []
    try:
        yield bool(cores)
    finally:
        for core in cores:
            core.cache = None
