"""Calls as bytes: their description once, then its number."""

from __future__ import annotations

import pickle

from rose_compiler.base import phases
from rose_compiler.runtime.hosts import served
from rose_compiler.runtime.hosts.reviving import Call

#: Descriptions of calls that a worker keeps: calls like one of them are sent as a number.
_KEPT = 256
#: Bytes of a description that is kept: a longer one is mostly values, which differ each time.
_LONGEST = 1 << 12


class Numbering:
    """The caller's numbers of the calls that one worker knows; :class:`served.Served` has them
    from here."""

    def __init__(self) -> None:
        self._known: dict[Call, int] = {}

    def payload(self, call: Call, place: int, version: int) -> bytes:
        """What is sent for a call whose arrays lie in ``place``, to run with a version of the
        parameters. Who has sent it says so by :meth:`sent`."""
        number = self._known.get(call)
        how, rest = served.KNOWN, b""
        if number is None:
            number = len(self._known)
            how, rest = served.ONCE, pickle.dumps((call.method, call.blob, call.layouts))
            if self._keeps(call):
                how = served.FULL
        return served.CALL.pack(number, place, how, phases.wanted(), version) + rest

    def sent(self, call: Call) -> None:
        """The worker has the description of this call, or will have it before any that follows."""
        if call not in self._known and self._keeps(call):
            self._known[call] = len(self._known)

    def _keeps(self, call: Call) -> bool:
        return len(self._known) < _KEPT and len(call.blob) <= _LONGEST
