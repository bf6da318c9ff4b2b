"""Conversion: the same bytes back, one tensor in memory at a time, nothing half written, and what a run exports."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import lf
from lf.data.hf_tokenizer import read_tokenizer
from lf.models import hf, weights
from lf.models.hf_folder import open_folder
from lf.models.llm.llama import Llama
from lf.train import checkpoint, comm, shards
from lf.train.convert import export_folder, import_folder
from lf.train.start import open_saved, open_start
from scripts.convert import main
from scripts.generate import main as generate_main
from tests.test_hf_folder import CASES, COPIES, GOLDEN, changed, with_head
from tests.test_train import go, small_run
from tests.workers import Workers

ROOT = Path(__file__).parents[1]


def digests(folder: Path) -> dict[str, str]:
    """The sha256 of every file that belongs to the model."""
    files = [file for file in folder.iterdir() if file.name not in ("report.json", "io.safetensors")]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def report(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "report.json").read_text())


SPARSE = ("deepseek_v2", "deepseek_v3_mtp", "minimax_m2", "qwen2_moe", "qwen3_moe")


@pytest.mark.parametrize(("family", "copy"), [*CASES, *((family, next(iter(COPIES))) for family in SPARSE)])
def test_import_then_export_gives_the_same_folder(tmp_path: Path, family: str, copy: str) -> None:
    make = COPIES.get(copy) or changed(with_head)
    original = make(GOLDEN / family, tmp_path / "original")
    (original / "tokenizer.json").write_text('{"a": "é"}')
    (original / "LICENSE").write_text("free")
    (original / "report.json").write_text("of an earlier conversion")
    expected = digests(original)
    imported = import_folder(original, tmp_path / "lf")
    assert [row["key"] for row in imported.rows] == list(open_folder(original).names)
    kept = weights.read, weights.lf_shapes(table := weights_of(original), folder := open_folder(original))
    started = open_start(str(tmp_path / "lf"), None)
    assert started.model == hf.read_config(original)
    assert started.published is not None
    started.published.check(kept[1], True)
    for name, shape in kept[1].items():
        placed = weights.whole(name, shape)
        assert torch.equal(started.published.read(placed), weights.read(table, folder, placed)), name
    assert not (tmp_path / "lf" / "source" / "files" / "report.json").exists()
    shutil.rmtree(original)
    exported = export_folder(tmp_path / "lf", tmp_path / "back")
    assert digests(tmp_path / "back") == expected
    assert exported.rows == imported.rows == report(tmp_path / "lf") == report(tmp_path / "back")
    assert exported.read == tmp_path / "lf" / "checkpoints" / "step_0"


def weights_of(folder: Path) -> weights.WeightMap:
    from lf.models.spec import weight_map

    return weight_map(hf.read_config(folder))


def sparse_llama(path: Path) -> int:
    """A folder of zeros that takes neither memory nor disk; returns its bytes."""
    width, layers = 512, 8
    config = json.loads((GOLDEN / "llama" / "config.json").read_text()) | {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": width // 8,
        "vocab_size": 512,
    }
    shapes = {"model.embed_tokens.weight": (512, width), "lm_head.weight": (512, width), "model.norm.weight": (width,)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{x}_proj.weight": (width, width) for x in "qkvo"}
        shapes |= {f"{at}.mlp.{x}_proj.weight": (2 * width, width) for x in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj.weight": (width, 2 * width)}
        shapes |= {f"{at}.{x}_layernorm.weight": (width,) for x in ("input", "post_attention")}
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path / "model.safetensors", 8 + len(raw) + at)
    return at


def test_an_import_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sparse_llama(tmp_path / "hf")
    held: list[StorageWeakRef] = []
    sizes, reading = [], weights.read

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        assert all(storage.expired() for storage in held)
        tensor = reading(*args, **kwargs)
        held.append(StorageWeakRef(tensor.untyped_storage()))
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(weights, "read", watched)
    import_folder(tmp_path / "hf", tmp_path / "lf")
    assert sum(sizes) == size
    assert max(sizes) < size / 15


def test_fp8_is_dequantised_on_import_and_exported_as_bf16(tmp_path: Path) -> None:
    def quantise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = dict(tensors)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            scale = tensors[name].abs().max() / 448.0
            made[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
            made[f"{name}_scale_inv"] = scale.reshape(1, 1)
        return made

    original = changed(quantise)(GOLDEN / "llama", tmp_path / "fp8")
    plain = json.loads((original / "config.json").read_text())
    quantisation = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (original / "config.json").write_text(json.dumps(plain | {"quantization_config": quantisation}))
    import_folder(original, tmp_path / "lf")
    opened, back = open_folder(original), tmp_path / "back"
    reader = checkpoint.open_checkpoint(tmp_path / "lf" / "checkpoints" / "step_0")
    fc1 = reader.read("weight/decoder.layers.1.mlp.linear_fc1.weight")
    gate, up = (opened.read(f"model.layers.1.mlp.{x}_proj.weight") for x in ("gate", "up"))
    assert fc1.dtype == torch.float32
    assert torch.equal(fc1, torch.cat([gate, up]))
    rows = {row["key"]: row for row in export_folder(tmp_path / "lf", back).rows}
    made = load_file(back / "model.safetensors")
    assert made.keys() == rows.keys() == load_file(GOLDEN / "llama" / "model.safetensors").keys()
    assert torch.equal(made["model.layers.1.mlp.up_proj.weight"], up.bfloat16())
    assert made["model.norm.weight"].dtype == torch.float32
    assert json.loads((back / "config.json").read_text()) == plain
    row = next(row for row in report(tmp_path / "lf") if row["key"] == "model.layers.1.mlp.up_proj.weight")
    assert (row["dtype"], row["waived"][:15]) == ("F8_E4M3", "dequantised wit")


def test_the_tokenizer_of_an_import_is_whole(tmp_path: Path) -> None:
    original = shutil.copytree(GOLDEN / "llama", tmp_path / "original")
    import_folder(original, tmp_path / "bare")
    assert not (tmp_path / "bare" / "tokenizer").exists()
    write_tokenizer(original)
    import_folder(original, tmp_path / "lf")
    # Only config.json names the end-of-text token.
    tokenizer = read_tokenizer(tmp_path / "lf" / "tokenizer")
    assert tokenizer.eos == 2
    assert tokenizer.files == read_tokenizer(original).files


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of some 128 ids without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:120]
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    (folder / "tokenizer.json").write_text(inner.to_str())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(12):
        (folder / f"{i}.txt").write_text(" ".join(f"word{(i * j) % 17} = {j}" for j in range(5, 60)))
    return folder


@pytest.mark.parametrize("params", ["float32", "bfloat16"])
def test_a_run_is_converted_to_what_it_exports(workers: Workers, corpus: Path, tmp_path: Path, params: Any) -> None:
    run = small_run(corpus, steps=2, precision=lf.Precision(params=params))
    workers.run(1, go, run, tmp_path / "first", tmp_path)
    tuned = attrs.evolve(run, model=None, tokenizer=None, init=str(tmp_path / "first" / "hf"))
    workers.run(1, go, tuned, tmp_path / "second", tmp_path)
    # A model given beside `init` overrules the one in the folder, and the export says so.
    longer = attrs.evolve(tuned, model=attrs.evolve(run.model, max_length=8192))
    workers.run(1, go, longer, tmp_path / "third", tmp_path)
    for name in ("first", "second", "third"):
        done = export_folder(tmp_path / name, tmp_path / f"{name}_hf")
        assert digests(tmp_path / f"{name}_hf") == digests(tmp_path / name / "hf")
        assert {row["dtype"] for row in done.rows} == {"F32" if params == "float32" else "BF16"}
    stated = [json.loads((tmp_path / name / "hf" / "config.json").read_text()) for name in ("first", "second", "third")]
    eos = read_tokenizer(tmp_path / "first" / "tokenizer").eos
    assert [stated[0][f"{token}_token_id"] for token in ("bos", "eos", "pad")] == [eos] * 3
    assert stated[1] == stated[0]
    assert stated[2] == stated[0] | {"max_position_embeddings": 8192}


def saved_again(folder: Path, step: int, extra: tuple[shards.Piece, ...] = ()) -> Path:
    """A later checkpoint of an imported folder with other values."""
    reader = checkpoint.open_checkpoint(folder / "checkpoints" / "step_0")
    pieces = [shards.box_piece(name, reader.read(name) + 1) for name in reader.names]
    return checkpoint.save(folder, step, [*pieces, *extra], reader.meta)


def test_an_export_takes_the_newest_good_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_folder(GOLDEN / "llama", tmp_path / "lf")
    saved_again(tmp_path / "lf", 3)
    damaged = saved_again(tmp_path / "lf", 5) / "rank_00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert main(["export", str(tmp_path / "lf"), str(tmp_path / "hf")]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"skipped {damaged.parent}: ")
    assert f"21 tensors of {tmp_path / 'lf' / 'checkpoints' / 'step_3'} are in {tmp_path / 'hf'}" in said.out
    before, after = load_file(GOLDEN / "llama" / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(after[name], before[name] + 1) for name in before)


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("layers.1.mlp.up", "layers.1.mlp.upper"): tensor for name, tensor in tensors.items()}


def test_what_cannot_be_converted_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = shutil.copytree(GOLDEN / "llama", tmp_path / "good")
    import_folder(good, tmp_path / "lf")
    other = shutil.copytree(good, tmp_path / "other")
    (other / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    cut = shutil.copytree(good, tmp_path / "cut")
    os.truncate(cut / "model.safetensors", 1000)
    heads = shutil.copytree(good, tmp_path / "heads")
    config = json.loads((good / "config.json").read_text())
    (heads / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 3}))
    precious = shutil.copytree(good, tmp_path / "precious")
    (precious / "thesis.tex").write_text("precious")
    for name in ("pipeline/model_index.json", "lora/adapter_config.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    shutil.copytree(tmp_path / "lf", tmp_path / "bad")
    for file in (tmp_path / "bad").rglob("rank_*"):
        os.truncate(file, 100)
    shutil.copytree(tmp_path / "lf", tmp_path / "more")
    saved_again(tmp_path / "more", 1, (shards.box_piece("weight/router", torch.ones(2)),))
    table = {
        ("import", "nowhere"): "nowhere is not a folder",
        ("import", "other"): "model_type = 'mistral', which lf does not know",
        ("import", "cut"): "model.safetensors is truncated",
        ("import", "heads"): "k_proj.weight in model.safetensors is",
        ("import", "lf"): "config.json is missing",
        ("import", "pipeline"): "is a whole diffusers pipeline; give the folder of its model, transformer/",
        ("import", "lora"): "is a PEFT adapter; give the model that it is for",
        ("export", "good"): "good has no checkpoints",
        ("export", "nowhere"): "nowhere has no checkpoints",
        ("export", "bad"): "no checkpoint in",
        ("export", "more"): "holds 1 weights that this model does not have: router",
    }
    for (verb, name), expected in table.items():
        assert main([verb, str(tmp_path / name), str(tmp_path / "new")]) == 1, name
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: ")
        assert expected in said.err
        assert not (tmp_path / "new").exists(), name
    for verb, name, target, expected in (
        ("import", "good", "precious", "precious is no empty folder"),
        ("export", "lf", "precious", "thesis.tex"),
        ("import", "good", "good", "good is no empty folder"),
        ("export", "lf", "lf", "choose another folder"),
    ):
        assert main([verb, str(tmp_path / name), str(tmp_path / target)]) == 1
        assert expected in capsys.readouterr().err
    assert (precious / "thesis.tex").read_text() == "precious"
    assert checkpoint.latest(tmp_path / "lf") is not None


def test_a_renamed_tensor_is_named_and_counted(tmp_path: Path) -> None:
    folder = changed(renamed)(GOLDEN / "llama", tmp_path / "hf")
    with pytest.raises(ValueError, match=r"1 missing in the folder: model\.layers\.1\.mlp\.up_proj\.weight") as caught:
        import_folder(folder, tmp_path / "lf")
    assert "1 unexpected in the folder: model.layers.1.mlp.upper_proj.weight in model.safetensors" in str(caught.value)


def test_an_import_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, shard: shards.Shard) -> str:
        path.write_bytes(shard.head)
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_shard", full)
    with pytest.raises(checkpoint.CheckpointError, match="No space left"):
        import_folder(GOLDEN / "llama", tmp_path / "lf")
    assert os.listdir(tmp_path) == []


FAMILY = """
import attrs
from lf.models.llm.llama import Llama, from_hf

@attrs.frozen(kw_only=True)
class Mine(Llama):
    extra: int = 0

def reader(config):
    base = from_hf(config)
    return Mine(**{field.name: getattr(base, field.name) for field in attrs.fields(Llama)}, extra=config["extra"])
"""


def script(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "scripts/convert.py", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_family_outside_lf_goes_in_and_out(tmp_path: Path) -> None:
    original = shutil.copytree(GOLDEN / "llama", tmp_path / "original")
    config = json.loads((original / "config.json").read_text()) | {"model_type": "mine", "extra": 7}
    (original / "config.json").write_text(json.dumps(config))
    (tmp_path / "convert_family.py").write_text(FAMILY)
    family = f"{tmp_path / 'convert_family.py'}:reader"
    assert script("import", original, tmp_path / "lf", "--family", family).returncode == 0
    unknown = script("export", tmp_path / "lf", tmp_path / "back")
    assert unknown.returncode == 1
    assert "convert_family:Mine" in unknown.stderr
    assert "Traceback" not in unknown.stderr
    assert export_folder(tmp_path / "lf", tmp_path / "back", family).rows == report(tmp_path / "lf")
    assert digests(tmp_path / "back") == digests(original)
    model = open_saved(tmp_path / "lf", family).model
    assert isinstance(model, Llama)
    assert model.extra == 7  # type: ignore[attr-defined]


def test_bad_usage_is_explained() -> None:
    for args in ((), ("import", "a"), ("convert", "a", "b"), ("import", "a", "b", "--famly", "x")):
        with pytest.raises(SystemExit) as caught:
            main([*args])
        assert caught.value.code == 2


def test_conversion_loads_no_other_framework(tmp_path: Path) -> None:
    code = f"""
import sys
from scripts.convert import main
from scripts.generate import main as generate_main
assert main(["import", "tests/golden/hf/qwen3", {str(tmp_path / "lf")!r}]) == 0
assert main(["export", {str(tmp_path / "lf")!r}, {str(tmp_path / "hf")!r}]) == 0
heavy = {{"transformers", "tokenizers"}} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_file_of_a_folder_is_executed_unasked(
    one_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "process_group", lambda device: contextlib.nullcontext())
    original = shutil.copytree(GOLDEN / "llama", tmp_path / "original")
    write_tokenizer(original)
    import_folder(original, tmp_path / "lf")
    # As a run leaves it, but with a config whose classes are in a file of the folder.
    (tmp_path / "lf" / "owned.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\n")
    (tmp_path / "lf" / "config.json").write_text(json.dumps({"data": {"_type": "owned:Data"}}))
    assert main(["export", str(tmp_path / "lf"), str(tmp_path / "back")]) == 0
    assert digests(tmp_path / "back") == digests(original)
    assert open_saved(tmp_path / "lf").model == open_start(str(tmp_path / "lf"), None).model
    assert generate_main([str(tmp_path / "lf"), "--prompt", "x", "--tokens", "1", "--device", "cpu"]) == 0
    assert not (tmp_path / "owned").exists()


def test_the_file_of_a_models_class_is_executed_where_it_is_named(
    one_process: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comm, "process_group", lambda device: contextlib.nullcontext())
    source = shutil.copytree(GOLDEN / "llama", tmp_path / "original")
    write_tokenizer(source)
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "class_of_mine.py").write_text(FAMILY)
    original_config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(original_config | {"model_type": "mine", "extra": 7}))
    import_folder(source, tmp_path / "lf", f"{tmp_path / 'away' / 'class_of_mine.py'}:reader")
    sys.path.remove(str(tmp_path / "away"))
    del sys.modules["class_of_mine"]
    copy = shutil.move(tmp_path / "away" / "class_of_mine.py", tmp_path / "lf")
    generating = [str(tmp_path / "lf"), "--prompt", "x", "--tokens", "1", "--device", "cpu"]
    exporting = ["export", str(tmp_path / "lf"), str(tmp_path / "back")]
    for script_main, args in ((main, exporting), (generate_main, generating)):
        assert script_main(args) == 1
        assert f"If you trust that file, name it: --config-file {copy} (generate.py" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--config-file"):
        open_start(str(tmp_path / "lf"), None)
    assert "class_of_mine" not in sys.modules
    try:
        assert main([*exporting, "--config-file", str(copy)]) == 0
        assert generate_main([*generating, "--config-file", str(copy)]) == 0
    finally:
        sys.path.remove(str(tmp_path / "lf"))
        del sys.modules["class_of_mine"]
    assert generate_main([*generating, "--config-file", str(tmp_path / "lf")]) == 1
    assert "must be an existing Python file" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"vocab_size": 64}, {"intermediate_size": 999}, {"num_hidden_layers": 3}])
def test_an_import_holds_the_folder_to_its_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, int]
) -> None:
    folder = shutil.copytree(GOLDEN / "llama", tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert main(["import", str(folder), str(tmp_path / "lf")]) == 1
    assert "the model needs" in capsys.readouterr().err or "num_hidden_layers" in change
    assert not (tmp_path / "lf").exists()
