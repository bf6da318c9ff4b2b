"""Images encoded apart: the plan gives each once and brings every gradient back, and a step equals one process."""

import fnmatch
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import lf
from lf import config
from lf.devices.cpu import cpu
from lf.models.spec import Layout, check_layout, collate, slice_batch
from lf.models.vlm_rows import MEDIA
from lf.parallel.config import resolve
from lf.parallel.groups import place
from lf.plan.encode import Images, StepPlan, step_plan
from lf.train.run import check_run
from tests.cases import DENSE, gradients, megatron, near_float32, off, run_of
from tests.vlm_cases import MODELS, TOWERS, rows_of
from tests.workers import Workers

GATE = 5e-6
"""Largest difference over largest reference, in fp32."""
P, H = lf.MegatronParallel, lf.Hetero


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[Images], int, tuple[bool, ...], int]:
    """Returns micro-batches, ranks, who returns, and how many ranks encode together.

    Takers share the features, or each has all of them.
    """
    takers, shared = draw(st.integers(1, 3)), draw(st.booleans())
    ranks = takers * draw(st.integers(1, 3))
    together = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    micro = []
    for _ in range(draw(st.integers(1, 5))):
        features = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        owner, places = rng.integers(0, takers, sum(features)), np.arange(sum(features))
        taken = tuple(rng.permutation(places[owner == taker] if shared else places) for taker in range(takers))
        micro.append(Images(features=features, costs=tuple(float(n * n) for n in features), taken=taken))
    return micro, ranks, tuple(shared or taker == 0 for taker in range(takers)), together


def made_by(plan: StepPlan, micro: list[Images], rank: int, number: int) -> np.ndarray:
    """Returns the numbers of the features that a rank makes for a micro-batch, as the encoder gives them."""
    starts = np.cumsum([0, *micro[number].features])
    parts = [np.arange(starts[i], starts[i + 1]) for i in plan.encodes[rank][number]]
    return np.concatenate([np.zeros(0, np.int64), *parts])


@given(steps())
@settings(max_examples=80, deadline=None)
def test_every_image_is_encoded_once_and_every_gradient_comes_back_once(step: Any) -> None:
    micro, ranks, takers, together = step
    plan = step_plan(micro, ranks, takers, together)
    assert all(plan.encodes[rank] == plan.encodes[rank - rank % together] for rank in range(ranks))
    for number, images in enumerate(micro):
        encoded = [i for rank in range(0, ranks, together) for i in plan.encodes[rank][number]]
        assert sorted(encoded) == list(range(len(images.features)))
        routes = [route for route in plan.routes if route.micro == number]
        assert len({(route.source, route.target) for route in routes}) == len(routes)
        for taker, taken in enumerate(images.taken):
            # What arrives stands in the taker's own order, whoever made it.
            found = np.full(len(taken), -1)
            for route in (route for route in routes if route.target == taker):
                found[route.into] = made_by(plan, micro, route.source, number)[route.rows]
            assert found.tolist() == taken.tolist()
        back = [made_by(plan, micro, route.source, number)[route.rows] for route in routes if route.returns]
        assert sorted(np.concatenate([np.zeros(0, np.int64), *back])) == list(range(sum(images.features)))


@given(steps())
@settings(max_examples=40, deadline=None)
def test_no_rank_encodes_much_more_than_others(step: Any) -> None:
    micro, ranks, takers, together = step
    plan = step_plan(micro, ranks, takers, together)
    loads = [sum(micro[m].costs[i] for m, own in enumerate(rank) for i in own) for rank in plan.encodes]
    costs = [cost for images in micro for cost in images.costs]
    assert max(loads) - min(loads) <= max(costs, default=0.0) + 1e-9


def micro_batches(cfg: Any, parallel: Any, layout: Layout, *, rows: int) -> list[Any]:
    made, size = rows_of(cfg, rows, 48, seed=3), parallel.micro_batch
    micro = [collate(cfg, made[i : i + size], made[0]) for i in range(0, len(made), size)]
    return micro[layout.dp_rank :: layout.dp]


def one_step(
    model: str, parallel: Any, frozen: tuple[str, ...] = (), rows: int = 8, precision: lf.Precision | None = None
) -> Any:
    cfg = MODELS[model]
    run = run_of(cfg, optim=lf.AdamW(clip=0.0, freeze=frozen), parallel=parallel, precision=precision or lf.Precision())
    engine, ctx = megatron(run)
    return gradients(engine, ctx, micro_batches(cfg, parallel, ctx.layout, rows=rows))


@pytest.fixture(scope="module")
def reference(workers: Workers) -> Any:
    made: dict[Any, Any] = {}

    def get(model: str, rows: int) -> Any:
        if (model, rows) not in made:
            (made[model, rows],) = workers.run(1, one_step, model, P(), (), rows)
        return made[model, rows]

    return get


def equals(found: list[Any], reference: Any, frozen: tuple[str, ...] = ()) -> None:
    grads, norm, loss, _ = reference
    for grads_, norm_, loss_, _ in found:
        assert abs(loss_ - loss) <= GATE * loss
        assert frozen or abs(norm_ - norm) <= GATE * norm
        assert grads_.keys() == {name for name in grads if not any(fnmatch.fnmatch(name, p) for p in frozen)}
        for name, grad in grads_.items():
            assert off(grad, grads[name]) <= GATE, name


LAYOUTS: dict[str, tuple[int, lf.Hetero]] = {
    "one": (1, H(micro_batch=2, vision=P(recompute="full"))),
    "dp2": (2, H()),
    "tp2": (2, H(text=P(tp=2))),
    "tp2 without sp": (2, H(micro_batch=2, text=P(tp=2, sp=False))),
    "pp2": (2, H(text=P(pp=2))),
    "pp2 vpp2": (2, H(text=P(pp=2, vpp=2, stages=(2, 1, 1, 1)))),
    "cp2": (2, H(text=P(cp=2))),
    "cp2 ulysses": (2, H(micro_batch=2, text=P(cp=2, cp_kind="ulysses"))),
    "tp2 pp2": (4, H(text=P(tp=2, pp=2, recompute="full"), vision=P(recompute="full"))),
    "cp2 pp2": (4, H(text=P(cp=2, pp=2))),
    "pp2 dp2": (4, H(text=P(pp=2))),
    "tp2 cp2": (4, H(text=P(tp=2, cp=2))),
    "without overlap": (2, H(text=P(pp=2, overlap=False))),
    "ep2": (2, H(text=P(ep=2))),
    "tp2, vision tp2": (2, H(micro_batch=2, text=P(tp=2), vision=P(tp=2))),
    "tp2 without sp, vision tp2": (2, H(text=P(tp=2, sp=False), vision=P(tp=2))),
    "pp2, vision tp2": (2, H(text=P(pp=2), vision=P(tp=2, recompute="full"))),
    "pp2 vpp2, vision tp2": (2, H(text=P(pp=2, vpp=2, stages=(2, 1, 1, 1)), vision=P(tp=2))),
    "cp2, vision tp2": (2, H(text=P(cp=2), vision=P(tp=2))),
    "tp2 pp2, vision tp2": (4, H(text=P(tp=2, pp=2), vision=P(tp=2))),
    "cp2 pp2, vision tp2": (4, H(text=P(cp=2, pp=2), vision=P(tp=2, recompute="full"))),
    "tp2 dp2, vision tp2": (4, H(text=P(tp=2), vision=P(tp=2))),
    "tp2 pp2, vision tp4": (4, H(text=P(tp=2, pp=2), vision=P(tp=4))),
    "tp2 cp2, vision tp4": (4, H(text=P(tp=2, cp=2), vision=P(tp=4, recompute="full"))),
}
SHARED = [layout for layout in LAYOUTS if "vision" in layout]
PAIRS = [
    *((layout, "levels") for layout in LAYOUTS if layout != "ep2" and layout not in SHARED),
    *((layout, "windows") for layout in ("tp2", "pp2 vpp2", "cp2", "tp2 pp2")),
    ("ep2", "experts"),
    *((layout, "levels") for layout in SHARED if "tp4" not in layout),
    *((layout, "intern") for layout in SHARED if "tp4" in layout),
    *(("tp2 pp2, vision tp2", name) for name in TOWERS),
]
LATER = {
    *((layout, "levels") for layout in ("one", "cp2 ulysses", "pp2 dp2", "tp2 cp2", "without overlap", "dp2")),
    *((layout, "windows") for layout in ("tp2", "cp2", "tp2 pp2")),
    ("ep2", "experts"),
    *((layout, model) for layout, model in PAIRS if layout in SHARED and layout != "pp2, vision tp2"),
}
"""Pairs in the full tests only."""


@pytest.mark.parametrize(
    ("layout", "model"), [pytest.param(*pair, marks=pytest.mark.full if pair in LATER else ()) for pair in PAIRS]
)
def test_gradients_are_those_of_one_process(workers: Workers, reference: Any, layout: str, model: str) -> None:
    world, parallel = LAYOUTS[layout]
    equals(workers.run(world, one_step, model, parallel), reference(model, 8))


def shared_and_alone(name: str) -> list[float]:
    """Returns how far the features and the gradients of a tower and its projector are from those of one rank.

    Each rank begins the backward with a part of the gradient.
    """
    from lf.models.layers.shared import Share, set_share
    from lf.models.spec import Ctx
    from lf.models.vlm_model import encoder_of

    cfg, rank, ranks = MODELS[name], dist.get_rank(), dist.get_world_size()
    encoder = encoder_of(cfg, Ctx(device=cpu))
    torch.manual_seed(0)
    for param in encoder.parameters():
        torch.nn.init.normal_(param, std=0.1)
    rows = [row for row in rows_of(cfg, 6, 48, seed=3) if row["media"]]
    media = [item for row in rows for item in row["media"]]
    patches = torch.from_numpy(np.concatenate([row["patches"] for row in rows]))

    def run(first: int, step: int) -> list[torch.Tensor]:
        made = encoder(encoder.states(patches, media), media)
        weights = torch.linspace(-1, 1, made.numel()).view_as(made)
        params = [param for param in encoder.parameters() if param.requires_grad]
        loss = (made * weights)[:, first::step].sum()
        return [made.detach(), *torch.autograd.grad(loss, params)]

    alone = run(0, 1)
    set_share(encoder, Share(group=dist.group.WORLD, rank=rank, size=ranks))
    shared = run(rank, ranks)
    for grad in shared[1:]:
        dist.all_reduce(grad)
    return [off(one, other) for one, other in zip(shared, alone, strict=True)]


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, 2) for name in TOWERS),
        *(pytest.param(name, 4, marks=pytest.mark.full) for name in ("intern", "intern rms", "siglip")),
    ],
)
def test_ranks_that_share_a_tower_equal_one(workers: Workers, name: str, ranks: int) -> None:
    for found in workers.run(ranks, shared_and_alone, name):
        assert max(found) <= GATE


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_any_number_of_micro_batches_will_do(workers: Workers, reference: Any, rows: int) -> None:
    """One micro-batch has one image for two ranks; three and five do not divide by them."""
    equals(workers.run(2, one_step, "levels", H(text=P(pp=2)), (), rows), reference("levels", rows))


@pytest.mark.full
def test_images_of_one_encoder_alone_are_enough(workers: Workers, reference: Any) -> None:
    """One row has one image, and two pairs of ranks encode."""
    world, parallel = LAYOUTS["tp2 pp2, vision tp2"]
    equals(workers.run(world, one_step, "levels", attrs.evolve(parallel, micro_batch=1), (), 1), reference("levels", 1))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2", "tp2", "tp2, vision tp2"])
def test_in_bfloat16_gradients_are_near_those_of_float32(workers: Workers, reference: Any, layout: str) -> None:
    """All gradients together: a tower's biases alone are apart by more than the gate of one, in one process too."""
    world, parallel = LAYOUTS[layout]
    for found in workers.run(world, one_step, "levels", parallel, (), 8, lf.Precision(params="bfloat16")):
        near_float32(found, reference("levels", 8), experts=True)


@pytest.mark.parametrize(
    ("layout", "frozen"),
    [
        ("pp2", ("vision.*",)),
        ("tp2", ("vision.*", "projector.*")),
        ("pp2", ("vision.*", "projector.*")),
        pytest.param("pp2, vision tp2", ("vision.*",), marks=pytest.mark.full),
        pytest.param("tp2, vision tp2", ("vision.*", "projector.*"), marks=pytest.mark.full),
        ("tp2", ("embedding.*", "decoder.*", "output_layer.*")),
    ],
)
def test_frozen_parts_get_no_gradient_and_change_none(
    workers: Workers, reference: Any, layout: str, frozen: tuple[str, ...]
) -> None:
    world, parallel = LAYOUTS[layout]
    equals(workers.run(world, one_step, "levels", parallel, frozen), reference("levels", 8), frozen)


def text_alone(parallel: Any) -> Any:
    cfg = MODELS["levels"]
    rows: list[Any] = rows_of(cfg, 8, 48, seed=3)[2::3]
    assert not any(row["media"] for row in rows)
    engine, ctx = megatron(run_of(cfg, optim=lf.AdamW(clip=0.0), parallel=parallel))
    return gradients(engine, ctx, [collate(cfg, [row], row) for row in rows[ctx.layout.dp_rank :: ctx.layout.dp]])


def test_a_step_of_text_alone_leaves_zero_gradients_in_the_tower(workers: Workers) -> None:
    (alone,) = workers.run(1, text_alone, P())
    found = workers.run(2, text_alone, H(text=P(pp=2), vision=P(tp=2)))
    equals(found, alone)
    assert not any(grad.any() for name, grad in found[0][0].items() if name.startswith(("vision", "projector")))


def trained(parallel: Any) -> Any:
    """Returns the losses of three steps and a held-out loss after them, and how many micro-batches had features."""
    from lf.train import decoupled

    peaks = []
    begin = decoupled.begin

    def watched(*args: Any, **kwargs: Any) -> Any:
        exchange = begin(*args, **kwargs)
        peaks.append(exchange)
        return exchange

    decoupled.begin = watched
    try:
        cfg = MODELS["levels"]
        engine, ctx = megatron(run_of(cfg, optim=lf.AdamW(lr=1e-2, eps=1e-3), parallel=parallel))
        batches = micro_batches(cfg, parallel, ctx.layout, rows=8)
        state, losses = engine.state, []
        for _ in range(3):
            state, metrics = engine.step(state, batches)
            losses.append(metrics.loss)
        losses.append(engine.evaluate(state, [batches])["loss"])
    finally:
        decoupled.begin = begin
    return losses, [exchange.peak for exchange in peaks], [exchange.live for exchange in peaks]


@pytest.mark.parametrize("text", [P(pp=2), P(tp=2)])
def test_weights_stay_the_same_on_all_ranks_and_features_are_few(workers: Workers, text: Any) -> None:
    """Copies of later stages follow the weights, and no more features live than the pipeline is deep."""
    ((wanted, none, _),) = workers.run(1, trained, P())
    assert none == []
    found = workers.run(2, trained, H(text=text))
    for losses, _, live in found:
        assert losses == pytest.approx(wanted, rel=2e-5)
        assert not any(live)
    assert found[0][1][:3] == [text.pp] * 3


def taken(engine: Any, steps: list[list[Any]], held: list[Any], *, ahead: bool) -> tuple[Any, list[float]]:
    """Returns the last state and each step's loss, norm and held-out loss, images of the next step encoded or not."""
    from lf.data.loader import prefetch

    state, numbers = engine.state, []
    with prefetch(lambda at: engine.ahead(steps[at]) if ahead else steps[at], range(len(steps)), depth=1) as feed:
        for item in feed:
            state, metrics = engine.step(state, item.value)
            numbers += [metrics.loss, metrics.grad_norm, engine.evaluate(state, [held])["loss"]]
    return state, numbers


def with_and_without_ahead(parallel: Any, frozen: tuple[str, ...], folder: str) -> list[list[float]]:
    """Returns what `taken` does with images encoded ahead and without.

    Ahead, after two steps another engine, whose own weights are others, goes on from a checkpoint.
    """
    from lf.train import checkpoint
    from lf.train.comm import distributed

    cfg = MODELS["levels"]
    run = run_of(cfg, optim=lf.AdamW(lr=1e-2, eps=1e-3, freeze=frozen), parallel=parallel)
    engine, ctx = megatron(run)
    steps = [micro_batches(cfg, parallel, ctx.layout, rows=rows) for rows in (2, 1, 3, 2)]
    state, numbers = taken(engine, steps[:2], steps[0], ahead=True)
    checkpoint.save(Path(folder), state.step, engine.pieces(state), {}, comm=distributed())
    other, _ = megatron(attrs.evolve(run, seed=5))
    reader = checkpoint.open_latest(Path(folder), comm=distributed()).reader
    assert reader is not None
    other.restore(other.state, reader)
    numbers += taken(attrs.evolve(other, state=attrs.evolve(other.state, step=2)), steps[2:], steps[0], ahead=True)[1]
    return [numbers, taken(megatron(run)[0], steps, steps[0], ahead=False)[1]]


@pytest.mark.parametrize(
    ("text", "frozen"),
    [
        (P(pp=2), ("vision.*",)),
        pytest.param(P(tp=2), ("vision.*", "projector.*"), marks=pytest.mark.full),
        pytest.param(P(cp=2), ("vision.*",), marks=pytest.mark.full),
    ],
)
def test_images_of_the_next_step_encoded_beside_this_one_change_no_bit(
    workers: Workers, tmp_path: Path, text: Any, frozen: tuple[str, ...]
) -> None:
    for ahead, without in workers.run(2, with_and_without_ahead, H(text=text), frozen, str(tmp_path)):
        assert ahead == without


def what_goes_ahead() -> list[bool]:
    """Returns for frozen and trained towers, and shared ones, whether anything is done ahead."""
    whole, shared = H(text=P(tp=2)), H(text=P(tp=2), vision=P(tp=2))
    cases = [(whole, ("vision.*",)), (whole, ("projector.*",)), (shared, ("vision.*",))]
    runs = [run_of(MODELS["levels"], optim=lf.AdamW(freeze=frozen), parallel=parallel) for parallel, frozen in cases]
    return [megatron(run)[0].ahead is not None for run in runs]


def test_nothing_goes_ahead_that_is_trained_or_takes_messages(workers: Workers) -> None:
    assert workers.run(2, what_goes_ahead)[0] == [True, False, False]


def test_the_loop_is_one_step_ahead_and_gives_what_fails_there() -> None:
    from lf.data.loader import prefetch
    from lf.train.loop import _ahead

    done: list[int] = []

    def ahead(batches: list[Any]) -> list[Any]:
        (step,) = batches
        if step == 6:
            raise RuntimeError("out of memory beside the step")
        done.append(step)
        return [-step]

    state = SimpleNamespace(state=SimpleNamespace(step=2), ahead=ahead)
    job: Any = SimpleNamespace(engine=state, run=SimpleNamespace(steps=8))
    with prefetch(lambda step: [step], range(3, 9)) as read, _ahead(job, read) as feed:
        assert (item := next(feed)).value == [-3]
        assert item.step == 3
        deadline = time.monotonic() + 10
        while len(done) < 2 and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(0.05)
        assert done == [3, 4]
        assert [next(feed).value, next(feed).value] == [[-4], [-5]]
        with pytest.raises(RuntimeError, match="beside the step"):
            next(feed)


def test_a_rank_has_the_places_of_every_rank_of_the_first_stage() -> None:
    cfg = MODELS["levels"]
    batch = collate(cfg, rows_of(cfg, 1, 48, seed=3), rows_of(cfg, 1, 48, seed=3)[0])
    layout = Layout(tp=2, sp=True, cp=2, pp=2)
    for rank in range(8):
        at = place(layout, rank)
        made = slice_batch(cfg, batch, attrs.evolve(at, apart=1))
        assert made.keys() & set(MEDIA) == {"patches", "media"}
        for number, (slots, taken) in enumerate(made["places"]):
            own = slice_batch(cfg, batch, attrs.evolve(place(layout, number), pp_rank=0))
            assert torch.equal(own["slots"], slots)
            assert torch.equal(own["taken"], taken)


@pytest.mark.parametrize(
    ("parallel", "world", "said"),
    [
        (H(vision=P(tp=2)), 2, "parallel.vision.tp = 2 does not divide the parallel.text.tp * cp * pp = 1 * 1 * 1 = 1"),
        (H(vision=P(tp=4), text=P(tp=2, cp=3)), 6, "set it to a divisor of 6"),
        (H(vision=P(pp=2)), 2, "parallel.vision.pp = 2: a tower has tp and recompute alone"),
        (H(vision=P(overlap=False)), 2, "leave parallel.vision.overlap at True"),
        (H(vision=P(recompute="selective")), 1, "set full or none"),
        (H(text=P(micro_batch=2)), 1, "rows of a micro-batch are parallel.micro_batch; set that"),
        (H(text=P(tp=2)), 3, "parallel.text.tp * cp * pp = 2 * 1 * 1 = 2 does not divide the world of 3 ranks"),
    ],
)
def test_layouts_that_cannot_be_are_refused_by_name(parallel: Any, world: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        resolve(parallel, world)


@pytest.mark.parametrize(
    ("model", "parallel", "world", "said"),
    [
        ("levels", H(vision=P(tp=4), text=P(tp=4)), 4, "parallel.vision.tp = 4 does not divide model.vision.heads = 2"),
        ("levels", H(vision=P(tp=3), text=P(pp=3)), 3, "set it to a divisor of 2"),
        ("levels", H(text=P(tp=16)), 16, "parallel.text.tp = 16 does not divide model.text.attention.heads = 4"),
        ("levels", H(text=P(pp=5)), 5, "set parallel.text.stages so that it has at least 2, or lower parallel.text.pp"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_by_name(model: str, parallel: Any, world: int, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_layout(MODELS[model], resolve(parallel, world), 48)


def test_a_model_without_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Qwen3 has no images to encode; set parallel to what parallel\.text is"):
        check_run(run_of(DENSE, parallel=H()), DENSE, cpu, 1)


def test_the_config_reads_back_equal() -> None:
    run = run_of(MODELS["levels"], parallel=H(micro_batch=2, text=P(tp=2, pp=2), vision=P(recompute="full")))
    assert config.from_json(config.to_json(run)) == run
    assert resolve(run.parallel, 8) == Layout(dp=2, tp=2, sp=True, pp=2, apart=1)
