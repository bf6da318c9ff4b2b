"""Finds the files of a text source and reads the documents out of them.

Every fault of a file is a ValueError that names the file and, where there is one, the line.
"""

import codecs
import hashlib
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from gzip import GzipFile
from pathlib import Path
from typing import IO, Any, cast

import attrs

from lf.data.cache import build_once, key_of, sha256_of
from lf.data.config import ChatData, TextData

_SETTLED_NS = 2_000_000_000
_SHOWN = 12


@attrs.frozen(kw_only=True)
class TextFile:
    """A file of a text source."""

    path: Path
    """Where it is."""
    name: str
    """What row ids call it: the path below the folder that was searched, or the file's own name."""
    listed: bool
    """Whether the config names the file itself, rather than a folder above it."""

    @property
    def kind(self) -> str:
        """How it is read: `.jsonl`, `.jsonl.gz`, `.parquet`, or empty for one document a file."""
        name = self.path.name.lower()
        return next((kind for kind in (".jsonl", ".jsonl.gz", ".parquet") if name.endswith(kind)), "")


@attrs.frozen(kw_only=True)
class Document:
    """A document as it stands in a file."""

    file: int
    """Index of its file."""
    line: int
    """Its line or record, counted from 1; 0 where the document is the file."""
    text: str
    """The text, never empty."""

    @property
    def hash(self) -> int:
        """64-bit hash of the text's UTF-8 bytes."""
        return int.from_bytes(hashlib.blake2b(self.text.encode(), digest_size=8).digest())


def find_files(cfg: TextData | ChatData, where: str) -> tuple[TextFile, ...]:
    """Returns the files of a source of text or chats, in the order of `cfg.paths` and sorted within each folder.

    Hidden files, hidden folders and `__pycache__` are skipped. Linked folders are entered, unless they lead back to a
    folder above. A file that two of the paths lead to is an error, as it would count twice. `where` names the config in
    errors.
    """
    files: list[TextFile] = []
    owners: dict[Path, int] = {}
    for at, text in enumerate(cfg.paths):
        path = Path(text).expanduser()
        if text and path.is_dir():
            found = _search(cfg, path, f"{where}.paths[{at}]")
        elif text and path.is_file():
            found = [TextFile(path=path, name=path.name, listed=True)]
        else:
            raise ValueError(f"{where}.paths[{at}] = {text!r} is neither a file nor a folder; give a path that exists")
        for file in found:
            if owners.setdefault(file.path.resolve(), at) != at:
                first = owners[file.path.resolve()]
                raise ValueError(
                    f"{where}.paths[{at}] = {text!r} holds {file.path}, which paths[{first}] = {cfg.paths[first]!r} "
                    "holds too; leave one out, or weigh the sources with a Mixture"
                )
        files += found
    return tuple(files)


def read_documents(files: Sequence[TextFile], field: str) -> Iterator[Document]:
    """Yields the documents of `files` in order; those whose text is empty are left out.

    A leading byte-order mark is dropped. In files of one document, CRLF becomes LF; the strings of `.jsonl` and
    `.parquet` stay as they are.
    """
    for at, file in enumerate(files):
        records = 0
        for line, text in _records(file, field):
            records += 1
            if text:
                yield Document(file=at, line=line, text=text)
        if not records:
            raise ValueError(f"{file.path}: the file holds no text; fill it or leave it out")


def file_digests(files: Sequence[TextFile], cache_dir: Path) -> list[str]:
    """Returns the sha256 of the bytes of each file.

    They are cached under the files' paths, sizes and times, unless a file changed so lately that one more change might
    leave its time as it is.
    """
    stats = [file.path.stat() for file in files]
    newest = max(max(stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats)
    if newest > time.time_ns() - _SETTLED_NS:
        return [sha256_of(file.path) for file in files]
    seen = [
        [str(file.path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
        for file, stat in zip(files, stats, strict=True)
    ]
    facts = build_once(
        cache_dir / "files" / key_of(seen), lambda _: {"sha256": [sha256_of(file.path) for file in files]}
    )
    return [str(digest) for digest in facts["sha256"]]


def _search(cfg: TextData | ChatData, folder: Path, where: str) -> list[TextFile]:
    files = []
    for name in _walk(folder, "", cfg.exclude, frozenset()):
        if not name.endswith(cfg.suffixes) or any(fnmatchcase(name, pattern) for pattern in cfg.exclude):
            continue
        path = folder / name
        if not path.exists():
            raise ValueError(f"{path}: the link leads nowhere; mend or remove it")
        if path.is_file():
            files.append(TextFile(path=path, name=name, listed=False))
    if not files:
        raise ValueError(
            f"{where} = {str(folder)!r} holds no file that ends in {', '.join(cfg.suffixes)} and is not left out by "
            f"exclude = {cfg.exclude}; set suffixes to what is there"
        )
    return files


def _walk(root: Path, below: str, exclude: tuple[str, ...], above: frozenset[tuple[int, int]]) -> Iterator[str]:
    stat = os.stat(root / below)
    identity = (stat.st_dev, stat.st_ino)
    # A pattern that ends in a star and matches `folder/` matches all that is below: there is no need to look.
    if identity in above or any(pattern.endswith("*") and fnmatchcase(below, pattern) for pattern in exclude if below):
        return
    for entry in sorted(os.listdir(root / below)):
        if entry.startswith(".") or entry == "__pycache__":
            continue
        name = below + entry
        if os.path.isdir(root / name):
            yield from _walk(root, name + "/", exclude, above | {identity})
        else:
            yield name


def _records(file: TextFile, field: str) -> Iterator[tuple[int, str]]:
    if file.kind == ".parquet":
        yield from _parquet(file.path, field)
    elif file.kind:
        yield from _json_lines(file, field)
    else:
        text = _decode(file.path.read_bytes(), f"{file.path}", 1).removeprefix("\ufeff").replace("\r\n", "\n")
        # Packages are full of empty files; one that was asked for by name is a mistake.
        if text or not file.listed:
            yield 0, text


def _json_lines(file: TextFile, field: str) -> Iterator[tuple[int, str]]:
    with file.path.open("rb") as raw:
        stream = cast(IO[bytes], GzipFile(fileobj=raw)) if file.kind == ".jsonl.gz" else raw
        try:
            for number, line in enumerate(stream, 1):
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if line.strip():
                    yield number, _json_text(line, file.path, number, field)
        except (EOFError, zlib.error, OSError) as error:
            raise ValueError(f"{file.path}: cannot be read as {file.kind}: {error}; fetch or write it again") from error


def _json_text(line: bytes, path: Path, number: int, field: str) -> str:
    where = f"{path}:{number}"
    decoded = _decode(line, str(path), number)
    try:
        value = json.loads(decoded)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON ({error.msg}, character {error.pos + 1}); every line must be one JSON object"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where}: JSON nested too deeply to be read; flatten the line") from error
    except ValueError as error:  # An integer of thousands of digits.
        raise ValueError(f"{where}: JSON that cannot be read ({error}); repair or drop the line") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON {type(value).__name__}; every line must be one JSON object")
    if field not in value:
        raise ValueError(f"{where}: no field {field!r}; the line has {_names(value)}: set the config's field to one")
    return checked_text(value[field], where, field)


def _parquet(path: Path, field: str) -> Iterator[tuple[int, str]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(f'{path}: reading parquet needs pyarrow; pip install "lf[data]"') from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            if field not in columns:
                raise ValueError(
                    f"{path}: no column {field!r}; it has {_names(columns)}: set the config's field to one"
                )
            for batch in file.iter_batches(batch_size=256, columns=[field]):
                for value in batch.column(0):
                    number += 1
                    yield number, checked_text(value.as_py(), f"{path}: record {number}", field)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: record {number}: byte {error.start} of {field!r} is not UTF-8") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: cannot be read as parquet: {error}; fetch or write it again") from error


def json_object(data: bytes, where: str) -> Mapping[str, Any]:
    """Returns the JSON object of a sample; raises ValueError with `where` for bytes that are none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); every sample must be one JSON object") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: a JSON {type(value).__name__}; every sample must be one JSON object")
    return value


def path_fault(path: str) -> str:
    """Returns why a text cannot be the path of a file on this system, with the cure; empty where it can."""
    try:
        Path(path).expanduser()
        os.fsencode(path)
    except RuntimeError as error:
        return f"is in the home of a user that is not there ({error}); write the whole path"
    except UnicodeEncodeError as error:
        return f"holds a character that no path can have ({error.reason}); correct the path"
    return "holds a null byte, which no path can; correct the path" if "\0" in path else ""


def checked_text(value: Any, where: str, field: str) -> str:
    """Returns `value`; raises ValueError with `where` if it is no string, or one that is not text."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} is of type {type(value).__name__}; it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: field {field!r} holds half a surrogate pair ({ascii(value[error.start])[1:-1]}, character "
            f"{error.start + 1}), which is not text; repair or drop the line"
        ) from error
    return value


def _decode(data: bytes, path: str, line: int) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        column = error.start - data.rfind(b"\n", 0, error.start)
        raise ValueError(
            f"{path}:{line}: byte {column} of the line, 0x{data[error.start]:02x}, is not UTF-8 ({error.reason}); "
            "convert the file to UTF-8"
        ) from error


def _names(names: Any) -> str:
    shown = [repr(name) for name in list(names)[:_SHOWN]]
    return ", ".join(shown + ["..."] * (len(names) > _SHOWN)) or "none"
