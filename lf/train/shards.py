"""Pieces of tensors, the boxes they are made of, and the file that holds the pieces of one rank.

A shard is a plain safetensors file (https://huggingface.co/docs/safetensors): the length of the header as a
little-endian 64-bit number, the header (JSON, padded with spaces to a multiple of 8 bytes), then the bytes of the
tensors without holes, wide types first, so that every tensor is aligned. The i-th piece of the tensor `name` in a file
is the flat tensor `name#i`.
"""

import collections
import hashlib
import json
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import attrs
import torch
from torch import Tensor

from lf.storage import flush

CHUNK_BYTES = 1 << 26
"""Most bytes that are copied from a device at once while a shard is written."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types that a shard can hold, by their safetensors names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@attrs.frozen
class Box:
    """A box of a tensor: first index and extent, one number a dimension."""

    at: tuple[int, ...]
    """First index."""
    size: tuple[int, ...]
    """Extent."""


def fits(box: Box, shape: tuple[int, ...]) -> bool:
    """Returns whether a box lies inside a tensor of this shape."""
    axes = zip(box.at, box.size, shape, strict=False)
    return len(box.at) == len(box.size) == len(shape) and all(0 <= a <= a + n <= s for a, n, s in axes)


@attrs.frozen(kw_only=True)
class Span:
    """The elements [start, stop) of a box of a global tensor, flattened in row-major order."""

    at: tuple[int, ...]
    """First index of the box in the global tensor."""
    size: tuple[int, ...]
    """Extent of the box."""
    start: int
    """First element of the flattened box."""
    stop: int
    """Element after the last one."""


@attrs.frozen(kw_only=True)
class Stored(Span):
    """A span in a file of a checkpoint."""

    file: int
    """Rank that wrote the file."""
    offset: int
    """First byte in the file."""


@attrs.frozen(kw_only=True, eq=False)
class Piece(Span):
    """A part of a global tensor that this rank holds. Raises ValueError where the numbers do not fit together."""

    name: str
    """Name of the global tensor."""
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    data: Tensor
    """The elements: flat, on any device; on the meta device where `make` gives them."""
    make: Callable[[], Tensor] | None = None
    """Gives the elements when they are written, so that not all pieces need be in memory at once."""

    def __attrs_post_init__(self) -> None:
        if not fits(Box(self.at, self.size), self.shape) or not 0 <= self.start <= self.stop <= math.prod(self.size):
            raise ValueError(
                f"piece of {self.name}: elements [{self.start}, {self.stop}) of the box at {self.at} of size "
                f"{self.size} are not all inside a tensor of shape {self.shape}"
            )
        if self.data.shape != (self.stop - self.start,):
            raise ValueError(
                f"piece of {self.name}: its data has shape {tuple(self.data.shape)}, but elements "
                f"[{self.start}, {self.stop}) need ({self.stop - self.start},)"
            )
        if self.data.dtype not in _NAMES:
            raise ValueError(
                f"piece of {self.name}: a checkpoint cannot hold {self.data.dtype}; convert it to one of "
                f"{', '.join(str(dtype) for dtype in _NAMES)}"
            )


def box_piece(
    name: str, tensor: Tensor, shape: tuple[int, ...] | None = None, at: tuple[int, ...] | None = None
) -> Piece:
    """Returns the piece whose data is the memory of a contiguous tensor: a box at `at` of a tensor of `shape`.

    Without `shape` and `at` it is the whole tensor. Raises RuntimeError when the tensor is not contiguous.
    """
    size = tuple(tensor.shape)
    return Piece(
        name=name,
        shape=size if shape is None else shape,
        at=(0,) * len(size) if at is None else at,
        size=size,
        start=0,
        stop=tensor.numel(),
        data=tensor.detach().view(-1),
    )


def boxes(span: Span) -> Iterator[tuple[int, Box]]:
    """Yields the boxes that a span consists of, in order, each with the place of its first element in the span.

    The elements of each box follow one another in the span. There are fewer than twice as many as dimensions.
    """
    done = 0
    for at, size in _cut(span.size, span.start, span.stop):
        yield done, Box(tuple(a + b for a, b in zip(span.at, at, strict=True)), size)
        done += math.prod(size)


def _cut(size: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    if start == stop:
        return
    if not size:
        yield (), ()
        return
    rest = size[1:]
    row = math.prod(rest)
    first, last = -(-start // row), stop // row
    partial = []
    if first > last:
        partial = [(last, start - last * row, stop - last * row)]
    elif start < first * row:
        partial = [(first - 1, start - (first - 1) * row, row)]
    for index, low, high in partial:
        for at, extent in _cut(rest, low, high):
            yield (index, *at), (1, *extent)
    if first < last:
        yield (first, *(0,) * len(rest)), (last - first, *rest)
    if first <= last:
        for at, extent in _cut(rest, 0, stop - last * row):
            yield (last, *at), (1, *extent)


def overlap(a: Box, b: Box) -> Box | None:
    """Returns the box that two boxes share, None when they share no element."""
    low = tuple(map(max, a.at, b.at))
    ends = ((p + m, q + n) for p, m, q, n in zip(a.at, a.size, b.at, b.size, strict=True))
    size = tuple(min(end) - first for end, first in zip(ends, low, strict=True))
    return Box(low, size) if all(n > 0 for n in size) else None


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Returns the index of a box in a tensor that holds the box `outer`."""
    return tuple(slice(a - b, a - b + n) for a, b, n in zip(box.at, outer.at, box.size, strict=True))


def tiling_fault(shape: tuple[int, ...], parts: Sequence[Stored]) -> str:
    """Returns what is wrong where the parts do not hold every element of a tensor exactly once, else an empty text."""
    # A leading axis of extent 1 makes scalars like the rest.
    cut = [(part.file, Box((0, *box.at), (1, *box.size))) for part in parts for _, box in boxes(part)]
    axis = max(range(len(shape) + 1), key=lambda d: len({box.at[d] for _, box in cut}))
    live: list[tuple[int, Box]] = []
    for file, box in sorted(cut, key=lambda row: row[1].at[axis]):
        live = [row for row in live if row[1].at[axis] + row[1].size[axis] > box.at[axis]]
        for other, rival in live:
            common = overlap(box, rival)
            if common is not None:
                return f"ranks {other} and {file} both give the box at {common.at[1:]} of size {common.size[1:]}"
        live.append((file, box))
    missing = math.prod(shape) - sum(math.prod(box.size) for _, box in cut)
    return f"no rank gives {missing} of its {math.prod(shape)} elements" if missing else ""


@attrs.frozen(kw_only=True, eq=False)
class Shard:
    """A shard that is ready to be written."""

    head: bytes
    """The file up to the first tensor."""
    pieces: tuple[Piece, ...]
    """The pieces in the order of the file."""
    stored: tuple[Stored, ...]
    """Where each piece lies in the file."""
    size: int
    """Bytes of the file."""


def dtype_name(piece: Piece) -> str:
    """Returns the safetensors name of a piece's type."""
    return _NAMES[piece.data.dtype]


def layout(pieces: Sequence[Piece], file: int) -> Shard:
    """Returns the shard of a rank: what stands where, before any tensor is copied."""
    ordered = sorted(pieces, key=lambda piece: -piece.data.element_size())
    count: collections.Counter[str] = collections.Counter()
    header: dict[str, object] = {}
    place = 0
    starts: list[int] = []
    for piece in ordered:
        end = place + piece.data.numel() * piece.data.element_size()
        key = f"{piece.name}#{count[piece.name]}"
        header[key] = {"dtype": dtype_name(piece), "shape": [piece.data.numel()], "data_offsets": [place, end]}
        count[piece.name] += 1
        starts.append(place)
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    stored = tuple(
        Stored(at=p.at, size=p.size, start=p.start, stop=p.stop, file=file, offset=len(head) + start)
        for p, start in zip(ordered, starts, strict=True)
    )
    return Shard(head=head, pieces=tuple(ordered), stored=stored, size=len(head) + place)


def write_shard(path: Path, shard: Shard) -> str:
    """Writes a new file, waits until it is on the disk and returns its sha256 in hex.

    At most `CHUNK_BYTES` are copied at a time. Raises OSError, FileExistsError when the file is there.
    """
    digest = hashlib.sha256(shard.head)
    with open(path, "xb") as file:
        file.write(shard.head)
        for piece in shard.pieces:
            _put(piece, file, digest)
        flush(file)
    return digest.hexdigest()


def _put(piece: Piece, file: BinaryIO, digest: "hashlib._Hash") -> None:
    elements = piece.data.detach() if piece.make is None else piece.make()
    assert (elements.shape, elements.dtype) == (piece.data.shape, piece.data.dtype), piece.name
    for chunk in torch.split(elements, max(CHUNK_BYTES // elements.element_size(), 1)):
        # A single element counts as contiguous at any stride, but only stride 1 can be seen as bytes.
        flat = chunk.cpu().contiguous().as_strided((chunk.numel(),), (1,))
        data = flat.view(torch.uint8).numpy().data
        digest.update(data)
        file.write(data)


def file_sha256(path: Path) -> str:
    """Returns the sha256 of a file in hex, read in small parts. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def mapped(path: Path, offset: int, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor of `size` whose memory is the file from byte `offset` on; only what is looked at is read.

    Copy it before the file changes. Raises OSError, and ValueError when the file is too short.
    """
    first = offset - offset % mmap.ALLOCATIONGRANULARITY
    count = math.prod(size)
    length = offset - first + count * dtype.itemsize
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=first)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset - first).view(size)
