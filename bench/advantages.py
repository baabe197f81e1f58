"""What advantages shard by shard could bring: ``python -m bench.advantages``.

Two shards of unequal steps, in processes of their own, make rollouts; behind the last step come
generalized advantages over all environments. The hand-written alternative computes those of the
first shard, which is through earlier, while the second one's last step still runs. Columns of the
table: an iteration, what the loop of the advantages takes in it as written and as one operation
(``scan``), which is the most that could be hidden, and the ratio of paired iterations with a 95%
interval. Bits of both are compared.
"""

from __future__ import annotations

import argparse
import math
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
from torch import Tensor

import rose_compiler
from bench.measure import abba, bootstrap, ratio

STEPS = 64
#: Seconds that a step of each shard keeps its process busy.
STEP_S = (0.002, 0.006)
#: Environments of each shard: few, where what calling costs dominates, and many.
SHAPES = ((48, 16), (6144, 2048))
GAMMA, LAMBDA = 0.99, 0.95


def step(seconds: float) -> None:
    """A simulator's step: its process is busy."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        math.sqrt(2.0)


def advantages(
    rewards: Tensor, values: Tensor, dones: Tensor, following: Tensor, found: Tensor
) -> Tensor:
    """Generalized advantage estimates (Schulman et al. 2016, equation 16); time first."""
    last = torch.zeros_like(following)
    for t in reversed(range(STEPS)):
        alive = 1.0 - dones[t]
        delta = rewards[t] + GAMMA * following * alive - values[t]
        last = delta + GAMMA * LAMBDA * alive * last
        found[t] = last
        following = values[t]
    return last


class Rollouts:
    """Two shards and what is collected of them: buffers of shape (steps, environments)."""

    def __init__(self, envs: tuple[int, int]) -> None:
        torch.manual_seed(0)
        self.columns = (slice(0, envs[0]), slice(envs[0], sum(envs)))
        self.made = torch.randn(3, STEPS, sum(envs))
        self.rewards, self.values, self.dones, self.found = torch.zeros(4, STEPS, sum(envs))
        self.workers = [ProcessPoolExecutor(1, get_context("spawn")) for _ in envs]
        self.policy = torch.nn.Linear(1, 1)

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.shutdown()

    def estimate(self, columns: slice) -> None:
        """The advantages of some environments."""
        rewards, values, dones = (b[:, columns] for b in (self.rewards, self.values, self.dones))
        advantages(rewards, values, dones, self.made[1, -1, columns], self.found[:, columns])

    @torch.no_grad()
    def iteration(self, by_shard: bool) -> None:
        """One rollout and its advantages, ``by_shard`` as the shards finish."""
        for t in range(STEPS):
            self.policy(self.made[0, t, :, None])
            running = [w.submit(step, s) for w, s in zip(self.workers, STEP_S, strict=True)]
            for columns, one in zip(self.columns, running, strict=True):
                one.result()
                for to, new in zip((self.rewards, self.values), self.made[:2], strict=True):
                    to[t, columns] = new[t, columns]
                self.dones[t, columns] = (self.made[2, t, columns] > 1.6).float()
                if by_shard and t == STEPS - 1:
                    self.estimate(columns)
        if not by_shard:
            self.estimate(slice(None))


def timed(rollouts: Rollouts, fn: object, repeats: int = 20) -> float:
    """Milliseconds that the advantages of all environments take."""
    given = (rollouts.rewards, rollouts.values, rollouts.dones, rollouts.made[1, -1])
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        fn(*given, rollouts.found)  # type: ignore[operator]
        taken.append(1e3 * (time.perf_counter() - begin))
    return sorted(taken)[repeats // 2]


def row(envs: tuple[int, int], pairs: int) -> str:
    """One line of the table."""
    rollouts = Rollouts(envs)
    try:
        bits = []
        for by_shard in (False, True):
            rollouts.found.zero_()
            rollouts.iteration(by_shard)
            bits.append(rollouts.found.clone())
        assert torch.equal(*bits)
        variants = {str(k): partial(rollouts.iteration, k) for k in (False, True)}
        scores = abba(variants, pairs, 0.0).seconds
        fast = rose_compiler.compile(advantages, numerics="bitwise", tune=False)
        written, scanned = timed(rollouts, advantages), timed(rollouts, fast, 200)
        whole = 1e3 * bootstrap(scores["False"]).median
        gain = ratio(scores["False"], scores["True"])
        return (
            f"{envs[0]:5d} + {envs[1]:<5d} {whole:9.1f} ms "
            f"{written:8.2f} ms ({written / whole:5.1%}) "
            f"{scanned:8.3f} ms ({scanned / whole:6.2%})  {gain!s:>24}x"
        )
    finally:
        rollouts.close()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m bench.advantages")
    parser.add_argument("--pairs", type=int, default=9)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    print(f"{'environments':>13} {'iteration':>12} {'as written':>19} {'scan':>21} {'ratio':>21}")
    for envs in SHAPES:
        print(row(envs, pairs), flush=True)


if __name__ == "__main__":
    main()
