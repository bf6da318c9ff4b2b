"""Frames of video files, found by the container's own timestamps; the decoder is PyAV (the extra `robot`).

Shapes: F frames of a file, T frames asked for, H height, W width.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.data.regular import kind_fault

Pixels = NDArray[np.uint8]

# FFmpeg also reads lists (concat, HLS) that make it open other files, whatever the file is called.
_CONTAINERS = "mov,matroska,webm,avi,flv,asf,mpeg,mpegts,ogg,gif"
_OPEN_FILES = 16
_AHEAD = 8


def import_av() -> Any:
    """Returns the module `av`; raises ValueError with the cure where it is not installed."""
    try:
        import av
    except ImportError as error:
        raise ValueError(f"videos are read by PyAV, which is missing ({error}); install lf[robot]") from error
    return av


def open_video(path: Path) -> Any:
    """Returns a video file as PyAV opens it; raises PyAV's errors for one that is broken or of another container."""
    return import_av().open(str(path), options={"format_whitelist": _CONTAINERS, "protocol_whitelist": "file"})


@attrs.frozen(kw_only=True, eq=False)
class VideoIndex:
    """What a container says about its frames, without decoding one."""

    pts: NDArray[np.int64]
    """[F] presentation times of the frames, ascending, in units of `unit`."""
    unit: Fraction
    """Seconds of one tick."""
    height: int
    """Pixels from top to bottom."""
    width: int
    """Pixels from left to right."""
    codec: str
    """Name of the codec."""
    pixel: Fraction
    """Width of a pixel over its height, as the file states it."""

    @property
    def seconds(self) -> NDArray[np.float64]:
        """[F] presentation times in seconds, rounded once."""
        return self.pts * self.unit.numerator / self.unit.denominator


def index_video(path: Path) -> VideoIndex:
    """Returns the index of a video file, from its packets. Raises ValueError, with the path, for one that is cut off.

    The container lists where every packet lies, and one that ends beyond the end of the file is missing.
    """
    av = import_av()
    fault = kind_fault(path)
    if fault:
        raise ValueError(f"{path}: {fault}")
    size = path.stat().st_size
    try:
        with open_video(path) as file:
            if not file.streams.video:
                raise ValueError(f"{path} has no video stream: it may be cut off, or sound alone; fetch it again")
            stream = file.streams.video[0]
            end = max((entry.pos + entry.size for entry in stream.index_entries), default=0)
            packets = [(packet.pts, packet.is_discard) for packet in file.demux(stream) if packet.size]
            # Frames that the container cuts off at the start are decoded, and never shown.
            pts = np.array(sorted(tick for tick, cut in packets if tick is not None and not cut), np.int64)
            codec = stream.codec_context
            found = VideoIndex(
                pts=pts,
                unit=Fraction(stream.time_base),
                height=codec.height,
                width=codec.width,
                codec=codec.name,
                pixel=Fraction(stream.sample_aspect_ratio or 1),
            )
            stated = stream.frames
    except av.error.FFmpegError as error:
        raise ValueError(
            f"{path} is no video that can be read ({error}); it may be cut off, or be no mp4, mkv, webm or avi: "
            "fetch it again, or convert it"
        ) from error
    if end > size or (stated and stated != len(packets)):
        raise ValueError(
            f"{path} is cut off: the container lists {stated} frames up to byte {end}, and the file has {len(packets)} "
            f"in {size} bytes; fetch it again"
        )
    if not len(pts):
        raise ValueError(f"{path} has no frame; fetch or record it again")
    return found


def nearest(index: VideoIndex, seconds: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the number of the frame nearest to each time, the earlier of two, and how far it is, in seconds."""
    have = index.seconds
    after = np.clip(np.searchsorted(have, seconds), 1, max(len(have) - 1, 1))
    after = np.minimum(after, len(have) - 1)
    before = np.maximum(after - 1, 0)
    late = np.abs(have[after] - seconds) < np.abs(have[before] - seconds)
    chosen = np.where(late, after, before)
    return chosen, np.abs(have[chosen] - seconds)


class Decoder:
    """An open video file that stands at a frame. One thread at a time may use it."""

    def __init__(self, path: Path) -> None:
        self._av = import_av()
        self.path = path
        try:
            self._file = open_video(path)
            self._stream = self._file.streams.video[0]
            # One thread a file: rows are read by several threads at once, and a codec's own threads only delay frames.
            self._stream.codec_context.thread_count = 1
            entries = [(entry.timestamp, entry.is_keyframe) for entry in self._stream.index_entries]
        except (self._av.error.FFmpegError, OSError, IndexError) as error:
            raise ValueError(f"{path} is no video that can be read ({error}); fetch it again") from error
        self._times = np.array(sorted(time for time, _ in entries), np.int64)
        self._keys = np.array(sorted(time for time, is_key in entries if is_key), np.int64)
        self._frames: Iterator[Any] = iter(())
        self._last: int | None = None
        # One for all frames, of one thread: each frame's own would start threads and work its tables out anew.
        self._colours = self._av.video.reformatter.VideoReformatter()

    def frame(self, pts: int) -> Pixels:
        """Returns the frame [H, W, 3] (RGB) whose presentation time is `pts` ticks.

        Colours are those of FFmpeg's own conversion; it is as the file stores it, not turned by `turns`. Raises
        ValueError with the path where there is no such frame, and where it or one that was decoded on the way to it is
        damaged.
        """
        try:
            if self._last is None or pts <= self._last or self._is_far(pts):
                self._file.seek(pts, stream=self._stream, backward=True)
                self._frames = self._file.decode(self._stream)
            for frame in self._frames:
                self._last = frame.pts
                if frame.is_corrupt:  # FFmpeg makes up what is missing, and draws later frames on top of that.
                    self._last = None
                    raise ValueError(
                        f"{self.path}: the frame at tick {frame.pts} is damaged; fetch the file again, or leave it out"
                    )
                if frame.pts == pts:
                    return self._colours.reformat(frame, format="rgb24", threads=1).to_ndarray()
                if frame.pts is None or frame.pts > pts:
                    break
        except self._av.error.FFmpegError as error:
            self._last = None
            raise ValueError(f"{self.path}: the frame at tick {pts} cannot be decoded ({error})") from error
        self._last = None
        raise ValueError(f"{self.path} has no frame at tick {pts}; check the dataset, and fetch the file again")

    def turns(self) -> int:
        """Returns by how many quarters, counterclockwise, the file says that frames are to be turned.

        Raises ValueError with the path for another angle, and for mirrored frames. The decoder stands at no frame
        afterwards.
        """
        try:
            self._file.seek(0, stream=self._stream)
            first = next(self._file.decode(self._stream))
        except (self._av.error.FFmpegError, StopIteration) as error:
            raise ValueError(f"{self.path}: its first frame cannot be decoded ({error}); fetch it again") from error
        self._last = None
        matrix = first.side_data.get("DISPLAYMATRIX")
        right, down, left, up = (1, 0, 0, 1) if matrix is None else np.frombuffer(bytes(matrix), np.int32)[[0, 1, 3, 4]]
        if first.rotation % 90 or float(right) * float(up) < float(down) * float(left):
            raise ValueError(
                f"{self.path} is to be shown mirrored or turned by {first.rotation} degrees; lf turns by quarters: "
                "encode it upright"
            )
        return first.rotation // 90 % 4

    def _is_far(self, pts: int) -> bool:
        """Returns whether a key frame before `pts` is so far ahead that decoding from it is shorter than going on."""
        assert self._last is not None
        at = int(np.searchsorted(self._keys, pts, side="right")) - 1
        here, key = np.searchsorted(self._times, [self._last, self._keys[at] if at >= 0 else 0])
        return bool(key - here > _AHEAD)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Decoders:
    """A bounded number of open video files, lent to one thread at a time.

    The one thing here that changes; what it returns does not depend on what was asked before.
    """

    def __init__(self, limit: int = _OPEN_FILES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, Decoder] = OrderedDict()

    def frames(self, path: Path, pts: Sequence[int]) -> Pixels:
        """Returns the frames [T, H, W, 3] at the given ticks; frames that repeat are decoded once."""
        with self._borrow(path) as decoder:
            found = {tick: decoder.frame(tick) for tick in sorted(set(pts))}
        return found[pts[0]][None] if len(pts) == 1 else np.stack([found[tick] for tick in pts])

    @contextlib.contextmanager
    def _borrow(self, path: Path) -> Iterator[Decoder]:
        with self._lock:
            # The one that was used last stands where a reader of frames in order left it.
            key = next((key for key, decoder in reversed(self._idle.items()) if decoder.path == path), None)
            decoder = self._idle.pop(key) if key is not None else None
        decoder = decoder or Decoder(path)
        try:
            yield decoder
        except BaseException:
            decoder.close()
            raise
        with self._lock:
            self._idle[id(decoder)] = decoder
            dropped = [self._idle.popitem(last=False)[1] for _ in range(len(self._idle) - self._limit)]
        for old in dropped:
            old.close()

    def close(self) -> None:
        """Closes all files that are not lent."""
        with self._lock:
            held, self._idle = list(self._idle.values()), OrderedDict()
        for decoder in held:
            decoder.close()

    def __len__(self) -> int:
        """Returns how many files are open and idle."""
        return len(self._idle)


def write_video(path: Path, frames: Iterable[Pixels], fps: Fraction, *, codec: str = "libx264", crf: int = 23) -> int:
    """Writes frames [H, W, 3] (RGB) as a video with a key frame every two frames, and returns how many there were.

    So few frames between key frames make random access fast. Raises ValueError for frames that the codec cannot take.
    """
    av = import_av()
    count = 0
    try:
        with av.open(str(path), "w") as file:
            stream = file.add_stream(codec, rate=fps, options={"crf": str(crf), "g": "2"})
            stream.pix_fmt = "yuv420p"
            for frame in frames:
                if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
                    raise ValueError(f"frame {count} is {frame.dtype} {frame.shape}; it must be uint8 [H, W, 3]")
                if not count:
                    stream.height, stream.width = frame.shape[:2]
                elif frame.shape[:2] != (stream.height, stream.width):
                    raise ValueError(
                        f"frame {count} is {frame.shape[:2]}, and those before {stream.height, stream.width}"
                    )
                file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
                count += 1
            if count:
                file.mux(stream.encode())
    except (av.error.FFmpegError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be written with {codec} ({error}); frames must be alike, and of even height and width"
        ) from error
    return count


def append_videos(path: Path, parts: Sequence[Path]) -> list[Fraction]:
    """Joins videos of one codec and size without encoding them again, and returns the start of each, in seconds.

    Every frame keeps its bits. Raises ValueError where a part has other codec settings than the first.
    """
    av = import_av()
    starts: list[Fraction] = []
    at = 0
    # Frames that are shown out of order are decoded early, in each part by as much as in the one that needs most:
    # decoding times must rise from part to part.
    delays = [_delay(part) for part in parts]
    with av.open(str(path), "w") as out:
        stream, first, unit = None, None, Fraction(0)
        for part, delay in zip(parts, delays, strict=True):
            with open_video(part) as file:
                source = file.streams.video[0]
                settings = _settings(source)
                if stream is None:
                    stream, first = out.add_stream_from_template(source, opaque=True), settings
                    unit = stream.time_base = Fraction(source.time_base)
                elif settings != first:
                    raise ValueError(f"{part} has other codec settings than {parts[0]}; they cannot share a file")
                starts.append(at * unit)
                end, step = at, round(1 / (source.average_rate * unit))
                for packet in file.demux(source):
                    if packet.dts is None:
                        continue
                    packet.pts, packet.dts = packet.pts + at, packet.dts + at + delay - max(delays)
                    end = max(end, packet.pts + (packet.duration or step))
                    packet.stream = stream
                    out.mux(packet)
                at = end
    return starts


def _delay(path: Path) -> int:
    """Returns by how many ticks the first frame is decoded before it is shown."""
    with open_video(path) as file:
        packets = [packet for packet in file.demux(file.streams.video[0]) if packet.dts is not None]
    return min(packet.pts for packet in packets) - packets[0].dts if packets else 0


def joinable(left: Path, right: Path) -> bool:
    """Returns whether `append_videos` can join two files."""
    with open_video(left) as a, open_video(right) as b:
        return bool(_settings(a.streams.video[0]) == _settings(b.streams.video[0]))


def _settings(stream: Any) -> tuple[Any, ...]:
    codec = stream.codec_context
    return (
        *(codec.name, codec.width, codec.height, codec.pix_fmt, bytes(codec.extradata or b"")),
        Fraction(stream.time_base),
    )
