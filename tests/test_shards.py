"""Pieces of tensors as boxes, how they tile, and the shards that they are written to."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lf.train import shards
from lf.train.shards import DTYPES, Piece, Span, Stored, box_piece, boxes, file_sha256, inside, layout, write_shard

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    size = draw(SHAPES)
    at = tuple(draw(st.integers(0, 3)) for _ in size)
    start = draw(st.integers(0, math.prod(size)))
    return Span(at=at, size=size, start=start, stop=draw(st.integers(start, math.prod(size))))


@given(spans())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_boxes_are_the_elements_of_the_span_in_order(span: Span) -> None:
    whole = shards.Box(span.at, span.size)
    index = torch.arange(math.prod(span.size)).view(span.size)
    found = list(boxes(span))
    got = [index[inside(box, whole)].flatten() for _, box in found]
    assert torch.equal(torch.cat([*got, torch.empty(0, dtype=torch.int64)]), torch.arange(span.start, span.stop))
    assert [place for place, _ in found] == [sum(map(len, got[:i])) for i in range(len(got))]
    assert len(found) <= max(2 * len(span.size) - 1, 1)


@st.composite
def heaps(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Stored]]:
    """A tensor's shape and spans inside it: row ranges that tile it, some of them changed."""
    shape = draw(SHAPES)
    cuts = sorted(draw(st.lists(st.integers(0, math.prod(shape)), max_size=4)))
    edges = [0, *cuts, math.prod(shape)]
    zero = (0,) * len(shape)
    parts = [
        Stored(at=zero, size=shape, start=a, stop=b, file=i, offset=0)
        for i, (a, b) in enumerate(itertools.pairwise(edges))
    ]
    for _ in range(draw(st.integers(0, 2))):
        size = tuple(draw(st.integers(1, n)) for n in shape)
        at = tuple(draw(st.integers(0, n - m)) for n, m in zip(shape, size, strict=True))
        part = Stored(at=at, size=size, start=0, stop=math.prod(size), file=9, offset=0)
        place = draw(st.integers(0, len(parts)))
        parts[place : place + draw(st.integers(0, 1))] = [part]
    return shape, parts


@given(heaps())
@settings(max_examples=200, derandomize=True, deadline=None)
def test_tiling_fault_agrees_with_counting(case: tuple[tuple[int, ...], list[Stored]]) -> None:
    shape, parts = case
    count = torch.zeros(shape, dtype=torch.int64)
    for part in parts:
        flat = torch.zeros(math.prod(part.size), dtype=torch.int64)
        flat[part.start : part.stop] = 1
        count[inside(shards.Box(part.at, part.size), shards.Box((0,) * len(shape), shape))] += flat.view(part.size)
    fault = shards.tiling_fault(shape, parts)
    assert (fault == "") == bool((count == 1).all())
    assert ("both give" in fault) == bool((count > 1).any())
    assert ("no rank gives" in fault) == bool((count == 0).any() and (count <= 1).all())


def test_a_thousand_slices_of_either_axis_are_checked_quickly() -> None:
    for axis in range(2):
        size = tuple(1 if d == axis else 2000 for d in range(2))
        parts = [
            Stored(at=(i, 0) if axis == 0 else (0, i), size=size, start=0, stop=2000, file=i, offset=0)
            for i in range(2000)
        ]
        assert shards.tiling_fault((2000, 2000), parts) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"at": (2, 0)},
        {"at": (-1, 0)},
        {"at": (0,)},
        {"size": (4, 2)},
        {"start": -1},
        {"stop": 7},
        {"start": 3, "stop": 2},
        {"data": torch.zeros(2, 3)},
        {"data": torch.zeros(5)},
        {"data": torch.zeros(6, dtype=torch.complex64)},
    ],
)
def test_a_piece_that_cannot_be_names_its_tensor(change: dict[str, object]) -> None:
    good = {
        "name": "exp_avg/a",
        "shape": (3, 3),
        "at": (1, 0),
        "size": (2, 3),
        "start": 0,
        "stop": 6,
        "data": torch.zeros(6),
    }
    Piece(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="exp_avg/a"):
        Piece(**{**good, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk", [1, 24, 1 << 20])
def test_a_shard_is_a_plain_safetensors_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(shards, "CHUNK_BYTES", chunk)
    gen = torch.Generator().manual_seed(0)
    whole = {
        f"{name} é": torch.randint(0, 2 if name == "BOOL" else 100, (3, 5), generator=gen).to(dtype)
        for name, dtype in DTYPES.items()
    }
    whole["scalar"] = torch.tensor(3.5)
    whole["empty"] = torch.zeros(0, 2)
    strided = torch.arange(12.0).view(4, 3)[:, 1]
    pieces = [box_piece(name, tensor) for name, tensor in whole.items()]
    for i in range(2):
        pieces.append(
            Piece(
                name="two", shape=(4,), at=(0,), size=(4,), start=2 * i, stop=2 * i + 2, data=strided[2 * i : 2 * i + 2]
            )
        )
    shard = layout(pieces, 0)
    path = tmp_path / "a.safetensors"
    assert write_shard(path, shard) == file_sha256(path)
    assert path.stat().st_size == shard.size
    read = load_file(path)
    assert set(read) == {f"{name}#0" for name in whole} | {"two#0", "two#1"}
    for name, tensor in whole.items():
        assert read[f"{name}#0"].dtype == tensor.dtype
        assert torch.equal(read[f"{name}#0"], tensor.flatten())
    assert torch.equal(torch.cat([read["two#0"], read["two#1"]]), strided)
    for piece, stored in zip(shard.pieces, shard.stored, strict=True):
        assert stored.offset % piece.data.element_size() == 0
    with pytest.raises(FileExistsError):
        write_shard(path, shard)


def test_a_rank_without_tensors_writes_a_file_that_opens(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", layout([], 3))
    assert load_file(tmp_path / "a.safetensors") == {}


def test_a_box_piece_shares_memory_and_refuses_what_it_cannot_share() -> None:
    tensor = torch.nn.Parameter(torch.zeros(2, 3))
    box_piece("a", tensor, shape=(4, 3), at=(2, 0)).data.fill_(1)
    assert torch.equal(tensor.detach(), torch.ones(2, 3))
    with pytest.raises(RuntimeError):
        box_piece("a", torch.zeros(2, 3).t())
