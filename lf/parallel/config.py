"""How a run is spread over ranks: the degrees as data, and the rules they must obey."""

from typing import Literal

import attrs
from attrs.validators import ge

from lf.models.spec import Layout


@attrs.frozen(kw_only=True)
class ParallelConfig:
    """How a run is spread over ranks."""

    micro_batch: int = attrs.field(default=1, validator=ge(1))
    """Rows of a micro-batch: what one forward takes."""


@attrs.frozen(kw_only=True)
class MegatronParallel(ParallelConfig):
    """The Megatron path; data parallel takes the ranks that the other degrees leave."""

    tp: int = attrs.field(default=1, validator=ge(1))
    """Tensor parallel ranks."""
    pp: int = attrs.field(default=1, validator=ge(1))
    """Pipeline stages."""
    cp: int = attrs.field(default=1, validator=ge(1))
    """Context parallel ranks."""
    ep: int = attrs.field(default=1, validator=ge(1))
    """Expert parallel ranks."""
    recompute: Literal["none", "full"] = "none"
    """Activations kept for the backward (`none`), or made again layer by layer (`full`)."""
    overlap: bool = True
    """Whether gradient reduction and parameter gathering run beside compute; it changes no number."""


@attrs.frozen(kw_only=True)
class TorchParallel(ParallelConfig):
    """The torch path: every rank holds the whole model and takes its share of the rows."""


def resolve(cfg: ParallelConfig, world: int) -> Layout:
    """Returns the layout of rank 0 of `world` ranks; raises ValueError with the cure where the degrees cannot be."""
    if not isinstance(cfg, MegatronParallel):
        return Layout(dp=world)
    for axis in ("tp", "pp", "cp", "ep"):
        if getattr(cfg, axis) > 1:
            raise ValueError(
                f"parallel.{axis} = {getattr(cfg, axis)}, but this version of lf trains the Megatron path with data "
                f"parallel ranks only; set parallel.{axis} to 1"
            )
    return Layout(dp=world)
