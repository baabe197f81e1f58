"""Plans that rest on measured points: each that was tried is one, on a virtual GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rose_compiler.api import process_quotas
from rose_compiler.api.process_quotas import POINTS, ProcessQuotas
from rose_compiler.api.quotas import plan_quotas
from rose_compiler.base.gpu import Kernel, simulate_gpu
from rose_compiler.base.machine import load_machine
from rose_compiler.base.profile import Profile, Span, Timeline
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.base.remarks import RemarkLog

H200 = load_machine("h200")
SIM = "host:sim"
#: Most of a step of the simulator gains nothing from more SMs, which its profile does not show, and
#: kernels that last longer keep it waiting where both share.
KERNELS = (
    Kernel("act", "coordinator", 5e-4, demand=132),
    Kernel("step", SIM, 3e-3, demand=132, after=("act",), serial=0.7, grain=1e-5),
    Kernel("value", "coordinator", 5e-3, demand=132, grain=1e-2),
    Kernel("update", "coordinator", 1e-3, demand=132, after=("step",)),
)


def simulated(plan: QuotaPlan | None) -> Timeline:
    """An iteration under a plan, or with the device shared as MPS does."""
    run = simulate_gpu(KERNELS, (plan or QuotaPlan("mps-percentage", H200)).virtual_gpu())
    return Timeline(
        tuple(
            Span(
                k.name,
                "" if k.lane == "coordinator" else k.lane,
                run.start[k.name],
                run.end[k.name],
                activity=1.0,
            )
            for k in KERNELS
        )
    )


def seconds(timeline: Timeline) -> float:
    return max(span.end_s for span in timeline.spans)


class Backend:
    """In place of MPS: it says yes."""

    name = "mps-percentage"

    def apply(self, plan: QuotaPlan) -> Any:
        made = SimpleNamespace(plan=plan, check=lambda: None, close=lambda: None, started=None)
        made.environment = lambda lane: made.plan.environment(lane)
        made.replan = lambda other: setattr(made, "plan", other)
        return made


@pytest.fixture
def quotas(monkeypatch: pytest.MonkeyPatch) -> ProcessQuotas:
    def move(components: Any, environments: Any, *_: Any) -> list[Any]:
        for lane in environments:
            components[lane].pid += 1
        return []

    monkeypatch.setattr(process_quotas, "move", move)
    monkeypatch.setattr(process_quotas, "hosted", lambda objects: objects)
    monkeypatch.setattr(process_quotas, "starts_with", lambda *_: None)
    return ProcessQuotas(RemarkLog(), lambda: True, lambda: [Backend()])  # type: ignore[list-item]


def test_the_next_plan_rests_on_what_was_measured(quotas: ProcessQuotas) -> None:
    base = simulated(None)
    profile = Profile("a GPU", (seconds(base),), timeline=base)
    parts = {"sim": SimpleNamespace(hosts="process", pid=1)}
    budget: Any = SimpleNamespace(spend=lambda *_: None, allows=lambda _: True)
    tried: list[QuotaPlan] = []
    asked: list[Any] = []

    def plan(alone: Any, than: Any) -> QuotaPlan:
        asked.append(alone)
        return plan_quotas(profile, "virtual:h200", alone, than=than)

    quotas.seen(base)
    for _ in range(2000):
        quotas.boundary(parts, plan, True, budget)
        if not quotas.comparing:
            break
        if quotas.plan is not None and quotas.plan not in tried:
            tried.append(quotas.plan)
        timeline = simulated(quotas.plan)
        if quotas.watching:
            quotas.seen(timeline)
        quotas.record(100 * seconds(timeline))
    assert not quotas.comparing
    assert 1 < len(tried) < POINTS
    times = {
        k: seconds(
            simulated(QuotaPlan.divide(tried[0].backend, H200, {"coordinator": 16 - k, SIM: k}))
        )
        for k in range(1, 16)
    }
    best = min(times.values())
    assert seconds(simulated(tried[0])) > 1.05 * best, "one profile does not tell"
    assert quotas.plan is not None
    assert seconds(simulated(quotas.plan)) < 1.02 * best
    curve = asked[-1]["step"]
    assert all(curve.seconds(k) >= curve.seconds(k + 1) for k in range(1, 16))
    assert curve.seconds(4) == pytest.approx(3e-3 * (0.7 + 0.3 * 132 / 32), rel=0.1)
