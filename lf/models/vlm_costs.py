"""What the tower and the projector of a vision-language model hold, keep, compute and send, beside its decoder.

Memory is counted on their own modules (`lf.models.vision.memory`), operations are `media_flops`. Where all ranks of a
replica encode (`Layout.apart`), the images of a step are taken as spread evenly over them, and over the row; those that
share a tower, as taking turns evenly in sending what they make.
"""

import functools
import math
import re
from typing import TYPE_CHECKING

import attrs
import torch

from lf.models import spec
from lf.models.layer_costs import INDEX, WIDE
from lf.models.media import media_flops, media_tokens
from lf.models.spec import Block, Layout, Load, Message, Weight
from lf.models.vision.memory import Taken, encoder_memory, encoder_parts
from lf.models.vision.tower import tower_of
from lf.models.vlm_rows import picture_fault

if TYPE_CHECKING:
    from lf.models.vlm import Vlm

NAME = "tower and projector"


@attrs.frozen(kw_only=True)
class _Images:
    """The images of the fullest row, and what they become on a rank."""

    cfg: "Vlm"
    layout: Layout
    load: Load

    @property
    def features(self) -> int:
        """Features of the row, each `1 + levels` vectors."""
        return sum(media_tokens(self.cfg, item) for item in self.load.media)

    @property
    def vector(self) -> int:
        """Bytes of a feature."""
        return (1 + tower_of(self.cfg.vision).levels) * self.cfg.text.hidden * self.load.itemsize

    @property
    def forward(self) -> float:
        """Operations of the forward of the row's images."""
        return sum(media_flops(self.cfg, item) for item in self.load.media) / 3

    @property
    def pixels(self) -> int:
        """Bytes of the row's patches."""
        return sum(item.patches for item in self.load.media) * tower_of(self.cfg.vision).numbers * WIDE

    @property
    def parts(self) -> int:
        """Ranks of a first stage that have different features."""
        return self.layout.cp * (self.layout.tp if self.layout.sp else 1)

    @property
    def ranks(self) -> int:
        """Ranks of a replica."""
        return self.layout.tp * self.layout.cp * self.layout.pp

    @property
    def encoders(self) -> int:
        """Ranks of a replica that encode images of their own, or groups of ranks that do so together."""
        return self.ranks // max(1, self.layout.apart)

    @property
    def away(self) -> float:
        """Share of what a rank encodes that other ranks take, where it may be taken by itself."""
        return 1.0 if self.layout.pp_rank else 1.0 - 1.0 / (self.layout.tp * self.layout.cp)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return torch.float32 if self.load.itemsize == WIDE else torch.bfloat16

    def memory(self, *, together: bool) -> Taken:
        """Returns what encoding the row's images takes."""
        cfg, load = self.cfg, self.load
        if not load.media:
            return Taken(kept=0, working=0)
        return encoder_memory(
            cfg.vision,
            cfg.projector,
            cfg.text.hidden,
            self.dtype,
            load.media,
            again=load.media_again,
            together=together,
            ranks=max(1, self.layout.apart),
        )


def vlm_blocks(cfg: "Vlm", layout: Layout, load: Load) -> tuple[Block, ...]:
    """Returns the blocks of the pipeline stage `layout.pp_rank`; see `lf.models.spec.blocks`.

    Raises ValueError, with the cure, where the row cannot have the images.
    """
    images = _Images(cfg=cfg, layout=layout, load=load)
    _check(images)
    decoder = spec.blocks(cfg.text, layout, load)
    if layout.apart:
        return (*decoder, *_placed(images), _apart(images))
    return decoder if layout.pp_rank else (*decoder, *_with_decoder(images))


def _check(images: _Images) -> None:
    tower, length = tower_of(images.cfg.vision), images.load.length
    for grid in (grid for item in images.load.media for grid in item.grids):
        if fault := picture_fault(images.cfg, tower, grid):
            raise ValueError(f"images of the plan: {fault}")
    if images.features > length:
        raise ValueError(
            f"images of the plan: {len(images.load.media)} take {images.features:,} tokens of a row, which has "
            f"{length:,}; plan fewer or smaller ones, or longer rows"
        )


@functools.lru_cache(maxsize=16)
def _weights(cfg: "Vlm", *, summed: bool, copy: bool = False) -> tuple[Weight, ...]:
    """Returns the parameters of tower and projector; of a `copy` none is optimised."""
    parts = encoder_parts(cfg.vision, cfg.projector, cfg.text.hidden, torch.float32)
    return tuple(
        Weight(
            name=re.sub(r"\.\d+(?=\.)", "", name),
            size=param.numel(),
            summed=summed,
            frozen=copy or not param.requires_grad,
        )
        for name, param in parts.named_parameters()
    )


def _with_decoder(images: _Images) -> tuple[Block, ...]:
    """Returns tower and projector where the first stage encodes: each of its ranks all images of a micro-batch."""
    load, taken = images.load, images.memory(together=False)
    # Made again, the decoder's layers keep the features of the levels that they add.
    levels = images.features * (images.vector - images.cfg.text.hidden * load.itemsize) // images.parts
    again = "full" in load.recompute
    return (
        Block(name="pictures", step=True, saved=(("patches", load.micro * load.rows * images.pixels),)),
        Block(
            name=NAME,
            weights=_weights(images.cfg, summed=images.layout.sp),
            saved=(("activations", load.rows * taken.kept), ("levels", load.rows * levels * again)),
            working=load.rows * taken.working,
            forward=load.rows * load.usual * images.forward,
            again=load.rows * load.usual * images.forward * load.media_again,
        ),
    )


def _placed(images: _Images) -> tuple[Block, ...]:
    """Returns what a rank of the first stage holds of features that were encoded apart."""
    features = images.load.rows * images.features // images.parts
    saved = (("features", features * images.vector), ("places", features * INDEX))
    return () if images.layout.pp_rank or not features else (Block(name="images", saved=saved),)


def _apart(images: _Images) -> Block:
    """Returns tower and projector where all ranks of a replica encode, each its share of the images of a step."""
    load, first, shared = images.load, images.layout.pp_rank == 0, images.layout.apart
    # Images are not cut: the heaviest encoder has a whole number.
    number = math.ceil(load.micro * load.rows * load.usual * len(load.media) / images.encoders)
    rows = number / max(1, len(load.media))
    # What each of the ranks that share a tower does for itself, the embedding of patches, is little.
    forward = rows * images.forward / shared
    taken, made = images.memory(together=True), round(rows * images.features * images.vector)
    sent, returned = _sent(images)
    kept = {
        "activations": round(rows * taken.kept),
        "patches": round(rows * images.pixels),
        "features": made,
        "features on their way": sum(each.size * each.calls for each in sent),
        "gradients on their way": round(made * images.away / shared),
    }
    weights = _weights(images.cfg, summed=False, copy=not first)
    trained = sum(weight.size for weight in _weights(images.cfg, summed=False) if not weight.frozen)
    # All gradients at once, then one float32 row of them to be summed, by way of float32 copies.
    gradients = trained * (load.itemsize + WIDE + (0 if load.itemsize == WIDE else WIDE))
    every = [Message(op="broadcast", axis="pp", size=weight.size * load.itemsize) for weight in weights]
    sums = [Message(op="all_reduce", axis="apart", size=round(rows * size)) for size in taken.sums]
    return Block(
        name=NAME if first else f"copy of {NAME}",
        step=True,
        weights=weights,
        saved=tuple(kept.items()),
        working=made + max(round(rows * taken.working), gradients - kept["activations"]),
        forward=forward,
        again=forward * load.media_again,
        messages=(*sums, *sent, *returned, *every, Message(op="all_reduce", axis="mp", size=trained * WIDE)),
    )


def _sent(images: _Images) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Returns the features and the gradients that a rank sends point to point in a step, as means over its stage.

    What a rank encodes of a micro-batch goes in one message to each rank of the first stage that has some of it.
    """
    layout, load, ranks = images.layout, images.load, images.ranks
    number = load.rows * load.usual * len(load.media)
    if not number:
        return (), ()
    takers, copies = layout.tp * layout.cp, layout.tp * layout.cp // images.parts
    sources = min(number, images.encoders)
    # An image somewhere in the row lies in one piece of it, and in more as it is longer.
    piece = load.rows * load.length / (images.parts * (2 if layout.cp > 1 else 1))
    touched = min(images.parts, number / sources * (1 + (images.features / len(load.media) - 1) / piece))
    routes, size = load.micro * sources * touched, load.micro * load.rows * load.usual * images.features * images.vector
    share = copies * images.away / ranks
    back = (1 - 1 / ranks) / takers if layout.pp_rank == 0 else 0.0
    return _send(routes * share, size * share), _send(routes * back, size * back)


def _send(calls: float, size: float) -> tuple[Message, ...]:
    whole = max(1, round(calls))
    return (Message(op="send", axis="replica", size=round(size / whole), calls=whole),) if size else ()
