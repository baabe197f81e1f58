"""What simulators say of the wrappers around their environments, and what is made of it."""

from __future__ import annotations

from typing import Any

import pytest

from rose_compiler.api.wrappers import batchable, with_wrappers
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import fail
from rose_compiler.base.profile import OpTime, Profile
from rose_compiler.ir.parse import parse
from rose_compiler.sim import ShardedEnv
from rose_compiler.tune.space import candidates
from tests.api.loops import Drift

TEXT = """
@op(reads=[], writes=[])
def act(obs): ...

@op(kind="step", reads=["envs"], writes=["envs"], attributes={"step": {"env": "envs", "action": "action"}})
def step(action, envs): ...

def iteration(obs0, *, envs):
    action = act(obs0)
    obs = step(action, envs)
    return obs
"""  # noqa: E501


def test_every_candidate_but_the_users_own_statements_lets_wrappers_advance_at_once() -> None:
    known: dict[str, Any] = {"close": True, "threads": 2, "asynchronous": True, "eager": False}
    plain, *rest = candidates(2, wrappers=True, overlap=True, **known)
    assert plain == Decision()
    assert all(one is not None and one.wrappers for one in rest)
    assert not any(one.wrappers for one in candidates(2, overlap=True, **known) if one is not None)


def test_a_step_ends_sooner_by_what_the_slowest_shard_saves() -> None:
    program = parse(TEXT)
    times = {"median_s": 0.01, "p90_s": 0.02, "mean_s": 0.011, "work_s": 0.03}
    ops = tuple(OpTime(node, 3, **times) for node in ("action", "obs"))
    saved = {"envs": ((("ClipAction",), "", 0.002), (("ClipAction",), "", 0.003))}
    act, step = with_wrappers(Profile("cpu", (0.1,), ops), program, saved).ops
    assert act == ops[0]
    found = [step.median_s, step.p90_s, step.mean_s, step.work_s]
    assert found == pytest.approx([0.007, 0.017, 0.008, 0.025])
    assert with_wrappers(Profile("cpu", (0.1,), ops), program, {}).ops == ops


def test_a_simulator_that_is_lost_says_nothing() -> None:
    envs = ShardedEnv.split([Drift] * 2, shards=2)
    assert batchable({"envs": envs}) == {
        "envs": (((), "no wrapper stands around the environments", 0.0),) * 2
    }
    envs.close()
    assert batchable({"envs": envs}) == {}
    with pytest.raises(type(fail("fault-closed", ""))):
        envs.batchable()
