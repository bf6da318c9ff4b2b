"""Media to cached latents: what a row is, resume after a kill, audits and refusals, on small random encoders."""

import codecs
import errno
import json
import os
import re
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import save_file

import lf
from lf.data import clips as media
from lf.data import encode, latent_files, latents
from lf.data.config import Encoding
from lf.data.encode_text import open_texts
from lf.data.latent_commands import Latents
from lf.data.latent_files import write_cache
from lf.data.lerobot_commands import run
from lf.data.outline import outline
from lf.data.source import DataCtx, open_data
from lf.data.split import check_split
from lf.devices.cpu import cpu
from lf.models import spec
from lf.models.diffusion.wan import experts, wan_tiny
from lf.models.work import row_work
from lf.storage import locked
from lf.train.checkpoint import distributed
from lf.train.run import open_job
from scripts.prepare import main
from tests.media_tools import make_media, make_pipeline, make_texts, make_vae
from tests.robot_tools import EPS, watch_ghostscript

HOW: dict[str, Any] = {"sizes": ("32x48", "48x32"), "frames": (9, 5), "dtype": "float32", "text_dtype": "float32"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents")
    make_pipeline(folder / "pipeline")
    make_media(folder / "media")
    run(command(folder, folder / "cache"))
    return folder


def how(home: Path, **changes: Any) -> Encoding:
    return Encoding(**{"pipeline": str(home / "pipeline"), **HOW, **changes})


def command(home: Path, dst: Path, **changes: Any) -> Latents:
    given = {"pipeline": str(home / "pipeline"), **HOW, "src": home / "media", "shard_mb": 1e-3, "json": True}
    return Latents(dst=dst, **{**given, **changes})


def rows_of(cache: Path, **fields: Any) -> latents.LatentRows:
    return latents.open_latents(lf.LatentData(path=str(cache), **fields), seed=3, cache_dir=cache.parent / "digests")


def by_id(rows: Any) -> dict[str, dict[str, Any]]:
    made = [rows.row(0, i) for i in range(len(rows))]
    return {row["id"]: row for row in made}


def test_an_outline_costs_what_the_row_does(home: Path) -> None:
    rows = rows_of(home / "cache")
    told = [outline(rows, 1, index) for index in range(len(rows))]
    assert [one["id"] for one in told] == [rows.row(1, index)["id"] for index in range(len(rows))]
    assert all(one["latents"].is_meta for one in told)
    found = [row_work(wan_tiny, one) for one in told]
    assert found == [row_work(wan_tiny, rows.row(1, index)) for index in range(len(rows))]
    assert len({one.tokens for one in found}) == 2


def test_a_row_is_what_diffusers_and_transformers_encode(home: Path) -> None:
    import diffusers
    import transformers

    rows = by_id(rows_of(home / "cache"))
    assert {name: list(row["latents"].shape) for name, row in rows.items()} == {
        "a.mp4": [4, 3, 4, 6],
        "b.mp4": [4, 3, 6, 4],
        "c.png": [4, 1, 4, 6],
    }
    assert rows["b.mp4"]["caption"] == "a red disc moves right right"
    vae = diffusers.AutoencoderKLWan.from_pretrained(home / "pipeline/vae")
    (planned,) = [p for p in _plan(home) if p.media.name == "a.mp4"]
    pixels = torch.from_numpy(media.read_frames(planned)).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    with torch.no_grad():
        wanted = vae.encode(pixels).latent_dist.mode()[0]
    mean, std = (torch.tensor(vae.config[name])[:, None, None, None] for name in ("latents_mean", "latents_std"))
    assert torch.allclose(rows["a.mp4"]["latents"], (wanted - mean) / std, atol=1e-5)
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "pipeline/tokenizer")
    model = transformers.UMT5EncoderModel.from_pretrained(home / "pipeline/text_encoder")
    for text, row in (("a blue square", rows["c.png"]["text"]), ("", rows["c.png"]["empty"])):
        # As the pipelines do: padded to a length, masked, and cut to the mask again.
        given = tokenizer(text, padding="max_length", max_length=12, return_tensors="pt")
        with torch.no_grad():
            told = model(given.input_ids, given.attention_mask).last_hidden_state[0, : int(given.attention_mask.sum())]
        assert torch.allclose(row, told, atol=1e-5)


def _plan(home: Path) -> tuple[media.Planned, ...]:
    return media.plan_media(media.find_media(home / "media"), latents._buckets(how(home)))


def test_rows_train_a_model_of_their_sizes_and_others_are_refused(home: Path) -> None:
    rows = rows_of(home / "cache", given=1)
    model = attrs.evolve(wan_tiny, text=8)
    spec.check_model(model, rows.describe())
    made = [rows.row(0, i) for i in range(3)]
    assert sorted(row["given"] for row in made) == [0, 1, 1]
    assert spec.collate(model, made, made[0])["count"] == 18 + 18 + 6
    for change, words in (
        ({"in_channels": 16, "out_channels": 16}, "own VAE"),
        ({"text_dim": 32}, "own encoder"),
        ({"text": 6}, "shorten them"),
        ({"in_channels": 8}, "cache the condition"),
    ):
        with pytest.raises(ValueError, match=words):
            spec.check_model(attrs.evolve(model, **change), rows.describe())


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(home: Path) -> None:
    rows = rows_of(home / "cache")
    orders = [tuple(rows.row(epoch, i)["id"] for i in range(3)) for epoch in range(6)]
    assert all(sorted(order) == ["a.mp4", "b.mp4", "c.png"] for order in orders)
    assert len(set(orders)) > 1
    assert orders[4] == tuple(rows_of(home / "cache").row(4, i)["id"] for i in range(3))
    assert [rows.at(i)["id"] for i in range(3)] == ["a.mp4", "b.mp4", "c.png"]


def test_a_killed_run_goes_on_and_ends_equal(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = latents.open_encoder(how(home))
    calls: list[str] = []

    def dies(one: media.Planned) -> dict[str, torch.Tensor]:
        calls.append(one.media.name)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return encoder.row(one)

    def write(row: Any) -> int:
        return write_cache(
            tmp_path / "cache", _plan(home), encoder.facts, encoder.empty, row, shard_mb=1e-3, say=lambda _: None
        )

    with pytest.raises(KeyboardInterrupt):
        write(dies)
    (tmp_path / "cache/rows-00002.safetensors.partial").write_bytes(b"half")
    with pytest.raises(ValueError, match="not ended: run prepare"):
        rows_of(tmp_path / "cache")
    assert write(encoder.row) == 2
    assert len(list((tmp_path / "cache").glob("rows-*.safetensors"))) == 3
    assert (tmp_path / "cache/index.json").read_bytes() == (home / "cache/index.json").read_bytes()
    ours, theirs = by_id(rows_of(tmp_path / "cache")), by_id(rows_of(home / "cache"))
    assert all(torch.equal(ours[name]["latents"], theirs[name]["latents"]) for name in theirs)
    with pytest.raises(ValueError, match="other facts"):
        run(command(home, tmp_path / "cache", dtype="bfloat16"))
    with pytest.raises(ValueError, match="other media"):
        run(command(home, tmp_path / "cache", frames=(5,)))


def test_encoding_while_reading_gives_the_rows_of_the_cache(home: Path) -> None:
    ctx = DataCtx(seed=3, cache_dir=home)
    live = open_data(lf.MediaData(path=str(home / "media"), encoding=how(home)), ctx)
    kept = open_data(lf.LatentData(path=str(home / "cache")), ctx)
    facts = live.describe(), kept.describe()
    assert all(facts[0][name] == facts[1][name] for name in facts[1] if name != "content")
    for i in range(3):
        one, other = live.row(1, i), kept.row(1, i)
        assert one["id"] == other["id"]
        assert all(torch.equal(one[name], other[name]) for name in ("latents", "text", "empty"))


def test_qwen_images_vae_and_conditions_of_first_frames(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "pipeline", tmp_path / "pipeline")
    shutil.rmtree(tmp_path / "pipeline/vae")
    make_vae(tmp_path / "pipeline/vae", kind="AutoencoderKLQwenImage")
    encoder = latents.open_encoder(how(tmp_path, condition=True))
    row = encoder.row(_plan(home)[0])
    assert encoder.facts["condition_channels"] == 8
    assert row["condition"].shape == (8, 3, 4, 6)
    assert row["condition"][:4, 0].eq(1).all()
    assert row["condition"][:4, 1:].eq(0).all()
    # The VAE is causal: its first latent frame is that of the first frame alone.
    assert torch.allclose(row["condition"][4:, 0], row["latents"][:, 0], atol=1e-5)


def test_decoding_undoes_the_scaling(home: Path) -> None:
    vae = encode.open_vae(home / "pipeline/vae")
    pixels = np.random.default_rng(0).integers(0, 255, (5, 16, 16, 3), np.uint8)
    latent = encode.encode_pixels(vae, pixels)
    with torch.no_grad():
        wanted = vae.module.decode((latent * vae.std + vae.mean)[None]).sample[0]
    made = encode.decode_latent(vae, latent)
    assert made.shape == (5, 16, 16, 3)
    assert np.abs(made - ((wanted.clamp(-1, 1) + 1) * 127.5).permute(1, 2, 3, 0).numpy()).max() <= 0.51


def test_buckets_take_the_nearest_shape_and_the_most_frames(home: Path) -> None:
    planned = {one.media.name: one for one in _plan(home)}
    assert attrs.astuple(planned["a.mp4"].bucket) == (9, 32, 48)
    assert attrs.astuple(planned["b.mp4"].bucket) == (9, 48, 32)
    assert attrs.astuple(planned["c.png"].bucket) == (1, 32, 48)
    slower = latents._buckets(how(home, fps=4.0))
    found = {one.media.name: one for one in media.plan_media(media.find_media(home / "media"), slower)}
    assert attrs.astuple(found["a.mp4"].bucket) == (5, 32, 48)
    assert found["a.mp4"].pts == planned["a.mp4"].pts[::2]


@pytest.mark.parametrize("stored", ["upright", "turned", "wide"])
def test_videos_are_shown_as_their_files_say(tmp_path: Path, stored: str) -> None:
    import av

    # Red above green, left half darker; stored turned to the left, or squeezed to half its width.
    shown = np.zeros((64, 96, 3), np.uint8)
    shown[:32, :, 0], shown[32:, :, 1] = 200, 200
    shown[:, :48] //= 2
    kept = {"upright": shown, "turned": np.rot90(shown), "wide": shown[:, ::2]}[stored]
    with av.open(str(tmp_path / "a.mp4"), "w") as file:
        stream = file.add_stream("libx264", rate=8, options={"crf": "4"})
        stream.height, stream.width, stream.pix_fmt = *kept.shape[:2], "yuv420p"
        if stored == "turned":
            stream.set_display_rotation(-90)
        if stored == "wide":
            stream.sample_aspect_ratio = Fraction(2)
        file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(kept), format="rgb24")))
        file.mux(stream.encode())
    (tmp_path / "a.txt").write_text("a red disc")
    buckets = media.Buckets(sizes=((64, 96), (96, 64)), frames=(1,), fps=0.0, enlarge=False)
    (planned,) = media.plan_media(media.find_media(tmp_path), attrs.evolve(buckets, enlarge=stored == "wide"))
    assert (planned.bucket.height, planned.bucket.width) == (64, 96)
    corners = media.read_frames(planned)[0][[[8], [-8]], [[8, -8]]].astype(int)
    assert np.abs(corners - shown[[[8], [-8]], [[8, -8]]].astype(int)).max() < 24


@pytest.mark.parametrize(("angle", "mirrored"), [(45, False), (0, True)])
def test_videos_shown_askew_or_mirrored_are_refused(tmp_path: Path, angle: int, mirrored: bool) -> None:
    import av

    with av.open(str(tmp_path / "a.mp4"), "w") as file:
        stream = file.add_stream("libx264", rate=8)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        stream.set_display_rotation(angle, hflip=mirrored)
        file.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 48, 3), np.uint8), format="rgb24")))
        file.mux(stream.encode())
    with pytest.raises(ValueError, match=r"a\.mp4 is to be shown mirrored or turned .* encode it upright"):
        media.plan_media(
            [media.Media(name="a", path=tmp_path / "a.mp4", caption="x")],
            media.Buckets(sizes=((32, 48),), frames=(1,), fps=0.0, enlarge=False),
        )


def refused(home: Path, **changes: Any) -> str:
    def opened() -> None:
        encoder = latents.open_encoder(how(home, **{k: v for k, v in changes.items() if k != "src"}))
        latents.plan(changes.get("src", home / "media"), encoder)

    with pytest.raises(ValueError, match=r"\w") as caught:
        opened()
    return str(caught.value)


def test_sizes_and_frames_that_no_vae_takes_are_refused_with_the_nearest(home: Path) -> None:
    assert "nearest is 32x48" in refused(home, sizes=("30x42",))
    assert "multiples of 16" in refused(home, sizes=("30x40",))
    assert "4k + 1" in refused(home, frames=(8,))
    assert "nearest is 9" in refused(home, frames=(8,))
    assert "HEIGHTxWIDTH" in refused(home, sizes=("big",))
    assert "device = 'nope' cannot be used" in refused(home, device="nope")


def test_media_that_do_not_fit_are_all_named(home: Path, tmp_path: Path) -> None:
    source = tmp_path / "media"
    shutil.copytree(home / "media", source)
    whole = (source / "a.mp4").read_bytes()
    (source / "a.mp4").write_bytes(whole[: len(whole) // 2])
    (source / "c.png").write_bytes(b"\x89PNG nothing")
    told = refused(home, src=source)
    assert "2 of 3 media" in told
    assert "a.mp4" in told
    assert "c.png is no picture" in told
    assert "smaller than its bucket" in refused(home, sizes=("64x96",))
    assert "shortest bucket 17" in refused(home, frames=(17,))
    assert "ask fewer" in refused(home, fps=16.0)
    assert "takes 3; shorten" in refused(home, text=3)


def test_pictures_of_more_than_eight_bits_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=r"a\.png: it has pixels of mode I;16, .* convert it"):
        media.read_picture(tmp_path / "a.png")


def test_media_that_are_no_pictures_or_paths_are_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = watch_ghostscript(tmp_path, monkeypatch)
    (tmp_path / "innocent.png").write_bytes(EPS)
    os.mkfifo(tmp_path / "pipe.png")
    listed = tmp_path / "list.jsonl"
    lines = [json.dumps({"media": name, "caption": "x"}) for name in ("innocent.png", "pipe.png")]
    listed.write_text("\n".join(lines))
    told = refused(home, src=listed)
    assert re.search(r"innocent\.png is no picture that can be read \(it is none of PNG, ", told)
    assert re.search(r"pipe\.png: it is a named pipe, and must be a regular file", told)
    assert not called.exists()
    listed.write_text('{"media": "a\\u0000.png", "caption": "x"}\n')
    assert "list.jsonl:1: 'a\\x00.png' holds a null byte" in refused(home, src=listed)
    listed.write_text('{"media": "a.png", "caption": "\\ud800"}\n')
    assert "list.jsonl:1: field 'caption' holds half a surrogate pair" in refused(home, src=listed)


def test_captions_that_lack_are_refused(home: Path, tmp_path: Path) -> None:
    source = tmp_path / "media"
    shutil.copytree(home / "media", source)
    (source / "b.txt").write_text(" \n")
    with pytest.raises(ValueError, match=r"b\.txt is empty"):
        media.find_media(source)
    (source / "b.txt").unlink()
    with pytest.raises(ValueError, match="has no caption"):
        media.find_media(source)
    (source / "b.txt").write_bytes(codecs.BOM_UTF8 + b"a disc")
    assert [one.caption for one in media.find_media(source)][1:] == ["a disc", "a blue square"]
    for left in ("d.gif", "e.M4V", "f.txt"):
        (source / left).write_text("a caption of what is not read")
    with pytest.raises(ValueError, match=r"captions without a medium: d\.gif, e\.M4V, f\.txt; convert"):
        media.find_media(source)
    lines = source / "list.jsonl"
    lines.write_text('\ufeff{"media": "a.mp4", "caption": "a red\u2028disc"}\n')
    assert [(one.name, one.caption) for one in media.find_media(lines)] == [("a.mp4", "a red\u2028disc")]
    lines.write_bytes(b'{"media": "a.mp4", "caption": "\xe9"}')
    with pytest.raises(ValueError, match=r"list\.jsonl:1: not JSON"):
        media.find_media(lines)
    with pytest.raises(ValueError, match=r"none\.jsonl is no file; give a folder"):
        media.find_media(source / "none.jsonl")
    for line, words in (
        ('{"media": "a.mp4"}', "needs `media`"),
        ('{"media": "x.mp4", "caption": "x"}', "is missing"),
        ('{"media": "a.mp4", "caption": "x"}\n{"media": "a.mp4", "caption": "y"}', "twice"),
        ('{"media": "a.mp4", "caption": "x"}\n{"media": "./a.mp4", "caption": "y"}', "twice"),
        ('{"media": "a.gif", "caption": "x"}', "convert it"),
        ('{"media": "a.mp4", "caption": "x", "references": "c.png"}', "give a list of paths"),
        ('{"media": "a.mp4", "caption": "x", "references": ["b.mp4"]}', "b.mp4 is none of .png"),
        ('{"media": "a.mp4", "caption": "x", "references": ["x.png"]}', r"names a.mp4, and .*x.png is missing"),
        ("{", "not JSON"),
    ):
        lines.write_text(line)
        with pytest.raises(ValueError, match=words):
            media.find_media(lines)


def test_references_of_videos_or_for_pipelines_that_edit_nothing_are_refused(home: Path, tmp_path: Path) -> None:
    source = shutil.copytree(home / "media", tmp_path / "media")
    lines = source / "list.jsonl"
    lines.write_text('{"media": "a.mp4", "caption": "x", "references": ["c.png"]}')
    assert "only pictures are edits" in refused(home, src=lines)
    lines.write_text('{"media": "c.png", "caption": "x", "references": ["c.png"]}')
    assert "the pipeline edits nothing; give one of QwenImageEditPipeline" in refused(home, src=lines)
    (source / "d.png").write_bytes(b"\x89PNG nothing")
    lines.write_text('{"media": "c.png", "caption": "x", "references": ["d.png"]}')
    assert "d.png is no picture" in refused(home, src=lines)


@pytest.mark.parametrize(
    ("cache", "model", "words"),
    [
        ({}, {"text": 5}, "captions of 7 embeddings; shorten them, or raise model.text"),
        ({}, {"in_channels": 16, "out_channels": 16}, "the data has channels 4, and the model 16"),
        ({}, {"in_channels": 12}, "condition_channels 0, and the model 8"),
        ({}, {"image_dim": 20}, "image_dim 0, and the model 20"),
        ({"pipeline": "other"}, {}, "made by another vae"),
    ],
)
def test_a_run_on_a_cache_that_does_not_fit_does_not_start(
    one_process: None, home: Path, tmp_path: Path, cache: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    if cache.get("pipeline"):
        other = shutil.copytree(home / "pipeline", tmp_path / "other")
        (other / "vae/config.json").write_text((home / "pipeline/vae/config.json").read_text() + " ")
        cache = {"pipeline": str(other)}
    not_started(tmp_path, lf.LatentData(path=str(home / "cache"), **cache), words, **model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"frames": (8,)}, "4k [+] 1"),
        ({"sizes": ("30x48",)}, "multiples of 16.*nearest is 32x48"),
        ({"text": 3}, "the model takes 3; shorten it"),
        ({}, r"c\.png has no caption"),
    ],
)
def test_a_run_on_media_that_do_not_fit_does_not_start(
    one_process: None, home: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    source = shutil.copytree(home / "media", tmp_path / "media")
    if not change:
        (source / "c.txt").unlink()
    not_started(tmp_path, lf.MediaData(path=str(source), encoding=how(home, **change)), words)


def not_started(folder: Path, data: lf.DataConfig, words: str, **model: Any) -> None:
    """Asserts that a run on some data is refused before it has a folder."""
    changed = attrs.evolve(wan_tiny, **{"text": 8, **model})
    run = lf.Run(model=changed, data=data, parallel=lf.TorchParallel(micro_batch=1), batch=2, steps=1)
    with pytest.raises(ValueError, match=words):
        open_job(run, folder / "run", (), cpu, distributed(), lambda line: None)
    assert not (folder / "run").exists()


def test_a_boundary_that_parts_nothing_is_refused() -> None:
    for boundary in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match="must lie between 0 and 1"):
            experts(wan_tiny, boundary)


def test_a_vae_whose_scaling_is_wrong_is_refused(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "pipeline", tmp_path / "pipeline")
    file = tmp_path / "pipeline/vae/config.json"
    config = json.loads(file.read_text())
    for change, words in (
        ({"latents_std": [1.0, 0.0, 1.0, 1.0]}, "above 0"),
        ({"latents_mean": [0.0]}, "z_dim = 4"),
        ({"_class_name": "AutoencoderKL"}, "lf encodes with"),
    ):
        file.write_text(json.dumps({**config, **change}))
        assert words in refused(tmp_path, src=home / "media")


def test_a_cache_that_is_not_what_it_was_is_refused(home: Path, tmp_path: Path) -> None:
    def broken(change: Any) -> str:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        shutil.copytree(home / "cache", tmp_path / "cache")
        change(tmp_path / "cache")
        with pytest.raises(ValueError, match=r"\w") as caught:
            rows_of(tmp_path / "cache")
        return str(caught.value)

    assert "missing or not of" in broken(lambda cache: (cache / "rows-00001.safetensors").unlink())
    assert "missing or not of" in broken(lambda cache: (cache / "rows-00001.safetensors").write_bytes(b"1"))
    assert "was changed" in broken(
        lambda cache: (cache / "index.json").write_text((cache / "index.json").read_text().replace("disc", "dusk"))
    )
    assert "was changed" in broken(lambda cache: (cache / "index.json").write_text('{"format": 3}'))
    assert "no cache of latents" in broken(shutil.rmtree)
    for name in ("rows-00001.safetensors", "empty.safetensors"):
        assert f"{name} has other bytes than when it was made; copy" in broken(
            lambda cache, name=name: flip(cache / name)
        )


def flip(file: Path) -> None:
    """Changes the last byte."""
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))


def write_again(cache: Path, source: Path) -> int:
    """Does what `prepare.py latents` does to a cache that needs nothing encoded."""
    planned = media.plan_media(media.find_media(source), media.Buckets(sizes=((32, 48), (48, 32)), **KEPT))
    facts = json.loads((cache / "plan.json").read_text())["facts"]
    return write_cache(cache, planned, facts, never, never, shard_mb=1.0, say=lambda _: None)


KEPT: dict[str, Any] = {"frames": (9, 5), "fps": 0.0, "enlarge": False}


def never(*_: Any) -> Any:
    raise AssertionError("nothing is to be encoded")


def test_a_cache_is_of_the_bytes_of_its_media_and_ended_once(home: Path, tmp_path: Path) -> None:
    cache, source = shutil.copytree(home / "cache", tmp_path / "cache"), shutil.copytree(home / "media", tmp_path / "m")
    assert write_again(cache, source) == 3
    (cache / "index.json").unlink()
    assert write_again(cache, source) == 3
    assert (cache / "index.json").read_bytes() == (home / "cache/index.json").read_bytes()
    with locked(cache / "lock", wait=False), pytest.raises(ValueError, match=r"another process writes .*; wait until"):
        write_again(cache, source)
    flip(cache / "rows-00002.safetensors")
    with pytest.raises(ValueError, match=r"rows-00002\.safetensors has other bytes"):
        write_again(cache, source)
    (cache / "index.json").unlink()
    (cache / "rows-00001.safetensors").rename(tmp_path / "kept")
    with pytest.raises(ValueError, match=r"rows-00001\.safetensors is missing; copy"):
        write_again(cache, source)
    save_file({}, cache / "rows-00001.safetensors")
    with pytest.raises(ValueError, match=r"rows-00001\.safetensors does not say what its rows are .*; copy"):
        write_again(cache, source)
    (tmp_path / "kept").rename(cache / "rows-00001.safetensors")
    picture = np.asarray(media.read_picture(source / "c.png"))
    Image.fromarray(255 - picture).save(source / "c.png")
    with pytest.raises(ValueError, match=r"other media .* the bytes of c\.png are others"):
        write_again(cache, source)


@pytest.mark.parametrize(
    ("name", "error", "file"),
    [
        ("sync", OSError(errno.ENOSPC, "No space left on device"), "plan.json"),
        ("save_file", SafetensorError("No space left on device"), "empty.safetensors"),
    ],
)
def test_a_full_disk_is_said_with_the_file_and_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, file: str
) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(latent_files, name, full)
    with pytest.raises(OSError, match=rf"{file} cannot be written \(.*No space left.*\); make room"):
        write_cache(tmp_path, (), {}, lambda: torch.zeros(1), never, shard_mb=1.0, say=lambda _: None)


def test_encoders_draw_no_bars(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_texts(home / "pipeline")
    assert capsys.readouterr().err == ""


def test_latents_of_another_vae_are_refused(home: Path, tmp_path: Path) -> None:
    assert len(rows_of(home / "cache", pipeline=str(home / "pipeline"))) == 3
    shutil.copytree(home / "pipeline", tmp_path / "pipeline")
    shutil.rmtree(tmp_path / "pipeline/vae")
    make_vae(tmp_path / "pipeline/vae", seed=9)
    with pytest.raises(ValueError, match=r"data\.pipeline = 'none': none/vae cannot be read \(.*\); give the"):
        rows_of(home / "cache", pipeline="none")
    with pytest.raises(ValueError, match="another vae than"):
        rows_of(home / "cache", pipeline=str(tmp_path / "pipeline"))
    run(command(tmp_path, tmp_path / "cache", src=home / "media"))
    parts = tuple(lf.Weighted(data=lf.LatentData(path=str(folder / "cache"))) for folder in (home, tmp_path))
    with pytest.raises(ValueError, match="2 different VAEs"):
        open_data(lf.Mixture(parts=parts), DataCtx(seed=0, cache_dir=tmp_path))
    alike = open_data(lf.Mixture(parts=parts[:1] * 2), DataCtx(seed=0, cache_dir=tmp_path))
    spec.check_model(attrs.evolve(wan_tiny, text=8), alike.describe())
    shutil.rmtree(tmp_path / "pipeline/text_encoder")
    make_texts(tmp_path / "pipeline", width=8)
    assert "takes 3" in refused(tmp_path, src=home / "media", text=3)


def test_a_split_parts_the_rows_and_is_held_to(home: Path) -> None:
    sides = [set(by_id(rows_of(home / "cache", part=part, held_out=0.5))) for part in ("train", "held_out")]
    assert sides[0] | sides[1] == {"a.mp4", "b.mp4", "c.png"}
    assert not sides[0] & sides[1]
    cache = lf.LatentData(path=str(home / "cache"), part="held_out")
    with pytest.raises(ValueError, match="would be trained on"):
        check_split(lf.LatentData(path=str(home / "cache")), cache)
    check_split(lf.LatentData(path=str(home / "cache"), part="train"), cache)


def test_the_script_says_what_it_made_and_what_it_refuses(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["latents", str(home / "media"), str(tmp_path / "cache"), "--pipeline", str(home / "pipeline")]
    asked = [*given, "--sizes", "32x48", "48x32", "--frames", "9", "--json"]
    for before in (0, 3):
        assert main(asked) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["before"] == before
        assert facts["buckets"] == {"1x32x48": 1, "9x32x48": 1, "9x48x32": 1}
    assert rows_of(tmp_path / "cache").row(0, 0)["latents"].dtype == torch.bfloat16
    assert main([*given, "--sizes", "32x48", "--frames", "8"]) == 1
    assert "the nearest is 9" in capsys.readouterr().err
