"""Text files of every kind, the split into training and held-out text, and the cache of token ids."""

import codecs
import gzip
import json
import os
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lf.data.files as files_module
from lf.data.config import Mixture, TextData, Weighted
from lf.data.files import TextFile, file_digests, find_files, read_documents
from lf.data.source import open_data, texts
from lf.data.split import check_split
from lf.data.text import TextRows
from tests.data_tools import byte_tokenizer, context, documents_of, epoch_rows, open_text, write

TEXTS = ["one", "two\nlines", "three é 漢 \u2028 inside", "four"]


def jsonl(texts: list[str], end: str = "\n") -> str:
    return end.join(json.dumps({"text": text}, ensure_ascii=False) for text in texts) + end


def parquet(path: Path, **columns: Any) -> Path:
    import pyarrow
    from pyarrow import parquet as pq

    pq.write_table(pyarrow.table(columns), path)
    return path


# What is read


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", jsonl(TEXTS)),
        ("a.jsonl", "\ufeff" + jsonl(TEXTS)),
        ("a.jsonl", jsonl(TEXTS, "\r\n")),
        ("a.jsonl", jsonl(TEXTS).rstrip("\n")),
        ("a.jsonl", "\n \n" + jsonl(TEXTS, "\n\n")),
        ("a.jsonl", "\n".join(json.dumps({"n": float("nan"), "text": text}) for text in TEXTS)),
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS).encode())),
        ("a.jsonl.gz", gzip.compress(codecs.BOM_UTF8 + jsonl(TEXTS, "\r\n").encode())),
    ],
)
def test_json_lines_in_every_dress_hold_the_same_documents(tmp_path: Path, name: str, data: bytes | str) -> None:
    rows = open_text(tmp_path, write(tmp_path / name, data), seq_len=8)
    assert documents_of(rows) == TEXTS
    assert rows.describe() == {
        "documents": 4,
        "tokens": sum(len(text.encode()) + 1 for text in TEXTS),
        "rows": len(rows),
        "vocab": 257,
        "length": 8,
        "content": rows.content,
    }


def test_parquet_holds_the_same_documents(tmp_path: Path) -> None:
    import pyarrow

    plain = open_text(tmp_path, parquet(tmp_path / "a.parquet", text=TEXTS, n=[1, 2, 3, 4]))
    assert documents_of(plain) == TEXTS
    large = parquet(tmp_path / "b.parquet", body=pyarrow.array(TEXTS, pyarrow.large_string()).dictionary_encode())
    assert documents_of(open_text(tmp_path, large, field="body")) == TEXTS


def test_a_text_file_is_one_document_without_mark_and_carriage_returns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.md", "\ufeffone\r\ntwo\rthree\r\n")
    assert documents_of(open_text(tmp_path, path)) == ["one\ntwo\rthree\n"]


def test_folders_are_searched_in_order(tmp_path: Path) -> None:
    names = ["b.txt", "a/z.txt", "a/sub/y.txt", "a-b.txt", "a/skip/x.txt", "c.log", "a/empty.txt"]
    for name in [*names, ".hidden.txt", ".git/a.txt", "__pycache__/a.txt"]:
        write(tmp_path / "root" / name, "" if "empty" in name else name)
    (tmp_path / "root" / "a" / "loop").symlink_to(tmp_path / "root")
    (tmp_path / "root" / "self").symlink_to(tmp_path / "root" / "self")
    rows = open_text(tmp_path, tmp_path / "root", exclude=("*/skip/*",))
    assert documents_of(rows) == ["a/sub/y.txt", "a/z.txt", "a-b.txt", "b.txt"]
    logs = open_text(tmp_path, tmp_path / "root", tmp_path / "root" / "b.txt", suffixes=(".log",))
    assert documents_of(logs) == ["c.log", "b.txt"]


def test_linked_folders_are_entered_and_excluded_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "elsewhere" / "a.txt", "linked")
    write(tmp_path / "root" / "b.txt", "own")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere")
    write(tmp_path / "root" / "closed" / "c.txt", "closed")
    entered: list[str] = []
    listdir = os.listdir

    def spy(path: Path) -> list[str]:
        entered.append(path.name)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", spy)
    rows = open_text(tmp_path, tmp_path / "root", exclude=("closed/*",))
    assert documents_of(rows) == ["own", "linked"]
    assert entered[:2] == ["root", "link"]
    assert "closed" not in entered


def test_a_very_long_line_is_one_document(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", jsonl(["x" * 20_000_000, "short"]))
    found = read_documents([TextFile(path=path, name="a.jsonl", listed=True)], "text")
    assert [(document.line, len(document.text)) for document in found] == [(1, 20_000_000), (2, 5)]


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.lists(st.text(), min_size=1, max_size=8))
def test_any_text_comes_through_json_lines(tmp_path_factory: pytest.TempPathFactory, found: list[str]) -> None:
    path = write(tmp_path_factory.getbasetemp() / "any.jsonl", jsonl(found))
    read = read_documents([TextFile(path=path, name="a.jsonl", listed=True)], "text")
    assert [document.text for document in read] == [text for text in found if text]


# What is refused


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", jsonl(["ok"] * 9999) + '{"text": "cut', r"a\.jsonl:10000: not JSON \(Unterminated string"),
        ("a.jsonl", '{"text": "ok"}\nplain words\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", "[" * 100_000, r"a\.jsonl:1: JSON nested too deeply"),
        ("a.jsonl", '\n["text"]', r"a\.jsonl:2: a JSON list; every line must be one JSON object"),
        ("a.jsonl", '{"body": "x", "id": 1}', r"a\.jsonl:1: no field 'text'; the line has 'body', 'id'"),
        ("a.jsonl", '{"text": null}', r"a\.jsonl:1: field 'text' is of type NoneType; it must be a string"),
        ("a.jsonl", '{"text": 3}', r"a\.jsonl:1: field 'text' is of type int"),
        (
            "a.jsonl",
            '{"text": "ok"}\n{"text": "a\\ud83d"}',
            r"a\.jsonl:2: .*half a surrogate pair \(\\ud83d, char.* 2\)",
        ),
        ("a.jsonl", b'{"text": "ok"}\n{"text": "\xff"}', r"a\.jsonl:2: byte 11 of the line, 0xff, is not UTF-8"),
        ("a.jsonl", '{"text": "ok"}\n{"text": "a", "n": ' + "9" * 5000 + "}", r"a\.jsonl:2: JSON that cannot be read"),
        ("a.jsonl", b"", r"a\.jsonl: the file holds no text"),
        ("a.jsonl", b"\n \r\n", r"a\.jsonl: the file holds no text"),
        ("a.jsonl", codecs.BOM_UTF8, r"a\.jsonl: the file holds no text"),
        ("a.jsonl", '{"text": ""}', "no document of the 1 files has a token"),
        ("a.jsonl.gz", jsonl(TEXTS), r"a\.jsonl\.gz: cannot be read as \.jsonl\.gz"),
        ("a.jsonl.gz", gzip.compress(jsonl(TEXTS * 50).encode())[:-20], r"a\.jsonl\.gz: cannot be read as"),
        ("a.jsonl.gz", b"", r"a\.jsonl\.gz: the file holds no text"),
        ("a.txt", b"", r"a\.txt: the file holds no text"),
        ("a.txt", codecs.BOM_UTF8, r"a\.txt: the file holds no text"),
        ("a.txt", b"one\ntwo \xc3(", r"a\.txt:2: byte 5 of the line, 0xc3, is not UTF-8"),
        ("a.txt", "one".encode("utf-16"), r"a\.txt:1: byte 1 of the line, 0xff, is not UTF-8"),
        ("a.parquet", b"", r"a\.parquet: cannot be read as parquet"),
        ("a.parquet", b"PAR1 and then nothing", r"a\.parquet: cannot be read as parquet"),
    ],
)
def test_bad_files_are_refused_with_their_place(tmp_path: Path, name: str, data: bytes | str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_text(tmp_path, write(tmp_path / name, data))
    assert not list(tmp_path.glob("cache/tokens/*/"))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["x"], "n": [1]}, r"a\.parquet: no column 'text'; it has 'body', 'n'"),
        ({"text": ["x", None]}, r"a\.parquet: record 2: field 'text' is of type NoneType"),
        ({"text": [1, 2]}, r"a\.parquet: record 1: field 'text' is of type int"),
        ({"text": [b"x"]}, r"a\.parquet: record 1: field 'text' is of type bytes"),
        ({"text": []}, r"a\.parquet: the file holds no text"),
    ],
)
def test_bad_parquet_is_refused(tmp_path: Path, columns: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_text(tmp_path, parquet(tmp_path / "a.parquet", **columns))


def test_invalid_utf8_in_parquet_is_refused(tmp_path: Path) -> None:
    import pyarrow

    column = pyarrow.array([b"fine", b"\xff"]).view(pyarrow.string())
    with pytest.raises(ValueError, match=r"a\.parquet: record 2: byte 0 of 'text' is not UTF-8"):
        open_text(tmp_path, parquet(tmp_path / "a.parquet", text=column))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = parquet(tmp_path / "a.parquet", text=TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r'pip install "lf\[data\]"'):
        open_text(tmp_path, path)


def test_missing_paths_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.paths\[1\] = '.*gone' is neither a file nor a folder"):
        open_text(tmp_path, write(tmp_path / "a.txt", "a"), tmp_path / "gone")
    with pytest.raises(ValueError, match=r"data\.paths\[0\] = '' is neither"):
        open_data(TextData(paths=("",)), context(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no file that ends in \.txt, \.jsonl"):
        open_text(tmp_path, tmp_path / "empty")
    with pytest.raises(ValueError, match=r"is not left out by exclude = \('\*\.txt',\)"):
        open_text(tmp_path, tmp_path, exclude=("*.txt",))
    (tmp_path / "empty" / "broken.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ValueError, match=r"broken\.txt: the link leads nowhere"):
        open_text(tmp_path, tmp_path / "empty")


def test_a_file_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in" / "a.txt", "a")
    (tmp_path / "link").symlink_to(path.parent)
    for paths in ((path, path), (path.parent, path), (path, tmp_path / "link")):
        with pytest.raises(ValueError, match=r"data\.paths\[1\] = .* holds .*a\.txt, which paths\[0\] = .* holds too"):
            open_text(tmp_path, *paths)


def test_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "a")
    with pytest.raises(ValueError, match=r"eval\.data is text, which needs a tokenizer"):
        open_data(TextData(paths=(str(path),)), context(tmp_path, tokenizer=None, path="eval.data"))


# The split


def test_the_split_parts_documents_by_their_bytes(tmp_path: Path) -> None:
    found = [f"document {n}" for n in range(400)]
    path = write(tmp_path / "a.jsonl", jsonl([*found, *found[::-1]]))
    sides = {
        part: documents_of(open_text(tmp_path, path, part=part, held_out=0.2)) for part in ("train", "held_out", "all")
    }
    assert not set(sides["train"]) & set(sides["held_out"])
    assert sorted(sides["train"] + sides["held_out"]) == sorted(sides["all"]) == sorted(found * 2)
    assert 0.14 < len(sides["held_out"]) / 800 < 0.26
    cfg = TextData(paths=(str(path),), part="train", held_out=0.2)
    assert list(texts(cfg, context(tmp_path)).read()) == sides["train"]
    more = write(tmp_path / "b.jsonl", jsonl([f"more {n}" for n in range(50)] + found))
    assert set(documents_of(open_text(tmp_path, more, part="held_out", held_out=0.2))) > set(sides["held_out"])


def test_documents_without_a_token_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", jsonl(["one", "?", "two"]))
    deaf = attrs.evolve(byte_tokenizer(), encode_batch=lambda texts: [list(t.replace("?", "").encode()) for t in texts])
    rows = open_data(TextData(paths=(str(path),), seq_len=4), context(tmp_path, tokenizer=deaf))
    assert isinstance(rows, TextRows)
    assert documents_of(rows) == ["one", "two"]
    assert rows.origins[:, 1].tolist() == [1, 3]


def test_an_empty_side_of_the_split_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "a")
    for part, share, said in (
        ("held_out", 0.0, "nothing is held out; set data.held_out between 0 and 1"),
        ("train", 1.0, "everything is held out, and nothing left to train on"),
        ("held_out", 1e-9, "leaves none of the 1 documents"),
    ):
        with pytest.raises(ValueError, match=rf"data\.part = '{part}' with held_out = {share}:? {said}"):
            open_text(tmp_path, path, part=part, held_out=share)
    for share in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match="held_out"):
            TextData(paths=(str(path),), held_out=share)


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    path, other = write(tmp_path / "in" / "a.txt", "a"), write(tmp_path / "b.txt", "b")
    folder = TextData(paths=(str(path.parent),), part="train", held_out=0.1)
    file = TextData(paths=(str(path),), part="held_out", held_out=0.1)
    elsewhere = attrs.evolve(folder, paths=(str(other),), part="all")

    def mixed(cfg: TextData) -> Mixture:
        return Mixture(parts=(Weighted(data=elsewhere), Weighted(data=Mixture(parts=(Weighted(data=cfg),)))))

    check_split(folder, None)
    check_split(folder, file)
    check_split(folder, attrs.evolve(folder, held_out=0.5))
    check_split(elsewhere, attrs.evolve(file, held_out=0.5))
    check_split(mixed(folder), mixed(file))
    for wrong in (attrs.evolve(folder, held_out=0.3), attrs.evolve(folder, part="all"), attrs.evolve(file)):
        with pytest.raises(ValueError, match=rf"^data has part .* both read {path}: .* Set data\.part to 'train'"):
            check_split(wrong, file)
        with pytest.raises(
            ValueError, match=r"data\.parts\[1\]\.data\.parts\[0\]\.data has .*, and eval\.data\.parts\[1\]"
        ):
            check_split(mixed(wrong), mixed(file))


# The cache


def counting() -> tuple[Any, list[int]]:
    calls: list[int] = []

    def encode(batch: Any) -> list[list[int]]:
        calls.append(len(batch))
        return [list(text.encode()) for text in batch]

    return attrs.evolve(byte_tokenizer(), encode_batch=encode), calls


def test_the_cache_is_keyed_by_content_and_tokenizer(tmp_path: Path) -> None:
    tokenizer, calls = counting()
    ctx = context(tmp_path, tokenizer=tokenizer)
    path = write(tmp_path / "one" / "a.jsonl", jsonl(TEXTS))
    cfg = TextData(paths=(str(path),))

    def builds(cfg: TextData, **fields: Any) -> int:
        before = len(calls)
        open_data(cfg, attrs.evolve(ctx, **fields))
        return len(calls) - before

    assert builds(cfg) == 1
    assert builds(attrs.evolve(cfg, seq_len=7, cross_documents=True, part="train", held_out=0.1), seed=3) == 0
    copy = write(tmp_path / "two" / "b.jsonl", jsonl(TEXTS))
    assert builds(attrs.evolve(cfg, paths=(str(copy),))) == 0
    assert builds(cfg, tokenizer=attrs.evolve(tokenizer, fingerprint="other")) == 1
    assert builds(cfg, tokenizer=attrs.evolve(tokenizer, eos=255)) == 1
    assert builds(attrs.evolve(cfg, paths=(str(write(tmp_path / "c.txt", jsonl(TEXTS))),))) == 1
    write(path, jsonl([*TEXTS[:3], "five"]))
    assert builds(cfg) == 1
    assert documents_of(open_text(tmp_path, path)) == [*TEXTS[:3], "five"]


def test_digests_are_cached_only_for_files_that_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "one")
    files = find_files(TextData(paths=(str(path),)), "data")
    fresh = file_digests(files, tmp_path)
    assert not (tmp_path / "files").exists()
    monkeypatch.setattr(files_module, "_SETTLED_NS", -(10**18))
    assert file_digests(files, tmp_path) == fresh
    monkeypatch.setattr(files_module, "sha256_of", lambda path: pytest.fail("hashed again"))
    assert file_digests(files, tmp_path) == fresh


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", jsonl(TEXTS))

    def encode(batch: Any) -> list[list[int]]:
        write(path, jsonl([*TEXTS[:-1], "other"]))
        return byte_tokenizer().encode_batch(batch)

    cfg = TextData(paths=(str(path),))
    with pytest.raises(ValueError, match="data: a file changed while it was read"):
        open_data(cfg, context(tmp_path, tokenizer=attrs.evolve(byte_tokenizer(), encode_batch=encode)))
    assert not list(tmp_path.glob("cache/tokens/*/meta.json"))
    assert documents_of(open_text(tmp_path, path)) == [*TEXTS[:-1], "other"]


def test_ids_that_changed_on_the_disk_are_made_again(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", jsonl(TEXTS))
    open_text(tmp_path, path)
    (file,) = tmp_path.glob("cache/tokens/*/tokens.bin")
    file.write_bytes(bytes(file.stat().st_size))
    assert documents_of(open_text(tmp_path, path)) == TEXTS
    (meta,) = tmp_path.glob("cache/tokens/*/meta.json")
    meta.write_text(meta.read_text().replace('"uint16"', "16"))
    assert documents_of(open_text(tmp_path, path)) == TEXTS


@pytest.mark.parametrize("broken", ["meta.json", "tokens.bin", "offsets.npy"])
def test_a_broken_cache_is_built_again(tmp_path: Path, broken: str) -> None:
    path = write(tmp_path / "a.jsonl", jsonl(TEXTS))
    before = epoch_rows(open_text(tmp_path, path, seq_len=4), 0)
    (file,) = tmp_path.glob(f"cache/tokens/*/{broken}")
    os.truncate(file, file.stat().st_size // 2)
    after = epoch_rows(open_text(tmp_path, path, seq_len=4), 0)
    assert [row["id"] for row in before] == [row["id"] for row in after]
    assert all((a["tokens"] == b["tokens"]).all() for a, b in zip(before, after, strict=True))


def test_ids_need_more_bytes_when_the_vocabulary_does(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abc")
    wide = attrs.evolve(byte_tokenizer(), vocab=100_000, eos=99_999, fingerprint="wide")
    rows = open_data(TextData(paths=(str(path),), seq_len=6), context(tmp_path, tokenizer=wide))
    assert rows.row(0, 0)["tokens"].tolist() == [97, 98, 99, 99_999, 99_999, 99_999]
    assert rows.describe()["vocab"] == 100_000


def test_row_ids_name_the_file_and_line(tmp_path: Path) -> None:
    write(tmp_path / "root" / "deep" / "a.jsonl", jsonl(["aaa", "bbb"]))
    write(tmp_path / "root" / "c.txt", "ccc")
    rows = open_text(tmp_path, tmp_path / "root", seq_len=4)
    ids = {bytes(row["tokens"][:3].astype(np.uint8)).decode(): row["id"] for row in epoch_rows(rows, 1)}
    assert {text: name.split(" ", 1)[1] for text, name in ids.items()} == {
        "aaa": "deep/a.jsonl:1",
        "bbb": "deep/a.jsonl:2",
        "ccc": "c.txt",
    }
    assert sorted(name.split(" ")[0] for name in ids.values()) == ["1:0", "1:1", "1:2"]
