"""Wan as a family: what lf asks of it, its weight table in diffusers' and the original names, and the published sizes.

The modules are in `wan_model.py`, the row that data must give in `latent.py`, config.json in `wan_config.py`, and what
all models of latents share in `family.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from lf.models import hf, spec
from lf.models.diffusion import wan_config
from lf.models.diffusion.family import Family, family_of
from lf.models.diffusion.flow import high_part, low_part
from lf.models.diffusion.latent import row_sizes
from lf.models.diffusion.layers import TIMES
from lf.models.diffusion.packed import Packing, grid_of, patchify, unpatchify
from lf.models.diffusion.wan_model import Wan as Wan
from lf.models.diffusion.wan_model import WanModel
from lf.models.initialise import normal
from lf.models.layouts import Alias
from lf.models.weights import Carried, Rule, Same, WeightMap
from lf.models.work import RowWork, row_work

from_hf, from_original = wan_config.from_hf, wan_config.from_original

WIDE = ("time.*", "time_mod.*", "table.*", "blocks.*.table.*", "blocks.*.cross_norm.*")
"""Tensors that compute in float32 in a bfloat16 model: times and what they modulate."""
WIDE_IMAGE = ("image.norm_in.*", "image.norm_out.*")
"""The same of models that read image embeddings."""


@family_of.register
def _(cfg: Wan) -> Family:
    shared = (("model.heads", cfg.heads), ("model.mlp", cfg.mlp))
    return Family(module=WanModel, wide=WIDE + (WIDE_IMAGE if cfg.image_dim else ()), shared=shared)


@spec.hf_config.register
def _(cfg: Wan) -> dict[str, Any]:
    return wan_config.to_hf(cfg)


@hf.settled.register
def _(cfg: Wan, names: tuple[str, ...]) -> Wan:
    reads = any(name.endswith(("img_emb.proj.1.weight", "image_embedder.ff.net.0.proj.weight")) for name in names)
    return cfg if reads or not cfg.image_dim else attrs.evolve(cfg, image_dim=0)


@spec.init_rules.register
def _(cfg: Wan) -> tuple[spec.InitRule, ...]:
    """The last layer starts at zero, as in the original: a new model says nothing at first."""

    return (
        spec.InitRule(pattern="out.*", kind="zeros"),
        spec.InitRule(pattern="*bias", kind="zeros"),
        spec.InitRule(pattern="*norm*.weight", kind="ones"),
        normal("*table.weight", cfg.width),
        normal("patch.weight", cfg.in_channels * math.prod(cfg.patch)),
        spec.InitRule(pattern="time.*", kind="normal", std=0.02),
        spec.InitRule(pattern="text.*", kind="normal", std=0.02),
        normal("image.*", max(1, cfg.image_dim)),
        normal("blocks.*.mlp.down.weight", cfg.mlp),
        normal("*", cfg.width),
    )


@spec.flops.register
def _(cfg: Wan, rows: int, length: int) -> float:
    """`length` is the tokens of a sample; texts are counted at their most, images are not."""
    return rows * sum(_operations(cfg, length, cfg.text).values())


@row_work.register
def _(cfg: Wan, row: Mapping[str, Any]) -> RowWork:
    tokens, text = row_sizes(cfg.space, row)
    return RowWork(kinds={"calls": 1.0, **_operations(cfg, tokens, text)}, tokens=tokens)


def _operations(cfg: Wan, length: int, text: int) -> dict[str, float]:
    """Returns the operations of a sample of `length` tokens, by kind."""
    w, patch = cfg.width, math.prod(cfg.patch)
    block = length * (6 * w * w + 2 * w * cfg.mlp) + 2 * text * w * w
    ends = length * patch * w * (cfg.in_channels + cfg.out_channels)
    once = text * (cfg.text_dim * w + w * w) + cfg.sinusoids * w + 7 * w * w
    return {
        "matrices": 6.0 * (cfg.layers * block + ends + once),
        "full": 6.0 * cfg.layers * 2 * w * (length * length + length * text),
    }


@spec.golden.register
def _(cfg: Wan, model: nn.Module, inputs: Mapping[str, Tensor], config: Mapping[str, Any]) -> spec.Golden:
    """Times may be those of tokens [B, S] or of samples [B]; every text of a recording is as long as its tensor."""
    x, text, image = inputs["hidden_states"], inputs["encoder_hidden_states"], inputs.get("encoder_hidden_states_image")
    grid, rows = grid_of(x.shape[1:], cfg.patch), len(x)
    times = inputs["timestep"].float().reshape(rows, -1).expand(rows, math.prod(grid))
    found = [torch.unique_consecutive(row, return_counts=True) for row in times]
    packing = Packing(
        grids=((grid,),) * rows,
        texts=(text.shape[1],) * rows,
        images=(image.shape[1],) * rows if image is not None else (),
        runs=tuple(tuple(counts.tolist()) for _, counts in found),
    )
    tokens = torch.cat([patchify(one, cfg.patch, channels_first=False) for one in x])
    time = torch.cat([values for values, _ in found]) / TIMES
    made = model(tokens, time, text.flatten(0, 1), packing, None, None if image is None else image.flatten(0, 1))
    parts = made.split(packing.lengths)
    told = torch.stack([unpatchify(part, grid, cfg.patch, channels_first=False) for part in parts])
    loss = (told - inputs["target"]).square().mean()
    return spec.Golden(outputs={"pred": told.detach(), "sample": told.detach(), "loss": loss.detach()}, loss=loss)


@spec.weight_map.register
def _(cfg: Wan) -> WeightMap:
    """Names are diffusers'; the original's are aliases. Its block calls norm3 what diffusers calls norm2."""
    modules = {
        "patch": ("patch_embedding", "patch_embedding"),
        "time.up": ("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
        "time.down": ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
        "time_mod": ("condition_embedder.time_proj", "time_projection.1"),
        "text.up": ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
        "text.down": ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
        "out": ("proj_out", "head.head"),
    }
    if cfg.image_dim:
        embedder = "condition_embedder.image_embedder."
        modules |= {
            "image.norm_in": (f"{embedder}norm1", "img_emb.proj.0"),
            "image.mlp.up": (f"{embedder}ff.net.0.proj", "img_emb.proj.1"),
            "image.mlp.down": (f"{embedder}ff.net.2", "img_emb.proj.3"),
            "image.norm_out": (f"{embedder}norm2", "img_emb.proj.4"),
        }
    tensors = {"table.weight": ("scale_shift_table", "head.modulation")}
    for i in range(cfg.layers):
        more, single = _block(bool(cfg.image_dim))
        at = f"blocks.{i}."
        modules |= {at + ours: (at + theirs, at + original) for ours, (theirs, original) in more.items()}
        tensors |= {at + ours: (at + theirs, at + original) for ours, (theirs, original) in single.items()}
    for ours, names in modules.items():
        tensors |= {f"{ours}.{kind}": (f"{names[0]}.{kind}", f"{names[1]}.{kind}") for kind in ("weight", "bias")}
    rules: list[Rule] = [Same(ours, theirs) for ours, (theirs, _) in tensors.items()]
    rules += [Alias(original, theirs) for theirs, original in tensors.values() if original != theirs]
    # diffusers' published I2V folders hold a norm that no model of theirs has.
    left = [Carried("blocks.*.attn2.norm_added_q.weight")] if cfg.image_dim else []
    return WeightMap(rules=(*rules, *left))


def _block(image: bool) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
    """Returns the modules with weight and bias of a block, and its single tensors, in diffusers' and original names."""
    modules = {
        "cross_norm": ("norm2", "norm3"),
        "mlp.up": ("ffn.net.0.proj", "ffn.0"),
        "mlp.down": ("ffn.net.2", "ffn.2"),
    }
    single = {"table.weight": ("scale_shift_table", "modulation")}
    for ours, theirs, original in (
        ("self_attention", "attn1", "self_attn"),
        ("cross_attention", "attn2", "cross_attn"),
    ):
        for part in "qkv":
            modules[f"{ours}.{part}"] = (f"{theirs}.to_{part}", f"{original}.{part}")
        modules[f"{ours}.out"] = (f"{theirs}.to_out.0", f"{original}.o")
        for part in "qk":
            single[f"{ours}.{part}_norm.weight"] = (f"{theirs}.norm_{part}.weight", f"{original}.norm_{part}.weight")
    if image:
        for part in "kv":
            modules[f"cross_attention.image_{part}"] = (f"attn2.add_{part}_proj", f"cross_attn.{part}_img")
        single["cross_attention.image_k_norm.weight"] = ("attn2.norm_added_k.weight", "cross_attn.norm_k_img.weight")
    return modules, single


def experts(cfg: Wan, boundary: float) -> tuple[Wan, Wan]:
    """Returns the experts of times from `boundary` on and below it; each is a model of its own and trains alone."""
    high, low = high_part(cfg.flow, boundary), low_part(cfg.flow, boundary)
    return attrs.evolve(cfg, flow=high), attrs.evolve(cfg, flow=low)


wan2_1_t2v_14b = Wan()
wan2_1_t2v_1_3b = Wan(layers=30, heads=12, mlp=8960)
wan2_1_i2v_14b = Wan(in_channels=36, image_dim=wan_config.CLIP)
wan2_2_t2v_a14b_high, wan2_2_t2v_a14b_low = experts(Wan(), 0.875)
wan2_2_i2v_a14b_high, wan2_2_i2v_a14b_low = experts(Wan(in_channels=36), 0.9)
wan2_2_ti2v_5b = Wan(layers=30, heads=24, mlp=14336, in_channels=48, out_channels=48)
wan_tiny = Wan(layers=2, heads=2, head_dim=12, mlp=48, in_channels=4, out_channels=4, text=6, text_dim=16, sinusoids=32)
"""Tens of thousands of parameters, for tests."""
