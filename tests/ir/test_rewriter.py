"""The rewriter: making, replacing and erasing nodes, remarks and fuel."""

from __future__ import annotations

import pytest

from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts, ops
from rose_compiler.ir.ops import Op, Signature
from rose_compiler.ir.program import LoopView
from rose_compiler.ir.rewriter import Fuel
from rose_compiler.ir.verify import verify
from tests.ir.rewriting import EXPECTED, outcome, program, rewriter, the

# -- making nodes


def test_a_call_is_stamped_registered_and_sees_outer_values() -> None:
    p = program()
    where = SourceLocation("train.py", 7)
    facts.put(the(p, "p"), origin=facts.Origin(where), context=(facts.Context("no_grad"),))
    r = rewriter(p)
    triple = Op(Signature("triple", ("x",), (), ()), lambda x: 3 * x)
    outer = p.find("c")
    new = r.call(triple, outer, before=the(p, "p"), like=the(p, "p"), name="three", note="new")
    assert p.ops.by_name["triple"] is triple
    assert (new.name, new.graph) == ("three", the(p, "p").graph)
    known = facts.get(new)
    assert known.origin == facts.Origin(where, (), ("demo",))
    assert known.context == (facts.Context("no_grad"),)
    assert known.note == "new"
    used = new.args[0]
    assert facts.get(used).role == "captured"
    assert outcome(p, 1, 2) == EXPECTED


def test_a_value_is_captured_once_through_every_level() -> None:
    p = program()
    r = rewriter(p)
    loop = LoopView(p.find("L"))
    count = len(loop.captured)
    k = next(n for n in p.graph.nodes if n.name == "k")
    first = r.call(p.ops.by_name["double"], k, before=the(p, "p"))
    second = r.call(p.ops.by_name["double"], k, before=the(p, "q"))
    assert len(loop.captured) == count + 1
    third = r.call(p.ops.by_name["double"], k, after=the(p, "p"))
    assert first.args == third.args
    assert second.args[0].graph is the(p, "q").graph
    assert outcome(p, 1, 2) == EXPECTED


def test_a_call_needs_one_place_and_values_in_reach() -> None:
    p = program()
    r = rewriter(p)
    double = p.ops.by_name["double"]
    with pytest.raises(ValueError, match="exactly one"):
        r.call(double, 1)
    with pytest.raises(ValueError, match="exactly one"):
        r.call(double, 1, before=the(p, "c"), after=the(p, "c"))
    with pytest.raises(ValueError, match="no graph around"):
        r.call(double, the(p, "a"), before=the(p, "last"))
    with pytest.raises(ValueError, match="two operations named"):
        r.call(double.with_signature(reads=None), 1, before=the(p, "c"))


def test_a_call_behind_a_placeholder_stands_behind_all_of_them() -> None:
    p = program()
    r = rewriter(p)
    first = next(iter(p.graph.nodes))
    r.call(p.ops.by_name["double"], first, after=first)
    kinds = [n.op for n in p.graph.nodes]
    assert kinds[:4] == ["placeholder"] * 3 + ["call_function"]


def test_items_are_shared_and_stand_behind_their_tuple() -> None:
    p = program("def f(x0):\n    r = two(x0)\n    a = double(x0)\n    b = r[1]\n    return b")
    r = rewriter(p)
    assert r.item(the(p, "r"), 1) is the(p, "b")
    assert the(p, "r").next is the(p, "b")
    new = r.item(the(p, "r"), 0)
    assert new.args == (the(p, "r"), 0)
    verify(p)


# -- changing nodes


def test_replace_reaches_bodies_that_captured_the_node() -> None:
    p = program()
    r = rewriter(p)
    c = the(p, "c")
    copy = r.call(p.ops.by_name["double"], c.args[0], after=c)
    r.replace(c, copy)
    assert not c.users
    r.erase(c)
    assert outcome(p, 1, 2) == EXPECTED


def test_replacing_by_a_value_that_is_captured_already_shares_its_placeholder() -> None:
    p = program(
        """
def f(x0, *, s):
    a = double(x0)
    b = double(x0)
    for t in L(0, 3, 1):
        if t:
            p = add(a, b)
            n = p
        else:
            n = 0
        w = push(s, b)
        yield ()
    return a
"""
    )
    before = outcome(p, 3)
    r = rewriter(p)
    r.replace(the(p, "b"), the(p, "a"))
    assert len(LoopView(p.find("L")).captured) == 2
    assert the(p, "p").args[0] is the(p, "p").args[1]
    r.erase(the(p, "b"))
    assert outcome(p, 3) == before


def test_replacing_by_a_constant_reaches_nested_bodies() -> None:
    p = program()
    r = rewriter(p)
    r.replace(the(p, "c"), 4)
    r.erase(the(p, "c"))
    assert the(p, "p").args[1] == 4
    assert the(p, "h").args == (4,)
    assert outcome(p, 1, 2) == EXPECTED


def test_a_snapshot_may_go_on_using_what_it_replaces() -> None:
    p = program()
    r = rewriter(p)
    a = the(p, "a")
    copy = r.call(ops.SNAPSHOT, a, after=a)
    r.replace(a, copy)
    assert list(a.users) == [copy]
    assert "demo" in facts.get(the(p, "b")).origin.passes
    assert outcome(p, 1, 2) == EXPECTED


def test_replace_for_some_users_alone() -> None:
    p = program()
    r = rewriter(p)
    a = the(p, "a")
    copy = r.call(ops.SNAPSHOT, a, after=a)
    r.replace(a, copy, users=[the(p, "w")])
    assert set(a.users) == {copy, the(p, "b")}
    assert outcome(p, 1, 2) == EXPECTED


def test_erase_refuses_what_is_used_and_takes_bodies_along() -> None:
    p = program()
    r = rewriter(p)
    with pytest.raises(ValueError, match="still used by b"):
        r.erase(the(p, "a"))
    loop = p.find("L")
    r.replace(the(p, "last"), 0)
    r.erase(the(p, "last"))
    r.erase(loop)
    assert [n.op for n in p.graph.nodes if n.op == "get_attr"] == []
    assert not dict(p.root.named_children())
    assert outcome(p, 1, 2) == (0, [1])


def test_facts_that_are_no_rewrite_are_not_stamped() -> None:
    p = program()
    r = rewriter(p)
    r.set_facts(the(p, "a"), slot=facts.Slot(), cost=0.1, spec=facts.Spec("scalar"))
    assert facts.get(the(p, "a")).origin.passes == ()
    r.set_facts(the(p, "a"), alias=("s",))
    assert facts.get(the(p, "a")).origin.passes == ("demo",)
    assert [str(e) for e in r.deps.effects(the(p, "b"))] == ["R s"]


# -- remarks and fuel


def test_remarks_carry_pass_line_and_gain() -> None:
    p = program()
    where = SourceLocation("train.py", 9)
    facts.put(the(p, "a"), origin=facts.Origin(where))
    r = rewriter(p)
    r.applied(the(p, "a"), "moved it", gain=0.5)
    r.applied(the(p, "b"), "moved it too", "shadow")
    r.missed(the(p, "a"), Blocker("no-window", "nothing there"))
    first, second, third = r.log
    assert (first.kind, first.pass_name, first.code, first.where) == (
        "applied",
        "demo",
        "demo",
        (where,),
    )
    assert first.gain == 0.5
    assert (second.code, second.where) == ("shadow", ())
    assert (third.kind, third.code, third.verdict) == ("missed", "no-window", "does-not-fit")
    assert r.rewrites == 2


def test_fuel_is_shared_and_runs_out() -> None:
    p = program()
    fuel = Fuel(2)
    first, second = rewriter(p, fuel=fuel), rewriter(p, fuel=fuel)
    assert first.spend()
    first.applied(the(p, "a"), "one")
    assert second.spend()
    second.applied(the(p, "a"), "two")
    assert not first.spend()
    assert not second.spend()
    assert rewriter(p).spend()
    assert not rewriter(p, fuel=0).spend()


def test_dependences_follow_every_change() -> None:
    p = program()
    r = rewriter(p)
    before = r.deps
    assert r.deps is before
    r.call(p.ops.by_name["double"], 1, before=the(p, "c"))
    assert r.deps is not before
    with pytest.raises(ValueError, match="no body"):
        r.owner(program().find("p").graph)
