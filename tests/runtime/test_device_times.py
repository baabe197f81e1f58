"""When a device ran what was issued: kernels go to the operation that launched them."""

from __future__ import annotations

import pytest

from rose_compiler.base.profile import Span, Timeline
from rose_compiler.runtime.device_times import on_device
from rose_compiler.runtime.kernels import Kernel, parse_kernels


def kernel(launched: float | None, start: float, end: float, share: float = 0.5) -> Kernel:
    return Kernel("k", 0, 7, start, end, share, launched)


def test_an_operation_runs_from_its_first_kernel_to_its_last() -> None:
    issued = Timeline(
        (
            Span("act", "", 0.0, 0.1),
            Span("value", "stream:a", 0.1, 0.2),
            Span("nothing", "", 0.2, 0.3),
            Span("step", "shard:0", 0.0, 0.3),
        )
    )
    kernels = [
        kernel(10.05, 10.1, 11.1),
        kernel(10.06, 11.6, 12.1),
        kernel(10.15, 10.5, 13.5, share=0.2),
        kernel(10.9, 13.0, 14.0),  # launched by none of them
        kernel(None, 14.0, 15.0),
    ]
    found = on_device(issued, kernels, 10.0)
    assert found is not None
    act, value = found.spans
    assert (act.op, act.start_s, act.end_s) == ("act", pytest.approx(0.1), pytest.approx(2.1))
    assert act.activity == pytest.approx(0.5 * 1.5 / 2.0)
    assert (value.lane, value.duration_s) == ("stream:a", pytest.approx(3.0))
    assert on_device(issued, kernels[3:], 10.0) is None


def test_a_trace_says_when_a_kernel_was_launched() -> None:
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "cuda_runtime", "ts": 90.0, "args": {"correlation": 5}},
            {"ph": "X", "cat": "kernel", "ts": 100.0, "dur": 1.0, "args": {"correlation": 5}},
            {"ph": "X", "cat": "kernel", "ts": 102.0, "dur": 1.0, "args": {"correlation": 6}},
        ]
    }
    launched = [k.launched_s for k in parse_kernels(trace)]
    assert launched == [pytest.approx(90e-6), None]
