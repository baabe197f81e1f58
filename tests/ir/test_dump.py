"""Printing programs: goldens, names, constants, and that text keeps the whole program."""

from __future__ import annotations

import math
import operator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_compiler.base.errors import SourceLocation, VerifyError
from rose_compiler.ir import facts
from rose_compiler.ir.dump import dump
from rose_compiler.ir.facts import Context, LoopFacts, Origin, Slot
from rose_compiler.ir.ops import BREAK_IF, CONTINUE_IF, RANDN, UNBOUND, Op, OpTable, Signature
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Builder, Program
from rose_compiler.testing.compare import difference
from rose_compiler.testing.programs import Generated, programs
from rose_compiler.testing.samples import ppo

GOLDEN = Path(__file__).parent / "golden"


def check_round_trip(program: Program) -> str:
    text = dump(program)
    again = parse(text)
    found = difference(program, again)
    assert found is None, f"{found}\n{text}"
    assert dump(again) == text
    return text


def program_of(top: Builder, returned: Any, states: tuple[str, ...] = (), **more: Any) -> Program:
    root = top.finish(returned)
    values = [
        n.name for n in root.graph.nodes if n.op == "placeholder" and facts.get(n).role == "value"
    ]
    program = Program(more.pop("name", "p"), root, OpTable(), tuple(values), states, **more)
    for node in program.nodes():
        if isinstance(node.target, Op) and node.target.kind != "builtin":
            program.ops.add(node.target)
    return program


def op(name: str, *params: str, results: int = 1, **more: Any) -> Op:
    kind, source = more.pop("kind", "block"), more.pop("source", ())
    attributes = more.pop("attributes", None)
    signature = Signature(
        name, params, more.pop("reads", ()), more.pop("writes", ()), results, **more
    )
    return Op(signature, kind=kind, source=source, attributes=attributes)


def rollout() -> Program:
    """A rollout with everything that structure can be."""
    traced = fx.symbolic_trace(
        lambda x, w: torch.tanh(torch.nn.functional.linear(x, w))[0:2].sum(1)
    )
    features = Op(
        Signature("features", ("x", "w"), ("w",), (), may_raise=False, batch=(("x", 0),)),
        kind="graph",
        body=traced,
        source=("y = net(x)", "    .sum(1)"),
    )
    act = op("act", "obs", "noise", "params", results=2, reads=("params",), kind="component")
    step = op(
        *("env_step", "action", "env"),
        reads=("env",),
        writes=("env",),
        kind="step",
        attributes={"step": {"env": "env", "action": "action"}},
    )
    store = op(*("store", "buf", "t", "obs"), writes=("buf.obs[t]",), results=0, declared=True)
    unknown = Op(Signature("train", ("params", "adv")), kind="component")
    new = op("new_table", "n", source=("table = {}",))
    grad, half = Context("no_grad"), Context("autocast", ("cpu", ("dtype", torch.bfloat16)))

    top = Builder()
    obs0 = top.placeholder("obs0", "value", borrowed=True, alias=("env.outputs",))
    params, env, buf = (top.placeholder(n, "state", state=n) for n in ("params", "env", "buf"))
    table = top.call(new, 3, name="table", state="%table")
    body = Builder(top)
    t = body.placeholder("t", "index")
    obs = body.placeholder("obs", "carried", alias=("env.outputs",), borrowed=True)
    body.placeholder("best", "carried", maybe_unbound=True)
    cpu = torch.device("cpu")
    noise = body.call(RANDN, 4, 2, torch.float32, cpu, name="noise", context=(grad,))
    acted = body.call(act, obs, noise, params, context=(grad, half))
    action = body.item(acted, 0, "action")
    stepped = body.call(step, action, env, name="r", alias=("env.outputs",), note="lent")
    body.call(store, buf, t, obs)
    later = body.graph.create_node("call_function", operator.add, (t, 1), name="later")
    body.call(store, buf, later, obs)
    done = body.graph.create_node("call_function", operator.getitem, (stepped, 2), name="done")
    weight = body.state(params, "actor.0.weight")
    then, orelse = Builder(body), Builder(body)
    inner = then.call(features, obs, weight, name="y")
    nested = Builder(then)
    nested.placeholder("k", "index")
    nested.call(CONTINUE_IF, done, ())
    nested.call(store, table, 0, inner)
    then.loop(nested, (), (obs,), (), LoopFacts("iter", "each", "k", has_exit=True))
    branch = body.branch(done, then, (inner, -1.5), orelse, (obs, math.inf))
    following = body.item(branch, 0, "following")
    body.call(BREAK_IF, done, (following, UNBOUND))
    loop = top.loop(
        body,
        (following, stepped),
        (0, 128, 1),
        (obs0, UNBOUND),
        LoopFacts("range", "rollout", "t", wrapper="tqdm", has_exit=True),
    )
    last = top.item(loop, 0, "last")
    forever = Builder(top)
    forever.placeholder("_trip", "index")
    forever.call(unknown, params, last, context=(grad,))
    forever.call(BREAK_IF, last, ())
    top.loop(forever, (), (), (), LoopFacts("while", "forever", "i"), context=(grad,))
    return program_of(top, {"last": (last,), "cut": slice(None, last, 2)}, ("params", "env", "buf"))


def scheduled() -> Program:
    program = rollout()
    program.stage = "scheduled"
    body = program.loops()[-1] if program.loops()[-1].label == "rollout" else program.loops()[-2]
    lanes = ["", "thread:infer", "shard:0", "stream:side"]
    for order, node in enumerate(n for n in body.graph.nodes if n.op == "call_function"):
        facts.put(node, slot=Slot(lanes[order % 4], order % 2, order))
    return program


@pytest.mark.parametrize(("name", "build"), [("rollout", rollout), ("scheduled", scheduled)])
def test_golden(name: str, build: Any) -> None:
    assert check_round_trip(build()) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_sample_of_a_whole_rollout_keeps_everything() -> None:
    text = check_round_trip(ppo().program)
    assert "action, logprob, _, value = act(obs, " in text


@settings(max_examples=80)
@given(programs())
def test_generated_programs_round_trip(generated: Generated) -> None:
    check_round_trip(generated.program)


def test_every_fact_is_either_printed_or_left_out_on_purpose() -> None:
    """A field that is added to the facts has to be dealt with in dump, parse and this test."""
    names = {
        kind.__name__: {f.name for f in fields(kind)} for kind in (facts.Facts, LoopFacts, Slot)
    }
    printed = {
        "role",
        "context",
        "alias",
        "borrowed",
        "loop",
        "slot",
        "state",
        "maybe_unbound",
        "note",
    }
    assert names["Facts"] == printed | {"spec", "cost", "origin"}
    assert names["LoopFacts"] == {"kind", "label", "index", "wrapper", "has_exit", "threads"}
    assert names["Slot"] == {"lane", "stage", "order"}
    signature = {f.name for f in fields(Signature)}
    told = {
        "name",
        "params",
        "reads",
        "writes",
        "results",
        "batch",
        "exact",
        "may_raise",
        "declared",
        "records",
    }
    assert signature == told


def test_facts_of_loops_round_trip() -> None:
    top = Builder()
    body = Builder(top)
    body.placeholder("t", "index", alias=("a",), borrowed=True, maybe_unbound=True, note="n")
    known = LoopFacts("iter", "epochs", "epoch", "tqdm", True, 2)
    top.loop(body, (), (3,), (), known, name="loop")
    text = check_round_trip(program_of(top, None))
    marks = 'label="epochs", index="epoch", wrapper="tqdm", threads=2, has_exit=True'
    assert f"for t in loop(3) @ loop({marks}) @ index(" in text


_texts = st.text(alphabet=st.characters(codec="utf-8"), max_size=6)


def _decorate(program: Program, data: st.DataObject) -> None:
    """Give nodes facts at random, those that only later stages set among them."""
    for node in program.nodes():
        if node.op != "call_function" or not data.draw(st.booleans()):
            continue
        lane = data.draw(st.sampled_from(["", "thread:a", "shard:1"]))
        facts.put(node, slot=Slot(lane, data.draw(st.integers(0, 2)), data.draw(st.integers(0, 9))))
        facts.put(node, note=data.draw(_texts), borrowed=data.draw(st.booleans()))
        facts.put(
            node, alias=tuple(data.draw(st.lists(st.sampled_from(["a.b", "%c"]), max_size=2)))
        )
        contexts = st.sampled_from([Context("no_grad"), Context("autocast", ("cpu",))])
        facts.put(node, context=tuple(data.draw(st.lists(contexts, max_size=2))))
        known = facts.get(node).loop
        if known is not None:
            facts.put(node, loop=replace(known, label=data.draw(_texts), index=data.draw(_texts)))


@settings(max_examples=60)
@given(programs(size=12), st.data())
def test_facts_of_any_node_round_trip(generated: Generated, data: st.DataObject) -> None:
    _decorate(generated.program, data)
    check_round_trip(generated.program)


_constants = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | _texts
    | st.sampled_from(
        [torch.float32, torch.int64, torch.strided, torch.channels_last, torch.device("cpu")]
    )
    | st.sampled_from([torch.device("cuda:1"), Ellipsis, UNBOUND]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(_texts, inner, max_size=2)
        | st.builds(slice, inner, inner, inner)
    ),
    max_leaves=6,
)


@settings(max_examples=300)
@given(_constants)
def test_constants_round_trip(constant: Any) -> None:
    top = Builder()
    top.call(op("f", "x"), constant)
    check_round_trip(program_of(top, constant))


def test_attributes_that_passes_read_are_kept_and_no_others() -> None:
    top = Builder()
    attributes = {
        "calls": frozenset({"module", "optimizer"}),
        "rows": {"obs": 0},
        "draws": (),
        "filename": "/somewhere/ppo.py",
        "live": Thing(),
    }
    call = top.call(op("f", attributes=attributes), name="y")
    text = check_round_trip(program_of(top, call))
    shown = 'calls=["module", "optimizer"], attributes={"rows": {"obs": 0}})'
    assert shown in text
    assert parse(text).ops.by_name["f"].attributes["calls"] == attributes["calls"]


def test_names_of_calls_in_traced_graphs_are_kept() -> None:
    """Attributes of the operation speak of draws and checks by name, used or not."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.create_node("call_function", torch.add, (x, 1), name="check_7")
    graph.output(x)
    body = fx.GraphModule(torch.nn.Module(), graph)
    top = Builder()
    y = top.call(Op(Signature("g", ("x",), (), ()), kind="graph", body=body), 1)
    again = parse(check_round_trip(program_of(top, y)))
    read = again.ops.by_name["g"].body
    assert read is not None
    assert [n.name for n in read.graph.nodes] == ["x", "check_7", "output"]


def test_costs_and_origins_are_comments() -> None:
    top = Builder()
    x = top.placeholder("x", "value")
    where = Origin(SourceLocation("ppo.py", 41), passes=("hoist", "split"))
    y = top.call(op("f", "x"), x, cost=0.0012, origin=where)
    program = program_of(top, y)
    text = dump(program, costs=True, origins=True)
    assert "    f = f(x)  # 1.200 ms | ppo.py:41 | by hoist, split\n" in text
    assert dump(parse(text)) == dump(program)


def test_a_body_may_not_hide_an_outer_value_that_it_uses() -> None:
    """The inner node has the name of an outer one that its body captures."""
    top = Builder()
    f = op("f", "x")
    outer = top.call(f, 1, name="y")
    body = Builder(top)
    body.placeholder("t", "index")
    inner = body.call(f, 2, name="y")
    body.call(op("g", "a", "b"), outer, inner)
    top.loop(body, (), (0, 1, 1), (), LoopFacts(label="loop", index="t"))
    text = check_round_trip(program_of(top, outer))
    assert "y_1 = f(2)" in text
    assert "g(y, y_1)" in text


def test_nested_loops_may_use_one_index_name() -> None:
    top = Builder()
    outer = Builder(top)
    t = outer.placeholder("t", "index")
    inner = Builder(outer)
    s = inner.placeholder("t", "index")
    inner.call(op("f", "a", "b"), t, s)
    outer.loop(inner, (), (0, 2, 1), (), LoopFacts(label="inner", index="t"))
    top.loop(outer, (), (0, 2, 1), (), LoopFacts(label="outer", index="t"))
    text = check_round_trip(program_of(top, None))
    assert "f(t, t_1)" in text


@pytest.mark.parametrize("name", ["torch", "operator", "UNBOUND", "input", "_", "math"])
def test_names_with_a_meaning_are_no_obstacle(name: str) -> None:
    top = Builder()
    x = top.placeholder(name, "value")
    y = top.call(op("f", name), x, name=name)
    program = program_of(top, (y, x))
    text = dump(program)
    again = parse(text)
    assert dump(again) == text
    assert again.ops.by_name["f"].signature.params == (name,)


@pytest.mark.parametrize(
    "name", ["agent.act", "float", "loop", "lambda", "<lambda>", "<block 3>", "ß", "1st"]
)
def test_operations_of_any_name_round_trip(name: str) -> None:
    top = Builder()
    y = top.call(op(name), name="y")
    z = top.call(op("agent_act", "x"), y, name="z")
    check_round_trip(program_of(top, (y, z)))


def test_a_program_of_any_name_round_trips() -> None:
    top = Builder()
    assert '@program(name="Trainer.update")' in check_round_trip(
        program_of(top, None, name="Trainer.update")
    )


def test_unnamed_nodes_take_no_name_of_the_text() -> None:
    """A node without users prints without a name, and may not get one that stands below it."""
    top = Builder()
    f = op("f", "x")
    top.call(f, 0)
    y = top.call(f, 1, name="f_1")
    z = top.call(f, y, name="f_2")
    w = top.call(f, z, name="body_then")
    then, orelse = Builder(top), Builder(top)
    top.branch(w, then, (), orelse, ())
    check_round_trip(program_of(top, (y, z, w)))


def test_small_tensor_constants_of_traced_graphs_keep_their_bits() -> None:
    module = torch.nn.Module()
    numbers = torch.tensor([0.1, math.inf, -0.0, math.nan, 1e-45, 3.0])
    module.register_buffer("numbers", numbers)
    graph = fx.Graph()
    graph.output(graph.get_attr("numbers"))
    body = fx.GraphModule(module, graph)
    top = Builder()
    call = top.call(Op(Signature("g", (), (), ()), body, kind="graph", body=body))
    again = parse(dump(program_of(top, call)))
    got = again.ops.by_name["g"]()
    assert got.dtype == numbers.dtype
    assert torch.equal(got.view(torch.int32), numbers.view(torch.int32))


def test_every_kind_of_call_in_a_traced_graph_round_trips() -> None:
    def body(x, y):  # type: ignore[no-untyped-def]
        z = torch.ops.aten.addmm.default(y, x, y, beta=2)
        z = (-(z.view(-1)[None, ..., 0:3:2] ** 2) > 1) | ~(z[0] == 0)
        z = torch.where(z, x.shape[0], math.pi)
        parts = torch.split(z, [1, 2], dim=1)
        return {"a": (parts[0], 2 - x), "b": [torch.full((2,), 7, dtype=torch.int64)]}

    traced = fx.symbolic_trace(body)
    top = Builder()
    x = top.placeholder("x", "value")
    call = top.call(Op(Signature("g", ("x", "y"), (), ()), kind="graph", body=traced), x, x)
    check_round_trip(program_of(top, call))


class Thing:
    def __repr__(self) -> str:
        return "<thing>"


def test_what_cannot_be_printed_is_named() -> None:
    top = Builder()
    y = top.call(op("f", "x"), 1)
    program = program_of(top, y)
    y.args = (Thing(),)  # type: ignore[assignment]
    with pytest.raises(VerifyError, match=r"type Thing can.t be printed: <thing>") as caught:
        dump(program)
    assert caught.value.code == "dump-unprintable"


def test_a_traced_graph_that_calls_an_unlisted_function_is_not_printed() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.load, ("file",)))
    body = fx.GraphModule(torch.nn.Module(), graph)
    top = Builder()
    y = top.call(Op(Signature("g", (), (), ()), kind="graph", body=body))
    with pytest.raises(VerifyError, match="none of the known functions"):
        dump(program_of(top, y))
