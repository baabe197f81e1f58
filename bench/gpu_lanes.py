"""Checks of stream lanes on a device: streams lent to them, their device times, their quotas."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

import rose_compiler
from bench.gpu_lines import Line, disjoint, sms_used
from bench.gpu_loops import Sleeper, both, on_streams
from rose_compiler.base.machine import Machine
from rose_compiler.base.profile import Span, Timeline
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.kernels import scan_triton
from rose_compiler.runtime.device_times import STREAM
from rose_compiler.runtime.quotas import GreenContexts
from rose_compiler.runtime.support import Runtime

#: How far device times of two calls that take as long may differ, and how much of the shorter one
#: the other must run beside.
ALIKE, BESIDE = 1.25, 0.5
#: What a remark says of quotas of SMs that were compared.
_COMPARED = ("SMs by green contexts (", "streams without quotas of SMs:")


def lent(backend: GreenContexts, machine: Machine, device: str = "cuda") -> Line:
    """Lanes keep to the SMs of streams that they are lent, and have all of them on their own."""
    name = "lanes keep to the SMs of streams that they are lent"
    probe = backend.probe()
    if not probe.available:
        return Line(name, "absent", probe.why)
    if not scan_triton.available():
        return Line(name, "absent", "no Triton, which asks each block for its SM")
    groups = backend.groups(machine.chunk)
    whole = replace(machine, sms=groups * machine.chunk)
    lanes = {f"{STREAM}a": groups // 4, f"{STREAM}b": groups // 4}
    applied = backend.lasting(QuotaPlan.divide("green-context", whole, lanes))
    runtime = Runtime(device=device)

    def used() -> dict[str, set[int]]:
        found = {lane: runtime.lane(lane).submit(0, sms_used).wait() for lane in lanes}
        runtime.drain()
        return found

    runtime.lend({lane: applied.stream(lane) for lane in lanes})
    theirs = used()
    runtime.lend({})
    own = used()
    runtime.close()
    return returned(disjoint(name, theirs, applied.sms), own, applied.sms)


def returned(line: Line, own: dict[str, set[int]], allowed: dict[str, int]) -> Line:
    """``line``, unless lanes that are lent nothing any more keep to what they were lent."""
    kept = [lane for lane in own if len(own[lane]) <= allowed[lane]]
    told = f"{line.detail}; on their own {', '.join(str(len(used)) for used in own.values())}"
    return replace(line, status="fail" if kept else line.status, detail=told)


def device_times(device: str = "cuda", cycles: int = 100_000_000) -> Line:
    """A profile tells when the device ran what was issued to a stream, beside what else ran."""
    compiled = on_streams(both, device)
    given = Sleeper(cycles), Sleeper(cycles), torch.ones(1 << 10, device=device)
    for _ in range(6):
        compiled(*given)
    timeline = compiled._last.unit.profiling.last.on_device
    compiled.close()
    return told(timeline)


def told(timeline: Timeline | None) -> Line:
    """What the device times of two calls that take as long come to, one on a stream."""
    name = "device times of lanes in the profile"
    if timeline is None:
        return Line(name, "fail", "no kernels were seen in a profiled iteration")
    longest: dict[str, Span] = {}
    for span in timeline.spans:
        lane = span.lane if span.lane.startswith(STREAM) else ""
        if lane not in longest or span.duration_s > longest[lane].duration_s:
            longest[lane] = span
    if len(longest) != 2:
        return Line(name, "fail", f"operations were seen on {', '.join(longest) or 'nothing'}")
    a, b = longest.values()
    shorter, longer = sorted((a.duration_s, b.duration_s))
    beside = max(0.0, min(a.end_s, b.end_s) - max(a.start_s, b.start_s))
    good = longer <= ALIKE * shorter and beside >= BESIDE * shorter
    text = f"{1e3 * shorter:.1f} and {1e3 * longer:.1f} ms, {1e3 * beside:.1f} of them together"
    return Line(name, "pass" if good else "fail", text)


class Multiplier:
    """A component that multiplies matrices so many times, of so many rows."""

    def __init__(self, times: int, rows: int, device: str) -> None:
        self.times = times
        self.weight = torch.eye(rows, device=device)

    @rose_compiler.component(reads=["self"], writes=[])
    def score(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, shape (rows, rows), once more for each time."""
        for _ in range(self.times):
            x = x @ self.weight
        return x


def quotas(seconds: float, device: str = "cuda", rows: int = 1024) -> Line:
    """A compiled function measures plans of SMs for its streams and decides on one, or on none."""
    compiled = on_streams(both, device)
    x = torch.rand(rows, rows, device=device)
    given = Multiplier(60, rows, device), Multiplier(20, rows, device), x
    end = time.perf_counter() + seconds
    text = same = None
    while time.perf_counter() < end:
        for _ in range(20):
            found = compiled(*given)
        same = torch.allclose(found, 2 * x, rtol=1e-2)
        text = compiled.explain(width=10_000)
        if any(one in text for one in _COMPARED):
            break
    compiled.close()
    return decided(text or "", bool(same))


def decided(text: str, same: bool) -> Line:
    """What ``explain()`` says of quotas of SMs."""
    name = "quotas of SMs for streams are measured and decided on"
    lines = [line.strip() for line in text.splitlines()]
    for one in _COMPARED:
        if found := [line for line in lines if one in line]:
            return Line(name, "pass" if same else "fail", found[-1])
    if found := [line for line in lines if "green contexts are passed over" in line]:
        return Line(name, "absent", found[-1])
    left = [line for line in lines if "quota" in line]
    return Line(name, "fail", left[-1] if left else "nothing was decided in time")
