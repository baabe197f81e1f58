"""accumulate: a group's backward moves into the loop that collects, where no dependence is turned
round; what keeps it behind is named."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from dataclasses import replace

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts
from rose_compiler.ir.deps import effects_of
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, Program, is_call, op_of
from rose_compiler.passes import fusion
from rose_compiler.passes.accumulate import Accumulate, accumulates
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import History, PassManager

CONTEXT = PassContext(options=Decision(accumulate=True))
TEXT = """
@op(kind="step", reads=["env"], writes=["env"], attributes={"step": {"env": "env", "action": "action"}})
def step(action, env): ...

@op(reads=["net.params", "rng:torch"], writes=["rng:torch"])
def act(obs, net): ...

@op(reads=[], writes=["buf.obs[g, t]"], results=0)
def put(buf, g, t, obs): ...

@op(reads=["buf.obs[g]"], writes=["buf.adv[g]"], results=0)
def compare(buf, g): ...

@op(reads=["opt"], writes=["@net.grads"], results=0, calls=["optimizer"])
def zero_grad(opt): ...

@op(reads=["buf.obs[g]"], writes=[], attributes={"views": ("buf.obs[g]",)})
def seen_of(buf, g): ...

@op(reads=["net.params", "buf.adv[g]"], writes=[], records=["net.params"])
def loss_of(obs, buf, g, net): ...

@op(reads=["@net.grads", "@net.params", "@buf.obs", "@buf.adv"], writes=["@net.grads"], results=0, calls=["backward"], attributes={"through": ("loss",)})
def back(loss): ...

@op(reads=[], writes=[])
def add(total, loss): ...

@op(reads=["opt", "@net.grads"], writes=["opt", "@net.params"], results=0, calls=["optimizer"])
def opt_step(opt): ...

def train(obs0, *, net, env, buf, opt):
    for g in groups(0, 4, 1):
        for t, obs in trips(0, 5, 1, obs=obs0):
            with no_grad():
                action = act(obs, net)
            put(buf, g, t, obs)
            seen = step(action, env)
            yield seen
        compare(buf, g)
    for e, total in epochs(0, 2, 1, total=0.0):
        zero_grad(opt)
        for g, total in again(0, 4, 1, total=total):
            obs = seen_of(buf, g) @ facts(alias=["buf.obs"])
            loss = loss_of(obs, buf, g, net)
            back(loss)
            more = add(total, loss)
            yield more
        opt_step(opt)
        yield again.total
    return epochs.total
"""


def passed(text: str, context: PassContext = CONTEXT) -> tuple[Program, History]:
    program = parse(text)
    return program, PassManager([Accumulate()], verify=2).run(program, context)


def code_of(text: str, context: PassContext = CONTEXT) -> str | None:
    program, history = passed(text, context)
    assert program.stage == "captured"
    (missed,) = history.remarks.missed()
    return missed.code


def body(program: Program, label: str) -> LoopView:
    (found,) = (loop for loop in program.loops() if loop.label == label)
    return found


def test_the_first_epoch_moves_into_the_loop_that_collects() -> None:
    program, history = passed(TEXT)
    (told,) = history.remarks.applied()
    assert "in the first epoch" in told.why
    fused = body(program, "groups")
    slots = {op_of(n).name: facts.get(n).slot for n in fused.graph.nodes if is_call(n)}
    where = {name: (slot.lane, slot.stage) for name, slot in slots.items() if slot}
    lane = "thread:groups"
    assert where["loop"] == where["compare"] == (lane, 0)
    assert where["seen_of"] == where["loss_of"] == where["back"] == where["add"] == ("", 1)
    assert [slots[n].order for n in ("loop", "compare", "back")] == sorted(
        slots[n].order for n in ("loop", "compare", "back")
    )
    # zero_grad stands in front, the step behind; the other epoch is as it was
    names = [op_of(n).name for n in program.graph.nodes if is_call(n)]
    assert names.index("zero_grad") < names.index("loop") < names.index("opt_step")
    assert body(program, "epochs").bounds == (1, 2, 1)
    assert "again" in {loop.label for loop in program.loops()}


def test_forwards_do_not_compare_versions_of_buffers_that_are_collected_beside() -> None:
    program, _ = passed(TEXT)
    for name in ("seen_of", "loss_of", "back"):
        (node,) = (
            n for n in body(program, "groups").graph.nodes if is_call(n) and op_of(n).name == name
        )
        assert [c.kind for c in facts.get(node).context] == ["unversioned"]


def test_a_graph_that_compares_versions_minds_writes_to_other_rows() -> None:
    program = parse(TEXT)
    held = [e for e in effects_of(program.find("back"), program) if e.state == "buf.obs"]
    assert [e.region for e in held] == [None]
    program, _ = passed(TEXT)
    (node,) = (n for n in body(program, "groups").graph.nodes if n.name.startswith("back"))
    held = [e for e in effects_of(node, program) if e.state == "buf.obs"]
    assert [str(e.region) for e in held] == ["g"]


def test_a_single_epoch_leaves_no_loop_over_epochs() -> None:
    program, _ = passed(TEXT.replace("epochs(0, 2, 1", "epochs(0, 1, 1"))
    assert {loop.label for loop in program.loops()} == {"groups", "trips"}


def test_an_update_without_epochs() -> None:
    before, after = TEXT.index("    for e, total"), TEXT.index("    return")
    plain = """    zero_grad(opt)
    for g, total in again(0, 4, 1, total=0.0):
        obs = seen_of(buf, g) @ facts(alias=["buf.obs"])
        loss = loss_of(obs, buf, g, net)
        back(loss)
        more = add(total, loss)
        yield more
    opt_step(opt)
"""
    text = TEXT[:before] + plain + TEXT[after:].replace("epochs.total", "again.total")
    program, history = passed(text)
    assert len(history.remarks.applied()) == 1
    assert {loop.label for loop in program.loops()} == {"groups", "trips"}


MIDDLE = """
@op(reads=["buf.obs[g]"], writes=["buf.adv[g]"], results=0)
def late_compare(buf, g): ...

@op(reads=["buf.adv"], writes=["buf.adv"], results=0)
def whiten(buf): ...

@op()
def normalize(): ...

@op(reads=["host"], writes=["host"], calls=["clock"])
def now(): ...
"""


def between(lines: str) -> str:
    """The program with more between its loops."""
    return MIDDLE + TEXT.replace("    for e, total", f"{lines}\n    for e, total")


def test_a_loop_of_the_same_trips_between_them_joins_the_collection() -> None:
    text = between("    for g in compared(0, 4, 1):\n        late_compare(buf, g)")
    program, history = passed(text)
    assert len(history.remarks.applied()) == 1
    assert {loop.label for loop in program.loops()} == {"groups", "trips", "epochs", "again"}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("whole-collection", between("    whiten(buf)")),
        ("unknown-effects", between("    normalize()")),
        # it tells how long the collection took
        ("effects-conflict", between("    taken = now()")),
        # a loss that looks at the data of all groups
        ("incomplete-group", TEXT.replace('"net.params", "buf.adv[g]"', '"net.params", "buf.adv"')),
        # a view that may lie anywhere, and a graph that may come from anywhere
        ("incomplete-group", TEXT.replace(', attributes={"views": ("buf.obs[g]",)}', "")),
        ("incomplete-group", TEXT.replace(', attributes={"through": ("loss",)}', "")),
        ("incomplete-group", TEXT.replace("= seen_of(buf, g)", "= seen_of(buf, 3)")),
        # the optimizer steps behind each group
        (
            "parameters-change",
            TEXT.replace("            back(loss)", "            back(loss)\n            opt_step(opt)"),
        ),
        (
            "draw-order",
            TEXT.replace(
                'reads=["net.params", "buf.adv[g]"], writes=[]',
                'reads=["net.params", "buf.adv[g]", "rng:torch"], writes=["rng:torch"]',
            ),
        ),
        ("grad-graph", TEXT.replace('writes=["rng:torch"])', 'writes=["rng:torch"], records=["net.params"])')),
        # in place on what the graph holds: autograd would no longer notice
        ("grad-graph", TEXT.replace("def add(", "def add(").replace(
            "@op(reads=[], writes=[])\ndef add", '@op(reads=[], writes=["loss"])\ndef add')),
        ("may-not-run", TEXT.replace("epochs(0, 2, 1", "epochs(0, obs0, 1")),
        ("single-trip", TEXT.replace("(0, 4, 1", "(0, 1, 1")),
    ],
)  # fmt: skip
def test_what_keeps_every_loss_behind_the_collection(code: str, text: str) -> None:
    assert text != TEXT
    assert code_of(text) == code


def test_other_trips_are_no_groups() -> None:
    _, history = passed(TEXT.replace("again(0, 4, 1", "again(0, 3, 1"))
    assert not history.remarks.applied()


def test_a_decision_without_it_and_run_ahead() -> None:
    assert code_of(TEXT, PassContext()) == "switched-off"
    assert code_of(TEXT, replace(CONTEXT, run_ahead=False)) == "may-raise"


def test_the_question_of_the_chooser_changes_nothing() -> None:
    program = parse(TEXT)
    assert accumulates(program)
    assert [op_of(n).name for n in program.graph.nodes if is_call(n)].count("loop") == 2
    assert not accumulates(parse(between("    whiten(buf)")))


def test_bounds_that_are_read_twice_from_what_nobody_writes() -> None:
    """Two loops over the same number of a configuration."""
    known = '@op(reads=["env.n"], writes=[])\ndef count(env):\n    # n = env.n\n    ...\n'
    text = known.replace("env", "cfg") + TEXT.replace(
        "buf, opt):", "buf, opt, cfg):\n    n = count(cfg)"
    )
    text = text.replace("groups(0, 4, 1", "groups(0, n, 1")
    text = text.replace("        zero_grad(opt)", "        zero_grad(opt)\n        m = count(cfg)")
    text = text.replace("again(0, 4, 1", "again(0, m, 1")
    _, history = passed(text)
    assert len(history.remarks.applied()) == 1, history.remarks.render()


def test_the_trial_asks_the_dependences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its question the verifier stops what it would let through."""
    monkeypatch.setattr(fusion, "_turned", lambda edges, deps: None)
    assert code_of(TEXT.replace("= seen_of(buf, g)", "= seen_of(buf, 3)")) == "unsupported-shape"
