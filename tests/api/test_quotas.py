"""compiled.quota_plan: it always exists, and fits the machine that was asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rose_compiler
from rose_compiler.api import quotas
from rose_compiler.api.quotas import plan_quotas
from rose_compiler.base.errors import ConfigError, fail
from rose_compiler.base.machine import Machine
from rose_compiler.base.profile import Profile, Span, Timeline
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.runtime.quotas import Device, Probe
from tests.api.loops import Training, iteration

LANES = Timeline(
    (
        Span("step", "shard:0", 0.0, 9.0, activity=0.8),
        Span("value", "", 0.0, 3.0, activity=0.9),
        Span("update", "", 9.0, 10.0, activity=0.9),
    )
)


pytestmark = pytest.mark.usefixtures("one_thread")


def profile(timeline: Timeline | None) -> Profile:
    return Profile("two cores", (10.0,), timeline=timeline)


def test_a_plan_for_a_gpu_that_is_not_here(training: Training, tmp_path: Path) -> None:
    fast = rose_compiler.compile(iteration, tune=False, backend="virtual:h200")
    plan = fast.quota_plan
    assert not plan.shares
    assert "no iteration was profiled yet" in plan.explain()
    training.run(fast, 5)
    plan = fast.quota_plan
    assert {share.lane for share in plan.shares} == {"coordinator", "shard:0", "shard:1"}
    assert plan.machine.name == "NVIDIA H200"
    assert plan.given == 128
    assert plan.environment("shard:0")["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]
    assert plan.predicted_s is not None
    assert plan.before_s is not None
    assert plan.predicted_s <= plan.before_s
    plan.save(tmp_path / "plan.json")
    assert QuotaPlan.load(tmp_path / "plan.json") == plan
    fast.close()


def test_cores_are_divided_where_there_are_enough(training: Training) -> None:
    fast = rose_compiler.compile(iteration, tune=False, backend="cpu")
    training.run(fast, 5)
    plan = fast.quota_plan
    assert plan.backend == "cores"
    cores = len(os.sched_getaffinity(0))
    if cores < 3:
        assert "3 lanes (" in plan.explain()
        assert f"share {cores} cores: too few" in plan.explain()
    else:
        assert plan.given == cores
    fast.close()


def test_a_description_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\ncores = 4\nsms = 24\nsm_granularity = 8\n')
    plan = plan_quotas(profile(LANES), f"virtual:{file}")
    assert {s.lane: s.units for s in plan.shares} == {"shard:0": 16, "coordinator": 8}
    assert "critical" in plan.explain()
    file.write_text('name = "mine"\ncores = 4\n')
    assert plan_quotas(profile(LANES), f"virtual:{file}").backend == "cores"
    streams = Timeline(tuple(Span(s.op, "stream:side", s.start_s, s.end_s) for s in LANES.spans))
    both = Timeline((*streams.spans, Span("act", "", 0.0, 1.0)))
    assert plan_quotas(profile(both), "virtual:h200").backend == "green-context"


def test_where_there_is_nothing_to_divide_the_plan_says_so() -> None:
    one = Timeline((Span("act", "", 0.0, 1.0),))
    for timeline, note in ((one, "one lane does everything"), (None, "no iteration was profiled")):
        plan = plan_quotas(profile(timeline), "virtual:h200")
        assert not plan.shares
        assert note in plan.explain()


class Available:
    """A back end that is there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def probe(self) -> Probe:
        """Found."""
        return Probe(True, "")


def test_the_back_end_fits_where_the_lanes_live(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("GPU-1", "NVIDIA H200", (9, 0), 132, 4.8e12, 13010)
    there = [Available(n) for n in ("mps-partition", "green-context", "mps-percentage", "cores")]
    monkeypatch.setattr(quotas, "all_backends", lambda: there)
    monkeypatch.setattr(quotas, "devices", lambda: [gpu])
    plan = plan_quotas(profile(LANES), "auto")
    assert (plan.backend, plan.device, plan.given) == ("mps-partition", "GPU-1", 128)
    streams = Timeline((Span("step", "stream:side", 0.0, 2.0), Span("act", "", 0.0, 1.0)))
    assert plan_quotas(profile(streams), "auto").backend == "green-context"
    assert plan_quotas(profile(LANES), "cpu").backend == "cores"
    del there[1]
    assert plan_quotas(profile(streams), "cuda").backend == "cores"

    def gone() -> list[Device]:
        raise fail("quota-nvml", "gone")

    monkeypatch.setattr(quotas, "devices", gone)
    assert "can't be described" in plan_quotas(profile(LANES), "auto").explain()


def test_what_was_passed_over_is_in_the_notes() -> None:
    plan = plan_quotas(profile(LANES), "auto")
    if plan.backend == "cores":
        assert any("mps-percentage is passed over" in note for note in plan.notes)


def test_a_machine_that_nothing_describes_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h200'"):
        rose_compiler.compile(iteration, backend="virtual:h2000")
    with pytest.raises(ConfigError, match="config-argument"):
        rose_compiler.compile(iteration, backend="cudda")
    assert Machine("m", 1).chunks == 1
