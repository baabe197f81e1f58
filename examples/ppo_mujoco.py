"""PPO on HalfCheetah in MuJoCo, trained as written and compiled, then compared.

    python examples/ppo_mujoco.py [--iterations N] [--seed S] [--seeds K] [--out curves.png]
                                  [--numerics bitwise] [--quick]

What a researcher would write ends with `iteration`; `compile` is called once, in `main`. Measuring,
printing and the picture are in comparison.py. 13 minutes with set-up on two cores at 2.0 GHz.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from comparison import Curve, Effort, compare, draw, show
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributions import Normal

import rose_compiler
from rose_compiler.sim import ShardedEnv


@dataclass(frozen=True)
class Config:
    """Sizes and hyperparameters."""

    num_envs: int = 32
    shards: int = 2
    num_steps: int = 64
    episode: int = 200  # steps after which an episode is truncated
    hidden: int = 256
    epochs: int = 2
    minibatch: int = 256
    lr: float = 3e-4
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip: float = 0.2
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float = 0.05


def make_env(episode: int) -> gym.Env:
    """HalfCheetah with the usual wrappers; each environment normalizes for itself."""
    env = gym.make("HalfCheetah-v5", max_episode_steps=episode)
    env = gym.wrappers.RecordEpisodeStatistics(env)
    env = gym.wrappers.ClipAction(env)
    env = gym.wrappers.NormalizeObservation(env)
    env = gym.wrappers.TransformObservation(
        env, lambda obs: np.clip(obs, -10, 10), env.observation_space
    )
    env = gym.wrappers.NormalizeReward(env, gamma=0.99)
    return gym.wrappers.TransformReward(env, lambda reward: np.clip(float(reward), -10, 10))


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(made.weight, gain)
    nn.init.zeros_(made.bias)
    return made


def mlp(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    return nn.Sequential(
        layer(inputs, hidden),
        nn.Tanh(),
        layer(hidden, hidden),
        nn.Tanh(),
        layer(hidden, outputs, gain),
    )


class Agent(nn.Module):
    """A Gaussian policy with a state-independent scale, and a critic of its own."""

    def __init__(self, obs_dim: int, act_dim: int, hidden: int) -> None:
        super().__init__()
        self.actor = mlp(obs_dim, hidden, act_dim, 0.01)
        self.critic = mlp(obs_dim, hidden, 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(act_dim))

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)

    def act(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        policy = Normal(self.actor(obs), self.log_std.exp())
        action = policy.sample()
        return action, policy.log_prob(action).sum(-1), self.value(obs)

    def evaluate(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        policy = Normal(self.actor(obs), self.log_std.exp())
        return policy.log_prob(action).sum(-1), self.value(obs)


class Buffers:
    """One rollout, time first."""

    def __init__(self, cfg: Config, obs_dim: int, act_dim: int) -> None:
        shape = (cfg.num_steps, cfg.num_envs)
        self.obs = torch.zeros(*shape, obs_dim)
        self.actions = torch.zeros(*shape, act_dim)
        self.log_probs = torch.zeros(shape)
        self.rewards = torch.zeros(shape)
        self.dones = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self.advantages = torch.zeros(shape)


def collect(agent, envs, buffers, cfg, log, obs, done):
    """Step all environments `num_steps` times; returns what comes next."""
    for t in range(cfg.num_steps):
        buffers.obs[t] = obs
        buffers.dones[t] = done
        with torch.no_grad():
            action, log_prob, value = agent.act(obs)
        buffers.actions[t] = action
        buffers.log_probs[t] = log_prob
        buffers.values[t] = value
        next_obs, reward, terminated, truncated, infos = envs.step(action.numpy())
        buffers.rewards[t] = torch.as_tensor(reward, dtype=torch.float32)
        obs = torch.as_tensor(next_obs, dtype=torch.float32)
        done = torch.as_tensor(np.logical_or(terminated, truncated), dtype=torch.float32)
        if "episode" in infos:
            for i in np.flatnonzero(infos["_episode"]):
                log.append(float(infos["episode"]["r"][i]))
    return obs, done


def estimate_advantages(agent, buffers, cfg, obs, done):
    """Generalized advantage estimation, backwards in time."""
    with torch.no_grad():
        next_value = agent.value(obs)
    alive = 1.0 - done
    last = torch.zeros(cfg.num_envs)
    for t in reversed(range(cfg.num_steps)):
        delta = buffers.rewards[t] + cfg.gamma * next_value * alive - buffers.values[t]
        last = delta + cfg.gamma * cfg.gae_lambda * alive * last
        buffers.advantages[t] = last
        next_value = buffers.values[t]
        alive = 1.0 - buffers.dones[t]


def update(agent, optimizer, buffers, cfg):
    """Epochs of minibatches, until the policy has moved too far."""
    batch = cfg.num_steps * cfg.num_envs
    obs = buffers.obs.reshape(batch, -1)
    actions = buffers.actions.reshape(batch, -1)
    log_probs = buffers.log_probs.reshape(batch)
    advantages = buffers.advantages.reshape(batch)
    returns = advantages + buffers.values.reshape(batch)
    kl = 0.0
    for _epoch in range(cfg.epochs):
        order = torch.randperm(batch)
        for start in range(0, batch, cfg.minibatch):
            rows = order[start : start + cfg.minibatch]
            new_log_prob, new_value = agent.evaluate(obs[rows], actions[rows])
            log_ratio = new_log_prob - log_probs[rows]
            ratio = log_ratio.exp()
            adv = advantages[rows]
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            clipped = ratio.clamp(1 - cfg.clip, 1 + cfg.clip)
            policy_loss = torch.max(-adv * ratio, -adv * clipped).mean()
            value_loss = 0.5 * (new_value - returns[rows]).pow(2).mean()
            loss = policy_loss + cfg.vf_coef * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), cfg.max_grad_norm)
            optimizer.step()
            with torch.no_grad():
                approx_kl = ((ratio - 1) - log_ratio).mean()
        kl = approx_kl.item()
        if kl > cfg.target_kl:
            break
    return {"loss": loss.item(), "kl": kl}


def iteration(agent, optimizer, envs, buffers, cfg, log, obs, done):
    """One iteration of PPO. This is what gets compiled."""
    obs, done = collect(agent, envs, buffers, cfg, log, obs, done)
    estimate_advantages(agent, buffers, cfg, obs, done)
    stats = update(agent, optimizer, buffers, cfg)
    return obs, done, stats


@dataclass
class Run:
    """Everything that one training owns."""

    cfg: Config
    agent: Agent
    optimizer: torch.optim.Optimizer
    envs: gym.vector.VectorEnv
    buffers: Buffers
    obs: Tensor
    done: Tensor
    log: list[float] = field(default_factory=list)

    @classmethod
    def start(cls, cfg: Config, seed: int, hosts: str = "process") -> Run:
        """Seed, build and reset. `hosts` of the shards; "inline" has all of them in one process."""
        torch.manual_seed(seed)
        make = partial(make_env, cfg.episode)
        envs = ShardedEnv.split([make] * cfg.num_envs, shards=cfg.shards, hosts=hosts)
        obs_dim, act_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        agent = Agent(obs_dim, act_dim, cfg.hidden)
        optimizer = torch.optim.Adam(agent.parameters(), lr=cfg.lr, eps=1e-5)
        obs = torch.as_tensor(envs.reset(seed=seed)[0], dtype=torch.float32)
        buffers = Buffers(cfg, obs_dim, act_dim)
        return cls(cfg, agent, optimizer, envs, buffers, obs, torch.zeros(cfg.num_envs))

    def advance(self, fn: Callable[..., Any]) -> None:
        """Train for one call of `fn`, which has the signature of `iteration`."""
        objects = (self.agent, self.optimizer, self.envs, self.buffers, self.cfg, self.log)
        self.obs, self.done, _ = fn(*objects, self.obs, self.done)

    def close(self) -> None:
        self.envs.close()


def train(label: str, fn: Callable[..., Any], run: Run, iterations: int, console: Console) -> Curve:
    """Train with a progress bar; the learning curve."""
    steps = run.cfg.num_steps * run.cfg.num_envs
    curve = Curve(steps)
    bar = Progress(
        TextColumn(f"{label:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]:>7,.0f} steps/s  return {task.fields[last]:>6.1f}"),
        console=console,
    )
    start = perf_counter()
    with bar:
        task = bar.add_task(label, total=iterations, rate=0.0, last=float("nan"))
        for i in range(iterations):
            seen = len(run.log)
            run.advance(fn)
            curve.seconds.append(perf_counter() - start)
            curve.returns.append(run.log[seen:])
            if curve.settled is None and getattr(fn, "settled", False):
                curve.settled = curve.seconds[-1]
            last = np.mean(run.log[-run.cfg.num_envs :]) if run.log else float("nan")
            bar.update(task, advance=1, rate=(i + 1) * steps / curve.seconds[-1], last=last)
    return curve


def settle(fast: Any, run: Run, seconds: float) -> None:
    """Train on until the schedule is chosen, but not for longer than that."""
    start = perf_counter()
    while not fast.settled and perf_counter() - start < seconds:
        run.advance(fast)


def with_threads(rollout: int, rest: int) -> Callable[..., Any]:
    """`iteration` with a torch thread count for the rollout and one for everything after it."""

    def run(agent, optimizer, envs, buffers, cfg, log, obs, done):
        torch.set_num_threads(rollout)
        obs, done = collect(agent, envs, buffers, cfg, log, obs, done)
        torch.set_num_threads(rest)
        estimate_advantages(agent, buffers, cfg, obs, done)
        return obs, done, update(agent, optimizer, buffers, cfg)

    return run


def single_core(cfg: Config) -> Callable[[], None]:
    """Advances a training on one core, in this process alone."""
    torch.set_num_threads(1)
    run = Run.start(replace(cfg, shards=1), seed=0, hosts="inline")
    return partial(run.advance, iteration)


def critical_path(cfg: Config, counts: list[int]) -> float:
    """Seconds of an iteration that must follow upon each other, however many cores there are.

    Acting and stepping of one shard alone, step by step; then advantages and update, at their best
    thread count.
    """
    part, chain, tail = replace(cfg, num_envs=-(-cfg.num_envs // cfg.shards), shards=1), [], []
    with closing(Run.start(part, 0, "inline")) as one, closing(Run.start(cfg, 0, "inline")) as run:
        for _ in range(3):
            torch.set_num_threads(1)
            start = perf_counter()
            for _ in range(cfg.num_steps):
                with torch.no_grad():
                    action = Normal(one.agent.actor(one.obs), one.agent.log_std.exp()).sample()
                one.obs = torch.as_tensor(one.envs.step(action.numpy())[0], dtype=torch.float32)
            chain.append(perf_counter() - start)
            for count in counts:
                torch.set_num_threads(count)
                start = perf_counter()
                estimate_advantages(run.agent, run.buffers, cfg, run.obs, run.done)
                update(run.agent, run.optimizer, run.buffers, cfg)
                tail.append(perf_counter() - start)
    return float(np.median(chain)) + min(tail)


def measure(eager: Run, compiled: Run, fast: Any, cfg: Config, effort: Effort) -> tuple[Table, str]:
    """E0, E1 and compiled against each other and against the bound, as trainings that go on."""
    default = torch.get_num_threads()
    counts = sorted({1, default})

    def stepper(run: Run, fn: Callable[..., Any]) -> Callable[[], None]:
        def step() -> None:
            torch.set_num_threads(default)
            run.advance(fn)

        return step

    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, default)
        path = Path(stack.enter_context(TemporaryDirectory())) / "decision.json"
        rose_compiler.Decision(defer=True, rollout_threads=1, update_threads=1).save(path)
        lean = stack.enter_context(closing(rose_compiler.compile(iteration, tune=path)))
        whole = replace(cfg, shards=1)
        plain, other = (
            stack.enter_context(closing(Run.start(whole, 0, "inline"))) for _ in range(2)
        )
        return compare(
            eager=stepper(eager, iteration),
            sequential={
                f"torch threads {r} and {u}": stepper(eager, with_threads(r, u))
                for r in counts
                for u in counts
            },
            compiled=stepper(compiled, fast),
            work={
                "the loop as written": stepper(plain, with_threads(1, 1)),
                "the loop compiled": stepper(other, lean),
            },
            capacity_of=(
                f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})\n"
                f"from ppo_mujoco import Config, single_core; f = single_core({cfg!r})"
            ),
            critical_path=critical_path(cfg, counts),
            steps=cfg.num_steps * cfg.num_envs,
            effort=effort,
        )


def main(argv: list[str] | None = None) -> None:
    """Train eager, train compiled, show what was done and compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=None, help="of each training (60)")
    parser.add_argument("--seed", type=int, default=1, help="the first one")
    parser.add_argument("--seeds", type=int, default=None, help="trainings of either kind (3)")
    parser.add_argument("--out", type=Path, default=Path("out/ppo_mujoco.png"), help="the picture")
    parser.add_argument("--numerics", default="close", help="or bitwise: both learn in step")
    parser.add_argument("--quick", action="store_true", help="small and short: does it run?")
    args = parser.parse_args(argv)
    cfg, effort, iterations, seeds = Config(), Effort(), args.iterations or 60, args.seeds or 3
    if args.quick:
        cfg = replace(cfg, num_envs=8, num_steps=16, hidden=64, minibatch=64, episode=20)
        effort = Effort(2, trial=0.05, capacity_repeats=1, capacity_seconds=0.3, capacity_retries=0)
        iterations, seeds = args.iterations or 12, args.seeds or 1
    console = Console(width=max(100, Console().width))
    console.print(
        f"PPO on HalfCheetah-v5: {cfg.num_envs} environments in {cfg.shards} processes, "
        f"{cfg.num_steps} steps, MLP 2x{cfg.hidden}, {torch.get_num_threads()} torch threads",
        highlight=False,
    )

    fast = rose_compiler.compile(iteration, numerics=args.numerics)
    with closing(fast), ExitStack() as stack:

        def learn(name: str, fn: Callable[..., Any], run: Run, seed: int) -> None:
            curve = train(f"{name}, seed {seed}", fn, run, iterations, console)
            curves.setdefault(name, []).append(curve)

        curves: dict[str, list[Curve]] = {}
        eager = stack.enter_context(closing(Run.start(cfg, args.seed)))
        learn("eager", iteration, eager, args.seed)
        compiled = stack.enter_context(closing(Run.start(cfg, args.seed)))
        learn("compiled", fast, compiled, args.seed)
        with console.status("tuning has not ended yet: training on"):
            settle(fast, compiled, 5.0 if args.quick else 60.0)
        for seed in range(args.seed + 1, args.seed + seeds):
            for name, fn in (("eager", iteration), ("compiled", fast)):
                with closing(Run.start(cfg, seed)) as run:
                    learn(name, fn, run, seed)

        show(fast, console)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        title = (
            f"PPO on HalfCheetah-v5, {cfg.num_envs} environments, mean and range of {seeds} seeds"
        )
        draw(curves, cfg.episode, title, args.out)
        console.rule("steps/s", align="left")
        with console.status("measuring both trainings in alternation"):
            table, notes = measure(eager, compiled, fast, cfg, effort)
        console.print(table)
        console.print(notes, markup=False, highlight=False, soft_wrap=True)
        console.print(f"Learning curves: {args.out}", highlight=False)
        if args.numerics == "close":
            console.print(
                "Curves of a seed part once rounding has grown, as far as those of two seeds do; "
                "with --numerics bitwise they don't."
            )


if __name__ == "__main__":
    main()
