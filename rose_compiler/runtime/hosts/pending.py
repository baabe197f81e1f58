"""Calls of hosted components that have begun and are not answered yet."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from rose_compiler.base.phases import Ended
from rose_compiler.runtime.hosts.host import Ticket, within
from rose_compiler.runtime.hosts.tape import ENDS

_state = threading.local()


class Pending:
    """A call under way in a host. ``version`` is that of the parameters it was issued with."""

    __slots__ = (
        "_hosted",
        "_ticket",
        "call",
        "done",
        "error",
        "held",
        "phases",
        "place",
        "times",
        "value",
        "version",
    )

    def __init__(
        self, of: Any, ticket: Ticket, place: int, version: int, held: Any, call: Any = None
    ) -> None:
        self._hosted = of
        self._ticket = ticket
        self.place = place
        self.call = call  # as it travels, for a process that takes over
        self.version = version
        self.held: Any = held  # what the other side may still read
        self.done = False
        self.value: Any = None
        self.error: BaseException | None = None
        #: When it ran there (start, end, by ``perf_counter``) and its CPU time in seconds.
        self.times: tuple[float, float, float] | None = None
        #: The phases in it, where they were wanted.
        self.phases: list[Ended] = []

    @property
    def what(self) -> str:
        """The name of the method."""
        return self._ticket.what

    @property
    def number(self) -> int:
        """Counts up with every call of one host."""
        return self._ticket.seq

    @property
    def answered(self) -> bool:
        """Whether its result has arrived, and is only to be taken in."""
        return self._ticket.done and self._ticket.error is None

    def adopt(self, other: Pending) -> None:
        """Take the answer of the same call, repeated elsewhere."""
        self.value, self.error = other.value, other.error
        self.times, self.phases = other.times, other.phases
        self.done, self.held = True, None

    @property
    def timeout(self) -> float | None:
        """Seconds that its host waits for an answer."""
        limit: float | None = self._hosted.timeout
        return limit

    def within(self, seconds: float | None) -> AbstractContextManager[None]:
        """Let all that its host waits for inside the block take so long and no longer: a component
        that is still being built too, and one that is built anew."""
        return within(self._hosted, seconds)

    def collect(self, timeout: float | None = None) -> None:
        """Take the answer in, a result or an exception, waiting for it."""
        if self.done:
            return
        try:
            self.value = self._hosted._answer(self, self._ticket, self.place, timeout)
        except ENDS as error:
            self.error = error
            # a process that takes over answers, as fast as this one should have: see `adopt`
            self._hosted.rose_revived(error, timeout)
        except Exception as error:  # the component's own, kept for who asks for the result
            self.error = error
        self.done = True
        self.held = None

    def drop(self) -> None:
        """Its host has ended: take the answer if it had come, else what ended the host."""
        if self.done:
            return
        try:
            self.value = self._hosted._answer(self, self._ticket, self.place, 0.0)
        except Exception as error:  # as in `collect`, but nothing is repeated
            self.error = error
        self.done, self.held = True, None

    def result(self, timeout: float | None = None) -> Any:
        """The result; raises what the call raised, ``HostDied`` or ``HostTimeout``."""
        self.collect(timeout)
        if self.error is not None:
            raise self.error
        return self.value


def deferring() -> bool:
    """Whether this thread begins calls without waiting for them."""
    return getattr(_state, "deferring", False)


def begin(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a function that calls a hosted component once: the call is begun and not waited for.

    Its result is the :class:`Pending` call, or a value where nothing was left to wait for.
    """
    _state.deferring = True
    try:
        return function(*args)
    finally:
        _state.deferring = False
