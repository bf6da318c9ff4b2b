"""Cross entropy over a padded vocabulary.

Shapes: S positions, B rows, P rows of the output layer, padding included.
"""

import torch.nn.functional as F
from torch import Tensor


def token_losses(logits_SBP: Tensor, labels_BS: Tensor, vocab: int, ignore: int) -> Tensor:
    """Returns the fp32 cross entropy of every position [B, S], zero where the label is `ignore`.

    Columns from `vocab` on are padding: they get no probability and no gradient.
    """
    logits = logits_SBP[..., :vocab].flatten(0, 1).float()
    losses_SB = F.cross_entropy(logits, labels_BS.t().flatten(), ignore_index=ignore, reduction="none")
    return losses_SB.view(logits_SBP.shape[:2]).t()
