"""Videos and pictures with captions: which there are, the bucket of each, and its frames as a VAE takes them.

Shapes: F frames, H height, W width.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.data.cache import key_of, sha256_of
from lf.data.files import checked_text, json_object, path_fault
from lf.data.picture import mode_fault, open_picture
from lf.data.regular import kind_fault
from lf.data.video import Decoder, index_video

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi")
_UNREAD = (".gif", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".3gp")

_SHOWN = 20


@attrs.frozen(kw_only=True)
class Media:
    """A video or a picture, and what is said about it."""

    name: str
    """Its path below the source, which is its id."""
    path: Path
    """The file."""
    caption: str
    """What is said about it."""
    references: tuple[Path, ...] = ()
    """Pictures that it is made from."""

    @property
    def told(self) -> tuple[str, str, tuple[str, ...]]:
        """Its name, its caption, and where its references lie beside it."""
        return self.name, self.caption, tuple(os.path.relpath(path, self.path.parent) for path in self.references)


@attrs.frozen(kw_only=True)
class Bucket:
    """A size that media are brought to."""

    frames: int
    """Frames; 1 for pictures."""
    height: int
    """Pixels from top to bottom."""
    width: int
    """Pixels from left to right."""


@attrs.frozen(kw_only=True)
class Buckets:
    """The sizes that there are, and how media come to them."""

    sizes: tuple[tuple[int, int], ...]
    """Heights and widths; a medium goes to the one whose shape is nearest to its own."""
    frames: tuple[int, ...]
    """Frames of a video; it goes to the most that it has."""
    fps: float
    """Frames a second that are taken; 0 takes every frame."""
    enlarge: bool
    """Whether media smaller than their bucket are made larger."""


@attrs.frozen(kw_only=True)
class Planned:
    """A medium, its bucket, and which frames of it are taken."""

    media: Media
    """The medium."""
    bucket: Bucket
    """Its bucket."""
    pts: tuple[int, ...]
    """Times of the frames in ticks of the container; empty for a picture."""
    fps: float
    """Frames a second of what is taken; 0 for a picture."""
    references: tuple[tuple[int, int], ...] = ()
    """Heights and widths of the references."""
    turns: int = 0
    """Quarters by which frames of a video are turned, counterclockwise."""
    pixel: float = 1.0
    """Width of a pixel over its height, before that."""
    digest: str = ""
    """Hash of the bytes of the medium and its references."""


def parse_sizes(sizes: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Returns heights and widths of texts such as 480x832; raises ValueError for another form."""
    made = []
    for size in sizes:
        height, cross, width = size.partition("x")
        if not (cross and height.isdecimal() and width.isdecimal()):
            raise ValueError(f"size {size!r} is not HEIGHTxWIDTH; give one such as 480x832")
        made.append((int(height), int(width)))
    return tuple(made)


def check_buckets(buckets: Buckets, spatial: int, temporal: int) -> None:
    """Raises ValueError unless a VAE with these strides, and a patch of two, takes every bucket.

    A VAE takes a first frame and then whole groups of `temporal` frames.
    """
    unit = 2 * spatial
    for height, width in buckets.sizes:
        if height % unit or width % unit or min(height, width) < 1:
            near = f"{max(1, round(height / unit)) * unit}x{max(1, round(width / unit)) * unit}"
            raise ValueError(
                f"size {height}x{width} must be multiples of {unit}, the stride of the VAE times the patch of the "
                f"model; the nearest is {near}"
            )
    for frames in buckets.frames:
        if frames < 1 or (frames - 1) % temporal:
            close = max(0, round((frames - 1) / temporal)) * temporal + 1
            raise ValueError(
                f"frames = {frames} must be {temporal}k + 1, one and whole groups of {temporal}; the nearest is {close}"
            )
    if not buckets.sizes or not buckets.frames or buckets.fps < 0:
        raise ValueError(f"sizes = {buckets.sizes}, frames = {buckets.frames}, fps = {buckets.fps}: give some of each")


def find_media(source: Path) -> tuple[Media, ...]:
    """Returns the media of a folder, in order of their names, or of a .jsonl file, in order of its lines.

    In a folder the caption of `a/b.mp4` is the text of `a/b.txt`. A line of a .jsonl has `media`, a path below the
    file's folder, `caption` and, for edits, `references`, paths of pictures. Raises ValueError for a missing or empty
    caption, a caption of nothing, a kind that is not read, a missing file and one that is named twice.
    """
    source = source.expanduser()
    found = list(_of_lines(source) if source.suffix == ".jsonl" else _of_folder(source))
    if not found:
        raise ValueError(f"{source} has no videos or pictures ({', '.join(VIDEOS + PICTURES)}); give a folder that has")
    names: set[str] = set()
    for media in found:
        name = os.path.normpath(media.path)
        if name in names:
            raise ValueError(f"{source} names {media.name} twice; a name is the sample's id: give each once")
        names.add(name)
        for path in (media.path, *media.references):
            if not path.exists():
                raise ValueError(f"{source} names {media.name}, and {path} is missing; add it, or remove the line")
    return tuple(found)


def _of_folder(folder: Path) -> Iterator[Media]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is neither a folder of media nor a .jsonl file; give one of them")
    paths = sorted(folder.rglob("*"))
    media = [path for path in paths if path.suffix.lower() in PICTURES + VIDEOS]
    texts = {path.with_suffix(".txt") for path in media}
    left = [p for p in paths if p.suffix.lower() in _UNREAD or (p.suffix == ".txt" and p not in texts)]
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        raise ValueError(
            f"{folder} has media of kinds that are not read, or captions without a medium: "
            f"{', '.join(p.relative_to(folder).as_posix() for p in left[:_SHOWN])}{more}; convert media to one of "
            f"{', '.join(VIDEOS + PICTURES)}, and take away what is no medium"
        )
    for path in media:
        text = path.with_suffix(".txt")
        if not text.is_file():
            raise ValueError(f"{path} has no caption: {text} is missing; write it, or list the media in a .jsonl")
        try:
            caption = text.read_text(encoding="utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{text} is not UTF-8 ({error}); save it so") from error
        if not caption:
            raise ValueError(f"{text} is empty; write what {path.name} shows")
        yield Media(name=path.relative_to(folder).as_posix(), path=path, caption=caption)


def _of_lines(file: Path) -> Iterator[Media]:
    if not file.is_file():
        raise ValueError(f"{file} is no file; give a folder of media, or a .jsonl that is there")
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        where = f"{file}:{number}"
        fields = json_object(line, where)
        told, caption = fields.get("media"), fields.get("caption")
        if not isinstance(told, str) or not isinstance(caption, str) or not told or not caption.strip():
            raise ValueError(f"{where} needs `media`, a path, and `caption`, a text that is not empty; add what lacks")
        checked_text(caption, where, "caption")
        references = fields.get("references", [])
        if not isinstance(references, list) or not all(isinstance(one, str) and one for one in references):
            raise ValueError(f"{where}: `references` is {references!r:.120}; give a list of paths of pictures")
        yield Media(
            name=told,
            path=_below(file, where, told, VIDEOS + PICTURES),
            caption=caption.strip(),
            references=tuple(_below(file, where, one, PICTURES) for one in references),
        )


def _below(file: Path, where: str, told: str, suffixes: Sequence[str]) -> Path:
    if fault := path_fault(told):
        raise ValueError(f"{where}: {told!r:.120} {fault}")
    path = file.parent / told
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"{where}: {told} is none of {', '.join(suffixes)}; convert it")
    return path


def plan_media(media: Sequence[Media], buckets: Buckets) -> tuple[Planned, ...]:
    """Returns the bucket and frames of each medium; nothing is decoded.

    Raises one ValueError that names every medium which is broken or does not fit.
    """
    planned, wrong = [], []
    for one in media:
        try:
            planned.append(_planned(one, buckets))
        except ValueError as error:
            wrong.append(str(error))
    if wrong:
        more = [f"... and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise ValueError("\n".join([f"{len(wrong)} of {len(media)} media cannot be used:", *wrong[:_SHOWN], *more]))
    return tuple(planned)


def _planned(media: Media, buckets: Buckets) -> Planned:
    references = tuple(read_picture(path).shape[:2] for path in media.references)
    made = _placed(media, buckets)
    digests = [sha256_of(path) for path in (media.path, *media.references)]
    return attrs.evolve(made, references=references, digest=key_of(*digests))


def _placed(media: Media, buckets: Buckets) -> Planned:
    if media.path.suffix.lower() in PICTURES:
        height, width = read_picture(media.path).shape[:2]
        bucket = Bucket(frames=1, **_size(media.path, height, width, buckets))
        return Planned(media=media, bucket=bucket, pts=(), fps=0.0)
    if media.references:
        raise ValueError(f"{media.path} is a video with references; only pictures are edits: leave them out")
    index = index_video(media.path)
    seconds = index.seconds
    length = float(seconds[-1] - seconds[0])
    own = (len(seconds) - 1) / length if length > 0 else 0.0
    if buckets.fps > own * 1.001 and min(buckets.frames) > 1:
        raise ValueError(f"{media.path} has {own:.3g} frames a second, and fps = {buckets.fps:g} are asked; ask fewer")
    have = math.floor(length * buckets.fps + 1e-3) + 1 if buckets.fps else len(seconds)
    fitting = [frames for frames in buckets.frames if frames <= have]
    if not fitting:
        raise ValueError(
            f"{media.path} has {have} frames{f' at {buckets.fps:g} a second' if buckets.fps else ''}, and the shortest "
            f"bucket {min(buckets.frames)}; add a shorter one to frames, or leave the video out"
        )
    frames = max(fitting)
    wanted = seconds[0] + np.arange(frames) / buckets.fps if buckets.fps else seconds[:frames]
    at = np.abs(seconds[None] - wanted[:, None]).argmin(1)
    turns, shown = _turns(media.path), (index.height, round(index.width * index.pixel))
    bucket = Bucket(frames=frames, **_size(media.path, *(shown[::-1] if turns % 2 else shown), buckets))
    return Planned(
        media=media,
        bucket=bucket,
        pts=tuple(index.pts[at].tolist()),
        fps=buckets.fps or own,
        turns=turns,
        pixel=float(index.pixel),
    )


def _turns(path: Path) -> int:
    decoder = Decoder(path)
    try:
        return decoder.turns()
    finally:
        decoder.close()


def _size(path: Path, height: int, width: int, buckets: Buckets) -> dict[str, int]:
    """Returns height and width of the bucket whose shape is nearest; among those of one shape the largest that fits."""

    def far(size: tuple[int, int]) -> tuple[float, bool, int]:
        shape = abs(math.log(size[0] / size[1]) - math.log(height / width))
        small = size[0] > height or size[1] > width
        return round(shape, 6), small, size[0] * (1 if small else -1)

    best = min(buckets.sizes, key=far)
    if not buckets.enlarge and (best[0] > height or best[1] > width):
        raise ValueError(
            f"{path} is {height}x{width}, smaller than its bucket {best[0]}x{best[1]}; add a smaller size, leave it "
            "out, or set enlarge"
        )
    return {"height": best[0], "width": best[1]}


def read_picture(path: Path) -> NDArray[np.uint8]:
    """Returns a picture as RGB [H, W, 3], upright; raises ValueError for one that cannot be read."""
    try:
        from PIL import ImageOps
    except ImportError as error:
        raise ValueError(f"pictures are read by Pillow, which is missing ({error}); install lf[diffusion]") from error
    fault = kind_fault(path)
    if fault:
        raise ValueError(f"{path}: {fault}")
    try:
        with open_picture(path) as image:
            fault = mode_fault(image)
            pixels = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(f"{path} is no picture that can be read ({error}); mend it, or leave it out") from error
    if fault:
        raise ValueError(f"{path}: {fault}")
    return pixels


def read_frames(planned: Planned) -> NDArray[np.uint8]:
    """Returns the frames [F, H, W, 3] (RGB) of a medium: cut to the shape of its bucket in the middle, and resized.

    They are upright, and their pixels square.
    """
    bucket = planned.bucket
    if not planned.pts:
        return fit_picture(read_picture(planned.media.path), bucket)[None]
    pixel = 1.0 / planned.pixel if planned.turns % 2 else planned.pixel
    decoder = Decoder(planned.media.path)
    try:
        return np.stack([fit_picture(np.rot90(decoder.frame(p), planned.turns), bucket, pixel) for p in planned.pts])
    finally:
        decoder.close()


def fit_picture(picture: NDArray[np.uint8], bucket: Bucket, pixel: float = 1.0) -> NDArray[np.uint8]:
    """Returns a picture [H, W, 3], whose pixels are `pixel` as wide as high, cut to a bucket's shape and resized."""
    from PIL import Image

    height, width = picture.shape[:2]
    scale = min(height / bucket.height, width * pixel / bucket.width)
    dy, dx = (height - bucket.height * scale) / 2, (width - bucket.width * scale / pixel) / 2
    box = (max(0.0, dx), max(0.0, dy), min(float(width), width - dx), min(float(height), height - dy))
    image: Any = Image.fromarray(np.ascontiguousarray(picture))
    return np.asarray(image.resize((bucket.width, bucket.height), Image.Resampling.LANCZOS, box=box))
