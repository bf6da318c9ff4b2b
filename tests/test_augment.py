"""Pictures of training rows: what is drawn, where pixels come from, colours, and that nothing else is changed."""

import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import lf
from lf.config import from_json, to_json
from lf.data.augment import Drawn, augmented, coloured, drawn, moved, moves, openpi
from lf.data.source import DataCtx, open_data
from lf.devices.cpu import cpu
from lf.models.embodied import robot
from lf.models.embodied.pi05 import pi05_tiny
from lf.train import checkpoint
from lf.train.run import open_job
from tests.robot_tools import CAMERAS, SIZE, Toy, write_v21
from tests.test_robot_training import run_on
from tests.test_train import go, metrics, tensors
from tests.workers import Workers

PLAIN = Drawn(down=0.0, right=0.0, degrees=0.0, brightness=1.0, contrast=1.0, saturation=1.0)


def picture(*shape: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (*shape[:-2], 3, *shape[-2:]), dtype=np.uint8)


def sampled(image: NDArray[np.float64], crop: float, how: Drawn) -> NDArray[np.float64]:
    """Returns what `moved` should: each pixel by itself, from the window's geometry."""
    _, height, width = image.shape
    rows, columns = int(height * crop), int(width * crop)
    # The middle of the window in pixels, from the picture's upper left corner.
    middle = height / 2 + how.down * (height - rows) / 2, width / 2 + how.right * (width - columns) / 2
    angle, out = math.radians(how.degrees), np.zeros_like(image)
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1)))
    for i in range(height):
        for j in range(width):
            y, x = i + 0.5 - height / 2, j + 0.5 - width / 2
            turned = math.sin(angle) * x + math.cos(angle) * y, math.cos(angle) * x - math.sin(angle) * y
            at = middle[0] + turned[0] * rows / height - 0.5, middle[1] + turned[1] * columns / width - 0.5
            top, left = math.floor(at[0]), math.floor(at[1])
            for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
                share = (at[0] - top if dy else 1 - at[0] + top) * (at[1] - left if dx else 1 - at[1] + left)
                if -1 <= top + dy <= height and -1 <= left + dx <= width:
                    out[:, i, j] += share * padded[:, top + dy + 1, left + dx + 1]
    return out


@pytest.mark.parametrize("size", [(20, 20), (12, 19)])
@pytest.mark.parametrize(
    "how",
    [
        PLAIN,
        attrs.evolve(PLAIN, down=-1.0, right=1.0),
        attrs.evolve(PLAIN, degrees=30.0),
        attrs.evolve(PLAIN, down=0.3, right=-0.8, degrees=-5.0),
    ],
)
def test_a_window_shows_what_its_geometry_says(size: tuple[int, int], how: Drawn) -> None:
    image = np.random.default_rng(1).random((3, *size))
    found = moved(torch.from_numpy(image).float()[None], 0.8, how)[0].numpy()
    assert np.abs(found - sampled(image, 0.8, how)).max() < 1e-5


def test_a_window_is_a_crop_and_a_quarter_turn_is_one() -> None:
    image = torch.rand(1, 3, 10, 10)
    # Twice as large: each corner of the window's pixels is a quarter of its neighbours.
    corner = moved(image, 0.5, attrs.evolve(PLAIN, down=-1.0, right=-1.0))
    inside = torch.nn.functional.interpolate(image[..., :6, :6], scale_factor=2, mode="bilinear", align_corners=False)
    assert torch.allclose(corner[..., 1:9, 1:9], inside[..., 1:9, 1:9], atol=1e-5)
    assert torch.allclose(
        moved(image, 1.0, attrs.evolve(PLAIN, degrees=90.0)), torch.rot90(image, 1, (2, 3)), atol=1e-5
    )
    assert torch.allclose(moved(image, 1.0, PLAIN), image, atol=1e-6)


def test_colours_are_those_of_the_formulas() -> None:
    x = torch.rand(2, 3, 6, 5)
    found = coloured(x, attrs.evolve(PLAIN, brightness=0.8, contrast=1.3, saturation=0.6))
    for one, image in zip(found.numpy(), x.numpy().astype(np.float64), strict=True):
        bright = image * 0.8
        strong = bright.mean() + (bright - bright.mean()) * 1.3
        grey = strong.mean(axis=0)
        assert np.allclose(one, np.clip(grey + (strong - grey) * 0.6, 0.0, 1.0), atol=1e-6)
    grey = coloured(x, attrs.evolve(PLAIN, saturation=0.0))
    assert torch.allclose(grey[:, 0], grey[:, 2])
    assert float(coloured(x, attrs.evolve(PLAIN, contrast=2.0)).max()) == 1.0


def test_no_strength_changes_no_bit() -> None:
    images = {"base": picture(24, 31), "wrist": picture(2, 8, 8)}
    same = augmented(lf.Augment(), 3, images, "id")
    assert all(np.array_equal(same[name], pixels) for name, pixels in images.items())
    # Fitted to the model's size, they are what the model makes of them.
    fitted = augmented(lf.Augment(size=28), 3, images, "id")["base"]
    assert torch.equal(
        robot.fitted_image(torch.from_numpy(fitted), 28), robot.fitted_image(torch.from_numpy(images["base"]), 28)
    )


def test_draws_are_functions_of_seed_sample_and_camera_and_stay_in_range() -> None:
    many = [drawn(openpi, 0, f"{i}", "base") for i in range(400)]
    assert many == [drawn(openpi, 0, f"{i}", "base") for i in range(400)]
    for field, low, high in (
        *(("down", -1.0, 1.0), ("right", -1.0, 1.0), ("degrees", -5.0, 5.0)),
        *(("brightness", 0.7, 1.3), ("contrast", 0.6, 1.4), ("saturation", 0.5, 1.5)),
    ):
        values = np.array([getattr(one, field) for one in many])
        width = high - low
        assert low <= values.min() < low + 0.05 * width, field
        assert high - 0.05 * width < values.max() <= high, field
        assert abs(values.mean() - (low + high) / 2) < 0.08 * width, field
    assert len({drawn(openpi, seed, i, c) for seed in (0, 1) for i in ("a", "b") for c in ("base", "left_wrist")}) == 8
    # One strength does not move the others' draws.
    still = drawn(attrs.evolve(openpi, rotate=0.0, brightness=0.0), 0, "1", "base")
    assert still == attrs.evolve(many[1], degrees=0.0, brightness=1.0)


def test_wrist_cameras_keep_their_geometry_and_a_window_changes_as_one() -> None:
    assert [moves(openpi, name) for name in pi05_tiny.cameras] == [True, False]
    flat = attrs.evolve(openpi, size=0, brightness=0.0, contrast=0.0, saturation=0.0)
    image = picture(16, 16)
    found = augmented(flat, 0, {"base": image, "left_wrist": image}, "id")
    assert np.array_equal(found["left_wrist"], image)
    assert not np.array_equal(found["base"], image)
    window = augmented(flat, 0, {"base": np.stack([image, image])}, "id")["base"]
    assert np.array_equal(window[0], found["base"])
    assert np.array_equal(window[1], found["base"])
    made = augmented(openpi, 0, {"base": picture(2, 48, 64)}, "id")["base"]
    assert made.shape == (2, 3, 224, 224)
    assert made.dtype == np.uint8
    assert from_json(to_json(openpi), kind=lf.Augment) == openpi


@pytest.mark.parametrize("field", [{"crop": 0.0}, {"crop": 1.1}, {"rotate": -1.0}, {"brightness": 1.5}, {"size": -1}])
def test_strengths_out_of_range_are_refused(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(field))):
        lf.Augment(**field)


# Datasets and runs

HARD = lf.Augment(crop=0.5, rotate=20.0, brightness=0.5, contrast=0.5, saturation=0.5)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_v21(tmp_path / "toy", Toy(cameras=CAMERAS[:1]))


def test_training_rows_alone_are_changed_anew_each_epoch(root: Path, tmp_path: Path) -> None:
    data = run_on(root).data
    assert isinstance(data, lf.LeRobotData)
    ctx = DataCtx(seed=4, cache_dir=tmp_path / "cache")
    rows: Any = open_data(attrs.evolve(data, augment=HARD), ctx)
    plain: Any = open_data(data, ctx)
    held_out: Any = open_data(attrs.evolve(data, augment=HARD), attrs.evolve(ctx, training=False))
    again: Any = open_data(attrs.evolve(data, augment=HARD), ctx)
    one, other = rows.row(0, 1), plain.row(0, 1)
    assert one["images"]["front"].shape == (3, *SIZE)
    assert not np.array_equal(one["images"]["front"], other["images"]["front"])
    assert np.array_equal(one["images"]["front"], again.row(0, 1)["images"]["front"])
    assert np.array_equal(held_out.row(0, 1)["images"]["front"], other["images"]["front"])
    assert np.array_equal(rows.frame_row(3)["images"]["front"], plain.frame_row(3)["images"]["front"])
    assert {key: value for key, value in one.items() if key in ("id", "task")} == {
        key: other[key] for key in ("id", "task")
    }
    assert np.array_equal(one["actions"], other["actions"])
    assert rows.describe() == plain.describe()
    # The same frame in the next epoch.
    orders = [rows.order(epoch) for epoch in (0, 1)]
    at = int(np.flatnonzero(orders[1] == orders[0][1])[0])
    assert not np.array_equal(rows.row(1, at)["images"]["front"], one["images"]["front"])
    mixed: Any = open_data(lf.Mixture(parts=(lf.Weighted(data=attrs.evolve(data, augment=HARD)),)), ctx)
    assert not np.array_equal(mixed.row(0, 1)["images"]["front"], plain.row(0, 1)["images"]["front"])


@pytest.mark.usefixtures("one_process")
def test_a_run_opens_its_held_out_rows_without_changes(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = run_on(root)
    data = attrs.evolve(run.data, augment=HARD)
    run = attrs.evolve(run, data=data, eval=lf.Eval(data=data))
    job = open_job(run, tmp_path / "run", (), cpu, checkpoint.distributed(), lambda line: None)
    job.lock.close()
    rows: Any = job.rows
    held_out: Any = job.eval_rows
    assert rows.augment is not None
    assert held_out.augment is None


def test_layouts_see_the_same_pictures_and_a_resume_goes_on_bit_for_bit(
    workers: Workers, root: Path, tmp_path: Path
) -> None:
    run = run_on(root)
    run = attrs.evolve(run, data=attrs.evolve(run.data, augment=HARD))
    workers.run(1, go, run, tmp_path / "whole", tmp_path)
    workers.run(1, go, run, tmp_path / "cut", tmp_path, 3)
    workers.run(1, go, run, tmp_path / "cut", tmp_path)
    workers.run(2, go, run, tmp_path / "two", tmp_path)
    expected = metrics(tmp_path / "whole")
    assert metrics(tmp_path / "cut") == expected
    assert all(torch.equal(t, tensors(tmp_path / "cut", 6)[name]) for name, t in tensors(tmp_path / "whole", 6).items())
    for ours, theirs in zip(metrics(tmp_path / "two"), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
