"""How long a simulator's steps may take in hosts, and how long they took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rose_compiler.base import phases
from rose_compiler.sim.hosted_shards import HostedShard, Told
from rose_compiler.sim.shards import BaseShard


class HostedSteps:
    """Limits and times of the steps of all shards, of those that live in threads or processes.

    The part of a :class:`ShardedEnv` that compiled loops ask; shards in the caller's thread have
    none of it.
    """

    _shards: list[BaseShard]

    @contextmanager
    def within(self, seconds: float, again: float | None = None) -> Iterator[None]:
        """Wait for the shards' steps no longer than that from now on inside the block, for all of
        them together, where they live in threads or processes. A process that takes over has
        ``again`` seconds, by default as many, for each thing that it is asked anew."""
        with ExitStack() as limits:
            for shard in self._shards:
                if isinstance(shard, HostedShard):
                    limits.enter_context(shard.within(seconds, again))
            yield

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Let no process take over from a shard's that ends inside the block."""
        with ExitStack() as held:
            for shard in self._shards:
                if isinstance(shard, HostedShard):
                    held.enter_context(shard.settling())
            yield

    def timed(self, on: bool) -> None:
        """Let the shards in threads and processes time their steps from now on, or not; not while
        one is under way."""
        for shard in self._shards:
            if isinstance(shard, HostedShard):
                shard.timed(on)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Let the shards in threads and processes time the step inside the block; after it they do
        what they did before, however it ended."""
        before = [(s, s.is_timed) for s in self._shards if isinstance(s, HostedShard)]
        self.timed(True)
        try:
            yield
        finally:
            for shard, on in before:
                shard.timed(on)

    def times(self) -> tuple[float, float, float] | None:
        """When the first shard began the last step and the last one ended it (``perf_counter``),
        and the CPU seconds of all; None unless all of them were timed."""
        told = self.told()
        return None if told is None else told[:3]

    def told(self) -> Told | None:
        """:meth:`times` of the last step, and how many named phases ended in it."""
        told = [shard.told() for shard in self._shards if isinstance(shard, HostedShard)]
        known = [one for one in told if one is not None]
        if len(known) < len(self._shards):
            return None
        starts, ends, cpu, named = zip(*known, strict=True)
        return min(starts), max(ends), sum(cpu), sum(named)

    def phases(self) -> list[phases.Ended]:
        """The named phases in the last step, if it was timed; before the next begins."""
        hosted = (s for s in self._shards if isinstance(s, HostedShard))
        return [ended for shard in hosted for ended in shard.phases()]
