"""Vision towers and projectors: packed calls equal single ones, and recordings and transformers agree."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lf.models import hf, weights
from lf.models.hf_folder import open_folder
from lf.models.layouts import fitted_to
from lf.models.media import Grid, Media, media_flops, media_tokens
from lf.models.recorded import recorded_rows
from lf.models.spec import collate, weight_map
from lf.models.vision.intern_vit import InternVision
from lf.models.vision.moon_vit import MoonVision
from lf.models.vision.projector import Anyres, Projector, ProjectorModule, crop, shrunken, tiling, tokens_of
from lf.models.vision.qwen_vit import Qwen3Vision, Qwen25Vision, window_order
from lf.models.vision.siglip import Siglip
from lf.models.vision.tower import (
    TowerModule,
    VisionConfig,
    attend,
    block_order,
    build_tower,
    places,
    resampled,
    tower_flops,
    tower_of,
    tower_rules,
)
from lf.models.vlm import Vlm
from tests.vlm_cases import TOWERS

GOLDEN = Path(__file__).parent / "golden/hf"
SETS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe_hub", "internvl", "kimi_k25", "llava_onevision")

GRIDS: tuple[Grid, ...] = ((1, 4, 6), (3, 8, 4), (1, 2, 6), (1, 4, 6))


def tower(cfg: VisionConfig, seed: int = 0) -> TowerModule:
    torch.manual_seed(seed)
    made = build_tower(cfg)
    for param in made.parameters():
        torch.nn.init.normal_(param, std=0.1)
    return made


def grids_of(cfg: VisionConfig) -> tuple[Grid, ...]:
    side = tower_of(cfg).side
    return ((1, side, side),) * 3 if side else GRIDS


def patches_of(cfg: VisionConfig, grids: tuple[Grid, ...]) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.randn(t * h * w, tower_of(cfg).numbers) for t, h, w in grids]


@pytest.mark.parametrize("name", TOWERS)
def test_pictures_in_one_call_equal_pictures_one_by_one(name: str) -> None:
    cfg = TOWERS[name]
    module, grids = tower(cfg), grids_of(cfg)
    pictures = patches_of(cfg, grids)
    whole, levels = module(torch.cat(pictures), grids)
    single = [module(patches, [grid]) for patches, grid in zip(pictures, grids, strict=True)]
    assert whole.shape == (sum(map(len, pictures)), tower_of(cfg).width)
    assert torch.allclose(whole, torch.cat([x for x, _ in single]), atol=2e-6)
    assert len(levels) == tower_of(cfg).levels
    for at, level in enumerate(levels):
        assert torch.allclose(level, torch.cat([own[at] for _, own in single]), atol=2e-6)


@pytest.mark.parametrize("name", TOWERS)
def test_layers_made_again_change_no_number(name: str) -> None:
    cfg = TOWERS[name]
    module, grids = tower(cfg), grids_of(cfg)
    patches = torch.cat(patches_of(cfg, grids))
    found = []
    for again in (False, True):
        module.again = again
        module.zero_grad()
        module(patches, grids)[0].square().sum().backward()
        found.append({key: param.grad for key, param in module.named_parameters()})
    for key, grad in found[0].items():
        other = found[1][key]
        assert (grad is None) == (other is None), key
        assert grad is None or other is None or torch.equal(grad, other), key


@pytest.mark.parametrize("name", TOWERS)
def test_every_tensor_of_a_tower_has_a_rule_and_operations_grow_with_the_picture(name: str) -> None:
    cfg = TOWERS[name]
    with torch.device("meta"):
        names = {f"v.{key}" for key, _ in build_tower(cfg).named_parameters()}
    rules = tower_rules(cfg, "v.", "hf.")
    assert {rule.lf for rule in rules if isinstance(rule, weights.LfRule)} == names
    grid = grids_of(cfg)[0]
    assert tower_flops(cfg, (2, *grid[1:])) > tower_flops(cfg, grid) > 0


@pytest.mark.parametrize("name", SETS)
def test_features_are_those_that_transformers_recorded(name: str) -> None:
    folder = GOLDEN / name
    cfg: Any = hf.read_config(folder)
    assert isinstance(cfg, Vlm)
    stored, recorded = open_folder(folder), load_file(folder / "io.safetensors")
    table = fitted_to(weight_map(cfg), stored)
    module = build_tower(cfg.vision)
    projector = ProjectorModule(cfg.projector, tower_of(cfg.vision), cfg.text.hidden)
    for prefix, part in (("vision.", module), ("projector.", projector)):
        for key, param in part.named_parameters():
            with torch.no_grad():
                param.copy_(weights.read(table, stored, weights.whole(prefix + key, tuple(param.shape))))
    rows = recorded_rows(cfg, recorded)
    batch = collate(cfg, rows, rows[0])
    with torch.no_grad():
        states, levels = module(batch["patches"], [grid for item in batch["media"] for grid in item.grids])
        tokens, deep = projector.project(states, levels, batch["media"])
    wanted = recorded["image_features"].flatten(0, -2)
    assert float((tokens - wanted).abs().max() / wanted.abs().max()) < 2e-5
    for at in range(tower_of(cfg.vision).levels):
        assert deep is not None
        level = recorded[f"deepstack_features.{at}"]
        assert float((deep[at] - level).abs().max() / level.abs().max()) < 2e-5
    if cfg.text.rope.sections:
        kept = recorded["attention_mask"].bool()
        assert torch.equal(batch["positions"][:, kept], recorded["position_ids"][:, kept])


def test_segments_attend_to_themselves_alone() -> None:
    torch.manual_seed(0)
    lengths = (2, 2, 5, 1, 2)
    q, k, v = torch.randn(3, 12, 2, 4)
    whole, at = attend(q, k, v, lengths), 0
    for length in lengths:
        part = slice(at, at + length)
        assert torch.allclose(whole[part], attend(q[part], k[part], v[part], (length,)), atol=1e-6)
        at += length


def test_blocks_hold_neighbours_and_orders_are_permutations() -> None:
    assert places([(1, 2, 4)], 2).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert block_order([(1, 2, 4)], 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    order, lengths = window_order(GRIDS, 2, 2)
    assert (
        sorted(order.tolist())
        == list(range(sum(t * h * w for t, h, w in GRIDS)))
        == sorted(block_order(GRIDS, 2).tolist())
    )
    assert sum(lengths) == len(order)
    # 4 x 6 patches are 2 x 3 blocks: a window of 2 x 2 blocks and one of 2 x 1; those of one size follow each other.
    order, lengths = window_order([(1, 4, 6)] * 2, 2, 2)
    assert lengths == [8, 8, 16, 16]
    assert order[:8].tolist() == [8, 9, 10, 11, 20, 21, 22, 23]


@pytest.mark.parametrize(("mode", "corners"), [("bilinear", True), ("bicubic", False)])
@pytest.mark.parametrize("size", [(3, 7), (6, 6), (1, 9)])
def test_resampling_is_that_of_torch(mode: str, corners: bool, size: tuple[int, int]) -> None:
    table = torch.randn(6, 6, 5, generator=torch.Generator().manual_seed(0))
    wanted = torch.nn.functional.interpolate(table.permute(2, 0, 1)[None], size, mode=mode, align_corners=corners)[0]
    assert torch.allclose(resampled(table, *size, mode, corners=corners), wanted.permute(1, 2, 0), atol=1e-6)


@pytest.mark.parametrize("size", [(14, 30), (16, 16), (70, 9), (50, 61), (33, 20)])
def test_tokens_of_tiles_are_those_of_transformers(size: tuple[int, int]) -> None:
    from transformers import LlavaOnevisionConfig, Qwen2Config, SiglipVisionConfig
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

    pinpoints = tuple((16 * rows, 16 * columns) for rows in range(1, 5) for columns in range(1, 5))
    cfg = Anyres(width=8, pinpoints=pinpoints, most=2)
    side, tile_rows, tile_columns = 4, *tiling(cfg, size)
    media = Media(grids=((1, side, side),) * (1 + tile_rows * tile_columns), size=size)
    with torch.device("meta"):
        public = LlavaOnevisionModel(
            LlavaOnevisionConfig(
                vision_config=SiglipVisionConfig(
                    image_size=16,
                    patch_size=4,
                    hidden_size=8,
                    intermediate_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=1,
                ),
                text_config=Qwen2Config(
                    hidden_size=8,
                    intermediate_size=8,
                    num_hidden_layers=1,
                    num_attention_heads=1,
                    num_key_value_heads=1,
                    vocab_size=9,
                ),
                image_grid_pinpoints=[list(pinpoint) for pinpoint in pinpoints],
                vision_aspect_ratio="anyres_max_2",
            )
        )
    torch.manual_seed(0)
    tokens, newline = torch.randn(len(media.grids), side**2, 8), torch.randn(8)
    wanted, _ = public.pack_image_features([tokens], torch.tensor([size]), newline, "anyres_max_2")
    module = ProjectorModule(cfg, tower_of(TOWERS["siglip"]), 8)
    module.newline.data = newline
    assert torch.allclose(module._laid(tokens.flatten(0, 1), [media]), wanted[0], atol=1e-6)
    assert tokens_of(cfg, media) == len(wanted[0])
    _, _, height, width = crop(tile_rows * side, tile_columns * side, size)
    assert shrunken(cfg, side, height, width) <= (height, width)


def test_an_image_with_other_tiles_is_refused() -> None:
    cfg = Anyres(pinpoints=((16, 16), (16, 32)))
    with pytest.raises(ValueError, match="has 2 pictures, but the whole and 1 x 2 tiles are 3; cut it as"):
        tokens_of(cfg, Media(grids=((1, 4, 4),) * 2, size=(14, 30)))


def test_frames_of_a_video_become_their_mean() -> None:
    module = ProjectorModule(Projector(mean=True), tower_of(TOWERS["moon"]), 8)
    states = torch.randn(3 * 8, 32, generator=torch.Generator().manual_seed(0))
    tokens, _ = module.project(states, (), [Media(grids=((3, 2, 4),), kind="video")])
    mean, _ = module.project(states.unflatten(0, (3, 8)).mean(0), (), [Media(grids=((1, 2, 4),))])
    assert torch.allclose(tokens, mean, atol=1e-6)
    assert tokens_of(module.cfg, Media(grids=((3, 2, 4),), kind="video")) == len(tokens) == 2


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        (Qwen25Vision, {"width": 30, "heads": 2}, "a multiple of 4"),
        (Qwen25Vision, {"window": 20}, "hold no block of 28"),
        (Qwen3Vision, {"levels": (27,)}, "must lie in 0 .. 26"),
        (MoonVision, {"width": 30, "heads": 2}, "a multiple of 4"),
        (InternVision, {"image": 20}, "must be a multiple of vision.patch"),
        (Siglip, {"image": 7}, "at least vision.patch"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(kind: Any, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kind(**change)


def test_a_video_of_too_many_frames_is_refused() -> None:
    cfg = TOWERS["moon"]
    with pytest.raises(ValueError, match="a video of 5 frames, but the tower has positions"):
        tower(cfg)(torch.zeros(5 * 4, 48), [(5, 2, 2)])


def test_costs_of_media_follow_their_size() -> None:
    from lf.models.vlms.qwen_vl import qwen3_vl_tiny

    small, large = (Media(grids=((1, side, side),)) for side in (4, 8))
    assert (media_tokens(qwen3_vl_tiny, small), media_tokens(qwen3_vl_tiny, large)) == (4, 16)
    assert media_flops(qwen3_vl_tiny, large) > 4 * media_flops(qwen3_vl_tiny, small) > 0
