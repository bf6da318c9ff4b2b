"""What a row's cost follows from, told without reading the row."""

import functools
from typing import Any

from lf.models.spec import no_rule


@functools.singledispatch
def outline(rows: Any, epoch: int, index: int) -> dict[str, Any]:
    """Returns a row as `rows.row(epoch, index)` gives it, of sizes alone: nothing of the row is read.

    It has the row's `id`, the `lengths` of documents and the `media` where rows have them, and tensors of the row as
    tensors without values (torch's device `meta`). Sources without a rule are read before it is known what rows cost.
    """
    raise no_rule(outline, rows)
