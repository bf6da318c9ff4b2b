"""Embeddings of captions, and of the pictures that an edit starts from, by transformers' encoders (extra `diffusion`).

An encoder is `text_encoder/`, `tokenizer/` and, where pictures stand beside captions, `processor/` of a diffusers
pipeline, and `model_index.json` says which pipeline that is. Weights are safetensors alone.

Shapes: H height, W width of a picture; L length, D width of a text.
"""

import html
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lf.data.cache import key_of
from lf.data.encode import digest_of, json_file, stated

Size = tuple[int, int]
"""Height and width of a picture."""
Pixels = NDArray[np.uint8]

QWEN_PROMPT = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""What Qwen-Image is told around a caption (arXiv:2508.02324); the embeddings of what stands before it are dropped."""
EDIT_PROMPT = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""The same of Qwen-Image-Edit."""

_PAD = "<|image_pad|>"
_SEEN = f"<|vision_start|>{_PAD}<|vision_end|>"
_UNIT = 32


@attrs.frozen(kw_only=True)
class Edit:
    """How a pipeline takes the pictures that an edit starts from."""

    single: bool
    """Whether it takes one picture, or any number."""
    picture: str
    """What stands before the caption for each, with its number."""
    area: int
    """Pixels, about, of a picture beside the caption."""


EDITS: Mapping[str, Edit] = {
    "QwenImageEditPipeline": Edit(single=True, picture=_SEEN, area=1024 * 1024),
    "QwenImageEditPlusPipeline": Edit(single=False, picture="Picture {}: " + _SEEN, area=384 * 384),
}
"""diffusers' pipelines that edit: those of Qwen-Image-Edit, and of 2509 and 2511."""


@attrs.frozen(kw_only=True, eq=False)
class Texts:
    """An encoder of captions."""

    ids: Callable[[str, Sequence[Size]], list[int]]
    """Returns the tokens of a caption, with what is said around it and its pictures, which `edit` has resized."""
    run: Callable[[list[int], Sequence[Pixels]], Tensor]
    """Returns the embeddings [L, D] of tokens and of the pictures [H, W, 3] among them."""
    edit: Edit | None
    """How pictures are taken; None takes none."""
    dropped: int
    """How many embeddings in front are left out."""
    empty: str
    """The empty caption, as the family's pipeline has it."""
    width: int
    """D."""
    most: int
    """Most embeddings of a caption that the family's models take."""
    digest: str
    """As `texts_digest`."""


def resized_to(area: int, size: Size) -> Size:
    """Returns the multiples of 32 nearest to a size of about `area` pixels and the shape of `size`.

    Raises ValueError where nothing of the shorter side would be left.
    """
    ratio = size[1] / size[0]
    width = math.sqrt(area * ratio)
    made = round(width / ratio / _UNIT) * _UNIT, round(width / _UNIT) * _UNIT
    if not all(made):
        raise ValueError(f"a picture of {size[0]}x{size[1]} is too long for its width; cut it, or leave it out")
    return made


def pipeline_class(pipeline: Path) -> str:
    """Returns the class that a pipeline's `model_index.json` states, empty where there is none."""
    file = pipeline / "model_index.json"
    if not file.is_file():
        return ""
    return str(json_file(file, "fetch the pipeline again").get("_class_name") or "")


def texts_digest(pipeline: Path) -> str:
    """Returns the sha256 of everything that embeddings of captions depend on."""
    kind = pipeline_class(pipeline)
    seen = [pipeline / "processor"] if kind in EDITS else []
    return key_of(digest_of(pipeline / "text_encoder", pipeline / "tokenizer", *seen), kind if kind in EDITS else "")


def processor_class(name: str) -> Any:
    """Returns transformers' image processor that computes with Pillow, so that no number depends on what is installed.

    Raises ValueError where transformers has none.
    """
    import transformers

    try:
        return getattr(transformers, f"{name}Pil")
    except AttributeError as error:
        raise ValueError(
            f"transformers {transformers.__version__} has no {name}Pil, which reads pictures; install a newer one"
        ) from error


def load_quietly(kind: Any, folder: Path, dtype: torch.dtype) -> Any:
    """Returns transformers' model of a folder; raises as it does, and draws no bars."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return kind.from_pretrained(folder, dtype=dtype, use_safetensors=True, local_files_only=True)
    finally:
        if drawn:
            logging.enable_progress_bar()


def clean(caption: str) -> str:
    """Returns a caption as Wan's pipelines clean it: broken characters mended, entities resolved, white space single.

    Raises ValueError where ftfy is missing, without which they leave the first out.
    """
    try:
        import ftfy
    except ImportError as error:
        raise ValueError(
            f"Wan's captions are cleaned by ftfy, which is missing ({error}); install lf[diffusion]"
        ) from error
    return " ".join(html.unescape(html.unescape(ftfy.fix_text(caption))).split())


def open_texts(pipeline: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Texts:
    """Returns the text encoder of a pipeline, frozen; raises ValueError for one that lf does not know or is broken."""
    folder = pipeline / "text_encoder"
    kind, edit = stated(folder).get("model_type"), EDITS.get(pipeline_class(pipeline))
    known = {"umt5": "UMT5EncoderModel", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"}
    fitting = ["qwen2_5_vl"] if edit else list(known)
    if kind not in fitting:
        raise ValueError(
            f"{folder / 'config.json'} states model_type {kind!r}, and lf encodes {'edits' if edit else 'captions'} "
            f"with {' or '.join(fitting)}; give a pipeline whose text_encoder is one"
        )
    try:
        import transformers
    except ImportError as error:
        raise ValueError(
            f"texts are encoded by transformers, which is missing ({error}); install lf[diffusion]"
        ) from error
    seen = processor_class("Qwen2VLImageProcessor") if edit else None
    try:
        model = load_quietly(getattr(transformers, known[kind]), folder, dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(pipeline / "tokenizer", local_files_only=True)
        processor = seen.from_pretrained(pipeline / "processor", local_files_only=True) if seen else None
    except (OSError, RuntimeError, ValueError) as error:
        needed = f"text_encoder{', processor' if edit else ''} and tokenizer"
        raise ValueError(f"{pipeline} has no whole {needed} ({error}); fetch them again") from error
    model.requires_grad_(False).eval().to(device)
    digest = texts_digest(pipeline)
    return _umt5(model, tokenizer, digest) if kind == "umt5" else _qwen(model, tokenizer, processor, edit, digest)


def _umt5(model: Any, tokenizer: Any, digest: str) -> Texts:
    @torch.no_grad()
    def run(tokens: list[int], pictures: Sequence[Pixels]) -> Tensor:
        given = torch.tensor([tokens], device=model.device)
        return model(input_ids=given, attention_mask=torch.ones_like(given)).last_hidden_state[0].cpu()

    return Texts(
        ids=lambda caption, sizes: list(tokenizer(clean(caption)).input_ids),
        run=run,
        edit=None,
        dropped=0,
        empty="",
        width=int(model.config.d_model),
        most=512,
        digest=digest,
    )


def _qwen(model: Any, tokenizer: Any, processor: Any, edit: Edit | None, digest: str) -> Texts:
    prompt, pad = EDIT_PROMPT if edit else QWEN_PROMPT, tokenizer.convert_tokens_to_ids(_PAD)

    def ids(caption: str, sizes: Sequence[Size]) -> list[int]:
        counts = [processor.get_number_of_image_patches(*size, {}) // processor.merge_size**2 for size in sizes]
        shown = [edit.picture.format(n).replace(_PAD, _PAD * k) for n, k in enumerate(counts, 1)] if edit else []
        tokens = list(tokenizer(prompt.format("".join(shown) + caption)).input_ids)
        if edit and tokens.count(pad) != sum(counts):
            raise ValueError(f"the caption {caption[:60]!r} holds {_PAD}, which stands for a picture; leave it out")
        return tokens

    @torch.no_grad()
    def run(tokens: list[int], pictures: Sequence[Pixels]) -> Tensor:
        given = torch.tensor([tokens], device=model.device)
        told: dict[str, Any] = {"input_ids": given, "attention_mask": torch.ones_like(given)}
        if pictures:
            # Without the kinds of tokens transformers 5 would count positions of pictures along a line, where the
            # encoder was trained with rows and columns (arXiv:2502.13923).
            kinds = {"mm_token_type_ids": (given == pad).int()}
            told |= {**processor(images=_images(pictures), return_tensors="pt").to(model.device), **kinds}
        return model.model(**told).last_hidden_state[0].cpu()

    return Texts(
        ids=ids,
        run=run,
        edit=edit,
        dropped=len(tokenizer(prompt.partition("{}")[0]).input_ids),
        empty=" ",
        width=int(model.config.get_text_config().hidden_size),
        most=2048 if edit else 1024,
        digest=digest,
    )


def _images(pictures: Sequence[Pixels]) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(picture) for picture in pictures]


def resize_picture(picture_HW3: Pixels, size: Size) -> Pixels:
    """Returns a picture at another size, as diffusers' pipelines resize."""
    from PIL import Image

    return np.asarray(Image.fromarray(picture_HW3).resize((size[1], size[0]), Image.Resampling.LANCZOS))


def check_caption(texts: Texts, name: str, caption: str, most: int, sizes: Sequence[Size] = ()) -> list[int]:
    """Returns the tokens of a caption and of pictures of these sizes; raises ValueError where they are too many.

    `most` is the most embeddings; the pictures are those that the pipeline must have.
    """
    edit = texts.edit
    if edit is None and sizes:
        raise ValueError(f"{name} has references, and the pipeline edits nothing; give one of {', '.join(EDITS)}")
    if edit and (not sizes or (edit.single and len(sizes) > 1)):
        raise ValueError(
            f"{name} has {len(sizes)} references, and the pipeline takes {'one' if edit.single else 'one or more'}; "
            "list them as `references` in a .jsonl, or give as many --image"
        )
    try:
        tokens = texts.ids(caption, [resized_to(edit.area, size) for size in sizes] if edit else ())
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if len(tokens) - texts.dropped > most:
        raise ValueError(
            f"{name}: its caption has {len(tokens) - texts.dropped} embeddings{', pictures included' * bool(sizes)}, "
            f"and the model takes {most}; shorten it: {caption[:60]!r} ..."
        )
    return tokens


def encode_caption(texts: Texts, name: str, caption: str, most: int, pictures: Sequence[Pixels] = ()) -> Tensor:
    """Returns the embeddings [L, D] of a caption and the pictures [H, W, 3] beside it, without padding."""
    tokens = check_caption(texts, name, caption, most, [picture.shape[:2] for picture in pictures])
    seen = [resize_picture(one, resized_to(texts.edit.area, one.shape[:2])) for one in pictures] if texts.edit else []
    made = texts.run(tokens, seen)[texts.dropped :]
    if not len(made):
        raise ValueError(f"{name}: the tokenizer makes nothing of {caption!r}; write a caption of words")
    return made
