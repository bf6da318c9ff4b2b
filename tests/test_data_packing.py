"""Packed rows hold every token once, keep documents apart, and have labels that are true."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lf.data.text import TextRows
from lf.plan.packing import IGNORE, pack_row, pieces, plan_epoch, row_count

PAD = 9999

quick = settings(max_examples=60, derandomize=True, deadline=None)
lengths_lists = st.lists(st.integers(1, 12), min_size=1, max_size=30)
seq_lens = st.integers(2, 9)


def rows_of(lengths: list[int], seq_len: int, seed: int = 0, cross: bool = False) -> TextRows:
    """Rows over documents whose tokens are all different, so that a token says where it comes from."""
    array = np.array(lengths, np.int64)
    return TextRows(
        tokens=np.arange(array.sum()).astype(np.uint16),
        starts=np.cumsum(array) - array,
        lengths=array,
        total=int(array.sum()),
        origins=np.stack([np.zeros_like(array), np.arange(len(array)) + 1], 1),
        names=("a.jsonl",),
        seq_len=seq_len,
        cross_documents=cross,
        pad=PAD,
        vocab=PAD + 1,
        content=0,
        plan=lambda epoch: plan_epoch(array, seq_len, seed, epoch),
    )


def stream_of(rows: TextRows, epoch: int) -> list[int]:
    """The stream of an epoch, put together from its rows; a last token that no row has as an input is a label only."""
    plan = rows.plan(epoch)
    taken = [rows.row(epoch, index) for index in np.argsort(plan.rows)]
    last = plan.documents[-1]
    alone = [int(rows.starts[last] + rows.lengths[last] - 1)] * (rows.total % rows.seq_len == 1)
    return [int(token) for row in taken for token in row["tokens"][: row["real"]]] + alone


@quick
@given(lengths_lists, seq_lens, st.integers(0, 3))
def test_every_token_is_an_input_once_and_rows_rebuild_documents(lengths: list[int], seq_len: int, epoch: int) -> None:
    rows = rows_of(lengths, seq_len)
    assert len(rows) == row_count(sum(lengths), seq_len)
    stream = stream_of(rows, epoch)
    assert sorted(stream) == list(range(sum(lengths)))
    firsts = {int(start): int(length) for start, length in zip(rows.starts, rows.lengths, strict=True)}
    at = 0
    while at < len(stream):
        length = firsts.pop(stream[at])
        assert stream[at : at + length] == list(range(stream[at], stream[at] + length))
        at += length
    assert not firsts


@quick
@given(lengths_lists, seq_lens)
def test_labels_and_segments_stay_inside_documents(lengths: list[int], seq_len: int) -> None:
    rows = rows_of(lengths, seq_len)
    document = np.repeat(np.arange(len(lengths)), lengths)
    last = np.cumsum(lengths) - 1
    for index in range(len(rows)):
        row = rows.row(0, index)
        assert row["tokens"].dtype == row["labels"].dtype == np.int32
        assert len(row["tokens"]) == len(row["labels"]) == seq_len == sum(row["lengths"])
        real = row["tokens"][: row["real"]]
        assert row["labels"][: row["real"]].tolist() == [IGNORE if t in last else t + 1 for t in real]
        assert (row["tokens"][row["real"] :] == PAD).all()
        assert (row["labels"][row["real"] :] == IGNORE).all()
        segments = np.split(row["tokens"], np.cumsum(row["lengths"])[:-1])
        found = [set(document[segment]) if segment[0] != PAD else {-1} for segment in segments]
        assert all(len(of) == 1 for of in found)
        assert all(a != b for a, b in itertools.pairwise(found))


@quick
@given(st.lists(st.integers(2, 12), min_size=1, max_size=12), seq_lens, st.booleans())
def test_every_row_has_a_label(lengths: list[int], seq_len: int, cross: bool) -> None:
    rows = rows_of(lengths, seq_len, cross=cross)
    assert all((rows.row(0, index)["labels"] != IGNORE).any() for index in range(len(rows)))
    assert len(rows) >= 1


def test_a_token_too_many_for_whole_rows_makes_no_row() -> None:
    assert [row_count(tokens, 4) for tokens in (1, 2, 4, 5, 6, 8, 9, 10)] == [0, 1, 1, 1, 2, 2, 2, 3]
    rows = rows_of([9], 4)
    first, second = (rows.row(0, index) for index in np.argsort(rows.plan(0).rows))
    assert (first["labels"].tolist(), second["labels"].tolist()) == ([1, 2, 3, 4], [5, 6, 7, 8])


@quick
@given(lengths_lists, seq_lens)
def test_crossing_rows_are_one_segment_and_labels_run_on(lengths: list[int], seq_len: int) -> None:
    rows = rows_of(lengths, seq_len, cross=True)
    stream = stream_of(rows, 0)
    follow = dict(zip(stream, [*stream[1:], IGNORE], strict=True))
    for index in range(len(rows)):
        row = rows.row(0, index)
        real = row["real"]
        assert row["lengths"] == ((seq_len,) if real == seq_len else (real, seq_len - real))
        assert row["labels"][:real].tolist() == [follow[int(token)] for token in row["tokens"][:real]]
        assert (row["labels"][real:] == IGNORE).all()


def test_a_document_longer_than_the_row_goes_on_in_the_next_with_its_true_labels() -> None:
    rows = rows_of([20], 8)
    first, second, third = (rows.row(0, index) for index in np.argsort(rows.plan(0).rows))
    assert [row["lengths"] for row in (first, second, third)] == [(8,), (8,), (4, 4)]
    assert first["labels"].tolist() == list(range(1, 9))
    assert second["labels"].tolist() == list(range(9, 17))
    assert third["labels"].tolist() == [17, 18, 19] + [IGNORE] * 5


def test_documents_and_rows_have_an_order_of_their_own_in_each_epoch_and_seed() -> None:
    lengths = np.full(40, 3)
    plans = [plan_epoch(lengths, 3, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    orders = [tuple(order.tolist()) for plan in plans for order in (plan.documents, plan.rows)]
    assert len({*orders, tuple(range(40))}) == 7
    again = plan_epoch(lengths, 3, 0, 0)
    assert [tuple(again.documents), tuple(again.rows)] == orders[:2]


def test_ids_name_epoch_index_and_place() -> None:
    rows = rows_of([4, 4], 4)
    ids = [rows.row(2, index)["id"] for index in range(2)]
    assert sorted(text.split(" ")[1] for text in ids) == ["a.jsonl:1", "a.jsonl:2"]
    assert [text.split(" ")[0] for text in ids] == ["2:0", "2:1"]


@quick
@given(lengths_lists, st.data())
def test_pieces_cover_exactly_what_was_asked(lengths: list[int], data: st.DataObject) -> None:
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    first = data.draw(st.integers(0, int(bounds[-1]) - 1))
    last = data.draw(st.integers(first + 1, int(bounds[-1])))
    covered = [
        int(bounds[place]) + at for place, start, stop in pieces(bounds, first, last) for at in range(start, stop)
    ]
    assert covered == list(range(first, last))


def test_pack_row_at_the_edges() -> None:
    full = pack_row(np.array([5, 6, 7], np.int32), [2], seq_len=2, pad=0, cross_documents=False)
    assert (full.tokens.tolist(), full.labels.tolist(), full.lengths) == ([5, 6], [6, IGNORE], (2,))
    short = pack_row(np.array([5], np.int32), [], seq_len=3, pad=0, cross_documents=False)
    assert (short.tokens.tolist(), short.labels.tolist(), short.lengths) == ([5, 0, 0], [IGNORE] * 3, (1, 2))
    exact = pack_row(np.array([5, 6], np.int32), [], seq_len=2, pad=0, cross_documents=True)
    assert (exact.labels.tolist(), exact.lengths, exact.real) == ([6, IGNORE], (2,), 2)
