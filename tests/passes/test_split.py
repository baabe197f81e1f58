"""split: late results and checks off the action's path, with the bits of the whole operation."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

import pytest
import torch

from rose_compiler.base.decision import Decision
from rose_compiler.ir.interp import run
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.split import Split
from rose_compiler.testing.samples import ppo

TEXT = """
@op(kind="graph", reads=["w", "v"], writes=[], results=3, batch={"obs": 0, "return.0": 0, "return.1": 0, "return.2": 0}, exact=True)
def act(obs, w, v):
    h = torch.tanh(obs)
    action = torch.nn.functional.linear(h, w)
    valid = action == action
    all_valid = torch._is_all_true(valid)
    c = rose_compiler.checks.check_valid(all_valid, "not a number: {value}", action)
    squared = action * action
    logprob = torch.Tensor.sum(squared, 1)
    value = torch.nn.functional.linear(h, v)
    return action, logprob, value

@op(kind="step", reads=["envs"], writes=["envs"], attributes={"step": {"env": "envs", "action": "action"}})
def step(action, envs): ...

@op(reads=[], writes=["buf[t]"], results=0)
def store(buf, t, logprob, value): ...

def rollout(obs0, *, agent, envs, buf):
    w = state(agent, "w")
    v = state(agent, "v")
    for t, obs in trips(0, 3, 1, obs=obs0):
        with no_grad():
            action, logprob, value = act(obs, w, v)
        store(buf, t, logprob, value)
        next_obs = step(action, envs)
        yield next_obs
    return trips.obs
"""
BIND = {
    "step": lambda action, envs: envs(action),
    "store": lambda buf, t, logprob, value: buf.__setitem__(t, (logprob, value)),
}


class Agent(torch.nn.Module):
    def __init__(self, scale: float = 0.25) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(9.0).reshape(3, 3) * scale)
        self.v = torch.nn.Parameter(torch.ones(1, 3))


def outcome(program, agent=None):
    buf = {}
    objects = {"agent": agent or Agent(), "envs": lambda a: a * 0.5, "buf": buf}
    last = run(program, {"obs0": torch.ones(4, 3)}, objects)
    return [last, *(x for t in range(3) for x in buf[t])]


def test_values_and_checks_come_behind_what_the_step_needs(golden) -> None:
    golden("checks", [Split()], program=parse(TEXT))


def test_same_bits() -> None:
    want = outcome(parse(TEXT, BIND))
    program = parse(TEXT, BIND)
    history = PassManager([Split()], verify=2).run(program)
    assert history.rewrites["split"] == 1
    assert all(torch.equal(a, b) for a, b in zip(want, outcome(program), strict=True))


def test_a_check_that_fails_raises_the_same_error() -> None:
    whole, halves = parse(TEXT, BIND), parse(TEXT, BIND)
    PassManager([Split()]).run(halves)
    errors = []
    for program in (whole, halves):
        with pytest.raises(ValueError, match="not a number") as raised:
            outcome(program, Agent(float("nan")))
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_only_the_late_half_may_raise() -> None:
    program = parse(TEXT)
    PassManager([Split()]).run(program)
    early, late = (op_of(n) for n in program.nodes() if is_call(n) and op_of(n).kind == "graph")
    assert (early.name, late.name) == ("act_early", "act_late")
    assert not early.signature.may_raise
    assert late.signature.may_raise
    assert early.signature.reads == ("w",)
    assert late.signature.reads == ("v",)


def test_both_halves_keep_their_batch_axes_where_they_are_proven() -> None:
    sample = ppo()
    PassManager([Split()]).run(sample.program)
    early, late = (
        op_of(n) for n in sample.program.nodes() if is_call(n) and op_of(n).kind == "graph"
    )
    # the draw is still inside: rows of the early half can't be computed apart
    assert not early.signature.batch
    assert "rng:torch" in early.signature.writes
    assert late.signature.writes == ()


REFUSED = {
    "not-traceable": ((('kind="graph", reads=["w", "v"]', 'reads=["w", "v"]'),), PassContext()),
    "may-raise": ((), PassContext(run_ahead=False)),
    "not-pure": ((("squared = action * action", "squared = action.mul_(action)"),), PassContext()),
    "unsupported-shape": (
        (
            (
                "action, logprob, value = act(obs, w, v)",
                "all_of = act(obs, w, v)\n            action = all_of[0]",
            ),
            ("        store(buf, t, logprob, value)", "        store(buf, t, all_of, all_of)"),
        ),
        PassContext(),
    ),
}


@pytest.mark.parametrize("code", REFUSED)
def test_refused(blocked, code: str) -> None:
    changes, context = REFUSED[code]
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    if code == "not-traceable":
        head, tail = text.split("def act(obs, w, v):")
        text = head + "def act(obs, w, v): ...\n" + tail.split("return action, logprob, value")[1]
    assert blocked(text, Split(), context) == [code]


def test_nothing_to_say_where_everything_is_needed() -> None:
    text = TEXT.replace("        store(buf, t, logprob, value)\n", "")
    text = text.replace(
        '    c = rose_compiler.checks.check_valid(all_valid, "not a number: {value}", action)\n', ""
    )
    history = PassManager([Split()]).run(parse(text), PassContext(options=Decision(groups=2)))
    assert len(history.remarks) == 0


CHAIN = """
@op(kind="graph", reads=[], writes=[], results=2, may_raise=False)
def first(obs):
    h = torch.tanh(obs)
    cost = torch.exp(h)
    return h, cost

@op(kind="graph", reads=[], writes=[], results=2, may_raise=False)
def second(h, cost):
    action = h * 0.5
    total = cost + action
    return action, total

@op(kind="step", reads=["envs"], writes=["envs"], attributes={"step": {"env": "envs", "action": "action"}})
def step(action, envs): ...

@op(reads=[], writes=["buf[t]"], results=0)
def store(buf, t, total): ...

def rollout(obs0, *, envs, buf):
    for t, obs in trips(0, 3, 1, obs=obs0):
        with no_grad():
            h, cost = first(obs)
            action, total = second(h, cost)
        store(buf, t, total)
        next_obs = step(action, envs)
        yield next_obs
    return trips.obs
"""


def test_what_only_late_halves_use_is_late_too() -> None:
    bind = {"step": BIND["step"], "store": lambda buf, t, total: buf.__setitem__(t, total)}

    def outcome(program):
        buf: dict[int, torch.Tensor] = {}
        given = {"envs": lambda action: action + 1, "buf": buf}
        return [run(program, {"obs0": torch.ones(2, 3)}, given), *buf.values()]

    program = parse(CHAIN, bind)
    history = PassManager([Split()], verify=2).run(program)
    names = [op_of(n).name for n in program.nodes() if is_call(n)]
    assert len(history.remarks.applied()) == 2
    assert {"first_early", "first_late", "second_early", "second_late"} <= set(names)
    late = program.ops.by_name["first_late"].body
    assert late is not None
    assert "torch.exp" in late.code
    before = outcome(parse(CHAIN, bind))
    assert all(torch.equal(a, b) for a, b in zip(before, outcome(program), strict=True))
