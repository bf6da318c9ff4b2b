"""A question about images and videos, as a model that was trained on chats reads it.

Shapes: N patches, F numbers of a patch.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from lf.data.chat_files import question_sample
from lf.data.chat_text import encode, media_names, open_template, question_pieces
from lf.data.config import ChatData
from lf.data.hf_tokenizer import Tokenizer
from lf.data.media import patches_of
from lf.data.media_files import pixels_of
from lf.data.multimodal import Maker
from lf.data.video import Decoders
from lf.models.media import MediaRules


@attrs.frozen(kw_only=True, eq=False)
class Question:
    """A question, up to where its answer begins."""

    tokens: list[int]
    """Ids."""
    pictures: Mapping[str, Any]
    """Its `media`, images and videos in order, and the `patches` [N, F] of all of them."""
    end: int
    """Id of the token that ends an answer."""


def open_question(
    cfg: ChatData,
    tokenizer: Tokenizer,
    rules: MediaRules,
    *,
    prompt: str,
    images: Sequence[str],
    videos: Sequence[str],
    where: str,
) -> Question:
    """Returns a question about image and video files, by the template and the pictures of `cfg`.

    `<image>` and `<video>` in the prompt are places of files, which stand before it otherwise. Raises ValueError, with
    the file, where one cannot be read.
    """
    template, _ = open_template(cfg.template, tokenizer, where)
    names = media_names(rules.ids, cfg.pictures.video, tokenizer, where)
    maker = Maker(cfg, template, tokenizer, rules.count, names)
    sample = question_sample(prompt, images, videos)
    entries = maker.entries(sample)
    pieces, end = question_pieces(template, maker.special, sample.messages)
    fitted = [maker.fitted(entry) for entry in entries]
    encoded = encode(pieces, fitted, tokenizer, names)
    with contextlib.closing(Decoders()) as decoders:
        patches = [
            patches_of(cfg.pictures, made, pixels_of(entry.ref, entry.shape, made.frames, decoders))
            for entry, made in zip(entries, fitted, strict=True)
        ]
    return Question(
        tokens=encoded.tokens,
        pictures={"media": tuple(made.media for made in fitted), "patches": np.concatenate(patches)},
        end=tokenizer.special[end],
    )
