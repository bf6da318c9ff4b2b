"""Measures speed as ratios of runs that alternate in one process: `python scripts/bench.py peers`."""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lf
from lf.devices.cpu import cpu
from lf.models.decoder import Attention, DecoderConfig, Mlp
from lf.models.llm.llama import Llama
from lf.models.llm.qwen import Qwen3
from lf.models.spec import Batch, fake_batch
from lf.train.comm import process_group
from lf.train.start import export

Family = Literal["llama", "qwen3"]
Step = Callable[[Batch], tuple[float, float]]
"""Takes one optimiser step on a batch; returns its loss and the norm of its gradients before clipping."""


@attrs.frozen(kw_only=True)
class Peers:
    """Trains equal models in lf and in a plain transformers loop, in turn, and compares their speed.

    Both sides have the same weights, rows, fp32, fused AdamW and clipping; transformers runs its SDPA attention. Exit
    code 1 when they disagree about the first step.
    """

    families: tuple[Family, ...] = ("llama", "qwen3")
    """Shapes of the models."""
    lengths: tuple[int, ...] = (256, 1024, 2048)
    """Tokens of a row."""
    tokens: int = 2048
    """Tokens of a step; at least one row."""
    hidden: int = 384
    """Width of the models, a multiple of 12."""
    layers: int = 4
    """Layers of the models."""
    vocab: int = 8192
    """Token ids of the models."""
    pairs: int = 5
    """Timed pairs of steps."""
    threads: int = 0
    """Threads of torch; 0 leaves torch's own choice."""
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


def peer_model(family: Family, args: Peers) -> DecoderConfig:
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


def megatron_side(run: lf.Run, folder: Path) -> Step:
    """Returns lf's step on the Megatron path, and writes its first weights as a Hugging Face folder."""
    from lf.parallel.config import MegatronParallel, resolve
    from lf.parallel.megatron import make_context
    from lf.train.megatron_step import megatron_engine

    assert isinstance(run.parallel, MegatronParallel)
    assert run.model is not None
    engine = megatron_engine(run, run.model, make_context(run.parallel, resolve(run.parallel, 1), cpu, torch.float32))
    export(run.model, engine.weights(engine.state), folder, source=None, files={}, write=True)
    state = engine.state

    def step(batch: Batch) -> tuple[float, float]:
        nonlocal state
        state, metrics = engine.step(state, [batch])
        return metrics.loss, metrics.grad_norm

    return step


def transformers_side(run: lf.Run, folder: Path) -> Step:
    """Returns a plain training step of transformers' model of a folder."""
    from transformers import AutoModelForCausalLM

    from lf.train.optim import make_optimizer, param_groups

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.train()
    optimizer = make_optimizer(run.optim, param_groups(model.named_parameters(), run.optim))

    def step(batch: Batch) -> tuple[float, float]:
        logits = model(input_ids=batch["tokens"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.optim.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss), float(norm)

    return step


def check_same(ours: tuple[float, float], theirs: tuple[float, float], case: str) -> None:
    """Raises DisagreementError unless two first steps have the same loss and the same norm of the gradients."""
    for name, a, b, limit in zip(("loss", "gradient norm"), ours, theirs, (1e-5, 1e-4), strict=True):
        if not abs(a - b) <= limit * abs(b):
            raise DisagreementError(f"{case}: {name} {a} of lf, {b} of the peer; a comparison of speed says nothing")


def timed(step: Step, batch: Batch) -> tuple[float, float]:
    """Returns the seconds of wall-clock and of processor time that a step takes."""
    wall, busy = time.perf_counter(), time.process_time()
    step(batch)
    return time.perf_counter() - wall, time.process_time() - busy


def measure(ours: Step, theirs: Step, batches: Sequence[Batch], case: str) -> list[tuple[tuple[float, float], ...]]:
    """Returns the times of lf and its peer on each batch but the first, which is for comparison and warming up."""
    check_same(ours(batches[0]), theirs(batches[0]), case)
    return [(timed(ours, batch), timed(theirs, batch)) for batch in batches[1:]]


def compare_peers(args: Peers) -> Iterator[Ratio]:
    """Gives the ratio of each case as it is measured; torch.distributed must be up, with one process."""
    for family in args.families:
        model = peer_model(family, args)
        for length in args.lengths:
            rows = max(1, args.tokens // length)
            run = lf.Run(
                model=model,
                data=lf.TextData(paths=("unused",)),
                batch=rows,
                parallel=lf.MegatronParallel(micro_batch=rows),
            )
            with tempfile.TemporaryDirectory() as folder:
                ours, theirs = megatron_side(run, Path(folder)), transformers_side(run, Path(folder))
            batches = [fake_batch(model, rows, length, seed) for seed in range(1 + args.pairs)]
            yield summarise(measure(ours, theirs, batches, f"{family} at {length}"), family, length, rows)


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


def peers(args: tyro.conf.OmitArgPrefixes[Peers]) -> int:
    """Compares lf with a plain transformers training loop; returns the exit code."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    if not args.json:
        print(f"fp32 on a CPU, threads {torch.get_num_threads()}, {args.tokens} tokens a step, {args.pairs} pairs")
        print(row("model", "length", "rows", "lf tok/s", "peer tok/s", "ratio", "min-max", "cpu ratio"))
    try:
        with process_group(cpu):
            for r in compare_peers(args):
                speeds = f"{r.ours:.0f}", f"{r.peer:.0f}", f"{r.ratio:.2f}", f"{r.low:.2f}-{r.high:.2f}"
                line = row(r.model, r.length, r.rows, *speeds, f"{r.cpu_ratio:.2f}")
                print(json.dumps(attrs.asdict(r)) if args.json else line, flush=True)
    except DisagreementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


COMMANDS = {"peers": peers}


if __name__ == "__main__":
    sys.exit(tyro.extras.subcommand_cli_from_dict(COMMANDS))
