"""Embeddings of first frames, which Wan2.1 I2V reads: `image_encoder/` and `image_processor/` of a diffusers pipeline.

Shapes: H height, W width of a picture; I embeddings, D their width.
"""

from collections.abc import Callable
from pathlib import Path

import attrs
import torch
from torch import Tensor

from lf.data.encode import digest_of, stated
from lf.data.encode_text import Pixels, load_quietly, processor_class


@attrs.frozen(kw_only=True, eq=False)
class Images:
    """An encoder of pictures."""

    run: Callable[[Pixels], Tensor]
    """Returns the embeddings [I, D] of a picture [H, W, 3]: what goes into the last layer, as Wan's pipeline does."""
    width: int
    """D."""
    digest: str
    """As `images_digest`."""


def images_digest(pipeline: Path) -> str:
    """Returns the sha256 of what embeddings of first frames depend on, empty where a pipeline makes none (Wan2.2)."""
    if not (pipeline / "image_encoder").is_dir():
        return ""
    return digest_of(pipeline / "image_encoder", pipeline / "image_processor")


def open_images(pipeline: Path, device: str = "cpu") -> Images | None:
    """Returns the image encoder of a pipeline, frozen, in float32; None where it has none.

    Raises ValueError for one that is no CLIP vision model, or broken.
    """
    folder = pipeline / "image_encoder"
    if not folder.is_dir():
        return None
    kind = stated(folder).get("model_type")
    if kind != "clip_vision_model":
        raise ValueError(
            f"{folder / 'config.json'} states model_type {kind!r}, and lf encodes first frames with clip_vision_model; "
            "give a pipeline whose image_encoder is one"
        )
    try:
        from transformers import CLIPVisionModel
    except ImportError as error:
        raise ValueError(
            f"first frames are encoded by transformers, which is missing ({error}); install lf[diffusion]"
        ) from error
    try:
        model = load_quietly(CLIPVisionModel, folder, torch.float32)
        processor = processor_class("CLIPImageProcessor").from_pretrained(
            pipeline / "image_processor", local_files_only=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{pipeline} has no whole image_encoder and image_processor ({error}); fetch them again"
        ) from error
    model.requires_grad_(False).eval().to(device)

    @torch.no_grad()
    def run(picture_HW3: Pixels) -> Tensor:
        from PIL import Image

        seen = processor(images=Image.fromarray(picture_HW3), return_tensors="pt").to(device)
        return model(**seen, output_hidden_states=True).hidden_states[-2][0].cpu()

    return Images(run=run, width=int(model.config.hidden_size), digest=images_digest(pipeline))
