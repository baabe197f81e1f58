"""C of `torch_ppo`: acting and stepping as one compiled call, advantages and loss as others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from bench.loops import Agent, Buffers, Config
from bench.workloads.base import Function


def compiled_by_hand(agent: Agent, envs: Any) -> Function:
    """The iteration with what a user would compile of it."""

    @torch.compile(dynamic=False)
    def act(obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean = agent.actor_mean(obs)
        noise = torch.randn_like(mean)
        norm = (agent.actor_logstd + 0.5 * math.log(2 * math.pi)).sum()
        logprob = -0.5 * noise.pow(2).sum(1) - norm
        return mean + agent.actor_logstd.exp() * noise, logprob, agent.critic(obs).flatten()

    # the step as a function of its state: `torch.compile` of a bound method that rebinds attributes
    # would guard on each of them
    @torch.compile(dynamic=False)
    def step(state: Tensor, steps: Tensor, restarts: Tensor, action: Tensor) -> tuple[Tensor, ...]:
        state, reward, terminated = envs.advance(state, action.clamp(-1.0, 1.0))
        steps = steps + 1
        done = terminated | (steps >= envs.limit)
        restarts = restarts + done
        fresh = envs.starts[restarts % envs.bank, envs.rows]
        state = torch.where(done[:, None], fresh, state)
        return (
            state,
            torch.where(done, 0, steps),
            restarts,
            envs.observe(state),
            reward,
            done.float(),
        )

    @torch.compile(dynamic=False)
    def loss_of(
        obs: Tensor, act: Tensor, old: Tensor, adv: Tensor, ret: Tensor, clip: float, vf_coef: float
    ) -> tuple[Tensor, Tensor]:
        logstd = agent.actor_logstd
        z = (act - agent.actor_mean(obs)) * torch.exp(-logstd)
        ratio = ((-0.5 * z * z - logstd - 0.5 * math.log(2 * math.pi)).sum(1) - old).exp()
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - clip, 1 + clip)).mean()
        v_loss = 0.5 * (agent.critic(obs).view(-1) - ret).pow(2).mean()
        return pg_loss + vf_coef * v_loss, v_loss.detach()

    def run(
        agent: Agent,
        optimizer: torch.optim.Optimizer,
        envs: Any,
        buf: Buffers,
        cfg: Config,
        obs: Tensor,
        done: Tensor,
    ) -> tuple[Tensor, Tensor, float]:
        state, steps, restarts = envs.state, envs.steps, envs.restarts
        with torch.no_grad():
            for t in range(cfg.num_steps):
                buf.obs[t], buf.dones[t] = obs, done
                action, buf.logprobs[t], buf.values[t] = act(obs)
                buf.actions[t] = action
                state, steps, restarts, obs, buf.rewards[t], done = step(
                    state, steps, restarts, action
                )
            envs.state, envs.steps, envs.restarts = state, steps, restarts
            following = torch.cat([buf.values[1:], agent.get_value(obs).view(1, -1)])
            alive = 1.0 - torch.cat([buf.dones[1:], done.view(1, -1)])
            delta = buf.rewards + cfg.gamma * following * alive - buf.values
            decay = cfg.gamma * cfg.gae_lambda * alive
            advantages, row = torch.empty_like(delta), torch.zeros(cfg.num_envs)
            for t in reversed(range(cfg.num_steps)):
                row = torch.addcmul(delta[t], decay[t], row, out=advantages[t])
        data = (
            *(buf.obs.flatten(0, 1), buf.actions.flatten(0, 1), buf.logprobs.flatten()),
            *(advantages.flatten(), (advantages + buf.values).flatten()),
        )
        size = cfg.batch // cfg.minibatches
        for _epoch in range(cfg.epochs):
            order = torch.randperm(cfg.batch)
            for start in range(0, cfg.batch, size):
                rows = order[start : start + size]
                loss, v_loss = loss_of(*(x[rows] for x in data), cfg.clip, cfg.vf_coef)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), cfg.max_grad_norm)
                optimizer.step()
        return obs, done, float(v_loss.item())

    return run
