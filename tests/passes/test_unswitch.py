"""unswitch: on trips that don't take the branch in front of the next action, the work that led to
it is late; every trip does the same as before."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import VerifyError
from rose_compiler.ir import facts
from rose_compiler.ir.interp import run
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program, is_call, is_item, op_of
from rose_compiler.passes import unswitch
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.late import LateWork
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.unswitch import Unswitch

CONTEXT = PassContext(options=Decision(late="shadow"), asynchronous=frozenset({"envs"}))
TEXT = """
@op(reads=["actor"], writes=[])
def act(obs, actor): ...

@op(kind="step", reads=["envs"], writes=["envs"], results=2, attributes={"step": {"env": "envs", "action": "action"}})
def step(action, envs): ...

@op(reads=["buf"], writes=["buf"], results=0)
def add(buf, obs, reward): ...

@op(reads=["buf"], writes=[], results=2)
def sample(buf): ...

@op(reads=["critic"], writes=["critic"], calls=["backward", "optimizer"])
def train_critic(a, b, critic): ...

@op(reads=[], writes=[], may_raise=False)
def warm(t): ...

@op(reads=[], writes=[], may_raise=False)
def due(t): ...

@op(reads=["critic", "actor"], writes=["actor"], calls=["backward", "optimizer"])
def train_actor(a, critic, actor): ...

@op(reads=["log"], writes=["log"], results=0)
def note(log, loss, value): ...

def train(obs0, n, *, actor, critic, envs, buf, log):
    for t, obs in trips(0, n, 1, obs=obs0):
        action = act(obs, actor)
        next_obs, reward = step(action, envs)
        add(buf, obs, reward)
        a, b = sample(buf)
        loss = train_critic(a, b, critic)
        pred = due(t)
        if pred:
            value = train_actor(a, critic, actor)
            result = value
        else:
            result = loss
        note(log, loss, result)
        yield next_obs
    return trips.obs
"""
#: The update in a branch of its own, the actor's in one below that.
NESTED = (
    ("        loss = train_critic(a, b, critic)\n        pred = due(t)\n", "        ready = warm(t)\n"),
    ("        if pred:\n            value", "        if ready:\n            loss = train_critic(a, b, critic)\n            first = loss\n        else:\n            first = 0.0\n        if ready:\n            pred = due(t)\n            if pred:\n                value"),
    ("            result = value\n        else:\n            result = loss\n", "                inner = value\n            else:\n                inner = 0.5\n            result = inner\n        else:\n            result = 0.25\n"),
    ("note(log, loss, result)", "note(log, first, result)"),
)  # fmt: skip


def changed(*changes: tuple[str, str]) -> str:
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


class World:
    """Implementations that leave a trace of every call in an order that can be compared."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Any]] = {
            k: [1.0] for k in ("actor", "critic", "envs", "buf", "log")
        }

    @staticmethod
    def step(action: float, envs: list[float]) -> tuple[float, float]:
        envs.append(envs[-1] * 0.5 + action)
        return envs[-1], -envs[-1]

    @staticmethod
    def train(owner: list[float], *given: float) -> float:
        owner.append(owner[-1] * 0.9 + 0.01 * sum(given))
        return owner[-1]

    def bind(self) -> dict[str, Any]:
        return {
            "act": lambda obs, actor: obs * 0.3 + actor[-1],
            "step": self.step,
            "add": lambda buf, obs, reward: buf.append(obs + reward),
            "sample": lambda buf: (buf[-1], buf[len(buf) // 2]),
            "train_critic": lambda a, b, critic: self.train(critic, a, b),
            "warm": lambda t: t > 1,
            "due": lambda t: t % 3 == 0,
            "train_actor": lambda a, critic, actor: self.train(actor, a, critic[-1]),
            "note": lambda log, loss, value: log.append((loss, value)),
        }


def outcome(text: str, *passes: Any, trips: int) -> tuple[Any, dict[str, list[Any]]]:
    world = World()
    program = parse(text, world.bind())
    if passes:
        history = PassManager(passes, verify=2).run(program, CONTEXT)
        assert history.rewrites["unswitch"] == 1, history.remarks.render()
    return run(program, {"obs0": 0.5, "n": trips}, world.objects), world.objects


@pytest.mark.parametrize("text", [TEXT, changed(*NESTED)], ids=["flat", "nested"])
@pytest.mark.parametrize("trips", [0, 1, 7])
def test_every_trip_does_the_same(text: str, trips: int) -> None:
    assert outcome(text, Unswitch(), trips=trips) == outcome(text, trips=trips)


def test_a_branch_of_its_own(golden) -> None:
    golden("flat", [Unswitch(), LateWork()], CONTEXT, program=parse(TEXT), folder="unswitch")


def test_a_branch_in_a_branch(golden) -> None:
    golden(
        "nested",
        [Unswitch(), LateWork()],
        CONTEXT,
        program=parse(changed(*NESTED)),
        folder="unswitch",
    )


def issued(program: Program) -> list[str]:
    slots = {n: slot for n in program.nodes() if (slot := facts.get(n).slot) is not None}
    return [
        op_of(n).name if op_of(n).name != "branch" else n.name
        for n in sorted(slots, key=lambda n: slots[n].order)
        if is_call(n)
    ]


@pytest.mark.parametrize("text", [TEXT, changed(*NESTED)], ids=["flat", "nested"])
def test_one_copy_stands_in_front_of_the_step_and_one_behind_it(text: str) -> None:
    program = parse(text)
    PassManager([Unswitch(), LateWork()], verify=2).run(program, CONTEXT)
    order = issued(program)
    assert order.index("early") < order.index("act") < order.index("step") < order.index("late")
    assert "train_critic" not in order


UNTOUCHED: dict[str, tuple[Sequence[tuple[str, str]], PassContext]] = {
    "late work stays": ((), PassContext(asynchronous=frozenset({"envs"}))),
    "no lane": ((), PassContext(options=Decision(late="shadow"))),
    "one trip": ((("trips(0, n, 1", "trips(0, 1, 1"),), CONTEXT),
    "an early exit": ((("        pred = due(t)\n", "        pred = due(t)\n        break_if(loss, (next_obs,))\n"),), CONTEXT),
    "both arms write": ((("            result = loss\n", "            other = train_actor(a, critic, actor)\n            result = other\n"),), CONTEXT),
    "the action reads the critic": ((('reads=["actor"], writes=[])\ndef act(obs, actor)', 'reads=["actor", "critic"], writes=[])\ndef act(obs, actor, critic)'), ("act(obs, actor)\n", "act(obs, actor, critic)\n")), CONTEXT),
    "the action takes the branch's value": ((("trips(0, n, 1, obs=obs0)", "trips(0, n, 1, obs=obs0, last=0.0)"), ("for t, obs in", "for t, obs, last in"), ("yield next_obs", "yield next_obs, result"), ("act(obs, actor)\n", "act(last, actor)\n")), CONTEXT),
    "the condition is made of the loss": ((("def due(t)", "def due(loss)"), ("due(t)\n", "due(loss)\n")), CONTEXT),
    "both draw": ((('reads=["critic"], writes=["critic"]', 'reads=["critic", "rng:torch"], writes=["critic", "rng:torch"]'), ('reads=["actor"], writes=[])', 'reads=["actor", "rng:torch"], writes=["rng:torch"])')), CONTEXT),
}  # fmt: skip


@pytest.mark.parametrize("why", UNTOUCHED)
def test_untouched(blocked, why: str) -> None:
    changes, context = UNTOUCHED[why]
    assert blocked(changed(*changes), Unswitch(), context) == []


def test_a_condition_that_may_raise_stays_behind_the_update(blocked) -> None:
    text = changed(*NESTED).replace("may_raise=False)\ndef due", "may_raise=True)\ndef due")
    assert blocked(text, Unswitch(), CONTEXT) == []


def test_what_the_condition_reads_stays_in_front_of_it(blocked) -> None:
    """A counter that the update itself advances is advanced first, where nothing else needs it."""
    text = changed(
        ("@op(reads=[], writes=[], may_raise=False)\ndef due(t)", '@op(reads=["log"], writes=[], may_raise=False)\ndef due(log)'),
        ("        pred = due(t)\n", "        note(log, loss, loss)\n        pred = due(log)\n"),
    )  # fmt: skip
    assert blocked(text, Unswitch(), CONTEXT) == []


#: Planted faults: a question that finds nothing, or a rewrite that is wrong, the program that shows
#: it, and whether the pass does anything to it where nothing is planted.
MUTANTS: dict[str, tuple[str, Any, str, bool]] = {
    "the condition is tested ahead of what it reads": (
        "_overwritten",
        lambda test, others, rewrite: False,
        changed(
            *NESTED,
            ("@op(reads=[], writes=[], may_raise=False)\ndef due(t)", '@op(reads=["critic"], writes=[], may_raise=False)\ndef due(critic)'),
            ("pred = due(t)", "pred = due(critic)"),
        ),
        False,
    ),
    "what stays in front of the branch uses what is moved behind it": (
        "_closed",
        lambda moved, gate, edges: {n for n in moved if not is_item(n)},
        changed(
            ("        pred = due(t)\n", "        note(log, loss, loss)\n        pred = due(t)\n"),
        ),
        False,
    ),
    "the branch is never taken early": ("_early_test", lambda gate, rewrite: False, TEXT, True),
}  # fmt: skip


MARKED = changed(
    ("def train(obs0", '@op(reads=["pred"], writes=["pred"], results=0)\ndef mark(pred, loss): ...\n\ndef train(obs0'),
    ("        action = act", "        pred = due(t)\n        action = act"),
    ("        pred = due(t)\n        if", "        mark(pred, loss)\n        if"),
)  # fmt: skip


@pytest.mark.parametrize("born", ["pred", "pred: state"])
def test_a_list_that_is_tested_is_filled_first(born: str) -> None:
    text = MARKED.replace("pred = due", f"{born} = due")
    found = []
    for passes in ((), (Unswitch(), LateWork())):
        world = World()
        bind = {"due": lambda t: [], "mark": lambda p, x: p.append(x) if int(1e3 * x) % 3 else None}
        program = parse(text, world.bind() | bind)
        PassManager(passes, verify=2).run(program, CONTEXT)
        found.append((run(program, {"obs0": 0.5, "n": 7}, world.objects), world.objects))
    assert 1 < len(found[0][1]["actor"]) < 8  # it is trained on some trips
    assert found[0] == found[1]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    question, answer, text, applies = MUTANTS[name]
    plain = either_way(text)
    assert either_way(text, Unswitch(), LateWork()) == plain
    assert rewritten(text) == applies
    monkeypatch.setattr(unswitch, question, answer)
    assert either_way(text, Unswitch(), LateWork()) != plain
    assert rewritten(text) or not applies


def either_way(text: str, *passes: Any) -> Any:
    """What seven trips leave behind, or why the program is refused."""
    world = World()
    bind = world.bind() | {"due": lambda given: int(10 * given) % 3 == 0}
    if "due(critic)" in text:
        bind["due"] = lambda critic: len(critic) % 3 == 0
    program = parse(text, bind)
    try:
        PassManager(passes, verify=2).run(program, CONTEXT)
    except VerifyError as error:
        return str(error)
    return run(program, {"obs0": 0.5, "n": 7}, world.objects), world.objects


def rewritten(text: str) -> bool:
    """Whether the pass does something to the program."""
    try:
        history = PassManager([Unswitch()], verify=0).run(parse(text), CONTEXT)
    except Exception:
        return True
    return history.rewrites["unswitch"] > 0
