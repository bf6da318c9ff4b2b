"""Pi0.5 as a family: what lf asks of it, its weight table in the published names, and presets of the published sizes.

The modules are in `pi05_model.py`, the readers and writers of config.json in `pi05_config.py`.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from lf.models import spec
from lf.models.embodied import pi05_config, pi05_golden, robot
from lf.models.embodied.lerobot_files import lerobot_files
from lf.models.embodied.pi05_model import CAMERAS, Pi05, Pi05Model, noisy
from lf.models.embodied.pi05_sample import euler
from lf.models.initialise import normal
from lf.models.layers.gemma import Gemma, tower_flops
from lf.models.layouts import Alias, Prefix
from lf.models.vision.siglip import Siglip, siglip_flops, siglip_init, siglip_rules
from lf.models.weights import Carried, Duplicate, Rule, Same, Stack, Unused, WeightMap
from lf.models.work import RowWork, row_work

from_hf = pi05_config.from_hf

VLM_HF, EXPERT_HF = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
EMBED = f"{VLM_HF}model.language_model.embed_tokens.weight"

WIDE = (
    *("vision.embed.*", "*_norm.*", "vlm.norm.*", "expert.norm.*"),
    *("action_in.*", "action_out.*", "time_in.*", "time_out.*"),
)
"""Tensors that stay float32 in a bfloat16 model, as in the published checkpoints."""

VISION = ("vision.*",)
"""Canonical names of the vision tower."""
VLM = ("vision.*", "projector.*", "embed.*", "vlm.*")
"""Canonical names of everything but the action expert and its heads."""


def unused(cfg: Pi05) -> tuple[str, ...]:
    """Returns the tensors that no action depends on: what the VLM's last layer does after its keys, and its last norm.

    Published checkpoints hold them, so the model does; they are never trained and no rank waits for their gradients.
    """
    last = f"vlm.layers.{cfg.vlm.depth - 1}."
    names = ("out.weight", "mlp_norm.weight", "mlp.gate_up.weight", "mlp.down.weight")
    return (*(last + name for name in names), "vlm.norm.weight")


@spec.build_model.register
def _(cfg: Pi05, ctx: spec.Ctx) -> nn.Module:
    with torch.device("meta"):
        model = Pi05Model(cfg).to(ctx.dtype)
    for name, param in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in WIDE):
            param.data = param.data.float()
    for name in unused(cfg):
        model.get_parameter(name).requires_grad_(False)
    # torch's own first values of billions of parameters would be drawn for nothing.
    return model if ctx.meta else model.to_empty(device=ctx.device.torch_type)


@spec.forward.register
def _(cfg: Pi05, model: nn.Module, batch: spec.Batch) -> spec.Output:
    x_BHD = noisy(batch["actions"], batch["noise"], batch["time"])
    return model(batch["images"], batch["cameras"], batch["prompt"], batch["words"], x_BHD, batch["time"])


@spec.loss_weights.register
def _(cfg: Pi05, batch: spec.Batch) -> dict[str, Tensor]:
    return {"flow": batch["counted"].sum()}


@spec.loss_terms.register
def _(cfg: Pi05, output: spec.Output, batch: spec.Batch) -> dict[str, Tensor]:
    error = batch["noise"] - batch["actions"] - output
    return {"flow": torch.where(batch["counted"], error, 0.0).square().sum()}


@spec.draw.register
def _(cfg: Pi05, batch: spec.Batch, seed: int, step: int) -> spec.Batch:
    return robot.with_draws(batch, cfg.times, seed, step)


@spec.collate.register
def _(cfg: Pi05, rows: Sequence[Mapping[str, Any] | None], like: Mapping[str, Any]) -> spec.Batch:
    return robot.trimmed(robot.robot_batch(cfg.space, rows))


@spec.sample.register
def _(cfg: Pi05, model: nn.Module, batch: spec.Batch) -> Tensor:
    assert isinstance(model, Pi05Model)
    keys, valid = model.observe(batch["images"], batch["cameras"], batch["prompt"], batch["words"])
    dims = batch["dims"] if cfg.counted == "valid" else None
    return euler(model, keys, valid, batch["noise"], cfg.steps, dims).actions


@spec.prompt.register
def _(cfg: Pi05, task: str, state: np.ndarray) -> str:
    """The format is openpi's (`PaligemmaTokenizer` with a discrete state)."""
    text = task.strip().replace("_", " ").replace("\n", " ")
    return f"Task: {text}, State: {' '.join(map(str, robot.state_bins(state)))};\nAction: "


@spec.robot_files.register
def _(
    cfg: Pi05, config: Mapping[str, Any], state: spec.Affine | None, actions: spec.Affine, delta: bool
) -> dict[str, bytes]:
    return lerobot_files(config, cfg.prompt, state, actions, delta)


@spec.prompt_limit.register
def _(cfg: Pi05) -> int:
    return cfg.prompt


@spec.golden.register
def _(cfg: Pi05, model: nn.Module, inputs: Mapping[str, Tensor], config: Mapping[str, Any]) -> spec.Golden:
    assert isinstance(model, Pi05Model)
    return pi05_golden.golden(cfg, model, inputs, config["action_dim"])


@spec.hf_config.register
def _(cfg: Pi05) -> dict[str, Any]:
    return pi05_config.to_hf(cfg)


@spec.check_model.register
def _(cfg: Pi05, data: Mapping[str, int]) -> None:
    facts = (("vocab", "vocab", "token ids"), ("action_dims", "dims", "action dims"))
    for fact, field, what in facts:
        if data.get(fact, 0) > getattr(cfg, field):
            raise ValueError(
                f"model.{field} = {getattr(cfg, field)}, but the data has {data[fact]} {what}; raise model.{field}"
            )
    if data.get("length", cfg.horizon) != cfg.horizon:
        raise ValueError(
            f"model.horizon = {cfg.horizon}, but the data has chunks of {data['length']} steps; set both to one number"
        )


@spec.shard_spec.register
def _(cfg: Pi05) -> spec.ShardSpec:
    units = ("vision.layers.*", "vlm.layers.*", "expert.layers.*")
    return spec.ShardSpec(fsdp_units=units, recompute_units=units, float32=WIDE)


@spec.flops.register
def _(cfg: Pi05, rows: int, length: int) -> float:
    """`length` is the steps of an action chunk; rows count as if they had all cameras and the longest prompt."""
    before = len(cfg.cameras) * cfg.vision.tokens + cfg.prompt
    width = cfg.expert.width
    heads = 2.0 * (length * 2 * width * cfg.dims + 2 * width**2)
    images = len(cfg.cameras) * (siglip_flops(cfg.vision) + 2.0 * cfg.vision.tokens * cfg.vision.width * cfg.vlm.width)
    towers = tower_flops(cfg.vlm, before, before, keys_only=True) + tower_flops(
        cfg.expert, length, before + length, width
    )
    return 3.0 * rows * (images + towers + heads)


@row_work.register
def _(cfg: Pi05, row: Mapping[str, Any]) -> RowWork:
    """All rows count alike, as for `flops`."""
    tokens = len(cfg.cameras) * cfg.vision.tokens + cfg.prompt + cfg.horizon
    return RowWork(kinds={"calls": 1.0, "matrices": spec.flops(cfg, 1, cfg.horizon)}, tokens=tokens)


@spec.fake_batch.register
def _(cfg: Pi05, rows: int, length: int, seed: int) -> spec.Batch:
    space = attrs.evolve(cfg.space, horizon=length)
    return spec.draw(cfg, robot.robot_batch(space, robot.fake_rows(space, rows, seed)), seed, 0)


@spec.init_rules.register
def _(cfg: Pi05) -> tuple[spec.InitRule, ...]:
    """Adaptive norms start at zero, as in openpi's JAX model: the expert's layers do nothing at first."""

    def tower(name: str, cfg: Gemma) -> tuple[spec.InitRule, ...]:
        return (
            normal(f"{name}.layers.*.out.weight", cfg.heads * cfg.head_dim),
            normal(f"{name}.layers.*.mlp.down.weight", cfg.mlp),
            normal(f"{name}.*", cfg.width),
        )

    vision = siglip_init(cfg.vision).items()
    return (
        spec.InitRule(pattern="*bias", kind="zeros"),
        spec.InitRule(pattern="vision.*norm*.weight", kind="ones"),
        spec.InitRule(pattern="*norm.*", kind="zeros"),
        *(spec.InitRule(pattern=f"vision.*{name}", kind="normal", std=std) for name, std in vision),
        normal("projector.weight", cfg.vision.width),
        normal("embed.weight", cfg.vlm.width),
        *tower("vlm", cfg.vlm),
        *tower("expert", cfg.expert),
        normal("action_in.weight", cfg.dims),
        normal("*", cfg.expert.width),
    )


@spec.weight_map.register
def _(cfg: Pi05) -> WeightMap:
    vlm, expert = f"{VLM_HF}model.language_model.", f"{EXPERT_HF}model."
    rules: list[Rule] = [
        *siglip_rules(cfg.vision, "vision.", f"{VLM_HF}model.vision_tower.vision_model."),
        Same("embed.weight", EMBED),
        Duplicate(f"{VLM_HF}lm_head.weight", EMBED),
        *_tower_rules(cfg.vlm, "vlm.", vlm, ("weight",)),
        *_tower_rules(cfg.expert, "expert.", expert, ("dense.weight", "dense.bias")),
    ]
    for kind in ("weight", "bias"):
        rules.append(Same(f"projector.{kind}", f"{VLM_HF}model.multi_modal_projector.linear.{kind}"))
        for ours, theirs in (("action_in", "action_in_proj"), ("action_out", "action_out_proj")):
            rules.append(Same(f"{ours}.{kind}", f"{theirs}.{kind}"))
        for part in ("in", "out"):
            rules.append(Same(f"time_{part}.{kind}", f"time_mlp_{part}.{kind}"))
            rules.append(Alias(f"action_time_mlp_{part}.{kind}", f"time_mlp_{part}.{kind}"))
    head = Unused(f"{EXPERT_HF}lm_head.weight", (cfg.vocab, cfg.expert.width))
    left = (f"{expert}norm.weight", f"{expert}layers.*norm.weight", "state_proj.*")
    return WeightMap(rules=(*rules, head, *(Carried(name) for name in left), Prefix("model.")))


def _tower_rules(cfg: Gemma, lf: str, hf: str, norm: tuple[str, ...]) -> list[Rule]:
    sizes = (cfg.heads * cfg.head_dim, *(cfg.kv_heads * cfg.head_dim,) * 2)
    rules: list[Rule] = []
    for i in range(cfg.depth):
        ours, theirs = f"{lf}layers.{i}.", f"{hf}layers.{i}."
        qkv = tuple(f"{theirs}self_attn.{part}_proj.weight" for part in "qkv")
        rules += [
            Stack(f"{ours}qkv.weight", qkv, rows=sizes),
            Same(f"{ours}out.weight", f"{theirs}self_attn.o_proj.weight"),
            Stack(f"{ours}mlp.gate_up.weight", (f"{theirs}mlp.gate_proj.weight", f"{theirs}mlp.up_proj.weight")),
            Same(f"{ours}mlp.down.weight", f"{theirs}mlp.down_proj.weight"),
        ]
        for one, other in (("input_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            rules += [Same(f"{ours}{one}.{kind}", f"{theirs}{other}.{kind}") for kind in norm]
    return [*rules, *(Same(f"{lf}norm.{kind}", f"{hf}norm.{kind}") for kind in norm)]


pi05_base = Pi05()
pi05_libero = Pi05(horizon=10)
pi05_droid = Pi05(horizon=15)
pi05_tiny = Pi05(
    vision=Siglip(width=32, depth=2, mlp=48, heads=4, image=28, patch=14),
    vlm=Gemma(width=64, depth=2, mlp=96, head_dim=8),
    expert=Gemma(width=32, depth=2, mlp=64, head_dim=8),
    vocab=160,
    cameras=CAMERAS[:2],
    prompt=12,
    horizon=10,
    dims=8,
)
"""Tens of thousands of parameters, for tests."""
