"""What a component was asked, so that a new process can take the place of one that died or hung.

A stateless component only has to be asked again what it had not answered. Another one, made with
``recover=True`` and with ``get_state`` and ``set_state``, gets its state of the latest boundary
between iterations back, and is then asked everything again that it was asked since. Answers that
were handed out already are not handed out twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rose_compiler.base.errors import HostTimeout
from rose_compiler.base.remarks import Blocker, Remark
from rose_compiler.runtime.hosts import arrays, parameters
from rose_compiler.runtime.hosts.pending import Pending
from rose_compiler.runtime.hosts.tape import ENDS, LIVES, Tape


@dataclass(frozen=True)
class Call:
    """A call as it travels: its arrays apart, like ``layouts``."""

    method: str
    blob: bytes
    layouts: tuple[arrays.Layout, ...]


@dataclass
class Entry:
    """A call that was issued, with its arrays; or, without one, parameters that were published,
    and their version."""

    values: Any
    size: int
    call: Call | None = None
    pending: Pending | None = None
    version: int = 0


class Journal(Tape):
    """Brings one component back. ``stateful``: whether its state has to be taken and put back."""

    entries: list[Entry]

    def __init__(self, component: Any, stateful: bool) -> None:
        super().__init__(component.name, component.rose_remarks, "iteration")
        self._component = component
        self._stateful = stateful
        self._started = not stateful
        self._published: dict[str, Any] | None = None
        self._version = 0
        self._waiting: list[Entry] = []  # calls that had no answer yet
        self._given: Any = None
        self._limit: float | None = None  # of calls that are asked again, as of those that hung

    # -- noting ----------------------------------------------------------------------------------

    def boundary(self) -> None:
        """An iteration begins: take the component's state, unless that was done a moment ago."""
        self._lives = LIVES
        if not self._stateful:
            self._failed = None
        if not self._stateful or self._busy:
            return
        if not self.due():
            return
        began = perf_counter()
        component = self._component
        self._busy = True
        try:
            if not component.rose_offers("get_state", "set_state"):
                self._useless()
                return
            state = component.rose_now("get_state")
        except ENDS as error:
            self._busy = False
            # a `get_state` that hangs is not asked for again soon
            self._cost = max(self._cost, perf_counter() - began)
            self.revive(error)
            return  # the earlier state and what was asked since are still known
        finally:
            self._busy = False
        self._taken(state, perf_counter() - began)

    def moved(self, state: Any) -> None:
        """The component has gone to another process with this state."""
        if self._stateful and self._started:
            self._taken(state)

    def _taken(self, state: Any, cost: float | None = None) -> None:
        """This is the state now, every call answered."""
        published = [entry.values for entry in self.entries if entry.call is None]
        if published:
            self._published = published[-1]
        elif not self._started:
            self._published = _parameters(self._component)
        self._version = self._component.version
        self._waiting = []
        self.took(state, cost)

    def issued(self, call: Call, found: Sequence[Any], pending: Pending) -> None:
        """A call was issued with these arrays."""
        if self._stateful and self._started and not self._busy:
            for entry in self._waiting:
                if entry.pending is not None and entry.pending.done:
                    entry.pending = None  # and its result with it
            size = len(call.blob) + arrays.room(call.layouts)
            entry = Entry([copied(array) for array in found], size, call, pending)
            self._waiting = [one for one in self._waiting if one.pending is not None] + [entry]
            self.keep(entry, size)

    def published(self, state: dict[str, Any], version: int, size: int) -> None:
        """Parameters were published: ``size`` bytes."""
        if self._stateful and self._started and not self._busy:
            if self.entries and self.entries[-1].call is None:
                self._size -= self.entries.pop().size  # no call has had those
            values = {name: copied(value) for name, value in state.items()}
            self.keep(Entry(values, size, version=version), size)

    def released(self) -> None:
        """No iterations any more: what was kept is let go."""
        if self._started:
            self._forget()

    def forget(self) -> None:
        """Another beginning: nothing of what came before can be brought back."""
        self._forget()
        self._lives, self._failed = LIVES, None

    def _forget(self) -> None:
        super()._forget()
        self._started = not self._stateful
        self._published, self._waiting = None, []

    def _useless(self) -> None:
        why = f"{self._component.name!r} can't be brought back after the end of its process"
        allow = "`get_state` and `set_state` on the component, or `stateless=True` if it has none"
        blocker = Blocker("hosted-elsewhere", why, allow)
        self._component.rose_remarks.append(Remark.from_blocker("hosts", blocker))
        self._component._journal = None

    # -- bringing it back ------------------------------------------------------------------------

    def revive(self, error: BaseException, limit: float | None = None) -> None:
        """Bring it back in a new process; what had no answer is given ``limit`` seconds there, or
        the component's own limit.

        Raises ``error`` where that can't be, where it hung as it was built, and where nobody waits
        for it any more since a fault has ended the iteration: whoever calls it next brings it back.
        """
        component = self._component
        if isinstance(error, HostTimeout) and (
            component.until is not None or not component._host.built
        ):
            raise error
        if not self._busy:
            self._limit = limit
        super().revive(error)

    def _usable(self) -> bool:
        return bool(self._component._host.usable)

    def _again(self) -> int:
        """Every call raises, where this fails, of a component with state until ``restart()``, of a
        stateless one until the next iteration."""
        self._given = self._component._published, self._component._version
        return self._repeat_all() if self._stateful else self._ask_again()

    def _given_up(self) -> None:
        self._component._published, self._component._version = self._given
        self._component._end()

    def _ask_again(self) -> int:
        component = self._component
        left = _unanswered(component)
        # what was written for them is still there, whatever the caller has done since
        values = [component._memory.written(one.place, one.call.layouts) for one in left]
        component.rose_replace()
        for pending, given in zip(left, values, strict=True):
            again = self._repeat(pending.call, given, pending.version, self._limit)
            pending.adopt(again)
        return len(left)

    def _repeat_all(self) -> int:
        component = self._component
        _unanswered(component)
        component._end()
        component._published, component._version = None, self._version
        component._open()
        if self._published is not None:
            component._version -= 1
            component.publish(self._published)
        component.rose_now("set_state", self._state)
        calls = 0
        for entry in self.entries:
            if entry.call is None:
                component._version = entry.version - 1
                component.publish(entry.values)
                continue
            calls += 1
            waiting = entry.pending
            if waiting is not None and waiting.done:
                waiting = None
            limit = None if waiting is None else self._limit
            done = self._repeat(entry.call, entry.values, component.version, limit)
            if waiting is not None:
                waiting.adopt(done)
        return calls

    def _repeat(self, call: Call, values: list[Any], version: int, limit: float | None) -> Pending:
        pending: Pending = self._component._issue(call, values, values, version)
        pending.collect(limit)
        error = pending.error
        left = isinstance(error, HostTimeout) and self._component.until is not None
        if isinstance(error, ENDS) and not left and not self._component._host.usable:
            raise error  # but not where a fault has left it while it was built: nobody waits for it
        return pending


def _unanswered(component: Any) -> list[Pending]:
    """Calls that a process can't answer any more, in the order they were issued."""
    left = [one for one in component._places if one is not None and not one.done]
    for pending in left:
        if pending.answered:  # before the process ended
            pending.collect()
    return sorted((one for one in left if not one.done), key=lambda one: one.number)


def _parameters(component: Any) -> dict[str, Any] | None:
    """Copies of what was published last."""
    if component._published is None:
        return None
    names, layouts, memory = component._published
    values = parameters.stored(memory, component.version, layouts)
    return dict(zip(names, values, strict=True))


def copied(array: Any) -> Any:
    """The values of an array or tensor, apart from it."""
    return array.detach().clone() if hasattr(array, "detach") else array.copy()
