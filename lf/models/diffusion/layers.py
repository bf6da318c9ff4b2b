"""Modules that diffusion transformers share, and what they are built from where ranks share the work.

Norms, modulation and times are fp32 whatever the model computes in. Where tensor parallel ranks share the sequence too,
each has its own tokens between the matrices. What every rank has whole and uses for its own tokens alone has a partial
gradient: it is marked `sliced`, and its gradients are summed. Times and Wan's texts are computed whole by every rank;
gradients are summed where they meet the tokens, so that everything before has whole ones.

Shapes: T tokens, W width, N heads, D head width, R runs of tokens of one time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lf.models.diffusion.flow import time_embedding
from lf.models.diffusion.packed import Place, attend, held, interleave, separate, slice_of
from lf.models.layers.fused import rms_norm

TIMES = 1000.0
"""The time of pure noise, as the models read it."""


def type_of(module: nn.Module) -> torch.dtype:
    """Returns the type that a module computes in."""
    return next(module.parameters()).dtype


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


@attrs.frozen(kw_only=True, eq=False)
class Exchange:
    """How context parallel ranks attend to tokens [T, N, D] that others have. Here one rank has them all."""

    held: Callable[[tuple[int, ...], Place], tuple[int, ...]] = lambda lengths, place: lengths
    """How many tokens of each sample the rank has queries of."""
    queries: Callable[[Tensor], Tensor] = lambda x: x
    """The queries that the rank attends with, given those of its tokens."""
    keys: Callable[[Tensor], Tensor] = lambda x: x
    """Keys or values of the whole sequence, given those of the rank's tokens."""
    back: Callable[[Tensor], Tensor] = lambda x: x
    """All heads of the rank's tokens, given what its queries have found."""


@attrs.frozen(kw_only=True, eq=False)
class Layers:
    """What models are built from. These are one rank's; `megatron.py` has those of ranks that share the work."""

    column: Callable[[int, int], nn.Module] = nn.Linear
    """A linear layer of inputs and outputs, the outputs being shared out: each rank gets its own, of all its
    neighbours' tokens."""
    column_of_whole: Callable[[int, int], nn.Module] = nn.Linear
    """The same of a sequence that every rank has whole, such as a text."""
    row: Callable[[int, int], nn.Module] = nn.Linear
    """A linear layer of inputs that are shared out; each rank gets all outputs of its own tokens."""
    spread: Callable[[int, int], nn.Module] = nn.Linear
    """A large linear layer of few inputs that all have: the weight is shared out, and every rank gets all outputs for
    its own tokens."""
    norm: Callable[[int, float], nn.Module]
    """RMSNorm over all heads together, of width and eps; ranks have their own heads."""
    head_norm: Callable[[int, float], nn.Module]
    """RMSNorm of each head, of head width and eps."""
    sliced: Callable[[nn.Module], nn.Module] = lambda module: module
    """Marks a module that every rank has whole and uses for its own tokens alone."""
    enter: Callable[[Tensor], Tensor] = lambda x: x
    """Sums the gradients of what every rank has whole, and goes on to use for its own tokens."""
    leave: Callable[[Tensor], Tensor] = lambda x: x
    """Puts the ranks' tokens together; what follows is computed whole by every rank."""
    place: Callable[[Place], Place] = lambda place: place
    """A rank's slice of a sequence between the matrices, given that of its context parallel rank."""
    exchange: Exchange = Exchange()
    """How context parallel ranks attend."""
    config: Any = None
    """megatron-core's config, None on the torch path."""
    group: Any = None
    """The tensor parallel ranks, None on the torch path."""


class GeluMlp(nn.Module):
    """Two linear layers with a GELU between them, by its tanh approximation or exactly."""

    def __init__(self, layers: Layers, width: int, inner: int, out: int, exact: bool = False) -> None:
        super().__init__()
        self.up = layers.column(width, inner)
        self.down = layers.row(inner, out)
        self.approximate = "none" if exact else "tanh"

    def forward(self, x_TW: Tensor) -> Tensor:
        """Returns [T, out]."""
        return self.down(F.gelu(self.up(x_TW), approximate=self.approximate))


Stream = tuple[Tensor | None, Tensor, Tensor]
"""Query, key and value [T, N, D] of some tokens; without a query they are attended to, and attend to nothing."""


class Attention(nn.Module):
    """Attention of the tokens of one or more streams to all tokens of their sample; it has no weights."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange

    def forward(
        self, streams: Sequence[Stream], lengths: Sequence[tuple[int, ...]], place: Place
    ) -> tuple[Tensor, ...]:
        """Returns what the queries of each stream find [T, N * D]; `lengths` are those of each stream's samples."""
        asking = [(q, own) for (q, _, _), own in zip(streams, lengths, strict=True) if q is not None]
        asked = [self.exchange.held(own, place) for _, own in asking]
        q = interleave([self.exchange.queries(one) for one, _ in asking], asked)
        seen = ([one[1] for one in streams], [one[2] for one in streams])
        k, v = (interleave([self.exchange.keys(each) for each in kind], lengths) for kind in seen)
        out = attend(q, k, v, _sums(asked), _sums(lengths)).unflatten(1, (q.shape[1], -1))
        return tuple(self.exchange.back(part).flatten(1) for part in separate(out, asked))


def _sums(lengths: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*lengths, strict=True)))


class LatentModule(nn.Module):
    """A model of latents."""

    model_type = "latents"
    """megatron-core asks what kind a model is; it has no name for this one."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers, self.config = layers, layers.config

    def own(self, lengths: tuple[int, ...], place: Place) -> tuple[int, ...]:
        """Returns how many tokens of each part of a sequence a rank has between the matrices."""
        return held(lengths, self.layers.place(place))

    def slice(self, x: Tensor, place: Place = (0, 1)) -> Tensor:
        """Returns the tokens that a rank has between the matrices, of all that context parallel ranks' slices have."""
        return slice_of(x, self.layers.place(place))

    def set_input_tensor(self, states: Any) -> None:
        """Is told that no pipeline stage comes before."""

    def sharded_state_dict(self, *, metadata: dict[str, Any]) -> dict[str, Any]:
        """Returns the place of every weight, as the layers have marked it."""
        from lf.models.diffusion.megatron import placed

        return placed(self, metadata["dp_cp_group"])


TORCH = Layers(norm=Norm, head_norm=Norm)
"""What the torch path builds from."""
