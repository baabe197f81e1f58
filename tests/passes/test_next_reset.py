"""next_reset: the reset that begins the next trip, beside the update that this one ends with."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts, interp
from rose_compiler.ir.parse import parse
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.next_reset import NextReset, resetting
from rose_compiler.passes.overlap import Overlap
from rose_compiler.testing import slots
from tests.passes.texts import changed

TEXT = """
@op(reads=["envs"], writes=["envs"], calls=["reset"])
def reset(envs, it): ...

@op(kind="step", reads=["envs", "agent"], writes=["envs"], attributes={"step": {"env": "envs", "action": "action"}})
def step(action, agent, envs): ...

@op(kind="component", reads=["agent"], writes=["agent"], results=0, calls=["optimizer"])
def train(agent, x): ...

@op(reads=["tests"], writes=["tests"], calls=["reset"])
def restart(tests): ...

@op(reads=["tests", "agent", "rng:torch"], writes=["tests", "rng:torch"], calls=["module"])
def evaluate(agent, look, tests): ...

def iterations(n, *, agent, envs, tests):
    for it in training(0, n, 1):
        first = reset(envs, it)
        for t, obs in rollout(0, 4, 1, obs=first):
            next_obs = step(obs, agent, envs)
            yield next_obs
        last = rollout.obs
        train(agent, last)
        yield ()
    return n
"""
CONTEXT = PassContext(options=Decision(overlap=True))


def test_a_reset_runs_beside_the_update_in_front_of_it(golden: Any) -> None:
    golden("reset", [NextReset()], CONTEXT, program=parse(TEXT))
    assert resetting(parse(TEXT))


class Simulator:
    """One that makes frames, or none."""

    def __init__(self, render_mode: str | None, native_async: bool = False) -> None:
        self.render_mode, self.native_async = render_mode, native_async

    def step(self, action: Any) -> Any:
        return action


@pytest.mark.parametrize(
    ("envs", "stays"),
    [
        (Simulator(None), False),
        (Simulator("ansi"), False),
        (Simulator("rgb_array"), True),
        (Simulator("rgb_array", native_async=True), False),  # in a host of its own
    ],
)
def test_what_renders_stays_on_the_thread_of_its_context(envs: Any, stays: bool) -> None:
    program = parse(TEXT)
    program.objects["envs"] = envs
    assert resetting(program) is not stays
    history = PassManager([NextReset()]).run(program, CONTEXT)
    told = [r.why for r in history.remarks.missed() if r.code == "opaque-call"]
    assert bool(told) is stays
    assert not stays or "renders" in told[0]


EVALUATED = TEXT.replace(
    "        train(agent, last)\n",
    "        train(agent, last)\n        look = restart(tests)\n        evaluate(agent, look, tests)\n",
).replace('"envs", "agent"], writes=["envs"]', '"envs", "agent", "rng:torch"], writes=["envs", "rng:torch"]')  # fmt: skip


def test_the_reset_of_an_evaluation_that_draws_runs_ahead(golden: Any) -> None:
    golden(
        "evaluated",
        [NextReset(), Overlap()],
        CONTEXT,
        program=parse(EVALUATED),
        folder="next_reset",
    )


class Counted:
    """What was done to it, in order, with what was seen meanwhile."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, *what: Any) -> int:
        self.seen.append(what)
        return len(self.seen)


BIND: dict[str, Callable[..., Any]] = {
    "reset": lambda envs, it: envs.note("reset", it),
    "step": lambda action, agent, envs: envs.note("step", action, len(agent.seen)),
    "train": lambda agent, x: agent.note("train", x),
    "restart": lambda tests: tests.note("reset"),
    "evaluate": lambda agent, look, tests: tests.note("step", look, len(agent.seen)),
}


@pytest.mark.parametrize("text", [TEXT, EVALUATED], ids=["reset", "evaluated"])
@pytest.mark.parametrize("trips", [0, 1, 2, 5])
def test_every_order_of_the_lanes_is_program_order(text: str, trips: int) -> None:
    program = parse(text, bind=BIND)
    names = ("agent", "envs", "tests")
    plain = {name: Counted() for name in names}
    interp.run(program, [trips], plain)
    history = PassManager([NextReset(), Overlap()], verify=2).run(program, CONTEXT)
    assert any(r.pass_name == "next_reset" for r in history.remarks.applied())
    for seed in range(4):
        found = {name: Counted() for name in names}
        slots.run(program, [trips], found, seed=seed)
        assert {n: c.seen for n, c in found.items()} == {n: c.seen for n, c in plain.items()}


REFUSED: dict[str, tuple[tuple[tuple[str, str], ...], PassContext]] = {
    "switched-off": ((), PassContext()),
    "may-raise": ((), PassContext(options=Decision(overlap=True), run_ahead=False)),
    "single-trip": ((("training(0, n, 1)", "training(0, 1, 1)"),), CONTEXT),
    "early-exit": (
        (("        train(agent, last)\n", "        break_if(last, ())\n        train(agent, last)\n"),),
        CONTEXT,
    ),
    "unknown-effects": (
        (('@op(reads=["envs"], writes=["envs"], calls=["reset"])', '@op(calls=["reset"])'),),
        CONTEXT,
    ),
    # the environments draw from the generator that the update draws from
    "draw-order": (
        (
            ('reads=["envs"], writes=["envs"], calls=["reset"]', 'reads=["envs", "rng:torch"], writes=["envs", "rng:torch"], calls=["reset"]'),
            ('reads=["agent"], writes=["agent"], results=0', 'reads=["agent", "rng:torch"], writes=["agent", "rng:torch"], results=0'),
        ),
        CONTEXT,
    ),
    # a reset that looks at what the update has made of the agent
    "carried-dependence": (
        (
            ('reads=["envs"], writes=["envs"], calls=["reset"]', 'reads=["envs", "envs.level"], writes=["envs"], calls=["reset"]'),
            ('reads=["agent"], writes=["agent"], results=0', 'reads=["agent", "@envs.level"], writes=["agent", "@envs.level"], results=0'),
        ),
        CONTEXT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("code", REFUSED)
def test_refused(code: str) -> None:
    changes, context = REFUSED[code]
    text = changed(TEXT, changes)
    program = parse(text)
    history = PassManager([NextReset()], verify=2).run(program, context)
    assert [r.code for r in history.remarks.missed()] == [code]
    assert not history.remarks.applied()
    assert all(facts.get(n).slot is None for n in program.nodes())
    if code not in ("switched-off", "may-raise"):
        assert not resetting(parse(text))


def test_a_body_that_is_placed_keeps_its_schedule() -> None:
    placed = (
        TEXT.replace("= reset(envs, it)", "= reset(envs, it) @ lane(order=0)")
        .replace("obs=first)", "obs=first) @ lane(order=1)")
        .replace("train(agent, last)\n", "train(agent, last) @ lane(order=2)\n")
        .replace("def iterations", '@program(stage="scheduled")\ndef iterations')
    )
    history = PassManager([NextReset()], verify=2).run(parse(placed), CONTEXT)
    assert [r.code for r in history.remarks.missed()] == ["no-window"]
    assert not history.remarks.applied()
