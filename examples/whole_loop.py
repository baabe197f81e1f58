"""The whole training as one function, on a simulator written in torch, compiled at once.

    python examples/whole_loop.py [--iterations N]

`train` holds the loop over iterations. It is captured once; its first trip is watched, and later
trips are scheduled and tuned one by one, all within the single call. The cart-pole's step is tensor
code, so it is inlined and traced like the policy. With numerics="bitwise" both runs end in the same
bits. Under half a minute on two cores.
"""

from __future__ import annotations

import argparse
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import rose_compiler
from rose_compiler.sim import TorchCartPole


class Agent(nn.Module):
    """A Gaussian policy, and a critic of its own."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, act_dim), nn.Tanh()
        )
        self.critic = nn.Sequential(nn.Linear(obs_dim, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.log_std = nn.Parameter(torch.full((act_dim,), -0.5))

    def policy(self, obs: Tensor) -> Normal:
        return Normal(self.actor(obs), self.log_std.exp())


class Buffers:
    """One rollout, time first."""

    def __init__(self, steps: int, envs: int, obs_dim: int, act_dim: int) -> None:
        self.obs = torch.zeros(steps, envs, obs_dim)
        self.actions = torch.zeros(steps, envs, act_dim)
        self.rewards = torch.zeros(steps, envs)
        self.falls = torch.zeros(steps, envs)
        self.returns = torch.zeros(steps, envs)


def train(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    sim: TorchCartPole,
    buffers: Buffers,
    obs: Tensor,
    iterations: int,
    steps: int,
    gamma: float = 0.97,
) -> list[Tensor]:
    """Advantage actor-critic; the share of steps, by iteration, in which the pole fell."""
    falls = []
    for _ in range(iterations):
        for t in range(steps):
            with torch.no_grad():
                action = agent.policy(obs).sample()
            buffers.obs[t] = obs
            buffers.actions[t] = action
            obs, reward, terminated, _, _ = sim.step(action)
            buffers.rewards[t] = reward
            buffers.falls[t] = terminated.float()
        with torch.no_grad():
            value = agent.critic(obs).squeeze(-1)
        for t in reversed(range(steps)):
            value = buffers.rewards[t] + gamma * value * (1.0 - buffers.falls[t])
            buffers.returns[t] = value
        values = agent.critic(buffers.obs).squeeze(-1)
        log_probs = agent.policy(buffers.obs).log_prob(buffers.actions).sum(-1)
        advantages = (buffers.returns - values).detach()
        advantages = advantages / (advantages.std() + 1e-6)
        loss = -(log_probs * advantages).mean() + 0.5 * (values - buffers.returns).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        falls.append(buffers.falls.mean())
    return falls


def run(fn, iterations: int, seed: int = 0, envs: int = 64, steps: int = 32):
    """One training from the seed: falls, parameters at the end, seconds."""
    torch.manual_seed(seed)
    sim = TorchCartPole(envs)
    agent = Agent(sim.obs_dim, sim.act_dim)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-3)
    buffers = Buffers(steps, envs, sim.obs_dim, sim.act_dim)
    obs, _ = sim.reset()
    start = perf_counter()
    falls = fn(agent, optimizer, sim, buffers, obs, iterations, steps)
    return torch.stack(falls), list(agent.parameters()), perf_counter() - start


def main() -> None:
    """Train eager and compiled, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=150)
    args = parser.parse_args()

    compiled = rose_compiler.compile(train, numerics="bitwise")
    falls, eager_end, eager_s = run(train, args.iterations)
    same_falls, compiled_end, compiled_s = run(compiled, args.iterations)

    dump = compiled.ir("captured")
    print("one iteration, as captured (compiled.ir('captured')):\n")
    print(dump[dump.index("def train(") :])
    print("what the chooser tried, trip by trip (compiled.explain()):\n")
    print(compiled.explain())
    equal = all(torch.equal(a, b) for a, b in zip(eager_end, compiled_end, strict=True))
    print(f"\neager    {args.iterations} iterations in {eager_s:5.1f} s")
    print(
        f"compiled {args.iterations} iterations in {compiled_s:5.1f} s, capture and tuning included"
    )
    first, last = 1 / falls[:5].mean(), 1 / falls[-5:].mean()
    print(f"steps between falls: {first:.0f} at first, {last:.0f} at the end")
    print(f"parameters equal bit for bit: {equal}; falls too: {torch.equal(falls, same_falls)}")
    compiled.close()


if __name__ == "__main__":
    main()
