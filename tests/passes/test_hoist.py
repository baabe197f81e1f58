"""hoist: what is the same on every trip goes in front of the loop; a test per reason to refuse."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.interp import run
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.hoist import HoistInvariant
from rose_compiler.passes.manager import PassManager


def test_out_of_two_loops(golden) -> None:
    golden("invariants", [HoistInvariant()])


REFUSED = {
    "reads-loop-state": (
        """
@op(reads=["agent.w"], writes=[], may_raise=False)
def cast(agent): ...

@op(reads=["agent"], writes=["agent"], results=0)
def train(agent, h): ...

def f(T, *, agent):
    for t in trips(0, T, 1):
        h = cast(agent)
        train(agent, h)
        yield ()
    return T
"""
    ),
    "may-not-run": (
        """
@op(reads=[], writes=[])
def encode(x): ...

@op(reads=["log"], writes=["log"], results=0)
def note(log, h): ...

def f(x, T, *, log):
    for t in trips(0, T, 1):
        h = encode(x)
        note(log, h)
        yield ()
    return T
"""
    ),
    "unknown-effects": (
        """
@op()
def mystery(x): ...

def f(x):
    for t in trips(0, 3, 1):
        h = mystery(x)
        yield ()
    return x
"""
    ),
    "may-alias": (
        """
@op(reads=[], writes=[], may_raise=False)
def fresh(x): ...

@op(reads=["h"], writes=["h"], results=0)
def add_one(h): ...

def f(x):
    for t in trips(0, 3, 1):
        h = fresh(x)
        add_one(h)
        yield ()
    return x
"""
    ),
    "retained-instance": (
        """
@op(reads=[], writes=[], may_raise=False)
def fresh(x): ...

@op()
def keep(h): ...

def f(x):
    for t in trips(0, 3, 1):
        h = fresh(x)
        k = keep(h)
        yield ()
    return x
"""
    ),
}


@pytest.mark.parametrize("code", REFUSED)
def test_refused(blocked, code: str) -> None:
    assert code in blocked(REFUSED[code], HoistInvariant())


def test_an_exit_in_front_may_keep_it_from_running(blocked) -> None:
    text = """
@op(reads=[], writes=[])
def encode(x): ...

@op(reads=["log"], writes=["log"], results=0)
def note(log, h): ...

def f(x, flag, *, log):
    for t in trips(0, 3, 1):
        break_if(flag, ())
        h = encode(x)
        note(log, h)
        yield ()
    return x
"""
    assert blocked(text, HoistInvariant()) == ["may-not-run"]


def test_known_trips_allow_what_may_raise() -> None:
    program = parse(REFUSED["may-not-run"])
    history = PassManager([HoistInvariant()]).run(program, PassContext(trips={"trips": 5}))
    assert len(history.remarks.applied()) == 1
    program = parse(REFUSED["may-not-run"])
    history = PassManager([HoistInvariant()]).run(program, PassContext(trips={"trips": 0}))
    assert not history.remarks.applied()


RAISING = """
@op(reads=[], writes=[])
def encode(x): ...

@op(reads=["log"], writes=["log"], results=0, may_raise=False)
def note(log, h): ...

@op(reads=[], writes=[])
def check(x): ...

@op(reads=[], writes=[], may_raise=False)
def copy(x): ...

@op(reads=["v"], writes=["v"], results=0, may_raise=False)
def add_one(v): ...

def f(x, *, log):
    for t in trips(0, 3, 1):
        FIRST
        h = encode(x)
        note(log, h)
        yield ()
    return x
"""


@pytest.mark.parametrize(
    ("first", "codes"),
    [
        ("note(log, t)", ["may-not-run"]),
        ("c = check(t)", ["may-not-run"]),
        ("c = copy(t)", []),
        ("c = copy(t)\n        add_one(c)", []),
        ("add_one(x)", ["reads-loop-state"]),
    ],
)
def test_what_may_raise_overtakes_nothing_that_shows(blocked, first: str, codes: list[str]) -> None:
    """An error of the moved operation would come without what eager has done before it, or in the
    place of the error that eager would have met first."""
    text = RAISING.replace("FIRST", first)
    if codes:
        assert blocked(text, HoistInvariant()) == codes
        return
    applied = PassManager([HoistInvariant()]).run(parse(text), PassContext()).remarks.applied()
    assert [r.why.split("`")[1] for r in applied] == ["encode"]


@pytest.mark.parametrize(
    ("attributes", "put", "stays"),
    [
        ({"keeps": (("log", "h"),)}, "put(log, h)", True),
        ({"retains": ("h",)}, "put(log, h)", True),
        ({"retains": ("h",)}, "if x:\n            put(log, h)", True),
        # an attribute holds one: the last
        ({"retains": ("h",), "stores": ("log", "last", "h")}, "put(log, h)", False),
    ],
)
def test_a_value_that_something_keeps_stays(attributes, put, stays, blocked) -> None:
    text = f"""
@op(reads=[], writes=[], may_raise=False)
def fresh(x): ...

@op(reads=["log"], writes=["log"], results=0, attributes={attributes})
def put(log, h): ...

def f(x, *, log):
    for t in trips(0, 3, 1):
        h = fresh(x)
        {put}
        yield ()
    return x
"""
    if stays:
        assert blocked(text, HoistInvariant()) == ["retained-instance"]
    else:
        assert PassManager([HoistInvariant()]).run(parse(text)).remarks.applied()


@pytest.mark.parametrize("kind", ["tuple", "tensor"])
def test_a_value_that_a_container_gathers_stays(kind: str) -> None:
    program = parse("""
@op(reads=[], writes=[], may_raise=False)
def fresh(x): ...

@op(reads=[], writes=[], may_raise=False)
def more(kept, h): ...

def f(x, none):
    for t, kept in trips(0, 3, 1, kept=none):
        h = fresh(x)
        both = more(kept, h)
        yield both
    return trips.kept
""")
    for node in program.nodes():
        if node.name == "both":
            facts.put(node, spec=facts.Spec(kind))
    applied = PassManager([HoistInvariant()], verify=2).run(program).remarks.applied()
    assert bool(applied) == (kind == "tensor")


def test_a_mutable_local_stays() -> None:
    text = """
@op(reads=[], writes=[], may_raise=False)
def make(x): ...

@op(reads=["s"], writes=["s"], results=0)
def push(s, t): ...

def f(x):
    for t in trips(0, 3, 1):
        s: state = make(x)
        push(s, t)
        yield ()
    return x
"""
    program = parse(text)
    history = PassManager([HoistInvariant()], verify=2).run(program)
    assert not history.remarks.applied()


DRAWING = """
@op(kind="graph", reads=["rng:torch"], writes=["rng:torch"], batch={"obs": 0, "return.0": 0})
def act(obs):
    std = torch.exp(obs)
    action = torch.normal(obs, std)
    return action

@op(kind="step", reads=["envs"], writes=["envs"], attributes={"step": {"env": "envs", "action": "action"}})
def step(action, envs): ...

def rollout(obs0, *, envs):
    for t, obs in trips(0, 3, 1, obs=obs0):
        action = act(obs)
        next_obs = step(action, envs)
        yield next_obs
    return trips.obs
"""
TILED = PassContext(options=Decision(groups=2), shards={"envs": (2, 2)})


ROWS = Spec("tensor", "Tensor", (4, 3), "float32", "cpu")


def drawing(text: str = DRAWING, spec: Spec | None = ROWS):
    program = parse(text, {"step": lambda action, envs: action * 0.5})
    op = next(op for op in program.ops.by_name.values() if op.name == "act")
    for node in op.body.graph.nodes:
        if node.op != "output":
            facts.put(node, spec=spec)
    return program


def test_a_draw_is_made_whole_in_front_of_the_operation(golden) -> None:
    golden("draw", [HoistInvariant()], TILED, program=drawing())


def test_drawn_whole_the_numbers_and_the_generator_are_the_same() -> None:
    def outcome(program):
        torch.manual_seed(5)
        last = run(program, {"obs0": torch.zeros(4, 3)}, {"envs": None})
        return last, torch.get_rng_state()

    program = drawing()
    history = PassManager([HoistInvariant()], verify=2).run(program, TILED)
    assert history.rewrites["hoist"] == 1
    assert "draw" not in str(op_names(program))
    assert all(torch.equal(a, b) for a, b in zip(outcome(drawing()), outcome(program), strict=True))


def op_names(program):
    return [op_of(n).name for n in program.nodes() if is_call(n)]


def test_draws_stay_where_no_batch_is_to_be_cut() -> None:
    for context in (PassContext(), replace(TILED, shards={}), replace(TILED, options=Decision())):
        history = PassManager([HoistInvariant()]).run(drawing(), context)
        assert len(history.remarks) == 0


def test_a_draw_of_unknown_shape_stays() -> None:
    history = PassManager([HoistInvariant()]).run(drawing(spec=None), TILED)
    assert [r.code for r in history.remarks.missed()] == ["draw-shape-unknown"]


def test_a_draw_without_another_form_stays() -> None:
    text = DRAWING.replace("torch.normal(obs, std)", "torch.nn.functional.dropout(std)")
    history = PassManager([HoistInvariant()]).run(drawing(text), TILED)
    assert [r.code for r in history.remarks.missed()] == ["data-dependent-draw"]


def test_a_draw_that_can_not_be_tried_stays() -> None:
    program = drawing()
    op = program.ops.by_name["act"]
    placeholder = next(iter(op.body.graph.nodes))
    facts.put(placeholder, spec=Spec("tensor", "Tensor", (4, 3)))
    history = PassManager([HoistInvariant()]).run(program, TILED)
    assert [r.code for r in history.remarks.missed()] == ["not-probed"]
