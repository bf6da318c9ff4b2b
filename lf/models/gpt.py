"""DecoderConfig to megatron-core's GPTModel, and what lf does otherwise.

Shapes: S positions, B rows, H width, V vocabulary, P columns of this rank's output layer. Under sequence parallelism a
rank has s = S / tp positions between the matrices.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.multi_token_prediction import tie_word_embeddings_state_dict
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from lf.models.decoder import DecoderConfig
from lf.models.decoder_facts import mtp_depth, mtp_term, padded_vocab, rope_width, sparse_layers
from lf.models.gpt_spec import layer_spec, transformer_config
from lf.models.layers.loss import token_losses
from lf.models.layers.media import Features, placed
from lf.models.layers.mtp import MtpHeads
from lf.models.layers.rope import DynamicScaling, rope_table
from lf.models.layers.router import Router
from lf.models.spec import IGNORE, Ctx

EMBEDDING = "embedding.word_embeddings.weight"


class Gpt(GPTModel):
    """megatron-core's GPTModel with lf's rotary table, a loss that never sees padded vocabulary, and further heads."""

    def __init__(self, cfg: DecoderConfig, ctx: Ctx, levels: int = 0) -> None:
        config = transformer_config(cfg, ctx)
        chunk = ctx.chunk if ctx.layout.vpp > 1 else None
        first = get_transformer_layer_offset(config, chunk, ctx.layout.pp_rank)
        own = range(first, first + get_num_layers_to_build(config, chunk, ctx.layout.pp_rank))
        super().__init__(
            config,
            TransformerBlockSubmodules(
                layer_specs=[layer_spec(cfg, ctx, layer, levels) for layer in own],
                layer_norm=ctx.layers.layer_norm(rms_norm=True),
            ),
            vocab_size=padded_vocab(cfg, ctx.layout.tp),
            max_sequence_length=cfg.max_length,
            pre_process=ctx.pre,
            post_process=ctx.post,
            share_embeddings_and_output_weights=cfg.tied,
            position_embedding_type="none",
            pg_collection=ctx.groups,
            vp_stage=chunk,
        )
        self.cfg, self.layout = cfg, ctx.layout
        if depth := mtp_depth(cfg):
            self._add_heads(ctx, chunk, depth)
        self.unpadded = {EMBEDDING: cfg.vocab, "output_layer.weight": cfg.vocab}

    def _add_heads(self, ctx: Ctx, chunk: int | None, depth: int) -> None:
        """Adds the heads to the last stage, and the embedding that they need there where the first stage is another."""
        # megatron-core then sums the embedding's gradients over the first and the last stage. It reads the number of
        # heads when it builds a decoder, too, to leave room for its own: hence only now.
        self.config.mtp_num_layers = depth
        if self.post_process:
            last = range(self.cfg.layers, self.cfg.layers + depth)
            specs = [layer_spec(self.cfg, ctx, layer) for layer in last]
            self.mtp = MtpHeads(self.config, specs, ctx.layers, ctx.groups, chunk)
        if self.post_process and not self.pre_process:
            self.embedding = LanguageModelEmbedding(
                config=self.config,
                vocab_size=self.vocab_size,
                max_sequence_length=self.max_sequence_length,
                position_embedding_type="none",
                tp_group=ctx.groups.tp,
            )
            words = self.embedding.word_embeddings
            if self.cfg.tied:
                words.weight = self.output_layer.weight
            else:
                words.weight.shared = True
        if ctx.layout.pp > 1 and (self.pre_process or self.post_process):
            # Both copies lie alone in their gradient bucket, so that the ranks of both stages own the same parts.
            weight: Any = self.shared_embedding_or_output_weight()
            weight.shared_embedding = True

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Returns the embedding of this stage, or else the output layer that is tied to it."""
        if hasattr(self, "embedding"):
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        labels: Tensor | None = None,
        packing: Any = None,
        pool: Tensor | None = None,
        pools: int = 1,
        ahead: Sequence[tuple[Tensor | None, Tensor | None]] = (),
        features: Features | None = None,
    ) -> Any:
        """Returns the loss of every position [B, S]; without labels the logits [B, S, V]; states before the last stage.

        `pool` [B, S] is for the routers, of whose numbers there are `pools`. With `ahead`, tokens and labels [B, S] of
        each further head, a training model returns a tensor for each loss term.
        """
        table = self._rope(position_ids)
        if pool is not None:
            pool = self._own(pool)
            for router in self._routers():
                router.pools = pools
        states = self.decoder(
            hidden_states=self._embedded(input_ids, position_ids, features) if self.pre_process else None,
            attention_mask=None,
            context=features.levels if features else None,
            context_mask=features.slots if features else None,
            rotary_pos_emb=table,
            packed_seq_params=packing,
            padding_mask=pool,
        )
        if not self.post_process:
            return states
        main = self._output(states, labels)
        tokens = [tokens for tokens, _ in ahead if tokens is not None]
        # megatron-core takes a model that has the attribute for one that has heads.
        further = getattr(self, "mtp", None)
        if further is None or not self.training or not tokens:
            return main
        heads = further(states, tokens, lambda ids: self.embedding(ids, position_ids), table, packing, pool)
        terms = {
            mtp_term(d): self._output(head, None if labels is None else ahead[d - 1][1])
            for d, head in enumerate(heads, 1)
        }
        return {"lm": main, **terms}

    def _embedded(self, input_ids: Tensor, position_ids: Tensor, features: Features | None) -> Tensor:
        states: Tensor = self.embedding(input_ids, position_ids)
        return placed(states, features) if features else states

    def _rope(self, position_ids: Tensor) -> Tensor:
        # Only dynamic scaling asks for the longest position, and reading it makes an accelerator wait.
        dynamic = isinstance(self.cfg.rope.scaling, DynamicScaling)
        longest = int(position_ids.max()) + 1 if dynamic else 0
        table = rope_table(self.cfg.rope, rope_width(self.cfg.attention), position_ids, longest)
        return table.to(self.config.params_dtype)

    def _own(self, pool_BS: Tensor) -> Tensor:
        """Returns the pools of this rank's tokens between the matrices [s, B]."""
        pool = pool_BS.t()
        return pool.chunk(self.layout.tp)[self.layout.tp_rank] if self.layout.sp else pool

    def _output(self, states: Tensor, labels_BS: Tensor | None) -> Tensor:
        """Returns the fp32 cross entropy of every position [B, S], or without labels the logits [B, S, V]."""
        weight = self.shared_embedding_or_output_weight() if self.cfg.tied else None
        logits_SBP, _ = self.output_layer(states, weight=weight)
        if labels_BS is not None:
            return token_losses(logits_SBP, labels_BS, self.cfg.vocab, IGNORE, self.pg_collection.tp)
        logits = gather_from_tensor_model_parallel_region(logits_SBP, group=self.pg_collection.tp)
        return logits.transpose(0, 1)[..., : self.cfg.vocab].contiguous()

    def _routers(self) -> list[Router]:
        return [module for module in self.modules() if isinstance(module, Router)]

    def start_pass(self, weights: Mapping[str, float]) -> None:
        """Makes the routers ready for the micro-batches of a pass."""
        for router in self._routers():
            router.start_pass(weights)

    def own_terms(self) -> dict[str, Tensor]:
        """Returns this rank's share of the sums of the routers' losses, as means over all layers that have one."""
        total: dict[str, Tensor] = {}
        for router in self._routers():
            for name, value in router.sums.items():
                total[name] = total.get(name, torch.zeros_like(value)) + value / sparse_layers(self.cfg)
        return total

    def after_update(self) -> None:
        """Moves the routers' biases."""
        for router in self._routers():
            router.after_update()

    def sharded_state_dict(self, *args: Any, metadata: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Returns the place of every weight; the last stage's copy of the embedding is a replica."""
        found = super().sharded_state_dict(*args, metadata=metadata, **kwargs)
        if EMBEDDING in found and not self.pre_process:
            weight = self.shared_embedding_or_output_weight()
            groups = self.pg_collection
            tie_word_embeddings_state_dict(found, weight, EMBEDDING, groups.tp, groups.dp_cp)
        return found


def build_gpt(cfg: DecoderConfig, ctx: Ctx) -> Gpt:
    """Returns the decoder of this rank, its weights not yet set."""
    with torch.device("meta" if ctx.meta else ctx.device.torch_type):
        return Gpt(cfg, ctx)
