"""Latents of media, by diffusers' VAEs (extra `diffusion`): the `vae/` of a pipeline. Weights are safetensors alone.

Shapes: F frames, H height, W width of a medium; C channels, f frames, y rows, x columns of a latent.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lf.data.cache import sha256_of

VAES = ("AutoencoderKLWan", "AutoencoderKLQwenImage")


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


def digest_of(*folders: Path) -> str:
    """Returns the sha256 of the names and bytes of the settings, tokenizers and safetensors of folders."""
    made = hashlib.sha256()
    for folder in folders:
        for file in sorted(folder.iterdir()):
            if file.suffix not in (".json", ".safetensors", ".model", ".txt") or not file.is_file():
                continue
            made.update(f"{file.name}\0".encode() + bytes.fromhex(sha256_of(file)))
    return made.hexdigest()


def json_file(file: Path, cure: str) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ValueError with the cure where there is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}); {cure}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no object; {cure}")
    return found


def stated(folder: Path) -> dict[str, Any]:
    """Returns the config.json of a folder; raises ValueError where there is none."""
    return json_file(folder / "config.json", "give a whole diffusers pipeline, with vae/ and text_encoder/")


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
        raise ValueError(
            f"{folder / 'config.json'} states {kind!r}, and lf encodes with {' and '.join(VAES)}; give a pipeline that "
            "has one of them as its vae"
        )
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
