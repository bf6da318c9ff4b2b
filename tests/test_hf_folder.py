"""Hugging Face folders: faults found before a tensor is read, saves that are whole or not at all, exact round trips."""

import errno
import hashlib
import io
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lf.models import hf_save
from lf.models.hf_folder import open_folder
from lf.models.hf_save import check_target, load_source, save_folder, store_source, write_safetensors
from lf.models.weights import Carried, Same, WeightMap, check, export, read, remember, report, whole
from tests.test_weights import dense_map, dense_shapes

GOLDEN = Path(__file__).parent / "golden" / "hf"
FAMILIES = ("llama", "llama31", "qwen2", "qwen3")
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def two_shards(path: Path) -> Path:
    """A folder of two shards with tensors a, b and c, d."""
    tensors = [(name, torch.full((3, 4), float(number))) for number, name in enumerate("abcd")]
    save_folder(path, tensors, config={"model_type": "toy"}, max_shard_bytes=96)
    assert sorted(os.listdir(path)) == ["config.json", FIRST, SECOND, INDEX]
    return path


def header_of(file: Path) -> dict:
    raw = file.read_bytes()
    return json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])


def edit_header(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(file: Path) -> None:
        raw = file.read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        changed = change(header)
        text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return edit


def cut(part: float) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, int(file.stat().st_size * part))


def write(content: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(content) and None


BROKEN_FILES = {
    "cut inside the tensors": (cut(0.9), "is truncated: its tensors need 96 bytes"),
    "cut to 60 %": (cut(0.6), "is truncated or not safetensors"),
    "cut inside the header": (cut(0.2), "is truncated or not safetensors"),
    "zero bytes": (cut(0), "is truncated or not safetensors: it has 0 bytes"),
    "seven bytes": (write(b"\0" * 7), "is truncated or not safetensors: it has 7 bytes"),
    "header of 2^40": (write(struct.pack("<Q", 2**40) + b"{}"), f"should take {2**40}"),
    "bytes at the end": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "has bytes at its end"),
    "git lfs": (write(b"version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "not JSON": (edit_header(lambda header: b"{"), "has a broken header"),
    "a list": (edit_header(lambda header: b"[1]"), "has a broken header"),
    "no dtype": (edit_header(lambda header: header["d"].pop("dtype")), "has a broken header"),
    "negative": (edit_header(lambda header: header["d"].update(shape=[-3, -4])), r"d has shape \[-3, -4\]"),
    "fraction": (edit_header(lambda header: header["d"].update(data_offsets=[0.5, 48])), "has a broken header"),
    "name twice": (
        edit_header(lambda header: json.dumps(header).replace('"d"', '"c"').encode()),
        "has a broken header .c stands twice",
    ),
    "unknown dtype": (edit_header(lambda header: header["d"].update(dtype="F4")), "d has the unknown dtype 'F4'"),
    "overlap": (edit_header(lambda header: header["d"].update(data_offsets=[40, 88])), "d overlaps the tensor before"),
    "gap": (edit_header(lambda header: header["d"].update(data_offsets=[52, 100])), "d leaves a gap before it"),
    "metadata of numbers": (
        edit_header(lambda header: header.update(__metadata__={"a": 1})),
        "is no object of strings",
    ),
    "metadata in a list": (edit_header(lambda header: header.update(__metadata__=["a"])), "is no object of strings"),
    "nested without end": (edit_header(lambda header: b"[" * 100_000), "has a broken header"),
    "half a surrogate pair": (
        edit_header(lambda header: header.update(__metadata__={"a": "\ud800"})),
        "not safetensors",
    ),
    "wrong extent": (
        edit_header(lambda header: header["d"].update(shape=[3, 3])),
        r"d of shape \[3, 3\] and dtype F32 needs 36 bytes, its header gives it 48",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_FILES)
def test_a_broken_file_is_named(tmp_path, fault):
    breaks, said = BROKEN_FILES[fault]
    folder = two_shards(tmp_path / "m")
    breaks(folder / SECOND)
    with pytest.raises(ValueError, match=said) as caught:
        open_folder(folder)
    assert SECOND in str(caught.value)


def edit_index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return edit


BROKEN_FOLDERS = {
    "missing shard": (lambda path: (path / SECOND).unlink(), rf"{INDEX} names 1 missing shards \({SECOND}\)"),
    "absent tensor": (
        edit_index(lambda index: index["weight_map"].update(e=FIRST)),
        rf"{FIRST} lacks 1 tensors that the index puts there \(e\)",
    ),
    "tensor not in the index": (
        edit_index(lambda index: index["weight_map"].pop("a")),
        rf"{FIRST} holds 1 tensors that the index does not put there \(a\).* stale or extra",
    ),
    "tensor in another shard": (
        edit_index(lambda index: index["weight_map"].update(a=SECOND)),
        rf"{FIRST} holds 1 tensors that the index does not put there \(a\)",
    ),
    "leftover shard": (
        lambda path: shutil.copy(path / FIRST, path / "model-00003-of-00004.safetensors"),
        r"1 stale or extra weight files that .* does not name \(model-00003-of-00004",
    ),
    "single file beside the index": (
        lambda path: shutil.copy(path / FIRST, path / "model.safetensors"),
        r"stale or extra weight files .*\(model\.safetensors\)",
    ),
    "no index": (lambda path: (path / INDEX).unlink(), rf"holds shards .* but {INDEX} is missing"),
    "single file and shards": (
        lambda path: (path / INDEX).unlink() or shutil.copy(path / FIRST, path / "model.safetensors"),
        "2 stale or extra shards",
    ),
    "two stems": (
        lambda path: shutil.copy(path / FIRST, path / "diffusion_pytorch_model.safetensors"),
        "the weights of two models",
    ),
    "index is not JSON": (lambda path: (path / INDEX).write_text("{"), f"{INDEX} is not JSON"),
    "index without map": (lambda path: (path / INDEX).write_text("{}"), f"{INDEX} has no weight_map"),
    "shard outside": (
        edit_index(lambda index: index["weight_map"].update(a="../other.safetensors")),
        "puts a into '../other.safetensors', which is not a safetensors file of the folder",
    ),
    "config is not JSON": (lambda path: (path / "config.json").write_text("{'a'}"), "config.json is not JSON"),
    "config is empty": (lambda path: (path / "config.json").write_text(""), "config.json is not JSON"),
    "config is a list": (lambda path: (path / "config.json").write_text("[]"), "config.json holds a list"),
}


@pytest.mark.parametrize("fault", BROKEN_FOLDERS)
def test_a_broken_folder_is_named(tmp_path, fault):
    breaks, said = BROKEN_FOLDERS[fault]
    folder = two_shards(tmp_path / "m")
    breaks(folder)
    with pytest.raises(ValueError, match=said) as caught:
        open_folder(folder)
    assert str(folder) in str(caught.value)


def test_folders_without_safetensors(tmp_path):
    with pytest.raises(ValueError, match="Qwen/Qwen3 is not a folder"):
        open_folder("Qwen/Qwen3")
    with pytest.raises(ValueError, match="holds no weights"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    with pytest.raises(ValueError, match=r"only as pickles \(pytorch_model\.bin\).* download the safetensors"):
        open_folder(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match="only as pickles"):
        open_folder(tmp_path)


def test_a_file_without_tensors_can_be_opened(tmp_path):
    save_folder(tmp_path / "m", [], config={})
    assert open_folder(tmp_path / "m").names == ()
    assert load_file(tmp_path / "m" / "model.safetensors") == {}


def test_published_spellings_of_shards_and_stems(tmp_path):
    names = ["model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"]
    for name, key in zip(names, "ab", strict=True):
        save_file({key: torch.ones(2)}, tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
    save_file({"x": torch.ones(1)}, tmp_path / "io.safetensors")
    assert open_folder(tmp_path).names == ("a", "b")
    weights = WeightMap((Same("a", "a"), Same("b", "b")))

    def again(path: Path, to: Path) -> list[str]:
        source = remember(weights, open_folder(path))
        save_folder(to, export(weights, lambda name: torch.ones(2), source), source=source, config=source.config)
        assert open_folder(to).names == ("a", "b")
        return sorted(os.listdir(to))

    assert again(tmp_path, tmp_path / "sharded") == [*names, INDEX]
    stem = "diffusion_pytorch_model"
    save_folder(tmp_path / "d", [("a", torch.ones(2)), ("b", torch.ones(2))], config={}, stem=stem)
    assert again(tmp_path / "d", tmp_path / "d2") == ["config.json", f"{stem}.safetensors"]


def test_read_gives_boxes_and_refuses_what_is_outside(tmp_path):
    tensors = {"m": torch.arange(12.0).reshape(3, 4), "s": torch.tensor(2.5), "e": torch.zeros(0, 3)}
    save_folder(tmp_path / "m", tensors.items(), config={})
    folder = open_folder(tmp_path / "m")
    assert (folder.shape("m"), folder.dtype("m")) == ((3, 4), torch.float32)
    assert torch.equal(folder.read("m", [slice(1, 3), slice(0, 2)]), tensors["m"][1:3, :2])
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in tensors.items())
    for outside in ([slice(0, 4), slice(0, 4)], [slice(0, 1)], [slice(2, 1), slice(0, 4)]):
        with pytest.raises(ValueError, match=r"m has shape \[3, 4\]"):
            folder.read("m", outside)
    with pytest.raises(ValueError, match="has no tensor n; it has 3, such as"):
        folder.read("n")


def sharded(source: Path, path: Path) -> Path:
    """A copy in three shards, in an order that puts parts of one rule into different shards."""
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    ordered = [(name, tensors[name]) for name in names]
    total = sum(tensor.nbytes for tensor in tensors.values())
    save_folder(path, ordered, config=(source / "config.json").read_bytes(), max_shard_bytes=total // 2)
    assert len(list(path.glob("model-*-of-*.safetensors"))) == 3
    return path


def changed(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path, Path], Path]:
    def make(source: Path, path: Path) -> Path:
        path.mkdir()
        shutil.copy(source / "config.json", path)
        save_file(change(load_file(source / "model.safetensors")), path / "model.safetensors", {"format": "pt"})
        return path

    return make


def mixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Some tensors in bf16 and some in fp16, so that one rule joins several dtypes."""
    kinds = (torch.float32, torch.bfloat16, torch.float16)
    return {name: tensor.to(kinds[number % 3]) for number, (name, tensor) in enumerate(sorted(tensors.items()))}


def with_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), **tensors}


def with_buffers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.randn(4) for layer in range(2)}
    return buffers | tensors


COPIES = {
    "as it is": lambda source, path: shutil.copytree(source, path, ignore=shutil.ignore_patterns("io.*")),
    "sharded": sharded,
    "bf16": changed(lambda tensors: {name: tensor.bfloat16() for name, tensor in tensors.items()}),
    "mixed dtypes": changed(mixed),
    "with buffers": changed(with_buffers),
}
CASES = [(family, copy) for family in FAMILIES for copy in COPIES] + [("qwen2", "stored tied head")]


@pytest.mark.parametrize(("family", "copy"), CASES)
def test_import_then_export_gives_the_same_files(tmp_path, family, copy):
    make = COPIES.get(copy) or changed(with_head)
    original = make(GOLDEN / family, tmp_path / "original")
    (original / "tokenizer.json").write_text('{"a": "é"}')
    folder = open_folder(original)
    weights, shapes = dense_map(folder.config), dense_shapes(folder.config)
    check(weights, folder, shapes)
    values = {name: read(weights, folder, whole(name, shape), dtype=torch.float32) for name, shape in shapes.items()}
    rows = report(weights, folder)
    store_source(remember(weights, folder), tmp_path / "source")
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in original.iterdir()}
    shutil.rmtree(original)

    source = load_source(tmp_path / "source")
    tensors = export(weights, values.__getitem__, source)
    save_folder(tmp_path / "back", tensors, source=source, config=source.config, files=dict(source.files))
    assert {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (tmp_path / "back").iterdir()
    } == digests
    assert report(weights, open_folder(tmp_path / "back")) == rows


def test_export_without_a_source(tmp_path):
    folder = open_folder(GOLDEN / "qwen3")
    weights, shapes = dense_map(folder.config), dense_shapes(folder.config)
    values = {name: read(weights, folder, whole(name, shape)) for name, shape in shapes.items()}
    save_folder(tmp_path / "m", export(weights, values.__getitem__), config=folder.config)
    expected, got = load_file(GOLDEN / "qwen3" / "model.safetensors"), load_file(tmp_path / "m" / "model.safetensors")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == folder.config


def test_a_renamed_key_is_refused_by_name(tmp_path):
    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.replace("layers.1.mlp.up", "layers.1.mlp.upper"): tensor for name, tensor in tensors.items()}

    folder = open_folder(changed(rename)(GOLDEN / "llama", tmp_path / "m"))
    weights = dense_map(folder.config)
    with pytest.raises(ValueError, match="the weights do not fit the model; nothing was loaded") as caught:
        check(weights, folder, dense_shapes(folder.config))
    assert "1 missing in the folder: model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "1 unexpected in the folder: model.layers.1.mlp.upper_proj.weight in model.safetensors" in str(caught.value)


def test_files_are_those_of_the_safetensors_library(tmp_path):
    tensors = {
        "long": torch.arange(3),
        "wide": torch.randn(3, 2),
        "scalar": torch.tensor(1.5),
        "half": torch.randn(5).bfloat16(),
        "eight": torch.randn(3).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
    }
    write_safetensors(tmp_path / "ours", tensors, {"format": "pt"})
    loaded = load_file(tmp_path / "ours")
    assert all(torch.equal(loaded[name].float(), tensor.float()) for name, tensor in tensors.items())
    save_file({name: tensors[name] for name in sorted(tensors)}, tmp_path / "theirs", {"format": "pt"})
    in_order = {name: loaded[name] for name in header_of(tmp_path / "theirs") if name != "__metadata__"}
    write_safetensors(tmp_path / "again", in_order, {"format": "pt"})
    assert (tmp_path / "again").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_shared_and_strided_tensors_are_written_by_value(tmp_path):
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    save_folder(tmp_path / "m", [("a", base), ("b", base), ("t", base.T), ("row", base[1])], config={})
    loaded = load_file(tmp_path / "m" / "model.safetensors")
    expected = {"a": base, "b": base, "t": base.T, "row": base[1]}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_bad_saves_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a is to be saved twice"):
        save_folder(tmp_path / "m", [("a", torch.ones(1)), ("a", torch.ones(1))], config={})
    with pytest.raises(ValueError, match=r"c has dtype torch\.complex128"):
        save_folder(tmp_path / "m", [("c", torch.ones(1, dtype=torch.complex128))], config={})
    assert os.listdir(tmp_path) == []


def test_a_save_never_removes_what_it_did_not_write(tmp_path):
    home = two_shards(tmp_path / "m")
    (home / "report.json").write_text("{}")
    check_target(home, [])
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"holds 1 entries that saving there would remove \(thesis\.tex\)"):
        save_folder(home, [("a", torch.ones(1))], config={})
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file is a file"):
        save_folder(tmp_path / "file", [], config={})
    assert (home / "thesis.tex").exists()
    assert (home / FIRST).exists()


def test_fewer_shards_replace_more(tmp_path):
    folder = two_shards(tmp_path / "m")
    save_folder(folder, [("a", torch.ones(2))], config={})
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert open_folder(folder).names == ("a",)
    assert os.listdir(tmp_path) == ["m"]


def test_a_folder_can_be_rewritten_from_itself(tmp_path):
    path = two_shards(tmp_path / "m")
    folder = open_folder(path)
    before = {name: folder.read(name).clone() for name in folder.names}
    save_folder(path, ((name, folder.read(name)) for name in folder.names), config={}, max_shard_bytes=48)
    after = open_folder(path)
    assert len({entry.file for entry in after.entries.values()}) == 4
    assert all(torch.equal(after.read(name), tensor) for name, tensor in before.items())
    assert all(torch.equal(folder.read(name), tensor) for name, tensor in before.items())


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


class FullDisk(io.FileIO):
    """A file on a disk with room for `left` bytes."""

    left = 0

    def write(self, data: object) -> int:
        FullDisk.left -= memoryview(data).nbytes
        if FullDisk.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.mark.parametrize("room", [0, 30, 150, 500, 700])
def test_a_full_disk_leaves_the_older_export(tmp_path, monkeypatch, room):
    folder = two_shards(tmp_path / "m")
    before = contents(tmp_path)
    tensors = [(name, torch.full((3, 4), 9.0)) for name in "abcd"]
    FullDisk.left = room
    monkeypatch.setattr(Path, "open", lambda self, mode="r": FullDisk(self, mode.replace("b", "")))
    with pytest.raises(
        OSError, match=r"m could not be written .*No space left.* what was there is unchanged"
    ) as caught:
        save_folder(folder, tensors, config={"model_type": "toy"}, max_shard_bytes=96)
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert contents(tmp_path) == before
    assert os.listdir(tmp_path) == ["m"]


def test_an_error_of_the_tensors_leaves_the_older_export(tmp_path):
    folder = two_shards(tmp_path / "m")
    before = contents(tmp_path)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_folder(folder, broken(), config={}, max_shard_bytes=96)
    assert contents(tmp_path) == before


class KilledError(BaseException):
    """Stands for a process that is gone."""


@pytest.mark.parametrize("step", ["write", "first rename", "second rename", "after"])
def test_a_kill_at_any_point_loses_neither_folder(tmp_path, monkeypatch, step):
    folder = two_shards(tmp_path / "m")
    before = contents(folder)
    new = [("a", torch.full((3, 4), 9.0))]
    renames = []

    def rename(self: Path, target: Path) -> Path:
        if ".partial" in self.name and self.is_file():
            return Path(os.rename(self, target) or target)
        renames.append(target)
        if step == ("first rename", "second rename")[len(renames) - 1]:
            raise KilledError
        os.rename(self, target)
        return target

    def remove(path: Path, **_: object) -> None:
        pass  # a killed process cleans nothing up

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", remove)
    if step == "write":
        monkeypatch.setattr(hf_save, "write_safetensors", lambda *_: (_ for _ in ()).throw(KilledError))
    if step == "after":
        save_folder(folder, new, config={})
    else:
        with pytest.raises(KilledError):
            save_folder(folder, new, config={})
    monkeypatch.undo()
    if folder.exists():
        kept = contents(folder)
        assert kept == before or open_folder(folder).read("a").eq(9).all()
    else:
        assert contents(folder.with_name(".m.old")) == before
    save_folder(folder, [("a", torch.full((3, 4), 8.0))], config={})
    assert os.listdir(tmp_path) == ["m"]
    assert open_folder(folder).read("a").eq(8).all()


def test_no_more_than_one_shard_is_held(tmp_path, monkeypatch):
    alive: list[int] = []
    most = 0

    class Tracked:
        def __del__(self) -> None:
            alive.pop()

    def tensors() -> Iterator[tuple[str, Tensor]]:
        nonlocal most
        for number in range(8):
            tensor = torch.ones(4)
            tensor.tracked = Tracked()
            alive.append(number)
            most = max(most, len(alive))
            yield f"t{number}", tensor
            del tensor

    monkeypatch.setattr(hf_save, "_once", iter)  # which makes an alias of each tensor that is not tracked
    save_folder(tmp_path / "m", tensors(), config={}, max_shard_bytes=32)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 4
    assert most == 3


def test_a_stored_source_is_replaced_as_a_whole(tmp_path):
    path = two_shards(tmp_path / "m")
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="4 unexpected"):
        check(WeightMap(()), open_folder(path), {})
    weights = WeightMap((Carried("*"),))
    check(weights, open_folder(path), {})
    source = remember(weights, open_folder(path))
    for _ in range(2):
        store_source(source, tmp_path / "source")
    assert sorted(os.listdir(tmp_path / "source")) == ["carried.safetensors", "files", "source.json"]
    loaded = load_source(tmp_path / "source")
    assert (loaded.tensors, loaded.files, loaded.config) == (source.tensors, source.files, source.config)
    assert torch.equal(loaded.carried.read("c"), source.carried.read("c"))


def stored(path: Path) -> tuple[Path, dict]:
    """A stored source, and its record."""
    two_shards(path / "m")
    (path / "m" / "LICENSE").write_text("free")
    store_source(remember(WeightMap((Carried("*"),)), open_folder(path / "m")), path / "source")
    return path / "source" / "source.json", json.loads((path / "source" / "source.json").read_text())


OUTSIDE = ("../evil.safetensors", "/evil.safetensors", "a/b.safetensors", "a\\b.safetensors", "\0.safetensors")
BAD_RECORDS = [
    *((("tensors", 0, "file"), name, r"tensors\[0\]\.file = .* must be the name of a safetensors") for name in OUTSIDE),
    (("tensors", 1, "file"), "evil.py", r"tensors\[1\]\.file = 'evil.py' must be the name of a safetensors file"),
    (("tensors", 1, "file"), 3, r"tensors\[1\] = .* must have the strings name"),
    (("tensors", 1, "carried"), "no", r"tensors\[1\] = .* must have the strings name"),
    (("tensors", 1, "dtype"), "F33", r"tensors\[1\]\.dtype = 'F33' must be one of BOOL"),
    (("tensors", 1), 7, r"tensors\[1\] = 7 must have the strings name"),
    (("tensors",), {"a": 1}, "must be a list"),
    *(
        (("stem",), stem, "stem = .* must be model or diffusion_pytorch_model")
        for stem in ("../m", "", 3, ["model"], None)
    ),
    *(
        (("files",), [name], "files = .* names of text files")
        for name in ("../../id.txt", "..", "", "/etc/a.txt", "run.sh", 5)
    ),
    (("files",), None, "files = None must be"),
    (("metadata",), {"a": 1}, "metadata = .* must be an object of strings"),
]


@pytest.mark.parametrize(("at", "value", "said"), BAD_RECORDS)
def test_a_source_from_elsewhere_names_no_other_file(tmp_path, at, value, said):
    file, record = stored(tmp_path)
    inner = record
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=said) as caught:
        load_source(file.parent)
    assert str(caught.value).startswith(f"{file}: ")


def test_a_source_that_lacks_a_key_is_named(tmp_path):
    file, record = stored(tmp_path)
    for key in record:
        file.write_text(json.dumps({name: value for name, value in record.items() if name != key}))
        with pytest.raises(ValueError, match=f"source.json: {key} = None must be"):
            load_source(file.parent)
    file.write_text('{"a": ' + "[" * 99 + "]" * 99 + "}")
    with pytest.raises(ValueError, match=r"source\.json is nested more than 64 levels deep"):
        load_source(file.parent)
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"source\.json is not JSON"):
        load_source(file.parent)


@pytest.mark.parametrize("name", ["../evil.json", "", ".", "..", "/evil.json", "a\0b"])
def test_nothing_is_saved_outside_of_the_folder(tmp_path, name):
    tensors = [("a", torch.ones(1))]
    with pytest.raises(ValueError, match="is not the name of a file in a folder"):
        save_folder(tmp_path / "x" / "m", tensors, config={}, files={name: b"evil"})
    with pytest.raises(ValueError, match="is not the name of a file in a folder"):
        save_folder(tmp_path / "x" / "m", tensors, config={}, stem=name)
    source = remember(WeightMap((Same("a", "a"),)), open_folder(two_shards(tmp_path / "m")))
    tensors_of = tuple(attrs.evolve(kept, file=name) for kept in source.tensors)
    with pytest.raises(ValueError, match="is not the name of a file in a folder"):
        save_folder(tmp_path / "x" / "m", tensors, config={}, source=attrs.evolve(source, tensors=tensors_of))
    mixed_up = attrs.evolve(source, tensors=(source.tensors[0], source.tensors[-1], *source.tensors[1:-1]))
    with pytest.raises(ValueError, match="do not stand together"):
        save_folder(tmp_path / "x" / "m", tensors, config={}, source=mixed_up)
    assert os.listdir(tmp_path) == ["m"]


def test_links_out_of_a_folder_are_not_copied(tmp_path):
    (tmp_path / "secret.txt").write_text("private")
    two_shards(tmp_path / "m")
    weights = WeightMap((Carried("*"),))
    (tmp_path / "m" / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ValueError, match=r"notes\.txt is a link to .*secret\.txt, outside of its folder"):
        remember(weights, open_folder(tmp_path / "m"))
    # Hugging Face's cache has links to its own files.
    (tmp_path / "models--x" / "snapshots").mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    shutil.move(tmp_path / "m", tmp_path / "models--x" / "snapshots" / "rev")
    shutil.move(tmp_path / "secret.txt", tmp_path / "models--x" / "blobs" / "hash")
    link = tmp_path / "models--x" / "snapshots" / "rev" / "notes.txt"
    link.unlink()
    link.symlink_to("../../blobs/hash")
    assert ("notes.txt", b"private") in remember(weights, open_folder(link.parent)).files


def test_a_pipe_is_no_weight_file(tmp_path):
    shutil.copytree(GOLDEN / "llama", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValueError, match="no regular file"):
        open_folder(tmp_path / "m")
