"""Every layout and every split of the same rows gives the loss, gradients and weights of one process."""

from typing import Any

import attrs
import pytest
import torch

import lf
from lf.models.decoder import Attention
from tests.cases import DENSE, dealt, gradients, megatron, near_float32, off, ragged, run_of, trained
from tests.workers import Workers

GATE = 5e-6
"""Largest difference over largest reference, in fp32."""

MODELS = {
    "untied": attrs.evolve(DENSE, layers=4),
    "tied": attrs.evolve(DENSE, layers=4, tied=True),
    "padded vocabulary": attrs.evolve(DENSE, layers=4, vocab_multiple=64, tied=True),
    "bias, window": attrs.evolve(
        DENSE,
        layers=4,
        attention=Attention(heads=4, kv_heads=4, head_dim=12, qkv_bias=True, window=5, window_layers=(1,)),
    ),
}

FP32, BF16 = lf.Precision(), lf.Precision(params="bfloat16")
P = lf.MegatronParallel
LAYOUTS: dict[str, tuple[int, lf.MegatronParallel]] = {
    "one micro-batch": (1, P(micro_batch=8)),
    "dp2": (2, P(micro_batch=2)),
    "dp2, four rows": (2, P(micro_batch=4)),
    "tp2": (2, P(tp=2)),
    "tp2 without sp": (2, P(tp=2, sp=False, micro_batch=2)),
    "tp2, recompute": (2, P(tp=2, recompute="full")),
    "tp2, selective": (2, P(tp=2, recompute="selective", recompute_modules=("core_attn", "mlp", "layernorm"))),
    "pp2": (2, P(pp=2)),
    "pp2, uneven": (2, P(pp=2, stages=(1, 3), micro_batch=2)),
    "pp2 vpp2": (2, P(pp=2, vpp=2)),
    "cp2": (2, P(cp=2)),
    "cp2, two rows": (2, P(cp=2, micro_batch=2)),
    "cp2 ulysses": (2, P(cp=2, cp_kind="ulysses")),
    "pp4": (4, P(pp=4)),
    "tp2 pp2": (4, P(tp=2, pp=2)),
    "tp2 cp2": (4, P(tp=2, cp=2)),
    "pp2 cp2": (4, P(pp=2, cp=2)),
    "tp2 dp2": (4, P(tp=2)),
    "pp2 vpp2 tp2": (4, P(pp=2, vpp=2, tp=2)),
    "cp2 dp2": (4, P(cp=2)),
}
WIDE: dict[str, tuple[int, lf.MegatronParallel]] = {
    "tp2 pp2 cp2": (8, P(tp=2, pp=2, cp=2)),
    "tp2 pp2 dp2": (8, P(tp=2, pp=2)),
    "tp4 dp2": (8, P(tp=4)),
    "tp2 cp2 dp2": (8, P(tp=2, cp=2)),
    "pp4 cp2": (8, P(pp=4, cp=2)),
    "pp2 vpp2 cp2 dp2": (8, P(pp=2, vpp=2, cp=2)),
}
"""Layouts of eight processes, in the full product only."""

_PAIRS = [(layout, list(MODELS)[i % len(MODELS)]) for i, layout in enumerate(LAYOUTS)]
_FULL = [(layout, model) for layout in {**LAYOUTS, **WIDE} for model in MODELS if (layout, model) not in _PAIRS]


def one_step(model: str, parallel: lf.MegatronParallel, precision: lf.Precision = FP32) -> Any:
    engine, ctx = megatron(run_of(MODELS[model], optim=lf.AdamW(clip=0.0), parallel=parallel, precision=precision))
    rows = ragged(DENSE, 8, 24, seed=3)
    return gradients(engine, ctx, dealt(rows, parallel.micro_batch, ctx.layout))


def three_steps(model: str, parallel: lf.MegatronParallel, optim: lf.OptimConfig) -> Any:
    engine, ctx = megatron(run_of(MODELS[model], optim=optim, parallel=parallel))
    rows = ragged(DENSE, 8, 24, seed=3)
    return trained(engine, dealt(rows, parallel.micro_batch, ctx.layout), 3)


@pytest.fixture(scope="module")
def reference(workers: Workers) -> Any:
    made: dict[str, Any] = {}

    def get(model: str) -> Any:
        if model not in made:
            (made[model],) = workers.run(1, one_step, model, P())
        return made[model]

    return get


def _fits(model: str, parallel: lf.MegatronParallel) -> bool:
    attention = MODELS[model].attention
    assert isinstance(attention, Attention)
    return attention.kv_heads % parallel.tp == 0


@pytest.mark.parametrize(
    ("layout", "model"),
    [*_PAIRS, *(pytest.param(layout, model, marks=pytest.mark.full) for layout, model in _FULL)],
)
def test_gradients_do_not_depend_on_the_layout(workers: Workers, reference: Any, layout: str, model: str) -> None:
    world, parallel = {**LAYOUTS, **WIDE}[layout]
    if not _fits(model, parallel):
        parallel = attrs.evolve(parallel, tp=2)
    grads, norm, loss, _ = reference(model)
    for grads_, norm_, loss_, _ in workers.run(world, one_step, model, parallel):
        assert abs(loss_ - loss) <= GATE * loss
        assert abs(norm_ - norm) <= GATE * norm
        assert grads_.keys() == grads.keys()
        for name, grad in grads_.items():
            assert off(grad, grads[name]) <= GATE, name


@pytest.fixture(scope="module")
def stepped(workers: Workers) -> Any:
    made: dict[tuple[str, str], Any] = {}

    def get(model: str, optim: str) -> Any:
        if (model, optim) not in made:
            (made[model, optim],) = workers.run(1, three_steps, model, P(), OPTIMISERS[optim])
        return made[model, optim]

    return get


OPTIMISERS = {"sgd": lf.Sgd(lr=0.1, momentum=0.9), "adamw": lf.AdamW(lr=1e-3, eps=1e-3)}
_STEPPED = [("tied", layout) for layout in ("one micro-batch", "dp2", "tp2", "pp2 vpp2", "cp2", "tp2 pp2")]
_MORE = [(model, layout) for model in MODELS for layout in {**LAYOUTS, **WIDE} if (model, layout) not in _STEPPED]


@pytest.mark.parametrize("optim", OPTIMISERS)
@pytest.mark.parametrize(
    ("model", "layout"), [*_STEPPED, *(pytest.param(*pair, marks=pytest.mark.full) for pair in _MORE)]
)
def test_weights_after_three_steps_do_not_depend_on_the_layout(
    workers: Workers, stepped: Any, optim: str, model: str, layout: str
) -> None:
    losses, expected = stepped(model, optim)
    assert losses[2] < losses[0]
    world, parallel = {**LAYOUTS, **WIDE}[layout]
    if not _fits(model, parallel):
        parallel = attrs.evolve(parallel, tp=2)
    found = workers.run(world, three_steps, model, parallel, OPTIMISERS[optim])
    assert all(losses_ == pytest.approx(losses, rel=GATE) for losses_, _ in found)
    weights = found[0][1]
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert off(weight, expected[name]) <= GATE, name


def test_overlapped_communication_changes_no_number(workers: Workers) -> None:
    plain = workers.run(2, one_step, "tied", P(micro_batch=2))
    apart = workers.run(2, one_step, "tied", P(micro_batch=2, overlap=False))
    for (a, *rest), (b, *rest_) in zip(plain, apart, strict=True):
        assert rest == rest_
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_recompute_changes_no_number(workers: Workers) -> None:
    (kept, *rest), *_ = workers.run(1, one_step, "tied", P(micro_batch=2))
    (again, *rest_), *_ = workers.run(1, one_step, "tied", P(micro_batch=2, recompute="full"))
    assert rest_ == rest
    assert all(torch.equal(kept[name], again[name]) for name in kept)


_BF16 = [("untied", "tp2"), ("tied", "pp2"), ("bias, window", "cp2"), ("padded vocabulary", "dp2")]
_MORE_BF16 = [(model, layout) for model in MODELS for layout in LAYOUTS if (model, layout) not in _BF16]


@pytest.mark.parametrize(
    ("model", "layout"), [*_BF16, *(pytest.param(*pair, marks=pytest.mark.full) for pair in _MORE_BF16)]
)
def test_bfloat16_gradients_stay_near_float32(workers: Workers, reference: Any, model: str, layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    for found in workers.run(world, one_step, model, parallel, BF16):
        near_float32(found, reference(model), experts=False)


def bfloat16_losses(parallel: lf.MegatronParallel) -> Any:
    run = run_of(MODELS["untied"], precision=BF16, parallel=parallel)
    engine, ctx = megatron(run)
    rows = ragged(DENSE, 8, 24, seed=3)
    return trained(engine, dealt(rows, parallel.micro_batch, ctx.layout), 3)


@pytest.mark.parametrize("layout", ["one micro-batch", "dp2", "tp2", "pp2", "cp2"])
def test_bfloat16_stays_near_float32(workers: Workers, layout: str) -> None:
    (expected, _), *_ = workers.run(1, three_steps, "untied", P(), lf.AdamW(lr=1e-3, eps=1e-3))
    world, parallel = LAYOUTS[layout]
    found = workers.run(world, bfloat16_losses, parallel)
    assert all(losses == pytest.approx(expected, rel=2e-3) for losses, _ in found)
    assert all(weight.dtype == torch.bfloat16 for weight in found[0][1].values())
