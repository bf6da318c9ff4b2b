"""Datasets that lf writes: v2.1 made v3.0, and of files of arrays. Nothing recorded is changed or lost."""

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lf.data.config import LeRobotData, Normalise
from lf.data.lerobot import LeRobotRows
from lf.data.lerobot_audit import audit
from lf.data.lerobot_convert import convert_dataset, convert_files
from lf.data.lerobot_meta import read_meta, recorded_stats
from lf.data.lerobot_record import Take, write_dataset
from lf.data.lerobot_write import Limits
from lf.data.source import open_data
from lf.data.video import write_video
from tests.data_tools import context
from tests.robot_tools import CAMERAS, FPS, SIZE, TASKS, Toy, frame, level, write_v21, write_v30

TOY = Toy(lengths=(5, 1, 7, 4, 3, 2, 6))
RAW = Normalise(state="none", actions="none")
FILES = (("data", "parquet"), ("videos", "mp4"))
SMALL = Limits(chunk=2, data_mb=0.0006, video_mb=0.004)


def open_rows(root: Path, folder: Path, **fields: Any) -> LeRobotRows:
    rows = open_data(LeRobotData(path=str(root), chunk=3, **{"normalise": RAW, **fields}), context(folder))
    assert isinstance(rows, LeRobotRows)
    return rows


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(np.all(one == other))


@pytest.mark.parametrize("kind", ["video", "image"])
@pytest.mark.parametrize("limits", [Limits(), SMALL], ids=["one file", "many files"])
def test_a_converted_dataset_has_the_same_rows_bit_for_bit(tmp_path: Path, kind: str, limits: Limits) -> None:
    source, root = write_v21(tmp_path / "old", attrs.evolve(TOY, kind=kind)), tmp_path / "new"
    convert_dataset(source, root, limits=limits)
    old, new = open_rows(source, tmp_path), open_rows(root, tmp_path)
    assert len(old) == len(new) == sum(TOY.lengths)
    for number in range(len(old)):
        one, other = old.frame_row(number), new.frame_row(number)
        assert {**one, "id": ""}.keys() == {**other, "id": ""}.keys()
        assert all(same(one[key], other[key]) for key in one if key != "id"), number
    report = audit(root)
    assert report.ok, [finding.show("new") for finding in report.findings]
    files = {name: len(list((root / name).rglob(f"*.{suffix}"))) for name, suffix in FILES}
    if limits is SMALL:
        assert files["data"] > 2
        assert {path.name for path in (root / "data").rglob("chunk-001/*")} >= {"file-000.parquet"}
        assert kind == "image" or 2 * len(CAMERAS) < files["videos"] < len(CAMERAS) * len(TOY.lengths)
    else:
        assert files == {"data": 1, "videos": len(CAMERAS) if kind == "video" else 0}


def test_statistics_that_are_written_are_those_of_all_rows(tmp_path: Path) -> None:
    convert_dataset(write_v21(tmp_path / "old", attrs.evolve(TOY, cameras=())), tmp_path / "new")
    stats = recorded_stats(read_meta(tmp_path / "new"))
    wide = TOY.actions.astype(np.float64)
    expected = {"min": wide.min(0), "max": wide.max(0), "mean": wide.mean(0), "std": wide.std(0), "count": [len(wide)]}
    expected |= {name: np.quantile(wide, q, 0) for name, q in (("q01", 0.01), ("q50", 0.5), ("q99", 0.99))}
    for name, value in expected.items():
        assert np.allclose(stats["action"][name], value, rtol=0, atol=1e-12), name


def test_some_episodes_are_numbered_anew(tmp_path: Path) -> None:
    source = write_v21(tmp_path / "old", TOY)
    (source / "data/chunk-000/episode_000000.parquet").unlink()
    convert_dataset(source, tmp_path / "new", episodes=(5, 2))
    old, new = open_rows(source, tmp_path, episodes=(2, 5)), open_rows(tmp_path / "new", tmp_path)
    assert new.episodes.tolist() == [0, 1]
    assert len(new) == len(old) == 9
    assert audit(tmp_path / "new").ok
    for number in range(9):
        one, other = old.frame_row(number), new.frame_row(number)
        assert all(same(one[key], other[key]) for key in ("state", "actions", "images", "task", "frame", "timestamp"))


def test_a_dataset_with_a_fault_is_not_converted_and_leaves_nothing(tmp_path: Path) -> None:
    source = write_v21(tmp_path / "old", TOY)
    (source / f"videos/chunk-000/{CAMERAS[0]}/episode_000004.mp4").unlink()
    with pytest.raises(ValueError, match=rf"old, episode 4, {CAMERAS[0]}, .*: the video is not there"):
        convert_dataset(source, tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_what_is_there_already_is_not_touched(tmp_path: Path) -> None:
    source = write_v21(tmp_path / "old", Toy(cameras=()))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").write_text("mine")
    with pytest.raises(ValueError, match="new is there already"):
        convert_dataset(source, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["mine"]
    with pytest.raises(ValueError, match=r"v30 is v3\.0 already"):
        convert_dataset(write_v30(tmp_path / "v30", Toy(cameras=())), tmp_path / "other")


def test_videos_with_other_settings_get_files_of_their_own(tmp_path: Path) -> None:
    source = write_v21(tmp_path / "old", attrs.evolve(TOY, cameras=CAMERAS[:1]))
    video = source / f"videos/chunk-000/{CAMERAS[0]}/episode_000002.mp4"
    write_video(video, [frame(0, TOY.starts[2] + i) for i in range(7)], Fraction(FPS), codec="mpeg4")
    convert_dataset(source, tmp_path / "new")
    assert len(list((tmp_path / "new/videos").rglob("*.mp4"))) == 3
    old, new = open_rows(source, tmp_path), open_rows(tmp_path / "new", tmp_path)
    assert all(same(old.frame_row(k)["images"], new.frame_row(k)["images"]) for k in range(len(old)))


def takes(toy: Toy) -> list[Take]:
    return [
        Take(
            values={"observation.state": toy.columns(n)["observation.state"], "action": toy.columns(n)["action"]},
            pictures={
                key: [frame(c, toy.starts[n] + i) for i in range(toy.lengths[n])] for c, key in enumerate(CAMERAS)
            },
            task=TASKS[toy.task(n)],
        )
        for n in range(len(toy.lengths))
    ]


def test_recorded_episodes_come_back(tmp_path: Path) -> None:
    root = tmp_path / "toy"
    write_dataset(root, iter(takes(TOY)), fps=FPS, robot="arm", names={"action": ("x", "y")}, limits=SMALL)
    meta = read_meta(root)
    assert (meta.robot, meta.fps, meta.features["action"].names) == ("arm", FPS, ("x", "y"))
    rows = open_rows(root, tmp_path)
    for number in range(len(rows)):
        row = rows.frame_row(number)
        assert (row["state"] == TOY.states[number]).all()
        assert row["task"] == TASKS[TOY.task(row["episode"])]
        for camera, key in enumerate(CAMERAS):
            assert abs(float(row["images"][key].mean()) - level(camera, number)) <= 3
    assert audit(root).ok
    pixels = np.array([level(0, number) for number in range(len(rows))]) / 255
    stats = recorded_stats(meta)[CAMERAS[0]]
    assert stats["mean"].shape == (3, 1, 1)
    assert np.allclose(stats["mean"], pixels.mean())
    assert np.allclose(stats["std"], pixels.std())
    assert (stats["min"].min(), stats["max"].max(), stats["count"].tolist()) == (
        pixels.min(),
        pixels.max(),
        [len(rows)],
    )


def test_other_readers_find_tasks_in_the_index_of_the_table(tmp_path: Path) -> None:
    write_dataset(tmp_path / "toy", iter(takes(Toy())), fps=FPS)
    schema = pq.read_schema(tmp_path / "toy/meta/tasks.parquet")
    assert json.loads(schema.metadata[b"pandas"])["index_columns"] == ["task"]
    episodes = pq.read_table(tmp_path / "toy/meta/episodes/chunk-000/file-000.parquet")
    assert episodes.schema.field("dataset_to_index").type == pa.int64()
    assert episodes[f"videos/{CAMERAS[0]}/to_timestamp"].to_pylist() == pytest.approx([0.5, 0.6, 1.3, 1.7])
    assert {f"stats/{CAMERAS[0]}/q99", "stats/action/q01", "data/file_index"} <= set(episodes.column_names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"values": {"action": np.zeros((2, 2)), "s": np.zeros((3, 2))}}, r"episode 1: its features have .* frames"),
        ({"values": {"action": np.zeros((3, 2, 2))}}, r"episode 1, action: float64 \(3, 2, 2\) cannot be a feature"),
        ({"values": {"a/b": np.zeros((3, 2))}}, "episode 1, a/b: a feature cannot be called that"),
        ({"values": {"index": np.zeros(3)}}, "episode 1, index: a feature cannot be called that"),
        ({"values": {"action": np.zeros((3, 5))}}, "episode 1 has features .*those before"),
        ({"pictures": {"cam": [frame(0, 0)] * 2}}, "episode 1, cam: there are 2 frames for 3 rows"),
        ({"pictures": {}}, "episode 1 has features .*those before"),
    ],
)
def test_episodes_that_do_not_fit_are_refused_and_leave_nothing(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    good = Take(values={"action": np.zeros((3, 2))}, pictures={"cam": [frame(0, 0)] * 3}, task="go")
    with pytest.raises(ValueError, match=message):
        write_dataset(tmp_path / "toy", [good, attrs.evolve(good, **changes)], fps=FPS)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="no episode to write"):
        write_dataset(tmp_path / "toy", [], fps=FPS)


def arrays(episode: int) -> dict[str, Any]:
    start, length = TOY.starts[episode], TOY.lengths[episode]
    return {
        "qpos": TOY.columns(episode)["observation.state"],
        "action": TOY.columns(episode)["action"].astype(np.float64),
        "front": np.stack([frame(0, start + i) for i in range(length)]),
    }


def check_files(root: Path, folder: Path, order: list[int]) -> None:
    rows = open_rows(root, folder)
    assert audit(root).ok
    numbers = [TOY.starts[episode] + i for episode in order for i in range(TOY.lengths[episode])]
    assert len(rows) == len(numbers)
    for place, number in enumerate(numbers):
        row = rows.frame_row(place)
        assert (row["state"] == TOY.states[number]).all()
        assert (row["actions"][0] == TOY.actions[number]).all()
        assert row["images"]["front"].shape == (3, *SIZE)
        assert abs(float(row["images"]["front"].mean()) - level(0, number)) <= 3


def test_npz_files_become_a_dataset_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    source = tmp_path / "files"
    source.mkdir()
    for name, episode in (("ep_10", 2), ("ep_9", 0), ("ep_2", 1)):
        np.savez(source / f"{name}.npz", **arrays(episode), task=f"task {episode}", extra=np.zeros(2))
    with pytest.raises(ValueError, match=r"ep_2\.npz: its arrays have"):
        convert_files(source, tmp_path / "toy", fps=FPS)
    convert_files(source, tmp_path / "toy", fps=FPS, rename={"qpos": "observation.state"}, drop=("extra",))
    check_files(tmp_path / "toy", tmp_path, [1, 0, 2])
    assert list(read_meta(tmp_path / "toy").tasks.values()) == ["task 1", "task 0", "task 2"]


@pytest.mark.parametrize("demos", [False, True], ids=["a file an episode", "groups of one file"])
def test_hdf5_files_become_a_dataset(tmp_path: Path, demos: bool) -> None:
    import h5py

    source = tmp_path / "files"
    source.mkdir()
    for place, episode in enumerate((3, 0)):
        with h5py.File(source / ("all.h5" if demos else f"{place}.hdf5"), "a") as file:
            group = file.create_group(f"data/demo_{place}") if demos else file
            for name, value in arrays(episode).items():
                group[name if name == "action" else f"observations/{name}"] = value
    rename = {"observations.qpos": "observation.state", "observations.front": "front"}
    with pytest.raises(ValueError, match="has no text named task; give the instruction with --task"):
        convert_files(source, tmp_path / "toy", fps=FPS, rename=rename)
    convert_files(source, tmp_path / "toy", fps=FPS, rename=rename, task="go")
    check_files(tmp_path / "toy", tmp_path, [3, 0])


def test_files_that_are_no_episodes_are_named(tmp_path: Path) -> None:
    source = tmp_path / "files"
    source.mkdir()
    with pytest.raises(ValueError, match=r"files is no folder with files that end in \.npz"):
        convert_files(source, tmp_path / "toy", fps=FPS)
    (source / "1.h5").write_text("nothing")
    with pytest.raises(ValueError, match=r"1\.h5 cannot be read as HDF5"):
        convert_files(source, tmp_path / "toy", fps=FPS)
    (source / "0.npz").write_text("nothing")
    with pytest.raises(ValueError, match=r"0\.npz is no npz file \(it begins with b'nothing'\)"):
        convert_files(source, tmp_path / "toy", fps=FPS)
    (source / "1.h5").unlink()
    np.savez(source / "0.npz", action=np.zeros((3, 2)), jpeg=np.zeros((3, 90), np.uint8), task="go")
    with pytest.raises(ValueError, match=r"0\.npz: jpeg is uint8 \(3, 90\)"):
        convert_files(source, tmp_path / "toy", fps=FPS)


def npz(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    sound = {"state": rng.standard_normal((4, 2)), "action": rng.standard_normal((4, 2)), "task": "go"}
    for number in range(2):
        np.savez(folder / f"{number}.npz", **(sound | changes if number else sound))
    return folder


NAMES: dict[str, tuple[dict[str, Any], str]] = {
    "onto another": (
        {"rename": {"action": "state"}},
        r"0\.npz: state and action would both be state; drop one, or rename it",
    ),
    "two onto one": ({"rename": {"action": "a", "state": "a"}}, r"0\.npz: state and action would both be a"),
    "of nothing": (
        {"rename": {"qpos": "a"}},
        r"rename: no file of .*files has an array 'qpos'; they have action, state",
    ),
    "drop nothing": (
        {"drop": ("state", "qpos")},
        r"drop: no file of .*files has an array 'qpos'; they have action, state",
    ),
    "both": ({"rename": {"state": "a"}, "drop": ("state",)}, "rename and drop both name 'state'"),
    "above": ({"rename": {"state": ".."}}, r"0\.npz, episode 0, \.\.: a feature cannot be called that"),
    "bytes as a task": ({"task": "\udcff"}, r"task is '\\udcff', which is no UTF-8 text .*; write it anew"),
    "bytes as a robot": ({"robot": "\udcff"}, r"robot is '\\udcff', which is no UTF-8 text"),
    **{
        f"fps {fps}": ({"fps": fps}, rf"toy: fps is {fps:g}; give .* from 0.001 to 1000".replace("+", r"\+"))
        for fps in (float("nan"), float("inf"), 0.0, -3.0, 1e-300, 1e9)
    },
    **{
        f"megabytes {size}": (
            {"limits": Limits(data_mb=size)},
            f"toy: data_mb is {size:g}; it must be a number above 0",
        )
        for size in (0.0, -1.0, float("nan"), float("inf"))
    },
}


@pytest.mark.parametrize("name", list(NAMES))
def test_what_cannot_be_asked_for_is_refused_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    fields, message = NAMES[name]
    source = npz(tmp_path / "files")
    if "task" in fields:
        for path in source.iterdir():
            np.savez(path, action=np.eye(3))
    with pytest.raises(ValueError, match=message):
        convert_files(source, tmp_path / "toy", **{"fps": FPS, **fields})
    assert [path.name for path in tmp_path.iterdir()] == ["files"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"action": np.full((4, 2), np.nan)},
            r"1\.npz, episode 1, action: dim 0 is nan at frame 0, .* \(4 such frames\)",
        ),
        (
            {"action": np.array([[0, 0], [0, 1e300]] * 2)},
            r"episode 1, action: dim 1 is inf at frame 1, as float32 \(2 such",
        ),
        ({"a/b": np.zeros(4)}, r"1\.npz, episode 1, a/b: a feature cannot be called that"),
        ({"..": np.zeros((4, 8, 8, 3), np.uint8)}, r"episode 1, \.\.: a feature cannot be called that"),
        ({"action": np.zeros((4, 0))}, r"episode 1, action: float64 \(4, 0\) cannot be a feature"),
        ({"thing": np.array([{}] * 4)}, r"1\.npz: thing cannot be read \(it holds Python objects\); .* or drop it"),
    ],
)
def test_numbers_that_the_check_would_reject_are_not_written(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    source = npz(tmp_path / "files", **changes)
    with pytest.raises(ValueError, match=message):
        convert_files(source, tmp_path / "toy", fps=FPS)
    assert [path.name for path in tmp_path.iterdir()] == ["files"]
    # What is left out is not even read.
    (key,) = changes
    convert_files(source, tmp_path / "toy", fps=FPS, drop=(key,))
    assert audit(tmp_path / "toy").ok


def test_an_array_is_renamed_to_a_name_that_is_dropped(tmp_path: Path) -> None:
    source = npz(tmp_path / "files")
    convert_files(source, tmp_path / "toy", fps=0.5, drop=("state",), rename={"action": "state"})
    with np.load(source / "0.npz") as file:
        assert (
            open_rows(tmp_path / "toy", tmp_path, state=("state",), actions=()).columns["state"][:4]
            == file["action"].astype(np.float32)
        ).all()
    assert audit(tmp_path / "toy").ok


def test_an_episode_without_tasks_gets_those_of_its_rows(tmp_path: Path) -> None:
    source = write_v21(tmp_path / "old", Toy(cameras=()))
    path = source / "meta/episodes.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "tasks": []}) + "\n" for line in lines))
    convert_dataset(source, tmp_path / "new")
    assert [one.tasks for one in read_meta(tmp_path / "new").episodes.values()] == [(TASKS[n % 2],) for n in range(4)]
    assert audit(tmp_path / "new").ok


def test_broken_files_of_episodes_are_named(tmp_path: Path) -> None:
    import h5py

    source = npz(tmp_path / "files")
    data = bytearray((source / "1.npz").read_bytes())
    data[data.index(b"NUMPY") + 80] ^= 255
    (source / "1.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"1\.npz: state cannot be read"):
        convert_files(source, tmp_path / "toy", fps=FPS)
    (source / "1.npz").unlink()
    os.mkfifo(source / "1.npz")
    with pytest.raises(ValueError, match=r"1\.npz: it is a named pipe, and must be a regular file"):
        convert_files(source, tmp_path / "toy", fps=FPS)
    (source / "1.npz").unlink()
    with h5py.File(source / "1.h5", "w") as file:
        file["a.b"], file["a/b"] = np.zeros(3), np.zeros(3)
    with pytest.raises(ValueError, match=r"1\.h5 .*two arrays that would be called a\.b"):
        convert_files(source, tmp_path / "toy", fps=FPS)
    with h5py.File(source / "1.h5", "w") as file:
        file["a/b"] = np.zeros(3)
        file["a/c"] = file["/"]
    with pytest.raises(ValueError, match=r"1\.h5 cannot be read as HDF5"):
        convert_files(source, tmp_path / "toy", fps=FPS)
