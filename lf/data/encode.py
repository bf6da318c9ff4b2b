"""Latents of media and embeddings of captions, by diffusers' VAEs and transformers' text encoders (extra `diffusion`).

An encoder is the folder of a diffusers pipeline: `vae/`, `text_encoder/`, `tokenizer/`. Weights are safetensors alone.

Shapes: F frames, H height, W width of a medium; C channels, f frames, y rows, x columns of a latent; L length, D width
of a text.
"""

import hashlib
import html
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VAES = ("AutoencoderKLWan", "AutoencoderKLQwenImage")
QWEN_PROMPT = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""What Qwen-Image is told around a caption (arXiv:2508.02324); the embeddings of what stands before it are dropped."""


@attrs.frozen(kw_only=True, eq=False)
class Vae:
    """A VAE, and how its latents are scaled."""

    module: Any
    """diffusers' module, in float32."""
    mean: Tensor
    """[C, 1, 1, 1]"""
    std: Tensor
    """[C, 1, 1, 1]"""
    spatial: int
    """Pixels of a row or column of latents."""
    temporal: int
    """Frames of a frame of latents, all but the first."""
    digest: str
    """sha256 of config and weights."""

    @property
    def channels(self) -> int:
        """Channels of a latent."""
        return len(self.mean)


@attrs.frozen(kw_only=True, eq=False)
class Texts:
    """An encoder of captions."""

    ids: Callable[[str], list[int]]
    """Returns the tokens of a caption, with what is said around it."""
    run: Callable[[list[int]], Tensor]
    """Returns the embeddings [L, D] of tokens."""
    dropped: int
    """How many embeddings in front are left out."""
    empty: str
    """The empty caption, as the family's pipeline has it."""
    width: int
    """D."""
    most: int
    """Most embeddings of a caption that the family's models take."""
    digest: str
    """sha256 of config, weights and tokenizer."""


def digest_of(*folders: Path) -> str:
    """Returns the sha256 of the names and bytes of the settings, tokenizers and safetensors of folders."""
    made = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.iterdir()):
            if file.suffix not in (".json", ".safetensors", ".model", ".txt") or not file.is_file():
                continue
            with file.open("rb") as stream:
                made.update(f"{file.name}\0".encode() + hashlib.file_digest(stream, "sha256").digest())
    return made.hexdigest()


def stated(folder: Path) -> dict[str, Any]:
    """Returns the config.json of a folder; raises ValueError where there is none."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{file} cannot be read ({error}); give a diffusers pipeline with vae/ and text_encoder/"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold an object; fetch the folder again")
    return config


def scaling(config: Mapping[str, Any], where: Path) -> tuple[Tensor, Tensor]:
    """Returns mean and std [C, 1, 1, 1] of latents as a VAE's config states them; raises ValueError for bad ones."""
    channels, made = config.get("z_dim"), []
    for name in ("latents_mean", "latents_std"):
        value = config.get(name)
        numbers = value if isinstance(value, list) else []
        good = all(isinstance(n, int | float) and math.isfinite(n) for n in numbers) and len(numbers) == channels
        if not good or not numbers or (name == "latents_std" and min(numbers) <= 0):
            raise ValueError(
                f"{where}: {name} = {value} must be z_dim = {channels} finite numbers{', above 0' * ('std' in name)}; "
                "latents are scaled by it: fetch the config again"
            )
        made.append(torch.tensor(numbers, dtype=torch.float32)[:, None, None, None])
    return made[0], made[1]


def strides(config: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the spatial and the temporal stride of a VAE."""
    halved = config.get("temperal_downsample") or [False, True, True]
    return 2 ** len(halved) * int(config.get("patch_size") or 1), 2 ** sum(map(bool, halved))


def open_vae(folder: Path, device: str = "cpu") -> Vae:
    """Returns the VAE of a folder, frozen; raises ValueError for one that lf does not know or that is broken."""
    config = stated(folder)
    kind = config.get("_class_name")
    if kind not in VAES:
        raise ValueError(f"{folder / 'config.json'} states {kind!r}; lf encodes with {' and '.join(VAES)}")
    mean, std = scaling(config, folder / "config.json")
    try:
        import diffusers
    except ImportError as error:
        raise ValueError(f"VAEs are diffusers', which is missing ({error}); install lf[diffusion]") from error
    try:
        module = getattr(diffusers, kind).from_pretrained(
            folder, torch_dtype=torch.float32, use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{folder} is no whole {kind} ({error}); fetch it again") from error
    module.requires_grad_(False).eval().to(device)
    spatial, temporal = strides(config)
    return Vae(
        module=module,
        mean=mean.to(device),
        std=std.to(device),
        spatial=spatial,
        temporal=temporal,
        digest=digest_of(folder),
    )


def encode_pixels(vae: Vae, pixels_FHWC: NDArray[np.uint8]) -> Tensor:
    """Returns the scaled latent [C, f, y, x] of frames: the mean that the VAE gives, less `mean`, over `std`."""
    return encode_values(vae, _values(vae, pixels_FHWC))


def _values(vae: Vae, pixels_FHWC: NDArray[np.uint8]) -> Tensor:
    pixels = torch.from_numpy(np.array(pixels_FHWC)).to(vae.mean.device)
    return (pixels.float() / 127.5 - 1.0).permute(3, 0, 1, 2)


@torch.no_grad()
def encode_values(vae: Vae, values_3FHW: Tensor) -> Tensor:
    """Returns the scaled latent [C, f, y, x], float32, of values from -1 to 1."""
    latent = vae.module.encode(values_3FHW[None]).latent_dist.mode()[0].float()
    return ((latent - vae.mean) / vae.std).cpu()


@torch.no_grad()
def decode_latent(vae: Vae, latent_CFYX: Tensor) -> NDArray[np.uint8]:
    """Returns the frames [F, H, W, 3] of a scaled latent."""
    latent = latent_CFYX.to(vae.mean) * vae.std + vae.mean
    values = vae.module.decode(latent[None]).sample[0].clamp(-1.0, 1.0)
    return ((values + 1.0) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0).cpu().numpy()


def first_frame_condition(vae: Vae, pixels_FHWC: NDArray[np.uint8]) -> Tensor:
    """Returns what Wan I2V reads beside the latents, [temporal + C, f, y, x] (arXiv:2503.20314).

    The first channels say which frames are given (one for each frame that a latent frame holds, 1 in the first latent
    frame alone); then comes the latent of the first frame with grey behind it.
    """
    first = _values(vae, pixels_FHWC[:1])
    rest = first.new_zeros(3, len(pixels_FHWC) - 1, *first.shape[2:])
    latent = encode_values(vae, torch.cat((first, rest), dim=1))
    mask = torch.zeros(vae.temporal, *latent.shape[1:])
    mask[:, 0] = 1.0
    return torch.cat((mask, latent))


def clean(caption: str) -> str:
    """Returns a caption as Wan's pipelines clean it: HTML entities resolved, white space single."""
    return " ".join(html.unescape(html.unescape(caption)).split())


def open_texts(pipeline: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Texts:
    """Returns the text encoder of a pipeline, frozen; raises ValueError for one that lf does not know or is broken."""
    folder, words = pipeline / "text_encoder", pipeline / "tokenizer"
    kind = stated(folder).get("model_type")
    known = {"umt5": "UMT5EncoderModel", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration"}
    if kind not in known:
        raise ValueError(f"{folder / 'config.json'} states model_type {kind!r}; lf encodes with {', '.join(known)}")
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"texts are encoded by transformers, which is missing ({error}); install lf[hf]") from error
    try:
        model = getattr(transformers, known[kind]).from_pretrained(
            folder, dtype=dtype, use_safetensors=True, local_files_only=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(words, local_files_only=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{pipeline} has no whole text_encoder and tokenizer ({error}); fetch them again") from error
    model.requires_grad_(False).eval().to(device)
    qwen = kind == "qwen2_5_vl"

    def ids(caption: str) -> list[int]:
        return list(tokenizer(QWEN_PROMPT.format(caption) if qwen else clean(caption)).input_ids)

    @torch.no_grad()
    def run(tokens: list[int]) -> Tensor:
        given = torch.tensor([tokens], device=device)
        if qwen:
            made = model(input_ids=given, attention_mask=torch.ones_like(given), output_hidden_states=True)
            return made.hidden_states[-1][0].cpu()
        return model(input_ids=given, attention_mask=torch.ones_like(given)).last_hidden_state[0].cpu()

    return Texts(
        ids=ids,
        run=run,
        dropped=len(tokenizer(QWEN_PROMPT.partition("{}")[0]).input_ids) if qwen else 0,
        empty=" " if qwen else "",
        width=int(model.config.get_text_config().hidden_size) if qwen else int(model.config.d_model),
        most=1024 if qwen else 512,
        digest=digest_of(folder, words),
    )


def check_caption(texts: Texts, name: str, caption: str, most: int) -> list[int]:
    """Returns the tokens of a caption; raises ValueError where it has more than `most` embeddings."""
    tokens = texts.ids(caption)
    if len(tokens) - texts.dropped > most:
        raise ValueError(
            f"{name}: its caption has {len(tokens) - texts.dropped} embeddings, and the model takes {most}; shorten "
            f"it: {caption[:60]!r} ..."
        )
    return tokens


def encode_caption(texts: Texts, name: str, caption: str, most: int) -> Tensor:
    """Returns the embeddings [L, D] of a caption, without padding."""
    made = texts.run(check_caption(texts, name, caption, most))[texts.dropped :]
    if not len(made):
        raise ValueError(f"{name}: the tokenizer makes nothing of {caption!r}; write a caption of words")
    return made
