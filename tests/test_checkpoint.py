"""Checkpoints read back at any layout, what they refuse, and which of them is the newest."""

import fcntl
import json
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lf.train.checkpoint import (
    CheckpointError,
    Comm,
    Piece,
    box_piece,
    check_all_read,
    complete,
    distributed,
    latest,
    open_checkpoint,
    open_latest,
    prune,
    save,
    verify,
)
from lf.train.shards import Box, inside
from tests.saving import equal, holds, names, on_ranks, save_on_ranks, save_state, state
from tests.workers import Workers

DTYPES = [torch.bfloat16, torch.float32, torch.int64, torch.uint8]


def _random(draw: st.DrawFn, shape: tuple[int, ...]) -> Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    gen = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    raw = torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), generator=gen).to(torch.uint8)
    return raw.view(dtype).view(shape)


def _split(draw: st.DrawFn, name: str, tensor: Tensor) -> list[Piece]:
    """Cuts a tensor into boxes, and the boxes into flat ranges."""
    found = [Box((0,) * tensor.ndim, tuple(tensor.shape))]
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(found) - 1))
        box = found[place]
        axes = [d for d, n in enumerate(box.size) if n > 1]
        if not axes:
            continue
        axis = draw(st.sampled_from(axes))
        k = draw(st.integers(1, box.size[axis] - 1))
        low = tuple(k if d == axis else n for d, n in enumerate(box.size))
        high = tuple(n - k if d == axis else n for d, n in enumerate(box.size))
        at = tuple(a + k if d == axis else a for d, a in enumerate(box.at))
        found[place : place + 1] = [Box(box.at, low), Box(at, high)]
    pieces = []
    for box in found:
        flat = tensor[inside(box, Box((0,) * tensor.ndim, tuple(tensor.shape)))].flatten()
        cuts = sorted(draw(st.lists(st.integers(0, len(flat)), max_size=2)))
        for a, b in zip([0, *cuts], [*cuts, len(flat)], strict=True):
            pieces.append(
                Piece(
                    name=name,
                    shape=tuple(tensor.shape),
                    at=box.at,
                    size=box.size,
                    start=a,
                    stop=b,
                    data=flat[a:b].clone(),
                )
            )
    return pieces


@st.composite
def states(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[list[Piece]], dict[str, list[Piece]]]:
    """Tensors, a layout of them over ranks, and a second layout."""
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=3))
    tensors = {f"weight/{i}.x": _random(draw, shape) for i, shape in enumerate(shapes)}
    ranks: list[list[Piece]] = [[] for _ in range(draw(st.integers(1, 3)))]
    for name, tensor in tensors.items():
        for piece in _split(draw, name, tensor):
            ranks[draw(st.integers(0, len(ranks) - 1))].append(piece)
    return tensors, ranks, {name: _split(draw, name, tensor) for name, tensor in tensors.items()}


@given(states(), st.data())
@settings(max_examples=60, derandomize=True, deadline=None)
def test_any_layout_is_read_back_at_any_other(
    case: tuple[dict[str, Tensor], list[list[Piece]], dict[str, list[Piece]]], data: st.DataObject
) -> None:
    tensors, ranks, second = case
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        assert save_on_ranks(run, 7, ranks, {"lr": 0.1}) == [run / "checkpoints" / "step_7"] * len(ranks)
        assert verify(run / "checkpoints" / "step_7") == ""
        reader = open_latest(run).reader
        assert reader is not None
        assert (reader.step, reader.meta, reader.names) == (7, {"lr": 0.1}, tuple(sorted(tensors)))
        for name, tensor in tensors.items():
            assert reader.shape(name) == tensor.shape
            assert reader.dtype(name) == tensor.dtype
            assert equal(reader.read(name), tensor)
            at = tuple(data.draw(st.integers(0, n)) for n in tensor.shape)
            size = tuple(data.draw(st.integers(0, n - a)) for n, a in zip(tensor.shape, at, strict=True))
            box = tensor[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))]
            assert equal(reader.read(name, at, size), box)
            for piece in second[name]:
                want = piece.data.clone()
                piece.data.zero_()
                reader.fill(piece)
                assert equal(piece.data, want)
        assert reader.unread() == ()


def _flat_ranges(comm: Comm, value: int) -> list[Piece]:
    """This rank's share of every tensor, as equal flat ranges with an uneven end."""
    pieces = []
    for name, tensor in state(value).items():
        share = -(-tensor.numel() // comm.world)
        start = min(comm.rank * share, tensor.numel())
        stop = min(start + share, tensor.numel())
        shape = tuple(tensor.shape)
        zero = (0,) * tensor.ndim
        data = tensor.flatten()[start:stop].clone()
        pieces.append(Piece(name=name, shape=shape, at=zero, size=shape, start=start, stop=stop, data=data))
    return pieces


def _saves_and_reads(run: str) -> tuple[bool, bool, str]:
    comm = distributed()
    folder = Path(run)
    save(folder, 1, _flat_ranges(comm, 1), {"value": 1}, comm=comm)
    save(folder, 2, _flat_ranges(comm, 2), {"value": 2}, comm=comm)
    prune(folder, 1, comm=comm)
    reader = open_latest(folder, comm=comm).reader
    assert reader is not None
    mine = _flat_ranges(comm, 3)
    for piece in mine:
        reader.fill(piece)
    check_all_read(reader, comm=comm)
    same = all(equal(a.data, b.data) for a, b in zip(mine, _flat_ranges(comm, 2), strict=True))
    try:
        save(folder, 3, _flat_ranges(comm, 3) if comm.rank == 0 else [], {}, comm=comm)
    except CheckpointError as error:
        return same, holds(reader, 2), str(error)
    return same, False, ""


def test_processes_save_and_read_together(tmp_path: Path, workers: Workers) -> None:
    answers = workers.run(2, _saves_and_reads, str(tmp_path))
    for same, whole, fault in answers:
        assert same
        assert whole
        assert "no rank gives" in fault
    assert names(tmp_path) == {"step_2"}


def test_the_folder_holds_tensors_and_json_only(tmp_path: Path) -> None:
    path = save_state(tmp_path, 3)
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "rank_00000.safetensors"]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == "lf checkpoint"
    assert manifest["version"] == 1
    body = manifest["body"]
    assert body["step"] == 3
    assert body["meta"] == {"value": 3}
    assert body["files"][0]["bytes"] == (path / "rank_00000.safetensors").stat().st_size
    entry = body["tensors"]["exp_avg/a"]
    assert entry["dtype"] == "F32"
    assert entry["shape"] == [4, 3]
    (piece,) = entry["pieces"]
    raw = (path / "rank_00000.safetensors").read_bytes()[piece.pop("offset") :]
    assert piece == {"at": [0, 0], "size": [4, 3], "start": 0, "stop": 12, "file": 0}
    assert raw[:48] == state(3)["exp_avg/a"].numpy().tobytes()


@pytest.mark.parametrize("meta", [{"a": (1, 2)}, {1: 2}, {"a": float("nan")}, {"a": torch.zeros(1)}, {"a": {2: 3}}])
def test_meta_that_json_would_change_is_refused(tmp_path: Path, meta: dict[Any, Any]) -> None:
    with pytest.raises(CheckpointError, match="meta"):
        save(tmp_path, 1, [], meta)
    assert complete(tmp_path).found == ()


def _part(start: int, stop: int, dtype: torch.dtype = torch.float32, width: int = 4) -> Piece:
    data = torch.zeros(stop - start, dtype=dtype)
    return Piece(name="exp_avg/b", shape=(width,), at=(0,), size=(width,), start=start, stop=stop, data=data)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([[_part(0, 2)], [_part(1, 4)]], r"exp_avg/b .*ranks 0 and 1 both give the box at \(1,\) of size \(1,\)"),
        ([[_part(0, 2)], [_part(3, 4)]], "exp_avg/b .*no rank gives 1 of its 4 elements"),
        ([[_part(0, 4), _part(0, 4)], []], "exp_avg/b .*ranks 0 and 0 both give"),
        ([[_part(0, 2)], [_part(2, 4, torch.int64)]], "exp_avg/b disagree .*F32 .* on rank 0, I64 .* on rank 1"),
        ([[_part(0, 2)], [_part(2, 4, width=5)]], r"exp_avg/b disagree .*\[4\] on rank 0, .*\[5\] on rank 1"),
    ],
)
def test_pieces_that_do_not_tile_are_refused_on_every_rank(
    tmp_path: Path, ranks: list[list[Piece]], message: str
) -> None:
    save_state(tmp_path, 1)
    for error in save_on_ranks(tmp_path, 2, ranks, {}):
        assert isinstance(error, CheckpointError)
        assert error.__str__().startswith(f"cannot save {tmp_path / 'checkpoints' / 'step_2'}: ")
        with pytest.raises(CheckpointError, match=message):
            raise error
    assert names(tmp_path) == {"step_1"}


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step is -1"):
        save(tmp_path, -1, [], {})


def test_what_is_not_there_or_other_is_named(tmp_path: Path) -> None:
    path = save_state(tmp_path, 1)
    reader = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=f"{path} has no tensor exp_avg_sq/a"):
        reader.read("exp_avg_sq/a")
    with pytest.raises(CheckpointError, match="no tensor exp_avg_sq/a"):
        reader.fill(box_piece("exp_avg_sq/a", torch.zeros(4, 3)))
    with pytest.raises(CheckpointError, match=r"exp_avg/a is F32 \[4, 3\] in .*, but F32 \[4, 4\] in this run"):
        reader.fill(box_piece("exp_avg/a", torch.zeros(4, 4)))
    with pytest.raises(CheckpointError, match=r"but BF16 \[4, 3\] in this run"):
        reader.fill(box_piece("exp_avg/a", torch.zeros(4, 3).bfloat16()))
    with pytest.raises(ValueError, match=r"at \(2, 0\) of size \(3, 3\) is not inside exp_avg/a"):
        reader.read("exp_avg/a", (2, 0), (3, 3))


def test_state_that_nobody_reads_back_is_refused(tmp_path: Path) -> None:
    path = save_state(tmp_path, 1)

    def job(read: dict[int, list[str]]) -> list[Exception | None]:
        def one(comm: Comm) -> None:
            reader = open_checkpoint(path)
            for name in read[comm.rank]:
                reader.read(name)
            assert set(reader.unread()) == set(state(1)) - set(read[comm.rank])
            check_all_read(reader, comm=comm)

        return on_ranks(2, one)

    assert job({0: ["weight/a"], 1: ["exp_avg/a", "step"]}) == [None, None]
    for error in job({0: ["weight/a"], 1: ["step", "weight/a"]}):
        assert isinstance(error, CheckpointError)
        assert f"{path} has state that this run does not read back: exp_avg/a;" in str(error)


def test_the_newest_is_the_highest_number(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert open_latest(tmp_path).reader is None
    for step in (9, 10, 0):
        save_state(tmp_path, step)
    for name in ("step_", "step_07", "step_x", "best", "step_99.tmp-abc"):
        shutil.copytree(tmp_path / "checkpoints" / "step_9", tmp_path / "checkpoints" / name)
    assert [one.step for one in complete(tmp_path).found] == [10, 9, 0]
    assert complete(tmp_path).skipped == ()
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.step == 10
    assert holds(open_checkpoint(tmp_path / "checkpoints" / "best"), 9)


def test_a_renamed_folder_is_skipped(tmp_path: Path) -> None:
    path = save_state(tmp_path, 1)
    path.rename(path.with_name("step_5"))
    (skipped,) = complete(tmp_path).skipped
    assert "holds step 1" in skipped.reason


def test_a_second_save_of_a_step_replaces_the_first(tmp_path: Path) -> None:
    save_state(tmp_path, 4, value=1)
    reader = open_checkpoint(tmp_path / "checkpoints" / "step_4")
    kept = reader.read("exp_avg/a")
    save_state(tmp_path, 4, value=2)
    assert names(tmp_path) == {"step_4"}
    assert equal(kept, state(1)["exp_avg/a"])
    assert holds(open_checkpoint(tmp_path / "checkpoints" / "step_4"), 2)


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_moved_aside_is_used_until_the_new_one_is_there(tmp_path: Path, whole: bool) -> None:
    path = save_state(tmp_path, 4, value=1)
    old = path.rename(path.with_name("step_4.old"))
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.path == old
    if not whole:
        shutil.copytree(old, path)
        (path / "manifest.json").write_text("{")
        newest = latest(tmp_path)
        assert newest is not None
        assert newest.path == old
    prune(tmp_path, 1)
    assert old.exists()
    save_state(tmp_path, 4, value=2)
    assert names(tmp_path) == {"step_4"}
    assert holds(open_checkpoint(path), 2)


def test_prune_drops_what_a_finished_replacement_left(tmp_path: Path) -> None:
    path = save_state(tmp_path, 4)
    shutil.copytree(path, path.with_name("step_4.old"))
    assert prune(tmp_path, 1) == ()
    assert names(tmp_path) == {"step_4"}


def _spoil(path: Path) -> None:
    """Changes a tensor's last byte: the size stays."""
    file = path / "rank_00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


@given(
    steps=st.sets(st.integers(0, 30), max_size=5),
    keep=st.integers(1, 4),
    spoilt=st.sets(st.integers(0, 4)),
    cut=st.sets(st.integers(0, 4), max_size=1),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_prune_keeps_the_newest_and_never_the_last_good_one_goes(
    steps: set[int], keep: int, spoilt: set[int], cut: set[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        order = sorted(steps, reverse=True)
        for step in order:
            save_state(run, step)
        bad = {order[i] for i in spoilt if i < len(order)}
        short = {order[i] for i in cut if i < len(order)}
        for step in bad:
            _spoil(run / "checkpoints" / f"step_{step}")
        for step in short:
            (run / "checkpoints" / f"step_{step}" / "manifest.json").unlink()
        (run / "checkpoints" / "step_3.tmp-0af1").mkdir(parents=True)
        full = [step for step in order if step not in short]
        good = [step for step in full if step not in bad]
        removed = prune(run, keep)
        left = {int(name.removeprefix("step_")) for name in names(run)}
        assert {int(path.name.removeprefix("step_")) for path in removed} == steps - left
        assert set(full[:keep]) | short <= left
        assert set(good[:1]) <= left
        assert left - short == (set(full[:keep]) | set(good[:1]) if good else set(full))


def test_prune_refuses_to_keep_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep is 0"):
        prune(tmp_path, 0)
    assert prune(tmp_path, 1) == ()
    assert list(tmp_path.iterdir()) == []


def test_only_one_process_writes_in_a_run(tmp_path: Path) -> None:
    save_state(tmp_path, 1)
    going_on = tmp_path / "checkpoints" / "step_2.tmp-ab"
    going_on.mkdir()
    with open(tmp_path / "checkpoints" / ".lock", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is writing checkpoints in"):
            save_state(tmp_path, 2)
        with pytest.raises(CheckpointError, match="another process is writing checkpoints in"):
            prune(tmp_path, 1)
        assert going_on.exists()
    save_state(tmp_path, 2)
    assert names(tmp_path) == {"step_1", "step_2"}
