"""Pi0.5: parity, published checkpoints, what the loss counts, draws, and runs on the torch path."""

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from lf.devices.cpu import cpu
from lf.models import spec, weights
from lf.models.embodied import pi05, pi05_config, robot
from lf.models.embodied.pi05 import Pi05, pi05_base, pi05_tiny
from lf.models.hf_folder import open_folder
from lf.models.layouts import fitted
from lf.models.spec import Batch, Ctx
from lf.train.parity import compare, to_json
from lf.train.start import export, load_model, open_start

GOLDEN = Path(__file__).parent / "golden/pi05"
META = Ctx(device=cpu, meta=True)


def tiny(seed: int = 0) -> torch.nn.Module:
    """Returns the tiny model with random weights everywhere, adaptive norms too."""
    model = spec.build_model(pi05_tiny, Ctx(device=cpu))
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=gen) * 0.15)
    return model


def batch_of(rows: list[dict[str, Any] | None], cfg: Pi05 = pi05_tiny) -> Batch:
    like = next(row for row in rows if row is not None)
    return spec.draw(cfg, spec.collate(cfg, rows, like), 3, 5)


def rows_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return robot.fake_rows(pi05_tiny.space, count, seed)


def loss_of(model: torch.nn.Module, batch: Batch, cfg: Pi05 = pi05_tiny) -> torch.Tensor:
    terms = spec.loss_terms(cfg, spec.forward(cfg, model, batch), batch)
    return terms["flow"] / spec.loss_weights(cfg, batch)["flow"]


# Parity


def test_golden_parity_of_every_recorded_number() -> None:
    line = to_json(compare(GOLDEN, Ctx(device=cpu)))
    recorded = load_file(GOLDEN / "outputs.safetensors")
    assert line["ok"], line
    assert {*line["outputs"], *line["grads"]} == {name.removeprefix("grad.") for name in recorded}
    assert line["family"] == "pi05"


@pytest.mark.parametrize(
    "damage", ["v_t", "pre.state_bins", "attention_mask_2d", "grad.time_mlp_in.weight", "gradnorm.action_in_proj.bias"]
)
def test_a_recorded_number_that_is_off_is_found(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "pi05"
    shutil.copytree(GOLDEN, folder)
    recorded = load_file(folder / "outputs.safetensors")
    value = recorded[damage]
    recorded[damage] = (
        ~value
        if value.dtype == torch.bool
        else value + (value.abs().max() * 1e-3).to(value.dtype) + (0 if value.is_floating_point() else 1)
    )
    save_file(recorded, folder / "outputs.safetensors")
    assert not compare(folder, Ctx(device=cpu)).ok


# Published checkpoints


def published() -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns every tensor of the published base model; `{N}` in the list stands for layers 0 to N - 1."""
    found = {}
    for line in (GOLDEN / "published.txt").read_text().splitlines():
        name, shape, dtype = line.split(" | ")
        count = int(name.partition("{")[2].partition("}")[0] or 0)
        for layer in range(count or 1):
            found[name.replace(f"{{{count}}}", str(layer))] = (tuple(json.loads(shape)), getattr(torch, dtype))
    return found


def test_the_base_model_has_the_tensors_of_the_published_one() -> None:
    model = spec.build_model(pi05_base, attrs.evolve(META, dtype=torch.bfloat16))
    params = dict(model.named_parameters())
    assert all(param.is_meta for param in params.values())
    table = spec.weight_map(pi05_base)
    made = {name: (tuple(t.shape), t.dtype) for name, t in weights.export(table, params.__getitem__)}
    listed = published()
    assert len(listed) == 813
    tied, unused = "paligemma_with_expert.paligemma.lm_head.weight", "paligemma_with_expert.gemma_expert.lm_head.weight"
    assert listed.keys() - made.keys() == {tied, unused}
    assert made == {name: value for name, value in listed.items() if name in made}
    assert unused in table.carried
    assert isinstance(table.by_hf[tied], weights.Duplicate)
    assert sum(param.numel() for param in params.values()) == 3_353_433_872


def checkpoint(folder: Path, dialect: str, *, prefix: str = "", keep: str = "embed", **more: torch.Tensor) -> Path:
    """Writes the golden weights as a published checkpoint: bfloat16 where published ones are, and another layout."""
    table = spec.weight_map(pi05_tiny)
    wide = spec.build_model(pi05_tiny, attrs.evolve(META, dtype=torch.bfloat16))
    dtypes = {name: t.dtype for name, t in weights.export(table, dict(wide.named_parameters()).__getitem__)}
    stored = load_file(GOLDEN / "weights.safetensors")
    stored = {name: value.to(dtypes.get(name, torch.bfloat16)) for name, value in stored.items()}
    head = pi05.EMBED.replace("model.language_model.embed_tokens", "lm_head")
    if keep != "embed":
        stored[head] = stored[pi05.EMBED].clone()
    if keep == "head":
        del stored[pi05.EMBED]
    stored |= more
    folder.mkdir(parents=True)
    save_file({prefix + name: value for name, value in stored.items()}, folder / "model.safetensors")
    config = pi05_config.to_hf(pi05_tiny)
    if dialect == "openpi":
        sizes = {key: config[key] for key in ("vision", "vlm", "action_expert", "vocab_size")}
        config = {"action_dim": 8, "action_horizon": 10, "max_token_len": 12, "num_cameras": 2, **sizes}
        config |= {"paligemma_variant": "gemma_2b", "precision": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LAYOUTS: dict[str, dict[str, Any]] = {
    "openpi": {"dialect": "openpi"},
    "openpi, both of the tied": {"dialect": "openpi", "keep": "both"},
    "openpi, the head alone": {"dialect": "openpi", "keep": "head"},
    "lerobot": {"dialect": "lerobot", "prefix": "model.", "keep": "head"},
    "lerobot, left over": {
        "dialect": "lerobot",
        "prefix": "model.",
        "state_proj.weight": torch.ones(3, 2),
        "paligemma_with_expert.gemma_expert.model.layers.1.input_layernorm.weight": torch.ones(32),
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_checkpoint_comes_back_byte_for_byte(tmp_path: Path, layout: str) -> None:
    folder = checkpoint(tmp_path / "in", **LAYOUTS[layout])
    start = open_start(str(folder), None)
    assert start.model == pi05_tiny
    model = load_model(start, Ctx(device=cpu))
    embed = load_file(GOLDEN / "weights.safetensors")[pi05.EMBED].bfloat16().float()
    params = dict(model.named_parameters())
    assert torch.equal(params["embed.weight"], embed)
    export(start.model, params.__getitem__, tmp_path / "out", source=start.source, files={}, write=True)
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"extra.weight": torch.ones(2)}, "unexpected in the folder: extra.weight"),
        ({"action_in_proj.bias": torch.ones(3)}, "of the wrong shape"),
        ({"keep": "both", pi05.EMBED: torch.zeros(160, 64)}, "stored twice with different values"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    start = open_start(str(checkpoint(tmp_path / "in", "openpi", **change)), None)
    with pytest.raises(ValueError, match=told):
        load_model(start, Ctx(device=cpu))


def test_older_names_are_read_and_kept(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in", "lerobot", prefix="model.")
    stored = {
        name.replace(".time_mlp", ".action_time_mlp"): t for name, t in load_file(folder / "model.safetensors").items()
    }
    save_file(stored, folder / "model.safetensors")
    table = fitted(spec.weight_map(pi05_tiny), open_folder(folder).names)
    assert weights.hf_names(table.by_lf["time_in.weight"]) == ("model.action_time_mlp_in.weight",)
    weights.check(table, open_folder(folder))
