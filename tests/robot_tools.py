"""Small LeRobot datasets in both formats, written here from the format's description and not by lf's own writer.

Every frame of a camera is one grey level, which says which frame of which camera it is.
"""

import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import EpsImagePlugin, Image

FPS = 10
LENGTHS = (5, 1, 7, 4)
TASKS = ("lift the cup", "push the block")
CAMERAS = ("observation.images.front", "observation.images.wrist")
SIZE = (48, 64)


def level(camera: int, number: int) -> int:
    """Grey level of frame `number`, counted over the dataset; neighbours are far apart."""
    return 20 + (number * 67 + camera * 31) % 200


def frame(camera: int, number: int) -> np.ndarray[Any, Any]:
    return np.full((*SIZE, 3), level(camera, number), np.uint8)


def encode(path: Path, frames: Iterable[np.ndarray[Any, Any]], fps: int = FPS, **options: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=fps, options={"crf": "10", "g": "4", **options})
        stream.height, stream.width, stream.pix_fmt = *SIZE, "yuv420p"
        for pixels in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    return path


@attrs.frozen(kw_only=True, eq=False)
class Toy:
    """What a dataset holds, before any format."""

    lengths: tuple[int, ...] = LENGTHS
    fps: int = FPS
    kind: str = "video"
    cameras: tuple[str, ...] = CAMERAS
    state_dim: int = 3
    action_dim: int = 2
    seed: int = 0

    @property
    def starts(self) -> list[int]:
        return [0, *np.cumsum(self.lengths).tolist()]

    @property
    def states(self) -> np.ndarray[Any, Any]:
        return self._draw(self.state_dim, 0)

    @property
    def actions(self) -> np.ndarray[Any, Any]:
        return self._draw(self.action_dim, 1)

    def _draw(self, dims: int, part: int) -> np.ndarray[Any, Any]:
        rng = np.random.default_rng([self.seed, part])
        return rng.standard_normal((sum(self.lengths), dims)).astype(np.float32)

    def task(self, episode: int) -> int:
        return episode % len(TASKS)

    def columns(self, episode: int) -> dict[str, np.ndarray[Any, Any]]:
        start, length = self.starts[episode], self.lengths[episode]
        steps = np.arange(length)
        return {
            "observation.state": self.states[start : start + length],
            "action": self.actions[start : start + length],
            "timestamp": (steps / self.fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(length, episode),
            "index": start + steps,
            "task_index": np.full(length, self.task(episode)),
        }

    def table(self, episode: int) -> pa.Table:
        columns: dict[str, Any] = {}
        for key, values in self.columns(episode).items():
            flat = pa.array(values.reshape(-1))
            columns[key] = flat if values.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        if self.kind == "image":
            start, length = self.starts[episode], self.lengths[episode]
            for number, key in enumerate(self.cameras):
                pictures = [{"bytes": png(frame(number, start + i)), "path": f"{i}.png"} for i in range(length)]
                columns[key] = pa.array(pictures, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        return pa.table(columns)

    def features(self) -> dict[str, Any]:
        index = {key: {"dtype": "int64", "shape": [1], "names": None} for key in self.columns(0) if "index" in key}
        camera = {"dtype": self.kind, "shape": [*SIZE, 3], "names": ["height", "width", "channel"]}
        return {
            "observation.state": {
                "dtype": "float32",
                "shape": [self.state_dim],
                "names": [list("abcdefgh"[: self.state_dim])],
            },
            "action": {
                "dtype": "float32",
                "shape": [self.action_dim],
                "names": {"motors": ["x", "y", "z"][: self.action_dim]},
            },
            **dict.fromkeys(self.cameras, camera),
            "timestamp": {"dtype": "float32", "shape": [1], "names": None},
            **index,
        }

    def info(self, version: str, data: str, video: str, **more: Any) -> dict[str, Any]:
        counts = {"total_episodes": len(self.lengths), "total_frames": sum(self.lengths), "total_tasks": len(TASKS)}
        stated = {"codebase_version": version, "robot_type": "toy", "fps": self.fps, "features": self.features()}
        return {**stated, **counts, "chunks_size": 1000, "data_path": data, "video_path": video, **more}

    def stats(self, episodes: Sequence[int]) -> dict[str, Any]:
        parts = [self.columns(episode) for episode in episodes]
        whole = {key: np.concatenate([part[key] for part in parts]).astype(np.float64) for key in parts[0]}
        found = {}
        for key, values in whole.items():
            wide = values.reshape(len(values), -1)
            one = {"min": wide.min(0), "max": wide.max(0), "mean": wide.mean(0), "std": wide.std(0)}
            found[key] = {**{name: value.tolist() for name, value in one.items()}, "count": [len(wide)]}
        return found


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 24 16\n%%EndComments\nshowpage\n%%EOF\n"
"""A picture that Pillow hands to the program Ghostscript."""


def watch_ghostscript(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a `gs` on the path that does nothing but make the file which is returned."""
    called, program = folder / "called", folder / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n: > '{called}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    # Pillow looks for it once.
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return called


def png(pixels: np.ndarray[Any, Any], mode: str = "") -> bytes:
    out, image = io.BytesIO(), Image.fromarray(pixels)
    (image.convert(mode) if mode else image).save(out, "PNG")
    return out.getvalue()


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_table(path: Path, table: pa.Table) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    return path


def write_v21(root: Path, toy: Toy = Toy()) -> Path:
    """An episode a file; the lines of the metadata stand in no order."""
    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    write_json(root / "meta/info.json", toy.info("v2.1", data, video, total_chunks=1, total_videos=8))
    tasks = [{"task_index": index, "task": task} for index, task in enumerate(TASKS)]
    write_lines(root / "meta/tasks.jsonl", reversed(tasks))
    numbers = list(range(len(toy.lengths)))
    episodes = [{"episode_index": n, "tasks": [TASKS[toy.task(n)]], "length": toy.lengths[n]} for n in numbers]
    write_lines(root / "meta/episodes.jsonl", reversed(episodes))
    write_lines(root / "meta/episodes_stats.jsonl", [{"episode_index": n, "stats": toy.stats([n])} for n in numbers])
    for n in numbers:
        at = {"episode_chunk": 0, "episode_index": n}
        write_table(root / data.format(**at), toy.table(n))
        if toy.kind == "video":
            for number, key in enumerate(toy.cameras):
                frames = [frame(number, toy.starts[n] + i) for i in range(toy.lengths[n])]
                encode(root / video.format(**at, video_key=key), frames, toy.fps)
    return root


def write_v30(root: Path, toy: Toy = Toy(), per_data: int = 2, per_video: int = 3) -> Path:
    """Several episodes a file, fewer in those of rows than in videos, so that their numbers differ."""
    data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    write_json(root / "meta/info.json", toy.info("v3.0", data, video))
    write_json(root / "meta/stats.json", toy.stats(range(len(toy.lengths))))
    tasks = pa.table({"task_index": list(range(len(TASKS))), "__index_level_0__": list(TASKS)})
    write_table(root / "meta/tasks.parquet", tasks)
    rows = []
    for n, length in enumerate(toy.lengths):
        row: dict[str, Any] = {"episode_index": n, "tasks": [TASKS[toy.task(n)]], "length": length}
        row |= {"data/chunk_index": 0, "data/file_index": n // per_data}
        row |= {"dataset_from_index": toy.starts[n], "dataset_to_index": toy.starts[n] + length}
        start = (toy.starts[n] - toy.starts[n // per_video * per_video]) / toy.fps
        for key in toy.cameras if toy.kind == "video" else ():
            row |= {f"videos/{key}/chunk_index": 0, f"videos/{key}/file_index": n // per_video}
            row |= {f"videos/{key}/from_timestamp": start, f"videos/{key}/to_timestamp": start + length / toy.fps}
        row |= {f"stats/{key}/{name}": value for key, one in toy.stats([n]).items() for name, value in one.items()}
        rows.append(row)
    write_table(root / "meta/episodes/chunk-000/file-000.parquet", pa.Table.from_pylist(rows))
    numbers = range(len(toy.lengths))
    for at in range(0, len(toy.lengths), per_data):
        tables = [toy.table(n) for n in numbers[at : at + per_data]]
        write_table(root / data.format(chunk_index=0, file_index=at // per_data), pa.concat_tables(tables))
    for at in range(0, len(toy.lengths), per_video) if toy.kind == "video" else ():
        first, last = toy.starts[at], toy.starts[min(at + per_video, len(toy.lengths))]
        for number, key in enumerate(toy.cameras):
            frames = [frame(number, i) for i in range(first, last)]
            encode(root / video.format(video_key=key, chunk_index=0, file_index=at // per_video), frames, toy.fps)
    return root


def change_json(path: Path, **fields: Any) -> None:
    write_json(path, {**json.loads(path.read_text()), **fields})


def change_column(path: Path, key: str, change: Any) -> None:
    """Writes a column of a Parquet file anew, as `change(values [N] or [N, D])` returns it."""
    table = pq.read_table(path)
    column = table[key].combine_chunks()
    nested = pa.types.is_nested(column.type)
    values = np.asarray(column.flatten() if nested else column).copy().reshape(len(column), -1)
    made = np.asarray(change(values if nested else values[:, 0]))
    flat = pa.array(made.reshape(-1))
    array = pa.FixedSizeListArray.from_arrays(flat, made.shape[1]) if made.ndim == 2 else flat
    pq.write_table(table.set_column(table.column_names.index(key), key, array), path)


def change_episode(root: Path, key: str, values: list[Any]) -> None:
    """Writes a column of a v3.0 table of episodes anew."""
    path = root / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.column_names.index(key), key, pa.array(values)), path)
