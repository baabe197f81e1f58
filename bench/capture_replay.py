"""Loops over replayed and recorded data, in our own words: soft actor-critic as a script, and
imitation from a dataset with evaluation in between."""

# ruff: noqa: NPY002 (the loops use the global generator, as such loops do)

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from bench.capture_onpolicy import Log, mlp, pendulums

# -- soft actor-critic -----------------------------------------------------------------------------


class SoftQ(nn.Module):
    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.net = mlp(observations + actions, 32, 32, 1)

    def forward(self, x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        return self.net(torch.cat([x, a], 1))


class Actor(nn.Module):
    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.trunk = mlp(observations, 32, 32)
        self.fc_mean = nn.Linear(32, actions)
        self.fc_logstd = nn.Linear(32, actions)
        self.register_buffer("action_scale", torch.full((actions,), 2.0))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = F.relu(self.trunk(x))
        log_std = torch.tanh(self.fc_logstd(x))
        return self.fc_mean(x), -5 + 0.5 * 7 * (log_std + 1)

    def get_action(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_std = self(x)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x_t = normal.rsample()
        y_t = torch.tanh(x_t)
        action = y_t * self.action_scale
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return action, log_prob.sum(1, keepdim=True), torch.tanh(mean) * self.action_scale


class ReplayBuffer:
    """A ring of transitions in preallocated arrays."""

    def __init__(self, size: int, num_envs: int, observations: int, actions: int) -> None:
        self.size, self.num_envs = size, num_envs
        self.observations = np.zeros((size, num_envs, observations), dtype=np.float32)
        self.next_observations = np.zeros((size, num_envs, observations), dtype=np.float32)
        self.actions = np.zeros((size, num_envs, actions), dtype=np.float32)
        self.rewards = np.zeros((size, num_envs), dtype=np.float32)
        self.dones = np.zeros((size, num_envs), dtype=np.float32)
        self.pos = 0
        self.full = False

    def add(self, obs, next_obs, action, reward, done) -> None:  # type: ignore[no-untyped-def]
        self.observations[self.pos] = obs
        self.next_observations[self.pos] = next_obs
        self.actions[self.pos] = action
        self.rewards[self.pos] = reward
        self.dones[self.pos] = done
        self.pos += 1
        if self.pos == self.size:
            self.full = True
            self.pos = 0

    def sample(self, batch_size: int) -> SimpleNamespace:
        upper = self.size if self.full else self.pos
        rows = np.random.randint(0, upper, size=batch_size)
        envs = np.random.randint(0, self.num_envs, size=batch_size)
        return SimpleNamespace(
            observations=torch.as_tensor(self.observations[rows, envs]),
            next_observations=torch.as_tensor(self.next_observations[rows, envs]),
            actions=torch.as_tensor(self.actions[rows, envs]),
            rewards=torch.as_tensor(self.rewards[rows, envs]),
            dones=torch.as_tensor(self.dones[rows, envs]),
        )


def sac(args, nets, actor_optimizer, q_optimizer, a_optimizer, envs, rb, writer):  # type: ignore[no-untyped-def]
    actor, qf1, qf2 = nets.actor, nets.qf1, nets.qf2
    qf1_target, qf2_target, log_alpha = nets.qf1_target, nets.qf2_target, nets.log_alpha
    target_entropy = -1.0
    alpha = log_alpha.exp().item()
    start_time = time.time()
    obs, _ = envs.reset(seed=args.seed)
    for global_step in range(args.total_timesteps):
        if global_step < args.learning_starts:
            actions = np.array([envs.single_action_space.sample() for _ in range(envs.num_envs)])
        else:
            actions, _, _ = actor.get_action(torch.Tensor(obs))
            actions = actions.detach().cpu().numpy()
        next_obs, rewards, terminations, truncations, infos = envs.step(actions)
        if "episode" in infos:
            for i, r in enumerate(infos["episode"]["r"]):
                if infos["_episode"][i]:
                    writer.add_scalar("charts/episodic_return", r, global_step)
                    break
        real_next_obs = next_obs.copy()
        for idx, trunc in enumerate(truncations):
            if trunc:
                real_next_obs[idx] = next_obs[idx]
        rb.add(obs, real_next_obs, actions, rewards, terminations)
        obs = next_obs
        if global_step > args.learning_starts:
            data = rb.sample(args.batch_size)
            with torch.no_grad():
                next_actions, next_log_pi, _ = actor.get_action(data.next_observations)
                qf1_next = qf1_target(data.next_observations, next_actions)
                qf2_next = qf2_target(data.next_observations, next_actions)
                min_next = torch.min(qf1_next, qf2_next) - alpha * next_log_pi
                next_q = data.rewards + (1 - data.dones) * args.gamma * min_next.view(-1)
            qf1_loss = F.mse_loss(qf1(data.observations, data.actions).view(-1), next_q)
            qf2_loss = F.mse_loss(qf2(data.observations, data.actions).view(-1), next_q)
            qf_loss = qf1_loss + qf2_loss
            q_optimizer.zero_grad()
            qf_loss.backward()
            q_optimizer.step()
            if global_step % args.policy_frequency == 0:
                for _ in range(args.policy_frequency):
                    pi, log_pi, _ = actor.get_action(data.observations)
                    min_qf_pi = torch.min(qf1(data.observations, pi), qf2(data.observations, pi))
                    actor_loss = ((alpha * log_pi) - min_qf_pi).mean()
                    actor_optimizer.zero_grad()
                    actor_loss.backward()
                    actor_optimizer.step()
                    with torch.no_grad():
                        _, log_pi, _ = actor.get_action(data.observations)
                    alpha_loss = (-log_alpha.exp() * (log_pi + target_entropy)).mean()
                    a_optimizer.zero_grad()
                    alpha_loss.backward()
                    a_optimizer.step()
                    alpha = log_alpha.exp().item()
            if global_step % args.target_network_frequency == 0:
                for p, target_p in zip(qf1.parameters(), qf1_target.parameters(), strict=True):
                    target_p.data.copy_(args.tau * p.data + (1 - args.tau) * target_p.data)
                for p, target_p in zip(qf2.parameters(), qf2_target.parameters(), strict=True):
                    target_p.data.copy_(args.tau * p.data + (1 - args.tau) * target_p.data)
            if global_step % 4 == 0:
                writer.add_scalar("losses/qf_loss", qf_loss.item() / 2.0, global_step)
                writer.add_scalar("losses/alpha", alpha, global_step)
                sps = int(global_step / (time.time() - start_time))
                print("SPS:", sps)
                writer.add_scalar("charts/SPS", sps, global_step)


def make_sac() -> tuple[Any, ...]:
    torch.manual_seed(0)
    np.random.seed(0)
    args = SimpleNamespace(
        total_timesteps=14,
        learning_starts=5,
        seed=1,
        batch_size=16,
        gamma=0.99,
        tau=0.005,
        policy_frequency=2,
        target_network_frequency=1,
    )
    nets = SimpleNamespace(
        actor=Actor(3, 1),
        qf1=SoftQ(3, 1),
        qf2=SoftQ(3, 1),
        qf1_target=SoftQ(3, 1),
        qf2_target=SoftQ(3, 1),
        log_alpha=torch.zeros(1, requires_grad=True),
    )
    nets.qf1_target.load_state_dict(nets.qf1.state_dict())
    nets.qf2_target.load_state_dict(nets.qf2.state_dict())
    q_optimizer = torch.optim.Adam([*nets.qf1.parameters(), *nets.qf2.parameters()], lr=1e-3)
    envs = pendulums(4)
    envs.single_action_space.seed(0)
    return (
        args,
        nets,
        torch.optim.Adam(nets.actor.parameters(), lr=3e-4),
        q_optimizer,
        torch.optim.Adam([nets.log_alpha], lr=1e-3),
        envs,
        ReplayBuffer(64, 4, 3, 1),
        Log(),
    )


# -- imitation with evaluation ---------------------------------------------------------------------


class Demonstrations(Dataset):
    """Observations with the next few actions that a demonstrator took."""

    def __init__(self, count: int = 64, chunk: int = 4) -> None:
        generator = torch.Generator().manual_seed(0)
        self.states = torch.randn(count, 3, generator=generator)
        self.chunks = torch.randn(count, chunk, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"observation.state": self.states[index], "action": self.chunks[index]}


class ChunkPolicy(nn.Module):
    """Predicts several actions at once and plays them one by one."""

    def __init__(self, chunk: int = 4) -> None:
        super().__init__()
        self.chunk = chunk
        self.net = nn.Sequential(mlp(3, 32, 32), nn.Dropout(0.1), nn.Linear(32, chunk))
        self.queue: deque[torch.Tensor] = deque(maxlen=chunk)

    def reset(self) -> None:
        self.queue.clear()

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        predicted = self.net(batch["observation.state"]).unsqueeze(-1)
        loss = F.l1_loss(predicted, batch["action"])
        return loss, {"l1_loss": loss.item()}

    @torch.no_grad()
    def select_action(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if len(self.queue) == 0:
            actions = self.net(batch["observation.state"]).unsqueeze(-1)
            self.queue.extend(actions.transpose(0, 1))
        return self.queue.popleft()


class Meter:
    def __init__(self) -> None:
        self.sum = 0.0
        self.count = 0

    def update(self, value: float) -> None:
        self.sum += value
        self.count += 1

    def reset(self) -> None:
        self.sum, self.count = 0.0, 0


def evaluate(policy: ChunkPolicy, env: Any, steps: int, seed: int) -> float:
    policy.eval()
    policy.reset()
    observation, _ = env.reset(seed=seed)
    total = 0.0
    for _ in range(steps):
        batch = {"observation.state": torch.from_numpy(observation).float()}
        action = policy.select_action(batch)
        observation, reward, _terminated, _truncated, _ = env.step(action.numpy())
        total += float(reward.mean())
    return total


def cycle(iterable: Any) -> Iterator[Any]:
    iterator = iter(iterable)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            iterator = iter(iterable)


def imitate(cfg, policy, evaluator, optimizer, lr_scheduler, dataloader, eval_env, meter, log):  # type: ignore[no-untyped-def]
    policy.train()
    batches = cycle(dataloader)
    for step in range(1, cfg.steps + 1):
        batch = next(batches)
        loss, output = policy.forward(batch)
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.grad_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
        meter.update(output["l1_loss"])
        if step % cfg.log_freq == 0:
            log.add_scalar("grad_norm", grad_norm.item(), step)
            log.add_scalar("l1_loss", meter.sum / meter.count, step)
            log.add_scalar("lr", lr_scheduler.get_last_lr()[0], step)
            meter.reset()
        if step % cfg.save_freq == 0:
            checkpoint = {k: v.clone() for k, v in policy.state_dict().items()}
            torch.save(checkpoint, cfg.checkpoint_path)
        if step % cfg.eval_freq == 0:
            evaluator.load_state_dict(policy.state_dict())
            reward = evaluate(evaluator, eval_env, cfg.eval_steps, cfg.seed)
            log.add_scalar("eval/reward", reward, step)


def make_imitation() -> tuple[Any, ...]:
    torch.manual_seed(0)
    cfg = SimpleNamespace(
        steps=10,
        grad_clip_norm=10.0,
        log_freq=2,
        save_freq=4,
        eval_freq=4,
        eval_steps=6,
        seed=3,
        checkpoint_path="/dev/null",
    )
    policy, evaluator = ChunkPolicy(), ChunkPolicy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    loader = DataLoader(Demonstrations(), batch_size=16, shuffle=True)
    return cfg, policy, evaluator, optimizer, scheduler, loader, pendulums(4), Meter(), Log()
