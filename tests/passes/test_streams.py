"""Device work on streams of its own: what goes there, in which order, and what does not."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_compiler.base.decision import Decision
from rose_compiler.codegen import emit, load
from rose_compiler.ir import facts, interp
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.passes.base import Pass, PassContext
from rose_compiler.passes.late import LateWork
from rose_compiler.passes.manager import History, PassManager
from rose_compiler.passes.place import Place
from rose_compiler.passes.streams import Streams, issue_order
from rose_compiler.passes.tile_batch import TileBatch
from rose_compiler.runtime.recording import RecordingStreams
from rose_compiler.runtime.support import Runtime

CONTEXT = PassContext(options=Decision(streams=True), device="virtual:h200")

OPS = """
@op(kind="graph", reads=[], writes=[], results=2, may_raise=False)
def act(obs, w, v):
    h = torch.matmul(obs, w)
    action = torch.tanh(h)
    c = torch.matmul(obs, v)
    value = torch.sum(c, 1)
    return action, value

@op(kind="graph", reads=[], writes=[], may_raise=False)
def advance(obs, action):
    h = torch.matmul(action, obs)
    y = torch.tanh(h)
    return y

@op(kind="graph", reads=[], writes=[], may_raise=False)
def ref(x, w):
    h = torch.matmul(x, w)
    y = torch.tanh(h)
    return y

@op(reads=[], writes=["rows[t]"], results=0, may_raise=False)
def keep(rows, t, v): ...

@op(reads=["net"], writes=["net"], results=0)
def train(net, x): ...

@op(reads=[], writes=[])
def add(a, b): ...
"""
IMPLS: dict[str, Any] = {
    "keep": lambda rows, t, v: rows[t].copy_(v),
    "train": lambda net, x: net.add_(x.mean()),
    "add": lambda a, b: a + b,
}
ROLLOUT = (
    OPS
    + """
def roll(x, w, v, n, *, rows):
    for t, obs in loop0(0, n, 1, obs=x):
        made = act(obs, w, v)
        value = made[1]
        action = made[0]
        keep(rows, t, value)
        following = advance(obs, action)
        yield following
    last = loop0.obs
    return last
"""
)
PARALLEL = (
    OPS
    + """
def update(x, w, v, *, net):
    a = ref(x, w)
    b = ref(x, v)
    c = ref(a, v)
    d = add(b, c)
    train(net, d)
    return d
"""
)


def run(
    text: str, context: PassContext = CONTEXT, passes: Sequence[Pass] = (Streams(),)
) -> tuple[Program, History]:
    program = parse(text, IMPLS)
    return program, PassManager(passes, verify=2).run(program, context)


def issued(program: Program, loop: bool = True) -> list[str]:
    plan = emit(program).plan
    assert plan is not None
    return next(b for b in plan.bodies.values() if (b.loop is not None) is loop).describe()


def codes(history: History) -> set[str]:
    return {r.code for r in history.remarks.missed()}


def test_the_critic_is_cut_off_and_runs_beside_the_simulator(golden) -> None:  # type: ignore[no-untyped-def]
    history = golden("rollout", [Streams()], CONTEXT, program=parse(ROLLOUT, IMPLS))
    assert history.rewrites["streams"] == 2


def test_streams_are_fed_first_and_awaited_late() -> None:
    program, _ = run(ROLLOUT)
    lines = issued(program)
    submit, step = lines.index("submit made_late stream:made_late"), lines.index("run following")
    assert submit < lines.index("submit keep stream:made_late") < step
    assert "await keep stream:made_late stage 1" in lines


def test_what_lies_off_the_longest_path_gets_a_stream() -> None:
    program, history = run(PARALLEL)
    assert issued(program, loop=False) == [
        "submit b stream:b",
        "run a",
        "run c",
        "await b stream:b",
        "run d",
        "run train",
    ]
    assert "runs on lane 'stream:b' beside `ref`" in history.remarks.render()


def rollout(program: Program, streams: RecordingStreams | None, executor: Any = None) -> list[Any]:
    torch.manual_seed(0)
    x, w, v = (torch.rand(3, 3) for _ in range(3))
    rows = torch.zeros(4, 3)
    runtime = Runtime(streams=streams)
    if executor is not None:
        return [executor(program, (x, w, v, 4), {"rows": rows}), rows]
    if streams is None:
        return [load(emit(program))(runtime, x, w, v, 4, rows), rows]
    with streams:
        return [load(emit(program))(runtime, x, w, v, 4, rows), rows]


def test_bits_are_those_of_program_order_and_nothing_races() -> None:
    want = rollout(parse(ROLLOUT, IMPLS), None, interp.run)
    program, _ = run(ROLLOUT)
    streams = RecordingStreams()
    for found in (rollout(program, None), rollout(program, streams)):
        assert all(map(torch.equal, found, want))
    streams.check()
    assert {s for s, _ in streams.issued} == {0, 1}


@pytest.mark.parametrize(
    ("code", "context"),
    [
        ("switched-off", replace(CONTEXT, options=Decision())),
        ("may-raise", replace(CONTEXT, run_ahead=False)),
    ],
)
@pytest.mark.parametrize("text", [ROLLOUT, PARALLEL], ids=["rollout", "parallel"])
def test_what_is_switched_off_says_so(code: str, context: PassContext, text: str) -> None:
    program, history = run(text, context)
    assert codes(history) == {code}
    assert program.stage == "captured"


def test_what_all_else_waits_for_has_no_window() -> None:
    text = PARALLEL.replace("c = ref(a, v)", "c = ref(a, v)\n    e = ref(d0, v)").replace(
        "a = ref(x, w)", "d0 = ref(x, v)\n    a = ref(d0, w)"
    )
    assert "e = " in text
    _, history = run(text.replace("b = ref(x, v)", "b = ref(d0, v)"))
    assert history.rewrites["streams"] == 2  # both hang off the first
    chain = (
        OPS
        + """
def f(x, w, *, net):
    a = ref(x, w)
    b = ref(a, w)
    train(net, b)
    return b
"""
    )
    _, history = run(chain)
    assert not history.remarks


def test_no_more_than_three_streams_a_body() -> None:
    more = "".join(f"    e{k} = ref(x, v)\n    train(net, e{k})\n" for k in range(5))
    text = PARALLEL.replace("    return d\n", more + "    return d\n")
    _, history = run(text)
    assert history.rewrites["streams"] == 3
    assert "no-lane" in codes(history)


def test_without_a_device_nothing_is_looked_for() -> None:
    program, history = run(ROLLOUT, replace(CONTEXT, device=""))
    assert not history.remarks
    assert program.stage == "captured"


def test_what_records_gradients_stays() -> None:
    program = parse(PARALLEL, IMPLS)
    facts.put(program.find("b"), spec=facts.Spec("tensor", requires_grad=True))
    history = PassManager([Streams()]).run(program, CONTEXT)
    assert codes(history) == {"grad-graph"}
    assert "stream:" not in history.after()


def test_what_is_not_known_stays() -> None:
    unknown = '\n@op(calls=["module"])\ndef other(x, w): ...\n\ndef update'
    text = PARALLEL.replace("b = ref(x, v)", "b = other(x, v)").replace("\ndef update", unknown)
    _, history = run(text)
    assert "stream:" not in history.after()


def test_an_object_among_the_arguments_keeps_it_on_the_coordinator() -> None:
    program = parse(PARALLEL, IMPLS)
    for node in program.graph.nodes:
        if node.name == "v":
            facts.put(node, spec=facts.Spec("object", "somewhere.Holder"))
    history = PassManager([Streams()]).run(program, CONTEXT)
    assert "opaque-call" in codes(history)
    assert "stream:" not in history.after()


def test_a_device_takes_only_what_lies_on_it() -> None:
    def lanes(device: str) -> bool:
        program = parse(PARALLEL, IMPLS)
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in ("x", "w", "v"):
                facts.put(node, spec=facts.Spec("tensor", "torch.Tensor", (3, 3), device="cuda:0"))
        context = replace(CONTEXT, device=device)
        return "stream:" in PassManager([Streams()]).run(program, context).after()

    assert lanes("cuda:0")
    assert not lanes("cuda:1")


def test_the_order_keeps_every_dependence() -> None:
    draw = random.Random(0)
    for _ in range(12):
        program, _ = run(ROLLOUT if draw.random() < 0.5 else PARALLEL, CONTEXT, ())
        for graph in program.graphs():
            nodes = [n for n in graph.nodes if n.op == "call_function"]
            edges = [e for e in Dependences(program).edges(graph) if {e.src, e.dst} <= set(nodes)]
            lanes = {n for n in nodes if draw.random() < 0.4}
            order = issue_order(nodes, edges, lanes)
            at = {n: k for k, n in enumerate(order)}
            assert set(order) == set(nodes)
            assert all(at[e.src] < at[e.dst] for e in edges if not e.least and e.src is not e.dst)


def test_each_group_of_shards_has_a_stream() -> None:
    text = (Path(__file__).parent / "golden/tile_batch/rollout.in.txt").read_text()
    options = Decision(groups=2, late="shadow", streams=True)
    context = replace(
        CONTEXT, options=options, shards={"envs": (3, 3, 3, 3)}, asynchronous=frozenset({"envs"})
    )
    program = parse(text)
    history = PassManager([TileBatch(), LateWork(), Place(), Streams()], verify=2).run(
        program, context
    )
    lines = issued(program)
    for group in (0, 1):
        mine = [line for line in lines if line.endswith(f"stream:group{group}")]
        assert any(line.startswith("submit act") for line in mine), lines
    assert "beside" in history.remarks.for_pass("streams").applied().render()
