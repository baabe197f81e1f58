"""Device streams as lanes, on the CPU and on a stand-in that finds what is not ordered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rose_compiler.runtime.events import StreamLane, TorchStreams, tensors
from rose_compiler.runtime.recording import RaceFound, RecordingStreams


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
