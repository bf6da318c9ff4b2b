"""Rows, samples and written pipelines are those of diffusers' own pipelines, on small random parts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lf
from lf.data import latents
from lf.data.config import Encoding
from lf.data.encode_text import EDITS, check_caption, clean, encode_caption, open_texts, resized_to, texts_digest
from lf.data.latent_commands import Latents
from lf.data.lerobot_commands import run
from lf.data.source import DataCtx, open_data
from lf.devices.cpu import cpu
from lf.models import spec
from lf.models.diffusion.flow import Flow
from lf.models.diffusion.latent import LatentModel, latent_batch, with_draws
from lf.models.diffusion.packed import patchify, unpatchify
from lf.models.diffusion.qwen_image import qwen_image_tiny
from lf.models.diffusion.wan import wan_tiny
from lf.train.checkpoint import distributed
from lf.train.loop import train
from lf.train.run import open_job
from scripts.generate import main
from tests.media_tools import QWEN_WIDTH, make_clip, make_qwen_texts, make_texts, make_vae
from tests.test_painting import write_transformer

I2V = attrs.evolve(wan_tiny, in_channels=12, image_dim=20)
EDIT = attrs.evolve(qwen_image_tiny, text_dim=QWEN_WIDTH)
STEPS = ("--steps", "3", "--device", "cpu", "--seed", "4")
SMALL = 64 * 64


def write_index(folder: Path, kind: str, **more: Any) -> None:
    ours = {"vae": "diffusers", "scheduler": "diffusers", "transformer": "diffusers", "transformer_2": "diffusers"}
    classes = {
        name: json.loads((folder / name / "config.json").read_text()) for name in ours if (folder / name).is_dir()
    }
    parts = {name: ["diffusers", stated["_class_name"]] for name, stated in classes.items()}
    encoder = "Qwen2_5_VLForConditionalGeneration" if "Qwen" in kind else "UMT5EncoderModel"
    parts |= {"text_encoder": ["transformers", encoder], "tokenizer": ["transformers", "PreTrainedTokenizerFast"]}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": kind, **parts, **more}))


def write_scheduler(folder: Path, **more: Any) -> None:
    import diffusers

    diffusers.FlowMatchEulerDiscreteScheduler(**more).save_pretrained(folder / "scheduler")
    file = folder / "scheduler/scheduler_config.json"
    (folder / "scheduler/config.json").write_text(file.read_text())


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    make_vae(folder / "vae")
    make_texts(folder)
    make_clip(folder)
    # Not the 5.0 that Wan has itself.
    write_scheduler(folder, shift=3.0)
    write_transformer(folder / "transformer", 0, I2V)
    clip = {
        "image_encoder": ["transformers", "CLIPVisionModel"],
        "image_processor": ["transformers", "CLIPImageProcessor"],
    }
    write_index(folder, "WanImageToVideoPipeline", **clip)
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    make_vae(folder / "vae", kind="AutoencoderKLQwenImage")
    make_qwen_texts(folder)
    dynamic = {"base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02}
    write_scheduler(folder, use_dynamic_shifting=True, **dynamic)
    write_transformer(folder / "transformer", 1, EDIT)
    write_index(folder, "QwenImageEditPlusPipeline", processor=["transformers", "Qwen2VLProcessor"])
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pictures of edits have thousands of pixels, not a million, here and in diffusers."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    monkeypatch.setattr(latents, "REFERENCE_AREA", SMALL)
    monkeypatch.setitem(EDITS, "QwenImageEditPipeline", attrs.evolve(EDITS["QwenImageEditPipeline"], area=SMALL))  # type: ignore[arg-type]
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", SMALL)
    there = pipeline_qwenimage_edit.calculate_dimensions
    monkeypatch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda area, ratio: there(SMALL, ratio))
    there_plus = pipeline_qwenimage_edit_plus.calculate_dimensions
    monkeypatch.setattr(
        pipeline_qwenimage_edit_plus,
        "calculate_dimensions",
        lambda area, ratio: there_plus(SMALL if area == 1024 * 1024 else area, ratio),
    )
    return


def pictures(folder: Path, **sizes: tuple[int, int]) -> list[Path]:
    from PIL import Image

    rng = np.random.default_rng(5)
    for name, (height, width) in sizes.items():
        coarse = rng.integers(0, 255, (height // 8, width // 8, 3), np.uint8)
        Image.fromarray(coarse.repeat(8, 0).repeat(8, 1)).save(folder / f"{name}.png")
    return [folder / f"{name}.png" for name in sizes]


def shown(paths: list[Path]) -> list[Any]:
    return [told for path in paths for told in ("--image", path)]


def opened(paths: list[Path]) -> list[Any]:
    from PIL import Image

    return [Image.open(path) for path in paths]


def even(pipe: Any) -> Any:
    """Gives a pipeline of Wan evenly spaced steps to the end, as lf's are; its own end at a thousandth."""
    import diffusers

    class Even(diffusers.FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
        def set_timesteps(self, steps: int, device: Any = None) -> None:  # type: ignore[override]
            super().set_timesteps(sigmas=np.linspace(1.0, 1.0 / steps, steps), device=device)

    pipe.scheduler = Even.from_config(pipe.scheduler.config)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def processor(folder: Path) -> Any:
    """The pipeline's own processor, without the videos that it would need torchvision for."""
    import transformers

    made = object.__new__(transformers.Qwen2VLProcessor)
    made.image_processor = transformers.Qwen2VLImageProcessorPil.from_pretrained(folder / "processor")
    made.tokenizer, made.video_processor = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer"), None
    made.image_token, made.video_token = "<|image_pad|>", "<|video_pad|>"
    made.image_token_id, made.video_token_id = map(
        made.tokenizer.convert_tokens_to_ids, ("<|image_pad|>", "<|video_pad|>")
    )
    return made


def editing(folder: Path, kind: str) -> Any:
    """Opens an edit pipeline; its text encoder counts positions of pictures by rows and columns, as it was trained."""
    import diffusers

    pipe = getattr(diffusers, kind).from_pretrained(folder, processor=processor(folder))
    pipe.set_progress_bar_config(disable=True)

    def kinds(model: Any, args: Any, given: dict[str, Any]) -> Any:
        return args, {**given, "mm_token_type_ids": (given["input_ids"] == model.config.image_token_id).int()}

    pipe.text_encoder.register_forward_pre_hook(kinds, with_kwargs=True)
    return pipe


def noise_of(cfg: LatentModel, shape: tuple[int, ...], seed: int = 4) -> torch.Tensor:
    """Returns the noise [C, F, Y, X] that `generate.py` begins with."""
    row: dict[str, Any] = {"latents": torch.zeros(shape), "text": torch.zeros(1, cfg.space.text_dim), "id": "sample"}
    plain = attrs.evolve(cfg.space, condition=0, image_dim=0)
    batch = with_draws(plain, Flow(), latent_batch(plain, [row]), seed, 0)
    return unpatchify(batch["noise"], batch["packing"].grids[0][0], plain.patch, plain.channels_first)


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def painted(*args: Any) -> torch.Tensor:
    assert main(["media", *map(str, args), *STEPS]) == 0
    return load_file(args[args.index("--out") + 1])["latents"]


def test_wan_animates_a_picture_as_diffusers_does_and_so_does_what_it_writes(wan: Path, tmp_path: Path) -> None:
    import diffusers
    import transformers

    paths = pictures(tmp_path, first=(32, 48))
    out = tmp_path / "a.safetensors"
    asked = ("--prompt", "a &amp;  red disc", *shown(paths), "--size", "32x48", "--frames", 9)
    ours = painted(wan, *asked, "--guidance", 3, "--out", out, "--write-pipeline", tmp_path / "p")
    reader = transformers.CLIPImageProcessorPil.from_pretrained(wan / "image_processor")
    pipe = even(diffusers.WanImageToVideoPipeline.from_pretrained(tmp_path / "p", image_processor=reader))
    theirs = pipe(
        *(opened(paths)[0], "a &amp;  red disc"),
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=3,
        guidance_scale=3.0,
        latents=noise_of(I2V, (4, 3, 4, 6))[None],
        output_type="latent",
    ).frames[0]
    assert apart(ours, theirs) < 1e-4


def test_rows_of_wan_have_the_embeddings_and_the_condition_of_the_pipeline(wan: Path, tmp_path: Path) -> None:
    import transformers

    (path,) = pictures(tmp_path, first=(32, 48))
    (tmp_path / "first.txt").write_text("a red disc")
    how = {"pipeline": str(wan), "sizes": ("32x48",), "condition": True, "dtype": "float32", "text_dtype": "float32"}
    run(Latents(src=tmp_path, dst=tmp_path / "cache", json=True, **how))  # type: ignore[arg-type]
    ctx = DataCtx(seed=0, cache_dir=tmp_path)
    kept = open_data(lf.LatentData(path=str(tmp_path / "cache"), pipeline=str(wan)), ctx)
    live = open_data(lf.MediaData(path=str(tmp_path), encoding=Encoding(**how)), ctx)  # type: ignore[arg-type]
    row = kept.row(0, 0)
    assert all(torch.equal(row[name], live.row(0, 0)[name]) for name in ("latents", "text", "condition", "image"))
    model = transformers.CLIPVisionModel.from_pretrained(wan / "image_encoder")
    reader = transformers.CLIPImageProcessorPil.from_pretrained(wan / "image_processor")
    with torch.no_grad():
        seen = model(**reader(images=opened([path])[0], return_tensors="pt"), output_hidden_states=True)
    assert torch.allclose(row["image"], seen.hidden_states[-2][0], atol=1e-6)
    assert kept.describe()["image_dim"] == live.describe()["image_dim"] == 20
    spec.check_model(I2V, kept.describe())
    with pytest.raises(ValueError, match="image_dim 20, and the model 0"):
        spec.check_model(attrs.evolve(I2V, image_dim=0), kept.describe())
    assert spec.collate(I2V, [row], row)["image"].shape == (5, 20)


def test_two_experts_make_what_diffusers_makes_of_the_pipeline_that_is_written(wan: Path, tmp_path: Path) -> None:
    import shutil

    import diffusers

    both = tmp_path / "both"
    for name in ("vae", "text_encoder", "tokenizer", "scheduler"):
        shutil.copytree(wan / name, both / name)
    write_transformer(both / "transformer", 5, wan_tiny)
    write_transformer(both / "transformer_2", 6, wan_tiny)
    write_index(both, "WanPipeline", boundary_ratio=0.875)
    asked = ("--prompt", "a red disc", "--size", "32x48", "--frames", 5, "--guidance", 3)
    ours = painted(both, *asked, "--out", tmp_path / "a.safetensors", "--write-pipeline", tmp_path / "p")
    pipe = even(diffusers.WanPipeline.from_pretrained(tmp_path / "p"))
    theirs = pipe(
        "a red disc",
        height=32,
        width=48,
        num_frames=5,
        num_inference_steps=3,
        guidance_scale=3.0,
        latents=noise_of(wan_tiny, (4, 2, 4, 6))[None],
        output_type="latent",
    ).frames[0]
    assert apart(ours, theirs) < 1e-4


@pytest.mark.parametrize(("kind", "count"), [("QwenImageEditPipeline", 1), ("QwenImageEditPlusPipeline", 2)])
def test_edits_are_those_of_diffusers(qwen: Path, tmp_path: Path, small: None, kind: str, count: int) -> None:
    import shutil

    source = shutil.copytree(qwen, tmp_path / "source")
    write_index(source, kind, processor=["transformers", "Qwen2VLProcessor"])
    # What a caption's embeddings are depends on which of the two it is, and so does their hash.
    assert (texts_digest(source) == texts_digest(qwen)) == (count == 2)
    paths = pictures(tmp_path, tall=(96, 40), wide=(48, 80))[-count:]
    asked = ("--prompt", "a red disc's (left), right", *shown(paths), "--guidance", 3)
    ours = painted(source, *asked, "--out", tmp_path / "a.safetensors", "--write-pipeline", tmp_path / "p")
    pipe, shape = editing(tmp_path / "p", kind), tuple(ours.shape)
    assert shape[1:] == (1, *(side // 8 for side in resized_to(SMALL, (48, 80))))
    height, width = shape[2] * 8, shape[3] * 8
    theirs = pipe(
        image=opened(paths) if count > 1 else opened(paths)[0],
        prompt="a red disc's (left), right",
        negative_prompt=" ",
        true_cfg_scale=3.0,
        height=height,
        width=width,
        num_inference_steps=3,
        latents=patchify(noise_of(EDIT, shape), (1, 2, 2), channels_first=True)[None],
        output_type="latent",
    ).images[0]
    assert apart(patchify(ours, (1, 2, 2), channels_first=True), theirs) < 1e-4


def test_rows_of_edits_are_cached_resumed_and_equal_to_those_encoded_while_reading(
    one_process: None, qwen: Path, tmp_path: Path, small: None
) -> None:
    pictures(tmp_path, one=(64, 64), tall=(96, 40), wide=(48, 80))
    lines = [
        {"media": "one.png", "caption": "a red disc", "references": ["tall.png", "wide.png"]},
        {"media": "wide.png", "caption": "a blue square moves left", "references": ["tall.png"]},
    ]
    source = tmp_path / "list.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    how = {"pipeline": str(qwen), "sizes": ("32x48", "64x64"), "dtype": "float32", "text_dtype": "float32"}
    command = Latents(src=source, dst=tmp_path / "cache", json=True, enlarge=True, shard_mb=1e-3, **how)  # type: ignore[arg-type]
    run(command)
    (tmp_path / "cache/index.json").unlink()
    (tmp_path / "cache/rows-00001.safetensors").unlink()
    assert run(command).facts["before"] == 1
    ctx = DataCtx(seed=0, cache_dir=tmp_path)
    kept_data = lf.LatentData(path=str(tmp_path / "cache"), pipeline=str(qwen))
    kept = open_data(kept_data, ctx)
    live = open_data(lf.MediaData(path=str(source), encoding=Encoding(enlarge=True, **how)), ctx)  # type: ignore[arg-type]
    rows = [kept.row(0, i) for i in range(2)]
    for i, row in enumerate(rows):
        other = live.row(0, i)
        assert all(torch.equal(row[name], other[name]) for name in ("latents", "text", "empty"))
        assert all(torch.equal(a, b) for a, b in zip(row["references"], other["references"], strict=True))
    facts = kept.describe()
    assert all(facts[name] == value for name, value in live.describe().items() if name != "content")
    both = next(row for row in rows if row["id"] == "one.png")
    # The encoder's own sizes of the pictures in the prompt, four patches a token: 384 x 384 pixels of each shape.
    pipe = editing(qwen, "QwenImageEditPlusPipeline")
    images = [
        pipe.image_processor.resize(image, *resized_to(384 * 384, image.size[::-1]))
        for image in opened([tmp_path / "tall.png", tmp_path / "wide.png"])
    ]
    for name, prompt in (("text", "a red disc"), ("empty", " ")):
        wanted, mask = pipe.encode_prompt(prompt, images)
        assert mask is None
        assert torch.allclose(both[name], wanted[0], atol=1e-5)
    # Latents of references, in order, are those that the pipeline packs.
    size = resized_to(SMALL, (96, 40))
    seen = pipe.image_processor.preprocess(opened([tmp_path / "tall.png"])[0], *size).unsqueeze(2)
    with torch.no_grad():
        assert torch.allclose(both["references"][0], pipe._encode_vae_image(seen, None)[0], atol=1e-5)
    model = attrs.evolve(EDIT, text=facts["text_length"], flow=Flow(caption_dropout=0.5))
    with pytest.raises(ValueError, match="up to 2 references, and the model reads none"):
        spec.check_model(attrs.evolve(model, edit=False), facts)
    job = lf.Run(model=model, data=kept_data, parallel=lf.TorchParallel(micro_batch=2), batch=2, steps=2)
    train(open_job(job, tmp_path / "run", (), cpu, distributed(), lambda line: None))
    batch = spec.collate(model, rows, rows[0])
    assert len(batch["empty"]) == sum(batch["empties"]) == sum(len(row["empty"]) for row in rows)


def test_sizes_of_pictures_are_those_of_the_pipelines() -> None:
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    for area in (384 * 384, 1024 * 1024):
        for height, width in ((64, 64), (33, 401), (1080, 1920), (1999, 1000), (720, 721)):
            assert resized_to(area, (height, width)) == calculate_dimensions(area, width / height)[::-1]
    with pytest.raises(ValueError, match="too long"):
        resized_to(1024 * 1024, (1, 9000))


def test_captions_of_qwen_image_are_those_of_its_pipeline(qwen: Path, tmp_path: Path) -> None:
    import shutil

    import diffusers

    folder = tmp_path / "plain"
    for name in ("vae", "text_encoder", "tokenizer", "scheduler", "transformer"):
        shutil.copytree(qwen / name, folder / name)
    write_index(folder, "QwenImagePipeline")
    pipe, texts = diffusers.QwenImagePipeline.from_pretrained(folder), open_texts(folder)
    prompts = ["a red disc", " ", "the blue square's shape, moves left\nright"]
    wanted, mask = pipe.encode_prompt(prompts)
    assert mask.sum(1).tolist() == [8, 5, 15]
    for prompt, told, kept in zip(prompts, wanted, mask, strict=True):
        made = encode_caption(texts, "x", prompt, 1024)
        assert len(made) == int(kept.sum())
        assert torch.allclose(made, told[: len(made)], atol=1e-5)
    assert texts.dropped == pipe.prompt_template_encode_start_idx
    words = "red " * 1100
    cut, _ = pipe.encode_prompt(words)
    assert cut.shape[1] == 1024
    with pytest.raises(ValueError, match="1105 embeddings, and the model takes 1024; shorten"):
        encode_caption(texts, "x", words, 1024)


def test_captions_of_wan_are_cleaned_as_by_its_pipeline() -> None:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    for caption in ("a  red\n disc ", "caf\u00c3\u00a9 &amp;amp; \u201cdisc\u201d", "\ufb01sh\u00a0\x1cleft", ""):
        assert clean(caption) == prompt_clean(caption)
    assert clean("caf\u00c3\u00a9") == "caf\u00e9"


@pytest.mark.parametrize(
    ("pipeline", "kind", "told"),
    [
        ("QwenImageEditPipeline", "umt5", "edits with qwen2_5_vl; give a pipeline whose text_encoder is one"),
        ("WanPipeline", "t5", "captions with umt5 or qwen2_5_vl; give"),
    ],
)
def test_a_text_encoder_that_lf_does_not_know_is_refused_with_those_that_it_could_be(
    tmp_path: Path, pipeline: str, kind: str, told: str
) -> None:
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / "text_encoder/config.json").write_text(json.dumps({"model_type": kind}))
    write_index(tmp_path, pipeline)
    with pytest.raises(ValueError, match=f"text_encoder/config.json states model_type '{kind}', and lf encodes {told}"):
        open_texts(tmp_path)


def test_edits_without_their_pictures_are_refused(
    qwen: Path, tmp_path: Path, small: None, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = open_texts(qwen)
    with pytest.raises(ValueError, match=r"x: the caption .* holds <.image_pad.>, which stands for a picture"):
        check_caption(texts, "x", "a <|image_pad|>", 999, [(64, 64)])
    single = attrs.evolve(texts, edit=EDITS["QwenImageEditPipeline"])
    with pytest.raises(ValueError, match="x has 2 references, and the pipeline takes one"):
        check_caption(single, "x", "a", 999, [(64, 64)] * 2)
    with pytest.raises(ValueError, match="x: a picture of 1x9000 is too long for its width; cut it"):
        check_caption(texts, "x", "a", 999, [(1, 9000)])
    with pytest.raises(ValueError, match="embeddings, pictures included, and the model takes 99"):
        check_caption(texts, "x", "a", 99, [(64, 64)])
    assert main(["media", str(qwen), "--prompt", "a red disc", "--size", "64x64", *STEPS]) == 1
    assert "0 references, and the pipeline takes one or more; list them" in capsys.readouterr().err
