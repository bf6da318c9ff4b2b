"""Images and videos at the size that a tower takes them: `fit` says what an item becomes, `patches_of` makes it.

Both follow from the item's size and the settings alone, so that tokens are counted without a pixel. Numbers are those
of the image processors of transformers, bit for bit; a video's frames are resized as images are.

Shapes: T frames, H height, W width, N patches, F numbers of a patch.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.data.config import AnyresPictures, KimiPictures, Pictures, Qwen3Pictures, Qwen25Pictures, TilePictures
from lf.models.media import Grid, Media
from lf.models.spec import no_rule

Pixels = NDArray[np.uint8]
Piece = tuple[Literal["text", "special", "media"], str | int]
"""A part of what stands for an item in the prompt: a text, a special token, or so many tokens of the item itself."""

_ASPECT = 200


@attrs.frozen(kw_only=True)
class Shape:
    """What a file says of an image or a video before it is decoded."""

    height: int
    """Pixels from top to bottom."""
    width: int
    """Pixels from left to right."""
    kind: Literal["image", "video"] = "image"
    """Which of the two."""
    frames: int = 1
    """Frames of the file."""
    fps: float = 0.0
    """Frames of a second of a video."""


@attrs.frozen(kw_only=True)
class Fitted:
    """What an image or a video becomes."""

    media: Media
    """Its grids."""
    tokens: int
    """Tokens of a row that its features take."""
    pieces: tuple[Piece, ...]
    """What stands for it in the prompt."""
    frames: tuple[int, ...] = (0,)
    """Frames of the file that are taken."""
    size: tuple[int, int] = (0, 0)
    """Height and width in pixels that its pictures are resized to."""
    around: tuple[str, str] = ("", "")
    """Special tokens directly before and after it that `pieces` replace too."""


Count = Callable[[Media], int]


@functools.singledispatch
def fit(cfg: Pictures, shape: Shape, count: Count, alone: bool = True) -> Fitted:
    """Returns what an item becomes, a function of its shape and the settings.

    `count` is the model's rule for how many tokens a `Media` takes, and `alone` says whether the sample has no other
    image. Raises ValueError where the item cannot be taken.
    """
    raise no_rule(fit, cfg)


@functools.singledispatch
def pictures_of(cfg: Pictures, fitted: Fitted, pixels_THWC: Pixels) -> Pixels:
    """Returns the pictures [P, H, W, 3] that the tower sees of an item, of the pixels of `fitted.frames`."""
    raise no_rule(pictures_of, cfg)


@functools.singledispatch
def shrunk(cfg: Pictures, level: int) -> Pictures | None:
    """Returns settings that make smaller images than `cfg`, the smaller the higher `level`; None below the least."""
    raise no_rule(shrunk, cfg)


def patches_of(cfg: Pictures, fitted: Fitted, pixels_THWC: Pixels) -> NDArray[np.float32]:
    """Returns the patches [N, F] of an item, of the pixels of `fitted.frames`; N is that of `fitted.media`."""
    pictures = pictures_of(cfg, fitted, pixels_THWC)
    scaled: NDArray[Any] = (pictures.astype(np.float64) * (1 / 255)).astype(np.float32)
    scaled = (scaled - np.array(cfg.mean, np.float32)) / np.array(cfg.std, np.float32)
    merge, frames = (cfg.merge, cfg.frames) if isinstance(cfg, Qwen3Pictures) else (1, 1)
    t, h, w = len(pictures) // frames, pictures.shape[1] // cfg.patch, pictures.shape[2] // cfg.patch
    cut = scaled[:, : h * cfg.patch, : w * cfg.patch]
    blocks = cut.reshape(t, frames, h // merge, merge, cfg.patch, w // merge, merge, cfg.patch, 3)
    # Blocks row by row, patches of a block row by row; a patch is channels, frames, rows, columns.
    return blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(t * h * w, -1).astype(np.float32, copy=False)


def _resized(pixels_THWC: Pixels, size: tuple[int, int]) -> Pixels:
    from PIL import Image

    made = [Image.fromarray(frame).resize((size[1], size[0]), Image.Resampling.BICUBIC) for frame in pixels_THWC]
    return np.stack([np.asarray(frame) for frame in made])


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) > _ASPECT * min(height, width):
        raise ValueError(
            f"{height} x {width} pixels are more than {_ASPECT} times as long as wide; cut it, or leave it out"
        )


def _blocks(
    height: int, width: int, factor: int, frames: float, low: int, high: int, slots: int = 1
) -> tuple[int, int]:
    """Returns the nearest multiples of `factor` whose pixels, times `frames`, are from `low` to `high`.

    The rule of Qwen2-VL (arXiv:2409.12191); `slots` are the frames after rounding, which the limits are held to.
    """
    _check_aspect(height, width)
    h, w = round(height / factor) * factor, round(width / factor) * factor
    if slots * h * w > high:
        beta = math.sqrt(frames * height * width / high)
        h, w = (max(factor, math.floor(side / beta / factor) * factor) for side in (height, width))
    elif slots * h * w < low:
        beta = math.sqrt(low / (frames * height * width))
        h, w = (math.ceil(side * beta / factor) * factor for side in (height, width))
    return h, w


def _qwen_media(cfg: Qwen3Pictures, shape: Shape, size: tuple[int, int], frames: Sequence[int]) -> Media:
    grid = (-(-len(frames) // cfg.frames), size[0] // cfg.patch, size[1] // cfg.patch)
    kept = shape.frames / shape.fps if shape.fps else 0.0
    # Seconds between two grids, as the sampled rate says.
    seconds = cfg.frames * kept / len(frames) if shape.kind == "video" and kept else 1.0
    return Media(grids=(grid,), kind=shape.kind, size=(shape.height, shape.width), seconds=seconds)


@fit.register
def _(cfg: Qwen3Pictures, shape: Shape, count: Count, alone: bool = True) -> Fitted:
    factor = cfg.patch * cfg.merge
    if shape.kind == "image":
        size = _blocks(shape.height, shape.width, factor, 1, cfg.min_pixels, cfg.max_pixels)
        media = _qwen_media(cfg, shape, size, (0,))
        return Fitted(media=media, tokens=count(media), pieces=(("media", count(media)),), size=size)
    frames = _evenly(cfg, shape)
    height, width = shape.height, shape.width
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    slots = round(len(frames) / cfg.frames) * cfg.frames
    size = _blocks(height, width, factor, len(frames), cfg.video_min_pixels, cfg.video_max_pixels, slots)
    media = _qwen_media(cfg, shape, size, frames)
    tokens, groups = count(media), media.grids[0][0]
    padded = [*frames, *[frames[-1]] * (groups * cfg.frames - len(frames))]
    pieces: list[Piece] = []
    for at in range(0, len(padded), cfg.frames):
        seconds = (padded[at] + padded[at + cfg.frames - 1]) / 2 / shape.fps
        pieces += [("text", f"<{seconds:.1f} seconds>"), ("special", "<|vision_start|>")]
        pieces += [("media", tokens // groups), ("special", "<|vision_end|>")]
    around = ("<|vision_start|>", "<|vision_end|>")
    return Fitted(media=media, tokens=tokens, pieces=tuple(pieces), frames=frames, size=size, around=around)


def _evenly(cfg: Qwen3Pictures, shape: Shape) -> tuple[int, ...]:
    _check_video(shape)
    wanted = int(shape.frames / shape.fps * cfg.fps)
    number = min(max(wanted, cfg.min_frames), cfg.max_frames, shape.frames)
    if number < cfg.frames:
        raise ValueError(f"a video of {shape.frames} frames, fewer than the {cfg.frames} of a patch; give more frames")
    return tuple(np.linspace(0, shape.frames - 1, number).round().astype(int).tolist())


def _check_video(shape: Shape) -> None:
    if shape.frames < 1 or shape.fps <= 0:
        raise ValueError(f"a video of {shape.frames} frames at {shape.fps} a second; both must be above 0")


@fit.register
def _(cfg: Qwen25Pictures, shape: Shape, count: Count, alone: bool = True) -> Fitted:
    if shape.kind == "image":
        return fit.dispatch(Qwen3Pictures)(cfg, shape, count, alone)
    _check_video(shape)
    most = min(cfg.max_frames, shape.frames) // cfg.frames * cfg.frames
    wanted = min(max(shape.frames / shape.fps * cfg.fps, cfg.min_frames), most, shape.frames)
    number = int(wanted // cfg.frames) * cfg.frames
    if not number:
        raise ValueError(f"a video of {shape.frames} frames, fewer than the {cfg.frames} of a patch; give more frames")
    # In float32 before the fraction goes, as there: 45 * (138 / 54) is 115.
    frames = tuple((np.arange(number) * (shape.frames / number)).astype(np.float32).astype(int).tolist())
    size = _blocks(shape.height, shape.width, cfg.patch * cfg.merge, 1, cfg.video_min_pixels, cfg.video_max_pixels)
    media = _qwen_media(cfg, shape, size, frames)
    return Fitted(media=media, tokens=count(media), pieces=(("media", count(media)),), frames=frames, size=size)


@pictures_of.register
def _(cfg: Qwen3Pictures, fitted: Fitted, pixels_THWC: Pixels) -> Pixels:
    frames = _resized(pixels_THWC, fitted.size)
    return np.concatenate([frames, *[frames[-1:]] * (-len(frames) % cfg.frames)])


@shrunk.register
def _(cfg: Qwen3Pictures, level: int) -> Qwen3Pictures | None:
    lows, highs = (cfg.min_pixels, cfg.video_min_pixels), (cfg.max_pixels, cfg.video_max_pixels)
    image, video = (max(low, int(high * 0.75**level)) for low, high in zip(lows, highs, strict=True))
    before = [max(low, int(high * 0.75 ** (level - 1))) for low, high in zip(lows, highs, strict=True)]
    return attrs.evolve(cfg, max_pixels=image, video_max_pixels=video) if [image, video] != before else None


def _tiles(cfg: TilePictures, height: int, width: int) -> tuple[int, int]:
    """Returns rows and columns of the tiles of an image: InternVL's nearest shape, the larger of equals if it pays."""
    most = cfg.max_tiles
    layouts = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if cfg.min_tiles <= rows * columns <= most
    ]
    best, least = (1, 1), math.inf
    for rows, columns in sorted(layouts, key=lambda layout: layout[0] * layout[1]):
        off = abs(width / height - columns / rows)
        if off < least or (off == least and width * height > 0.5 * cfg.tile**2 * rows * columns):
            best, least = (rows, columns), off
    return best


@fit.register
def _(cfg: TilePictures, shape: Shape, count: Count, alone: bool = True) -> Fitted:
    grid = (1, cfg.tile // cfg.patch, cfg.tile // cfg.patch)
    start, end = ("special", cfg.start), ("special", cfg.end)
    if shape.kind == "image":
        rows, columns = _tiles(cfg, shape.height, shape.width) if cfg.max_tiles > 1 else (1, 1)
        media = Media(grids=(grid,) * (rows * columns + (rows * columns > 1)), size=(shape.height, shape.width))
        pieces: tuple[Piece, ...] = (start, ("media", count(media)), end)  # type: ignore[assignment]
        return Fitted(media=media, tokens=count(media), pieces=pieces, size=(rows * cfg.tile, columns * cfg.tile))
    frames = _middles(cfg.frames, shape)
    media = Media(grids=(grid,) * len(frames), kind="video", size=(shape.height, shape.width))
    each = count(media) // len(frames)
    texts = [f"Frame{at + 1}: " if at == 0 else f"\nFrame{at + 1}: " for at in range(len(frames))]
    made: list[Any] = [piece for text in texts for piece in (("text", text), start, ("media", each), end)]
    return Fitted(media=media, tokens=count(media), pieces=tuple(made), frames=frames, size=(cfg.tile, cfg.tile))


def _middles(number: int, shape: Shape) -> tuple[int, ...]:
    """Returns the frames in the middle of as many equal parts of a video; all of them where it has no more."""
    _check_video(shape)
    number = min(number, shape.frames)
    return tuple(int(shape.frames / number * (at + 0.5)) for at in range(number))


@pictures_of.register
def _(cfg: TilePictures, fitted: Fitted, pixels_THWC: Pixels) -> Pixels:
    whole = _resized(pixels_THWC, fitted.size)
    if fitted.size == (cfg.tile, cfg.tile):
        return whole
    return np.concatenate([_cut(whole[0], cfg.tile), _resized(pixels_THWC, (cfg.tile, cfg.tile))])


def _cut(whole_HWC: Pixels, tile: int) -> Pixels:
    rows, columns = whole_HWC.shape[0] // tile, whole_HWC.shape[1] // tile
    return whole_HWC.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)


@shrunk.register
def _(cfg: TilePictures, level: int) -> TilePictures | None:
    tiles, frames = max(cfg.max_tiles - level, cfg.min_tiles), max(cfg.frames - level, 1)
    before = (max(cfg.max_tiles - level + 1, cfg.min_tiles), max(cfg.frames - level + 1, 1))
    return attrs.evolve(cfg, max_tiles=tiles, frames=frames) if (tiles, frames) != before else None


@fit.register
def _(cfg: AnyresPictures, shape: Shape, count: Count, alone: bool = True) -> Fitted:
    grid: Grid = (1, cfg.tile // cfg.patch, cfg.tile // cfg.patch)
    height, width = shape.height, shape.width
    size, pictures = (cfg.tile, cfg.tile), 1
    frames: tuple[int, ...] = (0,)
    if shape.kind == "video":
        _check_video(shape)
        # As transformers takes them: at the start of as many equal parts.
        pictures = min(cfg.frames, shape.frames)
        frames = tuple((np.arange(pictures) * (shape.frames / pictures)).astype(int).tolist())
    elif alone:
        scale = math.sqrt(cfg.max_pixels / (height * width)) if 0 < cfg.max_pixels < height * width else 1.0
        height, width = (max(1, int(side * scale)) for side in (height, width))
        size = _pinpoint(cfg, height, width)
        pictures = 1 + size[0] * size[1] // cfg.tile**2
    media = Media(grids=(grid,) * pictures, kind=shape.kind, size=(height, width))
    tokens = count(media)
    # A size of (0, 0) is that of a square with margins: one of several images.
    size = size if alone or shape.kind == "video" else (0, 0)
    return Fitted(media=media, tokens=tokens, pieces=(("media", tokens),), frames=frames, size=size)


def _pinpoint(cfg: AnyresPictures, height: int, width: int) -> tuple[int, int]:
    """Returns the size that keeps most pixels and wastes least (LLaVA-NeXT)."""

    def loss(point: tuple[int, int]) -> tuple[int, int]:
        scale = min(point[1] / width, point[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return -kept, point[0] * point[1] - kept

    return min(cfg.pinpoints, key=loss)


@pictures_of.register
def _(cfg: AnyresPictures, fitted: Fitted, pixels_THWC: Pixels) -> Pixels:
    tile = (cfg.tile, cfg.tile)
    height, width = fitted.media.size
    if pixels_THWC.shape[1:3] != fitted.media.size:
        pixels_THWC = _resized(pixels_THWC, fitted.media.size)
    if fitted.media.kind == "video":
        return _resized(pixels_THWC, tile)
    if fitted.size == (0, 0):
        side = max(height, width)
        colour = np.array([int(value * 255) for value in cfg.mean], np.uint8)
        square = np.broadcast_to(colour, (1, side, side, 3)).copy()
        top, left = (side - height) // 2, (side - width) // 2
        square[:, top : top + height, left : left + width] = pixels_THWC
        return _resized(square, tile)
    down, across = fitted.size[0] / height, fitted.size[1] / width
    scaled = (
        (min(math.ceil(height * across), fitted.size[0]), fitted.size[1])
        if across < down
        else (fitted.size[0], min(math.ceil(width * down), fitted.size[1]))
    )
    canvas = np.zeros((*fitted.size, 3), np.uint8)
    top, left = (fitted.size[0] - scaled[0]) // 2, (fitted.size[1] - scaled[1]) // 2
    canvas[top : top + scaled[0], left : left + scaled[1]] = _resized(pixels_THWC, scaled)[0]
    return np.concatenate([_resized(pixels_THWC, tile), _cut(canvas, cfg.tile)])


@shrunk.register
def _(cfg: AnyresPictures, level: int) -> AnyresPictures | None:
    most = cfg.max_pixels or max(height * width for height, width in cfg.pinpoints)
    if cfg.frames < level and most * 0.75 ** (level - 1) <= cfg.tile**2:
        return None
    pixels = max(cfg.tile**2, int(most * 0.75**level))
    return attrs.evolve(cfg, max_pixels=pixels, frames=max(cfg.frames - level, 1))


@fit.register
def _(cfg: KimiPictures, shape: Shape, count: Count, alone: bool = True) -> Fitted:
    most = cfg.max_patches if shape.kind == "image" else cfg.video_max_patches
    patches = max(1, shape.height // cfg.patch) * max(1, shape.width // cfg.patch)
    longest = cfg.side * cfg.patch
    scale = min(1.0, math.sqrt(most / patches), longest / shape.height, longest / shape.width)
    height, width = (min(max(1, int(side * scale)), longest) for side in (shape.height, shape.width))
    factor = cfg.patch * cfg.merge
    rows, columns = (-(-side // factor) * cfg.merge for side in (height, width))
    frames = _kimi_frames(cfg, shape) if shape.kind == "video" else (0,)
    starts = frames[:: cfg.frames]
    grids = tuple((len(frames[at : at + cfg.frames]), rows, columns) for at in range(0, len(frames), cfg.frames))
    media = Media(grids=grids, kind=shape.kind, size=(shape.height, shape.width))
    tokens = count(media)
    pieces: list[Piece] = [("media", tokens)]
    if shape.kind == "video":
        pieces = [piece for frame in starts for piece in _kimi_piece(frame / shape.fps, tokens // len(grids))]
    return Fitted(media=media, tokens=tokens, pieces=tuple(pieces), frames=frames, size=(height, width))


def _kimi_frames(cfg: KimiPictures, shape: Shape) -> tuple[int, ...]:
    """Returns the frames of a video: at its ends and evenly between, as Kimi-K2.5's published processor takes them."""
    _check_video(shape)
    number = max(1, round(shape.frames * min(cfg.fps, shape.fps) / shape.fps))
    return tuple(np.linspace(0, shape.frames - 1, number).round().astype(int).tolist())


def _kimi_piece(seconds: float, tokens: int) -> list[Piece]:
    stamp = time.strftime("%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}"
    begin: list[Piece] = [("text", stamp), ("special", "<|media_begin|>"), ("text", "video")]
    return [*begin, ("special", "<|media_content|>"), ("media", tokens), ("special", "<|media_end|>")]


@pictures_of.register
def _(cfg: KimiPictures, fitted: Fitted, pixels_THWC: Pixels) -> Pixels:
    _, rows, columns = fitted.media.grids[0]
    filled = np.zeros((len(pixels_THWC), rows * cfg.patch, columns * cfg.patch, 3), np.uint8)
    filled[:, : fitted.size[0], : fitted.size[1]] = _resized(pixels_THWC, fitted.size)
    return filled


@shrunk.register
def _(cfg: KimiPictures, level: int) -> KimiPictures | None:
    least = cfg.merge**2
    if max(cfg.max_patches, cfg.video_max_patches) * 0.75 ** (level - 1) <= least:
        return None
    image, video = (max(least, int(most * 0.75**level)) for most in (cfg.max_patches, cfg.video_max_patches))
    return attrs.evolve(cfg, max_patches=image, video_max_patches=video)
