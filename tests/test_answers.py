"""Questions about images and videos: greedy answers are those of transformers, from its folders and from runs of lf."""

import json
import os
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

import lf
from lf.data.chat_text import CHATML, Tokens
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
from lf.train.chats import ask
from lf.train.start import Start, load_model, local_context, open_saved
from scripts.generate import main
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
        CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>").replace("<|video_pad|>", "<video>"),
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
    stated = {"eos_token": "<|im_end|>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    folder.joinpath("tokenizer_config.json").write_text(json.dumps(stated))


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


def asked(folder: Path, prompt: str, images: Sequence[Path] = (), videos: Sequence[Path] = ()) -> tuple[Start, Question]:
    start = open_saved(folder)
    return start, ask(folder, start, read_tokenizer(folder), prompt, images, videos)


def answered(start: Start, question: Question, count: int = 16) -> list[int]:
    model = load_model(start, local_context(start.model, cpu))
    pictures = {"media": question.media, "patches": question.patches}
    how = Sampling(tokens=count)
    return list(generate(start.model, model, question.tokens, how, eos=None, device="cpu", pictures=pictures))


def reference(folder: Path, question: Question, inputs: dict[str, torch.Tensor], count: int = 16) -> list[int]:
    """What transformers' own generate gives."""
    from transformers import AutoModelForImageTextToText

    peer = AutoModelForImageTextToText.from_pretrained(folder).eval()
    peer.generation_config.eos_token_id = None
    ids = torch.tensor([question.tokens])
    if "image_grid_thw" in inputs or "video_grid_thw" in inputs:
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


@pytest.mark.parametrize(
    "family", ["qwen3_vl", "llava_onevision", *(pytest.param(n, marks=pytest.mark.full) for n in ("qwen2_5_vl", "internvl", "qwen3_vl_moe"))]
)
def test_answers_about_images_are_those_of_transformers(one_process: None, tmp_path: Path, family: str) -> None:
    from transformers import AutoImageProcessor

    folder = folder_of(family, tmp_path)
    images = [save(tmp_path / "a.png", 20, 30), save(tmp_path / "b.png", 33, 17, seed=1)]
    start, question = asked(folder, "What?", images)
    opened = [Image.open(path) for path in images]
    made = AutoImageProcessor.from_pretrained(folder)(
        images=[opened] if family == "llava_onevision" else opened, return_tensors="pt"
    )
    inputs = {name: value for name, value in made.items() if name != "num_patches"}
    ours = answered(start, question)
    assert ours == reference(folder, question, inputs)
    # They do look at the images.
    other = attrs.evolve(question, patches=question.patches[::-1].copy())
    print(ours, answered(start, other))
    assert answered(start, other) != ours
