"""Plans without any process: schedules, sizes of presets, what fits, the script."""

import importlib.util
import json
import sys
import time
from pathlib import Path

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lf
from lf.data.config import DataConfig
from lf.devices.cpu import cpu
from lf.models import spec
from lf.models.decoder import DecoderConfig
from lf.models.decoder_facts import parameters
from lf.models.llm import deepseek, llama, qwen
from lf.models.spec import Layout, Load
from lf.models.toy import Toy
from lf.parallel.config import MegatronParallel, resolve
from lf.parallel.groups import place
from lf.plan.estimate import Job, Traffic, layout_of, load_of, plan, stage_memory, worst
from lf.plan.near import changes, nearest, peak
from lf.plan.pipeline import idle, makespan, most_held, order
from lf.plan.speed import Devices, search, step_seconds
from lf.plan.text import as_json, render
from lf.train.planning import job_of, state_bytes
from tests.cases import DENSE, run_of
from tests.test_families import PRESETS, PUBLISHED
from tests.test_sparse_families import PRESETS as SPARSE
from tests.test_sparse_families import PUBLISHED as SPARSE_PUBLISHED

ROOT = Path(__file__).parents[1]
GIB = 2**30
P = MegatronParallel
LARGE = Job(model=llama.llama3_1_405b, parallel=P(tp=8, pp=16), world=4096, batch=2048, length=8192, itemsize=2)
SMALL = Job(model=attrs.evolve(DENSE, layers=8), parallel=P(), world=4, batch=16, length=64)
PLAIN = Load(rows=1, length=64)


def total(cfg: DecoderConfig) -> int:
    return sum(
        (weight.size - weight.padding) * block.count
        for block in spec.blocks(cfg, Layout(), PLAIN)
        for weight in block.weights
        if not weight.frozen
    )


@pytest.mark.parametrize("name", [*PUBLISHED, *SPARSE_PUBLISHED])
def test_parameters_are_those_that_were_published(name: str) -> None:
    if name in PUBLISHED:
        assert total(PRESETS[name]) == PUBLISHED[name]
    else:
        assert total(attrs.evolve(SPARSE[name], mtp=None)) == SPARSE_PUBLISHED[name]


@pytest.mark.parametrize("name", SPARSE)
def test_parameters_with_experts_are_those_of_the_model(name: str) -> None:
    assert total(SPARSE[name]) == parameters(SPARSE[name])


MODELS = {
    "tied": attrs.evolve(DENSE, tied=True),
    "padded": attrs.evolve(DENSE, vocab_multiple=64),
    "llama": llama.llama_tiny,
    "qwen2": qwen.qwen2_tiny,
    "published": qwen.qwen3_8b,
    **{name: cfg for name, cfg in SPARSE.items() if name.endswith("_tiny")},
    "kimi_k2": deepseek.kimi_k2,
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_module(one_process: None, name: str) -> None:
    from lf.parallel.megatron import make_context

    cfg = MODELS[name]
    ctx = make_context(P(), Layout(), cpu, spec.torch.float32)
    built = spec.build_model(cfg, attrs.evolve(ctx, meta=True))
    expected = {}
    for block in spec.blocks(cfg, Layout(), PLAIN):
        for weight in block.weights:
            names = [f"decoder.layers.{layer}.{weight.name}" for layer in block.layers] or [weight.name]
            expected |= dict.fromkeys(names, weight.size)
    assert {name: p.numel() for name, p in built.named_parameters()} == expected


@pytest.mark.parametrize("model", ["dense", "deepseek_v3_tiny", "qwen2_moe_tiny"])
@pytest.mark.parametrize("parallel", [P(), P(tp=2), P(pp=2), P(pp=2, vpp=2), P(cp=2), P(tp=2, pp=2, recompute="full")])
def test_operations_add_up_to_those_of_the_model(model: str, parallel: MegatronParallel) -> None:
    cfg = attrs.evolve(SPARSE[model], layers=8) if model in SPARSE else SMALL.model
    made = plan(attrs.evolve(SMALL, model=cfg, parallel=parallel))
    a_pass = sum(sum(stage.forward) * stage.ranks for stage in made.stages) * made.micro_batches
    # Padded columns of the output layer are multiplied too.
    assert 3 * a_pass == pytest.approx(made.flops, rel=0.01)
    backward = sum(sum(stage.backward) for stage in made.stages) / sum(sum(stage.forward) for stage in made.stages)
    assert 2.9 < backward < 3.0 if parallel.recompute == "full" else backward == pytest.approx(2.0)


pipelines = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 5)).map(
    lambda t: (t[0], t[1] if t[0] > 1 else 1, t[0] * t[2] if t[1] > 1 else t[2])
)


@given(pipelines)
@settings(max_examples=60, deadline=None)
def test_a_schedule_runs_every_pass_once_and_never_waits_for_itself(shape: tuple[int, int, int]) -> None:
    pp, vpp, micro = shape
    for stage in range(pp):
        passes = order(stage, pp, vpp, micro)
        assert len(set(passes)) == len(passes) == 2 * vpp * micro
        assert all(passes.index((True, c, m)) < passes.index((False, c, m)) for _, c, m in passes)
    ones = [[1.0] * vpp] * pp
    assert makespan(ones, [[2.0] * vpp] * pp, micro) >= 3.0 * vpp * micro


@pytest.mark.parametrize(("pp", "vpp", "micro"), [(4, 1, 8), (4, 1, 2), (2, 2, 4), (4, 3, 8), (8, 1, 100), (8, 2, 96)])
def test_the_bubble_of_even_stages_is_that_of_the_papers(pp: int, vpp: int, micro: int) -> None:
    """(p - 1) / (v m + p - 1), arXiv:2104.04473."""
    found = idle([[1.0] * vpp] * pp, [[2.0] * vpp] * pp, micro)
    assert found == pytest.approx((pp - 1) / (vpp * micro + pp - 1))


def test_a_slow_stage_makes_the_others_wait() -> None:
    even, uneven = [[1.0], [1.0]], [[1.0], [3.0]]
    assert idle(uneven, uneven, 50) > 0.3 > idle(even, even, 50)


def test_stages_hold_as_many_micro_batches_as_follow() -> None:
    assert [most_held(stage, 4, 64, (1,)) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert [most_held(stage, 4, 2, (1,)) for stage in range(4)] == [(2,), (2,), (2,), (1,)]


@given(
    st.sampled_from([P(tp=2, pp=2), P(pp=4, vpp=2), P(cp=2, pp=2), P(tp=4), P(pp=2, stages=(3, 5))]),
    st.sampled_from([8, 16]),
)
@settings(max_examples=10, deadline=None)
def test_ranks_of_a_stage_are_those_of_the_groups(parallel: MegatronParallel, world: int) -> None:
    job = attrs.evolve(SMALL, model=attrs.evolve(SMALL.model, attention=MHA), parallel=parallel, world=world)
    stages = plan(job).stages
    for rank in range(world):
        stage = stages[place(resolve(parallel, world), rank).pp_rank]
        assert stage.first <= rank < stage.first + stage.ranks


MHA = attrs.evolve(DENSE.attention, kv_heads=4)  # type: ignore[type-var]


def test_stages_hold_the_layers_that_megatron_gives_them() -> None:
    from lf.models.gpt_spec import stage_layout

    cfg = attrs.evolve(DENSE, layers=11)
    for parallel in (P(pp=2), P(pp=2, vpp=2), P(pp=4), P(pp=2, stages=(3, 8)), P(pp=2, vpp=2, stages=(1, 2, 3, 5))):
        layout = resolve(parallel, parallel.pp)
        chunks = [c for s in range(layout.pp) for c in _chunks(cfg, attrs.evolve(layout, pp_rank=s))]
        counts = [stage.count("decoder") for stage in stage_layout(cfg, layout)]
        assert [len(layers) for _, layers in sorted(chunks)] == counts
        assert sorted(layer for _, layers in chunks for layer in layers) == list(range(11))


def _chunks(cfg: spec.ModelConfig, layout: Layout) -> list[tuple[int, tuple[int, ...]]]:
    found = spec.blocks(cfg, layout, PLAIN)
    return [(b.chunk * layout.pp + layout.pp_rank, b.layers) for b in found if b.name == "feed-forward"]


def test_thousands_of_ranks_are_planned_in_seconds() -> None:
    started = time.process_time()
    made = plan(LARGE)
    text = render(made, 80 * GIB)
    assert time.process_time() - started < 10.0
    assert made.micro_batches == 64
    assert "4096 ranks: tp 8 with sp, cp 1, dp 32, pp 16" in text
    assert "does not fit in 80 GiB: stages 0, 1, 2, 3, 4" in text
    assert "would fit: --parallel.cp 2" in text


def test_many_chunks_are_planned_in_a_time_that_grows_with_them() -> None:
    cfg = attrs.evolve(DENSE, layers=1200)
    started = time.process_time()
    made = plan(attrs.evolve(SMALL, model=cfg, parallel=P(pp=2, vpp=600), world=2, batch=4))
    assert time.process_time() - started < 4.0
    assert [stage.in_flight for stage in made.stages] == [1201, 1199]
    assert "layer 0 | layer 2 | layer 4 |" in render(made)
    assert "layer 14 | 592 more chunks\n" in render(made)
    with pytest.raises(ValueError, match=r"parallel.pp = 2000 .* and 8000 micro-batches .* replays at most 10,000,000"):
        plan(attrs.evolve(SMALL, model=attrs.evolve(DENSE, layers=2000), parallel=P(pp=2000), world=2000, batch=8000))


@given(pipelines, st.lists(st.integers(0, 9), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None)
def test_what_a_stage_holds_at_most_is_found_in_its_order(shape: tuple[int, int, int], sizes: list[int]) -> None:
    pp, vpp, micro = shape
    for stage in range(pp):
        held, most = [0] * vpp, 0
        for forward, chunk, _ in order(stage, pp, vpp, micro):
            held[chunk] += 1 if forward else -1
            most = max(most, sum(n * size for n, size in zip(held, sizes, strict=False)))
        found = most_held(stage, pp, micro, sizes[:vpp])
        assert sum(n * size for n, size in zip(found, sizes, strict=False)) == most


degrees = st.sampled_from([1, 2, 4])


@given(
    model=st.sampled_from(["dense", *(name for name in SPARSE if name.endswith("_tiny"))]),
    parallel=st.builds(
        P, tp=degrees, pp=degrees, vpp=st.sampled_from([1, 2]), cp=degrees, ep=degrees, etp=st.sampled_from([1, 2]),
        recompute=st.sampled_from(["none", "selective", "full"]), micro_batch=degrees,
        cp_kind=st.sampled_from(["gather", "ulysses"]), sp=st.booleans(),
    ),
    world=st.sampled_from([1, 2, 4, 8, 16]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_what_the_rules_accept_is_planned_whole(model: str, parallel: MegatronParallel, world: int) -> None:
    cfg = SMALL.model if model == "dense" else attrs.evolve(SPARSE[model], layers=8)
    job = attrs.evolve(SMALL, model=cfg, parallel=parallel, world=world)
    try:
        layout = layout_of(job)
    except ValueError:
        return
    made = plan(job)
    assert 0.0 <= made.bubble < 1.0
    held = []
    for rank, stage in enumerate(made.stages):
        found = spec.blocks(cfg, attrs.evolve(layout, pp_rank=rank), load_of(job, layout, "none"))
        held += [layer for block in found if block.name == "attention" for layer in block.layers]
        memory = stage.memory[parallel.recompute]
        # The pieces are what the peak is made of.
        assert memory.peak >= sum(size for _, size in stage.pieces) * 0.9
        assert all(each.size > 0 and each.calls > 0 and each.ranks > 1 for each in stage.traffic)
        once = sum(w.size * b.count for b in found for w in b.weights if not w.frozen)
        assert stage.elements == once
    assert sorted(held) == list(range(cfg.layers))
    heads = [name for stage in made.stages for name in stage.holds if "further head 1" in name]
    assert len(heads) == (cfg.mtp is not None)
    assert made.parameters <= sum(stage.elements * stage.ranks for stage in made.stages)


def test_more_recomputation_keeps_less() -> None:
    layout = resolve(LARGE.parallel, LARGE.world)
    kept = [stage_memory(LARGE, layout, choice).activations for choice in ("none", "selective", "full")]
    assert kept[0] > kept[1] > kept[2]


def test_nearest_layouts_fit_and_say_all_that_differs() -> None:
    most = worst(plan(SMALL))[1]
    found = nearest(SMALL, 0.6 * most, count=5)
    assert found
    for option in found:
        new = attrs.evolve(SMALL.parallel, **dict(option.changes))
        assert changes(SMALL, attrs.evolve(SMALL, parallel=new)) == option.changes
        assert peak(attrs.evolve(SMALL, parallel=new)) == option.peak <= 0.6 * most
        assert not any(set(other.changes) < set(option.changes) for other in found)
    assert nearest(SMALL, 1.0) == ()


def test_a_ring_sends_its_share_of_the_bytes() -> None:
    one = Traffic(axis="tp", op="all_gather", ranks=4, calls=1, size=400)
    assert [attrs.evolve(one, op=op).wire for op in ("all_gather", "all_reduce", "send")] == [300, 600, 400]


def test_the_state_of_an_optimiser_is_found_by_a_step() -> None:
    assert [state_bytes(each) for each in (lf.AdamW(), lf.Sgd(), lf.Sgd(momentum=0.9))] == [8.0, 0.0, 4.0]


def test_a_run_that_cannot_be_planned_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plans are made for the Megatron path alone"):
        job_of(run_of(DENSE, parallel=lf.TorchParallel()), 1)
    with pytest.raises(ValueError, match=r"nothing to plan; set model, or init"):
        job_of(attrs.evolve(run_of(DENSE), model=None), 1)
    with pytest.raises(ValueError, match=r"nothing says what lf.models.toy.Toy costs, so it has no plan"):
        job_of(run_of(Toy()), 1)
    with pytest.raises(ValueError, match=r"balance.tokens and balance.patches cap micro-batches"):
        job_of(run_of(DENSE, balance=lf.Balance(tokens=64)), 1)
    with pytest.raises(ValueError, match=r"lf.data.config.DataConfig does not say how long a row is; give --length"):
        job_of(run_of(DENSE, data=DataConfig()), 1)
    with pytest.raises(ValueError, match=r"parallel.tp = 4 does not divide model.attention.kv_heads = 2"):
        plan(attrs.evolve(SMALL, parallel=P(tp=4)))


def test_a_step_of_one_rank_takes_as_long_as_its_operations() -> None:
    job = attrs.evolve(SMALL, world=1)
    (stage,) = plan(job).stages
    devices = Devices(tflops=1e-6)
    assert step_seconds(job, (stage,), devices) == pytest.approx(plan(job).flops / 1e6, rel=0.01)


def test_slower_links_and_waiting_stages_cost_time() -> None:
    job = attrs.evolve(SMALL, parallel=P(tp=2, pp=2), world=8)
    stages = plan(job).stages
    fast, slow = (step_seconds(job, stages, Devices(fast=rate, latency=0.0)) for rate in (100.0, 1.0))
    assert fast < slow
    free = Devices(tflops=1e-6, fast=1e12, slow=1e12, latency=0.0)
    # Three stages' worth of passes for two micro-batches: (m + p - 1) / m.
    passes = max(sum(stage.forward) + sum(stage.backward) for stage in stages) / 1e6
    assert step_seconds(job, stages, free) == pytest.approx((plan(job).micro_batches + 1) * passes)


def test_a_search_finds_layouts_that_fit_the_fastest_first() -> None:
    most = worst(plan(SMALL))[1]
    devices = Devices(node=2)
    every = search(SMALL, devices, count=10_000)
    found = search(SMALL, devices, 0.6 * most, count=10_000)
    times = [each.seconds for each in every]
    assert times == sorted(times)
    assert any(each.job == SMALL for each in every)
    assert [each for each in every if each.peak <= 0.6 * most] == list(found)
    for each in found[:20]:
        assert peak(each.job) == each.peak
        assert step_seconds(each.job, plan(each.job).stages, devices) == pytest.approx(each.seconds)
        assert each.job.parallel.tp <= 2


CONFIG = """
import lf
from lf.models.llm.qwen import qwen3_tiny
cfg = lf.Run(model=qwen3_tiny, data=lf.TextData(paths=("nowhere",), seq_len=64), batch=8)
"""


def script(*args: str) -> int:
    spec_ = importlib.util.spec_from_file_location("plan_script", ROOT / "scripts/plan.py")
    assert spec_ is not None
    assert spec_.loader is not None
    module = importlib.util.module_from_spec(spec_)
    sys.modules["plan_script"] = module
    spec_.loader.exec_module(module)
    return int(module.main(args))


def test_the_script_plans_the_config_with_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.py").write_text(CONFIG)
    cfg = ("--cfg", str(tmp_path / "c.py"))
    assert script(*cfg, "--world", "4", "--parallel.tp", "2", "--memory", "1", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["layout"]["tp"], made["layout"]["dp"], made["fits"], made["nearest"]) == (2, 2, True, [])
    job = job_of(run_of(qwen.qwen3_tiny, data=lf.TextData(paths=("x",), seq_len=64), batch=8, parallel=P(tp=2)), 4)
    assert made == json.loads(json.dumps(as_json(plan(job), GIB)))
    assert script(*cfg, "--world", "3", "--parallel.tp", "2") == 2
    assert "does not divide the world of 3 ranks" in capsys.readouterr().err
    assert script(*cfg, "--world", "2", "--search", "--devices.node", "2") == 0
    assert "fastest layouts first" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        script("--help")
    assert "--memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--world 0", "--world = 0 must be 1 to 16777216; give the number of ranks"),
        ("--world -4", "--world = -4 must be 1 to 16777216"),
        (
            "--world 2 --search --devices.tflops 0",
            "--devices.tflops = 0.0 must be above 0 and finite; give",
        ),
        ("--world 2 --search --devices.tflops nan", "--devices.tflops = nan must be above 0 and finite"),
        ("--world 2 --devices.latency -1", "--devices.latency = -1.0 must be 0 or more and finite"),
        ("--world 2 --devices.node 0", "--devices.node = 0 must be above 0 and finite"),
        ("--world 2 --memory nan", "--memory = nan must be 0 or more and finite; give the GiB of a rank"),
        ("--world 2 --memory -1", "--memory = -1.0 must be 0 or more and finite"),
        ("--world 2 --memory inf", "--memory = inf must be 0 or more and finite"),
        ("--world 2 --images -2", "--images = -2 must be -1 to 65536; give those of a row"),
        ("--world 2 --images 2", "--images = 2 with --grid = (0, 0, 0): give both, the images of a row and the frames"),
        (
            "--world 2 --images 2 --grid 1 2 2",
            "--images = 2, but lf.models.llm.qwen.Qwen3 takes no images; leave it out",
        ),
        ("--world 2 --length -5", "--length = -5 must be 0 to 1099511627776; give the tokens of a row"),
    ],
)
def test_the_script_refuses_numbers_that_plan_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    (tmp_path / "c.py").write_text(CONFIG)
    assert script("--cfg", str(tmp_path / "c.py"), *flags.split()) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"error: {said}")
    assert printed.out == ""
