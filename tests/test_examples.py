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

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TEXTS = [path for path in EXAMPLES if path.stem != "diffusion_quickstart"]
"""Those of language models; `test_diffusion_quickstart.py` has the other."""


@pytest.mark.parametrize("example", TEXTS, ids=lambda path: path.stem)
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
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, run.steps + 1))
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    model = AutoModelForCausalLM.from_pretrained(out / "hf")
    answer = model.generate(**tokenizer("import ", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert answer.shape[1] > 1


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_header_says_hardware_time_and_result(example: Path) -> None:
    header = example.read_text().split('"""')[1]
    assert all(word in header for word in ("Hardware:", "Time:", "Result:"))
