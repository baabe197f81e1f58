"""quota: thread counts within the coordinator's cores, and lanes that the plan leaves out."""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

import pytest

from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import QuotaError
from rose_compiler.base.machine import Machine, load_machine
from rose_compiler.base.quota import COORDINATOR, QuotaPlan
from rose_compiler.ir.parse import parse
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.manager import History, PassManager
from rose_compiler.passes.place import Place
from rose_compiler.passes.quota import Quota

TEXT = """
@op(reads=[], writes=[])
def act(obs): ...

@op(kind="step", reads=["envs"], writes=["envs"], attributes={"step": {"env": "envs", "action": "action"}})
def step(action, envs): ...

@op(reads=[], writes=["buf[t]"], results=0)
def store(buf, t, x): ...

def iteration(obs0, *, envs, buf):
    for e in iterations(0, 3, 1):
        for t, obs in rollout(0, 4, 1, obs=obs0):
            action = act(obs)
            next_obs = step(action, envs)
            store(buf, t, action)
            yield next_obs
        yield ()
    return obs0
"""
FOUR = Machine("four cores", cores=4)


def run(plan: QuotaPlan | None, **context: object) -> tuple[History, dict[str, int]]:
    program = parse(TEXT)
    known = PassContext(asynchronous=frozenset({"envs"}), **context)  # type: ignore[arg-type]
    history = PassManager([Place(), Quota(plan)], verify=2).run(program, known)
    return history, program.threads


def cores(**chunks: int) -> QuotaPlan:
    return QuotaPlan.divide("cores", FOUR, chunks)


def test_threads_are_bounded_where_lanes_run_beside() -> None:
    history, threads = run(cores(**{COORDINATOR: 3, "shard:envs": 1}))
    assert threads == {"rollout": 3}
    (remark,) = history.remarks.for_pass("quota")
    assert remark.kind == "applied"
    assert "3 threads while rollout runs" in remark.why


def test_fewer_threads_than_cores_are_left_alone() -> None:
    plan = cores(**{COORDINATOR: 3, "shard:envs": 1})
    assert run(plan, options=Decision(rollout_threads=2))[1] == {"iterations": 2}
    four = run(plan, options=Decision(rollout_threads=4))[1]
    assert four == {"iterations": 4, "rollout": 3}  # the inner loop's count holds inside


def test_a_lane_without_a_share_is_remarked_on_and_nothing_is_bounded() -> None:
    history, threads = run(cores(**{COORDINATOR: 3, "shard:other": 1}))
    assert threads == {}
    (remark,) = history.remarks.for_pass("quota").missed()
    assert remark.code == "over-committed"
    assert "lane 'shard:envs'" in remark.why


def test_bitwise_keeps_the_threads_of_eager_execution() -> None:
    history, threads = run(cores(**{COORDINATOR: 3, "shard:envs": 1}), numerics="bitwise")
    assert threads == {}
    assert [r.code for r in history.remarks.for_pass("quota").missed()] == ["switched-off"]


def test_without_a_plan_or_for_sms_no_thread_is_counted() -> None:
    assert run(None)[1] == {}
    gpu = {COORDINATOR: 8, "shard:envs": 8}
    assert run(QuotaPlan.divide("mps-percentage", load_machine("h200"), gpu))[1] == {}
    assert run(cores(**{"shard:envs": 1}))[1] == {}


def test_an_over_committed_plan_never_reaches_the_pass() -> None:
    with pytest.raises(QuotaError, match="quota-overcommitted"):
        Quota(cores(**{COORDINATOR: 4, "shard:envs": 1}))
