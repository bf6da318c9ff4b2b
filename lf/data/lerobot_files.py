"""The files of a LeRobot dataset: JSON, lines of JSON, Parquet, and the path templates that lead to them.

What a dataset says is not to be trusted: nothing here waits, grows or leaves the dataset because of what a file holds,
and every fault is a ValueError that names the file.
"""

import functools
import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from lf.data.regular import kind_fault

_MOST = 1 << 48
_DIGITS = 20
_SHOWN = 100


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; raises ValueError with the file."""
    _check_kind(file)
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; give the folder of a LeRobot dataset, whole") from None
    except RecursionError:
        raise ValueError(f"{file} cannot be read as JSON (it is nested too deeply); fetch it again") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, and must hold an object; fetch it again")
    return value


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Returns the objects in a file of JSON lines; raises ValueError with file and line."""
    _check_kind(file)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({error}); fetch it") from error
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                found.append(dict(json.loads(line)))
            except (ValueError, TypeError, RecursionError) as error:
                raise ValueError(f"{file}:{number} is not a JSON object ({error}); fetch the file again") from error
    return found


def read_table(file: Path, columns: Sequence[str] | None = None) -> Any:
    """Returns a pyarrow table of a Parquet file; raises ValueError with the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check_kind(file)
    try:
        with pq.ParquetFile(file) as parquet:
            missing = set(columns or ()).difference(parquet.schema_arrow.names)
            if missing:
                raise ValueError(f"it has no column {', '.join(sorted(missing))}")
            return parquet.read(columns=None if columns is None else list(columns))
    except FileNotFoundError:
        raise ValueError(f"{file} does not exist; fetch it, or leave out the episodes that need it") from None
    except (pa.ArrowException, ValueError, OSError) as error:
        raise ValueError(f"{file} cannot be read as Parquet ({error}); fetch it again") from error


def column_names(file: Path) -> list[str]:
    """Returns the names of a Parquet file's columns; raises ValueError with the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    _check_kind(file)
    try:
        return list(pq.read_schema(file).names)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file} cannot be read as Parquet ({error}); fetch it again") from error


def _check_kind(file: Path) -> None:
    fault = kind_fault(file)
    if fault:
        raise ValueError(f"{file}: {fault}")


def numbered(root: Path, pattern: str) -> list[Path]:
    """Returns the files that match a glob pattern below a folder, sorted by the numbers in their names."""

    def key(path: Path) -> tuple[tuple[int, str], ...]:
        parts = re.split(r"(\d+)", path.relative_to(root).as_posix())
        return tuple((int(part), "") if part.isdigit() else (-1, part) for part in parts)

    return sorted(root.glob(pattern), key=key)


def get(row: Mapping[str, Any], key: str, file: Path) -> Any:
    """Returns a value of a row; raises ValueError with the file where there is none."""
    if key not in row or row[key] is None:
        raise ValueError(f"{file}: {_row(row)} has no {key} (it has {', '.join(row)}); fetch the file again")
    return row[key]


def get_int(row: Mapping[str, Any], key: str, file: Path) -> int:
    """Returns a whole number of a row; raises ValueError with the file for anything else."""
    value = get(row, key, file)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST or int(value) != value:
        raise ValueError(
            f"{file}: {key} of {_row(row)} is {brief(value)}, and must be a whole number below 2**48; mend it"
        )
    return int(value)


def get_float(row: Mapping[str, Any], key: str, file: Path) -> float:
    """Returns a finite number of a row; raises ValueError with the file for anything else."""
    value = get(row, key, file)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _MOST:
        raise ValueError(f"{file}: {key} of {_row(row)} is {brief(value)}, and must be a finite number; mend it")
    return float(value)


def get_texts(row: Mapping[str, Any], key: str, file: Path) -> tuple[str, ...]:
    """Returns the texts of a row, none where it has none; raises ValueError with the file for anything else."""
    value = row.get(key) or ()
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"{file}: {key} of {_row(row)} is {brief(value)}, and must be a list of texts; mend it")
    return tuple(value)


def _row(row: Mapping[str, Any]) -> str:
    return f"the row of episode {brief(row['episode_index'])}" if "episode_index" in row else "a row"


def brief(value: Any) -> str:
    """Returns how a value is written, cut where it is long."""
    text = value[:_SHOWN] if isinstance(value, (str, list, tuple)) else value
    text = repr(text)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def place(template: Any, file: Path, **fields: int | str) -> str:
    """Returns the path, below the dataset, that a template of info.json gives; raises ValueError if it leads out.

    A field is plain, or a number with at most 20 digits: `{video_key}`, `{chunk_index:03d}`.
    """
    try:
        path = "".join(text + (format(fields[name], spec) if name else "") for text, name, spec in _parse(template))
    except (KeyError, ValueError, TypeError) as error:
        known = ", ".join(f"{{{name}}}" for name in fields)
        raise ValueError(
            f"{file}: the path template {brief(template)} is malformed ({error!r}); its fields may be {known}, and "
            "numbers with their digits, as in {episode_index:06d}; mend it"
        ) from error
    return inside(path, f"{file}: the path template {brief(template)}, with {fields},")


@functools.lru_cache(maxsize=8)
def _parse(template: Any) -> tuple[tuple[str, str, str], ...]:
    """Returns the texts of a template, each with the field that follows it and its format; ValueError for more."""
    found = []
    for text, name, spec, conversion in string.Formatter().parse(template):
        digits = re.fullmatch(r"(?:0?([0-9]{1,2}))?d", spec) if spec else None
        if conversion or (spec and (digits is None or int(digits[1] or 0) > _DIGITS)) or name == "":
            raise ValueError(f"the field {name!r} with {'!' + conversion if conversion else ':' + brief(spec)}")
        found.append((text, name or "", spec or ""))
    return tuple(found)


def inside(path: str, where: str) -> str:
    """Returns a path below the dataset; raises ValueError with `where` for one that leads outside it."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or "\0" in path:
        raise ValueError(f"{where} leads to {path!r}, outside the dataset; mend it")
    return str(parts)
