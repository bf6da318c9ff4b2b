"""The log line, metrics.jsonl, the other reports and the profiler's window."""

import io
import json
import re
import sys
import types
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lf.devices.device import Memory
from lf.train.config import Log, Profile
from lf.train.meter import StepReport, Timing, add_timing, duration, eval_line, line, report_step, to_json
from lf.train.profile import profile_window
from lf.train.sinks import check_sinks, cut_lines, open_progress, open_sinks

REPORT = StepReport(
    step=1200,
    loss=2.43121,
    terms={"lm": 2.43121},
    grad_norm=0.8123,
    lr=3e-4,
    tokens=123_456_789,
    tokens_per_second=12431.2,
    tflops=412.3,
    mfu=0.4168,
    memory=Memory(used=2**30, peak=int(61.2 * 2**30), total=int(79.1 * 2**30)),
    data_wait=0.0124,
    eta=3 * 3600 + 12 * 60 + 20,
    seconds=1.25,
    idle=0.03,
)


def timing(seconds: float, data: float = 0.0, tokens: int = 0, flops: float = 0.0) -> Timing:
    return Timing(seconds=seconds, data_seconds=data, tokens=tokens, flops=flops)


def report(window: tuple[Timing, ...], last: Timing, **given: object) -> StepReport:
    args = {"step": 4, "steps": 10, "loss": 1.0, "terms": {}, "grad_norm": 1.0, "lr": 0.1, "tokens": 9, "devices": 2}
    memory = Memory(used=1, peak=2, total=None)
    return report_step(window, last, **{**args, "peak": 1e12, "memory": memory, "idle": None, **given})


def test_the_line() -> None:
    assert line(REPORT, 10000) == (
        "step  1200/10000  loss 2.4312  gnorm 0.812  lr 3.0e-04  tok/s/dev 12,431  TFLOP/s 412  MFU 41.7%  "
        "mem 61.2/79.1 GiB  data 1.2%  eta 3h12m"
    )


def test_what_is_unknown_is_not_zero() -> None:
    unknown = attrs.evolve(
        REPORT,
        loss=float("nan"),
        terms={"lm": 2.0, "balance": 0.0123},
        tokens_per_second=None,
        tflops=None,
        mfu=None,
        eta=None,
        memory=Memory(used=1, peak=2**29, total=None),
    )
    assert line(unknown, 10000) == (
        "step  1200/10000  loss nan (lm 2.0000 balance 0.0123)  gnorm 0.812  lr 3.0e-04  tok/s/dev n/a  TFLOP/s n/a  "
        "MFU n/a  mem 0.5 GiB  data 1.2%  eta n/a"
    )
    assert "  MFU n/a  " in line(attrs.evolve(REPORT, mfu=None), 10000)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.6, "1m00s"), (425, "7m05s"), (11540, "3h12m"), (187_000, "2d03h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_json_twin_has_every_number_and_null_for_what_is_not_finite() -> None:
    record = to_json(attrs.evolve(REPORT, loss=float("nan"), grad_norm=float("inf"), mfu=None))
    assert json.loads(json.dumps(record, allow_nan=False)) == {
        "step": 1200,
        "loss": None,
        "terms/lm": 2.43121,
        "grad_norm": None,
        "lr": 3e-4,
        "tokens": 123_456_789,
        "tokens_per_second": 12431.2,
        "tflops": 412.3,
        "mfu": None,
        "memory_used": 2**30,
        "memory_peak": int(61.2 * 2**30),
        "memory_total": int(79.1 * 2**30),
        "data_wait": 0.0124,
        "eta": 11540,
        "seconds": 1.25,
        "idle": 0.03,
    }
    assert eval_line(3, float("nan"), {"lm": 2.0}) == {"step": 3, "eval_loss": None, "eval_terms/lm": 2.0}


def test_the_first_step_says_nothing_of_speed() -> None:
    slow = timing(100.0, data=50.0, tokens=100, flops=1e12)
    window = add_timing(None, slow)
    first = report(window, slow)
    assert (first.tokens_per_second, first.tflops, first.mfu, first.eta) == (None, None, None, None)
    assert (first.data_wait, first.seconds) == (0.5, 100.0)
    fast = timing(2.0, data=0.5, tokens=100, flops=1e12)
    second = report(add_timing(window, fast), fast)
    assert second.tokens_per_second == 100 / 2.0 / 2
    assert second.tflops == pytest.approx(0.25)
    assert second.mfu == pytest.approx(0.25)
    assert second.eta == 6 * 2.0
    assert second.data_wait == 0.25
    unknown = report(add_timing(window, fast), fast, peak=None)
    assert (unknown.tflops, unknown.mfu) == (pytest.approx(0.25), None)
    assert report(add_timing(window, timing(1.0)), timing(1.0)).tflops is None


@settings(max_examples=30, derandomize=True, deadline=None)
@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=80))
def test_the_window_moves(seconds: list[float]) -> None:
    window = None
    for each in seconds:
        window = add_timing(window, timing(each, tokens=1))
    kept = seconds[1:][-50:]
    assert window is not None
    assert [each.seconds for each in window] == kept
    speed = report(window, timing(1.0)).tokens_per_second
    assert speed == (pytest.approx(len(kept) / sum(kept) / 2) if kept else None)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_metrics_go_on_after_the_checkpoint(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path, Log(), rank=0, step=0, config={})
    for step in (1, 2, 3, 4):
        sinks.write({"step": step, "loss": 1.0 / step})
    assert len(lines(tmp_path / "metrics.jsonl")) == 4  # Each line is there before the file is closed.
    sinks.write({"step": 3, "eval_loss": None})
    sinks.close()

    again = open_sinks(tmp_path, Log(), rank=0, step=3, config={})
    again.write({"step": 4, "loss": 9.0})
    again.close()
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 1.0 / 3},
        {"step": 3, "eval_loss": None},
        {"step": 4, "loss": 9.0},
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        open_sinks(tmp_path / "b", Log(), rank=0, step=0, config={}).write({"step": 1, "loss": float("nan")})


def test_a_line_cut_at_any_byte_leaves_the_lines_before_it(tmp_path: Path) -> None:
    whole = b'{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 1.5}\n'
    path = tmp_path / "metrics.jsonl"
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        cut_lines(path, 2)
        assert path.read_bytes() in (b"", whole[:25], whole)
        assert len(lines(path)) == (size >= 24) + (size >= 49)
    cut_lines(tmp_path / "none.jsonl", 2)
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize("broken", ["{", "3", '{"loss": 1.0}', '{"step": null}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "metrics.jsonl"
    text = f'{{"step": 1}}\n{broken}\n{{"step": 2}}\n'
    path.write_text(text)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not a line of metrics"):
        cut_lines(path, 5)
    assert path.read_text() == text


def test_only_rank_0_writes(tmp_path: Path) -> None:
    sinks = open_sinks(tmp_path / "run", Log(tensorboard=True, wandb="p"), rank=1, step=0, config={})
    sinks.write({"step": 1, "loss": 1.0})
    sinks.close()
    assert not (tmp_path / "run").exists()


def test_tensorboard_has_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = open_sinks(tmp_path, Log(tensorboard=True), rank=0, step=0, config={})
    for step in (1, 2):
        sinks.write({"step": step, "loss": 2.0 / step, "mfu": None, "terms/lm": 1.0})
    sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["loss", "terms/lm"]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]


def test_wandb_goes_on_with_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []
    logged: list[tuple[int, dict[str, object]]] = []

    def init(**given: object) -> types.SimpleNamespace:
        seen.append(given)
        return types.SimpleNamespace(log=lambda values, step: logged.append((step, values)), finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    folder = tmp_path / "small"
    for step in (0, 1):
        sinks = open_sinks(folder, Log(wandb="proj"), rank=0, step=step, config={"seed": 7})
        sinks.write({"step": step + 1, "loss": 1.0, "eta": None})
        sinks.close()
    assert seen[0] == seen[1]
    assert (seen[0]["project"], seen[0]["name"], seen[0]["config"]) == ("proj", "small", {"seed": 7})
    assert logged == [(1, {"loss": 1.0}), (2, {"loss": 1.0})]


@pytest.mark.parametrize(
    ("module", "log", "message"),
    [
        ("tensorboard", Log(tensorboard=True), r"log.tensorboard = True needs .* pip install 'lf\[log\]'"),
        ("wandb", Log(wandb="proj"), r"log.wandb = 'proj' needs the package wandb.* pip install 'lf\[log\]'"),
    ],
)
def test_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, module: str, log: Log, message: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=message):
        check_sinks(log)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_for_terminals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for stream, rank, shown in ((Terminal(), 0, True), (Terminal(), 1, False), (io.StringIO(), 0, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        bar = open_progress(40, 10, rank=rank)
        bar.update(30, "loss [2.5]")
        bar.close()
        assert ("30/40" in stream.getvalue()) is shown
        assert ("loss [2.5]" in re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())) is shown


def run_steps(cfg: Profile, folder: Path, steps: range) -> list[str]:
    with profile_window(cfg, folder) as begin:
        for step in steps:
            begin(step)
            torch.ones(4, 4) @ torch.ones(4, 4)
    return sorted(path.name for path in folder.rglob("*.json"))


def test_the_profiler_writes_a_trace_of_its_window(tmp_path: Path) -> None:
    names = run_steps(Profile(start=2, steps=2), tmp_path, range(1, 6))
    assert names == ["steps_2_to_3_rank_0.json"]
    trace = json.loads((tmp_path / "profile" / names[0]).read_text())
    assert sum(event.get("name") == "aten::mm" for event in trace["traceEvents"]) == 2


@pytest.mark.parametrize(
    ("cfg", "steps", "names"),
    [
        (Profile(), range(1, 4), []),
        (Profile(start=3, steps=5), range(1, 5), ["steps_3_to_4_rank_0.json"]),
        (Profile(start=3, steps=5), range(4, 6), []),
    ],
    ids=["off", "ends_early", "resumed_inside"],
)
def test_a_window_that_is_cut_short(tmp_path: Path, cfg: Profile, steps: range, names: list[str]) -> None:
    assert run_steps(cfg, tmp_path, steps) == names
