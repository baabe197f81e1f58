"""On-policy loops in three styles of public code, in our own words: a script, its variant with
curiosity, and a runner made of classes. Small enough to run in seconds on a CPU."""

# ruff: noqa: NPY002 (the loops use the global generator, as such loops do)

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions.normal import Normal


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


class Log:
    """Scalars by name, as a writer keeps them."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, float(value), step))


class Agent(nn.Module):
    """Separate actor and critic, a state-independent spread."""

    def __init__(self, observations: int, actions: int, width: int = 32) -> None:
        super().__init__()
        self.critic = mlp(observations, width, width, 1)
        self.actor_mean = mlp(observations, width, width, actions)
        self.actor_logstd = nn.Parameter(torch.zeros(1, actions))

    def get_value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(x)

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> Any:
        mean = self.actor_mean(x)
        std = torch.exp(self.actor_logstd.expand_as(mean))
        probs = Normal(mean, std)
        if action is None:
            action = probs.sample()
        logprob = probs.log_prob(action).sum(1)
        return action, logprob, probs.entropy().sum(1), self.critic(x)


def pendulums(count: int) -> gym.vector.SyncVectorEnv:
    def one() -> gym.Env[Any, Any]:
        made = gym.make("Pendulum-v1", max_episode_steps=12)
        made = gym.wrappers.RecordEpisodeStatistics(made)
        return gym.wrappers.ClipAction(made)

    return gym.vector.SyncVectorEnv([one] * count)


# -- a script --------------------------------------------------------------------------------------


def ppo_script(args, agent, optimizer, envs, writer):  # type: ignore[no-untyped-def]
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros((*shape, *envs.single_observation_space.shape))
    actions = torch.zeros((*shape, *envs.single_action_space.shape))
    logprobs = torch.zeros(shape)
    rewards = torch.zeros(shape)
    dones = torch.zeros(shape)
    values = torch.zeros(shape)
    global_step = 0
    start_time = time.time()
    next_obs, _ = envs.reset(seed=args.seed)
    next_obs = torch.Tensor(next_obs)
    next_done = torch.zeros(args.num_envs)
    for iteration in range(1, args.num_iterations + 1):
        if args.anneal_lr:
            frac = 1.0 - (iteration - 1.0) / args.num_iterations
            optimizer.param_groups[0]["lr"] = frac * args.learning_rate
        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step] = next_obs
            dones[step] = next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step] = action
            logprobs[step] = logprob
            next_obs, reward, terminations, truncations, infos = envs.step(action.cpu().numpy())
            next_done = np.logical_or(terminations, truncations)
            rewards[step] = torch.tensor(reward).view(-1)
            next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(next_done)
            if "episode" in infos:
                for i, r in enumerate(infos["episode"]["r"]):
                    if infos["_episode"][i]:
                        print(f"global_step={global_step}, episodic_return={r:.1f}")
                        writer.add_scalar("charts/episodic_return", r, global_step)
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            lastgaelam = 0
            for t in reversed(range(args.num_steps)):
                if t == args.num_steps - 1:
                    nextnonterminal = 1.0 - next_done
                    nextvalues = next_value
                else:
                    nextnonterminal = 1.0 - dones[t + 1]
                    nextvalues = values[t + 1]
                delta = rewards[t] + args.gamma * nextvalues * nextnonterminal - values[t]
                advantages[t] = lastgaelam = (
                    delta + args.gamma * args.gae_lambda * nextnonterminal * lastgaelam
                )
            returns = advantages + values
        b_obs = obs.reshape((-1, *envs.single_observation_space.shape))
        b_logprobs = logprobs.reshape(-1)
        b_actions = actions.reshape((-1, *envs.single_action_space.shape))
        b_advantages = advantages.reshape(-1)
        b_returns = returns.reshape(-1)
        b_values = values.reshape(-1)
        b_inds = np.arange(args.batch_size)
        clipfracs = []
        for _epoch in range(args.update_epochs):
            np.random.shuffle(b_inds)
            for start in range(0, args.batch_size, args.minibatch_size):
                end = start + args.minibatch_size
                mb_inds = b_inds[start:end]
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(
                    b_obs[mb_inds], b_actions[mb_inds]
                )
                logratio = newlogprob - b_logprobs[mb_inds]
                ratio = logratio.exp()
                with torch.no_grad():
                    old_approx_kl = (-logratio).mean()
                    approx_kl = ((ratio - 1) - logratio).mean()
                    clipfracs += [((ratio - 1.0).abs() > args.clip_coef).float().mean().item()]
                mb_advantages = b_advantages[mb_inds]
                if args.norm_adv:
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (
                        mb_advantages.std() + 1e-8
                    )
                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(
                    ratio, 1 - args.clip_coef, 1 + args.clip_coef
                )
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()
                newvalue = newvalue.view(-1)
                if args.clip_vloss:
                    v_clipped = b_values[mb_inds] + torch.clamp(
                        newvalue - b_values[mb_inds], -args.clip_coef, args.clip_coef
                    )
                    v_loss = 0.5 * ((v_clipped - b_returns[mb_inds]) ** 2).mean()
                else:
                    v_loss = 0.5 * ((newvalue - b_returns[mb_inds]) ** 2).mean()
                entropy_loss = entropy.mean()
                loss = pg_loss - args.ent_coef * entropy_loss + v_loss * args.vf_coef
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()
            if args.target_kl is not None and approx_kl > args.target_kl:
                break
        y_pred, y_true = b_values.cpu().numpy(), b_returns.cpu().numpy()
        var_y = np.var(y_true)
        explained_var = np.nan if var_y == 0 else 1 - np.var(y_true - y_pred) / var_y
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], global_step)
        writer.add_scalar("losses/value_loss", v_loss.item(), global_step)
        writer.add_scalar("losses/old_approx_kl", old_approx_kl.item(), global_step)
        writer.add_scalar("losses/clipfrac", np.mean(clipfracs), global_step)
        writer.add_scalar("losses/explained_variance", explained_var, global_step)
        writer.add_scalar("charts/SPS", int(global_step / (time.time() - start_time)), global_step)


def ppo_arguments(**changes: Any) -> SimpleNamespace:
    found = {
        "num_steps": 8,
        "num_envs": 4,
        "num_iterations": 2,
        "seed": 1,
        "anneal_lr": True,
        "learning_rate": 3e-4,
        "gamma": 0.99,
        "int_gamma": 0.99,
        "gae_lambda": 0.95,
        "update_epochs": 2,
        "batch_size": 32,
        "minibatch_size": 16,
        "norm_adv": True,
        "clip_coef": 0.2,
        "clip_vloss": True,
        "ent_coef": 0.0,
        "vf_coef": 0.5,
        "max_grad_norm": 0.5,
        "target_kl": 0.5,
        "int_coef": 1.0,
        "ext_coef": 2.0,
        "update_proportion": 0.5,
    }
    return SimpleNamespace(**{**found, **changes})


def make_ppo_script() -> tuple[Any, ...]:
    torch.manual_seed(0)
    np.random.seed(0)
    args = ppo_arguments()
    agent = Agent(3, 1)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    return args, agent, optimizer, pendulums(args.num_envs), Log()


# -- with curiosity --------------------------------------------------------------------------------


class RunningMeanStd:
    """Mean and variance of everything seen, batch by batch."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        self.mean = np.zeros(shape)
        self.var = np.ones(shape)
        self.count = 1e-4

    def update(self, x: np.ndarray) -> None:
        mean, var, count = x.mean(0), x.var(0), x.shape[0]
        delta = mean - self.mean
        total = self.count + count
        self.var = (
            self.var * self.count + var * count + delta**2 * self.count * count / total
        ) / total
        self.mean = self.mean + delta * count / total
        self.count = total


class Curiosity(nn.Module):
    """Random network distillation: a predictor learns a frozen random network."""

    def __init__(self, observations: int, width: int = 32) -> None:
        super().__init__()
        self.predictor = mlp(observations, width, width, 16)
        self.target = mlp(observations, width, 16)
        for p in self.target.parameters():
            p.requires_grad = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.predictor(x), self.target(x)


def rnd_iteration(  # type: ignore[no-untyped-def]
    args, agent, rnd, optimizer, envs, buf, obs_rms, reward_rms, log, next_obs
):
    for step in range(args.num_steps):
        buf.obs[step] = next_obs
        with torch.no_grad():
            action, logprob, _, value = agent.get_action_and_value(next_obs)
        buf.values[step] = value.flatten()
        buf.actions[step] = action
        buf.logprobs[step] = logprob
        fresh, reward, terminations, truncations, _infos = envs.step(action.cpu().numpy())
        done = np.logical_or(terminations, truncations)
        buf.rewards[step] = torch.tensor(reward).view(-1)
        buf.dones[step] = torch.tensor(done, dtype=torch.float32)
        next_obs = torch.tensor(fresh, dtype=torch.float32)
        rnd_obs = ((next_obs - torch.from_numpy(obs_rms.mean)) / np.sqrt(obs_rms.var)).clip(-5, 5)
        with torch.no_grad():
            predicted, wanted = rnd(rnd_obs.float())
            curiosity = (wanted - predicted).pow(2).sum(1) / 2
        buf.curiosity[step] = curiosity
    total = buf.curiosity.sum(0).numpy()
    reward_rms.update(total)
    buf.curiosity /= float(np.sqrt(reward_rms.var))
    with torch.no_grad():
        last_value = agent.get_value(next_obs).reshape(-1)
        advantages = torch.zeros_like(buf.rewards)
        running = torch.zeros(args.num_envs)
        for t in reversed(range(args.num_steps)):
            following = last_value if t == args.num_steps - 1 else buf.values[t + 1]
            alive = 1.0 - buf.dones[t]
            combined = args.ext_coef * buf.rewards[t] + args.int_coef * buf.curiosity[t]
            delta = combined + args.gamma * following * alive - buf.values[t]
            running = delta + args.gamma * args.gae_lambda * alive * running
            advantages[t] = running
        returns = advantages + buf.values
    b_obs = buf.obs.reshape(-1, buf.obs.shape[-1])
    b_actions = buf.actions.reshape(-1, buf.actions.shape[-1])
    b_logprobs, b_advantages = buf.logprobs.reshape(-1), advantages.reshape(-1)
    b_returns = returns.reshape(-1)
    obs_rms.update(b_obs.numpy())
    centred = (b_obs - torch.from_numpy(obs_rms.mean).float()).clip(-5, 5)
    for _ in range(args.update_epochs):
        order = torch.randperm(args.batch_size)
        for start in range(0, args.batch_size, args.minibatch_size):
            mb = order[start : start + args.minibatch_size]
            predicted, wanted = rnd(centred[mb])
            forward_loss = nn.functional.mse_loss(
                predicted, wanted.detach(), reduction="none"
            ).mean(-1)
            mask = torch.rand(len(forward_loss))
            mask = (mask < args.update_proportion).float()
            forward_loss = (forward_loss * mask).sum() / torch.max(mask.sum(), torch.tensor(1.0))
            _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions[mb])
            ratio = (newlogprob - b_logprobs[mb]).exp()
            mb_adv = b_advantages[mb]
            pg_loss = torch.max(
                -mb_adv * ratio,
                -mb_adv * torch.clamp(ratio, 1 - args.clip_coef, 1 + args.clip_coef),
            ).mean()
            v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb]) ** 2).mean()
            loss = pg_loss - args.ent_coef * entropy.mean() + v_loss + forward_loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    log.add_scalar("losses/curiosity", forward_loss.item(), 0)
    return next_obs


def make_rnd() -> tuple[Any, ...]:
    torch.manual_seed(0)
    np.random.seed(0)
    args = ppo_arguments()
    agent, rnd = Agent(3, 1), Curiosity(3)
    both = [*agent.parameters(), *rnd.predictor.parameters()]
    optimizer = torch.optim.Adam(both, lr=args.learning_rate, eps=1e-5)
    envs = pendulums(args.num_envs)
    shape = (args.num_steps, args.num_envs)
    buf = SimpleNamespace(
        obs=torch.zeros(*shape, 3),
        actions=torch.zeros(*shape, 1),
        **{n: torch.zeros(shape) for n in ("logprobs", "rewards", "dones", "values", "curiosity")},
    )
    first, _ = envs.reset(seed=1)
    next_obs = torch.tensor(first, dtype=torch.float32)
    return (
        args, agent, rnd, optimizer, envs, buf, RunningMeanStd((3,)), RunningMeanStd(), Log(),
        next_obs,
    )  # fmt: skip
