"""Off-policy correction with an acting copy that is refreshed every other iteration: V-trace over a
reversed loop, one loss over the rollout, RMSprop."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

from tests.loops.envs import Corridor
from tests.loops.harness import ITERATIONS, Script


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.torso = nn.Linear(2, 8)
        self.policy = nn.Linear(8, 2)
        self.baseline = nn.Linear(8, 1)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.torso(obs))
        return self.policy(x), self.baseline(x).squeeze(-1)


def vtrace(log_rhos, discounts, rewards, values, bootstrap):  # type: ignore[no-untyped-def]
    rhos = torch.exp(log_rhos)
    clipped = torch.clamp(rhos, max=1.0)
    next_values = torch.cat([values[1:], bootstrap.unsqueeze(0)])
    deltas = clipped * (rewards + discounts * next_values - values)
    acc = torch.zeros_like(bootstrap)
    result = []
    for t in range(discounts.shape[0] - 1, -1, -1):
        acc = deltas[t] + discounts[t] * clipped[t] * acc
        result.append(acc)
    result.reverse()
    vs = torch.stack(result) + values
    next_vs = torch.cat([vs[1:], bootstrap.unsqueeze(0)])
    return vs, clipped * (rewards + discounts * next_vs - values)


def rollout(envs, actor, obs, steps):  # type: ignore[no-untyped-def]
    batch = {"obs": [], "logits": [], "action": [], "reward": [], "done": []}
    for _ in range(steps):
        with torch.no_grad():
            logits, _ = actor(obs)
            action = Categorical(logits=logits).sample()
        next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
        batch["obs"].append(obs)
        batch["logits"].append(logits)
        batch["action"].append(action)
        batch["reward"].append(torch.from_numpy(reward).float())
        batch["done"].append(torch.from_numpy(terminated | truncated).float())
        obs = torch.from_numpy(next_obs)
    return {k: torch.stack(v) for k, v in batch.items()}, obs


def iteration(envs, actor, learner, optimizer, obs, number, stats):  # type: ignore[no-untyped-def]
    batch, obs = rollout(envs, actor, obs, 5)
    logits, values = learner(batch["obs"])
    _, bootstrap = learner(obs)
    now, then = Categorical(logits=logits), Categorical(logits=batch["logits"])
    log_prob = now.log_prob(batch["action"])
    with torch.no_grad():
        vs, advantages = vtrace(
            log_prob - then.log_prob(batch["action"]),
            (1 - batch["done"]) * 0.98,
            batch["reward"],
            values,
            bootstrap,
        )
    losses = {
        "policy": -(log_prob * advantages).sum(),
        "baseline": 0.5 * (vs - values).pow(2).sum(),
        "entropy": -0.01 * now.entropy().sum(),
    }
    optimizer.zero_grad(set_to_none=False)
    sum(losses.values()).backward()
    nn.utils.clip_grad_value_(learner.parameters(), 0.5)
    optimizer.step()
    if number % 2 == 1:
        actor.load_state_dict(learner.state_dict())
    for name, value in losses.items():
        stats.setdefault(name, []).append(value.item())
    return obs


def run(compile: Any, vectorize: Any) -> Any:
    envs, learner = vectorize([Corridor] * 8), Net()
    actor = copy.deepcopy(learner)
    optimizer = torch.optim.RMSprop(learner.parameters(), lr=1e-2, momentum=0.1)
    obs = torch.from_numpy(np.asarray(envs.reset(seed=8)[0]))
    stats: dict[str, list[float]] = {}
    step = compile(iteration)
    for number in range(ITERATIONS):
        obs = step(envs, actor, learner, optimizer, obs, number, stats)
    return envs, actor, learner, optimizer, obs, stats


SCRIPTS = [Script("V-trace with a delayed actor", run, sharded=True)]
