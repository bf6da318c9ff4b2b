"""A pipeline folder with small random encoders, and media, made on the spot."""

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from lf.data.video import write_video

WORDS = ["red", "blue", "disc", "square", "moves", "left", "right", "a"]


def make_vae(folder: Path, seed: int = 0, kind: str = "AutoencoderKLWan", std: float = 2.0) -> None:
    import diffusers

    torch.manual_seed(seed)
    sizes = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    scale = {"latents_mean": [0.1, -0.1, 0.2, 0.0], "latents_std": [std, 1.0, 0.5, 1.5]}
    made = getattr(diffusers, kind)(**sizes, temperal_downsample=[False, True, True], **scale)
    made.save_pretrained(folder)


def make_texts(pipeline: Path, width: int = 16) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(1)
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(pipeline / "tokenizer")
    config = transformers.UMT5Config(
        vocab_size=len(vocab), d_model=width, d_kv=4, d_ff=16, num_layers=1, num_heads=2, feed_forward_proj="gated-gelu"
    )
    transformers.UMT5EncoderModel(config).save_pretrained(pipeline / "text_encoder")


def make_pipeline(folder: Path) -> Path:
    make_vae(folder / "vae")
    make_texts(folder)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    return folder


def make_media(folder: Path, frames: int = 9) -> Path:
    """Two videos and a picture, with captions beside."""
    from PIL import Image

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, height, width in (("a", 32, 48), ("b", 48, 32)):
        clip = rng.integers(0, 255, (frames, height // 8, width // 8, 3), np.uint8).repeat(8, 1).repeat(8, 2)
        write_video(folder / f"{name}.mp4", clip, Fraction(8))
        (folder / f"{name}.txt").write_text(f"a red disc moves {'left' if name == 'a' else 'right right'}\n")
    Image.fromarray(rng.integers(0, 255, (40, 50, 3), np.uint8)).save(folder / "c.png")
    (folder / "c.txt").write_text("a blue square")
    return folder
