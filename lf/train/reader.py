"""The reader of a checkpoint's tensors, at any layout. `lf.train.manifest` describes the format."""

from pathlib import Path
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from lf.train.manifest import CheckpointError, Entry, Manifest, file_name, read_manifest
from lf.train.shards import DTYPES, Box, Piece, Stored, boxes, dtype_name, fits, inside, mapped, overlap

T = TypeVar("T")


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

    def fact(self, name: str, kind: type[T]) -> T:
        """Returns an entry of `meta`. Raises CheckpointError where there is none of that name and type."""
        value = self.meta.get(name)
        if type(value) is not kind:
            raise CheckpointError(
                f"{self.path} has no {name} of type {kind.__name__} in meta ({', '.join(sorted(self.meta))}), so no "
                "run of lf saved it; give a folder that one did"
            )
        return value

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
