"""Plans of vision-language models: against what real small ones hold and send, and what a plan says of images."""

from typing import Any

import attrs
import pytest
import torch

import lf
from lf.models.media import Media
from lf.models.vision.intern_vit import InternVision
from lf.models.vision.memory import encoder_memory, taken
from lf.models.vision.moon_vit import MoonVision
from lf.models.vision.projector import Anyres, Projector, ProjectorModule
from lf.models.vision.siglip import Siglip
from lf.models.vision.tower import build_tower, tower_of, unused
from tests.test_plan_counts import check, check_peak
from tests.vlm_cases import MODELS, QWEN2_5, QWEN3
from tests.workers import Workers

P, H = lf.MegatronParallel, lf.Hetero
IMAGES = (Media(grids=((1, 8, 8),)),) * 2

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
    "apart cp2": (2, "windows", H(text=P(cp=2))),
    "apart tp2 pp2": (4, "windows", H(text=P(tp=2, pp=2))),
    "apart pp2 dp2": (4, "levels", H(text=P(pp=2, recompute="full"))),
}


@pytest.mark.parametrize("case", CASES)
def test_a_plan_is_what_a_step_holds_and_sends(workers: Workers, case: str) -> None:
    world, model, parallel = CASES[case]
    check(workers, world, MODELS[model], parallel, media=IMAGES)


@pytest.mark.parametrize("case", ["one", "one, full", "tp2", "apart pp2", "apart tp2", "apart tp2 pp2"])
def test_a_peak_is_what_a_step_has_alive(workers: Workers, case: str) -> None:
    world, model, parallel = CASES[case]
    check_peak(workers, world, MODELS[model], parallel, IMAGES * 2)


TOWERS = {
    "qwen3": (QWEN3, Projector(), IMAGES),
    "qwen2.5": (QWEN2_5, Projector(norm="rms"), (Media(grids=((1, 8, 8),)), Media(grids=((2, 6, 4),), kind="video"))),
    "intern": (
        InternVision(width=32, depth=2, mlp=48, heads=4, image=16, patch=4, norm="rms", qk_norm=True),
        Projector(over="block"),
        (Media(grids=((1, 4, 4), (1, 8, 8))),),
    ),
    "siglip": (
        Siglip(width=32, depth=2, mlp=48, heads=4, image=16, patch=4),
        Anyres(pinpoints=((16, 16), (16, 32))),
        (Media(grids=((1, 4, 4),) * 3, size=(14, 30)),),
    ),
    "moon": (MoonVision(width=32, depth=2, mlp=48, heads=2, patch=4, side=6), Projector(mean=True), IMAGES),
}


@pytest.mark.parametrize(("again", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)])
@pytest.mark.parametrize("name", TOWERS)
def test_memory_of_towers_is_what_they_take_on_a_cpu(name: str, again: bool, dtype: torch.dtype) -> None:
    vision, projector, media = TOWERS[name]
    planned = encoder_memory(vision, projector, 48, dtype, media, again=again, together=False)
    tower, joined = build_tower(vision).to(dtype), ProjectorModule(projector, tower_of(vision), 48).to(dtype)
    tower.again = again
    for unseen in unused(vision):
        tower.get_parameter(unseen).requires_grad_(False)
    found = taken(tower, joined, torch.zeros(sum(item.patches for item in media), joined.tower.numbers), media, together=False)
    assert planned.kept == pytest.approx(found.kept, rel=0.02)
    assert planned.working == pytest.approx(found.working, rel=0.15)
