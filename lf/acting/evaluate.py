"""Closed-loop evaluation: a policy acts in an environment, episode after episode, and how often it succeeds is counted.

An episode is a function of its seed, of the policy's answers and of `Evaluation`, however many are played side by side.

Shapes: h, w pixels of a picture, H steps of an action chunk, a dims of an action.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
from attrs.validators import ge
from numpy.typing import NDArray

from lf.acting.env import Environment, told_error
from lf.acting.policy import Observation, Policy

Pixels = NDArray[np.uint8]
_Z = 1.959963984540054
"""Quantile of the normal distribution that leaves 2.5 % above."""


@attrs.frozen(kw_only=True)
class Evaluation:
    """How a policy is evaluated."""

    episodes: int = attrs.field(default=50, validator=ge(1))
    """Episodes to play."""
    first: int = attrs.field(default=0, validator=ge(0))
    """Seed of the first episode; the others follow. Take seeds that no demonstration had."""
    parallel: int = attrs.field(default=8, validator=ge(1))
    """Environments side by side: the policy is asked for all of them at once. Seeds and noise do not depend on it; a
    policy's numbers do, by the rounding of its matrix products: an episode at the edge of success may end otherwise."""
    execute: int = attrs.field(default=0, validator=ge(0))
    """Actions of a chunk that are executed before the policy is asked again; 0 takes all."""
    cameras: tuple[str, ...] = ()
    """KEY=CAMERA: the policy's name of each camera that the environment calls otherwise."""
    any_fps: bool = False
    """Whether policy and environment may differ in actions a second."""
    seed: int = attrs.field(default=0, validator=ge(0))
    """Seed of the policy's noise."""


@attrs.frozen(kw_only=True)
class Episode:
    """How an episode went."""

    seed: int
    """Its seed."""
    task: str
    """The instruction."""
    success: bool
    """Whether the task was done."""
    steps: int
    """Actions that were executed."""


@attrs.frozen(kw_only=True)
class Score:
    """Successes among episodes."""

    successes: int
    """Episodes that succeeded."""
    episodes: int
    """Episodes."""
    steps: float | None
    """Mean actions of the episodes that succeeded, None where none did."""

    @property
    def rate(self) -> float:
        """Share of episodes that succeeded."""
        return self.successes / self.episodes

    @property
    def interval(self) -> tuple[float, float]:
        """95 % confidence interval of the rate (Wilson 1927)."""
        return wilson(self.successes, self.episodes)


@attrs.frozen(kw_only=True)
class Report:
    """What an evaluation found."""

    environment: str
    """Name of the environment."""
    fps: float
    """Its actions a second."""
    episodes: tuple[Episode, ...]
    """The episodes, by seed."""

    @property
    def score(self) -> Score:
        """The score of all episodes."""
        return _score(self.episodes)

    @property
    def tasks(self) -> dict[str, Score]:
        """The score of each instruction that came."""
        names = dict.fromkeys(episode.task for episode in self.episodes)
        return {name: _score([one for one in self.episodes if one.task == name]) for name in names}


def wilson(successes: int, episodes: int) -> tuple[float, float]:
    """Returns Wilson's 95 % score interval of a rate: it stays within 0 and 1, and holds for few episodes too."""
    rate, square = successes / episodes, _Z**2 / episodes
    middle = (rate + square / 2) / (1 + square)
    reach = _Z / (1 + square) * math.sqrt(rate * (1 - rate) / episodes + square / (4 * episodes))
    low, high = max(0.0, middle - reach), min(1.0, middle + reach)
    return (low if successes else 0.0), (high if successes < episodes else 1.0)


def report_json(report: Report) -> dict[str, Any]:
    """Returns a report as plain values for JSON."""
    return {
        "environment": report.environment,
        **_score_json(report.score),
        "tasks": {task: _score_json(score) for task, score in report.tasks.items()},
        "per_episode": [attrs.asdict(episode) for episode in report.episodes],
    }


def report_lines(report: Report) -> list[str]:
    """Returns a report as lines to print: one for each task, and one for all."""
    rows = [*report.tasks.items(), ("all", report.score)]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {score_text(score)}" for name, score in rows]


def score_text(score: Score) -> str:
    """Returns a score as one line."""
    low, high = score.interval
    steps = "" if score.steps is None else f", {score.steps:.1f} steps where it succeeds"
    return f"{score.rate:6.1%} of {score.episodes} (95 % interval {low:.1%} to {high:.1%}){steps}"


def evaluate(
    policy: Policy | None,
    make: Callable[[], Environment],
    how: Evaluation,
    *,
    progress: Callable[[Episode], None] = lambda episode: None,
    watched: Collection[int] = (),
    watch: Callable[[int, Pixels], None] = lambda seed, frame: None,
) -> Report:
    """Returns how a policy, or the environment's expert (None), does in the environments that `make` returns.

    `progress` is told of each episode as it ends; `watch` gets (seed, picture of the scene [h, w, 3]) before each
    action and at the end, of the episodes with the seeds `watched`.
    Raises ValueError where policy and environment do not fit, for actions that are not finite or of another shape, and,
    with the seed, for whatever the environment raises.
    """
    worlds = [make() for _ in range(min(how.parallel, how.episodes))]
    try:
        choose = _expert(worlds[0]) if policy is None else _chooser(policy, worlds[0], how)
        seeds = iter(range(how.first, how.first + how.episodes))
        # zip takes a world first, so that no seed is lost when these end.
        slots = [_Slot(world, seed) for world, seed in zip(worlds, seeds, strict=False)]
        ended: list[Episode] = []
        while slots:
            waiting = [slot for slot in slots if not slot.planned]
            if waiting:
                for slot, actions in zip(waiting, choose(waiting), strict=True):
                    slot.planned, slot.asked = list(actions), slot.asked + 1
            for slot in list(slots):
                if slot.seed in watched:
                    watch(slot.seed, slot.view())
                episode = slot.act()
                if episode is None:
                    continue
                if slot.seed in watched:
                    watch(slot.seed, slot.view())
                ended.append(episode)
                progress(episode)
                slots.remove(slot)
                following = next(seeds, None)
                if following is not None:
                    slots.append(_Slot(slot.world, following))
    finally:
        for world in worlds:
            world.close()
    by_seed = tuple(sorted(ended, key=lambda episode: episode.seed))
    return Report(environment=worlds[0].name, fps=worlds[0].fps, episodes=by_seed)


class _Slot:
    """An environment and the episode that runs in it."""

    def __init__(self, world: Environment, seed: int) -> None:
        self.world, self.seed = world, seed
        with self._named("reset"):
            self.seen: Observation = world.reset(seed)
        self.planned: list[NDArray[np.float32]] = []
        self.asked = 0
        self._task, self._steps = self.seen.task, 0

    def act(self) -> Episode | None:
        """Executes the next action that is planned, and returns the episode if it ended."""
        with self._named("step"):
            step = self.world.step(self.planned.pop(0))
        self.seen, self._steps = step.observation, self._steps + 1
        if not step.done and self._steps < self.world.max_steps:
            return None
        return Episode(seed=self.seed, task=self._task, success=step.success, steps=self._steps)

    def view(self) -> Pixels:
        """Returns the picture [h, w, 3] of the scene."""
        with self._named("view"):
            return self.world.view()

    def expert(self) -> NDArray[np.float32]:
        """Returns the action [a] that the environment's script takes now."""
        assert self.world.expert is not None
        with self._named("expert"):
            return self.world.expert()

    def shown(self, cameras: Mapping[str, str]) -> Observation:
        """Returns what the policy sees, given its name of each camera; the others are left out."""
        lacking = [key for key in cameras if key not in self.seen.images]
        if lacking:
            raise ValueError(
                f"{self.world.name}, seed {self.seed}: the observation has no picture of {lacking[0]}, and the "
                f"environment says that it has {', '.join(self.world.cameras)}; correct it"
            )
        return attrs.evolve(self.seen, images={name: self.seen.images[key] for key, name in cameras.items()})

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Names environment and seed in whatever is raised."""
        try:
            yield
        except Exception as error:
            raise ValueError(f"{self.world.name}, seed {self.seed}: {what} raised {told_error(error)}") from error


_Choose = Callable[[Sequence[_Slot]], list[NDArray[np.float32]]]
"""Returns the actions [k, a] that each of the episodes executes next."""


def _expert(world: Environment) -> _Choose:
    if world.expert is None:
        raise ValueError(f"{world.name} has no expert; evaluate a policy")

    def choose(slots: Sequence[_Slot]) -> list[NDArray[np.float32]]:
        return [slot.expert()[None] for slot in slots]

    return choose


def _chooser(policy: Policy, world: Environment, how: Evaluation) -> _Choose:
    _check(policy, world, how)
    cameras = _shown(policy, world, how.cameras)
    count = how.execute or policy.horizon

    def choose(slots: Sequence[_Slot]) -> list[NDArray[np.float32]]:
        seen = [slot.shown(cameras) for slot in slots]
        chunks = policy.act(seen, [_noise(how.seed, slot.seed, slot.asked) for slot in slots])
        if len(chunks) != len(slots):
            raise ValueError(
                f"the policy answered {len(slots)} observations with {len(chunks)} chunks; it must give as many"
            )
        for slot, chunk in zip(slots, chunks, strict=True):
            _check_chunk(policy, chunk, f"seed {slot.seed}, answer {slot.asked + 1}")
        return [chunk[:count] for chunk in chunks]

    return choose


def _check(policy: Policy, world: Environment, how: Evaluation) -> None:
    for what, of_policy, of_world in (
        ("state", policy.state_dims, world.state_dims),
        ("actions", policy.action_dims, world.action_dims),
    ):
        # A policy that reads no state takes any.
        if of_policy != of_world and (what == "actions" or of_policy):
            raise ValueError(
                f"the policy's {what} have {of_policy} dims, and those of {world.name} {of_world}; take a policy that "
                "was trained on recordings of this environment"
            )
    if how.execute > policy.horizon:
        raise ValueError(
            f"execute = {how.execute} is more than the {policy.horizon} actions of a chunk; give fewer, or 0"
        )
    if not how.any_fps and not math.isclose(policy.fps, world.fps, rel_tol=0.01):
        raise ValueError(
            f"the policy acts {policy.fps:g} times a second, and {world.name} takes {world.fps:g} actions a second; "
            "take another policy, or say that it does not matter (any_fps)"
        )


def _shown(policy: Policy, world: Environment, pairs: Sequence[str]) -> dict[str, str]:
    """Returns the policy's name of each camera of the environment that it is shown."""
    has = f"the environment has {', '.join(world.cameras) or 'none'}, the policy {', '.join(policy.cameras) or 'none'}"
    named: dict[str, str] = {}
    for pair in pairs:
        key, _, camera = pair.rpartition("=")
        if key not in world.cameras or camera not in policy.cameras or key in named:
            raise ValueError(f"cameras has {pair!r}; give KEY=CAMERA, the environment's name and the policy's; {has}")
        named[key] = camera
    shown = {key: key for key in world.cameras if key in policy.cameras and key not in named} | named
    if len(set(shown.values())) != len(shown):
        raise ValueError(f"cameras {shown} show one camera of the policy two pictures; map each to one; {has}")
    if policy.cameras and not shown:
        raise ValueError(f"no camera has the same name: {has}; say which is which (cameras KEY=CAMERA)")
    return shown


def _check_chunk(policy: Policy, chunk: NDArray[np.float32], where: str) -> None:
    shape, wanted = np.shape(chunk), (policy.horizon, policy.action_dims)
    if shape != wanted:
        raise ValueError(
            f"{where}: the policy's actions are {list(shape)}, and must be {list(wanted)}; correct the policy"
        )
    if not np.isfinite(chunk).all():
        step, dim = np.argwhere(~np.isfinite(chunk))[0].tolist()
        raise ValueError(
            f"{where}: action {step} of the policy's chunk is {chunk[step][dim]} in dim {dim}; its weights or its "
            "scaling are broken, so take another checkpoint"
        )


def _noise(seed: int, episode: int, asked: int) -> int:
    return int(np.random.SeedSequence([seed, episode, asked]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _score(episodes: Sequence[Episode]) -> Score:
    steps = [episode.steps for episode in episodes if episode.success]
    return Score(successes=len(steps), episodes=len(episodes), steps=sum(steps) / len(steps) if steps else None)


def _score_json(score: Score) -> Mapping[str, Any]:
    low, high = score.interval
    return {
        "episodes": score.episodes,
        "successes": score.successes,
        "success_rate": score.rate,
        "interval": [low, high],
        "mean_steps": score.steps,
    }
