"""Iterative modulo scheduling of one loop body over lanes, on plain numbers.

Rau, "Iterative modulo scheduling: an algorithm for software pipelining loops" (1994). Every trip
does the same, ``interval`` ticks behind the one before it. An operation starts at a fixed tick of
its trip; what keeps a resource busy does so modulo the interval. The interval is searched upwards
from what resources (ResMII) and recurrences (RecMII) allow at best.

Here a resource is a lane that does one operation at a time, the coordinator's (the empty name)
among them. An operation that runs on another lane also takes the coordinator ``submit`` ticks to be
handed over, and begins ``submit + launch`` ticks after its start; its lane is free until then.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import networkx as nx

from rose_compiler.ir.cycles import max_ratio_cycle

#: The lane of the coordinator.
COORDINATOR = ""
#: Operations that may be placed, as a multiple of all there are, before a longer interval is tried.
_BUDGET = 12
#: By what share of itself the interval grows from one attempt to the next.
_STEP = 1 / 64


@dataclass(frozen=True)
class Operation:
    """One operation: the ticks it takes, and the lanes that may run it, the preferred one first."""

    name: str
    length: int
    lanes: tuple[str, ...] = (COORDINATOR,)


@dataclass(frozen=True)
class Wait:
    """``dst``, ``distance`` trips later than ``src``, starts no sooner than that has ended."""

    src: str
    dst: str
    distance: int = 0


@dataclass(frozen=True)
class Hand:
    """What handing an operation to another lane takes: the coordinator's ticks, and those until it
    begins there."""

    submit: int = 0
    launch: int = 0


@dataclass(frozen=True)
class Recurrence:
    """The cycle of waits that sets RecMII: its operations in order, its ticks and its distance."""

    names: tuple[str, ...]
    length: int
    distance: int

    @property
    def ticks(self) -> int:
        """Ticks a trip, rounded up."""
        return -(-self.length // self.distance)


@dataclass(frozen=True)
class Least:
    """The least interval: ``resources`` has the ticks a trip of what every placement fills, by name
    (a lane, ``"lanes"`` for all of them together, an operation for one that runs on one lane)."""

    resources: Mapping[str, int]
    recurrence: Recurrence | None = None

    @property
    def res_mii(self) -> int:
        """ResMII."""
        return max(self.resources.values(), default=0)

    @property
    def rec_mii(self) -> int:
        """RecMII."""
        return 0 if self.recurrence is None else self.recurrence.ticks

    @property
    def ticks(self) -> int:
        """The larger one, and a tick at least."""
        return max(1, self.res_mii, self.rec_mii)


@dataclass(frozen=True)
class Placement:
    """A schedule: when each operation of a trip starts, and on which lane."""

    interval: int
    start: Mapping[str, int]
    lane: Mapping[str, str]
    waits: Sequence[Wait] = field(repr=False, default=())

    def stage(self, name: str) -> int:
        """How many trips later than its own an operation is issued."""
        return self.start[name] // self.interval

    @property
    def depth(self) -> int:
        """Over how many further trips one trip spreads."""
        return max(map(self.stage, self.start), default=0)

    @property
    def order(self) -> tuple[str, ...]:
        """All operations as one trip of the steady state issues them: by their ticks, and what a
        dependence joins at one tick behind what it waits for."""
        rank = {name: k for k, name in enumerate(self.start)}
        graph: nx.DiGraph = nx.DiGraph()
        graph.add_nodes_from(self.start)
        for w in self.waits:
            if w.distance + self.stage(w.dst) == self.stage(w.src) and w.src != w.dst:
                graph.add_edge(w.src, w.dst)
        return tuple(
            nx.lexicographical_topological_sort(
                graph, lambda n: (self.start[n] % self.interval, rank[n])
            )
        )


def least_interval(
    operations: Sequence[Operation], waits: Sequence[Wait], hand: Hand = Hand()
) -> Least:
    """What no schedule can beat.

    Raises:
        ValueError: when a cycle of waits has no distance, so that no trip can ever be done.
    """
    same: nx.DiGraph = nx.DiGraph((w.src, w.dst) for w in waits if w.distance == 0)
    if not nx.is_directed_acyclic_graph(same):
        raise ValueError("operations of one trip wait for each other")
    ticks: dict[str, int] = defaultdict(int)
    free: list[Operation] = []
    for op in operations:
        if op.lanes == (COORDINATOR,):
            ticks[COORDINATOR] += op.length
        elif len(op.lanes) == 1:
            ticks[COORDINATOR] += hand.submit
            ticks[op.lanes[0]] += op.length
        else:
            free.append(op)
    if free:
        longest = max(free, key=lambda op: op.length)
        ticks[longest.name] = max(ticks.get(longest.name, 0), longest.length)
        lanes = {lane for op in free for lane in op.lanes}
        total = sum(ticks[lane] for lane in lanes) + sum(op.length for op in free)
        ticks["lanes"] = -(-total // len(lanes))
    took = {op.name: _shortest(op, hand) for op in operations}
    found = max_ratio_cycle([(w.src, w.dst, w.distance) for w in waits], took.__getitem__)
    cycle = None
    if found is not None and found[1] > 0:
        names, length, distance = found
        rank = {op.name: k for k, op in enumerate(operations)}
        lead = min(range(len(names)), key=lambda k: rank[names[k]])
        named = (*names[lead:], *names[:lead])
        cycle = Recurrence(tuple(n for n in named if took[n]), int(length), distance)
    return Least({name: t for name, t in ticks.items() if t}, cycle)


def _shortest(op: Operation, hand: Hand) -> int:
    """The ticks from an operation's start to its end, on the lane where that is soonest."""
    return min(_took(op, lane, hand) for lane in op.lanes)


def _took(op: Operation, lane: str, hand: Hand) -> int:
    return op.length + (hand.submit + hand.launch if lane != COORDINATOR else 0)


def modulo_schedule(
    operations: Sequence[Operation],
    waits: Sequence[Wait],
    hand: Hand = Hand(),
    *,
    most: int | None = None,
) -> Placement | None:
    """A schedule of the least interval that the search finds, at most ``most`` ticks, or ``None``.

    Left out, ``most`` is what all operations take one after the other.

    Raises:
        ValueError: as :func:`least_interval`.
    """
    least = least_interval(operations, waits, hand)
    if most is None:
        one = sum(max(_took(op, lane, hand) for lane in op.lanes) for op in operations)
        most = max(1, one)
    interval = least.ticks
    while interval <= most:
        found = _Attempt(operations, waits, hand, interval).run()
        if found is not None:
            return found
        interval += max(1, int(interval * _STEP))
    return None


class _Attempt:
    """One attempt at one interval."""

    def __init__(
        self,
        operations: Sequence[Operation],
        waits: Sequence[Wait],
        hand: Hand,
        interval: int,
    ) -> None:
        self.operations = {op.name: op for op in operations}
        self.waits, self.hand, self.interval = tuple(waits), hand, interval
        self.into: dict[str, list[Wait]] = defaultdict(list)
        self.out: dict[str, list[Wait]] = defaultdict(list)
        for w in waits:
            self.into[w.dst].append(w)
            self.out[w.src].append(w)
        self.start: dict[str, int] = {}
        self.lane: dict[str, str] = {}
        self.last: dict[str, int] = {}  # where an operation stood before it was put out
        # by lane: from which tick on an operation keeps it busy, and for how many
        self.busy: dict[str, dict[str, tuple[int, int]]] = defaultdict(dict)

    def run(self) -> Placement | None:
        height = self._heights()
        if height is None:
            return None
        rank = {name: k for k, name in enumerate(self.operations)}
        queue = [(-height[n], rank[n], n) for n in self.operations]
        heapq.heapify(queue)
        budget = _BUDGET * len(self.operations)
        while queue:
            _, _, name = heapq.heappop(queue)
            if name in self.start:
                continue
            budget -= 1
            if budget < 0:
                return None
            for other in self._place(name):
                heapq.heappush(queue, (-height[other], rank[other], other))
        least = min(self.start.values(), default=0) // self.interval * self.interval
        start = {n: self.start[n] - least for n in self.operations}
        return Placement(self.interval, start, {n: self.lane[n] for n in start}, self.waits)

    def _heights(self) -> dict[str, int] | None:
        """The longest way from each operation's start to the end of what waits for it, a trip later
        counting ``interval`` less; ``None`` where that has no bound."""
        took = {n: _shortest(op, self.hand) for n, op in self.operations.items()}
        height = dict(took)
        for _ in range(len(height) + 1):
            changed = False
            for w in self.waits:
                far = took[w.src] + height[w.dst] - w.distance * self.interval
                if far > height[w.src]:
                    height[w.src], changed = far, True
            if not changed:
                return height
        return None

    def _place(self, name: str) -> list[str]:
        """Place an operation; the names of those put out for it."""
        op = self.operations[name]
        first = 0
        for w in self.into[name]:
            if w.src != name and w.src in self.start:
                first = max(first, self._end(w.src) - w.distance * self.interval)
        choices = [lane for lane in op.lanes if self._fits(op, lane)]
        if not choices:
            return [name]  # no lane has room for it at this interval: the budget runs out
        found = [(at, lane) for lane in choices if (at := self._free(op, lane, first)) is not None]
        if found:
            # where it ends first: being handed over takes time
            at, lane = min(found, key=lambda one: one[0] + _took(op, one[1], self.hand))
            return self._put(op, lane, at)
        at = max(first, self.last.get(name, -1) + 1)
        # the lane that puts out the fewest
        lane = min(choices, key=lambda lane: len(self._holders(op, lane, at)))
        return self._put(op, lane, at)

    def _free(self, op: Operation, lane: str, first: int) -> int | None:
        """The first tick from ``first`` on at which nothing is in the way, within an interval:
        ``first`` itself, or one at which something else ends."""
        ends = {0}
        for where, offset, ticks in self._uses(op, lane):
            if ticks:
                ends |= {
                    (since + length - offset - first) % self.interval
                    for since, length in self.busy[where].values()
                }
        for later in sorted(ends):
            if not self._holders(op, lane, first + later):
                return first + later
        return None

    def _fits(self, op: Operation, lane: str) -> bool:
        took = _took(op, lane, self.hand)
        own = (w.distance for w in self.out[op.name] if w.dst == op.name)
        return all(took <= distance * self.interval for distance in own) and all(
            ticks <= self.interval for _, _, ticks in self._uses(op, lane)
        )

    def _uses(self, op: Operation, lane: str) -> list[tuple[str, int, int]]:
        """(lane, from, ticks) of what an operation keeps busy, from its start on."""
        if lane == COORDINATOR:
            return [(COORDINATOR, 0, op.length)]
        hand = self.hand
        return [(COORDINATOR, 0, hand.submit), (lane, hand.submit + hand.launch, op.length)]

    def _holders(self, op: Operation, lane: str, at: int) -> set[str]:
        """What stands in the way of an operation."""
        found = set()
        for where, offset, ticks in self._uses(op, lane):
            if not ticks:
                continue
            begin = at + offset
            for other, (since, length) in self.busy[where].items():
                behind = (begin - since) % self.interval
                if behind < length or self.interval - behind < ticks:
                    found.add(other)
        return found

    def _put(self, op: Operation, lane: str, at: int) -> list[str]:
        out = self._holders(op, lane, at)
        for other in out:
            self._remove(other)
        for where, offset, ticks in self._uses(op, lane):
            if ticks:
                self.busy[where][op.name] = (at + offset, ticks)
        self.start[op.name], self.lane[op.name] = at, lane
        self.last[op.name] = at
        end = self._end(op.name)
        for w in self.out[op.name]:
            late = w.dst in self.start and self.start[w.dst] < end - w.distance * self.interval
            if w.dst != op.name and late:
                self._remove(w.dst)
                out.add(w.dst)
        return sorted(out)

    def _remove(self, name: str) -> None:
        del self.start[name], self.lane[name]
        for held in self.busy.values():
            held.pop(name, None)

    def _end(self, name: str) -> int:
        return self.start[name] + _took(self.operations[name], self.lane[name], self.hand)
