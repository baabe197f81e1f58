"""A rollout whose value function may run on a stream of its own."""

from __future__ import annotations

from collections.abc import Callable

import torch

import rose_compiler

#: Who is told the names of what runs: the last one.
TOLD: list[Callable[[str], None]] = [lambda name: None]


class Policy:
    @rose_compiler.component(reads=["self"], writes=[])
    def act(self, obs: torch.Tensor) -> torch.Tensor:
        TOLD[-1]("act")
        return obs * 0.5

    @rose_compiler.component(reads=["self"], writes=[])
    def value(self, obs: torch.Tensor) -> torch.Tensor:
        TOLD[-1]("value")
        return obs.sum()


class World:
    def __init__(self) -> None:
        self.position = torch.ones(3)

    @rose_compiler.component(reads=["self"], writes=["self"])
    def advance(self, action: torch.Tensor) -> torch.Tensor:
        TOLD[-1]("advance")
        self.position = self.position + action
        return self.position.clone()


def rollout(policy: Policy, world: World, values: torch.Tensor, obs: torch.Tensor) -> torch.Tensor:
    for t in range(4):
        value = policy.value(obs)
        values[t] = value
        action = policy.act(obs)
        obs = world.advance(action)
    return obs
