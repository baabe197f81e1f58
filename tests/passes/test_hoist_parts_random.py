"""hoist on generated graphs in loops: what a part of them makes once is what every trip made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from rose_compiler.ir import invariant
from rose_compiler.ir.interp import run
from rose_compiler.ir.parse import parse
from rose_compiler.passes import hoist_parts
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.hoist import HoistInvariant
from rose_compiler.passes.manager import PassManager

#: Calls of a graph on values of one shape: those that make their result anew, and those that may
#: hand on an operand or a view of it.
ANEW = ("torch.tanh({a})", "{a} * 0.5", "{a} + {b}", "torch.nn.functional.linear({a}, w)")
VIEWS = (
    *("{a}[0:4]", "torch.Tensor.contiguous({a})", "torch.nn.functional.dropout({a}, 0.5, False)"),
    *("torch.Tensor.view({a}, 4, 3)", "torch.Tensor.to({a}, torch.float64)"),
)
DRAWS = ("torch.normal({a}, 0.5)",)
AROUND = """
@op(reads=["v"], writes=["v"], results=0, may_raise=False)
def scale(v): ...

@op(reads=["agent.w"], writes=["agent.w"], results=0, may_raise=False)
def train(agent): ...

@op(reads=[], writes=["host"], results=0, may_raise=False)
def keep(p, q): ...

@op(reads=[], writes=[], may_raise=False)
def advance(x, p): ...

def f(x0, y, *, agent):
    w = state(agent, "w")
    for t, x in trips(0, {trips}, 1, x=x0):
        p, q = g(x, y, w)
        {first}
        keep(p, q)
        {then}
        n = advance(x, p)
        yield n
    return trips.x
"""
BETWEEN = ("keep(q, p)", "keep(q, p)", "scale(p)", "scale(q)", "scale(y)", "train(agent)")


@st.composite
def texts(draw: Any) -> str:
    """A loop around a graph, as text."""
    owner = {"x": "x", "y": "y", "w": "w"}  # in whose memory each value may lie
    lines, values = [], ["x", "y", "y"]
    drawn = False
    for k in range(draw(st.integers(6, 12))):
        calls = draw(st.sampled_from([ANEW] * 5 + [VIEWS] * 2 + [DRAWS]))
        call = draw(st.sampled_from(calls))
        a, b = (draw(st.sampled_from(values[-5:] + values[1:2])) for _ in range(2))
        drawn |= calls is DRAWS
        lines.append(f"    v{k} = {call.format(a=a, b=b)}")
        owner[f"v{k}"] = owner[a] if calls is VIEWS else f"v{k}"
        values.append(f"v{k}")
    own = [v for v in values if owner[v] not in ("x", "y", "w")] or ["fresh"]
    if own == ["fresh"]:
        lines.append("    fresh = x + y")
    p, q = (draw(st.sampled_from(own[-4:])) for _ in range(2))
    rng = ', "rng:torch"' if drawn else ""
    writes = '"rng:torch"' if drawn else ""
    head = f'@op(kind="graph", reads=["w"{rng}], writes=[{writes}], results=2, may_raise=False)'
    graph = [head, "def g(x, y, w):", *lines, f"    return {p}, {q}"]
    first, then = (draw(st.sampled_from(BETWEEN)) for _ in range(2))
    around = AROUND.format(trips=draw(st.sampled_from([3, 3, 2, 0])), first=first, then=then)
    return "\n".join([*graph, around])


def outcome(program: Any) -> list[torch.Tensor]:
    class Agent:
        w = torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3)

    agent, y = Agent(), torch.linspace(-2, 1, 12, dtype=torch.float64).reshape(4, 3)
    torch.manual_seed(3)
    LOG.clear()
    last = run(program, {"x0": torch.ones(4, 3, dtype=torch.float64), "y": y}, {"agent": agent})
    return [last, y, agent.w, torch.get_rng_state(), *LOG]


LOG: list[torch.Tensor] = []
OPS: dict[str, Callable[..., Any]] = {
    "scale": lambda v: v.mul_(0.5).add_(1),
    "train": lambda agent: agent.w.mul_(0.75),
    "keep": lambda p, q: LOG.extend((p.clone(), q.clone())),
    "advance": lambda x, p: 0.5 * x + 0.125 * p,
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can be hoisted is."""
    monkeypatch.setattr(hoist_parts, "LEAST_CALLS", 1)


def differing(count: int) -> tuple[bool, int]:
    """Whether a program among these many differs, and how many rewrites there were."""
    moved = 0

    @seed(11)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(texts())
    def check(text: str) -> None:
        nonlocal moved
        before = outcome(parse(text, OPS))
        program = parse(text, OPS)
        history = PassManager([HoistInvariant()], verify=1).run(program, PassContext())
        moved += sum("makes them once" in r.why for r in history.remarks.applied())
        after = outcome(program)
        assert len(before) == len(after)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), text

    try:
        check()
    except Exception:
        if count > FEW:
            raise
        return True, moved
    return False, moved


#: Programs among which a planted fault shows.
FEW = 100


def test_nothing_differs() -> None:
    differs, moved = differing(101)
    assert not differs
    assert moved > 20


@pytest.mark.parametrize(
    ("where", "name", "answer"),
    [
        (invariant, "_shared", lambda gm: set()),
        (invariant, "makes_anew", lambda node: True),
        (invariant, "_stays", lambda node: False),
        (hoist_parts, "_writer", lambda *given: None),
    ],
    ids=["results that are shared", "views taken for copies", "draws", "what the loop writes"],
)
def test_a_planted_fault_is_found(
    where: Any, name: str, answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, answer)
    if name == "_writer":  # asked twice: the question of all that is hoisted finds it too
        monkeypatch.setattr(HoistInvariant, "why_varies", lambda *given: None)
    assert differing(FEW)[0]
