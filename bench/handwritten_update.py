"""The update of `bench.loops.iteration` in straight lines, for H: no distribution object, one
gather an epoch, and the estimate of the KL divergence only where the loop reads it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.loops import Agent, Buffers, Config

HALF_LOG_2PI = 0.9189385332046727


def lean_update(
    agent: Agent,
    optimizer: torch.optim.Optimizer,
    buf: Buffers,
    cfg: Config,
    advantages: Tensor,
    returns: Tensor,
) -> dict[str, float]:
    """Epochs of minibatches over the buffers; what the loop reports of the last one."""
    data = (
        buf.obs.reshape(cfg.batch, -1),
        buf.actions.reshape(cfg.batch, -1),
        buf.logprobs.reshape(-1),
        advantages.reshape(-1),
        returns.reshape(-1),
    )
    size = cfg.batch // cfg.minibatches
    params = list(agent.parameters())
    stats: dict[str, float] = {}
    for _epoch in range(cfg.epochs):
        order = torch.randperm(cfg.batch)
        shuffled = [x[order] for x in data]
        for start in range(0, cfg.batch, size):
            obs, act, old, adv, ret = (x[start : start + size] for x in shuffled)
            mean = agent.actor_mean(obs)
            logstd = agent.actor_logstd
            z = (act - mean) * torch.exp(-logstd)
            newlogprob = (z * z * -0.5 - (logstd + HALF_LOG_2PI)).sum(1)
            entropy = (logstd + (0.5 + HALF_LOG_2PI)).sum()
            logratio = newlogprob - old
            ratio = logratio.exp()
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg_loss = torch.max(-adv * ratio, -adv * ratio.clamp(1 - cfg.clip, 1 + cfg.clip)).mean()
            v_loss = 0.5 * (agent.critic(obs).view(-1) - ret).pow(2).mean()
            loss = pg_loss - cfg.ent_coef * entropy + cfg.vf_coef * v_loss
            grads = torch.autograd.grad(loss, params)
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            nn.utils.clip_grad_norm_(params, cfg.max_grad_norm)
            optimizer.step()
        with torch.no_grad():
            kl = ((ratio - 1) - logratio).mean().item()
        stats = {"kl": kl, "pg_loss": pg_loss.item(), "v_loss": v_loss.item()}
        if kl > cfg.target_kl:
            break
    return stats


@torch.no_grad()
def lean_gae(
    agent: Agent, buf: Buffers, cfg: Config, next_obs: Tensor, next_done: Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both (steps, environments).

    With one environment the recurrence runs over Python numbers: tensors of one element cost more.
    """
    next_value = agent.get_value(next_obs).view(1, -1)
    following = torch.cat([buf.values[1:], next_value])
    alive = 1.0 - torch.cat([buf.dones[1:], next_done.view(1, -1)])
    delta = buf.rewards + cfg.gamma * following * alive - buf.values
    decay = cfg.gamma * cfg.gae_lambda * alive
    if cfg.num_envs == 1:
        out, last = [0.0] * cfg.num_steps, 0.0
        d, k = delta.flatten().tolist(), decay.flatten().tolist()
        for t in reversed(range(cfg.num_steps)):
            out[t] = last = d[t] + k[t] * last
        advantages = torch.tensor(out).view(-1, 1)
    else:
        advantages, row = torch.empty_like(delta), torch.zeros(cfg.num_envs)
        for t in reversed(range(cfg.num_steps)):
            row = torch.addcmul(delta[t], decay[t], row, out=advantages[t])
    return advantages, advantages + buf.values
