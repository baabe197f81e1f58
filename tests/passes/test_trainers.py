"""overlap: the update of a model of its own, beside that of the policy."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from typing import Any

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts
from rose_compiler.ir.deps import title_name
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import Program, is_call, op_of
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.overlap import Overlap

TEXT = """
@op(reads=["envs", "agent"], writes=["envs"], kind="step", attributes={"step": {"env": "envs", "action": "agent"}})
def collect(agent, envs): ...

@op(reads=["agent.params"], writes=[], records=["agent.params"], calls=["module"])
def policy_loss(agent, x): ...

@op(reads=["agent.params"], writes=["@agent.grads"], results=0, calls=["backward"])
def policy_back(agent, loss): ...

@op(reads=["opt", "@agent.grads"], writes=["opt", "@agent.params"], results=0, calls=["optimizer"])
def policy_step(opt): ...

@op(reads=["target.params"], writes=[], calls=["module"])
def wanted(target, x): ...

@op(reads=["rnd.params"], writes=[], records=["rnd.params"], calls=["module"])
def rnd_loss(rnd, x, goal): ...

@op(reads=["other"], writes=["@rnd.grads"], results=0, calls=["optimizer"])
def rnd_zero(other): ...

@op(reads=["rnd.params"], writes=["@rnd.grads"], results=0, calls=["backward"])
def rnd_back(rnd, wrong): ...

@op(reads=["other", "@rnd.grads"], writes=["other", "@rnd.params"], results=0, calls=["optimizer"])
def rnd_step(other): ...

@op(reads=[], writes=[])
def told(wrong): ...

def iteration(n, *, agent, opt, rnd, target, other, envs):
    x = collect(agent, envs)
    for e in epochs(0, n, 1):
        loss = policy_loss(agent, x)
        policy_back(agent, loss)
        policy_step(opt)
        yield ()
    goal = wanted(target, x)
    wrong = rnd_loss(rnd, x, goal)
    rnd_zero(other)
    rnd_back(rnd, wrong)
    rnd_step(other)
    number = told(wrong)
    return number
"""
CONTEXT = PassContext(options=Decision(overlap=True))
RND = ["wanted", "rnd_loss", "rnd_zero", "rnd_back", "rnd_step"]


def lanes(program: Program) -> dict[str, str]:
    """The lanes of operations, by name, in the order in which they are issued."""
    nodes = [n for n in program.graph.nodes if is_call(n) and facts.get(n).slot is not None]
    nodes.sort(key=lambda n: facts.get(n).slot.order)  # type: ignore[union-attr]
    return {op_of(n).name: facts.get(n).slot.lane for n in nodes}  # type: ignore[union-attr]


def test_a_model_of_its_own_is_trained_beside_the_policy(golden: Any) -> None:
    program = parse(TEXT)
    golden("curious", [Overlap()], CONTEXT, program=program, folder="overlap")
    found = lanes(program)
    assert [name for name, lane in found.items() if lane == "thread:wrong"] == RND
    order = list(found)
    assert order.index("rnd_step") < order.index("loop") < order.index("told")


def test_a_whole_loop_of_its_updates_goes_too() -> None:
    body, rest = TEXT.split("    goal = wanted(target, x)\n")
    inside, rest = rest.split("    number = told(wrong)\n    return number\n")
    lines = "".join(f"    {line}\n" for line in inside.splitlines())
    text = f"{body}    goal = wanted(target, x)\n    for m in models(0, 1, 1):\n{lines}        yield ()\n"
    step = "        policy_step(opt)\n"
    program = parse(f"{text}    return n\n{rest}".replace(step, step * 3))
    history = PassManager([Overlap()], verify=2).run(program, CONTEXT)
    assert history.remarks.applied()
    on = [n for n in program.graph.nodes if (s := facts.get(n).slot) is not None and s.lane]
    assert [title_name(n) for n in on] == ["wanted", "models"]


#: Changes that leave the model's update where it stands, and the codes that tell why.
HELD: dict[str, tuple[tuple[tuple[str, str], ...], list[str]]] = {
    "one optimizer for both": ((("rnd_step(other)", "rnd_step(opt)"), ("def rnd_step(opt)", "def rnd_step(other)")), []),
    "a tensor that both record from": ((('records=["rnd.params"]', 'records=["rnd.params", "@target.params"]'), ('records=["agent.params"]', 'records=["agent.params", "@target.params"]')), []),
    "what records anything": ((('records=["rnd.params"]', 'records=["*"]'),), []),
    "one generator": (
        (
            ('reads=["agent.params"], writes=[], records', 'reads=["agent.params", "rng:torch"], writes=["rng:torch"], records'),
            ('reads=["rnd.params"], writes=[], records', 'reads=["rnd.params", "rng:torch"], writes=["rng:torch"], records'),
        ),
        ["draw-order"],
    ),
    "the policy pays what it says": ((("policy_loss(agent, x)\n", "policy_loss(agent, number)\n"), ("    for e in epochs", "    goal = wanted(target, x)\n    wrong = rnd_loss(rnd, x, goal)\n    rnd_zero(other)\n    rnd_back(rnd, wrong)\n    rnd_step(other)\n    number = told(wrong)\n    for e in epochs"), ("        yield ()\n    goal = wanted(target, x)\n    wrong = rnd_loss(rnd, x, goal)\n    rnd_zero(other)\n    rnd_back(rnd, wrong)\n    rnd_step(other)\n    number = told(wrong)\n", "        yield ()\n")), ["value-dependence"]),
    "who knows what it does": ((('@op(reads=["other"], writes=["@rnd.grads"], results=0, calls=["optimizer"])', '@op(results=0, calls=["optimizer"])'),), []),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_it_stays_where_it_is(name: str) -> None:
    changes, codes = HELD[name]
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    program = parse(text)
    history = PassManager([Overlap()], verify=2).run(program, CONTEXT)
    assert not {"rnd_loss", "rnd_back", "rnd_step"} & {
        n for n, lane in lanes(program).items() if lane
    }
    told = [r.code for r in history.remarks.missed()]
    assert [code for code in codes if code not in told] == []


def test_an_update_under_autocast_stays_on_the_thread_whose_casts_it_shares() -> None:
    old = "    wrong = rnd_loss(rnd, x, goal)\n"
    new = '    with autocast("cpu", region=1):\n        wrong = rnd_loss(rnd, x, goal)\n'
    program = parse(TEXT.replace(old, new))
    history = PassManager([Overlap()], verify=2).run(program, CONTEXT)
    assert not {"rnd_loss", "rnd_back"} & {n for n, lane in lanes(program).items() if lane}
    assert "mode-change" in [r.code for r in history.remarks.missed()]
