"""What the benchmarks share: the models, and ratios of the times of two sides that take turns."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import attrs

from lf.models.decoder import Attention, DecoderConfig, Mlp
from lf.models.llm.llama import Llama
from lf.models.llm.qwen import Qwen3
from lf.models.spec import Batch

Family = Literal["llama", "qwen3"]
Step = Callable[[Batch], tuple[float, float]]
"""Takes one optimiser step on a batch; returns its loss and the norm of its gradients before clipping."""


@attrs.frozen(kw_only=True)
class Sizes:
    """What is measured, and how often."""

    families: tuple[Family, ...] = ("llama", "qwen3")
    """Shapes of the models."""
    lengths: tuple[int, ...] = (256, 1024, 2048)
    """Tokens of a row."""
    tokens: int = 2048
    """Tokens of a step of one process; at least one row."""
    hidden: int = 384
    """Width of the models, a multiple of 12."""
    layers: int = 4
    """Layers of the models."""
    vocab: int = 8192
    """Token ids of the models."""
    pairs: int = 5
    """Timed pairs of steps."""
    threads: int = 0
    """Threads of torch, of all processes together; 0 leaves torch's own choice."""
    json: bool = False
    """Print a JSON line a case in place of the table."""


@attrs.frozen(kw_only=True)
class Ratio:
    """How fast lf is beside its peer on one case; a ratio over 1 says that lf is faster."""

    model: str
    """Family of the model."""
    length: int
    """Tokens of a row."""
    rows: int
    """Rows of a step."""
    ours: float
    """Tokens a second of lf, median."""
    peer: float
    """Tokens a second of the peer, median."""
    ratio: float
    """Median over the pairs of peer's time / lf's time."""
    low: float
    """Smallest of the pairs."""
    high: float
    """Largest of the pairs."""
    cpu_ratio: float
    """Median over the pairs of the ratio of processor times, which other work on the machine disturbs less."""


class DisagreementError(Exception):
    """Two sides that should compute the same do not."""


def peer_model(family: Family, args: Sizes) -> DecoderConfig:
    """Returns the model of a family at the sizes asked for, with three query heads to a key head."""
    attention = Attention(heads=6, kv_heads=2, head_dim=args.hidden // 6, qk_norm=family == "qwen3")
    sizes: dict[str, Any] = {
        "vocab": args.vocab,
        "hidden": args.hidden,
        "layers": args.layers,
        "attention": attention,
        "mlp": Mlp(width=args.hidden * 8 // 3),
        "max_length": max(args.lengths),
    }
    return Llama(**sizes) if family == "llama" else Qwen3(**sizes, tied=True)


LIMITS = (1e-5, 1e-4)
"""How far apart, beside their size, the losses and the norms of two first steps may be in float32."""


def check_same(
    ours: tuple[float, float], theirs: tuple[float, float], case: str, limits: tuple[float, float] = LIMITS
) -> None:
    """Raises DisagreementError unless two first steps have the same loss and the same norm of the gradients."""
    for name, a, b, limit in zip(("loss", "gradient norm"), ours, theirs, limits, strict=True):
        if not abs(a - b) <= limit * abs(b):
            raise DisagreementError(f"{case}: {name} {a} of lf, {b} of the peer; a comparison of speed says nothing")


def timed(step: Step, batch: Batch) -> tuple[float, float]:
    """Returns the seconds of wall-clock and of processor time that a step takes."""
    wall, busy = time.perf_counter(), time.process_time()
    step(batch)
    return time.perf_counter() - wall, time.process_time() - busy


def measure(
    ours: Step, theirs: Step, batches: Sequence[Batch], case: str, limits: tuple[float, float] = LIMITS
) -> list[tuple[tuple[float, float], ...]]:
    """Returns the times of lf and its peer on each batch but the first, which is for comparison and warming up."""
    check_same(ours(batches[0]), theirs(batches[0]), case, limits)
    return [(timed(ours, batch), timed(theirs, batch)) for batch in batches[1:]]


def summarise(pairs: list[tuple[tuple[float, float], ...]], model: str, length: int, rows: int) -> Ratio:
    """Returns the ratio of a case from the times of its pairs."""
    walls = [(ours[0], theirs[0]) for ours, theirs in pairs]
    ratios = [theirs / ours for ours, theirs in walls]
    return Ratio(
        model=model,
        length=length,
        rows=rows,
        ours=rows * length / statistics.median(ours for ours, _ in walls),
        peer=rows * length / statistics.median(theirs for _, theirs in walls),
        ratio=statistics.median(ratios),
        low=min(ratios),
        high=max(ratios),
        cpu_ratio=statistics.median(theirs[1] / ours[1] for ours, theirs in pairs),
    )


def row(first: str, *rest: object) -> str:
    """Returns a line of the table."""
    return f"{first:8}" + "".join(f"{cell!s:>12}" for cell in rest)


def head(as_json: bool) -> None:
    """Prints what stands above the lines of `show`."""
    if not as_json:
        print(row("model", "length", "rows", "lf tok/s", "peer tok/s", "ratio", "min-max", "cpu ratio"))


def show(r: Ratio, as_json: bool) -> None:
    """Prints a case."""
    speeds = f"{r.ours:.0f}", f"{r.peer:.0f}", f"{r.ratio:.2f}", f"{r.low:.2f}-{r.high:.2f}"
    line = row(r.model, r.length, r.rows, *speeds, f"{r.cpu_ratio:.2f}")
    print(json.dumps(attrs.asdict(r)) if as_json else line, flush=True)
