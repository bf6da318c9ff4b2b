"""Rows with images and videos: where their features go, which positions they have, and each rank's part of them.

A row has what a row of text has, and `media` (`Media` records in the order of the row) with their `patches` [n, F].
The micro-batch has the media of all rows, their `patches` [N, F], and `slots` [M]: the place in the flattened tokens
[B * S] of each feature, in the order of the media. `slice_batch` turns them into a rank's own, and adds `taken`: which
of the features stand there.

Shapes: B rows, S positions of a row, N patches, F numbers of a patch, M media tokens.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import torch
from torch import Tensor

from lf.models import spec
from lf.models.decoder import DecoderConfig, is_packed
from lf.models.media import Grid, Media
from lf.models.vision.projector import Anyres, tokens_of
from lf.models.vision.tower import Tower, tower_of

if TYPE_CHECKING:
    from lf.models.vlm import Vlm

MEDIA = ("patches", "media", "slots", "taken")
"""What a micro-batch has besides that of text."""


@attrs.frozen
class _Span:
    """Tokens of one picture that follow each other in a row."""

    start: int
    grid: Grid  # In tokens.
    step: float  # Positions from one frame to the next.


def vlm_batch(cfg: "Vlm", rows: Sequence[Mapping[str, Any] | None], like: Mapping[str, Any]) -> spec.Batch:
    """Returns the micro-batch of rows; positions are [3, B, S] where the decoder turns by three of them, else [B, S].

    Raises ValueError, with the row's id, where a row's tokens, media and patches do not account for each other.
    """
    batch = dict(spec.text_batch(rows, like, cfg.text.vocab))
    length, tower = batch["tokens"].shape[1], tower_of(cfg.vision)
    slots: list[int] = []
    positions = []
    for number, row in enumerate(rows):
        own = [] if row is None else row_slots(cfg, tower, row)
        slots += [number * length + slot for slot in own]
        if cfg.text.rope.sections:
            positions.append(_positions(cfg, tower, row, own) if own and row else batch["positions"][number].numpy())
    if positions:
        whole = np.stack([np.broadcast_to(row, (3, length)) for row in positions], axis=1)
        batch["positions"] = torch.from_numpy(np.ascontiguousarray(whole))
    full = [row for row in rows if row is not None and row.get("media")]
    patches = [torch.as_tensor(row["patches"], dtype=torch.float32).reshape(-1, tower.numbers) for row in full]
    return {
        **batch,
        "patches": torch.cat(patches) if patches else torch.zeros(0, tower.numbers),
        "media": tuple(item for row in full for item in row["media"]),
        "slots": torch.tensor(slots, dtype=torch.int64),
    }


def row_slots(cfg: "Vlm", tower: Tower, row: Mapping[str, Any]) -> list[int]:
    """Returns the places in a row of the features of its media, in their order. Raises ValueError as `vlm_batch`."""
    media: Sequence[Media] = row.get("media", ())
    tokens = np.asarray(row["tokens"])
    _check_pictures(cfg, tower, row, media)
    counts = [tokens_of(cfg.projector, item) for item in media]
    found = {}
    for token in {cfg.image_token, cfg.video_token}:
        found[token] = np.flatnonzero(tokens == token).tolist()
        wanted = sum(n for n, item in zip(counts, media, strict=True) if _token(cfg, item) == token)
        if len(found[token]) != wanted:
            raise ValueError(
                f"row {row['id']}: token {token} stands {len(found[token])} times, but its {len(media)} images and "
                f"videos make {wanted} features; a row must have it once for each, so cut no image off"
            )
    at = {token: iter(places) for token, places in found.items()}
    return [slot for n, item in zip(counts, media, strict=True) for slot in itertools.islice(at[_token(cfg, item)], n)]


def _token(cfg: "Vlm", item: Media) -> int:
    return cfg.image_token if item.kind == "image" else cfg.video_token


def _check_pictures(cfg: "Vlm", tower: Tower, row: Mapping[str, Any], media: Sequence[Media]) -> None:
    if fault := next(filter(None, (picture_fault(cfg, tower, grid) for item in media for grid in item.grids)), ""):
        raise ValueError(f"row {row['id']}: {fault}")
    wanted = sum(item.patches for item in media)
    have = np.asarray(row["patches"]).size / tower.numbers if media else 0
    if have != wanted:
        raise ValueError(
            f"row {row['id']}: its pictures have {wanted} patches of {tower.numbers} numbers, but `patches` has "
            f"{have:g}; give the patches of the very grids"
        )


def picture_fault(cfg: "Vlm", tower: Tower, grid: Grid) -> str:
    """Returns why a model cannot take a picture, with the cure; empty where it can."""
    t, h, w = grid
    if tower.side and grid != (1, tower.side, tower.side):
        return (
            f"a picture of {grid} frames, rows and columns of patches, but the tower takes "
            f"{(1, tower.side, tower.side)} alone; resize it, or cut it into tiles"
        )
    if min(t, h, w) < 1 or h % cfg.projector.merge or w % cfg.projector.merge:
        return (
            f"a picture of {h} x {w} patches cannot be joined in blocks of {cfg.projector.merge} a side "
            "(projector.merge); resize it to a multiple"
        )
    return ""


def _positions(cfg: "Vlm", tower: Tower, row: Mapping[str, Any], slots: Sequence[int]) -> np.ndarray:
    """Returns time, row and column of every token [3, S]; a document's start at 0.

    Text counts on in all three, a picture spans rows and columns from where it begins, and text after it goes on
    behind the larger of the two (Qwen2-VL, arXiv:2409.12191).
    """
    made = np.zeros((3, len(row["tokens"])), np.int64)
    spans = sorted(_spans(cfg, tower, row, slots), key=lambda span: span.start)
    begin = 0
    for length in row["lengths"]:
        end, at, now = begin + int(length), begin, 0
        for span in (span for span in spans if begin <= span.start < end):
            t, h, w = span.grid
            stop = span.start + t * h * w
            if stop > end:
                raise ValueError(f"row {row['id']}: a document ends at token {end}, inside an image; cut elsewhere")
            made[:, at : span.start] = now + np.arange(span.start - at)
            now += span.start - at
            grid = np.indices((t, h, w)).reshape(3, -1)
            grid[0] = (grid[0] * span.step).astype(np.int64)
            made[:, span.start : stop] = now + grid
            now, at = now + max(h, w), stop
        made[:, at:end] = now + np.arange(end - at)
        begin = end
    return made


def _spans(cfg: "Vlm", tower: Tower, row: Mapping[str, Any], slots: Sequence[int]) -> Iterator[_Span]:
    merge, at = cfg.projector.merge, 0
    for item in row["media"]:
        for frames, h, w in item.grids:
            apart = tower.frames == "apart"
            t = 1 if apart or cfg.projector.mean else frames
            step = item.seconds * tower.rate if tower.frames == "timed" and item.kind == "video" else 1.0
            for _ in range(frames if apart else 1):
                span = _Span(slots[at], (t, h // merge, w // merge), step)
                at += t * span.grid[1] * span.grid[2]
                if slots[at - 1] - span.start != t * span.grid[1] * span.grid[2] - 1:
                    raise ValueError(
                        f"row {row['id']}: the {span.grid} features from token {span.start} on are interrupted; the "
                        "tokens of a picture must follow each other"
                    )
                yield span


def vlm_slice(text: DecoderConfig, batch: spec.Batch, layout: spec.Layout) -> spec.Batch:
    """Returns a rank's part of a micro-batch; later pipeline stages need nothing of images.

    Where all ranks encode (`layout.apart`) each has all images, and instead of its own `slots` and `taken` it has
    `places`: those of every rank of the first stage, tensor parallel ranks being neighbours. `states` is what was made
    of images before.
    """
    made = {**spec.slice_batch(text, {name: value for name, value in batch.items() if name not in MEDIA}, layout)}
    if "slots" not in batch or (layout.pp_rank and not layout.apart):
        return made
    made |= {name: batch[name] for name in (*MEDIA[:2], "states") if name in batch}
    shape, packed = (int(batch["tokens"].shape[0]), int(batch["tokens"].shape[1])), is_packed(made)
    if layout.apart:
        ranks = [
            attrs.evolve(layout, cp_rank=c, tp_rank=t, pp_rank=0) for c in range(layout.cp) for t in range(layout.tp)
        ]
        return {**made, "places": tuple(_own_places(batch["slots"], shape, packed, rank) for rank in ranks)}
    slots, taken = _own_places(batch["slots"], shape, packed, layout)
    return {**made, "slots": slots, "taken": taken}


def _own_places(slots: Tensor, shape: tuple[int, int], packed: bool, layout: spec.Layout) -> tuple[Tensor, Tensor]:
    """Returns the slots that a rank has, in its own [S, B], and which of the features stand there."""
    (rows, length), total = shape, shape[0] * shape[1]
    taken = torch.arange(len(slots), device=slots.device)
    if layout.cp > 1:
        # As `decoder_slice`: two of the equal pieces of the one packed row.
        size = total // (2 * layout.cp)
        piece = slots // size
        early, late = piece == layout.cp_rank, piece == 2 * layout.cp - 1 - layout.cp_rank
        slots, total = slots % size + size * late, total // layout.cp
        slots, taken = slots[early | late], taken[early | late]
    if packed:
        rows, length = 1, total
    # megatron-core has positions before rows.
    position, row = slots % length, slots // length
    if layout.sp:
        share = length // layout.tp
        own = position // share == layout.tp_rank
        position, row, taken = position[own] % share, row[own], taken[own]
    return position * rows + row, taken


def fake_rows(cfg: "Vlm", rows: int, length: int, rng: np.random.Generator, seed: int) -> list[dict[str, Any]]:
    """Returns rows of random tokens, each with a small image where there is room."""
    tower = tower_of(cfg.vision)
    side = tower.side or 2 * cfg.projector.merge
    pixels = min((size[0] for size in cfg.projector.pinpoints), default=1) if isinstance(cfg.projector, Anyres) else 1
    image = Media(grids=((1, side, side),), size=(pixels, pixels))
    words = np.array([i for i in range(min(cfg.text.vocab, 4096)) if i not in (cfg.image_token, cfg.video_token)])
    count = tokens_of(cfg.projector, image)
    made = []
    for i in range(rows):
        tokens = rng.choice(words, length + 1)
        room = count + 2 <= length
        if room:
            tokens[1 : 1 + count] = cfg.image_token
        labels = np.where(tokens[1:] == cfg.image_token, spec.IGNORE, tokens[1:])
        made.append(
            {
                "tokens": tokens[:-1],
                "labels": labels,
                "lengths": (length,),
                "real": length,
                "id": f"fake:{seed}:{i}",
                "media": (image,) if room else (),
                "patches": rng.standard_normal((image.patches if room else 0, tower.numbers), np.float32),
            }
        )
    return made
