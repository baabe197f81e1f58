"""pipeline_loops: trips overlap over lanes where the dependences let them; the rest is named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose_compiler.base.decision import Decision, Pipelined
from rose_compiler.ir import facts
from rose_compiler.ir.keys import loops_by_key
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import History, PassManager
from rose_compiler.passes.pipeline_loops import PipelineLoops

TEXT = """
@op(reads=["robot"], writes=["robot"])
def move(action, robot): ...

@op(kind="graph", reads=["w"], writes=[])
def think(x, w):
    y = torch.mul(x, w)
    return y

@op(kind="graph", reads=[], writes=[])
def encode(x):
    y = torch.tanh(x)
    return y

@op(kind="graph", reads=[], writes=[], results=2)
def halves(x):
    a = torch.neg(x)
    b = torch.exp(x)
    return a, b

@op(kind="component", reads=["log"], writes=["log"], results=0)
def note(log, x): ...

def watch(x0, *, robot, w, log):
    for t, x in trips(0, 20, 1, x=x0):
        action = think(x, w)
        seen = move(action, robot)
        coded = encode(seen)
        small, large = halves(coded)
        note(log, small)
        note(log, large)
        yield seen
    return trips.x
"""
MICROS = (("action", 300), ("seen", 500), ("coded", 700), ("halves", 300), ("note", 60))


def context(text: str = TEXT, lanes: int = 1, **micros: int) -> PassContext:
    key = next(iter(loops_by_key(parse(text))))
    known = {**dict(MICROS), **micros}
    wanted = Pipelined(key, lanes, tuple(known.items()))
    return PassContext(options=Decision(pipeline=(wanted,)))


def run(text: str, about: PassContext) -> tuple[Program, History]:
    program = parse(text)
    return program, PassManager([PipelineLoops()], verify=2).run(program, about)


def test_what_hangs_off_the_recurrence_runs_beside_the_next_trips(golden) -> None:
    golden("chain", [PipelineLoops()], context())


def test_more_lanes_take_more_stages(golden) -> None:
    golden("three_lanes", [PipelineLoops()], context(lanes=2), program=parse(TEXT))


def test_the_bound_and_what_sets_it_are_told() -> None:
    _, history = run(TEXT, context())
    (loop, *_) = history.remarks.applied()
    assert "ResMII 930 µs (all work over all lanes)" in loop.why
    assert "RecMII 800 µs (`think` -> `move` -> again 1 trip later)" in loop.why


def test_loops_that_the_decision_does_not_name_stay() -> None:
    program, history = run(TEXT, PassContext())
    assert not history.remarks
    assert program.stage == "captured"


REFUSED = {
    "early-exit": ((("        coded = ", "        break_if(x0, (x,))\n        coded = "),), {}),
    "single-trip": ((("trips(0, 20, 1", "trips(0, 1, 1"),), {}),
    "carried-dependence": ((("        yield seen", "        yield large"),), {"note": 10}),
    "too-small": ((), dict.fromkeys(("action", "seen", "coded", "halves"), 20)),
    "predicted-slower": (
        (
            ('writes=["robot"])', 'writes=["robot"], calls=["log"])'),
            ('writes=["log"], results=0)', 'writes=["log"], results=0, calls=["log"])'),
        ),
        {"action": 100, "seen": 100, "coded": 0, "halves": 0, "note": 75},
    ),
    "unknown-effects": (
        (
            ('@op(kind="component", reads=["log"], writes=["log"], results=0)', "@op(results=0)"),
            ('kind="graph", reads=[], writes=[], results=2', "results=2"),
            ("    a = torch.neg(x)\n    b = torch.exp(x)\n    return a, b", "    ..."),
        ),
        {"action": 0, "seen": 0, "coded": 0},
    ),
    "opaque-call": (
        (
            ('kind="graph", reads=["w"], writes=[]', 'reads=["w"], writes=[], calls=["log"]'),
            ("    y = torch.mul(x, w)\n    return y", "    ..."),
        ),
        {"seen": 0, "coded": 0, "halves": 0},
    ),
}


@pytest.mark.parametrize("code", sorted(REFUSED))
def test_refusals(code: str) -> None:
    changes, micros = REFUSED[code]
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    program, history = run(text, context(text, **micros))
    assert not history.remarks.applied()
    assert [r.code for r in history.remarks.missed()] == [code]
    assert all(facts.get(n).slot is None for n in program.nodes())


def test_a_lane_that_is_full() -> None:
    text = TEXT.replace('@op(reads=["robot"]', '@op(kind="step", reads=["robot"]')
    text = text.replace("def watch", '@program(stage="scheduled")\ndef watch')
    order = iter(range(9))

    def placed(line: str) -> str:
        if not line.startswith("        ") or "yield" in line or "..." in line:
            return line
        lane = '"thread:robot", ' if "move(" in line else ""
        return f"{line} @ lane({lane}order={next(order)})"

    text = "\n".join(map(placed, text.splitlines()))
    short = dict.fromkeys(("action", "coded", "halves", "note"), 60)
    _, history = run(text, context(text, **short, seen=15))
    assert [r.code for r in history.remarks.missed()] == ["resource-full"]
    assert "ResMII 250 µs (what only the coordinator runs" in history.remarks.missed()[0].why


def test_nothing_runs_ahead_of_what_may_raise_where_that_is_asked_for() -> None:
    about = replace(context(), run_ahead=False)
    _, history = run(TEXT, about)
    assert [r.code for r in history.remarks.missed()] == ["may-raise"]


@pytest.mark.parametrize("nested", ["for k in trips(0, 2, 1):", "if x0:"])
def test_what_may_raise_in_a_nested_body_is_seen_too(nested: str) -> None:
    calm = TEXT.replace("@op(", "@op(may_raise=False, ")
    line = "        note(log, large)\n"
    text = calm.replace("        note(log, small)\n", "").replace(
        line, f"        {nested}\n            note(log, large)\n"
    )
    for loud, codes in ((False, []), (True, ["may-raise"])):
        if loud:
            op = '@op(may_raise=False, kind="component"'
            text = text.replace(op, '@op(kind="component"')
        _, history = run(text, replace(context(text), run_ahead=False))
        assert [r.code for r in history.remarks.missed()] == codes
