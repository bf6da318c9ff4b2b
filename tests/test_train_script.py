"""`scripts/train.py` as a user runs it: exit codes, signals, kills, several processes, one's own classes."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lf.train import checkpoint

ROOT = Path(__file__).parents[1]

MINE = '''
"""A family, an optimiser and a data source that lf does not know, in one file."""

import attrs
import torch

import lf
from lf.data.source import open_data
from lf.models import spec
from lf.models.toy import Toy
from lf.train.optim import make_optimizer


@attrs.frozen(kw_only=True)
class Wide(Toy):
    """Toy with another name."""

    hidden: int = 48
    """Width."""


@attrs.frozen(kw_only=True)
class RAdam(lf.OptimConfig):
    """Rectified Adam."""

    beta: float = 0.9
    """Decay of the first moment."""


@make_optimizer.register
def _(cfg: RAdam, groups):
    return torch.optim.RAdam(groups, lr=cfg.lr, betas=(cfg.beta, 0.999))


@attrs.frozen(kw_only=True)
class Counting(lf.DataConfig):
    """Rows that count."""

    length: int = 16
    """Tokens of a row."""


class Rows:
    def __init__(self, cfg):
        self.cfg = cfg

    def __len__(self):
        return 50

    def row(self, epoch, index):
        import numpy as np

        ids = (np.arange(self.cfg.length + 1) + index + epoch) % 257
        size = self.cfg.length
        return {"tokens": ids[:-1], "labels": ids[1:], "lengths": (size,), "real": size, "id": f"{epoch}:{index}"}

    def describe(self):
        return {"rows": 50, "vocab": 257, "length": self.cfg.length}


@open_data.register
def _(cfg: Counting, ctx):
    return Rows(cfg)


cfg = lf.Run(
    model=Wide(),
    data=Counting(),
    eval=lf.Eval(data=Counting(length=16)),
    optim=RAdam(lr=1e-1),
    parallel=lf.TorchParallel(micro_batch=4),
    batch=8,
    steps=STEPS,
    log=lf.Log(every=1),
    save=lf.Save(every=SAVE),
)
'''


def command(*args: str) -> list[str]:
    return [sys.executable, "-W", "ignore", str(ROOT / "scripts/train.py"), "--device", "cpu", *args]


def start(cwd: Path, *args: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    line = [*launcher, *command(*args)[3:]] if launcher else command(*args)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cwd / "cache")}
    return subprocess.Popen(line, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = process.communicate(timeout=240)
    return process.returncode, out


def run(cwd: Path, *args: str) -> tuple[int, str]:
    return finish(start(cwd, *args))


def write(folder: Path, steps: int, save: int) -> str:
    path = folder / "mine.py"
    path.write_text(MINE.replace("STEPS", str(steps)).replace("SAVE", str(save)))
    return str(path)


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_a_users_own_family_optimiser_and_data(tmp_path: Path) -> None:
    code, out = run(tmp_path, "--cfg", write(tmp_path, 40, 0), "--steps", "30", "--optim.beta", "0.8")
    assert code == 0, out
    assert "override steps: 40 -> 30" in out
    assert "override optim.beta: 0.9 -> 0.8" in out
    folder = tmp_path / "runs" / "mine"
    assert {"config.json", "mine.py", "metrics.jsonl", "checkpoints", "hf", "loss.png"} <= set(os.listdir(folder))
    curve = losses(folder)
    assert len(curve) == 30
    assert curve[-1] < 0.7 * curve[0]
    code, out = run(tmp_path, "--cfg", str(folder / "config.json"), "--steps", "32")
    assert code == 0, out
    assert "resumed from" in out
    assert len(losses(folder)) == 32


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path: Path, number: signal.Signals, expected: int) -> None:
    config = write(tmp_path, 3000, 0)
    process = start(tmp_path, "--cfg", config)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and " 12/" in line:
            process.send_signal(number)
            break
    code, out = finish(process)
    assert code == expected, out
    folder = tmp_path / "runs" / "mine"
    found = checkpoint.latest(folder)
    assert found is not None
    assert len(losses(folder)) == found.step
    code, out = run(tmp_path, "--cfg", config, "--steps", str(found.step + 2))
    assert code == 0, out
    assert f"step_{found.step}" in out


def test_a_kill_at_any_moment_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    config, rng = write(tmp_path, 400, 3), random.Random(7)
    whole = tmp_path / "whole"
    assert run(tmp_path, "--cfg", config, "--out", str(whole))[0] == 0
    folder = tmp_path / "killed"
    for _ in range(4):
        process = start(tmp_path, "--cfg", config, "--out", str(folder))
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step"):
                time.sleep(rng.random() * 0.8)
                break
        process.kill()
        finish(process)
    code, out = run(tmp_path, "--cfg", config, "--out", str(folder))
    assert code == 0, out
    assert losses(folder) == losses(whole)


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29547")

TRIPPING = """
import os
from pathlib import Path

RANK = int(os.environ.get("RANK", "0"))
Path(f"pid_{RANK}").write_text(str(os.getpid()))
whole = Rows.row


def row(self, epoch, index):
    # Of the 8 rows of step 3, 16 to 23, the second rank has the last four.
    if RANK == 1 and WHERE == "row" and index == 22:
        raise LookupError("no good")
    return whole(self, epoch, index)


class Optimizer(torch.optim.RAdam):
    done = 0

    def step(self, closure=None):
        self.done += 1
        if RANK == 1 and WHERE == "update" and self.done == 3:
            raise LookupError("no good")
        return super().step(closure)


Rows.row = row
torch.optim.RAdam = Optimizer
"""
"""What raises on rank 1 at step 3; each rank leaves its process id in the working folder."""


def tripping(folder: Path, steps: int, save: int, where: str = "") -> str:
    path = Path(write(folder, steps, save))
    path.write_text(path.read_text() + TRIPPING.replace("WHERE", repr(where)))
    return str(path)


def ranks(folder: Path) -> list[int]:
    return [int((folder / f"pid_{rank}").read_text()) for rank in (0, 1)]


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


BESIDE = ("--save.background",)


@pytest.mark.parametrize(
    ("where", "save", "flags"),
    [
        ("row", 0, ()),
        pytest.param("update", 1, (), marks=pytest.mark.full),
        pytest.param("update", 1, BESIDE, marks=pytest.mark.full),
    ],
)
def test_a_rank_that_raises_ends_the_job_with_its_error_first(
    tmp_path: Path, where: str, save: int, flags: tuple[str, ...]
) -> None:
    config = tripping(tmp_path, 3000, save, where)
    begun = time.monotonic()
    code, out = finish(start(tmp_path, "--cfg", config, *flags, launcher=TORCHRUN))
    assert code not in (0, None), out
    assert time.monotonic() - begun < 60
    assert "no good" in re.findall(r"(?m)^\w*[Ee]rror: .*$", out)[0], out
    assert not any(map(is_there, ranks(tmp_path)))
    found = checkpoint.latest(tmp_path / "runs" / "mine")
    assert found is not None
    assert found.step == 2


@pytest.mark.full
@pytest.mark.parametrize("flags", [(), BESIDE])
def test_a_rank_that_is_killed_ends_the_job_and_the_same_command_goes_on(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    config = tripping(tmp_path, 60, 5)
    whole = tmp_path / "whole"
    assert finish(start(tmp_path, "--cfg", config, "--out", str(whole), launcher=TORCHRUN))[0] == 0
    folder = tmp_path / "killed"
    process = start(tmp_path, "--cfg", config, "--out", str(folder), *flags, launcher=TORCHRUN)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step") and " 12/" in line:
            os.kill(ranks(tmp_path)[1], signal.SIGKILL)
            break
    begun = time.monotonic()
    code, out = finish(process)
    assert code not in (0, None), out
    assert time.monotonic() - begun < 60
    assert not any(map(is_there, ranks(tmp_path)))
    assert len(losses(folder)) < 60
    assert re.search(r"(?m)^error: another rank is gone, and the ranks cannot go on without it \(", out), out
    code, out = finish(start(tmp_path, "--cfg", config, "--out", str(folder), *flags, launcher=TORCHRUN))
    assert code == 0, out
    assert "resumed from" in out
    assert losses(folder) == losses(whole)


def test_torchrun_on_two_processes_equals_one(tmp_path: Path) -> None:
    config = write(tmp_path, 12, 0)
    assert run(tmp_path, "--cfg", config, "--out", "one")[0] == 0
    code, out = finish(start(tmp_path, "--cfg", config, "--out", "two", launcher=TORCHRUN))
    assert code == 0, out
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert len(list((tmp_path / "two" / "checkpoints" / "step_12").glob("rank_*"))) == 2


@pytest.mark.parametrize(
    ("text", "args", "expected"),
    [
        ("import lf\ncfg = lf.Run(", (), r"bad\.py:2.*SyntaxError"),
        ("x = 1\n", (), r"bad\.py.*no config called cfg"),
        ("cfg = 3\n", (), r"bad\.py.*cfg"),
        ("import lf\ncfg = lf.TextData(paths=('a',))\n", (), "lf.Run"),
        ("import lf\ncfg = lf.Run(data=lf.TextData(paths=('/nowhere',)))\n", (), "model"),
        ("import lf\ncfg = lf.Run(data=lf.TextData(paths=('/nowhere',)))\n", ("--stepz", "3"), "--steps"),
        ("import lf\ncfg = lf.Run(data=lf.TextData(paths=('/nowhere',)))\n", ("--steps", "0"), "steps"),
    ],
)
def test_bad_configs_get_one_clear_line_and_exit_code_2(
    tmp_path: Path, text: str, args: tuple[str, ...], expected: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    code, out = run(tmp_path, "--cfg", "bad.py", *args)
    assert code == 2, out
    assert "Traceback" not in out
    assert re.search(expected, out), out
    assert not (tmp_path / "runs").exists()
