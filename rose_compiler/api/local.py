"""Times operations by themselves, on the rows and threads that schedules would call them with.

A schedule that cuts a batch calls the policy on some of its rows, one that defers late work calls
it once on the rows of all trips, and thread counts change what each call takes. The traced graphs
concerned are called a few times on copies of what they were first called with, largest first, as
long as the time for it lasts. Only what has no side effects is: a graph that writes nothing, draws
nothing and records no gradients, on the CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.fx as fx
from torch import Tensor

from rose_compiler.api.probing import Prober
from rose_compiler.base.profile import Profile
from rose_compiler.ir import facts
from rose_compiler.ir.contexts import entered
from rose_compiler.ir.program import Program, op_of
from rose_compiler.ir.recorded import records
from rose_compiler.passes.graphs import without_checks
from rose_compiler.tune.local import Identity, Local, Point
from rose_compiler.tune.transfer import Known, Use, uses

#: Most seconds for all of it, and the share of the budget for tuning.
MOST_S, SHARE = 2.0, 0.05
#: Iterations that it may take as long as: a training of short ones ends soon, too.
ITERATIONS = 2.0
#: Share of an iteration that an operation must take to be timed.
LEAST_SHARE = 0.01
#: Calls of each kind that are timed in a row, at least and at most; each row is gone through twice.
LEAST_ROUNDS, ROUNDS = 2, 8
#: Bytes of what a call on more rows than were seen is handed, at most.
MOST_BYTES = 64 << 20

#: Rows, in units of the batch in program order, and threads.
Way = tuple[float, int]


@dataclass
class _Wanted:
    """One operation, and the ways that schedules would call it. ``node`` is where it stands in
    ``program``, ``size`` has the rows of its batch in program order."""

    node: fx.Node
    program: Program
    known: Known
    size: int | None
    ways: set[Way] = field(default_factory=set)

    @property
    def total_s(self) -> float:
        """Seconds of its calls in an iteration."""
        return self.known.runs * self.known.cost.run_s


def budget(tune_budget: float, iteration_s: float) -> float:
    """Seconds that timing operations may take, of so many for tuning."""
    return min(MOST_S, SHARE * tune_budget, ITERATIONS * iteration_s)


def measured(
    profile: Profile,
    profiled: Program,
    programs: Sequence[Program],
    examples: Mapping[str, Any],
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Local:
    """What the operations of ``profiled`` take alone, called as ``programs`` call them.

    ``examples``: values that operations were first called with. Torch's thread count is as before
    when this returns; no generator and no state is touched.
    """
    threads = torch.get_num_threads()
    found = _wanted(profile, profiled, programs, threads)
    points: dict[Identity, list[Point]] = {}
    end = clock() + budget_s
    order = sorted(found.items(), key=lambda item: -item[1].total_s)
    for k, (identity, one) in enumerate(order):
        if (left := (end - clock()) / (len(order) - k)) <= 0:
            break
        try:
            points[identity] = _timed(one, examples, threads, left, clock)
        except Exception:  # an operation may refuse made-up values, in any way
            continue
    sizes = {i: one.size for i, one in found.items() if one.size is not None}
    return Local(threads, points, sizes)


def _wanted(
    profile: Profile, profiled: Program, programs: Sequence[Program], threads: int
) -> dict[Identity, _Wanted]:
    least = LEAST_SHARE * profile.iteration_s[-1]
    own = {u.identity: u.node for u in uses(profile, profiled, profiled)}
    found: dict[Identity, _Wanted] = {}
    for program in programs:
        for use in uses(profile, profiled, program):
            known = use.known
            if known is None or not known.runs or not use.changed(threads):
                continue
            node, where = use.node, program
            # what was seen to be handed to it is known by the names of program order
            if (seen := own.get(use.identity)) is not None and _like(seen, node):
                node, where = seen, profiled
            size = None if seen is None else _size(seen)
            one = _Wanted(node, where, known, size)
            if one.total_s < least or not _alone(node) or not _rows_agree(use, size):
                continue
            found.setdefault(use.identity, one).ways.add((use.rows, use.threads or threads))
    return found


def _alone(node: fx.Node) -> bool:
    """Whether a call of an operation leaves nothing behind, and is over when it returns."""
    op = op_of(node)
    reads, writes = op.signature.reads, op.signature.writes
    if op.kind != "graph" or not op.bound or reads is None or writes != () or records(node):
        return False
    if any(r.startswith("rng:") for r in reads):
        return False
    given = [a for a in node.args if isinstance(a, fx.Node)]
    specs = [facts.get(a).spec for a in (node, *given)]
    return all(s is None or s.device in ("", "cpu") for s in specs)


def _size(node: fx.Node) -> int | None:
    """The rows of an operation's batch, also where draws in it keep them from being apart."""
    op = op_of(node)
    axes = op.signature.separable() or dict(op.attributes.get("rows", {}))
    for name, value in zip(op.signature.params, node.args, strict=True):
        rows = facts.rows_of(facts.get(value).spec) if isinstance(value, fx.Node) else None
        if axes.get(name) == 0 and rows is not None:
            return rows
    return None


def _like(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes call what computes the same from the same arguments."""
    alike = op_of(one).signature.params == op_of(other).signature.params
    return alike and _alone(one) and _alone(other)


def _rows_agree(use: Use, size: int | None) -> bool:
    """Whether an operation is called on as many rows as follows from how often it stands there."""
    if use.rows == 1.0:
        return True
    mine = _size(use.node)
    return mine is not None and size is not None and (mine < size) == (use.rows < 1.0)


def _timed(
    one: _Wanted,
    examples: Mapping[str, Any],
    threads: int,
    left_s: float,
    clock: Callable[[], float],
) -> list[Point]:
    """The points of one operation."""
    ways = _affordable(one, threads, left_s)
    run = without_checks(op_of(one.node))
    with torch.no_grad(), entered(facts.get(one.node).context):
        args = dict(_arguments(one, examples, sorted({rows for rows, _ in ways})))
        calls = {(r, n): _call(run, args[r], clock) for r, n in ways if r in args}
        taken = in_turn(calls, threads, left_s, clock)
    return [point(way, seconds) for way, seconds in taken.items()]


def _arguments(
    one: _Wanted, examples: Mapping[str, Any], shares: Sequence[float]
) -> list[tuple[float, tuple[Any, ...]]]:
    """What to call an operation with, for each share of its rows that does not take too much."""
    prober = Prober(one.program, examples)
    made = []
    for share in shares:
        rows = None if one.size is None else max(1, round(share * one.size))
        args = prober.arguments(one.node, rows)
        if share <= 1.0 or sum(map(_bytes, args)) <= MOST_BYTES:
            made.append((share, args))
    return made


def _affordable(one: _Wanted, threads: int, left_s: float) -> set[Way]:
    """The ways to call an operation that there is time for, as in program order among them: on as
    many rows as fit where there are too many.

    Raises:
        ValueError: where there is no time for those on few rows.
    """
    calls = left_s / max(2 * (1 + LEAST_ROUNDS) * one.known.cost.run_s, 1e-12)
    # with the whole batch on each number of threads: what threads alone change
    ways = {(1.0, threads), *one.ways, *((1.0, count) for _, count in one.ways)}
    few = {way for way in ways if way[0] <= 1.0}
    calls -= sum(rows for rows, _ in few)
    if calls < 0:
        raise ValueError("its calls take too long")
    many = ways - few
    most = calls / max(len(many), 1)
    return few | {(min(rows, most), count) for rows, count in many if min(rows, most) >= 2.0}


def _call(
    run: Callable[..., Any], args: tuple[Any, ...], clock: Callable[[], float]
) -> Callable[[], float]:
    def call() -> float:
        start = clock()
        run(*args)
        return clock() - start

    return call


def in_turn(
    calls: Mapping[Way, Callable[[], float]],
    threads: int,
    left_s: float,
    clock: Callable[[], float],
) -> dict[Way, list[float]]:
    """Seconds of calls, made in turn where they run with one number of threads, and those numbers
    there and back, so that a machine that gets slower or faster does so for all of them."""
    counts = sorted({count for _, count in calls}, key=lambda count: (count != threads, count))
    blocks = [*counts, *reversed(counts)]
    taken: dict[Way, list[float]] = {way: [] for way in calls}
    began = clock()
    try:
        for k, count in enumerate(blocks):
            torch.set_num_threads(count)
            mine = [way for way in calls if way[1] == count]
            for way in mine:
                calls[way]()  # threads start, and caches are cold
            until = began + left_s * (k + 1) / len(blocks)
            for done in range(ROUNDS):
                if done >= LEAST_ROUNDS and clock() >= until:
                    break
                for way in mine:
                    taken[way].append(calls[way]())
    finally:
        torch.set_num_threads(threads)
    return taken


def point(way: Way, seconds: Sequence[float]) -> Point:
    """The point of several calls."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Point(*way, middle, low, high)


def _bytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_bytes, value.values()))
    return int(value.nbytes) if isinstance(value, Tensor | np.ndarray) else 0
