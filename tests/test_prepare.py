"""`prepare.py`: what it prints, its exit codes, and `parity.py --data`."""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

from tests.robot_tools import CAMERAS, FPS, TASKS, Toy, frame, write_json, write_v21, write_v30

ROOT = Path(__file__).parents[1]
FRONT, WRIST = CAMERAS


def call(script: str, *arguments: Any) -> int:
    main = runpy.run_path(str(ROOT / f"scripts/{script}.py"), run_name=script)["main"]
    return int(main([str(argument) for argument in arguments]))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("robot")
    return {"v2.1": write_v21(folder / "v21"), "v3.0": write_v30(folder / "v30")}


def test_check_reports_and_exits(made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("prepare", "check", made["v3.0"]) == 0
    assert capsys.readouterr().out.endswith("v30: 4 episodes, 17 rows read; 0 fatal, 0 wrong, 0 note; all is well\n")
    root = shutil.copytree(made["v2.1"], tmp_path / "toy")
    video = f"videos/chunk-000/{WRIST}/episode_000002.mp4"
    (root / video).unlink()
    assert call("prepare", "check", root) == 1
    out = capsys.readouterr().out
    assert f"fatal  {root}, episode 2, {WRIST}, {video}: the video is not there" in out
    assert "1 fatal, 0 wrong, 0 note; something is wrong" in out
    assert call("prepare", "check", root, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["episodes"], report["frames"]) == (False, 4, 17)
    found = [(one["level"], one["episode"], one["feature"], one["file"]) for one in report["findings"]]
    assert found == [("fatal", 2, WRIST, video)]
    assert call("prepare", "check", root, "--episodes", 0, 1) == 0
    assert call("prepare", "check", tmp_path / "nothing", "--json") == 1
    assert "info.json does not exist" in json.loads(capsys.readouterr().out.splitlines()[-1])["findings"][0]["message"]


def test_convert_reports_and_exits(made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("prepare", "convert", made["v2.1"], tmp_path / "new", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "ok": True,
        "dataset": str(tmp_path / "new"),
        "version": "v3.0",
        "episodes": 4,
        "frames": 17,
    }
    assert call("prepare", "convert", made["v2.1"], tmp_path / "new") == 1
    assert "new is there already" in capsys.readouterr().err
    assert call("prepare", "convert", made["v2.1"], tmp_path / "other", "--fps", 5, "--json") == 1
    assert "leave out --fps" in json.loads(capsys.readouterr().out)["error"]
    files = tmp_path / "files"
    files.mkdir()
    np.savez(files / "0.npz", q=np.eye(3, dtype=np.float32), action=np.eye(3, dtype=np.float32))
    assert call("prepare", "convert", files, tmp_path / "arm") == 1
    assert "needs --fps above 0" in capsys.readouterr().err
    wrong = {
        "leave out --episodes 0, which chooses": ("--fps", 0, "--episodes", 0),
        "arm: fps is nan; give the frames a second": ("--fps", "nan"),
        "--rename names 'q' twice": ("--fps", 5, "--rename", "q=a", "q=b"),
    }
    for message, given in wrong.items():
        assert call("prepare", "convert", files, tmp_path / "arm", "--task", "go", *given) == 1
        assert message in capsys.readouterr().err
    options = ("--fps", 5, "--task", "go", "--rename", "q=observation.state", "--robot", "arm")
    assert call("prepare", "convert", files, tmp_path / "arm", *options) == 0
    assert "arm has 1 episodes with 3 frames, as LeRobot v3.0" in capsys.readouterr().out
    assert call("prepare", "check", tmp_path / "arm") == 0


def test_view_episodes_draws_every_camera(made: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "sheets" / "sheet.png"
    assert call("prepare", "view-episodes", made["v3.0"], "--out", out, "--frames", 3, "--episodes", 2, 1) == 0
    whole = np.asarray(Image.open(out).convert("RGB"))
    assert call("prepare", "view-episodes", made["v3.0"], "--out", out, "--frames", 3, "--cameras", FRONT) == 0
    with Image.open(out) as image:
        assert image.size[1] > whole.shape[0]
    assert call("prepare", "view-episodes", made["v3.0"], "--out", out, "--cameras", "side") == 1
    # The first frame of episode 2 is somewhere on the sheet, as one grey area.
    grey = whole[(whole[..., 0] == whole[..., 1]) & (whole[..., 1] == whole[..., 2])][:, 0]
    counts = np.bincount(grey, minlength=256)
    near = [counts[int(frame(camera, 6).flat[0]) - 3 : int(frame(camera, 6).flat[0]) + 4].sum() for camera in (0, 1)]
    assert min(near) > 500


STEPS = {"plain": None, "chunk": {"action": [0, 1, 2], FRONT: [-1, 0]}}


def golden(folder: Path, toy: Toy) -> Path:
    """What an official reader would return for a toy dataset, from its definition alone."""
    samples = [(episode, at) for episode in range(4) for at in sorted({0, toy.lengths[episode] - 1})]
    tensors: dict[str, Any] = {}
    for variant, windows in STEPS.items():
        rows: dict[str, list[Any]] = {}
        for episode, at in samples:
            start, last = toy.starts[episode], toy.lengths[episode] - 1
            for key, values in {**toy.columns(episode), FRONT: None}.items():
                steps = (windows or {}).get(key)
                places = [min(max(at + step, 0), last) for step in steps or (0,)]
                if values is None:
                    levels = np.array([float(frame(0, start + place).flat[0]) / 255 for place in places], np.float32)
                    found = np.broadcast_to(levels[:, None, None, None], (len(places), 3, 24, 32)).copy()
                else:
                    found = values[places]
                rows.setdefault(key, []).append(found if steps else found[0])
                if steps:
                    rows.setdefault(f"{key}_is_pad", []).append(
                        np.array([at + step != place for step, place in zip(steps, places, strict=True)])
                    )
        tensors |= {f"{variant}/{key}": np.stack(values) for key, values in rows.items()}
    folder.mkdir()
    save_file(tensors, folder / "samples.safetensors")
    listed = [
        {"position": toy.starts[e] + k, "episode_index": e, "frame_index": k, "task": TASKS[toy.task(e)]}
        for e, k in samples
    ]
    subset = [{"position": toy.starts[e] + k - toy.starts[2], "sample": n} for n, (e, k) in enumerate(samples) if e > 1]
    write_json(folder / "samples.json", {"samples": listed, "subset": {"episodes": [3, 2], "samples": subset}})
    deltas = {key: [step / FPS for step in steps] for key, steps in (STEPS["chunk"] or {}).items()}
    variants = {"plain": "no windows", "chunk": {"delta_timestamps": deltas}}
    write_json(folder / "config.json", {"variants": variants})
    stats = {f"meta.stats/action/{name}": np.array(value) for name, value in toy.stats(range(4))["action"].items()}
    save_file(stats, folder / "stats.safetensors")
    return folder


def golden_meta(folder: Path, root: Path, toy: Toy) -> None:
    info = json.loads((root / "meta/info.json").read_text())
    keep = ("codebase_version", "robot_type", "fps", "features", "total_episodes", "total_frames", "total_tasks")
    data = "data/chunk-000/episode_{:06d}.parquet"
    video = "videos/chunk-000/{}/episode_{:06d}.mp4"
    write_json(
        folder / "meta.json",
        {
            **{name: info[name] for name in (*keep, "chunks_size", "data_path", "video_path")},
            "camera_keys": list(CAMERAS),
            "video_keys": list(CAMERAS),
            "image_keys": [],
            "tasks": {str(number): task for number, task in enumerate(TASKS)},
            "loaded": {"episodes": None},
            "paths_of_loaded_episodes": {
                str(n): {"data": data.format(n), **{key: video.format(key, n) for key in CAMERAS}} for n in range(4)
            },
            "delta_indices": STEPS,
            "episodes": [
                {
                    "episode_index": n,
                    "tasks": [TASKS[toy.task(n)]],
                    "length": toy.lengths[n],
                    "dataset_from_index": toy.starts[n],
                    "dataset_to_index": toy.starts[n + 1],
                }
                for n in range(4)
            ],
        },
    )


def test_parity_of_a_dataset_and_what_throws_it_off(
    made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, toy = golden(tmp_path / "golden", Toy()), Toy()
    golden_meta(folder, made["v2.1"], toy)

    def compare(folder: Path) -> tuple[int, dict[str, Any]]:
        code = call("parity", folder, "--data", made["v2.1"])
        return code, json.loads(capsys.readouterr().out)

    code, line = compare(folder)
    # Pictures went through a codec; all else is exact.
    off = {name: value for name, value in line["outputs"].items() if value}
    assert all(FRONT in name and value <= 3 / 255 for name, value in off.items()), off
    assert line["family"] == "lerobot v2.1"
    names = {"plain/action", "chunk/action_is_pad", f"chunk/{FRONT}", "subset chunk/position", "meta/episodes"}
    assert names <= line["outputs"].keys()
    tensors = load_file(folder / "samples.safetensors")
    exact = {name: value for name, value in tensors.items() if FRONT not in name}
    save_file(exact, folder / "samples.safetensors")
    assert compare(folder)[0] == 0
    for name in ("plain/observation.state", "chunk/action_is_pad", "chunk/task_index"):
        wrong = {**exact, name: exact[name].copy()}
        wrong[name].flat[-1] = not wrong[name].flat[-1] if wrong[name].dtype == bool else wrong[name].flat[-1] + 1
        save_file(wrong, folder / "samples.safetensors")
        code, line = compare(folder)
        assert code == 1
        assert not line["ok"]
        assert line["outputs"][name] == pytest.approx(1)
    save_file({**exact, "plain/lost": exact["plain/action"]}, folder / "samples.safetensors")
    code, line = compare(folder)
    assert (code, line["outputs"]["plain/lost"]) == (1, None)
    assert call("parity", folder, "--data", tmp_path) == 2
    assert "info.json does not exist" in json.loads(capsys.readouterr().out)["error"]
