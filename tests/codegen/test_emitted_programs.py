"""What emitted code does is what the program means: random programs, random schedules."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rose_compiler.codegen import emit, load
from rose_compiler.codegen.schedule import acts, source_of
from rose_compiler.codegen.unbound import exits_of
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.facts import Slot
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, Program, is_call, is_structure
from rose_compiler.ir.verify import verify
from rose_compiler.runtime.lanes import Lane, Task, ThreadLane
from rose_compiler.runtime.support import Runtime
from rose_compiler.testing.programs import Generated, Snapshot, programs

LANES = ("", "", "", "thread:a", "thread:b")


class SlowLane(ThreadLane):
    """A thread lane whose tasks begin and end at random moments."""

    def __init__(self, name: str, seed: int) -> None:
        super().__init__(name)
        self.random = random.Random(seed)

    def submit(self, site: int, fn: Callable[..., Any], *args: Any) -> Task:
        before, after = (self.random.choice((0, 0, 0.0005)) for _ in range(2))

        def slow(*given: Any) -> Any:
            time.sleep(before)
            result = fn(*given)
            time.sleep(after)
            return result

        return super().submit(site, slow, *args)


class SlowRuntime(Runtime):
    """All lanes are slow threads."""

    def _make(self, name: str) -> Lane:
        return SlowLane(name, sum(map(ord, name)))


def schedule_at_random(program: Program, seed: int) -> int:
    """Give the bodies of a program random slots that keep its dependences; the deepest stage."""
    draw = random.Random(seed)
    deps = Dependences(program)
    depth = 0
    for graph, loop in [*((v.graph, v) for v in program.loops()), (program.graph, None)]:
        nodes = [n for n in graph.nodes if acts(n)]
        for _ in range(30):
            slots = _random_slots(draw, nodes, deps, graph, loop)
            if slots is not None:
                for node, slot in slots.items():
                    facts.put(node, slot=slot)
                    depth = max(depth, slot.stage)
                break
    program.stage = "scheduled"
    return depth


def _random_slots(
    draw: random.Random, nodes: list[Any], deps: Dependences, graph: Any, loop: LoopView | None
) -> dict[Any, Slot] | None:
    edges = [
        (source_of(e.src), source_of(e.dst), e.least)
        for e in deps.edges(graph)
        if source_of(e.src) in nodes and source_of(e.dst) in nodes
    ]
    edges = [e for e in edges if e[0] is not e[1] or e[2] > 0]
    spread = loop is not None and loop.facts.kind != "while" and not list(exits_of(loop.body))
    chance = draw.choice((0, 0.1, 0.3)) if spread else 0
    stage: dict[Any, int] = {}
    for node in nodes:
        least = [stage[s] - d for s, t, d in edges if t is node and s in stage]
        stage[node] = max([0, *least]) + (draw.random() < chance)
    before: dict[Any, set[Any]] = {n: set() for n in nodes}
    for src, dst, distance in edges:
        gap = distance + stage[dst] - stage[src]
        if gap < 0 or (gap == 0 and src is dst):
            return None
        if gap == 0:
            before[dst].add(src)
    order: dict[Any, int] = {}
    while len(order) < len(nodes):
        ready = [n for n in nodes if n not in order and before[n] <= set(order)]
        if not ready:
            return None
        order[draw.choice(ready[:4])] = len(order)
    return {
        n: Slot(
            draw.choice(LANES) if is_call(n) and not is_structure(n) else "", stage[n], 2 * order[n]
        )
        for n in nodes
    }


def execute(generated: Generated, runtime: Runtime) -> Snapshot:
    program = generated.program
    run = load(emit(program))

    def call(objects: dict[str, Any]) -> Any:
        values = [generated.args[n] for n in program.value_params]
        return run(runtime, *values, *(objects[n] for n in program.state_params))

    try:
        return generated.observe(call)
    finally:
        runtime.close()


def assert_same(got: Snapshot, want: Snapshot) -> None:
    if want.raised:  # how far the others had come is told by the notes, and differs
        assert got.raised == want.raised
    else:
        assert got == want


@given(programs())
@settings(max_examples=60)
def test_a_captured_program(generated: Generated) -> None:
    assert execute(generated, Runtime()) == generated.run_and_snapshot()


@given(programs(), st.integers(0, 2**16))
@settings(max_examples=60)
def test_a_scheduled_program_on_slow_lanes(generated: Generated, seed: int) -> None:
    want = generated.run_and_snapshot()
    schedule_at_random(generated.program, seed)
    assert_same(execute(generated, SlowRuntime()), want)


@given(programs(), st.integers(0, 2**16))
@settings(max_examples=20)
def test_a_scheduled_program_in_one_lane(generated: Generated, seed: int) -> None:
    want = generated.run_and_snapshot()
    schedule_at_random(generated.program, seed)
    assert_same(execute(generated, Runtime(serial=True)), want)


def test_the_random_schedules_are_schedules() -> None:
    seen: list[tuple[int, int]] = []

    @given(programs(without={"opaque"}), st.integers(0, 2**16))
    @settings(max_examples=40)
    def collect(generated: Generated, seed: int) -> None:
        depth = schedule_at_random(generated.program, seed)
        verify(generated.program)
        seen.append((depth, len(emit(generated.program).plan.lanes)))  # type: ignore[union-attr]

    collect()
    assert sum(depth > 0 for depth, _ in seen) >= 4
    assert sum(lanes > 1 for _, lanes in seen) >= 4


def test_a_lost_wait_is_found() -> None:
    """The comparison above can fail: without its waits, emitted code gives something else."""

    text = """
@op(reads=[], writes=["cells"])
def put(cells, v): ...

@op(reads=["cells"], writes=[])
def total(cells): ...

@program(stage="scheduled")
def f(n, *, cells):
    for t in loop0(0, n, 1):
        put(cells, t) @ lane("thread:a", order=0)
        s = total(cells) @ lane(order=1)
        put(cells, s) @ lane(order=2)
    return n
"""

    def slow_put(cells: list[int], v: int) -> None:
        time.sleep(0.002)
        cells.append(v)

    program = parse(text, {"put": slow_put, "total": sum})
    emitted = emit(program)
    runtime = Runtime()
    cells: list[int] = []
    load(emitted)(runtime, 3, cells)
    assert cells == [0, 0, 1, 1, 2, 4]
    assert emitted.source.count("put_task.wait()") == 1
    source = emitted.source.replace("put_task.wait()", "pass")
    broken: list[int] = []
    namespace = dict(emitted.namespace)
    exec(source, namespace)
    namespace["run"](runtime, 3, broken)
    runtime.close()
    assert broken != cells
