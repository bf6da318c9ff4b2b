"""A tokenizer as a frozen record, read from a Hugging Face folder."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
"""Files of a tokenizer, as a Hugging Face folder has them beside the weights; only the first is always there."""


@attrs.frozen(kw_only=True, eq=False)
class Tokenizer:
    """What lf needs of a tokenizer."""

    encode_batch: Callable[[Sequence[str]], list[list[int]]]
    """Ids of each text. No special token is added, and text that looks like one is plain text."""
    decode: Callable[[Sequence[int]], str]
    """Text of ids, special tokens written out."""
    vocab: int
    """Largest id + 1."""
    eos: int
    """Id of the end-of-text token."""
    fingerprint: str
    """sha256 of `tokenizer.json`."""
    files: Mapping[str, bytes]
    """Files of the tokenizer by name, as they must stand beside exported weights."""
    special: Mapping[str, int] = attrs.field(factory=dict)
    """Ids of the special tokens, which `encode_batch` never gives."""
    start: tuple[int, ...] = ()
    """Ids that its own template puts before a text: PaliGemma's begin-of-text token, say."""


def read_tokenizer(path: Path) -> Tokenizer:
    """Returns the tokenizer of a Hugging Face folder, or of a `tokenizer.json` with its neighbours.

    Raises ValueError when there is no usable `tokenizer.json`, or no file that names the end-of-text token.
    """
    import tokenizers

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"tokenizer {str(path)!r}: there is no {file.name}; give a folder that has one (the hf/ of a run has that "
            "of the run), or write it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    data = file.read_bytes()
    try:
        inner = tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # tokenizers raises the base class
        raise ValueError(f"{file}: not a tokenizer that `tokenizers` reads ({error}); fetch it again") from error
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    companions = {name: file.with_name(name) for name in FILES[1:]}
    files = {name: companion.read_bytes() for name, companion in companions.items() if companion.is_file()}
    vocab = max(inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return Tokenizer(
        encode_batch=lambda texts: [
            encoding.ids for encoding in inner.encode_batch_fast(list(texts), add_special_tokens=False)
        ],
        decode=lambda ids: str(inner.decode(list(ids), skip_special_tokens=False)),
        vocab=vocab,
        eos=_eos(file, inner.token_to_id, vocab),
        fingerprint=hashlib.sha256(data).hexdigest(),
        files={"tokenizer.json": data, **files},
        special={token.content: i for i, token in inner.get_added_tokens_decoder().items() if token.special},
        start=_start(inner),
    )


def _start(inner: Any) -> tuple[int, ...]:
    """Returns the ids before those of a text that has the template's tokens around it."""
    plain, whole = (inner.encode("a", add_special_tokens=on).ids for on in (False, True))
    places = range(len(whole) - len(plain) + 1)
    return tuple(whole[: next((at for at in places if whole[at : at + len(plain)] == plain), 0)])


def _eos(file: Path, token_to_id: Callable[[str], int | None], vocab: int) -> int:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read_json(file.with_name(name)).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            found = token_to_id(token) if isinstance(token, str) else None
            if found is None:
                raise ValueError(
                    f"{file.with_name(name)}: eos_token = {token!r} is not in {file}; set it to one that is"
                )
            return found
    for name in ("generation_config.json", "config.json"):
        config = _read_json(file.with_name(name))
        ids = config.get("eos_token_id")
        if ids is None and isinstance(config.get("text_config"), dict):
            ids = config["text_config"].get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if first is not None:
            if type(first) is not int or not 0 <= first < vocab:
                raise ValueError(f"{file.with_name(name)}: eos_token_id = {ids!r} is not an id below {vocab} of {file}")
            return first
    raise ValueError(
        f"{file}: nothing beside it names the end-of-text token; set eos_token in tokenizer_config.json of that folder"
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: a JSON {type(value).__name__}, not an object; fetch it again")
    return value
