"""PPO on a vector environment, written as a researcher would."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions.normal import Normal


def layer(inputs: int, outputs: int, std: float = 2**0.5) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, std)
    nn.init.zeros_(made.bias)
    return made


class Agent(nn.Module):
    def __init__(self, observations: int, actions: int, hidden: int) -> None:
        super().__init__()
        self.critic = nn.Sequential(
            layer(observations, hidden),
            nn.Tanh(),
            layer(hidden, hidden),
            nn.Tanh(),
            layer(hidden, 1, 1.0),
        )
        self.actor_mean = nn.Sequential(
            layer(observations, hidden),
            nn.Tanh(),
            layer(hidden, hidden),
            nn.Tanh(),
            layer(hidden, actions, 0.01),
        )
        self.actor_logstd = nn.Parameter(torch.zeros(1, actions))

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(x)

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> Any:
        mean = self.actor_mean(x)
        logstd = self.actor_logstd.expand_as(mean)
        std = torch.exp(logstd)
        probs = Normal(mean, std)
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)


class Buffers:
    def __init__(self, steps: int, envs: int, observations: int, actions: int) -> None:
        self.obs = torch.zeros(steps, envs, observations)
        self.actions = torch.zeros(steps, envs, actions)
        self.logprobs = torch.zeros(steps, envs)
        self.rewards = torch.zeros(steps, envs)
        self.dones = torch.zeros(steps, envs)
        self.values = torch.zeros(steps, envs)


def iteration(agent, optimizer, envs, buf, cfg, log, obs, done):  # type: ignore[no-untyped-def]
    for t in range(cfg.num_steps):
        buf.obs[t] = obs
        buf.dones[t] = done
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(obs)
            buf.values[t] = value.flatten()
        buf.actions[t] = action
        buf.logprobs[t] = logprob
        next_obs, reward, terminations, truncations, infos = envs.step(action.cpu().numpy())
        next_done = np.logical_or(terminations, truncations)
        buf.rewards[t] = torch.tensor(reward).view(-1)
        obs, done = torch.Tensor(next_obs), torch.Tensor(next_done)
        if "episode" in infos:
            for r in infos["episode"]["r"][infos["_episode"]]:
                log.append(float(r))
    with torch.no_grad():
        next_value = agent.get_value(obs).reshape(1, -1)
        advantages = torch.zeros_like(buf.rewards)
        lastgaelam = 0
        for t in reversed(range(cfg.num_steps)):
            if t == cfg.num_steps - 1:
                nextnonterminal = 1.0 - done
                nextvalues = next_value
            else:
                nextnonterminal = 1.0 - buf.dones[t + 1]
                nextvalues = buf.values[t + 1]
            delta = buf.rewards[t] + cfg.gamma * nextvalues * nextnonterminal - buf.values[t]
            advantages[t] = lastgaelam = delta + cfg.gamma * cfg.lam * nextnonterminal * lastgaelam
        returns = advantages + buf.values
    b_obs = buf.obs.reshape(-1, buf.obs.shape[-1])
    b_logprobs = buf.logprobs.reshape(-1)
    b_actions = buf.actions.reshape(-1, buf.actions.shape[-1])
    b_advantages = advantages.reshape(-1)
    b_returns = returns.reshape(-1)
    batch = b_obs.shape[0]
    clipfracs = []
    for _epoch in range(cfg.epochs):
        perm = torch.randperm(batch)
        for start in range(0, batch, cfg.minibatch):
            mb = perm[start : start + cfg.minibatch]
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions[mb])
            logratio = newlogprob - b_logprobs[mb]
            ratio = logratio.exp()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - logratio).mean()
                clipfracs.append(((ratio - 1.0).abs() > cfg.clip).float().mean().item())
            adv = b_advantages[mb]
            if cfg.norm_adv:
                adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            pg = torch.max(
                -adv * ratio, -adv * torch.clamp(ratio, 1 - cfg.clip, 1 + cfg.clip)
            ).mean()
            vl = 0.5 * ((newvalue.view(-1) - b_returns[mb]) ** 2).mean()
            loss = pg - cfg.ent * entropy.mean() + vl * cfg.vf
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), cfg.max_norm)
            optimizer.step()
        if cfg.target_kl is not None and approx_kl > cfg.target_kl:
            break
    return obs, done, {"loss": loss.item(), "kl": approx_kl.item(), "clip": np.mean(clipfracs)}


class Setup:
    """Everything one training run owns; :meth:`run` calls an iteration like a training script."""

    def __init__(
        self,
        make_envs: Callable[[], Any],
        *,
        steps: int = 16,
        hidden: int = 64,
        seed: int = 0,
        epochs: int = 2,
        minibatches: int = 4,
    ) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002 (the legacy generator is one of the states compared)
        self.envs = make_envs()
        count = self.envs.num_envs
        observations = int(np.prod(self.envs.single_observation_space.shape))
        actions = int(np.prod(self.envs.single_action_space.shape))
        self.agent = Agent(observations, actions, hidden)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=3e-4, eps=1e-5)
        self.buf = Buffers(steps, count, observations, actions)
        self.cfg = SimpleNamespace(
            num_steps=steps,
            gamma=0.99,
            lam=0.95,
            epochs=epochs,
            minibatch=steps * count // minibatches,
            clip=0.2,
            norm_adv=True,
            ent=0.0,
            vf=0.5,
            max_norm=0.5,
            target_kl=0.03,
        )
        self.log: list[float] = []
        self.stats: list[dict[str, float]] = []
        first, _ = self.envs.reset(seed=seed)
        self.obs = torch.Tensor(first)
        self.done = torch.zeros(count)

    def run(self, step: Callable[..., Any], times: int = 1) -> None:
        for _ in range(times):
            self.obs, self.done, stats = step(
                self.agent,
                self.optimizer,
                self.envs,
                self.buf,
                self.cfg,
                self.log,
                self.obs,
                self.done,
            )
            self.stats.append(stats)

    def probe(self, steps: int = 20) -> list[np.ndarray]:
        """What the environments answer to fixed actions: equal only if their states are."""
        generator = np.random.default_rng(7)
        answers: list[np.ndarray] = []
        shape = (self.envs.num_envs, *self.envs.single_action_space.shape)
        for _ in range(steps):
            result = self.envs.step(generator.uniform(-1, 1, shape).astype(np.float32))
            answers += [np.array(part) for part in result[:4]]
        return answers

    def close(self) -> None:
        self.envs.close()


def state_of(setup: Setup) -> dict[str, Any]:
    """Everything that training leaves behind, to be compared bit for bit."""
    found: dict[str, Any] = {f"param.{n}": p.detach() for n, p in setup.agent.named_parameters()}
    for n, p in setup.agent.named_parameters():
        found[f"grad.{n}"] = p.grad
        for key, value in setup.optimizer.state[p].items():
            found[f"adam.{n}.{key}"] = value
    found.update({f"buf.{k}": v for k, v in vars(setup.buf).items()})
    found["obs"], found["done"] = setup.obs, setup.done
    found["rng.torch"] = torch.get_rng_state()
    found["rng.numpy"] = torch.from_numpy(np.random.get_state()[1].astype(np.int64))  # type: ignore[index]  # noqa: NPY002
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of what differs in any bit."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]
