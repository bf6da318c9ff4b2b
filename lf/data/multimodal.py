"""Conversations with images and videos as rows: indexed once, packed whole by their lengths, pictures read by the row.

The index holds the tokens of every sample, which of them are learnt, and the place and shape of every image: a row is
found without looking at another one, and the plan of an epoch reads no picture.

Shapes: D samples, T tokens of the index, S positions of a row, N patches, F numbers of a patch.
"""

import functools
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.data.cache import build_once, key_of
from lf.data.chat_files import Sample, read_samples
from lf.data.chat_text import Encoded, Template, Tokens, encode, media_names, open_template, rendered
from lf.data.config import ChatData, Pictures
from lf.data.files import TextFile, file_digests, find_files
from lf.data.hf_tokenizer import Tokenizer
from lf.data.media import Fitted, Shape, fit, patches_of, shrunk
from lf.data.media_files import Ref, pixels_of, shape_of
from lf.data.outline import outline
from lf.data.text import check_part, check_unchanged, on_side
from lf.data.video import Decoders
from lf.models.media import Media, MediaRules
from lf.models.spec import IGNORE
from lf.plan.order import permutation
from lf.plan.packing import WholePlan, filled, plan_whole

_FORMAT = 2
_THREADS = 4
_COUNTS = ("samples", "dropped", "shrunk", "cut")
_PROBES = ((64, 64), (300, 200), (200, 300), (448, 448), (720, 1280), (1999, 411), (90, 1200))


@attrs.frozen(kw_only=True)
class Entry:
    """An image or a video of a sample, as the index has it."""

    ref: Ref
    """Where it lies."""
    shape: Shape
    """Its shape."""
    level: int
    """How often its pictures were made smaller; 0 is as the config says."""
    alone: bool
    """Whether the sample has no other image."""
    tokens: int
    """Tokens of its features."""


@attrs.frozen(kw_only=True, eq=False)
class ChatRows:
    """The rows of a source of chats."""

    cfg: ChatData
    """The config."""
    count: Callable[[Media], int]
    """The model's rule for how many tokens a `Media` takes."""
    tokens: NDArray[np.uint32]
    """[T] ids of the index."""
    learnt: NDArray[np.uint8]
    """[T] whether the assistant says them."""
    starts: NDArray[np.int64]
    """[D] first token of each sample of this side of the split."""
    lengths: NDArray[np.int64]
    """[D] tokens of each sample."""
    places: NDArray[np.int64]
    """[D, 2] where the images of each sample begin and end in `media`, in bytes."""
    origins: NDArray[np.int64]
    """[D, 2] file and line of each sample."""
    media: NDArray[np.uint8]
    """JSON of the images and videos of all samples."""
    names: tuple[str, ...]
    """Names of the files."""
    packed: WholePlan
    """Which samples each row has."""
    order: Callable[[int], NDArray[np.int64]]
    """The order of the rows in an epoch."""
    pad: int
    """Id that fills rows."""
    facts: dict[str, int]
    """What `describe` returns."""
    decoders: Decoders
    """Open video files."""

    def __len__(self) -> int:
        """Returns the rows of one epoch."""
        return len(self.packed.bounds) - 1

    @property
    def threads(self) -> int:
        """How many rows are worth reading at once."""
        return _THREADS

    def describe(self) -> dict[str, int]:
        """Returns facts: `documents`, `tokens` and `rows` of an epoch, `vocab`, `length` of a row, `content` (a hash).

        And of all the files, both sides of the split: `samples`, and how many of them were `dropped`, `shrunk`, `cut`.
        """
        return self.facts

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        """Returns a row: `tokens` and `labels` [S], `lengths`, `real`, `id`, `media` and their `patches` [N, F]."""
        members = self.members(epoch, index)
        size = self.cfg.seq_len
        tokens, labels = np.full(size, self.pad, np.int32), np.full(size, IGNORE, np.int32)
        at = 0
        for member in members:
            first, count = int(self.starts[member]), int(self.lengths[member])
            ids = self.tokens[first : first + count].astype(np.int32)
            tokens[at : at + count] = ids
            labels[at : at + count - 1] = np.where(self.learnt[first + 1 : first + count], ids[1:], IGNORE)
            at += count
        items = [self.item(entry) for member in members for entry in self.entries(member)]
        patches = [made for _, made in items]
        return {
            "tokens": tokens,
            "labels": labels,
            "lengths": self.segments(members),
            "real": at,
            "id": f"{epoch}:{index} {self.origin(members[0])}",
            "media": tuple(fitted.media for fitted, _ in items),
            "patches": np.concatenate(patches) if patches else np.zeros((0, 0), np.float32),
        }

    def members(self, epoch: int, index: int) -> list[int]:
        """Returns the samples of a row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of an epoch of {len(self)} rows")
        row = int(self.order(epoch)[index])
        return self.packed.documents[self.packed.bounds[row] : self.packed.bounds[row + 1]].tolist()

    def segments(self, members: Sequence[int]) -> tuple[int, ...]:
        """Returns the lengths of the samples of a row, and of its padding."""
        return filled([int(self.lengths[member]) for member in members], self.cfg.seq_len)

    def origin(self, sample: int) -> str:
        """Returns file and line of a sample."""
        file, line = self.origins[sample].tolist()
        return f"{self.names[file]}:{line}"

    def entries(self, sample: int) -> list[Entry]:
        """Returns the images and videos of a sample, in their order."""
        first, last = self.places[sample].tolist()
        return [_entry(value) for value in json.loads(bytes(self.media[first:last]))]

    def fitted(self, entry: Entry) -> Fitted:
        """Returns what an image or a video becomes; raises ValueError where it is not what was indexed."""
        made = fit(_at_level(self.cfg.pictures, entry.level), entry.shape, self.count, entry.alone)
        if made.tokens != entry.tokens:
            raise ValueError(
                f"{entry.ref}: it takes {made.tokens} tokens of this model, and {entry.tokens} when it was indexed; "
                "delete the index from the cache"
            )
        return made

    def item(self, entry: Entry) -> tuple[Fitted, NDArray[np.float32]]:
        """Returns what an image or a video becomes, and its patches [N, F]."""
        fitted = self.fitted(entry)
        pixels = pixels_of(entry.ref, entry.shape, fitted.frames, self.decoders)
        return fitted, patches_of(self.cfg.pictures, fitted, pixels)


@outline.register
def _(rows: ChatRows, epoch: int, index: int) -> dict[str, Any]:
    members = rows.members(epoch, index)
    return {
        "id": f"{epoch}:{index} {rows.origin(members[0])}",
        "lengths": rows.segments(members),
        "media": tuple(rows.fitted(entry).media for member in members for entry in rows.entries(member)),
    }


def open_chat(
    cfg: ChatData, *, tokenizer: Tokenizer | None, rules: MediaRules | None, seed: int, cache_dir: Path, where: str
) -> ChatRows:
    """Returns the rows of a source of chats, indexing it first unless `cache_dir` holds its index.

    `rules` are what the model makes of images. Raises ValueError, with file and line, where a sample is no good.
    """
    if tokenizer is None:
        raise ValueError(f"{where} is of chats, which need a tokenizer; set tokenizer to HfTokenizer(...)")
    if rules is None:
        raise ValueError(f"{where} has images and videos, and the model takes none; give a vision-language model")
    check_part(cfg, where)
    template, source = open_template(cfg.template, tokenizer, where)
    names = media_names(rules.ids, cfg.pictures.video, tokenizer, where)
    files = find_files(cfg, where)

    def content() -> str:
        return key_of(_FORMAT, file_digests(files, cache_dir))

    before = content()
    made_by = [source, repr(cfg.pictures), cfg.media_root, cfg.seq_len, cfg.too_long, cfg.max_pixels, rules.ids]
    paths = [str(file.path.absolute()) for file in files]
    folder = (
        cache_dir / "chats" / key_of(before, tokenizer.fingerprint, made_by, _probe(cfg.pictures, rules.count), paths)
    )

    def build(temporary: Path) -> dict[str, Any]:
        made = _index(temporary, files, cfg, Maker(cfg, template, tokenizer, rules.count, names), where)
        check_unchanged(before, content(), where)
        return made

    facts = build_once(folder, build)
    return _rows(cfg, folder, facts, files, rules, tokenizer.eos, seed, where)


def _rows(
    cfg: ChatData,
    folder: Path,
    facts: dict[str, Any],
    files: Sequence[TextFile],
    rules: MediaRules,
    pad: int,
    seed: int,
    where: str,
) -> ChatRows:
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("offsets", "places", "origins")}
    chosen = np.flatnonzero(on_side(np.load(folder / "hashes.npy", mmap_mode="r"), cfg))
    if not len(chosen):
        raise ValueError(
            f"{where}.part = {cfg.part!r} with held_out = {cfg.held_out} leaves none of the {facts['kept']} samples; "
            "change held_out, or give more samples"
        )
    lengths = arrays["offsets"][chosen + 1] - arrays["offsets"][chosen]
    packed = plan_whole(lengths, cfg.seq_len, seed)
    rows = len(packed.bounds) - 1
    media = folder / "media.json"
    told = {
        "documents": len(chosen),
        "tokens": int(lengths.sum()),
        "rows": rows,
        "vocab": facts["vocab"],
        "length": cfg.seq_len,
        "content": int(folder.name[:15], 16),
        **{name: facts[name] for name in _COUNTS},
    }
    order = functools.lru_cache(maxsize=2)(lambda epoch: permutation(rows, seed, epoch, 1))
    return ChatRows(
        cfg=cfg,
        count=rules.count,
        tokens=np.memmap(folder / "tokens.bin", np.uint32, mode="r"),
        learnt=np.memmap(folder / "learnt.bin", np.uint8, mode="r"),
        starts=arrays["offsets"][chosen],
        lengths=lengths,
        places=np.stack([arrays["places"][chosen], arrays["places"][chosen + 1]], axis=1),
        origins=arrays["origins"][chosen],
        media=np.memmap(media, np.uint8, mode="r"),
        names=tuple(file.name for file in files),
        packed=packed,
        order=order,
        pad=pad,
        facts=told,
        decoders=Decoders(),
    )


def chat_texts(cfg: ChatData, files: Sequence[TextFile]) -> Iterator[str]:
    """Yields who says what in the samples on the side of the split that `cfg.part` names.

    Templates write the role into each message, so a tokenizer that learns from these texts should know the word.
    """
    for sample in read_samples(files, cfg.media_root):
        if cfg.part == "all" or on_side(np.array([sample.hash], np.uint64), cfg)[0]:
            for message in sample.messages:
                yield message.role
                yield from (item.text for item in message.items if item.text)


@attrs.frozen
class Maker:
    """What makes tokens of a sample."""

    cfg: ChatData
    """The config."""
    template: Template
    """The chat template."""
    tokenizer: Tokenizer
    """The tokenizer."""
    count: Callable[[Media], int]
    """The model's rule for how many tokens a `Media` takes."""
    names: Tokens
    """The special tokens of images and videos."""

    def encoded(self, sample: Sample, entries: Sequence[Entry]) -> Encoded:
        """Returns the sample as tokens."""
        pieces = rendered(self.template, self.special, sample.messages)
        return encode(pieces, [self.fitted(entry) for entry in entries], self.tokenizer, self.names)

    @property
    def special(self) -> tuple[str, ...]:
        """Texts that are tokens of their own where the template writes them."""
        return (*self.tokenizer.special, self.names.announce)

    def fitted(self, entry: Entry) -> Fitted:
        """Returns what an image or a video becomes."""
        return fit(_at_level(self.cfg.pictures, entry.level), entry.shape, self.count, entry.alone)

    def entries(self, sample: Sample) -> list[Entry]:
        """Returns the images and videos of a sample, at the config's own size."""
        images = sum(ref.kind == "image" for ref in sample.media)
        made = []
        for ref in sample.media:
            shape = shape_of(ref, self.cfg.max_pixels)
            try:
                fitted = fit(self.cfg.pictures, shape, self.count, images == 1)
            except ValueError as error:
                raise ValueError(f"{ref}: {error}") from error
            made.append(Entry(ref=ref, shape=shape, level=0, alone=images == 1, tokens=fitted.tokens))
        return made

    def made(self, sample: Sample, most: int) -> tuple[Encoded, list[Entry], str]:
        """Returns a sample as at most `most` tokens, and what was done to it: nothing, shrunk, cut or dropped.

        Raises ValueError where it is longer and the policy is to fail.
        """
        entries = self.entries(sample)
        try:
            encoded = self.encoded(sample, entries)
            if len(encoded.tokens) <= most:
                return encoded, entries, ""
            if self.cfg.too_long == "shrink":
                return self._smaller(sample, entries, most)
        except ValueError as error:
            raise ValueError(f"{sample.where}: {error}") from error
        if self.cfg.too_long == "fail":
            raise ValueError(
                f"{sample.where}: the sample has {len(encoded.tokens)} tokens, {sum(e.tokens for e in entries)} of "
                f"them of {len(entries)} images and videos, and a row has seq_len = {most}; raise that, or set "
                "too_long to shrink, cut or drop"
            )
        if self.cfg.too_long == "drop":
            return encoded, entries, "dropped"
        kept = cut(encoded, most)
        # A template may show images in another order than the messages.
        left = [e for e, span in zip(entries, encoded.spans, strict=True) if span[1] <= len(kept.tokens)]
        return kept, left, "cut" if any(kept.learnt[1:]) else "dropped"

    def _smaller(self, sample: Sample, entries: list[Entry], most: int) -> tuple[Encoded, list[Entry], str]:
        level = 1
        while (pictures := shrunk(self.cfg.pictures, level)) is not None:
            smaller = [
                attrs.evolve(e, level=level, tokens=fit(pictures, e.shape, self.count, e.alone).tokens) for e in entries
            ]
            if smaller != entries:
                encoded = self.encoded(sample, smaller)
                if len(encoded.tokens) <= most:
                    return encoded, smaller, "shrunk"
            level += 1
        return self.encoded(sample, entries), entries, "dropped"


def cut(encoded: Encoded, most: int) -> Encoded:
    """Returns at most the first `most` tokens: an image or a video that would be cut goes as a whole, and what follows.

    Spans of those that are left out are left out too.
    """
    end = most
    for start, stop in sorted(encoded.spans, reverse=True):
        if start < end < stop:
            end = start
    return Encoded(
        tokens=encoded.tokens[:end],
        learnt=encoded.learnt[:end],
        spans=[span for span in encoded.spans if span[1] <= end],
    )


def _at_level(pictures: Pictures, level: int) -> Pictures:
    made = shrunk(pictures, level) if level else pictures
    assert made is not None
    return made


def _entry(value: Sequence[Any]) -> Entry:
    ref, shape, level, alone, tokens = value
    ref["place"] = tuple(ref["place"])
    return Entry(ref=Ref(**ref), shape=Shape(**shape), level=level, alone=alone, tokens=tokens)


def _probe(pictures: Pictures, count: Callable[[Media], int]) -> list[int]:
    """Returns the tokens of items of some sizes, by which an index knows the rule of the model that it is for."""
    made = []
    for height, width in _PROBES:
        for shape in (
            Shape(height=height, width=width),
            Shape(height=height, width=width, kind="video", frames=20, fps=4.0),
        ):
            try:
                made.append(fit(pictures, shape, count).tokens)
            except ValueError:
                made.append(-1)
    return made


def _index(folder: Path, files: Sequence[TextFile], cfg: ChatData, maker: Maker, where: str) -> dict[str, Any]:
    offsets, places, hashes, origins = array("q", [0]), array("q", [0]), array("Q"), array("q")
    counts = dict.fromkeys(_COUNTS, 0)
    largest = 0
    with (
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "learnt.bin").open("wb") as learnt,
        (folder / "media.json").open("wb") as media,
    ):
        for sample in read_samples(files, cfg.media_root):
            encoded, entries, done = maker.made(sample, cfg.seq_len)
            counts["samples"] += 1
            counts.update({done: counts[done] + 1} if done else {})
            if done == "dropped":
                continue
            ids = np.array(encoded.tokens, np.uint32)
            tokens.write(ids.tobytes())
            learnt.write(np.array(encoded.learnt, np.uint8).tobytes())
            line = json.dumps([list(attrs.asdict(entry).values()) for entry in entries]).encode()
            media.write(line)
            offsets.append(offsets[-1] + len(ids))
            places.append(places[-1] + len(line))
            hashes.append(sample.hash)
            origins.extend((sample.file, sample.line))
            largest = max(largest, int(ids.max()))
    if not hashes:
        raise ValueError(
            f"{where}: all {counts['samples']} samples have more than seq_len = {cfg.seq_len} tokens and were left "
            "out; raise it"
        )
    np.save(folder / "offsets.npy", np.frombuffer(offsets, np.int64))
    np.save(folder / "places.npy", np.frombuffer(places, np.int64))
    np.save(folder / "hashes.npy", np.frombuffer(hashes, np.uint64))
    np.save(folder / "origins.npy", np.frombuffer(origins, np.int64).reshape(-1, 2))
    return {"vocab": largest + 1, "kept": len(hashes), **counts}
