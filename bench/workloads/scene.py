"""A table-top manipulation scene, and its vector environment of frames. No torch here: worker
processes import this module.

A planar arm of three links pushes one of three coloured blocks to the mark of its colour. Which one
is told by the seed: environments reset with one seed start alike and have the same task.
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any

import gymnasium
import numpy as np

from bench.workloads.raster import Raster

FRAME = 84
#: Actions in a chunk, and physics steps an action.
CHUNK, SUBSTEPS = 4, 5
JOINTS = 3
COLORS = {"red": (0.85, 0.2, 0.2), "green": (0.2, 0.7, 0.25), "blue": (0.2, 0.35, 0.85)}
#: Prompts as token numbers: a verb, a colour and a place, as a tokenizer would number them.
PROMPT = 12

_BLOCK = """
    <body name="{name}" pos="{x} 0.3 0.025">
      <joint name="{name} x" type="slide" axis="1 0 0" damping="1.5"/>
      <joint name="{name} y" type="slide" axis="0 1 0" damping="1.5"/>
      <geom name="{name}" type="box" size="0.03 0.03 0.025" mass="0.1" rgba="{rgba} 1"/>
    </body>
    <site name="{name} mark" pos="{x} 0.45 0.002" type="cylinder" size="0.045 0.001"
          rgba="{rgba} 0.5"/>
"""

MJCF = f"""
<mujoco model="table">
  <option timestep="0.01" integrator="implicitfast"/>
  <visual><quality shadowsize="0"/><global offwidth="{FRAME}" offheight="{FRAME}"/></visual>
  <default><geom friction="0.6 0.01 0.001"/></default>
  <worldbody>
    <light pos="0 0 2" dir="0 0 -1" castshadow="false" diffuse="0.35 0.35 0.35" specular="0 0 0"/>
    <camera name="above" pos="0 0.22 1.15" xyaxes="1 0 0 0 1 0" fovy="45"/>
    <geom name="table" type="plane" size="0.6 0.6 0.1" rgba="0.75 0.72 0.68 1"
          contype="0" conaffinity="0"/>
    {
    "".join(
        _BLOCK.format(name=n, x=x, rgba=" ".join(map(str, c)))
        for x, (n, c) in zip((-0.2, 0.0, 0.2), COLORS.items(), strict=False)
    )
}
    <body name="upper" pos="0 -0.05 0.03">
      <joint name="shoulder" axis="0 0 1" damping="0.5" range="-2.6 2.6" limited="true"/>
      <geom name="upper" type="capsule" fromto="0 0 0 0 0.2 0" size="0.02" rgba="0.3 0.3 0.3 1"/>
      <body name="fore" pos="0 0.2 0">
        <joint name="elbow" axis="0 0 1" damping="0.4" range="-2.4 2.4" limited="true"/>
        <geom name="fore" type="capsule" fromto="0 0 0 0 0.17 0" size="0.018" rgba="0.4 0.4 0.4 1"/>
        <body name="hand" pos="0 0.17 0">
          <joint name="wrist" axis="0 0 1" damping="0.3" range="-2 2" limited="true"/>
          <geom name="hand" type="capsule" fromto="0 0 0 0 0.08 0" size="0.016"
                rgba="0.9 0.75 0.2 1"/>
          <site name="tip" pos="0 0.09 0" size="0.005"/>
        </body>
      </body>
    </body>
  </worldbody>
  <contact><exclude body1="upper" body2="fore"/><exclude body1="fore" body2="hand"/></contact>
  <actuator>
    <velocity joint="shoulder" kv="3"/>
    <velocity joint="elbow" kv="2"/>
    <velocity joint="wrist" kv="1"/>
  </actuator>
</mujoco>
"""


def task_of(seed: int) -> int:
    """Which block a seed asks for."""
    return seed % len(COLORS)


def prompt_of(seed: int) -> list[int]:
    """The instruction of a seed as `PROMPT` tokens, numbers under 64."""
    words = [1, 7, 20 + task_of(seed), 9, 11, 30 + task_of(seed), 2]
    return words + [0] * (PROMPT - len(words))


@cache
def _model() -> Any:
    import mujoco

    return mujoco.MjModel.from_xml_string(MJCF)


_here = threading.local()  # a GL context belongs to one thread


def _renderer(frames: str) -> Any:
    """This thread's renderer."""
    if frames == "raster":
        return Raster(_model(), FRAME)
    if not hasattr(_here, "renderer"):
        _here.renderer = _gl_renderer()
    return _here.renderer


def _gl_renderer() -> Any:
    import mujoco

    return mujoco.Renderer(_model(), FRAME, FRAME)


@cache
def source() -> str:
    """Where frames come from: `egl` or `osmesa`, MuJoCo's renderer in software, or `raster`, our
    own in numpy: the first that works in a process of its own. `MUJOCO_GL` chooses, and `disable`
    there means `raster`."""
    wished = os.environ.get("MUJOCO_GL", "")
    if wished == "disable":
        return "raster"
    import subprocess
    import sys

    text = "import mujoco; from bench.workloads.scene import _gl_renderer as r; r().render()"
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for name in (wished,) if wished else ("egl", "osmesa"):
        env = {**os.environ, "MUJOCO_GL": name, "LP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", text], env=env, cwd=root, capture_output=True, check=False
        )
        if done.returncode == 0:
            return name
    return "raster"


def environment() -> dict[str, str]:
    """Variables for this process and for workers: the source of frames, one rasterizer thread."""
    found = source()
    return {"MUJOCO_GL": "disable" if found == "raster" else found, "LP_NUM_THREADS": "1"}


class Table(gymnasium.Env):
    """One table. An action is a chunk of joint velocities, shape (CHUNK * JOINTS,) in [-1, 1].

    Observation: `frame` (84, 84, 3) uint8 and `joints` (6,) float32: angles (rad) and velocities
    (rad/s). Reward of a chunk: how much nearer the block came to its mark, and the hand to the
    block (m), and 1 while the block lies on the mark. Episodes don't end; `reset` starts a new one.
    `frames` is one of what `source` tells.
    """

    def __init__(self, frames: str) -> None:
        import mujoco

        self._step, self._forward = mujoco.mj_step, mujoco.mj_forward
        self.model = _model()
        self.data = mujoco.MjData(self.model)
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (CHUNK * JOINTS,), np.float32)
        self.observation_space = gymnasium.spaces.Dict(
            {
                "frame": gymnasium.spaces.Box(0, 255, (FRAME, FRAME, 3), np.uint8),
                "joints": gymnasium.spaces.Box(-np.inf, np.inf, (2 * JOINTS,), np.float32),
            }
        )
        self.frames = frames
        self.block = "red"
        self._before = (0.0, 0.0)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Lay the table anew: blocks and arm from `seed`, which also sets the task."""
        super().reset(seed=seed)
        import mujoco

        mujoco.mj_resetData(self.model, self.data)
        task = task_of(seed) if seed is not None else int(self.np_random.integers(len(COLORS)))
        self.block = list(COLORS)[task]
        angles = self.np_random.uniform(-0.5, 0.5, JOINTS)
        spots = self.np_random.uniform(-0.05, 0.05, (len(COLORS), 2))
        for name, angle in zip(("shoulder", "elbow", "wrist"), angles, strict=True):
            self.data.joint(name).qpos[0] = angle
        for name, spot in zip(COLORS, spots, strict=True):
            self.data.joint(f"{name} x").qpos[0] = spot[0]
            self.data.joint(f"{name} y").qpos[0] = spot[1]
        self._forward(self.model, self.data)
        self._before = self._distances()
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Play a chunk."""
        for velocity in np.clip(action, -1.0, 1.0).reshape(CHUNK, JOINTS):
            self.data.ctrl[:] = 3.0 * velocity
            for _ in range(SUBSTEPS):
                self._step(self.model, self.data)
        left, reach = self._distances()
        nearer = (self._before[0] - left) + 0.5 * (self._before[1] - reach)
        self._before = (left, reach)
        return self._observe(), float(nearer) + float(left < 0.04), False, False, {}

    def _distances(self) -> tuple[float, float]:
        """From the block to its mark, and from the hand to the block."""
        block = self.data.body(self.block).xpos[:2]
        mark = self.data.site(f"{self.block} mark").xpos[:2]
        tip = self.data.site("tip").xpos[:2]
        return float(np.linalg.norm(block - mark)), float(np.linalg.norm(tip - block))

    def _observe(self) -> dict[str, Any]:
        renderer = _renderer(self.frames)
        renderer.update_scene(self.data, camera="above")
        arm = [self.data.joint(n) for n in ("shoulder", "elbow", "wrist")]
        state = [j.qpos[0] for j in arm] + [j.qvel[0] for j in arm]
        return {"frame": renderer.render(), "joints": np.asarray(state, dtype=np.float32)}
