"""A contact sheet of LeRobot episodes: frames of every camera over time, and below them states and actions.

Shapes: N frames of an episode, D dims.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lf.data.config import Camera, LeRobotData, Normalise, Signal
from lf.data.lerobot import LeRobotRows, open_lerobot
from lf.data.lerobot_choose import choose_episodes
from lf.data.lerobot_meta import Meta, read_meta
from lf.data.lerobot_scan import INDEXES, check_camera

_NAMES_SHOWN = 12


def draw_sheet(
    root: Path,
    out: Path,
    cache_dir: Path,
    *,
    episodes: Sequence[int] | None = None,
    frames: int = 8,
    cameras: Sequence[str] | None = None,
) -> None:
    """Writes a PNG with `frames` evenly spread frames of each episode and curves of all its numbers.

    Without `episodes`, the first four that are listed. Raises ValueError as opening the dataset does.
    """
    meta = read_meta(root)
    chosen = choose_episodes(meta, tuple(meta.episodes)[:4] if episodes is None else episodes, "--episodes")
    rows = _open(meta, chosen, cameras, cache_dir)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(f"contact sheets need matplotlib ({error}); install lf[plot]") from error
    strips, curves = len(rows.cameras), len(rows.cfg.extra)
    heights = ([1.3] * strips + [1.1] * curves) * len(chosen)
    figure = Figure(figsize=(1.7 * frames + 1, sum(heights) + 0.5 * len(chosen)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(heights), frames, height_ratios=heights)
    for number, episode in enumerate(rows.episodes):
        at = number * (strips + curves)
        _draw_frames(figure, grid, rows, number, at, frames)
        for place, signal in enumerate(rows.cfg.extra):
            first = not strips and not place
            title = f"episode {episode}: {_task(rows, number)}" if first else ""
            _draw_curve(figure.add_subplot(grid[at + strips + place, :]), meta, rows, number, signal.key, title)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=80)


def _open(meta: Meta, episodes: Sequence[int], cameras: Sequence[str] | None, cache_dir: Path) -> LeRobotRows:
    every = [feature.key for feature in meta.cameras if not check_camera(feature)]
    shown = every if cameras is None else cameras
    numbers = [feature.key for feature in meta.features.values() if feature.is_number and feature.key not in INDEXES]
    cfg = LeRobotData(
        path=str(meta.root),
        episodes=tuple(episodes),
        cameras=tuple(Camera(name=key, key=key) for key in shown),
        state=(),
        actions=(),
        extra=tuple(Signal(name=f"value {key}", key=key) for key in numbers),
        normalise=Normalise(state="none", actions="none"),
    )
    return open_lerobot(cfg, seed=0, cache_dir=cache_dir, where="--cameras")


def _task(rows: LeRobotRows, number: int) -> str:
    return rows.tasks[int(rows.columns["task_index"][int(rows.starts[number]), 0])]


def _draw_frames(figure: Any, grid: Any, rows: LeRobotRows, number: int, at: int, frames: int) -> None:
    start, end = int(rows.starts[number]), int(rows.starts[number + 1])
    for place, row in enumerate(np.linspace(start, end - 1, frames).round().astype(int).tolist()):
        if not rows.cameras:
            return
        item = rows.frame_row(row)
        for strip, camera in enumerate(rows.cameras):
            axes = figure.add_subplot(grid[at + strip, place])
            axes.imshow(np.moveaxis(item["images"][camera.name], 0, -1))
            axes.set_xticks([])
            axes.set_yticks([])
            if not place:
                axes.set_ylabel(camera.name.rsplit(".", 1)[-1], fontsize=7)
            head = "" if place else f"episode {item['episode']}: {item['task']}\n"
            if not strip:
                axes.set_title(f"{head}{item['timestamp']:.2f} s", fontsize=7, loc="left")


def _draw_curve(axes: Any, meta: Meta, rows: LeRobotRows, number: int, key: str, title: str) -> None:
    span = slice(int(rows.starts[number]), int(rows.starts[number + 1]))
    times, values = rows.columns["timestamp"][span, 0], rows.columns[key][span]
    names = meta.features[key].names or tuple(str(dim) for dim in range(values.shape[1]))
    for dim in range(values.shape[1]):
        axes.plot(times, values[:, dim], linewidth=0.8, label=names[dim] if dim < _NAMES_SHOWN else None)
    axes.set_ylabel(key.rsplit(".", 1)[-1], fontsize=7)
    axes.tick_params(labelsize=6)
    axes.margins(x=0)
    axes.legend(fontsize=5, ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5))
    if title:
        axes.set_title(title, fontsize=8, loc="left")
