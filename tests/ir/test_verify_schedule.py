"""The verifier on schedules: what keeps every dependence passes, and a wrong one is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rose_compiler.base.errors import VerifyError
from rose_compiler.ir import facts
from rose_compiler.ir.facts import Slot
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program
from rose_compiler.ir.verify import verify
from tests.ir.verifying import broken

SCHEDULED = """
@op(reads=["params"], writes=[])
def act(obs, params): ...
@op(kind="step", reads=["env"], writes=["env"], attributes={"step": {"env": "env", "action": "a"}})
def step(a, env): ...
@op(reads=[], writes=["buf.obs[t]"])
def store(buf, t, obs): ...
@op(reads=[], writes=["params"])
def update(params): ...

@program(stage="scheduled")
def ppo(obs0, *, params, env, buf):
    e0: state("env.0") = shard(env, 0)
    e1: state("env.1") = shard(env, 1)
    for t, o0, o1 in rollout(0, 8, 1, o0=obs0, o1=obs0):
        a0 = act(o0, params) @ lane(stage=0, order=0)
        s0 = store(buf, t, o0) @ lane(stage=0, order=2)
        r0 = step(a0, e0) @ lane("shard:0", stage=0, order=1)
        p0 = r0[0]
        a1 = act(o1, params) @ lane(stage=0, order=3)
        r1 = step(a1, e1) @ lane("shard:1", stage=0, order=4)
        p1 = r1[0]
        yield p0, p1
    u = update(params)
    return u
"""

SOUND = {
    "a0": Slot("", 0, 0),
    "r0": Slot("shard:0", 0, 1),
    "s0": Slot("", 0, 2),
    "a1": Slot("", 0, 3),
    "r1": Slot("shard:1", 0, 4),
}
#: The store in the shadow of the second shard's step, and the second shard half a trip behind.
SHIFTED = {
    "a1": Slot("", 1, 0),
    "r1": Slot("shard:1", 1, 1),
    "a0": Slot("", 0, 2),
    "r0": Slot("shard:0", 0, 3),
    "s0": Slot("", 1, 4),
}


def scheduled(slots: dict[str, Slot | None]) -> Program:
    p = parse(SCHEDULED)
    for name, slot in slots.items():
        facts.put(p.find(name), slot=slot)
    return p


@pytest.mark.parametrize("slots", [SOUND, SHIFTED])
def test_sound_schedules_pass(slots: dict[str, Slot]) -> None:
    verify(scheduled(dict(slots)))


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        # the step in front of the action it takes
        ("modulo", {"r0": Slot("shard:0", 0, 0), "a0": Slot("", 0, 1)}),
        # the action of the next trip in front of the step that makes its observation
        ("modulo", {"r0": Slot("shard:0", 1, 1)}),
        # a step a trip later than the next step of the same shard may start
        ("modulo", {"r1": Slot("shard:1", 2, 4)}),
        # a stage that does not fit the action's
        ("modulo", {"a1": Slot("", 1, 3)}),
        ("slots", {"s0": None}),
        ("slots", {"r1": None}),
        ("slots", {"s0": Slot("", 0, 1)}),
        ("slots", {"s0": Slot("", -1, 2)}),
        ("lanes", {"r0": Slot("gpu", 0, 1)}),
        ("lanes", {"r0": Slot("shard:", 0, 1)}),
        ("lanes", {"r0": Slot("shard:1", 0, 1)}),
        ("lanes", {"a0": Slot("shard:0", 0, 0)}),
        ("lanes", {"p0": Slot("thread:x", 0, 1)}),
    ],
)
def test_wrong_schedule_is_refused(rule: str, changes: dict[str, Slot | None]) -> None:
    assert broken(scheduled({**SOUND, **changes})) == rule


def test_a_wrong_order_names_the_dependence_and_its_own_code() -> None:
    p = scheduled({**SOUND, "r0": Slot("shard:0", 0, 0), "a0": Slot("", 0, 1)})
    with pytest.raises(VerifyError) as caught:
        verify(p)
    assert caught.value.code == "verify-dependence"
    assert "r0 has to wait for a0" in str(caught.value)
    assert "value" in str(caught.value)


def test_a_borrowed_reader_may_not_trail_the_next_step() -> None:
    p = scheduled(dict(SHIFTED))
    for name in ("p0", "p1"):
        facts.put(p.find(name), alias=(f"env.{name[1]}.outputs",), borrowed=True)
    # s0 of trip t runs in emitted trip t + 1, behind the step that overwrites what it reads
    assert broken(p) == "modulo"
    early = {**SHIFTED, "s0": Slot("", 0, 1), "r1": Slot("shard:1", 1, 5)}
    p = scheduled(early)
    for name in ("p0", "p1"):
        facts.put(p.find(name), alias=(f"env.{name[1]}.outputs",), borrowed=True)
    verify(p)


def test_slots_outside_loops_stay_in_their_trip() -> None:
    p = scheduled(dict(SOUND))
    for name, order in (("rollout", 0), ("u", 1)):
        facts.put(p.find(name), slot=Slot("", 0, order))
    verify(p)
    facts.put(p.find("u"), slot=Slot("", 1, 1))
    assert broken(p) == "slots"
    facts.put(p.find("u"), slot=Slot("", 0, -1))
    assert broken(p) == "modulo"
    facts.put(p.find("u"), slot=Slot("thread:update", 0, 1))
    verify(p)
    facts.put(p.find("rollout"), slot=Slot("thread:rollout", 0, 0))
    assert broken(p) == "lanes"


def test_a_pick_with_a_slot_of_its_own_waits_for_its_maker() -> None:
    p = scheduled({**SOUND, "p0": Slot("", 0, 1)})
    verify(p)
    facts.put(p.find("p0"), slot=Slot("", 0, 0))
    assert broken(p) == "modulo"


def test_nothing_is_taken_ahead_of_a_break() -> None:
    text = SCHEDULED.replace(
        "        yield p0, p1",
        "        b = break_if(p0, (p0, p1)) @ lane(order=5)\n        yield p0, p1",
    )
    p = parse(text)
    for name, slot in SOUND.items():
        facts.put(p.find(name), slot=slot)
    verify(p)
    late = replace(facts.get(p.find("break_if")).slot, stage=1)
    facts.put(p.find("break_if"), slot=late)
    assert broken(p) == "modulo"


def test_the_next_item_of_an_iterator_is_taken_behind_the_trip_before() -> None:
    text = """
@op(reads=["s"], writes=["s"])
def work(x, s): ...
@program(stage="scheduled")
def f(xs, *, s):
    for x in L(xs):
        w = work(x, s) @ lane(stage=S, order=0)
        yield ()
    return 0
"""
    p = parse(text.replace("stage=S", "stage=0"))
    facts.put(p.find("xs"), spec=facts.Spec("object", "generator"))
    verify(p)
    p = parse(text.replace("stage=S", "stage=1"))
    verify(p)
    facts.put(p.find("xs"), spec=facts.Spec("object", "generator"))
    assert broken(p) == "modulo"
