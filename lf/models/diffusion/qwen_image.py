"""Qwen-Image and Qwen-Image-Edit as a family: what lf asks of it, config.json, its weight table, the published models.

The modules are in `qwen_image_model.py`, the row that data must give in `latent.py`, and what all models of latents
share in `family.py`.
"""

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from lf.models import spec
from lf.models.diffusion.family import Family, family_of
from lf.models.diffusion.latent import row_sizes
from lf.models.diffusion.packed import Grid, Packing
from lf.models.diffusion.qwen_image_model import SINUSOIDS, QwenImageModel
from lf.models.diffusion.qwen_image_model import QwenImage as QwenImage
from lf.models.initialise import normal
from lf.models.llm.fields import flag, whole
from lf.models.weights import Rule, Same, WeightMap
from lf.models.work import RowWork, row_work

KIND = "QwenImageTransformer2DModel"

WIDE = ("time.*",)
"""Tensors that compute in float32 in a bfloat16 model."""

EDIT_TEXT = 2048
"""Most text embeddings of an edit: a picture beside the caption has about 1370."""

_OURS = {
    "layers": "num_layers",
    "heads": "num_attention_heads",
    "head_dim": "attention_head_dim",
    "text_dim": "joint_attention_dim",
    "patch": "patch_size",
}


def unused(cfg: QwenImage) -> tuple[str, ...]:
    """Returns the tensors that no output depends on: the text's queries, output and network of the last block."""
    last = f"blocks.{cfg.layers - 1}.text."
    layers = ("q", "out", "mlp.up", "mlp.down")
    return (*(f"{last}{name}.{kind}" for name in layers for kind in ("weight", "bias")), f"{last}q_norm.weight")


@family_of.register
def _(cfg: QwenImage) -> Family:
    return Family(module=QwenImageModel, wide=WIDE, unused=unused(cfg), shared=(("model.heads", cfg.heads),))


@spec.init_rules.register
def _(cfg: QwenImage) -> tuple[spec.InitRule, ...]:
    """Modulations and the last layer start at zero (adaLN-Zero, arXiv:2212.09748): blocks do nothing at first."""

    return (
        spec.InitRule(pattern="*bias", kind="zeros"),
        spec.InitRule(pattern="*norm.weight", kind="ones"),
        spec.InitRule(pattern="out*.weight", kind="zeros"),
        spec.InitRule(pattern="*.mod.weight", kind="zeros"),
        normal("patch.weight", cfg.channels * cfg.patch**2),
        normal("text.weight", cfg.text_dim),
        spec.InitRule(pattern="time.*", kind="normal", std=0.02),
        normal("*.mlp.down.weight", 4 * cfg.width),
        normal("*", cfg.width),
    )


@spec.flops.register
def _(cfg: QwenImage, rows: int, length: int) -> float:
    """`length` is the image tokens of a sample; texts are counted at their most."""
    return rows * sum(_operations(cfg, length, cfg.text).values())


@row_work.register
def _(cfg: QwenImage, row: Mapping[str, Any]) -> RowWork:
    tokens, text = row_sizes(cfg.space, row)
    return RowWork(kinds={"calls": 1.0, **_operations(cfg, tokens, text)}, tokens=tokens + text)


def _operations(cfg: QwenImage, length: int, text: int) -> dict[str, float]:
    """Returns the operations of a sample of `length` image tokens, by kind."""
    w, last, joint = cfg.width, cfg.layers - 1, length + text
    block = joint * 12 * w * w + 12 * w * w
    final = length * 12 * w * w + text * 2 * w * w + 12 * w * w
    ends = 2 * length * cfg.channels * cfg.patch**2 * w + text * cfg.text_dim * w
    once = SINUSOIDS * w + w * w + 2 * w * w
    return {
        "matrices": 6.0 * (last * block + final + ends + once),
        "full": 6.0 * 2 * w * joint * (last * joint + length),
    }


@spec.golden.register
def _(cfg: QwenImage, model: nn.Module, inputs: Mapping[str, Tensor], config: Mapping[str, Any]) -> spec.Golden:
    """`hidden_states` [B, S, P] are tokens already; a text's real embeddings come first, as the mask says."""
    x, text, times = inputs["hidden_states"], inputs["encoder_hidden_states"], inputs["timestep"]
    shapes = inputs["img_shapes"].tolist() if "img_shapes" in inputs else config["img_shapes"]
    grids: tuple[Grid, ...] = tuple((f, y, x) for f, y, x in shapes)
    lengths = [int(mask.sum()) for mask in inputs["encoder_hidden_states_mask"].bool()]
    target = grids[0][0] * grids[0][1] * grids[0][2]
    rest, rows = x.shape[1] - target, len(x)
    split = cfg.clean_references and rest > 0
    packing = Packing(
        grids=(grids,) * rows, texts=tuple(lengths), runs=((target, rest) if split else (target + rest,),) * rows
    )
    time = torch.stack([t * keep for t in times for keep in ((1.0, 0.0) if split else (1.0,))])
    told = torch.cat([row[:length] for row, length in zip(text, lengths, strict=True)])
    pred = model(x.flatten(0, 1), time, told, packing).unflatten(0, (rows, -1))
    goal = inputs["target"]
    loss = (pred[:, : goal.shape[1]] - goal).square().mean()
    return spec.Golden(outputs={"pred": pred.detach(), "sample": pred.detach(), "loss": loss.detach()}, loss=loss)


@spec.hf_config.register
def _(cfg: QwenImage) -> dict[str, Any]:
    return {
        "_class_name": KIND,
        **{theirs: getattr(cfg, ours) for ours, theirs in _OURS.items()},
        "in_channels": cfg.channels * cfg.patch**2,
        "out_channels": cfg.channels,
        "axes_dims_rope": list(cfg.axes),
        "guidance_embeds": False,
        "use_additional_t_cond": False,
        "use_layer3d_rope": False,
        "zero_cond_t": cfg.clean_references,
    }


def from_hf(config: Mapping[str, Any]) -> QwenImage:
    """Returns the model that diffusers' config.json states; raises ValueError where lf cannot have it.

    Text-to-image and edit models have one config.json, so every model that is read takes references.
    """
    fields = config["model"] if "reference_class" in config else config
    for name in ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"):
        if flag(fields, name, False):
            raise ValueError(f"{name} = true is of distilled or layered models, which lf does not have")
    sizes: dict[str, Any] = {ours: whole(fields, theirs) for ours, theirs in _OURS.items()}
    numbers = whole(fields, "in_channels")
    channels = whole(fields, "out_channels", numbers)
    if channels * sizes["patch"] ** 2 != numbers:
        raise ValueError(
            f"in_channels = {numbers} must be out_channels = {channels} times patch_size = {sizes['patch']} squared; "
            "correct it"
        )
    axes = fields.get("axes_dims_rope") or [16, 56, 56]
    if not isinstance(axes, list) or len(axes) != 3 or any(type(n) is not int or n < 2 for n in axes):
        raise ValueError(f"axes_dims_rope = {axes!r} must be a list of three whole numbers; correct it")
    return QwenImage(
        **sizes,
        channels=channels,
        axes=(axes[0], axes[1], axes[2]),
        text=EDIT_TEXT,
        edit=True,
        clean_references=flag(fields, "zero_cond_t", False),
    )


@spec.weight_map.register
def _(cfg: QwenImage) -> WeightMap:
    names = {
        "patch": "img_in",
        "text": "txt_in",
        "time.up": "time_text_embed.timestep_embedder.linear_1",
        "time.down": "time_text_embed.timestep_embedder.linear_2",
        "out_mod": "norm_out.linear",
        "out": "proj_out",
    }
    norms = {"text_norm": "txt_norm"}
    for i in range(cfg.layers):
        for ours, short, attention, out, norm in (
            ("image", "img", "to_{}", "to_out.0", "norm_{}"),
            ("text", "txt", "add_{}_proj", "to_add_out", "norm_added_{}"),
        ):
            at, theirs = f"blocks.{i}.{ours}.", f"transformer_blocks.{i}."
            names |= {f"{at}mod": f"{theirs}{short}_mod.1", f"{at}out": f"{theirs}attn.{out}"}
            names |= {f"{at}{part}": f"{theirs}attn.{attention.format(part)}" for part in "qkv"}
            names |= {f"{at}mlp.up": f"{theirs}{short}_mlp.net.0.proj", f"{at}mlp.down": f"{theirs}{short}_mlp.net.2"}
            norms |= {f"{at}{part}_norm": f"{theirs}attn.{norm.format(part)}" for part in "qk"}
    rules: list[Rule] = [Same(f"{a}.{kind}", f"{b}.{kind}") for a, b in names.items() for kind in ("weight", "bias")]
    return WeightMap(rules=(*rules, *(Same(f"{a}.weight", f"{b}.weight") for a, b in norms.items())))


qwen_image = QwenImage()
qwen_image_edit = attrs.evolve(qwen_image, edit=True, text=EDIT_TEXT)
qwen_image_edit_2509 = qwen_image_edit
qwen_image_edit_2511 = attrs.evolve(qwen_image_edit, clean_references=True)
qwen_image_tiny = QwenImage(
    layers=2, heads=2, head_dim=12, channels=4, text=6, text_dim=16, axes=(4, 4, 4), edit=True, clean_references=True
)
"""Tens of thousands of parameters, for tests."""
