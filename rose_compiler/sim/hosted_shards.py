"""Shards of a :class:`ShardedEnv` in hosts: what they have in common, and those in threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from rose_compiler.base import phases
from rose_compiler.runtime.hosts import ProcessHost, ThreadHost, Ticket
from rose_compiler.runtime.hosts.process import abandon_all
from rose_compiler.sim import layout
from rose_compiler.sim.body import Body, Timed, Traits
from rose_compiler.sim.shard_vector import BodyResult
from rose_compiler.sim.shards import BaseShard

#: What a step that was timed tells: when it began and ended (``perf_counter``), its CPU seconds,
#: and how many named phases ended in it.
Told = tuple[float, float, float, int]

#: Seconds to take in an answer that has arrived, though the time to wait for it is over.
TO_READ_S = 0.05


class HostedShard(BaseShard):
    """A shard in a host: steps and resets are submitted, and waited for by their ticket."""

    host: ThreadHost | ProcessHost

    def __init__(self, name: str, traits: Traits, offset: int) -> None:
        super().__init__(name, traits, offset)
        self.native_async = True
        self._ticket: Ticket | None = None
        self._until: float | None = None
        self._again_s: float | None = (
            None  # for what is asked once more of a process that took over
        )
        self._revives = True

    def invoke(self, method: str, *args: Any) -> Any:
        """Call a method of the body in its host."""
        return self.host.call(method, *args)

    def close(self) -> None:
        """Close the environments and end the host."""
        self.host.close()

    @contextmanager
    def within(self, seconds: float, again: float | None = None) -> Iterator[None]:
        """Wait for steps no longer than that from now on, all waits inside the block together, if
        the host is not less patient. An answer that has arrived by then is always taken in.

        A process that takes over has ``again`` seconds, by default as many, for each thing that it
        is asked anew.
        """
        before, until = (self._until, self._again_s), perf_counter() + seconds
        self._until = until if self._until is None else min(self._until, until)
        self._again_s = seconds if again is None else again
        try:
            yield
        finally:
            self._until, self._again_s = before

    @contextmanager
    def settling(self) -> Iterator[None]:
        """Let no process take over from one that ends inside the block: nobody goes on from it."""
        before, self._revives = self._revives, False
        try:
            yield
        finally:
            self._revives = before

    @property
    def is_timed(self) -> bool:
        """Whether steps are timed from now on."""
        raise NotImplementedError

    def timed(self, on: bool) -> None:
        """Let steps from now on be timed, or not; not while one is under way."""
        raise NotImplementedError

    def told(self) -> Told | None:
        """What is known of the last step; None where it was not timed."""
        raise NotImplementedError

    def times(self) -> tuple[float, float, float] | None:
        """When the last step began and ended (``perf_counter``), and its CPU seconds; None where
        it was not timed."""
        told = self.told()
        return None if told is None else told[:3]

    def phases(self) -> list[phases.Ended]:
        """The named phases in the last step, if it was timed; before the next begins."""
        raise NotImplementedError

    def _wait(self) -> Any:
        assert self._ticket is not None
        limit = self.host.timeout
        if self._until is not None:
            left = max(self._until - perf_counter(), TO_READ_S)
            limit = left if limit is None else min(left, limit)
        value = self.host.wait(self._ticket, limit)
        self._ticket = None
        return value

    def _answers(self) -> bool:
        return self.host.usable

    def _under_way(self) -> bool:
        return self._ticket is not None and not self._ticket.done and self.host.usable

    def _begin_reset(self, seed: Any, options: dict[str, Any] | None, mask: Any) -> None:
        self._ticket = self.host.submit("reset", seed, options, mask)


class ThreadShard(HostedShard):
    """A shard in a thread of its own."""

    def __init__(self, name: str, traits: Traits, offset: int, host: ThreadHost) -> None:
        super().__init__(name, traits, offset)
        self.host: ThreadHost = host
        self._body: Body = host.call("itself")
        self._timed = False
        self._told: Timed | None = None

    def batch_wrappers(self, on: bool) -> None:
        """Let the environments' wrappers advance at once from now on, or one by one."""
        self._body.batch_wrappers(on)

    def _begin(self, actions: Any) -> None:
        self._told = None
        method = "timed_step" if self._timed else "step"
        self._ticket = self.host.submit(method, layout.copy(actions))

    def _finish(self) -> BodyResult:
        value: Any = self._wait()
        if isinstance(value, Timed):
            self._told = value
            return value.result
        result: BodyResult = value
        return result

    @property
    def is_timed(self) -> bool:
        """Whether steps are timed from now on."""
        return self._timed

    def timed(self, on: bool) -> None:
        """Let steps from now on be timed, or not; not while one is under way."""
        self._timed, self._told = on, None

    def told(self) -> Told | None:
        """What is known of the last step; None where it was not timed."""
        told = self._told
        return None if told is None else (*told.times, len(told.phases))

    def phases(self) -> list[phases.Ended]:
        """The named phases in the last step, if it was timed."""
        return [] if self._told is None else self._told.phases

    def _finish_reset(self) -> tuple[Any, Any]:
        result: tuple[Any, Any] = self._wait()
        return result


def let_go(shards: Iterable[BaseShard]) -> None:
    """End threads and processes without their results; environments in the caller stay."""
    processes = []
    for shard in shards:
        host = shard.host if isinstance(shard, HostedShard) else None
        if isinstance(host, ThreadHost):
            host.abandon()
        elif host is not None:
            processes.append(host)
    abandon_all(processes)
