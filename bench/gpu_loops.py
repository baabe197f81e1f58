"""The workloads of the device checks: PPO over simulators made of tensors, in four ways.

No gymnasium, so that they run on a machine that has torch and nothing else.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.runtime.events import TorchStreams
from rose_compiler.runtime.kernels import KernelTrace, busy_sms
from rose_compiler.sim import TorchPendulum


class Camera(TorchPendulum):
    """Pendulums that are seen, not measured: a step is physics and then rendering, each of them
    kernels. Observation: the rod as a picture, and the same times its angular velocity in units of
    the greatest, both of ``PIXELS`` by ``PIXELS`` in [-1, 1], flattened.
    """

    PIXELS = 32
    obs_dim = 2 * PIXELS**2

    def observe(self, state: torch.Tensor) -> torch.Tensor:
        """Draw the rods, from their pivot in the middle: pixels fade with the distance to them."""
        with rose_compiler.phase("render"):
            angle, speed = state.unbind(1)
            side = torch.linspace(-1.2, 1.2, self.PIXELS, dtype=state.dtype, device=state.device)
            x, y = side[None, :, None], side[None, None, :]
            along_x = torch.sin(angle)[:, None, None]
            along_y = torch.cos(angle)[:, None, None]
            reach = (x * along_x + y * along_y).clamp(0.0, 1.0)
            apart = ((x - reach * along_x) ** 2 + (y - reach * along_y) ** 2).sqrt()
            drawn = torch.sigmoid(40.0 * (0.1 - apart)).flatten(1)
            return torch.cat([drawn, drawn * (speed / self.max_speed)[:, None]], 1)

    def advance(
        self, state: torch.Tensor, actions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One step of the equation of motion."""
        with rose_compiler.phase("physics"):
            return super().advance(state, actions)


@dataclass(frozen=True)
class Size:
    """Environments, steps of a rollout, hidden units of the networks, and what is simulated."""

    envs: int = 256
    steps: int = 16
    hidden: int = 64
    simulator: type[TorchPendulum] = TorchPendulum


#: The workloads, by what they are about.
WORKLOADS: dict[str, Size] = {
    "small kernels, launches decide": Size(4096, 32, 512),
    "a large policy": Size(2048, 16, 4096),
    "physics, rendering and a policy on pictures": Size(1024, 16, 1024, Camera),
}


class Policy(nn.Module):
    """Gaussian policy and value function over ``(rows, observations)``."""

    def __init__(self, observations: int, actions: int, hidden: int = 64) -> None:
        super().__init__()
        self.actor = nn.Sequential(
            nn.Linear(observations, hidden), nn.Tanh(), nn.Linear(hidden, actions)
        )
        self.critic = nn.Sequential(
            nn.Linear(observations, hidden), nn.Tanh(), nn.Linear(hidden, 1)
        )
        self.logstd = nn.Parameter(torch.zeros(1, actions))

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean = self.actor(obs)
        dist = torch.distributions.Normal(mean, self.logstd.exp().expand_as(mean))
        action = dist.sample()
        return action, dist.log_prob(action).sum(1), self.critic(obs).flatten()


def iteration(policy: Any, optimizer: Any, env: Any, buf: Any, cfg: Any, obs: Any) -> Any:
    """One iteration of PPO with one epoch over a simulator made of tensors."""
    for t in range(cfg.steps):
        buf.obs[t] = obs
        with torch.no_grad():
            action, logprob, value = policy.act(obs)
        buf.actions[t] = action
        buf.logprobs[t] = logprob
        buf.values[t] = value
        obs, reward, _terminated, _truncated, _info = env.step(action)
        buf.rewards[t] = reward
    return finish(policy, optimizer, buf, cfg, obs)


class Training:
    """Everything an iteration takes, made from a fixed seed; the observations it goes on from."""

    def __init__(self, fn: Callable[..., Any], device: str, size: Size = Size()) -> None:
        torch.manual_seed(0)
        self.fn = fn
        self.env = size.simulator(size.envs, device=device)
        self.obs, _ = self.env.reset()
        self.policy = Policy(self.obs.shape[1], 1, size.hidden).to(device)
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=3e-4)
        self.cfg = SimpleNamespace(steps=size.steps, gamma=0.99, lam=0.95)
        rows = (size.steps, size.envs)
        self.buf = SimpleNamespace(
            obs=torch.zeros(*rows, self.obs.shape[1], device=device),
            actions=torch.zeros(*rows, 1, device=device),
            logprobs=torch.zeros(*rows, device=device),
            values=torch.zeros(*rows, device=device),
            rewards=torch.zeros(*rows, device=device),
        )

    def step(self) -> None:
        """One iteration, to its end on the device: it reads the loss."""
        self.obs, _ = self.fn(self.policy, self.optimizer, self.env, self.buf, self.cfg, self.obs)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and last observations by name."""
        parameters = {n: p.detach() for n, p in self.policy.named_parameters()}
        return {**parameters, "obs": self.obs, **vars(self.buf)}


def train(fn: Callable[..., Any], device: str, iterations: int) -> dict[str, torch.Tensor]:
    """Train from a fixed seed; parameters and last observations."""
    training = Training(fn, device)
    for _ in range(iterations):
        training.step()
    return training.tensors()


def by_hand(
    streams: TorchStreams, policy: Any, optimizer: Any, env: Any, buf: Any, cfg: Any, obs: Any
) -> Any:
    """The iteration with the critic of the rollout on a stream of its own, beside the simulator,
    as a person would write it."""
    side, main = streams.stream(), streams.current()
    for t in range(cfg.steps):
        buf.obs[t] = obs
        with torch.no_grad():
            mean = policy.actor(obs)
            dist = torch.distributions.Normal(mean, policy.logstd.exp().expand_as(mean))
            action = dist.sample()
            buf.logprobs[t] = dist.log_prob(action).sum(1)
            buf.actions[t] = action
            ready = streams.record(main)
            with streams.use(side):
                streams.wait(side, ready)
                streams.keep(obs, side)
                buf.values[t] = policy.critic(obs).flatten()
        obs, reward, _terminated, _truncated, _info = env.step(action)
        buf.rewards[t] = reward
    streams.wait(main, streams.record(side))
    return finish(policy, optimizer, buf, cfg, obs)


def finish(policy: Any, optimizer: Any, buf: Any, cfg: Any, obs: Any) -> Any:
    """What follows the rollout: advantages and the update."""
    with torch.no_grad():
        last = policy.critic(obs).flatten()
        advantages = torch.zeros_like(buf.rewards)
        gae = torch.zeros_like(last)
        for t in reversed(range(cfg.steps)):
            following = last if t == cfg.steps - 1 else buf.values[t + 1]
            delta = buf.rewards[t] + cfg.gamma * following - buf.values[t]
            gae = delta + cfg.gamma * cfg.lam * gae
            advantages[t] = gae
        returns = advantages + buf.values
    mean = policy.actor(buf.obs)
    dist = torch.distributions.Normal(mean, policy.logstd.exp().expand_as(mean))
    ratio = (dist.log_prob(buf.actions).sum(-1) - buf.logprobs).exp()
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    loss = loss + 0.5 * ((policy.critic(buf.obs).squeeze(-1) - returns) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return obs, loss.item()


def on_streams(fn: Callable[..., Any], device: str, **options: Any) -> Any:
    """A function compiled to the schedule whose work is on streams of its own; on a CPU as for a
    device that is not there."""
    backend = "auto" if device != "cpu" else "virtual:h200"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decision.json"
        Decision(streams=True).save(path)
        return rose_compiler.compile(fn, tune=path, backend=backend, **options)


class Sleeper:
    """A component that keeps its stream waiting for so many cycles of the device."""

    def __init__(self, cycles: int) -> None:
        self.cycles = cycles

    @rose_compiler.component(reads=["self"], writes=[])
    def score(self, x: torch.Tensor) -> torch.Tensor:
        """Twice ``x``."""
        if x.is_cuda:
            torch.cuda._sleep(self.cycles)
        return x * 2


def both(first: Sleeper, second: Sleeper, x: torch.Tensor) -> torch.Tensor:
    """Two calls that do not need each other."""
    a = first.score(x)
    b = second.score(x)
    return a + b


def torch_compiled(policy: Any, *rest: Any) -> Any:
    """The iteration with both networks compiled by torch."""
    if not hasattr(policy.actor, "_orig_mod"):
        policy.actor = torch.compile(policy.actor)
        policy.critic = torch.compile(policy.critic)
    return iteration(policy, *rest)


@dataclass(frozen=True)
class Measured:
    """Milliseconds an iteration, and the share of SMs busy (None where no kernel was seen)."""

    ms: float
    activity: float | None


def measure(
    device: str, size: Size, seconds: float, names: tuple[str, ...] = ()
) -> dict[str, Measured]:
    """Each variant's median iteration, and the SMs' activity while it ran; all variants are live
    and take turns. ``names`` picks some. ``seconds`` bounds tuning, half of it measuring."""
    compiled = rose_compiler.compile(iteration, tune_budget=seconds)
    streamed = on_streams(iteration, device)
    variants: dict[str, Callable[..., Any]] = {
        "as written": iteration,
        "torch.compile": torch_compiled,
        "hand-written streams": partial(by_hand, TorchStreams(device)),
        "compiled on streams": streamed,
        "compiled": compiled,
    }
    live = {n: Training(f, device, size) for n, f in variants.items() if not names or n in names}
    for training in live.values():
        training.step()
        training.step()
    if "compiled" in live:
        end = time.perf_counter() + seconds
        while not compiled.settled and time.perf_counter() < end:
            live["compiled"].step()
    taken: dict[str, list[float]] = {name: [] for name in live}
    end = time.perf_counter() + seconds / 2
    while time.perf_counter() < end or not all(taken.values()):
        for name, training in live.items():
            started = time.perf_counter()
            training.step()
            taken[name].append(time.perf_counter() - started)
    found = {n: Measured(1e3 * statistics.median(taken[n]), busy(live[n].step)) for n in live}
    compiled.close()
    streamed.close()
    return found


def busy(step: Callable[[], None]) -> float | None:
    """The share of SMs busy while a few iterations run; None where no kernel is seen."""
    with KernelTrace() as trace:
        started = time.perf_counter()
        for _ in range(3):
            step()
        ended = time.perf_counter()
    if not trace.kernels:
        return None
    parts = busy_sms(trace.kernels, started, ended)
    return sum(a.share * (a.end_s - a.start_s) for a in parts) / (ended - started)
