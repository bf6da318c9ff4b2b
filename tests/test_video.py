"""Frames are found by the container's own timestamps, exactly, and open files stay few."""

import os
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from lf.data.video import Decoders, append_videos, index_video, nearest, open_video, write_video
from tests.robot_tools import SIZE, encode, frame


def plain(path: Path) -> list[tuple[int, np.ndarray[Any, Any]]]:
    """Every frame in the order of the file, as a loop over PyAV gives them."""
    with av.open(str(path)) as file:
        return [(shown.pts, shown.to_ndarray(format="rgb24")) for shown in file.decode(video=0)]


@pytest.mark.parametrize("options", [{"g": "2"}, {"g": "50", "bf": "0"}, {"g": "50", "bf": "3"}], ids=str)
def test_any_order_gives_the_frames_of_a_plain_loop(tmp_path: Path, options: dict[str, str]) -> None:
    path = encode(tmp_path / "a.mp4", [frame(0, i) for i in range(40)], **options)
    expected, decoders = dict(plain(path)), Decoders()
    index = index_video(path)
    assert sorted(expected) == index.pts.tolist()
    assert (index.height, index.width) == SIZE
    for tick in np.random.default_rng(0).permutation(np.repeat(index.pts, 2)).tolist():
        assert (decoders.frames(path, [tick])[0] == expected[tick]).all()
    ticks = index.pts[[30, 2, 2, 39]].tolist()
    assert (decoders.frames(path, ticks) == np.stack([expected[tick] for tick in ticks])).all()
    decoders.close()


@pytest.mark.parametrize("fps", [Fraction(30000, 1001), Fraction(30), Fraction(7)], ids=str)
def test_frame_times_are_those_of_the_rate(tmp_path: Path, fps: Fraction) -> None:
    path = tmp_path / "a.mp4"
    assert write_video(path, [frame(0, i) for i in range(20)], fps) == 20
    index = index_video(path)
    times = np.array([float(i / fps) for i in range(20)])
    found, off = nearest(index, times.astype(np.float32).astype(np.float64))
    assert found.tolist() == list(range(20))
    assert off.max() < 1e-6
    # A quarter of a frame away the same frame is meant, three quarters away the next one.
    assert nearest(index, times + 0.25 / float(fps))[0].tolist() == list(range(20))
    assert nearest(index, times[:-1] + 0.75 / float(fps))[0].tolist() == list(range(1, 20))


def test_frames_of_a_variable_rate_are_found_by_their_times(tmp_path: Path) -> None:
    path, ticks = tmp_path / "a.mp4", [0, 100, 130, 700, 701, 2000]
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=1000, options={"crf": "10"})
        stream.height, stream.width, stream.pix_fmt = *SIZE, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for number, tick in enumerate(ticks):
            picture = av.VideoFrame.from_ndarray(frame(0, number), format="rgb24")
            picture.pts, picture.time_base = tick, Fraction(1, 1000)
            file.mux(stream.encode(picture))
        file.mux(stream.encode())
    index, expected = index_video(path), plain(path)
    assert np.allclose(index.seconds, np.array(ticks) / 1000)
    found, off = nearest(index, np.array([0.1301, 0.7, 0.3, 5.0]))
    assert found.tolist() == [2, 3, 2, 5]
    assert np.allclose(off, [1e-4, 0, 0.17, 3.0])
    decoders = Decoders()
    for number in (3, 1, 5, 0):
        assert (decoders.frames(path, [int(index.pts[number])])[0] == expected[number][1]).all()


def test_a_frame_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    path = encode(tmp_path / "a.mp4", [frame(0, i) for i in range(5)])
    decoders, ticks = Decoders(), index_video(path).pts
    for tick in (int(ticks[1]) + 1, int(ticks[-1]) + 512):
        with pytest.raises(ValueError, match=rf"a\.mp4 has no frame at tick {tick}"):
            decoders.frames(path, [tick])
    assert decoders.frames(path, [int(ticks[1])]).shape == (1, *SIZE, 3)


@pytest.mark.parametrize("faststart", [False, True])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_a_video_that_is_cut_off_is_an_error(tmp_path: Path, part: float, faststart: bool) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w", options={"movflags": "faststart"} if faststart else {}) as file:
        stream = file.add_stream("libx264", rate=10, options={"crf": "1"})
        stream.height, stream.width, stream.pix_fmt = *SIZE, "yuv420p"
        noise = np.random.default_rng(0).integers(0, 255, (20, *SIZE, 3), np.uint8)
        for pixels in noise:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())
    assert len(index_video(path).pts) == 20
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    with pytest.raises(ValueError, match=r"a\.mp4.*cut off"):
        index_video(path)


def test_a_damaged_frame_and_those_drawn_on_top_of_it_are_errors(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.mp4", np.random.default_rng(0)
    write_video(path, [rng.integers(0, 255, (64, 64, 3), np.uint8) for _ in range(6)], Fraction(8))
    with open_video(path) as file:
        keys = [(entry.pos, entry.size) for entry in file.streams.video[0].index_entries if entry.is_keyframe]
    data, (start, size) = bytearray(path.read_bytes()), keys[-1]
    data[start + size // 2] ^= 0xFF
    path.write_bytes(data)
    ticks, decoders = index_video(path).pts.tolist(), Decoders()
    for asked in (ticks[-2:], ticks[-1:]):
        with pytest.raises(ValueError, match=rf"a.mp4: the frame at tick {ticks[-2]} is damaged; fetch the file again"):
            decoders.frames(path, asked)
    assert len(decoders.frames(path, ticks[:-2])) == 4


def test_a_file_that_is_no_video_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_text("not found")
    with pytest.raises(ValueError, match=r"a\.mp4 is no video"):
        index_video(tmp_path / "a.mp4")
    with pytest.raises(ValueError, match=r"a\.mp4 is no video"):
        Decoders().frames(tmp_path / "a.mp4", [0])


def test_a_list_of_files_is_no_video(tmp_path: Path) -> None:
    encode(tmp_path / "a.mp4", [frame(0, number) for number in range(3)])
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile a.mp4\n")
    with av.open(str(tmp_path / "list.mp4")) as file:
        assert file.format.name == "concat"
    with pytest.raises(ValueError, match=r"list\.mp4 is no video"):
        index_video(tmp_path / "list.mp4")
    with pytest.raises(ValueError, match=r"list\.mp4 is no video"):
        Decoders().frames(tmp_path / "list.mp4", [0])


def test_joined_videos_keep_every_bit(tmp_path: Path) -> None:
    parts = [encode(tmp_path / f"{n}.mp4", [frame(n, i) for i in range(n + 1)]) for n in (4, 0, 7)]
    joined = tmp_path / "all.mp4"
    starts = append_videos(joined, parts)
    assert starts == [0, Fraction(5, 10), Fraction(6, 10)]
    index, decoders = index_video(joined), Decoders()
    assert len(plain(joined)) == len(index.pts) == 14
    for start, part in zip(starts, parts, strict=True):
        mine = index_video(part)
        found, off = nearest(index, float(start) + mine.seconds)
        assert off.max() < 1e-9
        expected = np.stack([pixels for _, pixels in plain(part)])
        assert (decoders.frames(joined, index.pts[found].tolist()) == expected).all()


def test_videos_with_other_settings_cannot_be_joined(tmp_path: Path) -> None:
    one = encode(tmp_path / "a.mp4", [frame(0, 0)])
    other = tmp_path / "b.mp4"
    write_video(other, [np.zeros((32, 32, 3), np.uint8)], Fraction(10))
    with pytest.raises(ValueError, match="other codec settings"):
        append_videos(tmp_path / "all.mp4", [one, other])


@pytest.mark.parametrize("fault", ["odd", "float", "sizes"])
def test_frames_that_cannot_be_written_are_errors(tmp_path: Path, fault: str) -> None:
    frames = [np.zeros((48, 64, 3), np.uint8), np.zeros((48, 66, 3), np.uint8)]
    frames = {"odd": [np.zeros((47, 64, 3), np.uint8)], "float": [frames[0] / 2.0], "sizes": frames}[fault]
    with pytest.raises(ValueError, match=r"a\.mp4 cannot be written"):
        write_video(tmp_path / "a.mp4", frames, Fraction(10))


def resident() -> int:
    """Bytes of memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_and_open_files_level_off(tmp_path: Path) -> None:
    paths = [encode(tmp_path / f"{n}.mp4", [frame(0, n + i) for i in range(4)]) for n in range(25)]
    ticks, expected = index_video(paths[0]).pts.tolist(), {path: plain(path)[3][1] for path in paths}
    decoders, rng = Decoders(limit=4), np.random.default_rng(0)

    def read(k: int) -> bool:
        path = paths[k]
        return bool((decoders.frames(path, [ticks[3]])[0] == expected[path]).all())

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(read, rng.integers(0, 25, 500).tolist()))
        before, files = resident(), len(os.listdir("/proc/self/fd"))
        assert all(pool.map(read, rng.integers(0, 25, 1500).tolist()))
    assert resident() - before < 30e6
    assert len(os.listdir("/proc/self/fd")) <= files + 2
    assert len(decoders) <= 4
    decoders.close()
    assert len(decoders) == 0
