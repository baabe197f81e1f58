"""Regions of autocast whose casts of weights are shared, and what stays together for them."""

from __future__ import annotations

import pytest

from rose_compiler.ir.deps import Dependences, why
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, Program
from tests.ir.verifying import broken

TEXT = """
@op(reads=["w"], writes=[], records=["w"])
def net(w, x): ...

@op(reads=["w"], writes=[], records=[])
def quiet(w, x): ...

@op(reads=[], writes=["@w.params"], results=0)
def change(a): ...

@op(reads=[], writes=[], records=[])
def pure(x): ...

def p(x, *, w):
    for t in trips(0, 4, 1):
        y = pure(x)
        with autocast("cpu", region=1):
            a = net(w, x)
            b = net(w, y)
        z = pure(b)
        yield ()
    return x
"""


def between(p: Program) -> set[tuple[str, str]]:
    graph = LoopView(p.find("trips")).graph
    edges = Dependences(p).edges(graph)
    return {(e.src.name, e.dst.name) for e in edges if e.state == "autocast" and e.applies(0)}


def test_nothing_gets_between_two_operations_that_share_casts() -> None:
    p = parse(TEXT)
    assert between(p) == {
        *(("y", n) for n in ("a", "b")),
        ("a", "b"),
        *((n, "z") for n in ("a", "b")),
    }
    blocked = why(p, p.find("y"), p.find("a"))
    assert blocked is not None
    assert blocked.code == "mode-change"
    assert why(p, p.find("y"), p.find("a"), distance=1) is not None


@pytest.mark.parametrize(
    "changes",
    [
        (("net(w, x)\n", "quiet(w, x)\n"), ("net(w, y)\n", "quiet(w, y)\n")),
        (("            b = net(w, y)\n", ""), ("pure(b)", "pure(a)")),
        (('"cpu", region', '"cpu", enabled=False, region'),),
        ((", region=1", ""),),
    ],
)
def test_where_it_does_not_show_nothing_is_held(changes: tuple[tuple[str, str], ...]) -> None:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    assert not between(parse(text))


def test_what_changes_weights_is_held_though_nothing_records() -> None:
    text = TEXT.replace("net(w, x)\n", "quiet(w, x)\n")
    line = "            b = net(w, y)\n"
    text = text.replace(line, line.replace("b = net", "change(a)\n            b = quiet"))
    assert ("a", "b") in between(parse(text))


def test_a_thread_runs_nothing_under_autocast() -> None:
    text = TEXT.replace("net(w, x)\n", 'quiet(w, x) @ lane("thread:a", stage=0, order=1)\n')
    text = text.replace("            b = net(w, y)\n", "").replace("pure(b)", "pure(a)")
    text = text.replace("pure(x)\n        with", "pure(x) @ lane(stage=0, order=0)\n        with")
    text = text.replace("pure(a)\n", "pure(a) @ lane(stage=0, order=2)\n")
    p = parse(text.replace("def p(", '@program(stage="scheduled")\ndef p('))
    assert broken(p) == "lanes"
