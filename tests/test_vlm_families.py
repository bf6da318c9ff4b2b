"""Vision-language families: published sizes, config.json both ways, layouts of weights, what transformers computes."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from torch import Tensor

import lf
from lf import config
from lf.data.source import DataCtx, open_data
from lf.models import hf, weights
from lf.models.hf_folder import open_folder
from lf.models.hf_save import save_folder
from lf.models.layouts import fitted, fitted_to
from lf.models.llm import qwen
from lf.models.media import Media, media_tokens
from lf.models.spec import IGNORE, Layout, check_model, collate, forward, hf_config, slice_batch, weight_map
from lf.models.vision.intern_vit import InternVision
from lf.models.vision.projector import Anyres
from lf.models.vision.tower import tower_of
from lf.models.vlm import Vlm
from lf.models.vlms import internvl, kimi, llava, qwen_vl
from tests.cases import megatron
from tests.test_parity import parity_in
from tests.workers import Workers

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests/golden/hf"
TINY: dict[str, Vlm] = {
    "qwen2_5_vl": qwen_vl.qwen2_5_vl_tiny,
    "qwen3_vl": qwen_vl.qwen3_vl_tiny,
    "qwen3_vl_moe": qwen_vl.qwen3_vl_moe_tiny,
    "internvl": internvl.internvl_tiny,
    "kimi_k25": kimi.kimi_k2_5_tiny,
    "llava_onevision": llava.llava_onevision_tiny,
}
PAIR = Vlm(
    vision=InternVision(width=32, depth=2, mlp=48, heads=4, image=16, patch=4),
    text=qwen.qwen3_tiny,
    image_token=129,
    video_token=130,
)
TURNED = attrs.evolve(PAIR, vision=qwen_vl.qwen3_vl_tiny.vision, text=qwen_vl.qwen3_vl_tiny.text)

PUBLISHED = {
    "qwen2_5_vl_3b": (qwen_vl.qwen2_5_vl_3b, 3_754_622_976),
    "qwen2_5_vl_7b": (qwen_vl.qwen2_5_vl_7b, 8_292_166_656),
    "qwen2_5_vl_72b": (qwen_vl.qwen2_5_vl_72b, 73_410_777_344),
    "qwen3_vl_2b": (qwen_vl.qwen3_vl_2b, 2_127_532_032),
    "qwen3_vl_4b": (qwen_vl.qwen3_vl_4b, 4_437_815_808),
    "qwen3_vl_8b": (qwen_vl.qwen3_vl_8b, 8_767_123_696),
    "qwen3_vl_30b_a3b": (qwen_vl.qwen3_vl_30b_a3b, 31_070_754_032),
    "internvl3_5_1b": (internvl.internvl3_5_1b, 1_060_897_792),
    "internvl3_5_8b": (internvl.internvl3_5_8b, 8_528_318_464),
}
"""Presets, and the parameters of the published models of those names."""


def count(cfg: Vlm) -> int:
    from lf.train.start import stated_shapes

    return sum(math.prod(shape) for shape in stated_shapes(cfg).values())


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_parameters(name: str) -> None:
    cfg, published = PUBLISHED[name]
    assert count(cfg) == published


@pytest.mark.parametrize("cfg", [*TINY.values(), PAIR, TURNED, *(cfg for cfg, _ in PUBLISHED.values())])
def test_a_config_comes_back_from_its_config_json(cfg: Vlm, tmp_path: Path) -> None:
    stated = json.dumps(hf_config(cfg))
    (tmp_path / "config.json").write_text(stated)
    assert hf.read_config(tmp_path) == cfg


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl", "kimi_k25", "llava_onevision"])
def test_an_unchanged_model_exports_the_config_json_that_it_came_with(name: str) -> None:
    original = (GOLDEN / name / "config.json").read_bytes()
    assert hf.config_bytes(hf.read_config(GOLDEN / name), original) == original


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("qwen3_vl", {"vision_config": None}, "vision_config = None must be an object"),
        ("qwen3_vl", {"vision_config.out_hidden_size": 64}, "vision_config.out_hidden_size = 64"),
        ("qwen3_vl", {"vision_config.num_position_embeddings": 35}, "must be a square number"),
        ("qwen3_vl", {"text_config.rope_parameters": {"rope_theta": 1e4}}, "mrope_section = None"),
        ("qwen2_5_vl", {"vision_config.fullatt_block_indexes": "all"}, "must be a list of layers"),
        ("internvl", {"downsample_ratio": 0.25}, "config.downsample_ratio = 0.25"),
        ("internvl", {"vision_config.image_size": [16, 32]}, "must be one number, or two equal ones"),
        ("kimi_k25", {"vision_config.pos_emb_width": 7}, "a table of 6 x 7 positions"),
        ("kimi_k25", {"text_config.model_type": "bert"}, "'bert'"),
        ("llava_onevision", {"vision_aspect_ratio": "square"}, "'square' is not anyres_max_ and a number"),
        ("llava_onevision", {"image_grid_pinpoints": [16]}, "must be a list of heights and widths"),
    ],
)
def test_a_config_json_that_lf_cannot_have_is_refused(
    name: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    stated = json.loads((GOLDEN / name / "config.json").read_text())
    for key, value in change.items():
        outer, _, inner = key.rpartition(".")
        (stated[outer] if outer else stated)[inner] = value
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with pytest.raises(ValueError, match=said.replace(".", r"\.").replace("[", r"\[")) as error:
        hf.read_config(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_the_flat_config_json_of_qwen2_5_vl_is_read(tmp_path: Path) -> None:
    stated = json.loads((GOLDEN / "qwen2_5_vl/config.json").read_text())
    text = stated.pop("text_config")
    scaling = {"type": "mrope", "mrope_section": text.pop("rope_parameters")["mrope_section"]}
    flat = {**text, **stated, "rope_theta": 1e6, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    assert hf.read_config(tmp_path) == hf.read_config(GOLDEN / "qwen2_5_vl")


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "kimi_k25"])
def test_both_layouts_hold_one_model_and_that_of_the_hub_is_written(name: str) -> None:
    tables = {}
    values: dict[str, dict[str, Tensor]] = {}
    for folder in (GOLDEN / name, GOLDEN / f"{name}_hub"):
        cfg, stored = hf.read_config(folder), open_folder(folder)
        tables[folder.name] = table = fitted_to(weight_map(cfg), stored)
        shapes = weights.lf_shapes(table, stored)
        values[folder.name] = {key: weights.read(table, stored, weights.whole(key, s)) for key, s in shapes.items()}
    ours, hub = values[name], values[f"{name}_hub"]
    assert ours.keys() == hub.keys() == weight_map(hf.read_config(GOLDEN / name)).by_lf.keys()
    assert all(torch.equal(ours[key], hub[key]) for key in hub)
    stored = open_folder(GOLDEN / f"{name}_hub")
    written = dict(weights.export(weight_map(hf.read_config(GOLDEN / name)), lambda key: ours[key]))
    assert written.keys() == set(stored.names)
    assert all(torch.equal(written[key], stored.read(key)) for key in written)


def row_of(cfg: Vlm, media: list[Media], seed: int) -> dict[str, Any]:
    """Returns a row of one document with media, frames that are apart with a word between them."""
    rng = np.random.default_rng(seed)
    tower = tower_of(cfg.vision)
    words = rng.integers(3, 120, 64)
    tokens = words[:3].tolist()
    for item in media:
        token = cfg.image_token if item.kind == "image" else cfg.video_token
        parts = sum(t for t, _, _ in item.grids) if tower.frames == "apart" else 1
        for _ in range(parts):
            tokens += [token] * (media_tokens(cfg, item) // parts) + [int(words[len(tokens) % 64])]
    tokens += words[3:9].tolist()
    labels = [token if token not in (cfg.image_token, cfg.video_token) else IGNORE for token in tokens[1:]]
    return {
        "tokens": np.array(tokens),
        "labels": np.array([*labels, IGNORE]),
        "lengths": (len(tokens),),
        "real": len(tokens),
        "id": "row",
        "media": tuple(media),
        "patches": rng.standard_normal((sum(item.patches for item in media), tower.numbers)).astype(np.float32),
    }


def public_inputs(cfg: Vlm, row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row as the public model of its family takes it."""
    tokens = torch.from_numpy(row["tokens"])[None]
    kinds = torch.zeros_like(tokens)
    kinds[tokens == cfg.image_token] = 1
    if cfg.video_token != cfg.image_token:
        kinds[tokens == cfg.video_token] = 2
    made: dict[str, Any] = {"input_ids": tokens, "labels": torch.from_numpy(row["tokens"])[None].clone()}
    made["labels"][kinds > 0] = IGNORE
    at, seconds = 0, []
    for item in row["media"]:
        rows = torch.from_numpy(row["patches"][at : at + item.patches])
        at += item.patches
        video = item.kind == "video"
        name, grid = ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
        patch = cfg.vision.patch
        if isinstance(cfg.projector, Anyres) or isinstance(cfg, internvl.InternVl):
            side = item.grids[0][1]
            tiles = rows.view(len(item.grids), side, side, 3, patch, patch).permute(0, 3, 1, 4, 2, 5)
            tiles = tiles.reshape(len(item.grids), 3, side * patch, side * patch)
            made[name] = tiles if isinstance(cfg, internvl.InternVl) else tiles[None]
            if isinstance(cfg.projector, Anyres) and not video:
                made["image_sizes"] = torch.tensor([item.size])
            continue
        if isinstance(cfg, kimi.KimiK25):
            rows = rows.view(-1, 3, patch, patch)
        made[name] = torch.cat([made[name], rows]) if name in made else rows
        more = torch.tensor([item.grids[0]])
        made[grid] = torch.cat([made[grid], more]) if grid in made else more
        seconds += [item.seconds] if video else []
    if isinstance(cfg, qwen_vl.QwenVl):
        made["mm_token_type_ids"] = kinds.int()
    if isinstance(cfg, qwen_vl.Qwen25Vl) and seconds:
        made["second_per_grid_ts"] = torch.tensor(seconds)
    return made


IMAGES = [Media(grids=((1, 4, 6),)), Media(grids=((1, 2, 4),))]
VIDEO = Media(grids=((3, 4, 2),), kind="video", seconds=1.5)
ROWS: dict[str, list[Media]] = {
    "qwen2_5_vl": [IMAGES[0], VIDEO, IMAGES[1]],
    "qwen3_vl": [IMAGES[0], VIDEO, IMAGES[1]],
    "qwen3_vl_moe": [VIDEO, IMAGES[1]],
    "internvl": [Media(grids=((1, 4, 4),) * 2)],
    "kimi_k25": IMAGES,
    "llava_onevision": [Media(grids=((1, 4, 4),) * 3, size=(14, 30)), Media(grids=((1, 4, 4),) * 3, kind="video")],
}


def exported(name: str, folder: Path) -> Any:
    """Returns logits and loss of a row by lf, whose drawn weights it writes as a folder."""
    from lf.parallel.megatron import placements
    from tests.test_vlm import built

    cfg = TINY[name]
    model, ctx = built(cfg)
    values = {placed.name: tensor.detach() for tensor, placed in placements(model, ctx)}
    save_folder(folder, weights.export(weight_map(cfg), lambda key: values[key]), config=hf_config(cfg))
    row = row_of(cfg, ROWS[name], 0)
    batch = slice_batch(cfg, collate(cfg, [row], row), Layout())
    with torch.no_grad():
        loss = forward(cfg, model, batch).sum() / (batch["labels"] != IGNORE).sum()
        return forward(cfg, model, {key: v for key, v in batch.items() if key != "labels"}), loss


@pytest.mark.parametrize("name", TINY)
def test_transformers_reads_an_export_and_computes_the_same(workers: Workers, name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    ((logits, loss),) = workers.run(1, exported, name, tmp_path / "hf")
    public = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        found = public(**public_inputs(TINY[name], row_of(TINY[name], ROWS[name], 0)))
    assert float((found.logits - logits).abs().max() / found.logits.abs().max()) < 1e-4
    assert float(loss) == pytest.approx(float(found.loss), rel=2e-5)


def trained_pair(folder: Path) -> Any:
    from tests.cases import megatron, run_of, trained

    engine, _ = megatron(run_of(PAIR, optim=lf.AdamW(lr=3e-3)))
    row = row_of(PAIR, [Media(grids=((1, 4, 4),)), Media(grids=((1, 8, 4),))], 0)
    losses, values = trained(engine, [collate(PAIR, [row], row)], 6)
    save_folder(folder, weights.export(weight_map(PAIR), lambda key: values[key]), config=hf_config(PAIR))
    return losses, values


def test_a_pair_that_nobody_publishes_trains_and_comes_back_from_a_layout_of_its_own(
    workers: Workers, tmp_path: Path
) -> None:
    ((losses, values),) = workers.run(1, trained_pair, tmp_path / "hf")
    assert losses[-1] < 0.8 * losses[0]
    stored = open_folder(tmp_path / "hf")
    cfg = hf.read_config(tmp_path / "hf")
    assert cfg == PAIR
    table = fitted(weight_map(cfg), stored.names)
    weights.check(table, stored, {key: tuple(value.shape) for key, value in values.items()})
    for key, value in values.items():
        assert torch.equal(weights.read(table, stored, weights.whole(key, tuple(value.shape))), value)
    assert {name.split(".")[0] for name in stored.names} == {"vision_tower", "projector", "language_model"}


def test_the_own_layout_names_what_it_does_not_know(tmp_path: Path) -> None:
    stated = hf_config(PAIR)
    for change, said in (
        ({"vision_config": {"type": "clip"}}, "vision_config.type = 'clip' is not known"),
        (
            {"projector_config": {"type": "projector", "depth": 3}},
            "has depth, which Projector has not",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**stated, **change}))
        with pytest.raises(ValueError, match=said):
            hf.read_config(tmp_path)


@pytest.mark.full
def test_the_example_of_a_pair_learns_and_exports(tmp_path: Path) -> None:
    example = ROOT / "examples/vlm_pair.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "scripts/train.py"), "--cfg", f"{example}:smoke", "--out", "out"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ((loss, entropy),) = re.findall(
        r"held-out loss ([\d.]+) nats a token; entropy of single tokens ([\d.]+)", done.stdout
    )
    assert float(loss) < float(entropy)
    assert hf.read_config(tmp_path / "out/hf") == config.load(example, "smoke").model


def apart_losses() -> list[float]:
    run = attrs.evolve(config.load(ROOT / "examples/vlm_pair.py", "apart"), batch=8)
    engine, _ = megatron(run)
    rows = open_data(run.data, DataCtx(seed=0, cache_dir=Path("unused")))
    made = [rows.row(0, i) for i in range(8)]
    batches = [collate(run.model, made[i : i + 4], made[0]) for i in (0, 4)]
    state, losses = engine.state, []
    for _ in range(3):
        state, metrics = engine.step(state, batches)
        losses.append(metrics.loss)
    return losses


def test_the_example_of_a_pair_trains_on_four_ranks_with_images_apart(workers: Workers) -> None:
    first, *others = workers.run(4, apart_losses)
    assert all(losses == first for losses in others)
    assert first[-1] < first[0]


def test_rows_of_the_example_fit_its_model() -> None:
    run = config.load(ROOT / "examples/vlm_pair.py", "cfg")
    rows = open_data(run.data, DataCtx(seed=0, cache_dir=Path("unused")))
    check_model(run.model, rows.describe())
    first, again = rows.row(0, 7), rows.row(1, 7)
    batch = collate(run.model, [first, None], first)
    assert batch["slots"].tolist() == list(range(1, 17))
    assert torch.equal(batch["patches"], collate(run.model, [again], first)["patches"])


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("qwen3_vl_moe_hub", lf.MegatronParallel(ep=2)),
        ("qwen2_5_vl", lf.MegatronParallel(pp=2)),
        pytest.param("kimi_k25", lf.MegatronParallel(pp=2), marks=pytest.mark.full),
    ],
)
def test_ranks_that_share_a_model_compute_what_was_recorded(
    workers: Workers, name: str, parallel: lf.MegatronParallel
) -> None:
    first, second = workers.run(2, parity_in, GOLDEN / name, parallel)
    assert first["ok"], first
    assert first == second
