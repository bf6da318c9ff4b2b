"""Every example runs to its end in its `smoke` variant, and leaves what the README promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lf
from lf import config
from lf.data.lerobot_audit import audit

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TEXT = [ROOT / "examples/quickstart.py"]
"""Examples of text alone; the tests of other families run theirs."""


def losses(run: Path) -> list[int]:
    """The steps that have a loss."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "loss" in line]


@pytest.mark.parametrize("example", TEXT, ids=lambda path: path.stem)
def test_smoke(example: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = config.load(example, "smoke")
    assert isinstance(run, lf.Run)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "scripts/train.py"), "--cfg", f"{example}:smoke", "--out", "out"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "2", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    line = r"held-out loss ([\d.]+) nats a token; entropy of single tokens ([\d.]+)"
    loss, entropy = re.findall(line, done.stdout)[0]
    assert float(loss) < float(entropy)
    assert "sample, after the prompt" in done.stdout
    out = tmp_path / "out"
    assert losses(out) == list(range(1, run.steps + 1))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    model = AutoModelForCausalLM.from_pretrained(out / "hf")
    answer = model.generate(**tokenizer("import ", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert answer.shape[1] > 1


def test_the_robot_example_records_trains_and_acts(tmp_path: Path) -> None:
    flags = ["--out", "out", "--demonstrations", "6", "--episodes", "3", "--variant", "smoke"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "examples/robot_quickstart.py"), *flags],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rates = re.findall(r"(?m)^(script|untrained|trained) +succeeds in +([\d.]+)% of 3 ", done.stdout)
    assert [name for name, _ in rates] == ["script", "untrained", "trained"]
    assert rates[0][1] == "100.0"
    assert not audit(tmp_path / "out" / "data").findings
    assert len(losses(tmp_path / "out" / "run")) == 4
    assert (tmp_path / "out" / "episodes.mp4").stat().st_size > 1000


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_header_says_hardware_time_and_result(example: Path) -> None:
    header = example.read_text().split('"""')[1]
    assert all(word in header for word in ("Hardware:", "Time:", "Result:"))
