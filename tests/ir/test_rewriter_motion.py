"""The rewriter on motions: each keeps what the program computes, or is refused."""

from __future__ import annotations

import pytest

from rose_compiler.base.errors import SourceLocation, VerifyError
from rose_compiler.ir import facts, interp
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, output_node
from rose_compiler.ir.verify import verify
from tests.ir.rewriting import BIND, EXPECTED, OPS, outcome, program, rewriter, the

# -- moving


def test_move_keeps_what_nothing_forbids() -> None:
    p = program()
    r = rewriter(p)
    r.move(the(p, "w"), before=the(p, "b"))
    assert the(p, "w").next is the(p, "b")
    r.move(the(p, "h"), before=the(p, "a"))
    r.move(the(p, "h"), after=the(p, "a"))
    assert the(p, "a").next is the(p, "h")
    assert outcome(p, 1, 2) == EXPECTED


@pytest.mark.parametrize(
    ("node", "place"),
    [
        ("b", {"before": "a"}),  # a value
        ("a", {"after": "b"}),
        ("a", {"after": "z"}),
        ("w", {"after": "break_if"}),  # a write past an exit
        ("z", {"before": "break_if"}),  # speculation
        ("break_if", {"before": "w"}),
    ],
)
def test_move_refuses_what_a_dependence_forbids(node: str, place: dict[str, str]) -> None:
    p = program()
    facts.put(the(p, node), origin=facts.Origin(SourceLocation("train.py", 5)))
    text = dump(p)
    with pytest.raises(VerifyError) as caught:
        rewriter(p).move(the(p, node), **{k: the(p, v) for k, v in place.items()})
    assert caught.value.code == "verify-dependence"
    assert "demo" in str(caught.value)
    assert caught.value.where == SourceLocation("train.py", 5)
    assert dump(p) == text


def test_move_refuses_states_out_of_order() -> None:
    p = program(
        "def f(x, *, s):\n    a = read(s)\n    w = push(s, x)\n    b = read(s)\n    return b"
    )
    r = rewriter(p)
    with pytest.raises(VerifyError, match="anti s"):
        r.move(the(p, "w"), before=the(p, "a"))
    with pytest.raises(VerifyError, match="flow s"):
        r.move(the(p, "w"), after=the(p, "b"))
    with pytest.raises(ValueError, match="another body"):
        r.move(the(p, "w"), before=output_node(program().graph))
    with pytest.raises(ValueError, match="beside"):
        r.move(the(p, "w"), after=output_node(p.graph))
    with pytest.raises(ValueError, match="beside"):
        r.move(the(p, "w"), before=next(iter(p.graph.nodes)))


def test_a_loop_moves_with_its_body() -> None:
    p = program(
        """
def f(x, *, s):
    a = double(x)
    for t in L(0, 3, 1):
        w = push(s, t)
        yield ()
    return a
"""
    )
    before = outcome(p, 1)
    rewriter(p).move(p.find("L"), before=the(p, "a"))
    assert outcome(p, 1) == before


# -- hoisting


def test_hoist_moves_what_is_the_same_on_every_trip() -> None:
    p = program()
    r = rewriter(p)
    loop = LoopView(p.find("L"))
    moved = r.hoist(the(p, "h"), out_of=loop)
    assert moved.graph is p.graph
    assert "demo" in facts.get(moved).origin.passes
    assert moved in loop.captured
    assert outcome(p, 1, 2) == EXPECTED


def test_hoist_takes_states_below_a_root_along() -> None:
    p = parse(
        OPS
        + """
def f(*, s):
    for t, x in L(0, 3, 1, x=0):
        w = state(s, "inner")
        r = read(w)
        n = add(x, r)
        yield n
    last = L.x
    return last
""",
        bind=dict(BIND),
    )
    r = rewriter(p)
    moved = r.hoist(the(p, "r"), out_of=p.find("L"))
    assert facts.get(moved.args[0]).state == "s.inner"
    verify(p)
    assert interp.run(p, [], {"s": type("S", (), {"inner": [2, 3]})()}) == 15


def test_hoist_moves_whole_loops_and_branches() -> None:
    p = program(
        """
def f(x, *, s):
    for t, y in L(0, 3, 1, y=x):
        for n, z in inner(0, 4, 1, z=x):
            d = double(z)
            if n:
                e = add(d, x)
                v = e
            else:
                v = d
            yield v
        o = inner.z
        q = add(y, o)
        yield q
    last = L.y
    return last
"""
    )
    before = outcome(p, 3)
    r = rewriter(p)
    moved = r.hoist(p.find("inner"), out_of=p.find("L"))
    assert moved.graph is p.graph
    assert outcome(p, 3) == before


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("v = double(t)", "varies"),
        ("v = double(y)", "varies"),
        ("v = push(s, x)", "s"),
        ("v = read(s)", "s"),
        ("v: state = alloc()", "instance"),
    ],
)
def test_hoist_refuses_what_varies(line: str, why: str) -> None:
    p = program(
        f"""
def f(x, *, s):
    for t, y in L(0, 3, 1, y=x):
        {line}
        w = push(s, t)
        yield y
    return x
"""
    )
    with pytest.raises(VerifyError, match=why):
        rewriter(p).hoist(the(p, "v"), out_of=p.find("L"))


def test_hoist_refuses_a_node_of_another_body() -> None:
    p = program()
    with pytest.raises(ValueError, match="not directly in the body of L"):
        rewriter(p).hoist(the(p, "p"), out_of=p.find("L"))
