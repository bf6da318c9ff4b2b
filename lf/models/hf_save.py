"""Writes folders of safetensors in Hugging Face's layout, whole or not at all, and remembers imported ones.

A folder is written beside its place, synced to disk and renamed: until then an older one stays as it was.
"""

import contextlib
import itertools
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from lf.models import quantised
from lf.models.hf_folder import (
    DTYPES,
    STEMS,
    HfFolder,
    few,
    is_file_name,
    is_tensor_file,
    is_weight_file,
    open_folder,
    parse_config,
)
from lf.storage import flush, sync

CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
"""safetensors' name of each dtype."""

MAX_SHARD_BYTES = 5_000_000_000
"""Largest shard that is written, unless one tensor is larger."""

_ASSETS = (".json", ".jinja", ".model", ".py", ".tiktoken", ".txt")
_NOTICES = ("LICENSE", "NOTICE")
_CARRIED = "carried"


@attrs.frozen(kw_only=True)
class Kept:
    """What is remembered of one tensor of an imported folder."""

    name: str
    """Its HF name."""
    dtype: str
    """safetensors' name of the dtype that an export gives it."""
    file: str
    """The file that it lies in."""
    carried: bool
    """Whether no module holds it, so that its values come from the source."""


@attrs.frozen(kw_only=True)
class Source:
    """What an export needs to give an imported folder back: keys, dtypes, order, files, and what no module holds."""

    stem: str
    """How the weight files start."""
    metadata: tuple[tuple[str, str], ...]
    """Text in the header of the weight files."""
    tensors: tuple[Kept, ...]
    """Every tensor, in file order."""
    config: bytes
    """`config.json`, without quantization_config when the weights were dequantised; empty where there was none."""
    files: tuple[tuple[str, bytes], ...]
    """The other text files of the folder (tokenizer, generation config, licence) by name."""
    carried: HfFolder | None
    """Where the values of carried tensors are; None when there are none."""


def source_of(folder: HfFolder, carried: Collection[str]) -> Source:
    """Returns what is remembered of an open folder; `carried` names the tensors that no module holds.

    Their values stay in the folder until `store_source` copies them.
    """
    scales = folder.quantisation.scales
    return Source(
        stem=folder.stem,
        metadata=tuple(folder.metadata.items()),
        tensors=tuple(
            Kept(
                name=name,
                dtype="BF16" if name in scales else folder.entries[name].dtype,
                file=folder.entries[name].file,
                carried=name in carried,
            )
            for name in folder.names
        ),
        config=_json(quantised.without_quantisation(folder.config)) if scales else folder.config_bytes,
        files=tuple(
            (file.name, _own(file).read_bytes())
            for file in sorted(folder.path.iterdir())
            if _is_asset(file.name) and file.is_file()
        ),
        carried=folder if carried else None,
    )


def _own(file: Path) -> Path:
    """Returns a file of a folder; raises ValueError for a link out of it, which would export whatever lies there.

    Hugging Face's cache is made of links: `snapshots/REVISION/FILE` leads to `blobs/HASH` beside `snapshots`.
    """
    real, folder = file.resolve(), file.parent.resolve()
    if folder not in real.parents and real.parent != folder.parent.parent / "blobs":
        raise ValueError(f"{file} is a link to {real}, outside of its folder; put a copy in its place, or remove it")
    return file


def store_source(source: Source, path: str | Path) -> None:
    """Writes a source to a folder of its own, where it outlives the imported one.

    The folder holds `source.json`, `files/` and, if there are carried tensors, `carried.safetensors`.
    """
    record = {
        "stem": source.stem,
        "metadata": dict(source.metadata),
        "tensors": [attrs.asdict(kept) for kept in source.tensors],
        "files": [name for name, _ in source.files],
    }
    with new_folder(Path(path), ["source.json", "files"]) as folder:
        _write_bytes(folder / "source.json", _json(record))
        (folder / "files").mkdir()
        for name, content in [("config.json", source.config), *source.files]:
            _write_bytes(folder / "files" / name, content)
        sync(folder / "files")
        if source.carried is not None:
            values = source.carried
            carried = ((kept.name, values.read(kept.name).to(DTYPES[kept.dtype])) for kept in _carried(source))
            _write_numbered(folder, _by_size(carried, MAX_SHARD_BYTES), _CARRIED, dict(source.metadata))


def load_source(path: str | Path) -> Source:
    """Returns a source that `store_source` wrote.

    Raises ValueError for a record that it cannot have written: a folder that came from elsewhere may name any file.
    """
    path = Path(path)
    file = path / "source.json"
    record = parse_config(file, file.read_bytes())
    for fault in _faults(record):
        raise ValueError(f"{file}: {fault}; import the Hugging Face folder again")
    files = path / "files"
    source = Source(
        stem=record["stem"],
        metadata=tuple(record["metadata"].items()),
        tensors=tuple(Kept(**kept) for kept in record["tensors"]),
        config=(files / "config.json").read_bytes(),
        files=tuple((name, (files / name).read_bytes()) for name in record["files"]),
        carried=None,
    )
    return attrs.evolve(source, carried=open_folder(path, stems=[_CARRIED])) if _carried(source) else source


def save_folder(
    path: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    config: Mapping[str, Any] | bytes,
    files: Mapping[str, bytes] = {},
    source: Source | None = None,
    stem: str = "model",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metadata: Mapping[str, str] = {"format": "pt"},
) -> None:
    """Writes a Hugging Face folder, streaming: never more than one shard is in memory.

    With a source its split into files, stem and metadata hold, and `tensors` must come as `export` gives them for it;
    otherwise a shard has at most `max_shard_bytes` bytes, or one tensor. `files` are written beside `config.json`,
    which is left out when `config` is empty bytes.
    The folder appears, or replaces an older one, only when it is complete: on any error the older one is as it was.
    `tensors` may be read from the folder that is replaced. Raises ValueError as `check_target` does, for a name that
    comes twice and for a file that would lie elsewhere, OSError when the disk is full.
    """
    _check_names(files, source, stem)
    with new_folder(Path(path), files) as folder:
        if config != b"":
            _write_bytes(folder / "config.json", config if isinstance(config, bytes) else _json(config))
        for name, content in files.items():
            _write_bytes(folder / name, content)
        if source is None:
            _write_numbered(folder, _by_size(tensors, max_shard_bytes), stem, metadata)
        else:
            _write_like(folder, _by_file(tensors, source), source)


def check_target(path: str | Path, files: Collection[str]) -> None:
    """Raises ValueError if saving to `path` would lose something: anything but weights and `files`.

    `config.json` and `report.json` may go.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file: choose a folder to save to")
    known = {"config.json", "report.json", *files}
    lost = sorted(
        entry.name
        for entry in (path.iterdir() if path.is_dir() else ())
        if entry.name not in known and not is_weight_file(entry.name, (*STEMS, _CARRIED))
    )
    if lost:
        raise ValueError(
            f"{path} holds {len(lost)} entries that saving there would remove ({few(lost)}): "
            "choose another folder, or move them away"
        )


@contextlib.contextmanager
def new_folder(path: Path, files: Collection[str]) -> Iterator[Path]:
    """Gives a folder that takes the place of `path` when the block ends; on any error `path` is as it was.

    Raises ValueError as `check_target` does, OSError when the disk is full.
    """
    path = path.resolve()
    partial, old = path.with_name(f".{path.name}.partial"), path.with_name(f".{path.name}.old")
    path.parent.mkdir(parents=True, exist_ok=True)
    if old.exists() and not path.exists():  # a save was killed between its two renames
        old.rename(path)
    check_target(path, files)
    for left in (partial, old):
        if left.exists():
            shutil.rmtree(left)
    partial.mkdir()
    try:
        yield partial
        sync(partial)
        if path.exists():
            path.rename(old)
        try:
            partial.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
        sync(path.parent)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} could not be written ({error}); what was there is unchanged. Free space or "
            "choose another folder, then save again",
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes one safetensors file and syncs it to disk: in the order given, wide dtypes first so that all align."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    at = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in CODES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which safetensors cannot hold: convert it first")
        end = at + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for name in names:
            stream.write(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        flush(stream)


def _once(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"{name} is to be saved twice: give each tensor once")
        seen.add(name)
        yield name, tensor.detach().cpu()


def _by_size(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in _once(tensors):
        if shard and size + tensor.nbytes > max_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _by_file(tensors: Iterable[tuple[str, Tensor]], source: Source) -> Iterator[tuple[str, dict[str, Tensor]]]:
    given = _once(tensors)
    end = ("the end", torch.empty(0))
    for file, group in itertools.groupby(source.tensors, key=lambda kept: kept.file):
        shard = {}
        for kept in group:
            name, shard[kept.name] = next(given, end)
            if name != kept.name:
                raise ValueError(
                    f"{kept.name} is expected for {file}, {name} came: save what `export` gives with the source"
                )
        yield file, shard
    for name, _ in given:
        raise ValueError(f"{name} is not in the source: save what `export` gives with the source")


def _write_numbered(folder: Path, shards: Iterable[dict[str, Tensor]], stem: str, metadata: Mapping[str, str]) -> None:
    held: list[tuple[Path, list[str], int]] = []
    for number, shard in enumerate(shards):
        file = folder / f"{stem}-{number}.partial"
        write_safetensors(file, shard, metadata)
        held.append((file, list(shard), _nbytes(shard)))
        shard.clear()  # before the next one is made
    index: dict[str, str] = {}
    for number, (file, names, _) in enumerate(held, 1):
        final = f"{stem}-{number:05d}-of-{len(held):05d}.safetensors" if len(held) > 1 else f"{stem}.safetensors"
        file.rename(folder / final)
        index |= dict.fromkeys(names, final)
    if len(held) > 1:
        _write_index(folder, stem, index, sum(size for *_, size in held))


def _write_like(folder: Path, shards: Iterable[tuple[str, dict[str, Tensor]]], source: Source) -> None:
    index: dict[str, str] = {}
    total = 0
    for file, shard in shards:
        write_safetensors(folder / file, shard, dict(source.metadata))
        index |= dict.fromkeys(shard, file)
        total += _nbytes(shard)
        shard.clear()  # before the next one is made
    if set(index.values()) != {f"{source.stem}.safetensors"}:
        _write_index(folder, source.stem, index, total)


def _write_index(folder: Path, stem: str, index: Mapping[str, str], total: int) -> None:
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
    _write_bytes(folder / f"{stem}.safetensors.index.json", _json(content))


def _write_bytes(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        flush(stream)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _nbytes(shard: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in shard.values())


def _carried(source: Source) -> list[Kept]:
    return [kept for kept in source.tensors if kept.carried]


def _is_asset(name: object) -> bool:
    if not is_file_name(name) or name in ("config.json", "report.json") or is_weight_file(str(name)):
        return False
    file = Path(str(name))
    return (file.suffix in _ASSETS or file.stem in _NOTICES) and not file.name.endswith(".safetensors.index.json")


def _faults(record: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong with the content of a source.json; names in it become paths."""
    stem, metadata, tensors, files = (record.get(key) for key in ("stem", "metadata", "tensors", "files"))
    if stem not in STEMS:
        yield f"stem = {stem!r:.80} must be {' or '.join(STEMS)}"
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        yield f"metadata = {metadata!r:.80} must be an object of strings"
    if not isinstance(files, list) or not all(map(_is_asset, files)):
        yield f"files = {files!r:.80} must be a list of names of text files"
    if not isinstance(tensors, list):
        yield f"tensors = {tensors!r:.80} must be a list"
        return
    kinds = {"name": str, "dtype": str, "file": str, "carried": bool}
    for at, kept in enumerate(tensors):
        if not isinstance(kept, dict) or {key: type(value) for key, value in kept.items()} != kinds:
            yield f"tensors[{at}] = {kept!r:.80} must have the strings name, dtype and file, and carried"
        elif not is_tensor_file(kept["file"]):
            yield f"tensors[{at}].file = {kept['file']!r} must be the name of a safetensors file"
        elif kept["dtype"] not in DTYPES:
            yield f"tensors[{at}].dtype = {kept['dtype']!r} must be one of {', '.join(DTYPES)}"


def _check_names(files: Collection[str], source: Source | None, stem: str) -> None:
    """Raises ValueError where a name of what is to be saved is not that of a file in the folder."""
    shards = [] if source is None else [kept.file for kept in source.tensors]
    wrong = [name for name in files if not is_file_name(name)]
    wrong += [name for name in shards if not is_tensor_file(name)]
    wrong += [stem for stem in (stem, source.stem if source else stem) if not is_file_name(stem)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is to be saved, and is not the name of a file in a folder; give a plain name")
    order = [file for file, _ in itertools.groupby(shards)]
    if len(set(order)) < len(order):
        raise ValueError("the tensors of a file do not stand together in the source; it would be written twice")
