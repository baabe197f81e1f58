"""interleave: forwards over what was collected go into the loop that collects, trip by trip, where
no dependence is turned round."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.ir import interp
from rose_compiler.ir.ops import LOOP
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, Program, is_call, op_of
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.interleave import Interleave, interleaves
from rose_compiler.passes.late import LateWork
from rose_compiler.passes.manager import History, PassManager
from rose_compiler.testing import slots

CONTEXT = PassContext(
    options=Decision(accumulate=True, late="shadow", lanes="thread"),
    shards={"env": (2,)},
    asynchronous=frozenset({"env"}),
)
TEXT = """
@op(kind="step", reads=["env"], writes=["env"], attributes={"step": {"env": "env", "action": "action"}})
def step(action, env): ...

@op(reads=[], writes=[])
def act(obs): ...

@op(reads=[], writes=["buf.obs[t]"], results=0)
def put(buf, t, obs): ...

@op(reads=["other.params", "buf.obs[t]"], writes=["buf.kept[t]"], results=0, calls=["module"])
def look(buf, other, t): ...

@op(reads=["buf.kept", "net.params"], writes=["net.params"], results=0, calls=["optimizer"])
def update(buf, net): ...

def train(obs0, *, net, other, env, buf):
    for t, obs in trips(0, 5, 1, obs=obs0):
        action = act(obs)
        put(buf, t, obs)
        seen = step(action, env)
        yield seen
    with no_grad():
        for t in again(0, 5, 1):
            look(buf, other, t)
            yield ()
    update(buf, net)
    return trips.obs
"""


class Things:
    def __init__(self) -> None:
        self.obs: dict[int, float] = {}
        self.kept: dict[int, float] = {}
        self.w, self.at = 1.0, 0.0


def put(buf: Things, t: int, obs: float) -> None:
    buf.obs[t] = obs


def look(buf: Things, other: Things, t: int) -> None:
    buf.kept[t] = other.w + buf.obs[t]


def step(action: float, env: Things) -> float:
    env.at = 3 * env.at + action
    return env.at


def update(buf: Things, net: Things) -> None:
    net.w += sum(buf.kept.values())


BIND: dict[str, Callable[..., Any]] = {
    "act": lambda obs: obs + 1,
    "put": put,
    "look": look,
    "step": step,
    "update": update,
}


def passed(text: str, context: PassContext = CONTEXT) -> tuple[Program, History]:
    program = parse(text, bind=BIND)
    return program, PassManager([Interleave(), LateWork()], verify=2).run(program, context)


def objects() -> dict[str, Any]:
    return {name: Things() for name in ("net", "other", "env", "buf")}


def test_forwards_run_while_the_simulator_steps() -> None:
    assert interleaves(parse(TEXT))
    program, history = passed(TEXT)
    (loop,) = [LoopView(n) for n in program.graph.nodes if is_call(n, LOOP)]
    assert "look" in {op_of(n).name for n in loop.graph.nodes if is_call(n)}
    told = [r.pass_name for r in history.remarks.applied() if "look" in r.why]
    assert "late" in told
    plain = objects()
    interp.run(parse(TEXT, bind=BIND), [0.5], plain)
    for seed in range(4):
        found = objects()
        slots.run(program, [0.5], found, seed=seed)
        assert {k: vars(v) for k, v in found.items()} == {k: vars(v) for k, v in plain.items()}


def test_what_the_collection_leaves_may_be_used_behind_both() -> None:
    """Two operations between the loops, of which the second waits for the first."""
    text = TEXT.replace(
        "    with no_grad():\n",
        "    kept = act(trips.obs)\n    told = act(kept)\n    with no_grad():\n",
    )
    text = text.replace("return trips.obs", "return told")
    program, history = passed(text)
    assert [r.pass_name for r in history.remarks.applied()][:1] == ["interleave"]
    assert interp.run(program, [0.5], objects()) == interp.run(
        parse(text, bind=BIND), [0.5], objects()
    )


REFUSED: dict[str, tuple[str, str]] = {
    # a whole batch is looked at, of which a later trip collects a part
    "incomplete-group": ('reads=["other.params", "buf.obs[t]"]', 'reads=["other.params", "buf.obs"]'),
    "unknown-effects": ('@op(reads=["other.params", "buf.obs[t]"], writes=["buf.kept[t]"], ', "@op("),
    "draw-order": (
        'def act(obs)', '@op(reads=["rng:torch"], writes=["rng:torch"])\ndef drawn(): ...\n\n@op(reads=[], writes=[])\ndef act(obs)'
    ),
    "grad-graph": ('results=0, calls=["module"])', 'results=0, calls=["module"], records=["other.params"])'),
    "early-exit": ("            look(buf, other, t)\n", "            look(buf, other, t)\n            break_if(True, ())\n"),
    "single-trip": ("(0, 5, 1", "(0, 1, 1"),
}  # fmt: skip


@pytest.mark.parametrize("code", REFUSED)
def test_refused(code: str) -> None:
    old, new = REFUSED[code]
    assert old in TEXT
    text = TEXT.replace(old, new)
    if code == "draw-order":  # both loops draw
        text = text.replace("@op(reads=[], writes=[])\n@op", "@op")
        text = text.replace(
            "        action = act(obs)\n", "        action = act(obs)\n        drawn()\n"
        )
        text = text.replace("            look(", "            drawn()\n            look(")
    program, history = passed(text)
    missed = [r for r in history.remarks.missed() if r.pass_name == "interleave"]
    assert [r.code for r in missed] == [code]
    assert not interleaves(parse(text))
    assert sum(is_call(n, LOOP) for n in program.graph.nodes) == 2


@pytest.mark.parametrize(
    ("context", "code"),
    [
        (replace(CONTEXT, options=Decision()), "switched-off"),
        (replace(CONTEXT, run_ahead=False), "may-raise"),
    ],
)
def test_left_where_it_stands(context: PassContext, code: str) -> None:
    program, history = passed(TEXT, context)
    assert code in [r.code for r in history.remarks.missed() if r.pass_name == "interleave"]
    assert sum(is_call(n, LOOP) for n in program.graph.nodes) == 2


def test_other_trips_are_not_asked_about() -> None:
    text = TEXT.replace("again(0, 5, 1", "again(0, 4, 1")
    _, history = passed(text)
    assert not [r for r in history.remarks if r.pass_name == "interleave"]
