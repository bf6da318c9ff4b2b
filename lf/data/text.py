"""Documents of text: tokenised once into a memory-mapped cache, then packed into rows that are found by index.

Shapes: D documents of the source, T tokens of the cache, S positions of a row.
"""

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.data.cache import build_once, key_of
from lf.data.config import ChatData, TextData
from lf.data.files import Document, TextFile, file_digests, find_files, read_documents
from lf.data.hf_tokenizer import Tokenizer
from lf.data.outline import outline
from lf.plan.packing import EpochPlan, pack_row, pieces, plan_epoch, row_count, segments

_FORMAT = 2
_BATCH_CHARACTERS = 4_000_000
_BATCH_DOCUMENTS = 1024


@attrs.frozen(kw_only=True, eq=False)
class TextRows:
    """The rows of a text source."""

    tokens: NDArray[np.unsignedinteger[Any]]
    """[T] ids of the cache, mapped from disk; every document ends with the end-of-text token."""
    starts: NDArray[np.int64]
    """[D] first token of each document of this side of the split."""
    lengths: NDArray[np.int64]
    """[D] tokens of each document."""
    origins: NDArray[np.int64]
    """[D, 2] file and line of each document."""
    names: tuple[str, ...]
    """Names of the files."""
    total: int
    """Tokens of all documents."""
    seq_len: int
    """Tokens of a row."""
    cross_documents: bool
    """Whether a row is one segment."""
    pad: int
    """Id that fills the last row."""
    vocab: int
    """Largest id of the cache + 1."""
    content: int
    """Hash of what the cache was made from: the bytes of the files, and the tokenizer."""
    plan: Callable[[int], EpochPlan]
    """The plan of an epoch."""

    def __len__(self) -> int:
        """Returns the rows of one epoch."""
        return row_count(self.total, self.seq_len)

    def row(self, epoch: int, index: int) -> dict[str, Any]:
        """Returns a row: `tokens` [S], `labels` [S], `lengths`, `real` (tokens that are no padding) and `id`.

        The fields are those of `PackedRow`. The id reads `epoch:index file:line`, the place being the first document's.
        """
        parts, starts = self.parts(epoch, index)
        stream = [
            self.tokens[self.starts[document] + start : self.starts[document] + stop] for document, start, stop in parts
        ]
        packed = pack_row(
            np.concatenate(stream).astype(np.int32),
            starts,
            seq_len=self.seq_len,
            pad=self.pad,
            cross_documents=self.cross_documents,
        )
        return {**attrs.asdict(packed, recurse=False), "id": self.ident(epoch, index, parts[0][0])}

    def parts(self, epoch: int, index: int) -> tuple[list[tuple[int, int, int]], list[int]]:
        """Returns the parts of a row, as (document, start in it, stop in it), and where each but the first starts."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of an epoch of {len(self)} rows")
        plan = self.plan(epoch)
        first = int(plan.rows[index]) * self.seq_len
        parts = pieces(plan.bounds, first, min(first + self.seq_len + 1, self.total))
        starts = [int(plan.bounds[place]) - first for place, _, _ in parts[1:]]
        return [(int(plan.documents[place]), start, stop) for place, start, stop in parts], starts

    def ident(self, epoch: int, index: int, document: int) -> str:
        """Returns the id of a row that begins with a document."""
        file, line = self.origins[document].tolist()
        place = f"{self.names[file]}:{line}" if line else self.names[file]
        return f"{epoch}:{index} {place}"

    def describe(self) -> dict[str, int]:
        """Returns `documents`, `tokens` and `rows` of an epoch, `vocab`, `length` of a row, and `content`, a hash."""
        return {
            "documents": len(self.lengths),
            "tokens": self.total,
            "rows": len(self),
            "vocab": self.vocab,
            "length": self.seq_len,
            "content": self.content,
        }


@outline.register
def _(rows: TextRows, epoch: int, index: int) -> dict[str, Any]:
    parts, starts = rows.parts(epoch, index)
    real = min(sum(stop - start for _, start, stop in parts), rows.seq_len)
    lengths = segments([] if rows.cross_documents else starts, real, rows.seq_len)
    return {"id": rows.ident(epoch, index, parts[0][0]), "lengths": lengths}


def open_text(cfg: TextData, *, tokenizer: Tokenizer | None, seed: int, cache_dir: Path, where: str) -> TextRows:
    """Returns the rows of a text source, tokenising it first unless `cache_dir` holds it already.

    The cache is keyed by the bytes of the files and by the tokenizer; the length of rows and the split are not part of
    it. Documents without a token are left out. `where` names the config in errors.
    """
    if tokenizer is None:
        raise ValueError(f"{where} is text, which needs a tokenizer; set tokenizer to TrainedBpe() or HfTokenizer(...)")
    check_part(cfg, where)
    files = find_files(cfg, where)
    content = text_key(cfg, files, cache_dir)

    def build(temporary: Path) -> dict[str, Any]:
        made = _tokenise(temporary, files, cfg, tokenizer, where)
        check_unchanged(content, text_key(cfg, files, cache_dir), where)
        return made

    folder = cache_dir / "tokens" / key_of(content, tokenizer.fingerprint, tokenizer.eos)
    facts = build_once(folder, build)
    offsets = np.load(folder / "offsets.npy", mmap_mode="r")
    chosen = np.flatnonzero(on_side(np.load(folder / "hashes.npy", mmap_mode="r"), cfg))
    if not len(chosen):
        raise ValueError(
            f"{where}.part = {cfg.part!r} with held_out = {cfg.held_out} leaves none of the {facts['documents']} "
            "documents; change held_out, or give more documents"
        )
    lengths = offsets[chosen + 1] - offsets[chosen]
    plan = functools.partial(plan_epoch, lengths, cfg.seq_len, seed)
    return TextRows(
        tokens=np.memmap(folder / "tokens.bin", facts["dtype"], mode="r"),
        starts=offsets[chosen],
        lengths=lengths,
        total=int(lengths.sum()),
        origins=np.load(folder / "origins.npy", mmap_mode="r")[chosen],
        names=tuple(file.name for file in files),
        seq_len=cfg.seq_len,
        cross_documents=cfg.cross_documents,
        pad=tokenizer.eos,
        vocab=facts["vocab"],
        content=int(folder.name[:15], 16),
        plan=functools.lru_cache(maxsize=2)(plan),
    )


def check_part(cfg: TextData | ChatData, where: str) -> None:
    """Raises ValueError where the side of the split that `cfg.part` names is empty by its own settings."""
    if (cfg.part, cfg.held_out) in (("held_out", 0.0), ("train", 1.0)):
        what = (
            "nothing is held out" if cfg.part == "held_out" else "everything is held out, and nothing left to train on"
        )
        raise ValueError(
            f"{where}.part = {cfg.part!r} with held_out = {cfg.held_out}: {what}; set {where}.held_out between 0 and 1"
        )


def text_key(cfg: TextData, files: Sequence[TextFile], cache_dir: Path) -> str:
    """Returns a hash of everything that decides which documents the files hold."""
    kinds = [file.kind for file in files]
    return key_of(_FORMAT, cfg.field, kinds, file_digests(files, cache_dir))


def check_unchanged(before: str, after: str, where: str) -> None:
    """Raises ValueError unless two `text_key`, from before and after the files were read, are the same."""
    if before != after:
        raise ValueError(
            f"{where}: a file changed while it was read, so what was read is no one version of it; start again when "
            "nothing writes to the files"
        )


def read_texts(cfg: TextData, files: Sequence[TextFile]) -> Iterator[str]:
    """Yields the texts of the documents on the side of the split that `cfg.part` names."""
    for document in read_documents(files, cfg.field):
        if cfg.part == "all" or on_side(np.array([document.hash], np.uint64), cfg)[0]:
            yield document.text


def on_side(hashes: NDArray[np.uint64], cfg: TextData | ChatData) -> NDArray[np.bool_]:
    """Returns which documents, given by their hashes, are on the side of the split that `cfg.part` names."""
    held_out = (hashes >> np.uint64(11)) * 2.0**-53 < cfg.held_out
    return {"all": np.ones_like(held_out), "train": ~held_out, "held_out": held_out}[cfg.part]


def _tokenise(
    folder: Path, files: Sequence[TextFile], cfg: TextData, tokenizer: Tokenizer, where: str
) -> dict[str, Any]:
    dtype = np.dtype(np.uint16 if tokenizer.vocab <= 2**16 else np.uint32)
    offsets, hashes, origins, largest = array("q", [0]), array("Q"), array("q"), 0
    with (folder / "tokens.bin").open("wb") as out:
        for batch in _batches(read_documents(files, cfg.field)):
            encoded = tokenizer.encode_batch([document.text for document in batch])
            for document, ids in zip(batch, encoded, strict=True):
                if not ids:
                    continue  # Nothing follows its end-of-text token inside the document, so there is nothing to learn.
                row = np.array([*ids, tokenizer.eos], dtype)
                out.write(row.tobytes())
                offsets.append(offsets[-1] + len(row))
                hashes.append(document.hash)
                origins.extend((document.file, document.line))
                largest = max(largest, int(row.max()))
    if not hashes:
        raise ValueError(f"{where}.paths = {cfg.paths}: no document of the {len(files)} files has a token; give text")
    np.save(folder / "offsets.npy", np.frombuffer(offsets, np.int64))
    np.save(folder / "hashes.npy", np.frombuffer(hashes, np.uint64))
    np.save(folder / "origins.npy", np.frombuffer(origins, np.int64).reshape(-1, 2))
    return {"dtype": dtype.name, "vocab": largest + 1, "documents": len(hashes)}


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
