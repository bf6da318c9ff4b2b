"""Reads and writes config.json of Wan: that of diffusers' `transformer/` folder, and that of the original release.

What a training run adds (flow, sampling) is in neither; the published boundaries of two experts are in a pipeline's
`model_index.json`.
"""

from collections.abc import Mapping
from typing import Any

from lf.models.diffusion.wan_model import Wan
from lf.models.llm.fields import flag, number, whole

KIND = "WanTransformer3DModel"
CLIP = 1280
"""Width of the image embeddings of the published I2V models that read some."""

_OURS = {
    "heads": "num_attention_heads",
    "head_dim": "attention_head_dim",
    "in_channels": "in_channels",
    "out_channels": "out_channels",
    "text_dim": "text_dim",
    "sinusoids": "freq_dim",
    "mlp": "ffn_dim",
    "layers": "num_layers",
    "most": "rope_max_seq_len",
}
_DEFAULTS = {"text_dim": 4096, "sinusoids": 256, "most": 1024}


def from_hf(config: Mapping[str, Any]) -> Wan:
    """Returns the model that diffusers' config.json states; raises ValueError where lf cannot have it."""
    fields = config["model"] if "reference_class" in config else config
    if not flag(fields, "cross_attn_norm", True):
        raise ValueError("cross_attn_norm = false is not of any published model, and lf has none; set it to true")
    if fields.get("qk_norm", "rms_norm_across_heads") != "rms_norm_across_heads":
        raise ValueError(f"qk_norm = {fields['qk_norm']!r}; lf normalises over all heads: rms_norm_across_heads")
    if fields.get("pos_embed_seq_len") is not None:
        raise ValueError(
            f"pos_embed_seq_len = {fields['pos_embed_seq_len']} is that of first-and-last-frame models, which lf does "
            "not have; give a T2V, I2V or TI2V model"
        )
    sizes: dict[str, Any] = {ours: whole(fields, theirs, _DEFAULTS.get(ours)) for ours, theirs in _OURS.items()}
    image = whole(fields, "image_dim", 0, least=0)
    added = whole(fields, "added_kv_proj_dim", 0, least=0)
    if bool(image) != bool(added) or added not in (0, sizes["heads"] * sizes["head_dim"]):
        raise ValueError(
            f"image_dim = {image} and added_kv_proj_dim = {added}; a model that reads images has both, and the second "
            "is its width: correct them"
        )
    return Wan(**sizes, image_dim=image, patch=_patch(fields), eps=number(fields, "eps", 1e-6, above=0.0))


def to_hf(cfg: Wan) -> dict[str, Any]:
    """Returns diffusers' config.json of a model."""
    return {
        "_class_name": KIND,
        **{theirs: getattr(cfg, ours) for ours, theirs in _OURS.items()},
        "patch_size": list(cfg.patch),
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "eps": cfg.eps,
        "image_dim": cfg.image_dim or None,
        "added_kv_proj_dim": cfg.width if cfg.image_dim else None,
        "pos_embed_seq_len": None,
    }


def from_original(config: Mapping[str, Any]) -> Wan:
    """Returns the model that the original config.json states.

    It calls both Wan2.1 and Wan2.2 I2V `i2v`, though the second reads no image embeddings; `settled` tells them apart.
    """
    kind = config.get("model_type", "t2v")
    if kind not in ("t2v", "i2v", "ti2v"):
        raise ValueError(f"model_type = {kind!r}; lf has t2v, i2v and ti2v")
    width, heads = whole(config, "dim"), whole(config, "num_heads")
    if width % heads:
        raise ValueError(f"dim = {width} must be a multiple of num_heads = {heads}; correct it")
    return Wan(
        layers=whole(config, "num_layers"),
        heads=heads,
        head_dim=width // heads,
        mlp=whole(config, "ffn_dim"),
        in_channels=whole(config, "in_dim"),
        out_channels=whole(config, "out_dim"),
        patch=_patch(config),
        text=whole(config, "text_len", 512),
        text_dim=whole(config, "text_dim", 4096),
        image_dim=CLIP if kind == "i2v" else 0,
        sinusoids=whole(config, "freq_dim", 256),
        eps=number(config, "eps", 1e-6, above=0.0),
    )


def _patch(config: Mapping[str, Any]) -> tuple[int, int, int]:
    patch = config.get("patch_size") or [1, 2, 2]
    if not isinstance(patch, list) or len(patch) != 3 or any(type(n) is not int or n < 1 for n in patch):
        raise ValueError(f"patch_size = {patch!r} must be a list of three whole numbers; correct it")
    return patch[0], patch[1], patch[2]
