"""PPO with a recurrent policy: its state starts anew with an episode, minibatches are sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions.categorical import Categorical

from tests.loops.envs import Corridor
from tests.loops.harness import ITERATIONS, Script


class RecurrentAgent(nn.Module):
    def __init__(self, observations: int, actions: int, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(observations, width), nn.ReLU())
        self.lstm = nn.LSTM(width, width)
        self.actor = nn.Linear(width, actions)
        self.critic = nn.Linear(width, 1)

    def get_states(self, x, lstm_state, done):  # type: ignore[no-untyped-def]
        hidden = self.encoder(x)
        batch_size = lstm_state[0].shape[1]
        hidden = hidden.reshape((-1, batch_size, self.lstm.input_size))
        done = done.reshape((-1, batch_size))
        new_hidden = []
        for h, d in zip(hidden, done, strict=True):
            h, lstm_state = self.lstm(
                h.unsqueeze(0),
                (
                    (1.0 - d).view(1, -1, 1) * lstm_state[0],
                    (1.0 - d).view(1, -1, 1) * lstm_state[1],
                ),
            )
            new_hidden += [h]
        return torch.flatten(torch.cat(new_hidden), 0, 1), lstm_state

    def get_value(self, x, lstm_state, done):  # type: ignore[no-untyped-def]
        hidden, _ = self.get_states(x, lstm_state, done)
        return self.critic(hidden)

    def get_action_and_value(self, x, lstm_state, done, action=None):  # type: ignore[no-untyped-def]
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        probs = Categorical(logits=self.actor(hidden))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), lstm_state


def iteration(args, agent, optimizer, envs, buf, next_obs, next_done, next_lstm_state):  # type: ignore[no-untyped-def]
    initial_lstm_state = (next_lstm_state[0].clone(), next_lstm_state[1].clone())
    for step in range(args.num_steps):
        buf.obs[step] = next_obs
        buf.dones[step] = next_done
        with torch.no_grad():
            action, logprob, _, value, next_lstm_state = agent.get_action_and_value(
                next_obs, next_lstm_state, next_done
            )
            buf.values[step] = value.flatten()
        buf.actions[step] = action
        buf.logprobs[step] = logprob
        obs, reward, terminations, truncations, _ = envs.step(action.cpu().numpy())
        buf.rewards[step] = torch.tensor(reward).view(-1)
        next_obs = torch.Tensor(obs)
        next_done = torch.Tensor(np.logical_or(terminations, truncations))
    with torch.no_grad():
        next_value = agent.get_value(next_obs, next_lstm_state, next_done).reshape(1, -1)
        advantages = torch.zeros_like(buf.rewards)
        lastgaelam = 0
        for t in reversed(range(args.num_steps)):
            if t == args.num_steps - 1:
                alive, following = 1.0 - next_done, next_value
            else:
                alive, following = 1.0 - buf.dones[t + 1], buf.values[t + 1]
            delta = buf.rewards[t] + args.gamma * following * alive - buf.values[t]
            advantages[t] = lastgaelam = delta + args.gamma * args.lam * alive * lastgaelam
        returns = advantages + buf.values
    b_obs = buf.obs.reshape((-1, *envs.single_observation_space.shape))
    b_logprobs, b_actions = buf.logprobs.reshape(-1), buf.actions.reshape(-1)
    b_dones = buf.dones.reshape(-1)
    b_advantages, b_returns = advantages.reshape(-1), returns.reshape(-1)
    envs_per_batch = args.num_envs // args.num_minibatches
    env_inds = np.arange(args.num_envs)
    flat_inds = np.arange(args.num_steps * args.num_envs).reshape(args.num_steps, args.num_envs)
    for _ in range(args.update_epochs):
        np.random.shuffle(env_inds)  # noqa: NPY002 (as such loops do)
        for start in range(0, args.num_envs, envs_per_batch):
            mb_env_inds = env_inds[start : start + envs_per_batch]
            mb_inds = flat_inds[:, mb_env_inds].ravel()
            _, newlogprob, entropy, newvalue, _ = agent.get_action_and_value(
                b_obs[mb_inds],
                (initial_lstm_state[0][:, mb_env_inds], initial_lstm_state[1][:, mb_env_inds]),
                b_dones[mb_inds],
                b_actions.long()[mb_inds],
            )
            ratio = (newlogprob - b_logprobs[mb_inds]).exp()
            mb_advantages = b_advantages[mb_inds]
            pg_loss = torch.max(
                -mb_advantages * ratio, -mb_advantages * torch.clamp(ratio, 0.8, 1.2)
            ).mean()
            v_loss = 0.5 * ((newvalue.view(-1) - b_returns[mb_inds]) ** 2).mean()
            loss = pg_loss - 0.01 * entropy.mean() + 0.5 * v_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    return next_obs, next_done, next_lstm_state, loss.item()


def run(compile: Any, vectorize: Any) -> Any:
    args = SimpleNamespace(
        num_steps=6, num_envs=8, num_minibatches=2, update_epochs=2, gamma=0.99, lam=0.95
    )
    envs = vectorize([Corridor] * args.num_envs)
    agent = RecurrentAgent(2, 2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    shape = (args.num_steps, args.num_envs)
    names = ("actions", "logprobs", "rewards", "dones", "values")
    buf = SimpleNamespace(obs=torch.zeros(*shape, 2), **{n: torch.zeros(shape) for n in names})
    next_obs = torch.Tensor(envs.reset(seed=1)[0])
    next_done = torch.zeros(args.num_envs)
    state = tuple(torch.zeros(1, args.num_envs, agent.lstm.hidden_size) for _ in range(2))
    step = compile(iteration)
    losses = []
    for _ in range(ITERATIONS):
        next_obs, next_done, state, loss = step(
            args, agent, optimizer, envs, buf, next_obs, next_done, state
        )
        losses.append(loss)
    return args, agent, optimizer, envs, buf, next_obs, next_done, state, losses


SCRIPTS = [Script("PPO with an LSTM", run, sharded=True, applied=("split", "defer", "late"))]
