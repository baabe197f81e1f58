"""The predictor: sums, lanes, hand-overs, contention, and the formula that says the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy

from rose_compiler.base.machine import Machine
from rose_compiler.base.marks import Mark
from rose_compiler.base.profile import Span
from rose_compiler.runtime.profiler import summarize, timeline
from rose_compiler.runtime.recorder import Raw
from rose_compiler.tune.formula import formula
from rose_compiler.tune.nest import Cost, Costs, HandOver, Nest, Step
from rose_compiler.tune.predict import TRIPS, predict

TWO = Machine("two cores", 2)


def busy(seconds: float, **more: float) -> Cost:
    """An operation that keeps one core busy."""
    return Cost(seconds, seconds, **more)


def loop(key: str, trips: float, *steps: Step) -> Step:
    return Step("loop", key, inner=Nest(key, steps, trips))


SEQUENTIAL = Nest(
    "",
    (
        loop("roll", 10, Step("run", "roll/act"), Step("run", "roll/step")),
        loop("epoch", 2, Step("run", "epoch/order"),
             loop("epoch/batch", 4, Step("run", "epoch/batch/update", times=0.5))),
        Step("run", "save"),
    ),
)  # fmt: skip
COSTS = Costs(
    {
        "roll/act": busy(0.25),
        "roll/step": busy(0.5),
        "epoch/order": busy(0.125),
        "epoch/batch/update": busy(2.0),
        "save": busy(1.0),
    }
)

# act on the coordinator; the step of one trip runs while the next trip's rest is done
OVERLAPPED = Nest(
    "",
    (
        loop(
            "roll",
            20,
            Step("wait", "roll/step", "shard:0", stage=1),
            Step("run", "roll/act"),
            Step("submit", "roll/step", "shard:0"),
            Step("run", "roll/late"),
        ),
    ),
)


def test_shards_that_are_kept_to_a_core_leave_the_coordinator_its_own() -> None:
    steps = [Step("submit", f"step {g}", f"shard:{g}") for g in range(2)]
    waits = [Step("wait", f"step {g}", f"shard:{g}") for g in range(2)]
    nest = Nest("", (*steps, Step("run", "late"), *waits))
    costs = Costs({"step 0": busy(1.0), "step 1": busy(1.0), "late": busy(2.0)})
    assert predict(nest, costs, TWO).seconds == pytest.approx(2.5)
    assert predict(nest, costs, TWO, shard_cores=1).seconds == pytest.approx(2.0)
    short = Costs({"step 0": busy(1.0), "step 1": busy(1.0), "late": busy(0.0)})
    assert predict(nest, short, TWO).seconds == pytest.approx(1.0)
    assert predict(nest, short, TWO, shard_cores=1).seconds == pytest.approx(2.0)


def test_a_body_without_lanes_is_a_sum() -> None:
    found = predict(SEQUENTIAL, COSTS, TWO)
    assert found.seconds == pytest.approx(10 * 0.75 + 2 * (0.125 + 4 * 0.5 * 2.0) + 1.0)
    assert found.loops == pytest.approx({"roll": 7.5, "epoch/batch": 4.0, "epoch": 8.25})


def test_late_work_hides_behind_a_longer_step() -> None:
    costs = Costs({"roll/act": busy(1.0), "roll/step": busy(3.0), "roll/late": busy(2.0)})
    assert predict(OVERLAPPED, costs, TWO).seconds == pytest.approx(20 * 4.0)
    longer = Costs({**costs.by_key, "roll/late": busy(5.0)})
    assert predict(OVERLAPPED, longer, TWO).seconds == pytest.approx(20 * 6.0)


def test_one_core_hides_nothing() -> None:
    costs = Costs({"roll/act": busy(1.0), "roll/step": busy(3.0), "roll/late": busy(2.0)})
    one = Machine("one core", 1)
    assert predict(OVERLAPPED, costs, one).seconds == pytest.approx(20 * 6.0)
    # times that were measured beside each other hold the sharing already
    assert predict(OVERLAPPED, costs, one, contention=False).seconds == pytest.approx(20 * 4.0)
    # what sleeps needs no core
    asleep = Costs({**costs.by_key, "roll/step": Cost(3.0, 0.0)})
    assert predict(OVERLAPPED, asleep, one).seconds == pytest.approx(20 * 4.0, rel=1e-4)


def test_handing_over_costs_time_on_the_cycle() -> None:
    step = busy(3.0, submit_s=0.25, receive_s=0.5, launch_s=0.75)
    costs = Costs({"roll/act": busy(1.0), "roll/step": step, "roll/late": busy(1.0)})
    # receive, act, submit; the step begins half a second after submit is done
    a_trip = 0.5 + 1.0 + 0.25 + 0.5 + 3.0
    found = predict(OVERLAPPED, costs, TWO).seconds
    assert found == pytest.approx(20 * a_trip, rel=1e-3)
    late = Costs({**costs.by_key, "roll/late": busy(10.0)})
    assert predict(OVERLAPPED, late, TWO).seconds == pytest.approx(20 * 11.75)


def test_a_step_that_begins_while_it_is_handed_over_does_not_wait_for_the_end_of_that() -> None:
    """Whoever does not say when a step began is seen from the begin of handing it over."""
    costs = Costs({"roll/act": busy(1.0), "roll/step": busy(3.0, submit_s=0.5)})
    predicted = predict(OVERLAPPED, costs, TWO)
    assert predicted.seconds == pytest.approx(20 * (1.0 + 3.0))
    made = formula(OVERLAPPED, costs, TWO, predicted)
    assert made.loops["roll"].candidates[0].seconds == pytest.approx(4.0)
    assert made.seconds(T_roll=40) == pytest.approx(40 * 4.0)


def test_hand_overs_that_come_late_now_and_then_are_waited_for_in_that_trip() -> None:
    """On average step and hand-over take 2 and late work 3; in the trip that is late it waits."""
    late = HandOver(0.0, 2.0, 0.0), HandOver(0.0, 0.0, 0.0)
    costs = {"roll/act": busy(1.0), "roll/step": busy(1.0, launch_s=1.0), "roll/late": busy(2.0)}
    means = predict(OVERLAPPED, Costs(costs), TWO, contention=False)
    assert means.seconds == pytest.approx(20 * 3.0)
    costs["roll/step"] = replace(costs["roll/step"], handed=late)
    each = predict(OVERLAPPED, Costs(costs), TWO, contention=False)
    assert each.seconds == pytest.approx(10 * 3.0 + 10 * 4.0)


PROFILED = (
    Mark("trip", "roll", "roll"),
    Mark("wait", "roll/step", "step", ("roll",), "shard:0", stage=1),
    Mark("run", "roll/act", "act", ("roll",)),
    Mark("submit", "roll/step", "step", ("roll",), "shard:0"),
    Mark("run", "roll/late", "late", ("roll",)),
    Mark("leave", "roll", "roll"),
)


@pytest.mark.parametrize("told", [True, False], ids=["told", "until taken in"])
def test_the_costs_of_a_profile_add_up_to_the_iteration_it_was(told: bool) -> None:
    """Late starts, slow steps and slow takings-in fall on other trips than late work does."""
    at, ticks, lanes, began, ran, done = 0.0, [], [], 0.0, 0.0, 0.0
    for trip in range(4):
        ticks.append((0, at))
        if trip:
            at = max(at, done) + (0.75 if trip == 2 else 0.125)
            ticks.append((1, at))
            lanes.append(Span("step", "shard:0", began, at, ran_s=(ran, done) if told else None))
        ticks += [(2, at := at + 1.0)]
        began, ran = at, at + (1.5 if trip == 1 else 0.125)
        done = ran + (3.0 if trip == 0 else 1.0)
        ticks += [(3, at := at + 0.25), (4, at := at + (2.5 if trip == 2 else 0.5))]
    ticks += [(0, at), (1, at := max(at, done) + 0.125), (5, at)]
    lanes.append(Span("step", "shard:0", began, at, ran_s=(ran, done) if told else None))
    raw = Raw(tuple(k for k, _ in ticks), (0.0, *(t for _, t in ticks), at), ())
    profile = summarize([timeline(PROFILED, raw, lanes, TWO)], [at], TWO)
    inner = OVERLAPPED.steps[0].inner
    assert inner is not None
    nest = Nest("", (loop("roll", 4, *inner.steps),))
    found = predict(nest, Costs.of(profile), TWO, contention=False)
    assert found.seconds == pytest.approx(at)


def test_who_waits_for_the_other_waits_for_the_longer_every_time() -> None:
    """Means say that work and step take 2 each; in turn one of them takes 3."""
    step = Cost(2.0, 2.0, varies=(0.5, 1.5))
    late = Cost(2.0, 2.0, varies=(1.5, 0.5))
    costs = Costs({"roll/act": busy(1.0), "roll/step": step, "roll/late": late})
    assert predict(OVERLAPPED, costs, TWO, contention=False).seconds == pytest.approx(20 * 4.0)
    steady = Costs({"roll/act": busy(1.0), "roll/step": busy(2.0), "roll/late": busy(2.0)})
    assert predict(OVERLAPPED, steady, TWO, contention=False).seconds == pytest.approx(20 * 3.0)


def test_two_shards_take_turns_with_the_coordinator() -> None:
    nest = Nest(
        "",
        (
            loop(
                "roll",
                50,
                *(
                    step
                    for g in (0, 1)
                    for step in (
                        Step("wait", f"roll/step_{g}", f"shard:{g}", stage=1),
                        Step("run", f"roll/act_{g}"),
                        Step("submit", f"roll/step_{g}", f"shard:{g}"),
                    )
                ),
            ),
        ),
    )
    names = {f"roll/{what}_{g}": busy(s) for what, s in (("act", 1.0), ("step", 1.0))
             for g in (0, 1)}  # fmt: skip
    found = predict(nest, Costs(names), TWO)
    assert found.seconds == pytest.approx(50 * 2.0 + 1.0, rel=0.02), "act and step overlap fully"


def test_many_trips_go_on_as_the_last_ones_did() -> None:
    costs = Costs({"roll/act": busy(1.0), "roll/step": busy(3.0), "roll/late": busy(2.0)})
    steps = OVERLAPPED.steps[0].inner
    assert steps is not None
    for trips in (TRIPS - 1, TRIPS, TRIPS + 1, 1000):
        many = Nest("", (loop("roll", trips, *steps.steps),))
        assert predict(many, costs, TWO).seconds == pytest.approx(trips * 4.0)
    none = Nest("", (loop("roll", 0, *steps.steps),))
    assert predict(none, costs, TWO).seconds == 0.0


@pytest.mark.parametrize("late", [0.5, 2.0, 5.0])
def test_the_formula_says_what_the_simulation_says(late: float) -> None:
    step = busy(3.0, submit_s=0.25, receive_s=0.5, launch_s=0.75)
    costs = Costs({"roll/act": busy(1.0), "roll/step": step, "roll/late": busy(late)})
    predicted = predict(OVERLAPPED, costs, TWO)
    made = formula(OVERLAPPED, costs, TWO, predicted)
    assert made.seconds() == pytest.approx(predicted.seconds)
    inner = OVERLAPPED.steps[0].inner
    assert inner is not None
    longer = Nest("", (loop("roll", 40, *inner.steps),))
    expected = predict(longer, costs, TWO).seconds
    assert made.seconds(T_roll=40) == pytest.approx(expected, rel=1e-3), "trips are a symbol"


def test_the_formula_is_in_costs_and_trips() -> None:
    predicted = predict(SEQUENTIAL, COSTS, TWO)
    made = formula(SEQUENTIAL, COSTS, TWO, predicted)
    roll, epoch, batch, act, step, order, update, save = (
        sympy.Symbol(n, positive=True)
        for n in ["T_roll", "T_epoch", "T_batch", "act", "step", "order", "update", "save"]
    )
    expected = roll * (act + step) + epoch * (order + batch * update) + save
    assert sympy.expand(made.full() - expected) == 0
    assert made.seconds() == pytest.approx(predicted.seconds)
    assert made.seconds(act=1.0) == pytest.approx(predicted.seconds + 7.5)
    with pytest.raises(KeyError, match="acts"):
        made.seconds(acts=1.0)


def test_what_sets_the_rate_is_named() -> None:
    costs = Costs({"roll/act": busy(1.0), "roll/step": busy(3.0), "roll/late": busy(2.0)})
    made = formula(OVERLAPPED, costs, TWO, predict(OVERLAPPED, costs, TWO))
    rates = {c.name: c.seconds for c in made.loops["roll"].candidates}
    assert rates == {"through shard:0": 4.0, "coordinator": 3.0, "shard:0": 3.0, "cores": 3.0}
    assert made.loops["roll"].candidates[0].name == "through shard:0"
