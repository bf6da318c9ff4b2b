"""Samples of Pi0.5: everything that the Euler steps share is computed once, before the first of them.

That is the keys and values of the observation, where they lie before those of the actions; the table of positions; and
what the times of all steps make of the expert's norms, which reads those weights once instead of once a step.

Shapes: B rows, L tokens before the actions, H action steps, D action dims, T Euler steps.
"""

from collections.abc import Sequence

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from lf.models.embodied.pi05_model import Pi05Model
from lf.models.layers.gemma import AdaptiveNorm, GemmaLayer, Keys, rope_of


@attrs.frozen(kw_only=True)
class Sampled:
    """A sample and the way to it."""

    actions: Tensor
    """The actions [B, H, D]."""
    times: Tensor
    """Time of each Euler step."""
    first: Tensor
    """Velocity of the first step."""
    last: Tensor
    """Velocity of the last step."""


@torch.no_grad()
def euler(
    model: Pi05Model, keys: Sequence[Keys], valid_BL: Tensor, noise_BHD: Tensor, steps: int, dims_BD: Tensor | None
) -> Sampled:
    """Returns actions for what `observe` returned, by Euler steps from noise at time 1 to time 0.

    Time is added up in fp32, as openpi does. Dims that the robot does not have (False in `dims_BD`) were filled with
    zeros in training, so they go straight from noise to zero whatever the model says of them.
    """
    length, device = noise_BHD.shape[1], noise_BHD.device
    dt = torch.tensor(-1.0 / steps, dtype=torch.float32)
    times = [torch.tensor(1.0)]
    for _ in range(steps - 1):
        times.append(times[-1] + dt)
    times_T, layers, last = torch.stack(times), _layers(model), model.expert.norm
    assert isinstance(last, AdaptiveNorm)
    cond = model.condition(times_T.to(device))
    pairs, closing = [layer.modulations(cond) for layer in layers], last.modulation(cond)
    # Room for the actions' own keys and values, which each step writes anew.
    rooms = [(F.pad(k, (0, 0, 0, 0, 0, length)), F.pad(v, (0, 0, 0, 0, 0, length))) for k, v in keys]
    after = valid_BL.sum(1, keepdim=True) + torch.arange(length, device=device)
    table, seen = rope_of(model.cfg.expert, after), F.pad(valid_BL, (0, length), value=True)
    x, velocities, dt = noise_BHD, list[Tensor](), dt.to(device)
    for t in range(steps):
        h = model.suffix(x, rooms[0][0].dtype)
        for layer, room, pair in zip(layers, rooms, pairs, strict=True):
            h = layer.denoised(h, table, seen, room, (pair[0][t : t + 1], pair[1][t : t + 1]))
        v = model.action(last.modulated(h, closing[t : t + 1])[0])
        v = v if dims_BD is None else torch.where(dims_BD[:, None], v, noise_BHD)
        x = x + dt * v
        velocities = [*velocities[:1], v]
    return Sampled(actions=x, times=times_T, first=velocities[0], last=velocities[-1])


def _layers(model: Pi05Model) -> list[GemmaLayer]:
    return [layer for layer in model.expert.layers if isinstance(layer, GemmaLayer)]
