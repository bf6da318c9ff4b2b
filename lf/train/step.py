"""What both train paths do alike in a step: one loss, one scale over the global batch, a stop before bad updates.

Weights of the loss are counted over the global batch before the first forward, so each backward starts from
`coefficient * sum / weight`, and gradients only have to be added: micro-batches, padding and ranks leave them alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from lf.models.media import batch_flops
from lf.models.spec import Batch, Layout, ModelConfig, draw, loss_coefficients, loss_weights, slice_batch
from lf.train.config import Run
from lf.train.meter import finite
from lf.train.schedule import factor
from lf.train.state import Evaluate, Metrics, TrainState, TrainStep


class NonFiniteError(ArithmeticError):
    """A loss, gradient or weight that is not a number, found on every rank."""

    def __init__(self, text: str, line: Mapping[str, Any]) -> None:
        super().__init__(text)
        self.line = line
        """What `metrics.jsonl` says of it; empty where it was found after the step had its line."""


class NothingToScoreError(ValueError):
    """Held-out data without a position to score, found on every rank."""


@attrs.frozen(kw_only=True)
class Pass:
    """One pass over the micro-batches of a rank."""

    step: int
    """The step, from 1; 0 for an evaluation."""
    micro: tuple[Batch, ...]
    """This rank's micro-batches, on the host."""
    weights: Mapping[str, float]
    """Weight of each loss term over the global batch."""
    train: bool
    """Whether gradients are wanted."""


@attrs.frozen(kw_only=True, eq=False)
class Mechanics:
    """What a train path does in its own way."""

    layout: Layout
    """Degrees of parallelism, and this rank's place."""
    group: Any
    """Process group of the ranks that have different tokens."""
    run: Callable[[TrainState, Pass], list[dict[str, float]]]
    """Runs a pass and returns each micro-batch's sum of each loss term; gradients are then in the model, summed."""
    norm: Callable[[TrainState], float]
    """Returns the norm of all gradients."""
    update: Callable[[TrainState, float, float], None]
    """Multiplies the gradients by the third argument and steps with the second as learning rate."""


def train_step(run: Run, cfg: ModelConfig, mechanics: Mechanics) -> TrainStep:
    """Returns the step of a run on this rank. It changes model and optimiser in place and returns a new state."""
    optim = run.optim

    def step(state: TrainState, batches: Iterable[Batch]) -> tuple[TrainState, Metrics]:
        number = state.step + 1
        drawn = [draw(cfg, batch, run.seed, number) for batch in batches]
        micro = tuple(slice_batch(cfg, batch, mechanics.layout) for batch in drawn)
        # Context parallel ranks, over which is summed too, have the same images.
        images = sum(batch_flops(cfg, batch) for batch in drawn) / mechanics.layout.cp
        weights, tokens, images = _weigh(cfg, micro, images, mechanics.group)
        done = mechanics.run(state, Pass(step=number, micro=micro, weights=weights, train=True))
        loss, terms = _means(cfg, _total(done, mechanics.group), weights)
        norm = mechanics.norm(state)
        _check_finite(number, loss, norm, micro, done)
        rate = optim.lr * factor(optim.schedule, number, run.steps)
        mechanics.update(state, rate, optim.clip / (norm + 1e-6) if 0 < optim.clip < norm else 1.0)
        metrics = Metrics(loss=loss, terms=terms, grad_norm=norm, lr=rate, tokens=tokens, media_flops=images)
        return attrs.evolve(state, step=number, tokens=state.tokens + tokens), metrics

    return step


def evaluation(cfg: ModelConfig, mechanics: Mechanics) -> Evaluate:
    """Returns the evaluation on this rank; raises NothingToScoreError where no position counts."""

    def evaluate(state: TrainState, steps: Iterable[Sequence[Batch]]) -> dict[str, float]:
        sums: dict[str, float] = {}
        totals: dict[str, float] = {}
        for chunk in state.chunks:
            chunk.eval()
        for batches in steps:
            # One draw for each held-out sample, whatever the run's seed and step: losses compare.
            drawn = (draw(cfg, batch, 0, 0) for batch in batches)
            micro = tuple(slice_batch(cfg, batch, mechanics.layout) for batch in drawn)
            own = _own_weights(cfg, micro)
            done = mechanics.run(state, Pass(step=0, micro=micro, weights=dict.fromkeys(own, 1.0), train=False))
            # Terms that a model has only while it trains are no part of an evaluation.
            for name, weight in ((name, weight) for name, weight in own.items() if name in done[0]):
                totals[name] = totals.get(name, 0.0) + weight
                sums[name] = sums.get(name, 0.0) + math.fsum(terms[name] for terms in done)
        for chunk in state.chunks:
            chunk.train()
        totals = _sum_over(totals, mechanics.group)
        if not any(totals.values()):
            raise NothingToScoreError(
                "the held-out data has no position to score: every label is ignored; give eval.data others"
            )
        loss, terms = _means(cfg, _sum_over(sums, mechanics.group), totals)
        return {"loss": loss, **terms}

    return evaluate


def weighted_loss(cfg: ModelConfig, terms: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Returns the sum over the terms of coefficient * sum / weight: what the backward of a micro-batch starts from."""
    coefficients = loss_coefficients(cfg)
    parts = [coefficients.get(name, 1.0) * terms[name] / weights[name] for name in sorted(terms) if weights[name]]
    return torch.stack(parts).sum() if parts else torch.stack(list(terms.values())).sum() * 0.0


def to_device(batch: Batch, device: str) -> Batch:
    """Returns the batch with its tensors on a device."""
    return {k: v.to(device, non_blocking=True) if isinstance(v, Tensor) else v for k, v in batch.items()}


def _sum_over(values: Mapping[str, float], group: Any) -> dict[str, float]:
    """Returns each value summed over the ranks of a group. All of them have the same names."""
    names = sorted(values)
    # On the host, where every backend has float64 and nothing waits for the device.
    row = torch.tensor([values[name] for name in names], dtype=torch.float64)
    dist.all_reduce(row, group=group)
    return dict(zip(names, row.tolist(), strict=True))


def _own_weights(cfg: ModelConfig, micro: Sequence[Batch]) -> dict[str, float]:
    found = [loss_weights(cfg, batch) for batch in micro]
    if any(weights.keys() != found[0].keys() for weights in found):
        raise ValueError(
            f"loss_weights of {type(cfg).__qualname__} names {[sorted(w) for w in found]} for the micro-batches of a "
            "step; every batch must name every term, with weight 0 where it has none"
        )
    return {name: math.fsum(float(weights[name]) for weights in found) for name in found[0]}


def _weigh(cfg: ModelConfig, micro: Sequence[Batch], images: float, group: Any) -> tuple[dict[str, float], int, float]:
    """Returns the weight of each loss term over the global batch, its tokens without padding, and the sum of `images`.

    All are summed at once.
    """
    # Summed among the loss terms, none of which begins with a space.
    counted = {" tokens": float(sum(batch["count"] for batch in micro)), " images": images}
    totals = _sum_over({**_own_weights(cfg, micro), **counted}, group)
    tokens, images = round(totals.pop(" tokens")), totals.pop(" images")
    if not any(totals.values()):
        ids = [i for batch in micro for i in batch["ids"]]
        raise ValueError(
            f"the global batch has no position to train: every label of {ids} is ignored; "
            "use longer rows, or data whose labels are not all masked"
        )
    return totals, tokens, images


def _total(done: Sequence[Mapping[str, float]], group: Any) -> dict[str, float]:
    return _sum_over({name: math.fsum(terms[name] for terms in done) for name in done[0]}, group)


def _means(cfg: ModelConfig, sums: Mapping[str, float], weights: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    coefficients = loss_coefficients(cfg)
    terms = {name: sums[name] / weights[name] for name in sorted(sums) if weights[name]}
    return sum(coefficients.get(name, 1.0) * value for name, value in terms.items()), terms


def _check_finite(
    step: int, loss: float, norm: float, micro: Sequence[Batch], done: Sequence[Mapping[str, float]]
) -> None:
    """Raises NonFiniteError on every rank when the loss or the gradient norm is not finite, naming the samples.

    Loss and norm are those of all ranks, so all of them raise at the same step, before anything has changed.
    """
    if math.isfinite(loss) and math.isfinite(norm):
        return
    bad = [
        batch["ids"]
        for batch, terms in zip(micro, done, strict=True)
        if math.isfinite(loss) or not all(map(math.isfinite, terms.values()))
    ]
    found: list[list[tuple[str, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, bad)
    named = "; ".join(f"rank {rank}: {[i for ids in rows for i in ids]}" for rank, rows in enumerate(found) if rows)
    raise NonFiniteError(
        f"step {step}: loss {loss}, gradient norm {norm}. The step was not taken and the weights are those of step "
        f"{step - 1}. Samples: {named}. Look at these samples, or lower optim.lr",
        {"step": step, "loss": finite(loss), "grad_norm": finite(norm)},
    )
