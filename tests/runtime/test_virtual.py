"""The virtual device against the model in simulated time. Device times are compared, not this
process's: all work of a test is queued behind a gate, and then follows without a gap."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from rose_compiler.base.errors import QuotaError, RuntimeFault
from rose_compiler.base.gpu import Group, Kernel, VirtualGpu, simulate_gpu
from rose_compiler.base.machine import Machine
from rose_compiler.runtime.events import StreamLane
from rose_compiler.runtime.support import Runtime
from rose_compiler.runtime.virtual import VirtualDevice, VirtualEvent, Work, component

GPU = Machine("gpu", cores=4, sms=128, sm_granularity=8, switch_s=0.0)


class Gate(VirtualEvent):
    """An event that happens when the test says so."""

    def open(self, device: VirtualDevice) -> None:
        with device._changed:
            device._advance(device._clock())
            self.happened = True
            device._take_heads()
            device._changed.notify_all()


def in_real_time(kernels: Sequence[Kernel], gpu: VirtualGpu) -> dict[str, tuple[float, float]]:
    """Starts and ends from the first start, on streams named as the kernels' lanes."""
    with VirtualDevice(gpu) as device:
        streams = {"stream0", device.stream(), device.stream()}
        assert {k.lane for k in kernels} <= streams
        gate = Gate()
        for stream in streams:
            device.wait(stream, gate)
        done: dict[str, VirtualEvent] = {}
        for k in kernels:
            for name in k.after:
                device.wait(k.lane, done[name])
            with device.use(k.lane):
                device.launch(Work(k.work_s, k.demand, k.serial, k.bandwidth, k.grain, k.name))
            done[k.name] = device.record(k.lane)
        gate.open(device)
        for event in done.values():
            device.reach(event)
        run = device.record_of_run
    first = min(run.start.values())
    return {name: (run.start[name] - first, run.end[name] - first) for name in run.start}


GRAPH = [
    Kernel("a", "stream0", 0.010, 96, serial=0.2),
    Kernel("b", "stream1", 0.020, 64, bandwidth=0.8),
    Kernel("c", "stream0", 0.005, 128, ("b",), bandwidth=0.6),
    Kernel("d", "stream2", 0.008, 32, ("a",), grain=3.0),
    Kernel("e", "stream1", 0.004, 128),
    Kernel("f", "stream2", 0.006, 64, ("c", "e")),
]


@pytest.mark.parametrize(
    "gpu",
    [
        VirtualGpu(GPU),
        VirtualGpu(GPU, priority={"stream1": -1}),
        VirtualGpu(GPU, (Group("p", "p"), Group("q", "q")), {"stream1": "p", "stream2": "q"}),
        VirtualGpu(GPU, (Group("p", "p", 40),), {"stream1": "p"}, mps=True),
        VirtualGpu(GPU, (Group("g", sms=48, exclusive=True),), {"stream1": "g"}),
    ],
    ids=["shared", "priority", "turns", "percentage", "exclusive"],
)
def test_kernels_start_and_end_as_in_simulated_time(gpu: VirtualGpu) -> None:
    found = in_real_time(GRAPH, gpu)
    expected = simulate_gpu(GRAPH, gpu)
    for name, (start, end) in found.items():
        assert start == pytest.approx(expected.start[name], abs=1e-9)
        assert end == pytest.approx(expected.end[name], abs=1e-9)


def test_the_executor_s_lanes_run_on_it() -> None:
    with VirtualDevice(VirtualGpu(GPU)) as device:
        runtime = Runtime(streams=device)
        lane = runtime.lane("stream:sim")
        assert isinstance(lane, StreamLane)
        step = component(device, Work(0.004, 64, name="step"), result="observation")
        act = component(device, Work(0.002, 64, name="act"), result="action")
        task = lane.submit(0, step)
        assert act() == "action"  # on the coordinator's stream, beside the step
        assert task.wait() == "observation"
        late = component(device, Work(0.001, 64, name="late"))
        late()
        device.synchronize(device.current())
        run = device.record_of_run
        runtime.close()
    assert run.end["step"] - run.start["step"] == pytest.approx(0.004)
    assert run.start["late"] >= run.end["step"]  # the coordinator's stream waited
    assert 0 < run.activity < 1


def test_a_lane_s_priority_is_its_stream_s() -> None:
    with VirtualDevice(VirtualGpu(GPU, priority={"stream2": 3})) as device:
        first, second = device.stream(-1), device.stream(-1)
        assert device.gpu.priority == {first: -1, second: 3}


def test_each_thread_has_its_own_current_stream() -> None:
    with VirtualDevice(VirtualGpu(GPU)) as device:
        side = device.stream()
        seen: list[str] = []
        with device.use(side):
            thread = threading.Thread(target=lambda: seen.append(device.current()))
            thread.start()
            thread.join()
            assert device.current() == side
        assert seen == ["stream0"]
        assert device.current() == "stream0"


def test_kernels_of_one_name_are_told_apart() -> None:
    with VirtualDevice(VirtualGpu(GPU)) as device:
        gate = Gate()
        for stream in (device.stream(), device.stream()):
            device.wait(stream, gate)
            with device.use(stream):
                device.launch(Work(0.01, demand=128, name="step"))
        gate.open(device)
        for stream in ("stream1", "stream2"):
            device.synchronize(stream)
        run = device.record_of_run
    assert set(run.end) == {"step", "step 2"}
    assert run.end["step 2"] - run.start["step"] == pytest.approx(0.02)  # they share


def test_a_kernel_that_never_has_an_sm_is_an_error() -> None:
    gpu = VirtualGpu(GPU, (Group("all", sms=128, exclusive=True),), {"stream1": "all"})
    with VirtualDevice(gpu) as device:
        device.launch(Work(0.01, demand=8))
        with pytest.raises(QuotaError, match="kernel 1 can't run"):
            device.synchronize("stream0")


def test_a_closed_device_refuses_and_lets_nobody_hang() -> None:
    device = VirtualDevice(VirtualGpu(GPU))
    device.launch(Work(3600.0, 1))
    event = device.record("stream0")
    errors: list[str] = []

    def wait() -> None:
        try:
            device.reach(event)
        except RuntimeFault as error:
            errors.append(error.code)

    thread = threading.Thread(target=wait)
    thread.start()
    device.close()
    thread.join(10)
    assert errors == ["fault-closed"]
    with pytest.raises(RuntimeFault, match="fault-closed"):
        device.launch(Work(1.0, 1))
    device.close()
