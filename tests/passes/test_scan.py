"""scan: recurrences in captured loops, by what they compute, and what must stay a loop."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rose_compiler.ir import facts
from rose_compiler.ir.parse import parse
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.scan import Scan

GOLDEN = Path(__file__).parent / "golden/scan"
GAE = (GOLDEN / "gae.in.txt").read_text()
STEP = "delta = buf.rewards[t] + cfg.gamma * following * alive - buf.values[t]"
ADD = "last = delta + cfg.gamma * cfg.gae_lambda * alive * last"


def test_advantages(golden) -> None:
    golden("gae", [Scan()])


def test_sums_in_place_through_a_buffer_and_shifted(golden) -> None:
    golden("sums", [Scan()])


REFUSED = {
    "cross-element": ((ADD, "last = delta + alive * last.mean()"),),
    "cross-element, a product": ((ADD, "last = delta @ last"),),
    "cross-element, a shift": ((ADD, "last = delta + torch.roll(last, 1)"),),
    "cross-element, a part of a row": ((STEP, "delta = buf.rewards[t, 0] * alive"),),
    "not-affine": ((ADD, "last = delta + alive * last * last"),),
    "not-affine, a maximum": ((ADD, "last = torch.maximum(delta, alive * last)"),),
    "not-affine, below": ((ADD, "last = delta / (alive + last)"),),
    "not-affine, a choice by it": ((ADD, "last = torch.where(last > 0.0, last, delta)"),),
    "not-pure": (
        (
            'reads=["buf.rewards[t]", "buf.values[t]"], writes=[]',
            'reads=["buf.rewards[t]", "buf.values[t]"], writes=["buf.log"]',
        ),
    ),
    "not-pure, a draw": (
        (
            "reads=[], writes=[], may_raise=False)\ndef add",
            'reads=["rng:torch"], writes=["rng:torch"], may_raise=False)\ndef add',
        ),
    ),
    "not-pure, output": (
        (
            "reads=[], writes=[], may_raise=False)\ndef add",
            'reads=[], writes=["host"], may_raise=False)\ndef add',
        ),
    ),
    "not-pure, in place": ((ADD, "last = delta.mul_(alive)"),),
    "not-pure, in place of another": ((ADD, "delta += alive * last; last = delta"),),
    "unknown-effects": (("@op(reads=[], writes=[], may_raise=False)\ndef add", "@op()\ndef add"),),
    "opaque-call": ((ADD, "last = torch.erfinv(delta) + last"),),
    "early-exit": (
        (
            "            yield last_1",
            "            break_if(first, (last_1,))\n            yield last_1",
        ),
    ),
    "may-alias": (('alias=["%advantages"]', 'alias=["buf.rewards"]'),),
    "reads-loop-state": (
        (
            "reads=[], writes=[], may_raise=False)\ndef add(alive, cfg, delta, last)",
            'reads=["advantages[(t + 2)]"], writes=[], may_raise=False)\ndef add(advantages, alive, cfg, delta, last, t)',
        ),
        ("add(alive, cfg, delta, last)\n", "add(advantages, alive, cfg, delta, last, t)\n"),
        (ADD, "last = delta + alive * last + advantages[t + 2]"),
    ),
    "mode-change": (
        (
            "            store(advantages",
            "            with enable_grad():\n                store(advantages",
        ),
    ),
    "trip-count-unknown": (("for_t(15, -1, -1", "for_t(15, first, -1"),),
    "too-small": (("for_t(15, -1, -1", "for_t(5, -1, -1"),),
    "unsupported-shape, steps of two": (("for_t(15, -1, -1", "for_t(31, -1, -2"),),
    "unsupported-shape, an index by twos": ((STEP, "delta = buf.rewards[2 * t]"),),
    "unsupported-shape, an index that stands": ((STEP, "delta = buf.rewards[3] + alive"),),
    "unsupported-shape, both ways": ((STEP, "delta = buf.rewards[15 - t] + buf.values[t]"),),
    "unsupported-shape, the index as a number": ((STEP, "delta = buf.rewards[t] * t"),),
    "unsupported-shape, many apart": (("if t == 15:", "if t > 11:"),),
    "unsupported-shape, a test of data": (("if t == 15:", "if next_done:"),),
    "unsupported-shape, negative rows": ((STEP, "delta = buf.rewards[t - 20] + alive"),),
    "unsupported-shape, twice": (
        (ADD, ADD),
        ("# advantages[t] = last", "# advantages[t] = last\n    # advantages[t] = last"),
    ),
    "unsupported-shape, a power": ((ADD, "last = delta + last ** 2"),),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(blocked, case: str) -> None:
    text = GAE
    for old, new in REFUSED[case]:
        assert old in text, old
        text = text.replace(old, new)
    assert blocked(text, Scan(), None) == [case.split(",")[0]]


def test_other_bits_are_refused_in_bitwise_alone(blocked) -> None:
    text = GAE.replace(STEP, "delta = torch.exp(buf.rewards[t]).clamp(max=cfg.top) - following")
    context = PassContext(numerics="bitwise")
    assert blocked(text, Scan(), context) == ["not-probed"]
    assert PassManager([Scan()], verify=2).run(parse(text)).remarks.applied()
    assert PassManager([Scan()], verify=2).run(parse(GAE), context).remarks.applied()


def test_gradients_are_left_to_the_loop(blocked) -> None:
    text = GAE.replace("    with no_grad():", "    with enable_grad():")
    program = parse(text)
    for node in program.nodes():
        if node.name == "delta":
            facts.put(node, spec=facts.Spec("tensor", "", (4,), "float32", "cpu", True))
    history = PassManager([Scan()]).run(program)
    assert [r.code for r in history.remarks.missed()] == ["grad-graph"]


def test_types_that_change_are_refused() -> None:
    program = parse(GAE)
    specs = {"first": "float32", "last_1": "float64"}
    for node in program.nodes():
        if node.name in specs:
            facts.put(node, spec=facts.Spec("tensor", "", (4,), specs[node.name], "cpu"))
    text = GAE.replace("if t == 15:", "if t == 99:")  # no trip is set apart by a test
    assert not PassManager([Scan()]).run(program).remarks.missed()
    program = parse(text)
    for node in program.nodes():
        if node.name in specs:
            facts.put(node, spec=facts.Spec("tensor", "", (4,), specs[node.name], "cpu"))
    history = PassManager([Scan()]).run(program)
    assert [r.code for r in history.remarks.missed()] == ["unsupported-shape"]


def test_a_number_handed_in_is_no_reason_to_stay_a_loop() -> None:
    text = GAE.replace("last=first", "last=0").replace("if t == 15:", "if t == 99:")
    history = PassManager([Scan()], verify=2).run(parse(text))
    assert "16 trips of for_t at once" in history.remarks.applied()[0].why


def test_loops_of_another_kind_go_without_a_remark() -> None:
    stepping = GAE.replace(
        "@op(reads=[], writes=[], may_raise=False)\ndef add",
        '@op(kind="step", reads=[], writes=[], may_raise=False)\ndef add',
    )
    unknown = GAE.replace("for_t(15, -1, -1", "for_t(15, first, -1")
    for text in (stepping, unknown.replace("            store(advantages, last_1, t)\n", "")):
        history = PassManager([Scan()]).run(parse(text))
        assert not history.remarks.missed()
        assert not history.remarks.applied()


def test_fuel_and_leaving_it_out() -> None:
    assert PassManager([Scan()], fuel=0).run(parse(GAE)).rewrites == {"scan": 0}
    context = replace(PassContext(), numerics="close")
    assert PassManager([Scan()], names=("-scan",)).run(parse(GAE), context).rewrites == {}


def test_modes_of_the_statements_hold_for_the_operation() -> None:
    """Also where an object below a root, which has no modes, is the first of the body."""
    text = GAE.replace(
        "            both =", '            rewards = state(buf, "rewards")\n            both ='
    )
    text = text.replace("def step(alive, buf,", "def step(alive, rewards, buf,")
    text = text.replace("step(alive, buf,", "step(alive, rewards, buf,").replace(
        "# delta = buf.rewards", "# delta = rewards"
    )
    text = text.replace(
        'reads=["buf.rewards[t]", "buf.values[t]"]', 'reads=["rewards[t]", "buf.values[t]"]'
    )
    program = parse(text)
    for node in program.nodes():
        if node.name == "rewards":
            facts.put(node, context=())
    PassManager([Scan()], verify=2).run(program)
    assert [c.kind for c in facts.get(program.find("scan_for_t")).context] == ["no_grad"]
