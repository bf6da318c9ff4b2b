"""Vision-language models: they equal one process in every layout, and refuse what does not fit."""

import fnmatch
import re
from typing import Any

import attrs
import numpy as np
import pytest
import torch

import lf
from lf.models.decoder import decoder_inputs
from lf.models.media import Media
from lf.models.parts import Mtp
from lf.models.spec import Layout, check_layout, collate, fake_batch, forward, slice_batch
from lf.models.vision.projector import Anyres, Projector
from lf.models.vision.siglip import Siglip
from lf.models.vlms.llava import llava_onevision_tiny
from tests.cases import gradients, megatron, off, run_of
from tests.vlm_cases import IMAGE, MODELS, TEXT, rows_of
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
LATER = {
    *((layout, "levels") for layout in ("cp2 ulysses", "pp2 dp2", "pp2")),
    *((layout, "windows") for layout in ("dp2", "tp2")),
    ("cp2", "experts"),
}
"""Pairs in the full tests only."""


def micro_batches(cfg: Any, parallel: lf.MegatronParallel, layout: Layout) -> list[Any]:
    rows, size = rows_of(cfg, 8, 48, seed=3), parallel.micro_batch
    micro = [collate(cfg, rows[i : i + size], rows[0]) for i in range(0, len(rows), size)]
    return micro[layout.dp_rank :: layout.dp]


def one_step(model: str, parallel: lf.MegatronParallel) -> Any:
    cfg = MODELS[model]
    engine, ctx = megatron(run_of(cfg, optim=lf.AdamW(clip=0.0), parallel=parallel))
    return gradients(engine, ctx, micro_batches(cfg, parallel, ctx.layout))


@pytest.fixture(scope="module")
def reference(workers: Workers) -> Any:
    made: dict[str, Any] = {}

    def get(model: str) -> Any:
        if model not in made:
            (made[model],) = workers.run(1, one_step, model, P())
        return made[model]

    return get


@pytest.mark.parametrize(
    ("layout", "model"), [pytest.param(*pair, marks=pytest.mark.full if pair in LATER else ()) for pair in PAIRS]
)
def test_gradients_do_not_depend_on_the_layout(workers: Workers, reference: Any, layout: str, model: str) -> None:
    world, parallel = LAYOUTS[layout]
    grads, norm, loss, _ = reference(model)
    for grads_, norm_, loss_, _ in workers.run(world, one_step, model, parallel):
        assert abs(loss_ - loss) <= GATE * loss
        assert abs(norm_ - norm) <= GATE * norm
        assert grads_.keys() == grads.keys()
        for name, grad in grads_.items():
            assert off(grad, grads[name]) <= GATE, name


def frozen_step(parallel: lf.MegatronParallel, patterns: tuple[str, ...]) -> Any:
    cfg = MODELS["levels"]
    engine, ctx = megatron(run_of(cfg, optim=lf.AdamW(clip=0.0, freeze=patterns), parallel=parallel))
    return gradients(engine, ctx, micro_batches(cfg, parallel, ctx.layout))


@pytest.mark.parametrize(
    ("layout", "patterns"),
    [
        ("one, two rows", ("vision.*",)),
        ("dp2", ("vision.*", "projector.*")),
        ("tp2", ("embedding.*", "decoder.*", "output_layer.*")),
        ("pp2", ("vision.*",)),
    ],
)
def test_frozen_parts_get_no_gradient_and_change_none(
    workers: Workers, reference: Any, layout: str, patterns: tuple[str, ...]
) -> None:
    world, parallel = LAYOUTS[layout]
    grads, _, loss, _ = reference("levels")
    for grads_, _, loss_, _ in workers.run(world, frozen_step, parallel, patterns):
        assert abs(loss_ - loss) <= GATE * loss
        assert grads_.keys() == {name for name in grads if not any(fnmatch.fnmatch(name, p) for p in patterns)}
        for name, grad in grads_.items():
            assert off(grad, grads[name]) <= GATE, name


def refused_freeze(parallel: lf.MegatronParallel, patterns: tuple[str, ...]) -> str:
    with pytest.raises(ValueError, match=r"optim\.freeze") as error:
        megatron(run_of(MODELS["levels"], optim=lf.AdamW(freeze=patterns), parallel=parallel))
    return str(error.value)


@pytest.mark.parametrize(
    ("layout", "patterns", "said"),
    [
        ("pp2", ("decoder.*", "output_layer.*"), "leaves nothing to train on pipeline stage 1; lower parallel.pp"),
        ("pp2", ("tower.*",), "no tensor of the model matches 'tower.*'"),
    ],
)
def test_freezing_nothing_or_a_whole_stage_is_refused_on_every_rank(
    workers: Workers, layout: str, patterns: tuple[str, ...], said: str
) -> None:
    world, parallel = LAYOUTS[layout]
    assert all(said in error for error in workers.run(world, refused_freeze, parallel, patterns))


def text_alone(parallel: lf.MegatronParallel) -> Any:
    cfg = MODELS["levels"]
    rows: list[Any] = rows_of(cfg, 8, 48, seed=3)[2::3]
    assert len(rows) == 2
    assert not any(row["media"] for row in rows)
    engine, ctx = megatron(run_of(cfg, optim=lf.AdamW(clip=0.0), parallel=parallel))
    own = rows[ctx.layout.dp_rank :: ctx.layout.dp]
    made = gradients(engine, ctx, [collate(cfg, [row], row) for row in own])
    plain, ctx = megatron(run_of(cfg.text, optim=lf.AdamW(clip=0.0), parallel=parallel))
    return made, gradients(plain, ctx, [collate(cfg.text, [row], row) for row in own])


@pytest.mark.parametrize("layout", ["one, two rows", "dp2"])
def test_text_alone_is_the_decoder_and_leaves_zero_gradients_in_the_tower(workers: Workers, layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    ((grads, _, loss, _), (plain, _, wanted, _)), *_ = workers.run(world, text_alone, parallel)
    assert loss == pytest.approx(wanted, rel=GATE)
    encoder = grads.keys() - plain.keys()
    assert {name.split(".")[0] for name in encoder} == {"vision", "projector"}
    assert not any(grads[name].any() for name in encoder)
    assert all(off(grads[name], plain[name]) <= GATE for name in plain)


def built(cfg: Any) -> Any:
    """Returns a model with drawn weights in this process, and its context."""
    import torch.distributed as dist

    from lf.devices.cpu import cpu
    from lf.models.spec import build_model
    from lf.parallel.config import resolve
    from lf.parallel.megatron import make_context, placements
    from lf.train.state import initial_value

    assert dist.get_world_size() == 1
    ctx = make_context(P(), resolve(P(), 1), cpu, torch.float32)
    model = build_model(cfg, ctx)
    with torch.no_grad():
        for tensor, placed in placements(model, ctx):
            tensor.copy_(initial_value(cfg, 0, placed, tensor, None) * 3)
    return model, ctx


def in_other_ways(model: str) -> Any:
    """Returns the losses of rows, of the rows with their images in another order, and from features made elsewhere."""
    from lf.models.layers.media import Features

    cfg = MODELS[model]
    module, _ = built(cfg)
    rows = [row for row in rows_of(cfg, 6, 48, seed=4) if row["media"]]
    whole = slice_batch(cfg, collate(cfg, rows, rows[0]), Layout())
    turned = rows[::-1]
    other = slice_batch(cfg, collate(cfg, turned, rows[0]), Layout())
    inputs = decoder_inputs(cfg.text, whole)
    tokens, levels = module.encode(whole["patches"], whole["media"])
    features = Features(slots=whole["slots"], rows=tokens[whole["taken"]], levels=levels)
    with torch.no_grad():
        return (
            forward(cfg, module, whole).sum(),
            forward(cfg, module, other).sum(),
            module(**inputs, features=features).sum(),
        )


@pytest.mark.parametrize("model", ["levels", "windows"])
def test_neither_the_order_of_rows_nor_where_features_are_made_changes_the_loss(workers: Workers, model: str) -> None:
    ((whole, other, elsewhere),) = workers.run(1, in_other_ways, model)
    assert torch.allclose(whole, other, rtol=1e-5)
    assert torch.equal(whole, elsewhere)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"projector": Projector(merge=3)}, "blocks of 2 x 2, but projector.merge = 3; set it to 2"),
        ({"projector": Anyres()}, "merge = 1"),
        ({"projector": Projector(mean=True)}, "the tower has levels, whose frames stay apart"),
        ({"image_token": 131}, "image_token = 131 must be below text.vocab = 131"),
        ({"text": attrs.evolve(TEXT, layers=1)}, "2 levels, one for each of the decoder's first layers"),
        ({"text": attrs.evolve(TEXT, mtp=Mtp())}, "set text.mtp to None"),
        ({"vision": Siglip(image=20, patch=4), "projector": Projector()}, "does not divide the tower's 5 patches"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_the_cure(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        attrs.evolve(MODELS["levels"], **change)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (Layout(pp=4, stages=(1, 1, 1, 2)), "the first of 4 pipeline chunks has 1; set parallel.stages"),
        (Layout(tp=3), "does not divide model.text.attention.heads = 4"),
        (Layout(cp=5), "cannot be cut in 10 equal pieces"),
    ],
)
def test_layouts_that_do_not_fit_are_refused_with_the_cure(parallel: Layout, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        check_layout(MODELS["levels"], parallel, 48)


def _without(row: dict[str, Any], **change: Any) -> dict[str, Any]:
    return {**row, **change}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: {"tokens": np.where(row["tokens"] == IMAGE, 0, row["tokens"])}, "token 128 stands 0 times"),
        (lambda row: {"media": row["media"] * 2}, "patches"),
        (lambda row: {"patches": row["patches"][1:]}, "patches of 96 numbers, but `patches` has"),
        (lambda row: {"media": (Media(grids=((1, 3, 4),)),)}, "cannot be joined in blocks of 2"),
        (lambda row: {"lengths": (3, 45)}, "a document ends at token 3, inside an image"),
        (lambda row: {"tokens": np.roll(row["tokens"], 1) * 0 + _apart(row)}, "are interrupted"),
    ],
)
def test_rows_whose_parts_do_not_account_for_each_other_are_refused(change: Any, said: str) -> None:
    cfg = MODELS["levels"]
    row = rows_of(cfg, 1, 48, seed=3)[0]
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        collate(cfg, [_without(row, **change(row))], row)
    assert "row0" in str(error.value)


def _apart(row: dict[str, Any]) -> Any:
    """Returns the row's tokens with the last of an image moved to the end."""
    tokens = row["tokens"].copy()
    last = int(np.flatnonzero(tokens == IMAGE)[-1])
    tokens[[last, -1]] = tokens[[-1, last]]
    return tokens


def test_one_size_of_picture_is_all_that_some_towers_take() -> None:
    cfg = llava_onevision_tiny
    row = fake_batch(cfg, 1, 32, 0)
    assert len(row["slots"]) == 17
    media = Media(grids=((1, 4, 2),), size=(16, 8))
    bad = {"tokens": np.zeros(4), "labels": np.zeros(4), "lengths": (4,), "real": 4, "id": "x", "media": (media,)}
    with pytest.raises(ValueError, match=r"row x: a picture of \(1, 4, 2\) .* but the tower takes \(1, 4, 4\) alone"):
        collate(cfg, [bad], bad)
