"""What something in a process was asked since its state was known, to bring it back if it dies or
hangs.

Shared by components (:mod:`rose_compiler.runtime.hosts.reviving`) and shards of simulators
(:mod:`rose_compiler.sim.restarts`): when a state is taken, how much is kept, how often an end is
answered, and what is said of it.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from rose_compiler.base.errors import HostDied, HostTimeout
from rose_compiler.base.remarks import Blocker, Remark

#: What tells of the end of a process: one that hangs is ended at its time limit.
ENDS = (HostDied, HostTimeout)
#: Ends between two states from which one is brought back: a call that ends its process would end
#: the next one too.
LIVES = 3
#: Most of the time that taking states may cost, while less than half of this is kept:
SHARE = 0.01
#: most calls, and most bytes of their arguments and of parameters, that are kept to be repeated.
CALLS = 1 << 14
BYTES = 1 << 29


class Tape:
    """Calls with their sizes, as ``entries``, since ``state``.

    ``name`` is for errors and remarks, which go to ``remarks``; ``until`` says when a state is
    taken again. Whoever derives from it says how to repeat: :meth:`_again`, :meth:`_usable` and
    :meth:`_given_up`.
    """

    def __init__(self, name: str, remarks: list[Remark], until: str) -> None:
        self.name = name
        self.entries: list[Any] = []
        self._remarks = remarks
        self._until = until
        self._size = 0  # of the entries, in bytes
        self._lives = LIVES
        self._failed: str | None = None  # why it is not brought back
        self._told = False  # that the bound was passed
        self._busy = False  # bringing it back, or taking its state: nothing of that is an entry
        self._state: Any = None
        self._started = False  # a state is known
        self._taken_at = 0.0
        self._cost = 0.0

    def due(self) -> bool:
        """Whether a state is to be taken: none is known, the last one was long ago, or much is kept
        already."""
        near = len(self.entries) > CALLS // 2 or self._size > BYTES // 2
        long = perf_counter() - self._taken_at >= self._cost / SHARE
        return not self._started or near or long

    def took(self, state: Any, cost: float | None = None) -> None:
        """This is the state now, every call answered; taking it took ``cost`` seconds."""
        self._state, self._started, self._failed = state, True, None
        self.entries, self._size = [], 0
        self._taken_at = perf_counter()
        if cost is not None:
            self._cost = cost

    def keep(self, entry: Any, size: int) -> None:
        """One more entry; where that is too much, all are let go, and a remark says so."""
        self.entries.append(entry)
        self._size += size
        if len(self.entries) <= CALLS and self._size <= BYTES:
            return
        self._forget()
        why = (
            f"{self.name!r} can't be brought back before the next {self._until}: it was asked more "
            f"since its state was taken than is kept, {CALLS} calls and {BYTES >> 20} MiB of "
            "arguments"
        )
        self._failed = f"rose: {why}"
        if not self._told:
            self._told = True
            blocker = Blocker("hosted-elsewhere", why, "fewer calls, or shorter iterations")
            self._remarks.append(Remark.from_blocker("hosts", blocker))

    def _forget(self) -> None:
        """Nothing of what came before can be brought back."""
        self._started, self._state = False, None
        self.entries, self._size = [], 0

    def revive(self, error: BaseException) -> None:
        """Bring it back in a new process, all calls answered or under way again.

        Raises ``error``, which told of its end, where that can't be.
        """
        if self._usable():
            raise error  # its own, or a call's that an earlier process left behind
        if self._failed is not None:
            error.add_note(self._failed)
        if self._busy or self._lives == 0 or not self._started:
            raise error
        self._lives -= 1
        self._busy = True
        done = False
        try:
            count = self._again()
            done = True
        except Exception as failure:  # what a `set_state` of the user's raises among them
            if not isinstance(failure, ENDS):
                error.add_note(f"rose: it could not be brought back: {failure!r}")
                self._failed = error.__notes__[-1]
            raise error from None
        finally:
            # nor may what Ctrl-C has left half restored answer as if it were the component
            self._busy = False
            if not done:
                self._forget()
                self._lives = 0
                self._given_up()
        why = f"{str(error).splitlines()[0]}; a new process took over, {count} calls were repeated"
        self._remarks.append(Remark("note", "hosts", (), "revived", why))

    def _usable(self) -> bool:
        """Whether its process still answers."""
        raise NotImplementedError

    def _again(self) -> int:
        """Build it anew and repeat the entries; how many calls were repeated."""
        raise NotImplementedError

    def _given_up(self) -> None:
        """It could not be brought back: end what was begun."""
        raise NotImplementedError
