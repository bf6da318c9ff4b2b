"""Every split of the same rows over ranks and micro-batches gives the loss, gradients and weights of one process."""

from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

import lf
from lf.models.decoder import Attention
from tests.cases import DENSE, dealt, gradients, megatron, off, ragged, run_of, trained
from tests.workers import Workers

GATE = 5e-6
"""Largest difference over largest reference, in fp32."""

MODELS = {
    "untied": DENSE,
    "tied": attrs.evolve(DENSE, tied=True),
    "padded vocabulary": attrs.evolve(DENSE, vocab_multiple=64),
    "bias, window": attrs.evolve(
        DENSE,
        attention=Attention(heads=4, kv_heads=4, head_dim=12, qkv_bias=True, window=5, window_layers=(1,)),
    ),
}


def one_step(model: str, micro_batch: int, **changes: Any) -> Any:
    run = run_of(MODELS[model], optim=lf.AdamW(clip=0.0), **changes)
    engine, ctx = megatron(run)
    rows = ragged(DENSE, 8, 24, seed=3)
    return gradients(engine, ctx, dealt(rows, micro_batch, dist.get_rank(), dist.get_world_size()))


def three_steps(model: str, micro_batch: int, optim: lf.OptimConfig) -> Any:
    engine, _ = megatron(run_of(MODELS[model], optim=optim))
    rows = ragged(DENSE, 8, 24, seed=3)
    return trained(engine, dealt(rows, micro_batch, dist.get_rank(), dist.get_world_size()), 3)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_do_not_depend_on_the_split(workers: Workers, model: str) -> None:
    (reference, norm, loss), *_ = workers.run(1, one_step, model, 8)
    for world, micro_batch in ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4)):
        for grads, norm_, loss_ in workers.run(world, one_step, model, micro_batch):
            assert abs(loss_ - loss) <= GATE * loss
            assert abs(norm_ - norm) <= GATE * norm
            assert grads.keys() == reference.keys()
            for name, grad in grads.items():
                assert off(grad, reference[name]) <= GATE, (world, micro_batch, name)


@pytest.mark.parametrize("optim", [lf.Sgd(lr=0.1, momentum=0.9), lf.AdamW(lr=1e-3, eps=1e-3)], ids=["sgd", "adamw"])
def test_weights_after_three_steps_do_not_depend_on_the_split(workers: Workers, optim: lf.OptimConfig) -> None:
    (losses, reference), *_ = workers.run(1, three_steps, "tied", 4, optim)
    assert losses[2] < losses[0]
    for world, micro_batch in ((1, 1), (2, 2)):
        for losses_, weights in workers.run(world, three_steps, "tied", micro_batch, optim):
            assert losses_ == pytest.approx(losses, rel=GATE)
            for name, weight in weights.items():
                assert off(weight, reference[name]) <= GATE, (world, micro_batch, name)


def test_overlapped_communication_changes_no_number(workers: Workers) -> None:
    plain = workers.run(2, one_step, "tied", 2)
    apart = workers.run(2, overlapped, lf.MegatronParallel(overlap=False))
    for (a, *rest), (b, *rest_) in zip(plain, apart, strict=True):
        assert rest == rest_
        assert all(torch.equal(a[name], b[name]) for name in a)


def overlapped(parallel: lf.MegatronParallel) -> Any:
    return one_step("tied", 2, parallel=parallel)


def test_recompute_changes_no_number(workers: Workers) -> None:
    (kept, *rest), *_ = workers.run(1, one_step, "tied", 2)
    (again, *rest_), *_ = workers.run(1, overlapped, lf.MegatronParallel(recompute="full"))
    assert rest_ == rest
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def bfloat16_losses() -> Any:
    run = run_of(DENSE, precision=lf.Precision(params="bfloat16"))
    engine, _ = megatron(run)
    rows = ragged(DENSE, 8, 24, seed=3)
    return trained(engine, dealt(rows, 2, dist.get_rank(), dist.get_world_size()), 3)


def test_bfloat16_stays_near_float32(workers: Workers) -> None:
    (reference, _), *_ = workers.run(1, three_steps, "untied", 2, lf.AdamW(lr=1e-3, eps=1e-3))
    for world in (1, 2):
        for losses, weights in workers.run(world, bfloat16_losses):
            assert all(weight.dtype == torch.bfloat16 for weight in weights.values())
            assert losses == pytest.approx(reference, rel=2e-3)
