"""Vision-language models: they equal one process in every layout, and refuse what does not fit."""

from typing import Any

import pytest

import lf
from lf.models.spec import collate
from tests.cases import gradients, megatron, off, run_of
from tests.vlm_cases import MODELS, rows_of
from tests.workers import Workers

GATE = 5e-6
"""Largest difference over largest reference, in fp32."""

P = lf.MegatronParallel
LAYOUTS: dict[str, tuple[int, lf.MegatronParallel]] = {
    "one, two rows": (1, P(micro_batch=2)),
    "one, recompute": (1, P(recompute="full")),
    "dp2": (2, P()),
    "tp2": (2, P(tp=2)),
    "tp2 without sp": (2, P(tp=2, sp=False, micro_batch=2)),
    "pp2": (2, P(pp=2)),
    "pp2 vpp2": (2, P(pp=2, vpp=2, stages=(2, 1, 1, 1))),
    "cp2": (2, P(cp=2)),
    "cp2 ulysses": (2, P(cp=2, cp_kind="ulysses", micro_batch=2)),
    "tp2 pp2": (4, P(tp=2, pp=2, recompute="full")),
    "tp2 cp2": (4, P(tp=2, cp=2)),
    "pp2 dp2": (4, P(pp=2)),
    "ep2": (2, P(ep=2)),
}
PAIRS = [
    *((layout, "levels") for layout in LAYOUTS if not layout.startswith("ep")),
    *((layout, "windows") for layout in ("dp2", "tp2", "pp2 vpp2", "cp2")),
    *((layout, "experts") for layout in ("tp2", "ep2", "cp2")),
]


def one_step(model: str, parallel: lf.MegatronParallel) -> Any:
    cfg = MODELS[model]
    engine, ctx = megatron(run_of(cfg, optim=lf.AdamW(clip=0.0), parallel=parallel))
    rows, size = rows_of(cfg, 8, 48, seed=3), parallel.micro_batch
    micro = [collate(cfg, rows[i : i + size], rows[0]) for i in range(0, len(rows), size)]
    return gradients(engine, ctx, micro[ctx.layout.dp_rank :: ctx.layout.dp])


@pytest.fixture(scope="module")
def reference(workers: Workers) -> Any:
    made: dict[str, Any] = {}

    def get(model: str) -> Any:
        if model not in made:
            (made[model],) = workers.run(1, one_step, model, P())
        return made[model]

    return get


@pytest.mark.parametrize(("layout", "model"), PAIRS)
def test_gradients_do_not_depend_on_the_layout(workers: Workers, reference: Any, layout: str, model: str) -> None:
    world, parallel = LAYOUTS[layout]
    grads, norm, loss, _ = reference(model)
    for grads_, norm_, loss_, _ in workers.run(world, one_step, model, parallel):
        assert abs(loss_ - loss) <= GATE * loss
        assert abs(norm_ - norm) <= GATE * norm
        assert grads_.keys() == grads.keys()
        for name, grad in grads_.items():
            assert off(grad, grads[name]) <= GATE, name
