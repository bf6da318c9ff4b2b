"""Modules that diffusion transformers share. Norms, modulation and times are fp32 whatever the model computes in.

Shapes: T tokens, W width, R runs of tokens of one time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf.models.diffusion.flow import time_embedding
from lf.models.layers.fused import rms_norm


class Norm(nn.Module):
    """RMSNorm over the last dimension (arXiv:1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Returns x of the same shape and dtype, normalised."""
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class WideLayerNorm(nn.Module):
    """LayerNorm with weight and bias in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x_TW: Tensor) -> Tensor:
        """Returns x normalised, in its dtype."""
        wide = x_TW.to(self.weight.dtype)
        return F.layer_norm(wide, self.weight.shape, self.weight, self.bias, self.eps).to(x_TW.dtype)


class Modulation(nn.Module):
    """A learnt table that is added to what the time says."""

    def __init__(self, parts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, parts, width))

    def forward(self, time: Tensor) -> tuple[Tensor, ...]:
        """Returns the parts, each [R, W], of a table plus time [R, parts or 1, W]."""
        return (self.weight + time.to(self.weight.dtype)).unbind(1)


class TimeMlp(nn.Module):
    """Two linear layers on the sinusoids of a time."""

    def __init__(self, sinusoids: int, width: int) -> None:
        super().__init__()
        self.sinusoids = sinusoids
        self.up = nn.Linear(sinusoids, width)
        self.down = nn.Linear(width, width)

    def forward(self, time_R: Tensor) -> Tensor:
        """Returns [R, W] of times from 0 to 1000."""
        return self.down(F.silu(self.up(time_embedding(time_R, self.sinusoids).to(self.up.weight.dtype))))


class GeluMlp(nn.Module):
    """Two linear layers with a GELU between them, by its tanh approximation or exactly."""

    def __init__(self, width: int, inner: int, out: int, exact: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, out)
        self.approximate = "none" if exact else "tanh"

    def forward(self, x_TW: Tensor) -> Tensor:
        """Returns [T, out]."""
        return self.down(F.gelu(self.up(x_TW), approximate=self.approximate))
