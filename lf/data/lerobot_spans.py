"""Which frames of a shared video belong to an episode: every frame to one, in the order of the episodes' numbers.

Times alone do not say it: a start that is off by whole frames meets frames too, those of another episode. So the frames
before an episode in its file are counted.
"""

from collections.abc import Sequence
from typing import Literal

import attrs
import numpy as np

from lf.data.lerobot_meta import Meta
from lf.data.video import VideoIndex, nearest


@attrs.frozen(kw_only=True)
class Place:
    """What the metadata says of the episodes before an episode in one video."""

    rows: int = 0
    """Their rows, which are as many frames."""
    previous: int | None = None
    """episode_index of the one right before, None for the first."""
    start: float = 0.0
    """Time of the first frame of that one, in seconds."""
    length: int = 0
    """Its rows."""
    is_known: bool = True
    """Whether the table lists all episodes that may be before it in the file: none of their numbers is missing."""


def places(meta: Meta, cameras: Sequence[str], episodes: Sequence[int]) -> dict[tuple[str, int], Place]:
    """Returns the place of each episode in the video of each camera, by camera and episode."""
    wanted, found = set(episodes), {}
    for key in cameras:
        if meta.features[key].dtype != "video":
            continue
        last: dict[str, tuple[int, Place]] = {}
        for number, episode in meta.episodes.items():
            file = episode.clips[key].file
            if file in last:
                previous, there = last[file]
                before = meta.episodes[previous]
                place = Place(
                    rows=there.rows + before.length,
                    previous=previous,
                    start=before.clips[key].start,
                    length=before.length,
                    is_known=there.is_known and number == previous + 1,
                )
            else:
                place = Place(is_known=number == 0 or number - 1 in meta.episodes)
            last[file] = (number, place)
            if number in wanted:
                found[key, number] = place
    return found


def span_faults(
    meta: Meta, key: str, number: int, place: Place, video: VideoIndex, first: int
) -> list[tuple[Literal["fatal", "wrong"], str]]:
    """Returns what is wrong with an episode's part of a video, in which its first row is frame `first`."""
    clip, length = meta.episodes[number].clips[key], meta.episodes[number].length
    found: list[tuple[Literal["fatal", "wrong"], str]] = []
    if place.is_known and first != place.rows:
        kind = "overlaps them" if first < place.rows else "leaves a gap"
        many = f"{place.rows} frames" + ("" if place.previous is None else f", up to episode {place.previous}")
        found.append(
            (
                "fatal",
                f"it begins at frame {first} of the video (from_timestamp {clip.start:g} s), and the episodes before "
                f"it there have {many}, which {kind}; correct from_timestamp and file_index, or length",
            )
        )
    elif not place.is_known and place.previous is not None:
        end = int(nearest(video, np.array([place.start]))[0][0]) + place.length
        if first < end:
            found.append(
                (
                    "fatal",
                    f"it begins at frame {first} of the video (from_timestamp {clip.start:g} s), and episode "
                    f"{place.previous} before it ends at {end}, so they overlap; correct from_timestamp and file_index",
                )
            )
    if clip.end is not None and not found:
        frames = (clip.end - clip.start) * meta.fps
        # Some writers leave the last frame's own time out. Nobody reads a frame by the end, so that is no harm.
        if abs(frames - length) > 0.5:
            message = f"from_timestamp {clip.start:g} and to_timestamp {clip.end:g} s are {frames:g} frames at "
            message += f"{meta.fps:g} fps, and the episode has {length}; correct the times"
            found.append(("fatal" if abs(frames - length) > 1.5 else "wrong", message))
    return found
