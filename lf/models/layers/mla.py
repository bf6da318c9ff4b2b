"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in megatron-core's interface.

Shapes: S positions, B rows, H width, N heads of this rank, D width of a query and key (nope, then rope), R rope dims, V
width of a value, T tokens of a packed micro-batch. Under sequence parallelism a rank has s = S / tp positions outside.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint, gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lf.models.layers.megatron import duplicated_linear
from lf.models.layers.rope import rotate
from lf.models.parts import Mla


def pairs_to_halves(x: Tensor) -> Tensor:
    """Returns the last dimension with even dims first, then odd ones: adjacent pairs become half-split ones.

    Queries and keys are permuted alike, so their products stay.
    """
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _up(layers: Any, config: TransformerConfig, narrow: int, wide: int, tp: Any) -> Any:
    """Returns a projection to the heads, which the ranks share."""
    return layers.column_parallel_linear()(
        narrow,
        wide,
        config=config,
        init_method=config.init_method,
        gather_output=False,
        bias=False,
        skip_bias_add=False,
        is_expert=False,
        tp_group=tp,
    )


def _out(layers: Any, config: TransformerConfig, wide: int, tp: Any) -> Any:
    """Returns the projection of all heads' values to the residual stream."""
    return layers.row_parallel_linear()(
        wide,
        config.hidden_size,
        config=config,
        init_method=config.output_layer_init_method,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
        is_expert=False,
        tp_group=tp,
    )


class LatentAttention(MegatronModule):
    """Queries, keys and values from narrow vectors; the rotated part of the keys is shared by all heads.

    Every tensor parallel rank has both down-projections whole and applies them to its own part of the sequence.
    megatron-core's own module loses a part of the gradient there, and lf has one rotary table for all attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        part: Mla,
        layers: Any,
        scale: float,
        again: tuple[str, ...],
        pg_collection: Any = None,
        cp_comm_type: str | None = None,
    ) -> None:
        super().__init__(config=config)
        self.part, self.tp = part, pg_collection.tp
        self.width = part.nope_dim + part.rope_dim
        norm = layers.layer_norm(rms_norm=True, for_qk=True)
        if part.q_rank:
            self.linear_q_down_proj = duplicated_linear(layers, config, config.hidden_size, part.q_rank)
            self.q_layernorm = norm(config, part.q_rank, part.latent_eps)
        self.linear_q_up_proj = _up(layers, config, part.q_rank or config.hidden_size, part.heads * self.width, self.tp)
        self.linear_kv_down_proj = duplicated_linear(layers, config, config.hidden_size, part.kv_rank + part.rope_dim)
        self.kv_layernorm = norm(config, part.kv_rank, part.latent_eps)
        self.linear_kv_up_proj = _up(layers, config, part.kv_rank, part.heads * (part.nope_dim + part.v_dim), self.tp)
        self.core_attention = layers.core_attention()(
            config=config,
            layer_number=layer_number,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            softmax_scale=scale,
            k_channels=self.width,
            v_channels=part.v_dim,
            cp_comm_type=cp_comm_type,
            pg_collection=pg_collection,
        )
        self.linear_proj = _out(layers, config, part.heads * part.v_dim, self.tp)
        self.up_again, self.core_again = "mla_up_proj" in again, "core_attn" in again

    def forward(
        self,
        x_sBH: Tensor,
        attention_mask: Tensor | None = None,
        *,
        rotary_pos_emb: Tensor,
        packed_seq_params: Any = None,
        **unused: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the attention's output [s, B, H] and no bias; the table is `rope_table`'s [2, S, B, 1, R]."""
        narrow_q = self.q_layernorm(self.linear_q_down_proj(x_sBH)[0]) if self.part.q_rank else x_sBH
        narrow, key_R = self.linear_kv_down_proj(x_sBH)[0].split([self.part.kv_rank, self.part.rope_dim], dim=-1)
        inputs = (narrow_q, self.kv_layernorm(narrow), key_R, rotary_pos_emb)
        again = self.up_again and self.training
        q, k, v = checkpoint(self._heads, False, *inputs) if again else self._heads(*inputs)
        if packed_seq_params is not None:
            q, k, v = q.squeeze(1), k.squeeze(1), v.squeeze(1)

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kind = AttnMaskType.causal
            return self.core_attention(
                q, k, v, attention_mask, attn_mask_type=kind, packed_seq_params=packed_seq_params
            )

        out = checkpoint(core, False, q, k, v) if self.core_again and self.training else core(q, k, v)
        return self.linear_proj(out.unsqueeze(1) if packed_seq_params is not None else out)

    def _heads(self, narrow_q: Tensor, narrow: Tensor, key_R: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries and keys [S, B, N, D] and values [S, B, N, V]; the projections gather the sequence."""
        p = self.part
        q = self.linear_q_up_proj(narrow_q)[0].unflatten(-1, (-1, self.width))
        kv = self.linear_kv_up_proj(narrow)[0].unflatten(-1, (-1, p.nope_dim + p.v_dim))
        if self.config.sequence_parallel:
            # Each rank's heads add to its gradient: the backward sums them and takes the own part.
            key_R = gather_from_sequence_parallel_region(key_R, group=self.tp)
        q_nope, q_rope = q.split([p.nope_dim, p.rope_dim], dim=-1)
        k_nope, v = kv.split([p.nope_dim, p.v_dim], dim=-1)
        q_rope = rotate(pairs_to_halves(q_rope), table)
        k_rope = rotate(pairs_to_halves(key_R.unsqueeze(2)), table).expand(*k_nope.shape[:-1], -1)
        return torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v.contiguous()
