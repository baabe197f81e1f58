"""Learned models: planning by sampling in a latent space (after TD-MPC2), and imagination with a
recurrent latent state (after Dreamer)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests.loops.envs import Corridor, Reach
from tests.loops.harness import ITERATIONS, Script

# -- planning in a latent space --------------------------------------------------------------------


class WorldModel(nn.Module):
    def __init__(self, latent: int = 8) -> None:
        super().__init__()
        self._encoder = nn.Sequential(nn.Linear(4, latent), nn.LayerNorm(latent))
        self._dynamics = nn.Sequential(nn.Linear(latent + 2, latent), nn.Mish())
        self._reward = nn.Linear(latent + 2, 1)
        self._pi = nn.Linear(latent, 2)
        self._q = nn.ModuleList([nn.Linear(latent + 2, 1) for _ in range(2)])
        self._target_q = nn.ModuleList([nn.Linear(latent + 2, 1) for _ in range(2)])
        self._target_q.load_state_dict(self._q.state_dict())
        self._target_q.requires_grad_(False)

    def encode(self, obs: torch.Tensor) -> torch.Tensor:
        return self._encoder(obs)

    def next(self, z: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return self._dynamics(torch.cat([z, a], -1))

    def reward(self, z: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return self._reward(torch.cat([z, a], -1))

    def pi(self, z: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self._pi(z) + 0.1 * torch.randn(*z.shape[:-1], 2))

    def Q(self, z: torch.Tensor, a: torch.Tensor, target: bool = False) -> torch.Tensor:
        x = torch.cat([z, a], -1)
        return torch.stack([q(x) for q in (self._target_q if target else self._q)])

    @torch.no_grad()
    def soft_update_target_Q(self) -> None:
        for p, p_target in zip(self._q.parameters(), self._target_q.parameters(), strict=True):
            p_target.data.lerp_(p.data, 0.1)


class Agent:
    def __init__(self, cfg: SimpleNamespace) -> None:
        self.cfg = cfg
        self.model = WorldModel()
        self.optim = torch.optim.Adam(
            [
                {"params": self.model._encoder.parameters(), "lr": 3e-3},
                {"params": self.model._dynamics.parameters()},
                {"params": self.model._reward.parameters()},
                {"params": self.model._q.parameters()},
            ],
            lr=1e-2,
        )
        self.pi_optim = torch.optim.Adam(self.model._pi.parameters(), lr=1e-2, eps=1e-5)
        self._prev_mean = torch.zeros(cfg.horizon, 2)

    @torch.no_grad()
    def act(self, obs: torch.Tensor, t0: bool, eval_mode: bool = False) -> torch.Tensor:
        cfg = self.cfg
        z = self.model.encode(obs.unsqueeze(0)).repeat(cfg.samples, 1)
        mean = torch.zeros(cfg.horizon, 2)
        std = torch.full((cfg.horizon, 2), 0.8)
        if not t0:
            mean[:-1] = self._prev_mean[1:]
        for _ in range(cfg.plan_iterations):
            noise = torch.randn(cfg.horizon, cfg.samples, 2)
            actions = (mean.unsqueeze(1) + std.unsqueeze(1) * noise).clamp(-1, 1)
            value = self._estimate_value(z, actions)
            elite = torch.topk(value.squeeze(1), cfg.elites, dim=0).indices
            best, score = actions[:, elite], value[elite]
            weight = torch.exp(0.5 * (score - score.max(0).values))
            weight = weight / weight.sum(0)
            mean = (weight.unsqueeze(0) * best).sum(1)
            std = ((weight.unsqueeze(0) * (best - mean.unsqueeze(1)) ** 2).sum(1)).sqrt()
            std = std.clamp(0.05, 0.8)
        pick = np.random.choice(  # noqa: NPY002 (as such planners do)
            np.arange(cfg.elites), p=weight.squeeze(1).double().div(weight.double().sum()).numpy()
        )
        self._prev_mean.copy_(mean)
        action = best[0, pick]
        if not eval_mode:
            action = action + std[0] * torch.randn(2)
        return action.clamp(-1, 1)

    def _estimate_value(self, z: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        total, discount = 0, 1
        for t in range(self.cfg.horizon):
            total = total + discount * self.model.reward(z, actions[t])
            z = self.model.next(z, actions[t])
            discount = discount * 0.95
        return total + discount * self.model.Q(z, self.model.pi(z)).mean(0)

    def update(self, buffer: EpisodeBuffer) -> dict[str, float]:
        obs, action, reward = buffer.sample(self.cfg.batch, self.cfg.horizon)
        with torch.no_grad():
            next_z = self.model.encode(obs[1:])
            target = reward + 0.95 * self.model.Q(next_z, self.model.pi(next_z), True).min(0).values
        self.model.train()
        z = self.model.encode(obs[0])
        zs, consistency, reward_loss, value_loss = [z], 0, 0, 0
        for t in range(self.cfg.horizon):
            rho = 0.5**t
            reward_loss = reward_loss + rho * F.mse_loss(self.model.reward(z, action[t]), reward[t])
            for q in self.model.Q(z, action[t]).unbind(0):
                value_loss = value_loss + rho * F.mse_loss(q, target[t])
            z = self.model.next(z, action[t])
            consistency = consistency + rho * F.mse_loss(z, next_z[t])
            zs.append(z)
        total_loss = 2.0 * consistency + 0.5 * reward_loss + 0.1 * value_loss
        total_loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 20.0)
        self.optim.step()
        self.optim.zero_grad(set_to_none=True)
        pi_loss = self.update_pi(torch.stack(zs).detach())
        self.model.soft_update_target_Q()
        self.model.eval()
        return {
            "consistency": float(consistency),
            "pi_loss": pi_loss,
            "grad_norm": float(grad_norm),
        }

    def update_pi(self, zs: torch.Tensor) -> float:
        self.pi_optim.zero_grad(set_to_none=True)
        self.model._q.requires_grad_(False)
        rho = torch.pow(0.5, torch.arange(len(zs)))
        pi_loss = (-self.model.Q(zs, self.model.pi(zs)).mean(0).mean((1, 2)) * rho).mean()
        pi_loss.backward()
        self.pi_optim.step()
        self.model._q.requires_grad_(True)
        return pi_loss.item()


class EpisodeBuffer:
    """Whole episodes; short stretches of them are drawn."""

    def __init__(self) -> None:
        self.episodes: list[dict[str, torch.Tensor]] = []
        self.num_eps = 0

    def add(self, td: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> int:
        obs, action, reward = zip(*td, strict=True)
        episode = {"obs": torch.stack(obs), "action": torch.stack(action)}
        episode["reward"] = torch.stack(reward)
        if len(td) > 3:  # of shorter ones no stretch can be drawn
            self.episodes.append(episode)
            self.num_eps += 1
        return self.num_eps

    def sample(self, batch: int, horizon: int) -> tuple[torch.Tensor, ...]:
        rows = []
        for _ in range(batch):
            episode = self.episodes[np.random.randint(len(self.episodes))]  # noqa: NPY002
            start = np.random.randint(len(episode["obs"]) - horizon)  # noqa: NPY002
            rows.append((episode, start))
        return (
            torch.stack([e["obs"][s : s + horizon + 1] for e, s in rows], 1),
            torch.stack([e["action"][s + 1 : s + horizon + 1] for e, s in rows], 1),
            torch.stack([e["reward"][s + 1 : s + horizon + 1] for e, s in rows], 1),
        )


class OnlineTrainer:
    def __init__(self, cfg: SimpleNamespace, env: Any, agent: Agent, buffer: EpisodeBuffer) -> None:
        self.cfg, self.env, self.agent, self.buffer = cfg, env, agent, buffer
        self._step, self._ep_idx = 0, 0
        self.logs: list[dict[str, float]] = []

    def train(self) -> None:
        train_metrics, done = {}, True
        while self._step <= self.cfg.steps:
            if done:
                if self._step > 0:
                    self._ep_idx = self.buffer.add(self._tds)
                    train_metrics.update(
                        episode_reward=torch.stack([td[2] for td in self._tds[1:]]).sum().item()
                    )
                    self.logs.append(dict(train_metrics, step=self._step))
                obs = torch.from_numpy(self.env.reset(seed=self._step)[0])
                self._tds = [(obs, torch.full((2,), torch.nan), torch.full((1,), torch.nan))]
                elapsed = 0
            if self._step > self.cfg.seed_steps:
                action = self.agent.act(obs, t0=len(self._tds) == 1)
            else:
                action = torch.rand(2) * 2 - 1
            obs, reward, terminated, truncated, _ = self.env.step(action.numpy())
            obs = torch.from_numpy(obs)
            elapsed += 1
            done = truncated or (terminated and elapsed > 3)
            self._tds.append((obs, action, torch.tensor([reward], dtype=torch.float32)))
            if self._step >= self.cfg.seed_steps:
                num_updates = 2 if self._step == self.cfg.seed_steps else 1
                for _ in range(num_updates):
                    _train_metrics = self.agent.update(self.buffer)
                train_metrics.update(_train_metrics)
            self._step += 1


def run_planner(compile: Any, vectorize: Any) -> Any:
    del vectorize
    cfg = SimpleNamespace(
        horizon=2, samples=6, elites=3, plan_iterations=2, batch=4, steps=18, seed_steps=14
    )
    agent, buffer, env = Agent(cfg), EpisodeBuffer(), Reach()
    trainer = OnlineTrainer(cfg, env, agent, buffer)
    train = compile(trainer.train)
    train()
    cfg.steps = 24  # a user extends the run
    train()
    assert len(trainer.logs) > 1
    return trainer, agent, buffer, env


# -- imagination with a recurrent latent state -----------------------------------------------------


class RSSM(nn.Module):
    def __init__(self, deter: int = 8, stoch: int = 4) -> None:
        super().__init__()
        self.deter, self.stoch = deter, stoch
        self.cell = nn.GRUCell(stoch + 2, deter)
        self.prior = nn.Linear(deter, 2 * stoch)
        self.posterior = nn.Linear(deter + 2, 2 * stoch)

    def initial(self, batch: int) -> dict[str, torch.Tensor]:
        return {"deter": torch.zeros(batch, self.deter), "stoch": torch.zeros(batch, self.stoch)}

    def _split(self, x: torch.Tensor) -> torch.distributions.Normal:
        mean, std = x.chunk(2, -1)
        return torch.distributions.Normal(mean, F.softplus(std) + 0.1)

    def obs_step(self, state, action, embed, is_first):  # type: ignore[no-untyped-def]
        keep = (1.0 - is_first).unsqueeze(-1)
        state = {k: v * keep for k, v in state.items()}
        prior = self.img_step(state, action * keep)
        post = self._split(self.posterior(torch.cat([prior["deter"], embed], -1)))
        return {"deter": prior["deter"], "stoch": post.rsample()}, prior, post

    def img_step(self, state, action):  # type: ignore[no-untyped-def]
        deter = self.cell(torch.cat([state["stoch"], action], -1), state["deter"])
        dist = self._split(self.prior(deter))
        return {"deter": deter, "stoch": dist.rsample(), "dist": dist}


class Dreamer:
    def __init__(self) -> None:
        self.rssm = RSSM()
        self.heads = nn.ModuleDict(
            {"decoder": nn.Linear(12, 2), "reward": nn.Linear(12, 1), "value": nn.Linear(12, 1)}
        )
        self.actor = nn.Linear(12, 2)
        self.model_opt = torch.optim.Adam(
            [*self.rssm.parameters(), *self.heads["decoder"].parameters(),
             *self.heads["reward"].parameters()], lr=5e-3,
        )  # fmt: skip
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=5e-3)
        self.value_opt = torch.optim.Adam(self.heads["value"].parameters(), lr=5e-3)
        self.cache: list[dict[str, np.ndarray]] = []

    def feat(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([state["stoch"], state["deter"]], -1)

    def policy(self, obs, state, action, is_first):  # type: ignore[no-untyped-def]
        with torch.no_grad():
            state, _, _ = self.rssm.obs_step(state, action, obs, is_first)
            probs = torch.softmax(self.actor(self.feat(state)), -1)
            index = torch.multinomial(probs, 1).squeeze(1)
        return state, F.one_hot(index, 2).float()

    def train_model(self, batch: dict[str, torch.Tensor]) -> tuple[Any, float]:
        state, posts, kls = self.rssm.initial(batch["obs"].shape[1]), [], []
        for t in range(len(batch["obs"])):
            state, prior, post = self.rssm.obs_step(
                state, batch["action"][t], batch["obs"][t], batch["first"][t]
            )
            posts.append(self.feat(state))
            kls.append(torch.distributions.kl_divergence(post, prior["dist"]).sum(-1))
        feats = torch.stack(posts)
        loss = (
            F.mse_loss(self.heads["decoder"](feats), batch["obs"])
            + F.mse_loss(self.heads["reward"](feats).squeeze(-1), batch["reward"])
            + 0.1 * torch.stack(kls).clamp(min=0.1).mean()
        )
        self.model_opt.zero_grad()
        loss.backward()
        self.model_opt.step()
        return {k: v.detach() for k, v in state.items()}, loss.item()

    def train_behavior(self, start: dict[str, torch.Tensor], horizon: int) -> tuple[float, float]:
        self.rssm.requires_grad_(requires_grad=False)
        state, feats, logps = start, [], []
        for _ in range(horizon):
            feat = self.feat(state)
            dist = torch.distributions.OneHotCategoricalStraightThrough(logits=self.actor(feat))
            action = dist.rsample()
            state = self.rssm.img_step(state, action)
            feats.append(feat)
            logps.append(dist.log_prob(action.detach()))
        feats.append(self.feat(state))
        feats = torch.stack(feats)
        reward = self.heads["reward"](feats[1:]).squeeze(-1)
        value = self.heads["value"](feats).squeeze(-1)
        target, returns = value[-1], []
        for t in reversed(range(horizon)):
            target = reward[t] + 0.9 * (0.05 * value[t + 1] + 0.95 * target)
            returns.insert(0, target)
        returns = torch.stack(returns)
        actor_loss = -(returns + 0.01 * torch.stack(logps) * returns.detach()).mean()
        self.actor_opt.zero_grad()
        actor_loss.backward()
        self.actor_opt.step()
        value_loss = F.mse_loss(
            self.heads["value"](feats[:-1].detach()).squeeze(-1), returns.detach()
        )
        self.value_opt.zero_grad()
        value_loss.backward()
        self.value_opt.step()
        self.rssm.requires_grad_(requires_grad=True)
        return actor_loss.item(), value_loss.item()


def dream(agent, envs, obs, state, action, is_first, log):  # type: ignore[no-untyped-def]
    rows = {"obs": [], "action": [], "reward": [], "first": []}
    for _ in range(5):
        embed = torch.as_tensor(obs)
        before, first = action, is_first
        state, action = agent.policy(embed, state, action, is_first)
        obs, reward, terminated, truncated, _ = envs.step(action.argmax(-1).numpy())
        is_first = torch.as_tensor(terminated | truncated, dtype=torch.float32)
        rows["obs"].append(embed)
        rows["action"].append(before)
        rows["reward"].append(torch.as_tensor(reward, dtype=torch.float32))
        rows["first"].append(first)
    agent.cache.append({k: torch.stack(v).numpy() for k, v in rows.items()})
    for _ in range(2):
        picked = agent.cache[int(torch.randint(len(agent.cache), ()))]
        batch = {k: torch.from_numpy(v) for k, v in picked.items()}
        start, model_loss = agent.train_model(batch)
        actor_loss, value_loss = agent.train_behavior(start, 3)
        log.append((model_loss, actor_loss, value_loss))
    return obs, state, action, is_first


def run_dreamer(compile: Any, vectorize: Any) -> Any:
    envs, agent, log = vectorize([Corridor] * 8), Dreamer(), []
    obs, state = envs.reset(seed=11)[0], agent.rssm.initial(8)
    action, is_first = torch.zeros(8, 2), torch.ones(8)
    step = compile(dream)
    for _ in range(ITERATIONS):
        obs, state, action, is_first = step(agent, envs, obs, state, action, is_first, log)
    return agent, envs, obs, state, action, is_first, log


SCRIPTS = [
    Script("TD-MPC2-like planner", run_planner, recaptures=1),
    Script("Dreamer-like imagination", run_dreamer, sharded=True, applied=("late",)),
]
