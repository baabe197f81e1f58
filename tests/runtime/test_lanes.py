"""Lanes: order, modes, exceptions, time limits, and nothing left behind."""

from __future__ import annotations

import contextvars
import gc
import threading
import time
from typing import Any

import pytest
import torch

from rose_compiler.base.errors import HostTimeout
from rose_compiler.base.spanlog import SpanLog
from rose_compiler.runtime.lanes import InlineLane, Lane, Skipped, ThreadLane
from rose_compiler.runtime.remote import HostLane, ShardLane
from tests.awake import until, within


def rose_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("rose ") and t.is_alive()]


@pytest.fixture(autouse=True)
def _nothing_left() -> Any:
    before = set(rose_threads())
    yield
    gc.collect()
    assert until(lambda: set(rose_threads()) <= before, pause=0.01)


class Shard:
    """A shard that adds up its actions; the native one computes when it is waited for."""

    def __init__(self, native: bool) -> None:
        self.native_async = native
        self.total = 0
        self.pending: list[int] = []
        self.threads: list[int] = []

    def step(self, action: int) -> int:
        self.threads.append(threading.get_ident())
        if action < 0:
            raise ValueError("negative")
        self.total += action
        return self.total

    def step_async(self, action: int) -> None:
        assert not self.pending, "one step at a time"
        self.pending.append(action)

    def step_wait(self) -> int:
        return self.step(self.pending.pop())


def test_a_thread_lane_runs_in_order_beside_the_coordinator() -> None:
    lane = ThreadLane("a")
    seen: list[int] = []
    gate = threading.Event()
    tasks = [lane.submit(0, gate.wait)]
    tasks += [lane.submit(i, seen.append, i) for i in range(20)]
    assert not seen
    gate.set()
    for task in tasks:
        task.wait()
    assert seen == list(range(20))
    assert lane.submit(0, threading.get_ident).wait() != threading.get_ident()
    lane.close()


def test_a_task_among_the_arguments_stands_for_its_result() -> None:
    lane = ThreadLane("a")
    gate = threading.Event()
    pair = lane.submit(0, lambda: (gate.wait(), (3, 4)))
    total = lane.submit(1, lambda a, b: a * b, pair[1][0], pair[1][1])
    gate.set()
    assert total.wait() == 12
    lane.close()


def test_the_very_exception_is_raised_and_what_was_queued_behind_is_skipped() -> None:
    lane = ThreadLane("a")
    gate = threading.Event()
    error = KeyError("mine")

    def fails() -> None:
        gate.wait()
        raise error

    ran: list[int] = []
    task, later = lane.submit(0, fails), lane.submit(1, ran.append, 1)
    gate.set()
    with pytest.raises(KeyError) as caught:
        task.wait()
    assert caught.value is error
    with pytest.raises(Skipped):
        later.wait()
    assert not ran
    assert lane.settle(1.0)
    assert lane.failed == [task]
    assert lane.skipped == [later]
    lane.close()


def test_modes_of_the_submitter_hold_on_the_worker() -> None:
    lane = ThreadLane("a")
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)

    def modes() -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
            variable.get(),
        )

    variable.set(7)
    assert lane.submit(0, modes).wait() == (True, False, False, None, 7)
    with torch.no_grad():
        variable.set(8)
        task = lane.submit(0, modes)
    with torch.inference_mode():
        inferring = lane.submit(0, modes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = lane.submit(0, modes)
        product = lane.submit(0, torch.mm, torch.ones(2, 2), torch.ones(2, 2))
    assert task.wait() == (False, False, False, None, 8)
    assert inferring.wait() == (False, True, False, None, 8)
    assert cast.wait() == (True, False, True, torch.bfloat16, 8)
    assert product.wait().dtype == torch.bfloat16
    assert lane.submit(0, modes).wait() == (True, False, False, None, 8)
    with torch.device("meta"):
        made = lane.submit(0, torch.zeros, 1)
    assert made.wait().is_meta
    assert not lane.submit(0, torch.zeros, 1).wait().is_meta
    lane.close()


def test_a_worker_leaves_the_casts_of_its_submitter_alone() -> None:
    lane = ThreadLane("a")
    x, weight = torch.ones(2, 2), torch.nn.Parameter(torch.ones(2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first = torch.mm(x, weight)
        with torch.no_grad():
            weight.add_(1)
        other = lane.submit(0, torch.mm, x, weight).wait()  # it casts what there is now
        again = torch.mm(x, weight)  # as eager does: until the region is left
    assert torch.equal(first, again)
    assert torch.equal(other, 2 * first)
    assert torch.equal(lane.submit(0, torch.mm, x, weight).wait(), 2 * first.float())
    lane.close()


def test_a_graph_made_under_one_lane_trains_on_the_coordinator() -> None:
    lane = ThreadLane("a")
    w = torch.ones(3, requires_grad=True)
    lane.submit(0, lambda: (w * 2).sum()).wait().backward()
    assert torch.equal(w.grad, torch.full((3,), 2.0))
    lane.close()


def test_thread_counts_follow_the_submitter() -> None:
    before = torch.get_num_threads()
    lane, own = ThreadLane("a"), ThreadLane("b", threads=1)
    try:
        for count in (2, 1, 2):
            torch.set_num_threads(count)
            assert lane.submit(0, torch.get_num_threads).wait() == count
            assert own.submit(0, torch.get_num_threads).wait() == 1
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
        lane.close()
        own.close()


def test_a_time_limit_ends_a_wait() -> None:
    lane = ThreadLane("a", timeout=0.05)
    gate = threading.Event()
    task, ran = lane.submit(0, gate.wait), list[int]()
    behind = lane.submit(1, ran.append, 1)
    with pytest.raises(HostTimeout, match="lane 'a'"):
        task.wait()
    assert not lane.settle(0.01)
    lane.abandon()
    gate.set()
    with pytest.raises(Skipped):  # its caller has gone on long ago
        behind.wait()
    assert not ran


def test_a_closed_lane_starts_again() -> None:
    lane = ThreadLane("a")
    assert lane.submit(0, int, "3").wait() == 3
    lane.close()
    lane.close()
    assert lane.submit(0, int, "4").wait() == 4
    lane.close()


def test_a_forgotten_lane_ends_its_thread() -> None:
    lane = ThreadLane("forgotten")
    lane.submit(0, int).wait()
    assert any(t.name == "rose forgotten" for t in rose_threads())
    del lane  # the fixture checks that the thread ends


def test_a_task_lets_go_of_its_arguments() -> None:
    lane = ThreadLane("a")
    alive = [torch.zeros(3)]
    import weakref

    watch = weakref.ref(alive[0])
    task = lane.submit(0, lambda x: None, alive.pop())
    task.wait()
    assert watch() is None
    lane.close()


@pytest.mark.parametrize("native", [True, False])
def test_a_shard_steps_at_submit_or_wait(native: bool) -> None:
    lane, shard = ShardLane("shard:0"), Shard(native)
    for i in range(5):
        task = lane.step(0, shard, i)
        assert task.wait() == shard.total == sum(range(i + 1))
        assert task.wait() == shard.total
    assert (threading.get_ident() in shard.threads) is native
    # two steps that nobody waited for in between keep their order
    lane.step(0, shard, 10)
    assert lane.step(0, shard, 5).wait() == 25
    lane.close()


@pytest.mark.parametrize("native", [True, False])
def test_a_step_that_fails_is_on_record(native: bool) -> None:
    lane, shard = ShardLane("shard:0"), Shard(native)
    task = lane.step(3, shard, -1)
    assert lane.settle(1.0)
    assert [t.site for t in lane.failed] == [3]
    with pytest.raises(ValueError, match="negative"):
        task.wait()
    lane.close()


def test_a_step_that_hangs_is_left_after_a_while() -> None:
    lane, shard, release = ShardLane("shard:0"), Shard(True), threading.Event()
    shard.step_wait = lambda: release.wait() and 5  # type: ignore[assignment, return-value]
    lane.step(0, shard, 1)
    with within(2):
        assert not lane.settle(0.05)
    lane.abandon()
    lane.close()  # waits for nothing
    release.set()


def test_the_inline_lane_raises_at_submit() -> None:
    lane = InlineLane()
    assert lane.submit(0, max, lane.submit(0, int, "3"), 2).wait() == 3
    with pytest.raises(ZeroDivisionError):
        lane.submit(0, lambda: 1 / 0)
    assert lane.step(0, Shard(True), 2).wait() == 2


class Ticket:
    def __init__(self, value: Any, what: str) -> None:
        self.value, self.what = value, what


class Host:
    """A host by the book: methods of a list, run when waited for."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.timeout: float | None = None
        self.limits: list[float | None] = []

    def submit(self, method: str, *args: Any) -> Ticket:
        return Ticket(lambda: getattr(self.items, method)(*args), method)

    def wait(self, ticket: Ticket, timeout: float | None = None) -> Any:
        self.limits.append(timeout)
        return ticket.value()


def test_a_host_lane_calls_methods_by_name() -> None:
    host = Host()
    lane = HostLane("host:a", host, timeout=3.0)
    lane.submit(0, "append", 5).wait()
    assert lane.submit(1, "index", 5).wait() == 0
    assert host.limits == [3.0, 3.0]
    host.timeout = 0.5  # its own limit, which is shorter
    assert lane.submit(1, "index", 5).wait() == 0
    assert host.limits.pop() == 0.5
    host.timeout = 8.0
    failing = lane.submit(2, "index", 9)
    assert lane.settle(1.0)
    assert 0.5 < host.limits[-1] <= 1.0  # what is left of it
    assert lane.failed == [failing]


@pytest.mark.parametrize("lane", [InlineLane("x"), ThreadLane("x"), ShardLane("x")])
def test_spans_tell_what_ran(lane: Lane) -> None:
    lane.spans = SpanLog()
    lane.submit(0, time.sleep, 0.01).wait()
    (span,) = lane.spans
    assert (span.op, span.lane) == ("sleep", "x")
    assert span.duration_s >= 0.01
    lane.close()
