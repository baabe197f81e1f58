"""PPO as a script, and with curiosity: the loops of ``bench.capture_onpolicy``, four iterations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import torch

from bench.capture_onpolicy import (
    Agent,
    Curiosity,
    Log,
    RunningMeanStd,
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
    args = ppo_arguments(
        num_iterations=ITERATIONS, num_envs=8, num_steps=6, batch_size=48, minibatch_size=24
    )
    agent = Agent(3, 1, width=8)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    envs, writer = vectorize([_pendulum] * args.num_envs), Log()
    train = compile(ppo_script)
    train(args, agent, optimizer, envs, writer)
    return agent, optimizer, envs, writer, args


def run_curiosity(compile: Any, vectorize: Any) -> Any:
    args = ppo_arguments(num_envs=8, num_steps=5, batch_size=40, minibatch_size=20)
    agent, rnd = Agent(3, 1, width=8), Curiosity(3, width=8)
    both = [*agent.parameters(), *rnd.predictor.parameters()]
    optimizer = torch.optim.Adam(both, lr=args.learning_rate, eps=1e-5)
    envs, log = vectorize([_pendulum] * args.num_envs), Log()
    shape = (args.num_steps, args.num_envs)
    names = ("logprobs", "rewards", "dones", "values", "curiosity")
    buf = SimpleNamespace(
        obs=torch.zeros(*shape, 3),
        actions=torch.zeros(*shape, 1),
        **{name: torch.zeros(shape) for name in names},
    )
    obs_rms, reward_rms = RunningMeanStd((3,)), RunningMeanStd()
    next_obs = torch.tensor(envs.reset(seed=1)[0], dtype=torch.float32)
    iteration = compile(rnd_iteration)
    for _ in range(ITERATIONS):
        next_obs = iteration(
            args, agent, rnd, optimizer, envs, buf, obs_rms, reward_rms, log, next_obs
        )
    return args, agent, rnd, optimizer, envs, buf, obs_rms, reward_rms, log, next_obs


TILED = ("hoist", "split", "tile_batch", "late")
SCRIPTS = [
    Script("PPO, a script", run_script, sharded=True, applied=TILED),
    Script("PPO with curiosity", run_curiosity, sharded=True, applied=TILED),
]
