"""Plans against what real small models hold and send on CPUs, counted tensor by tensor."""

from typing import Any

import attrs
import pytest

import lf
from lf.models.decoder import Attention
from lf.models.spec import ModelConfig
from lf.plan.estimate import Job, plan
from tests.cases import DENSE, run_of
from tests.counting import counted
from tests.workers import Workers

NEAR = 0.1
"""Largest difference of an estimate, relative to what was counted."""
LENGTH = 64

P = lf.MegatronParallel
DEEP = attrs.evolve(DENSE, layers=4)
MODELS: dict[str, ModelConfig] = {
    "untied": DEEP,
    "tied": attrs.evolve(DEEP, tied=True, vocab_multiple=64),
    "bias, window": attrs.evolve(
        DEEP, attention=Attention(heads=4, kv_heads=4, head_dim=12, qkv_bias=True, window=5, window_layers=(1,))
    ),
}
ALL = ("core_attn", "mlp", "layernorm")
CASES: dict[str, tuple[int, str, lf.MegatronParallel]] = {
    "one": (1, "untied", P(micro_batch=2)),
    "one, full": (1, "untied", P(recompute="full")),
    "one, core": (1, "untied", P(recompute="selective")),
    "one, all modules": (1, "untied", P(recompute="selective", recompute_modules=ALL)),
    "one, window": (1, "bias, window", P()),
    "dp2": (2, "tied", P()),
    "tp2": (2, "untied", P(tp=2)),
    "tp2 without sp": (2, "bias, window", P(tp=2, sp=False)),
    "tp2, full": (2, "tied", P(tp=2, recompute="full")),
    "tp2, mlp": (2, "untied", P(tp=2, recompute="selective", recompute_modules=("mlp",))),
    "pp2": (2, "tied", P(pp=2)),
    "pp2, uneven": (2, "untied", P(pp=2, stages=(1, 3), recompute="full")),
    "pp2 vpp2": (2, "untied", P(pp=2, vpp=2)),
    "cp2": (2, "untied", P(cp=2)),
    "cp2, core": (2, "bias, window", P(cp=2, micro_batch=2, recompute="selective")),
    "cp2 ulysses": (2, "tied", P(cp=2, cp_kind="ulysses")),
    "tp2 pp2": (4, "tied", P(tp=2, pp=2)),
    "pp4": (4, "untied", P(pp=4)),
}


def check(workers: Workers, world: int, model: ModelConfig, parallel: lf.MegatronParallel, **changes: Any) -> None:
    documents, precision = changes.get("documents", 1), changes.get("precision", "float32")
    micro, optim = changes.get("micro", 4), changes.get("optim", lf.AdamW())
    ranks = world // (parallel.tp * parallel.pp * parallel.cp)
    job = Job(
        model=model,
        parallel=parallel,
        world=world,
        batch=micro * parallel.micro_batch * ranks,
        length=LENGTH,
        itemsize=2 if precision == "bfloat16" else 4,
        state=8.0 if isinstance(optim, lf.AdamW) else 0.0,
        packed=documents > 1 or parallel.pp > 1 or parallel.cp > 1,
        cpu=True,
    )
    expected = plan(job)
    assert expected.micro_batches == micro
    run = run_of(model, parallel=parallel, precision=lf.Precision(params=precision), optim=optim)
    counts = workers.run(world, counted, run, LENGTH, documents, micro)
    for stage in expected.stages:
        memory = attrs.asdict(stage.memory[parallel.recompute])
        # The output that waits for its gradient is not saved for autograd.
        memory["activations"] -= sum(size for name, size in stage.pieces if name.startswith("hand-over"))
        mine = counts[stage.first : stage.first + stage.ranks]
        for kind in ("parameters", "gradients", "optimizer", "activations"):
            assert memory[kind] == pytest.approx(max(real[kind] for real in mine), rel=NEAR), (stage.first, kind)
        for real in mine:
            assert stage.elements == real["elements"]
            assert {(t.axis, t.op): (t.calls, t.size) for t in stage.traffic} == real["traffic"]


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_what_a_step_holds_and_sends(workers: Workers, case: str) -> None:
    world, model, parallel = CASES[case]
    check(workers, world, MODELS[model], parallel)


def test_a_plan_counts_packed_rows(workers: Workers) -> None:
    check(workers, 1, MODELS["untied"], P(micro_batch=2), documents=4)


@pytest.mark.parametrize("parallel", [P(), P(tp=2, recompute="selective"), P(pp=2)], ids=["dp2", "tp2, core", "pp2"])
def test_a_plan_counts_bfloat16_and_its_main_weights(workers: Workers, parallel: lf.MegatronParallel) -> None:
    check(workers, 2, MODELS["tied"], parallel, precision="bfloat16")


def test_a_plan_counts_an_optimiser_without_state(workers: Workers) -> None:
    check(workers, 2, MODELS["untied"], P(), optim=lf.Sgd(), micro=1)
