"""hoist: the part of a traced graph that is the same on every trip goes in front of the loop."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.interp import run
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program, is_call, op_of, placeholders
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.defer import Defer
from rose_compiler.passes.hoist import HoistInvariant
from rose_compiler.passes.manager import History, PassManager
from rose_compiler.passes.split import Split
from rose_compiler.passes.tile_batch import TileBatch


def test_out_of_two_loops(golden: Any) -> None:
    golden("prompt", [HoistInvariant()])


GRAPH = """
@op(kind="graph", reads=["w"], writes=[], may_raise=False{more})
def act(obs, prompt, w):
    hidden = torch.nn.functional.linear(prompt, w)
    active = torch.tanh(hidden)
    again = torch.nn.functional.linear(active, w)
    mean = again * 0.5
    row = obs + mean
    return row

@op(reads=["agent.w"], writes=["agent.w"], results=0)
def train(agent, row): ...

@op(reads=["prompt"], writes=["prompt"], results=0)
def rewrite(prompt): ...

@op()
def mystery(row): ...

@op(reads=[], writes=["host"], results=0)
def note(row): ...

def f(obs, prompt, T, *, agent):
    w = state(agent, "w")
    for t, o in trips(0, {trips}, 1, o=obs):
        row = act(o, prompt, w)
        {then}
        yield row
    return trips.o
"""


def text(then: str = "note(row)", more: str = "", trips: str = "T") -> str:
    return GRAPH.format(more=more, then=then, trips=trips)


def hoisted(text: str, context: PassContext | None = None) -> History:
    return PassManager([HoistInvariant()], verify=2).run(parse(text), context or PassContext())


def test_a_remark_tells_what_is_moved() -> None:
    (remark,) = hoisted(text()).remarks.applied()
    assert remark.why == (
        "4 of 5 torch calls in `act` are the same on every trip of trips: `act_fixed` makes them "
        "once, in front of it"
    )


@pytest.mark.parametrize(
    ("code", "program"),
    [
        ("reads-loop-state", text("train(agent, row)")),
        ("reads-loop-state", text("rewrite(prompt)")),
        ("reads-loop-state", text("k = mystery(row)")),
        ("grad-graph", text(more=', records=["w"]')),
    ],
)
def test_refused(blocked: Any, code: str, program: str) -> None:
    assert code in blocked(program, HoistInvariant())


@pytest.mark.parametrize(
    ("trips", "first", "moves"),
    [
        ("4", "pass_by(o)", "index_select"),
        ("T", "pass_by(o)", ""),
        ("4", "note(o)", ""),
    ],
)
def test_what_raises_for_values_moves_where_nothing_comes_first(
    trips: str, first: str, moves: str
) -> None:
    program = """@op(reads=[], writes=[], results=0, may_raise=False)
def pass_by(row): ...
""" + text(trips=trips).replace(
        "again = torch.nn.functional.linear(active, w)", "again = active.index_select(0, prompt)"
    ).replace("        row = act(", f"        {first}\n        row = act(")
    applied = [r.why for r in hoisted(program).remarks.applied()]
    assert bool(applied) == bool(moves)


def test_what_can_not_raise_moves_without_the_rest() -> None:
    program = text().replace("row = obs + mean", "row = obs + mean + mean.index_select(0, prompt)")
    (remark,) = hoisted(program).remarks.applied()
    assert remark.why.startswith("4 of 7")


@pytest.mark.parametrize("first", ["torch.rand_like(obs)", "obs.index_select(0, obs)"])
def test_an_error_overtakes_no_draw_and_no_other_error(first: str) -> None:
    program = (
        text(trips="4")
        .replace(
            "    hidden =",
            f"    drawn = {first}\n    picked = prompt.index_select(0, prompt)\n    hidden =",
        )
        .replace("linear(prompt, w)", "linear(picked, w)")
        .replace("obs + mean", "drawn + mean")
    )
    program = program.replace(
        'reads=["w"], writes=[]', 'reads=["w", "rng:torch"], writes=["rng:torch"]'
    )
    assert not hoisted(program).remarks.applied()
    behind = program.replace(f"    drawn = {first}\n", "").replace(
        "    row = drawn", f"    drawn = {first}\n    row = drawn"
    )
    assert hoisted(behind).remarks.applied()


def test_one_trip_has_nothing_to_gain() -> None:
    assert not hoisted(text(trips="1")).remarks.applied()
    context = PassContext(trips={"trips": 1})
    assert not hoisted(text(), context).remarks.applied()


def test_a_few_calls_on_little_stay_and_a_large_one_moves() -> None:
    small = (
        text()
        .replace("    active = torch.tanh(hidden)\n", "")
        .replace("linear(active", "linear(hidden")
    )
    assert not hoisted(small).remarks.applied()
    program = parse(small)
    for node in op_of(program.find("act")).body.graph.nodes:  # type: ignore[union-attr]
        if node.op != "output":
            facts.put(node, spec=Spec("tensor", "Tensor", (512, 512), "float32", "cpu"))
    history = PassManager([HoistInvariant()], verify=2).run(program, PassContext())
    assert len(history.remarks.applied()) == 1


ROWS, PLAIN = (
    Spec("tensor", "Tensor", (4, 3), "float32", "cpu"),
    Spec("tensor", "Tensor", (3, 3), "float32", "cpu"),
)
POLICY = """
@op(kind="graph", reads=["w"], writes=[], results=2, may_raise=False)
def act(obs, tokens, w):
    hidden = torch.nn.functional.linear(tokens, w)
    active = torch.tanh(hidden)
    again = torch.nn.functional.linear(active, w)
    mean = again * 0.5
    action = obs + mean
    score = torch.exp(action) * mean
    return action, score

@op(kind="step", reads=["envs"], writes=["envs"], attributes={"step": {"env": "envs", "action": "action"}})
def step(action, envs): ...

@op(reads=[], writes=["buf[t]"], results=0)
def store(buf, t, score): ...

@op(reads=[], writes=[], may_raise=False, batch={"result": 0, "return.0": 0})
def observe(result): ...

def rollout(obs0, *, agent, envs, buf):
    w = state(agent, "w")
    tokens = state(agent, "tokens")
    for t, obs in trips(0, 3, 1, obs=obs0):
        with no_grad():
            action, score = act(obs, tokens, w)
        store(buf, t, score)
        result = step(action, envs)
        nxt = observe(result)
        yield nxt
    return trips.obs
"""


def policy() -> Program:
    """A policy whose graph takes rows of tokens that are a state, so no rows of a batch."""

    def advance(action: torch.Tensor, envs: Any) -> torch.Tensor:
        assert envs is None or len(action) == envs.rows
        return action * 0.5

    def store(buf: Any, t: int, score: torch.Tensor) -> None:
        buf[t] = score.clone()

    program = parse(POLICY, {"step": advance, "store": store, "observe": lambda result: result})
    op = program.ops.by_name["act"]
    assert op.body is not None
    for node in op.body.graph.nodes:
        if node.op != "output":
            facts.put(node, spec=PLAIN if node.name == "w" else ROWS)
    op.attributes["rows"] = {"obs": 0}  # as capture leaves it where the proof fails
    for node in program.nodes():
        if is_call(node) and op_of(node).name == "act":
            facts.put(node, spec=Spec("tuple", "tuple", items=(ROWS, ROWS)))
        elif node.name in ("obs", "obs0", "action", "score", "nxt"):
            facts.put(node, spec=ROWS)
    return program


def outcome(program: Program, envs: Any = None) -> tuple[torch.Tensor, ...]:
    class Agent:
        w = torch.linspace(-1, 1, 9).reshape(3, 3)
        tokens = torch.linspace(-2, 2, 12).reshape(4, 3)

    buf: dict[int, torch.Tensor] = {}
    last = run(program, {"obs0": torch.ones(4, 3)}, {"agent": Agent(), "envs": envs, "buf": buf})
    return (last, *(buf[t] for t in sorted(buf)))


def test_the_rest_is_handed_rows_and_is_separable() -> None:
    program = policy()
    before = outcome(program)
    history = PassManager([HoistInvariant()], verify=2).run(program, PassContext())
    assert len(history.remarks.applied()) == 1
    op = program.ops.by_name["act"]
    assert op.body is not None
    axes = dict(op.signature.batch or ())
    assert axes == {"obs": 0, "mean": 0, "return.0": 0, "return.1": 0}
    assert [n.name for n in placeholders(op.body.graph)] == ["obs", "mean"]
    assert all(torch.equal(a, b) for a, b in zip(before, outcome(program), strict=True))


class Shards:
    """A simulator of two halves, for tiled programs."""

    def shards(self) -> list[Any]:
        return [Half(2), Half(2)]

    def merge(self, results: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(results)


class Half:
    def __init__(self, rows: int) -> None:
        self.rows = rows


def test_late_work_on_rows_from_outside_is_deferred_with_them() -> None:
    program = policy()
    before = outcome(program)
    context = PassContext(
        options=Decision(groups=2, defer=True),
        shards={"envs": (2, 2)},
        probe=lambda node, rows: "bits",
    )
    passes = [HoistInvariant(), Split(), TileBatch(), Defer()]
    history = PassManager(passes, verify=2).run(program, context)
    assert {r.pass_name for r in history.remarks.applied()} >= {
        "hoist",
        "split",
        "tile_batch",
        "defer",
    }
    assert all(torch.equal(a, b) for a, b in zip(before, outcome(program, Shards()), strict=True))
