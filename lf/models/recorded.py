"""The recorded inputs of a public language model as rows of lf's."""

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lf.models.spec import IGNORE, ModelConfig


@functools.singledispatch
def recorded_rows(cfg: ModelConfig, recorded: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Returns the rows of `input_ids` and `labels` (unshifted) [B, S] that were recorded; each is one document."""
    ids, labels = recorded["input_ids"].cpu().numpy(), recorded["labels"].cpu().numpy()
    return [
        {
            "tokens": row,
            "labels": [*labels[i, 1:].tolist(), IGNORE],
            "lengths": (len(row),),
            "real": len(row),
            "id": f"golden:{i}",
        }
        for i, row in enumerate(ids)
    ]
