"""The manifest of a checkpoint folder: what stands in it, and the checks before any of it is believed.

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

import errno
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import attrs
import cattrs

from lf.storage import flush, sync
from lf.train.shards import DTYPES, Box, Stored, fits, tiling_fault

FORMAT = "lf checkpoint"
"""What a manifest says it is."""
VERSION = 1
"""The version of the format that is written and read."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_DIMS = 64
"""Most dimensions of a tensor in torch."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be saved, found or read; the message says which, why and what to do."""


class UnreadableError(CheckpointError):
    """A checkpoint that the disk does not give, or this lf does not know: it may be whole, so no older one will do."""


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
    outer = {"format": FORMAT, "version": VERSION, "sha256": digest(VERSION, body), "body": body}
    with open(folder / "manifest.json", "xb") as file:
        file.write(canonical(outer).encode())
        flush(file)
    sync(folder)


def digest(version: object, body: object) -> str:
    """Returns the sha256 of what a manifest says."""
    return hashlib.sha256(canonical([version, body]).encode()).hexdigest()


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:  # A bool is no int here.
        raise TypeError(f"expected {kind.__name__}")
    return value


def _is_tuple(kind: Any) -> bool:
    return get_origin(kind) is tuple


def _tuple_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    (item, _) = get_args(kind)
    hook = converter.get_structure_hook(item)
    return lambda value, _: tuple(hook(each, item) for each in _exactly(value, list))


def _strict() -> cattrs.Converter:
    """Returns the converter that takes JSON as it is: no number from text, no tuple from a mapping, no spare field."""
    made = cattrs.Converter(forbid_extra_keys=True)
    for kind in (int, str):
        made.register_structure_hook(kind, _exactly)
    made.register_structure_hook_factory(_is_tuple)(_tuple_hook)
    return made


_STRICT = _strict()


def read_error(file: Path, error: OSError) -> CheckpointError:
    """Returns the error for a file of a checkpoint that was not read: an UnreadableError unless it is missing."""
    said = f"{file}: {error.strerror or error}"
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return CheckpointError(
            f"{file.parent} is no complete checkpoint: {said}; its files lie in one folder that all ranks must see"
        )
    return UnreadableError(
        f"{file.parent} cannot be read: {said}; make it readable, or remove it to go on from an older checkpoint"
    )


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint folder whose files are all there with the right sizes.

    Everything that it says is checked, so that a reader may rely on it; file contents are not hashed. Raises
    CheckpointError, UnreadableError where a file is there and the system does not give it.
    """
    file = path / "manifest.json"
    if file.exists() and not file.is_file():
        raise CheckpointError(f"{file} is no regular file")
    try:
        outer = json.loads(file.read_bytes())
        if not isinstance(outer, dict) or outer.get("format") != FORMAT:
            raise CheckpointError(f"{file} is not the manifest of an {FORMAT}")
        version, body = outer.get("version"), outer.get("body")
        if outer.get("sha256") != digest(version, body):
            raise CheckpointError(f"{file} is damaged: it does not hold what was saved")
    except OSError as error:
        raise read_error(file, error) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged or cut off: {error}") from error
    if version != VERSION:
        raise UnreadableError(
            f"{path} has version {version} of the checkpoint format, and this lf reads version {VERSION}; "
            "use the lf that wrote it"
        )
    try:
        manifest = _STRICT.structure(body, Manifest)
    except Exception as error:
        faults = "; ".join(cattrs.transform_error(error, path="body")[:3])
        raise CheckpointError(f"{file} does not follow version {VERSION} of the format: {faults}") from error
    if fault := _fault(manifest):
        raise CheckpointError(f"{file} does not follow version {VERSION} of the format: {fault}")
    check_files(path, manifest.files)
    return manifest


def _fault(manifest: Manifest) -> str:
    """Returns what in a manifest cannot be, an empty text where its numbers fit together."""
    if manifest.step < 0:
        return f"step is {manifest.step}"
    for rank, row in enumerate(manifest.files):
        if row.bytes < 0 or not _SHA256.fullmatch(row.sha256):
            return f"{file_name(rank)} has {row.bytes} bytes and the hash {row.sha256!r}"
    for name, entry in manifest.tensors.items():
        fault = _entry_fault(entry, manifest.files)
        if fault:
            return f"{name}: {fault}"
    return _shared_bytes(manifest.tensors)


def _entry_fault(entry: Entry, files: Sequence[File]) -> str:
    shape = entry.shape
    if entry.dtype not in DTYPES:
        return f"dtype is {entry.dtype!r}; this lf knows {', '.join(DTYPES)}"
    # Extents of 0 hide the others from the product.
    if len(shape) > _MAX_DIMS or min(shape, default=0) < 0 or math.prod(max(n, 1) for n in shape) >= 2**63:
        return f"no tensor has the shape {list(shape)}"
    for at in entry.pieces:
        if not fits(Box(at.at, at.size), shape) or not 0 <= at.start <= at.stop <= math.prod(at.size):
            return (
                f"elements [{at.start}, {at.stop}) of the box at {at.at} of size {at.size} are not all inside the "
                f"shape {list(shape)}"
            )
        if not 0 <= at.file < len(files):
            return f"a piece lies in the file of rank {at.file}, and there are {len(files)} files"
        width = DTYPES[entry.dtype].itemsize
        end = at.offset + (at.stop - at.start) * width
        if at.offset < 0 or at.offset % width or end > files[at.file].bytes:
            return (
                f"a piece lies at bytes [{at.offset}, {end}) of {file_name(at.file)}, which has "
                f"{files[at.file].bytes}; its elements have {width}"
            )
    return tiling_fault(shape, entry.pieces)


def _shared_bytes(tensors: Mapping[str, Entry]) -> str:
    spans = sorted(
        (at.file, at.offset, at.offset + (at.stop - at.start) * DTYPES[entry.dtype].itemsize, name)
        for name, entry in tensors.items()
        for at in entry.pieces
        if at.start < at.stop
    )
    for (file, _, end, name), (same, start, _, other) in itertools.pairwise(spans):
        if file == same and start < end:
            return f"{name} and {other} both lie at byte {start} of {file_name(file)}"
    return ""


def check_files(folder: Path, files: Sequence[File]) -> None:
    """Raises CheckpointError unless the shards are in the folder with these sizes, as `read_manifest` does."""
    for rank, row in enumerate(files):
        path = folder / file_name(rank)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise read_error(path, error) from error
        if size != row.bytes:
            raise CheckpointError(f"{path} has {size} bytes, but {row.bytes} were saved: it is cut off or damaged")
