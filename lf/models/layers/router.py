"""Which experts a token goes to, and the losses and the bias that keep their loads even.

Shapes: S positions, B rows, H width, T tokens of this rank (S * B), E experts, R pools of a micro-batch: what a balance
loss is taken over.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from lf.models.decoder_facts import BALANCE, ROUTER_Z
from lf.models.parts import Experts


def choose(scores_TE: Tensor, bias_E: Tensor | None, part: Experts) -> tuple[Tensor, Tensor]:
    """Returns the weight of each expert in a token's output [T, E], zero for those not chosen, and who was chosen."""
    ranked = scores_TE if bias_E is None else scores_TE + bias_E
    if part.groups > 1:
        grouped = ranked.unflatten(1, (part.groups, -1))
        best = grouped.amax(-1) if part.group_rank == "max" else grouped.topk(2, dim=-1).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, best.topk(part.group_top_k).indices, True)
        ranked = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    chosen = torch.zeros_like(ranked, dtype=torch.bool).scatter(1, ranked.topk(part.top_k).indices, True)
    weights = scores_TE * chosen
    if part.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * part.scale, chosen


class _Attach(torch.autograd.Function):
    """Gives a tensor on, and starts the backward of a loss beside it with a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=torch.float32)


class Router(MegatronModule):
    """Scores experts in fp32 and chooses a token's few. Tensor parallel ranks each have other tokens."""

    def __init__(self, config: TransformerConfig, part: Experts, groups: Any) -> None:
        super().__init__(config=config)
        self.part, self.groups = part, groups
        self.weight = nn.Parameter(torch.empty(part.count, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        if part.bias:
            # No optimiser moves it, but it is saved, restored and exported like any weight.
            self.expert_bias = nn.Parameter(torch.zeros(part.count, dtype=torch.float32), requires_grad=False)
        self.pools = 1
        self.factors: dict[str, float] = {}
        self.sums: dict[str, Tensor] = {}
        self.counts = self.seen = torch.zeros(0)

    def forward(self, x_SBH: Tensor, pool_SB: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns weights and choice of `choose`; `pool_SB` says which pool a token is in, -1 for padding."""
        logits = F.linear(x_SBH.flatten(0, 1).float(), self.weight.float())
        scores = logits.softmax(-1) if self.part.score == "softmax" else logits.sigmoid()
        weights, chosen = choose(scores, self.expert_bias if self.part.bias else None, self.part)
        # The first pass of a recomputed layer has no gradient: what follows happens once a micro-batch.
        if self.training and torch.is_grad_enabled():
            pool = torch.zeros_like(chosen[:, 0], dtype=torch.long) if pool_SB is None else pool_SB.flatten()
            self._count(chosen, pool)
            for name, loss in self._losses(logits, scores, pool).items():
                self.sums[name] = self.sums.get(name, 0.0) + loss.detach()
                weights = _Attach.apply(weights, loss * self.factors[name])
        if self.part.capacity:
            weights, chosen = apply_router_token_dropping(
                weights, chosen, self.part.top_k, self.part.capacity, "probs", self.part.pad
            )
        return weights, chosen

    def _count(self, chosen: Tensor, pool: Tensor) -> None:
        if self.part.bias:
            load = (chosen & (pool >= 0)[:, None]).sum(0)
            self.counts = load if not len(self.counts) else self.counts + load

    def _losses(self, logits: Tensor, scores: Tensor, pool: Tensor) -> dict[str, Tensor]:
        """Returns this rank's share of the sum of each loss of this layer, before coefficients."""
        real = pool >= 0
        losses = {}
        if BALANCE in self.factors:
            losses[BALANCE] = self._balance(scores, pool, real)
        if ROUTER_Z in self.factors:
            losses[ROUTER_Z] = (logits.logsumexp(-1).square() * real).sum()
        return losses

    def _balance(self, scores: Tensor, pool: Tensor, real: Tensor) -> Tensor:
        part, overall = self.part, self.part.balance == "global"
        if part.score == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        with torch.no_grad():
            top = torch.zeros_like(scores).scatter(1, scores.topk(part.top_k).indices, 1.0) * real[:, None]
            loads = scores.new_zeros(self.pools, part.count).index_add_(0, pool.clamp(min=0), top)
            dist.all_reduce(loads, group=self.groups.tp_dp_cp if overall else self.groups.tp_cp)
            if overall:
                self.seen = loads = loads if not len(self.seen) else self.seen + loads
            tokens = (loads.sum(-1, keepdim=True) / part.top_k).clamp(min=1.0)
            factor = part.count / part.top_k * loads / tokens / (1.0 if overall else tokens)
        # Each rank adds the scores of its own tokens: shares of ranks and micro-batches sum to the loss of the whole.
        return (scores * factor[pool.clamp(min=0)] * real[:, None]).sum()

    def start_pass(self, weights: Mapping[str, float]) -> None:
        """Forgets the last pass; a loss's factor is its coefficient over its weight in the global batch."""
        coefficients = {BALANCE: self.part.balance_coef, ROUTER_Z: self.part.z_coef}
        self.factors = {name: coefficients[name] / weights[name] for name in coefficients if weights.get(name)}
        self.sums, self.seen = {}, torch.zeros(0)

    def after_update(self) -> None:
        """Moves the bias by `bias_rate` towards even loads, as counted over all ranks since the last update."""
        if not self.part.bias or not len(self.counts):
            return
        loads = self.counts.float()
        dist.all_reduce(loads, group=self.groups.tp_dp_cp)
        self.expert_bias.add_((loads.mean() - loads).sign(), alpha=self.part.bias_rate)
        self.counts = torch.zeros(0)
