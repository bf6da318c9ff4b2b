"""Pictures and videos of a diffusion model, for `generate.py media`.

Shapes: C channels, F frames, Y rows and X columns of a latent; H height, W width in pixels.
"""

import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, cast

import attrs
import torch
import tyro
from attrs.validators import ge, gt
from torch import Tensor, nn

from lf.data.encode import json_file
from lf.models.diffusion.latent import LatentModel
from lf.models.diffusion.sample import How, sample_row

_SUFFIXES = {".png": "a picture", ".mp4": "a video", ".safetensors": "a latent"}
_PLACES = ("transformer", "transformer_2")
"""Folders of a pipeline's models."""
_AGAIN = "fetch the pipeline again"


@attrs.frozen(kw_only=True)
class Media(How):
    """Samples a picture or a video from a trained or imported diffusion model."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Run folder of lf, folder of a transformer, or of a whole diffusers pipeline."""
    prompt: str = ""
    """What to show, for the text encoder of the pipeline."""
    pipeline: Path | None = None
    """Folder of a diffusers pipeline whose `vae` decodes and whose `text_encoder` and `tokenizer` read the prompt; a
    FOLDER that is a pipeline is its own."""
    cache: Path | None = None
    """Cache of latents whose row `row` says caption and size instead of a prompt."""
    row: int = attrs.field(default=0, validator=ge(0))
    """Row of the cache."""
    size: str = ""
    """HEIGHTxWIDTH in pixels; empty is 480x832, and for an edit the shape of the last picture in about 1024x1024."""
    frames: int = attrs.field(default=1, validator=ge(1))
    """Frames, 4k + 1; 1 makes a picture."""
    fps: float = attrs.field(default=16.0, validator=gt(0.0))
    """Frames a second of the video that is written."""
    image: tyro.conf.UseAppendAction[tuple[Path, ...]] = ()
    """First frame of the video (Wan I2V and TI2V), or a picture that an edit starts from (Qwen-Image-Edit), which may
    be given several times."""
    low: Path | None = None
    """Run folder or transformer of the expert of times below `boundary` (Wan2.2 A14B); a pipeline has its own."""
    out: Path = Path("sample.png")
    """File to write: .png, .mp4, or .safetensors for the latent alone."""
    write_pipeline: Path | None = None
    """Folder to write too: the pipeline with the model in it, as diffusers reads it."""
    device: str = ""
    """Name of the device (cpu, cuda, kunlun ...); empty takes the best one that is there."""
    config_file: str = ""
    """Python file to execute first, where the model's class is in it; no file of FOLDER is executed unasked."""


def paint(args: Media) -> str:
    """Writes a sample, and the pipeline where it is asked for; returns what was written. Raises ValueError, OSError."""
    from lf.devices.detect import detect
    from lf.train.start import load_model, local_context, open_saved

    args = _settled(args)
    _check_out(args)
    _check_flags(args)
    device = detect(args.device)
    folders = [folder for folder in (args.folder, args.low) if folder is not None]
    starts = [open_saved(folder, "", args.config_file) for folder in folders]
    for folder, start in zip(folders, starts, strict=True):
        if not isinstance(start.model, LatentModel):
            kind = type(start.model).__name__
            raise ValueError(f"{folder} holds a {kind}, which makes no pictures; give that of a diffusion model")
    cfg = cast(LatentModel, starts[0].model)
    row, decode = _asked(args, cfg, device.torch_type)
    models = [load_model(start, local_context(start.model, device)).eval() for start in starts]
    _write(args, sample_row(cfg, models, row, args, device.torch_type), decode)
    told = [str(args.out)]
    if args.cache is not None:
        told.append(f"row {args.row} is {row['id']}: {row['caption']}")
    if args.write_pipeline is not None:
        pairs = zip(starts, models, strict=True)
        save_pipeline(cast(Path, args.pipeline), args.write_pipeline, dict(zip(_PLACES, pairs, strict=False)))
        told.append(str(args.write_pipeline))
    return "\n".join(told)


def _settled(args: Media) -> Media:
    """Returns the arguments with what a folder that is a whole pipeline says itself."""
    if not (args.folder / "model_index.json").is_file():
        return args
    stated = json_file(args.folder / "model_index.json", _AGAIN)
    second = args.folder / "transformer_2"
    return attrs.evolve(
        args,
        pipeline=args.pipeline or args.folder,
        folder=args.folder / "transformer",
        low=args.low or (second if second.is_dir() else None),
        boundary=args.boundary or float(stated.get("boundary_ratio") or 0.0),
        shift=args.shift or _stated_shift(args.folder / "scheduler/scheduler_config.json"),
    )


def _stated_shift(file: Path) -> float:
    """Returns the shift that a scheduler states, 0 where it has none or one that grows with a sample's tokens."""
    stated = json_file(file, _AGAIN) if file.is_file() else {}
    constant = None if stated.get("use_dynamic_shifting") else stated.get("shift")
    return float(stated.get("flow_shift") or constant or 0.0)


def _check_out(args: Media) -> None:
    """Raises ValueError for a file that cannot be written."""
    kind = args.out.suffix.lower()
    if kind not in _SUFFIXES:
        raise ValueError(f"--out {args.out} is none of {', '.join(_SUFFIXES)}; name one of them")
    if args.cache is None and (kind == ".mp4") != (args.frames > 1) and kind != ".safetensors":
        raise ValueError(f"--out {args.out} is {_SUFFIXES[kind]}, and --frames {args.frames}; change one of them")
    if args.pipeline is None and kind != ".safetensors":
        raise ValueError(f"--out {args.out} is decoded by a VAE: give --pipeline, or --out FILE.safetensors")


def _check_flags(args: Media) -> None:
    """Raises ValueError for flags that do not fit together or change nothing, and for one expert of two."""
    if args.pipeline is None and (args.cache is None or args.write_pipeline is not None):
        raise ValueError("a prompt is read by a text encoder, and a pipeline is written like one: give --pipeline")
    if bool(args.prompt) == (args.cache is not None):
        raise ValueError("give either --prompt, or --cache with the --row that says caption and size")
    if args.cache is not None and args.image:
        raise ValueError("a row of a cache has its own first frame: leave out --image, or give a --prompt")
    if args.boundary and args.low is None:
        raise ValueError(f"--boundary {args.boundary} parts the times of two experts: give --low, or leave it out")
    if args.write_pipeline is not None:
        _check_target(cast(Path, args.pipeline), args.write_pipeline)
    if args.cache is not None and (args.size or args.frames > 1):
        raise ValueError("a row of a cache has its own size and frames: leave out --size and --frames")
    if args.low is None and args.pipeline is not None and (args.pipeline / "transformer_2").is_dir():
        raise ValueError(
            f"{args.pipeline} has two experts, and {args.folder} is one: give the other as --low, perhaps "
            f"{args.pipeline / 'transformer_2'}, and the --boundary between them"
        )


def _check_target(source: Path, target: Path) -> None:
    if not (source / "model_index.json").is_file():
        raise ValueError(f"{source} has no model_index.json; give a diffusers pipeline to write one like it")
    if target.exists():
        raise ValueError(f"{target} is there already; give a new folder")


def _asked(args: Media, cfg: LatentModel, device: str) -> tuple[dict[str, Any], Callable[[Tensor], Any] | None]:
    """Returns the row that asks for the sample, and what decodes it."""
    from lf.data.encode import decode_latent, open_vae

    vae = open_vae(args.pipeline / "vae", device) if args.pipeline is not None else None
    decode = None if vae is None else lambda latent: decode_latent(vae, latent)
    if args.cache is not None:
        return _cached(args, args.cache), decode
    assert vae is not None
    return _told(args, cfg, vae, device), decode


def _told(args: Media, cfg: LatentModel, vae: Any, device: str) -> dict[str, Any]:
    """Returns the row of a prompt and of the pictures beside it."""
    from lf.data.clips import read_picture
    from lf.data.encode_text import encode_caption, open_texts
    from lf.data.latents import encode_reference

    assert args.pipeline is not None
    texts, most = open_texts(args.pipeline, device), cfg.space.text
    pictures = [read_picture(path) for path in args.image] if texts.edit else []
    row = {
        "text": encode_caption(texts, "--prompt", args.prompt, most, pictures),
        "empty": encode_caption(texts, "the empty caption", texts.empty, most, pictures),
        "id": "sample",
    }
    if texts.edit:
        latents = torch.zeros(_shape(args, vae, _like(pictures[-1])))
        return {**row, "latents": latents, "references": [encode_reference(vae, one) for one in pictures]}
    return {**row, **_room(args, cfg, vae, device)}


def _like(picture: Any) -> str:
    from lf.data.encode_text import resized_to
    from lf.data.latents import REFERENCE_AREA

    return "x".join(map(str, resized_to(REFERENCE_AREA, picture.shape[:2])))


def _cached(args: Media, cache: Path) -> dict[str, Any]:
    from lf.data.config import LatentData
    from lf.data.latents import open_latents
    from lf.train.run import cache_dir

    rows = open_latents(LatentData(path=str(cache)), seed=0, cache_dir=cache_dir(), where="--cache")
    if args.row >= len(rows):
        raise ValueError(f"--row {args.row}, and {cache} has {len(rows)} rows; give a smaller one")
    row = rows.at(args.row)
    kind, frames = args.out.suffix.lower(), row["latents"].shape[1]
    if kind != ".safetensors" and (kind == ".mp4") != (frames > 1):
        shown = "a video; give --out FILE.mp4" if frames > 1 else "a picture; give --out FILE.png"
        raise ValueError(f"--out {args.out} is {_SUFFIXES[kind]}, and row {args.row} of {cache} is {shown}")
    return row


def _shape(args: Media, vae: Any, size: str) -> tuple[int, int, int, int]:
    """Returns the shape of latents of the size that is asked, or else of `size`."""
    from lf.data.clips import Buckets, check_buckets, parse_sizes

    ((height, width),) = sizes = parse_sizes([args.size or size])
    check_buckets(Buckets(sizes=sizes, frames=(args.frames,), fps=0.0, enlarge=True), vae.spatial, vae.temporal)
    return vae.channels, (args.frames - 1) // vae.temporal + 1, height // vae.spatial, width // vae.spatial


def _room(args: Media, cfg: LatentModel, vae: Any, device: str) -> dict[str, Any]:
    """Returns latents of the size that is asked, and what the first frame gives."""
    import numpy as np

    from lf.data.clips import Bucket, fit_picture, read_picture
    from lf.data.encode import encode_pixels, first_frame_condition
    from lf.data.encode_image import open_images

    row: dict[str, Any] = {"latents": torch.zeros(_shape(args, vae, "480x832"))}
    space = cfg.space
    if not args.image and not space.condition:
        return row
    if len(args.image) != 1 or not (space.condition or space.given):
        one = space.condition or space.given
        takes, cure = ("one first frame", "give one --image") if one else ("no first frame", "leave out --image")
        raise ValueError(f"the model takes {takes}, and {len(args.image)} are given; {cure}")
    height, width = (n * vae.spatial for n in row["latents"].shape[2:])
    first = fit_picture(read_picture(args.image[0]), Bucket(frames=1, height=height, width=width))[None]
    if not space.condition:
        row["latents"][:, :1] = encode_pixels(vae, first)
        return {**row, "given": 1}
    clip = np.concatenate([first, np.zeros((args.frames - 1, *first.shape[1:]), np.uint8)])
    row["condition"] = first_frame_condition(vae, clip)
    if not space.image_dim:
        return row
    images = open_images(cast(Path, args.pipeline), device)
    if images is None:
        raise ValueError(
            f"the model reads embeddings of its first frame, and {args.pipeline} has no image_encoder; give the "
            "--pipeline of the model, which has one"
        )
    return {**row, "image": images.run(first[0])}


def _write(args: Media, latent: Tensor, decode: Callable[[Tensor], Any] | None) -> None:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kind = args.out.suffix.lower()
    if kind == ".safetensors":
        from safetensors.torch import save_file

        save_file({"latents": latent.contiguous()}, args.out)
        return
    assert decode is not None
    frames = decode(latent)
    if kind == ".mp4":
        from lf.data.video import write_video

        write_video(args.out, list(frames), Fraction(args.fps).limit_denominator(1001), crf=16)
        return
    from PIL import Image

    Image.fromarray(frames[0]).save(args.out)


def save_pipeline(source: Path, target: Path, parts: dict[str, tuple[Any, nn.Module]]) -> None:
    """Writes a pipeline whose transformers are the models, and all else that of `source`; whole or not at all.

    `parts` are starts and models by folder name.
    """
    from lf.models.spec import named_tensors
    from lf.train.start import export

    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=lambda folder, names: set(parts) if Path(folder) == source else set())
    for name, (start, model) in parts.items():
        tensors = named_tensors(model)
        export(start.model, tensors.__getitem__, partial / name, source=start.source, files={}, write=True)
    partial.rename(target)
