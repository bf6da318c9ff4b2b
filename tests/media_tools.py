"""A pipeline folder with small random encoders, and media, made on the spot."""

import json
import re
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


QWEN_SPECIALS = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_WIDTH = 16


def make_qwen_texts(pipeline: Path) -> None:
    """A small Qwen2.5-VL whose tokenizer parts templates as the published one does: 34 and 64 tokens in front."""
    import transformers
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    from lf.data.encode_text import EDIT_PROMPT, QWEN_PROMPT

    parts = r"\n|'s|\),|\w+|[^\s\w]"
    words = sorted({*re.findall(parts, QWEN_PROMPT + EDIT_PROMPT), *WORDS, "Picture", "1", "2", ":"})
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(parts), "removed", invert=True)
    raw.add_special_tokens(list(QWEN_SPECIALS))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<unk>", eos_token="<|im_end|>")
    tokenizer.save_pretrained(pipeline / "tokenizer")
    number = tokenizer.convert_tokens_to_ids
    torch.manual_seed(2)
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": QWEN_WIDTH,
            "intermediate_size": 32,
            "bos_token_id": 0,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "eos_token_id": 0,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": QWEN_WIDTH,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
    )
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(pipeline / "text_encoder")
    (pipeline / "processor").mkdir()
    (pipeline / "processor/preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136, "max_pixels": 12845056})
    )


def make_clip(pipeline: Path) -> None:
    import transformers

    torch.manual_seed(3)
    sizes = {"hidden_size": 20, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.CLIPVisionConfig(**sizes, image_size=28, patch_size=14)
    transformers.CLIPVisionModel(config).save_pretrained(pipeline / "image_encoder")
    (pipeline / "image_processor").mkdir()
    (pipeline / "image_processor/preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "CLIPImageProcessor",
                "size": {"shortest_edge": 28},
                "crop_size": {"height": 28, "width": 28},
            }
        )
    )
