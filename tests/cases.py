"""Small models and runs that several test files share."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
import torch.distributed as dist

import lf
from lf.devices.cpu import cpu
from lf.models import spec
from lf.models.decoder import Attention, DecoderConfig, Mlp
from lf.models.layers.rope import Rope
from lf.models.llm.qwen import Qwen3
from lf.models.spec import Batch, Ctx, Layout, text_batch
from lf.parallel.config import megatron_part, resolve
from lf.train.state import Engine, Published

DENSE = Qwen3(
    vocab=131,
    hidden=48,
    layers=2,
    attention=Attention(heads=4, kv_heads=2, head_dim=16, qk_norm=True),
    mlp=Mlp(width=96),
    rope=Rope(theta=1e4),
)
"""A dense decoder with grouped heads, query and key norms and an odd vocabulary."""


class Alone:
    """A tensor parallel group of one rank, where torch.distributed is not up."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


ALONE = Alone()


def run_of(model: spec.ModelConfig, **changes: Any) -> lf.Run:
    """Returns a run of a model whose data is never opened."""
    base = lf.Run(model=model, data=lf.TextData(paths=("unused",)), optim=lf.AdamW(lr=1e-3, eps=1e-3), steps=10)
    return attrs.evolve(base, **changes)


def megatron(run: lf.Run, published: Published | None = None) -> tuple[Engine, Ctx]:
    """Returns the Megatron engine of a run on the CPU, for the world that is up, and its context."""
    from lf.parallel.megatron import make_context
    from lf.train.megatron_step import megatron_engine

    parallel = megatron_part(run.parallel)
    assert parallel is not None
    ctx = make_context(
        parallel, resolve(run.parallel, dist.get_world_size()), cpu, getattr(torch, run.precision.params)
    )
    assert run.model is not None
    return megatron_engine(run, run.model, ctx, published), ctx


def ragged(cfg: DecoderConfig, count: int, length: int, seed: int) -> list[dict[str, Any]]:
    """Returns rows of text with several documents each, masked labels and one padded end."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        cuts = sorted(rng.choice(np.arange(2, length - 2), size=int(rng.integers(0, 4)), replace=False).tolist())
        lengths = tuple(int(n) for n in np.diff([0, *cuts, length]))
        tokens = rng.integers(0, cfg.vocab, length + 1)
        labels = tokens[1:].copy()
        labels[np.cumsum(lengths) - 1] = spec.IGNORE
        labels[rng.random(length) < 0.1 * i] = spec.IGNORE
        padding = lengths[-1] if i == count - 1 else 0
        if padding:
            labels[-padding:] = spec.IGNORE
        row = {"tokens": tokens[:-1], "labels": labels, "lengths": lengths, "real": length - padding, "id": f"row{i}"}
        rows.append(row)
    return rows


def dealt(rows: Sequence[dict[str, Any]], micro_batch: int, layout: Layout) -> list[Batch]:
    """Returns the micro-batches of one rank: they are dealt to the data parallel ranks in turn."""
    micro = [text_batch(rows[i : i + micro_batch]) for i in range(0, len(rows), micro_batch)]
    return micro[layout.dp_rank :: layout.dp]


def gradients(
    engine: Engine, ctx: Ctx, batches: Sequence[Batch]
) -> tuple[dict[str, torch.Tensor], float, float, Mapping[str, float]]:
    """Returns every gradient of one step by canonical name, its norm, the loss and its terms, without the update.

    Ranks that hold the same numbers are compared on the way.
    """
    from lf.parallel.megatron import owned_range, placements
    from lf.train.megatron_step import _cut

    optimizer = engine.state.optimizer
    optimizer.step_with_ready_grads = lambda: True
    _, metrics = engine.step(engine.state, batches)
    del optimizer.step_with_ready_grads
    held = []
    for param, placed in (pair for chunk in engine.state.chunks for pair in placements(chunk.module, ctx)):
        if (owned := owned_range(optimizer, param)) is not None:
            held += _cut("grad", placed, owned[0], owned[1], owned[2].grad)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    whole: dict[str, torch.Tensor] = {}
    for piece in (piece for rank in everyone for piece in rank):
        name = piece.name.removeprefix("grad/")
        grad = whole.setdefault(name, torch.full(piece.shape, torch.nan))
        box = grad[tuple(slice(a, a + n) for a, n in zip(piece.at, piece.size, strict=True))]
        flat = box.clone().view(-1)
        before = flat[piece.start : piece.stop]
        twice = ~before.isnan()
        assert torch.allclose(before[twice], piece.data[twice], rtol=1e-4, atol=1e-7), name
        flat[piece.start : piece.stop] = piece.data
        box.copy_(flat.view_as(box))
    assert not any(grad.isnan().any() for grad in whole.values())
    return whole, metrics.grad_norm, metrics.loss, metrics.terms


BF16_LOSS, BF16_NORM, BF16_GRADS, BF16_GRAD = 2e-4, 3e-3, 2e-2, 3e-2
"""Gates of bfloat16 beside one process in float32: of the loss of a step, of the norm of its gradients, of the norm of
all differences between gradients, each over the reference, and of `off` for each gradient. The last does not hold where
experts are chosen: a token at the edge of a choice goes to others."""


def near_float32(found: Any, reference: Any, experts: bool) -> None:
    """Asserts that what `gradients` gives in bfloat16 is within the gates of what it gives in float32."""
    (grads_, norm_, loss_, _), (grads, norm, loss, _) = found, reference
    assert abs(loss_ - loss) <= BF16_LOSS * loss
    assert abs(norm_ - norm) <= BF16_NORM * norm
    assert grads_.keys() == grads.keys()
    apart = sum(float((grads_[name] - grad).square().sum()) for name, grad in grads.items())
    assert apart**0.5 <= BF16_GRADS * norm
    if not experts:
        for name, grad in grads.items():
            assert off(grads_[name], grad) <= BF16_GRAD, name


def trained(engine: Engine, batches: Sequence[Batch], steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses of some steps on the same micro-batches and, on rank 0, the weights after them by name."""
    state, losses = engine.state, []
    for _ in range(steps):
        state, metrics = engine.step(state, batches)
        losses.append(metrics.loss)
    names = {piece.name.removeprefix("weight/") for piece in engine.pieces(state) if piece.name.startswith("weight/")}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, names)
    weights = engine.weights(state)
    return losses, {name: weights(name).clone() for name in sorted(set().union(*everyone))}


def off(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns the largest difference over the largest reference; absolute where the reference is below 1e-7."""
    scale = float(reference.abs().max())
    return float((value - reference).abs().max()) / (scale if scale >= 1e-7 else 1.0)
