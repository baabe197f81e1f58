from __future__ import annotations

import json
import os
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_compiler.base.errors import VerifyError
from rose_compiler.base.machine import (
    Machine,
    Task,
    critical_path,
    detect_cpu,
    fair_shares,
    simulate,
    work_over_capacity,
)

TWO = Machine("two", cores=2)
ONE = Machine("one", cores=1)


def test_a_lane_runs_its_tasks_in_order() -> None:
    schedule = simulate([Task("a", "x", 2.0), Task("b", "x", 1.0)], TWO)
    assert schedule.start == {"a": 0.0, "b": 2.0}
    assert schedule.end == {"a": 2.0, "b": 3.0}
    assert schedule.makespan == 3.0


def test_lanes_with_room_for_all_run_at_full_speed() -> None:
    schedule = simulate([Task("a", "x", 2.0), Task("b", "y", 3.0)], TWO)
    assert schedule.makespan == 3.0


def test_one_core_is_shared_equally_until_the_shorter_task_ends() -> None:
    # both at half speed: a needs 2 s of wall time, b has 2 s left then and runs alone
    schedule = simulate([Task("a", "x", 1.0), Task("b", "y", 3.0)], ONE)
    assert schedule.end == {"a": 2.0, "b": 4.0}


def test_two_threads_get_twice_what_one_gets() -> None:
    # demand 3 on 2 cores: all at 2/3 until b ends at 1.5; a has done 1 of 2 s and takes 1 s more
    tasks = [Task("a", "x", 2.0, demand=2), Task("b", "y", 1.0, demand=1)]
    schedule = simulate(tasks, TWO)
    assert schedule.end["b"] == pytest.approx(1.5)
    assert schedule.makespan == pytest.approx(2.5)


def test_a_task_wider_than_the_machine_is_slowed() -> None:
    assert simulate([Task("a", "x", 1.0, demand=4)], TWO).makespan == 2.0


def test_who_needs_less_than_an_equal_share_gets_it_all() -> None:
    # a wants 0.25 of the core, under its equal share of 0.5; b gets the other 0.75
    tasks = [Task("a", "x", 1.0, demand=0.25), Task("b", "y", 1.5)]
    schedule = simulate(tasks, ONE)
    assert schedule.end["a"] == 1.0
    assert schedule.end["b"] == 1.75  # 0.75 done when a ends


def test_bound_lanes_share_their_part_and_leave_the_rest() -> None:
    tasks = [Task("a", "x", 2.0), Task("s", "sim 0", 1.0), Task("t", "sim 1", 1.0)]
    assert simulate(tasks, TWO).end["a"] == 2.5  # three on two cores, then one on one
    part = ("sims", 1.0)
    bound = simulate(tasks, TWO, {"sim 0": part, "sim 1": part})
    assert bound.end == {"a": 2.0, "s": 2.0, "t": 2.0}
    alone = simulate(tasks[1:], TWO, {"sim 0": part, "sim 1": part})
    assert alone.makespan == 2.0, "they have no more where nobody else runs"
    apart = simulate(tasks[1:], TWO, {"sim 0": part, "sim 1": ("other", 1.0)})
    assert apart.makespan == 1.0


def test_dependences_cross_lanes() -> None:
    # double buffering by hand: two shards, act on one lane, simulate on the other
    tasks = [
        Task("act0", "infer", 1.0),
        Task("act1", "infer", 1.0),
        Task("sim0", "sim", 2.0, after=("act0",)),
        Task("sim1", "sim", 2.0, after=("act1",)),
    ]
    schedule = simulate(tasks, TWO)
    assert schedule.start == {"act0": 0.0, "act1": 1.0, "sim0": 1.0, "sim1": 3.0}
    assert schedule.makespan == 5.0


def test_a_gpu_shares_its_sms() -> None:
    gpu = Machine("gpu", cores=16, sms=132, sm_granularity=8)
    # together 176 of 132 SMs: all at 3/4 until b ends at 4/3; a has 1 s left and runs alone
    tasks = [Task("a", "s0", 2.0, demand=132), Task("b", "s1", 1.0, demand=44)]
    schedule = simulate(tasks, gpu)
    assert schedule.end["b"] == pytest.approx(4 / 3)
    assert schedule.makespan == pytest.approx(7 / 3)


def test_tasks_without_work_take_no_time_and_keep_order() -> None:
    tasks = [Task("a", "x", 0.0), Task("b", "y", 1.0, after=("a",)), Task("c", "x", 0.0)]
    schedule = simulate(tasks, ONE)
    assert schedule.makespan == 1.0
    assert schedule.end["c"] == 0.0


def test_no_tasks() -> None:
    assert simulate([], ONE).makespan == 0.0
    assert critical_path([], ONE) == 0.0


def test_tasks_that_wait_for_each_other_are_named() -> None:
    tasks = [
        Task("a", "x", 1.0, after=("d",)),
        Task("b", "x", 1.0),
        Task("c", "y", 1.0, after=("b",)),
        Task("d", "y", 1.0),
    ]
    for compute in (simulate, critical_path):
        with pytest.raises(VerifyError, match="verify-deadlock") as caught:
            compute(tasks, TWO)
        assert caught.value.found == "a on lane x waits for d; c on lane y waits for b"


def test_malformed_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="two tasks are named 'a'"):
        simulate([Task("a", "x", 1.0), Task("a", "y", 1.0)], ONE)
    with pytest.raises(ValueError, match="waits for 'b', which does not exist"):
        simulate([Task("a", "x", 1.0, after=("b",))], ONE)
    with pytest.raises(ValueError, match="work_s of task 'a'"):
        Task("a", "x", -1.0)
    with pytest.raises(ValueError, match="demand of task 'a'"):
        Task("a", "x", 1.0, demand=0)
    with pytest.raises(ValueError, match="at least one core"):
        Machine("none", cores=0)


def test_detected_cores_are_those_this_process_may_use() -> None:
    available = os.sched_getaffinity(0)
    assert detect_cpu().cores == len(available)
    os.sched_setaffinity(0, {min(available)})
    try:
        assert detect_cpu().cores == 1
    finally:
        os.sched_setaffinity(0, available)


def test_machine_and_schedule_travel() -> None:
    gpu = Machine("gpu", cores=16, sms=132, sm_granularity=8, bandwidth_bytes_per_s=4.8e12)
    assert Machine.from_dict(json.loads(json.dumps(gpu.to_dict()))) == gpu
    schedule = simulate([Task("a", "x", 2.0)], ONE)
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@st.composite
def task_sets(draw: st.DrawFn) -> list[Task]:
    works = st.integers(0, 40).map(lambda n: n / 8)
    demands = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0])
    tasks: list[Task] = []
    for i in range(draw(st.integers(1, 12))):
        # only earlier tasks, so that lane order and dependences can't wait for each other
        after = draw(st.sets(st.sampled_from(range(i)), max_size=3)) if i else set()
        lane = draw(st.sampled_from("xyz"))
        names = tuple(f"t{k}" for k in sorted(after))
        tasks.append(Task(f"t{i}", lane, draw(works), draw(demands), names))
    return tasks


machines = st.integers(1, 4).map(lambda n: Machine(f"{n}", cores=n))
NEAR = 1e-9


@given(task_sets(), machines)
def test_makespan_lies_between_its_bounds(tasks: list[Task], machine: Machine) -> None:
    makespan = simulate(tasks, machine).makespan
    assert makespan >= critical_path(tasks, machine) - NEAR
    assert makespan >= work_over_capacity(tasks, machine) - NEAR
    # work conserving: never slower than one after another
    serial = sum(t.work_s * max(1.0, t.demand / machine.capacity) for t in tasks)
    assert makespan <= serial + NEAR


@given(task_sets(), machines)
def test_order_and_speed_limits_hold(tasks: list[Task], machine: Machine) -> None:
    schedule = simulate(tasks, machine)
    last_on_lane: dict[str, str] = {}
    for task in tasks:
        start, end = schedule.start[task.name], schedule.end[task.name]
        assert end - start >= task.work_s - NEAR
        for name in (
            *task.after,
            *([last_on_lane[task.lane]] if task.lane in last_on_lane else []),
        ):
            assert start >= schedule.end[name] - NEAR
        last_on_lane[task.lane] = task.name
    assert schedule.makespan == max(schedule.end.values())


@given(task_sets())
def test_a_machine_with_room_for_all_reaches_the_critical_path(tasks: list[Task]) -> None:
    roomy = Machine("roomy", cores=64)
    assert simulate(tasks, roomy).makespan == pytest.approx(critical_path(tasks, roomy), abs=NEAR)


@given(task_sets())
def test_a_serial_chain_is_the_sum_of_its_parts(tasks: list[Task]) -> None:
    chain = [Task(t.name, "one", t.work_s) for t in tasks]
    assert simulate(chain, ONE).makespan == pytest.approx(sum(t.work_s for t in tasks))


@given(
    st.dictionaries(st.text(min_size=1, max_size=3), st.floats(0.01, 8), min_size=1, max_size=6),
    st.integers(1, 8),
)
def test_shares_are_work_conserving(demands: dict[str, float], capacity: int) -> None:
    shares = fair_shares(demands, capacity)
    assert all(0 < shares[name] <= demands[name] for name in demands)
    assert sum(shares.values()) == pytest.approx(min(capacity, sum(demands.values())))
