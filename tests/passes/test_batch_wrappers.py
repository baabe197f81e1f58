"""batch_wrappers: wrappers of a simulator's environments advance at once while the program runs."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.ir.parse import parse
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.batch_wrappers import BatchWrappers

TEXT = """
@op(reads=[], writes=[])
def act(obs): ...

@op(kind="step", reads=["trainer.envs"], writes=["trainer.envs"], attributes={"step": {"env": "trainer", "action": "action"}})
def step(action, trainer): ...

def iteration(obs0, *, trainer):
    for t, obs in rollout(0, 4, 1, obs=obs0):
        action = act(obs)
        next_obs = step(action, trainer)
        yield next_obs
    return rollout.obs
"""
KNOWN = (("NormalizeReward", "ClipAction"), "", 1e-3)
UNKNOWN = ((), "Mine is no wrapper that can take a batch", 0.0)
ON = Decision(wrappers=True)


def test_a_simulator_below_a_root_is_switched_in_front_of_everything(golden) -> None:
    context = PassContext(options=ON, wrappers={"trainer.envs": (KNOWN, KNOWN, UNKNOWN)})
    golden("below_a_root", [BatchWrappers()], context, program=parse(TEXT))


def test_a_simulator_that_never_steps_is_left_alone(blocked) -> None:
    context = PassContext(options=ON, wrappers={"other": (UNKNOWN,)})
    assert blocked(TEXT, BatchWrappers(), context) == []


@pytest.mark.parametrize(
    ("code", "context"),
    {
        "switched-off": PassContext(wrappers={"trainer.envs": (KNOWN,)}),
        "unsupported-shape": PassContext(options=ON, wrappers={"trainer.envs": (UNKNOWN,) * 2}),
    }.items(),
)
def test_refused(blocked, code: str, context: PassContext) -> None:
    assert blocked(TEXT, BatchWrappers(), context) == [code]
