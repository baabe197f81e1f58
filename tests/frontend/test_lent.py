"""What shares memory with a simulator's results lies in its buffers, under whatever name."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch

from rose_compiler.ir.deps import Dependences, why
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.testing.capturing import FirstTrip, first_trip
from tests.loops.envs import Reach


def kept(envs: Any, obs: Any, seen: list[torch.Tensor]) -> Any:
    """A list of the user's keeps tensors over the simulator's arrays."""
    for _ in range(4):
        x = torch.as_tensor(obs)
        seen.append(x)
        obs, _reward, _, _, _ = envs.step(x[:, :2].numpy())
        total = x.sum()
        seen.append(total)
    return obs


def trip(copy: bool) -> FirstTrip:
    envs = gym.vector.SyncVectorEnv([Reach] * 2, copy=copy)
    obs, _ = envs.reset(seed=0)
    return first_trip(kept, envs, obs, [])


def test_a_tensor_over_a_lent_array_is_read_before_the_next_step() -> None:
    program = trip(copy=False).captured.program
    deps = Dependences(program)
    calls = {op_of(n).source[0]: n for n in program.nodes() if is_call(n) and op_of(n).source}
    step = next(n for n in program.nodes() if is_call(n) and op_of(n).kind == "step")
    assert "envs.outputs" in deps.scope.aliases(calls["x = torch.as_tensor(obs)"])
    found = why(deps, calls["total = x.sum()"], step, distance=1)
    assert found is not None
    assert found.code == "borrowed-buffer"
    assert why(deps, step, calls["total = x.sum()"]) is not None


def test_a_tensor_over_a_copied_array_is_not_bound_to_the_simulator() -> None:
    program = trip(copy=True).captured.program
    deps = Dependences(program)
    calls = {op_of(n).source[0]: n for n in program.nodes() if is_call(n) and op_of(n).source}
    assert "envs.outputs" not in deps.scope.aliases(calls["x = torch.as_tensor(obs)"])
