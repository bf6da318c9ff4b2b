"""From the numbers of a step to its report, and from that to a line on a terminal and a line in `metrics.jsonl`."""

import math
from collections.abc import Mapping
from typing import Any

import attrs

from lf.devices.device import Memory

_WINDOW = 50


@attrs.frozen(kw_only=True)
class Timing:
    """What one step took on this rank, and did over all ranks."""

    seconds: float
    """Wall-clock time of the step, in seconds, data included."""
    data_seconds: float
    """Seconds of it that were spent waiting for data."""
    tokens: int
    """Tokens that the step trained on, without padding."""
    flops: float
    """Operations of forward and backward of all ranks, without recompute; 0 where rows have no length."""


@attrs.frozen(kw_only=True)
class StepReport:
    """One step, as it is shown and written. None stands for what is not known."""

    step: int
    """The step, from 1."""
    loss: float
    """Weighted mean of the loss over the global batch."""
    terms: Mapping[str, float]
    """Weighted mean of each term of the loss, before its coefficient."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    """Tokens trained on since the first step of the run, without padding."""
    tokens_per_second: float | None
    """Tokens per second and device, over the last steps."""
    tflops: float | None
    """TFLOP/s per device, over the last steps."""
    mfu: float | None
    """Share of the device's dense peak, 0 to 1."""
    memory: Memory
    """Memory of this rank's device."""
    data_wait: float
    """Share of the time spent waiting for data over the last steps, 0 to 1."""
    eta: float | None
    """Seconds to the end of the run."""
    seconds: float
    """Wall-clock time of this step, in seconds."""
    idle: float | None
    """Share of the ranks' time that they wait for the slowest, as the step was planned, 0 to 1."""


def add_timing(window: tuple[Timing, ...] | None, timing: Timing) -> tuple[Timing, ...]:
    """Returns the window of the last 50 steps with one more; start from None, and the first step is left out.

    The first step of a process pays for compilation, allocation and the filling of queues, so it says nothing of speed.
    """
    return () if window is None else (*window, timing)[-_WINDOW:]


def report_step(
    window: tuple[Timing, ...],
    timing: Timing,
    *,
    step: int,
    steps: int,
    loss: float,
    terms: Mapping[str, float],
    grad_norm: float,
    lr: float,
    tokens: int,
    devices: int,
    peak: float | None,
    memory: Memory,
    idle: float | None,
) -> StepReport:
    """Returns the report of a step of `steps`, given the window after it and the step's own timing.

    `peak` is that of one device in FLOP/s (`Device.peak`), `devices` the number of ranks that share the work.
    """
    timed = window or (timing,)
    seconds = sum(each.seconds for each in window)
    flops = sum(each.flops for each in window)
    speed = flops / seconds / devices if seconds and flops else None
    return StepReport(
        step=step,
        loss=loss,
        terms=dict(terms),
        grad_norm=grad_norm,
        lr=lr,
        tokens=tokens,
        tokens_per_second=sum(each.tokens for each in window) / seconds / devices if seconds else None,
        tflops=None if speed is None else speed / 1e12,
        mfu=None if speed is None or peak is None else speed / peak,
        memory=memory,
        data_wait=sum(each.data_seconds for each in timed) / max(sum(each.seconds for each in timed), 1e-9),
        eta=(steps - step) * seconds / len(window) if window else None,
        seconds=timing.seconds,
        idle=idle,
    )


def _digits(value: float) -> str:
    """Returns a number in three digits, without an exponent where that is short enough to read."""
    if not math.isfinite(value):
        return str(value)
    if value >= 100.0:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1e-3 or value == 0.0 else f"{value:.1e}"


def _known(value: float | None, text: str) -> str:
    return "n/a" if value is None else text


def duration(seconds: float) -> str:
    """Returns a time as `45s`, `7m05s`, `3h12m` or `2d04h`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d{hour:02}h"
    if hours:
        return f"{hours}h{minute:02}m"
    return f"{minutes}m{second:02}s" if minutes else f"{second}s"


def _memory(memory: Memory) -> str:
    total = "" if memory.total is None else f"/{memory.total / 2**30:.1f}"
    return f"{memory.peak / 2**30:.1f}{total} GiB"


def line(report: StepReport, steps: int) -> str:
    """Returns the report as one line; what is not known is `n/a`, and memory is the peak of this rank's device.

    Loss terms are named where there is more than one.
    """
    terms = "".join(f" {name} {value:.4f}" for name, value in report.terms.items()) if len(report.terms) > 1 else ""
    fields = (
        f"step {report.step:>{len(str(steps))}}/{steps}",
        f"loss {report.loss:.4f}" + (f" ({terms[1:]})" if terms else ""),
        f"gnorm {_digits(report.grad_norm)}",
        f"lr {report.lr:.1e}",
        f"tok/s/dev {_known(report.tokens_per_second, _digits(report.tokens_per_second or 0.0))}",
        f"TFLOP/s {_known(report.tflops, _digits(report.tflops or 0.0))}",
        f"MFU {_known(report.mfu, f'{100 * (report.mfu or 0.0):.1f}%')}",
        f"mem {_memory(report.memory)}",
        f"data {100 * report.data_wait:.1f}%",
        f"eta {_known(report.eta, duration(report.eta or 0.0))}",
    )
    return "  ".join(fields)


def finite(value: float) -> float | None:
    """Returns the number, or None for NaN and infinities, which JSON has no word for."""
    return value if math.isfinite(value) else None


def to_json(report: StepReport) -> dict[str, Any]:
    """Returns the report as a line of `metrics.jsonl`: flat, with None where a number is unknown or not finite.

    Keys are the fields of `StepReport`; terms are `terms/NAME`, memory is `memory_used`, `memory_peak` and
    `memory_total` in bytes.
    """
    record = attrs.asdict(report, recurse=False)
    terms, memory = record.pop("terms"), record.pop("memory")
    record |= {f"terms/{name}": value for name, value in terms.items()}
    record |= {f"memory_{name}": value for name, value in attrs.asdict(memory).items()}
    return {key: None if value is None else finite(value) for key, value in record.items()}


def eval_line(step: int, loss: float, terms: Mapping[str, float]) -> dict[str, Any]:
    """Returns an evaluation after a step as a line of `metrics.jsonl`: `step`, `eval_loss` and `eval_terms/NAME`."""
    return {"step": step, "eval_loss": finite(loss)} | {f"eval_terms/{k}": finite(v) for k, v in terms.items()}
