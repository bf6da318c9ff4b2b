"""Encoded pictures, in files and in the rows of a dataset; the decoder is Pillow (the extra `robot`).

Shapes: H height, W width.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""What is read as a picture: Pillow would run a program, Ghostscript, on others whatever the file is called."""


def open_picture(source: Path | bytes) -> Any:
    """Returns a picture as Pillow opens it, undecoded; raises OSError, which does not name it, for any other format."""
    image = _pillow()
    try:
        return image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
    except image.UnidentifiedImageError as error:
        raise OSError(f"it is none of {', '.join(FORMATS)}, or its header is broken") from error


def mode_fault(image: Any) -> str:
    """Returns why a picture has too many bits, which Pillow would cut off, with the cure; empty for one of 8 bits."""
    deep = image.mode.startswith(("I", "F"))
    return f"it has pixels of mode {image.mode}, and lf reads 8 bits a channel; convert it" if deep else ""


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ValueError(f"pictures are read by Pillow, which is missing ({error}); install lf[robot]") from error
    return Image


def decode_picture(data: bytes, where: str) -> NDArray[np.uint8]:
    """Returns an encoded picture as RGB [H, W, 3]; raises ValueError with `where` for one that is broken."""
    try:
        with open_picture(data) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ValueError(
            f"{where}: a picture cannot be decoded ({error}); mend it, or leave its episode out"
        ) from error


def picture_fault(data: bytes, size: tuple[int, ...]) -> str:
    """Returns what is wrong with an encoded picture that should be (height, width), empty where nothing is.

    It is not decoded: its header and, in PNG, the checksums of its parts are looked at.
    """
    try:
        with open_picture(data) as image:
            if fault := mode_fault(image):
                return fault
            if (image.height, image.width) != size:
                return f"it is {image.height} x {image.width}, and info.json says {size}"
            image.verify()
    except (OSError, ValueError, SyntaxError) as error:
        return f"it is broken ({error})"
    return ""
