"""Images and videos of a row: what is known of them before a model has seen them, and what a model makes of them."""

import functools
from collections.abc import Callable
from typing import Literal

import attrs
from torch import nn

from lf.models.spec import Batch, Ctx, ModelConfig, has_rule, no_rule

Grid = tuple[int, int, int]
"""Frames, rows and columns of a picture, in patches."""


@attrs.frozen(kw_only=True)
class Media:
    """An image or a video of a row."""

    grids: tuple[Grid, ...]
    """Its pictures: one, or one for each tile, or for each frame where a tower takes frames alone."""
    kind: Literal["image", "video"] = "image"
    """Which of the two."""
    size: tuple[int, int] = (0, 0)
    """Height and width in pixels before it was cut into tiles, for models that ask."""
    seconds: float = 1.0
    """Seconds from one frame of a video's grid to the next."""

    @property
    def patches(self) -> int:
        """Patches of all its pictures."""
        return sum(t * h * w for t, h, w in self.grids)


@functools.singledispatch
def takes_media(cfg: ModelConfig) -> bool:
    """Returns whether a model can have images or videos, encoded by itself or, with `build_encoder`, apart."""
    return False


@functools.singledispatch
def build_encoder(cfg: ModelConfig, ctx: Ctx) -> nn.Module:
    """Returns what makes features of images, its weights not yet set.

    Its `states` takes patches [N, F] and their `Media`; called with what that gave and the media it gives
    [1 + L, M, H]: what stands in place of the M tokens, and what L levels add in the decoder's first layers. `fixed`
    says whether `states` needs no weight that is trained, `recompute` takes whether its backward makes activations
    again. A model that has one on its first pipeline stage gives it by `encoder`, and takes as `features` of a
    micro-batch what it gave.
    """
    raise no_rule(build_encoder, cfg)


@functools.singledispatch
def media_tokens(cfg: ModelConfig, media: Media) -> int:
    """Returns how many tokens of a row an image or a video takes; raises ValueError where a model cannot take it."""
    raise no_rule(media_tokens, cfg)


@functools.singledispatch
def media_flops(cfg: ModelConfig, media: Media) -> float:
    """Returns the floating point operations of forward and backward until an image or a video is tokens."""
    raise no_rule(media_flops, cfg)


def batch_flops(cfg: ModelConfig, batch: Batch) -> float:
    """Returns those of all images and videos of a micro-batch."""
    return sum(media_flops(cfg, item) for item in batch.get("media", ()))


@functools.singledispatch
def media_ids(cfg: ModelConfig) -> tuple[int, int]:
    """Returns the token ids that stand where the features of images, and of videos, go."""
    raise no_rule(media_ids, cfg)


@attrs.frozen(kw_only=True)
class MediaRules:
    """What data must know of a model that takes images."""

    count: Callable[[Media], int]
    """Returns how many tokens of a row an image or a video takes."""
    ids: tuple[int, int]
    """Token ids that stand where the features of images, and of videos, go."""


def media_rules(cfg: ModelConfig) -> MediaRules | None:
    """Returns what data must know of a model; None where it takes no images."""
    if not has_rule(media_tokens, cfg):
        return None
    return MediaRules(count=functools.partial(media_tokens, cfg), ids=media_ids(cfg))
