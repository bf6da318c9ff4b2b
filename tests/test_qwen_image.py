"""Qwen-Image and its edit models: parity, published folders, packing with references, positions, and units."""

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

import lf
from lf.devices.cpu import cpu
from lf.models import hf, spec
from lf.models.diffusion import qwen_image
from lf.models.diffusion.flow import Sampling
from lf.models.diffusion.latent import fake_rows
from lf.models.diffusion.packed import Packing
from lf.models.diffusion.qwen_image import QwenImage, qwen_image_tiny, unused
from lf.models.diffusion.qwen_image_model import position_tables
from lf.models.spec import Ctx
from lf.train.parity import compare
from lf.train.start import export, load_model, open_start
from tests.latent_tools import FakeLatents, batch_of, loss_of, tiny
from tests.test_train import go, metrics
from tests.workers import Workers

GOLDEN = Path(__file__).parent / "golden/diffusion"
META = Ctx(device=cpu, meta=True)

PLAIN = attrs.evolve(qwen_image_tiny, edit=False, clean_references=False)
EDIT = attrs.evolve(qwen_image_tiny, clean_references=False)
KINDS = {"text to image": PLAIN, "edit": EDIT, "edit 2511": qwen_image_tiny}

# Parity


def test_references_of_time_zero_make_the_recorded_difference(tmp_path: Path) -> None:
    folder = tmp_path / "edit"
    shutil.copytree(GOLDEN / "hf_qwen_image_edit", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"zero_cond_t": False}))
    assert not compare(folder, Ctx(device=cpu)).ok


# Published models


def test_every_preset_has_the_published_parameters() -> None:
    presets = {name: cfg for name, cfg in vars(qwen_image).items() if isinstance(cfg, QwenImage)}
    assert presets.keys() >= {"qwen_image", "qwen_image_edit", "qwen_image_edit_2509", "qwen_image_edit_2511"}
    for name, cfg in presets.items():
        if not name.endswith("tiny"):
            model = spec.build_model(cfg, META)
            assert sum(param.numel() for param in model.parameters()) == 20_430_401_088, name
    assert [presets[f"qwen_image{part}"].clean_references for part in ("", "_edit", "_edit_2511")] == [
        False,
        False,
        True,
    ]


def test_a_published_folder_comes_back_byte_for_byte(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(GOLDEN / "hf_qwen_image_edit", folder)
    (folder / "io.safetensors").unlink()
    start = open_start(str(folder), None)
    assert start.model.clean_references
    params = dict(load_model(start, Ctx(device=cpu)).named_parameters())
    export(start.model, params.__getitem__, tmp_path / "out", source=start.source, files={}, write=True)
    for name in ("diffusion_pytorch_model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    export(start.model, params.__getitem__, tmp_path / "new", source=None, files={}, write=True)
    golden = json.loads((folder / "config.json").read_text())
    assert json.loads((tmp_path / "new/config.json").read_text()) == {
        key: value for key, value in golden.items() if key != "_diffusers_version"
    }
    assert hf.read_config(tmp_path / "new") == start.model


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"guidance_embeds": True}, "guidance_embeds = true"),
        ({"use_layer3d_rope": True}, "use_layer3d_rope = true"),
        ({"use_additional_t_cond": True}, "use_additional_t_cond = true"),
        ({"in_channels": 12}, "in_channels = 12 must be out_channels = 4"),
        ({"axes_dims_rope": [4, 6]}, r"axes_dims_rope = \[4, 6\]"),
        ({"axes_dims_rope": [4, 6, 8]}, r"axes = \(4, 6, 8\) must be even and add up to head_dim = 16"),
        ({"num_layers": 0}, "num_layers = 0"),
    ],
)
def test_configs_that_lf_cannot_have_are_refused(config: dict[str, Any], told: str) -> None:
    stated = json.loads((GOLDEN / "hf_qwen_image/config.json").read_text())
    with pytest.raises(ValueError, match=told):
        qwen_image.from_hf(stated | config)


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(GOLDEN / "hf_qwen_image", folder)
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file(load_file(file) | {"addition": torch.ones(2)}, file)
    with pytest.raises(ValueError, match="unexpected in the folder: addition"):
        load_model(open_start(str(folder), None), Ctx(device=cpu))


# Packing


def test_references_are_seen_clean_and_not_trained() -> None:
    row = fake_rows(EDIT.space, 3, 1)[2]
    for cfg in (EDIT, qwen_image_tiny):
        model, batch = tiny(cfg), batch_of(cfg, [row])
        packing: Packing = batch["packing"]
        target = packing.runs[0][0] if cfg.clean_references else None
        grids = packing.grids[0]
        count = grids[0][0] * grids[0][1] * grids[0][2]
        assert len(grids) == 3
        assert target in (None, count)
        assert batch["time"].tolist() == [batch["sigma"].max(), *([0.0] if cfg.clean_references else [])]
        assert batch["noised"].tolist() == [True] * count + [False] * (sum(packing.lengths) - count)
        told = spec.forward(cfg, model, batch)
        error = (batch["noise"] - batch["latents"] - told)[:count].square()
        assert torch.allclose(loss_of(cfg, model, batch), error.mean(), rtol=1e-6)
        swapped = batch_of(cfg, [{**row, "references": [-row["references"][0], row["references"][1]]}])
        assert not torch.allclose(spec.forward(cfg, model, swapped)[:count], told[:count])
        assert torch.equal(swapped["noise"], batch["noise"])


def test_references_need_an_edit_model() -> None:
    row = fake_rows(EDIT.space, 2, 1)[1]
    with pytest.raises(ValueError, match=r"has references, and the model reads none.*use an edit model"):
        batch_of(PLAIN, [row])
    with pytest.raises(ValueError, match=r"references is .*\[3, 1, 4, 4\]"):
        batch_of(EDIT, [{**row, "references": [torch.zeros(3, 1, 4, 4)]}])
    assert batch_of(PLAIN, [{**row, "references": []}])["packing"].texts == batch_of(EDIT, [row])["packing"].texts


def test_positions_count_from_the_middle_and_texts_go_on_from_the_side() -> None:
    cfg = attrs.evolve(PLAIN, head_dim=6, axes=(2, 2, 2))
    packing = Packing(grids=(((1, 3, 4), (1, 2, 2)),), texts=(2,), runs=((16,),))
    pictures, texts = position_tables(cfg, packing, torch.device("cpu"))
    angle = torch.atan2(pictures[1], pictures[0])[:, 0].round(decimals=4).tolist()
    assert angle[0] == [0.0, -2.0, -2.0]
    assert angle[11] == [0.0, 0.0, 1.0]
    assert angle[12] == [1.0, -1.0, -1.0]
    assert angle[15] == [1.0, 0.0, 0.0]
    assert torch.atan2(texts[1], texts[0])[:, 0].round(decimals=4).tolist() == [[2.0] * 3, [3.0] * 3]


# The model


def test_the_last_block_gives_nothing_of_the_text() -> None:
    model = tiny(qwen_image_tiny)
    silent = {name for name, param in model.named_parameters() if not param.requires_grad}
    assert silent == set(unused(qwen_image_tiny))
    rows = fake_rows(EDIT.space, 2, 1)
    before = spec.forward(qwen_image_tiny, model, batch_of(qwen_image_tiny, [*rows]))
    with torch.no_grad():
        for name in silent:
            model.get_parameter(name).add_(1.0)
    assert torch.equal(before, spec.forward(qwen_image_tiny, model, batch_of(qwen_image_tiny, [*rows])))


def test_samples_are_made_beside_their_references() -> None:
    cfg = attrs.evolve(qwen_image_tiny, sampling=Sampling(steps=3, guidance=2.0))
    model, rows = tiny(cfg), fake_rows(cfg.space, 3, 1)
    with torch.no_grad():
        made = spec.sample(cfg, model, batch_of(cfg, [*rows]))
        (alone,) = spec.sample(cfg, model, batch_of(cfg, [rows[1]]))
    assert [one.shape for one in made] == [row["latents"].shape for row in rows]
    assert torch.allclose(alone, made[1], atol=1e-5)


# Runs


def small_run(**changes: Any) -> lf.Run:
    run = lf.Run(
        model=qwen_image_tiny,
        data=FakeLatents(kind="qwen_image"),
        batch=4,
        optim=lf.AdamW(lr=2e-2, eps=1e-3),
        parallel=lf.TorchParallel(micro_batch=2),
        steps=8,
        eval=lf.Eval(data=FakeLatents(kind="qwen_image", rows=3), every=4),
    )
    return attrs.evolve(run, **changes)


def test_a_run_learns_and_exports(workers: Workers, tmp_path: Path) -> None:
    workers.run(1, go, small_run(), tmp_path / "run", tmp_path)
    first, last = (line["eval_loss"] for line in metrics(tmp_path / "run") if "eval_loss" in line)
    assert last < first
    start = open_start(str(tmp_path / "run/hf"), None)
    assert start.model == attrs.evolve(qwen_image_tiny, text=start.model.text)
    load_model(start, Ctx(device=cpu))
