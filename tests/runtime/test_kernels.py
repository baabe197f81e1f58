"""The GPU's activity from recorded kernel events, and NVML's check, on stand-ins for both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rose_compiler.base.profile import Activity
from rose_compiler.runtime.kernels import (
    Check,
    Kernel,
    KernelTrace,
    Nvml,
    agrees,
    busy_sms,
    compared,
    parse_kernels,
    sm_share,
)


def event(ts: float, dur: float, cat: str = "kernel", **more: Any) -> dict[str, Any]:
    """An event in the shape in which torch.profiler exports kernels."""
    known = {
        "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": 4732,
        "registers per thread": 40, "shared memory": 0, "blocks per SM": 4.0,
        "warps per SM": 64.0, "grid": [528, 1, 1], "block": [512, 1, 1],
        "est. achieved occupancy %": 100,
    }  # fmt: skip
    args = {**known, **{k.replace("_", " "): v for k, v in more.items()}}
    return {"ph": "X", "cat": cat, "name": "k", "pid": 0, "tid": 7, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


TRACE = {
    "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    "traceEvents": [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 90.0, "dur": 5.0},
        event(300.0, 50.0, cat="gpu_memcpy"),
        event(100.0, 100.0, blocks_per_SM=0.5, stream=7),
        event(150.0, 100.0, blocks_per_SM=0.25, stream=9),
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ],
}


def test_kernels_are_read_from_a_trace() -> None:
    found = parse_kernels(TRACE)
    assert [(k.stream, k.share) for k in found] == [(7, 0.5), (9, 0.25), (7, 0.0)]
    assert found[0].start_s == pytest.approx(1_700_000_000.0001, abs=1e-6)
    assert found[0].end_s - found[0].start_s == pytest.approx(100e-6, abs=1e-6)
    assert parse_kernels({"traceEvents": []}) == []


@pytest.mark.parametrize(
    ("known", "share"),
    [
        ({"blocks per SM": 0.25}, 0.25),
        ({}, 1.0),
        ({"blocks per SM": 2.0}, 1.0),
        # three blocks fit at once: 4.7 blocks are two waves, the second one not full
        ({"blocks per SM": 4.5, "occupancy": {"activeBlocksPerMultiprocessor": 3}}, 0.75),
        ({"blocks per SM": 3.0, "occupancy": {"activeBlocksPerMultiprocessor": 3}}, 1.0),
        # 16 warps a block and all 64 held: four at once
        ({"blocks per SM": 6.0, "block": [512, 1, 1], "est. achieved occupancy %": 100}, 0.75),
        # half of the warps held, for want of registers: two at once
        ({"blocks per SM": 3.0, "block": [512, 1, 1], "est. achieved occupancy %": 50}, 0.75),
        # all blocks are resident at once: the occupancy is what they make of it
        ({"blocks per SM": 1.5, "block": [64, 1, 1], "est. achieved occupancy %": 5}, 1.0),
    ],
)
def test_the_share_of_sms_follows_from_grid_and_waves(known: dict[str, Any], share: float) -> None:
    assert sm_share(known) == pytest.approx(share)


def test_overlapping_kernels_add_up_to_all_sms_at_most() -> None:
    kernels = [
        Kernel("a", 0, 7, 1.0, 3.0, 0.5),
        Kernel("b", 0, 9, 2.0, 4.0, 0.75),
        Kernel("copy", 0, 9, 5.0, 6.0, 0.0),
        Kernel("elsewhere", 1, 7, 0.0, 9.0, 1.0),
    ]
    found = busy_sms(kernels, 0.0, 7.0)
    assert [(a.start_s, a.end_s, a.share, a.resident) for a in found] == [
        (0.0, 1.0, 0.0, False),
        (1.0, 2.0, 0.5, True),
        (2.0, 3.0, 1.0, True),
        (3.0, 4.0, 0.75, True),
        (4.0, 5.0, 0.0, False),
        (5.0, 6.0, 0.0, True),
        (6.0, 7.0, 0.0, False),
    ]
    assert {a.device for a in found} == {"cuda:0"}
    assert busy_sms([], 0.0, 1.0) == [Activity(0.0, 1.0, "cuda:0", 0.0, resident=False)]


def test_kernel_times_are_brought_to_the_program_s_clock() -> None:
    made = KernelTrace(available=lambda: True)
    made.take(TRACE, ahead=1_700_000_000.0)
    assert [k.start_s for k in made.kernels] == pytest.approx([1e-4, 1.5e-4, 3e-4], abs=1e-6)
    assert made.why is None


def test_a_trace_without_kernels_or_without_a_clock_is_not_used() -> None:
    made = KernelTrace(available=lambda: True)
    made.take({"baseTimeNanoseconds": 5, "traceEvents": [event(1, 1, cat="gpu_memcpy")]}, 0.0)
    assert (made.kernels, made.why) == ([], "the profiler saw no kernel")
    made.take({"traceEvents": TRACE["traceEvents"]}, 0.0)
    assert made.kernels == []
    assert "count from" in str(made.why)


def test_nothing_is_traced_without_a_device() -> None:
    with KernelTrace(available=lambda: False) as made:
        pass
    assert (made.kernels, made.why) == ([], "there is no CUDA device")


class FakeNvml:
    """The calls of pynvml that are used, as its documentation has them."""

    NVML_GPM_METRICS_GET_VERSION = 1
    NVML_GPM_METRIC_SM_UTIL = 2

    def __init__(self, *, gpm: bool = True, code: int = 0, broken: bool = False) -> None:
        self.gpm, self.code, self.broken = gpm, code, broken
        self.samples = 0
        self.freed = 0
        self.down = 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise RuntimeError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        self.down += 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"gpu {index}"

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(version=1, isSupportedDevice=int(self.gpm))

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples += 1
        return SimpleNamespace(number=self.samples)

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> None:
        sample.of = handle

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.freed += 1

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        metric = SimpleNamespace(metricId=0, value=0.0, nvmlReturn=1)
        return SimpleNamespace(metrics=[metric])

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert (asked.version, asked.numMetrics, asked.metrics[0].metricId) == (1, 1, 2)
        assert (asked.sample1.number, asked.sample2.number) == (1, 2)
        asked.metrics[0].value, asked.metrics[0].nvmlReturn = 62.5, self.code

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=80, memory=10)


def test_gpm_is_read_where_the_device_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvml, "LEAST_S", 0.0)
    fake = FakeNvml()
    with Nvml(module=fake) as nvml:
        pass
    assert nvml.check == Check(0.625, "gpm")
    assert (fake.samples, fake.freed, fake.down) == (2, 2, 1)


def test_plain_utilization_stands_in_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with Nvml(module=FakeNvml()) as nvml:
        pass
    assert nvml.check == Check(0.8, "utilization"), "a block shorter than 100 ms"
    monkeypatch.setattr(Nvml, "LEAST_S", 0.0)
    with Nvml(module=FakeNvml(gpm=False)) as nvml:
        pass
    assert nvml.check == Check(0.8, "utilization")


def test_a_failing_nvml_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvml, "LEAST_S", 0.0)
    with Nvml(module=FakeNvml(broken=True)) as nvml:
        pass
    assert nvml.check is None
    assert nvml.why == "NVML can't be used: Driver Not Loaded"
    fake = FakeNvml(code=3)
    with Nvml(module=fake) as nvml:
        pass
    assert (nvml.check, nvml.why) == (None, "NVML can't be used: GPM answers 3")
    assert fake.freed == 2


def test_kernels_and_nvml_are_compared_by_what_each_tells() -> None:
    activity = [
        Activity(0.0, 1.0, "cuda:0", 0.5),
        Activity(1.0, 2.0, "cuda:0", 0.0, resident=False),
    ]
    assert agrees(activity, Check(0.3, "gpm"))
    assert not agrees(activity, Check(0.5, "gpm"))
    assert agrees(activity, Check(0.5, "utilization"))
    assert not agrees(activity, Check(0.2, "utilization"))
    assert not agrees([], Check(0.0, "gpm"))


def test_the_comparison_is_one_line() -> None:
    activity = [Activity(0.0, 1.0, "cuda:0", 0.5)]
    nvml = Nvml(module=FakeNvml())
    nvml.check = Check(0.9, "gpm")
    said = "kernels keep 50% of the SMs busy"
    assert compared(activity, None, nvml) == (
        f"{said}; NVML (gpm) does not agree: 90% of the SMs busy"
    )
    nvml.check = Check(0.95, "utilization")
    assert compared(activity, None, nvml) == (
        f"{said}; NVML (utilization) agrees: 95% of the time with some kernel"
    )
    nvml.check, nvml.why = None, "nvidia-ml-py is not installed"
    assert compared(activity, None, nvml) == f"{said}; nvidia-ml-py is not installed"
    assert compared([], "the profiler saw no kernel", nvml) == (
        "no kernels: the profiler saw no kernel"
    )


@pytest.mark.gpu
def test_a_real_device_s_kernels_are_seen() -> None:
    import torch

    x = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with Nvml() as nvml, KernelTrace() as trace:
        for _ in range(200):
            x = torch.tanh(x @ x)
    assert trace.why is None, trace.why
    assert len(trace.kernels) >= 400
    assert all(0.0 <= k.share <= 1.0 for k in trace.kernels)
    assert nvml.check is not None, nvml.why
