"""Dependences of exits, and of loops whose number of trips is known."""

from __future__ import annotations

from rose_compiler.ir.deps import why
from rose_compiler.ir.program import LoopView
from tests.ir.depending import OPS, edges, program

# -- exits


EXIT = """
def f(c, x0, *, s):
    for t, x in L(0, 9, 1, x=x0):
        a = pure(x)
        w = write(s)
        EXIT(c, (a,))
        b = pure(a)
        yield b
    return 0
"""


def test_nothing_passes_a_break() -> None:
    found = edges(program(OPS, EXIT.replace("EXIT", "break_if")), "L")
    control = {e for e in found if "control" in e}
    assert control == {
        "w->break_if control 0",
        "break_if->b control 0..",
        "break_if->a control 1..",
        "break_if->w control 1..",
        "break_if->break_if control 1..",
    }
    # a writes nothing: it may end after the test
    assert "a->break_if value 0" in found


def test_a_continue_holds_back_its_trip_and_what_it_hands_on() -> None:
    found = edges(program(OPS, EXIT.replace("EXIT", "continue_if")), "L")
    assert {e for e in found if "control" in e} == {
        "w->continue_if control 0",
        "continue_if->b control 0",
        "continue_if->a control 1",
    }
    assert {"a->a value 1", "b->a value 1"} <= found


def test_a_branch_with_a_break_is_an_exit() -> None:
    p = program(
        OPS,
        """
def f(c, *, s):
    for t in L(0, 9, 1):
        if c:
            break_if(True, ())
            n = 1
        else:
            n = 0
        w = write(s)
        yield ()
    return 0
""",
    )
    branch = next(n for n in LoopView(p.find("L")).graph.nodes if n.users and "branch" in n.name)
    assert f"{branch}->w control 0.." in edges(p, "L")
    found = why(p, branch, p.find("w"))
    assert found is not None
    assert found.code == "early-exit"


# -- trips


def test_distances_beyond_the_last_trip_are_none() -> None:
    text = """
def f(*, s):
    for t in L(0, N, 1):
        w = write_t(s, n)
        r = read_t(s, t)
        yield ()
    return 0
""".replace("        w =", "        n = t + 3\n        w =")
    assert "w->r flow s 3" in edges(program(OPS, text.replace("N", "4")), "L")
    assert not any("flow" in e for e in edges(program(OPS, text.replace("N", "3")), "L"))
