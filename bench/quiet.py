"""How much of the machine other processes take, so that a trial beside them is not believed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

_PROC = Path("/proc")
#: A process: its number, and when it began, since numbers are used again.
_Key = tuple[int, int]


class Bystanders:
    """Watches the share of all cores that went to processes outside this one's tree.

    Counted in two ways, of which the larger holds. What all cores did (`/proc/stat`) less what this
    tree did has other containers' work in it, and time that the hypervisor kept; but the kernel
    looks who runs a hundred times a second there, and a tree that sleeps and wakes in between is
    counted short, so that its own exact times swallow what others did. What other processes say of
    themselves is exact, and has only those that can be seen. Where there is no `/proc` the share
    is 0.
    """

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Count from here."""
        self._began, self._before = perf_counter(), _Used.now()

    def share(self) -> float:
        """Their share of the cores since the start, 0 to 1."""
        elapsed = (perf_counter() - self._began) * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        now, before = _Used.now(), self._before
        unclaimed = (now.busy - before.busy) - (now.own - before.own)
        seen = now.others_since(before) + now.stolen - before.stolen
        return min(1.0, max(0.0, unclaimed / elapsed, seen / elapsed))


@dataclass(frozen=True)
class _Used:
    """Ticks of CPU time since the machine started: of all cores, of them what the hypervisor kept,
    of each process and the children that it has reaped. ``tree`` is this process's."""

    busy: int
    stolen: int
    by: dict[_Key, tuple[int, int]]
    tree: frozenset[_Key]

    @classmethod
    def now(cls) -> _Used:
        """What was used until here."""
        busy, stolen = _busy_ticks()
        return cls(busy, stolen, *_by_process())

    @property
    def own(self) -> int:
        """Ticks of this process and its descendants, reaped ones included."""
        return sum(sum(self.by[key]) for key in self.tree)

    def others_since(self, before: _Used) -> int:
        """Ticks of other processes since ``before``, of those that began or ended too."""
        ran = reaped = 0
        for key, (used, children) in self.by.items():
            if key not in self.tree:
                used_before, children_before = before.by.get(key, (0, 0))
                ran += used - used_before
                reaped += children - children_before
        # a parent is given all that a child that has ended had ever used
        known = sum(
            sum(used)
            for key, used in before.by.items()
            if key not in before.tree and key not in self.by
        )
        return ran + max(0, reaped - known)


def _busy_ticks() -> tuple[int, int]:
    """Ticks in which some core did something, and how many of them the hypervisor kept."""
    try:
        head = (_PROC / "stat").read_text().partition("\n")[0]
    except OSError:
        return 0, 0
    user, nice, system, _idle, _wait, irq, soft, steal = (int(x) for x in head.split()[1:9])
    return user + nice + system + irq + soft + steal, steal


def _by_process() -> tuple[dict[_Key, tuple[int, int]], frozenset[_Key]]:
    """Ticks of each process, and of its reaped children; which of them are this one's tree."""
    parents: dict[int, int] = {}
    keys: dict[int, _Key] = {}
    used: dict[_Key, tuple[int, int]] = {}
    for entry in _PROC.glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:  # it has just ended
            continue
        pid = int(entry.parent.name)
        # the name before the last parenthesis may hold spaces
        fields = [int(f) for f in text[text.rindex(")") + 4 :].split()]
        parents[pid] = fields[0]
        keys[pid] = pid, fields[18]
        used[keys[pid]] = fields[10] + fields[11], fields[12] + fields[13]
    mine = os.getpid()
    tree = set()
    for pid, key in keys.items():
        at = pid
        while at not in (mine, 0):
            at = parents.get(at, 0)
        if at == mine:
            tree.add(key)
    return used, frozenset(tree)
