"""Datasets that lie, by mistake or on purpose: wrong times of videos, wrong types, files that hang or trip a reader.

Each is refused in one message when it is opened, and found by the audit.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lf.data.config import LeRobotData, Normalise
from lf.data.lerobot import LeRobotRows
from lf.data.lerobot_audit import audit
from lf.data.lerobot_files import place
from lf.data.picture import decode_picture
from lf.data.source import open_data
from tests.data_tools import context
from tests.robot_tools import (
    CAMERAS,
    EPS,
    Toy,
    change_column,
    change_episode,
    change_json,
    encode,
    frame,
    watch_ghostscript,
    write_v21,
    write_v30,
)

FRONT, WRIST = CAMERAS
LENGTHS = (5, 4, 4, 3)
DATA = LeRobotData(path="", normalise=Normalise(state="none", actions="none"), chunk=2)
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
ROWS = "data/chunk-000/file-000.parquet"
VIDEO = f"videos/{FRONT}/chunk-000/file-000.mp4"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A v3.0 dataset whose four episodes share every file."""
    return write_v30(tmp_path_factory.mktemp("robot") / "v30", Toy(lengths=LENGTHS), per_data=4, per_video=4)


@pytest.fixture
def root(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "toy")


def open_rows(root: Path, folder: Path, **fields: Any) -> LeRobotRows:
    rows = open_data(attrs.evolve(DATA, path=str(root), **fields), context(folder))
    assert isinstance(rows, LeRobotRows)
    return rows


def starts(root: Path, *values: float, key: str = FRONT) -> None:
    change_episode(root, f"videos/{key}/from_timestamp", list(values))
    ends = [value + length / 10 for value, length in zip(values, LENGTHS, strict=True)]
    change_episode(root, f"videos/{key}/to_timestamp", ends)


def ends(root: Path, *values: float) -> None:
    change_episode(root, f"videos/{FRONT}/to_timestamp", list(values))


SPANS: dict[str, tuple[Callable[[Path], None], int, str]] = {
    "a start inside the one before": (
        lambda root: starts(root, 0.0, 0.3, 0.9, 1.3),
        1,
        r"it begins at frame 3 of the video \(from_timestamp 0\.3 s\), and the episodes before it there have 5 frames, "
        "up to episode 0, which overlaps them; correct from_timestamp",
    ),
    "all at the start": (lambda root: starts(root, 0.0, 0.0, 0.0, 0.0), 3, r"begins at frame 0 .* have 13 frames"),
    "two of one length in each other's place": (
        lambda root: starts(root, 0.0, 0.9, 0.5, 1.3),
        1,
        "begins at frame 9 .* have 5 frames, up to episode 0, which leaves a gap",
    ),
    "one frame late": (lambda root: starts(root, 0.0, 0.5, 1.0, 1.3), 2, "begins at frame 10 .* have 9 .* a gap"),
    "an end far beyond the file": (
        lambda root: ends(root, 0.5, 0.9, 1.3, 1e9),
        3,
        r"from_timestamp 1\.3 and to_timestamp 1e\+09 s are 1e\+10 frames at 10 fps, and the episode has 3",
    ),
    "an end before the start": (lambda root: ends(root, 0.5, 0.1, 1.3, 1.6), 1, "are -4 frames at 10 fps"),
}


@pytest.mark.parametrize("name", list(SPANS))
def test_times_that_would_give_the_pictures_of_other_frames_are_refused(root: Path, tmp_path: Path, name: str) -> None:
    damage, episode, message = SPANS[name]
    damage(root)
    with pytest.raises(ValueError, match=rf"(?m)^{root}, episode {episode}, {FRONT}, {VIDEO}: .*{message}"):
        open_rows(root, tmp_path)
    found = [one for one in audit(root).findings if one.level == "fatal"]
    assert (episode, FRONT, VIDEO) in [(one.episode, one.feature, one.file) for one in found]
    # A camera that is not read does not matter.
    assert len(open_rows(root, tmp_path, cameras=())) == sum(LENGTHS)


def test_the_cache_of_a_sound_dataset_does_not_hide_wrong_times(root: Path, tmp_path: Path) -> None:
    open_rows(root, tmp_path, episodes=(0, 2, 3))
    starts(root, 0.0, 0.4, 0.9, 1.3)
    with pytest.raises(ValueError, match=r"episode 1, .*begins at frame 4"):
        open_rows(root, tmp_path)
    assert len(open_rows(root, tmp_path, episodes=(0, 2, 3))) == 12


def test_ends_that_a_frame_is_missing_from_are_read_past(root: Path, tmp_path: Path) -> None:
    ends(root, 0.4, 0.8, 1.2, 1.5)
    assert len(open_rows(root, tmp_path)) == sum(LENGTHS)
    report = audit(root)
    assert {(one.level, one.episode) for one in report.findings if one.feature == FRONT} == {
        ("wrong", n) for n in range(4)
    }


def test_frames_of_an_episode_that_the_table_lacks_are_no_gap(root: Path, tmp_path: Path) -> None:
    table = pq.read_table(root / EPISODES)
    pq.write_table(pa.concat_tables([table.slice(0, 1), table.slice(2)]), root / EPISODES)
    rows = open_rows(root, tmp_path, episodes=(0, 2, 3))
    assert abs(float(rows.frame_row(5)["images"][FRONT].mean()) - float(frame(0, 9).mean())) <= 3
    times = table[f"videos/{FRONT}/from_timestamp"].to_pylist()
    change_episode(root, f"videos/{FRONT}/from_timestamp", [times[0], 0.4, times[3]])
    change_episode(root, f"videos/{FRONT}/to_timestamp", [0.5, 0.8, 1.6])
    with pytest.raises(
        ValueError, match=r"episode 2, .*begins at frame 4 .*episode 0 before it ends at 5, so they overlap"
    ):
        open_rows(root, tmp_path, episodes=(0, 2, 3))


def test_episodes_and_cameras_cannot_have_one_video(tmp_path: Path) -> None:
    root = write_v21(tmp_path / "toy", Toy(lengths=(3, 3), cameras=(FRONT,)))
    change_json(root / "meta/info.json", video_path="videos/{video_key}.mp4")
    encode(root / f"videos/{FRONT}.mp4", [frame(0, i) for i in range(3)])
    with pytest.raises(ValueError, match=r"episode 1, .*begins at frame 0 .*have 3 frames, up to episode 0"):
        open_rows(root, tmp_path)
    info = Toy().info("v2.1", "data/{episode_index}.parquet", "videos/{episode_index}.mp4")
    (root / "meta/info.json").write_text(json.dumps(info))
    with pytest.raises(ValueError, match=r"video_path is .* one file for all 2 cameras; put \{video_key\} into it"):
        open_rows(root, tmp_path)


def feature(root: Path, key: str, **fields: Any) -> None:
    features = json.loads((root / "meta/info.json").read_text())["features"]
    change_json(root / "meta/info.json", features={**features, key: {**features[key], **fields}})


def test_numbers_are_not_cut_to_the_type_that_the_metadata_says(root: Path, tmp_path: Path) -> None:
    feature(root, "action", dtype="int64")
    message = (
        r"episode 0, action, .*: its rows are float32, and info\.json says int64, which would make .* correct the dtype"
    )
    with pytest.raises(ValueError, match=message):
        open_rows(root, tmp_path)
    assert [one.feature for one in audit(root).findings if one.level == "fatal"] == ["action"] * 4
    change_column(root / ROWS, "action", np.round)
    rows = open_rows(root, tmp_path)
    assert (rows.columns["action"] == np.round(Toy(lengths=LENGTHS).actions)).all()


@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_numbers_of_another_type_that_become_the_stated_one_are_read(root: Path, tmp_path: Path, dtype: str) -> None:
    wide = (Toy(lengths=LENGTHS).actions * 9).astype(dtype)
    change_column(root / ROWS, "action", lambda _: wide)
    rows = open_rows(root, tmp_path)
    assert rows.columns["action"].dtype == np.float32
    assert (rows.columns["action"] == wide.astype(np.float32)).all()
    change_column(root / ROWS, "action", lambda _: np.where(np.arange(16)[:, None] == 6, 1e300, wide))
    with pytest.raises(ValueError, match=r"episode 1, action, .*: dim 0 is inf at frame 1"):
        open_rows(root, tmp_path)


INFO: dict[str, tuple[Callable[[Path], Any], str]] = {
    "nested": (lambda root: (root / "meta/info.json").write_text("[" * 100_000), "it is nested too deeply"),
    "no features": (
        lambda root: change_json(root / "meta/info.json", features=None),
        "features is None, and must be an",
    ),
    "shape": (lambda root: feature(root, "action", shape="x"), r"features\.action\.shape is 'x', and must be a list"),
    "dtype": (lambda root: feature(root, "action", dtype=3), r"features\.action\.dtype is 3, and must be a text"),
    "fps": (lambda root: change_json(root / "meta/info.json", fps="ten"), "fps is 'ten'; give the frames a second"),
    "version": (lambda root: change_json(root / "meta/info.json", codebase_version=[]), r"codebase_version is \[\]"),
    "length": (
        lambda root: change_episode(root, "length", [5, 4, 10**15, 3]),
        "length of the row of episode 2 is 1000",
    ),
    "tasks": (
        lambda root: change_episode(root, "tasks", [1, 2, 3, 4]),
        "tasks of the row of episode 0 is 1, and must be",
    ),
    "time": (
        lambda root: change_episode(root, f"videos/{WRIST}/from_timestamp", [0.0, 0.5, float("nan"), 1.3]),
        rf"videos/{WRIST}/from_timestamp of the row of episode 2 is nan, and must be a finite number",
    ),
    "camera above": (
        lambda root: change_json(root / "meta/info.json", features={"..": {"dtype": "video", "shape": [4, 4, 3]}}),
        r"has no videos/\.\./chunk_index",
    ),
}


@pytest.mark.parametrize("name", list(INFO))
def test_metadata_of_any_kind_is_refused_by_name(root: Path, tmp_path: Path, name: str) -> None:
    damage, message = INFO[name]
    damage(root)
    with pytest.raises(ValueError, match=rf"^{root}/meta/.*{message}"):
        open_rows(root, tmp_path)
    assert not audit(root).ok


def test_a_dtype_that_is_none_is_named(root: Path, tmp_path: Path) -> None:
    feature(root, "action", dtype="banana")
    with pytest.raises(ValueError, match=r"data\.actions: .*something else than a vector \(banana \[2\]\): 'action'"):
        open_rows(root, tmp_path)
    told = [one for one in audit(root).findings if one.feature == "action"]
    assert [(one.level, one.message.split(",")[0]) for one in told] == [("wrong", "its dtype is 'banana'")]
    feature(root, "timestamp", dtype="banana")
    with pytest.raises(
        ValueError, match=r"episode 0, timestamp, .*says banana \[1\], and it must be a vector of numbers"
    ):
        open_rows(root, tmp_path, actions=())


@pytest.mark.parametrize(
    "template",
    [
        "{video_key!r:>1000000000}",
        "{chunk_index:0999999999d}",
        "{chunk_index:021d}",
        "{chunk_index:>9}",
        "{chunk_index.real}",
        "{video_key[0]}",
        "{}",
        "{0}",
        "{nothing}",
        "{",
        3,
        ["a"],
    ],
)
def test_templates_that_are_no_paths_are_refused(template: Any) -> None:
    with pytest.raises(ValueError, match=r"info\.json: the path template .* is malformed .*; mend it"):
        place(template, Path("info.json"), video_key="cam", chunk_index=3)


def test_templates_give_paths_inside_the_dataset() -> None:
    found = place(
        "a/{video_key}/{chunk_index:03d}-{chunk_index}-{chunk_index:d}", Path("i"), video_key="c", chunk_index=7
    )
    assert found == "a/c/007-7-7"
    with pytest.raises(ValueError, match=r"with \{'video_key': '\.\.'\}, leads to 'a/\.\./b', outside the dataset"):
        place("a/{video_key}/b", Path("info.json"), video_key="..")


@pytest.mark.parametrize("file", ["meta/info.json", "meta/tasks.parquet", "meta/stats.json", EPISODES, ROWS, VIDEO])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_nothing_waits_for_what_is_no_regular_file(
    root: Path, tmp_path: Path, file: str, make: Callable[[Path], None]
) -> None:
    (root / file).unlink()
    make(root / file)
    found = [one.show(str(root)) for one in audit(root).findings if "must be a regular file" in one.message]
    assert found
    assert file in found[0]
    if file != "meta/stats.json":
        with pytest.raises(ValueError, match=r"(?s)it is a (named pipe|folder|device), and must be a regular file"):
            open_rows(root, tmp_path)


def test_ranges_and_tasks_that_the_format_does_not_allow_are_found(root: Path, tmp_path: Path) -> None:
    change_episode(root, "dataset_to_index", [5, 10**12, 13, 16])
    change_episode(root, "tasks", [["lift the cup"], ["push the block"], [], ["push the block"]])
    assert len(open_rows(root, tmp_path)) == sum(LENGTHS)
    found = {(one.level, one.episode, one.message) for one in audit(root).findings if one.level != "note"}
    assert found == {
        ("wrong", 1, "dataset_to_index is 1000000000000, and dataset_from_index 5 plus length 4 is 9; correct it"),
        ("wrong", 2, "its list of tasks is empty; list those of its rows"),
    }


@pytest.mark.parametrize("stats", [[1], {"action": 3}, {"action": {"min": "low"}}, {"action": {"min": [[1], [1, 2]]}}])
def test_statistics_that_are_none_do_not_stop_the_audit(root: Path, stats: Any) -> None:
    (root / "meta/stats.json").write_text(json.dumps(stats))
    found = [one.message for one in audit(root).findings if one.level != "note"]
    assert len(found) == 1
    assert "stats.json" in found[0]


def test_no_picture_runs_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = watch_ghostscript(tmp_path, monkeypatch)
    write_v21(tmp_path / "toy", Toy(kind="image"))
    file = next((tmp_path / "toy").rglob("episode_000000.parquet"))
    table = pq.read_table(file)
    rows = table[FRONT].to_pylist()
    rows[1]["bytes"] = EPS
    column = pa.array(rows, table.schema.field(FRONT).type)
    pq.write_table(table.set_column(table.schema.get_field_index(FRONT), FRONT, column), file)
    with pytest.raises(ValueError, match=r"the picture of frame 1: it is broken \(it is none of PNG, "):
        open_rows(tmp_path / "toy", tmp_path)
    with pytest.raises(ValueError, match=r"toy, row 3: a picture cannot be decoded \(it is none of PNG, "):
        decode_picture(EPS, "toy, row 3")
    assert not called.exists()
    # The stub is one that Pillow would have called.
    (tmp_path / "innocent.png").write_bytes(EPS)
    with Image.open(tmp_path / "innocent.png") as image, contextlib.suppress(OSError):
        image.load()
    assert called.exists()
