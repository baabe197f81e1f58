"""The views over nested graphs, and the builder that makes them."""

from __future__ import annotations

import pytest
import torch.fx as fx

from rose_compiler.ir import facts, interp, ops
from rose_compiler.ir.facts import LoopFacts
from rose_compiler.ir.ops import Op, OpTable, Signature
from rose_compiler.ir.program import (
    BranchView,
    Builder,
    LoopView,
    Program,
    children,
    is_call,
    is_exit,
    is_item,
    is_state,
    is_structure,
    op_of,
    output_node,
    placeholders,
    state_name,
)
from rose_compiler.ir.verify import verify

ADD = Op(Signature("add", ("a", "b"), (), ()), lambda a, b: a + b)
PUSH = Op(Signature("push", ("s", "a"), ("s",), ("s",), results=0), lambda s, a: s.append(a))
PAIR = Op(Signature("pair", ("a",), (), (), results=2), lambda a: (a, a + 1))


def nest() -> Program:
    """Two nested loops, a branch and an exit in the inner one."""
    root = Builder()
    x = root.placeholder("x", "value")
    s = root.placeholder("s", "state", state="s")
    body = Builder(root)
    t = body.placeholder("t", "index")
    acc = body.placeholder("acc", "carried")
    inner = Builder(body)
    n = inner.placeholder("n", "index")
    low = inner.placeholder("low", "carried")
    y = inner.call(ADD, low, x)
    then, orelse = Builder(inner), Builder(inner)
    then.call(PUSH, s, t)
    doubled = then.call(ADD, y, y)
    chosen = inner.item(inner.branch(n, then, (doubled,), orelse, (y,)), 0)
    inner.call(ops.BREAK_IF, False, (chosen,))
    low_loop = body.loop(inner, (chosen,), (0, 2, 1), (acc,), LoopFacts(label="inner", index="n"))
    top_loop = root.loop(
        body, (body.item(low_loop, 0),), (0, 3, 1), (x,), LoopFacts(label="outer", index="t")
    )
    root_module = root.finish(root.item(top_loop, 0))
    table = OpTable()
    for op in (ADD, PUSH):
        table.add(op)
    return Program("nest", root_module, table, ("x",), ("s",))


def test_a_built_nest_is_sound_and_runs() -> None:
    p = nest()
    verify(p)
    pushed: list[int] = []
    assert interp.run(p, [1], {"s": pushed}) == reference(1)
    assert pushed == [0, 1, 2]


def reference(x: int) -> int:
    acc = x
    for _ in range(3):
        low = acc
        for n in range(2):
            y = low + x
            low = y + y if n else y
        acc = low
    return acc


def test_graphs_come_innermost_first() -> None:
    p = nest()
    graphs = list(p.graphs())
    assert len(graphs) == 5
    assert graphs[-1] is p.graph
    owners = [view.graph for view in p.loops()]
    assert [graphs.index(g) for g in owners] == [2, 3]
    assert [view.label for view in p.loops()] == ["inner", "outer"]
    assert len(list(p.nodes())) == sum(len(g.nodes) for g in graphs)


def test_loop_views_name_every_part() -> None:
    p = nest()
    outer, inner = LoopView(p.find("outer")), LoopView(p.find("inner"))
    assert outer.bounds == (0, 3, 1)
    assert [n.name for n in outer.carried_init] == ["x"]
    assert outer.index.name == "t"
    assert [n.name for n in outer.carried] == ["acc"]
    assert {n.name for n in outer.captured} == {"x", "s"}
    assert [facts.get(n).role for n in outer.captured_params] == ["captured", "captured"]
    assert outer.outer(outer.captured_params[0]) is outer.captured[0]
    assert outer.outer(outer.index) is outer.index
    assert [n.args[0] for n in outer.carried_next] == [inner.node]
    assert outer.result(0) is output_node(p.graph).args[0]
    assert outer.result(1) is None
    assert inner.facts == LoopFacts(label="inner", index="n")
    assert dict(children(p.root)) == {outer.node: outer.body}


def test_branch_views_name_every_part() -> None:
    p = nest()
    node = next(n for n in p.nodes() if is_call(n, ops.BRANCH))
    branch = BranchView(node)
    assert branch.pred.name == "n"
    # both arms take the same values, in the same order
    for arm in (branch.then, branch.orelse):
        params = placeholders(arm.graph)
        assert [facts.get(x).state for x in params] == [facts.get(x).state for x in branch.captured]
        assert len(params) == len(branch.captured) == 3
    assert [child for _, child in children(LoopView(p.find("inner")).body)] == [
        branch.then,
        branch.orelse,
    ]


def test_states_keep_their_name_in_every_body() -> None:
    p = nest()
    names = {state_name(n) for g in p.graphs() for n in placeholders(g) if is_state(n)}
    assert names == {"s"}
    with pytest.raises(TypeError, match="is a value"):
        state_name(p.find("x"))


def test_states_below_a_root_have_a_path() -> None:
    b = Builder()
    agent = b.placeholder("agent", "state", state="agent")
    weight = b.state(agent, "actor.0.weight")
    assert state_name(weight) == "agent.actor.0.weight"
    assert weight.target is ops.STATE
    assert weight.args == (agent, "actor.0.weight")


def test_find_prefers_names_over_operations() -> None:
    p = nest()
    assert p.find("push").target is PUSH
    assert p.find("outer").target is ops.LOOP
    with pytest.raises(KeyError, match="nothing"):
        p.find("nothing")


def test_kinds_of_nodes() -> None:
    p = nest()
    loop = p.find("outer")
    exit_ = p.find("break_if")
    assert is_structure(loop)
    assert is_structure(exit_)
    assert is_exit(exit_)
    assert not is_structure(p.find("push"))
    picked = output_node(p.graph).args[0]
    assert isinstance(picked, fx.Node)
    assert is_item(picked)
    assert not is_call(picked)
    assert op_of(loop) is ops.LOOP
    with pytest.raises(TypeError, match="calls no operation"):
        op_of(picked)


def test_a_value_of_no_enclosing_graph_is_refused() -> None:
    one, other = Builder(), Builder()
    x = one.placeholder("x", "value")
    with pytest.raises(ValueError, match="belongs to no enclosing graph"):
        other.call(ADD, x, 1)


def test_picks_carry_the_facts_of_their_tuple() -> None:
    b = Builder()
    x = b.placeholder("x", "value")
    pair = b.call(PAIR, x, borrowed=True, alias=("env.outputs",), state="")
    first = b.item(pair, 0)
    assert facts.get(first).borrowed
    assert facts.get(first).alias == ("env.outputs",)


def test_bodies_of_one_name_are_kept_apart() -> None:
    root = Builder()
    loops = []
    for _ in range(2):
        body = Builder(root)
        body.placeholder("i", "index")
        loops.append(root.loop(body, (), (0, 1, 1), (), LoopFacts(label="L")))
    module = root.finish(0)
    p = Program("p", module, OpTable())
    verify(p)
    assert LoopView(loops[0]).body is not LoopView(loops[1]).body
    assert [n.name for n in loops] == ["l", "l_1"] or [n.name for n in loops] == ["L", "L_1"]


def test_placeholders_come_first_however_late_they_are_needed() -> None:
    root = Builder()
    x = root.placeholder("x", "value")
    y = root.placeholder("y", "value")
    body = Builder(root)
    i = body.placeholder("i", "index")
    a = body.call(ADD, i, x)
    body.call(ADD, a, y)
    root.loop(body, (), (0, 1, 1), (), LoopFacts())
    kinds = [n.op for n in body.graph.nodes]
    assert kinds == ["placeholder"] * 3 + ["call_function"] * 2 + ["output"]


def test_tables_keep_names_unique() -> None:
    table = OpTable()
    table.add(ADD)
    table.add(ADD)
    with pytest.raises(ValueError, match="two operations named 'add'"):
        table.add(Op(Signature("add")))
    assert table.fresh("add") == "add_1"
    assert table.fresh("new") == "new"
    assert table.fresh("loop") != "loop"


def test_facts_are_frozen_and_copied_with_a_stamp() -> None:
    b = Builder()
    x = b.placeholder("x", "value", note="n")
    y = b.call(ADD, x, 1)
    facts.copy(x, y, pass_name="demo")
    assert facts.get(y).origin.passes == ("demo",)
    facts.copy(y, x, pass_name="demo")
    assert facts.get(x).origin.passes == ("demo",)
    with pytest.raises(AttributeError):
        facts.get(x).note = "changed"  # type: ignore[misc]
    # deepcopy of a graph shares what facts hold, and that is harmless
    assert hash(facts.get(x)) == hash(facts.get(x))
