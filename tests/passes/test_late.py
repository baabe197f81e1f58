"""late: what no step waits for runs beside the simulator; what holds it back is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts
from rose_compiler.ir.parse import parse
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.late import LateWork
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.tile_batch import TileBatch

CONTEXT = PassContext(
    options=Decision(groups=2, late="shadow"),
    shards={"envs": (3, 3, 3, 3)},
    asynchronous=frozenset({"envs"}),
)
TEXT = (Path(__file__).parent / "golden/late/rollout.in.txt").read_text()


def test_two_groups_of_two_shards(golden) -> None:
    golden("rollout", [TileBatch(), LateWork()], CONTEXT)


def test_a_simulator_in_one_piece(golden) -> None:
    golden("one_piece", [LateWork()], CONTEXT, program=parse(TEXT))


def test_a_lent_buffer_is_copied(golden) -> None:
    lent = ' @ facts(alias=["envs.outputs"], borrowed=True)'
    text = TEXT
    for call in ("step(a_np, envs)", "unpack(r)", "to_obs(x)"):
        text = text.replace(f"= {call}\n", f"= {call}{lent}\n")
    golden("lent", [LateWork()], CONTEXT, program=parse(text))


def test_threads_where_the_simulator_has_no_step_of_its_own() -> None:
    program = parse(TEXT)
    options = Decision(late="shadow", lanes="thread")
    context = PassContext(options=options)
    PassManager([LateWork()], verify=2).run(program, context)
    slot = facts.get(program.find("step")).slot
    assert slot is not None
    assert slot.lane == "thread:envs"


REFUSED = {
    "switched-off": ((), replace(CONTEXT, options=Decision())),
    "no-lane": ((), replace(CONTEXT, asynchronous=frozenset())),
    "single-trip": (
        (
            ("trips(0, T, 1", "trips(0, 1, 1"),
            ("        store(buf, t, obs, logprob)\n", ""),
        ),
        CONTEXT,
    ),
    "early-exit": ((("        a_np = ", "        break_if(T, (obs,))\n        a_np = "),), CONTEXT),
    "may-raise": ((), replace(CONTEXT, run_ahead=False)),
    "unknown-effects": (
        (
            ('reads=["log"], writes=["log"], results=0)\ndef note', "results=0)\ndef note"),
            ('writes=["buf.obs[t]", "buf.logprobs[t]"], results=0)', 'writes=["envs"], results=0)'),
            ("def store(buf, t, obs, logprob)", "def store(envs, t, obs, logprob)"),
            ("store(buf, t, obs, logprob)\n", "store(envs, t, obs, logprob)\n"),
        ),
        CONTEXT,
    ),
    "no-window": (
        (
            ("        store(buf, t, obs, logprob)\n", ""),
            ("        note(log, reward, infos)\n", ""),
        ),
        CONTEXT,
    ),
    "effects-conflict": (
        (
            ("        store(buf, t, obs, logprob)\n", ""),
            (
                'reads=["log"], writes=["log"], results=0)',
                'reads=["envs"], writes=["log"], results=0)',
            ),
            ("def note(log, reward, infos)", "def note(log, envs, infos)"),
            ("note(log, reward, infos)\n", "note(log, envs, infos)\n"),
        ),
        CONTEXT,
    ),
    "borrowed-buffer": (
        (
            (
                "= step(a_np, envs)\n",
                '= step(a_np, envs) @ facts(alias=["envs.outputs"], borrowed=True)\n',
            ),
            ("= to_obs(x)\n", '= to_obs(x) @ facts(alias=["envs.outputs"], borrowed=True)\n'),
            ("        next_obs = ", "        store(buf, t, obs, logprob)\n        next_obs = "),
        ),
        CONTEXT,
    ),
}


@pytest.mark.parametrize("code", REFUSED)
def test_refused(blocked, code: str) -> None:
    changes, context = REFUSED[code]
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    assert blocked(text, LateWork(), context) == [code]


@pytest.mark.parametrize("nested", ["for k in trips(0, 2, 1):", "if T:"])
def test_run_ahead_false_looks_into_what_is_nested(blocked, nested: str) -> None:
    """The operation that may raise is in the body of a loop or a branch, which say nothing."""
    about = replace(CONTEXT, run_ahead=False)
    calm = TEXT.replace("@op(", "@op(may_raise=False, ")
    line = "        note(log, reward, infos)\n"
    text = calm.replace(line, f"        {nested}\n            note(log, reward, infos)\n")
    assert PassManager([LateWork()], verify=2).run(parse(text), about).remarks.applied()
    op = '@op(may_raise=False, reads=["log"]'
    assert blocked(text.replace(op, '@op(reads=["log"]'), LateWork(), about) == ["may-raise"]


def _placed(text: str) -> dict[str, facts.Slot]:
    program = parse(text)
    PassManager([LateWork()], verify=2).run(program, CONTEXT)
    return {n.name: slot for n in program.nodes() if (slot := facts.get(n).slot) is not None}


def test_one_trip_alone_overlaps_within_itself() -> None:
    """What waits for the step is issued behind what does not, whatever the program's order."""
    text = TEXT.replace("trips(0, T, 1", "trips(0, 1, 1")
    text = text.replace("        store(buf, t, obs, logprob)\n", "")
    text = text.replace(
        "        next_obs = ", "        store(buf, t, obs, logprob)\n        next_obs = "
    )
    slots = _placed(text)
    assert {slot.stage for slot in slots.values()} == {0}
    assert slots["r"].order < slots["store"].order < slots["note"].order
    assert slots["r"].lane


def test_a_trip_that_may_be_the_last_overlaps_within_itself() -> None:
    text = TEXT.replace("        store(buf, t, obs, logprob)\n", "")
    text = text.replace(
        "        next_obs = ",
        "        store(buf, t, obs, logprob)\n        break_if(infos, (obs,))\n        next_obs = ",
    )
    slots = _placed(text)
    assert {slot.stage for slot in slots.values()} == {0}
    order = {name: slot.order for name, slot in slots.items()}
    assert order["r"] < order["store"] < order["note"] < order["break_if"] < order["next_obs"]


def test_an_iterator_that_late_work_holds_up(blocked) -> None:
    text = TEXT.replace("trips(0, T, 1, obs=obs0)", "trips(log, obs=obs0)").replace("T, *", "*")
    assert blocked(text, LateWork(), CONTEXT) == ["effects-conflict"]


def test_an_operation_that_reads_the_simulator_stays_in_front_of_the_step() -> None:
    """Reading the simulator between two steps is kept there; the rest moves all the same."""
    text = TEXT.replace('reads=["log"], writes=["log"]', 'reads=["log", "envs"], writes=["log"]')
    text = text.replace("def note(log, reward, infos)", "def note(log, envs, infos)")
    text = text.replace("note(log, reward, infos)\n", "note(log, envs, infos)\n")
    program = parse(text)
    history = PassManager([LateWork()], verify=2).run(program, CONTEXT)
    slots = {n.name: facts.get(n).slot for n in program.nodes() if facts.get(n).slot}
    assert slots["note"].stage == 1
    assert slots["note"].order < slots["r"].order < slots["store"].order
    assert [r.code for r in history.remarks.missed()] == ["effects-conflict"]
