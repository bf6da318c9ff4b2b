"""What the data tests share: a tokenizer of bytes, and ways to open text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lf.data.config import TextData
from lf.data.hf_tokenizer import Tokenizer
from lf.data.source import DataCtx, open_data
from lf.data.text import TextRows


def byte_tokenizer() -> Tokenizer:
    """One id a byte, and 256 ends a text."""
    return Tokenizer(
        encode_batch=lambda texts: [list(text.encode()) for text in texts],
        decode=lambda ids: bytes(i for i in ids if i < 256).decode(),
        vocab=257,
        eos=256,
        fingerprint="bytes",
        files={},
    )


def context(folder: Path, **fields: Any) -> DataCtx:
    return DataCtx(**{"seed": 0, "cache_dir": folder / "cache", "tokenizer": byte_tokenizer(), **fields})


def open_text(folder: Path, *paths: Path, seed: int = 0, **fields: Any) -> TextRows:
    rows = open_data(TextData(paths=tuple(map(str, paths)), **fields), context(folder, seed=seed))
    assert isinstance(rows, TextRows)
    return rows


def documents_of(rows: TextRows) -> list[str]:
    """Every document of the source as text, in the order of the files."""
    return [
        bytes(rows.tokens[start : start + length - 1].astype(np.uint8)).decode()
        for start, length in zip(rows.starts, rows.lengths, strict=True)
    ]


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def epoch_rows(rows: TextRows, epoch: int) -> Sequence[dict[str, Any]]:
    return [rows.row(epoch, index) for index in range(len(rows))]
