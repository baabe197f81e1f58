"""Calls of components in hosts begin early and are awaited late."""

from __future__ import annotations

from rose_compiler.base.decision import Decision
from rose_compiler.codegen.emit import emit
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.hosts import Hosts
from rose_compiler.passes.manager import History, PassManager

HEAD = """
@op(kind="component", reads=["argument", "far"], writes=["far"], attributes={"hosted": "publish"})
def publish(argument, far): ...
@op(kind="component", reads=["far"], writes=["far"], attributes={"hosted": "evaluate"})
def evaluate(far): ...
@op(kind="component", reads=["x", "near"], writes=["near"], attributes={"hosted": "reward"})
def reward(x, near): ...
@op(reads=["net"], writes=["net"], results=0)
def train(net): ...
@op(reads=["log"], writes=["log"], results=0)
def note(log, score): ...
@op(reads=[], writes=[])
def look(x): ...
"""


def run(body: str, *, run_ahead: bool = True, hosted: bool = True) -> tuple[Program, History]:
    program = parse(HEAD + body)
    context = PassContext(options=Decision(hosted=hosted), run_ahead=run_ahead)
    return program, PassManager([Hosts()]).run(program, context)


def issued(program: Program) -> list[str]:
    plan = emit(program).plan
    assert plan is not None
    return plan.bodies[program.root.graph].describe()


EVALUATED = """
def loop(*, net, far, log):
    publish(net, far)
    score = evaluate(far)
    note(log, score)
    train(net)
    train(net)
    return 0
"""


def test_a_call_runs_beside_what_does_not_need_it() -> None:
    program, history = run(EVALUATED)
    assert issued(program) == [
        "submit publish host:far",
        "submit score host:far",
        "await publish host:far",
        "run train",
        "run train_1",
        "await score host:far",
        "run note",
    ]
    assert "beside 2 operations" in history.remarks.render()


def test_the_program_reads_like_this(golden) -> None:
    golden(
        "evaluated",
        [Hosts()],
        PassContext(options=Decision(hosted=True)),
        program=parse(HEAD + EVALUATED),
    )


def test_two_components_are_under_way_together() -> None:
    program, _ = run(
        """
def loop(x, *, net, far, near, log):
    a = evaluate(far)
    note(log, a)
    y = look(x)
    b = reward(y, near)
    note(log, b)
    train(net)
    return 0
"""
    )
    assert issued(program)[:4] == [
        "submit a host:far",
        "run y",
        "submit b host:near",
        "run train",
    ]


def test_a_result_is_used_on_the_next_trip() -> None:
    program, _ = run(
        """
def loop(x, *, near, net, log):
    for i, y in trips(0, 4, 1, y=x):
        note(log, y)
        z = reward(y, near)
        train(net)
        yield z
    return trips.y
"""
    )
    plan = emit(program).plan
    assert plan is not None
    body = next(b for b in plan.bodies.values() if b.loop is not None)
    assert body.depth == 1
    lines = body.describe()
    assert lines.index("submit z host:near") < lines.index("run train")
    assert "await z host:near stage 1" in lines


def codes(history: History) -> set[str]:
    return {r.code for r in history.remarks if r.kind == "missed"}


def test_what_keeps_a_call_where_it_is() -> None:
    _, history = run(EVALUATED, run_ahead=False)
    assert codes(history) == {"may-raise"}
    _, history = run(EVALUATED, hosted=False)
    assert codes(history) == {"switched-off"}
    program, history = run(
        """
def loop(*, net, far, log):
    publish(net, far)
    score = evaluate(far)
    note(log, score)
    return 0
"""
    )
    assert codes(history) == {"no-window"}
    assert not any("host:" in line for line in issued(program))
    _, history = run(
        """
def loop(*, net, far, log):
    for i in trips():
        s = evaluate(far)
        train(net)
        break_if(s, ())
        yield ()
    return 0
"""
    )
    assert codes(history) == {"early-exit"}
