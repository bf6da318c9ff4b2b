"""The tabletop: its physics, its picture, its expert, and the recordings of it."""

from pathlib import Path

import attrs
import numpy as np
import pytest

from lf.acting.demonstrate import demonstrations
from lf.acting.env import Environment, Step
from lf.acting.tabletop import CAMERA, Tabletop, tabletop
from lf.acting.tabletop_draw import BAR, BLOCK, PALETTE, Scene, draw
from lf.acting.tabletop_expert import SPEED, expert_action
from lf.data.lerobot_audit import audit
from lf.data.lerobot_record import write_dataset

pytest.importorskip("mujoco")


def play(env: Environment, seed: int, limit: int | None = None) -> list[Step]:
    assert env.expert is not None
    env.reset(seed)
    steps: list[Step] = []
    while len(steps) < (limit or env.max_steps) and not (steps and steps[-1].done):
        steps.append(env.step(env.expert()))
    return steps


def same(a: Step, b: Step) -> bool:
    images = np.array_equal(a.observation.images[CAMERA], b.observation.images[CAMERA])
    return images and np.array_equal(a.observation.state, b.observation.state) and a.success == b.success


@pytest.mark.parametrize("colours", [("red", "green"), ("red", "green", "blue"), tuple(PALETTE)])
def test_the_expert_solves_it(colours: tuple[str, ...]) -> None:
    env = tabletop(Tabletop(colours=colours))
    assert all(play(env, seed)[-1].success for seed in range(25))


def test_an_episode_is_a_function_of_its_seed_whatever_was_before() -> None:
    one, other = tabletop(), tabletop()
    play(other, 3, 12)
    first, second = play(one, 7), play(other, 7)
    assert len(first) == len(second)
    assert all(same(a, b) for a, b in zip(first, second, strict=True))


def test_the_instruction_names_each_colour_in_turn() -> None:
    env = tabletop()
    assert tuple(env.reset(seed).task for seed in range(3)) == env.tasks
    assert env.reset(4).task == env.tasks[1]


def test_another_block_over_the_line_ends_the_episode_in_failure() -> None:
    env = tabletop(Tabletop(max_steps=200))
    # Straight ahead from where the episode starts, until a block is met in this or another seed.
    ends = []
    for seed in range(12):
        env.reset(seed)
        for _ in range(30):
            step = env.step(np.array([0.0, SPEED], np.float32))
            if step.done:
                ends.append(step.success)
                break
    assert False in ends
    assert True in ends


def test_blocks_are_pushed_and_not_dragged_or_passed_through() -> None:
    env = tabletop()
    before = env.reset(0)
    for _ in range(5):
        step = env.step(np.zeros(2, np.float32))
    assert np.array_equal(before.images[CAMERA], step.observation.images[CAMERA])  # nothing moves by itself
    while not step.done:
        assert env.expert is not None
        step = env.step(env.expert())
    y = float(step.observation.state[1])
    lit = step.observation.images[CAMERA].astype(int)
    red = (lit[..., 0] - lit[..., 1:].max(-1)) > 90
    row = np.argwhere(red)[:, 0].mean()
    centre = 0.46 - (row + 0.5) * 0.48 / 64
    # The block lies against the bar: turned by up to 45 degrees.
    assert BAR[1] + BLOCK - 0.004 < centre - y < BAR[1] + BLOCK * 2**0.5 + 0.004


def test_velocity_is_in_metres_a_second_and_cut() -> None:
    env = tabletop()
    start = env.reset(1).state
    for _ in range(4):
        step = env.step(np.array([10.0, 0.0], np.float32))
    moved = step.observation.state - start
    assert moved[0] == pytest.approx(4 * SPEED / env.fps, rel=0.1)
    assert abs(moved[1]) < 1e-3


def test_the_state_does_not_tell_where_blocks_are() -> None:
    env = tabletop()
    assert env.reset(5).state.shape == (env.state_dims,) == (2,)


@pytest.mark.parametrize("action", [[0.1], [[0.1, 0.1]], [np.nan, 0.0], [0.0, np.inf]])
def test_a_broken_action_is_refused(action: list[float]) -> None:
    env = tabletop()
    env.reset(0)
    with pytest.raises(ValueError, match="2 finite numbers are expected"):
        env.step(np.array(action, np.float32))


def test_no_action_without_an_episode() -> None:
    env = tabletop()
    with pytest.raises(ValueError, match="no episode is running"):
        env.step(np.zeros(2, np.float32))
    play(env, 0)
    with pytest.raises(ValueError, match="no episode is running"):
        env.step(np.zeros(2, np.float32))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"colours": ("red",)}, "give 2 to 4"),
        ({"colours": ("red", "red")}, "different"),
        ({"colours": ("red", "pink")}, "red, green, blue, yellow"),
        ({"image": 8}, "at least 16 pixels"),
    ],
)
def test_a_wrong_table_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attrs.evolve(Tabletop(), **fields)


SCENE = Scene(
    pusher=(0.0, 0.05), blocks_n3=np.array([[0.1, 0.2, 0.3], [-0.1, 0.2, 0.0]]), colours=("red", "blue"), named=0
)


@pytest.mark.parametrize("size", [64, 96, 101])
def test_the_picture_has_each_thing_in_its_place_and_size(size: int) -> None:
    image = draw(SCENE, size).astype(float)
    metres = 0.48 / size
    red = np.clip(image[..., 0] - image[..., 2] - 20, 0, None)
    rows, columns = np.mgrid[:size, :size]
    x = (red * columns).sum() / red.sum()
    y = (red * rows).sum() / red.sum()
    assert (x + 0.5) * metres - 0.24 == pytest.approx(0.1, abs=0.002)
    assert 0.46 - (y + 0.5) * metres == pytest.approx(0.2, abs=0.002)
    dark = (image.max(-1) < 60).sum() * metres**2
    assert dark == pytest.approx(4 * BAR[0] * BAR[1], rel=0.35)


def test_edges_are_smooth_so_that_small_moves_show() -> None:
    moved = attrs.evolve(SCENE, pusher=(0.001, 0.05))
    assert not np.array_equal(draw(SCENE, 64), draw(moved, 64))
    gone = attrs.evolve(SCENE, pusher=(5.0, 5.0))  # outside of the picture
    assert draw(gone, 64).min() > draw(SCENE, 64).min()


def test_the_expert_remembers_nothing_and_comes_back() -> None:
    beside = attrs.evolve(SCENE, pusher=(0.0, 0.2))
    velocity = expert_action(beside)
    assert velocity[0] > 0
    assert velocity[1] < 0  # home first, so that no other block is hit
    below = expert_action(attrs.evolve(SCENE, pusher=(0.1, 0.05)))
    assert below == pytest.approx([0.0, SPEED])


def test_demonstrations_record_what_was_right_in_states_that_noise_led_to() -> None:
    env = tabletop()
    (clean,), (noisy,) = (list(demonstrations(env, [4], noise=noise)) for noise in (0.0, 0.04))
    (again,) = demonstrations(tabletop(), [4], noise=0.04)
    for key, values in noisy.values.items():
        assert np.array_equal(values, again.values[key])
    states, actions = noisy.values["observation.state"], noisy.values["action"]
    assert len(states) == len(actions) == len(list(noisy.pictures[f"observation.images.{CAMERA}"]))
    # What was executed is not what was recorded, except for motors that lag a little where there is no noise.
    drift = np.diff(states, axis=0) * env.fps - actions[:-1]
    still = np.diff(clean.values["observation.state"], axis=0) * env.fps - clean.values["action"][:-1]
    assert np.abs(drift[1:]).mean() > 3 * np.abs(still[1:]).mean()
    assert noisy.task == clean.task == env.tasks[4 % 3]


def test_episodes_that_the_expert_fails_are_left_out() -> None:
    env = tabletop(Tabletop(max_steps=16))
    kept = list(demonstrations(env, range(12)))
    assert 0 < len(kept) < 12
    with pytest.raises(ValueError, match="succeeds in none of 3"):
        list(demonstrations(tabletop(Tabletop(max_steps=3)), range(3)))
    with pytest.raises(ValueError, match="has no expert"):
        list(demonstrations(attrs.evolve(env, expert=None), range(3)))


def test_demonstrations_are_a_dataset(tmp_path: Path) -> None:
    env = tabletop(Tabletop(image=32))
    write_dataset(tmp_path / "set", demonstrations(env, range(2), noise=0.02), fps=env.fps)
    found = audit(tmp_path / "set", decode="all")
    assert found.findings == ()
    assert found.episodes == 2
