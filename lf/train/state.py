"""What a training run carries from step to step, and what a train path gives to the loop."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from lf.models.initialise import initial_tensor
from lf.models.spec import Batch, ModelConfig, Placed, type_name, weight_map
from lf.train.reader import Reader
from lf.train.shards import Piece


@attrs.frozen(kw_only=True, eq=False)
class TrainState:
    """Step number, model and optimiser; a step returns a new record whose tensors were updated in place."""

    step: int = 0
    """Optimiser steps done."""
    tokens: int = 0
    """Tokens trained on so far, without padding."""
    chunks: tuple[Any, ...]
    """The model of this rank: one module, or one for each virtual pipeline stage."""
    optimizer: Any
    """The optimiser of the train path."""
    average: Mapping[str, Tensor] = {}
    """What this rank keeps of the running average of the trained weights, by canonical name; empty without one."""


@attrs.frozen(kw_only=True)
class Metrics:
    """What one step measured, over all ranks."""

    loss: float
    """Weighted mean over the global batch, terms with their coefficients."""
    terms: Mapping[str, float]
    """Weighted mean of each loss term, without coefficients."""
    grad_norm: float
    """Norm of all gradients before clipping."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    """Tokens of the step, without padding."""
    media_flops: float
    """Operations of forward and backward until the step's images and videos are tokens."""


TrainStep = Callable[[TrainState, Iterable[Batch]], tuple[TrainState, Metrics]]
"""One optimiser step on this rank's micro-batches."""

Evaluate = Callable[[TrainState, Iterable[Sequence[Batch]]], dict[str, float]]
"""Returns `loss` and each term, as weighted means over all the batches of all ranks."""


@attrs.frozen(kw_only=True, eq=False)
class Engine:
    """A train path as the loop sees it."""

    state: TrainState
    """The state before the first step."""
    step: TrainStep
    """Takes one step."""
    evaluate: Evaluate
    """Evaluates held-out batches."""
    pieces: Callable[[TrainState], Iterator[Piece]]
    """Gives what this rank must save."""
    restore: Callable[[TrainState, Reader], None]
    """Puts a checkpoint into the state, in place; CheckpointError, on every rank, unless the tensors are the same."""
    weights: Callable[[TrainState], Callable[[str], Tensor]]
    """Returns a function from canonical names to whole tensors; every rank calls it, rank 0 may use it."""
    ahead: Callable[[list[Batch]], list[Batch]] | None = None
    """Does for the micro-batches of a later step what no trained weight changes, in a thread beside the step that runs;
    a step does itself what was not done for it. None where that is nothing."""


@attrs.frozen(kw_only=True, eq=False)
class Published:
    """Weights that a run starts from."""

    check: Callable[[Mapping[str, tuple[int, ...]], bool], None]
    """Raises ValueError unless the weights and the model's global shapes, by canonical name, fit tensor by tensor.

    The second argument says whether values that are stored twice are read and compared too.
    """
    read: Callable[[Placed], Tensor]
    """Reads this rank's tensor, without padding, in the dtype in which it is stored."""
    differing: Callable[[Placed, Tensor, tuple[int, int]], list[str]]
    """Returns the copies of what `read` gave that are stored with other values, in share `[0]` of `[1]` of its rows."""


def check_names(cfg: ModelConfig, names: Collection[str]) -> None:
    """Raises ValueError unless a family's weight map makes the tensors of its model, no fewer and no more.

    `names` are the canonical names of all parameters and persistent buffers, over all ranks. An export would lose the
    one and miss the other.
    """
    made = weight_map(cfg).by_lf
    lost, missing = sorted(set(names) - made.keys()), sorted(made.keys() - set(names))
    if lost or missing:
        told = [f"no rule for {name}" for name in lost[:3]] + [f"a rule for {name}, not in it" for name in missing[:3]]
        raise ValueError(
            f"weight_map of {type_name(cfg)} does not fit its model ({len(lost) + len(missing)} tensors): it has "
            f"{', '.join(told)}; change its rules, or register a buffer that need not be saved with persistent=False"
        )


def initial_value(cfg: ModelConfig, seed: int, placed: Placed, local: Tensor, published: Published | None) -> Tensor:
    """Returns this rank's tensor before the first step: read where weights are published, else drawn; padding is 0."""
    if published is None:
        return initial_tensor(cfg, placed, local, seed)
    value = published.read(placed)
    if local.is_floating_point() and not value.is_floating_point():
        raise ValueError(f"{placed.name} is stored as {value.dtype}, but the model trains it as {local.dtype}")
    if value.shape == local.shape:
        return value
    padded = torch.zeros(local.shape, dtype=value.dtype)
    padded[tuple(slice(0, n) for n in value.shape)] = value
    return padded
