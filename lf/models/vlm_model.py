"""Vlm to a module: lf's decoder with a tower and a projector before it.

They are whole on every rank that has the embedding: tensor parallel ranks compute the same features, and under sequence
parallelism each takes those of its own positions, so that their gradients are summed over the ranks. Where all ranks
encode (`Layout.apart`) features come from elsewhere, and whoever brings them sums the gradients.

Shapes: S positions, B rows, H width, N patches, F numbers of a patch, M media tokens, L levels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lf.models.gpt import Gpt
from lf.models.layers.media import Features, touched
from lf.models.media import Media
from lf.models.spec import Ctx
from lf.models.vision.projector import ProjectorModule
from lf.models.vision.tower import TowerModule, build_tower, tower_of, unused
from lf.models.vlm import Vlm


class Encoder(nn.Module):
    """A tower and a projector."""

    def __init__(self, vision: TowerModule, projector: ProjectorModule) -> None:
        super().__init__()
        self.vision, self.projector = vision, projector

    def recompute(self, again: bool) -> None:
        """Says whether the backward makes each layer's activations again."""
        self.vision.again = again

    @property
    def fixed(self) -> bool:
        """Whether what `states` gives depends on no weight that is trained."""
        return not any(param.requires_grad for param in self.vision.parameters())

    def states(self, patches_NF: Tensor, media: Sequence[Media]) -> tuple[Tensor, ...]:
        """Returns what the tower gives for each patch [N, W], and its levels; nothing where there are no media."""
        if not media:
            return ()
        last, levels = self.vision(patches_NF, [grid for item in media for grid in item.grids])
        return (last, *levels)

    def encode(self, patches_NF: Tensor, media: Sequence[Media]) -> tuple[Tensor, Tensor | None]:
        """Returns the features of media [M, H], and those of the tower's levels [L, M, H] or None."""
        last, *levels = self.states(patches_NF, media)
        return self.projector.project(last, levels, media)

    def forward(self, states: Sequence[Tensor], media: Sequence[Media]) -> Tensor:
        """Returns both, the levels behind the features [1 + L, M, H], for what `states` gave; media may be none."""
        if not media:
            weight = self.projector.fc2.weight
            return weight.new_zeros(1 + self.projector.tower.levels, 0, len(weight))
        last, *more = states
        rows, levels = self.projector.project(last, more, media)
        return rows[None] if levels is None else torch.cat((rows[None], levels))


def encoder_of(cfg: Vlm, ctx: Ctx) -> Encoder:
    """Returns a tower and a projector, their weights not yet set."""
    tower = tower_of(cfg.vision)
    with torch.device("meta"):
        vision = build_tower(cfg.vision).to(ctx.dtype)
        projector = ProjectorModule(cfg.projector, tower, cfg.text.hidden).to(ctx.dtype)
    if not ctx.meta:
        # torch's own first values of billions of parameters would be drawn for nothing.
        vision.to_empty(device=ctx.device.torch_type)
        projector.to_empty(device=ctx.device.torch_type)
    for name in unused(cfg.vision):
        vision.get_parameter(name).requires_grad_(False)
    made = Encoder(vision, projector)
    made.recompute(dict(ctx.options).get("recompute_granularity") == "full")
    return made


class VlmModel(Gpt):
    """The decoder of a rank; the first chunk of the first pipeline stage has the tower and the projector too."""

    def __init__(self, cfg: Vlm, ctx: Ctx) -> None:
        tower = tower_of(cfg.vision)
        super().__init__(cfg.text, ctx, tower.levels)
        if ctx.pre:
            encoder = encoder_of(cfg, ctx)
            self.vision, self.projector = encoder.vision, encoder.projector
            for param in self.encoder_parameters():
                param.sequence_parallel = ctx.layout.sp and not ctx.layout.apart  # type: ignore[attr-defined]

    def encoder_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the tower and the projector."""
        return [*self.vision.parameters(), *self.projector.parameters()]

    def encoder(self) -> Encoder:
        """Returns this rank's own tower and projector, of the first chunk of the first pipeline stage."""
        return Encoder(self.vision, self.projector)

    def encode(self, patches_NF: Tensor, media: Sequence[Media]) -> tuple[Tensor, Tensor | None]:
        """Returns what `Encoder.encode` does."""
        return self.encoder().encode(patches_NF, media)

    def forward(
        self, *args: Any, pictures: Mapping[str, Any] | None = None, features: Features | None = None, **kwargs: Any
    ) -> Any:
        """Returns what `Gpt.forward` does; `pictures` are encoded here, `features` were elsewhere.

        `pictures` has the `patches`, `media`, `slots` and `taken` of a rank's micro-batch.
        """
        if features is None and pictures is not None and self.pre_process and len(pictures["slots"]):
            rows, levels = self.encode(pictures["patches"], pictures["media"])
            taken = pictures["taken"]
            features = Features(
                slots=pictures["slots"],
                rows=rows[taken],
                levels=None if levels is None else levels[:, taken],
            )
        return super().forward(*args, **kwargs, features=features)  # type: ignore[misc]

    def _embedded(self, input_ids: Tensor, position_ids: Tensor, features: Features | None) -> Tensor:
        states = super()._embedded(input_ids, position_ids, features)
        return states if features else touched(states, self.encoder_parameters())


def build_vlm(cfg: Vlm, ctx: Ctx) -> nn.Module:
    """Returns the model of this rank, its weights not yet set."""
    with torch.device("meta" if ctx.meta else ctx.device.torch_type):
        return VlmModel(cfg, ctx)
