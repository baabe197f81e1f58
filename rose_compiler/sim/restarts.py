"""Brings a shard back whose process died or hung, with nothing lost.

Its environments' state is taken between two steps, as often as that costs at most 1% of the time; a
new process starts from the latest one and repeats what was asked since.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

from rose_compiler.base.errors import ConfigError, register
from rose_compiler.base.remarks import Blocker, Remark
from rose_compiler.runtime.hosts.tape import ENDS, LIVES, Tape
from rose_compiler.runtime.hosts.transport import dump_call
from rose_compiler.sim import layout

register(
    "sim-recover",
    ConfigError,
    "a simulator is to recover from the end of a process, and its environments can't hand over "
    "their state",
    "give the environment `get_state()` and `set_state(state)`, or leave `recover=` out",
)


@dataclass(eq=False)
class Asked:
    """One thing that a shard was asked, and whether its answer is still to come.

    ``payload`` is the call as it travels to the process, safe from what becomes of its arguments
    later; a step has copies of its ``actions`` instead, which mostly go through shared memory.
    """

    method: str
    size: int
    payload: bytes = b""
    actions: Any = None
    setting: str | None = None  # the attribute that it sets
    waiting: bool = True


class ShardTape(Tape):
    """What one shard in a process was asked since its state was known."""

    entries: list[Asked]

    def __init__(self, shard: Any, remarks: list[Remark]) -> None:
        super().__init__(shard.name, remarks, "step")
        self._shard = shard
        self._off = False
        self._settings: dict[str, Asked] = {}  # attributes that were set, by name
        self.took(None)  # the state is that of a new process

    def asks(self, method: str, *args: Any) -> Asked:
        """The shard is about to be asked this; its state is taken first where it is time to.

        Raises ``RuntimeFault`` (``host-pickle``) for arguments that can't travel.
        """
        idle = not any(entry.waiting for entry in self.entries)
        if self.entries and idle and not self._off and self.due():
            self._take()
        if method == "step":
            entry = Asked(method, _size(args[0]), actions=layout.copy(args[0]))
        else:
            payload = dump_call(method, args, {})
            setting = args[0] if method == "set_attr" else None
            entry = Asked(method, len(payload), payload, setting=setting)
        if not self._off:
            self.keep(entry, entry.size)
        return entry

    def took(self, state: Any, cost: float | None = None) -> None:
        """This is the state now; what attributes were set to may be no part of it."""
        self._set()
        super().took(state, cost)

    def _forget(self) -> None:
        self._set()
        super()._forget()

    def _set(self) -> None:
        self._settings |= {e.setting: e for e in self.entries if e.setting is not None}

    def drop(self, entry: Asked) -> None:
        """This is not to be repeated: it raised an exception of the environments', or changed
        nothing."""
        if entry in self.entries:  # they are compared by identity
            self.entries.remove(entry)
            self._size -= entry.size

    def _take(self) -> None:
        began = perf_counter()
        self._busy = True
        try:
            state = self._shard.host.call("get_state")
        except ENDS as error:
            self._busy = False
            self.revive(error)
            return  # the earlier state and what was asked since are still known
        except Exception as error:  # what a `get_state` of the user's raises
            self._off = True
            self._forget()
            why = f"{self.name!r} can't be brought back: its state can't be taken, {error!r}"
            blocker = Blocker("hosted-elsewhere", why, "a `get_state` that does not raise")
            self._remarks.append(Remark.from_blocker("hosts", blocker))
            return
        finally:
            self._busy = False
        self.took(state, perf_counter() - began)
        self._lives = LIVES

    def _usable(self) -> bool:
        return bool(self._shard.host.usable)

    def _again(self) -> int:
        self._shard.renew()
        for entry in self._settings.values():
            self._shard.repeat(entry)
        if self._state is not None:
            self._shard.restore(self._state)
        for entry in self.entries:
            self._shard.repeat(entry)
        return len(self.entries)

    def _given_up(self) -> None:
        self._shard.host.kill()


def _size(actions: Any) -> int:
    leaves = actions.values() if isinstance(actions, dict) else [actions]
    return sum(getattr(leaf, "nbytes", 64) for leaf in leaves) + 64
