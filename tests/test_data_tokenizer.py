"""Tokenizers that are trained, and those that are read from a folder."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf.data.config import DataConfig, HfTokenizer, LatentData, TextData, TokenizerConfig, TrainedBpe
from lf.data.hf_tokenizer import Tokenizer, read_tokenizer
from lf.data.source import DataCtx, open_data
from lf.data.text import TextRows
from lf.data.tokenizer import END_OF_TEXT, open_tokenizer, spread_sample
from tests.data_tools import context, documents_of, write

LINES = [f"def function_{n}(value): return value + {n}  # the {n}th of its kind" for n in range(300)]


def corpus(folder: Path, lines: list[str] = LINES) -> TextData:
    path = write(folder / "corpus" / "a.jsonl", "\n".join(json.dumps({"text": line}) for line in lines))
    return TextData(paths=(str(path),))


def trained(folder: Path, data: DataConfig | None = None, **fields: Any) -> Tokenizer:
    cfg = TrainedBpe(**{"vocab": 400, **fields})
    return open_tokenizer(cfg, data or corpus(folder), context(folder, tokenizer=None))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return trained(tmp_path_factory.mktemp("bpe"))


def test_data_without_texts_trains_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"texts has no rule for .*LatentData.*set tokenizer to HfTokenizer"):
        trained(tmp_path, LatentData(path="x"))


@pytest.fixture
def hub(tmp_path: Path, bpe: Tokenizer) -> Path:
    """A folder as it comes from the hub."""
    for name, data in bpe.files.items():
        write(tmp_path / "hub" / name, data)
    return tmp_path / "hub"


# Trained


@settings(max_examples=60, derandomize=True, deadline=None)
@given(text=st.text())
def test_any_text_comes_back(bpe: Tokenizer, text: str) -> None:
    (ids,) = bpe.encode_batch([text])
    assert bpe.decode(ids) == text
    assert all(0 <= i < bpe.vocab and i != bpe.eos for i in ids)


def test_special_looking_text_is_plain_text(bpe: Tokenizer) -> None:
    (ids,) = bpe.encode_batch([f"a {END_OF_TEXT} b"])
    assert bpe.eos not in ids
    assert bpe.decode(ids) == f"a {END_OF_TEXT} b"
    assert bpe.decode([bpe.eos]) == END_OF_TEXT


def test_merges_are_learnt_up_to_the_vocabulary(bpe: Tokenizer) -> None:
    assert bpe.vocab == 400
    (ids,) = bpe.encode_batch([LINES[5]])
    assert len(ids) < len(LINES[5]) / 2


def test_transformers_reads_what_was_written(tmp_path: Path, bpe: Tokenizer) -> None:
    from transformers import AutoTokenizer

    for name, data in bpe.files.items():
        write(tmp_path / name, data)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (bpe.eos, bpe.eos)
    assert len(theirs) == bpe.vocab
    sample = [*LINES[:20], "é 漢 🙂\n\t  x", " leading and trailing ", "it 's , spaced ."]
    ours = bpe.encode_batch(sample)
    assert [theirs.encode(text, add_special_tokens=False) for text in sample] == ours
    assert [theirs.decode(ids) for ids in ours] == sample == [bpe.decode(ids) for ids in ours]
    theirs.save_pretrained(tmp_path / "again")
    assert read_tokenizer(tmp_path / "again").encode_batch(sample) == ours


TRAIN = """
import sys
from pathlib import Path
from lf.data.config import TextData, TrainedBpe
from lf.data.source import DataCtx
from lf.data.text import TextRows
from lf.data.tokenizer import open_tokenizer

ctx = DataCtx(seed=0, cache_dir=Path(sys.argv[2]))
print(open_tokenizer(TrainedBpe(vocab=400), TextData(paths=(sys.argv[1],)), ctx).fingerprint)
"""


def test_training_is_the_same_in_every_process(tmp_path: Path, bpe: Tokenizer) -> None:
    path = corpus(tmp_path).paths[0]
    prints = {bpe.fingerprint}
    for n, hash_seed in enumerate(("1", "2")):
        command = [sys.executable, "-c", TRAIN, path, str(tmp_path / f"cache{n}")]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "TOKENIZERS_PARALLELISM": ("false", "true")[n]}
        root = Path(__file__).parents[1]
        prints.add(
            subprocess.run(command, env=env, cwd=root, check=True, capture_output=True, text=True).stdout.strip()
        )
    assert len(prints) == 1


def test_a_trained_tokenizer_is_cached_by_content(tmp_path: Path) -> None:
    first = trained(tmp_path)
    (file,) = tmp_path.glob("cache/tokenizers/*/tokenizer.json")
    time = file.stat().st_mtime_ns
    assert trained(tmp_path).fingerprint == first.fingerprint
    assert file.stat().st_mtime_ns == time
    assert trained(tmp_path, vocab=300).vocab == 300
    assert trained(tmp_path, corpus(tmp_path, LINES[::2])).fingerprint != first.fingerprint
    assert len(list(tmp_path.glob("cache/tokenizers/*/tokenizer.json"))) == 3


def test_the_held_out_side_teaches_nothing(tmp_path: Path) -> None:
    data = corpus(tmp_path, [*LINES, *(f"{'qzx' * 40} {n}" for n in range(40))])
    held_out = attrs.evolve(data, part="held_out", held_out=0.5)
    train = attrs.evolve(held_out, part="train")
    sides = {cfg.part: trained(tmp_path, cfg).fingerprint for cfg in (data, train, held_out)}
    assert len(set(sides.values())) == 3
    train_rows = open_data(train, context(tmp_path))
    assert isinstance(train_rows, TextRows)
    kept = documents_of(train_rows)
    alone = trained(tmp_path / "alone", corpus(tmp_path / "alone", kept))
    assert alone.fingerprint == sides["train"]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 30_000), min_size=1, max_size=30), st.integers(1, 400_000))
def test_the_sample_has_its_size_and_is_spread(sizes: list[int], size: int) -> None:
    found = [chr(97 + n % 26) * length for n, length in enumerate(sizes)]
    sample = list(spread_sample(lambda: iter(found), size))
    total, taken = sum(sizes), sum(map(len, sample))
    if size >= total:
        assert sample == found
    else:
        assert size - min(4096, size - 1, max(sizes)) <= taken <= size


def test_the_sample_reaches_the_last_documents() -> None:
    found = [f"{n:04d}" * 2048 for n in range(100)]
    sample = list(spread_sample(lambda: iter(found), 82_000))
    starts = [int(text[:4]) for text in sample]
    assert len(starts) >= 10
    assert max(b - a for a, b in zip([0, *starts], [*starts, 99], strict=True)) <= 15
    cut = list(spread_sample(lambda: iter(["é" * 10_000]), 4097))
    assert cut == ["é" * 2048]


def test_bad_text_stops_training_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"text": "fine"}\nnot json')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not JSON"):
        trained(tmp_path, TextData(paths=(str(path),)))
    empty = write(tmp_path / "b.jsonl", '{"text": ""}')
    with pytest.raises(ValueError, match="no text to learn a tokenizer from"):
        trained(tmp_path, TextData(paths=(str(empty),)))
    assert not list(tmp_path.glob("cache/tokenizers/*/"))


# From a folder


def test_a_folder_and_its_file_open_alike_and_files_are_kept(hub: Path, bpe: Tokenizer) -> None:
    extra = {"special_tokens_map.json": b'{"eos_token": "<|endoftext|>"}', "chat_template.jinja": b"{{ messages }}\n"}
    for name, data in extra.items():
        write(hub / name, data)
    write(hub / "config.json", "{}")
    for path in (hub, hub / "tokenizer.json"):
        opened = open_tokenizer(HfTokenizer(path=str(path)), TextData(paths=("unused",)), context(hub))
        assert opened.fingerprint == bpe.fingerprint
        assert opened.encode_batch(LINES[:3]) == bpe.encode_batch(LINES[:3])
        assert opened.files == {**bpe.files, **extra}


def test_settings_in_the_file_do_not_cut_pad_or_add(hub: Path, bpe: Tokenizer) -> None:
    from tokenizers import Tokenizer as Inner
    from tokenizers.processors import TemplateProcessing

    inner = Inner.from_file(str(hub / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=50)
    inner.post_processor = TemplateProcessing(single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)])
    inner.save(str(hub / "tokenizer.json"))
    assert read_tokenizer(hub).encode_batch(LINES[:3]) == bpe.encode_batch(LINES[:3])


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"tokenizer_config.json": {"eos_token": "b"}, "config.json": {"eos_token_id": 3}}, "b"),
        ({"tokenizer_config.json": {"eos_token": {"content": "c", "lstrip": False}}}, "c"),
        ({"special_tokens_map.json": {"eos_token": "d"}}, "d"),
        ({"tokenizer_config.json": {"eos_token": None}, "config.json": {"eos_token_id": 0}}, 0),
        ({"generation_config.json": {"eos_token_id": [7, 8]}, "config.json": {"eos_token_id": 3}}, 7),
        ({"config.json": {"text_config": {"eos_token_id": 5}}}, 5),
    ],
)
def test_the_end_of_text_is_found(hub: Path, bpe: Tokenizer, files: dict[str, Any], eos: str | int) -> None:
    (hub / "tokenizer_config.json").unlink()
    for name, value in files.items():
        write(hub / name, json.dumps(value))
    expected = bpe.encode_batch([eos])[0][0] if isinstance(eos, str) else eos
    assert read_tokenizer(hub).eos == expected


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.json", None, r"there is no tokenizer\.json; give a folder that has one .*, or write it with"),
        ("tokenizer.json", b'{"model"', r"tokenizer\.json: not a tokenizer that `tokenizers` reads"),
        ("tokenizer.json", b"\xff\xfe", r"tokenizer\.json: not a tokenizer that `tokenizers` reads"),
        ("tokenizer_config.json", None, r"nothing beside it names the end-of-text token; set eos_token in"),
        ("tokenizer_config.json", b"{", r"tokenizer_config\.json: not JSON"),
        ("tokenizer_config.json", b"[]", r"tokenizer_config\.json: a JSON list, not an object"),
        ("tokenizer_config.json", b'{"eos_token": "<gone>"}', r"eos_token = '<gone>' is not in .*tokenizer\.json"),
        ("tokenizer_config.json", b'{"eos_token": 5}', r"eos_token = 5 is not in"),
    ],
)
def test_folders_that_will_not_do_are_refused(hub: Path, name: str, data: bytes | None, message: str) -> None:
    (hub / name).unlink()
    if data is not None:
        write(hub / name, data)
    with pytest.raises(ValueError, match=message):
        read_tokenizer(hub)


@pytest.mark.parametrize("ids", [400, -1, "2", [1000]])
def test_an_end_of_text_id_must_be_in_the_vocabulary(hub: Path, ids: Any) -> None:
    (hub / "tokenizer_config.json").unlink()
    write(hub / "config.json", json.dumps({"eos_token_id": ids}))
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id = .* is not an id below 400 of"):
        read_tokenizer(hub)


def test_a_missing_folder_and_an_unknown_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer '.*nowhere': there is no nowhere"):
        read_tokenizer(tmp_path / "nowhere")
    ctx = DataCtx(seed=0, cache_dir=tmp_path)
    with pytest.raises(NotImplementedError, match=r"open_tokenizer has no rule for lf\.data\.config\.TokenizerConfig"):
        open_tokenizer(TokenizerConfig(), TextData(paths=("unused",)), ctx)
