"""What `prepare.py` does to robot data: each command is a frozen record and a rule of `run`."""

import functools
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
import tyro

from lf.data.lerobot_audit import Audit, audit, to_json
from lf.data.lerobot_convert import convert_dataset, convert_files
from lf.data.lerobot_meta import read_meta
from lf.data.lerobot_sheet import draw_sheet
from lf.data.lerobot_write import Limits

_SHOWN = 100

Place = Annotated[Path, tyro.conf.Positional]


@attrs.frozen(kw_only=True)
class Check:
    """Audits a LeRobot dataset: what is missing, broken or not as it says, with episode, camera and file."""

    folder: Annotated[Place, tyro.conf.arg(metavar="DIR")]
    """The dataset."""
    episodes: tuple[int, ...] | None = None
    """Episodes to look at; all of them by default."""
    decode: Literal["ends", "all"] = "ends"
    """Frames of an episode to decode: its first and its last one, or all, which takes long and finds rotten bytes."""
    json: bool = False
    """Print one JSON object."""


@attrs.frozen(kw_only=True)
class Convert:
    """Writes a LeRobot v2.1 dataset, or a folder of npz or HDF5 episodes, as a LeRobot v3.0 dataset."""

    src: Annotated[Place, tyro.conf.arg(metavar="SRC")]
    """The dataset, or the folder of files, an episode each."""
    dst: Annotated[Place, tyro.conf.arg(metavar="DST")]
    """Folder to write, new or empty."""
    episodes: tuple[int, ...] | None = None
    """Episodes of the dataset to convert, numbered anew; all of them by default."""
    fps: float = 0.0
    """Frames a second of the files; a dataset has its own."""
    task: str = ""
    """Instruction of the files that have no text named task."""
    robot: str = ""
    """Kind of robot of the files."""
    rename: tuple[str, ...] = ()
    """OLD=NEW names of arrays in the files, such as observations.qpos=observation.state."""
    drop: tuple[str, ...] = ()
    """Arrays of the files to leave out."""
    data_mb: float = 100.0
    """Megabytes at which a file of rows is closed."""
    video_mb: float = 200.0
    """Megabytes at which a video is closed."""
    json: bool = False
    """Print one JSON object."""


@attrs.frozen(kw_only=True)
class ViewEpisodes:
    """Draws frames, states and actions of episodes as one PNG."""

    folder: Annotated[Place, tyro.conf.arg(metavar="DIR")]
    """The dataset."""
    out: Path = Path("episodes.png")
    """The PNG to write."""
    episodes: tuple[int, ...] | None = None
    """Episodes to draw; the first four by default."""
    cameras: tuple[str, ...] | None = None
    """Cameras to draw, by feature; all of them by default."""
    frames: int = 8
    """Frames of an episode."""
    json: bool = False
    """Print one JSON object."""


@attrs.frozen(kw_only=True)
class Report:
    """What a command has to say."""

    ok: bool
    """Whether all is well."""
    text: str
    """For a reader."""
    facts: dict[str, Any]
    """For a program."""


@functools.singledispatch
def run(command: Any) -> Report:
    """Does what a command says; raises ValueError or OSError where it cannot be done."""
    raise NotImplementedError(f"run has no rule for {type(command).__name__}")


@run.register
def _(command: Check) -> Report:
    found = audit(command.folder, command.episodes, command.decode)
    return Report(ok=found.ok, text=_lines(found), facts=to_json(found))


@run.register
def _(command: Convert) -> Report:
    limits = Limits(data_mb=command.data_mb, video_mb=command.video_mb)
    of_files = {name: getattr(command, name) for name in ("fps", "task", "robot", "rename", "drop")}
    if (command.src / "meta" / "info.json").exists():
        given = [name for name, value in of_files.items() if value]
        if given:
            raise ValueError(f"{command.src} is a dataset, which has its own; leave out --{', --'.join(given)}")
        convert_dataset(command.src, command.dst, command.episodes, limits)
    else:
        if command.episodes is not None:
            raise ValueError(
                f"{command.src} is a folder of files, each of whose episodes is taken; leave out --episodes "
                f"{' '.join(map(str, command.episodes))}, which chooses those of a v2.1 dataset"
            )
        if command.fps == 0:
            raise ValueError(f"{command.src} is a folder of files, which needs --fps above 0; give the frames a second")
        pairs = [pair.partition("=") for pair in command.rename]
        bad = [old for old, is_pair, new in pairs if not (old and is_pair and new)]
        if bad:
            raise ValueError(f"--rename {bad[0]!r} is not OLD=NEW; give two names")
        olds = [old for old, _, _ in pairs]
        twice = [old for old in olds if olds.count(old) > 1]
        if twice:
            raise ValueError(f"--rename names {twice[0]!r} twice; give it one new name")
        of_files["rename"] = {old: new for old, _, new in pairs}
        convert_files(command.src, command.dst, limits=limits, **of_files)
    meta = read_meta(command.dst)
    frames = sum(episode.length for episode in meta.episodes.values())
    facts = {"ok": True, "dataset": str(command.dst), "version": meta.version, "episodes": len(meta.episodes)}
    text = f"{command.dst} has {len(meta.episodes)} episodes with {frames} frames, as LeRobot {meta.version}"
    return Report(ok=True, text=text, facts={**facts, "frames": frames})


@run.register
def _(command: ViewEpisodes) -> Report:
    if command.frames < 1:
        raise ValueError(f"--frames is {command.frames}; draw at least 1")
    with tempfile.TemporaryDirectory() as cache:
        draw_sheet(
            command.folder,
            command.out,
            Path(cache),
            episodes=command.episodes,
            frames=command.frames,
            cameras=command.cameras,
        )
    return Report(ok=True, text=str(command.out), facts={"ok": True, "file": str(command.out)})


def _lines(found: Audit) -> str:
    order = {"fatal": 0, "wrong": 1, "note": 2}
    ranked = sorted(found.findings, key=lambda finding: order[finding.level])
    lines = [f"{finding.level:5}  {finding.show(found.dataset)}" for finding in ranked[:_SHOWN]]
    lines += [f"... and {len(ranked) - _SHOWN} more; --json has all"] if len(ranked) > _SHOWN else []
    counts = ", ".join(f"{sum(one.level == level for one in ranked)} {level}" for level in order)
    verdict = "all is well" if found.ok else "something is wrong"
    return "\n".join(
        [*lines, f"{found.dataset}: {found.episodes} episodes, {found.frames} rows read; {counts}; {verdict}"]
    )
