"""What is wrong with robot data is said when it is opened, and by the audit: dataset, episode, feature and file."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lf.data.config import Camera, LeRobotData, Normalise, Signal
from lf.data.lerobot_audit import Audit, audit
from lf.data.source import open_data
from tests.data_tools import byte_tokenizer, context
from tests.robot_tools import (
    CAMERAS,
    FPS,
    TASKS,
    Toy,
    change_column,
    change_episode,
    change_json,
    encode,
    frame,
    png,
    write_v21,
    write_v30,
)

FRONT, WRIST = CAMERAS
DATA = LeRobotData(path="", normalise=Normalise())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("robot")
    return {"v2.1": write_v21(folder / "v21"), "v3.0": write_v30(folder / "v30")}


@pytest.fixture
def root(made: dict[str, Path], tmp_path: Path, version: str) -> Path:
    return shutil.copytree(made[version], tmp_path / "toy")


def data21(root: Path, episode: int) -> Path:
    return root / f"data/chunk-000/episode_{episode:06d}.parquet"


def video21(root: Path, episode: int, key: str = FRONT) -> Path:
    return root / f"videos/chunk-000/{key}/episode_{episode:06d}.mp4"


def data30(root: Path, file: int = 0) -> Path:
    return root / f"data/chunk-000/file-{file:03d}.parquet"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def put(value: float, at: tuple[int, ...]) -> Callable[[Any], Any]:
    def change(values: Any) -> Any:
        values[at] = value
        return values

    return change


def drop_rows(path: Path, keep: int) -> None:
    pq.write_table(pq.read_table(path).slice(0, keep), path)


Break = Callable[[Path], Any]

FATAL: dict[str, tuple[str, Break, str, tuple[int | None, str, str]]] = {
    "rows absent": (
        "v2.1",
        lambda root: data21(root, 2).unlink(),
        r"episode 2, data/.*000002\.parquet: the file of its rows is not there; fetch it",
        (2, "", "episode_000002.parquet"),
    ),
    "rows cut off": (
        "v2.1",
        lambda root: cut(data21(root, 0)),
        r"episode 0, .*000000\.parquet cannot be read as Parquet",
        (0, "", "episode_000000.parquet"),
    ),
    "rows absent, shared file": (
        "v3.0",
        lambda root: data30(root, 1).unlink(),
        r"episode 2, data/.*file-001\.parquet: the file of its rows is not there",
        (2, "", "file-001.parquet"),
    ),
    "video absent": (
        "v2.1",
        lambda root: video21(root, 1, WRIST).unlink(),
        rf"episode 1, {WRIST}, videos/.*000001\.mp4: the video is not there; fetch it",
        (1, WRIST, "episode_000001.mp4"),
    ),
    "video cut off": (
        "v2.1",
        lambda root: cut(video21(root, 2)),
        rf"episode 2, {FRONT}, .*000002\.mp4.* cut off",
        (2, FRONT, "episode_000002.mp4"),
    ),
    "video one frame short": (
        "v2.1",
        lambda root: encode(video21(root, 2), [frame(0, i) for i in range(6)]),
        rf"episode 2, {FRONT}, .*: the video has 6 frames, and the table 7",
        (2, FRONT, "episode_000002.mp4"),
    ),
    "shared video short": (
        "v3.0",
        lambda root: encode(root / f"videos/{FRONT}/chunk-000/file-001.mp4", [frame(0, i) for i in range(3)]),
        rf"episode 3, {FRONT}, .*file-001\.mp4: frame 3, at 0\.3.* s of the video, is 0\.1.* s from the nearest",
        (3, FRONT, "file-001.mp4"),
    ),
    "video of twice the rate": (
        "v3.0",
        lambda root: encode(
            root / f"videos/{FRONT}/chunk-000/file-001.mp4", [frame(0, i // 2) for i in range(8)], 2 * FPS
        ),
        rf"episode 3, {FRONT}, .*: the video has 7 frames for the 4 rows",
        (3, FRONT, "file-001.mp4"),
    ),
    "fewer rows than said": (
        "v2.1",
        lambda root: drop_rows(data21(root, 2), 6),
        r"episode 2, .*: the table of episodes says 7 frames, and there are 6 rows",
        (2, "", "episode_000002.parquet"),
    ),
    "a timestamp off": (
        "v2.1",
        lambda root: change_column(data21(root, 0), "timestamp", put(0.2002, (2,))),
        r"episode 0, timestamp, .*: frames 1 and 2 are 0\.1002 s apart, and 10 fps means 0\.1 \(2 such gaps\)",
        (0, "timestamp", "episode_000000.parquet"),
    ),
    "times of another rate": (
        "v3.0",
        lambda root: change_json(root / "meta/info.json", fps=12),
        r"episode 0, timestamp, .*: frames . and . are 0\.1 s apart, and 12 fps means 0\.0833",
        (0, "timestamp", "file-000.parquet"),
    ),
    "times shifted against the video": (
        "v2.1",
        lambda root: change_column(data21(root, 2), "timestamp", lambda times: times + np.float32(0.04)),
        rf"episode 2, {FRONT}, .*: frame ., at 0\..* s of the video, is 0\.04.* s from the nearest",
        (2, FRONT, "episode_000002.mp4"),
    ),
    "NaN in actions": (
        "v3.0",
        lambda root: change_column(data30(root), "action", put(np.nan, (3, 1))),
        r"episode 0, action, .*file-000\.parquet: dim 1 is nan at frame 3 \(1 such frames\)",
        (0, "action", "file-000.parquet"),
    ),
    "infinity in states": (
        "v2.1",
        lambda root: change_column(data21(root, 2), "observation.state", put(np.inf, (6, 0))),
        r"episode 2, observation\.state, .*: dim 0 is inf at frame 6",
        (2, "observation.state", "episode_000002.parquet"),
    ),
    "frames in another order": (
        "v2.1",
        lambda root: change_column(data21(root, 2), "frame_index", lambda frames: frames[::-1].copy()),
        r"episode 2, frame_index, .*: it is 6 at frame 0, where 0 belongs",
        (2, "frame_index", "episode_000002.parquet"),
    ),
    "an unknown task": (
        "v3.0",
        lambda root: change_column(data30(root), "task_index", put(5, (5,))),
        r"episode 1, task_index, .*: tasks \[5\] are not in the table of tasks",
        (1, "task_index", "file-000.parquet"),
    ),
    "another width": (
        "v2.1",
        lambda root: change_column(data21(root, 1), "action", lambda values: np.repeat(values, 2, axis=1)),
        r"episode 1, action, .*: its rows are not all 2 numbers",
        (1, "action", "episode_000001.parquet"),
    ),
    "a start beyond the video": (
        "v3.0",
        lambda root: change_episode(root, f"videos/{WRIST}/from_timestamp", [0.0, 0.5, 7.0, 0.0]),
        rf"episode 2, {WRIST}, .*: frame 6, at 7\.6.* s of the video",
        (2, WRIST, "file-000.mp4"),
    ),
}


def found(report: Audit, level: str) -> list[tuple[int | None, str, str]]:
    return [(one.episode, one.feature, one.file) for one in report.findings if one.level == level]


@pytest.mark.parametrize("name", list(FATAL))
def test_what_is_fatal_is_found_when_opened_and_by_the_audit(made: dict[str, Path], tmp_path: Path, name: str) -> None:
    version, damage, message, (episode, feature, file) = FATAL[name]
    root = shutil.copytree(made[version], tmp_path / "toy")
    damage(root)
    with pytest.raises(ValueError, match=rf"{tmp_path}/toy, {message}"):
        open_data(attrs.evolve(DATA, path=str(root)), context(tmp_path))
    report = audit(root)
    assert not report.ok
    places = found(report, "fatal")
    assert any((one[0], one[1]) == (episode, feature) and one[2].endswith(file) for one in places), places


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_sound_dataset_has_no_finding(made: dict[str, Path], version: str) -> None:
    report = audit(made[version])
    assert report.ok
    assert (report.episodes, report.frames, report.version) == (4, 17, version)
    assert [finding.message for finding in report.findings if finding.level != "note"] == []


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "camera": (
        {"cameras": (Camera(name="a", key="observation.images.fronty"),)},
        rf"data\.cameras\[0\]\.key = 'observation\.images\.fronty': .* no such feature; .*toy are: {FRONT}, {WRIST}",
    ),
    "camera of numbers": (
        {"cameras": (Camera(name="a", key="action"),)},
        r"cameras\[0\]\.key = 'action': it is a feature of float32, not a camera",
    ),
    "two cameras of one name": (
        {"cameras": (Camera(name="a", key=FRONT), Camera(name="a", key=WRIST))},
        r"data\.cameras: two have one name",
    ),
    "state": ({"state": ("state",)}, r"data\.state: .*toy has no such feature: 'state'; its vectors are: .*action"),
    "actions of pictures": ({"actions": (FRONT,)}, r"data\.actions: .*toy has it as something else than a vector"),
    "no episode": ({"episodes": ()}, r"data\.episodes is empty"),
    "unknown episodes": ({"episodes": (1, 4, 9)}, r"toy has no episodes \[4, 9\] \(it has 4 from 0 to 3\)"),
    "an episode twice": ({"episodes": (1, 1)}, r"names an episode twice"),
    "times between frames": (
        {"state_seconds": (0.0, 0.1002)},
        r"data\.state_seconds\[1\] = 0\.1002 is no whole number of frames at 10 fps",
    ),
    "a name that is taken": ({"extra": (Signal(name="state", key="action"),)}, r"\['state'\] are taken"),
    "a long task": ({"max_prompt": 12}, rf"toy, episode 0: the task '{TASKS[0]}' has 12 tokens|episode 1: the prompt"),
    "differences of too few": (
        {"normalise": Normalise(delta=(True,))},
        r"data\.normalise\.delta has 1 entries for 2 dims of actions",
    ),
    "differences to no state": (
        {"normalise": Normalise(delta=(True, True)), "state": ()},
        r"needs dims that the state, of 0, lacks",
    ),
}


@pytest.mark.parametrize("version", ["v3.0"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_config_that_does_not_fit_the_dataset_is_refused(root: Path, tmp_path: Path, name: str) -> None:
    fields, message = CONFIGS[name]
    with pytest.raises(ValueError, match=message):
        open_data(attrs.evolve(DATA, path=str(root), **fields), context(tmp_path))


@pytest.mark.parametrize("version", ["v3.0"])
def test_a_time_within_the_tolerance_means_its_frame(root: Path, tmp_path: Path) -> None:
    cfg = attrs.evolve(DATA, path=str(root), cameras=(), state_seconds=(0.10009,))
    assert open_data(cfg, context(tmp_path))
    with pytest.raises(ValueError, match=r"state_seconds\[0\] = 0\.10011"):
        open_data(attrs.evolve(cfg, state_seconds=(0.10011,)), context(tmp_path))


@pytest.mark.parametrize("version", ["v3.0"])
def test_tasks_are_counted_in_tokens(root: Path, tmp_path: Path) -> None:
    longest = max(map(len, TASKS))
    cfg = attrs.evolve(DATA, path=str(root), cameras=(), max_prompt=longest)
    assert open_data(cfg, context(tmp_path, tokenizer=byte_tokenizer()))
    with pytest.raises(ValueError, match="toy, episode 1: the prompt of the task 'push the block' has up to 14 tokens"):
        open_data(attrs.evolve(cfg, max_prompt=longest - 1), context(tmp_path))
    with pytest.raises(ValueError, match="the run has no tokenizer"):
        open_data(cfg, context(tmp_path, tokenizer=None))


@pytest.mark.parametrize("version", ["v2.1"])
def test_actions_that_never_change_are_refused(root: Path, tmp_path: Path) -> None:
    for episode in range(4):
        change_column(data21(root, episode), "action", np.zeros_like)
    with pytest.raises(ValueError, match=r"data \(toy\): all 2 dims of the actions have zero range over 17 frames"):
        open_data(attrs.evolve(DATA, path=str(root)), context(tmp_path))
    told = [one.message for one in audit(root).findings if one.feature == "action"]
    assert "2 of 2 dims never move: x, y; they are scaled by 1" in told


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codebase_version": "v4.2"}, r"info\.json: codebase_version is 'v4\.2'; lf reads v2\.1 and v3\.0"),
        ({"fps": 0}, r"info\.json: fps is 0"),
        ({"features": 3}, r"info\.json: features is 3, and must be an object"),
        ({"data_path": "../{episode_index}"}, r"leads to '\.\./.*', outside the dataset|malformed"),
        (
            {"video_path": "/etc/{video_key}.mp4"},
            r"leads to '/etc/observation\.images\.front\.mp4', outside",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_metadata_that_cannot_be_is_an_error(root: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    change_json(root / "meta/info.json", **fields)
    with pytest.raises(ValueError, match=message):
        open_data(attrs.evolve(DATA, path=str(root)), context(tmp_path))
    report = audit(root)
    assert not report.ok
    assert report.findings[0].level == "fatal"


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
@pytest.mark.parametrize("damage", ["absent", "cut"])
def test_a_file_of_metadata_that_is_not_whole_is_named(root: Path, tmp_path: Path, damage: str) -> None:
    for path in sorted((root / "meta").rglob("*.*")):
        if path.name in ("stats.json", "episodes_stats.jsonl"):
            continue
        whole = path.read_bytes()
        path.unlink()
        if damage == "cut":
            path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=r"meta/|table of (episodes|tasks)"):
            open_data(attrs.evolve(DATA, path=str(root)), context(tmp_path))
        path.write_bytes(whole)


WRONG: dict[str, tuple[str, Break, tuple[int | None, str, str], str]] = {
    "totals": (
        "v3.0",
        lambda root: change_json(root / "meta/info.json", total_frames=18),
        (None, "", "meta/info.json"),
        "total_frames is 18, and the tables have 17",
    ),
    "a range that overlaps": (
        "v3.0",
        lambda root: change_episode(root, "dataset_from_index", [0, 5, 5, 13]),
        (2, "", "meta"),
        "starts at frame 5 of the dataset, which overlaps the one before; it should at 6",
    ),
    "a pointer to another file": (
        "v3.0",
        lambda root: change_episode(root, "data/file_index", [0, 0, 0, 1]),
        (2, "", "data/chunk-000/file-000.parquet"),
        "its rows are in data/chunk-000/file-001.parquet; correct data/file_index",
    ),
    "numbers of frames": (
        "v2.1",
        lambda root: change_column(data21(root, 1), "index", lambda values: values + 4),
        (1, "index", "data/chunk-000/episode_000001.parquet"),
        "it is 9 at frame 0, where 5 belongs",
    ),
    "statistics of an episode": (
        "v2.1",
        lambda root: (root / "meta/episodes_stats.jsonl").write_text(
            "".join(
                json.dumps({"episode_index": n, "stats": Toy().stats([0 if n == 3 else n])}) + "\n" for n in range(4)
            )
        ),
        (3, "action", ""),
        "recorded statistics are not those of its rows",
    ),
    "statistics of the whole": (
        "v3.0",
        lambda root: change_json(root / "meta/stats.json", action=Toy().stats([1])["action"]),
        (None, "action", "meta"),
        "recorded statistics are not those of the rows (min of dim 0",
    ),
    "no statistics": (
        "v3.0",
        lambda root: (root / "meta/stats.json").unlink(),
        (None, "", "meta"),
        "stats.json does not exist",
    ),
    "tasks out of order": (
        "v3.0",
        lambda root: pq.write_table(
            pa.table({"task_index": [1, 0], "task": [TASKS[1], TASKS[0]]}), root / "meta/tasks.parquet"
        ),
        (None, "task_index", "meta"),
        "task_index is not the number of the row",
    ),
    "a file that nothing points at": (
        "v3.0",
        lambda root: shutil.copy(data30(root), data30(root, 7)),
        (None, "", "data/chunk-000/file-007.parquet"),
        "no episode points at it",
    ),
    "a video with frames of nobody": (
        "v3.0",
        lambda root: encode(root / f"videos/{WRIST}/chunk-000/file-001.mp4", [frame(1, 13 + i) for i in range(6)]),
        (None, WRIST, f"videos/{WRIST}/chunk-000/file-001.mp4"),
        "the video has 6 frames, and its episodes have 4",
    ),
    "another size": (
        "v2.1",
        lambda root: change_json(
            root / "meta/info.json",
            features={**Toy().features(), FRONT: {"dtype": "video", "shape": [64, 48, 3], "names": None}},
        ),
        (0, FRONT, f"videos/chunk-000/{FRONT}/episode_000000.mp4"),
        "the video is 48 x 64, and info.json says (64, 48)",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_what_lf_reads_past_is_found_by_the_audit_alone(made: dict[str, Path], tmp_path: Path, name: str) -> None:
    version, damage, place, message = WRONG[name]
    root = shutil.copytree(made[version], tmp_path / "toy")
    damage(root)
    assert len(open_data(attrs.evolve(DATA, path=str(root)), context(tmp_path))) == 17
    report = audit(root)
    assert not report.ok
    assert [one.message for one in report.findings if one.level == "fatal"] == []
    told = [one for one in report.findings if (one.episode, one.feature, one.file) == place and message in one.message]
    assert told, [one.show("toy") for one in report.findings]


@pytest.mark.parametrize("version", ["v3.0"])
def test_statistics_that_writers_are_known_to_get_wrong_are_notes(root: Path) -> None:
    stats = json.loads((root / "meta/stats.json").read_text())
    stats["action"]["q01"], stats["action"]["std"] = [-9.0, -9.0], [0.0, 0.0]
    pixels = {"min": 0.0, "max": 1.0, "mean": 0.5, "std": 0.004}
    stats[FRONT] = {**{name: [[[value]]] * 3 for name, value in pixels.items()}, "count": [4]}
    (root / "meta/stats.json").write_text(json.dumps(stats))
    report = audit(root)
    assert report.ok
    told = " ".join(one.message for one in report.findings)
    assert "recorded std of 2 of 2 dims is off" in told
    assert "recorded q01 of 2 of 2 dims is off" in told
    assert "standard deviation of its pixels is [0.004, 0.004, 0.004], too small to be true" in told


def test_rotten_frames_are_found_where_all_are_decoded(made: dict[str, Path], tmp_path: Path) -> None:
    root = shutil.copytree(made["v2.1"], tmp_path / "toy")
    path = video21(root, 2)
    with av.open(str(path)) as file:
        entries = list(file.streams.video[0].index_entries)
        spans = [(entry.pos, entry.size) for entry in entries if entry.is_keyframe][1:]
    data = bytearray(path.read_bytes())
    for at, size in spans:
        data[at : at + size] = bytes(size)
    path.write_bytes(data)
    found = [one for one in audit(root, decode="all").findings if one.level == "fatal"]
    assert [(one.episode, one.feature) for one in found] == [(2, FRONT)]
    assert "cannot be decoded" in found[0].message or "no frame at tick" in found[0].message


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:40], "it is broken"),
        (lambda data: data[:50] + b"xxxx" + data[54:], "it is broken"),
        (lambda data: None, "it is not in the row"),
        (lambda data: png(np.zeros((8, 8, 3), np.uint8)), r"it is 8 x 8, and info\.json says \(48, 64\)"),
        (lambda data: png(np.zeros((48, 64), np.uint16)), "pixels of mode I"),
    ],
)
def test_pictures_that_cannot_be_read_are_found_when_opened(
    tmp_path: Path, damage: Callable[[bytes], bytes | None], message: str
) -> None:
    root = write_v30(tmp_path / "toy", Toy(lengths=(3,), kind="image", cameras=(FRONT,)))
    table = pq.read_table(data30(root))
    pictures = table[FRONT].to_pylist()
    pictures[1]["bytes"] = damage(pictures[1]["bytes"])
    column = pa.array(pictures, table.schema.field(FRONT).type)
    pq.write_table(table.set_column(table.column_names.index(FRONT), FRONT, column), data30(root))
    with pytest.raises(ValueError, match=rf"toy, episode 0, {FRONT}, .*: the picture of frame 1: .*{message}"):
        open_data(attrs.evolve(DATA, path=str(root)), context(tmp_path))
    assert found(audit(root), "fatal") == [(0, FRONT, "data/chunk-000/file-000.parquet")]


def test_depths_are_refused_as_a_camera(made: dict[str, Path], tmp_path: Path) -> None:
    root = shutil.copytree(made["v3.0"], tmp_path / "toy")
    depth = {"dtype": "video", "shape": [48, 64, 3], "names": None, "info": {"video.is_depth_map": True}}
    change_json(root / "meta/info.json", features={**Toy().features(), WRIST: depth})
    with pytest.raises(ValueError, match=rf"cameras\[1\]\.key = '{WRIST}': it is a camera of depths"):
        open_data(attrs.evolve(DATA, path=str(root)), context(tmp_path))
    report = audit(root)
    assert report.ok
    assert any(one.feature == WRIST and "depths" in one.message for one in report.findings)
