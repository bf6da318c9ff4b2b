"""Samples of diffusion models from the command line: solvers, experts, given frames, pipelines in and out, refusals."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lf.data.encode import encode_pixels, open_vae
from lf.data.encode_text import pipeline_class
from lf.data.latents import LatentData, open_latents
from lf.models import spec
from lf.models.diffusion.flow import ConstantShift, Flow, Sampling, schedule
from lf.models.diffusion.latent import LatentModel, latent_batch, with_draws
from lf.models.diffusion.qwen_image import qwen_image_tiny
from lf.models.diffusion.sample import How, sample_row, solve
from lf.models.diffusion.wan import Wan, wan_tiny
from lf.train.start import export
from scripts.generate import main
from scripts.media.painting import Media, _room, _settled
from tests.latent_tools import tiny
from tests.media_tools import make_media, make_pipeline
from tests.test_latents import command
from tests.test_latents import run as encode_media

MODEL = attrs.evolve(wan_tiny, text=8, most=64)
ASK = ("--prompt", "a red disc", "--size", "32x48", "--steps", "3", "--device", "cpu")


def write_transformer(folder: Path, seed: int, cfg: Wan = MODEL) -> None:
    model = tiny(cfg, seed)
    tensors = spec.named_tensors(model)
    export(cfg, tensors.__getitem__, folder, source=None, files={}, write=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("painting")
    make_pipeline(folder / "pipeline")
    write_transformer(folder / "pipeline/transformer", 0)
    make_media(folder / "media")
    encode_media(command(folder, folder / "cache"))
    return folder


def row_of(frames: int = 2, **more: Any) -> dict[str, Any]:
    floats = torch.Generator().manual_seed(4)
    text = torch.randn(3, 16, generator=floats)
    empty = torch.randn(1, 16, generator=floats)
    return {"latents": torch.zeros(4, frames, 4, 6), "text": text, "empty": empty, "id": "x", **more}


def test_euler_is_the_sample_of_the_family() -> None:
    model, how = tiny(MODEL), How(steps=4, guidance=2.0, shift=3.0, seed=5)
    cfg = attrs.evolve(MODEL, sampling=Sampling(steps=4, guidance=2.0, shift=ConstantShift(factor=3.0)))
    batch = with_draws(cfg.space, Flow(), latent_batch(cfg.space, [row_of()]), 5, 0)
    with torch.no_grad():
        (wanted,) = spec.sample(cfg, model, batch)
    # Captions that training drops are not dropped in a sample.
    dropping = attrs.evolve(MODEL, flow=Flow(caption_dropout=0.99))
    assert torch.equal(sample_row(dropping, [model], row_of(), how, "cpu"), wanted)


def test_solvers_near_the_exact_flow_of_a_gaussian_and_unipc_in_fewer_steps() -> None:
    mean, std, all_ = 0.7, 0.4, torch.ones(64, 1, dtype=torch.bool)
    noise = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))

    def field(x: torch.Tensor, t: float) -> torch.Tensor:
        spread = (1 - t) ** 2 * std**2 + t**2
        return -mean + (t - (1 - t) * std**2) / spread * (x - (1 - t) * mean)

    def far(solver: Any, steps: int) -> float:
        way = schedule(Sampling(steps=steps, shift=ConstantShift(factor=1.0)), 1)
        return float((solve(solver, field, noise, all_, way) - (mean + std * noise)).abs().max())

    assert far("euler", 400) < 0.01
    assert far("unipc", 12) < 0.25 * far("euler", 12)


def test_each_expert_is_asked_in_its_own_times() -> None:
    high, low = tiny(MODEL, 1), tiny(MODEL, 2)
    asked: list[str] = []
    for name, model in (("high", high), ("low", low)):
        model.register_forward_pre_hook(lambda *_, name=name: asked.append(name))
    sample_row(MODEL, [high, low], row_of(), How(steps=4, guidance=1.0, shift=1.0, boundary=0.5), "cpu")
    assert asked == ["high", "high", "high", "low"]
    with pytest.raises(ValueError, match="between 0 and 1"):
        sample_row(MODEL, [high, low], row_of(), How(), "cpu")


def test_given_frames_stay() -> None:
    row = row_of(3, given=1)
    row["latents"][:, 0] = 0.25
    for solver in ("euler", "unipc"):
        made = sample_row(MODEL, [tiny(MODEL)], row, How(steps=3, solver=solver), "cpu")
        assert made[:, 0].eq(0.25).all()
        assert not made[:, 1].eq(0.25).any()


def test_a_pipeline_makes_a_picture_a_video_and_a_pipeline(home: Path, tmp_path: Path) -> None:
    import diffusers
    from PIL import Image

    out = tmp_path / "a.png"
    assert (
        main(["media", str(home / "pipeline"), *ASK, "--out", str(out), "--write-pipeline", str(tmp_path / "p")]) == 0
    )
    assert Image.open(out).size == (48, 32)
    latent = tmp_path / "a.SAFETENSORS"
    assert main(["media", str(tmp_path / "p"), *ASK, "--out", str(latent)]) == 0
    assert load_file(latent)["latents"].shape == (4, 1, 4, 6)
    video = tmp_path / "a.MP4"
    more = ("--frames", "9", "--out", str(video), "--solver", "unipc")
    assert main(["media", str(home / "pipeline"), *ASK, *more]) == 0
    from lf.data.video import index_video

    assert len(index_video(video).pts) == 9
    # What is written is the pipeline that it came from, and diffusers reads the model in it.
    for file in (home / "pipeline").rglob("*"):
        if file.is_file():
            assert (tmp_path / "p" / file.relative_to(home / "pipeline")).read_bytes() == file.read_bytes()
    peer = diffusers.WanTransformer3DModel.from_config(json.loads((tmp_path / "p/transformer/config.json").read_text()))
    peer.load_state_dict(load_file(tmp_path / "p/transformer/diffusion_pytorch_model.safetensors"))


def test_a_row_of_a_cache_asks_for_its_size(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = home / "pipeline/transformer", tmp_path / "a.safetensors"
    given = ["media", str(folder), "--cache", str(home / "cache"), "--steps", "2", "--device", "cpu", "--out", str(out)]
    rows = open_latents(LatentData(path=str(home / "cache")), seed=0, cache_dir=tmp_path)
    for number in range(3):
        assert main([*given, "--row", str(number)]) == 0
        row = rows.at(number)
        assert f"row {number} is {row['id']}: {row['caption']}\n" in capsys.readouterr().out
        shape = row["latents"].shape
        assert load_file(out)["latents"].shape == shape
        # Before anything is sampled, the file that is asked for must be of the row's kind.
        other = tmp_path / ("a.PNG" if shape[1] > 1 else "a.MP4")
        asked = [*given, "--row", str(number), "--pipeline", str(home / "pipeline"), "--out", str(other)]
        assert main(asked) == 1
        assert f"is {'a video; give' if shape[1] > 1 else 'a picture; give'}" in capsys.readouterr().err
    for flags in (("--size", "32x48"), ("--frames", "5")):
        assert main([*given, *flags]) == 1
        assert "leave out --size and --frames" in capsys.readouterr().err
    assert main([*given, "--image", "x.png"]) == 1
    assert "leave out --image" in capsys.readouterr().err


def test_a_first_frame_is_kept_or_conditions(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.safetensors"
    image = ("--image", str(home / "media/c.png"), "--frames", "5", "--out", str(out))
    assert main(["media", str(home / "pipeline"), *ASK, *image]) == 0
    from lf.data.clips import Bucket, Media, Planned, read_frames

    medium = Media(name="c", path=home / "media/c.png", caption="")
    pixels = read_frames(Planned(media=medium, bucket=Bucket(frames=1, height=32, width=48), pts=(), fps=0.0))
    first = encode_pixels(open_vae(home / "pipeline/vae"), pixels)
    assert torch.allclose(load_file(out)["latents"][:, 0], first[:, 0], atol=1e-6)
    write_transformer(tmp_path / "i2v", 3, attrs.evolve(MODEL, in_channels=12))
    asked = ["media", str(tmp_path / "i2v"), "--pipeline", str(home / "pipeline"), *ASK]
    assert main([*asked, *image]) == 0
    assert np.isfinite(load_file(out)["latents"].numpy()).all()
    assert main([*asked, "--out", str(out)]) == 1
    assert "one first frame, and 0 are given; give one --image" in capsys.readouterr().err
    write_transformer(tmp_path / "read", 3, attrs.evolve(MODEL, in_channels=12, image_dim=20))
    assert main(["media", str(tmp_path / "read"), *asked[2:], *image]) == 1
    assert "has no image_encoder; give" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cfg", "count", "words"),
    [
        (qwen_image_tiny, 1, "takes no first frame, and 1 are given; leave out --image"),
        (MODEL, 2, "takes one first frame, and 2 are given; give one --image"),
    ],
)
def test_pictures_that_a_model_does_not_take_are_refused(cfg: LatentModel, count: int, words: str) -> None:
    vae = SimpleNamespace(channels=4, spatial=8, temporal=4)
    with pytest.raises(ValueError, match=words):
        _room(Media(folder=Path(), image=(Path("a.png"),) * count), cfg, vae, "cpu")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--out", "a.gif"], "none of .png"),
        (["--out", "a.mp4"], "a video, and --frames 1"),
        (["--frames", "9"], "a picture, and --frames 9"),
        (["--frames", "8", "--out", "a.mp4"], "4k + 1"),
        (["--size", "30x48"], "multiples of 16"),
        (["--prompt", "a " * 600], "takes 512; shorten"),
        (["--cache", "x"], "either --prompt"),
        (["--boundary", "0.5"], "give --low"),
        (["--write-pipeline", "."], "is there already"),
    ],
)
def test_what_cannot_be_is_refused_with_the_cure(
    home: Path, capsys: pytest.CaptureFixture[str], changes: list[str], words: str
) -> None:
    assert main(["media", str(home / "pipeline"), *ASK, *changes]) == 1
    assert words in capsys.readouterr().err


def test_folders_that_do_not_fit_are_refused(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformer = str(home / "pipeline/transformer")
    assert main(["media", transformer, *ASK]) == 1
    assert "give --pipeline" in capsys.readouterr().err
    assert main([transformer, "--prompt", "a"]) == 1
    assert "generate.py media" in capsys.readouterr().err
    golden = str(Path(__file__).parent / "golden/hf/qwen3")
    assert main(["media", golden, "--pipeline", str(home / "pipeline"), *ASK]) == 1
    assert "makes no pictures" in capsys.readouterr().err
    shutil.copytree(home / "pipeline", tmp_path / "two")
    shutil.copytree(home / "pipeline/transformer", tmp_path / "two/transformer_2")
    assert main(["media", str(tmp_path / "two"), *ASK, "--out", str(tmp_path / "a.png")]) == 1
    assert "boundary" in capsys.readouterr().err
    assert main(["media", transformer, "--pipeline", str(tmp_path / "two"), *ASK]) == 1
    assert "two experts" in capsys.readouterr().err
    index = tmp_path / "two/model_index.json"
    index.write_text(json.dumps({"_class_name": "WanPipeline", "boundary_ratio": 0.875}))
    assert main(["media", str(tmp_path / "two"), *ASK, "--out", str(tmp_path / "a.png")]) == 0


@pytest.mark.parametrize(
    ("scheduler", "shift"),
    [
        ({"flow_shift": 3.0}, 3.0),
        ({"shift": 3.0}, 3.0),
        ({"shift": 3.0, "use_dynamic_shifting": False}, 3.0),
        ({"shift": 3.0, "use_dynamic_shifting": True}, 0.0),
        ({}, 0.0),
    ],
)
def test_a_whole_pipeline_says_boundary_and_shift(tmp_path: Path, scheduler: dict[str, Any], shift: float) -> None:
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "model_index.json").write_text('{"boundary_ratio": 0.9}')
    (tmp_path / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    told = _settled(Media(folder=tmp_path))
    assert (told.boundary, told.shift) == (0.9, shift)
    told = _settled(Media(folder=tmp_path, boundary=0.8, shift=5.0))
    assert (told.boundary, told.shift) == (0.8, 5.0)


def test_files_of_a_pipeline_that_hold_no_object_are_named(tmp_path: Path) -> None:
    (tmp_path / "scheduler").mkdir()
    for name in ("scheduler/scheduler_config.json", "model_index.json"):
        (tmp_path / "model_index.json").write_text("{}")
        for held, words in (("[]", "holds no object"), ("{", "cannot be read")):
            (tmp_path / name).write_text(held)
            with pytest.raises(ValueError, match=rf"{name} {words}.*; fetch the pipeline again"):
                _settled(Media(folder=tmp_path))
    with pytest.raises(ValueError, match=r"model_index\.json cannot be read"):
        pipeline_class(tmp_path)
