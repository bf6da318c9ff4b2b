"""Opens the tokenizer that a config names, training it first where the config says so."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lf.data.cache import build_once, key_of
from lf.data.config import DataConfig, HfTokenizer, TokenizerConfig, TrainedBpe
from lf.data.hf_tokenizer import Tokenizer, read_tokenizer
from lf.data.source import DataCtx, texts
from lf.data.text import check_unchanged
from lf.models.spec import no_rule

END_OF_TEXT = "<|endoftext|>"
"""The one special token of a trained tokenizer."""

_FORMAT = 1
_PIECE_BYTES = 4096


@functools.singledispatch
def open_tokenizer(cfg: TokenizerConfig, data: DataConfig, ctx: DataCtx) -> Tokenizer:
    """Returns the tokenizer of a config; `data` is the run's training data, which it may learn from."""
    raise no_rule(open_tokenizer, cfg)


@open_tokenizer.register
def _(cfg: HfTokenizer, data: DataConfig, ctx: DataCtx) -> Tokenizer:
    return read_tokenizer(Path(cfg.path).expanduser())


@open_tokenizer.register
def _(cfg: TrainedBpe, data: DataConfig, ctx: DataCtx) -> Tokenizer:
    try:
        source = texts(data, ctx)
    except NotImplementedError as error:
        raise ValueError(
            f"tokenizer = TrainedBpe learns from the texts of the data, which has none that lf knows ({error}); set "
            "tokenizer to HfTokenizer(...), or to None where the model reads no text"
        ) from error
    content = source.key()

    def build(temporary: Path) -> Mapping[str, Any]:
        made = _train(temporary, cfg, source.read)
        check_unchanged(content, source.key(), ctx.path)
        return made

    folder = ctx.cache_dir / "tokenizers" / key_of(_FORMAT, cfg.vocab, cfg.sample_bytes, content, *cfg.special)
    build_once(folder, build)
    return read_tokenizer(folder)


def spread_sample(read: Callable[[], Iterator[str]], size: int) -> Iterator[str]:
    """Yields about `size` bytes of the texts that `read` gives, spread evenly over them; all of them if they are fewer.

    Two passes: the first counts, the second takes the start of a text whenever enough bytes have come due to be worth
    cutting, so that words are rarely split.
    """
    total = sum(len(text.encode()) for text in read())
    if not total:
        raise ValueError(
            "the training data, on its side of the held-out split, holds no text to learn a tokenizer from; give more "
            "documents, change part and held_out, or use HfTokenizer(...)"
        )
    passed = taken = 0
    for text in read():
        data = text.encode()
        passed += len(data)
        due = min(size, total) * passed // total - taken
        if due >= min(len(data), _PIECE_BYTES, size):
            piece = data[:due]
            taken += len(piece)
            yield piece.decode(errors="ignore")


def _train(folder: Path, cfg: TrainedBpe, read: Callable[[], Iterator[str]]) -> Mapping[str, Any]:
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=cfg.vocab,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, *cfg.special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(spread_sample(read, cfg.sample_bytes), trainer)
    (folder / "tokenizer.json").write_text(inner.to_str(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return {"vocab": inner.get_vocab_size()}
