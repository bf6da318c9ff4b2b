"""The decoder families against transformers: recorded golden folders, and models of many shapes made here.

Families with a recording of their own layout have their parity in their own tests; the script takes both kinds.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lf
from lf.devices.cpu import cpu
from tests.golden.record_kimi_k2 import record
from tests.workers import Workers

ROOT = Path(__file__).parents[1]
GOLDEN = sorted((Path(__file__).parent / "golden/hf").iterdir())
LLAMA = Path(__file__).parent / "golden/hf/llama"
KIMI_K2 = Path(__file__).parent / "golden/hf/kimi_k2"
ROBOT = Path(__file__).parent / "golden/pi05"


def parity_of(folder: Path) -> dict[str, Any]:
    from lf.parallel.config import resolve
    from lf.parallel.megatron import make_context
    from lf.train.parity import compare, to_json

    ctx = make_context(lf.MegatronParallel(), resolve(lf.MegatronParallel(), 1), cpu, torch.float32)
    return to_json(compare(folder, ctx))


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_golden_folders(workers: Workers, folder: Path) -> None:
    (line,) = workers.run(1, parity_of, folder)
    recorded = load_file(folder / "io.safetensors")
    assert line["ok"], line
    assert set(line["outputs"]) == {name for name in recorded if name.endswith(("logits", "loss"))}
    assert {f"grad.{name}" for name in line["grads"]} == {name for name in recorded if name.startswith("grad.")}


def test_what_is_recorded_of_kimi_k2_is_what_its_script_records(tmp_path: Path) -> None:
    record(tmp_path)
    kept = KIMI_K2
    assert (tmp_path / "config.json").read_text() == (kept / "config.json").read_text()
    for name in ("model.safetensors", "io.safetensors"):
        made, recorded = load_file(tmp_path / name), load_file(kept / name)
        assert made.keys() == recorded.keys()
        for key, tensor in recorded.items():
            torch.testing.assert_close(made[key], tensor, rtol=1e-4, atol=1e-5)


def parity_in(folder: Path, parallel: lf.MegatronParallel) -> dict[str, Any]:
    import torch.distributed as dist

    from lf.parallel.config import resolve
    from lf.parallel.megatron import make_context
    from lf.train.parity import to_json
    from lf.train.parity_layout import compare_layout

    ctx = make_context(parallel, resolve(parallel, dist.get_world_size()), cpu, torch.float32)
    return to_json(compare_layout(folder, parallel, ctx))


SPREAD = {
    "tp2": lf.MegatronParallel(tp=2),
    "pp2": lf.MegatronParallel(pp=2),
    "ep2": lf.MegatronParallel(ep=2),
    "tp2 ep2": lf.MegatronParallel(tp=2, ep=2),
}
SPARSE = ("deepseek_v2", "deepseek_v3", "deepseek_v3_mtp", "kimi_k2", "minimax_m2", "qwen2_moe", "qwen3_moe")
SHOWN = {
    ("deepseek_v2", "ep2"),
    ("deepseek_v3", "tp2 ep2"),
    ("deepseek_v3_mtp", "pp2"),
    ("kimi_k2", "tp2"),
    ("kimi_k2", "pp2"),
    ("kimi_k2", "ep2"),
    ("minimax_m2", "tp2"),
    ("qwen2_moe", "tp2"),
    ("qwen3_moe", "ep2"),
}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=() if (name, layout) in SHOWN else pytest.mark.full)
        for name in SPARSE
        for layout in SPREAD
    ],
)
def test_golden_folders_that_ranks_share(workers: Workers, name: str, layout: str) -> None:
    folder = Path(__file__).parent / "golden/hf" / name
    first, second = workers.run(2, parity_in, folder, SPREAD[layout])
    assert first["ok"], first
    assert first == second
    assert all(value is not None for value in (*first["outputs"].values(), *first["grads"].values()))


@pytest.mark.parametrize("damage", ["logits", "loss", "grad.model.norm.weight", "grad.unknown.weight"])
def test_a_recorded_number_that_is_off_is_found(workers: Workers, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(LLAMA, folder)
    recorded = load_file(folder / "io.safetensors")
    recorded[damage] = recorded.get(damage, torch.ones(3)) * 1.001
    save_file(recorded, folder / "io.safetensors")
    (line,) = workers.run(1, parity_of, folder)
    assert not line["ok"]


def make_golden(folder: Path, kind: str, changes: dict[str, Any]) -> None:
    """Writes a golden folder from a random transformers model of a given shape."""
    import transformers

    torch.manual_seed(len(str(changes)))
    shape = {
        "vocab_size": 101,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "attn_implementation": "eager",
    }
    config = getattr(transformers, f"{kind}Config")(**{**shape, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float()
    for name, param in model.named_parameters():
        # Norms and biases start at constants, which would hide a missing one.
        torch.nn.init.normal_(param, mean=float("norm" in name), std=0.3 if param.ndim == 1 else 0.15)
    model.save_pretrained(folder)
    ids = torch.randint(0, 101, (2, 33))
    labels = ids.clone()
    labels[0, :9] = -100
    mask = torch.ones_like(ids)
    mask[1, 20:], labels[1, 20:] = 0, -100
    out = model(input_ids=ids, attention_mask=mask, labels=labels)
    out.loss.backward()
    grads = {f"grad.{name}": param.grad for name, param in model.named_parameters()}
    made = {"input_ids": ids, "attention_mask": mask, "labels": labels, "logits": out.logits, "loss": out.loss[None]}
    save_file({name: t.detach().contiguous() for name, t in {**made, **grads}.items()}, folder / "io.safetensors")


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "mha_tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "mqa": ("Llama", {"num_key_value_heads": 1}),
    "odd_head": ("Llama", {"head_dim": 6, "num_attention_heads": 5, "num_key_value_heads": 5}),
    "gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 3.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "dynamic": (
        "Llama",
        {"max_position_embeddings": 16, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "yarn": (
        "Qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "qwen2_tied": ("Qwen2", {"head_dim": 10, "tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2",
        {"head_dim": 10, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3_tied": ("Qwen3", {"num_attention_heads": 6, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_models_of_many_shapes_equal_transformers(workers: Workers, tmp_path: Path, shape: str) -> None:
    kind, changes = SHAPES[shape]
    make_golden(tmp_path, kind, changes)
    (line,) = workers.run(1, parity_of, tmp_path)
    assert line["ok"], line


@pytest.mark.full
@pytest.mark.parametrize("flags", ["--tp 2", "--pp 2", "--ep 2"])
def test_the_script_starts_the_ranks_that_a_layout_takes(tmp_path: Path, flags: str) -> None:
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "gpt_neverheard"}')
    golden = LLAMA.parent / "deepseek_v3_mtp" if flags != "--ep 2" else LLAMA.parent / "qwen3_moe"
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts/parity.py"), "--device", "cpu", *flags.split()]
    done = subprocess.run(
        [*command, str(golden), str(unknown)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stderr
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["ok"]
    assert "gpt_neverheard" in second["error"]


def test_the_script_prints_a_line_a_folder_and_its_exit_code_says_how_it_went(tmp_path: Path) -> None:
    unknown = tmp_path / "unknown"
    shutil.copytree(LLAMA, unknown)
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "model_type": "gpt_neverheard"}))
    off = tmp_path / "off"
    shutil.copytree(LLAMA, off)
    recorded = load_file(off / "io.safetensors")
    save_file({**recorded, "loss": recorded["loss"] + 1}, off / "io.safetensors")
    for folders, expected in (([GOLDEN[0], ROBOT], 0), ([off, GOLDEN[1]], 1), ([unknown, GOLDEN[0]], 2)):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(ROOT / "scripts/parity.py"), "--device", "cpu", *map(str, folders)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        lines = [json.loads(line) for line in done.stdout.splitlines()]
        assert done.returncode == expected, done.stderr
        assert [line["folder"] for line in lines] == [str(folder) for folder in folders]
        assert [line["ok"] for line in lines] == [folder in (*GOLDEN, ROBOT) for folder in folders]
    assert "gpt_neverheard" in lines[0]["error"]
