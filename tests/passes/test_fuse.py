"""fuse: optimizer steps by one kernel."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.ir.parse import parse
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.fuse import Fuse

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
