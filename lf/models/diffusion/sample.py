"""Samples of a prompt: the row that asks for one, and the solvers that go from noise to it.

Shapes: C channels, F frames, Y rows and X columns of a latent; T tokens, P numbers of a patch.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import torch
from attrs.validators import ge
from torch import Tensor, nn

from lf.models.diffusion.flow import ConstantShift, Flow, Sampling, noisy, schedule
from lf.models.diffusion.latent import LatentModel, latent_batch, latents_of, velocity, with_draws
from lf.models.diffusion.packed import Packing

Solver = Literal["euler", "unipc"]
"""`euler`: straight steps. `unipc`: diffusers' multistep predictor and corrector of order two (arXiv:2302.04867)."""

Field = Callable[[Tensor, float], Tensor]
"""The velocity [T, P] of tokens [T, P] at a time."""


@attrs.frozen(kw_only=True)
class How:
    """How a sample is made; what is 0 is the model's own."""

    steps: int = attrs.field(default=0, validator=ge(0))
    """Steps; 0 takes model.sampling.steps."""
    guidance: float = attrs.field(default=0.0, validator=ge(0.0))
    """Weight of the caption against the empty one; 0 takes model.sampling.guidance, 1 has none."""
    shift: float = attrs.field(default=0.0, validator=ge(0.0))
    """Factor by which the times of the steps move towards noise; 0 takes model.sampling.shift."""
    solver: Solver = "euler"
    """Way from noise to a sample."""
    seed: int = attrs.field(default=0, validator=ge(0))
    """Of the noise."""
    boundary: float = 0.0
    """Time from which on the first of two experts is asked, between 0 and 1."""


def sampling_of(cfg: LatentModel, how: How) -> Sampling:
    """Returns how a model samples, with what `how` changes."""
    own = cfg.sampling
    return attrs.evolve(
        own,
        steps=how.steps or own.steps,
        guidance=how.guidance or own.guidance,
        shift=ConstantShift(factor=how.shift) if how.shift else own.shift,
    )


@torch.no_grad()
def sample_row(cfg: LatentModel, models: Sequence[nn.Module], row: dict[str, Any], how: How, device: str) -> Tensor:
    """Returns the latent [C, F, Y, X] that models make of a row, whose `latents` say its size and its given frames.

    Two models are the experts of times from `how.boundary` on, and below it. Raises ValueError where they do not fit,
    and for a row that the model cannot take.
    """
    if len(models) == 2 and not 0.0 < how.boundary < 1.0:
        raise ValueError(f"boundary = {how.boundary} must lie between 0 and 1 for two experts; 0.875 is Wan2.2 T2V's")
    cfg = attrs.evolve(cfg, sampling=sampling_of(cfg, how))
    # No caption is dropped here, whatever the model trains with.
    batch = with_draws(cfg.space, Flow(), latent_batch(cfg.space, [row]), how.seed, 0)
    batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    packing: Packing = batch["packing"]

    def field(x: Tensor, time: float) -> Tensor:
        model = models[0] if len(models) == 1 or time >= how.boundary else models[1]
        return velocity(cfg, model, batch, x, [time])

    noised = batch["noised"][:, None]
    x = noisy(batch["latents"], batch["noise"], noised.float())
    way = schedule(cfg.sampling, math.prod(packing.grids[0][0]))
    x = solve(how.solver, field, x, noised, way)
    if not bool(torch.isfinite(x).all()):
        raise ValueError("the sample is not finite; the model's weights are damaged, or its training has diverged")
    return latents_of(cfg.space, packing, x)[0].cpu()


def solve(solver: Solver, field: Field, x: Tensor, noised: Tensor, way: Sequence[float]) -> Tensor:
    """Returns tokens [T, P] moved along a field through times from 1 to 0, where `noised` [T, 1] says so."""
    if solver == "unipc":
        return _unipc(field, x, noised, way)
    for now, then in itertools.pairwise(way):
        x = torch.where(noised, x + (then - now) * field(x, now), x)
    return x


def _unipc(field: Field, x: Tensor, noised: Tensor, way: Sequence[float]) -> Tensor:
    try:
        from diffusers import UniPCMultistepScheduler
    except ImportError as error:
        raise ValueError(f"UniPC is of diffusers, which is missing ({error}); install lf[diffusion]") from error
    solver = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    solver.set_timesteps(sigmas=np.array(way[:-1]), device=x.device)
    for now, step in zip(way, solver.timesteps, strict=False):
        x = torch.where(noised, solver.step(field(x, now), step, x, return_dict=False)[0], x)
    return x
