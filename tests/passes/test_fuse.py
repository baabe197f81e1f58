"""fuse: optimizer steps by one kernel, graphs for Inductor."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from dataclasses import replace

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.fuse import Fuse
from rose_compiler.passes.manager import PassManager

TEXT = """
@op(reads=["agent"], writes=["@agent.grads"], results=0, attributes={"calls": ("backward",)})
def backward(agent): ...

@op(reads=["trainer.optimizer", "@agent.grads"], writes=["trainer.optimizer", "@agent.params"], results=0, attributes={"calls": ("optimizer",)})
def step(trainer): ...

def iteration(x, *, agent, trainer):
    for e in epochs(0, 2, 1):
        backward(agent)
        step(trainer)
        yield ()
    return x
"""
CONTEXT = PassContext(options=Decision(fuse=True), optimizers={"trainer.optimizer": None})


def test_an_optimizer_below_a_root_is_switched_in_front_of_everything(golden) -> None:
    golden("below_a_root", [Fuse()], CONTEXT, program=parse(TEXT))


def test_an_optimizer_that_never_steps_is_left_alone(blocked) -> None:
    text = TEXT.replace("        step(trainer)\n", "")
    assert blocked(text, Fuse(), CONTEXT) == []


@pytest.mark.parametrize(
    ("code", "context"),
    {
        "switched-off": PassContext(optimizers={"trainer.optimizer": None}),
        "not-available": PassContext(
            options=Decision(fuse=True), optimizers={"trainer.optimizer": "it has none"}
        ),
        "probe-bits-differ": PassContext(
            numerics="bitwise",
            options=Decision(fuse=True),
            optimizers={"trainer.optimizer": None},
        ),
    }.items(),
)
def test_refused(blocked, code: str, context: PassContext) -> None:
    assert blocked(TEXT, Fuse(), context) == [code]


CALLS = "\n".join(f"    {b} = torch.tanh({a})" for a, b in zip("xabcdef", "abcdefg", strict=True))
GRAPHS = f"""
@op(kind="graph", reads=[], writes=[])
def act(x):
{CALLS}
    return g

@op(kind="graph", reads=[], writes=[])
def short(x):
    a = torch.tanh(x)
    return a

@op(kind="graph", reads=["agent"], writes=["agent"])
def writing(x, agent):
{CALLS}
    return g

@op(kind="graph", reads=["rng:torch"], writes=["rng:torch"])
def drawing(x):
{CALLS}
    return g

@op(kind="graph", reads=[], writes=[], records=["x"])
def recording(x):
{CALLS}
    return g

def iteration(x, *, agent):
    for t in steps(0, 2, 1):
        a = act(x)
        b = short(a)
        c = writing(b, agent)
        d = drawing(c)
        e = act(d)
        f = recording(e)
        yield ()
    return x
"""
COMPILE = PassContext(options=Decision(compile=True))


def inductors(context: PassContext) -> list[str]:
    program = parse(GRAPHS)
    PassManager([Fuse()], verify=2).run(program, context)
    calls = filter(is_call, parse(dump(program)).nodes())
    return [n.name for n in calls if op_of(n).attributes.get("inductor")]


def test_graphs_that_record_write_and_draw_nothing_are_for_inductor() -> None:
    assert inductors(COMPILE) == ["a", "e"]
    assert inductors(replace(COMPILE, numerics="bitwise")) == []
    assert inductors(PassContext(options=Decision())) == []


def test_why_other_graphs_are_not(blocked) -> None:
    others = GRAPHS.replace("= act(", "= short(")
    assert blocked(others, Fuse(), COMPILE) == ["not-pure", "draw-order", "grad-graph"]


REPLAYED = PassContext(options=Decision(compile=True, cuda_graphs=True))


def replayed(text: str, device: str) -> tuple[list[str], set[str]]:
    """Which calls are replayed where all tensors lie on a device, and the blockers of the rest."""
    program = parse(text)
    spec = facts.Spec("tensor", shape=(4,), dtype="float32", device=device)
    for node in program.nodes():
        if device and (node.op == "placeholder" or is_call(node)):
            facts.put(node, spec=spec)
    history = PassManager([Fuse()], verify=2).run(program, REPLAYED)
    calls = [n for n in program.nodes() if is_call(n) and op_of(n).attributes.get("replayed")]
    assert all(op_of(n).attributes["inductor"] for n in calls)
    codes = {r.code for r in history.remarks if r.kind == "missed"}
    return [n.name for n in calls], codes - {"not-pure", "draw-order", "grad-graph"}


def test_what_inductor_compiles_on_a_device_is_replayed() -> None:
    assert replayed(GRAPHS, "cuda:0") == (["a", "e"], set())
    assert inductors(replace(REPLAYED, options=Decision(cuda_graphs=True))) == []


@pytest.mark.parametrize(
    ("last", "device", "code"),
    [
        ("tanh(f)", "cpu", "not-available"),
        ("tanh(f)", "", "not-available"),
        ("nonzero(f)", "cuda:0", "unsupported-shape"),
        ("Tensor.cpu(f)", "cuda:0", "host-read"),
        ("Tensor.item(f)", "cuda:0", "host-read"),
    ],
)
def test_why_graphs_are_not_replayed(last: str, device: str, code: str) -> None:
    text = GRAPHS.replace("tanh(f)", last)
    assert replayed(text, device) == ([], {code})
