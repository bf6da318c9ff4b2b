"""The arrays in npz and HDF5 files of episodes, by name, each read when it is asked for."""

import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lf.data.regular import kind_fault

SUFFIXES = (".npz", ".h5", ".hdf5")
"""Files that hold episodes."""

Arrays = Mapping[str, Callable[[], Any]]
"""What reads each array of an episode, by its name in the file; to be called before the next episode is asked for."""

_BROKEN = (OSError, EOFError, KeyError, RuntimeError, ValueError, MemoryError, zipfile.BadZipFile, zlib.error)


def find_episodes(source: Path) -> list[Path]:
    """Returns the files of a folder that hold episodes, sorted by the numbers in their names; ValueError without."""

    def key(path: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]

    files = sorted((path for path in source.iterdir() if path.suffix in SUFFIXES), key=key) if source.is_dir() else []
    if not files:
        raise ValueError(f"{source} is no folder with files that end in {', '.join(SUFFIXES)}; give one")
    for path in files:
        fault = kind_fault(path)
        if fault:
            raise ValueError(f"{path}: {fault}")
    return files


def read_episodes(path: Path) -> Iterator[tuple[str, Arrays]]:
    """Yields the episodes of a file, each with what errors call it; raises ValueError for a file that is broken."""
    return _read_npz(path) if path.suffix == ".npz" else _read_hdf5(path)


def _read_npz(path: Path) -> Iterator[tuple[str, Arrays]]:
    with path.open("rb") as file:
        begin = file.read(8)
    if not zipfile.is_zipfile(path):
        raise ValueError(
            f"{path} is no npz file (it begins with {begin!r}); write it with numpy.savez, or fetch it again"
        )
    try:
        arrays = np.load(path, allow_pickle=False)
    except _BROKEN as error:
        raise ValueError(f"{path} cannot be read ({error}); write or fetch it again") from error

    def read(name: str) -> Any:
        try:
            return arrays[name]
        except _BROKEN as error:
            why = "it holds Python objects" if "Object arrays" in str(error) else str(error)
            raise ValueError(f"{path}: {name} cannot be read ({why}); save it as plain numbers, or drop it") from error

    with arrays:
        yield str(path), {name: _later(read, name) for name in arrays.files}


def _later(read: Callable[[str], Any], name: str) -> Callable[[], Any]:
    return lambda: read(name)


def _read_hdf5(path: Path) -> Iterator[tuple[str, Arrays]]:
    try:
        import h5py
    except ImportError as error:
        raise ValueError(f"{path} is read by h5py, which is missing ({error}); install lf[hdf5]") from error

    def fault(error: Exception) -> ValueError:
        return ValueError(f"{path} cannot be read as HDF5 ({error}); fetch it again")

    try:
        file = h5py.File(path, "r")
    except _BROKEN as error:
        raise fault(error) from error
    with file:
        try:
            root = file.get("data")
            groups = (
                {name: group for name, group in root.items() if isinstance(group, h5py.Group)}
                if _is_group(root)
                else {}
            )
            names = sorted(
                groups, key=lambda name: [int(part) if part.isdigit() else -1 for part in re.split(r"(\d+)", name)]
            )
            found = {name: _datasets(groups[name] if name else file, "", str(path)) for name in names or [""]}
        except _BROKEN as error:
            raise fault(error) from error

        def read(dataset: Any) -> Callable[[], Any]:
            def value() -> Any:
                try:
                    return dataset[()]
                except _BROKEN as error:
                    raise fault(error) from error

            return value

        for name, datasets in found.items():
            yield f"{path}{name and ':data/' + name}", {key: read(value) for key, value in datasets.items()}


def _is_group(value: Any) -> bool:
    import h5py

    return isinstance(value, h5py.Group)


def _datasets(group: Any, prefix: str, where: str) -> dict[str, Any]:
    """Returns the datasets below a group, by their names joined with dots."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        more = _datasets(value, f"{prefix}{name}.", where) if _is_group(value) else {f"{prefix}{name}": value}
        twice = sorted(found.keys() & more.keys())
        if twice:
            raise ValueError(f"{where} has two arrays that would be called {twice[0]}; rename one in the file")
        found |= more
    return found
