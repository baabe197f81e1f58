"""The other loops of ``bench.capture``, four iterations each: a runner of classes, SAC, imitation
with evaluation, groups of rollouts against a reference model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from bench.capture_grpo import DenoisingPolicy, Kitchen, Prompts, grpo
from bench.capture_onpolicy import Log
from bench.capture_replay import imitate, make_imitation, make_sac, sac
from bench.capture_runner import Runner, Walkers
from tests.loops.harness import ITERATIONS, Script


def run_runner(compile: Any, vectorize: Any) -> Any:
    del vectorize
    runner = Runner(Walkers(4, horizon=7), steps=4)
    compile(runner.learn)(ITERATIONS)
    return runner


def run_sac(compile: Any, vectorize: Any) -> Any:
    args, nets, actor_optimizer, q_optimizer, a_optimizer, old, buffer, writer = make_sac()
    old.close()

    def pendulum() -> gym.Env[Any, Any]:
        made = gym.make("Pendulum-v1", max_episode_steps=6)
        return gym.wrappers.ClipAction(gym.wrappers.RecordEpisodeStatistics(made))

    args.total_timesteps, args.learning_starts, args.batch_size = 12, 3, 8
    envs = vectorize([pendulum] * 4)
    envs.single_action_space.seed(0)
    compile(sac)(args, nets, actor_optimizer, q_optimizer, a_optimizer, envs, buffer, writer)
    return args, nets, actor_optimizer, q_optimizer, a_optimizer, envs, buffer, writer


def run_imitation(compile: Any, vectorize: Any) -> Any:
    cfg, policy, evaluator, optimizer, scheduler, loader, old, meter, log = make_imitation()
    old.close()
    envs = vectorize([lambda: gym.make("Pendulum-v1", max_episode_steps=5)] * 2)
    cfg.steps, cfg.eval_steps = 2 * ITERATIONS, 4
    compile(imitate)(cfg, policy, evaluator, optimizer, scheduler, loader, envs, meter, log)
    return cfg, policy, evaluator, optimizer, scheduler, envs, meter, log


def run_groups(compile: Any, vectorize: Any) -> Any:
    del vectorize
    policy, reference = DenoisingPolicy(2, 2), DenoisingPolicy(2, 2)
    reference.load_state_dict(policy.state_dict())
    reference.requires_grad_(False)
    cfg = SimpleNamespace(iterations=ITERATIONS, chunks=3, epochs=2, clip=0.2, beta=0.01)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    env, prompts, log = Kitchen(6), Prompts(2, 3), Log()
    compile(grpo)(cfg, policy, reference, optimizer, env, prompts, log)
    assert np.isfinite(log.rows[-1][1])
    return cfg, policy, reference, optimizer, env, prompts, log


SCRIPTS = [
    Script("PPO, a runner of classes", run_runner),
    Script("SAC", run_sac, sharded=True),
    Script("imitation, evaluation every k", run_imitation, sharded=True, applied=("late",)),
    Script("GRPO with a reference model", run_groups),
]
