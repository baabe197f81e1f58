"""Trainings with work that no update waits for: evaluations, checkpoints, logs, a model that
explores by itself, references. Small, in the styles that people write."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import rose_compiler
from tests.loops.envs import Reach

ENVS, STEPS, ITERATIONS = 4, 6, 5


class Field(Reach):
    """Draws from a generator of its own only, and says so."""

    @rose_compiler.component(reads=["self"], writes=["self"])
    def step(self, action: Any) -> Any:
        return super().step(action)


class Agent(nn.Module):
    """A Gaussian policy and a value function."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.log_std = nn.Parameter(torch.zeros(2))

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.mean(obs)
        action = mean + torch.randn_like(mean) * self.log_std.exp()
        return action, self.log_prob(obs, action)

    def log_prob(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        scaled = (action - self.mean(obs)) / self.log_std.exp()
        return (-0.5 * scaled**2 - self.log_std).sum(-1)


class Rows:
    """What is collected, a row for each step."""

    def __init__(self) -> None:
        self.seen, self.done = torch.zeros(STEPS, ENVS, 4), torch.zeros(STEPS, ENVS, 2)
        self.logps, self.paid = torch.zeros(STEPS, ENVS), torch.zeros(STEPS, ENVS)


@dataclass
class Setup:
    """All that a training owns, made from fixed seeds."""

    env: type[gym.Env] = Field
    eval_env: type[gym.Env] = Field
    folder: Path | None = None
    extra: Any = None
    log: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        self.envs = gym.vector.SyncVectorEnv([self.env] * ENVS)
        self.eval_envs = gym.vector.SyncVectorEnv([self.eval_env])
        self.agent = Agent()
        self.reference = Agent()
        self.target, self.predictor = nn.Linear(4, 3), nn.Linear(4, 3)
        self.predictor_opt = torch.optim.SGD(self.predictor.parameters(), lr=1e-2)
        self.opt = torch.optim.Adam(self.agent.parameters(), lr=1e-2)
        self.rows = Rows()
        self.obs = torch.as_tensor(self.envs.reset(seed=3)[0])

    def owned(self) -> Any:
        return self.envs, self.eval_envs, self.agent, self.opt, self.predictor, self.log

    def close(self) -> None:
        self.envs.close()
        self.eval_envs.close()


def collect(envs: Any, agent: Any, obs: Any) -> Any:
    """Steps the environments; what was seen, done and paid."""
    seen = torch.zeros(STEPS, ENVS, 4)
    done = torch.zeros(STEPS, ENVS, 2)
    logps = torch.zeros(STEPS, ENVS)
    paid = torch.zeros(STEPS, ENVS)
    for t in range(STEPS):
        with torch.no_grad():
            action, logp = agent.act(obs)
        seen[t], done[t], logps[t] = obs, action, logp
        obs, reward, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs)
        paid[t] = torch.as_tensor(reward)
    return obs, seen, done, logps, paid


def learn(agent: Any, opt: Any, seen: Any, done: Any, logps: Any, paid: Any) -> Any:
    """Two epochs over what was collected."""
    total = 0.0
    for _ in range(2):
        ratio = (agent.log_prob(seen, done) - logps).exp()
        value = agent.critic(seen).squeeze(-1)
        loss = -(ratio * (paid - value.detach())).mean() + (value - paid).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item()
    return total


def evaluate(envs: Any, agent: Any) -> float:
    """The return of the mean action, from fixed starts."""
    obs, _ = envs.reset(seed=7)
    total = 0.0
    for _ in range(5):
        with torch.no_grad():
            action = agent.mean(torch.as_tensor(obs))
        obs, reward, _, _, _ = envs.step(action.numpy())
        total += float(reward.sum())
    return total


def evaluated(iterations: int, s: Any) -> Any:
    """Evaluates on environments of their own behind every update."""
    envs, eval_envs, agent, opt, obs, log = s.envs, s.eval_envs, s.agent, s.opt, s.obs, s.log
    for it in range(iterations):
        obs, seen, done, logps, paid = collect(envs, agent, obs)
        learn(agent, opt, seen, done, logps, paid)
        score = evaluate(eval_envs, agent)
        log.append((it, score))
    return obs


def evaluated_first(iterations: int, s: Any) -> Any:
    """Evaluates in front of every update what the last one has made."""
    envs, eval_envs, agent, opt, obs, log = s.envs, s.eval_envs, s.agent, s.opt, s.obs, s.log
    for it in range(iterations):
        score = evaluate(eval_envs, agent)
        log.append((it, score))
        obs, seen, done, logps, paid = collect(envs, agent, obs)
        learn(agent, opt, seen, done, logps, paid)
    return obs


def checkpointed(iterations: int, s: Any) -> Any:
    """Saves the networks and the optimizer behind every update."""
    envs, agent, opt, obs, folder = s.envs, s.agent, s.opt, s.obs, s.folder
    for it in range(iterations):
        obs, seen, done, logps, paid = collect(envs, agent, obs)
        learn(agent, opt, seen, done, logps, paid)
        state = {"agent": agent.state_dict(), "opt": opt.state_dict(), "it": it, "extra": s.extra}
        torch.save(state, f"{folder}/{it}.pt")
    return obs


class Saving(Agent):
    """Writes itself to files."""

    def save(self, path: str) -> None:
        torch.save(self.state_dict(), path)


def saved_itself(iterations: int, s: Any) -> Any:
    """Has the agent write itself every other iteration, and writes it whole, behind a rollout and
    in front of its update."""
    envs, agent, opt, obs, folder = s.envs, s.agent, s.opt, s.obs, s.folder
    for it in range(iterations):
        obs, seen, done, logps, paid = collect(envs, agent, obs)
        if it % 2 == 0:
            agent.save(f"{folder}/{it}.pt")
        torch.save(agent, f"{folder}/whole{it}.pt")
        learn(agent, opt, seen, done, logps, paid)
    return obs


def checkpointed_now_and_then(iterations: int, s: Any) -> Any:
    """Saves networks and optimizer in front of the update of every other iteration."""
    envs, agent, opt, obs, folder = s.envs, s.agent, s.opt, s.obs, s.folder
    for it in range(iterations):
        obs, seen, done, logps, paid = collect(envs, agent, obs)
        if it % 2 == 0:
            torch.save([agent.state_dict(), opt.state_dict()], f"{folder}/{it}.pt")
        learn(agent, opt, seen, done, logps, paid)
    return obs


def logged(iterations: int, s: Any) -> Any:
    """Prints what an iteration brought, and evaluates now and then."""
    envs, eval_envs, agent, opt, obs, log = s.envs, s.eval_envs, s.agent, s.opt, s.obs, s.log
    for it in range(iterations):
        obs, seen, done, logps, paid = collect(envs, agent, obs)
        loss = learn(agent, opt, seen, done, logps, paid)
        print(f"iteration {it}: loss {loss:.6f}")
        if it % 2 == 0:
            score = evaluate(eval_envs, agent)
            log.append((it, score))
            print(f"iteration {it}: score {score:.6f}")
    return obs


def referenced(s: Any) -> Any:
    """One iteration that stays near a reference: its log-probabilities do not need the values that
    advantages are made of."""
    obs, seen, done, logps, paid = collect(s.envs, s.agent, s.obs)
    with torch.no_grad():
        kept = s.reference.log_prob(seen, done)
    with torch.no_grad():
        values = s.agent.critic(seen).squeeze(-1)
    advantages = paid - values
    total = 0.0
    for _ in range(2):
        now = s.agent.log_prob(seen, done)
        ratio = (now - logps).exp()
        value = s.agent.critic(seen).squeeze(-1)
        loss = -(ratio * advantages).mean() + 0.1 * (now - kept).mean()
        loss = loss + (value - paid).pow(2).mean()
        s.opt.zero_grad()
        loss.backward()
        s.opt.step()
        total += loss.item()
    s.obs = obs
    return total


def compared(iterations: int, s: Any) -> Any:
    """Stays near a reference that looks at every step that was collected, in a loop of its own;
    keeps a copy of the agent of every iteration, to play against."""
    envs, agent, opt, obs, reference, rows = s.envs, s.agent, s.opt, s.obs, s.reference, s.rows
    league = s.log
    for _ in range(iterations):
        for t in range(STEPS):
            with torch.no_grad():
                action, _ = agent.act(obs)
            rows.seen[t], rows.done[t] = obs, action
            obs, reward, _, _, _ = envs.step(action.numpy())
            obs = torch.as_tensor(obs)
            rows.paid[t] = torch.as_tensor(reward)
        with torch.no_grad():
            for t in range(STEPS):
                row = rows.seen[t]
                seen = row[:, :4]
                rows.logps[t] = reference.log_prob(seen, rows.done[t])
        learn(agent, opt, rows.seen, rows.done, rows.logps, rows.paid)
        league.append(copy.deepcopy(agent))
    return obs


def restarted(iterations: int, s: Any) -> Any:
    """Begins every iteration, and every evaluation behind its update, with a reset; evaluates with
    sampled actions, which keeps the evaluation where it stands."""
    envs, eval_envs, agent, opt, obs, log = s.envs, s.eval_envs, s.agent, s.opt, s.obs, s.log
    for it in range(iterations):
        first, _ = envs.reset(seed=it)
        obs = torch.as_tensor(first)
        obs, seen, done, logps, paid = collect(envs, agent, obs)
        learn(agent, opt, seen, done, logps, paid)
        look, _ = eval_envs.reset(seed=7)
        total = 0.0
        for _ in range(3):
            with torch.no_grad():
                action, _ = agent.act(torch.as_tensor(look))
            look, reward, _, _, _ = eval_envs.step(action.numpy())
            total += float(reward.sum())
        log.append(total)
    return obs


def restarted_once(s: Any) -> Any:
    """One iteration that begins with a reset."""
    first, _ = s.envs.reset(seed=3)
    obs = torch.as_tensor(first)
    obs, seen, done, logps, paid = collect(s.envs, s.agent, obs)
    return learn(s.agent, s.opt, seen, done, logps, paid)


def drawn(iterations: int, s: Any) -> Any:
    """Evaluates with sampled actions: their draws stand between those of two rollouts."""
    envs, eval_envs, agent, opt, obs, log = s.envs, s.eval_envs, s.agent, s.opt, s.obs, s.log
    for _ in range(iterations):
        obs, seen, done, logps, paid = collect(envs, agent, obs)
        learn(agent, opt, seen, done, logps, paid)
        look, _ = eval_envs.reset(seed=7)
        total = 0.0
        for _ in range(3):
            with torch.no_grad():
                action, _ = agent.act(torch.as_tensor(look))
            look, reward, _, _, _ = eval_envs.step(action.numpy())
            total += float(reward.sum())
        log.append(total)
    return obs


def curious(iterations: int, s: Any) -> Any:
    """Pays for what a second network can't tell yet, and trains that one behind the rollout."""
    envs, agent, opt, obs = s.envs, s.agent, s.opt, s.obs
    target, predictor, other = s.target, s.predictor, s.predictor_opt
    for _ in range(iterations):
        seen = torch.zeros(STEPS, ENVS, 4)
        done = torch.zeros(STEPS, ENVS, 2)
        logps = torch.zeros(STEPS, ENVS)
        paid = torch.zeros(STEPS, ENVS)
        for t in range(STEPS):
            with torch.no_grad():
                action, logp = agent.act(obs)
            seen[t], done[t], logps[t] = obs, action, logp
            obs, reward, _, _, _ = envs.step(action.numpy())
            obs = torch.as_tensor(obs)
            with torch.no_grad():
                bonus = (predictor(obs) - target(obs)).pow(2).mean(-1)
            paid[t] = torch.as_tensor(reward) + bonus
        learn(agent, opt, seen, done, logps, paid)
        wrong = (predictor(seen) - target(seen).detach()).pow(2).mean()
        other.zero_grad()
        wrong.backward()
        other.step()
    return obs
