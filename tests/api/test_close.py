"""``numerics="close"``: each rewritten operation, fed eager's inputs, agrees; draws bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
import torch

import rose_compiler
from bench import loops
from rose_compiler.base.decision import Decision
from rose_compiler.ir.program import Program
from rose_compiler.runtime.probe import ATOL_SHARE, RTOL
from rose_compiler.sim import ShardedEnv
from rose_compiler.testing.agree import Inputs, Report, agree
from tests.samples import ppo

pytestmark = pytest.mark.usefixtures("one_thread")

DECISION = Decision(groups=4, late="shadow", defer=True, lanes="thread")


def cheetah() -> Any:
    return gym.wrappers.RecordEpisodeStatistics(gym.make("HalfCheetah-v5", max_episode_steps=12))


def ppo_setup() -> ppo.Setup:
    # products of 2 rows differ in bits from those of 8 in layers of this width
    return ppo.Setup(
        lambda: ShardedEnv.split([cheetah] * 8, shards=4, hosts="inline"), steps=8, hidden=256
    )


def ppo_inputs(setup: ppo.Setup) -> Inputs:
    names = ("agent", "optimizer", "envs", "buf", "cfg", "log")
    return Inputs(
        {"obs": setup.obs, "done": setup.done}, {name: getattr(setup, name) for name in names}
    )


def loops_setup() -> loops.Setup:
    return loops.make(loops.Config(8, 8, 256, 3, 1, 4, 4, hosts="inline"))


def loops_inputs(setup: loops.Setup) -> Inputs:
    names = ("agent", "optimizer", "envs", "buf", "cfg", "log")
    return Inputs(
        {"next_obs": setup.next_obs, "next_done": setup.next_done},
        {name: getattr(setup, name) for name in names},
    )


def schedule_of(run: Callable[[Any], None], tmp_path: Any, fn: Any) -> tuple[Program, Program]:
    """The captured program and the rewritten one, in close mode and for :data:`DECISION`."""
    DECISION.save(tmp_path / "decision.json")
    compiled = rose_compiler.compile(fn, numerics="close", tune=tmp_path / "decision.json")
    run(compiled)
    unit = compiled._last.unit
    built = unit.build(DECISION)
    applied = {r.pass_name for r in built.history.remarks.applied()}
    assert {"hoist", "split", "tile_batch", "defer"} <= applied, compiled.explain()
    compiled.close()
    return unit.program, built.program


@pytest.fixture(scope="module")
def ppo_programs(tmp_path_factory: Any) -> tuple[Program, Program]:
    setup = ppo_setup()
    return schedule_of(setup.run, tmp_path_factory.mktemp("ppo"), ppo.iteration)


def compare(programs: tuple[Program, Program]) -> tuple[Report, list[str]]:
    """The report on two equal setups, and in which states they differ afterwards."""
    first, second = ppo_setup(), ppo_setup()
    for setup in (first, second):
        torch.manual_seed(5)
        setup.run(ppo.iteration)
    report = agree(*programs, ppo_inputs(first), ppo_inputs(second))
    found = ppo.differences(ppo.state_of(first), ppo.state_of(second))
    return report, found


def how(report: Report) -> set[tuple[str, str]]:
    return {(a.captured, a.how) for a in report.rewritten()}


def test_ppo(ppo_programs: tuple[Program, Program]) -> None:
    report, differ = compare(ppo_programs)
    assert report.faults() == []
    assert {("get_action_and_value", "tiles"), ("get_action_and_value", "trips")} <= how(report)
    assert ("env_step", "tiles") in how(report)
    assert report.drawn >= 8 + 2, "noise of every trip and a permutation of every epoch"
    # tiled products are not eager's bits here, or the tolerance would not have been tried
    assert any(a.verdict == "close" for a in report.rewritten())
    assert all(a.error <= (ATOL_SHARE + RTOL) * a.scale for a in report.rewritten())
    # all that was stored were eager's values, and what no pass touched gives eager's bits
    assert differ == []


def test_the_benchmark_loop(tmp_path: Any) -> None:
    setup = loops_setup()
    programs = schedule_of(setup.run, tmp_path, loops.iteration)
    first, second = loops_setup(), loops_setup()
    torch.manual_seed(3)
    report = agree(*programs, loops_inputs(first), loops_inputs(second))
    assert report.faults() == []
    assert {h for _, h in how(report)} == {"tiles", "trips"}
    for a, b in zip(first.agent.parameters(), second.agent.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, value in vars(first.buf).items():
        assert torch.equal(value, getattr(second.buf, name)), name


@pytest.mark.parametrize("part", ["_early", "_late"])
def test_a_wrong_result_is_found(part: str, ppo_programs: tuple[Program, Program]) -> None:
    (op,) = {o for n, o in ppo_programs[1].ops.by_name.items() if part in n}
    right = op.impl
    assert right is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "impl", lambda *a: tuple(r * (1 + 3e-5) for r in right(*a)))
        report, _ = compare(ppo_programs)
    assert any(part in fault and "differ" in fault for fault in report.faults())


def test_rows_in_the_wrong_place_are_found(ppo_programs: tuple[Program, Program]) -> None:
    (op,) = {o for n, o in ppo_programs[1].ops.by_name.items() if "_early" in n}
    right = op.impl
    assert right is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "impl", lambda *a: tuple(r.flip(0) for r in right(*a)))
        report, _ = compare(ppo_programs)
    assert any("_early" in fault for fault in report.faults())


def test_a_draw_too_many_is_found(ppo_programs: tuple[Program, Program]) -> None:
    (op,) = {o for n, o in ppo_programs[1].ops.by_name.items() if "_early" in n}
    right = op.impl
    assert right is not None

    def draws(*args: Any) -> Any:
        torch.rand(1)
        return right(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "impl", draws)
        report, _ = compare(ppo_programs)
    assert "generator" in report.draws
    assert report.draws in report.faults()
