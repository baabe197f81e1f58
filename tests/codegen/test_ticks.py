"""Instrumented functions: the same results, and a tick behind each thing that is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.codegen import emit, load
from rose_compiler.ir import facts
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.runtime.support import Runtime
from tests.api.loops import Training, iteration

TEXT = """
@op(reads=[], writes=[])
def double(x): ...

@op(reads=[], writes=[])
def add(x, y): ...

def f(x, *, log):
    y = double(x)
    for t, acc in outer(0, 3, 1, acc=y):
        z = double(t)
        for k, inner in deep(0, 2, 1, inner=acc):
            w = add(inner, z)
            yield w
        last = deep.inner
        if last:
            u = add(last, x)
            v = u
        else:
            v = last
        yield v
    end = outer.acc
    return end
"""


def program() -> Program:
    return parse(TEXT, bind={"double": lambda x: 2 * x, "add": lambda x, y: x + y})


def run(of: Program, ticks: list[int] | None = None) -> tuple[Any, Any]:
    emitted = emit(of, tick=None if ticks is None else ticks.append)
    runtime = Runtime()
    try:
        return load(emitted)(runtime, 1, None), emitted
    finally:
        runtime.close()


def test_ticks_follow_what_runs_at_every_level() -> None:
    plain, without = run(program())
    ticks: list[int] = []
    result, emitted = run(program(), ticks)
    assert result == plain
    assert without.marks == ()
    assert "tick" not in without.source
    seen = [(emitted.marks[k].kind, emitted.marks[k].key) for k in ticks]
    trip = [
        ("trip", "outer"),
        ("run", "outer/z"),
        ("trip", "outer/deep"),
        ("run", "outer/deep/w"),
        ("trip", "outer/deep"),
        ("run", "outer/deep/w"),
        ("leave", "outer/deep"),
        ("run", "outer/u"),
    ]
    assert seen == [("run", "y"), *trip * 3, ("leave", "outer")]
    paths = {m.key: m.path for m in emitted.marks}
    assert paths["outer/deep/w"] == ("outer", "deep")
    assert paths["outer/u"] == ("outer",), "a branch is no loop"


def test_a_lane_s_work_is_handed_over_and_awaited() -> None:
    of = program()
    body = next(v for v in of.loops() if v.label == "deep")
    (work,) = [n for n in body.graph.nodes if is_call(n) and op_of(n).name == "add"]
    facts.put(work, slot=facts.Slot("thread:0", order=0))
    of.stage = "scheduled"
    ticks: list[int] = []
    result, emitted = run(of, ticks)
    assert result == run(program())[0]
    marks = [emitted.marks[k] for k in ticks if emitted.marks[k].key == "outer/deep/w"]
    assert [m.kind for m in marks[:2]] == ["submit", "wait"]
    assert {m.lane for m in marks} == {"thread:0"}


def test_statements_that_are_merged_have_ticks_between_them() -> None:
    training = Training()
    fast = rose_compiler.compile(iteration, tune=False, numerics="bitwise")
    try:
        training.run(fast, 2)
        unit = fast._last.unit
        plain = unit.build(rose_compiler.Decision())
        ticks: list[int] = []
        emitted = emit(plain.program, tick=ticks.append)
        values = [training.obs]
        states = {
            "agent": training.agent,
            "optimizer": training.optimizer,
            "envs": training.envs,
            "buffer": training.buffer,
        }
        load(emitted)(fast.runtime, *values, *(states[n] for n in unit.program.state_params))
        labels = [emitted.marks[k].label for k in ticks]
        assert sum("optimizer.step()" in label for label in labels) == 1
        assert sum("loss.backward()" in label for label in labels) == 1
        assert sum(label == "env_step" for label in labels) == 4
        assert "optimizer.step()" not in emitted.source, "they are merged into one function"
    finally:
        fast.close()
        training.close()


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
