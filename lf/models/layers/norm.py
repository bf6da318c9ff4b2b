"""RMSNorm (arXiv:1910.07467) over one dimension, or over all heads of queries or keys together.

Shapes: N heads of this rank, D head width.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from lf.models.layers.fused import rms_norm


class TorchNorm(nn.Module):
    """RMSNorm over the last dimension whose weight knows that sequence parallel ranks each see a part."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Returns x of the same shape, normalised."""
        return rms_norm(x, self.weight, self.eps)


class _SumOver(torch.autograd.Function):
    """Sums over the ranks of a group, each of which uses the sum for its own part: so gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class HeadsNorm(nn.Module):
    """RMSNorm over all heads together (MiniMax-M2), which tensor parallel ranks share: each has the weights of its own.

    Input and output are [..., N, D]; the weight is [N * D].
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int, group: Any) -> None:
        super().__init__()
        self.eps, self.width, self.group = eps, heads * hidden_size, group
        self.weight = nn.Parameter(torch.ones(self.width // group.size(), dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns x of the same shape, normalised."""
        wide = x.flatten(-2).float()
        total = wide.square().sum(-1, keepdim=True)
        if self.group.size() > 1:
            total = _SumOver.apply(total, self.group)
        return (wide * torch.rsqrt(total / self.width + self.eps) * self.weight).to(x.dtype).view_as(x)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the place of the weight: tensor parallel ranks share its rows."""
        assert metadata is not None
        name, place = f"{prefix}weight", (0, self.group.rank(), self.group.size())
        replica = (0, 0, metadata["dp_cp_group"].rank())
        return {name: ShardedTensor.from_rank_offsets(name, self.weight, place, replica_id=replica)}
