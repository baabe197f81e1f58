"""Q-learning on a budget of steps: a deque as replay memory, exploration by Python's generator."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.loops.envs import Corridor, with_statistics
from tests.loops.harness import ITERATIONS, Script


class QNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 12), nn.ReLU(), nn.Linear(12, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)


def linear_schedule(start: float, end: float, duration: int, t: int) -> float:
    slope = (end - start) / duration
    return max(slope * t + start, end)


class Learner:
    """What a script of its kind holds in globals."""

    def __init__(self, envs: Any) -> None:
        self.envs = envs
        self.q_network, self.target_network = QNetwork(), QNetwork()
        self.target_network.load_state_dict(self.q_network.state_dict())
        self.optimizer = torch.optim.Adam(self.q_network.parameters(), lr=1e-2)
        self.memory: deque[Any] = deque(maxlen=40)
        self.global_step = 0
        self.losses: list[float] = []
        self.returns: list[float] = []


def learn(learner: Learner, obs: np.ndarray, budget: int) -> np.ndarray:
    """Steps until the budget is used up."""
    envs, q_network, target_network = learner.envs, learner.q_network, learner.target_network
    used = 0
    while used < budget:
        epsilon = linear_schedule(1.0, 0.1, 20, learner.global_step)
        if random.random() < epsilon:
            actions = np.array([random.randrange(2) for _ in range(envs.num_envs)])
        else:
            q_values = q_network(torch.Tensor(obs))
            actions = torch.argmax(q_values, dim=1).cpu().numpy()
        next_obs, rewards, terminations, _, infos = envs.step(actions)
        if "episode" in infos:
            for k, ended in enumerate(infos["_episode"]):
                if ended:
                    learner.returns.append(float(infos["episode"]["r"][k]))
        for i in range(envs.num_envs):
            learner.memory.append((obs[i], actions[i], rewards[i], next_obs[i], terminations[i]))
        obs = next_obs
        learner.global_step += 1
        used += 1
        if learner.global_step < 4:
            continue
        if learner.global_step % 2 == 0:
            batch = random.sample(list(learner.memory), 8)
            states, acts, rews, nexts, dones = zip(*batch, strict=True)
            with torch.no_grad():
                target_max, _ = target_network(torch.tensor(np.array(nexts))).max(dim=1)
                alive = 1 - torch.tensor(np.array(dones), dtype=torch.float32)
                rews = torch.tensor(np.array(rews), dtype=torch.float32)
                td_target = rews + 0.99 * target_max * alive
            picked = torch.tensor(np.array(acts)).unsqueeze(1)
            old_val = q_network(torch.tensor(np.array(states))).gather(1, picked).squeeze()
            loss = nn.functional.mse_loss(td_target, old_val)
            learner.optimizer.zero_grad()
            loss.backward()
            learner.optimizer.step()
            learner.losses.append(loss.item())
        if learner.global_step % 6 == 0:
            for target_param, param in zip(
                target_network.parameters(), q_network.parameters(), strict=True
            ):
                target_param.data.copy_(0.5 * param.data + 0.5 * target_param.data)
    return obs


def run(compile: Any, vectorize: Any) -> Any:
    learner = Learner(vectorize([with_statistics(Corridor)] * 8))
    obs, _ = learner.envs.reset(seed=5)
    step = compile(learn)
    for _ in range(ITERATIONS):
        obs = step(learner, obs, 5)
    assert learner.returns
    assert len(learner.losses) > 4
    return learner, obs


SCRIPTS = [Script("DQN on a budget", run, sharded=True)]
