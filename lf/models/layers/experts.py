"""The experts of a rank as grouped matrix products, and the layer that sends tokens to them and back.

Shapes: S positions, B rows, H width of the residual stream, T tokens that this rank's experts get (one token may come
several times), E experts of this rank, F this rank's width of an expert.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import checkpoint
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from lf.models.layers.fused import swiglu
from lf.models.layers.router import Router
from lf.models.parts import Experts

DISPATCHERS = {"alltoall": MoEAlltoAllTokenDispatcher, "allgather": MoEAllGatherTokenDispatcher}


def _check_rows(config: TransformerConfig, part: Experts, etp: int) -> None:
    """Raises ValueError where torch's grouped products, which take rows of 16 bytes and multiples, cannot run."""
    size = config.params_dtype.itemsize
    for name, extent in (("hidden", config.hidden_size), ("experts.width", part.width // etp)):
        if extent * size % 16:
            raise ValueError(
                f"model.{name} gives the experts of a rank rows of {extent} numbers of {size} bytes (parallel.etp = "
                f"{etp}), and grouped products need multiples of 16 bytes; make model.{name} a multiple of "
                f"{16 // size * (etp if name != 'hidden' else 1)}, or lower parallel.etp"
            )


class GroupedExperts(MegatronModule):
    """Gated feed-forward layers, all experts of a rank in one product.

    `gate_up` is [E, 2, F, H], gate first, and `down` [E, H, F]. Expert parallel ranks share E, expert tensor parallel
    ranks F. Their gradients are summed over the ranks that hold the same experts, and over no others.
    """

    def __init__(self, config: TransformerConfig, part: Experts, groups: Any) -> None:
        super().__init__(config=config)
        self.groups = groups
        count, width = part.count // groups.ep.size(), part.width // groups.expt_tp.size()
        _check_rows(config, part, groups.expt_tp.size())
        self.gate_up = nn.Parameter(torch.empty(count, 2, width, config.hidden_size, dtype=config.params_dtype))
        self.down = nn.Parameter(torch.empty(count, config.hidden_size, width, dtype=config.params_dtype))
        for param in (self.gate_up, self.down):
            param.allreduce = False  # type: ignore[attr-defined]
            # The norm of all gradients counts every expert, whichever tensor parallel rank holds it.
            set_tensor_model_parallel_attributes(param, True, 2, 1)
        modules = config.recompute_modules if config.recompute_granularity == "selective" else ()
        self.again = "moe_act" in modules

    def forward(self, x_TH: Tensor, counts_E: Tensor, weights_T: Tensor) -> tuple[Tensor, None]:
        """Returns the experts' outputs [T, H], each times its weight, for tokens in the order of the experts."""
        ends = counts_E.cumsum(0).to(device=x_TH.device, dtype=torch.int32)
        wide = F.grouped_mm(x_TH.contiguous(), self.gate_up.flatten(1, 2).transpose(1, 2), offs=ends)
        active = checkpoint(self._activate, False, wide, weights_T) if self.again else self._activate(wide, weights_T)
        return F.grouped_mm(active, self.down.transpose(1, 2), offs=ends), None

    def _activate(self, wide: Tensor, weights_T: Tensor) -> Tensor:
        if self.config.activation_func is F.silu:
            active = swiglu(wide)
        else:
            gate, up = wide.chunk(2, dim=-1)
            active = self.config.activation_func(gate) * up
        return (active * weights_T[:, None]).to(wide.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the place of both weights; replicas are the ranks that hold the same experts."""
        g = self.groups
        experts, width = (g.ep.rank(), g.ep.size()), (g.expt_tp.rank(), g.expt_tp.size())
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}{name}", param, (0, *experts), (2, *width), replica_id=(0, 0, g.expt_dp.rank())
            )
            for name, param in (("gate_up", self.gate_up), ("down", self.down))
        }


class Moe(MegatronModule):
    """A router, the experts it sends tokens to, and a shared expert for all tokens."""

    def __init__(self, config: TransformerConfig, part: Experts, groups: Any, shared: MLPSubmodules) -> None:
        super().__init__(config=config)
        self.router = Router(config, part, groups)
        self.experts = GroupedExperts(config, part, groups)
        self.part, self.groups = part, groups
        self.shared_experts = SharedExpertMLP(config, shared, part.shared_gate, groups) if part.shared else None
        modules = config.recompute_modules if config.recompute_granularity == "selective" else ()
        self.again, self.shared_again = "moe" in modules, "shared_experts" in modules

    @functools.cached_property
    def dispatcher(self) -> Any:
        """What sends tokens to the ranks of their experts; made on use, since it asks for a stream of the device."""
        own = self.part.count // self.groups.ep.size()
        first = self.groups.ep.rank() * own
        return DISPATCHERS[self.part.dispatch](own, list(range(first, first + own)), self.config, self.groups)

    def forward(self, x_SBH: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, None]:
        """Returns the layer's output [S, B, H]; `padding_mask` has the router's pools [S, B]."""
        if self.again:
            return checkpoint(self._forward, False, x_SBH, padding_mask), None
        return self._forward(x_SBH, padding_mask), None

    def _forward(self, x_SBH: Tensor, pool_SB: Tensor | None) -> Tensor:
        to = self.dispatcher
        weights, chosen = self.router(x_SBH, pool_SB)
        tokens, weights = to.token_dispatch(*to.dispatch_preprocess(x_SBH, chosen, weights))
        out, _ = self.experts(*to.dispatch_postprocess(tokens, weights))
        out = to.combine_postprocess(to.token_combine(to.combine_preprocess(out)))
        if self.shared_experts is None:
            return out
        shared = checkpoint(self.shared_experts, False, x_SBH) if self.shared_again else self.shared_experts(x_SBH)
        return out + shared


class SparseLayer(TransformerLayer):
    """A decoder layer with experts."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        part: Experts,
        shared: MLPSubmodules,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        assert submodules.mlp is IdentityOp
        super().__init__(config, submodules, pg_collection=pg_collection, **kwargs)
        self.mlp = Moe(config, part, pg_collection, shared)
        self.recompute_mlp = False  # It stands for dense layers; those with experts have names of their own.
