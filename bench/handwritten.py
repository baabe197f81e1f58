"""The baselines: E1, the loop with the best thread counts, and H, the best overlap by hand.

Every function here trains as `bench.loops.iteration` does: same data, order of updates and draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bench.handwritten_update import HALF_LOG_2PI, lean_gae, lean_update
from bench.loops import SHAPES, Agent, Buffers, Config, Iteration, iteration, make


class Clock:
    """Accumulates seconds by phase; `mark` charges the time since the last mark."""

    def __init__(self) -> None:
        self.total: dict[str, float] = {}
        self.last = perf_counter()

    def start(self) -> None:
        """Begin anew; the time since the last mark belongs to no phase."""
        self.last = perf_counter()

    def mark(self, phase: str) -> None:
        """Charge the time since the last mark."""
        now = perf_counter()
        self.total[phase] = self.total.get(phase, 0.0) + now - self.last
        self.last = now


def sequential(rollout_threads: int, update_threads: int) -> Iteration:
    """The loop as written, with a torch thread count for either phase.

    The count changes in the call that ends the collection, the value of the last observations.
    """

    def run(agent: Agent, *rest: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
        def get_value(obs: Tensor) -> Tensor:
            torch.set_num_threads(update_threads)
            return Agent.get_value(agent, obs)

        torch.set_num_threads(rollout_threads)
        if rollout_threads == update_threads:
            return iteration(agent, *rest)
        agent.get_value = get_value  # type: ignore[method-assign]
        try:
            return iteration(agent, *rest)
        finally:
            del agent.get_value

    return run


@dataclass(frozen=True)
class Overlap:
    """How H is arranged.

    `groups`: how many groups of neighbouring shards advance on their own. `values`: values and
    log-probabilities are computed after the rollout in one call each (`deferred`), or for each
    group in the shadow of the simulator (`shadow`).
    """

    groups: int
    values: Literal["deferred", "shadow"] = "deferred"
    rollout_threads: int = 1
    update_threads: int = 1


Weights = list[tuple[Tensor, Tensor]]


def _weights(net: nn.Sequential) -> Weights:
    return [(m.weight.t(), m.bias) for m in net if isinstance(m, nn.Linear)]


def _forward(weights: Weights, x: Tensor) -> Tensor:
    for weight, bias in weights[:-1]:
        x = torch.addmm(bias, x, weight).tanh_()
    weight, bias = weights[-1]
    return torch.addmm(bias, x, weight)


class _Whole:
    """A vector environment without shards as its only one; it steps in the caller."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.num_envs: int = env.num_envs
        self.offset = 0

    def step_async(self, action: np.ndarray) -> None:
        """Step."""
        self.result = self.env.step(action)

    def step_wait(self) -> Any:
        """The result of the step."""
        return self.result


@dataclass
class _Group:
    """Neighbouring shards, the rows they cover, and their last action."""

    shards: list[Any]
    rows: slice
    action: Tensor

    @classmethod
    def all(cls, envs: Any, count: int) -> list[_Group]:
        shards = envs.shards() if hasattr(envs, "shards") else [_Whole(envs)]
        per = len(shards) // count
        groups = []
        for first in range(0, len(shards), per):
            members = shards[first : first + per]
            stop = members[-1].offset + members[-1].num_envs
            groups.append(cls(members, slice(members[0].offset, stop), torch.empty(0)))
        return groups

    def submit(self) -> None:
        action, start = self.action.numpy(), self.rows.start
        for shard in self.shards:
            first = shard.offset - start
            shard.step_async(action[first : first + shard.num_envs])


class Rollout:
    """Collects a rollout; groups of shards advance on their own.

    A trip of a group: wait for its step, act, submit the next step; then what nothing waits for.
    """

    def __init__(self, agent: Agent, buf: Buffers, cfg: Config, how: Overlap) -> None:
        self.buf, self.cfg, self.how = buf, cfg, how
        self.actor, self.critic = _weights(agent.actor_mean), _weights(agent.critic)
        self.std = agent.actor_logstd.exp()
        self.norm = (agent.actor_logstd + HALF_LOG_2PI).sum()
        self.noise: list[Tensor] = []

    def act(self, group: _Group, t: int) -> None:
        """Act on a group's observations and submit its step."""
        if len(self.noise) == t:
            # a step's draw is made whole, before any group acts: the loop's own numbers
            self.noise.append(torch.randn(self.cfg.num_envs, self.buf.actions.shape[2]))
        mean = _forward(self.actor, self.buf.obs[t, group.rows])
        group.action = torch.addcmul(mean, self.noise[t][group.rows], self.std)
        group.submit()

    def late(self, group: _Group, t: int) -> None:
        """What no step waits for."""
        rows = group.rows
        self.buf.actions[t, rows] = group.action
        if self.how.values == "shadow":
            self.buf.values[t, rows] = _forward(self.critic, self.buf.obs[t, rows]).flatten()
            self.buf.logprobs[t, rows] = self._logprob(self.noise[t][rows])

    def values(self) -> None:
        """Values and log-probabilities of the whole rollout."""
        if self.how.values == "deferred":
            obs = self.buf.obs.reshape(self.cfg.batch, -1)
            self.buf.values[:] = _forward(self.critic, obs).view(self.buf.values.shape)
            self.buf.logprobs[:] = self._logprob(torch.stack(self.noise))

    def _logprob(self, noise: Tensor) -> Tensor:
        return (noise * noise).sum(-1).mul_(-0.5).sub_(self.norm)

    def collect(
        self, envs: Any, log: list[float], obs: Tensor, done: Tensor, clock: Clock
    ) -> tuple[Tensor, Tensor]:
        """Fill the buffers; the observations and flags after the last step."""
        buf, steps = self.buf, self.cfg.num_steps
        groups = _Group.all(envs, self.how.groups)
        buf.obs[0], buf.dones[0] = obs, done
        last_obs, last_done = torch.empty_like(obs), torch.empty_like(done)
        clock.start()
        for group in groups:
            self.act(group, 0)
            clock.mark("act")
            self.late(group, 0)
            clock.mark("late")
        for t in range(steps):
            more = t + 1 < steps
            next_obs = buf.obs[t + 1] if more else last_obs
            next_done = buf.dones[t + 1] if more else last_done
            for group in groups:
                outs = []
                for shard in group.shards:
                    obs_g, *rest = shard.step_wait()
                    rows = slice(shard.offset, shard.offset + shard.num_envs)
                    next_obs[rows] = torch.from_numpy(obs_g)
                    outs.append((rows, *rest))
                clock.mark("wait")
                if more:
                    self.act(group, t + 1)
                clock.mark("act")
                for rows, reward, terminated, truncated, infos in outs:
                    buf.rewards[t, rows] = torch.from_numpy(reward)
                    next_done[rows] = torch.from_numpy(terminated | truncated)
                    if "episode" in infos:
                        for i in np.flatnonzero(infos["_episode"]):
                            log.append(float(infos["episode"]["r"][i]))
                if more:
                    self.late(group, t + 1)
                clock.mark("late")
        return last_obs, last_done


def overlapped(how: Overlap, clock: Clock | None = None) -> Iteration:
    """H: an iteration over a simulator of shards, arranged by `how`.

    The clock gets the phases act (with the step of an inline shard), wait, late, deferred, gae
    and update.
    """
    clock = clock or Clock()

    def run(
        agent: Agent,
        optimizer: torch.optim.Optimizer,
        envs: Any,
        buf: Buffers,
        cfg: Config,
        log: list[float],
        next_obs: Tensor,
        next_done: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        torch.set_num_threads(how.rollout_threads)
        with torch.no_grad():
            rollout = Rollout(agent, buf, cfg, how)
            next_obs, next_done = rollout.collect(envs, log, next_obs, next_done, clock)
            torch.set_num_threads(how.update_threads)
            rollout.values()
        clock.mark("deferred")
        advantages, returns = lean_gae(agent, buf, cfg, next_obs, next_done)
        clock.mark("gae")
        stats = lean_update(agent, optimizer, buf, cfg, advantages, returns)
        clock.mark("update")
        return next_obs, next_done, stats

    return run


def single_core(shape: str) -> Callable[[], None]:
    """An iteration of a shape with all its work on one core, as a function without arguments."""
    torch.set_num_threads(1)
    setup = make(SHAPES[shape], shards=1, hosts="inline")
    h = overlapped(Overlap(groups=1))
    return lambda: setup.run(h)
