"""What holds of every model of latents: parity, packing, types, operations and first weights."""

import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lf.devices.cpu import cpu
from lf.models import spec, weights
from lf.models.diffusion.family import family_of
from lf.models.diffusion.latent import LatentModel, fake_rows
from lf.models.initialise import initial_tensor, rule_for
from lf.models.spec import Ctx
from lf.train.parity import compare, to_json
from tests import test_qwen_image, test_wan
from tests.latent_tools import batch_of, gradients, loss_of, near, tiny

GOLDEN = Path(__file__).parent / "golden/diffusion"
KINDS: dict[str, LatentModel] = {**test_wan.KINDS, **test_qwen_image.KINDS}
ONE_EACH = ("i2v", "edit 2511")
RECORDED = {
    "wan": ("wan", "wan_i2v", "hf_wan21_t2v", "hf_wan21_i2v", "hf_wan22_ti2v"),
    "qwenimage": ("qwen_image", "hf_qwen_image", "hf_qwen_image_edit"),
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in RECORDED for name in RECORDED[family]])
def test_golden_parity_of_every_recorded_number(family: str, name: str) -> None:
    line = to_json(compare(GOLDEN / name, Ctx(device=cpu)))
    assert line["ok"], line
    assert line["family"] == family
    single = (GOLDEN / name / "io.safetensors").is_file()
    recorded = load_file(GOLDEN / name / ("io.safetensors" if single else "outputs.safetensors"))
    grads = {key.removeprefix("grad.") for key in recorded if key.startswith(("grad.", "gradnorm."))}
    assert line["grads"].keys() == grads
    assert line["outputs"].keys() == ({"sample", "loss"} if single else {"pred", "loss", "gradnorm_total"})


@pytest.mark.parametrize("kind", KINDS)
def test_packed_samples_are_those_one_by_one(kind: str) -> None:
    cfg = KINDS[kind]
    model, rows = tiny(cfg), fake_rows(cfg.space, 4, 1)
    packed, single = batch_of(cfg, [*rows]), [batch_of(cfg, [row]) for row in rows]
    packing = packed["packing"]
    assert [len(grids) for grids in packing.grids] == ([1, 2, 3, 1] if cfg.space.references else [1] * 4)
    assert len({grids[0][1:] for grids in packing.grids}) > 1
    assert len({grids[0][0] for grids in packing.grids}) > 1
    assert len(set(packing.texts)) > 1 or cfg.space.pad_text
    assert len(packed["latents"]) == sum(packing.lengths)
    together = spec.forward(cfg, model, packed)
    alone = torch.cat([spec.forward(cfg, model, batch) for batch in single])
    assert torch.allclose(together, alone, atol=2e-6 * float(alone.detach().abs().max()))
    loss, grads = gradients(cfg, model, [packed])
    again, others = gradients(cfg, model, single)
    assert torch.allclose(loss, again, rtol=2e-6)
    near(grads, others)
    assert grads.keys() == {name for name, _ in model.named_parameters()} - set(family_of(cfg).unused)


@pytest.mark.parametrize("kind", KINDS)
def test_a_padding_row_adds_nothing(kind: str) -> None:
    cfg = KINDS[kind]
    model, rows = tiny(cfg), fake_rows(cfg.space, 2, 1)
    batch, padded = batch_of(cfg, [*rows]), batch_of(cfg, [None, *rows, None])
    loss, grads = gradients(cfg, model, [batch])
    again, others = gradients(cfg, model, [padded])
    assert padded["count"] == batch["count"] == sum(batch["packing"].lengths)
    assert torch.allclose(loss, again, rtol=2e-6)
    near(grads, others)
    empty = spec.draw(cfg, spec.collate(cfg, [None], rows[0]), 0, 0)
    assert spec.loss_weights(cfg, empty)["flow"] == 0.0
    assert spec.loss_terms(cfg, spec.forward(cfg, model, empty), empty)["flow"] == 0.0


@pytest.mark.parametrize("kind", ONE_EACH)
def test_bfloat16_keeps_float32_islands_and_computes_nearly_the_same(kind: str) -> None:
    cfg = KINDS[kind]
    batch = batch_of(cfg, fake_rows(cfg.space, 3, 0))
    exact, narrow = tiny(cfg), tiny(cfg, dtype=torch.bfloat16)
    islands = {name for name, param in narrow.named_parameters() if param.dtype == torch.float32}
    names = [name for name, _ in exact.named_parameters()]
    assert islands == {name for name in names if any(fnmatch.fnmatchcase(name, p) for p in family_of(cfg).wide)}
    assert islands >= {f"time.{layer}.{part}" for layer in ("up", "down") for part in ("weight", "bias")}
    if kind == "i2v":
        assert {"table.weight", "blocks.1.table.weight", "blocks.0.cross_norm.bias"} < islands
    a, b = (spec.forward(cfg, model, batch).detach() for model in (exact, narrow))
    assert b.dtype == torch.float32
    assert 0.0 < float((a - b).abs().max() / a.abs().max()) < 0.05


@pytest.mark.parametrize("kind", ["t2v", "text to image"])
def test_flops_are_those_that_torch_counts(kind: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    cfg = KINDS[kind]
    model, batch = tiny(cfg), spec.fake_batch(cfg, 2, 10, 0)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        spec.forward(cfg, model, batch)
    assert counter.get_total_flops() == spec.flops(cfg, 2, 10) / 3


@pytest.mark.parametrize("kind", ["t2v", *ONE_EACH])
def test_every_tensor_has_a_first_value_and_a_new_model_says_nothing(kind: str) -> None:
    cfg = KINDS[kind]
    model = spec.build_model(cfg, Ctx(device=cpu))
    with torch.no_grad():
        for name, param in model.named_parameters():
            ones = rule_for(cfg, name).kind == "ones"
            assert ones == (name.endswith("weight") and "norm" in name), name
            param.copy_(initial_tensor(cfg, weights.whole(name, tuple(param.shape)), param, 0))
    batch = batch_of(cfg, fake_rows(cfg.space, 4, 0))
    assert not spec.forward(cfg, model, batch).any()
    assert 1.0 < loss_of(cfg, model, batch) < 3.0
