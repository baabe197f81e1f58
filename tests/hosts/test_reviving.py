"""A component whose process dies or hangs: a new one takes over, and nothing that it was told is
lost."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_parts import Counter, Interrupted, Learner, Stubborn, Tuner

import rose_compiler
from rose_compiler.base.errors import HostDied, HostTimeout
from rose_compiler.runtime.hosts import moving, tape
from rose_compiler.runtime.hosts.hosted import Hosted
from rose_compiler.runtime.hosts.making import hosted
from rose_compiler.runtime.hosts.pending import begin
from rose_compiler.runtime.support import Runtime
from tests.awake import within

CORES = os.sched_getaffinity(0)


def revived(component: Hosted) -> list[str]:
    return [remark.why for remark in component.rose_remarks if remark.code == "revived"]


def killed(component: Hosted) -> int:
    component.ready()
    pid = component.pid
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/task").exists() and "Z" not in state_of(pid):
        time.sleep(0.005)
    return pid


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_stateless_component_is_asked_again_what_it_had_not_answered(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    with hosted(partial(Counter, str(trap)), stateless=True) as far:
        far.publish({"w": np.full(1, 2.0)})
        assert far.scaled(np.ones(2)).tolist() == [2.0, 2.0]
        trap.touch()
        given = np.arange(3.0)
        first = begin(far.scaled, (given,))  # dies in it, with version 1
        given += 100  # what was issued is what counts
        far.publish({"w": np.full(1, 3.0)})
        second = begin(far.scaled, (np.ones(1),))
        assert second.result().tolist() == [3.0]
        assert first.result().tolist() == [0.0, 2.0, 4.0]
        assert "2 calls were repeated" in revived(far)[0]
        pid = killed(far)
        assert far.scaled(np.ones(1)).tolist() == [3.0]
        assert far.pid != pid
        assert len(revived(far)) == 2


def test_a_call_that_always_ends_its_process_is_one_error() -> None:
    with hosted(Counter, stateless=True) as far:
        with within(10), pytest.raises(HostDied, match="die"):
            far.die()
        assert not revived(far)


def test_a_component_with_state_goes_back_to_the_iteration_and_repeats(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    with hosted(partial(Counter, str(trap)), recover=True) as far:
        far.publish({"w": np.full(1, 1.0)})
        far.add(np.ones(3))
        far.rose_boundary()
        amount = np.full(3, 2.0)
        far.add(amount)
        amount += 100
        far.publish({"w": np.full(1, 10.0)})
        far.add(np.ones(3))
        trap.touch()
        pending = begin(far.add, (np.full(3, 0.5),))
        assert pending.result().tolist() == [18.0] * 3
        assert "3 calls were repeated" in revived(far)[0]
        assert (far.version, far.replied) == (2, 2)
        killed(far)
        assert far.add(np.zeros(3)).tolist() == [18.0] * 3
        killed(far)
        far.rose_boundary()
        assert far.add(np.zeros(3)).tolist() == [18.0] * 3


def test_calls_that_hang_are_asked_again_though_nobody_waits_for_them(tmp_path: Path) -> None:
    """By the limit of their lane; the component has none of its own."""
    trap = tmp_path / "trap"
    with hosted(partial(Counter, str(trap)), stateless=True) as far:
        far.publish({"w": np.full(1, 2.0)})
        assert far.scaled(np.ones(2)).tolist() == [2.0, 2.0]
        pid = far.pid
        far.rose_limit({max(CORES)}, 1)
        runtime = Runtime(timeout=0.5)
        lane = runtime.lane("host:far")
        trap.write_text("hang")
        tasks = [lane.submit(0, far.scaled, np.full(2, value)) for value in (1.0, 3.0)]
        runtime.drain()
        assert [task.wait().tolist() for task in tasks] == [[2.0, 2.0], [6.0, 6.0]]
        (why,) = revived(far)
        assert "did not finish scaled()" in why
        assert "2 calls were repeated" in why
        assert far.pid != pid
        assert far.cores() == {max(CORES)}, "the quota in force is that of who takes over"
        runtime.close()


def test_a_component_with_state_that_hangs_goes_back_and_repeats(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    with hosted(partial(Counter, str(trap)), recover=True, timeout=0.5) as far:
        far.publish({"w": np.full(1, 1.0)})
        far.rose_boundary()
        far.add(np.full(3, 2.0))
        far.publish({"w": np.full(1, 10.0)})
        trap.write_text("hang")
        os.sched_setaffinity(0, {min(CORES)})  # as a coordinator that keeps to its own cores
        try:
            assert far.add(np.ones(3)).tolist() == [12.0] * 3
        finally:
            os.sched_setaffinity(0, CORES)
        assert far.cores() == CORES
        (why,) = revived(far)
        assert "did not finish add()" in why
        assert "2 calls were repeated" in why


def test_who_hangs_after_a_fault_is_brought_back_by_who_uses_it_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while the fault waits for everything to come to rest. A call that hangs again is an
    error."""
    monkeypatch.setattr(tape, "SHARE", 1e9)  # the state is taken at each boundary
    trap = tmp_path / "trap"
    with hosted(partial(Counter, str(trap)), recover=True) as far:
        far.rose_boundary()
        trap.write_text("hang")
        pending = begin(far.add, (np.ones(3),))
        with pending.within(0.1):
            pending.collect()
        assert isinstance(pending.error, HostTimeout)
        assert not revived(far)
        far.rose_boundary()
        assert "1 calls were repeated" in revived(far)[0]
        assert far.add(np.zeros(3)).tolist() == [1.0] * 3
        far.timeout = 0.1
        with pytest.raises(HostTimeout, match="sleep"):
            far.sleep(30.0)
        assert len(revived(far)) == 1
        for again in (lambda: far.add(np.ones(3)), far.rose_boundary):
            with pytest.raises(HostTimeout):
                again()
        far.timeout = None
        far.restart()
        assert far.add(np.ones(3)).tolist() == [1.0] * 3


def test_without_its_state_there_is_one_clear_error() -> None:
    with hosted(Stubborn, recover=True) as far:
        far.rose_boundary()
        far.add(np.ones(3))
        killed(far)
        with pytest.raises(HostDied) as caught:
            far.add(np.ones(3))
        assert "not this state" in caught.value.__notes__[0]
        assert not revived(far)
        for again in (lambda: far.add(np.ones(3)), far.rose_boundary, lambda: far.add(np.ones(3))):
            with pytest.raises(HostDied) as caught:
                again()
            assert "not this state" in caught.value.__notes__[0]
        far.restart()
        assert far.add(np.ones(3)).tolist() == [1.0] * 3
    with hosted(Learner, recover=True) as plain:
        plain.rose_boundary()
        (remark,) = plain.rose_remarks
        assert (remark.code, "get_state" in str(remark.allow)) == ("hosted-elsewhere", True)
        killed(plain)
        with pytest.raises(HostDied):
            plain.echo(1)


@pytest.mark.parametrize("kind", ["stateless", "recover", "neither"])
def test_a_restart_ends_calls_under_way_and_keeps_what_was_answered(kind: str) -> None:
    guarded = {} if kind == "neither" else {kind: True}
    with hosted(Learner, **guarded) as far:  # type: ignore[arg-type]
        far.rose_boundary()
        far.echo(np.ones(5000))  # so that there is room for the next one's answer
        answered = begin(far.echo, (np.ones(5000),))
        under_way = begin(far.sleep, (30.0,))
        while not answered.answered:
            far._host._receive()
        far.restart()
        pid = far.pid
        assert answered.result().tolist() == [1.0] * 5000
        for _ in range(2):
            with pytest.raises(HostDied):
                under_way.result()
        assert far.pid == pid
        assert far.echo(2) == 2


def test_ctrl_c_leaves_nothing_that_answers_half_restored() -> None:
    with hosted(Interrupted, recover=True) as far:
        far.publish({"w": np.full(1, 2.0)})
        far.rose_boundary()
        far.publish({"w": np.full(1, 3.0)})
        far.add(np.ones(3))
        killed(far)
        with pytest.raises(KeyboardInterrupt):
            far.add(np.ones(3))
        for again in (lambda: far.add(np.ones(3)), far.rose_boundary):
            with pytest.raises(HostDied):
                again()
        far.restart()
        assert far.add(np.ones(3)).tolist() == [3.0] * 3


def test_an_end_that_is_the_components_own_error_is_no_end_of_it() -> None:
    with hosted(Tuner, recover=True) as far:
        far.rose_boundary()
        far.train()
        pid = far.pid
        with pytest.raises(HostDied, match="another host"):
            far.missing_host()
        with pytest.raises(HostTimeout, match="another host"):
            far.late_host()
        assert far.pid == pid
        assert not revived(far)
        killed(far)
        assert far.train().tolist() == [2.0]


def test_taking_the_state_costs_next_to_nothing_of_short_iterations() -> None:
    with hosted(Counter, recover=True) as far:
        far.rose_boundary()
        sent = far._count
        for _ in range(3):
            far.add(np.ones(3))
            far.rose_boundary()
        assert far._count == sent + 3
        killed(far)
        assert far.add(np.ones(3)).tolist() == [4.0] * 3


def test_what_is_kept_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "CALLS", 6)
    with hosted(Counter, recover=True) as far:
        far.rose_boundary()
        for _ in range(4):  # near the bound the state is taken, whatever that costs
            for _ in range(4):
                far.add(np.ones(3))
            far.rose_boundary()
        assert far._journal is not None
        assert far._journal.entries == []
        assert not far.rose_remarks
        for _ in range(20):  # outside of any compiled loop
            far.add(np.ones(3))
            assert len(far._journal.entries) <= 6
        (remark,) = far.rose_remarks
        assert "can't be brought back before the next iteration" in remark.why
        far.rose_boundary()
        far.add(np.ones(3))
        killed(far)
        assert far.add(np.zeros(3)).tolist() == [37.0] * 3
        for _ in range(20):
            far.add(np.zeros(3))
        assert [each.code for each in far.rose_remarks] == ["hosted-elsewhere", "revived"]
        killed(far)
        for again in (lambda: far.add(np.ones(3)), far.rose_boundary):
            with pytest.raises(HostDied) as caught:
                again()
            assert "than is kept, 6 calls" in caught.value.__notes__[0]


def test_bytes_are_bounded_too_and_parameters_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "BYTES", 1 << 20)
    with hosted(Counter, recover=True) as far:
        far.rose_boundary()
        for value in range(100):  # superseded before any call had them
            far.publish({"w": np.full(20_000, float(value))})
        far.add(np.ones(3))
        assert not far.rose_remarks
        killed(far)
        assert far.add(np.ones(3)).tolist() == [198.0] * 3
        assert (far.version, far.replied) == (100, 100)
        for value in range(9):
            far.publish({"w": np.full(20_000, float(value))})
            far.add(np.ones(3))
        assert [each.code for each in far.rose_remarks] == ["revived", "hosted-elsewhere"]


def test_answers_are_not_kept_with_what_is_repeated() -> None:
    with hosted(Counter, recover=True) as far:
        far.rose_boundary()
        for value in range(6):
            far.publish({"w": np.full(1, float(value))})
            far.publish({"w": np.full(1, float(value))})
            far.add(np.ones(3))
        assert far._journal is not None
        kept = [each for each in far._journal.entries if each.pending is not None]
        assert len(kept) == 1
        killed(far)
        assert far.add(np.zeros(3)).tolist() == [15.0] * 3


def test_a_function_that_is_closed_keeps_nothing(tmp_path: Path) -> None:
    with hosted(Counter, recover=True) as far:
        step = rose_compiler.compile(iteration, tune=False)
        for k in range(3):
            step(far, np.full(3, float(k)), [])
        assert far._journal is not None
        assert far._journal._started
        step.close()
        assert not far._journal._started
        far.add(np.ones(3))
        assert far._journal.entries == []
        step(far, np.ones(3), [])  # which may be called again
        killed(far)
        step(far, np.ones(3), [])
        assert far.add(np.zeros(3)).tolist() == [6.0] * 3
        step.close()


@pytest.mark.parametrize("kind", ["stateless", "recover"])
def test_parameters_find_a_process_that_died_idle(kind: str) -> None:
    with hosted(Counter, **{kind: True}) as far:  # type: ignore[arg-type]
        far.rose_boundary()
        far.add(np.ones(3))
        killed(far)
        assert far.publish({"w": np.full(1, 2.0)}) == 1
        assert len(revived(far)) == 1
        before = 0.0 if kind == "stateless" else 1.0
        assert far.add(np.ones(3)).tolist() == [before + 2.0] * 3


def test_a_component_that_was_moved_is_brought_back_from_where_it_went() -> None:
    with hosted(Tuner, recover=True) as far:
        far.publish({"w": np.full(1, 5.0)})
        far.rose_boundary()
        far.train()
        moving.take_over(far, moving.successor(far, {}, "sms"))
        far.train()
        killed(far)
        assert far.train().tolist() == [8.0]
        assert "1 calls were repeated" in revived(far)[0]


def iteration(counter: Any, amounts: Any, log: list[Any]) -> float:
    """Calls beside work that does not need them."""
    total = counter.add(amounts)
    other = float((amounts * 2).sum())
    log.append(total.copy())
    return other


def test_a_compiled_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    logs: dict[bool, list[Any]] = {}
    for dies in (False, True):
        log = logs[dies] = []
        with hosted(partial(Counter, str(trap)), recover=True) as counter:
            step = rose_compiler.compile(iteration, tune=False)
            for k in range(5):
                if dies and k in (2, 4):
                    trap.touch()
                step(counter, np.full(3, float(k)), log)
            assert "submit" in step.source
            told = step.explain(width=10_000)
            step.close()
        assert told.count("a new process took over") == (2 if dies else 0)
    assert np.array_equal(logs[True], logs[False])


def test_a_move_takes_state_and_parameters_along() -> None:
    with hosted(Counter, environment={"ROSE_MARK": "first"}) as far:
        far.publish({"w": np.full(1, 2.0)})
        far.add(np.ones(3))
        pid = far.pid
        assert moving.movable(far)
        given = {"ROSE_MARK": "second", "ROSE_NEW": "1"}
        moving.take_over(far, moving.successor(far, given, "sms"))
        assert far.pid != pid
        assert not Path(f"/proc/{pid}").exists()
        assert far.add(np.ones(3)).tolist() == [4.0] * 3
        assert (far.variable("ROSE_MARK"), far.variable("ROSE_NEW")) == ("second", "1")
        moving.starts_with(far, {"ROSE_OTHER": "there"}, "cores")
        far.restart()  # where it lives now counts
        assert (far.variable("ROSE_MARK"), far.variable("ROSE_OTHER")) == ("second", "there")
        moving.take_over(far, moving.successor(far, {}, "sms"))
        assert (far.variable("ROSE_MARK"), far.variable("ROSE_NEW")) == ("first", None)
        assert far.variable("ROSE_OTHER") == "there", "somebody else gave it"
    with hosted(Stubborn) as far:
        far.add(np.ones(3))
        other = moving.successor(far, {}, "sms")
        with pytest.raises(ValueError, match="not this state"):
            moving.take_over(far, other)
        other.close()
        assert far.add(np.ones(3)).tolist() == [2.0] * 3
    with hosted(Learner) as plain:
        assert not moving.movable(plain)


def test_what_a_move_takes_along_is_newer_than_the_parameters() -> None:
    with hosted(Tuner) as far:
        far.publish({"w": np.full(1, 5.0)})
        assert far.train().tolist() == [6.0]
        moving.take_over(far, moving.successor(far, {}, "sms"))
        assert far.train().tolist() == [7.0]
        far.publish({"w": np.full(1, 1.0)})
        assert far.train().tolist() == [2.0]
        far.restart()
        assert far.train().tolist() == [2.0]
