"""How a Hugging Face folder says what becomes of images and videos: `read_pictures` reads it, `processor_files` writes.

The fields are those of transformers' image, video and whole processors; Kimi-K2.5's published folder has its own.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

from lf.data.chat_text import Tokens
from lf.data.config import AnyresPictures, KimiPictures, Pictures, Qwen3Pictures, Qwen25Pictures, TilePictures
from lf.data.hf_tokenizer import Tokenizer
from lf.models.media import Media, MediaRules
from lf.models.spec import no_rule

IMAGE, VIDEO, WHOLE = "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"
FILES = (IMAGE, VIDEO, WHOLE)
"""Files that say it."""

_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_ALWAYS = {**dict.fromkeys(_STEPS, True), "resample": 3, "rescale_factor": 1 / 255}


def read_pictures(files: Mapping[str, bytes], where: str) -> Pictures:
    """Returns what the processor files of a folder say, given its files by name, its config.json among them.

    A part that has no file of videos treats them as it treats images, as transformers does. Raises ValueError, with
    `where`, for files that are missing or say what lf does not do.
    """
    whole, config = _object(files, WHOLE, where), _object(files, "config.json", where)
    image = whole.get("image_processor") or _object(files, IMAGE, where)
    video = whole.get("video_processor") or _object(files, VIDEO, where) or image
    if not image:
        raise ValueError(
            f"{where} has no {IMAGE}, so nothing says how images become patches; copy it from where the model came from"
        )
    if isinstance(image.get("media_proc_cfg"), dict):
        return _published_kimi(image["media_proc_cfg"], where)
    kind = str(image.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil")
    owner = whole.get("processor_class", image.get("processor_class"))
    three = "Qwen3VL" in f"{owner} {video.get('video_processor_type')}"
    if kind == "Qwen2VLImageProcessor":
        made: Pictures = _qwen(Qwen3Pictures if three else Qwen25Pictures, image, video, where)
    elif kind == "GotOcr2ImageProcessor":
        made = TilePictures(
            **_common(image, where),
            patch=_patch(config, where),
            tile=_side(image, where),
            min_tiles=image.get("min_patches", 1),
            max_tiles=image.get("max_patches", 12),
            frames=video.get("num_frames") or TilePictures().frames,
        )
    elif kind == "LlavaOnevisionImageProcessor":
        made = AnyresPictures(
            **_common(image, where),
            patch=_patch(config, where),
            tile=_side(image, where),
            pinpoints=tuple((int(h), int(w)) for h, w in _stated(image, "image_grid_pinpoints", where)),
            frames=video.get("num_frames") or AnyresPictures().frames,
        )
    elif kind == "Kimi_K25ImageProcessor":
        made = KimiPictures(
            **_common(image, where),
            patch=image.get("patch_size", 14),
            merge=image.get("merge_size", 2),
            max_patches=image.get("max_patches", 16384),
            side=_stated(_stated(image, "size", where), "max_height", where),
            frames=video.get("temporal_patch_size", 4),
            video_max_patches=video.get("max_patches", 4096),
            fps=float(video.get("fps") or 2.0),
        )
    else:
        raise ValueError(
            f"{where}: image_processor_type = {kind!r} is no processor that lf has; give a run folder whose data has "
            "pictures"
        )
    _check_alike(made, image, video, where)
    return made


def _qwen(kind: type[Qwen3Pictures], image: Mapping[str, Any], video: Mapping[str, Any], where: str) -> Qwen3Pictures:
    (low, high), (video_low, video_high) = _limits(image, where), _limits(video, where)
    if video.get("cap_pixels_per_frame"):
        raise ValueError(f"{where}: cap_pixels_per_frame = True, and lf has no cap of a frame; set it to false")
    return kind(
        **_common(image, where),
        patch=_stated(image, "patch_size", where),
        merge=image.get("merge_size", 2),
        frames=image.get("temporal_patch_size", 2),
        min_pixels=low,
        max_pixels=high,
        video_min_pixels=video_low,
        video_max_pixels=video_high,
        fps=float(video.get("fps") or 2.0),
        min_frames=video.get("min_frames", 4),
        max_frames=video.get("max_frames", 768),
    )


def _published_kimi(fields: Mapping[str, Any], where: str) -> KimiPictures:
    for name in ("fixed_output_tokens", "in_patch_limit_video", "max_num_frames_each_video"):
        if fields.get(name) is not None:
            raise ValueError(f"{where}: media_proc_cfg.{name} = {fields[name]!r}, which lf does not do; set it to null")
    return KimiPictures(
        mean=tuple(_stated(fields, "image_mean", where)),
        std=tuple(_stated(fields, "image_std", where)),
        patch=_stated(fields, "patch_size", where),
        merge=_stated(fields, "merge_kernel_size", where),
        max_patches=_stated(fields, "in_patch_limit", where),
        side=_stated(fields, "patch_limit_on_one_side", where),
        frames=_stated(fields, "temporal_merge_kernel_size", where),
        video_max_patches=fields.get("in_patch_limit_each_frame") or fields["in_patch_limit"],
        fps=float(_stated(fields, "sample_fps", where)),
    )


def _common(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name, value in _ALWAYS.items():
        found = fields.get(name, value)
        if found != value and not (isinstance(found, float) and abs(found - float(value)) < 1e-6):
            raise ValueError(f"{where}: {name} = {found!r} in {IMAGE}, and lf has {value!r} alone; correct it")
    return {
        "mean": tuple(_stated(fields, "image_mean", where)),
        "std": tuple(_stated(fields, "image_std", where)),
    }


def _check_alike(made: Pictures, image: Mapping[str, Any], video: Mapping[str, Any], where: str) -> None:
    """Raises ValueError where videos are cut or scaled in another way than images, which lf cannot have."""
    for name in ("image_mean", "image_std", "patch_size", "merge_size"):
        if name in image and video.get(name, image[name]) != image[name]:
            raise ValueError(
                f"{where}: {name} is {image[name]} of images and {video[name]} of videos, and {type(made).__name__} "
                "has one of both; make them equal"
            )


def _limits(fields: Mapping[str, Any], where: str) -> tuple[int, int]:
    size = fields.get("size") or {}
    low, high = (
        fields.get(old) if fields.get(old) is not None else size.get(new)
        for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    if low is None or high is None:
        raise ValueError(f"{where}: size = {size!r} states no shortest_edge and longest_edge in pixels; add them")
    return low, high


def _side(fields: Mapping[str, Any], where: str) -> int:
    size = _stated(fields, "size", where)
    sides = {size.get("height"), size.get("width")} if isinstance(size, dict) else set()
    side = sides.pop() if len(sides) == 1 else None
    if not isinstance(side, int):
        raise ValueError(f"{where}: size = {size!r} must be the height and the equal width of a tile; correct it")
    return side


def _patch(config: Mapping[str, Any], where: str) -> int:
    vision = config.get("vision_config")
    patch = vision.get("patch_size") if isinstance(vision, dict) else None
    patch = patch[0] if isinstance(patch, list) and patch else patch
    if not isinstance(patch, int):
        raise ValueError(f"{where}: vision_config.patch_size = {patch!r} in config.json must be a number; correct it")
    return patch


def _stated(fields: Mapping[str, Any], name: str, where: str) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"{where}: no {name} is stated for images and videos; add it")
    return fields[name]


def _object(files: Mapping[str, bytes], name: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {name} is not JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {name} holds a JSON {type(value).__name__}, not an object; fetch it again")
    return value


def processor_files(
    cfg: Pictures, config: Mapping[str, Any], rules: MediaRules, names: Tokens, tokenizer: Tokenizer
) -> dict[str, bytes]:
    """Returns the files by which transformers makes the same patches and tokens, by name.

    `config` are the fields of the config.json beside them, `names` the tokens of images and videos, which the returned
    tokenizer_config.json states too.
    """
    image, video, whole, tokens = fields_of(cfg, config, rules, names)
    owner = {"processor_class": whole["processor_class"]}
    scaling = {**_ALWAYS, "image_mean": list(cfg.mean), "image_std": list(cfg.std), **owner}
    stated = _object(tokenizer.files, "tokenizer_config.json", "the tokenizer")
    extra = stated.get("extra_special_tokens")
    stated["extra_special_tokens"] = tokens | (extra if isinstance(extra, dict) else {})
    made = {
        IMAGE: {**scaling, **image},
        VIDEO: {**scaling, "do_sample_frames": True, **video},
        WHOLE: whole,
        "tokenizer_config.json": stated,
    }
    return {name: (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode() for name, value in made.items()}


Fields = tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, str]]
"""What is stated of images, of videos, of the whole processor, and of the tokenizer's tokens."""


@functools.singledispatch
def fields_of(cfg: Pictures, config: Mapping[str, Any], rules: MediaRules, names: Tokens) -> Fields:
    """Returns the fields that are not the same for all."""
    raise no_rule(fields_of, cfg)


@fields_of.register
def _(cfg: Qwen3Pictures, config: Mapping[str, Any], rules: MediaRules, names: Tokens) -> Fields:
    both = {"patch_size": cfg.patch, "merge_size": cfg.merge, "temporal_patch_size": cfg.frames}
    older = isinstance(cfg, Qwen25Pictures)
    image = {
        **both,
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": cfg.min_pixels, "longest_edge": cfg.max_pixels},
    }
    video = {
        **both,
        "video_processor_type": "Qwen2VLVideoProcessor" if older else "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": cfg.video_min_pixels, "longest_edge": cfg.video_max_pixels},
        "fps": cfg.fps,
        "min_frames": cfg.min_frames,
        "max_frames": cfg.max_frames,
        "cap_pixels_per_frame": False,
    }
    whole = {"processor_class": "Qwen2_5_VLProcessor" if older else "Qwen3VLProcessor"}
    return image, video, whole, {"image_token": names.image, "video_token": names.video}


@fields_of.register
def _(cfg: TilePictures, config: Mapping[str, Any], rules: MediaRules, names: Tokens) -> Fields:
    side = cfg.tile // cfg.patch
    size = {"size": {"height": cfg.tile, "width": cfg.tile}}
    image = {
        **size,
        "image_processor_type": "GotOcr2ImageProcessor",
        "crop_to_patches": True,
        "min_patches": cfg.min_tiles,
        "max_patches": cfg.max_tiles,
    }
    video = {**size, "video_processor_type": "InternVLVideoProcessor", "num_frames": cfg.frames, "initial_shift": True}
    count = rules.count(Media(grids=((1, side, side),), size=(cfg.tile, cfg.tile)))
    whole = {"processor_class": "InternVLProcessor", "image_seq_length": count}
    tokens = {
        "start_image_token": cfg.start,
        "end_image_token": cfg.end,
        "context_image_token": names.image,
        "video_token": names.announce,
    }
    return image, video, whole, tokens


@fields_of.register
def _(cfg: AnyresPictures, config: Mapping[str, Any], rules: MediaRules, names: Tokens) -> Fields:
    size = {"size": {"height": cfg.tile, "width": cfg.tile}}
    image = {
        **size,
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "image_grid_pinpoints": [list(point) for point in cfg.pinpoints],
        "do_pad": True,
    }
    video = {**size, "video_processor_type": "LlavaOnevisionVideoProcessor", "num_frames": cfg.frames}
    whole = {
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": (cfg.tile // cfg.patch) ** 2,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": config.get("vision_aspect_ratio", "anyres_max_9"),
    }
    return image, video, whole, {"image_token": names.image, "video_token": names.video}


@fields_of.register
def _(cfg: KimiPictures, config: Mapping[str, Any], rules: MediaRules, names: Tokens) -> Fields:
    both = {
        "patch_size": cfg.patch,
        "merge_size": cfg.merge,
        "size": {"max_height": cfg.side, "max_width": cfg.side},
    }
    image = {**both, "image_processor_type": "Kimi_K25ImageProcessor", "max_patches": cfg.max_patches}
    video = {
        **both,
        "video_processor_type": "Kimi_K25VideoProcessor",
        "max_patches": cfg.video_max_patches,
        "temporal_patch_size": cfg.frames,
        "fps": cfg.fps,
    }
    whole = {"processor_class": "Kimi_K25Processor"}
    return image, video, whole, {"image_token": names.image, "video_token": names.announce}
