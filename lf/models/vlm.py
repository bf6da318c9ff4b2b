"""A vision-language model: any vision tower, a projector and any decoder, composed by config.

Features of images and videos stand in the row in place of the tokens that announce them. Widths, how many tokens an
image takes, the decoder layers that get features of inner layers, and the rule of positions follow from the parts.

Shapes: B rows of a micro-batch, S positions of a row, N patches, F numbers of a patch, M media tokens.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from attrs.validators import ge
from torch import Tensor, nn

from lf.models import spec
from lf.models.decoder import DecoderConfig, decoder_inputs
from lf.models.media import Media, build_encoder, media_flops, media_ids, media_tokens, takes_media
from lf.models.recorded import recorded_rows
from lf.models.vision.projector import Anyres, Projector, tokens_of
from lf.models.vision.tower import Tower, VisionConfig, tower_flops, tower_of
from lf.models.vlm_costs import vlm_blocks
from lf.models.vlm_rows import fake_rows, vlm_batch, vlm_slice
from lf.models.work import RowWork, added, media_work, row_work


@attrs.frozen(kw_only=True)
class Vlm(spec.ModelConfig):
    """A vision-language model; published families are subclasses, other pairs are this."""

    vision: VisionConfig
    """The vision tower."""
    projector: Projector = Projector()
    """From the tower's width to the decoder's."""
    text: DecoderConfig
    """The decoder."""
    image_token: int = attrs.field(validator=ge(0))
    """Token id that stands where an image's features go, once for each."""
    video_token: int = attrs.field(validator=ge(0))
    """The same of a video; may be `image_token`."""

    def __attrs_post_init__(self) -> None:
        check_fit(self, tower_of(self.vision))


def check_fit(cfg: Vlm, tower: Tower) -> None:
    """Raises ValueError, with the cure, where the parts do not fit together."""
    projector, text = cfg.projector, cfg.text
    if tower.block not in (1, projector.merge):
        raise ValueError(
            f"the tower has its patches in blocks of {tower.block} x {tower.block}, but projector.merge = "
            f"{projector.merge}; set it to {tower.block}"
        )
    if tower.side % projector.merge:
        raise ValueError(
            f"projector.merge = {projector.merge} does not divide the tower's {tower.side} patches of a side; change it"
        )
    if isinstance(projector, Anyres) and (not tower.side or projector.merge > 1 or tower.levels or projector.mean):
        raise ValueError(
            "projector = Anyres(...) lays tiles together, so it needs a tower of one size without levels, merge = 1 "
            f"and mean = False; this tower has side = {tower.side} and {tower.levels} levels: take a Projector"
        )
    if projector.mean and tower.levels:
        raise ValueError("projector.mean = True, but the tower has levels, whose frames stay apart; set mean to False")
    if tower.levels > text.layers:
        raise ValueError(
            f"the tower has {tower.levels} levels, one for each of the decoder's first layers, but text.layers = "
            f"{text.layers}; take fewer levels or more layers"
        )
    for name in ("image_token", "video_token"):
        if getattr(cfg, name) >= text.vocab:
            raise ValueError(
                f"{name} = {getattr(cfg, name)} must be below text.vocab = {text.vocab}; raise that, or correct it"
            )
    if text.mtp is not None:
        raise ValueError(
            "text.mtp is set, but further heads embed the next tokens, which may be images; set text.mtp to None"
        )


@spec.build_model.register
def _(cfg: Vlm, ctx: spec.Ctx) -> nn.Module:
    from lf.models.vlm_model import build_vlm

    with _about_text(ctx.layout):
        return build_vlm(cfg, ctx)


@spec.paths.register
def _(cfg: Vlm) -> tuple[spec.Path, ...]:
    return spec.paths(cfg.text)


@spec.check_model.register
def _(cfg: Vlm, data: Mapping[str, int]) -> None:
    spec.check_model(cfg.text, data)


@spec.check_layout.register
def _(cfg: Vlm, layout: spec.Layout, length: int) -> None:
    _check_shares(cfg, layout.apart)
    with _about_text(layout):
        spec.check_layout(cfg.text, layout, length)
        _check_levels(cfg, layout)


@contextlib.contextmanager
def _about_text(layout: spec.Layout) -> Iterator[None]:
    """Makes errors name the decoder's fields as those of a part of the model, and of the layout where it has parts."""
    with spec.text_errors(layout.apart):
        try:
            yield
        except ValueError as error:
            raise ValueError(str(error).replace("model.", "model.text.")) from error


def _check_levels(cfg: Vlm, layout: spec.Layout) -> None:
    levels, chunks = tower_of(cfg.vision).levels, layout.pp * layout.vpp
    first = layout.stages[0] if layout.stages else -(-cfg.text.layers // chunks)
    if levels > first:
        raise ValueError(
            f"the tower's {levels} levels go into the first {levels} decoder layers, but the first of {chunks} "
            f"pipeline chunks has {first}; set parallel.stages so that it has at least {levels}, or lower parallel.pp "
            "or vpp"
        )


def _check_shares(cfg: Vlm, ranks: int) -> None:
    # A projector's width of 0 is vision.width * merge^2, which the heads divide.
    sizes = {"vision.heads": cfg.vision.heads, "vision.mlp": cfg.vision.mlp, "projector.width": cfg.projector.width}
    for name, size in sizes.items():
        if ranks and size % ranks:
            raise ValueError(
                f"parallel.vision.tp = {ranks} does not divide model.{name} = {size}; set it to a divisor of "
                f"{math.gcd(*sizes.values())}"
            )


@spec.slice_batch.register
def _(cfg: Vlm, batch: spec.Batch, layout: spec.Layout) -> spec.Batch:
    return vlm_slice(cfg.text, batch, layout)


@spec.forward.register
def _(cfg: Vlm, model: nn.Module, batch: spec.Batch) -> spec.Output:
    if "places" in batch:
        return model(**decoder_inputs(cfg.text, batch), features=_features(batch))
    names = ("patches", "media", "slots", "taken")
    pictures = {name: batch[name] for name in names} if batch.get("media") else None
    return model(**decoder_inputs(cfg.text, batch), pictures=pictures)


def _features(batch: spec.Batch) -> Any:
    """Returns what was encoded apart, None where this rank's part of the model takes nothing of it."""
    from lf.models.layers.media import Features

    if "features" not in batch:
        return None
    rows, levels = batch["features"][0], batch["features"][1:]
    return Features(slots=batch["slots"], rows=rows, levels=levels if len(levels) else None)


@spec.loss_weights.register
def _(cfg: Vlm, batch: spec.Batch) -> dict[str, Tensor]:
    return spec.loss_weights(cfg.text, batch)


@spec.loss_terms.register
def _(cfg: Vlm, output: spec.Output, batch: spec.Batch) -> dict[str, Tensor]:
    return spec.loss_terms(cfg.text, output, batch)


@spec.loss_coefficients.register
def _(cfg: Vlm) -> dict[str, float]:
    return spec.loss_coefficients(cfg.text)


@spec.collate.register
def _(cfg: Vlm, rows: Sequence[Mapping[str, Any] | None], like: Mapping[str, Any]) -> spec.Batch:
    return vlm_batch(cfg, rows, like)


@spec.fake_batch.register
def _(cfg: Vlm, rows: int, length: int, seed: int) -> spec.Batch:
    """Each row has an image, where it has room for one."""
    made = fake_rows(cfg, rows, length, np.random.default_rng(seed), seed)
    return vlm_batch(cfg, made, made[0])


@spec.weight_map.register
def _(cfg: Vlm) -> Any:
    from lf.models.vlms.own import own_weights

    return own_weights(cfg)


@spec.hf_config.register
def _(cfg: Vlm) -> dict[str, Any]:
    from lf.models.vlms.own import own_config

    return own_config(cfg)


@recorded_rows.register
def _(cfg: Vlm, recorded: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    from lf.models.vlms.recorded import vlm_rows

    return vlm_rows(cfg, recorded)


@spec.init_rules.register
def _(cfg: Vlm) -> tuple[spec.InitRule, ...]:
    """Norms and layer scales of the tower start as ones, biases as zeros, matrices normal."""
    return (
        *(spec.InitRule(pattern=pattern, kind="zeros") for pattern in ("vision.*bias", "projector.*bias")),
        spec.InitRule(pattern="vision.*norm*.weight", kind="ones"),
        spec.InitRule(pattern="projector.*norm.weight", kind="ones"),
        spec.InitRule(pattern="vision.*lambda_?", kind="ones"),
        *(spec.InitRule(pattern=f"{part}.*", kind="normal", std=0.02) for part in ("vision", "projector")),
        *spec.init_rules(cfg.text),
    )


@spec.flops.register
def _(cfg: Vlm, rows: int, length: int) -> float:
    """Those of the decoder: images come on top (`media_flops`)."""
    return spec.flops(cfg.text, rows, length)


@row_work.register
def _(cfg: Vlm, row: Mapping[str, Any]) -> RowWork:
    text = row_work(cfg.text, row)
    return attrs.evolve(text, kinds=added(text.kinds, *(media_work(cfg, item) for item in row.get("media", ()))))


@spec.blocks.register
def _(cfg: Vlm, layout: spec.Layout, load: spec.Load) -> tuple[spec.Block, ...]:
    return vlm_blocks(cfg, layout, load)


@takes_media.register
def _(cfg: Vlm) -> bool:
    return True


@build_encoder.register
def _(cfg: Vlm, ctx: spec.Ctx) -> nn.Module:
    from lf.models.vlm_model import encoder_of

    return encoder_of(cfg, ctx)


@media_tokens.register
def _(cfg: Vlm, media: Media) -> int:
    return tokens_of(cfg.projector, media)


@media_ids.register
def _(cfg: Vlm) -> tuple[int, int]:
    return cfg.image_token, cfg.video_token


@media_flops.register
def _(cfg: Vlm, media: Media) -> float:
    """Those of the tower, of the projector, and of those of the tower's levels."""
    tower, p = tower_of(cfg.vision), cfg.projector
    block = tower.width * p.merge**2
    token = 2.0 * (p.width or block) * (block + cfg.text.hidden) * (1 + tower.levels)
    joined = sum((1 if p.mean else t) * h * w for t, h, w in media.grids) // p.merge**2
    return 3.0 * (sum(tower_flops(cfg.vision, grid) for grid in media.grids) + joined * token)
