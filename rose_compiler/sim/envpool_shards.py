"""Factories of EnvPool shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EnvPoolFactory:
    """Builds one pool; picklable, so that it may be built in another process."""

    task_id: str
    options: dict[str, Any]

    def __call__(self) -> Any:
        import envpool

        return envpool.make(self.task_id, env_type="gymnasium", **self.options)


def envpool_factories(
    task_id: str, sizes: Sequence[int], seed: int | Sequence[int], options: dict[str, Any]
) -> list[Callable[[], Any]]:
    """One factory for each shard, with the seeds that one large pool would give its environments.

    ``sizes`` are the shards' numbers of environments. One pool gives environment i the seed
    ``seed + i``.
    """
    factories: list[Callable[[], Any]] = []
    offset = 0
    for size in sizes:
        own: Any = seed + offset if isinstance(seed, int) else list(seed[offset : offset + size])
        factories.append(EnvPoolFactory(task_id, {**options, "num_envs": size, "seed": own}))
        offset += size
    return factories
