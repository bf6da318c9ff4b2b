"""Plans of vision-language models: against what real small ones hold and send, and what a plan says of images."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import lf
from lf.config import load
from lf.models import spec
from lf.models.layers.shared import set_share
from lf.models.media import Media, media_flops
from lf.models.spec import Layout, Load
from lf.models.vision.memory import Counted, encoder_memory, taken
from lf.models.vision.projector import Anyres, Projector, ProjectorModule
from lf.models.vision.tower import build_tower, tower_of, unused
from lf.models.vlms.qwen_vl import qwen3_vl_8b, qwen3_vl_tiny
from lf.plan.estimate import Job, plan, worst
from lf.plan.near import nearest
from lf.plan.speed import Devices, search
from lf.plan.text import render
from lf.train.planning import job_of
from tests.cases import DENSE, run_of
from tests.test_plan_counts import check, check_peak
from tests.test_vlm_families import PUBLISHED
from tests.vlm_cases import MODELS, TOWERS
from tests.workers import Workers

P, H = lf.MegatronParallel, lf.Hetero
ROOT = Path(__file__).parents[1]
GIB = 2**30
IMAGES = (Media(grids=((1, 8, 8),)),) * 3
LARGE = (Media(grids=((1, 32, 32),)),)
CONTENTS = ((1.0, LARGE * 4), (0.5, LARGE * 4), (1.0, ()))

CASES: dict[str, tuple[int, str, Any]] = {
    "one": (1, "levels", P(micro_batch=2)),
    "one, full": (1, "windows", P(recompute="full")),
    "tp2": (2, "levels", P(tp=2)),
    "tp2 without sp": (2, "windows", P(tp=2, sp=False)),
    "pp2 vpp2": (2, "levels", P(pp=2, vpp=2, stages=(2, 1, 1, 1))),
    "cp2": (2, "levels", P(cp=2)),
    "apart pp2": (2, "levels", H(text=P(pp=2))),
    "apart tp2": (2, "levels", H(text=P(tp=2))),
    "apart tp2 without sp": (2, "windows", H(micro_batch=2, text=P(tp=2, sp=False))),
    "apart cp2": (2, "windows", H(micro_batch=2, text=P(cp=2))),
    "apart tp2 pp2": (4, "levels", H(text=P(tp=2, pp=2))),
    "apart pp2 dp2": (4, "levels", H(text=P(pp=2, recompute="full"))),
    "shared pp2": (2, "levels", H(text=P(pp=2), vision=P(tp=2))),
    "shared tp2": (2, "windows", H(text=P(tp=2), vision=P(tp=2))),
    "shared cp2 pp2": (4, "levels", H(micro_batch=2, text=P(cp=2, pp=2), vision=P(tp=2))),
    "shared tp2 pp2": (4, "windows", H(text=P(tp=2, pp=2), vision=P(tp=2))),
    "apart, full": (2, "levels", H(text=P(pp=2), vision=P(recompute="full"))),
    "shared, full": (2, "levels", H(text=P(pp=2), vision=P(tp=2, recompute="full"))),
}


def some(*default: str, of: Sequence[str]) -> list[Any]:
    """Returns cases, all but the default ones in the full tests only."""
    return [pytest.param(case, marks=() if case in default else pytest.mark.full) for case in of]


# What the backward makes again is hidden from the counting of what is kept; peaks see it.
@pytest.mark.parametrize("case", some("tp2", "apart pp2", "apart tp2 pp2", "shared pp2", of=[*CASES][:-2]))
def test_a_plan_is_what_a_step_holds_and_sends(workers: Workers, case: str) -> None:
    world, model, parallel = CASES[case]
    check(workers, world, MODELS[model], parallel, media=IMAGES)


@pytest.mark.parametrize("case", some("one", "apart tp2", of=[case for case in CASES if "dp2" not in case]))
def test_a_peak_is_what_a_step_has_alive(workers: Workers, case: str) -> None:
    world, model, parallel = CASES[case]
    check_peak(workers, world, MODELS[model], parallel, IMAGES * 2)


JOINED: dict[str, tuple[Projector, tuple[Media, ...]]] = {
    "qwen3": (Projector(), IMAGES),
    "qwen2.5": (Projector(norm="rms"), (Media(grids=((1, 8, 8),)), Media(grids=((2, 6, 4),), kind="video"))),
    "intern rms": (Projector(over="block"), (Media(grids=((1, 4, 4), (1, 8, 8))),)),
    "siglip": (Anyres(pinpoints=((16, 16), (16, 32))), (Media(grids=((1, 4, 4),) * 3, size=(14, 30)),)),
    "moon": (Projector(mean=True), IMAGES),
}


@pytest.mark.parametrize(
    ("again", "dtype", "ranks"),
    [(False, torch.float32, 1), (True, torch.float32, 1), (False, torch.bfloat16, 1), (True, torch.float32, 2)],
)
@pytest.mark.parametrize("name", JOINED)
def test_memory_of_towers_is_what_they_take_on_a_cpu(name: str, again: bool, dtype: torch.dtype, ranks: int) -> None:
    vision, (projector, media) = TOWERS[name], JOINED[name]
    planned = encoder_memory(vision, projector, 48, dtype, media, again=again, together=False, ranks=ranks)
    tower, joined = build_tower(vision).to(dtype), ProjectorModule(projector, tower_of(vision), 48).to(dtype)
    tower.again = again
    share = Counted(size=ranks)
    for part in (tower, joined):
        set_share(part, share if ranks > 1 else None)
    for unseen in unused(vision):
        tower.get_parameter(unseen).requires_grad_(False)
    found = taken(
        tower, joined, torch.zeros(sum(item.patches for item in media), joined.tower.numbers), media, together=False
    )
    assert planned.kept == pytest.approx(found.kept, rel=0.02)
    assert planned.working == pytest.approx(found.working, rel=0.15)
    assert planned.sums == tuple(share.sums)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_were_published(name: str) -> None:
    cfg, published = PUBLISHED[name]
    made = spec.blocks(cfg, Layout(), Load(rows=1, length=64))
    assert sum((w.size - w.padding) * block.count for block in made for w in block.weights) == published


JOB = Job(model=qwen3_vl_8b, parallel=P(tp=4, pp=4), world=64, batch=64, length=4096, itemsize=2, media=LARGE * 4)
APART = attrs.evolve(JOB, vision=P())
SHARED = attrs.evolve(JOB, vision=P(tp=2))


def test_thousands_of_ranks_that_encode_apart_are_planned_in_seconds() -> None:
    started = time.process_time()
    made = plan(attrs.evolve(SHARED, parallel=P(tp=8, pp=12), world=4032, batch=2048, known="as declared"))
    text = render(made, 60 * GIB)
    assert time.process_time() - started < 10.0
    assert "images of a row, as declared: 4 of 1 x 32 x 32 patches, 1,024 tokens together\n" in text
    assert "encoded by all 96 ranks of a replica, 2 together" in text
    assert "copy of tower and projector" in text


def test_operations_count_the_images_that_rows_have_on_average() -> None:
    whole, half, none = (plan(attrs.evolve(JOB, usual=usual, media=media)) for usual, media in CONTENTS)
    assert none.media_flops == 0.0
    assert half.media_flops == whole.media_flops / 2 == whole.flops - half.flops == half.flops - none.flops
    assert whole.media_flops == 64 * 4 * media_flops(qwen3_vl_8b, LARGE[0])
    one = [sum(made.stages[0].forward) for made in (whole, half, none)]
    assert one[0] - one[1] == pytest.approx(one[1] - one[2])
    # Memory is that of the fullest row.
    assert whole.stages[0].memory == half.stages[0].memory != none.stages[0].memory


def test_ranks_that_encode_apart_share_what_the_first_stage_else_does_alone() -> None:
    alone, apart, shared = plan(JOB), plan(APART), plan(SHARED)
    assert apart.flops == alone.flops
    assert apart.parameters == alone.parameters
    # Forward and two backward passes, over the ranks of each replica.
    work = sum(stage.apart * stage.ranks for stage in apart.stages)
    assert work == pytest.approx(apart.media_flops)
    assert [stage.apart for stage in shared.stages] == [stage.apart for stage in apart.stages]
    assert {stage.apart for stage in alone.stages} == {0.0}
    assert apart.bubble < alone.bubble
    assert apart.stages[1].memory["none"].parameters > alone.stages[1].memory["none"].parameters
    assert apart.stages[1].elements == alone.stages[1].elements


def test_layouts_that_would_fit_name_the_fields_of_both_parts() -> None:
    job = attrs.evolve(APART, batch=256, parallel=P(tp=4, pp=4, recompute="full"))
    limit = 0.95 * worst(plan(job))[1]
    found = nearest(job, limit)
    assert any(("vision.recompute", "full") in option.changes for option in found)
    for option in found:
        assert all(name == "micro_batch" or name.startswith(("text.", "vision.")) for name, _ in option.changes)
        assert option.peak <= limit
    fastest = search(attrs.evolve(SHARED, world=8, parallel=P(tp=2, pp=2)), Devices())
    assert [each.seconds for each in fastest] == sorted(each.seconds for each in fastest)
    assert all(each.job.vision is not None for each in fastest)


def test_images_of_a_row_are_those_of_the_data_or_declared() -> None:
    run = load(ROOT / "examples/vlm_pair.py", "apart")
    job = job_of(run, 4, length=20)
    assert (job.media, job.usual) == ((Media(grids=((1, 8, 8),)),), 1.0)
    assert job.known == "the fullest of the data's first 256"
    assert (job.vision, job.parallel.micro_batch, job.parallel.pp) == (P(), 4, 2)
    assert job_of(run, 4, length=20, media=()).known == "as declared"
    made = plan(job)
    fullest = "images of a row, the fullest of the data's first 256: 1 of 1 x 8 x 8 patches, 16 tokens together"
    assert fullest in render(made)
    assert "would fit: --parallel.text.tp 1 --parallel.vision.recompute full" in render(made, 0.9 * worst(made)[1])
    assert "no layout of as many ranks was found that fits; take more ranks" in render(made, 1e6)


@pytest.mark.parametrize(
    ("changes", "media", "said"),
    [
        ({}, None, "the data cannot say what images a row has .* declare them by --images and --grid"),
        ({"model": DENSE}, LARGE, "--images = 1, but .*Qwen3 takes no images; leave it out"),
        ({"model": DENSE, "parallel": H()}, None, "Qwen3 has no images to encode"),
        ({"parallel": H(text=P(tp=3))}, LARGE, "parallel.text.tp \\* cp \\* pp = 3 .* does not divide the world of 4"),
        ({}, LARGE * 20, "images of the plan: 20 take 5,120 tokens of a row, which has 4,096"),
        ({}, (Media(grids=((1, 31, 32),)),), "images of the plan: a picture of 31 x 32 patches cannot be joined"),
    ],
)
def test_images_that_cannot_be_planned_are_refused(changes: Any, media: Any, said: str) -> None:
    run = attrs.evolve(run_of(qwen3_vl_tiny), **changes)
    with pytest.raises(ValueError, match=said):
        plan(job_of(run, 4, length=4096, media=media))
