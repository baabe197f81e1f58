"""canonicalize: static branches, dead work and unread results go; what has an effect or may raise
stays."""

from __future__ import annotations

import pytest
import torch

from rose_compiler.ir.interp import run
from rose_compiler.ir.parse import parse
from rose_compiler.passes.canonicalize import Canonicalize
from rose_compiler.passes.manager import PassManager


def after(text: str) -> str:
    program = parse(text)
    return PassManager([Canonicalize()], verify=2).run(program).after()


def test_branches_exits_and_loops_that_are_static(golden) -> None:
    golden("branches", [Canonicalize()])


def test_results_that_nobody_reads_are_sliced_off(golden) -> None:
    golden("results", [Canonicalize()])


def test_effects_and_what_may_raise_stay() -> None:
    text = after(
        """
@op(reads=["log"], writes=["log"])
def note(log, x): ...

@op(reads=[], writes=[])
def may_raise(x): ...

@op(reads=["rng:torch"], writes=["rng:torch"], may_raise=False)
def draw(x): ...

def f(x, *, log):
    a = note(log, x)
    b = may_raise(x)
    c = draw(x)
    d = randn(3, torch.float32, "cpu")
    return x
"""
    )
    for call in ("note(log, x)", "may_raise(x)", "draw(x)", "randn(3"):
        assert call in text


def test_checks_and_draws_inside_a_graph_stay() -> None:
    text = after(
        """
@op(kind="graph", reads=["rng:torch"], writes=["rng:torch"], results=2)
def net(x):
    ok = x > 0
    c = rose_compiler.checks.check_valid(ok, "not valid", x)
    dead_draw = torch.rand_like(x)
    dead = torch.tanh(x)
    kept = x + 1
    return kept, dead

def f(x):
    kept, dead = net(x)
    return kept
"""
    )
    body = text.split("def net(x):")[1].split("def f(")[0]
    assert "check_valid" in body
    assert "rand_like" in body
    assert "tanh" not in body


def test_what_may_raise_for_values_inside_a_graph_stays() -> None:
    text = """
@op(kind="graph", reads=[], writes=[], may_raise=False, results=2)
def embed(x, at):
    found = torch.ops.aten.index_select.default(x, 0, at)
    dead = torch.tanh(found)
    kept = x + 1
    return kept, dead

@op(kind="graph", reads=[], writes=[], may_raise=False)
def look(x, at):
    found = torch.ops.aten.index_select.default(x, 0, at)
    return found

def f(x, at, far):
    kept, dead = embed(x, at)
    unread = look(x, far)
    return kept
"""
    program = parse(text)
    PassManager([Canonicalize()], verify=2).run(program)
    x, near, far = torch.ones(3), torch.tensor([2]), torch.tensor([3])
    run(program, {"x": x, "at": near, "far": near})
    for given in ({"at": far, "far": near}, {"at": near, "far": far}):
        with pytest.raises(IndexError):
            run(program, {"x": x, **given})


def test_a_chain_of_dead_operations_goes_in_one_run() -> None:
    text = after(
        """
@op(reads=[], writes=[], may_raise=False)
def double(x): ...

def f(x):
    a = double(x)
    b = double(a)
    c = double(b)
    return x
"""
    )
    assert "double" not in text


def test_the_kept_results_have_the_same_values() -> None:
    text = """
@op(kind="graph", reads=[], writes=[], results=3, may_raise=False)
def net(x):
    a = torch.tanh(x)
    b = a + x
    c = b * 2
    return a, b, c

def f(x):
    a, b, c = net(x)
    return c, a
"""
    x = torch.randn(4, 3)
    want = run(parse(text), {"x": x})
    program = parse(text)
    history = PassManager([Canonicalize()], verify=2).run(program)
    assert len(history.remarks.applied()) == 1
    got = run(program, {"x": x})
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
