"""Wan and Qwen-Image on the Megatron path: every layout gives the loss, gradients and weights of the torch path."""

import fnmatch
import signal
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import lf
from lf.devices.cpu import cpu
from lf.models import spec, weights
from lf.models.diffusion.family import TOKENS, filled
from lf.models.diffusion.latent import LatentModel, fake_rows
from lf.models.diffusion.packed import held
from lf.models.diffusion.qwen_image import qwen_image_tiny
from lf.models.diffusion.wan import wan_tiny
from lf.models.initialise import initial_tensor
from lf.models.spec import Ctx, Layout
from lf.train.run import check_run
from lf.train.start import load_model, open_start
from tests import latent_tools
from tests.cases import BF16_GRADS, gradients, megatron, off, run_of, trained
from tests.latent_tools import FakeLatents, batch_of, micro_batches, near, random_first, write_base
from tests.test_train import go, metrics
from tests.workers import Workers

GATE = 5e-6
"""Largest difference over largest reference, in fp32."""
GATE_BF16 = 3e-3
"""Of losses and norms in bf16."""

P = lf.MegatronParallel
WAN = attrs.evolve(wan_tiny, heads=4, flow=attrs.evolve(wan_tiny.flow, caption_dropout=0.3))
QWEN = attrs.evolve(qwen_image_tiny, heads=4)
MODELS: dict[str, LatentModel] = {
    "t2v, ti2v": random_first(WAN),
    "i2v": random_first(attrs.evolve(WAN, in_channels=9, image_dim=20, padding="masked")),
    "text to image": random_first(attrs.evolve(QWEN, edit=False, clean_references=False)),
    "edit": random_first(attrs.evolve(QWEN, clean_references=False)),
    "edit 2511": random_first(QWEN),
}
"""Rows differ in frames, rows, columns, texts and references, and those of the first in given frames."""
LAYOUTS: dict[str, tuple[int, lf.MegatronParallel]] = {
    "one, recompute": (1, P(recompute="full", micro_batch=8)),
    "one, selective": (1, P(recompute="selective", recompute_modules=("core_attn", "mlp"), micro_batch=4)),
    "dp2": (2, P(micro_batch=2)),
    "tp2": (2, P(tp=2, sp=False, micro_batch=2)),
    "tp2 sp": (2, P(tp=2, micro_batch=2)),
    "cp2": (2, P(cp=2, micro_batch=4)),
    "cp2 ulysses": (2, P(cp=2, cp_kind="ulysses", micro_batch=2)),
    "tp2 cp2": (4, P(tp=2, cp=2, sp=False, micro_batch=4)),
    "tp2 sp cp2": (4, P(tp=2, cp=2, micro_batch=4)),
    "tp2 sp cp2 ulysses, recompute": (4, P(tp=2, cp=2, cp_kind="ulysses", micro_batch=2, recompute="full")),
    "dp2 tp2 sp": (4, P(tp=2, micro_batch=2)),
    "dp2 cp2": (4, P(cp=2)),
}
WIDE: dict[str, tuple[int, lf.MegatronParallel]] = {
    "one": (1, P()),
    "tp4 sp": (4, P(tp=4)),
    "cp4": (4, P(cp=4, micro_batch=8)),
    "cp4 ulysses": (4, P(cp=4, cp_kind="ulysses")),
    "tp2 sp cp2 dp2": (8, P(tp=2, cp=2, micro_batch=2)),
    "tp2 sp cp2, selective": (4, P(tp=2, cp=2, recompute="selective", recompute_modules=("core_attn", "mlp"))),
}
"""In the full product only."""
EVERY = {**LAYOUTS, **WIDE}
PAIRS = [(layout, list(MODELS)[i % len(MODELS)]) for i, layout in enumerate(LAYOUTS)]
FULL = [(layout, model) for layout in EVERY for model in MODELS if (layout, model) not in PAIRS]


NARROW = [("tp2 sp", "i2v"), ("cp2", "edit")]


def run_in(model: str, parallel: lf.MegatronParallel, **changes: Any) -> lf.Run:
    return run_of(MODELS[model], parallel=parallel, **{"optim": lf.AdamW(clip=0.0), **changes})


def one_step(model: str, parallel: lf.MegatronParallel, **changes: Any) -> Any:
    engine, ctx = megatron(run_in(model, parallel, **changes))
    rows = fake_rows(MODELS[model].space, 8, 3)
    return gradients(engine, ctx, micro_batches(MODELS[model], rows, parallel.micro_batch, ctx.layout))


def bfloat16_step(model: str, parallel: lf.MegatronParallel) -> Any:
    return one_step(model, parallel, precision=lf.Precision(params="bfloat16"))


def three_steps(model: str, parallel: lf.MegatronParallel, optim: lf.OptimConfig) -> Any:
    engine, ctx = megatron(run_in(model, parallel, optim=optim))
    rows = fake_rows(MODELS[model].space, 8, 3)
    return trained(engine, micro_batches(MODELS[model], rows, parallel.micro_batch, ctx.layout), 3)


@pytest.fixture(scope="module")
def reference() -> Any:
    """Gives what the torch path's module makes of the rows, one by one, in this process and in float64."""
    made: dict[str, Any] = {}

    def get(model: str) -> Any:
        if model not in made:
            cfg, run = MODELS[model], run_in(model, P())
            module = spec.build_model(cfg, Ctx(device=cpu))
            with torch.no_grad():
                for name, param in module.named_parameters():
                    param.copy_(initial_tensor(cfg, weights.whole(name, tuple(param.shape)), param, run.seed))
            micro = micro_batches(cfg, fake_rows(cfg.space, 8, 3), 1, Layout())
            loss, grads = latent_tools.gradients(
                cfg, module.double(), [spec.draw(cfg, one, run.seed, 1) for one in micro]
            )
            norm = torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()
            made[model] = grads, float(norm), float(loss), {}
        return made[model]

    return get


@pytest.mark.parametrize(("layout", "model"), [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.full) for pair in FULL)])
def test_gradients_do_not_depend_on_path_and_layout(workers: Workers, reference: Any, layout: str, model: str) -> None:
    world, parallel = EVERY[layout]
    grads, norm, loss, _ = reference(model)
    for grads_, norm_, loss_, _ in workers.run(world, one_step, model, parallel):
        assert abs(loss_ - loss) <= GATE * loss
        assert abs(norm_ - norm) <= GATE * norm
        near(grads_, grads, GATE)


@pytest.mark.parametrize(
    ("layout", "model"),
    [*NARROW, *(pytest.param(*pair, marks=pytest.mark.full) for pair in [*PAIRS, *FULL] if pair not in NARROW)],
)
def test_bfloat16_gradients_stay_near_float32(workers: Workers, reference: Any, layout: str, model: str) -> None:
    world, parallel = EVERY[layout]
    grads, norm, loss, _ = reference(model)
    for grads_, norm_, loss_, _ in workers.run(world, bfloat16_step, model, parallel):
        assert abs(loss_ - loss) <= GATE_BF16 * loss
        assert abs(norm_ - norm) <= GATE_BF16 * norm
        apart = sum(float((grads_[name] - grad).square().sum()) for name, grad in grads.items())
        assert apart**0.5 <= BF16_GRADS * norm


FROZEN = ("blocks.*.q.weight", "blocks.0.image.mlp.up.*", "patch.*", "blocks.1.image.mod.weight")


def frozen_step(model: str, parallel: lf.MegatronParallel) -> Any:
    return one_step(model, parallel, optim=lf.AdamW(clip=0.0, freeze=FROZEN))


@pytest.mark.parametrize("layout", ["tp2 sp"])
def test_frozen_weights_leave_the_gradients_of_the_others(workers: Workers, reference: Any, layout: str) -> None:
    world, parallel = EVERY[layout]
    grads, *_ = reference("edit")
    left = {name for name in grads if not any(fnmatch.fnmatchcase(name, pattern) for pattern in FROZEN)}
    assert "blocks.0.image.q.bias" in left < grads.keys()
    for found, *_ in workers.run(world, frozen_step, "edit", parallel):
        near(found, {name: grads[name] for name in left}, GATE)


@pytest.fixture(scope="module")
def stepped(workers: Workers) -> Any:
    made: dict[tuple[str, str], Any] = {}

    def get(model: str, optim: str) -> Any:
        if (model, optim) not in made:
            (made[model, optim],) = workers.run(1, three_steps, model, P(), OPTIMISERS[optim])
        return made[model, optim]

    return get


OPTIMISERS = {"sgd": lf.Sgd(lr=0.01, momentum=0.9), "adamw": lf.AdamW(lr=1e-3, eps=1e-3)}
STEPPED = [("sgd", "tp2 sp cp2", "i2v"), ("adamw", "tp2 sp cp2", "edit 2511")]
MORE = [(optim, *pair) for optim in OPTIMISERS for pair in [*PAIRS, *FULL] if (optim, *pair) not in STEPPED]


@pytest.mark.parametrize(
    ("optim", "layout", "model"), [*STEPPED, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE)]
)
def test_weights_after_three_steps_do_not_depend_on_the_layout(
    workers: Workers, stepped: Any, optim: str, layout: str, model: str
) -> None:
    losses, expected = stepped(model, optim)
    world, parallel = EVERY[layout]
    found = workers.run(world, three_steps, model, parallel, OPTIMISERS[optim])
    assert all(losses_ == pytest.approx(losses, rel=GATE) for losses_, _ in found)
    assert found[0][1].keys() == expected.keys()
    for name, weight in found[0][1].items():
        assert off(weight, expected[name]) <= GATE, name


# Runs


def small_run(**changes: Any) -> lf.Run:
    run = lf.Run(
        model=WAN,
        data=FakeLatents(),
        batch=4,
        optim=lf.AdamW(lr=1e-2, eps=1e-3),
        parallel=P(micro_batch=2),
        steps=len(WALK),
        eval=lf.Eval(data=FakeLatents(rows=3), every=3),
        log=lf.Log(every=1),
    )
    return attrs.evolve(run, **changes)


WALK: tuple[tuple[int, lf.MegatronParallel | lf.TorchParallel], ...] = (
    (4, P(tp=2, cp=2, sp=False, micro_batch=2)),
    (1, lf.TorchParallel(micro_batch=2)),
    (2, P(tp=2, micro_batch=4)),
)
"""Worlds and layouts that a run passes through."""


def test_a_run_starts_from_a_folder_and_goes_on_in_any_other_layout(workers: Workers, tmp_path: Path) -> None:
    whole, moved, base = tmp_path / "whole", tmp_path / "moved", tmp_path / "base"
    write_base(WAN, base)
    run = small_run(init=str(base))
    workers.run(1, go, run, whole, tmp_path)
    for step, (world, parallel) in enumerate(WALK, 1):
        stop = step if step < len(WALK) else 0
        for lines, number in workers.run(world, go, attrs.evolve(run, parallel=parallel), moved, tmp_path, stop):
            assert number == (signal.SIGTERM if stop else 0), lines
    for ours, reference in zip(metrics(moved), metrics(whole), strict=True):
        assert all(ours[key] == pytest.approx(reference[key], rel=1e-4) for key in ours), (ours, reference)
    models = [load_model(open_start(str(folder / "hf"), None), Ctx(device=cpu)) for folder in (moved, whole)]
    for (name, a), (_, b) in zip(*(model.state_dict().items() for model in models), strict=True):
        assert torch.allclose(a, b, atol=2e-5), name


# Slices


@pytest.mark.parametrize("model", ["t2v, ti2v", "edit 2511"])
def test_slices_are_the_sequence_and_what_fills_it_counts_nothing(model: str) -> None:
    cfg = MODELS[model]
    batch = batch_of(cfg, fake_rows(cfg.space, 3, 1))
    layout = Layout(cp=3, tp=2, sp=True)
    parts = [spec.slice_batch(cfg, batch, attrs.evolve(layout, cp_rank=rank)) for rank in range(3)]
    assert spec.slice_batch(cfg, batch, Layout(dp=4)) is batch
    tokens, texts = sum(batch["packing"].lengths), sum(batch["packing"].texts)
    for name in (name for name in TOKENS if name in batch):
        whole = torch.cat([part[name] for part in parts])
        assert {len(part[name]) for part in parts} == {len(whole) // 3}
        assert torch.equal(whole[:tokens], batch[name])
        assert not whole[tokens:].any()
    packing = parts[0]["packing"]
    assert packing.lengths[:3] == batch["packing"].lengths
    assert not sum(packing.lengths) % 6
    assert not sum(packing.texts) % 6
    assert len(parts[0]["text"]) == sum(packing.texts) > texts
    assert sum(float(spec.loss_weights(cfg, part)["flow"]) for part in parts) == pytest.approx(3.0)
    assert sum(part["count"] for part in parts) == pytest.approx(tokens)
    assert filled(batch, 1) is batch


def test_a_slice_has_so_many_tokens_of_each_sample() -> None:
    assert [held((3, 5, 4), (rank, 3)) for rank in range(3)] == [(3, 1, 0), (0, 4, 0), (0, 0, 4)]


# What cannot be


@pytest.mark.parametrize(
    ("model", "parallel", "world", "told"),
    [
        ("t2v, ti2v", P(pp=2), 2, r"parallel.pp = 2.*no pipeline stages; set it to 1, and raise tp, cp"),
        ("edit", P(pp=2, vpp=2), 2, r"parallel.pp = 2"),
        ("t2v, ti2v", P(ep=2), 2, r"parallel.ep = 2.*no experts"),
        ("t2v, ti2v", P(etp=2), 2, r"parallel.etp = 2.*no experts"),
        ("edit", P(stages=(2,)), 1, r"parallel.stages = \(2,\).*leave it empty"),
        ("t2v, ti2v", P(tp=8), 8, r"parallel.tp = 8 does not divide model.heads = 4; lower parallel.tp"),
        ("edit", P(tp=3), 3, r"parallel.tp = 3 does not divide model.heads = 4"),
        ("i2v", P(cp=8, cp_kind="ulysses"), 8, r"tp \* cp = 8 to divide model.heads = 4; use cp_kind = 'gather'"),
        ("i2v", P(tp=2, cp=4, cp_kind="ulysses"), 8, r"tp \* cp = 8 to divide model.heads = 4"),
    ],
)
def test_layouts_that_cannot_be_are_refused(model: str, parallel: lf.MegatronParallel, world: int, told: str) -> None:
    cfg = MODELS[model]
    with pytest.raises(ValueError, match=told):
        spec.check_layout(cfg, check_run(run_in(model, parallel), cfg, cpu, world), 1)


def test_a_network_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel.tp = 4 does not divide model.mlp = 50; lower parallel.tp"):
        spec.check_layout(attrs.evolve(WAN, mlp=50), Layout(tp=4), 1)


def test_what_cannot_be_made_again_is_refused(one_process: None) -> None:
    parallel = P(recompute="selective", recompute_modules=("layernorm",))
    with pytest.raises(ValueError, match=r"recompute_modules has 'layernorm'.*core_attn and mlp.*recompute to full"):
        megatron(run_in("edit", parallel))


def test_adapters_are_refused() -> None:
    run = run_in("edit", P(), adapt=lf.Lora(targets=("blocks.*.q",)))
    with pytest.raises(ValueError, match="adapt is for the torch path"):
        check_run(run, MODELS["edit"], cpu, 1)


def test_recordings_are_compared_in_one_process_alone() -> None:
    from lf.train.parity_layout import compare_layout

    folder = Path(__file__).parent / "golden/diffusion/hf_wan21_t2v"
    with pytest.raises(ValueError, match="Wan is compared in one process alone; leave out --tp"):
        compare_layout(folder, P(tp=2), Ctx(device=cpu))
