"""Reads a folder of safetensors in Hugging Face's layout: checked whole before any tensor, then read by slice.

A folder holds `model.safetensors`, or shards and `model.safetensors.index.json` (diffusers: `diffusion_pytorch_model`).
The file format is described at https://github.com/huggingface/safetensors#format: eight bytes of header length, a JSON
header, then the tensors without gaps.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lf.models import quantised
from lf.models.quantised import Quantisation

STEMS = ("model", "diffusion_pytorch_model")
"""How the weight files of a folder may start: transformers' name and diffusers'."""

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
"""safetensors' names of the dtypes that lf reads and writes."""

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CURE = "copy or download the folder again"
_DEEPEST = 64


@attrs.frozen(kw_only=True)
class Entry:
    """One tensor as its file stores it."""

    file: str
    """Name of the file in the folder."""
    dtype: str
    """safetensors' name of the dtype."""
    shape: tuple[int, ...]
    """Extents."""


@attrs.frozen(kw_only=True)
class HfFolder:
    """An open folder of weights. The files are memory-mapped: a tensor is read when it is asked for."""

    path: Path
    """The folder."""
    stem: str
    """How its weight files start: `model` or `diffusion_pytorch_model`."""
    entries: Mapping[str, Entry]
    """Every tensor as stored, in the order of the files and of the tensors in them."""
    metadata: Mapping[str, str]
    """Text that the first file carries in its header, `{"format": "pt"}` as a rule."""
    config: Mapping[str, Any]
    """`config.json`; empty where there is none."""
    config_bytes: bytes
    """`config.json` as stored; empty where there is none."""
    quantisation: Quantisation
    """Which tensors are quantised; reading dequantises them."""
    handles: Mapping[str, Any]
    """An open `safe_open` for each file."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor that can be read, in file order; factors of quantised tensors are not among them."""
        return tuple(name for name in self.entries if name not in self.quantisation.unused)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype that `read` gives: the stored one, float32 for a quantised tensor."""
        return torch.float32 if name in self.quantisation.scales else DTYPES[self._entry(name).dtype]

    def read(self, name: str, box: Sequence[slice] | None = None) -> Tensor:
        """Returns a tensor, or a box of it: a slice with start and stop for each dimension.

        Only the box is read from the file. The result may be a view of the mapped file: do not write into it.
        """
        shape = self.shape(name)
        whole = tuple(slice(0, extent) for extent in shape)
        box = whole if box is None else tuple(box)
        inside = len(box) == len(shape) and all(
            0 <= part.start <= part.stop <= extent and part.step is None
            for part, extent in zip(box, shape, strict=True)
        )
        if not inside:
            raise ValueError(f"{self.path / self._entry(name).file}: {name} has shape {list(shape)}, {box} is outside")
        values = self._raw(name, box)
        scale = self.quantisation.scales.get(name)
        if scale is None:
            return values
        factors = self._raw(scale.name, quantised.scale_box(scale, box))
        return quantised.dequantise(values, factors, scale, box)

    def _raw(self, name: str, box: tuple[slice, ...]) -> Tensor:
        tensor: Tensor = self.handles[self._entry(name).file].get_slice(name)[box]
        return tensor

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise ValueError(
                f"{self.path} has no tensor {name}; it has {len(self.entries)}, such as {few(self.entries)}"
            )
        return self.entries[name]


def open_folder(path: str | Path, *, stems: Sequence[str] = STEMS) -> HfFolder:
    """Returns a folder of weights, opened and checked: every file is whole and the index names what is there.

    Raises ValueError, naming the file and the cure, for missing, truncated, stale or extra shards, for headers that do
    not describe their file, for pickled weights and for quantisations other than FP8 (`quantised.py`).
    """
    path = Path(path)
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder: give a local folder with config.json and *.safetensors (download first)"
        )
    stem, files, index = _files(path, stems)
    config_file = path / "config.json"
    config_bytes = config_file.read_bytes() if config_file.is_file() else b""
    config = parse_config(config_file, config_bytes) if config_file.is_file() else {}
    entries: dict[str, Entry] = {}
    metadata: dict[str, str] = {}
    for number, file in enumerate(files):
        tensors, text = _read_header(path / file)
        if index is not None:
            _check_index(path, file, tensors, index)
        entries.update(tensors)
        metadata = metadata if number else text
    try:
        quantisation = quantised.quantisation(
            config,
            {name: entry.shape for name, entry in entries.items()},
            {name: entry.dtype for name, entry in entries.items()},
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return HfFolder(
        path=path,
        stem=stem,
        entries=entries,
        metadata=metadata,
        config=config,
        config_bytes=config_bytes,
        quantisation=quantisation,
        handles={file: _open_file(path / file) for file in files},
    )


def _open_file(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except SafetensorError as error:
        raise ValueError(f"{file} is not safetensors ({error}): {_CURE}") from error


def parse_config(file: Path, content: bytes) -> dict[str, Any]:
    """Returns the JSON object that `file` holds, given its content. Raises ValueError naming the file."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON ({error}): {_CURE}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds a {type(config).__name__}, a JSON object is expected: {_CURE}")
    level: list[Any] = [config]
    for _ in range(_DEEPEST):
        level = [item for value in level for item in (value.values() if isinstance(value, dict) else value)]
        level = [item for item in level if isinstance(item, (dict, list))]
    if level:
        raise ValueError(f"{file} is nested more than {_DEEPEST} levels deep, which no such file is: {_CURE}")
    return config


def is_file_name(name: object) -> bool:
    """Returns whether a value is the name of a file in a folder, which leads nowhere else when it is joined to one."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def is_tensor_file(name: object) -> bool:
    """Returns whether a value is the name of a safetensors file in a folder. Published indexes take any such name."""
    return is_file_name(name) and str(name).endswith(".safetensors")


def is_weight_file(name: str, stems: Sequence[str] = STEMS) -> bool:
    """Returns whether a file name is a weight file, a shard or an index of a folder with one of these stems."""
    return any(
        name in {f"{stem}.safetensors", f"{stem}.safetensors.index.json"} or _is_shard(name, stem) for stem in stems
    )


def _is_shard(name: str, stem: str) -> bool:
    return re.fullmatch(rf"{re.escape(stem)}(\.safetensors)?-\d+-of-\d+\.safetensors", name) is not None


def _files(path: Path, stems: Sequence[str]) -> tuple[str, list[str], dict[str, str] | None]:
    names = sorted(entry.name for entry in path.iterdir())
    present = [stem for stem in stems if any(is_weight_file(name, [stem]) for name in names)]
    if not present:
        pickles = [name for name in names if name.endswith(_PICKLES)]
        if pickles:
            raise ValueError(
                f"{path} holds weights only as pickles ({few(pickles)}), which can run code and are not loaded: "
                "download the safetensors, or convert them with transformers' save_pretrained where you trust them"
            )
        raise ValueError(f"{path} holds no weights: {' or '.join(f'{stem}.safetensors' for stem in stems)} is expected")
    if len(present) > 1:
        raise ValueError(f"{path} holds the weights of two models ({' and '.join(present)}): keep one of them")
    stem = present[0]
    single, index_file = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    shards = [name for name in names if _is_shard(name, stem)]
    if index_file in names:
        index = _read_index(path / index_file)
        files = sorted(set(index.values()))
        missing = [name for name in files if not (path / name).is_file()]
        if missing:
            raise ValueError(f"{path / index_file} names {len(missing)} missing shards ({few(missing)}): {_CURE}")
        extra = [name for name in [*shards, single] if name in names and name not in files]
        if extra:
            raise ValueError(
                f"{path} holds {len(extra)} stale or extra weight files that {index_file} does not name "
                f"({few(extra)}): remove what is not part of this model"
            )
        return stem, files, index
    if single not in names:
        raise ValueError(f"{path} holds shards ({few(shards)}) but {index_file} is missing: {_CURE}")
    if shards:
        raise ValueError(
            f"{path} holds {single} and {len(shards)} stale or extra shards ({few(shards)}) without an index: "
            "remove what is not part of this model"
        )
    return stem, [single], None


def _read_index(file: Path) -> dict[str, str]:
    weight_map = parse_config(file, file.read_bytes()).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{file} has no weight_map, an object from tensor to shard: {_CURE}")
    for name, shard in weight_map.items():
        if not is_tensor_file(shard):
            raise ValueError(
                f"{file} puts {name} into {shard!r}, which is not a safetensors file of the folder: {_CURE}"
            )
    return weight_map


def _check_index(path: Path, file: str, tensors: Mapping[str, Entry], index: Mapping[str, str]) -> None:
    lacking = [name for name, shard in index.items() if shard == file and name not in tensors]
    if lacking:
        raise ValueError(
            f"{path / file} lacks {len(lacking)} tensors that the index puts there ({few(lacking)}): {_CURE}"
        )
    extra = [name for name in tensors if index.get(name) != file]
    if extra:
        raise ValueError(
            f"{path / file} holds {len(extra)} tensors that the index does not put there ({few(extra)}): the shard or "
            f"the index is stale or extra; {_CURE}"
        )


def _read_header(file: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    if not file.is_file():
        raise ValueError(f"{file} is no regular file; {_CURE}")
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if start == b"version ":
            raise ValueError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
        if size < 8 or length > size - 8:
            says = f", of which its header should take {length}" if size >= 8 else ""
            raise ValueError(f"{file} is truncated or not safetensors: it has {size} bytes{says}; {_CURE}")
        raw = stream.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("__metadata__ is no object of strings")
        spans = sorted(_span(name, **entry) for name, entry in header.items())
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        says = f" ({error})" if isinstance(error, ValueError) else ""
        raise ValueError(f"{file} has a broken header{says}: {_CURE}") from error
    at = 0
    for begin, end, name, dtype, shape in spans:
        if dtype not in DTYPES:
            raise ValueError(f"{file}: {name} has the unknown dtype {dtype!r}; known are {', '.join(DTYPES)}")
        if begin != at:
            kind = "overlaps the tensor before it" if begin < at else "leaves a gap before it"
            raise ValueError(f"{file}: {name} {kind} (it starts at byte {begin}, {at} is free); {_CURE}")
        needed = math.prod(shape) * DTYPES[dtype].itemsize
        if end - begin != needed:
            raise ValueError(
                f"{file}: {name} of shape {list(shape)} and dtype {dtype} needs {needed} bytes, its header gives it "
                f"{end - begin}; {_CURE}"
            )
        at = end
    if at != size - 8 - length:
        kind = "is truncated" if at > size - 8 - length else "has bytes at its end that no tensor owns"
        raise ValueError(f"{file} {kind}: its tensors need {at} bytes, it holds {size - 8 - length}; {_CURE}")
    return {name: Entry(file=file.name, dtype=dtype, shape=shape) for _, _, name, dtype, shape in spans}, metadata


def _span(
    name: str, dtype: str, shape: list[int], data_offsets: list[int]
) -> tuple[int, int, str, str, tuple[int, ...]]:
    begin, end = data_offsets
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"{name} has shape {shape} and data_offsets {data_offsets}")
    return begin, end, name, str(dtype), tuple(shape)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name} stands twice")
        found[name] = value
    return found


def few(names: Sequence[object] | Mapping[str, Any]) -> str:
    """Returns the first five of some names or numbers, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(str, list(names)[:5])) + more
