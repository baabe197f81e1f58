"""What a user does between calls has the effect that it has in eager."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import rose_compiler
from tests.api.loops import Agent, Buffer, Training, differing, iteration


def resets(t: Training) -> None:
    t.obs = torch.as_tensor(t.envs.reset(seed=7)[0], dtype=torch.float32)


def changes_the_rate(t: Training) -> None:
    for group in t.optimizer.param_groups:
        group["lr"] *= 0.1


def draws(t: Training) -> None:
    t.obs = t.obs + torch.randn(8, 3)
    np.random.random(3)  # noqa: NPY002  # the global one


def seeds(t: Training) -> None:
    torch.manual_seed(99)


def loads_a_checkpoint(t: Training) -> None:
    torch.manual_seed(3)
    t.agent.load_state_dict(Agent().state_dict())
    t.optimizer.load_state_dict(
        torch.optim.Adam(t.agent.parameters(), lr=3e-3, betas=(0.8, 0.9)).state_dict()
    )


def swaps_the_critic(t: Training) -> None:
    torch.manual_seed(3)
    t.agent.critic = nn.Linear(3, 1)
    t.optimizer = torch.optim.Adam(t.agent.parameters(), lr=1e-2)


def widens_the_critic(t: Training) -> None:
    torch.manual_seed(3)
    t.agent.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))  # type: ignore[assignment]
    t.optimizer = torch.optim.Adam(t.agent.parameters(), lr=1e-2)


def takes_another_optimizer(t: Training) -> None:
    t.optimizer = torch.optim.SGD(t.agent.parameters(), lr=1e-2, momentum=0.9)  # type: ignore[assignment]


def steps_by_hand(t: Training) -> None:
    t.obs = torch.as_tensor(t.envs.step(np.ones((8, 3), np.float32))[0])


def writes_weights(t: Training) -> None:
    with torch.no_grad():
        t.agent.actor.weight.mul_(0.5)
        t.agent.actor.bias.data = torch.ones(3)


def takes_another_buffer(t: Training) -> None:
    t.buffer = Buffer(4, 8)


def runs_an_iteration_in_eager(t: Training) -> None:
    t.run(iteration)


def freezes_the_actor(t: Training) -> None:
    for p in t.agent.critic.parameters():
        p.requires_grad_(False)
    t.agent.critic.bias.requires_grad_(True)


DEEDS = (
    *(resets, changes_the_rate, draws, seeds, loads_a_checkpoint, swaps_the_critic),
    *(widens_the_critic, takes_another_optimizer, steps_by_hand, writes_weights),
    *(takes_another_buffer, runs_an_iteration_in_eager, freezes_the_actor),
)


@pytest.mark.parametrize("deed", DEEDS, ids=lambda d: d.__name__)
def test_it_has_the_effect_that_it_has_in_eager(deed: Callable[[Training], None]) -> None:
    results = []
    for compiled in (False, True):
        np.random.seed(0)  # noqa: NPY002
        training = Training()
        fn = iteration
        if compiled:
            fn = rose_compiler.compile(iteration, numerics="bitwise", tune=False)
        training.run(fn, 3)
        deed(training)
        training.run(fn, 2)
        results.append(training.bits())
        results[-1]["numpy"] = torch.as_tensor(np.random.random(2))  # noqa: NPY002
        if compiled:
            names = {name for name, _ in fn.history}
            assert {"tile_batch", "late"} <= names
            done = fn._schedule().history.remarks.applied()
            assert "tile_batch" in {r.pass_name for r in done}
            fn.close()
        training.close()
    assert differing(*results) == []
