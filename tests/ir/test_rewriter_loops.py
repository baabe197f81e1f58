"""The rewriter on loops: carried values, new loops and clones."""

from __future__ import annotations

from rose_compiler.base.errors import SourceLocation
from rose_compiler.ir import facts, ops
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    op_of,
    output_node,
    placeholders,
)
from rose_compiler.ir.verify import verify
from tests.ir.rewriting import EXPECTED, outcome, program, rewriter, the

# -- carrying, building, cloning


def test_an_added_carried_value_is_handed_out_by_exits() -> None:
    p = program()
    r = rewriter(p)
    loop = LoopView(p.find("L"))
    param, result = r.add_carried(
        loop, 100, lambda n: r.call(p.ops.by_name["add"], n, 1, before=output_node(loop.graph))
    )
    assert param in loop.carried
    # the next value stands behind the exit, so leaving there hands out the current one
    assert p.find("break_if").args[1][1] is param
    output_node(p.graph).args = (result,)
    assert outcome(p, 1, 2) == (103, EXPECTED[1])


def test_an_added_carried_value_made_in_front_of_an_exit() -> None:
    p = program()
    r = rewriter(p)
    loop = LoopView(p.find("L"))
    _, result = r.add_carried(
        loop, 100, lambda n: r.call(p.ops.by_name["add"], n, 1, before=the(p, "a"))
    )
    output_node(p.graph).args = (result,)
    assert outcome(p, 1, 2) == (104, EXPECTED[1])


def test_exits_in_branches_hand_out_an_added_carried_value() -> None:
    p = program(
        """
def f(x, *, s):
    for t in L(0, 5, 1):
        if t:
            stop = t == 2
            break_if(stop, ())
            n = 1
        else:
            n = 0
        w = push(s, t)
        yield ()
    return x
"""
    )
    before = outcome(p, 7)
    r = rewriter(p)
    loop = LoopView(p.find("L"))
    _, result = r.add_carried(
        loop, p.find("x"), lambda n: r.call(p.ops.by_name["double"], n, before=the(p, "w"))
    )
    output_node(p.graph).args = (result,)
    assert outcome(p, 7) == (28, before[1])


def test_new_loops_capture_what_they_use() -> None:
    p = program()
    r = rewriter(p)
    where = SourceLocation("train.py", 3)
    facts.put(the(p, "last"), origin=facts.Origin(where))
    known = facts.LoopFacts(label="N", index="i")
    lb = r.new_loop(
        before=output_node(p.graph),
        bounds=(0, 3, 1),
        carried=(the(p, "last"),),
        known=known,
        like=the(p, "last"),
    )
    add = p.ops.by_name["add"]
    y = lb.call(add, lb.params[0], the(p, "c"))
    z = lb.call(add, y, lb.index)
    node = lb.close((z,))
    output_node(p.graph).args = (r.item(node, 0),)
    assert facts.get(node).origin == facts.Origin(where, (), ("demo",))
    assert facts.get(y).origin.passes == ("demo",)
    assert LoopView(node).facts == known
    assert outcome(p, 1, 2) == (EXPECTED[0] + 3 * 4 + 3, EXPECTED[1])


def test_a_builder_makes_branches_in_bodies() -> None:
    p = program()
    r = rewriter(p)
    b = r.builder(before=the(p, "z"))
    double = p.ops.by_name["double"]
    then, orelse = b.nested(), b.nested()
    a = then.call(double, the(p, "c"))
    node = b.branch(the(p, "stop"), then, (a,), orelse, (the(p, "a"),))
    picked = b.item(node, 0)
    r.replace(the(p, "h"), picked, users=[the(p, "z")])
    assert BranchView(node).node.graph is the(p, "z").graph
    verify(p)
    assert outcome(p, 1, 2)[0] != EXPECTED[0]


def test_clones_of_loops_are_independent() -> None:
    p = program()
    r = rewriter(p)
    loop = p.find("L")
    copy = r.clone(loop, {the(p, "c"): 0}, before=output_node(p.graph))
    inside = LoopView(copy).graph
    assert inside is not LoopView(loop).graph
    for node in inside.nodes:
        if node.op == "call_function":
            assert "demo" in facts.get(node).origin.passes
    first = next(n for n in inside.nodes if n.name == "a")
    r.replace(first, 0)
    result, state = outcome(p, 1, 2)
    assert result == EXPECTED[0]
    assert state[: len(EXPECTED[1])] == EXPECTED[1]
    assert state[len(EXPECTED[1]) :] == [0] * 4


def test_clones_for_another_state_rename_it_all_the_way_down() -> None:
    p = parse(
        """
@op(kind="step", reads=["env"], writes=["env"], attributes={"step": {"env": "env", "action": "a"}})
def step(a, env): ...
def f(a, *, env):
    for t in L(0, 3, 1):
        if a:
            r = step(a, env) @ facts(alias=["env.outputs"], borrowed=True)
            w = state(env, "x.y")
            n = 1
        else:
            n = 0
        yield ()
    return a
"""
    )
    r = rewriter(p)
    env = next(n for n in p.graph.nodes if n.name == "env")
    shard = r.call(ops.SHARD, env, 0, before=p.find("L"), state="env.0")
    copy = r.clone(p.find("L"), {env: shard}, before=output_node(p.graph))
    verify(p)
    arm = BranchView(next(n for n in LoopView(copy).graph.nodes if n.target is ops.BRANCH)).then
    calls = {op_of(n).name: n for n in arm.graph.nodes if n.op == "call_function"}
    assert facts.get(calls["step"]).alias == ("env.0.outputs",)
    assert facts.get(calls["state"]).state == "env.0.x.y"
    assert [str(e) for e in r.deps.effects(copy)][:2] == ["R env.0", "W env.0"]


def test_a_clone_that_captures_one_value_twice_shares_its_placeholder() -> None:
    p = program(
        """
def f(x, y, *, s):
    for t in L(0, 3, 1):
        for n in inner(0, 2, 1):
            a = add(x, y)
            w = push(s, a)
            yield ()
        yield ()
    return x
"""
    )
    r = rewriter(p)
    x, y = list(p.graph.nodes)[:2]
    copy = r.clone(p.find("L"), {y: x}, before=output_node(p.graph))
    assert len(LoopView(copy).captured) == 2
    assert outcome(p, 3, 4) == (3, [1] + [7] * 6 + [6] * 6)


def test_a_cloned_birth_is_a_new_instance() -> None:
    p = program(
        """
def f(x, *, s):
    for t in L(0, 3, 1):
        v: state = alloc()
        w = push(v, x) @ facts(alias=["%v"])
        yield ()
    u: state = alloc()
    return x
"""
    )
    r = rewriter(p)
    copy = r.clone(p.find("L"), {}, before=output_node(p.graph))
    state = next(facts.get(n).state for n in LoopView(copy).graph.nodes if n.name == "v")
    assert state not in ("%v", "%u")
    w = next(n for n in LoopView(copy).graph.nodes if n.name == "w")
    assert facts.get(w).alias == (state,)
    other = r.clone(the(p, "u"), {}, before=output_node(p.graph))
    assert facts.get(other).state not in ("%u", "%v", state)
    verify(p)
    # both loops keep an instance a trip of their own
    for node in (p.find("L"), copy):
        graph = LoopView(node).graph
        assert all(e.distance == 0 for e in r.deps.edges(graph))


def test_captured_values_of_a_branch_come_into_both_arms() -> None:
    p = program()
    r = rewriter(p)
    branch = next(n for n in LoopView(p.find("L")).graph.nodes if n.target is ops.BRANCH)
    inner = r.import_value(branch, the(p, "a"))
    assert inner.graph is BranchView(branch).then.graph
    again = r.import_value(branch, the(p, "a"), graph=BranchView(branch).orelse.graph)
    assert again.graph is BranchView(branch).orelse.graph
    assert outcome(p, 1, 2) == EXPECTED


def test_placeholders_of_one_name_can_be_copied() -> None:
    p = program(
        """
def f(x, *, s):
    for t, x in L(0, 3, 1, x=x):
        a = double(x)
        w = push(s, a)
        yield a
    last = L.x
    return last
"""
    )
    r = rewriter(p)
    loop = LoopView(p.find("L"))
    outer = next(n for n in p.graph.nodes if n.name == "x")
    inner = r.use(outer, loop.graph)
    r.add_carried(loop, 0, inner, name="x")
    # fx compiles the copy, and refuses two parameters of one name
    copy = r.clone(loop.node, {}, before=loop.node)
    targets = [n.target for n in placeholders(LoopView(copy).graph)]
    assert len(set(targets)) == len(targets) == 5
    verify(p)
