"""Wan: parity, both published layouts, packing, what rows may hold, samples, and runs on the torch path."""

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
from lf.models.diffusion import flow, wan
from lf.models.diffusion.flow import Sampling, noisy
from lf.models.diffusion.latent import fake_rows, velocity
from lf.models.diffusion.packed import Packing
from lf.models.diffusion.wan import Wan, wan_tiny
from lf.models.layouts import Alias
from lf.models.spec import Ctx
from lf.train.convert import export_folder, import_folder
from lf.train.parity import compare
from lf.train.start import export, load_model, open_start
from tests.latent_tools import FakeLatents, batch_of, loss_of, tiny
from tests.test_train import go, metrics, tensors
from tests.workers import Workers

GOLDEN = Path(__file__).parent / "golden/diffusion"
META = Ctx(device=cpu, meta=True)

I2V = attrs.evolve(wan_tiny, in_channels=9, image_dim=20)
"""Reads channels beside the latents, and an image."""
MASKED = attrs.evolve(wan_tiny, padding="masked")
KINDS = {"t2v": wan_tiny, "i2v": I2V, "masked": MASKED}

# Parity


@pytest.mark.parametrize("damage", ["sample", "loss", "grad.blocks.1.scale_shift_table"])
def test_a_recorded_number_that_is_off_is_found(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "wan"
    shutil.copytree(GOLDEN / "hf_wan21_t2v", folder)
    recorded = load_file(folder / "io.safetensors")
    recorded[damage] = recorded[damage] + recorded[damage].abs().max() * 1e-3
    save_file(recorded, folder / "io.safetensors")
    assert not compare(folder, Ctx(device=cpu)).ok


# Published models

COUNTS = {
    "wan2_1_t2v_1_3b": 1_418_996_800,
    "wan2_1_t2v_14b": 14_288_491_584,
    "wan2_1_i2v_14b": 16_394_878_784,
    "wan2_2_t2v_a14b_high": 14_288_491_584,
    "wan2_2_t2v_a14b_low": 14_288_491_584,
    "wan2_2_i2v_a14b_high": 14_288_901_184,
    "wan2_2_i2v_a14b_low": 14_288_901_184,
    "wan2_2_ti2v_5b": 4_999_787_712,
}
"""Parameters of diffusers' models with the published configs."""


def test_every_preset_has_the_published_parameters() -> None:
    presets = {name for name, cfg in vars(wan).items() if isinstance(cfg, Wan) and not name.endswith("tiny")}
    assert presets == COUNTS.keys()
    for name, count in COUNTS.items():
        model = spec.build_model(getattr(wan, name), META)
        assert sum(param.numel() for param in model.parameters()) == count, name


def test_experts_share_the_times() -> None:
    for kind, boundary in (("t2v", 0.875), ("i2v", 0.9)):
        high, low = (getattr(wan, f"wan2_2_{kind}_a14b_{part}") for part in ("high", "low"))
        assert (low.flow.low, low.flow.high, high.flow.low, high.flow.high) == (0.0, boundary, boundary, 1.0)
        assert attrs.evolve(high, flow=low.flow) == low
    high, low = wan.experts(wan_tiny, 0.875)
    rows = [{**row, "id": f"{i}"} for i, row in enumerate(fake_rows(wan_tiny.space, 1, 0) * 50)]
    for cfg, least, most in ((high, 0.875, 1.0), (low, 0.0, 0.875)):
        time = batch_of(cfg, rows)["time"]
        assert least <= float(time.min()) < float(time.max()) <= most
    with pytest.raises(ValueError, match=r"boundary = 875 must lie between 0 and 1"):
        wan.experts(wan_tiny, 875)


def original(folder: Path, name: str = "hf_wan21_t2v", kind: str = "t2v", **more: Any) -> Path:
    """Writes golden weights in the layout of the original release."""
    source = GOLDEN / name
    config = json.loads((source / "config.json").read_text())
    stored = load_file(source / "diffusion_pytorch_model.safetensors")
    rules = spec.weight_map(wan.from_hf(config)).rules
    renamed = {rule.of: rule.hf for rule in rules if isinstance(rule, Alias)}
    folder.mkdir(parents=True)
    named = {renamed.get(key, key): value for key, value in stored.items()}
    save_file(named, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    stated = {
        "_class_name": "WanModel",
        "_diffusers_version": "0.30.0",
        "model_type": kind,
        "dim": 48,
        "num_heads": 2,
        "num_layers": 2,
        "ffn_dim": 64,
        "freq_dim": 32,
        "in_dim": config["in_channels"],
        "out_dim": config["out_channels"],
        "text_dim": 24,
        "text_len": 512,
        "eps": 1e-6,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(stated))
    return folder


def test_the_original_names_are_those_of_the_release(tmp_path: Path) -> None:
    names = set(load_file(original(tmp_path / "wan") / "diffusion_pytorch_model.safetensors"))
    block = {name for name in names if name.startswith("blocks.1.")}
    parts = [f"{kind}_attn.{part}" for kind in ("self", "cross") for part in "qkvo"]
    weighted = [*parts, "norm3", "ffn.0", "ffn.2"]
    assert block == {
        *(f"blocks.1.{part}.{kind}" for part in weighted for kind in ("weight", "bias")),
        *(f"blocks.1.{kind}_attn.norm_{part}.weight" for kind in ("self", "cross") for part in "qk"),
        "blocks.1.modulation",
    }
    ends = ("patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2")
    assert {name for name in names if not name.startswith("blocks.")} == {
        *(f"{end}.{kind}" for end in (*ends, "time_projection.1", "head.head") for kind in ("weight", "bias")),
        "head.modulation",
    }


@pytest.mark.parametrize("layout", ["diffusers", "diffusers, i2v", "original"])
def test_a_published_folder_comes_back_byte_for_byte(tmp_path: Path, layout: str) -> None:
    folder = tmp_path / "in"
    if layout == "original":
        original(folder)
    else:
        shutil.copytree(GOLDEN / ("hf_wan21_i2v" if "i2v" in layout else "hf_wan22_ti2v"), folder)
        (folder / "io.safetensors").unlink()
    file = folder / "diffusion_pytorch_model.safetensors"
    if "i2v" in layout:
        # Published I2V folders hold a norm that no model reads.
        save_file(load_file(file) | {"blocks.0.attn2.norm_added_q.weight": torch.ones(48)}, file, {"format": "pt"})
    start = open_start(str(folder), None)
    params = dict(load_model(start, Ctx(device=cpu)).named_parameters())
    export(start.model, params.__getitem__, tmp_path / "out", source=start.source, files={}, write=True)
    for name in (file.name, "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    import_folder(folder, tmp_path / "lf")
    export_folder(tmp_path / "lf", tmp_path / "again")
    for name in (file.name, "config.json"):
        assert (folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_both_layouts_are_one_model(tmp_path: Path) -> None:
    starts = [open_start(str(folder), None) for folder in (GOLDEN / "hf_wan21_t2v", original(tmp_path / "wan"))]
    assert attrs.evolve(starts[1].model, most=64) == starts[0].model
    one, other = (load_model(start, Ctx(device=cpu)).state_dict() for start in starts)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_tensors_tell_the_two_models_that_are_called_i2v_apart(tmp_path: Path) -> None:
    """Wan2.2's reads no image, and its config.json is that of Wan2.1's."""
    folder = original(tmp_path / "new", "hf_wan21_t2v", kind="i2v")
    start = open_start(str(folder), None)
    assert start.model.image_dim == 0
    load_model(start, Ctx(device=cpu))
    assert hf.config_bytes(start.model, start.source.config) == (folder / "config.json").read_bytes()
    older = hf.read_config(original(tmp_path / "old", "hf_wan21_i2v", kind="i2v"))
    assert older.image_dim == 1280


def test_a_model_without_a_source_is_a_folder_of_diffusers(tmp_path: Path) -> None:
    model = tiny(wan_tiny)
    params = dict(model.named_parameters())
    export(wan_tiny, params.__getitem__, tmp_path / "out", source=None, files={}, write=True)
    config = json.loads((tmp_path / "out/config.json").read_text())
    golden = json.loads((GOLDEN / "hf_wan21_t2v/config.json").read_text())
    assert config.keys() == golden.keys() - {"_diffusers_version"}
    start = open_start(str(tmp_path / "out"), None)
    again = load_model(start, Ctx(device=cpu)).state_dict()
    assert all(torch.equal(param, again[name]) for name, param in params.items())
    assert (tmp_path / "out/diffusion_pytorch_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"cross_attn_norm": False}, "cross_attn_norm = false"),
        ({"qk_norm": "layer_norm"}, "qk_norm = 'layer_norm'"),
        ({"pos_embed_seq_len": 514}, "first-and-last-frame"),
        ({"image_dim": 1280}, "image_dim = 1280 and added_kv_proj_dim = 0"),
        ({"patch_size": [2, 2]}, r"patch_size = \[2, 2\]"),
        ({"num_layers": 0}, "num_layers = 0"),
        ({"attention_head_dim": 23}, "head_dim = 23"),
        ({"out_channels": 64}, "in_channels = 8 must be out_channels = 64 or more"),
    ],
)
def test_configs_that_lf_cannot_have_are_refused(config: dict[str, Any], told: str) -> None:
    stated = json.loads((GOLDEN / "hf_wan21_t2v/config.json").read_text())
    with pytest.raises(ValueError, match=told):
        wan.from_hf(stated | config)


@pytest.mark.parametrize(
    ("change", "told"), [({"model_type": "vace"}, "model_type = 'vace'"), ({"dim": 49}, "dim = 49 must be a multiple")]
)
def test_original_configs_that_lf_cannot_have_are_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        open_start(str(original(tmp_path / "wan", **change)), None)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"blocks.9.extra": torch.ones(2)}, "unexpected in the folder: blocks.9.extra"),
        ({"proj_out.bias": torch.ones(3)}, "of the wrong shape"),
        ({"head.head.bias": torch.ones(32)}, "unexpected in the folder: head.head.bias"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, torch.Tensor], told: str) -> None:
    folder = tmp_path / "in"
    shutil.copytree(GOLDEN / "hf_wan21_t2v", folder)
    file = folder / "diffusion_pytorch_model.safetensors"
    save_file(load_file(file) | change, file)
    with pytest.raises(ValueError, match=told):
        load_model(open_start(str(folder), None), Ctx(device=cpu))


# Packing


def test_what_is_padding_in_a_text_has_no_influence() -> None:
    rows = fake_rows(wan_tiny.space, 1, 0)
    text = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    for cfg in (wan_tiny, MASKED):
        model = tiny(cfg)
        told = [
            spec.forward(cfg, model, batch_of(cfg, [{**rows[0], **change}]))
            for change in (
                {"text": text[:3]},
                {"text": text, "text_length": 3},
                {"text": torch.cat((text[:3], text[:2] * 1e6)), "text_length": 3},
                {"text": text},
            )
        ]
        assert torch.equal(told[0], told[1])
        assert torch.equal(told[0], told[2])
        assert not torch.allclose(told[0], told[3])


def test_zeros_behind_a_text_are_what_diffusers_sees() -> None:
    (row,) = fake_rows(wan_tiny.space, 1, 0)
    row["text"] = row["text"][:2]
    filled = {**row, "text": torch.cat((row["text"], torch.zeros(4, 16)))}
    model = tiny(wan_tiny)
    zeros, masked = (spec.forward(cfg, model, batch_of(cfg, [row])) for cfg in (wan_tiny, MASKED))
    assert torch.equal(zeros, spec.forward(MASKED, model, batch_of(MASKED, [filled])))
    assert not torch.allclose(zeros, masked)


# Rows


def test_given_frames_are_clean_and_not_trained() -> None:
    """As in Wan2.2 TI2V: the tokens of the first frame have time 0 and the loss does not count them."""
    (row,) = fake_rows(wan_tiny.space, 1, 0)
    row["latents"] = torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    model, batch = tiny(wan_tiny), batch_of(wan_tiny, [{**row, "given": 1}])
    packing: Packing = batch["packing"]
    assert packing.runs == ((4, 8),)
    assert batch["time"].tolist()[0] == 0.0 < batch["time"].tolist()[1]
    assert batch["noised"].tolist() == [False] * 4 + [True] * 8
    error = (batch["noise"] - batch["latents"] - spec.forward(wan_tiny, model, batch)).square()
    assert torch.allclose(loss_of(wan_tiny, model, batch), error[4:].mean(), rtol=1e-6)
    whole = batch_of(wan_tiny, [row])
    assert torch.equal(whole["noise"], batch["noise"])
    per_token = torch.where(batch["noised"], batch["time"][1], 0.0)
    singles = attrs.evolve(packing, runs=((1,) * 12,))
    x = noisy(batch["latents"], batch["noise"], batch["sigma"])
    told = [model(x, time, batch["text"], where) for time, where in ((batch["time"], packing), (per_token, singles))]
    assert torch.allclose(told[0], told[1], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"latents": torch.zeros(16, 1, 4, 4)}, r"latents is torch.float32 \[16, 1, 4, 4\].*\[4, frames, rows, col"),
        ({"latents": torch.zeros(4, 1, 4, 4, dtype=torch.uint8)}, "torch.uint8.*encode the media"),
        ({"latents": torch.zeros(4, 1, 5, 4)}, "5 rows, and the model takes multiples of 2"),
        ({"latents": torch.zeros(4, 0, 4, 4)}, "0 frames"),
        ({"latents": torch.zeros(4, 1, 4, 4096)}, "4096 columns, and the model takes multiples of 2 up to 2048"),
        ({"latents": torch.full((4, 1, 4, 4), torch.nan)}, "not finite"),
        ({"text": None}, "has no `text`"),
        ({"text": torch.zeros(7, 16)}, "text has 7 embeddings, and the model takes 1 to 6"),
        ({"text": torch.zeros(0, 16)}, "text has 0 embeddings"),
        ({"text": torch.zeros(3, 12)}, r"text is torch.float32 \[3, 12\].*\[length, 16\]"),
        ({"text_length": 9}, "text_length = 9"),
        ({"empty": torch.zeros(1, 12)}, "empty is"),
        ({"condition": None}, "has no `condition`"),
        ({"condition": torch.zeros(5, 1, 2, 2)}, "condition is .* and latents"),
        ({"condition": torch.zeros(4, 1, 4, 4)}, r"condition is torch.float32 \[4, 1, 4, 4\]"),
        ({"image": None}, "has no `image`"),
        ({"image": torch.zeros(3, 4)}, "image is"),
        ({"given": 1}, "1 frames are given, and the model has no such frames"),
        ({"references": [torch.zeros(4, 1, 4, 4)]}, "has references, and the model reads none"),
    ],
)
def test_rows_that_the_model_cannot_take_are_refused_by_id(change: dict[str, Any], told: str) -> None:
    (row,) = fake_rows(I2V.space, 1, 0)
    with pytest.raises(ValueError, match=told) as error:
        batch_of(I2V, [{**row, **change}])
    assert row["id"] in str(error.value)


def test_given_frames_must_leave_some_to_make() -> None:
    (row,) = fake_rows(wan_tiny.space, 1, 0)
    with pytest.raises(ValueError, match=rf"row {row['id']}: given = 3 of 3 frames"):
        batch_of(wan_tiny, [{**row, "latents": torch.zeros(4, 3, 4, 4), "given": 3}])


def test_each_row_has_its_own_empty_caption_and_all_or_none_have_one() -> None:
    cfg = attrs.evolve(wan_tiny, flow=attrs.evolve(wan_tiny.flow, caption_dropout=1.0 - 1e-9))
    rows = fake_rows(wan_tiny.space, 2, 0)
    rows[1]["empty"] = torch.full((2, 16), 1.5)
    batch = batch_of(cfg, [*rows, None])
    texts = batch["text"].split(batch["packing"].texts)
    assert all(torch.equal(text[: len(r["empty"])], r["empty"]) for text, r in zip(texts, rows, strict=False))
    with pytest.raises(ValueError, match=rf"rows {rows[0]['id']} have no `empty`.*with all of them, or with none"):
        batch_of(wan_tiny, [{**rows[0], "empty": None}, rows[1]])


def test_facts_of_the_data_are_held_against_the_model() -> None:
    for facts, told in (
        ({"channels": 16}, "the data has channels 16, and the model 4"),
        ({"text_dim": 4096}, "text_dim 4096"),
        ({"text_length": 7}, "model.text = 6"),
        ({"condition_channels": 20}, "condition_channels 20"),
        ({"references": 2}, "up to 2 references, and the model reads none"),
    ):
        with pytest.raises(ValueError, match=told):
            spec.check_model(wan_tiny, facts)
    with pytest.raises(ValueError, match=r"gives 1 frames, and the model takes none; set data\.given to 0"):
        spec.check_model(I2V, {"given": 1})
    spec.check_model(wan_tiny, {"channels": 4, "text_dim": 16, "text_length": 6})


# The model


def test_samples_follow_the_velocity() -> None:
    rows = fake_rows(wan_tiny.space, 3, 1)
    rows[0]["given"] = 0
    rows[1] |= {"latents": torch.ones(4, 2, 4, 4), "given": 1}
    model = tiny(wan_tiny)
    cfg = attrs.evolve(wan_tiny, sampling=Sampling(steps=3, guidance=2.0))
    batch = batch_of(cfg, [*rows])
    with torch.no_grad():
        made = spec.sample(cfg, model, batch)
        assert [one.shape for one in made] == [row["latents"].shape for row in rows]
        assert all(torch.isfinite(one).all() for one in made)
        # Given frames stay, what is made does not depend on its neighbours.
        assert torch.equal(made[1][:, :1], torch.ones(4, 1, 4, 4))
        (alone,) = spec.sample(cfg, model, batch_of(cfg, [rows[2]]))
        assert torch.allclose(alone, made[2], atol=1e-5)
        # One step by hand: from noise along the guided velocity.
        one = attrs.evolve(cfg, sampling=Sampling(steps=1, guidance=2.0))
        single = batch_of(one, [rows[2]])
        told = velocity(one, model, single, single["noise"], [1.0])
        plain = attrs.evolve(one, sampling=Sampling(guidance=1.0))
        said = velocity(plain, model, single, single["noise"], [1.0])
        without = velocity(plain, model, batch_of(one, [{**rows[2], "text": rows[2]["empty"]}]), single["noise"], [1.0])
        assert torch.allclose(told, without + 2.0 * (said - without), atol=1e-5)
        (made_once,) = spec.sample(one, model, single)
        expected = wan.patchify(made_once, (1, 2, 2), channels_first=False)
        assert torch.allclose(expected, single["noise"] - told, atol=1e-5)
    with pytest.raises(ValueError, match=r"guidance = 2.0 needs the empty caption"):
        spec.sample(cfg, model, batch_of(cfg, [{**rows[2], "empty": None}]))


# Runs


def small_run(**changes: Any) -> lf.Run:
    run = lf.Run(
        model=attrs.evolve(wan_tiny, flow=attrs.evolve(wan_tiny.flow, caption_dropout=0.2)),
        data=FakeLatents(),
        batch=4,
        optim=lf.AdamW(lr=1e-2, eps=1e-3, ema=0.5),
        parallel=lf.TorchParallel(micro_batch=2),
        steps=6,
        eval=lf.Eval(data=FakeLatents(rows=3), every=3),
        save=lf.Save(every=3, averaged=False),
    )
    return attrs.evolve(run, **changes)


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
    trained = dict(load_model(start, Ctx(device=cpu)).named_parameters())
    assert all(torch.equal(param, reference[f"weight/{name}"]) for name, param in trained.items())


def test_blocks_can_be_frozen(workers: Workers, tmp_path: Path) -> None:
    run = small_run(optim=lf.AdamW(lr=1e-2, freeze=("blocks.0.*", "text.*")), eval=lf.Eval(), steps=1)
    workers.run(1, go, run, tmp_path / "run", tmp_path)
    moments = {name for name in tensors(tmp_path / "run", 1) if name.startswith("exp_avg/")}
    assert not any(name.startswith(("exp_avg/blocks.0.", "exp_avg/text.")) for name in moments)
    assert any(name.startswith("exp_avg/blocks.1.") for name in moments)


def test_a_config_with_a_flow_comes_back_from_json(tmp_path: Path) -> None:
    from lf.config import from_json, to_json

    run = small_run(model=attrs.evolve(wan_tiny, flow=flow.Flow(sampler=flow.Mode(scale=0.5), shift=flow.TokenShift())))
    assert from_json(to_json(run)) == run
