"""GRPO in the style that people write: groups of rollouts from one start, compared with each other,
and a gradient that adds up over groups before the optimizer steps."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

from tests.loops.aside import Field

GROUPS, SIZE, STEPS = 3, 4, 5


class Actor(nn.Module):
    """A Gaussian policy."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.log_std = nn.Parameter(torch.zeros(2))

    def sample(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.mean(obs)
        action = mean + torch.randn_like(mean) * self.log_std.exp()
        return action, self.log_prob(obs, action)

    def log_prob(self, obs: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        scaled = (action - self.mean(obs)) / self.log_std.exp()
        return (-0.5 * scaled**2 - self.log_std).sum(-1)


class Kept:
    """What the rollouts of all groups leave."""

    def __init__(self) -> None:
        shape = (GROUPS, STEPS, SIZE)
        self.obs = torch.zeros(*shape, 4)
        self.actions = torch.zeros(*shape, 2)
        self.old = torch.zeros(shape)
        self.reference = torch.zeros(shape)
        self.rewards = torch.zeros(shape)
        self.advantages = torch.zeros(GROUPS, SIZE)


class Size:
    """Numbers that a script reads from its settings."""

    def __init__(self) -> None:
        self.groups, self.epochs = GROUPS, 2


class Setup:
    """All that a training owns, made from fixed seeds."""

    def __init__(self, env: type[gym.Env] = Field) -> None:
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        self.envs = gym.vector.SyncVectorEnv([env] * SIZE)
        self.policy, self.reference = Actor(), Actor()
        self.reference.load_state_dict(self.policy.state_dict())
        self.opt = torch.optim.Adam(self.policy.parameters(), lr=1e-2)
        self.buf, self.cfg = Kept(), Size()

    def normalize(self, buf: Any) -> None:
        """In terms that can't be looked into."""
        exec("buf.advantages.div_(buf.advantages.std() + 1e-4)", {"buf": buf})

    def owned(self) -> Any:
        return self.envs, self.policy, self.opt, vars(self.buf)

    def close(self) -> None:
        self.envs.close()


def rollout(envs: Any, policy: Any, reference: Any, buf: Any, g: int) -> None:
    """Plays one group, and compares its rollouts."""
    obs, _ = envs.reset(seed=[g] * SIZE)
    for t in range(STEPS):
        seen = torch.as_tensor(obs)
        with torch.no_grad():
            action, logp = policy.sample(seen)
            known = reference.log_prob(seen, action)
        buf.obs[g, t], buf.actions[g, t], buf.old[g, t] = seen, action, logp
        buf.reference[g, t] = known
        obs, reward, _, _, _ = envs.step(action.numpy())
        buf.rewards[g, t] = torch.as_tensor(reward)
    returns = buf.rewards[g].sum(0)
    buf.advantages[g] = (returns - returns.mean()) / (returns.std() + 1e-4)


def loss_of(policy: Any, buf: Any, g: int) -> torch.Tensor:
    """The clipped surrogate of one group and its drift from the reference."""
    logp = policy.log_prob(buf.obs[g], buf.actions[g])
    ratio = (logp - buf.old[g]).exp()
    gain = torch.min(ratio * buf.advantages[g], ratio.clamp(0.8, 1.2) * buf.advantages[g])
    drift = buf.reference[g] - logp
    return (0.02 * (drift.exp() - drift - 1) - gain).mean() / GROUPS


def once(s: Any) -> float:
    """One iteration: all groups play, then the gradient of all."""
    envs, policy, reference, opt, buf = s.envs, s.policy, s.reference, s.opt, s.buf
    for g in range(GROUPS):
        rollout(envs, policy, reference, buf, g)
    opt.zero_grad()
    total = 0.0
    for g in range(GROUPS):
        loss = loss_of(policy, buf, g)
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    opt.step()
    return total


def epochs(s: Any) -> float:
    """The same, with two epochs over what was collected."""
    envs, policy, reference, opt, buf = s.envs, s.policy, s.reference, s.opt, s.buf
    for g in range(GROUPS):
        rollout(envs, policy, reference, buf, g)
    total = 0.0
    for _ in range(2):
        opt.zero_grad()
        for g in range(GROUPS):
            loss = loss_of(policy, buf, g)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
    return total


def whitened(s: Any) -> float:
    """Advantages less the mean of all groups."""
    envs, policy, reference, opt, buf = s.envs, s.policy, s.reference, s.opt, s.buf
    for g in range(GROUPS):
        rollout(envs, policy, reference, buf, g)
    flat = buf.advantages
    buf.advantages[:] = (flat - flat.mean()) / (flat.std() + 1e-4)
    opt.zero_grad()
    total = 0.0
    for g in range(GROUPS):
        loss = loss_of(policy, buf, g)
        loss.backward()
        total += loss.item()
    opt.step()
    return total


def normalized(s: Any) -> float:
    """A normalizer that nothing is known of looks at all rewards."""
    envs, policy, reference, opt, buf = s.envs, s.policy, s.reference, s.opt, s.buf
    for g in range(GROUPS):
        rollout(envs, policy, reference, buf, g)
    s.normalize(buf)
    opt.zero_grad()
    for g in range(GROUPS):
        loss = loss_of(policy, buf, g)
        loss.backward()
    opt.step()
    return float(loss.item())


def incomplete(s: Any) -> float:
    """Each group is compared with the mean of all."""
    envs, policy, reference, opt, buf = s.envs, s.policy, s.reference, s.opt, s.buf
    for g in range(GROUPS):
        rollout(envs, policy, reference, buf, g)
    opt.zero_grad()
    for g in range(GROUPS):
        lead = buf.advantages[g] - buf.rewards.sum(1).mean(0)
        logp = policy.log_prob(buf.obs[g], buf.actions[g])
        loss = -((logp - buf.old[g]).exp() * lead).mean()
        loss.backward()
    opt.step()
    return float(loss.item())


def stepped(s: Any) -> float:
    """The optimizer steps behind each group: the next one's old log-probabilities would be newer
    than in eager, where all groups are collected by one policy."""
    envs, policy, reference, opt, buf = s.envs, s.policy, s.reference, s.opt, s.buf
    for g in range(GROUPS):
        rollout(envs, policy, reference, buf, g)
    for g in range(GROUPS):
        loss = loss_of(policy, buf, g)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return float(loss.item())


def noisy(s: Any) -> float:
    """A loss that draws, as that of a flow does, from the generator that acting draws from."""
    envs, policy, reference, opt, buf = s.envs, s.policy, s.reference, s.opt, s.buf
    for g in range(GROUPS):
        rollout(envs, policy, reference, buf, g)
    opt.zero_grad()
    for g in range(GROUPS):
        noise = torch.randn(STEPS, SIZE, 2)
        loss = -(policy.log_prob(buf.obs[g], noise) * buf.advantages[g]).mean()
        loss.backward()
    opt.step()
    return float(loss.item())


def configured(s: Any) -> list[float]:
    """Loops over numbers of a configuration, a reference and advantages in loops of their own."""
    envs, policy, reference, opt, buf, cfg = s.envs, s.policy, s.reference, s.opt, s.buf, s.cfg
    losses = []
    for g in range(cfg.groups):
        obs, _ = envs.reset(seed=[g] * SIZE)
        for t in range(STEPS):
            with torch.no_grad():
                action, logp = policy.sample(torch.as_tensor(obs))
            buf.obs[g, t] = torch.as_tensor(obs)
            buf.actions[g, t], buf.old[g, t] = action, logp
            obs, reward, _, _, _ = envs.step(action.numpy())
            buf.rewards[g, t] = torch.as_tensor(reward)
    for g in range(cfg.groups):
        with torch.no_grad():
            buf.reference[g] = reference.log_prob(buf.obs[g], buf.actions[g])
        returns = buf.rewards[g].sum(0)
        buf.advantages[g] = (returns - returns.mean()) / (returns.std() + 1e-4)
    for _ in range(cfg.epochs):
        opt.zero_grad(set_to_none=True)
        for g in range(cfg.groups):
            loss = loss_of(policy, buf, g)
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
    return losses
