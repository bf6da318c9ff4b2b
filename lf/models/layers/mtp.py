"""The heads that predict further tokens while training (multi-token prediction, DeepSeek-V3, arXiv:2412.19437).

Shapes: S positions, B rows, H width. Under sequence parallelism a rank has s = S / tp positions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from lf.models.layers.megatron import duplicated_linear


class MtpHead(MegatronModule):
    """Joins the states of the head before with the embeddings of a further token, and runs one decoder layer."""

    def __init__(
        self, config: TransformerConfig, spec: ModuleSpec, layers: Any, groups: Any, chunk: int | None
    ) -> None:
        super().__init__(config=config)
        norm = layers.layer_norm(rms_norm=True)
        width, eps = config.hidden_size, config.layernorm_epsilon
        self.enorm, self.hnorm = norm(config, width, eps), norm(config, width, eps)
        self.eh_proj = duplicated_linear(layers, config, 2 * width, width)
        self.transformer_layer = build_module(spec, config=config, pg_collection=groups, vp_stage=chunk)
        self.final_layernorm = norm(config, width, eps)

    def forward(self, state_sBH: Tensor, embedded_sBH: Tensor, table: Tensor, packing: Any, pool: Any) -> Tensor:
        """Returns the states [s, B, H] that the output layer, and the next head, take."""

        def run(state: Tensor, embedded: Tensor, pool: Tensor | None) -> Tensor:
            joined, _ = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(state)), dim=-1))
            out, _ = self.transformer_layer(
                hidden_states=joined,
                attention_mask=None,
                rotary_pos_emb=table,
                packed_seq_params=packing,
                padding_mask=pool,
            )
            return self.final_layernorm(out)

        again = self.config.recompute_granularity == "full" and self.training
        return checkpoint(run, False, state_sBH, embedded_sBH, pool) if again else run(state_sBH, embedded_sBH, pool)


class MtpHeads(MegatronModule):
    """One head for each further token, each starting from the states of the one before."""

    def __init__(
        self, config: TransformerConfig, specs: Sequence[ModuleSpec], layers: Any, groups: Any, chunk: int | None
    ) -> None:
        super().__init__(config=config)
        self.layers = torch.nn.ModuleList(MtpHead(config, spec, layers, groups, chunk) for spec in specs)

    def forward(
        self,
        state_sBH: Tensor,
        tokens: Sequence[Tensor],
        embed: Callable[[Tensor], Tensor],
        table: Tensor,
        packing: Any,
        pool: Any,
    ) -> list[Tensor]:
        """Returns each head's states [s, B, H] from the decoder's, after its last norm."""
        states = [state_sBH]
        for head, ahead_BS in zip(self.layers, tokens, strict=True):
            states.append(head(states[-1], embed(ahead_BS), table, packing, pool))
        return states[1:]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the place of every weight, head by head: a plain list of modules has no such answer."""
        found: dict[str, Any] = {}
        for i, head in enumerate(self.layers):
            assert isinstance(head, MtpHead)
            found |= head.sharded_state_dict(f"{prefix}layers.{i}.", sharded_offsets, metadata)
        return found
