"""A checkpoint folder as it lies on the disk: its manifest, and the reader of its tensors.

Format 1, under the folder of a run:

    checkpoints/.lock                             held by the process that writes
    checkpoints/step_<n>/rank_<r>.safetensors     the tensors that rank r gave; five digits, rank_00000 first
    checkpoints/step_<n>/manifest.json            written last
    checkpoints/step_<n>.old/                     what a second save of the step replaces, for a moment
    checkpoints/step_<n>.tmp-<token>/             a save or a removal that goes on, or was cut off

`manifest.json` is one JSON object: `format` ("lf checkpoint"), `version` (1), `sha256` (of the body as JSON with sorted
keys, no spaces and ASCII only) and `body`:

    step       the step
    meta       what the caller gave: plain JSON
    files      for each rank in order, the `bytes` and `sha256` of its file
    tensors    by name, the `dtype` (safetensors' word), the `shape`, and `pieces`: elements [start, stop) of the
               row-major flattened box at `at` of extent `size` lie in the file of rank `file` from byte `offset` on

The pieces of a tensor hold each element exactly once, so it does not matter to a reader which ranks wrote it. The
shards are plain safetensors files (`lf.train.shards`).
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import cattrs
import torch
from torch import Tensor

from lf.train.comm import told
from lf.train.shards import DTYPES, Box, Piece, Stored, boxes, dtype_name, fits, inside, mapped, overlap

FORMAT = "lf checkpoint"
"""What a manifest says it is."""
VERSION = 1
"""The version of the format that is written and read."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be saved, found or read; the message says which, why and what to do."""


@attrs.frozen(kw_only=True)
class File:
    """What a manifest says of a shard."""

    bytes: int
    """Its size."""
    sha256: str
    """Its hash in hex."""


@attrs.frozen(kw_only=True)
class Entry:
    """What a manifest says of a tensor."""

    dtype: str
    """Its type, by safetensors' name."""
    shape: tuple[int, ...]
    """Its shape."""
    pieces: tuple[Stored, ...]
    """Where its elements are; each is there once."""


@attrs.frozen(kw_only=True)
class Manifest:
    """What a checkpoint holds."""

    step: int
    """The step it was saved at."""
    meta: dict[str, Any]
    """Plain JSON of the caller."""
    files: tuple[File, ...]
    """The shards, by rank."""
    tensors: dict[str, Entry]
    """The tensors, by name."""


def file_name(rank: int) -> str:
    """Returns the name of the shard of a rank."""
    return f"rank_{rank:05d}.safetensors"


def canonical(body: Any) -> str:
    """Returns the text of a JSON value that is hashed. Raises ValueError or TypeError where it is no strict JSON."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes `manifest.json` and waits until it and the folder are on the disk. Raises OSError."""
    body = cattrs.unstructure(manifest)
    outer = {"format": FORMAT, "version": VERSION, "sha256": _sha256(canonical(body)), "body": body}
    with open(folder / "manifest.json", "xb") as file:
        file.write(canonical(outer).encode())
        file.flush()
        os.fsync(file.fileno())
    flush(folder)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def flush(folder: Path) -> None:
    """Waits until the names in a folder are on the disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint folder whose files are all there with the right sizes.

    File contents are not hashed. Raises CheckpointError.
    """
    file = path / "manifest.json"
    try:
        outer = json.loads(file.read_bytes())
        body = outer["body"] if isinstance(outer, dict) and "body" in outer else None
        digest = _sha256(canonical(body))
    except OSError as error:
        raise CheckpointError(f"{path} is no complete checkpoint: {told(error)}") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged or cut off: {error}") from error
    if not isinstance(outer, dict) or outer.get("format") != FORMAT:
        raise CheckpointError(f"{file} is not the manifest of an {FORMAT}")
    if outer.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {outer.get('version')} of the checkpoint format, and this lf reads version {VERSION}; "
            "use the lf that wrote it"
        )
    if outer.get("sha256") != digest:
        raise CheckpointError(f"{file} is damaged: it does not hold what was saved")
    try:
        manifest = cattrs.structure(body, Manifest)
    except Exception as error:
        raise CheckpointError(f"{file} does not follow version {VERSION} of the format: {error}") from error
    check_files(path, manifest.files)
    return manifest


def check_files(folder: Path, files: Sequence[File]) -> None:
    """Raises CheckpointError unless the shards are in the folder with these sizes."""
    for rank, row in enumerate(files):
        path = folder / file_name(rank)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{told(error)}; the checkpoint has {len(files)} files like it, in one folder that all ranks must see"
            ) from error
        if size != row.bytes:
            raise CheckpointError(f"{path} has {size} bytes, but {row.bytes} were saved: it is cut off or damaged")


@attrs.frozen(kw_only=True, eq=False)
class Reader:
    """An open checkpoint, made by `open_checkpoint`. It remembers which tensors were read."""

    path: Path
    """The folder."""
    manifest: Manifest
    """What it holds."""
    _read: set[str] = attrs.field(factory=set, init=False)

    @property
    def step(self) -> int:
        """The step it was saved at."""
        return self.manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        """The JSON that was given to `save`."""
        return self.manifest.meta

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its tensors, sorted."""
        return tuple(sorted(self.manifest.tensors))

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor. Raises CheckpointError when there is none of that name."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns the type of a tensor. Raises CheckpointError when there is none of that name."""
        return DTYPES[self._entry(name).dtype]

    def read(self, name: str, at: tuple[int, ...] | None = None, size: tuple[int, ...] | None = None) -> Tensor:
        """Returns a box of a tensor on the CPU, the whole tensor without `at` and `size`; reads nothing else.

        Raises CheckpointError for an unknown name or a file that cannot be read, ValueError for a box that is not
        inside the tensor.
        """
        entry = self._entry(name)
        box = Box((0,) * len(entry.shape) if at is None else at, entry.shape if size is None else size)
        if not fits(box, entry.shape):
            raise ValueError(f"the box at {box.at} of size {box.size} is not inside {name} of shape {entry.shape}")
        out = torch.empty(box.size, dtype=DTYPES[entry.dtype])
        for stored in entry.pieces:
            if overlap(Box(stored.at, stored.size), box) is not None:
                self._copy(stored, box, out)
        self._read.add(name)
        return out

    def fill(self, piece: Piece) -> None:
        """Copies the saved values into the data of a piece, in place, bit by bit.

        Raises CheckpointError when the saved tensor is not there or has another shape or type.
        """
        entry = self._entry(piece.name)
        if (entry.shape, entry.dtype) != (piece.shape, dtype_name(piece)):
            raise CheckpointError(
                f"{piece.name} is {entry.dtype} {list(entry.shape)} in {self.path}, but {dtype_name(piece)} "
                f"{list(piece.shape)} in this run; resume with the config that saved it, or choose another --out"
            )
        with torch.no_grad():
            for place, box in boxes(piece):
                values = self.read(piece.name, box.at, box.size).view(-1)
                piece.data[place : place + values.numel()].copy_(values)
        self._read.add(piece.name)

    def unread(self) -> tuple[str, ...]:
        """Returns the names of the tensors of which this rank has read nothing, sorted."""
        return tuple(name for name in self.names if name not in self._read)

    def _entry(self, name: str) -> Entry:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name}; it was saved by a run with another state")
        return self.manifest.tensors[name]

    def _copy(self, stored: Stored, box: Box, out: Tensor) -> None:
        path = self.path / file_name(stored.file)
        for place, part in boxes(stored):
            common = overlap(part, box)
            if common is None:
                continue
            try:
                source = mapped(path, stored.offset + place * out.element_size(), part.size, out.dtype)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
            out[inside(common, box)] = source[inside(common, part)]


def open_checkpoint(path: Path) -> Reader:
    """Returns a reader of a checkpoint folder; sizes are checked, contents are not hashed. Raises CheckpointError."""
    return Reader(path=path, manifest=read_manifest(path))
