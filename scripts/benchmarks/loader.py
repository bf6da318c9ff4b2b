"""The reading of robot data beside a plain PyAV loop over the same frames, and how much of a run waits for data."""

import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

import lf
from lf.data.lerobot import LeRobotRows
from lf.data.lerobot_record import Take, write_dataset
from lf.data.loader import Share, by_turns, prefetch, read_rows, step_rows
from lf.data.source import DataCtx, open_data
from lf.data.video import Pixels
from scripts.benchmarks.ratios import DisagreementError, Ratio, Step, measure, summarise

CAMERAS = ("observation.images.front", "observation.images.wrist")
FPS = 30


@attrs.frozen(kw_only=True)
class LoaderBench:
    """Reads rows of two cameras in a random order, in lf and in a plain PyAV loop, in turn, and compares their speed.

    The plain loop keeps its files open, seeks to the key frame before each frame and decodes from there. Both give the
    same pixels; lf's rows hold states, actions and tasks too. Exit code 1 when a pixel differs.
    """

    key_frames: tuple[int, ...] = (2, 30)
    """Frames from one key frame of the videos to the next: few in datasets made for training, more in others."""
    size: tuple[int, int] = (240, 320)
    """Height and width of a frame."""
    episodes: int = 4
    """Episodes of the dataset."""
    length: int = 90
    """Frames of an episode."""
    rows: int = 16
    """Rows of a batch."""
    pairs: int = 5
    """Timed pairs of batches."""
    json: bool = False
    """Print a JSON line a case in place of the table."""


def pictures(args: LoaderBench, seed: int) -> Iterator[Pixels]:
    """Yields the frames of an episode: a pattern of blocks that moves, with some noise."""
    rng = np.random.default_rng(seed)
    height, width = args.size
    blocks = rng.integers(0, 236, (-(-height // 16), -(-width // 16), 3), np.uint8)
    pattern = np.kron(blocks, np.ones((16, 16, 1), np.uint8))[:height, :width]
    for at in range(args.length):
        noise = rng.integers(0, 20, (height, width, 1), np.uint8)
        yield np.roll(pattern, (at, 2 * at), axis=(0, 1)) + noise


def make_dataset(root: Path, args: LoaderBench, gap: int) -> Path:
    """Writes a dataset, and its videos again with another distance of key frames."""

    def takes() -> Iterator[Take]:
        for number in range(args.episodes):
            values = np.random.default_rng(number).standard_normal((args.length, 7)).astype(np.float32)
            seen = {key: pictures(args, 2 * number + at) for at, key in enumerate(CAMERAS)}
            yield Take(values={"observation.state": values, "action": values}, pictures=seen, task="move")

    write_dataset(root, takes(), fps=FPS)
    for path in root.rglob("*.mp4"):
        encode_again(path, gap)
    return root


def encode_again(path: Path, gap: int) -> None:
    """Encodes a video again, frame by frame at the same times, with a key frame every `gap` frames."""
    import av

    old = path.rename(path.with_suffix(".old"))
    with av.open(str(old)) as source, av.open(str(path), "w") as file:
        given = source.streams.video[0]
        stream = file.add_stream("libx264", rate=FPS, options={"crf": "23", "g": str(gap), "bf": "0"})
        stream.height, stream.width, stream.pix_fmt = given.height, given.width, "yuv420p"
        for number, frame in enumerate(source.decode(given)):
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    old.unlink()


def open_rows(root: Path, cache: Path) -> LeRobotRows:
    """Returns the rows of the dataset."""
    data = lf.LeRobotData(path=str(root), cameras=tuple(lf.Camera(name=key, key=key) for key in CAMERAS))
    rows = open_data(data, DataCtx(seed=0, cache_dir=cache))
    assert isinstance(rows, LeRobotRows)
    return rows


def plain_frames(rows: LeRobotRows, numbers: Sequence[int], files: dict[Path, Any]) -> list[Pixels]:
    """Returns the frames [H, W, 3] of both cameras of some rows, decoded by PyAV alone."""
    import av

    found = []
    for number in numbers:
        row = int(rows.order(0)[number])
        at = int(np.searchsorted(rows.starts, row, side="right")) - 1
        for key in CAMERAS:
            path, tick = rows.pictures[key].files[at], int(rows.pictures[key].ticks[row])
            file = files.setdefault(path, None) or av.open(str(path))
            files[path] = file
            stream = file.streams.video[0]
            file.seek(tick, stream=stream, backward=True)
            frame = next(frame for frame in file.decode(stream) if frame.pts == tick)
            found.append(frame.to_ndarray(format="rgb24"))
    return found


def sides(rows: LeRobotRows) -> tuple[Step, Step]:
    """Returns what reads a batch of rows on either side; it gives the sum of some pixels, and how many frames."""
    files: dict[Path, Any] = {}

    def ours(batch: Any) -> tuple[float, float]:
        frames = [row["images"][key] for row in read_rows(rows, batch["rows"]) for key in CAMERAS]
        return float(sum(int(frame[:, ::8, ::8].sum()) for frame in frames)), float(len(frames))

    def theirs(batch: Any) -> tuple[float, float]:
        frames = plain_frames(rows, batch["rows"], files)
        return float(sum(int(frame[::8, ::8].sum()) for frame in frames)), float(len(frames))

    return ours, theirs


def compare(args: LoaderBench, folder: Path) -> Iterator[tuple[LeRobotRows, Ratio]]:
    """Gives the rows and the ratio of each case as it is measured; speeds are frames a second."""
    for gap in args.key_frames:
        rows = open_rows(make_dataset(folder / f"gap_{gap}", args, gap), folder / "cache")
        numbers = np.arange((1 + args.pairs) * args.rows) % len(rows)
        batches = [{"rows": part.tolist()} for part in np.split(numbers, 1 + args.pairs)]
        pairs = measure(*sides(rows), batches, f"a key frame every {gap}", (0.0, 0.0))
        yield rows, summarise(pairs, f"gap {gap}", len(CAMERAS), args.rows)


def waits(rows: LeRobotRows, batch: int, steps: int) -> tuple[float, float]:
    """Returns which part of the time a loop waits for data: with a thread that fetches ahead, and without.

    Its step multiplies matrices for about as long as reading a batch takes.
    """
    make = functools.partial(_batch, rows, batch)
    times = [_timed(functools.partial(make, step)) for step in range(1, 4)]
    enough, x = statistics.median(times), torch.ones(256, 256)

    def work() -> None:
        end = time.perf_counter() + enough
        while time.perf_counter() < end:
            x @ x

    start, waited = time.perf_counter(), []
    with prefetch(make, range(1, steps + 1)) as feed:
        for fetched in feed:
            waited.append(fetched.wait)
            work()
    # The first batch cannot be there yet.
    ahead = sum(waited[1:]) / (time.perf_counter() - start - waited[0])
    alone, start = 0.0, time.perf_counter()
    for step in range(1, steps + 1):
        alone += _timed(functools.partial(make, step))
        work()
    return ahead, alone / (time.perf_counter() - start)


def _batch(rows: LeRobotRows, batch: int, step: int) -> Any:
    return by_turns(rows, step_rows(step, batch), Share(micro_batch=batch)).micro


def _timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def compare_loader(args: LoaderBench) -> int:
    """Measures, prints, and returns the exit code."""
    if not args.json:
        size = f"{args.size[0]} x {args.size[1]}"
        print(f"two cameras of {size}, H.264, random rows in batches of {args.rows}, {args.pairs} pairs")
        names = ("key frames", "lf fps", "plain fps", "ratio", "min-max", "cpu ratio", "wait", "without")
        print("".join(f"{name:>12}" for name in names))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for rows, found in compare(args, Path(folder)):
                wait, without = waits(rows, args.rows, 6)
                if args.json:
                    print(json.dumps({**attrs.asdict(found), "wait": wait, "without": without}), flush=True)
                    continue
                cells = (f"{found.ratio:.2f}", f"{found.low:.2f}-{found.high:.2f}", f"{found.cpu_ratio:.2f}")
                speeds = (found.model, f"{found.ours:.0f}", f"{found.peer:.0f}")
                print("".join(f"{cell:>12}" for cell in (*speeds, *cells, f"{wait:.0%}", f"{without:.0%}")), flush=True)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
