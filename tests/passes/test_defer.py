"""defer: late traced work of all trips in one call behind the loop, or the reason why not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts
from rose_compiler.ir.interp import run
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.defer import Defer
from rose_compiler.passes.manager import PassManager

CONTEXT = PassContext(options=Decision(defer=True))
TEXT = (Path(__file__).parent / "golden/defer/critic.in.txt").read_text()
OBS = facts.Spec("tensor", "Tensor", (4, 3), "float32", "cpu")


def typed(text: str, bind: Mapping[str, Any] = {}) -> Program:
    """The program with the type of the observations known, as after a first trip."""
    program = parse(text, dict(bind))
    for node in program.nodes():
        if node.name == "obs":
            facts.put(node, spec=OBS)
        if is_call(node) and op_of(node).name == "critic":
            facts.put(node, spec=replace(OBS, shape=(4, 1)))
    return program


def test_a_critic_behind_a_loop_that_counts_down(golden) -> None:
    golden("critic", [Defer()], CONTEXT, program=typed(TEXT))


class _Envs:
    def __init__(self) -> None:
        self.x = torch.arange(12.0).reshape(4, 3)

    def step(self, action):
        self.x = self.x * 0.5 + action
        return self.x, self.x.sum(1)


class _Buffer:
    def __init__(self) -> None:
        self.values = torch.zeros(10, 4, 1)


def outcome(program: Program) -> tuple[torch.Tensor, ...]:
    buf, log = _Buffer(), []
    agent = torch.nn.Module()
    agent.critic = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(agent.critic.weight)
    with torch.no_grad():
        last = run(
            program,
            {"obs0": torch.ones(4, 3)},
            {"agent": agent, "envs": _Envs(), "buf": buf, "log": log},
        )
    return last, buf.values, torch.stack(log)


BIND = {
    "act": lambda obs, agent: obs.mean(1, keepdim=True),
    "step": lambda action, envs: envs.step(action),
    "unpack": lambda r: r,
    "store": lambda buf, t, value: buf.values.__setitem__(t, value),
    "note": lambda log, reward: log.append(reward),
}


def test_the_same_values_in_the_same_places() -> None:
    want = outcome(parse(TEXT, BIND))
    program = parse(TEXT, BIND)
    for node in program.nodes():
        if node.name == "obs":
            facts.put(node, spec=OBS)
    history = PassManager([Defer()], verify=2).run(program, CONTEXT)
    assert history.rewrites["defer"] == 1
    assert sum(is_call(n) and op_of(n).name == "critic" for n in program.graph.nodes) == 1
    got = outcome(program)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_what_is_kept_has_memory_of_its_own() -> None:
    text = TEXT.replace("note(log, reward)", "note(log, value)")
    text = text.replace('writes=["log"], ', 'writes=["log"], attributes={"retains": ("reward",)}, ')
    program = typed(text, BIND)
    assert PassManager([Defer()], verify=2).run(program, CONTEXT).rewrites["defer"] == 1
    log: list[torch.Tensor] = []
    agent = torch.nn.Module()
    agent.critic = torch.nn.Linear(3, 1, bias=False)
    objects = {"agent": agent, "envs": _Envs(), "buf": _Buffer(), "log": log}
    with torch.no_grad():
        run(program, {"obs0": torch.ones(4, 3)}, objects)
    log[0].zero_()
    assert [kept._version for kept in log] == [1, 0, 0]


REFUSED = {
    "switched-off": ((), replace(CONTEXT, options=Decision())),
    "early-exit": ((("        r = ", "        break_if(obs0, (obs,))\n        r = "),), CONTEXT),
    "trip-count-unknown": ((("trips(8, 2, -2", "trips(0, obs0, 1"),), CONTEXT),
    "single-trip": ((("trips(8, 2, -2", "trips(0, 1, 1"),), CONTEXT),
    "carried-dependence": (
        (
            (
                "for t, obs in trips(8, 2, -2, obs=obs0)",
                "for t, obs, v in trips(8, 2, -2, obs=obs0, v=obs0)",
            ),
            ("yield next_obs", "yield next_obs, value"),
        ),
        CONTEXT,
    ),
    "not-proven-separable": ((('batch={"obs": 0, "return.0": 0}, ', ""),), CONTEXT),
    "batch-coupling": ((('batch={"obs": 0, "return.0": 0}', 'batch={"obs": 0}'),), CONTEXT),
    "not-probed": ((("exact=True, ", ""),), CONTEXT),
    "probe-bits-differ": ((("exact=True", "exact=False"),), replace(CONTEXT, numerics="bitwise")),
    "probe-values-differ": ((), replace(CONTEXT, probe=lambda node, rows: "differ")),
    "memory-limit": ((), replace(CONTEXT, memory_limit=100)),
    "may-raise": ((("may_raise=False", "may_raise=True"),), replace(CONTEXT, run_ahead=False)),
    "reads-loop-state": (
        (
            ('reads=["log"], writes=["log"], results=0)', 'reads=["w"], writes=["w"], results=0)'),
            ("def note(log, reward)", "def note(w, action)"),
            ("        note(log, reward)\n", ""),
            ("        with no_grad", "        note(w, action)\n        with no_grad"),
        ),
        CONTEXT,
    ),
    "effects-conflict": (
        (
            (
                'reads=["log"], writes=["log"], results=0)',
                'reads=["buf.values"], writes=["log"], results=0)',
            ),
            ("def note(log, reward)", "def note(log, reward, buf)"),
            ("note(log, reward)\n        yield", "note(log, reward, buf)\n        yield"),
        ),
        CONTEXT,
    ),
    "varies-in-loop": ((("critic(obs, w)\n    ", "critic(obs0, w)\n    "),), CONTEXT),
    "unsupported-shape": (
        (
            (
                "        store(buf, t, value)\n",
                "        if obs0:\n            store(buf, t, value)\n",
            ),
        ),
        CONTEXT,
    ),
}


def test_no_store_behind_the_loop_may_raise_without_run_ahead() -> None:
    """Trip one's store would come behind the steps of all others."""
    program = typed(TEXT)
    history = PassManager([Defer()], verify=2).run(program, replace(CONTEXT, run_ahead=False))
    assert [r.code for r in history.remarks.missed()] == ["may-raise"]
    calm = TEXT.replace('writes=["buf.values[t]"], ', 'writes=["buf.values[t]"], may_raise=False, ')
    history = PassManager([Defer()], verify=2).run(typed(calm), replace(CONTEXT, run_ahead=False))
    assert list(history.remarks.missed()) == []


@pytest.mark.parametrize("code", REFUSED)
def test_refused(code: str) -> None:
    changes, context = REFUSED[code]
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    program = typed(text)
    history = PassManager([Defer()], verify=2).run(program, context)
    assert [r.code for r in history.remarks.missed()] == [code]
    assert not history.remarks.applied()


@pytest.mark.parametrize("written", [True, False])
def test_a_view_of_a_state_is_copied(written: bool) -> None:
    """Of memory that the loop leaves alone, too: a list of it would be no reader of the state."""
    text = TEXT.replace(
        "value = critic(obs, w)",
        'seen = look(buf, t) @ facts(alias=["buf.frames"])\n            value = critic(seen, w)',
    )
    text = '@op(reads=["buf.frames"], writes=[])\ndef look(buf, t): ...\n\n' + text
    if written:
        text = text.replace(
            'reads=["log"], writes=["log"], results=0)',
            'reads=["buf.frames"], writes=["buf.frames"], results=0)',
        )
        text = text.replace("def note(log, reward)", "def note(buf, reward)").replace(
            "note(log, reward)\n        yield", "note(buf, reward)\n        yield"
        )
    program = typed(text)
    for node in program.nodes():
        if node.name == "seen":
            facts.put(node, spec=OBS)
    history = PassManager([Defer()], verify=2).run(program, CONTEXT)
    assert history.rewrites["defer"] == 1
    assert "snapshot(seen)" in history.after()


@pytest.mark.parametrize(("late", "applied"), [("obs", 0), ("value", 1)])
def test_what_is_overwritten_between_two_reads_is_not_kept_once_for_both(
    late: str, applied: int
) -> None:
    """The step writes into the buffer that it has lent: who reads the observation behind it reads
    the next one."""
    text = TEXT.replace(
        "next_obs, reward = unpack(r)",
        'next_obs, reward = unpack(r) @ facts(alias=["envs.outputs"], borrowed=True)',
    )
    text = text.replace("        store(buf, t, value)\n", "").replace(
        "        note(log, reward)\n", f"        store(buf, t, value, {late})\n"
    )
    text = text.replace("def store(buf, t, value)", "def store(buf, t, value, other)")
    history = PassManager([Defer()], verify=2).run(typed(text), CONTEXT)
    assert history.rewrites["defer"] == applied
    assert [r.code for r in history.remarks.missed()] == ["borrowed-buffer"] * (1 - applied)
    assert not applied or "snapshot(obs)" in history.after()


def test_an_operation_that_may_build_an_autograd_graph_stays() -> None:
    program = typed(TEXT.replace("with no_grad():", "with enable_grad():"))
    critic = next(n for n in program.nodes() if is_call(n) and op_of(n).name == "critic")
    facts.put(critic, spec=replace(OBS, requires_grad=True))
    history = PassManager([Defer()]).run(program, CONTEXT)
    assert [r.code for r in history.remarks.missed()] == ["grad-graph"]
