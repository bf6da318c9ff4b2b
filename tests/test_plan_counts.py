"""Plans against what real small models hold and send on CPUs, counted tensor by tensor."""

from typing import Any

import attrs
import pytest

import lf
from lf.models.decoder import Attention, DecoderConfig, Experts, Mla, Mtp
from lf.models.llm.deepseek import deepseek_v3_tiny
from lf.models.media import Media
from lf.models.spec import ModelConfig
from lf.models.vlm_costs import NAME
from lf.parallel.config import megatron_part
from lf.plan.estimate import Job, plan
from lf.train.planning import job_of
from tests.cases import DENSE, run_of
from tests.counting import counted, most_alive
from tests.workers import Workers

NEAR = 0.1
"""Largest difference of an estimate, relative to what was counted."""
NEAR_PEAK = 0.15
"""The same for a peak, which adds what lives for moments only."""
NEAR_CALLS = 0.15
"""The same for messages with features, whose number depends on where in a row images stand."""
LENGTH = 64

P = lf.MegatronParallel
DEEP: DecoderConfig = attrs.evolve(DENSE, layers=4)
SOFTMAX = Experts(count=8, top_k=2, width=24, balance="sequence", z_coef=0.01)
SIGMOID = Experts(
    count=8,
    top_k=4,
    width=16,
    score="sigmoid",
    groups=4,
    group_top_k=2,
    bias=True,
    shared=40,
    shared_gate=True,
    dense=(0,),
    balance="switch",
)
LATENT = Mla(heads=4, q_rank=24, kv_rank=16, nope_dim=12, rope_dim=8, v_dim=12)
OVER_ALL = attrs.evolve(DEEP.attention, qk_norm_over="all")  # type: ignore[type-var]
MODELS: dict[str, DecoderConfig] = {
    "untied": DEEP,
    "tied": attrs.evolve(DEEP, tied=True, vocab_multiple=64),
    "bias, window": attrs.evolve(
        DEEP, attention=Attention(heads=4, kv_heads=4, head_dim=12, qkv_bias=True, window=5, window_layers=(1,))
    ),
    "experts": attrs.evolve(DEEP, experts=SOFTMAX),
    "gathered": attrs.evolve(DEEP, attention=OVER_ALL, experts=attrs.evolve(SOFTMAX, dispatch="allgather")),
    "latent": attrs.evolve(DEEP, attention=LATENT),
    "heads": attrs.evolve(DEEP, mtp=Mtp(depth=2)),
    "all": attrs.evolve(DEEP, attention=LATENT, experts=SIGMOID, mtp=Mtp(), tied=True),
    "deepseek": attrs.evolve(deepseek_v3_tiny, layers=3),
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
    "experts": (1, "experts", P()),
    "experts, full": (1, "all", P(recompute="full")),
    "latent": (1, "latent", P()),
    "heads": (1, "heads", P()),
    "heads pp2": (2, "heads", P(pp=2)),
    "all": (1, "all", P()),
    "all, act": (1, "all", P(recompute="selective", recompute_modules=("moe_act", "shared_experts", "core_attn"))),
    "all, moe": (2, "all", P(recompute="selective", recompute_modules=("moe", "mla_up_proj", "layernorm"))),
    "ep2": (2, "experts", P(ep=2)),
    "ep2 all": (2, "all", P(ep=2)),
    "tp2 all": (2, "all", P(tp=2)),
    "tp2 etp2": (2, "experts", P(tp=2, etp=2)),
    "tp2 ep2": (2, "all", P(tp=2, ep=2)),
    "deepseek tp2 ep2": (2, "deepseek", P(tp=2, ep=2)),
    "deepseek tp2 etp2": (2, "deepseek", P(tp=2, etp=2)),
    "deepseek tp2 ep2 etp2": (4, "deepseek", P(tp=2, ep=2, etp=2)),
    "ep2 gathered": (2, "gathered", P(tp=2, ep=2)),
    "pp2 all": (2, "all", P(pp=2)),
    "cp2 latent": (2, "latent", P(cp=2)),
    "cp2 all": (2, "all", P(cp=2, ep=2, micro_batch=2)),
    "cp2 ulysses all": (2, "all", P(cp=2, cp_kind="ulysses")),
    "tp2 pp2": (4, "tied", P(tp=2, pp=2)),
    "pp2 tp2 ep2": (4, "all", P(tp=2, pp=2, ep=2)),
    "pp4": (4, "untied", P(pp=4)),
}


UNSEEN = ("hand-over", "pictures: patches", "images: features", f"{NAME}: features", "on their way")
"""Pieces that are kept, but by no function's backward."""


def job_with(run: lf.Run, world: int, length: int, media: tuple[Media, ...], documents: int = 1) -> Job:
    """Returns the facts of a run of rows of `documents` documents on CPUs."""
    job = job_of(run, world, length=length, media=media, cpu=True)
    return attrs.evolve(job, packed=documents > 1 or job.parallel.pp > 1 or job.parallel.cp > 1)


def check(workers: Workers, world: int, model: ModelConfig, parallel: Any, **changes: Any) -> None:
    documents, precision = changes.get("documents", 1), changes.get("precision", "float32")
    micro, optim = changes.get("micro", 4), changes.get("optim", lf.AdamW())
    media: tuple[Media, ...] = changes.get("media", ())
    text = megatron_part(parallel)
    assert text is not None
    replicas = world // (text.tp * text.pp * text.cp)
    batch = micro * parallel.micro_batch * replicas
    run = run_of(model, parallel=parallel, precision=lf.Precision(params=precision), optim=optim, batch=batch)
    job = job_with(run, world, LENGTH, media, documents)
    expected = plan(job)
    assert expected.micro_batches == micro
    uneven = isinstance(model, DecoderConfig) and model.experts is not None
    padded = uneven and text.ep > 1 and (text.etp or 1) > 1
    counts = workers.run(world, counted, run, LENGTH, documents, micro, media)
    for stage in expected.stages:
        memory = attrs.asdict(stage.memory[text.recompute])
        # The output that waits for its gradient is not saved for autograd, nor are features on their way.
        memory["activations"] -= sum(size for name, size in stage.pieces if any(part in name for part in UNSEEN))
        mine = counts[stage.first : stage.first + stage.ranks]
        for real in mine:
            assert stage.elements == real["elements"]
            assert expected.media_flops == pytest.approx(real["media_flops"])
        for kind in ("parameters", "gradients", "optimizer", "activations"):
            held = [real[kind] for real in mine]
            # Loads of experts differ between ranks; a plan takes them as even.
            most = sum(held) / len(held) if uneven else max(held)
            assert memory[kind] == pytest.approx(most, rel=NEAR), (stage.first, kind)
        sent = {(t.axis, t.op): (t.calls, t.size) for t in stage.traffic}
        check_traffic(sent, [real["traffic"] for real in mine], uneven, padded)


def check_traffic(sent: dict[Any, Any], real: list[dict[Any, Any]], uneven: bool, padded: bool) -> None:
    alike = [{key: value for key, value in each.items() if key[0] != "replica"} for each in real]
    for each in alike:
        assert {k: calls for k, (calls, _) in sent.items() if k[0] != "replica"} == {k: n for k, (n, _) in each.items()}
    for key, (calls, size) in sent.items():
        if key[0] == "replica":
            # Which rank encodes what differs; a plan says what they do on average.
            for at, wanted in enumerate((calls, size)):
                found = [each.get(key, (0, 0))[at] for each in real]
                assert wanted == pytest.approx(sum(found) / len(found), rel=(NEAR_CALLS, NEAR)[at]), key
            continue
        sizes = [each[key][1] for each in alike]
        # Experts cut twice: gloo gathers uneven loads in pieces of the largest, so the mean of the ranks counts.
        for found in [sum(sizes) / len(sizes)] if padded else sizes:
            assert size == pytest.approx(found, rel=NEAR if uneven else 0.0), key


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


@pytest.mark.parametrize("case", ["one", "one, full", "one, core", "tp2", "pp2", "cp2", "all", "experts, full"])
def test_a_peak_is_what_a_step_has_alive(workers: Workers, case: str) -> None:
    world, model, parallel = CASES[case]
    cfg = attrs.evolve(MODELS[model], vocab=517)
    check_peak(workers, world, cfg, parallel)


def check_peak(workers: Workers, world: int, model: ModelConfig, parallel: Any, media: tuple[Media, ...] = ()) -> None:
    run, length = run_of(model, parallel=parallel, batch=4 * parallel.micro_batch), 4 * LENGTH
    job = job_with(run, world, length, media)
    alive = workers.run(world, most_alive, run, length, 4, media)
    for stage in plan(job).stages:
        memory = stage.memory[job.parallel.recompute]
        found = max(alive[stage.first : stage.first + stage.ranks])
        assert memory.activations + memory.working == pytest.approx(found, rel=NEAR_PEAK), stage.first
