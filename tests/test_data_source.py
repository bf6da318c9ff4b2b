"""Sources of one's own, and mixtures in order and proportion."""

from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import pytest

from lf.data.config import DataConfig, Mixture, TextData, Weighted
from lf.data.source import DataCtx, Row, Rows, locate, open_data, texts
from tests.data_tools import context, write


@attrs.frozen(kw_only=True)
class Numbers(DataConfig):
    """A source that a user defines in a config file."""

    count: int
    width: int = 4


@attrs.frozen(kw_only=True)
class NumberRows:
    cfg: Numbers
    ctx: DataCtx

    def __len__(self) -> int:
        return self.cfg.count

    def row(self, epoch: int, index: int) -> Row:
        return {"value": epoch * len(self) + index, "seed": self.ctx.seed, "id": f"{epoch}:{index}"}

    def describe(self) -> dict[str, int]:
        return {"rows": self.cfg.count, "length": self.cfg.width}


@open_data.register
def _(cfg: Numbers, ctx: DataCtx) -> NumberRows:
    return NumberRows(cfg=cfg, ctx=ctx)


def mixture(*parts: tuple[DataConfig, float]) -> Mixture:
    return Mixture(parts=tuple(Weighted(data=data, weight=weight) for data, weight in parts))


def take(rows: Rows, count: int) -> list[dict[str, Any]]:
    return [rows.row(*locate(rows, k)) for k in range(count)]


def test_a_source_of_ones_own_is_one_rule(tmp_path: Path) -> None:
    rows = open_data(Numbers(count=3), context(tmp_path))
    assert [row["value"] for row in take(rows, 7)] == list(range(7))


def test_a_source_without_a_rule_says_what_to_write(tmp_path: Path) -> None:
    class Other(DataConfig):
        pass

    with pytest.raises(
        NotImplementedError, match=r"open_data has no rule for .*Other; add one with @open_data\.register"
    ):
        open_data(Other(), context(tmp_path))
    with pytest.raises(NotImplementedError, match="texts has no rule"):
        texts(Numbers(count=1), context(tmp_path))


def test_a_mixture_takes_every_part_in_order_and_proportion(tmp_path: Path) -> None:
    cfg = mixture((Numbers(count=10), 1.0), (Numbers(count=7), 3.0), (mixture((Numbers(count=5), 2.0)), 0.5))
    rows = open_data(cfg, context(tmp_path))
    assert len(rows) == 22
    assert rows.describe() == {"rows": 22, "length": 4}
    taken = take(rows, 450)
    by_part: dict[str, list[int]] = {}
    for row in taken:
        by_part.setdefault(row["id"].split("/")[0], []).append(row["value"])
    assert {part: len(values) for part, values in by_part.items()} == {"0": 100, "1": 300, "2": 50}
    assert all(values == list(range(len(values))) for values in by_part.values())
    assert Counter(row["id"] for row in taken).most_common(1)[0][1] == 1
    assert len({row["seed"] for row in taken}) == 3
    assert rows.row(3, 5)["id"] == taken[3 * 22 + 5]["id"]


def test_a_mixture_in_proportion_is_one_pass_over_each_part(tmp_path: Path) -> None:
    rows = open_data(mixture((Numbers(count=12), 3.0), (Numbers(count=4), 1.0)), context(tmp_path))
    seen = Counter(row["id"].split(":")[0] for row in take(rows, len(rows)))
    assert seen == {"0/0": 12, "1/0": 4}


def test_a_mixture_of_text_is_described_and_read_as_one(tmp_path: Path) -> None:
    parts = [TextData(paths=(str(write(tmp_path / name, name * 9)),), seq_len=8) for name in ("a.txt", "b.txt")]
    cfg = mixture((parts[0], 1.0), (parts[1], 1.0))
    facts = open_data(cfg, context(tmp_path)).describe()
    assert facts.pop("content") > 0
    assert facts == {"documents": 2, "tokens": 92, "rows": 12, "vocab": 257, "length": 8}
    found = texts(cfg, context(tmp_path))
    assert list(found.read()) == ["a.txt" * 9, "b.txt" * 9]
    assert found.key() != texts(mixture((parts[1], 1.0), (parts[0], 1.0)), context(tmp_path)).key()


def test_rows_of_a_mixture_have_one_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.parts have rows of \[4, 5\] tokens; rows of a mixture must be of one"):
        open_data(mixture((Numbers(count=1), 1.0), (Numbers(count=1, width=5), 1.0)), context(tmp_path))


def test_errors_name_the_part(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.parts\[1\]\.data\.paths\[0\] = 'nowhere' is neither"):
        open_data(mixture((Numbers(count=1), 1.0), (TextData(paths=("nowhere",)), 1.0)), context(tmp_path))


def test_a_source_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows"):
        locate(open_data(Numbers(count=0), context(tmp_path)), 3)


def test_negative_and_far_indices_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "words")
    plain = open_data(TextData(paths=(str(path),), seq_len=4), context(tmp_path))
    mixed = open_data(mixture((Numbers(count=2), 1.0)), context(tmp_path))
    for rows in (plain, mixed):
        for index in (-1, 2):
            with pytest.raises(IndexError, match="of an epoch of 2 rows"):
                rows.row(0, index)
