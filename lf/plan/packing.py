"""Packs documents into rows of one length, from the documents' lengths alone.

The documents of an epoch stand in a random order, end to end: the stream. It is cut every S tokens, and the rows are
put in a random order of their own. Any row is found without making another one.

Shapes: D documents, R rows of an epoch, S positions of a row.
"""

import itertools
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.models.spec import IGNORE
from lf.plan.order import permutation


@attrs.frozen(kw_only=True, eq=False)
class EpochPlan:
    """Where the documents and rows of one epoch stand."""

    documents: NDArray[np.int64]
    """[D] the document at each place of the stream."""
    bounds: NDArray[np.int64]
    """[D + 1] the position in the stream where each place starts, then the stream's length."""
    rows: NDArray[np.int64]
    """[R] the row of the stream, counted from its start, that each index of the epoch names."""


@attrs.frozen(kw_only=True, eq=False)
class PackedRow:
    """One row, ready for a model."""

    tokens: NDArray[np.int32]
    """[S] input ids."""
    labels: NDArray[np.int32]
    """[S] the id that follows each position; IGNORE where there is none to learn."""
    lengths: tuple[int, ...]
    """Tokens of each segment, summing to S. Attention never crosses segments; padding is one of its own at the end."""
    real: int
    """Tokens that are not padding."""


def row_count(tokens: int, seq_len: int) -> int:
    """Returns the rows of `seq_len` that hold `tokens` tokens, the last one padded.

    The last token of all has no label. Where it would stand alone in a row it is the label of the row before only, so
    that every row has something to learn as long as every document has two tokens.
    """
    return -(-(tokens - 1) // seq_len)


def plan_epoch(lengths: NDArray[np.int64], seq_len: int, seed: int, epoch: int) -> EpochPlan:
    """Returns the plan of an epoch over documents of `lengths` [D] tokens, a function of the arguments alone."""
    documents = permutation(len(lengths), seed, epoch, 0)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[documents], dtype=np.int64)])
    return EpochPlan(
        documents=documents, bounds=bounds, rows=permutation(row_count(int(bounds[-1]), seq_len), seed, epoch, 1)
    )


def pieces(bounds: NDArray[np.int64], first: int, last: int) -> list[tuple[int, int, int]]:
    """Returns what `[first, last)` of the stream is made of: (place, start in its document, stop in its document)."""
    at = int(np.searchsorted(bounds, first, side="right")) - 1
    end = int(np.searchsorted(bounds, last, side="left"))
    starts = bounds[at : end + 1].tolist()
    return [
        (at + i, max(first, start) - start, min(last, stop) - start)
        for i, (start, stop) in enumerate(itertools.pairwise(starts))
        if max(first, start) < min(last, stop)
    ]


def pack_row(
    stream: NDArray[np.int32], starts: list[int], *, seq_len: int, pad: int, cross_documents: bool
) -> PackedRow:
    """Returns the row that begins with `stream`, a run of the stream up to one token longer than the row.

    `starts` are the offsets in `stream`, beyond 0, where a document starts. The token past the row is the label of the
    row's last position. A run of `seq_len` or less is the end of the epoch: its last token has no label, and `pad`
    fills the row. Labels cross from one document to the next only where `cross_documents` says so, and then the
    documents of the row are one segment.
    """
    real = min(len(stream), seq_len)
    tokens = np.full(seq_len, pad, np.int32)
    labels = np.full(seq_len, IGNORE, np.int32)
    tokens[:real] = stream[:real]
    labels[: len(stream) - 1] = stream[1:]
    cuts = [] if cross_documents else starts
    labels[[start - 1 for start in cuts]] = IGNORE
    return PackedRow(tokens=tokens, labels=labels, lengths=segments(cuts, real, seq_len), real=real)


def segments(starts: list[int], real: int, seq_len: int) -> tuple[int, ...]:
    """Returns the `lengths` of a packed row: documents start at 0 and at `starts`, and padding fills it from `real`."""
    edges = [0, *(start for start in starts if start < real), real]
    return filled([stop - start for start, stop in itertools.pairwise(edges)], seq_len)


def filled(lengths: Sequence[int], size: int) -> tuple[int, ...]:
    """Returns the lengths of segments, with one of its own for what fills them up to `size`, where something does."""
    rest = size - sum(lengths)
    return (*lengths, rest) if rest else tuple(lengths)


@attrs.frozen(kw_only=True, eq=False)
class WholePlan:
    """Rows of whole documents: none is cut."""

    documents: NDArray[np.int64]
    """[D] the documents of all rows, row by row."""
    bounds: NDArray[np.int64]
    """[R + 1] where in `documents` each row starts, then their number."""


def plan_whole(lengths: NDArray[np.int64], seq_len: int, seed: int, open_rows: int = 32) -> WholePlan:
    """Returns rows of at most `seq_len` tokens of documents of `lengths` [D], none longer; the arguments alone decide.

    The documents come in a random order, and each goes into the first of the last `open_rows` rows that has room. The
    rows are the same in every epoch, so that an epoch always has as many; their order is for the caller to draw.
    """
    rows: list[list[int]] = []
    open_: list[tuple[int, int]] = []  # Rows that may have room, and how much.
    for document in permutation(len(lengths), seed, 0, 2).tolist():
        length = int(lengths[document])
        place = next((at for at, (_, room) in enumerate(open_) if room >= length), None)
        if place is None:
            open_.append((len(rows), seq_len))
            rows.append([])
            open_ = open_[-open_rows:]
            place = len(open_) - 1
        row, room = open_[place]
        rows[row].append(document)
        open_[place] = (row, room - length)
    return WholePlan(
        documents=np.array(list(itertools.chain.from_iterable(rows)), np.int64),
        bounds=np.concatenate([np.zeros(1, np.int64), np.cumsum([len(row) for row in rows], dtype=np.int64)]),
    )
