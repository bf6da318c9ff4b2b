"""What a training run carries from step to step, and what a train path gives to the loop."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lf.models.initialise import initial_tensor
from lf.models.spec import Batch, ModelConfig, Placed, forward, loss_coefficients, loss_terms, loss_weights
from lf.train.reader import Reader
from lf.train.shards import Piece

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that hold different rows; in one process, the identity."""


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


TrainStep = Callable[[TrainState, Iterable[Batch]], tuple[TrainState, Metrics]]
"""One optimiser step on this rank's micro-batches."""


@attrs.frozen(kw_only=True, eq=False)
class Engine:
    """A train path as the loop sees it."""

    state: TrainState
    """The state before the first step."""
    step: TrainStep
    """Takes one step."""
    evaluate: Callable[[TrainState, Iterable[Sequence[Batch]]], dict[str, float]]
    """Returns `loss` and each term, as weighted means over all the batches of all ranks."""
    pieces: Callable[[TrainState], Iterator[Piece]]
    """Gives what this rank must save."""
    restore: Callable[[TrainState, Reader], None]
    """Puts a checkpoint's tensors into the state, in place."""
    weights: Callable[[TrainState], Callable[[str], Tensor]]
    """Returns a function from canonical names to whole tensors; every rank calls it, rank 0 may use it."""


@attrs.frozen(kw_only=True, eq=False)
class Published:
    """Weights that a run starts from."""

    check: Callable[[Mapping[str, tuple[int, ...]]], None]
    """Raises ValueError unless the weights and the model's global shapes, by canonical name, fit tensor by tensor."""
    read: Callable[[Placed], Tensor]
    """Reads this rank's tensor, without padding, in the dtype in which it is stored."""


class NonFiniteError(ArithmeticError):
    """A loss or gradient that is not a number, found before the update."""


def initial_value(cfg: ModelConfig, seed: int, placed: Placed, local: Tensor, published: Published | None) -> Tensor:
    """Returns this rank's tensor before the first step: read where weights are published, else drawn; padding is 0."""
    if published is None:
        return initial_tensor(cfg, placed, local, seed)
    value = published.read(placed)
    if value.shape == local.shape:
        return value
    padded = torch.zeros(local.shape, dtype=value.dtype)
    padded[tuple(slice(0, n) for n in value.shape)] = value
    return padded


def kinds_by_name(reader: Reader) -> dict[str, list[str]]:
    """Returns which tensors (`weight`, and what the optimiser keeps) a checkpoint has for each canonical name."""
    kinds: dict[str, list[str]] = {}
    for stored in reader.names:
        kind, _, name = stored.partition("/")
        kinds.setdefault(name, []).append(kind)
    return kinds


def total_weights(cfg: ModelConfig, batches: Sequence[Batch], reduce: Reduce, device: str) -> dict[str, float]:
    """Returns the weight of each loss term over the whole global batch; raises ValueError where nothing is trained."""
    sums: dict[str, Tensor] = {}
    for batch in batches:
        for name, weight in loss_weights(cfg, batch).items():
            sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64, device=device)) + weight
    names = sorted(sums)
    totals = reduce(torch.stack([sums[name] for name in names])).tolist()
    if not any(totals):
        ids = [i for batch in batches for i in batch["ids"]]
        raise ValueError(
            f"the global batch has no position to train: every label of {ids} is ignored; "
            "use longer rows, or data whose labels are not all masked"
        )
    return dict(zip(names, totals, strict=True))


def weighted_loss(cfg: ModelConfig, terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Returns the sum over the terms of coefficient * sum / weight: what the backward of a micro-batch starts from."""
    coefficients = loss_coefficients(cfg)
    parts = [coefficients.get(name, 1.0) * terms[name] / weights[name] for name in sorted(terms) if weights[name]]
    return torch.stack(parts).sum() if parts else sum(terms.values(), torch.zeros(())) * 0.0


def combine(
    cfg: ModelConfig, done: Sequence[Mapping[str, Tensor]], weights: Mapping[str, float], reduce: Reduce
) -> tuple[float, dict[str, float]]:
    """Returns the loss and its terms over the global batch from the sums of this rank's micro-batches."""
    names = sorted(weights)
    sums = reduce(torch.stack([torch.stack([terms[name].double() for terms in done]).sum() for name in names])).tolist()
    return _means(cfg, dict(zip(names, sums, strict=True)), weights)


def _means(cfg: ModelConfig, sums: Mapping[str, float], weights: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    coefficients = loss_coefficients(cfg)
    terms = {name: sums[name] / weights[name] for name in sorted(sums) if weights[name]}
    return sum(coefficients.get(name, 1.0) * value for name, value in terms.items()), terms


def check_finite(
    step: int, loss: float, norm: float, micro: Sequence[Batch], done: Sequence[Mapping[str, Tensor]]
) -> None:
    """Raises NonFiniteError on every rank when the loss or the gradient norm is not finite, naming the samples.

    Loss and norm are those of all ranks, so all of them raise at the same step, before anything has changed.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    bad = [
        batch["ids"]
        for batch, terms in zip(micro, done, strict=True)
        if math.isfinite(loss) or not all(bool(torch.isfinite(value)) for value in terms.values())
    ]
    found: list[list[tuple[str, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, bad)
    named = "; ".join(f"rank {rank}: {[i for ids in rows for i in ids]}" for rank, rows in enumerate(found) if rows)
    raise NonFiniteError(
        f"step {step}: loss {loss}, gradient norm {norm}. The step was not taken and the weights are those of step "
        f"{step - 1}. Samples: {named}. Look at these samples, or lower optim.lr"
    )


def to_device(batch: Batch, device: str) -> Batch:
    """Returns the batch with its tensors on a device."""
    return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}


def evaluate(
    cfg: ModelConfig, model: nn.Module, steps: Iterable[Sequence[Batch]], reduce: Reduce, device: str
) -> dict[str, float]:
    """Returns `loss` and each term over all the batches of all ranks, as weighted means, without gradients."""
    sums: dict[str, Tensor] = {}
    model.eval()
    with torch.no_grad():
        for batch in (to_device(batch, device) for batches in steps for batch in batches):
            terms = loss_terms(cfg, forward(cfg, model, batch), batch)
            for name, weight in loss_weights(cfg, batch).items():
                pair = torch.stack([terms[name].double(), weight.double()])
                sums[name] = sums.get(name, torch.zeros_like(pair)) + pair
    model.train()
    names = sorted(sums)
    pairs = reduce(torch.stack([sums[name] for name in names])).tolist()
    totals, weights = (dict(zip(names, column, strict=True)) for column in zip(*pairs, strict=True))
    loss, means = _means(cfg, totals, weights)
    return {"loss": loss, **means}
