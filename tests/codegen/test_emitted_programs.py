"""What emitted code does is what the program means: random programs, random schedules.

On lanes that are slow at random they run in ``tests/testing/test_many_programs.py``.
"""

from __future__ import annotations

import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rose_compiler.codegen import emit, load
from rose_compiler.ir.parse import parse
from rose_compiler.ir.verify import verify
from rose_compiler.runtime.support import Runtime
from rose_compiler.testing import lanes
from rose_compiler.testing.lanes import schedule_at_random
from rose_compiler.testing.programs import Generated, Snapshot, programs


def execute(generated: Generated, runtime: Runtime) -> Snapshot:
    program = generated.program

    def call(objects: dict[str, Any]) -> Any:
        return lanes.execute(program, generated.args, objects, runtime)

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
@settings(max_examples=30)
def test_a_captured_program(generated: Generated) -> None:
    assert execute(generated, Runtime()) == generated.run_and_snapshot()


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
