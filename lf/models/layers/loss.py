"""Cross entropy over a padded vocabulary.

Shapes: S positions, B rows, P rows of the output layer, padding included.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_losses(logits_SBP: Tensor, labels_BS: Tensor, vocab: int, ignore: int) -> Tensor:
    """Returns the fp32 cross entropy of every position [B, S], zero where the label is `ignore`.

    Columns from `vocab` on are padding: they get no probability and no gradient.
    """
    logits = logits_SBP[..., :vocab].flatten(0, 1).float()
    losses = _CrossEntropy.apply(logits, labels_BS.t().flatten(), ignore)
    return losses.view(logits_SBP.shape[:2]).t()


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy of rows of logits, whose backward writes into the log-probabilities instead of new memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore: int) -> Tensor:
        log_probs = F.log_softmax(logits, dim=-1)
        ctx.save_for_backward(log_probs, labels)
        ctx.ignore = ignore
        return F.nll_loss(log_probs, labels, ignore_index=ignore, reduction="none")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        log_probs, labels = ctx.saved_tensors
        seen = labels != ctx.ignore
        factor = torch.where(seen, grad, 0.0)[:, None]
        grad_logits = log_probs.exp_().mul_(factor)
        # An ignored label stands for no column; column 0 gets its zero.
        return grad_logits.scatter_add_(1, torch.where(seen, labels, 0)[:, None], -factor), None, None
