"""A small tabletop with MuJoCo physics: a pusher, coloured blocks, and the instruction to push one of them away.

The blocks lie free on the table, each in a lane of its own. The pusher, a bar on two slides driven by motors of limited
force, starts on the near side. An episode succeeds once the named block lies beyond the line on the far side, and has
failed once another one does. The state is where the pusher is; blocks are seen in the picture only, and only the
instruction says which of them counts. Needs MuJoCo (the extra `sim`), and no graphics.

Units: metres, metres a second, radians. x goes to the right from the middle of the table, y to its far side.
Shapes: n blocks.
"""

from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from lf.acting.env import Environment, Step, checked_action
from lf.acting.policy import Observation
from lf.acting.tabletop_draw import BAR, BLOCK, LINE, PALETTE, Scene, draw
from lf.acting.tabletop_expert import SPEED, expert_action

CAMERA = "top"
"""Name of the only camera."""
FPS = 10.0

_LANES = 0.18
"""Blocks start within this distance of the middle."""
_GAP = 0.11
"""Distance of lanes at least: the bar passes between two blocks, whichever way they are turned."""
_SUBSTEPS = 20
_VIEW = 288


@attrs.frozen(kw_only=True)
class Tabletop:
    """A tabletop."""

    colours: tuple[str, ...] = ("red", "green", "blue")
    """Colours of the blocks, 2 to 4 of red, green, blue and yellow."""
    image: int = 64
    """Pixels of a side of the picture."""
    max_steps: int = 60
    """Actions of an episode."""

    def __attrs_post_init__(self) -> None:
        wrong = sorted(set(self.colours) - set(PALETTE))
        if wrong or len(set(self.colours)) != len(self.colours) or len(self.colours) < 2:
            raise ValueError(
                f"colours = {self.colours}; give 2 to {len(PALETTE)} different ones of {', '.join(PALETTE)}"
            )
        if self.image < 16 or self.max_steps < 1:
            raise ValueError(f"image = {self.image}, max_steps = {self.max_steps}; give at least 16 pixels and 1 step")


def instruction(colour: str) -> str:
    """Returns the instruction to push the block of a colour."""
    return f"push the {colour} block over the line"


def tabletop(cfg: Tabletop = Tabletop()) -> Environment:
    """Returns a tabletop. An action is the pusher's velocity (x, y), cut to `SPEED` each way; the state its (x, y).

    Raises ValueError where MuJoCo is missing.
    """
    table = _Table(cfg)
    return Environment(
        name="tabletop",
        cameras={CAMERA: (cfg.image, cfg.image)},
        state_dims=2,
        action_dims=2,
        fps=FPS,
        max_steps=cfg.max_steps,
        tasks=tuple(instruction(colour) for colour in cfg.colours),
        reset=table.reset,
        step=table.step,
        view=lambda: draw(table.scene(), _VIEW),
        expert=lambda: expert_action(table.scene()),
    )


class _Table:
    """The simulator and the episode that it holds."""

    def __init__(self, cfg: Tabletop) -> None:
        self._cfg = cfg
        self._mujoco = _import_mujoco()
        self._model = self._mujoco.MjModel.from_xml_string(_mjcf(len(cfg.colours)))
        self._data = self._mujoco.MjData(self._model)
        self._named = 0
        self._running = False

    def reset(self, seed: int) -> Observation:
        n = len(self._cfg.colours)
        # One layout with each instruction in turn: nothing but the words says which block counts.
        rng = np.random.default_rng([seed // n, n])
        # Lanes: n sorted numbers in what the gaps leave, and a gap more for each.
        lanes = np.sort(rng.uniform(-_LANES, _LANES - _GAP * (n - 1), n)) + _GAP * np.arange(n)
        lanes, far, yaw = rng.permutation(lanes), rng.uniform(0.15, 0.18, n), rng.uniform(0, np.pi / 2, n)
        self._mujoco.mj_resetData(self._model, self._data)
        qpos = self._data.qpos
        qpos[0], qpos[1] = rng.uniform(-_LANES, _LANES), rng.uniform(0.02, 0.06)
        for i in range(n):
            turned = np.cos(yaw[i] / 2), 0.0, 0.0, np.sin(yaw[i] / 2)
            qpos[2 + 7 * i : 9 + 7 * i] = [lanes[i], far[i], BLOCK, *turned]
        self._mujoco.mj_forward(self._model, self._data)
        self._named, self._running = seed % n, True
        return self._observation()

    def step(self, action: NDArray[np.float32]) -> Step:
        velocity = checked_action(action, 2, "tabletop")
        if not self._running:
            raise ValueError("tabletop: no episode is running; call reset(seed) first")
        self._data.ctrl[:] = np.clip(velocity, -SPEED, SPEED)
        self._mujoco.mj_step(self._model, self._data, _SUBSTEPS)
        over = self.scene().blocks_n3[:, 1] > LINE
        success = bool(over[self._named] and over.sum() == 1)
        self._running = not bool(over.any())
        return Step(observation=self._observation(), success=success, done=not self._running)

    def scene(self) -> Scene:
        pose_n7 = self._data.qpos[2:].reshape(-1, 7)
        yaw = 2 * np.arctan2(pose_n7[:, 6], pose_n7[:, 3])
        x, y = self._data.qpos[:2].tolist()
        blocks_n3 = np.column_stack([pose_n7[:, :2], yaw])
        return Scene(pusher=(x, y), blocks_n3=blocks_n3, colours=self._cfg.colours, named=self._named)

    def _observation(self) -> Observation:
        scene = self.scene()
        return Observation(
            images={CAMERA: draw(scene, self._cfg.image)},
            state=np.array(scene.pusher, np.float32),
            task=instruction(self._cfg.colours[self._named]),
        )


def _import_mujoco() -> Any:
    try:
        import mujoco
    except ImportError as error:
        raise ValueError(f"the tabletop needs MuJoCo, which is missing ({error}); install lf[sim]") from error
    return mujoco


def _mjcf(blocks: int) -> str:
    """Returns the world in MuJoCo's XML: table, pusher, and cubes of 42 g."""
    cubes = "".join(
        f'<body pos="0 {0.2 + 0.1 * i} {BLOCK}"><freejoint/>'
        f'<geom type="box" size="{BLOCK} {BLOCK} {BLOCK}" density="300"/></body>'
        for i in range(blocks)
    )
    return f"""
<mujoco>
  <option timestep="{1 / FPS / _SUBSTEPS}" integrator="implicitfast" cone="elliptic"/>
  <default><geom friction="0.6 0.005 0.0001"/></default>
  <worldbody>
    <geom type="plane" size="2 2 0.1"/>
    <body pos="0 0 0.025">
      <joint name="x" type="slide" axis="1 0 0" range="-0.2 0.2" limited="true"/>
      <joint name="y" type="slide" axis="0 1 0" range="0 0.44" limited="true"/>
      <geom type="box" size="{BAR[0]} {BAR[1]} 0.02" mass="0.5"/>
    </body>
    {cubes}
  </worldbody>
  <actuator>
    <velocity joint="x" kv="50" forcerange="-20 20"/>
    <velocity joint="y" kv="50" forcerange="-20 20"/>
  </actuator>
</mujoco>"""
