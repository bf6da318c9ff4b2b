"""Makes LeRobot v3.0 datasets of v2.1 ones, and of episodes in npz and HDF5 files.

A file of episodes holds an array a feature, all of as many frames: numbers [N, D] or [N], and pictures uint8
[N, H, W, 3], which become cameras. Groups of HDF5 are joined with dots (`observations.qpos`). A file may hold several
episodes as groups `data/<name>`. A text named `task` is the instruction.

Shapes: N frames of an episode, D dims, H height, W width.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lf.data.lerobot_choose import choose_episodes
from lf.data.lerobot_files import read_table
from lf.data.lerobot_meta import V21, Meta, Recorded, episode_stats, read_meta
from lf.data.lerobot_record import Take, write_dataset
from lf.data.lerobot_scan import INDEXES, Scan, check_camera, scan
from lf.data.lerobot_write import DEFAULT_LIMITS, Limits, Part, assemble

SUFFIXES = (".npz", ".h5", ".hdf5")
"""Files that hold episodes."""


def convert_dataset(
    source: Path, root: Path, episodes: Sequence[int] | None = None, limits: Limits = DEFAULT_LIMITS
) -> None:
    """Writes a v2.1 dataset, or some of its episodes numbered anew, as v3.0.

    Videos are joined without encoding them again, so every frame keeps its bits. Raises ValueError for what the audit
    calls fatal, and for a dataset that is v3.0 already.
    """
    meta = read_meta(source)
    if meta.version != V21:
        raise ValueError(f"{source} is {meta.version} already; only {V21} is converted")
    chosen = choose_episodes(meta, episodes, "--episodes")
    unread = [feature.key for feature in meta.cameras if check_camera(feature)]
    if unread:
        raise ValueError(f"{source}: lf does not read the cameras {unread}; take them out of info.json first")
    features = {
        key: {name: value for name, value in stated.items() if name != "fps"}
        for key, stated in meta.info["features"].items()
    }
    assemble(root, lambda _: _parts(meta, chosen), features, fps=meta.fps, robot=meta.robot, limits=limits)


def _parts(meta: Meta, episodes: Sequence[int]) -> Iterator[Part]:
    stats = episode_stats(meta)
    cameras = tuple(feature.key for feature in meta.cameras)
    numbers = tuple(feature.key for feature in meta.features.values() if feature.is_number)
    for found in scan(Scan(meta=meta, keys=numbers, cameras=cameras), episodes):
        fatal = [finding.show(str(meta.root)) for finding in found.findings if finding.level == "fatal"]
        if fatal:
            raise ValueError("\n".join(fatal))
        episode = found.episode
        table = read_table(meta.root / episode.file)
        recorded: Recorded = stats.get(episode.index, {})
        yield Part(
            length=episode.length,
            tasks=episode.tasks,
            table=table.select([name for name in table.column_names if name not in INDEXES]).replace_schema_metadata(
                None
            ),
            task_of_row=tuple(meta.tasks[int(number)] for number in found.columns["task_index"][:, 0]),
            times=found.columns["timestamp"][:, 0],
            videos={key: meta.root / clip.file for key, clip in episode.clips.items()},
            stats={key: recorded[key] for key in cameras if key in recorded},
        )


def convert_files(
    source: Path,
    root: Path,
    *,
    fps: float,
    robot: str = "",
    task: str = "",
    rename: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> None:
    """Writes the episodes in the npz and HDF5 files of a folder, sorted by the numbers in their names, as v3.0.

    `rename` maps names in the files to those of features, `drop` leaves names out, `task` is the instruction of files
    without one. Raises ValueError, with the file, for what cannot be an episode.
    """

    def key(path: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name)]

    files = sorted((path for path in source.iterdir() if path.suffix in SUFFIXES), key=key) if source.is_dir() else []
    if not files:
        raise ValueError(f"{source} is no folder with files that end in {', '.join(SUFFIXES)}; give one")

    def takes() -> Iterator[Take]:
        for path in files:
            for name, arrays in _read_npz(path) if path.suffix == ".npz" else _read_hdf5(path):
                yield _take(name, arrays, task, rename or {}, drop)

    write_dataset(root, takes(), fps=fps, robot=robot, limits=limits)


def _take(where: str, arrays: Mapping[str, Any], task: str, rename: Mapping[str, str], drop: Sequence[str]) -> Take:
    values: dict[str, NDArray[Any]] = {}
    pictures: dict[str, NDArray[np.uint8]] = {}
    for name, value in arrays.items():
        if name in drop:
            continue
        array = np.asarray(value)
        if name == "task" and array.ndim == 0:
            text = array.item()
            task = text.decode() if isinstance(text, bytes) else str(text)
        elif array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] == 3:
            pictures[rename.get(name, name)] = array
        elif array.dtype.kind in "fiub" and array.ndim in (1, 2) and not (array.dtype == np.uint8 and array.ndim == 2):
            values[rename.get(name, name)] = array
        else:
            raise ValueError(
                f"{where}: {name} is {array.dtype} {array.shape}; features are numbers [N, D] and pictures uint8 "
                "[N, H, W, 3], so drop or decode it"
            )
    lengths = {name: len(array) for name, array in {**values, **pictures}.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"{where}: its arrays have {lengths or 'no'} frames; they must have as many, so drop the others"
        )
    if not task:
        raise ValueError(f"{where} has no text named task; give the instruction with --task")
    return Take(values=values, pictures=pictures, task=task)


def _read_npz(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read ({error}); give an npz file of plain arrays") from error
    yield str(path), arrays


def _read_hdf5(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import h5py
    except ImportError as error:
        raise ValueError(f"{path} is read by h5py, which is missing ({error}); install lf[hdf5]") from error
    try:
        with h5py.File(path, "r") as file:
            root = file.get("data")
            groups = (
                {name: group for name, group in root.items() if isinstance(group, h5py.Group)}
                if isinstance(root, h5py.Group)
                else {}
            )
            names = sorted(
                groups, key=lambda name: [int(part) if part.isdigit() else -1 for part in re.split(r"(\d+)", name)]
            )
            for name in names or [""]:
                yield f"{path}{name and ':data/' + name}", _datasets(groups[name] if name else file, "", h5py)
    except OSError as error:
        raise ValueError(f"{path} cannot be read as HDF5 ({error}); fetch it again") from error


def _datasets(group: Any, prefix: str, h5py: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, h5py.Group):
            found |= _datasets(value, f"{prefix}{name}.", h5py)
        else:
            found[f"{prefix}{name}"] = value[()]
    return found
