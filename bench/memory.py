"""Predicted against measured peak memory: `python -m bench.memory`.

Program order is measured in one iteration. What another schedule will peak at is predicted from
that, before it runs; then it runs, and the highest of its iterations counts. Memory is the resident
set of the training's own process (simulators in other processes are theirs). Each schedule has a
process of its own, so that none finds what another one has left to the allocator. The goal is a
ratio within 5%. `tensors` is what the schedule adds in tensors and arrays.

Beside the shapes of `bench.ppo_mujoco` stands `frames`: a critic on images, where collecting the
observations of a rollout takes as much memory as all else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import rose_compiler
from bench import measure
from bench.loops import SHAPES, iteration, make
from rose_compiler.base.decision import Decision
from rose_compiler.base.sizes import show_bytes
from rose_compiler.runtime.memory import PROCESS
from rose_compiler.sim import ShardedEnv

#: Schedules by how much they keep.
DECISIONS = (
    Decision(groups=2, late="shadow"),
    Decision(groups=1, late="shadow", defer=True),
    Decision(groups=2, late="shadow", defer=True),
)
STEPS, ENVS, SIDE = 48, 16, 96


class Frames(gymnasium.Env):
    """A camera whose picture moves with the action."""

    def __init__(self) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (3, SIDE, SIDE), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.frame = np.zeros((3, SIDE, SIDE), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.frame = self.np_random.random((3, SIDE, SIDE), dtype=np.float32)
        return self.frame, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.frame = np.roll(self.frame, 1, axis=2)
        return self.frame, float(self.frame[0, 0, 0]), False, False, {}


class Seeing(nn.Module):
    """A policy on pooled pixels, and a critic that convolves."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(8)
        self.actor = nn.Linear(3 * 64, 2)
        self.critic = nn.Sequential(
            nn.Conv2d(3, 8, 8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 23 * 23, 1)
        )

    def act(self, obs: Tensor) -> Tensor:
        """Actions, shape (rows, 2)."""
        action: Tensor = torch.tanh(self.actor(self.pool(obs).flatten(1)))
        return action


def frames_iteration(net: Seeing, optimizer: Any, envs: Any, values: Tensor, obs: Tensor) -> Tensor:
    """Look, act, and judge each picture; then one step of the critic on the last one."""
    for t in range(STEPS):
        with torch.no_grad():
            action = net.act(obs)
            value = net.critic(obs)
        values[t] = value.squeeze(-1)
        stepped, _reward, _ended, _cut, _infos = envs.step(action.numpy())
        obs = torch.as_tensor(stepped, dtype=torch.float32) + 0.0
    loss = net.critic(obs).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return obs


@dataclass
class FramesSetup:
    """A live training of `frames_iteration`."""

    net: Seeing
    optimizer: Any
    envs: Any
    values: Tensor
    obs: Tensor

    def run(self, fn: Any) -> None:
        """One call of `fn`."""
        self.obs = fn(self.net, self.optimizer, self.envs, self.values, self.obs)

    def close(self) -> None:
        """Stop the simulator."""
        self.envs.close()


def _frames() -> FramesSetup:
    torch.manual_seed(1)
    net = Seeing()
    envs = ShardedEnv.split([Frames] * ENVS, shards=2, hosts="thread")
    obs = torch.as_tensor(envs.reset(seed=1)[0], dtype=torch.float32)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    return FramesSetup(net, optimizer, envs, torch.zeros(STEPS, ENVS), obs)


def one(program: str, decision: Decision, iterations: int) -> dict[str, float]:
    """Predict one schedule from program order, run it and measure; bytes."""
    torch.set_num_threads(1)
    setup: Any = _frames() if program == "frames" else make(SHAPES[program])
    fn = frames_iteration if program == "frames" else iteration
    compiled = rose_compiler.compile(fn, tune=False, memory_limit="1TiB")
    try:
        for _ in range(2):  # watched, and measured in program order
            setup.run(compiled)
        unit = compiled._last.unit
        unit.tuning()._fixed = decision
        built = unit.build(decision)
        found = unit.memory.estimate(decision, unit.program, built.program)
        assert found is not None
        measured = 0
        for _ in range(iterations):
            unit.memory.measured.pop(decision, None)
            setup.run(compiled)
            measured = max(measured, unit.memory.measured[decision][PROCESS])
        return {
            "before": unit.memory.before[PROCESS],
            "predicted": found.peak[PROCESS],
            "measured": measured,
            "tensors": sum(p.bytes for p in found.pieces),
        }
    finally:
        compiled.close()
        setup.close()


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="bench.memory", description=__doc__.split("\n")[0])
    parser.add_argument("--programs", default="a,b,c,d,frames", help="names, with commas")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        name, data = args.one
        print(json.dumps(one(name, Decision.from_dict(json.loads(data)), args.iterations)))
        return
    table = Table(title="peak memory of an iteration", title_justify="left")
    for name in ("program", "schedule", "program order", "tensors", "predicted", "measured"):
        table.add_column(name, justify="left" if name in ("program", "schedule") else "right")
    table.add_column("ratio", justify="right")
    console = Console()
    if console.width < 110:
        console = Console(width=110)
    for program in args.programs.split(","):
        for decision in DECISIONS:
            data = json.dumps(decision.to_dict())
            command = [sys.executable, "-m", "bench.memory", "--one", program, data]
            command += ["--iterations", str(args.iterations)]
            done = subprocess.run(
                command, cwd=measure.ROOT, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode:
                raise SystemExit(f"{program} [{decision}] failed:\n{done.stderr}")
            found = json.loads(done.stdout.splitlines()[-1])
            sizes = (show_bytes(found[k]) for k in ("before", "tensors", "predicted", "measured"))
            ratio = found["predicted"] / found["measured"]
            table.add_row(program, str(decision), *sizes, f"{ratio:.3f}")
    console.print(table)
    console.print(measure.machine(), highlight=False)


if __name__ == "__main__":
    main()
