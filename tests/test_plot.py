"""Curves of runs as pictures, and what cannot be drawn."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lf.train.plot import plot_runs, read_curves, smooth
from scripts.plot import main

ROOT = Path(__file__).parents[1]


def run(folder: Path, steps: int) -> Path:
    folder.mkdir()
    records = [{"step": step, "loss": 8.0 / step, "grad_norm": 1.0} for step in range(1, steps + 1)]
    records.insert(2, {"step": 2, "eval_loss": 5.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def pixels(path: Path) -> object:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    return imread(path)


def test_curves_of_a_run(tmp_path: Path) -> None:
    folder = run(tmp_path / "small", 3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": null, "grad_norm": null}\n{"step": 5, "lo')
    curves = read_curves(folder)
    assert curves.name == "small"
    assert curves.loss[:3] == ((1, 8.0), (2, 4.0), (3, 8.0 / 3))
    assert curves.loss[3][0] == 4
    assert math.isnan(curves.loss[3][1])
    assert curves.eval_loss == ((2, 5.0),)
    assert [step for step, _ in curves.grad_norm] == [1, 2, 3, 4]
    assert read_curves(folder / "metrics.jsonl").name == "small"


def test_one_and_several_runs_become_a_picture(tmp_path: Path) -> None:
    a, b = run(tmp_path / "a", 120), run(tmp_path / "b", 1)
    plot_runs([a], tmp_path / "out" / "one.png")
    plot_runs([a, b], tmp_path / "two.png")
    one, two = pixels(tmp_path / "out" / "one.png"), pixels(tmp_path / "two.png")
    assert one.shape == two.shape == (960, 1200, 4)
    assert (one != two).any()
    assert one[..., :3].min() < 0.2 < 0.9 < one[..., :3].mean()


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.floats(-100, 100) | st.just(math.nan), min_size=1, max_size=40), st.integers(0, 8))
def test_smoothing_is_a_mean_of_neighbours(values: list[float], width: int) -> None:
    result = smooth(values, width)
    assert len(result) == len(values)
    for index, got in enumerate(result):
        reach = min(width, index)
        near = [value for value in values[index - reach : index + reach + 1] if not math.isnan(value)]
        assert got == pytest.approx(sum(near) / len(near), abs=1e-9) if near else math.isnan(got)


NO_METRICS = (
    *("7", "[]", "null", '"step"', "{}", '{"loss": 1.0}', '{"step": "1"}', '{"step": 1.5}', '{"step": true}'),
    *('{"step": 1, "loss": "low"}', '{"step": 1, "grad_norm": [1]}', '{"step": 1, "eval_loss": false}'),
    *('{"step": 1' + "0" * 400 + "}", '{"step": 1, "loss": 1' + "0" * 400 + "}"),
)


def test_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    losses = ("1.0", "1e999", "NaN", "-Infinity", "null", "2")
    text = "".join(f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses))
    (tmp_path / "metrics.jsonl").write_text(text)
    values = [value for _, value in read_curves(tmp_path).loss]
    assert (values[0], values[-1]) == (1.0, 2)
    assert all(math.isnan(value) for value in values[1:-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist; give a run folder or its metrics.jsonl"),
        ("", "has no step in it"),
        ('{"step": 1}\n', "has no step in it"),
        ('{"step": 1, "loss": 2.0}\n{oops\n{"step": 2, "loss": 2.0}\n', r"metrics\.jsonl:2 is not JSON"),
        (b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": "\xff"}\n{"step": 3}\n', r"metrics\.jsonl:2 is not JSON"),
        ("[" * 100_000 + '\n{"step": 3}\n', r"metrics\.jsonl:1 is not JSON"),
        *(
            (line + '\n{"step": 3, "loss": 1.0}\n', r"metrics\.jsonl:1 = .* is no line of metrics")
            for line in NO_METRICS
        ),
        ('{"step": 3, "loss": 1.0}\n[]', r"metrics\.jsonl:2 = '\[\]' is no line of metrics"),
    ],
)
def test_nothing_to_draw_is_said(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=message):
        plot_runs([tmp_path / "metrics.jsonl"], tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()


def test_matplotlib_missing_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'lf\[plot\]'"):
        plot_runs([run(tmp_path / "a", 3)], tmp_path / "out.png")


def test_a_picture_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main((run(tmp_path / "a", 3),), out=tmp_path / "file" / "loss.png") == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_the_script(tmp_path: Path) -> None:
    run(tmp_path / "a", 3)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "scripts" / "plot.py"), "--out", "loss.png"]
    done = subprocess.run([*command, "a"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "loss.png"), done.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    for wrong in (["nowhere"], []):
        done = subprocess.run([*command, *wrong], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
