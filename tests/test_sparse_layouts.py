"""Experts, latent attention and further heads in every layout give the numbers of one process."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import lf
from lf.models import spec
from lf.parallel.config import resolve
from lf.train.comm import distributed
from tests.cases import dealt, gradients, megatron, near_float32, off, ragged, run_of, trained
from tests.moe_cases import LAYOUTS, MODELS, WIDE, P, fits
from tests.workers import Workers

GATE = 5e-6
"""Largest difference over largest reference, in fp32."""

PAIRS = [
    ("one micro-batch", "all"),
    ("one, recompute", "all"),
    ("dp2", "shared"),
    ("ep2", "all"),
    ("ep2, two rows", "allgather"),
    ("ep2, recompute", "softmax"),
    ("tp2", "max"),
    ("tp2 etp2", "shared"),
    ("tp2 ep2", "softmax"),
    ("selective", "softmax"),
    ("selective, latent", "all"),
    ("selective moe", "softmax"),
    ("pp2", "tied heads"),
    ("pp2 vpp2", "all"),
    ("cp2", "heads"),
    ("cp2 ep2", "all"),
    ("cp2 ulysses", "latent"),
    ("tp2 ep2 etp2", "shared"),
    ("pp2 tp2 ep2", "all"),
    ("pp2 cp2 ep2", "heads and experts"),
]
EVERY = [(layout, model) for layout in {**LAYOUTS, **WIDE} for model in MODELS if fits(model, layout)]


def one_step(
    model: str, parallel: lf.MegatronParallel, experts: dict[str, Any] | None = None, params: str = "float32"
) -> Any:
    cfg = MODELS[model]
    if experts:
        assert cfg.experts is not None
        cfg = attrs.evolve(cfg, experts=attrs.evolve(cfg.experts, **experts))
    precision = lf.Precision(params=params)
    engine, ctx = megatron(run_of(cfg, optim=lf.AdamW(clip=0.0), parallel=parallel, precision=precision))
    return gradients(engine, ctx, dealt(ragged(cfg, 8, 24, seed=3), parallel.micro_batch, ctx.layout))


def three_steps(model: str, parallel: lf.MegatronParallel, optim: lf.OptimConfig) -> Any:
    engine, ctx = megatron(run_of(MODELS[model], optim=optim, parallel=parallel))
    return trained(engine, dealt(ragged(MODELS[model], 8, 24, seed=3), parallel.micro_batch, ctx.layout), 3)


@pytest.fixture(scope="module")
def reference(workers: Workers) -> Callable[..., Any]:
    made: dict[str, Any] = {}

    def get(*args: Any) -> Any:
        if repr(args) not in made:
            (made[repr(args)],) = workers.run(1, *args)
        return made[repr(args)]

    return get


def assert_equal(found: list[Any], reference: Any) -> None:
    grads, norm, loss, terms = reference
    for grads_, norm_, loss_, terms_ in found:
        assert loss_ == pytest.approx(loss, rel=GATE)
        assert norm_ == pytest.approx(norm, rel=GATE)
        assert terms_ == pytest.approx(terms, rel=GATE)
        assert grads_.keys() == grads.keys()
        for name, grad in grads_.items():
            assert off(grad, grads[name]) <= GATE, name


@pytest.mark.parametrize(
    ("layout", "model"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.full) for pair in EVERY if pair not in PAIRS)],
)
def test_gradients_do_not_depend_on_the_layout(
    workers: Workers, reference: Callable[..., Any], layout: str, model: str
) -> None:
    world, parallel = {**LAYOUTS, **WIDE}[layout]
    assert_equal(workers.run(world, one_step, model, parallel), reference(one_step, model, P()))


def accepted(world: int) -> list[lf.MegatronParallel]:
    """Returns every layout of a world of ranks that lf accepts for the model with everything."""
    found = []
    for tp, pp, cp, ep, etp in itertools.product((1, 2, 4), repeat=5):
        parallel = P(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
        try:
            spec.check_layout(MODELS["all"], resolve(parallel, world), 24)
        except ValueError:
            continue
        found.append(parallel)
    return found


@pytest.mark.full
@pytest.mark.parametrize("parallel", accepted(4), ids=lambda p: f"tp{p.tp} pp{p.pp} cp{p.cp} ep{p.ep} etp{p.etp}")
def test_whatever_is_accepted_runs_and_is_right(
    workers: Workers, reference: Callable[..., Any], parallel: lf.MegatronParallel
) -> None:
    assert_equal(workers.run(4, one_step, "all", parallel), reference(one_step, "all", P()))


OPTIMISERS = {"sgd": lf.Sgd(lr=0.1, momentum=0.9), "adamw": lf.AdamW(lr=1e-3, eps=1e-3)}
STEPPED = [("sgd", "tp2 ep2", "all"), ("adamw", "pp2 cp2 ep2", "all"), ("adamw", "pp2 vpp2", "tied heads")]


@pytest.mark.parametrize(
    ("optim", "layout", "model"),
    [
        *STEPPED,
        *(
            pytest.param(optim, layout, "all", marks=pytest.mark.full)
            for optim in OPTIMISERS
            for layout in {**LAYOUTS, **WIDE}
            if fits("all", layout) and (optim, layout, "all") not in STEPPED
        ),
    ],
)
def test_weights_and_biases_after_three_steps_do_not_depend_on_the_layout(
    workers: Workers, reference: Callable[..., Any], optim: str, layout: str, model: str
) -> None:
    losses, expected = reference(three_steps, model, P(), OPTIMISERS[optim])
    assert losses[2] < losses[0]
    biases = [value for name, value in expected.items() if name.endswith("expert_bias")]
    assert all(bias.any() for bias in biases)
    assert bool(biases) == (model == "all")
    world, parallel = {**LAYOUTS, **WIDE}[layout]
    found = workers.run(world, three_steps, model, parallel, OPTIMISERS[optim])
    assert all(losses_ == pytest.approx(losses, rel=GATE) for losses_, _ in found)
    weights = found[0][1]
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert off(weight, expected[name]) <= GATE, name


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({"balance": "switch"}, (2, P(ep=2, micro_batch=2))),
        ({"balance": "switch"}, (2, P(tp=2, ep=2, micro_batch=2))),
        ({"balance": "global"}, (2, P(tp=2, etp=2, micro_batch=2))),
        ({"balance": "global"}, (2, P(cp=2, micro_batch=2))),
        ({"capacity": 1.0}, (2, P(ep=2, micro_batch=2))),
        ({"capacity": 1.0, "pad": True}, (2, P(ep=2, micro_batch=2))),
        ({"capacity": 1.25}, (2, P(pp=2, micro_batch=2))),
    ],
    ids=str,
)
def test_what_depends_on_micro_batches_is_equal_on_equal_ones(
    workers: Workers, changes: dict[str, Any], layout: tuple[int, lf.MegatronParallel]
) -> None:
    (plain,) = workers.run(1, one_step, "softmax", P(micro_batch=2))
    (expected,) = workers.run(1, one_step, "softmax", P(micro_batch=2), changes)
    assert max(off(expected[0][name], plain[0][name]) for name in plain[0]) > 1e-3
    world, parallel = layout
    assert_equal(workers.run(world, one_step, "softmax", parallel, changes), expected)


def test_the_global_loss_is_equal_at_equal_data_parallel_degrees(workers: Workers) -> None:
    changes = {"balance": "global", "balance_coef": 0.1}
    spread = P(micro_batch=2)
    expected, _ = workers.run(2, one_step, "softmax", spread, changes)
    assert_equal(workers.run(2, one_step, "softmax", attrs.evolve(spread, ep=2), changes), expected)
    # What it depends on: the loads that are known when a micro-batch's turn comes.
    (alone,) = workers.run(1, one_step, "softmax", spread, changes)
    assert alone[3]["balance"] != pytest.approx(expected[3]["balance"], rel=1e-4)


def test_a_router_loss_is_logged_without_its_coefficient(workers: Workers) -> None:
    once, twice = (
        workers.run(1, one_step, "softmax", P(), {"balance_coef": coef, "z_coef": 0.0})[0] for coef in (0.02, 0.04)
    )
    assert set(once[3]) == {"lm", "balance"}
    assert once[3] == twice[3]
    layers = MODELS["softmax"].layers
    assert once[2] == pytest.approx(once[3]["lm"] + 0.02 * layers * once[3]["balance"])
    # Even loads give 1: what a router is drawn to.
    assert 1.0 <= once[3]["balance"] < 1.5


WALK = [
    (4, P(tp=2, pp=2, ep=2, micro_batch=4)),
    (1, P(micro_batch=4)),
    (2, P(micro_batch=4)),
    (2, P(ep=2, micro_batch=4)),
    (2, P(cp=2, ep=2, micro_batch=4)),
    (4, P(pp=4, micro_batch=4)),
]


def walk(folder: Path, parallel: lf.MegatronParallel, step: int) -> float:
    """Goes one step on from the checkpoint of the step before, and saves."""
    from lf.train import checkpoint

    cfg, comm = MODELS["all"], distributed()
    engine, ctx = megatron(run_of(cfg, optim=OPTIMISERS["adamw"], parallel=parallel))
    if step:
        reader = checkpoint.open_latest(folder, comm=comm).reader
        assert reader is not None
        engine.restore(engine.state, reader)
    batches = dealt(ragged(cfg, 8, 24, seed=step), parallel.micro_batch, ctx.layout)
    state, metrics = engine.step(attrs.evolve(engine.state, step=step), batches)
    checkpoint.save(folder, step + 1, engine.pieces(state), {}, comm=comm)
    return metrics.loss


def test_a_checkpoint_of_one_layout_goes_on_in_any_other(workers: Workers, tmp_path: Path) -> None:
    for step, (world, parallel) in enumerate(WALK):
        (expected,) = workers.run(1, walk, tmp_path / "straight", P(micro_batch=4), step)
        for loss in workers.run(world, walk, tmp_path / "moved", parallel, step):
            assert loss == pytest.approx(expected, rel=GATE)


BF16_PAIRS = [
    ("one micro-batch", "max"),
    ("tp2 ep2", "softmax"),
    ("ep2, two rows", "allgather"),
    ("tp2 etp2", "all"),
    ("cp2", "latent"),
    ("pp2", "heads"),
    ("pp2 vpp2", "all"),
    ("cp2 ep2", "all"),
]


def rows_fit(layout: str, model: str) -> bool:
    """Returns whether an expert tensor parallel rank has whole rows of 16 bytes in bfloat16."""
    experts = MODELS[model].experts
    return experts is None or experts.width % (8 * LAYOUTS[layout][1].etp) == 0


BF16_MORE = [pair for pair in EVERY if pair not in BF16_PAIRS and pair[0] in LAYOUTS and rows_fit(*pair)]


@pytest.mark.parametrize(
    ("layout", "model"), [*BF16_PAIRS, *(pytest.param(*pair, marks=pytest.mark.full) for pair in BF16_MORE)]
)
def test_bfloat16_gradients_stay_near_float32(
    workers: Workers, reference: Callable[..., Any], layout: str, model: str
) -> None:
    world, parallel = LAYOUTS[layout]
    for found in workers.run(world, one_step, model, parallel, None, "bfloat16"):
        near_float32(found, reference(one_step, model, P()), experts=MODELS[model].experts is not None)


def refused(model: str, parallel: lf.MegatronParallel) -> str:
    try:
        one_step(model, parallel, None, "bfloat16")
    except ValueError as error:
        return str(error)
    return ""


def test_experts_too_narrow_for_grouped_products_are_refused_when_built(workers: Workers) -> None:
    for text in workers.run(2, refused, "softmax", P(tp=2, etp=2)):
        assert "model.experts.width gives the experts of a rank rows of 12 numbers of 2 bytes" in text
        assert "make model.experts.width a multiple of 16, or lower parallel.etp" in text


def bfloat16_losses(parallel: lf.MegatronParallel) -> Any:
    run = run_of(MODELS["all"], precision=lf.Precision(params="bfloat16"), parallel=parallel)
    engine, ctx = megatron(run)
    return trained(engine, dealt(ragged(MODELS["all"], 8, 24, seed=3), parallel.micro_batch, ctx.layout), 3)


def test_bfloat16_stays_near_float32_and_keeps_biases_in_float32(workers: Workers) -> None:
    ((expected, _),) = workers.run(1, three_steps, "all", P(micro_batch=4), OPTIMISERS["adamw"])
    found = workers.run(2, bfloat16_losses, P(ep=2, micro_batch=4))
    assert all(losses == pytest.approx(expected, rel=5e-3) for losses, _ in found)
    dtypes = {name: weight.dtype for name, weight in found[0][1].items()}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("expert_bias")} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith("expert_bias")} == {torch.bfloat16}


def test_every_expert_setting_of_the_table_is_met() -> None:
    met = [cfg.experts for cfg in MODELS.values() if cfg.experts]
    for field in ("score", "renormalise", "group_rank", "bias", "shared_gate", "dispatch"):
        assert len({getattr(part, field) for part in met}) == 2, field
