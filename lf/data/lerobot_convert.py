"""Makes LeRobot v3.0 datasets of v2.1 ones, and of episodes in npz and HDF5 files.

A file of episodes holds an array a feature, all of as many frames: numbers [N, D] or [N], and pictures uint8
[N, H, W, 3], which become cameras. Groups of HDF5 are joined with dots (`observations.qpos`). A file may hold several
episodes as groups `data/<name>`. A text named `task` is the instruction.

Shapes: N frames of an episode, D dims, H height, W width.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lf.data.lerobot_arrays import Arrays, find_episodes, read_episodes
from lf.data.lerobot_choose import choose_episodes
from lf.data.lerobot_files import read_table
from lf.data.lerobot_meta import V21, Meta, Recorded, episode_stats, read_meta
from lf.data.lerobot_record import Take, write_dataset
from lf.data.lerobot_scan import INDEXES, Scan, check_camera, scan
from lf.data.lerobot_write import DEFAULT_LIMITS, Limits, Part, assemble


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
        told = tuple(meta.tasks[int(number)] for number in found.columns["task_index"][:, 0])
        yield Part(
            length=episode.length,
            tasks=episode.tasks or tuple(dict.fromkeys(told)),
            table=table.select([name for name in table.column_names if name not in INDEXES]).replace_schema_metadata(
                None
            ),
            task_of_row=told,
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
    without one. Raises ValueError, with the file, for what cannot be an episode, for a name that no file has, and for
    two arrays of one name.
    """

    new, files = rename or {}, find_episodes(source)
    both = sorted(set(new).intersection(drop))
    if both:
        raise ValueError(f"rename and drop both name {both[0]!r}; name it once")
    known = {name for path in files for _, arrays in read_episodes(path) for name in arrays}
    for field, wanted in (("rename", sorted(new)), ("drop", sorted(drop))):
        lost = [name for name in wanted if name not in known]
        if lost:
            raise ValueError(
                f"{field}: no file of {source} has an array {lost[0]!r}; they have {', '.join(sorted(known))}"
            )

    def takes() -> Iterator[Take]:
        for path in files:
            for where, arrays in read_episodes(path):
                yield _take(where, arrays, task, new, drop)

    write_dataset(root, takes(), fps=fps, robot=robot, limits=limits)


def _take(where: str, arrays: Arrays, task: str, rename: Mapping[str, str], drop: Sequence[str]) -> Take:
    values: dict[str, NDArray[Any]] = {}
    pictures: dict[str, NDArray[np.uint8]] = {}
    old_of: dict[str, str] = {}
    for old, read in arrays.items():
        if old in drop:
            continue
        name = rename.get(old, old)
        if name in old_of:
            raise ValueError(f"{where}: {old_of[name]} and {old} would both be {name}; drop one, or rename it")
        old_of[name] = old
        array = np.asarray(read())
        if name == "task" and array.ndim == 0:
            task = _text(array.item(), where)
        elif array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] == 3:
            pictures[name] = array
        elif array.dtype.kind in "fiub" and array.ndim in (1, 2) and not (array.dtype == np.uint8 and array.ndim == 2):
            values[name] = array
        else:
            raise ValueError(
                f"{where}: {old} is {array.dtype} {array.shape}; features are numbers [N, D] and pictures uint8 "
                "[N, H, W, 3], so drop or decode it"
            )
    lengths = {name: len(array) for name, array in {**values, **pictures}.items()}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"{where}: its arrays have {lengths or 'no'} frames; they must have as many, so drop the others"
        )
    if not task:
        raise ValueError(f"{where} has no text named task; give the instruction with --task")
    return Take(values=values, pictures=pictures, task=task, source=where)


def _text(value: Any, where: str) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: task is no UTF-8 text ({error}); write it anew, or drop it and give --task"
        ) from error
