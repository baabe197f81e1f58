"""What ``why`` answers: codes, states, lines and chains."""

from __future__ import annotations

import pytest

from rose_compiler.base.errors import SourceLocation
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences, effects_of, title, why
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, Program, is_call
from tests.ir.depending import OPS, program

LINES = """
def f(x0, *, params, env, s):
    for t, obs in L(0, 9, 1, obs=x0):
        a = pure(obs)
        v = pure(obs)
        r = step(a, env)
        o = pure(r)
        w = write_t(s, t)
        yield o
    u = write(params)
    g = read(s)
    d = sample()
    e = sample()
    return 0
"""


def located(p: Program) -> Program:
    for n in p.nodes():
        if n.op == "call_function":
            facts.put(n, origin=facts.Origin(SourceLocation("ppo.py", 10 + len(n.name), 0, "x")))
    return p


def test_why_names_state_and_both_lines() -> None:
    p = located(program(OPS, LINES))
    blocked = why(p, p.find("w"), p.find("g"))
    assert blocked is not None
    assert blocked.code == "effects-conflict"
    assert " s " in blocked.why
    assert [w.file for w in blocked.where] == ["ppo.py"]
    far = why(p, p.find("a"), p.find("step"))
    assert far is not None
    assert far.code == "value-dependence"


def test_why_allows_what_no_dependence_forbids() -> None:
    p = program(OPS, LINES)
    assert why(p, p.find("v"), p.find("step")) is None  # the value head beside the simulator
    assert why(p, p.find("w"), p.find("step"), distance=1) is None  # stores beside the next step
    assert why(p, p.find("w"), p.find("u")) is None  # different levels


def test_why_follows_chains_and_says_through_whom() -> None:
    p = program(OPS, LINES)
    blocked = why(p, p.find("step"), p.find("step"), distance=1)
    assert blocked is not None
    assert blocked.code == "carried-dependence"
    chain = Dependences(p).path(p.find("a"), p.find("a"), distance=1)
    assert chain is not None
    assert [str(e.dst) for e in chain] == ["r", "o", "a"]
    assert sum(e.least for e in chain) == 1


def test_why_does_not_ask_for_an_order() -> None:
    p = program(OPS, LINES)
    assert why(p, p.find("d"), p.find("e")) == why(p, p.find("e"), p.find("d"))
    found = why(p, p.find("d"), p.find("e"))
    assert found is not None
    assert found.code == "draw-order"


def test_why_names_what_is_unknown() -> None:
    p = program(OPS, "def f(x, *, s):\n    o = opaque(x)\n    r = read(s)\n    return 0")
    found = why(p, p.find("o"), p.find("r"))
    assert found is not None
    assert found.code == "unknown-effects"
    assert found.verdict == "unknown"
    assert "opaque" in found.why
    assert found.allow is not None


def test_why_refuses_a_distance_outside_loops() -> None:
    p = program(OPS, LINES)
    with pytest.raises(ValueError, match="no loop holds both"):
        why(p, p.find("u"), p.find("g"), distance=1)
    inside = why(p, p.find("L"), p.find("a"))
    assert inside is not None
    assert inside.code == "unsupported-shape"


def test_effects_of_a_node_alone_cover_what_comes_from_outside() -> None:
    p = program(OPS, LINES)
    w = p.find("w")
    assert [str(e) for e in effects_of(w, p)] == ["W s[t]"]
    assert [str(e) for e in effects_of(w)] == ["W s"]


def test_network_holds_every_edge() -> None:
    p = program(OPS, LINES)
    deps = Dependences(p)
    graph = LoopView(p.find("L")).graph
    net = deps.network(graph)
    assert net.number_of_edges() == len(deps.edges(graph))
    assert set(net.nodes) == {n for n in graph.nodes if is_call(n)}


def test_a_numbered_statement_is_named_by_its_text() -> None:
    p = parse("""
@op(reads=["buf"], writes=[])
def blk_3(buf):
    # value = buf.obs.reshape(-1, *shape).to(device) + a_very_long_expression(buf)
    ...

@op(reads=["buf"], writes=[])
def load(buf):
    # y = load(buf)
    ...

def fn(*, buf):
    x = blk_3(buf)
    y = load(buf)
    return x, y
""")
    calls = [n for n in p.graph.nodes if n.op == "call_function"]
    assert [title(n) for n in calls] == [
        "`value = buf.obs.reshape(-1, *shape).to(device) …`",
        "`load`",
    ]
