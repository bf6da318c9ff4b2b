"""Questions about images and videos: greedy answers are those of transformers, from its folders and from runs of lf."""

import contextlib
import json
import re
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from PIL import Image

from lf.data.chat_text import CHATML, Item, Message, Tokens, open_template, question_pieces
from lf.data.config import AnyresPictures, KimiPictures, Pictures, Qwen3Pictures, Qwen25Pictures, TilePictures
from lf.data.hf_tokenizer import Tokenizer, read_tokenizer
from lf.data.processor_files import processor_files, read_pictures
from lf.data.question import Question
from lf.data.video import write_video
from lf.devices.cpu import cpu
from lf.models import generate as module
from lf.models import hf
from lf.models.generate import Sampling, generate
from lf.models.media import media_rules
from lf.train.chats import _says, ask
from lf.train.start import Start, load_model, local_context, open_saved
from scripts.generate import main
from tests.golden.record_processors import FILE, NAMES, PROMPT, SIZE, of_lf, of_transformers, smooth
from tests.test_multimodal import picture, save

GOLDEN = Path(__file__).parent / "golden/hf"
SPECIAL = {"<|endoftext|>": 0, "<|im_start|>": 110, "<|im_end|>": 111, "<|vision_start|>": 120, "<|vision_end|>": 121}
LETTERS = [*map(chr, range(33, 127)), "Ġ", "Ċ"]

HALF = {"patch": 4, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
POINTS = ((16, 16), (16, 32), (32, 16), (32, 32))
QWEN = {**HALF, "min_pixels": 64, "max_pixels": 1024, "video_min_pixels": 64, "video_max_pixels": 4096}
CASES: dict[str, tuple[Pictures, dict[str, int], str]] = {
    "qwen3_vl": (Qwen3Pictures(**QWEN), {"<|image_pad|>": 122, "<|video_pad|>": 123}, CHATML),
    "qwen3_vl_moe": (Qwen3Pictures(**QWEN), {"<|image_pad|>": 122, "<|video_pad|>": 123}, CHATML),
    "qwen2_5_vl": (Qwen25Pictures(**QWEN), {"<|image_pad|>": 122, "<|video_pad|>": 123}, CHATML),
    "internvl": (
        TilePictures(**HALF, tile=16, max_tiles=4, frames=3),
        {"<IMG_CONTEXT>": 122, "<video>": 114, "<img>": 112, "</img>": 113},
        CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>").replace(
            "<|video_pad|>", "<video>"
        ),
    ),
    "llava_onevision": (
        AnyresPictures(**HALF, tile=16, pinpoints=POINTS, frames=3),
        {"<image>": 122, "<video>": 123},
        CHATML.replace("<|image_pad|>", "<image>").replace("<|video_pad|>", "<video>"),
    ),
    "kimi_k25": (
        KimiPictures(**HALF, max_patches=64, video_max_patches=36, side=8),
        {"<|media_pad|>": 122, "<|video_placeholder|>": 123, "<|media_begin|>": 112, "<|media_content|>": 113}
        | {"<|media_end|>": 114},
        CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|media_pad|>").replace(
            "<|vision_start|><|video_pad|><|vision_end|>", "<|kimi_k25_video_placeholder|>"
        ),
    ),
}


def write_tokenizer(folder: Path, more: dict[str, int], template: str) -> None:
    """A byte-level tokenizer of ASCII without merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = SPECIAL | more
    vocab = {letter: 1 + i for i, letter in enumerate(LETTERS)} | special
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(name, special=True) for name in special])
    folder.joinpath("tokenizer.json").write_text(inner.to_str())
    stated = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    folder.joinpath("tokenizer_config.json").write_text(json.dumps(stated))
    folder.joinpath("chat_template.jinja").write_text(template)


def folder_of(family: str, tmp_path: Path) -> Path:
    """A folder of transformers with tokenizer and processors."""
    pictures, more, template = CASES[family]
    folder = shutil.copytree(GOLDEN / family, tmp_path / family)
    write_tokenizer(folder, more, template)
    tokenizer, model = read_tokenizer(folder), hf.read_config(folder)
    names = {at: name for name, at in tokenizer.special.items()}
    rules = media_rules(model)
    assert rules is not None
    announce = pictures.video or names[rules.ids[1]]
    tokens = Tokens(image=names[rules.ids[0]], video=names[rules.ids[1]], announce=announce)
    config = json.loads((folder / "config.json").read_text())
    for name, content in processor_files(pictures, config, rules, tokens, tokenizer).items():
        (folder / name).write_bytes(content)
    return folder


def asked(
    folder: Path, prompt: str, images: Sequence[Path] = (), videos: Sequence[Path] = ()
) -> tuple[Start, Question]:
    start = open_saved(folder)
    return start, ask(folder, start, read_tokenizer(folder), prompt, images, videos)


def answered(start: Start, question: Question, count: int = 16) -> list[int]:
    model = load_model(start, local_context(start.model, cpu))
    how = Sampling(tokens=count)
    return list(generate(start.model, model, question.tokens, how, eos=None, device="cpu", pictures=question.pictures))


def reference(folder: Path, question: Question, inputs: dict[str, torch.Tensor], count: int = 16) -> list[int]:
    """What transformers' own generate gives."""
    from transformers import AutoModelForImageTextToText

    peer = AutoModelForImageTextToText.from_pretrained(folder).eval()
    peer.generation_config.eos_token_id = None
    ids = torch.tensor([question.tokens])
    if folder.name.startswith("qwen"):
        inputs["mm_token_type_ids"] = (ids == 122).int() + 2 * (ids == 123).int()
    made = peer.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        pad_token_id=0,
        max_new_tokens=count,
        **inputs,
    )
    return made[0, ids.shape[1] :].tolist()


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", *(pytest.param(name, marks=FULL) for name in CASES if name != "qwen3_vl")],
)
def test_answers_about_images_are_those_of_transformers(one_process: None, tmp_path: Path, family: str) -> None:
    from transformers import AutoImageProcessor

    folder = folder_of(family, tmp_path)
    images = [save(tmp_path / "a.png", 20, 30), save(tmp_path / "b.png", 33, 17, seed=1)]
    # Tiles of an image are those of an only one.
    images = images[: 1 if family == "llava_onevision" else 2]
    start, question = asked(folder, "What?", images)
    opened = [Image.open(path) for path in images]
    if family == "kimi_k25":  # Its processor needs torchvision.
        patches = torch.from_numpy(question.pictures["patches"]).view(-1, 3, 4, 4)
        inputs = {
            "pixel_values": patches,
            "image_grid_thw": torch.tensor([item.grids[0] for item in question.pictures["media"]]),
        }
    else:
        made = AutoImageProcessor.from_pretrained(folder, backend="pil")(images=opened, return_tensors="pt")
        inputs = {name: value for name, value in made.items() if name != "num_patches"}
    ours = answered(start, question)
    assert ours == reference(folder, question, inputs)
    # They do look at the images.
    turned = question.pictures["patches"][::-1].copy()
    assert answered(start, attrs.evolve(question, pictures={**question.pictures, "patches": turned})) != ours


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=FULL)])
def test_answers_about_videos_are_those_of_transformers_and_the_cache_changes_nothing(
    one_process: None, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av")
    folder = folder_of(family, tmp_path)
    image = save(tmp_path / "a.png", 20, 30)
    write_video(tmp_path / "v.mp4", [picture(32, 32, i) for i in range(9)], Fraction(4))
    start, question = asked(folder, "First <video> then <image>?", [image], [tmp_path / "v.mp4"])
    clip, still = question.pictures["media"]
    assert (clip.kind, still.kind) == ("video", "image")
    inputs = {
        "pixel_values": torch.from_numpy(question.pictures["patches"][clip.patches :]),
        "image_grid_thw": torch.tensor(still.grids),
        "pixel_values_videos": torch.from_numpy(question.pictures["patches"][: clip.patches]),
        "video_grid_thw": torch.tensor(clip.grids),
    }
    if family == "qwen2_5_vl":
        inputs["second_per_grid_ts"] = torch.tensor([clip.seconds])
    ours = answered(start, question)
    assert ours == reference(folder, question, inputs)
    monkeypatch.setattr(module, "_cache", lambda cfg, model: contextlib.nullcontext(False))
    assert answered(start, question) == ours


@pytest.mark.parametrize("family", CASES)
def test_processor_files_say_what_pictures_they_were_made_of(tmp_path: Path, family: str) -> None:
    pictures, _, _ = CASES[family]
    folder = folder_of(family, tmp_path)
    found = {file.name: file.read_bytes() for file in folder.glob("*.json")}
    assert attrs.evolve(read_pictures(found, "here"), video=pictures.video) == pictures
    # As transformers 5 saves them: in one file.
    image, video = (json.loads(found.pop(f"{name}preprocessor_config.json")) for name in ("", "video_"))
    whole = json.loads(found["processor_config.json"]) | {"image_processor": image, "video_processor": video}
    found["processor_config.json"] = json.dumps(whole).encode()
    assert attrs.evolve(read_pictures(found, "here"), video=pictures.video) == pictures
    # An export keeps them where the run has the same pictures, and not where it has others.
    source = open_saved(folder).source
    assert _says(source, pictures)
    assert not _says(source, attrs.evolve(pictures, mean=(0.1, 0.2, 0.3)))


@pytest.mark.parametrize("family", CASES)
def test_whole_processors_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """As `processors.npz` has recorded them: resized pixels within a level or two of 255, all else equal."""
    pictures, folder = CASES[family][0], folder_of(family, tmp_path)
    Image.fromarray(smooth(*SIZE, 99)).save(tmp_path / "a.png")
    _, question = asked(folder, PROMPT, [tmp_path / "a.png"])
    with np.load(FILE) as recorded:
        ids, image, frames, video = (recorded[f"{family}.{name}"] for name in NAMES)
    ours, chosen, clip = of_lf(pictures, folder)
    assert question.tokens == ids.tolist()
    assert ours.shape == image.shape
    assert np.abs(ours - image).max() * 127.5 < 1.1
    assert clip.shape == video.shape
    assert np.abs(clip - video).max() * 127.5 < 2.1
    # Kimi's published processor takes a video's first and last frames, transformers' does not.
    assert family == "kimi_k25" or chosen.tolist() == frames.tolist()


@pytest.mark.parametrize("family", CASES)
def test_what_is_recorded_of_processors_is_what_transformers_makes(tmp_path: Path, family: str) -> None:
    pytest.importorskip("torchvision", reason="the whole processors of transformers need it")
    pictures, folder = CASES[family][0], folder_of(family, tmp_path)
    found = of_transformers(pictures, folder, of_lf(pictures, folder)[1])
    with np.load(FILE) as recorded:
        for name, value in zip(NAMES, found, strict=True):
            np.testing.assert_allclose(value, recorded[f"{family}.{name}"], atol=1e-5)


def published(**fields: Any) -> dict[str, bytes]:
    return {"preprocessor_config.json": json.dumps(fields).encode()}


def test_published_processor_files_are_read() -> None:
    clip = attrs.asdict(Qwen25Pictures())
    older = {"image_processor_type": "Qwen2VLImageProcessor", "image_mean": clip["mean"], "image_std": clip["std"]}
    older |= {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    # Without a file of their own, videos are limited as images are.
    made = attrs.evolve(Qwen25Pictures(), video_min_pixels=3136, video_max_pixels=12845056)
    assert read_pictures(published(**older, processor_class="Qwen2_5_VLProcessor"), "here") == made
    kimi = {"in_patch_limit": 16384, "patch_size": 14, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    kimi |= {"merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 512, "sample_fps": 2.0}
    kimi |= {"in_patch_limit_each_frame": 4096, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff"}
    assert read_pictures(published(media_proc_cfg=kimi), "here") == KimiPictures()
    for files, told in (
        ({}, "here has no preprocessor_config.json"),
        ({"preprocessor_config.json": b"{"}, "here: preprocessor_config.json is not JSON"),
        (published(image_processor_type="ViTImageProcessor"), "'ViTImageProcessor' is no processor that lf has"),
        (published(**older | {"resample": 2}), "resample = 2 in preprocessor_config.json, and lf has 3 alone"),
        (published(**older | {"image_mean": None}), "no image_mean is stated"),
        (published(**older | {"max_pixels": None}), "states no shortest_edge and longest_edge"),
        (published(media_proc_cfg=kimi | {"in_patch_limit_video": 9}), r"in_patch_limit_video = 9, which lf does not"),
    ):
        with pytest.raises(ValueError, match=told):
            read_pictures(files, "here")


def test_the_script_answers_and_says_what_is_wrong(
    one_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lf.train.comm.process_group", contextlib.nullcontext)
    folder, image = folder_of("qwen3_vl", tmp_path), save(tmp_path / "a.png", 20, 30)
    start, question = asked(folder, "What?", [image])
    expected = read_tokenizer(folder).decode(answered(start, question, 5))
    capsys.readouterr()
    flags = ["--prompt", "What?", "--device", "cpu"]
    assert main([str(folder), "--image", str(image), "--tokens", "5", *flags]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    (tmp_path / "broken.png").write_bytes(image.read_bytes()[:40])
    many = [flag for _ in range(80) for flag in ("--image", str(image))]
    text = shutil.copytree(GOLDEN / "qwen3", tmp_path / "text")
    write_tokenizer(text, {}, CHATML)
    bare = shutil.copytree(folder, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    for told, where, given in (
        (r"none\.png \(named by the prompt\): the image is missing", folder, ["--image", str(tmp_path / "none.png")]),
        (
            r"broken\.png \(named by .*cannot be decoded",
            folder,
            ["--image", str(tmp_path / "broken.png")],
        ),
        (r"of them of images and videos, .* model\.text\.max_length = 512; give fewer or smaller", folder, many),
        ("takes no images or videos; ask it about text alone", text, ["--image", str(image)]),
        ("bare has no chat template; put the model's there", bare, ["--image", str(image)]),
    ):
        assert main([str(where), *given, *flags]) == 1
        assert re.search(told, capsys.readouterr().err)
    assert main([str(folder), "--image", str(image), "--prompt", "<image> or <image>?", "--device", "cpu"]) == 1
    assert "more images are placed in the messages than the 1 listed" in capsys.readouterr().err


def test_a_template_that_begins_no_answer_is_refused() -> None:
    special = {"<|im_start|>": 1, "<|im_end|>": 2}
    own = Tokenizer(encode_batch=list, decode=str, vocab=3, eos=2, fingerprint="", files={}, special=special)  # type: ignore[arg-type]
    template, _ = open_template("chatml", own, "data")
    said = [Message(role="user", items=(Item(kind="text", text="Hi"),))]
    pieces, end = question_pieces(template, special, said)
    assert (end, "".join(piece.text for piece in pieces)) == (
        "<|im_end|>",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    )
    with pytest.raises(ValueError, match=r"begins no answer: .* add_generation_prompt"):
        question_pieces(lambda messages, begin: template(messages, False), special, said)
