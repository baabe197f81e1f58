"""Faults while a schedule runs: the right exception, notes, states, and nothing left behind."""

from __future__ import annotations

import _thread
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rose_compiler.base.errors import HostTimeout
from rose_compiler.base.faultmap import FaultMap
from rose_compiler.codegen import emit, load
from rose_compiler.ir.parse import parse
from rose_compiler.ir.verify import verify
from rose_compiler.runtime import remote, support
from rose_compiler.runtime.lanes import late
from rose_compiler.runtime.recording import RecordingStreams
from rose_compiler.runtime.support import Runtime
from tests.awake import within

TEXT = """
@op(reads=[], writes=["buf"])
def store(buf, t, obs): ...

@op(reads=[], writes=[])
def act(obs, t): ...

@op(kind="step", reads=["env"], writes=["env"],
    attributes={"step": {"env": "env", "action": "action"}})
def env_step(action, env): ...

@op(reads=[], writes=["log"])
def record(log, r): ...

@program(stage="scheduled")
def ppo(obs0, n, *, env, buf, log):
    for t, obs in rollout(0, n, 1, obs=obs0):
        a = act(obs, t) @ lane(order=0)
        r = env_step(a, env) @ lane("LANE", order=1)
        store(buf, t, obs) @ lane(order=2)
        nxt = r[0]
        record(log, nxt) @ lane(stage=1, order=3)
        yield nxt
    last = rollout.obs
    return last
"""


class Env:
    def __init__(self, native: bool) -> None:
        self.native_async = native
        self.v = self.steps = 0
        self.pending: list[int] = []

    def step(self, action: int) -> tuple[int, float]:
        self.steps += 1
        self.v += action
        return self.v, 1.0

    def step_async(self, action: int) -> None:
        self.pending.append(action)

    def step_wait(self) -> tuple[int, float]:
        return self.step(self.pending.pop())


class World:
    """The program above on live objects; ``fail`` names (operation, trip) pairs that raise."""

    def __init__(
        self, lane: str, *fail: tuple[str, int], hook: Callable[[str], None] | None = None
    ):
        self.fail = {f: RuntimeError(f"{f[0]} of trip {f[1]}") for f in fail}
        self.counts: dict[str, int] = {}
        self.hook = hook
        self.env, self.buf, self.log = Env(not lane.startswith("shard:slow")), [], []
        bind = {
            "act": self.counted("act", lambda obs, t: obs * 2 + t),
            "env_step": self.counted("env_step", lambda a, env: env.step(a)),
            "store": self.counted("store", lambda buf, t, obs: buf.append((t, obs))),
            "record": self.counted("record", lambda log, r: log.append(r)),
        }
        self.env.step = self.counted("env_step", self.env.step)  # type: ignore[method-assign]
        if lane.startswith(("thread", "stream")):
            bind["env_step"] = lambda a, env: env.step(a)
        program = parse(TEXT.replace("LANE", lane), bind)
        verify(program)
        self.emitted = emit(program)
        self.run = load(self.emitted)

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            trip = self.counts.get(name, 0)
            self.counts[name] = trip + 1
            if self.hook is not None:
                self.hook(name)
            if (name, trip) in self.fail:
                raise self.fail[name, trip]
            return function(*args)

        return call

    def __call__(self, runtime: Runtime, n: int = 5) -> Any:
        return self.run(runtime, 1, n, self.env, self.buf, self.log)


ORDER = ("act", "env_step", "store", "record")
#: ``stream:`` lanes run on the device's own streams, and on a stand-in that records their order.
LANES = ("thread:sim", "shard:env", "shard:slow", "stream:sim", "stream:recorded")


@contextmanager
def runtime_for(lane: str) -> Iterator[Runtime]:
    if lane != "stream:recorded":
        yield Runtime()
        return
    with RecordingStreams() as streams:
        yield Runtime(streams=streams)
    streams.check()


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("rose ")}


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("trip", [0, 2, 4])
@pytest.mark.parametrize("name", ORDER)
def test_one_operation_raises(name: str, trip: int, lane: str) -> None:
    before = threads()
    world = World(lane, (name, trip))
    with runtime_for(lane) as runtime, pytest.raises(RuntimeError) as caught:
        world(runtime)
    assert caught.value is world.fail[name, trip]
    # what comes first in program order has been done, on every trip
    done = {n: trip + (ORDER.index(n) < ORDER.index(name)) for n in ORDER}
    states = {"store": len(world.buf), "record": len(world.log)}
    ahead = {n: states[n] - done[n] for n in states if n != name}
    assert all(0 <= n <= 1 for n in ahead.values())
    where, *rest = caught.value.__notes__
    assert re.fullmatch(rf"rose: raised by {name}, line \d+ of the emitted <rose:ppo.*>", where)
    number = int(re.findall(r"line (\d+)", where)[0])
    assert name in world.emitted.source.splitlines()[number - 1]
    told = "; ".join(rest)
    assert "behind" not in told
    assert ("buf by 1 write" in told) is (ahead.get("store") == 1)
    assert threads() <= before


@pytest.mark.parametrize("lane", LANES)
def test_of_two_that_raise_the_first_in_program_order_is_reported(lane: str) -> None:
    # the step is issued first and fails on its lane; the store fails on the coordinator meanwhile
    world = World(lane, ("env_step", 2), ("store", 2))
    with runtime_for(lane) as runtime, pytest.raises(RuntimeError) as caught:
        world(runtime)
    assert caught.value is world.fail["env_step", 2]
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None
    # here the operation of the earlier trip had not been issued when the later one failed
    world = World(lane, ("record", 1), ("act", 2))
    with runtime_for(lane) as runtime, pytest.raises(RuntimeError) as caught:
        world(runtime)
    assert caught.value is world.fail["record", 1]


def test_the_runtime_goes_on_working_after_a_fault() -> None:
    runtime = Runtime()
    world = World("thread:sim", ("env_step", 1))
    with pytest.raises(RuntimeError):
        world(runtime)
    world.fail.clear()
    world.env.v = 0
    world.log.clear()
    assert world(runtime, 3) == world.log[-1] == 23
    runtime.close()


def test_serial_runs_fail_alike() -> None:
    world = World("thread:sim", ("env_step", 2))
    with pytest.raises(RuntimeError) as caught:
        world(Runtime(serial=True))
    assert caught.value is world.fail["env_step", 2]
    assert len(world.log) == 2


def test_an_interrupt_ends_in_one_interrupt() -> None:
    before = threads()
    started = threading.Event()

    def hook(name: str) -> None:
        if name == "env_step":
            started.set()
            time.sleep(0.2)

    world = World("thread:sim", ("env_step", 0), hook=hook)
    threading.Thread(target=lambda: (started.wait(), _thread.interrupt_main())).start()
    with pytest.raises(KeyboardInterrupt):
        world(Runtime())
    assert threads() <= before


def test_a_time_limit_ends_the_run_and_says_which_lane() -> None:
    release = threading.Event()
    world = World("thread:sim", hook=lambda n: n == "env_step" and release.wait() and None)
    with within(5), pytest.raises(HostTimeout, match="lane 'thread:sim'") as caught:
        world(Runtime(timeout=0.1))
    assert any("lane thread:sim did not come to rest" in n for n in caught.value.__notes__)
    release.set()


def test_the_traceback_shows_the_operation() -> None:
    world = World("thread:sim", ("env_step", 1))
    with pytest.raises(RuntimeError) as caught:
        world(Runtime())
    shown = "".join(traceback.format_exception(caught.value))
    assert "env_step_task.wait()" in shown
    assert "raise self.fail[name, trip]" in shown


NESTED = """
@op(reads=[], writes=["a"])
def put(a, t): ...

@op(reads=[], writes=["b"])
def deep(b, t, k): ...

@op(reads=[], writes=["c"])
def late(c, t): ...

@op(reads=[], writes=["d"])
def beside(d, t): ...

@program(stage="scheduled")
def nest(n, *, a, b, c, d):
    for t in outer(0, n, 1):
        put(a, t) @ lane(order=0)
        beside(d, t) @ lane("thread:x", order=1)
        for k in inner(0, 3, 1) @ lane(order=2):
            deep(b, t, k)
        late(c, t) @ lane(stage=1, order=3)
    return n
"""


@pytest.mark.parametrize("failing", ["deep", "beside"])
def test_a_fault_inside_an_inner_loop(failing: str) -> None:
    done: dict[str, list[Any]] = {"a": [], "b": [], "c": [], "d": []}

    def put(state: list[Any], *at: int) -> None:
        state.append(at)

    def deep(state: list[Any], t: int, k: int) -> None:
        if failing == "deep" and (t, k) == (2, 1):
            raise ValueError("deep")
        state.append((t, k))

    def beside(state: list[Any], t: int) -> None:
        if failing == "beside" and t == 2:
            raise ValueError("beside")
        state.append(t)

    program = parse(NESTED, {"put": put, "deep": deep, "late": put, "beside": beside})
    verify(program)
    runtime = Runtime()
    with pytest.raises(ValueError, match=failing) as caught:
        load(emit(program))(runtime, 4, *done.values())
    # the late operation of trip 1 was put off to trip 2, behind the loop that failed
    assert done["c"] == [(0,), (1,)]
    assert [t for (t,) in done["a"]] == ([0, 1, 2] if failing == "deep" else [0, 1, 2, 3])
    assert "behind" not in " ".join(caught.value.__notes__)
    if failing == "deep":
        assert done["b"] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]
        assert done["d"] == [0, 1, 2]
        assert caught.value.__notes__[1:] == ["rose: every other state is as eager order left it"]
    else:
        assert "rose: ahead of eager order: a by 1 write, b by 1 write" in caught.value.__notes__


class Hung:
    """A lane that does not come to rest, on a clock of its own."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.failed: list[Any] = []
        self.skipped: list[Any] = []

    def settle(self, grace: float) -> bool:
        self.clock[0] += grace
        return False


def test_lanes_that_hang_have_one_grace_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(support, "perf_counter", lambda: clock[0])
    runtime = Runtime()
    runtime._lanes = {f"stream:{k}": Hung(clock) for k in range(6)}  # type: ignore[misc]
    error = RuntimeError("the coordinator's own")
    runtime.fault(error, FaultMap("nowhere", (), (), {}))
    assert clock[0] <= 100.0 + support.GRACE + 6 * support.LEAST_S
    assert len([n for n in error.__notes__ if "did not come to rest" in n]) == 6
    runtime._lanes = {f"stream:{k}": Hung(clock) for k in range(6)}  # type: ignore[misc]
    clock[0] = 200.0
    monkeypatch.setattr(Runtime, "close", lambda self: None)
    runtime.drain()
    assert clock[0] <= 200.0 + support.GRACE + 6 * support.LEAST_S


@pytest.mark.parametrize("make", [remote.ComponentLane, lambda name: remote.HostLane(name, None)])
def test_calls_that_hang_have_one_grace_together(
    make: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(remote, "perf_counter", lambda: clock[0])

    class Call:
        error = limit = None

        def receive(self, timeout: float) -> None:
            clock[0] += timeout

    lane = make("host:judge")
    lane._running = [Call(), Call()]
    lane.settle(4.0)
    assert clock[0] == 4.0


def test_a_call_that_takes_longer_than_it_may_has_failed_also_while_settling() -> None:
    """With a grace that is longer, and with one that ends before."""

    class Host:
        timeout = 0.5

        def submit(self, method: str) -> str:
            return method

        def wait(self, ticket: str, timeout: float) -> None:
            waits.append(timeout)
            raise late("host:judge", timeout)

    waits: list[float] = []
    for grace, failed in ((5.0, True), (0.2, False)):
        waits.clear()
        lane = remote.HostLane("host:judge", Host())
        task = lane.submit(0, "score")
        assert lane.settle(grace) is failed
        assert lane.failed == ([task] if failed else [])
        assert waits == [pytest.approx(min(0.5, grace), abs=0.1)]
    lane = remote.HostLane("host:judge", Host(), timeout=0.3)
    lane.submit(0, "score")
    assert lane.settle(5.0)
    assert waits[1:] == [pytest.approx(0.3, abs=0.01)]


def test_a_shard_that_is_left_in_a_step_is_lost() -> None:
    class Shard:
        native_async = True
        said = ""

        def __init__(self) -> None:
            self.gate = threading.Event()

        def step_async(self, action: int) -> None:
            pass

        def step_wait(self) -> int:
            self.gate.wait(30)
            return 1

        def give_up(self, error: BaseException) -> None:
            self.said = str(error)

    shard = Shard()
    lane = remote.ShardLane("shard:0")
    lane.step(0, shard, 1)
    assert not lane.settle(0.01)
    assert not shard.said
    lane.abandon()
    assert "shard:0" in shard.said
    shard.gate.set()
