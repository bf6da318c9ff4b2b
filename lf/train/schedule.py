"""Learning rate schedules as pure functions of the step: nothing is kept, so a resume has nothing to load.

Steps count from 1. The first step of a warm-up has the factor 1/warmup, its last step 1; the last step of a run has
the schedule's `final`.
"""

import functools
import math

from lf.models.spec import no_rule
from lf.train.config import Constant, Cosine, Linear, ScheduleConfig, Wsd


@functools.singledispatch
def factor(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """Returns the factor on the learning rate at step `step` of `steps`."""
    raise no_rule(factor, schedule)


def _line(begin: int, final: float, step: int, steps: int) -> float:
    """Returns the height at `step` of a line from 1 at step `begin` to `final` at step `steps`."""
    return 1.0 + (final - 1.0) * (step - begin) / (steps - begin)


@factor.register
def _constant(schedule: Constant, step: int, steps: int) -> float:
    return step / schedule.warmup if step < schedule.warmup else 1.0


@factor.register
def _cosine(schedule: Cosine, step: int, steps: int) -> float:
    if step <= schedule.warmup:
        return step / schedule.warmup
    turn = math.pi * (step - schedule.warmup) / (steps - schedule.warmup)
    return schedule.final + (1.0 - schedule.final) * 0.5 * (1.0 + math.cos(turn))


@factor.register
def _linear(schedule: Linear, step: int, steps: int) -> float:
    if step <= schedule.warmup:
        return step / schedule.warmup
    return _line(schedule.warmup, schedule.final, step, steps)


@factor.register
def _wsd(schedule: Wsd, step: int, steps: int) -> float:
    if step < schedule.warmup:
        return step / schedule.warmup
    begin = steps - schedule.decay
    return _line(begin, schedule.final, step, steps) if step > begin else 1.0


def check_schedule(schedule: ScheduleConfig, steps: int) -> None:
    """Raises ValueError when warm-up and decay do not fit into the steps of the run, or no step of it would train."""
    decay = schedule.decay if isinstance(schedule, Wsd) else 0
    if schedule.warmup + decay > steps:
        parts = f"optim.schedule.warmup = {schedule.warmup}"
        parts += f" and optim.schedule.decay = {decay} together exceed" if decay else " exceeds"
        raise ValueError(
            f"{parts} steps = {steps}; shorten what is too long, or set steps to {schedule.warmup + decay} or more"
        )
    if not any(factor(schedule, step, steps) for step in range(1, min(steps, 2) + 1)):
        raise ValueError(
            f"steps = {steps} with optim.schedule = {schedule} has a learning rate of 0 at every step; "
            "give it more steps, or a schedule whose final is above 0"
        )
