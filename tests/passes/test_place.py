"""place: lanes where something can run beside a step, and thread counts of loops."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts
from rose_compiler.ir.parse import parse
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.place import Place
from tests.passes.texts import changed

TEXT = """
@op(reads=[], writes=[])
def act(obs): ...

@op(kind="step", reads=["envs"], writes=["envs"], attributes={"step": {"env": "envs", "action": "action"}})
def step(action, envs): ...

@op(reads=[], writes=["buf[t]"], results=0)
def store(buf, t, x): ...

@op(kind="component", reads=["agent"], writes=["agent"], results=0, calls=["optimizer"])
def train(agent, x): ...

def iteration(obs0, *, agent, envs, buf):
    for e in iterations(0, 3, 1):
        for t, obs in rollout(0, 4, 1, obs=obs0):
            action = act(obs)
            next_obs = step(action, envs)
            store(buf, t, action)
            yield next_obs
        last = rollout.obs
        for u in epochs(0, 2, 1):
            for m in minibatches(0, 2, 1):
                train(agent, last)
                yield ()
            yield ()
        yield ()
    return obs0
"""
CONTEXT = PassContext(asynchronous=frozenset({"envs"}))


def test_a_step_with_something_beside_it_gets_its_lane(golden) -> None:
    golden("step", [Place()], CONTEXT, program=parse(TEXT))


def test_thread_counts_stand_at_the_outermost_loop_of_one_purpose() -> None:
    program = parse(TEXT)
    options = Decision(rollout_threads=1, update_threads=2)
    PassManager([Place()], verify=2).run(program, PassContext(options=options))
    assert program.threads == {"rollout": 1, "epochs": 2}


def test_thread_counts_are_left_alone_unless_asked_for() -> None:
    program = parse(TEXT)
    PassManager([Place()]).run(program)
    assert program.threads == {}


REFUSED = {
    "no-window": ((("            store(buf, t, action)\n", ""),), CONTEXT),
    "switched-off": ((), PassContext(options=Decision(lanes="inline"))),
    "no-lane": ((), PassContext()),
    "may-raise": ((), PassContext(asynchronous=frozenset({"envs"}), run_ahead=False)),
    "early-exit": (
        (("            action =", "            break_if(obs0, (obs,))\n            action ="),),
        CONTEXT,
    ),
}


@pytest.mark.parametrize("code", REFUSED)
def test_refused(code: str) -> None:
    changes, context = REFUSED[code]
    program = parse(changed(TEXT, changes))
    history = PassManager([Place()], verify=2).run(program, context)
    assert [r.code for r in history.remarks.missed()] == [code]
    assert all(facts.get(n).slot is None for n in program.nodes())
