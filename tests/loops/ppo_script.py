"""PPO as a script, and with curiosity: the loops of ``bench.capture_onpolicy``, four iterations."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from bench.capture_onpolicy import (
    Agent,
    Log,
    make_rnd,
    ppo_arguments,
    ppo_script,
    rnd_iteration,
)
from tests.loops.harness import ITERATIONS, Script


def _pendulum() -> gym.Env[Any, Any]:
    made = gym.make("Pendulum-v1", max_episode_steps=12)
    made = gym.wrappers.RecordEpisodeStatistics(made)
    return gym.wrappers.ClipAction(made)


def run_script(compile: Any, vectorize: Any) -> Any:
    args = ppo_arguments(num_iterations=ITERATIONS, num_steps=6, batch_size=24, minibatch_size=12)
    agent = Agent(3, 1, width=8)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    envs, writer = vectorize([_pendulum] * args.num_envs), Log()
    train = compile(ppo_script)
    train(args, agent, optimizer, envs, writer)
    return agent, optimizer, envs, writer, args


def run_curiosity(compile: Any, vectorize: Any) -> Any:
    args, agent, rnd, optimizer, _, buf, obs_rms, reward_rms, log, _ = make_rnd()
    envs = vectorize([_pendulum] * args.num_envs)
    next_obs = torch.tensor(envs.reset(seed=1)[0], dtype=torch.float32)
    iteration = compile(rnd_iteration)
    for _ in range(ITERATIONS):
        next_obs = iteration(
            args, agent, rnd, optimizer, envs, buf, obs_rms, reward_rms, log, next_obs
        )
        assert np.isfinite(reward_rms.var)
    return args, agent, rnd, optimizer, envs, buf, obs_rms, reward_rms, log, next_obs


SCRIPTS = [
    Script("PPO, a script", run_script, sharded=True, applied=("late",)),
    Script("PPO with curiosity", run_curiosity, sharded=True, applied=("late",)),
]
