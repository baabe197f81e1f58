"""Round trips to the hosts of a component: ``python -m bench.handoff``.

Medians and 99th percentiles in µs of an empty call, and of the step of a simulator with one
environment that does nothing, so that what is measured is the hand-off.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from rose_compiler.runtime.hosts import InlineHost, ProcessHost, ThreadHost
from rose_compiler.runtime.hosts.making import hosted
from rose_compiler.sim import ShardedEnv
from rose_compiler.sim.shards import BaseShard


class Nothing:
    """A component with an empty method."""

    def call(self) -> None:
        """Return at once."""


class Echo:
    """A component that gives back what it was given, and takes parameters."""

    def call(self, value: Any = None) -> Any:
        """The argument."""
        return value

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep nothing."""


class Still(gymnasium.Env):
    """An environment of 17 observations and 6 actions that never moves."""

    def __init__(self, infos: bool = False) -> None:
        self.observation_space = spaces.Box(-1, 1, (17,), np.float64)
        self.action_space = spaces.Box(-1, 1, (6,), np.float32)
        self.infos = {name: np.float64(1.0) for name in "abcd"} if infos else {}
        self.obs = np.zeros(17)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """The one observation there is."""
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Nothing happens."""
        return self.obs, 0.0, False, False, self.infos


def measure(call: Callable[[], Any], count: int = 4000) -> str:
    """Median and 99th percentile of a call's duration in µs."""
    for _ in range(200):
        call()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    times.sort()
    return f"median {statistics.median(times):7.1f} µs   p99 {times[int(count * 0.99)]:7.1f} µs"


def arrays_there_and_back() -> None:
    """Arrays to a component and back: by shared memory, pickled, and as published parameters."""
    shared = hosted(Echo, name="shared")
    pickled = ProcessHost(Echo, name="pickled")
    for count in (17, 32 * 17, 1 << 16, 1 << 20):
        array = np.zeros(count, np.float32)
        size = f"{array.nbytes / 1024:.4g} KiB"
        rounds = 2000 if count < 1 << 16 else 200
        by_memory = measure(partial(shared.call, array), rounds)
        by_pickle = measure(partial(pickled.call, "call", array), rounds)

        def publish_and_call(array: np.ndarray = array) -> None:
            shared.publish({"w": array})
            shared.call()

        publish = measure(publish_and_call, rounds)
        print(f"{'hosted, shared memory':26} {size:12} {by_memory}")
        print(f"{'ProcessHost, pickled':26} {size:12} {by_pickle}")
        print(f"{'hosted, published':26} {size:12} {publish}")
    shared.close()
    pickled.close()


def main() -> None:
    """Print the table."""
    for kind in (InlineHost, ThreadHost, ProcessHost):
        host = kind(Nothing)
        print(f"{kind.__name__:26} empty call   {measure(partial(host.call, 'call'))}")
        host.close()
    arrays_there_and_back()
    for infos in (False, True):
        what = "4 infos" if infos else "no infos"
        actions = np.zeros((1, 6), np.float32)

        def make(infos: bool = infos) -> gymnasium.Env:
            return Still(infos)

        plain = SyncVectorEnv([make])
        plain.reset()
        print(f"{'SyncVectorEnv, 1 env':26} {what:12} {measure(partial(plain.step, actions))}")
        for hosts in ("inline", "thread", "process"):
            env = ShardedEnv([make], hosts=hosts)
            env.reset()
            text = measure(partial(env.step, actions))
            print(f"{'ShardedEnv, 1 env, ' + hosts:26} {what:12} {text}")
            if hosts == "process":
                shard = env.shards()[0]

                def step_by_itself(shard: BaseShard = shard, actions: Any = actions) -> None:
                    shard.step_async(actions)
                    shard.step_wait()

                payload = measure(step_by_itself)
                print(f"{'  its shard alone':26} {what:12} {payload}")
            env.close()


if __name__ == "__main__":
    main()
