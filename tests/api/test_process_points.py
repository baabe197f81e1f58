"""Plans that rest on measured points: each that was tried is one, on a virtual GPU."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rose_compiler.api import objects as api_objects
from rose_compiler.api import process_quotas
from rose_compiler.api.cache import Entry
from rose_compiler.api.process_quotas import ProcessQuotas
from rose_compiler.api.quota_trial import units
from rose_compiler.api.quotas import plan_quotas
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import fail
from rose_compiler.base.gpu import Kernel, simulate_gpu
from rose_compiler.base.machine import load_machine
from rose_compiler.base.profile import Profile, Span, Timeline
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.runtime.quotas import Device
from rose_compiler.tune.blocks import least_s
from rose_compiler.tune.levels import LEAST, MOST

GPU = Device("GPU-1", "NVIDIA H200", (9, 0), 132, 4.8e12, 13010)
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
    """In place of MPS: it says yes. ``fixed``: plans are not changed while they are in force, as
    with partitions; ``refused`` and ``gone`` say at which question it says no, counted from 1."""

    name = "mps-percentage"

    def __init__(self, fixed: bool = False, refused: int = 0, gone: int = 0) -> None:
        self.fixed, self.refused, self.gone = fixed, refused, gone
        self.applied = self.checks = self.open = 0

    def apply(self, plan: QuotaPlan) -> Any:
        self.applied += 1
        if self.applied == self.refused:
            raise fail("quota-mps-refused", "not enough free chunks")
        self.open += 1
        assert self.open == 1, "one at a time"
        made = SimpleNamespace(plan=plan, check=self.check, started=None)
        made.environment = lambda lane: made.plan.environment(lane)
        made.replan = lambda other: self.replan(made, other)
        made.close = lambda: setattr(self, "open", 0)
        return made

    def replan(self, made: Any, plan: QuotaPlan) -> None:
        if self.fixed:
            raise fail("quota-fixed", "partitions stay while clients run in them")
        made.plan = plan

    def check(self) -> None:
        self.checks += 1
        if self.checks == self.gone:
            raise fail("quota-mps-died", "the daemon exited with status 1")


@pytest.fixture
def quotas(monkeypatch: pytest.MonkeyPatch) -> ProcessQuotas:
    def move(components: Any, environments: Any, *_: Any) -> list[Any]:
        for lane in environments:
            components[lane].pid += 1
        return []

    monkeypatch.setattr(process_quotas, "move", move)
    monkeypatch.setattr(api_objects, "hosted", lambda objects: objects)
    monkeypatch.setattr(process_quotas, "starts_with", lambda *_: None)
    return made()


def made(gpu: Device = GPU, backend: Backend | None = None) -> ProcessQuotas:
    one: Any = backend or Backend()
    return ProcessQuotas(RemarkLog(), lambda: True, lambda: [one], lambda: [gpu])


def driven(
    quotas: ProcessQuotas,
    gpu: str = "virtual:h200",
    left_s: float = math.inf,
    slower: float = 100.0,
) -> tuple[list[dict[str, int]], list[Any]]:
    """Iterations until nothing is compared: the quotas in force in their order, in chunks, and the
    responses that plans were made with. An iteration takes ``slower`` times its simulated time."""
    base = simulated(None)
    profile = Profile("a GPU", (seconds(base),), timeline=base)
    parts = {"sim": SimpleNamespace(hosts="process", pid=1)}
    left = [left_s]
    budget: Any = SimpleNamespace(spend=lambda *_: None, allows=lambda s: s <= left[0])
    tried: list[dict[str, int]] = []
    asked: list[Any] = []

    def plan(alone: Any, than: Any) -> QuotaPlan:
        asked.append(alone)
        return plan_quotas(profile, gpu, alone, than=than)

    quotas.seen(base)
    for _ in range(2000):
        quotas.boundary(parts, plan, True, budget)
        if not quotas.comparing:
            break
        if quotas.plan is not None and units(quotas.plan) not in tried:
            tried.append(units(quotas.plan))
        timeline = simulated(quotas.plan)
        if quotas.watching:
            quotas.seen(timeline)
        quotas.record(slower * seconds(timeline))
        left[0] -= slower * seconds(timeline)
    assert not quotas.comparing
    return tried, asked


def test_a_plan_rests_on_three_quotas_of_each_lane(quotas: ProcessQuotas) -> None:
    tried, asked = driven(quotas)
    for lane in ("coordinator", SIM):
        assert len({chunks[lane] for chunks in tried[:3]}) == LEAST
    assert 3 < len(tried) <= MOST
    assert quotas._measured.quotas == tried
    times = {
        k: seconds(
            simulated(QuotaPlan.divide("mps-percentage", H200, {"coordinator": 16 - k, SIM: k}))
        )
        for k in range(1, 16)
    }
    assert times[tried[0][SIM]] > 1.05 * min(times.values()), "one profile does not tell"
    assert quotas.plan is not None
    assert seconds(simulated(quotas.plan)) < 1.02 * min(times.values())
    assert "responses from iterations profiled under 3 plans" in quotas.plan.notes
    assert asked[0] is None
    curve = asked[1]["step"]  # before anything was compared
    for k in (1, 4, 12):
        assert curve.seconds(k) == pytest.approx(3e-3 * (0.7 + 0.3 * 132 / (8 * k)), rel=0.02)
    assert "few-points" not in [remark.code for remark in quotas._log]


def test_where_there_are_fewer_quotas_all_are_measured_and_that_is_told(
    quotas: ProcessQuotas, tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(
        'name = "small"\ncores = 4\nsms = 24\nsm_granularity = 8\nbandwidth_bytes_per_s = 1e12\n'
    )
    tried, _ = driven(quotas, f"virtual:{tmp_path / 'small.toml'}")
    assert sorted(chunks[SIM] for chunks in tried) == [1, 2]
    (few,) = [remark for remark in quotas._log if remark.code == "few-points"]
    assert few.why == (
        "responses of coordinator from 2, host:sim from 2 different quotas: there are 2"
    )


def test_points_are_measured_within_the_time_for_tuning(quotas: ProcessQuotas) -> None:
    quotas.iteration_s = 1.0
    assert driven(quotas, left_s=least_s(1.0) + 2.0) == ([], [None])
    assert quotas._log[-1].why.endswith("are not compared: the time for tuning is over")
    quotas = made()
    # iterations are longer than was thought, so that it ends among the points
    tried, _ = driven(quotas, left_s=least_s(), slower=300.0)
    assert 0 < len(tried) < LEAST
    assert quotas.plan is None
    assert "not compared to the end" in quotas._log[-1].why


def test_partitions_are_given_back_for_every_plan_that_is_measured(quotas: ProcessQuotas) -> None:
    backend = Backend(fixed=True)
    quotas = made(backend=backend)
    tried, _ = driven(quotas)
    assert len(tried) > LEAST
    assert quotas.plan is not None
    assert backend.applied == len(tried)
    assert backend.open == 1
    quotas.release()
    assert backend.open == 0


@pytest.mark.parametrize(
    ("no", "why"),
    [
        ({"refused": 2, "fixed": True}, "the plan was refused: not enough free chunks"),
        ({"gone": 3}, "quotas have gone: the daemon exited with status 1"),
        ({"gone": 30}, "quotas have gone: the daemon exited with status 1"),
    ],
)
def test_what_goes_wrong_while_plans_are_measured_costs_the_quotas_only(
    quotas: ProcessQuotas, no: dict[str, Any], why: str
) -> None:
    backend = Backend(**no)
    quotas = made(backend=backend)
    driven(quotas)
    assert (quotas.plan, backend.open) == (None, 0)
    assert [remark.code for remark in quotas._log] == ["not-available"]
    assert why in quotas._log[-1].why


DECISION = Decision(hosted=True)
PLAN = QuotaPlan.divide("mps-percentage", GPU.machine(), {"coordinator": 12, SIM: 4})


def started(quotas: ProcessQuotas, entry: Entry, *lanes: str) -> Any:
    """What the first iteration of a schedule with these lanes finds that an earlier run kept."""
    part = SimpleNamespace(hosts="process", pid=1)
    schedule: Any = SimpleNamespace(emitted=SimpleNamespace(plan=SimpleNamespace(lanes=lanes)))
    tuning: Any = SimpleNamespace(
        drifts=0, settled=True, best=DECISION, steady=lambda: None, entry=entry
    )
    profiling: Any = SimpleNamespace(pending=lambda _: True, latest=None)
    quotas.between({"sim": part}, tuning, profiling, "auto", schedule)
    return part


def test_a_second_run_starts_with_the_plan_that_the_first_one_found(
    quotas: ProcessQuotas, tmp_path: Path
) -> None:
    def entry() -> Entry:
        found = Entry(tmp_path, "p", {}, log)
        assert found.load([None, DECISION]) == 1
        return found

    log = RemarkLog()
    first = Entry(tmp_path, "p", {}, log)
    first.keep("processes", PLAN)
    assert not first.path.exists(), "there is no schedule that it belongs to"
    first.store(DECISION, "won")
    assert "sms" not in json.loads(first.path.read_text())
    first.keep("processes", PLAN)
    part = started(quotas, entry(), SIM)
    assert (quotas.plan, part.pid) == (PLAN.on("GPU-1"), 2)
    assert quotas._log[-1].code == "moved"
    quotas.release()
    assert quotas.plan is None
    assert started(quotas, entry(), SIM).pid == 2, "calls after `close()` have it again"
    kept = entry()
    kept.store(DECISION, "won again")
    assert entry().sms == {"processes": PLAN}
    started(made(replace(GPU, sms=64)), entry(), SIM)
    assert entry().sms == {}
    assert "is one for NVIDIA H200 with 132 SMs; it is deleted" in log[-1].why
    kept.keep("processes", None)
    kept.keep("pending", PLAN)
    started(made(), entry(), "host:other")
    assert "not one for the lanes of its schedule" in log[-1].why
    assert entry().sms == {}
    kept = entry()
    kept.keep("pending", PLAN)
    waiting = made()
    assert started(waiting, entry(), SIM).pid == 1
    assert (waiting.plan, waiting.pending) == (None, PLAN)
    kept.store(None, "another schedule")
    assert kept.sms == {}


@pytest.mark.parametrize("sms", [{"processes": 3}, {"streams": PLAN.to_dict()}, {"x": {}}, [1]])
def test_what_is_no_plan_is_deleted_with_its_entry(sms: Any, tmp_path: Path) -> None:
    log = RemarkLog()
    entry = Entry(tmp_path, "p", {}, log)
    entry.store(DECISION, "won")
    entry.path.write_text(json.dumps({**json.loads(entry.path.read_text()), "sms": sms}))
    assert Entry(tmp_path, "p", {}, log).load([DECISION]) is None
    assert not entry.path.exists()
    assert "it can't be used" in log[-1].why
