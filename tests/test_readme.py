"""What the README shows is what the code does."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lf
from lf.devices.cpu import cpu
from lf.models import spec
from lf.models.decoder import DecoderConfig
from lf.models.decoder_facts import parameters
from lf.models.hf import READERS
from lf.models.spec import ModelConfig
from tests.test_plan import script

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def presets(module: Any) -> Iterator[tuple[str, DecoderConfig]]:
    for name, value in vars(module).items():
        if isinstance(value, DecoderConfig) and not name.endswith("tiny"):
            yield name, value


def family_table() -> str:
    """Returns the table of families: a line for each prefix of presets, with sizes in billions of parameters."""
    lines = ["| family | `model_type` | presets, with their parameters in billions |", "|---|---|---|"]
    for path in sorted({reader.partition(":")[0] for reader in READERS.values() if ".llm." in reader}):
        module = importlib.import_module(path)
        types: dict[tuple[str, str], list[str]] = {}
        for name, cfg in presets(module):
            kind = (type(cfg).__name__, spec.hf_config(cfg)["model_type"])
            types.setdefault(kind, []).append(f"`{name}` {parameters(cfg) / 1e9:.2f}")
        for (kind_name, model_type), sizes in types.items():
            lines.append(f"| `{path}.{kind_name}` | `{model_type}` | {', '.join(sizes)} |")
    return "\n".join(lines)


def vlm_table() -> str:
    """Returns the table of vision-language families."""
    from lf.models.vision.projector import ProjectorModule
    from lf.models.vision.tower import build_tower, tower_of
    from lf.models.vlm import Vlm

    lines = ["| vision-language family | `model_type` | presets, with their parameters in billions |", "|---|---|---|"]
    for path in sorted({reader.partition(":")[0] for reader in READERS.values() if ".vlms." in reader}):
        types: dict[tuple[str, str], list[str]] = {}
        for name, cfg in vars(importlib.import_module(path)).items():
            if isinstance(cfg, Vlm) and not name.endswith("tiny"):
                with torch.device("meta"):
                    tower = tower_of(cfg.vision)
                    parts = (build_tower(cfg.vision), ProjectorModule(cfg.projector, tower, cfg.text.hidden))
                count = parameters(cfg.text) + sum(p.numel() for part in parts for p in part.parameters())
                kind = (type(cfg).__name__, spec.hf_config(cfg)["model_type"])
                types.setdefault(kind, []).append(f"`{name}` {count / 1e9:.2f}")
        for (kind_name, model_type), sizes in types.items():
            lines.append(f"| `{path}.{kind_name}` | `{model_type}` | {', '.join(sizes)} |")
    return "\n".join(lines)


def test_the_table_of_vision_language_families_is_that_of_the_code() -> None:
    assert vlm_table() in README


def test_the_table_of_families_is_that_of_the_code() -> None:
    assert family_table() in README
    language = {kind for kind, reader in READERS.items() if ".llm." in reader}
    assert {line.split("`")[3] for line in family_table().splitlines()[2:]} == language


@pytest.mark.parametrize("kind", [kind for kind, reader in READERS.items() if ".embodied." in reader])
def test_the_table_of_robot_families_names_every_preset(kind: str) -> None:
    path = READERS[kind].partition(":")[0]
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{path}.")]
    values = vars(importlib.import_module(path)).items()
    named = [name for name, value in values if isinstance(value, ModelConfig) and not name.endswith("tiny")]
    assert named
    assert re.findall(r"`(\w+)`", row) == [kind, *named]


DIFFUSION = {reader.partition(":")[0] for reader in READERS.values() if ".diffusion." in reader}


@pytest.mark.parametrize("path", sorted(DIFFUSION))
def test_the_table_of_diffusion_families_names_every_kind_and_preset(path: str) -> None:
    (row,) = [line for line in README.splitlines() if line.startswith(f"| `{path}.")]
    kinds = [kind for kind, reader in READERS.items() if reader.startswith(f"{path}:")]
    values = vars(importlib.import_module(path)).items()
    presets = [(name, cfg) for name, cfg in values if isinstance(cfg, ModelConfig) and not name.endswith("tiny")]
    assert presets
    assert re.findall(r"`(\w+)`", row) == [*kinds, *(name for name, _ in presets)]
    meta = spec.Ctx(device=cpu, meta=True)
    sizes = [sum(p.numel() for p in spec.build_model(cfg, meta).parameters()) / 1e9 for _, cfg in presets]
    assert re.findall(r"` (\d+\.\d\d)", row) == [f"{size:.2f}" for size in sizes]


def test_the_config_of_the_readme_trains_with_the_flags_it_shows(tmp_path: Path) -> None:
    (tmp_path / "my_cfg.py").write_text(blocks("python")[0])
    (tmp_path / "data").mkdir()
    for i in range(12):
        (tmp_path / "data" / f"{i}.txt").write_text(" ".join(f"token{(i * j) % 19}" for j in range(400)))
    (block,) = [block for block in blocks("bash") if "my_cfg.py --steps" in block]
    commands = [line.split("#")[0] for line in block.splitlines()]
    assert commands[0].startswith("python scripts/train.py --cfg my_cfg.py --steps 10")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    for command, expected in ((commands[0], "override steps: 20 -> 10"), (commands[2], "--optim.schedule.warmup")):
        line = [sys.executable, "-W", "ignore", str(ROOT / "scripts/train.py"), *command.split()[2:]]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        assert expected in done.stdout
    made = {entry.name for entry in (tmp_path / "runs/my_cfg").iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "hf", "tokenizer", "loss.png"} <= made


def test_the_plan_of_the_readme_is_what_the_script_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config,) = [block for block in blocks("python") if block.startswith("# eight.py")]
    (command,) = [block for block in blocks("bash") if "scripts/plan.py" in block]
    (tmp_path / "eight.py").write_text(config)
    args = command.replace("eight.py", str(tmp_path / "eight.py")).split()[2:]
    assert script(*args) == 0
    assert capsys.readouterr().out in blocks("text")


def test_the_fields_of_a_run_are_those_of_the_readme() -> None:
    import attrs

    text = README[README.index("The top fields of a run are") :].split(".")[0]
    named = re.findall(r"`([a-z]+)`", text)
    assert named == [field.name for field in attrs.fields(lf.Run)]
    changing = next(line for line in README.splitlines() if "a resume may change" in line)
    listed = re.findall(r"`([a-z]+)`", changing.split("may change")[1])
    assert listed == [field.name for field in attrs.fields(lf.Run) if field.metadata.get("resume")]


@pytest.mark.parametrize("path", re.findall(r"`((?:tests|docs|lf|scripts|examples)/[\w/.]+)`", README))
def test_every_file_that_the_readme_names_exists(path: str) -> None:
    assert (ROOT / path).exists()


def test_every_script_is_in_the_readme() -> None:
    assert all(f"`{path.name}`" in README for path in (ROOT / "scripts").glob("*.py"))


def test_no_placeholder_is_left() -> None:
    assert not re.findall(r"\b[A-Z]{4,}_[A-Z_]+\b", re.sub(r"`[^`]*`", "", README))
