"""A run of Pi0.5 on robot data that cannot be trained on is refused where it starts, and leaves nothing behind."""

import re
import shutil
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import lf
from lf.data.split import check_split
from lf.devices.cpu import cpu
from lf.models.embodied.pi05 import pi05_tiny
from lf.train import checkpoint
from lf.train.loop import Job
from lf.train.run import open_job
from tests.robot_tools import CAMERAS, Toy, change_column, write_v21, write_v30
from tests.test_lerobot_faults import FATAL, data21

BASE, LEFT = pi05_tiny.cameras
FRONT, WRIST = CAMERAS
MODEL = attrs.evolve(pi05_tiny, vocab=300, prompt=60, horizon=4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("robot")
    return {"v2.1": write_v21(folder / "v21"), "v3.0": write_v30(folder / "v30")}


def run_on(root: Path, model: Any = MODEL, **fields: Any) -> lf.Run:
    cameras = (lf.Camera(name=BASE, key=FRONT), lf.Camera(name=LEFT, key=WRIST))
    return lf.Run(
        model=model,
        tokenizer=lf.TrainedBpe(vocab=300),
        data=lf.LeRobotData(**{"path": str(root), "cameras": cameras, "chunk": 4, **fields}),
        batch=2,
        parallel=lf.TorchParallel(micro_batch=2),
        steps=1,
    )


def start(run: lf.Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return open_job(run, folder / "run", (), cpu, checkpoint.distributed(), lambda line: None)


def refused(run: lf.Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    with pytest.raises(ValueError, match=" ") as error:
        start(run, folder, monkeypatch)
    assert not (folder / "run").exists()
    return str(error.value)


def test_sound_data_is_opened(
    one_process: None, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(run_on(made["v3.0"]), tmp_path, monkeypatch)
    job.lock.close()
    job.sinks.close()
    job.progress.close()
    assert len(job.rows) == 17


@pytest.mark.parametrize(
    "name",
    [
        *("rows absent", "video absent", "video cut off", "video one frame short", "fewer rows than said"),
        *("a timestamp off", "times shifted against the video", "NaN in actions", "infinity in states"),
    ],
)
def test_broken_data_is_refused(
    one_process: None, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    version, damage, told, _ = FATAL[name]
    root = shutil.copytree(made[version], tmp_path / "toy")
    damage(root)
    text = refused(run_on(root), tmp_path, monkeypatch)
    assert re.search(rf"{tmp_path}/toy, {told}", text), text


OTHER = (lf.Camera(name="front", key=FRONT),)
FITS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a camera that the dataset lacks": (
        {"cameras": (lf.Camera(name=BASE, key="observation.images.top"),)},
        (
            "data.cameras[0].key = 'observation.images.top': the dataset has no such feature",
            f"toy are: {FRONT}, {WRIST}",
        ),
    ),
    "a camera that the model lacks": (
        {"cameras": OTHER},
        ("data (toy: action): row 0:0 toy/", "has the camera front, and the model's are base_0_rgb, left_wrist_0_rgb"),
    ),
    "cameras under their own keys": (
        {"cameras": None},
        ("data (toy: action): row 0:0 toy/", f"has the camera {FRONT}"),
    ),
    "no camera": ({"cameras": ()}, ("data (toy: action): row 0:0 toy/", "has no camera")),
    "too many dims": (
        {"model": attrs.evolve(MODEL, dims=1)},
        ("data (toy: action): model.dims = 1, but the data has 2 action dims; raise model.dims",),
    ),
    "another chunk": ({"chunk": 5}, ("data (toy: action): model.horizon = 4, but the data has chunks of 5 steps",)),
    "a long prompt": (
        {"model": attrs.evolve(MODEL, prompt=20)},
        ("toy, episode 1: the prompt of the task 'push the block' has up to", "and model.prompt is 20; shorten it, or"),
    ),
    "a long prompt by the data's own rule": (
        {"max_prompt": 21},
        ("toy, episode 1: the prompt of the task", "and data.max_prompt is 21; shorten it, or raise data.max_prompt"),
    ),
    "no episode": ({"episodes": ()}, ("data.episodes is empty, or ", "toy has no episode; name at least one")),
    "unknown episodes": ({"episodes": (2, 7)}, ("data.episodes: ", "toy has no episodes [7] (it has 4 from 0 to 3)")),
}


@pytest.mark.parametrize("name", list(FITS))
def test_a_config_that_does_not_fit_is_refused(
    one_process: None, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fields, told = FITS[name]
    root = shutil.copytree(made["v3.0"], tmp_path / "toy")
    text = refused(run_on(root, **fields), tmp_path, monkeypatch)
    assert all(part in text for part in told), text


def test_held_out_data_is_held_to_the_model_too(
    one_process: None, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run_on(made["v2.1"], cameras=OTHER).data
    run = attrs.evolve(run_on(made["v3.0"]), eval=lf.Eval(data=other))
    assert "eval.data (v21: action): row 0:0 v21/" in refused(run, tmp_path, monkeypatch)


def test_actions_of_zero_range_and_other_rates_are_refused(
    one_process: None, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(made["v2.1"], tmp_path / "toy")
    for episode in range(4):
        change_column(data21(root, episode), "action", np.zeros_like)
    text = refused(run_on(root), tmp_path, monkeypatch)
    assert "data (toy): all 2 dims of the actions have zero range over 17 frames" in text
    fast = write_v30(tmp_path / "fast", Toy(fps=20))
    parts = tuple(lf.Weighted(data=run_on(one).data) for one in (made["v3.0"], fast))
    text = refused(attrs.evolve(run_on(fast), data=lf.Mixture(parts=parts)), tmp_path, monkeypatch)
    assert "data: the datasets v30 and fast differ in fps 10.0 and 20.0" in text


def test_the_longest_state_counts_for_the_length_of_a_prompt(
    one_process: None, made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def most(model: Any) -> int:
        text = refused(run_on(made["v3.0"], model), tmp_path, monkeypatch)
        return int(text.split(" has up to ")[1].split()[0])

    longest = most(attrs.evolve(MODEL, prompt=20))
    assert 20 < longest < 60
    assert most(attrs.evolve(MODEL, prompt=longest - 1)) == longest
    job = start(run_on(made["v3.0"], attrs.evolve(MODEL, prompt=longest)), tmp_path, monkeypatch)
    job.lock.close()
    job.sinks.close()
    job.progress.close()
    assert max(len(job.rows.row(0, at)["prompt"]) for at in range(17)) <= longest


def test_held_out_episodes_are_not_trained_on(tmp_path: Path) -> None:
    def data(*episodes: int, root: Path = tmp_path / "toy") -> lf.LeRobotData:
        return lf.LeRobotData(path=str(root), episodes=episodes or None)

    def mixed(part: lf.DataConfig) -> lf.Mixture:
        return lf.Mixture(parts=(lf.Weighted(data=data(root=tmp_path / "other")), lf.Weighted(data=part)))

    check_split(data(0, 1, 2), data(3))
    check_split(data(0, 1), data(1, 0))
    check_split(data(), data())
    check_split(data(0, 1), data())
    check_split(data(0, 3, root=tmp_path / "other"), data(3))
    check_split(mixed(data(0, 1)), mixed(data(2)))
    for trained, told in ((data(), r"None, all of them"), (data(0, 3), r"some of them, \[3\], too")):
        for train, held, here in (
            (trained, data(3), "data"),
            (mixed(trained), data(3), r"data\.parts\[1\]\.data"),
            (trained, data(3, root=tmp_path / "x" / ".." / "toy"), "data"),
        ):
            with pytest.raises(
                ValueError, match=rf"eval\.data\.episodes names 1 of .*toy, and {here}\.episodes is {told}"
            ):
                check_split(train, held)
