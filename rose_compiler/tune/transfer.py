"""What the operations of a schedule cost, from the profile of another schedule of the same program.

An operation is found again by its name and the user's line. One that runs on fewer rows (a tile)
or on more (collected over a loop) keeps a fixed part, the cost of its calls, and scales the rest;
where a few calls of it were timed on as many rows, and threads, it goes by these
(:mod:`rose_compiler.tune.local`).
A simulator that was stepped as a whole is taken apart into its shards: each has its share of the
core seconds, and what the coordinator spent on the whole step it spends on taking them in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch.fx as fx

from rose_compiler.base.profile import OpTime, Profile
from rose_compiler.ir import facts
from rose_compiler.ir.keys import nodes_by_key
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import LoopView, Program, is_call, op_of
from rose_compiler.tune.local import Identity, Local
from rose_compiler.tune.nest import Cost, Costs

#: Seconds of one call of torch on few rows: dispatch, allocation and the kernel's start. Measured
#: on one core of an EPYC; a linear layer of 256 takes about twice this.
CALL_S = 4e-6
#: Seconds of what a schedule adds itself: cutting rows, joining them, drawing noise.
SMALL_S = 10e-6
#: Seconds from handing a step over to its begin, where no profile has seen one.
LAUNCH_S = 60e-6
#: Share of its time that a simulator must keep cores busy for to count as computing.
_COMPUTES = 0.3


@dataclass(frozen=True)
class Known:
    """One operation as profiled: its cost, and how often it runs an iteration, all places together.

    ``places`` is the number of nodes that it stands at, ``own_s`` what its thread computed itself.
    """

    cost: Cost
    runs: float
    places: int
    own_s: float


@dataclass(frozen=True)
class Use:
    """One operation in a program, and what the profile of another schedule knows of it.

    ``places`` is the number of nodes that it stands at here, ``rows`` those of one call in units of
    what it was profiled with, ``times`` how often it runs a trip, and ``threads`` torch's while it
    runs, 0 for those of the user.
    """

    key: str
    node: fx.Node
    identity: Identity
    known: Known | None
    places: int
    rows: float
    times: float
    threads: int

    @property
    def kind(self) -> str:
        """Of its operation."""
        return op_of(self.node).kind

    def changed(self, threads: int) -> bool:
        """Whether it runs on other rows than it was profiled with, or other threads than these."""
        return self.rows != 1.0 or self.threads not in (0, threads)


def transfer(
    profile: Profile,
    profiled: Program,
    program: Program,
    shards: int = 1,
    local: Local | None = None,
) -> tuple[Costs, dict[str, float]]:
    """Costs of the operations of ``program`` by key, and how often each runs a trip of its body.

    Args:
        profile: of ``profiled``, another schedule of the same captured program.
        shards: how many parts of the simulator step beside each other when it steps as a whole.
        local: what operations were measured to take on other rows or threads.
    """
    known = _known(profile, profiled)
    costs: dict[str, Cost] = {}
    times: dict[str, float] = {}
    for use in _uses(known, profile, profiled, program):
        times[use.key] = use.times
        found = use.known
        if found is None:
            costs[use.key] = _fused(use.node, known) or _added(use.node)
        elif use.kind == "step":
            costs[use.key] = _step(found, use.places / found.places, shards)
        else:
            costs[use.key] = _on_lane(_called(found.cost, use, local), use.node)
    return Costs(costs), times


def uses(profile: Profile, profiled: Program, program: Program) -> Iterator[Use]:
    """The operations of ``program``, with what the profile of another schedule knows of each."""
    return _uses(_known(profile, profiled), profile, profiled, program)


def _uses(
    known: Mapping[Identity, Known], profile: Profile, profiled: Program, program: Program
) -> Iterator[Use]:
    loops = loop_trips(profile, profiled, program)
    body_runs = {key: runs * trips for key, (runs, trips) in loops.items()}
    every = nodes_by_key(program)
    threads = {k: LoopView(n).facts.threads for k, n in every.items() if is_call(n, LOOP)}
    places: dict[Identity, list[str]] = defaultdict(list)
    for key, node in every.items():
        if _counts(node):
            places[_identity(node)].append(key)
    for identity, keys in places.items():
        found = known.get(identity)
        for key in keys:
            node = every[key]
            body = _body_runs(key, body_runs)
            each, rows = 1.0, 1.0
            if found is not None:
                each = found.runs / found.places / body if body else 0.0
                deferred = "defer" in facts.get(node).origin.passes
                # behind a loop it runs once for all trips
                rows = found.places / len(keys) * (max(1.0, each) if deferred else 1.0)
            count = next((threads[k] for k in _around(key) if threads.get(k)), 0)
            # in an arm of a branch it runs on some trips
            yield Use(key, node, identity, found, len(keys), rows, min(1.0, each), count)


def _around(key: str) -> Iterator[str]:
    """The keys of the loops around a node, innermost first."""
    while key := key.rpartition("/")[0]:
        yield key


def _called(cost: Cost, use: Use, local: Local | None) -> Cost:
    """The cost of an operation on its rows and threads: by what was measured, or as a guess."""
    whole = None if local is None else local.seconds(use.identity)
    if local is None or not whole:
        return scaled(cost, use.rows, _calls(use.node))
    found = local.seconds(use.identity, use.rows, use.threads)
    alone = local.seconds(use.identity, 1.0, use.threads) or whole
    ratio = (alone if found is None else found) / whole
    run = cost.run_s * ratio
    one = use.threads == 1 != local.threads
    made = replace(cost, run_s=run, work_s=run if one else cost.work_s * ratio)
    return scaled(made, use.rows, _calls(use.node)) if found is None else made


def scaled(cost: Cost, rows: float, calls: int) -> Cost:
    """The cost on ``rows`` times as many rows, a fixed :data:`CALL_S` for each of its calls."""
    if rows == 1.0 or cost.run_s <= 0:
        return cost
    fixed = min(cost.run_s, calls * CALL_S)
    run = fixed + (cost.run_s - fixed) * rows
    return replace(cost, run_s=run, work_s=cost.work_s * run / cost.run_s)


def _on_lane(cost: Cost, node: fx.Node) -> Cost:
    """The cost of an operation that a thread runs, where no profile has seen it there."""
    slot = facts.get(node).slot
    if slot is None or not slot.lane.startswith("thread:") or cost.launch_s:
        return cost
    return replace(cost, submit_s=SMALL_S, receive_s=SMALL_S, launch_s=LAUNCH_S)


def _step(found: Known, groups: float, shards: int) -> Cost:
    """A step of one of ``groups`` groups, from one of all shards together."""
    cost = found.cost
    if groups <= 1.0:
        return cost
    own = min(cost.run_s, found.own_s)
    work = max(0.0, cost.work_s - own)
    computes = work >= _COMPUTES * cost.run_s
    parts = max(float(shards), groups)
    run = work / parts if computes else cost.run_s - own
    return Cost(run, work / groups, 0.0, own / groups, LAUNCH_S)


def _known(profile: Profile, profiled: Program) -> dict[Identity, Known]:
    nodes = nodes_by_key(profiled)
    iterations = max(1, len(profile.iteration_s))
    found: dict[Identity, list[OpTime]] = defaultdict(list)
    for times in profile.ops:
        if times.op in nodes:
            found[_identity(nodes[times.op])].append(times)
    made = {}
    for identity, parts in found.items():
        runs = sum(times.count for times in parts)

        def mean(name: str, parts: list[OpTime] = parts, runs: int = runs) -> float:
            return sum(getattr(times, name) * times.count for times in parts) / runs

        cost = Cost(
            mean("mean_s"), mean("work_s"), mean("submit_s"), mean("receive_s"), mean("launch_s")
        )
        made[identity] = Known(cost, runs / iterations, len(parts), mean("cpu_s"))
    return made


def loop_trips(
    profile: Profile, profiled: Program, program: Program
) -> dict[str, tuple[float, float]]:
    """How often each loop of ``program`` begins an iteration, and its trips each time.

    A loop that a pass has split off another one runs as often as the one on the same line.
    """
    known = {one.loop: (one.runs, one.trips) for one in profile.loops}
    lines = {
        _line(node): known[key]
        for key, node in nodes_by_key(profiled).items()
        if is_call(node, LOOP) and key in known
    }
    for key, node in nodes_by_key(program).items():
        if is_call(node, LOOP) and key not in known and _line(node) in lines:
            known[key] = lines[_line(node)]
    return known


def _body_runs(key: str, runs: Mapping[str, float]) -> float:
    """How often the body that a node lies in runs an iteration."""
    around = key.rpartition("/")[0]
    return runs.get(around, 1.0) if around else 1.0


def _counts(node: fx.Node) -> bool:
    return not (is_call(node, LOOP) or is_call(node, BRANCH))


def _identity(node: fx.Node) -> Identity:
    return op_of(node).name, _line(node)


def _line(node: fx.Node) -> str:
    return str(facts.get(node).origin.where)


def _calls(node: fx.Node) -> int:
    body = op_of(node).body
    if body is None:
        return 1
    return sum(n.op in ("call_function", "call_method") for n in body.graph.nodes)


def _fused(node: fx.Node, known: Mapping[Identity, Known]) -> Cost | None:
    """What the operations took that one stands for: no more than that is known of it."""
    members = op_of(node).attributes.get("fused", ())
    parts = [k.cost for (name, _), k in known.items() if name in members]
    if not parts:
        return None
    return Cost(sum(c.run_s for c in parts), sum(c.work_s for c in parts))


def _added(node: fx.Node) -> Cost:
    """What a schedule has added itself, or what was not seen to run."""
    op = op_of(node)
    seconds = SMALL_S if op.kind == "builtin" else 0.0
    return Cost(seconds, seconds)
