"""Curves of one or several runs: loss over the steps, and below it the norm of the gradient."""

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

_CURVES = ("loss", "eval_loss", "grad_norm")


@attrs.frozen(kw_only=True)
class Curves:
    """What is drawn of one run: points (step, value), NaN where a value is missing."""

    name: str
    """Label of the run."""
    loss: tuple[tuple[int, float], ...]
    """Training loss."""
    eval_loss: tuple[tuple[int, float], ...]
    """Loss on held-out data."""
    grad_norm: tuple[tuple[int, float], ...]
    """Norm of the gradient before clipping."""


def read_curves(path: Path) -> Curves:
    """Returns the curves of a run folder or a metrics file; ValueError where there is nothing to draw."""
    source = path / "metrics.jsonl" if path.is_dir() else path
    if not source.exists():
        raise ValueError(f"{source} does not exist; give a run folder or its metrics.jsonl")
    records: list[dict[str, Any]] = []
    lines = source.read_bytes().splitlines()
    for number, text in enumerate(lines, 1):
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            if number == len(lines):
                break  # A run that is being written now.
            raise ValueError(f"{source}:{number} is not JSON; repair or remove the line") from None
        if (
            not isinstance(record, dict)
            or type(record.get("step")) is not int
            or not all(map(_is_value, record.items()))
        ):
            raise ValueError(
                f"{source}:{number} = {text.decode()!r:.80} is no line of metrics: an object whose step is a whole "
                f"number and whose {', '.join(_CURVES)} are numbers or null; repair or remove the line"
            )
        records.append(record)

    def points(key: str) -> tuple[tuple[int, float], ...]:
        found = ((record["step"], record[key]) for record in records if key in record)
        return tuple((step, value if value is not None and math.isfinite(value) else math.nan) for step, value in found)

    curves = Curves(
        name=source.parent.name if source.name == "metrics.jsonl" else source.stem,
        loss=points("loss"),
        eval_loss=points("eval_loss"),
        grad_norm=points("grad_norm"),
    )
    if not curves.loss and not curves.eval_loss:
        raise ValueError(f"{source} has no step in it; wait for the first one, or give another run")
    return curves


def _is_value(field: tuple[str, Any]) -> bool:
    name, value = field
    if name not in ("step", *_CURVES):
        return True
    if type(value) is int:
        return abs(value) < 2**63  # Whole numbers of JSON have no bound, those of a drawing have.
    return name != "step" and (value is None or type(value) is float)


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Returns the mean of each value and up to `width` neighbours on either side, NaN left out.

    The window shrinks on both sides towards the start, where curves fall fast; near the end only later steps lack.
    """
    sums = list(itertools.accumulate((0.0 if math.isnan(value) else value for value in values), initial=0.0))
    counts = list(itertools.accumulate((not math.isnan(value) for value in values), initial=0))
    result = []
    for index in range(len(values)):
        reach = min(width, index)
        low, high = index - reach, min(index + reach + 1, len(values))
        count = counts[high] - counts[low]
        result.append((sums[high] - sums[low]) / count if count else math.nan)
    return result


def _draw(axis: Any, points: Sequence[tuple[int, float]], color: str, label: str) -> None:
    """Draws points faintly and their smoothed curve over them."""
    steps, values = zip(*points, strict=True)
    width = len(values) // 50
    if width:
        axis.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
    marker = "o" if len(values) == 1 else ""
    axis.plot(steps, smooth(values, width), color=color, linewidth=1.6, label=label, marker=marker)


def plot_runs(paths: Sequence[Path], out: Path) -> None:
    """Writes a PNG with the training loss, the held-out loss and the gradient norm of the runs.

    `paths` are run folders or metrics files. Raises ValueError where one has nothing to draw, or matplotlib is missing.
    """
    if not paths:
        raise ValueError("no run to draw; give a run folder or its metrics.jsonl")
    runs = [read_curves(path) for path in paths]
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ValueError("plots need the package matplotlib, which is not installed; pip install 'lf[plot]'") from None

    figure = Figure(figsize=(8.0, 6.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for index, run in enumerate(runs):
        color = f"C{index % 10}"
        prefix = f"{run.name}: " if len(runs) > 1 else ""
        if run.loss:
            _draw(top, run.loss, color, f"{prefix}training")
        if run.eval_loss:
            steps, values = zip(*run.eval_loss, strict=True)
            style = {"marker": "o", "markersize": 4.5, "linestyle": "--", "linewidth": 1.0}
            top.plot(steps, values, color=color, markeredgecolor="black", label=f"{prefix}held-out", **style)
        if run.grad_norm:
            _draw(bottom, run.grad_norm, color, run.name)
    top.set_title(runs[0].name if len(runs) == 1 else "")
    top.set_ylabel("loss")
    top.legend(frameon=False)
    bottom.set_ylabel("gradient norm\n(before clipping)")
    bottom.set_ylim(bottom=0.0)
    bottom.set_xlabel("step")
    bottom.xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    for axis in (top, bottom):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png", dpi=150)
