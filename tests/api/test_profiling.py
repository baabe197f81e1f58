"""compiled.windows() and compiled.profile: what is profiled when, and that training stays as is."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import pytest

import rose_compiler
from rose_compiler.api import profiling
from rose_compiler.api.costing import CostModel, nest_of
from rose_compiler.api.profiling import Instrumented
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import ConfigError
from rose_compiler.base.machine import Machine
from rose_compiler.ir.parse import parse
from rose_compiler.runtime.kernels import Check, Kernel
from rose_compiler.runtime.support import Runtime
from rose_compiler.tune.windows import find_windows
from tests.api.loops import Training, differing, iteration

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_given_schedule_is_profiled_from_its_second_iteration_on(training: Training) -> None:
    fast = rose_compiler.compile(iteration, tune=False, numerics="bitwise")
    training.run(fast, 2)
    with pytest.raises(ConfigError, match="no iteration was profiled"):
        fast.windows()
    training.run(fast, 6)
    profile = fast.profile
    assert len(profile.iteration_s) == 3
    steps = [o for o in profile.ops if o.label == "env_step"]
    assert {o.lane for o in steps} == {"shard:0", "shard:1"}
    assert [o.count for o in steps] == [12, 12]
    (update,) = (o for o in profile.ops if "optimizer.step()" in o.label)
    assert update.count == 3
    assert profile.timeline is not None
    assert {s.trip for s in profile.timeline.spans if s.op == steps[0].op} == {
        (0,), (1,), (2,), (3,)
    }  # fmt: skip
    fast.profile_next(2)
    training.run(fast, 3)
    assert len(fast.profile.iteration_s) == 5
    fast.close()


def test_profiled_iterations_train_the_same_bits(training: Training) -> None:
    fast = rose_compiler.compile(iteration, tune=False, numerics="bitwise")
    training.run(fast, 1)
    fast.profile_next(3)
    training.run(fast, 3)
    assert len(fast.profile.iteration_s) == 3
    plain = Training()
    plain.run(iteration, 4)
    assert differing(training.bits(), plain.bits()) == []
    plain.close()
    fast.close()


def test_program_order_is_profiled_before_anything_is_tried(training: Training) -> None:
    fast = rose_compiler.compile(iteration, numerics="bitwise")
    training.run(fast, 2)
    assert len(fast.profile.iteration_s) == 1
    assert {o.lane for o in fast.profile.ops} == {""}
    windows = fast.windows()
    assert windows.iteration_s == fast.profile.iteration_s[0]
    assert all(0.0 <= w.activity <= 1.0 and w.duration_s > 0 for w in windows)
    assert str(windows)
    fast.close()


def test_an_exception_of_a_profiled_iteration_is_the_user_s(training: Training) -> None:
    fast = rose_compiler.compile(iteration, tune=False, numerics="bitwise")
    training.run(fast, 3)

    def broken(*_: object, **__: object) -> None:
        raise KeyError("mine")

    fast.profile_next()
    training.optimizer.register_step_pre_hook(broken)
    with pytest.raises(KeyError, match="mine"):
        training.run(fast, 1)
    fast.close()


def test_the_cost_of_a_schedule_is_a_formula(training: Training) -> None:
    fast = rose_compiler.compile(iteration, tune=False, numerics="bitwise")
    with pytest.raises(ConfigError, match="was not called"):
        fast.explain("cost")
    training.run(fast, 2)
    with pytest.raises(ConfigError, match="no iteration was profiled"):
        fast.explain("cost")
    training.run(fast, 4)
    text = fast.explain("cost", width=120)
    assert "iteration = " in text
    assert "T_for_t (4) x max(" in text
    # the longest four are shown: which shard's those are is a matter of how its steps went
    assert "through shard:" in text
    assert "lower bound" in text
    assert "RecMII" in text
    with pytest.raises(ConfigError, match="explain"):
        fast.explain("costs")
    model = fast.cost
    assert str(model) == model.render()
    ways = {c.name for loop in model.formula.loops.values() for c in loop.candidates}
    assert {"coordinator", "through shard:0", "through shard:1", "cores"} <= ways
    assert model.formula.seconds(T_for_t=8) > model.formula.seconds()
    assert model.formula.seconds() == pytest.approx(model.prediction.seconds)
    assert 0 < model.bound.seconds <= model.prediction.seconds * 1.001
    # every operation is in the model, once
    typical = fast._last.unit.profiling.last.typical
    total = sum(o.count * o.mean_s for o in typical.ops if not o.lane)
    own = sum(
        model.costs[s.key].run_s * s.times * n.trips
        for n in model.nest.walk()
        for s in n.steps
        if s.what == "run"
    )
    assert own == pytest.approx(total)
    fast.close()


BRANCHES = """
@op(reads=[], writes=[])
def fourth(t): ...

@op(reads=[], writes=[])
def add(x, y): ...

def f(x):
    for t, acc in loop(0, 8, 1, acc=x):
        p = fourth(t)
        if p:
            u = add(acc, x)
            v = u
        else:
            v = acc
        yield v
    return loop.acc
"""


def test_a_branch_s_arms_count_for_the_trips_that_take_them() -> None:
    bind = {"fourth": lambda t: t % 4 == 0, "add": lambda x, y: x + y}
    profiled = Instrumented(parse(BRANCHES, bind=bind), Machine("two cores", 2))
    runtime = Runtime()
    assert [profiled.run(runtime, 1) for _ in range(2)] == [3, 3]
    runtime.close()
    assert profiled.plan is not None
    nest = nest_of(profiled.plan, profiled.profile)
    times = {s.key: s.times for n in nest.walk() for s in n.steps if s.what == "run"}
    assert times == {"loop/p": 1.0, "loop/u": 0.25}
    assert [n.trips for n in nest.walk()] == [1.0, 8.0]


def test_an_iteration_that_was_disturbed_does_not_lengthen_what_is_predicted() -> None:
    """Means over three iterations add up to more than the median of them."""

    def fourth(t: int) -> bool:
        if t == 0 and len(profiled.iteration_s) == 1:
            sleep(0.05)
        return t % 4 == 0

    bind = {"fourth": fourth, "add": lambda x, y: x + y}
    profiled = Instrumented(parse(BRANCHES, bind=bind), Machine("two cores", 2))
    runtime = Runtime()
    for _ in range(3):
        profiled.run(runtime, 1)
    runtime.close()
    assert profiled.plan is not None
    program, machine = profiled.program, profiled.machine
    model = CostModel.of(profiled.plan, program, profiled.typical, machine)
    assert model.measured_s == median(profiled.iteration_s)
    assert 0 < model.prediction.seconds <= model.measured_s
    means = CostModel.of(profiled.plan, program, profiled.profile, machine)
    assert means.prediction.seconds > model.measured_s


def test_memory_is_looked_at_in_the_first_iteration_alone() -> None:
    bind = {"fourth": lambda t: t % 4 == 0, "add": lambda x, y: x + y}
    profiled = Instrumented(parse(BRANCHES, bind=bind), Machine("two cores", 2), stretches=True)
    runtime = Runtime()
    profiled.run(runtime, 1)
    first = list(profiled.stretches)
    assert first
    profiled.peaks = None  # type: ignore[assignment]  # whoever looks once more will fail
    profiled.run(runtime, 1)
    assert profiled.stretches == first
    runtime.close()


def test_the_report_is_one_page(training: Training, tmp_path: Path) -> None:
    fast = rose_compiler.compile(iteration, tune=False, numerics="bitwise")
    training.run(fast, 5)
    fast.report(tmp_path / "deep" / "page.html")
    page = (tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert "http" not in page.replace("http://www.w3.org", "")
    for part in ("env_step", "windows of low activity", "iteration = ", "Applied"):
        assert part in page
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="can't be written"):
        fast.report(tmp_path / "file" / "page.html")
    fast.close()


def test_what_was_kept_and_what_was_not_come_with_figures(training: Training) -> None:
    fast = rose_compiler.compile(iteration, numerics="bitwise")
    training.run(fast)
    fast._last.unit.tuning().by_windows = False  # whatever they say: somebody is to be rejected
    training.run(fast)
    # what follows up on the best is told of later, against what was measured by then
    fast._last.unit.tuning().follow_ups.compilable = lambda: False
    chooser = fast._last.unit.tuning()._chooser
    chooser.trial_s, chooser.budget_trips = 0.0, 40
    while not fast.settled:  # what runs later may look like drift, and then be tried again
        training.run(fast, 1)
    tuned = [r for r in fast._log if r.pass_name == "tune"]
    rejected = [r for r in tuned if r.code == "measured-slower"]
    assert rejected
    assert all(r.gain is not None for r in rejected)
    assert all("predicted" in r.why and "over program order" in r.why for r in rejected)
    scores = {row.decision: row.seconds_per_work for row in chooser.reports()}
    kept = scores[chooser.candidates[chooser.best]]
    for remark in rejected:
        decision = next(d for d in scores if remark.why.startswith(f"[{d}]:"))
        assert remark.gain == pytest.approx(kept - scores[decision])
    applied = [r for r in tuned if r.kind == "applied"]
    assert len(applied) == (chooser.best != chooser.eager)
    fast.close()


def test_a_schedule_is_forecast_from_program_order(training: Training) -> None:
    fast = rose_compiler.compile(iteration, numerics="bitwise")
    training.run(fast, 1)
    unit = fast._last.unit
    assert unit.forecast(Decision()) is None, "nothing is profiled yet"
    training.run(fast, 1)
    base = fast.profile
    own = unit.forecast(Decision())
    assert own is not None
    assert own == pytest.approx(sum(o.count * o.mean_s for o in base.ops), rel=1e-6)
    other = unit.forecast(Decision(groups=2, late="shadow"))
    assert other is not None
    assert other > 0
    fast.close()


class FakeTrace:
    """A profiler that saw two kernels: on half of the SMs in the middle of the iteration."""

    why = None

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []

    def __enter__(self) -> FakeTrace:
        self.since = perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        end = perf_counter()
        third = (end - self.since) / 3
        self.kernels = [
            Kernel("gemm", 0, 7, self.since + third, end - third, 0.25),
            Kernel("gemm", 0, 9, self.since + third, end - third, 0.25),
        ]


class FakeNvml:
    why = None
    check = Check(1 / 6, "gpm")

    def __enter__(self) -> FakeNvml:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_a_device_s_kernels_make_windows_of_their_own(
    training: Training, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(profiling, "KernelTrace", FakeTrace)
    monkeypatch.setattr(profiling, "Nvml", FakeNvml)
    fast = rose_compiler.compile(iteration, tune=False, numerics="bitwise")
    training.run(fast, 4)
    windows = find_windows(fast.profile, least_s=0.0)
    device = [w for w in windows if w.device == "cuda:0"]
    assert {w.idle for w in device} == {True, False}
    assert {round(w.activity, 2) for w in device if not w.idle} == {0.5}
    assert any(w.device == "cpu" for w in windows)
    check = fast._last.unit.profiling.last.device_check
    assert check is not None
    assert "NVML (gpm) agrees: 17% of the SMs busy" in check
    fast.report(tmp_path / "page.html")
    assert "NVML (gpm) agrees" in (tmp_path / "page.html").read_text(encoding="utf-8")
    fast.close()
