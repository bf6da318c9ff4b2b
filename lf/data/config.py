"""Where samples come from, as data; opening them is `data/text.py` and its neighbours."""

from typing import Literal

import attrs
from attrs.validators import and_, ge, gt, le, min_len


@attrs.frozen(kw_only=True)
class DataConfig:
    """A data source: the type says which kind. A class of your own needs one rule, `@open_data.register`."""


@attrs.frozen(kw_only=True)
class TextData(DataConfig):
    """Documents of text, packed into rows of one length. The end-of-text token follows each; none stands before it."""

    paths: tuple[str, ...] = attrs.field(validator=min_len(1))
    """Files or folders; folders are searched for the suffixes below, in sorted order. No file may be there twice."""
    suffixes: tuple[str, ...] = (".txt", ".jsonl", ".jsonl.gz", ".parquet")
    """Suffixes of the files that a folder is searched for; anything but jsonl and parquet is one document a file."""
    exclude: tuple[str, ...] = ()
    """Glob patterns, over the path below the folder, of files to leave out; `*` matches slashes too."""
    field: str = "text"
    """Key of the text in a `.jsonl` line, or column of a `.parquet` file."""
    seq_len: int = attrs.field(default=1024, validator=ge(2))
    """Tokens of a row."""
    cross_documents: bool = False
    """Whether a token may attend to earlier documents of its row."""
    part: Literal["all", "train", "held_out"] = "all"
    """Which documents: all of them, or one side of the split by the hash of their bytes."""
    held_out: float = attrs.field(default=0.02, validator=and_(ge(0.0), le(1.0)))
    """Share of the documents on the `held_out` side of the split."""


@attrs.frozen(kw_only=True)
class Weighted:
    """One part of a mixture."""

    data: DataConfig
    """The source."""
    weight: float = attrs.field(default=1.0, validator=gt(0.0))
    """Its share of the rows, relative to the other parts."""


@attrs.frozen(kw_only=True)
class Mixture(DataConfig):
    """Rows of several sources, interleaved in fixed proportions."""

    parts: tuple[Weighted, ...] = attrs.field(validator=min_len(1))
    """The sources and their weights."""


@attrs.frozen(kw_only=True)
class TokenizerConfig:
    """A tokenizer: the type says where it comes from."""


@attrs.frozen(kw_only=True)
class HfTokenizer(TokenizerConfig):
    """A Hugging Face tokenizer folder, or a `tokenizer.json`.

    What its own template adds to a text is left out: packed documents, and the prompts of `generate.py`, have no
    begin-of-text token in front (Llama's `<|begin_of_text|>`); the end-of-text token alone parts them.
    """

    path: str
    """The folder or file."""


@attrs.frozen(kw_only=True)
class TrainedBpe(TokenizerConfig):
    """A byte-level BPE tokenizer trained on the run's own text, once, and cached."""

    vocab: int = attrs.field(default=4096, validator=ge(257))
    """Entries of the vocabulary, the end-of-text token included."""
    sample_bytes: int = attrs.field(default=8_000_000, validator=ge(1))
    """Bytes of text that the merges are learnt from, spread evenly over the documents."""
