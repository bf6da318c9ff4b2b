"""Images and videos where they lie: in files, in the columns of a parquet file, in an uncompressed tar.

Every fault is a ValueError that names the file. Shapes: T frames, H height, W width.
"""

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from lf.data.media import Pixels, Shape
from lf.data.picture import mode_fault, open_picture
from lf.data.regular import kind_fault
from lf.data.video import Decoders, VideoIndex, index_video

_ORIENTATION = 0x0112
_GROUPS = 4
_VIDEOS = 256


@attrs.frozen(kw_only=True)
class Ref:
    """Where an image or a video lies."""

    kind: str
    """`image` or `video`."""
    path: str
    """The file."""
    column: str = ""
    """Column of a parquet file."""
    place: tuple[int, ...] = ()
    """Row group, row and place in its list; or offset and size in bytes in a tar; empty for a file of its own."""
    where: str = ""
    """Which sample names it, for errors."""
    key: str = ""
    """What the split knows it by: its path as written, its name in a tar, the hash of its bytes in parquet."""

    def __str__(self) -> str:
        """Returns what errors call it."""
        if not self.place:
            return f"{self.path} (named by {self.where})"
        return f"{self.where}, {self.kind} {self.place[-1] + 1}" if self.column else self.where


def shape_of(ref: Ref, most: int) -> Shape:
    """Returns the shape of an image or a video, from its header; raises ValueError where it has over `most` pixels."""
    if ref.kind == "image":
        with _image(ref) as image:
            turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
            width, height = image.size[::-1] if turned else image.size
        shape = Shape(height=height, width=width)
    else:
        with _video(ref) as (_, index):
            seconds = index.seconds
            apart = float(seconds[-1] - seconds[0])
            fps = round((len(seconds) - 1) / apart, 6) if apart > 0 else 1.0
            shape = Shape(height=index.height, width=index.width, kind="video", frames=len(seconds), fps=fps)
    if shape.height * shape.width > most:
        raise ValueError(
            f"{ref}: {shape.height} x {shape.width} pixels, above max_pixels = {most}; reduce it, or raise that"
        )
    return shape


def pixels_of(ref: Ref, shape: Shape, frames: Sequence[int], decoders: Decoders) -> Pixels:
    """Returns the frames [T, H, W, 3] (RGB) of an image (its one) or a video; raises ValueError if `shape` is not its.

    Images are turned as their EXIF orientation says.
    """
    if ref.kind == "image":
        from PIL import ImageOps

        with _image(ref) as image:
            made = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))[None]
    else:
        with _video(ref) as (path, index):
            if len(index.pts) != shape.frames:
                raise ValueError(f"{ref}: {len(index.pts)} frames, and {shape.frames} when it was indexed; {_AGAIN}")
            ticks = [int(index.pts[frame]) for frame in frames]
            # A file that was written for this call alone is not kept open.
            with contextlib.closing(Decoders()) as own:
                made = (own if ref.place else decoders).frames(path, ticks)
    if made.shape[1:3] != (shape.height, shape.width):
        raise ValueError(
            f"{ref}: {made.shape[1]} x {made.shape[2]} pixels, and {shape.height} x {shape.width} when it was indexed; "
            f"{_AGAIN}"
        )
    return made


_AGAIN = "it changed: touch the file that names it, so that it is indexed again"


@contextlib.contextmanager
def _image(ref: Ref) -> Iterator[Any]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(f"{ref}: images are read by Pillow, which is missing ({error}); install lf[robot]") from error
    fault = "" if ref.place else kind_fault(Path(ref.path))
    if fault:
        raise ValueError(f"{ref}: {fault}")
    try:
        with open_picture(_bytes(ref) if ref.place else Path(ref.path)) as image:
            if fault := mode_fault(image):
                raise ValueError(f"{ref}: {fault}")
            yield image
    except FileNotFoundError as error:
        raise ValueError(f"{ref}: the image is missing; put it there, or leave the sample out") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"{ref}: the image is huge ({error}); reduce it, or leave it out") from error
    except (OSError, SyntaxError, EOFError) as error:
        raise ValueError(f"{ref}: the image cannot be decoded ({error}); mend it, or leave it out") from error


@contextlib.contextmanager
def _video(ref: Ref) -> Iterator[tuple[Path, VideoIndex]]:
    if not ref.place:
        path = Path(ref.path)
        if fault := kind_fault(path):
            raise ValueError(f"{ref}: {fault}")
        if not path.exists():
            raise ValueError(f"{ref}: the video is missing; put it there, or leave the sample out")
        stat = path.stat()
        yield path, _indexed(path, stat.st_size, stat.st_mtime_ns)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video"
        path.write_bytes(_bytes(ref))
        try:
            yield path, index_video(path)
        except ValueError as error:
            raise ValueError(f"{ref}: {error}") from error


@functools.lru_cache(maxsize=_VIDEOS)
def _indexed(path: Path, size: int, changed: int) -> VideoIndex:
    return index_video(path)


def _bytes(ref: Ref) -> bytes:
    if ref.column:
        group, row, at = ref.place
        value = _group(ref.path, ref.column, group)[row].as_py()
        value = value[at] if isinstance(value, list) else value
        return bytes(value["bytes"] if isinstance(value, dict) else value)
    with Path(ref.path).open("rb") as stream:
        stream.seek(ref.place[0])
        return stream.read(ref.place[1])


@functools.lru_cache(maxsize=_GROUPS)
def _group(path: str, column: str, group: int) -> Any:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        return file.read_row_group(group, columns=[column]).column(0)
