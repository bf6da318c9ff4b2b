"""Small vision-language models, and rows with images and videos, that several test files share."""

from typing import Any

import attrs
import numpy as np

from lf.models import spec
from lf.models.decoder import DecoderConfig
from lf.models.layers.rope import Rope
from lf.models.media import Media, media_tokens
from lf.models.vision.intern_vit import InternVision
from lf.models.vision.moon_vit import MoonVision
from lf.models.vision.qwen_vit import Qwen3Vision, Qwen25Vision
from lf.models.vision.siglip import Siglip
from lf.models.vision.tower import VisionConfig, tower_of
from lf.models.vlm import Vlm
from lf.models.vlms.qwen_vl import PROJECTOR2_5
from tests.cases import DENSE
from tests.moe_cases import SOFTMAX

THREE = Rope(theta=1e4, sections=(4, 2, 2), interleaved=True)
TEXT: DecoderConfig = attrs.evolve(DENSE, layers=5, rope=THREE)
QWEN3 = Qwen3Vision(width=24, depth=3, mlp=32, heads=2, patch=4, side=6, levels=(0, 1))
QWEN2_5 = Qwen25Vision(width=32, depth=2, mlp=40, heads=2, patch=4, window=16, full=(1,))
IMAGE, VIDEO = 128, 129

TOWERS: dict[str, VisionConfig] = {
    "qwen2.5": Qwen25Vision(width=32, depth=3, mlp=40, heads=2, patch=4, window=16, full=(1,)),
    "qwen3": Qwen3Vision(width=24, depth=3, mlp=32, heads=2, patch=4, side=6, levels=(0, 1)),
    "intern": InternVision(width=32, depth=2, mlp=48, heads=4, image=16, patch=4),
    "intern rms": InternVision(
        width=32, depth=2, mlp=48, heads=4, image=16, patch=4, norm="rms", qkv_bias=False, qk_norm=True
    ),
    "moon": MoonVision(width=32, depth=2, mlp=48, heads=2, patch=4, side=6),
    "siglip": Siglip(width=32, depth=2, mlp=48, heads=4, image=16, patch=4),
}

MODELS: dict[str, Vlm] = {
    "levels": Vlm(vision=QWEN3, text=TEXT, image_token=IMAGE, video_token=VIDEO),
    "windows": Vlm(
        vision=QWEN2_5,
        projector=PROJECTOR2_5,
        text=attrs.evolve(TEXT, rope=attrs.evolve(THREE, interleaved=False), tied=True),
        image_token=IMAGE,
        video_token=VIDEO,
    ),
    "experts": Vlm(vision=QWEN3, text=attrs.evolve(TEXT, experts=SOFTMAX), image_token=IMAGE, video_token=VIDEO),
    **{name: Vlm(vision=TOWERS[name], text=TEXT, image_token=IMAGE, video_token=VIDEO) for name in TOWERS},
}


def rows_of(cfg: Vlm, count: int, length: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows of several documents with up to two images or videos each; every third row has text alone."""
    rng = np.random.default_rng(seed)
    tower = tower_of(cfg.vision)
    made = []
    for i in range(count):
        tokens, labels = rng.integers(0, min(IMAGE, VIDEO), (2, length))
        media = [] if i % 3 == 2 else [_media(cfg, tower.side, rng, video=k == 1) for k in range(1 + i % 2)]
        at = 2
        for item in media:
            left = media_tokens(cfg, item)
            for t, h, w in item.grids:
                for _ in range(t):
                    n = min(left, h * w // cfg.projector.merge**2)
                    tokens[at : at + n] = IMAGE if item.kind == "image" else VIDEO
                    # Frames that are apart have text between them.
                    at += n + (1 if tower.frames == "apart" else 0)
                    left -= n
            tokens[at : at + left] = IMAGE
            at += left + 2
        assert at < length
        labels = np.where((tokens == IMAGE) | (tokens == VIDEO), spec.IGNORE, labels)
        lengths = (at, length - at) if i % 2 else (length,)
        labels[np.cumsum(lengths) - 1] = spec.IGNORE
        made.append(
            {
                "tokens": tokens,
                "labels": labels,
                "lengths": lengths,
                "real": length,
                "id": f"row{i}",
                "media": tuple(media),
                "patches": rng.standard_normal((sum(item.patches for item in media), tower.numbers)).astype(np.float32),
            }
        )
    return made


def even_rows(cfg: Vlm, count: int, length: int, media: tuple[Media, ...]) -> list[dict[str, Any]]:
    """Returns rows of one document that all have the same images, spread evenly over the row."""
    rng = np.random.default_rng(0)
    numbers, made = tower_of(cfg.vision).numbers, []
    for i in range(count):
        tokens = rng.integers(0, min(cfg.image_token, cfg.video_token), length)
        for k, item in enumerate(media):
            at = k * length // len(media) + 1
            tokens[at : at + media_tokens(cfg, item)] = cfg.image_token
        row = {"tokens": tokens, "labels": tokens, "lengths": (length,), "real": length, "id": f"row{i}"}
        patches = rng.standard_normal((sum(item.patches for item in media), numbers)).astype(np.float32)
        made.append({**row, "media": media, "patches": patches})
    return made


def _media(cfg: Vlm, side: int, rng: np.random.Generator, *, video: bool) -> Media:
    if side:
        return Media(grids=((1, side, side),))
    h, w = (2 * int(n) for n in rng.integers(1, 4, 2))
    return Media(grids=((2, h, 2),), kind="video", seconds=1.5) if video else Media(grids=((1, h, w),))
