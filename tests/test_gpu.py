"""The check of an accelerator: as far as a CPU goes everywhere, and whole where CUDA is there."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check.py"
GOLDEN = sorted(path for path in (ROOT / "tests" / "golden" / "hf").iterdir() if path.is_dir())


def check(*args: str, timeout: float = 600.0) -> tuple[int, dict[str, Any], str]:
    """Returns exit code, JSON report and error output of the script."""
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *args, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout)
    report = json.loads(done.stdout.splitlines()[-1]) if done.stdout else {}
    return done.returncode, report, done.stderr


def copy(folder: Path, target: Path, **changes: float) -> Path:
    """Returns a copy of a golden folder in which recorded tensors are scaled."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    recorded = load_file(target / "io.safetensors")
    for name, factor in changes.items():
        recorded[name] = recorded[name] * factor
    save_file(recorded, target / "io.safetensors")
    return target


def test_everything_that_a_cpu_can_check_holds() -> None:
    code, report, errors = check("--device", "cpu", "--size", "tiny")
    assert code == 0, (report, errors)
    assert (report["device"], report["ok"]) == ("cpu", True)
    names = [one["name"] for one in report["checks"]]
    assert len(set(names)) == len(names)
    for folder in GOLDEN:
        assert f"parity {folder.name}" in names
    for start in ("device", "collectives", "equal to the CPU", "resume float32", "resume bfloat16", "export", "speed"):
        assert any(name.startswith(start) for name in names), start
    judged = [one for one in report["checks"] if one["ok"] is not None]
    assert len(judged) == len(names) - 2
    assert all(one["found"] for one in report["checks"])


def test_what_does_not_hold_is_named_and_ends_with_1(tmp_path: Path) -> None:
    off = copy(GOLDEN[0], tmp_path / "off", logits=1.001)
    broken = copy(GOLDEN[0], tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    folders = [str(GOLDEN[0]), str(off), str(broken)]
    code, report, errors = check(*folders, "--device", "cpu", "--size", "tiny", "--only", "parity")
    assert code == 1, (report, errors)
    found = {one["name"]: one for one in report["checks"]}
    assert {name: one["ok"] for name, one in found.items()} == {
        f"parity {GOLDEN[0].name}": True,
        "parity off": False,
        "parity broken": False,
    }
    assert found["parity off"]["found"].startswith("worst logits: 1.0e-03")
    assert "model.safetensors" in found["parity broken"]["found"]


def test_bad_usage_ends_with_2() -> None:
    code, _, errors = check("--device", "abacus")
    assert code == 2
    assert "device 'abacus' is not known" in errors


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
def test_everything_holds_on_a_card() -> None:
    code, report, errors = check("--device", "cuda")
    assert code == 0, (report, errors)
    assert report["ok"]
