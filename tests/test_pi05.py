"""Pi0.5: parity, published checkpoints, what the loss counts, draws, and runs on the torch path."""

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import lf
from lf.data.source import DataCtx, Row, open_data
from lf.devices.cpu import cpu
from lf.models import hf, spec, weights
from lf.models.embodied import pi05, pi05_config, robot
from lf.models.embodied.pi05 import Pi05, pi05_base, pi05_tiny
from lf.models.embodied.pi05_model import Pi05Model, noisy, visible
from lf.models.hf_folder import open_folder
from lf.models.layers.gemma import positions, rope_of
from lf.models.layers.rope import rotate
from lf.models.layouts import fitted
from lf.models.spec import Batch, Ctx
from lf.train.convert import export_folder, import_folder
from lf.train.parity import compare, to_json
from lf.train.run import check_run
from lf.train.start import export, load_model, open_start
from tests.test_train import go, metrics, tensors
from tests.workers import Workers

GOLDEN = Path(__file__).parent / "golden/pi05"
META = Ctx(device=cpu, meta=True)


def tiny(seed: int = 0, cfg: Pi05 = pi05_tiny) -> Pi05Model:
    """Returns a small model with random weights everywhere, adaptive norms too."""
    model = spec.build_model(cfg, Ctx(device=cpu))
    assert isinstance(model, Pi05Model)
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
    # safetensors' strict loader refuses a file with both of a tied pair.
    assert listed.keys() - made.keys() == {tied}
    assert {**made, unused: listed[unused]} == {name: value for name, value in listed.items() if name in made}
    assert made[unused][0] == listed[unused][0]
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


def test_a_published_checkpoint_is_converted_and_comes_back(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in", **LAYOUTS["lerobot"])
    rows = import_folder(folder, tmp_path / "lf").rows
    assert {row["rule"] for row in rows} == {"Same", "Stack", "Carried"}
    export_folder(tmp_path / "lf", tmp_path / "out")
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_older_names_are_read_and_kept(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in", "lerobot", prefix="model.")
    stored = {
        name.replace(".time_mlp", ".action_time_mlp"): t for name, t in load_file(folder / "model.safetensors").items()
    }
    save_file(stored, folder / "model.safetensors")
    table = fitted(spec.weight_map(pi05_tiny), open_folder(folder).names)
    assert weights.hf_names(table.by_lf["time_in.weight"]) == ("model.action_time_mlp_in.weight",)
    weights.check(table, open_folder(folder))


CONFIGS: dict[str, tuple[dict[str, Any], Pi05]] = {
    "lerobot's base": ({"type": "pi05", "chunk_size": 50, "n_action_steps": 10, "max_action_dim": 32}, pi05_base),
    "openpi's": (
        {"action_dim": 32, "action_horizon": 10, "paligemma_variant": "gemma_2b", "precision": "bfloat16"},
        pi05.pi05_libero,
    ),
    "cameras of a dataset": (
        {
            "type": "pi05",
            "input_features": {
                "observation.images.top": {"type": "VISUAL", "shape": [3, 480, 640]},
                "observation.state": {"type": "STATE", "shape": [6]},
            },
        },
        attrs.evolve(pi05_base, cameras=("top",)),
    ),
    "golden": (json.loads((GOLDEN / "config.json").read_text()), pi05_tiny),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_are_read_and_stay_as_they_were(tmp_path: Path, name: str) -> None:
    config, expected = CONFIGS[name]
    raw = json.dumps(config).encode()
    (tmp_path / "config.json").write_bytes(raw)
    assert hf.read_config(tmp_path) == expected
    assert hf.config_bytes(expected, raw) == raw
    (tmp_path / "config.json").write_bytes(hf.config_bytes(expected))
    assert hf.read_config(tmp_path) == expected


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"paligemma_variant": "gemma_7b"}, "gemma_7b.*lf knows gemma_2b, gemma_300m"),
        ({"n_obs_steps": 2}, "n_obs_steps = 2"),
        ({"image_resolution": [224, 320]}, r"image_resolution = \[224, 320\]"),
        ({"image_resolution": 224}, "image_resolution = 224 must be a list"),
        ({"input_features": ["top"]}, r"input_features = \['top'\] must be an object"),
        ({"vlm": 64}, "vlm = 64 must be an object with width, depth"),
        ({"vlm": {"width": 64}}, "depth is missing"),
        ({"chunk_size": 0}, "chunk_size = 0"),
        (
            {"action_expert_variant": "gemma_2b", "vlm": pi05_config.to_hf(pi05_tiny)["vlm"]},
            "differ in depth: 2 and 18",
        ),
    ],
)
def test_configs_that_lf_cannot_have_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        pi05.from_hf(config)


# The loss and what it counts


def test_the_loss_is_the_mean_over_real_steps_and_dims_or_as_published() -> None:
    model, rows = tiny(), rows_of(3)
    steps = [int((~row["action_is_pad"]).sum()) for row in rows]
    dims = [row["actions"].shape[1] for row in rows]
    assert min(steps) < 10
    counts = {
        "valid": sum(h * d for h, d in zip(steps, dims, strict=True)),
        "lerobot": sum(10 * d for d in dims),
        "openpi": 3 * 10 * 8,
    }
    for counted, entries in counts.items():
        cfg = attrs.evolve(pi05_tiny, counted=counted)
        batch = batch_of([*rows, None], cfg)
        assert int(spec.loss_weights(cfg, batch)["flow"]) == entries
        error = (batch["noise"] - batch["actions"] - spec.forward(cfg, model, batch)).square()
        kept = [
            error[i, : steps[i] if counted == "valid" else 10, : 8 if counted == "openpi" else dims[i]].sum()
            for i in range(3)
        ]
        assert torch.allclose(loss_of(model, batch, cfg), torch.stack(kept).sum() / entries, rtol=1e-6)


def gradients(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def with_padding(row: dict[str, Any], value: float) -> dict[str, Any]:
    """Returns a row whose steps after the end of the episode hold another value."""
    actions = np.where(row["action_is_pad"][:, None], value, row["actions"]).astype(np.float32)
    return {**row, "actions": actions}


def test_what_is_padding_has_no_influence_on_loss_or_gradients() -> None:
    model, rows = tiny(), rows_of(3)
    assert any(row["action_is_pad"].any() for row in rows)
    batch = batch_of([*rows])
    loss, grads = gradients(model, batch)
    absent = ~batch["cameras"]
    assert absent.any()
    silent = ~batch["words"]
    others = {
        "padded steps": batch_of([with_padding(row, 1e6) for row in rows]),
        "absent cameras": {**batch, "images": torch.where(absent[..., None, None, None], 3.0, batch["images"])},
        "padded prompt": {**batch, "prompt": torch.where(silent, 7, batch["prompt"])},
    }
    for name, other in others.items():
        again, moved = gradients(model, other)
        assert torch.equal(loss, again), name
        for key, grad in grads.items():
            assert torch.allclose(grad, moved[key], atol=1e-6 * float(grad.abs().max())), (name, key)


def test_batches_leave_out_what_is_padding_in_every_row() -> None:
    cfg = attrs.evolve(pi05_tiny, cameras=("a", "b", "c"), prompt=20)
    model, rows = tiny(cfg=cfg), robot.fake_rows(cfg.space, 3, 0)
    for row, words in zip(rows, (3, 9, 5), strict=True):
        row["prompt"], row["images"] = np.arange(words), {"c": row["images"]["a"]}
    rows[1]["images"]["a"] = rows[0]["images"]["c"]
    whole = spec.draw(cfg, robot.robot_batch(cfg.space, rows), 3, 5)
    short = batch_of([*rows], cfg)
    assert (short["images"].shape[1], short["cameras"].shape, short["prompt"].shape) == (2, (3, 2), (3, 16))
    assert whole["images"].shape[1] == 3
    (loss, grads), (again, more) = (gradients(model, batch) for batch in (whole, short))
    assert torch.allclose(loss, again, rtol=1e-6)
    assert all(torch.allclose(grad, more[name], atol=2e-6 * float(grad.abs().max())) for name, grad in grads.items())
    with torch.no_grad():
        a, b = (spec.sample(cfg, model, batch) for batch in (whole, short))
    assert torch.allclose(a, b, atol=1e-5)
    nobody = spec.collate(cfg, [None, None], rows[0])
    assert nobody["images"].shape[1] == 1
    assert torch.isfinite(spec.forward(cfg, model, spec.draw(cfg, nobody, 0, 0))).all()
    full = {**rows[0], "prompt": np.arange(20)}
    assert spec.collate(cfg, [full, rows[1]], full)["prompt"].shape == (2, 20)


def test_a_padding_row_adds_nothing() -> None:
    model, rows = tiny(), rows_of(2)
    loss, grads = gradients(model, batch_of([*rows]))
    again, more = gradients(model, batch_of([*rows, None]))
    assert torch.allclose(loss, again, rtol=1e-6)
    assert all(torch.allclose(grad, more[name], atol=2e-6 * float(grad.abs().max())) for name, grad in grads.items())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"images": {"front": np.zeros((3, 28, 28), np.uint8)}},
            "has the camera front, and the model's are base_0_rgb",
        ),
        ({"images": {}}, "has no camera"),
        ({"prompt": np.zeros(13, np.int64)}, "13 tokens, the model takes 1 to 12"),
        ({"prompt": np.array([160])}, "token ids from 160 to 160"),
        ({"actions": np.zeros((10, 9), np.float32)}, r"\[10, 9\], the model takes \[10, 1 to 8\]"),
        ({"actions": np.zeros((9, 7), np.float32)}, r"\[9, 7\]"),
        ({"actions": np.full((10, 7), np.nan, np.float32)}, "not all finite"),
        ({"action_is_pad": np.ones(10, bool)}, "every action step is padding"),
        ({"action_is_pad": np.zeros(3, bool)}, "action_is_pad"),
        ({"images": {"base_0_rgb": np.zeros((28, 28, 3), np.uint8)}}, r"\[28, 28, 3\]"),
    ],
)
def test_rows_that_the_model_cannot_take_are_refused_by_id(change: dict[str, Any], told: str) -> None:
    (row,) = rows_of(1)
    with pytest.raises(ValueError, match=told) as error:
        batch_of([{**row, **change}])
    assert "images" in change or row["id"] in str(error.value)


def test_facts_of_the_data_are_held_against_the_model() -> None:
    for facts, told in (
        ({"action_dims": 9}, "model.dims = 8"),
        ({"length": 50}, "horizon = 10"),
        ({"vocab": 161}, "160"),
    ):
        with pytest.raises(ValueError, match=told):
            spec.check_model(pi05_tiny, facts)
    spec.check_model(pi05_tiny, {"action_dims": 7, "length": 10, "vocab": 160})


def test_the_megatron_path_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Pi05 does not train there; set parallel to lf.TorchParallel\(...\)"):
        check_run(small_run(parallel=lf.MegatronParallel()), pi05_tiny, cpu, 1)


def test_images_of_any_size_and_type_become_the_model_s() -> None:
    (row,) = rows_of(1)
    whole = np.asarray(row["images"]["base_0_rgb"])
    floats = {**row, "images": {"base_0_rgb": whole.astype(np.float32) / 255}}
    a, b = batch_of([{**row, "images": {"base_0_rgb": whole}}]), batch_of([floats])
    assert torch.allclose(a["images"], b["images"], atol=1e-6)
    assert a["images"].min() == -1.0
    odd = robot.fitted_image(torch.arange(3 * 9 * 5, dtype=torch.uint8).view(3, 9, 5), 28)
    assert torch.allclose(((odd + 1) * 127.5).round(), (odd + 1) * 127.5, atol=1e-3)
    wide = robot.fitted_image(torch.full((3, 20, 56), 255, dtype=torch.uint8), 28)
    assert torch.equal(wide[0, :, 0] == 1.0, torch.arange(28).sub(13.5).abs() < 5)
    assert set(wide.unique().tolist()) == {-1.0, 1.0}


def test_the_prompt_is_that_of_openpi() -> None:
    state = np.array([-1.5, -1.0, 0.0, 0.999, 2.0])
    text = spec.prompt(pi05_base, " pick_up the\ncup ", state)
    assert text == "Task: pick up the cup, State: -1 0 128 255 255;\nAction: "


# Draws


def test_draws_are_functions_of_seed_step_and_sample() -> None:
    rows = rows_of(4)
    whole = batch_of([*rows])
    alone = batch_of([rows[2], rows[0]])
    for name in ("noise", "time"):
        assert torch.equal(alone[name], whole[name][[2, 0]])
        assert len({float(value.flatten()[0]) for value in whole[name]}) == 4
        for seed, step in ((4, 5), (3, 6)):
            assert not torch.equal(spec.draw(pi05_tiny, alone, seed, step)[name], alone[name])


def test_times_follow_the_published_distribution() -> None:
    batch = {"actions": torch.zeros(4000, 1, 1), "ids": tuple(map(str, range(4000)))}
    drawn = robot.with_draws(batch, robot.Times(), 0, 1)
    time = drawn["time"].sort().values.double()
    assert time[0] >= 0.001
    assert time[-1] <= 1.0
    # Beta(1.5, 1) has the distribution function x^1.5; 1.95 / sqrt(n) is exceeded once in a thousand.
    expected = ((time - 0.001) / 0.999) ** 1.5
    assert (expected - torch.arange(4000) / 4000).abs().max() < 1.95 / 4000**0.5
    assert drawn["noise"].mean().abs() < 3.3 / 4000**0.5
    assert (drawn["noise"].std() - 1.0).abs() < 0.04


# The model


def test_sampling_leaves_dims_that_the_robot_lacks_on_their_way_to_zero() -> None:
    model, batch = tiny(), batch_of([*rows_of(2)])
    with torch.no_grad():
        actions = spec.sample(pi05_tiny, model, batch)
        as_trained = spec.sample(attrs.evolve(pi05_tiny, counted="openpi"), model, batch)
    lacking = ~batch["dims"][:, None].expand_as(actions)
    assert lacking.any()
    assert actions[lacking].abs().max() < 1e-5
    assert as_trained[lacking].abs().min() > 1e-4
    assert torch.isfinite(actions).all()


def joint(model: Pi05Model, batch: Batch) -> torch.Tensor:
    """Returns the velocity as the papers draw it: both towers' tokens in one row, one table of who sees whom."""
    cfg = model.cfg
    valid = F.pad(model.valid(batch["cameras"], batch["words"]), (0, cfg.horizon), value=True)
    before = valid.shape[1] - cfg.horizon
    # Padding sees itself, so that its rows of the softmax are numbers.
    mask = visible(valid, (torch.arange(valid.shape[1]) >= before).long()) | torch.eye(valid.shape[1], dtype=torch.bool)
    table = rope_of(cfg.vlm, positions(valid))
    x_t = noisy(batch["actions"], batch["noise"], batch["time"])
    cond = model.condition(batch["time"])
    tokens = [model.embedded(batch["images"], batch["prompt"]), model.action_in(x_t)]
    for layers in zip(model.vlm.layers, model.expert.layers, strict=True):
        normed = [layer.input_norm(x, cond) for layer, x in zip(layers, tokens, strict=True)]
        fused = [layer.qkv(h) for layer, (h, _) in zip(layers, normed, strict=True)]
        heads = torch.cat(fused, 1).unflatten(-1, (-1, cfg.vlm.head_dim))
        turned = rotate(heads[:, :, : cfg.vlm.heads + cfg.vlm.kv_heads], table)
        q, k = turned.split((cfg.vlm.heads, cfg.vlm.kv_heads), dim=2)
        k, v = (
            t.repeat_interleave(cfg.vlm.heads // cfg.vlm.kv_heads, dim=2) for t in (k, heads[:, :, -cfg.vlm.kv_heads :])
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / cfg.vlm.head_dim**0.5
        weight = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weight, v).flatten(2)
        for i, (layer, (_, gate)) in enumerate(zip(layers, normed, strict=True)):
            x = tokens[i] + layer.out(out[:, before:] if i else out[:, :before]) * (1.0 if gate is None else gate)
            h, gate = layer.mlp_norm(x, cond)
            tokens[i] = x + layer.mlp(h) * (1.0 if gate is None else gate)
    return model.action_out(model.expert.norm(tokens[1], cond)[0])


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_towers_one_after_the_other_equal_one_joint_attention(kv_heads: int) -> None:
    towers = {name: attrs.evolve(getattr(pi05_tiny, name), heads=4, kv_heads=kv_heads) for name in ("vlm", "expert")}
    cfg = attrs.evolve(pi05_tiny, cameras=("a", "b", "c"), **towers)
    model, rows = tiny(cfg=cfg), robot.fake_rows(cfg.space, 3, 0)
    # Cameras may be absent anywhere, before those that are there too.
    del rows[0]["images"]["a"]
    del rows[2]["images"]["b"]
    batch = batch_of([*rows], cfg)
    ours, theirs = spec.forward(cfg, model, batch), joint(model, batch)
    assert torch.allclose(ours, theirs, atol=2e-5 * float(theirs.detach().abs().max()))
    grads = [
        torch.autograd.grad((v - batch["noise"]).square().sum(), [p for p in model.parameters() if p.requires_grad])
        for v in (ours, theirs)
    ]
    assert all(torch.allclose(a, b, atol=5e-5 * float(b.abs().max())) for a, b in zip(*grads, strict=True))


def test_the_last_layer_of_the_vlm_gives_keys_alone() -> None:
    model, batch = tiny(), batch_of([*rows_of(2)])
    _, grads = gradients(model, batch)
    silent = {name for name, _ in model.named_parameters()} - grads.keys()
    last = ("out.weight", "mlp_norm.weight", "mlp.gate_up.weight", "mlp.down.weight")
    assert silent == {"vlm.norm.weight", *(f"vlm.layers.1.{name}" for name in last)}
    assert silent == {name for name, param in model.named_parameters() if not param.requires_grad}
    assert not grads["vlm.layers.1.qkv.weight"][: 8 * 8].any()


def test_bfloat16_keeps_float32_islands_and_computes_nearly_the_same() -> None:
    batch = batch_of([*rows_of(2)])
    wide, narrow = tiny(), spec.build_model(pi05_tiny, Ctx(device=cpu, dtype=torch.bfloat16))
    narrow.load_state_dict(wide.state_dict())
    assert narrow.action_out.weight.dtype == narrow.vlm.norm.weight.dtype == torch.float32
    a, b = (spec.forward(pi05_tiny, model, batch).detach() for model in (wide, narrow))
    assert b.dtype == torch.float32
    assert 0.0 < float((a - b).abs().max() / a.abs().max()) < 0.03


def test_units_name_every_layer() -> None:
    import fnmatch

    units = spec.shard_spec(pi05_tiny)
    for patterns in (units.fsdp_units, units.recompute_units):
        names = [name for name, _ in tiny().named_modules()]
        found = [name for name in names if any(fnmatch.fnmatchcase(name, p) and name.count(".") == 2 for p in patterns)]
        assert len(found) == 6


def test_flops_are_those_that_torch_counts() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = tiny(), spec.fake_batch(pi05_tiny, 2, 10, 0)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        spec.forward(pi05_tiny, model, batch)
    assert counter.get_total_flops() == spec.flops(pi05_tiny, 2, 10) / 3


def test_every_tensor_has_a_first_value() -> None:
    from lf.models.initialise import initial_tensor, rule_for

    kinds = {name: rule_for(pi05_tiny, name) for name, _ in tiny().named_parameters()}
    assert all(rule.kind == "zeros" for name, rule in kinds.items() if name.endswith("bias") or "vlm.norm" in name)
    assert {kinds["vision.norm.weight"].kind, kinds["vision.layers.0.norm1.weight"].kind} == {"ones"}
    model = spec.build_model(pi05_tiny, Ctx(device=cpu))
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(initial_tensor(pi05_tiny, weights.whole(name, tuple(param.shape)), param, 0))
    assert 0.5 < loss_of(model, batch_of([*rows_of(4)])) < 10.0


# Runs


@attrs.frozen(kw_only=True)
class FakeRobots(lf.DataConfig):
    """Random rows, for runs."""

    rows: int = 7
    """Rows of an epoch."""


@attrs.frozen(kw_only=True)
class FakeRows:
    count: int
    seed: int

    def __len__(self) -> int:
        return self.count

    def row(self, epoch: int, index: int) -> Row:
        return robot.fake_rows(pi05_tiny.space, self.count, self.seed)[index]

    def describe(self) -> dict[str, int]:
        return {"rows": self.count, "length": 10, "action_dims": 7}


@open_data.register
def _(cfg: FakeRobots, ctx: DataCtx) -> FakeRows:
    return FakeRows(count=cfg.rows, seed=ctx.seed)


def small_run(**changes: Any) -> lf.Run:
    run = lf.Run(
        model=pi05_tiny,
        data=FakeRobots(),
        batch=4,
        optim=lf.AdamW(lr=1e-2, eps=1e-3),
        parallel=lf.TorchParallel(micro_batch=2),
        steps=6,
        eval=lf.Eval(data=FakeRobots(rows=3), every=3),
        save=lf.Save(every=3),
    )
    return attrs.evolve(run, **changes)


def test_a_finished_run_is_summed_up_without_words(workers: Workers, tmp_path: Path) -> None:
    ((lines, _),) = workers.run(1, closed, small_run(steps=1), tmp_path / "run", tmp_path)
    assert any(line.startswith("held-out loss ") and "nats" not in line for line in lines)
    assert not any("no summary" in line for line in lines)


def closed(run: lf.Run, folder: Path, cache: Path) -> tuple[list[str], int]:
    from lf.train import checkpoint
    from lf.train.loop import train
    from lf.train.run import open_job
    from lf.train.summary import close

    lines: list[str] = []
    job = open_job(run, folder, (), cpu, checkpoint.distributed(), lines.append)
    close(job, train(job))
    return lines, 0


def test_a_run_learns_resumes_bit_for_bit_and_exports(workers: Workers, tmp_path: Path) -> None:
    run, whole, cut = small_run(), tmp_path / "whole", tmp_path / "cut"
    workers.run(1, go, run, whole, tmp_path)
    workers.run(1, go, run, cut, tmp_path, 2)
    workers.run(1, go, run, cut, tmp_path)
    assert metrics(cut) == metrics(whole)
    reference = tensors(whole, 6)
    for name, value in tensors(cut, 6).items():
        assert torch.equal(value, reference[name]), name
    first, last = (line["eval_loss"] for line in metrics(whole) if "eval_loss" in line)
    assert last < first
    start = open_start(str(whole / "hf"), None)
    assert start.model == pi05_tiny
    head = load_file(whole / "hf/model.safetensors")["paligemma_with_expert.gemma_expert.lm_head.weight"]
    assert head.shape == (160, 32)
    trained = dict(load_model(start, Ctx(device=cpu)).named_parameters())
    assert all(torch.equal(param, reference[f"weight/{name}"]) for name, param in trained.items())


@pytest.mark.parametrize("part", [pi05.VISION, pi05.VLM])
def test_frozen_parts_stay_as_they_are_and_are_saved(workers: Workers, tmp_path: Path, part: tuple[str, ...]) -> None:
    start = tmp_path / "start"
    checkpoint(start, "openpi")
    optim = lf.AdamW(lr=1e-2, weight_decay=0.5, freeze=part, rates=(lf.Rate(names=("action_*",), factor=0.0625),))
    run = small_run(init=str(start), optim=optim, eval=lf.Eval(), steps=2, save=lf.Save(every=1))
    workers.run(2, go, run, tmp_path / "run", tmp_path, 1)
    workers.run(1, go, run, tmp_path / "run", tmp_path)
    saved = tensors(tmp_path / "run", 2)
    before = load_model(open_start(str(start), None), Ctx(device=cpu)).state_dict()
    still = {name for name in before if name.startswith(tuple(pattern[:-1] for pattern in part))}
    still |= set(pi05.unused(pi05_tiny))
    assert 20 < len(still) < len(before)
    for name, value in before.items():
        moved = float((saved[f"weight/{name}"] - value).abs().max())
        assert (f"exp_avg/{name}" in saved) == (moved > 0) == (name not in still), name
        if name.startswith("action_"):
            # Two steps of Adam, and of its decay, at a sixteenth of the rate.
            assert moved < 2 * 0.0625 * 1.6e-2
    stored, exported = load_file(start / "model.safetensors"), load_file(tmp_path / "run/hf/model.safetensors")
    assert exported.keys() == stored.keys()
    for name, rule in spec.weight_map(pi05_tiny).by_lf.items():
        for theirs in weights.hf_names(rule):
            assert torch.equal(stored[theirs], exported[theirs]) or name not in still, theirs


def test_ranks_and_micro_batches_leave_loss_and_weights_alone(workers: Workers, tmp_path: Path) -> None:
    optim = lf.AdamW(lr=1e-3, eps=1e-3)
    for world, micro_batch in ((1, 4), (1, 1), (2, 1)):
        run = small_run(steps=3, parallel=lf.TorchParallel(micro_batch=micro_batch), optim=optim)
        workers.run(world, go, run, tmp_path / f"{world}_{micro_batch}", tmp_path)
    reference = metrics(tmp_path / "1_4"), tensors(tmp_path / "1_4", 3)
    for name in ("1_1", "2_1"):
        for ours, theirs in zip(metrics(tmp_path / name), reference[0], strict=True):
            assert all(ours[key] == pytest.approx(theirs[key], rel=2e-5) for key in theirs), name
        for key, value in tensors(tmp_path / name, 3).items():
            if key.startswith("weight/"):
                assert torch.allclose(value, reference[1][key], atol=5e-6), (name, key)
