"""What each layout costs on two processes, beside one process that trains the same model on the same micro-batches."""

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, Literal

import attrs
import torch

import lf
from lf.devices.cpu import cpu
from lf.models.decoder import Experts
from lf.models.spec import Batch, fake_batch
from lf.train.comm import process_group
from scripts.benchmarks.ratios import Ratio, Sizes, check_same, peer_model, summarise

Layout = Literal["dp2", "tp2", "tp2 sp", "pp2", "cp2", "ep2"]
LAYOUTS: tuple[Layout, ...] = ("dp2", "tp2", "tp2 sp", "pp2", "cp2", "ep2")
"""What is measured. `ep2` has experts in place of the feed-forward layers."""


def spread(layout: Layout, rows: int) -> lf.MegatronParallel:
    """Returns a layout of two processes for steps of some rows, an even number."""
    found: dict[Layout, lf.MegatronParallel] = {
        "dp2": lf.MegatronParallel(micro_batch=rows // 2),
        "tp2": lf.MegatronParallel(tp=2, sp=False, micro_batch=rows),
        "tp2 sp": lf.MegatronParallel(tp=2, micro_batch=rows),
        "pp2": lf.MegatronParallel(pp=2, micro_batch=max(1, rows // 4)),
        "cp2": lf.MegatronParallel(cp=2, micro_batch=rows),
        "ep2": lf.MegatronParallel(ep=2, micro_batch=rows // 2),
    }
    return found[layout]


def run_of(layout: Layout, args: Sizes, rows: int) -> lf.Run:
    """Returns the run that a layout is measured on; its data is never opened."""
    model = peer_model("qwen3", args)
    if layout == "ep2":
        model = attrs.evolve(model, experts=Experts(count=8, top_k=2, width=args.hidden * 2 // 3))
    data = lf.TextData(paths=("unused",))
    return lf.Run(model=model, data=data, batch=rows, parallel=spread(layout, rows))


def micro_batches(run: lf.Run, length: int, seed: int) -> list[Batch]:
    """Returns the micro-batches of a step over all ranks."""
    assert run.model is not None
    size, count = run.parallel.micro_batch, run.batch // run.parallel.micro_batch
    return [fake_batch(run.model, size, length, seed * count + i) for i in range(count)]


class Trainer:
    """lf's step in this process, which holds a rank."""

    def __init__(self, run: lf.Run) -> None:
        from scripts.benchmarks.megatron import lf_engine

        self._engine, ctx = lf_engine(run)
        self._layout, self._state = ctx.layout, self._engine.state

    def step(self, micro: Sequence[Batch]) -> tuple[float, float, float]:
        """Returns loss, norm of the gradients and seconds of processor time of a step on a global batch."""
        busy = time.process_time()
        self._state, metrics = self._engine.step(self._state, micro[self._layout.dp_rank :: self._layout.dp])
        return metrics.loss, metrics.grad_norm, time.process_time() - busy


def _serve(pipe: Connection, rank: int, world: int, port: int, threads: int) -> None:
    """Is one rank: builds what it is given a run for, and takes a step for each batch, until the pipe is closed."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(threads)
    trainer: Trainer | None = None
    with process_group(cpu), contextlib.suppress(EOFError):
        while True:
            asked = pipe.recv()
            if isinstance(asked, lf.Run):
                trainer = Trainer(asked)
                pipe.send(None)
            else:
                assert trainer is not None
                pipe.send(trainer.step(asked))


@contextlib.contextmanager
def ranks(world: int, threads: int) -> Iterator[list[Connection]]:
    """Gives the pipes to processes that wait for work, one for each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    pairs = [spawn.Pipe() for _ in range(world)]
    made = [
        spawn.Process(target=_serve, args=(theirs, rank, world, port, threads), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for process, (_, theirs) in zip(made, pairs, strict=True):
        process.start()
        theirs.close()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        for process, (ours, _) in zip(made, pairs, strict=True):
            ours.close()
            process.join()


def ask(pipes: Sequence[Connection], what: Any) -> list[Any]:
    """Returns what the processes answer to a run, which they build, or to micro-batches, on which they take a step."""
    for pipe in pipes:
        pipe.send(what)
    return [pipe.recv() for pipe in pipes]


def measure_layout(layout: Layout, length: int, args: Sizes, pipes: Sequence[Connection]) -> Ratio:
    """Returns how fast a layout is beside this process alone. Raises as `measure_run` does."""
    rows = max(2, args.tokens // length // 2 * 2)
    run = run_of(layout, args, rows)
    return measure_run(run, layout, length, lambda seed: micro_batches(run, length, seed), args.pairs, pipes)


def measure_run(
    run: lf.Run, case: str, length: int, micro_of: Callable[[int], list[Batch]], pairs: int, pipes: Sequence[Connection]
) -> Ratio:
    """Returns how fast the layout of a run is beside this process alone; the two take turns on equal micro-batches.

    `micro_of` gives those of a step by its number. Raises DisagreementError when they disagree about the first step.
    """
    alone = Trainer(attrs.evolve(run, parallel=lf.MegatronParallel(micro_batch=run.parallel.micro_batch)))
    ask(pipes, run)
    times: list[tuple[tuple[float, float], ...]] = []
    for seed in range(1 + pairs):
        micro = micro_of(seed)
        started = time.perf_counter()
        found = ask(pipes, micro)
        between = time.perf_counter()
        loss, norm, busy = alone.step(micro)
        ended = time.perf_counter()
        if not seed:  # For comparison and warming up.
            check_same(found[0][:2], (loss, norm), f"{case} at {length}")
            continue
        times.append(((between - started, sum(each[2] for each in found)), (ended - between, busy)))
    return summarise(times, case, length, run.batch)


def compare_layouts(layouts: Sequence[Layout], args: Sizes) -> Iterator[Ratio]:
    """Gives the ratio of each case as it is measured: over 1 says that two processes are faster than one."""
    threads = torch.get_num_threads()
    with ranks(2, max(1, threads // 2)) as pipes, process_group(cpu):
        for layout in layouts:
            for length in args.lengths:
                yield measure_layout(layout, length, args, pipes)
