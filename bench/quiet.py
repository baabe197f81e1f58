"""How much of the machine other processes take, so that a trial beside them is not believed."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

_PROC = Path("/proc")


class Bystanders:
    """Watches the share of all cores that went to processes outside this one's tree.

    Time that the hypervisor kept counts too. Where there is no `/proc` the share is 0.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Count from here."""
        self._began = perf_counter()
        self._busy, self._own = _busy_ticks(), _own_ticks()

    def share(self) -> float:
        """Their share of the cores since the start, 0 to 1."""
        elapsed = (perf_counter() - self._began) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        theirs = (_busy_ticks() - self._busy) - (_own_ticks() - self._own)
        return min(1.0, max(0.0, theirs / elapsed))


def _busy_ticks() -> int:
    try:
        head = (_PROC / "stat").read_text().partition("\n")[0]
    except OSError:
        return 0
    user, nice, system, _idle, _wait, irq, soft, steal = (int(x) for x in head.split()[1:9])
    return user + nice + system + irq + soft + steal


def _own_ticks() -> int:
    """Ticks of this process and its descendants, reaped ones included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:  # it has just ended
            continue
        pid = int(entry.parent.name)
        # the name before the last parenthesis may hold spaces
        fields = text[text.rindex(")") + 2 :].split()
        parents[pid] = int(fields[1])
        ticks[pid] = sum(int(x) for x in fields[11:15])
    mine = os.getpid()
    total = 0
    for pid, used in ticks.items():
        at = pid
        while at not in (mine, 0):
            at = parents.get(at, 0)
        if at == mine:
            total += used
    return total
