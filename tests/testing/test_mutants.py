"""Planted faults, one decision each: a pass or the runtime that answers wrongly is found out.

A mutant lets one question of a pass answer "nothing against it", or leaves out one thing that the
runtime does. Some program among the first few of a fixed seed then differs from eager order, or
breaks a rule of the verifier. The very same programs pass where nothing is planted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from rose_compiler.ir.deps import Dependences
from rose_compiler.passes import (
    canonicalize,
    defer,
    fission,
    fuse,
    graphs,
    hoist,
    late,
    pipeline_loops,
    place,
    scan,
    split,
    tile_batch,
)
from rose_compiler.passes.modulo import Modulo
from rose_compiler.runtime import lanes as runtime_lanes
from rose_compiler.runtime.recording import RecordingStreams
from rose_compiler.runtime.support import Runtime
from rose_compiler.testing.fuzz import Result, fuzz

# the package has a function of that name
codegen_schedule = sys.modules["rose_compiler.codegen.schedule"]
pytestmark = pytest.mark.timeout(900)

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutant:
    """A planted fault, and the programs that find it: ``count`` of a kind from a seed."""

    name: str
    kind: str
    count: int
    plant: Plant
    seed: int = 1


MUTANTS: list[Mutant] = []


def mutant(name: str, kind: str, count: int, seed: int = 1) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        MUTANTS.append(Mutant(name, kind, count, plant, seed))
        return plant

    return register


def nothing_against(*args: Any, **kwargs: Any) -> None:
    """A question of legality that finds nothing, whatever it is asked."""


# Dependences, which all passes rest on.


def _without(monkeypatch: pytest.MonkeyPatch, dropped: Callable[[Any], bool]) -> None:
    edges = Dependences.edges
    monkeypatch.setattr(
        Dependences,
        "edges",
        lambda self, graph: tuple(e for e in edges(self, graph) if not dropped(e)),
    )


@mutant("dependences: reads behind writes", "nests", 240)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, lambda e: e.kind == "flow")


@mutant("dependences: writes behind reads", "nests", 240)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, lambda e: e.kind == "anti")


@mutant("dependences: writes behind writes", "nests", 240)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, lambda e: e.kind == "output")


@mutant("dependences: early exits", "nests", 240)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, lambda e: e.kind == "control")


@mutant("dependences: between trips", "lanes", 120)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, lambda e: e.kind != "value" and not e.applies(0))


# Passes.


@mutant("canonicalize: what is written is dead", "nests", 240)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        canonicalize,
        "_dead",
        lambda n: canonicalize.is_call(n) and not canonicalize.is_structure(n),
    )


@mutant("hoist: what is changed later on", "nests", 60, seed=3)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoist, "changed_later", nothing_against)


@mutant("graphs: kept results in another order", "rollouts", 80)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = graphs.keep_results
    monkeypatch.setattr(canonicalize, "keep_results", lambda body, kept: keep(body, kept[::-1]))


@mutant("scan: no trips of their own at the ends", "recurrences", 60, seed=3)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "_trip", lambda loop, index, carried, rewrite: carried)


@mutant("split: results in another order", "rollouts", 60)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    results = split._results
    monkeypatch.setattr(
        split,
        "_results",
        lambda node, specs, picks, *rest: results(node, specs, picks[::-1], *rest),
    )


@mutant("tile_batch: rows that are coupled", "rollouts", 150)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_batch, "_coupled", nothing_against)


@mutant("defer: dependences that are turned round", "rollouts", 150)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defer, "_held", nothing_against)


@mutant("defer: an exit on the way", "rollouts", 150)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defer.bodies, "exits", lambda graph: [])


@mutant("fission: no copies of what is kept", "rollouts", 200)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defer, "_changes", lambda *given: False)


@mutant("fission: trips in another order", "rollouts", 120)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fission, "APPEND", _prepending())


def _prepending() -> Any:
    op = fission.APPEND
    return type(op)(
        replace(op.signature, name="prepend"),
        lambda items, value: items.insert(0, value),
        kind="block",
    )


@mutant("late, borrowed: no copies of what a simulator lends", "rollouts", 60)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "own", lambda *given: False)


@mutant("borrowed: who would see that it is a copy", "rollouts", 200)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late, "why_not_copied", nothing_against)
    monkeypatch.setattr(tile_batch, "why_not_copied", nothing_against)


@mutant("late: an exit on the way", "rollouts", 60)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late.bodies, "exits", lambda graph: [])


@mutant("modulo: orders of one trip only", "rollouts", 60)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = late.schedule
    monkeypatch.setattr(
        late,
        "schedule",
        lambda nodes, edges, *rest: schedule(nodes, [e for e in edges if e.least == 0], *rest),
    )


@mutant("place: slots against the order", "rollouts", 60)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    write = place.write_slots

    def turned(modulo: Modulo, *rest: Any) -> None:
        write(replace(modulo, order=modulo.order[::-1]), *rest)

    monkeypatch.setattr(place, "write_slots", turned)


@mutant("fuse: where every bit counts", "trainings", 30)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "why_not", nothing_against)


@mutant("pipeline_loops: dependences between trips", "pipelines", 30)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = pipeline_loops.modulo_schedule

    def careless(operations: Any, waits: Any, *rest: Any, **more: Any) -> Any:
        return schedule(operations, [w for w in waits if w.distance == 0], *rest, **more)

    monkeypatch.setattr(pipeline_loops, "modulo_schedule", careless)
    monkeypatch.setattr(pipeline_loops, "_broken", nothing_against)


@mutant("pipeline_loops: dependences between trips, for the verifier too", "pipelines", 30)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    _without(monkeypatch, lambda e: e.kind != "value" and not e.applies(0))


@mutant("pipeline_loops: an exit on the way", "pipelines", 30)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_loops, "_one_at_a_time", nothing_against)


# The schedule and the runtime of lanes.


@mutant("schedule: no waits for states", "lanes", 80)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(Dependences):
        def edges(self, graph: Any) -> Any:
            return tuple(e for e in super().edges(graph) if e.kind == "value")

    monkeypatch.setattr(codegen_schedule, "Dependences", Careless)


@mutant("lanes: a wait that does not wait", "lanes", 80)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_lanes.ThreadTask, "arrived", lambda task, timeout: True)


@mutant("lanes: a snapshot that is none", "rollouts", 60)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "snapshot", staticmethod(lambda value: value))


@mutant("lanes: the worker's own modes", "lanes", 120)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    current = runtime_lanes.current
    monkeypatch.setattr(runtime_lanes, "current", lambda: replace(current(), grad=True))


# Streams of a device, on the stand-in.


@mutant("streams: a lane that does not wait for the coordinator's stream", "streams", 15)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    _waits(monkeypatch, lambda stream: stream == 0)


@mutant("streams: a coordinator's stream that does not wait for a lane", "streams", 15)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    _waits(monkeypatch, lambda stream: stream != 0)


def _waits(monkeypatch: pytest.MonkeyPatch, which: Callable[[int], bool]) -> None:
    """Let only some streams wait."""
    wait = RecordingStreams.wait
    monkeypatch.setattr(
        RecordingStreams,
        "wait",
        lambda self, stream, event: wait(self, stream, event) if which(stream) else None,
    )


@mutant("streams: a tensor that crosses and is not recorded", "streams", 15)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecordingStreams, "keep", lambda self, tensor, stream: None)


@mutant("streams: what is handed to a lane is let go before it is used", "streams", 40)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    keep = RecordingStreams.keep
    monkeypatch.setattr(
        RecordingStreams,
        "keep",
        lambda self, tensor, stream: keep(self, tensor, stream) if stream == 0 else None,
    )


@mutant("streams: a schedule that waits for values alone", "streams", 40)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    class Careless(Dependences):
        def edges(self, graph: Any) -> Any:
            return tuple(e for e in super().edges(graph) if e.kind == "value")

    monkeypatch.setattr(codegen_schedule, "Dependences", Careless)


@pytest.mark.parametrize("planted", MUTANTS, ids=lambda m: m.name)
def test_a_planted_fault_is_found(planted: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        planted.plant(patched)
        found = fuzz(planted.kind, planted.count, planted.seed, shrink=False)
    assert found.failure is not None, f"{found.programs} programs let it pass"


#: The programs that find the faults, by kind and seed: as many as the most that a fault asks for.
#: Trainings are dear, and test_many_programs.py runs as many.
PLAIN = {
    (m.kind, m.seed): max(o.count for o in MUTANTS if (o.kind, o.seed) == (m.kind, m.seed))
    for m in MUTANTS
    if m.kind != "trainings"
}


@pytest.mark.parametrize(("kind", "seed"), sorted(PLAIN), ids=lambda v: str(v))
def test_the_same_programs_pass_without(
    kind: str, seed: int, tally: Callable[[Result], None]
) -> None:
    found = fuzz(kind, PLAIN[kind, seed], seed, shrink=False)
    tally(found)
    assert found.failure is None, found.failure
    assert found.programs == PLAIN[kind, seed]
