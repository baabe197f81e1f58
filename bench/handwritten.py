"""H: the best overlap a person writes by hand for `bench.loops.iteration`, and sequential variants.

Every function here trains exactly as the loop does: same data, order of updates and random draws.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bench.loops import Agent, Buffers, Config


class Clock:
    """Accumulates seconds by phase; `mark` charges the time since the last mark."""

    def __init__(self) -> None:
        self.total: dict[str, float] = {}
        self.last = perf_counter()

    def start(self) -> None:
        self.last = perf_counter()

    def mark(self, phase: str) -> None:
        now = perf_counter()
        self.total[phase] = self.total.get(phase, 0.0) + now - self.last
        self.last = now


def collect(agent, envs, buf, cfg, log, next_obs, next_done, clock=None):
    """The rollout of the loop as written."""
    clock = clock or Clock()
    clock.start()
    for t in range(cfg.num_steps):
        buf.obs[t] = next_obs
        buf.dones[t] = next_done
        clock.mark("store")
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
        clock.mark("act")
        buf.actions[t] = action
        buf.logprobs[t] = logprob
        buf.values[t] = value.flatten()
        clock.mark("store")
        obs, reward, terminated, truncated, infos = envs.step(action.cpu().numpy())
        clock.mark("sim")
        buf.rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
        next_obs = torch.as_tensor(obs, dtype=torch.float32)
        next_done = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        if "episode" in infos:
            for i in np.flatnonzero(infos["_episode"]):
                log.append(float(infos["episode"]["r"][i]))
        clock.mark("store")
    return next_obs, next_done


def gae(agent, buf, cfg, next_obs, next_done):
    with torch.no_grad():
        next_value = agent.get_value(next_obs).flatten()
    advantages = torch.zeros_like(buf.rewards)
    last = torch.zeros(cfg.num_envs)
    for t in reversed(range(cfg.num_steps)):
        if t == cfg.num_steps - 1:
            alive = 1.0 - next_done
            following = next_value
        else:
            alive = 1.0 - buf.dones[t + 1]
            following = buf.values[t + 1]
        delta = buf.rewards[t] + cfg.gamma * following * alive - buf.values[t]
        last = delta + cfg.gamma * cfg.gae_lambda * alive * last
        advantages[t] = last
    return advantages, advantages + buf.values


def update(agent, optimizer, buf, cfg, advantages, returns):
    b_obs = buf.obs.reshape(cfg.batch, -1)
    b_actions = buf.actions.reshape(cfg.batch, -1)
    b_logprobs = buf.logprobs.reshape(-1)
    b_advantages = advantages.reshape(-1)
    b_returns = returns.reshape(-1)
    size = cfg.batch // cfg.minibatches
    updates = 0
    for _epoch in range(cfg.epochs):
        order = torch.randperm(cfg.batch)
        for start in range(0, cfg.batch, size):
            rows = order[start : start + size]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(
                b_obs[rows], b_actions[rows]
            )
            logratio = newlogprob - b_logprobs[rows]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
            adv = b_advantages[rows]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            clipped = torch.clamp(ratio, 1 - cfg.clip, 1 + cfg.clip)
            pg_loss = torch.max(-adv * ratio, -adv * clipped).mean()
            v_loss = 0.5 * (newvalue.view(-1) - b_returns[rows]).pow(2).mean()
            loss = pg_loss - cfg.ent_coef * entropy.mean() + cfg.vf_coef * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), cfg.max_grad_norm)
            optimizer.step()
            updates += 1
        if approx_kl.item() > cfg.target_kl:
            break
    return {
        "kl": approx_kl.item(),
        "pg_loss": pg_loss.item(),
        "v_loss": v_loss.item(),
        "updates": float(updates),
    }


def layers(net: nn.Sequential) -> list[tuple[Tensor, Tensor]]:
    return [(m.weight.t(), m.bias) for m in net if isinstance(m, nn.Linear)]


def forward(ws: list[tuple[Tensor, Tensor]], x: Tensor) -> Tensor:
    for w, b in ws[:-1]:
        x = torch.addmm(b, x, w).tanh_()
    return torch.addmm(ws[-1][1], x, ws[-1][0])


HALF_LOG_2PI = 0.9189385332046727


@dataclass
class Overlap:
    """How the overlapped rollout is arranged."""

    groups: int | None = None       # shards acted on together; None: one group a shard
    values: str = "deferred"        # deferred | shadow | inline
    threads: int = 1


def read_infos(infos: Any, n: int, log: list) -> None:
    if isinstance(infos, bytes):
        if b"episode" not in infos:
            return
        infos = pickle.loads(infos)
    if "episode" in infos:
        for i in np.flatnonzero(infos["_episode"]):
            log.append(float(infos["episode"]["r"][i]))


@torch.no_grad()
def overlapped(agent, envs, buf, cfg, log, next_obs, next_done, how: Overlap, clock=None):
    """Shards advance on their own: while one is stepped the policy acts on another.

    A trip for a group: wait for its step, act, submit the next step; then what nothing waits for.
    """
    torch.set_num_threads(how.threads)
    clock = clock or Clock()
    steps, n = cfg.num_steps, cfg.num_envs
    actor, critic = layers(agent.actor_mean), layers(agent.critic)
    logstd = agent.actor_logstd
    std = logstd.exp()
    norm = (logstd + HALF_LOG_2PI).sum()
    nshards = len(envs.shards)
    groups = how.groups or nshards
    per = nshards // groups
    members = [list(range(g * per, (g + 1) * per)) for g in range(groups)]
    span = [slice(envs.slices[m[0]].start, envs.slices[m[-1]].stop) for m in members]
    # the draw of a step is made whole, before any group acts, and sliced: the loop's own numbers
    noise: list[Tensor | None] = [None] * steps
    acts = [None] * groups

    def act(g, t):
        k = span[g]
        if noise[t] is None:
            noise[t] = torch.randn(n, buf.actions.shape[2])
        x = buf.obs[t, k]
        mean = forward(actor, x)
        a = torch.addcmul(mean, noise[t][k], std)
        out = a.numpy()
        base = k.start
        for m in members[g]:
            s = envs.slices[m]
            envs.shards[m].submit(out[s.start - base : s.stop - base])
        acts[g] = a
        if how.values == "inline":
            buf.values[t, k] = forward(critic, x).flatten()

    def late(g, t):
        k = span[g]
        buf.actions[t, k] = acts[g]
        if how.values == "shadow":
            buf.values[t, k] = forward(critic, buf.obs[t, k]).flatten()
            z = noise[t][k]
            buf.logprobs[t, k] = (z * z).sum(1).mul_(-0.5).sub_(norm)

    buf.obs[0] = next_obs
    buf.dones[0] = next_done
    final_obs, final_done = torch.empty_like(next_obs), torch.empty_like(next_done)
    clock.start()
    for g in range(groups):
        act(g, 0)
        late(g, 0)
    clock.mark("act")
    for t in range(steps):
        last = t == steps - 1
        for g in range(groups):
            outs = []
            to_obs = final_obs if last else buf.obs[t + 1]
            to_done = final_done if last else buf.dones[t + 1]
            for m in members[g]:
                out = envs.shards[m].wait()
                s = envs.slices[m]
                to_obs[s] = torch.from_numpy(out[0])
                outs.append((s, out[1].copy(), out[2] | out[3], out[4]))
            clock.mark("wait")
            if not last:
                act(g, t + 1)
            clock.mark("act")
            for s, rew, done, infos in outs:
                buf.rewards[t, s] = torch.from_numpy(rew)
                to_done[s] = torch.from_numpy(done)
                read_infos(infos, s.stop - s.start, log)
            if not last:
                late(g, t + 1)
            clock.mark("late")
    return final_obs, final_done, noise, norm


@torch.no_grad()
def deferred_values(agent, buf, cfg, noise, norm):
    """Values and log-probabilities of the whole rollout, in one call each."""
    critic = layers(agent.critic)
    buf.values[:] = forward(critic, buf.obs.reshape(cfg.batch, -1)).view(buf.values.shape)
    z = torch.stack(noise)
    buf.logprobs[:] = (z * z).sum(2).mul_(-0.5).sub_(norm)


def make_h(how: Overlap, update_threads: int = 2, clock: Clock | None = None):
    def h(agent, optimizer, envs, buf, cfg, log, next_obs, next_done):
        next_obs, next_done, noise, norm = overlapped(
            agent, envs, buf, cfg, log, next_obs, next_done, how, clock
        )
        torch.set_num_threads(update_threads)
        if how.values == "deferred":
            deferred_values(agent, buf, cfg, noise, norm)
        if clock:
            clock.mark("deferred")
        advantages, returns = gae(agent, buf, cfg, next_obs, next_done)
        if clock:
            clock.mark("gae")
        stats = update(agent, optimizer, buf, cfg, advantages, returns)
        if clock:
            clock.mark("update")
        return next_obs, next_done, stats

    return h


def make_e1(rollout_threads: int, update_threads: int, clock: Clock | None = None):
    def e1(agent, optimizer, envs, buf, cfg, log, next_obs, next_done):
        torch.set_num_threads(rollout_threads)
        next_obs, next_done = collect(agent, envs, buf, cfg, log, next_obs, next_done, clock)
        torch.set_num_threads(update_threads)
        if clock:
            clock.start()
        advantages, returns = gae(agent, buf, cfg, next_obs, next_done)
        if clock:
            clock.mark("gae")
        stats = update(agent, optimizer, buf, cfg, advantages, returns)
        if clock:
            clock.mark("update")
        return next_obs, next_done, stats

    return e1
