"""A window of steps recorded with torch.profiler, written as a Chrome trace (chrome://tracing, ui.perfetto.dev)."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from lf.train.config import Profile


def check_window(cfg: Profile, steps: int) -> None:
    """Raises ValueError unless the window lies within the steps of the run."""
    if cfg.start and cfg.start + cfg.steps - 1 > steps:
        raise ValueError(
            f"profile.start = {cfg.start} and profile.steps = {cfg.steps} ask for steps up to "
            f"{cfg.start + cfg.steps - 1}, but steps = {steps}; begin earlier, or record fewer"
        )


@contextlib.contextmanager
def profile_window(cfg: Profile, folder: Path, *, rank: int = 0) -> Iterator[Callable[[int], None]]:
    """Yields a function to be called with the number of each step before it begins.

    The trace of the steps `cfg.start` to `cfg.start + cfg.steps - 1` goes to `profile/steps_A_to_B_rank_R.json` in the
    run folder; a run that ends earlier writes what it has. A run that resumes inside the window records nothing.
    """
    profiler: torch.profiler.profile | None = None
    last = 0

    def stop() -> None:
        nonlocal profiler
        if profiler is None:
            return
        profiler.stop()
        target = folder / "profile" / f"steps_{cfg.start}_to_{last}_rank_{rank}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(target))
        profiler = None

    def begin(step: int) -> None:
        nonlocal profiler, last
        if cfg.start == 0:
            return
        if step == cfg.start:
            profiler = torch.profiler.profile()
            profiler.start()
        elif step == cfg.start + cfg.steps:
            stop()
        last = step

    try:
        yield begin
    finally:
        stop()
