"""Cross entropy over a padded vocabulary that tensor parallel ranks share.

Shapes: S positions, B rows, P columns of this rank's part of the output layer, padding included; N = S * B.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_losses(logits_SBP: Tensor, labels_BS: Tensor, vocab: int, ignore: int, group: Any) -> Tensor:
    """Returns the fp32 cross entropy of every position [B, S], zero where the label is `ignore`.

    Rank r of the tensor parallel group has columns [r * P, (r + 1) * P). Columns from `vocab` on are padding: they get
    no probability and no gradient.
    """
    first = group.rank() * logits_SBP.shape[-1]
    own = max(0, min(vocab - first, logits_SBP.shape[-1]))
    logits = logits_SBP[..., :own].flatten(0, 1).float()
    labels = labels_BS.t().flatten()
    losses = _CrossEntropy.apply(logits, labels - first, labels != ignore, group)
    return losses.view(logits_SBP.shape[:2]).t()


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of rows of logits, whose backward writes into the log-probabilities instead of new memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, seen: Tensor, group: Any) -> Tensor:
        mine = seen & (labels >= 0) & (labels < logits.shape[1])
        # A label of another rank, or none, stands for no column here; column 0 gets its zero.
        column = torch.where(mine, labels, 0)[:, None]
        log_probs = _log_probs(logits, group)
        losses = logits.new_zeros(len(logits))
        if logits.shape[1]:
            losses = torch.where(mine, -log_probs.gather(1, column)[:, 0], losses)
        if group.size() > 1:
            dist.all_reduce(losses, group=group)
        ctx.save_for_backward(log_probs, column, mine, seen)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        log_probs, column, mine, seen = ctx.saved_tensors
        grad_logits = log_probs.exp_().mul_(torch.where(seen, grad, 0.0)[:, None])
        if log_probs.shape[1]:
            grad_logits.scatter_add_(1, column, -torch.where(mine, grad, 0.0)[:, None])
        return grad_logits, None, None, None


def _log_probs(logits: Tensor, group: Any) -> Tensor:
    """Returns the logarithms of the softmax over all ranks' columns, in new memory."""
    if group.size() == 1:
        return torch.log_softmax(logits, dim=-1)
    top = logits.amax(dim=-1) if logits.shape[1] else logits.new_full(logits.shape[:1], -torch.inf)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - top[:, None]
    total = shifted.exp().sum(dim=-1)
    dist.all_reduce(total, group=group)
    return shifted.sub_(total.log_()[:, None])
