"""Wrappers of environments at once against one by one: ``python -m bench.wrappers``.

HalfCheetah with the usual wrappers (bench/envs.py) in gymnasium's ``SyncVectorEnv``, stepped as it
is and with its wrappers advancing all environments at once, as compiled loops let them. Before
anything is timed, both are stepped with the same actions, and observations, rewards and ends of
episodes must agree bit for bit.
"""

from __future__ import annotations

import argparse

import numpy as np
from gymnasium.vector import SyncVectorEnv

from bench.envs import ACT, make_env
from bench.measure import abba, bootstrap, machine, ratio
from rose_compiler.sim import batching, quiet_mujoco

COUNTS = (2, 8, 32)
CHECKED = 200


def row(count: int, pairs: int, seconds: float) -> str:
    """One line of the table, for so many environments."""
    with quiet_mujoco():
        plain, lent = (SyncVectorEnv([make_env] * count) for _ in range(2))
    switch = batching(lent)
    ((names, why, _),) = switch.batchable()
    if not names:
        return f"{count:12d}   {why}"
    switch.batch_wrappers(True)
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1.5, 1.5, (CHECKED, count, ACT)).astype(np.float32)
    for envs in (plain, lent):
        envs.reset(seed=1)
    for action in actions:
        pair = zip(plain.step(action)[:4], lent.step(action)[:4], strict=True)
        assert all(a.tobytes() == b.tobytes() for a, b in pair), "the bits differ"
    variants = {
        "one by one": lambda: plain.step(actions[0]),
        "at once": lambda: lent.step(actions[0]),
    }
    scores = abba(variants, pairs, seconds)
    slow, fast = (scores.seconds[name] for name in variants)
    one, all_ = (1e6 * bootstrap(s).median / count for s in (slow, fast))
    for envs in (plain, lent):
        envs.close()
    noisy = f"noisy {scores.noisy}/{2 * pairs}"
    return f"{count:12d} {one:13.1f} {all_:13.1f}   {ratio(slow, fast)!s:>20}   {noisy}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="trials of each variant")
    parser.add_argument("--seconds", type=float, default=0.5, help="least length of a trial")
    chosen = parser.parse_args()
    print(machine())
    print("us a step and environment; all results have the same bits")
    print(f"{'environments':>12} {'one by one':>13} {'at once':>13}   {'times as fast':>20}")
    for count in COUNTS:
        print(row(count, chosen.pairs, chosen.seconds), flush=True)


if __name__ == "__main__":
    main()
