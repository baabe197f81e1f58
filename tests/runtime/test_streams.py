"""Device streams as lanes, on the CPU and on a stand-in that finds what is not ordered."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rose_compiler.runtime.events import DeviceThreadLane, StreamLane, TorchStreams
from rose_compiler.runtime.held import Held, inside, looked, tensors
from rose_compiler.runtime.lanes import ThreadLane, ThreadTask
from rose_compiler.runtime.recording import RaceFound, RecordingStreams
from rose_compiler.runtime.support import Runtime


def test_on_the_cpu_a_stream_lane_computes() -> None:
    lane = StreamLane("stream:a", TorchStreams("cpu"), priority=-1)
    task = lane.submit(0, torch.add, torch.ones(2), 1)
    assert torch.equal(task.wait(), torch.full((2,), 2.0))
    assert lane.submit(0, lambda x: x * 2, lane.submit(0, torch.ones, 2)).wait().sum() == 4
    assert lane.settle(None)


def test_tensors_of_a_nested_value() -> None:
    a, b = torch.zeros(1), torch.ones(1)
    assert [id(t) for t in tensors((a, [1, {"x": b}], "s"))] == [id(a), id(b)]


def two_lanes(streams: Any) -> torch.Tensor:
    """Two lanes work on one input; the coordinator joins them."""
    a, b = StreamLane("stream:a", streams), StreamLane("stream:b", streams)
    x = torch.ones(4) * 3
    first, second = a.submit(0, torch.square, x), b.submit(1, torch.neg, x)
    return first.wait() + second.wait()


def test_lanes_order_what_crosses_them() -> None:
    with RecordingStreams() as streams:
        result = two_lanes(streams)
    streams.check()
    assert torch.equal(result, torch.full((4,), 6.0))
    assert [s for s, _ in streams.issued] == [0, 0, 1, 2, 0]


class NoWait(RecordingStreams):
    """Every wait of the lanes, or of the coordinator, is lost."""

    def __init__(self, lost_on_lanes: bool) -> None:
        super().__init__()
        self.lost_on_lanes = lost_on_lanes

    def wait(self, stream: int, event: dict[int, int]) -> None:
        if (stream != 0) is not self.lost_on_lanes:
            super().wait(stream, event)


class NoRecord(RecordingStreams):
    """Nothing is recorded on another stream than its own."""

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        pass


@pytest.mark.parametrize(
    ("streams", "complaint"),
    [
        (NoWait(True), "square.* on stream 1 does not wait for aten.mul"),
        (NoWait(False), "add.* on the coordinator's stream does not wait for aten.*square|pow"),
        (NoRecord(), "uses memory of .* without record_stream"),
    ],
    ids=["no wait on the lane", "no wait on the coordinator", "no record_stream"],
)
def test_a_planted_fault_is_found(streams: RecordingStreams, complaint: str) -> None:
    with streams:
        two_lanes(streams)
    with pytest.raises(RaceFound, match=complaint.replace("square", "(square|pow)")):
        streams.check()


def test_a_write_waits_for_reads_on_other_streams() -> None:
    def reads_then_write(waits: bool) -> None:
        with RecordingStreams() as streams:
            x = torch.ones(4)
            task = StreamLane("stream:a", streams).submit(0, torch.neg, x)
            if waits:
                task.wait()
            x.add_(1)
        streams.check()

    reads_then_write(True)
    with pytest.raises(RaceFound, match=r"add_.* does not wait for aten.neg"):
        reads_then_write(False)


def test_synchronizing_orders_everything_behind_it() -> None:
    with RecordingStreams() as streams:
        x = torch.ones(4)
        lane = StreamLane("stream:a", streams)
        task = lane.submit(0, torch.neg, x)
        lane.settle(None)
        x.add_(1)
        streams.keep(task.value, 0)
        task.value.sum()
    streams.check()


class Noted(RecordingStreams):
    """Notes what is asked, by whom."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def wait(self, stream: int, event: dict[int, int]) -> None:
        self.asked.append(f"{stream} waits")
        super().wait(stream, event)

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        self.asked.append(f"{stream} keeps")
        super().keep(tensor, stream)


def test_a_thread_issues_to_a_stream_of_its_own() -> None:
    streams = Noted()
    runtime = Runtime(streams=streams)
    lane = runtime.lane("thread:a")
    seen: list[int] = []

    def work(x: torch.Tensor) -> torch.Tensor:
        seen.append(streams.current())
        return x * 2

    task = lane.submit(0, work, torch.ones(2))
    assert torch.equal(task.wait(), torch.full((2,), 2.0))
    assert seen == [1]
    assert streams.current() == 0
    assert streams.asked == ["1 waits", "1 keeps", "0 waits", "0 keeps"]
    task.wait()
    assert len(streams.asked) == 4  # once is enough
    failing = lane.submit(1, lambda x: x.nothing, torch.ones(2))
    with pytest.raises(AttributeError):
        failing.wait()
    assert lane.settle(1.0)
    runtime.close()


def test_a_thread_has_no_stream_where_there_is_no_device() -> None:
    runtime = Runtime()
    assert type(runtime.lane("thread:a")) is ThreadLane
    lane = runtime.lane("thread:a")
    runtime.on("cpu")
    assert runtime.lane("thread:a") is lane
    runtime.close()


def test_the_host_waits_only_for_what_nobody_waited_for() -> None:
    class Blocking(RecordingStreams):
        blocked = 0

        def synchronize(self, stream: int) -> None:
            self.blocked += 1
            super().synchronize(stream)

    streams = Blocking()
    lane = StreamLane("stream:a", streams)
    lane.submit(0, torch.ones, 2)
    lane.submit(1, torch.ones, 2).wait()  # and so for the one before
    lane.settle(None)
    assert streams.blocked == 0
    lane.submit(2, torch.ones, 2)
    lane.settle(None)
    assert streams.blocked == 1


def test_casts_of_weights_do_not_cross_streams() -> None:
    lane = StreamLane("stream:a", RecordingStreams())
    before = torch.is_autocast_cache_enabled()
    assert lane.submit(0, torch.is_autocast_cache_enabled).wait() is False
    assert torch.is_autocast_cache_enabled() is before


def test_a_lane_is_lent_another_stream_between_two_runs() -> None:
    streams = RecordingStreams()
    runtime = Runtime(streams=streams)
    lane = runtime.lane("stream:a")
    assert isinstance(lane, StreamLane)
    lent = streams.stream()
    with streams:
        x = torch.ones(4)
        first = lane.submit(0, torch.neg, x).wait()
        runtime.drain()
        runtime.lend({"stream:a": lent})
        second = lane.submit(0, torch.mul, first, x).wait()
        runtime.drain()
        runtime.lend({})
        third = lane.submit(0, torch.add, second, x).wait()
    streams.check()
    assert third.sum() == 0
    assert [s for s, _ in streams.issued][:4] == [0, lane.own, lent, lane.own]
    runtime.lend({"stream:b": lent})
    assert runtime.lane("stream:b").stream == lent  # type: ignore[attr-defined]
    runtime.on("meta")  # the streams are somebody's own, so the device is theirs
    assert runtime.lane("stream:b").stream == lent  # type: ignore[attr-defined]
    runtime.close()


def object_given(streams: RecordingStreams, kind: Callable[..., Any]) -> None:
    """A lane reads what an object holds; the coordinator lets go of that, and allocates."""
    lane = kind("a", streams)

    def work(box: SimpleNamespace) -> None:
        with streams:
            box.x.neg()

    with streams:
        box = SimpleNamespace(x=torch.ones(4))
        task = lane.submit(0, work, box)
        if isinstance(task, ThreadTask):
            task.arrived(None)  # all is issued, and nobody's stream waits for it
        del box
        torch.zeros(4)
        lane.settle(None)
        torch.zeros(4)
    lane.close()


def object_made(streams: RecordingStreams, wrap: Callable[[torch.Tensor], Any]) -> None:
    """The coordinator reads what an object holds that a thread made, and lets go of it, while the
    thread has more to do."""
    lane, go = DeviceThreadLane("a", streams), threading.Event()

    def make() -> Any:
        with streams:
            return wrap(torch.ones(4))

    def more() -> None:
        go.wait()
        with streams:
            torch.zeros(4)

    with streams:
        task = lane.submit(0, make)
        made = task.wait()
        following = lane.submit(1, more)
        (made() if callable(made) else made.x).neg()
        del made, task
        go.set()
        following.wait()
        lane.settle(None)
        lane.submit(2, more).wait()
    lane.close()


@pytest.mark.parametrize(
    ("run", "how"),
    [
        (object_given, StreamLane),
        (object_given, DeviceThreadLane),
        (object_made, lambda x: SimpleNamespace(x=x)),
        (object_made, lambda x: lambda: x),
    ],
    ids=["given to a stream", "given to a thread", "made by a thread", "made, and closed"],
)
def test_what_an_object_holds_is_not_let_go_early(
    run: Callable[..., None], how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = RecordingStreams()
    run(streams, how)
    streams.check()
    monkeypatch.setattr(Held, "given", lambda *_: None)
    monkeypatch.setattr(Held, "made", lambda *_: None)
    monkeypatch.setattr("rose_compiler.runtime.events.inside", lambda value: ([], True))
    streams = RecordingStreams()
    run(streams, how)
    with pytest.raises(RaceFound, match="without record_stream"):
        streams.check()


def test_what_is_held_is_let_go_when_the_stream_is_through() -> None:
    held, happened = Held(), set[int]()
    streams: Any = SimpleNamespace(happened=happened.__contains__)
    held.given(looked([SimpleNamespace(), torch.ones(1), 3, [{"x": None}]])[1], 1, streams)
    assert [len(kept) for _, kept in held._given] == [1]
    held.given(looked([torch.ones(1)])[1], 2, streams)
    assert len(held._given) == 1
    happened.add(1)
    held.given([], 3, streams)
    assert not held._given


def test_objects_are_looked_into_as_far_as_that_goes() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    normal = torch.distributions.Normal(x, y, validate_args=False)
    assert {id(t) for t in inside([normal, {"n": 3}])[0]} >= {id(x), id(y)}
    deep = SimpleNamespace(a=SimpleNamespace(b=(x, {"c": y})))
    found, whole = inside(deep)
    assert (len(found), whole) == (2, True)
    assert not inside(lambda: x)[1]
    assert not inside(torch.nn.Linear(1, 1))[1]
    assert not inside([SimpleNamespace(k=k) for k in range(2000)])[1]
    assert [bool(looked(v)[1]) for v in (x, (x, [1.0]), {"a": x}, deep, torch.Size([1]))] == [
        *(False, False, False, True, False)
    ]
    long = tuple(torch.ones(1) for _ in range(2000))
    assert looked((long,))[1][0] is long, "what can't change is held as it is"
    (copied,) = looked([*long])[1]
    assert copied == [*long]


class Drawn(Mapping[str, torch.Tensor]):
    """Its items are made when somebody asks for them, some of them in vain."""

    def __getitem__(self, key: str) -> torch.Tensor:
        if key == "b":
            raise OSError("no such shard")
        return torch.rand(4)

    def __iter__(self) -> Iterator[str]:
        return iter("ab")

    def __len__(self) -> int:
        return 2


class Guarded(list[torch.Tensor]):
    """Nobody may go through it."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        raise OSError("no such shard")


@pytest.mark.parametrize("kind", [StreamLane, DeviceThreadLane])
def test_no_code_of_what_is_handed_over_is_run(kind: Any) -> None:
    torch.manual_seed(0)
    expected = torch.rand(4), torch.rand(4)
    torch.manual_seed(0)
    lane, drawn, guarded = kind("a", RecordingStreams()), Drawn(), Guarded([torch.ones(1)])
    found = [lane.submit(0, lambda m: m["a"], drawn).wait() for _ in range(2)]
    assert all(map(torch.equal, found, expected))
    assert lane.submit(1, lambda v: v[0], guarded).wait() is guarded[0]
    assert lane.submit(2, lambda *_: (drawn, guarded)).wait()[0] is drawn
    lane.close()
    assert looked((drawn, guarded))[1] == [drawn, guarded]


def test_what_holds_itself_is_looked_at_once() -> None:
    loop: list[Any] = [torch.ones(1)]
    loop.append({"loop": loop})
    assert [len(part) for part in looked(loop)] == [1, 0]
    assert [len(loop), inside(loop)[1]] == [2, True]


def test_arrays_of_objects_may_hold_tensors() -> None:
    held = np.empty(1, object)
    held[0] = torch.ones(1)
    rows = np.zeros(1, [("n", int), ("x", object)])
    for value in (held, rows, rows[0]):
        assert len(looked((value,))[1]) == 1
        assert not inside((value,))[1]
    for value in (np.ones(3), np.zeros(1, [("n", int)]), np.float32(1)):
        assert looked((value,)) == ([], [])
        assert inside((value,))[1]


def test_a_long_buffer_is_not_gone_through_for_each_task() -> None:
    streams, x = Noted(), torch.ones(1)
    lane = StreamLane("stream:a", streams)
    for value in (deque([x] * 5000), [deque([x] * 600) for _ in range(9)], deque([1.0] * 5000)):
        streams.asked.clear()
        lane.submit(0, len, value).wait()
        assert streams.asked.count("1 keeps") <= 1000
        found, whole = inside(value)
        assert not whole
        assert len(found) <= 1


@pytest.mark.parametrize("kind", [StreamLane, DeviceThreadLane])
@pytest.mark.parametrize("others", [0, 2000], ids=["short", "long"])
@pytest.mark.parametrize("where", ["lane", "coordinator"])
def test_what_is_taken_out_of_a_buffer_is_not_let_go_early(
    kind: Any, others: int, where: str
) -> None:
    """By the lane's own task, or behind it; in a container that is looked through, or held."""
    streams = RecordingStreams()
    lane = kind("a", streams)

    def work(buffer: deque[Any]) -> None:
        with streams:
            buffer[0].neg()
        if where == "lane":
            buffer.popleft()

    with streams:
        buffer = deque([torch.ones(4), *[None] * others])
        task = lane.submit(0, work, buffer)
        if isinstance(task, ThreadTask):
            task.arrived(None)
        buffer.clear()
        torch.zeros(4)
        lane.settle(None)
        torch.zeros(4)
    lane.close()
    streams.check()


def test_a_thread_that_ends_waits_for_its_stream() -> None:
    class Blocking(RecordingStreams):
        blocked = 0

        def synchronize(self, stream: int) -> None:
            self.blocked += 1
            super().synchronize(stream)

    streams = Blocking()
    lane = DeviceThreadLane("a", streams)
    lane.submit(0, len, [SimpleNamespace()])
    lane.close()
    assert streams.blocked == 1
    assert not lane.held._given
    lane.submit(1, torch.ones, 2).wait()  # it starts anew
    lane.close()
    assert streams.blocked == 1, "the coordinator's stream waits for it already"
