"""Single checks of what a GPU and its driver offer; each answers with one line of the table."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from rose_compiler.base.machine import Machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.kernels import scan_triton
from rose_compiler.runtime.hosts import ipc
from rose_compiler.runtime.kernels import KernelTrace, Nvml, agrees, busy_sms, compared
from rose_compiler.runtime.quotas import GreenContexts, MpsPercentage, QuotaBackend


@dataclass(frozen=True)
class Line:
    """The outcome of one check: ``pass``, ``fail``, or ``absent`` where there is none of it.

    ``values`` are its figures by name and ``seconds`` what it took, for the JSON file.
    """

    check: str
    status: str
    detail: str
    values: Mapping[str, float] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)


def levers(backends: Iterable[QuotaBackend]) -> list[Line]:
    """What of the levers the machine has, a line each; one that it lacks is absent, not wrong."""
    found = []
    for backend in backends:
        probe = backend.probe()
        found.append(_lever(backend.name, probe.available, probe.why))
    cuda, triton = torch.cuda.is_available(), scan_triton.available()
    why = "no Triton" if not triton else "kernels are compiled" if cuda else "no CUDA device"
    found.append(_lever("Triton", triton and cuda, why))
    for name, probed in DEVICE_LEVERS.items():
        if not cuda:
            found.append(_lever(name, False, "no CUDA device"))
            continue
        try:
            found.append(_lever(name, True, probed()))
        except Exception as error:  # a driver that lacks it may raise anything
            found.append(_lever(name, False, f"{type(error).__name__}: {error}"))
    with Nvml() as nvml:
        time.sleep(0.15)
    seen = nvml.check is not None and nvml.check.source == "gpm"
    found.append(_lever("NVML GPM", seen, nvml.why or "SM activity can be read"))
    return found


def _lever(name: str, available: bool, why: str) -> Line:
    return Line(f"lever {name}", "pass" if available else "absent", why)


def _shared() -> str:
    if not ipc.available():
        raise RuntimeError("no handle of a CUDA tensor can be had")
    return "memory of a tensor can be shared"


def _priorities() -> str:
    least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]  # static in C
    if least == greatest:
        raise RuntimeError("all streams are served alike")
    return f"from {least} to {greatest}"


def _pinned() -> str:
    block = torch.empty(1 << 10, pin_memory=True)
    block.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    return "host memory can be pinned"


def _graphs() -> str:
    x = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    return "work can be captured and replayed"


def _profiler() -> str:
    with KernelTrace() as trace:
        torch.ones(1 << 16, device="cuda").sin()
    if not trace.kernels:
        raise RuntimeError(trace.why or "no kernel was seen")
    return "kernels can be seen"


def _torch_contexts() -> str:
    from torch.cuda.green_contexts import GreenContext  # a CPU build may not have the module

    made = "Stream" if hasattr(GreenContext, "Stream") else "create"
    return f"torch has GreenContext.{made}; those of one split are what quotas use"


#: Levers of a CUDA device that are no quotas: what each says of itself, or raises.
DEVICE_LEVERS: dict[str, Callable[[], str]] = {
    "CUDA IPC": _shared,
    "stream priorities": _priorities,
    "pinned memory": _pinned,
    "CUDA graphs": _graphs,
    "kernel profiler": _profiler,
    "torch green contexts": _torch_contexts,
}


def activity(seconds: float = 1.0) -> Line:
    """Kernels are in the profile, and their SM activity is what NVML's GPM says."""
    name = "kernels seen, and SM activity as NVML says"
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    with Nvml() as nvml, KernelTrace() as trace:
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            a @ a
            torch.cuda.synchronize()
        ended = time.perf_counter()
    return judged(name, trace, nvml, started, ended)


def judged(name: str, trace: Any, nvml: Any, started: float, ended: float) -> Line:
    """What a trace and NVML come to: no kernel fails, no GPM counter to compare with is absent."""
    if not trace.kernels:
        return Line(name, "fail", f"no kernels: {trace.why}")
    parts = busy_sms(trace.kernels, started, ended)
    text = f"{len(trace.kernels)} kernels; {compared(parts, trace.why, nvml)}"
    if nvml.check is None or nvml.check.source != "gpm":
        return Line(name, "absent", text)
    return Line(name, "pass" if agrees(parts, nvml.check) else "fail", text)


def triton_kernels(device: str) -> Line:
    """The Triton kernels against the same by torch, row by row."""
    name = "Triton kernels against their reference"
    if not scan_triton.available():
        return Line(name, "absent", "no Triton")
    generator = torch.Generator(device).manual_seed(0)
    worst = 0.0
    for trips, size in ((1, 1), (9, 5), (128, 4096)):
        a, b = (torch.randn(trips, size, generator=generator, device=device) / 2 for _ in range(2))
        first = torch.randn(size, generator=generator, device=device)
        reset = torch.rand(trips, size, generator=generator, device=device) < 0.1
        for given in ({}, {"reset": reset}, {"reverse": True}):
            found = scan_triton.linear(a, b, first, **given)
            wanted = scan_triton.linear_by_rows(a, b, first, **given)
            worst = max(worst, float((found - wanted).abs().max()))
    return Line(name, "pass" if worst < 1e-4 else "fail", f"off by {worst:.2g} at most")


_COUNT = (
    "import torch; torch.zeros(1, device='cuda'); "
    "print(torch.cuda.get_device_properties(0).multi_processor_count)"
)


def client(environment: Mapping[str, str]) -> int:
    """The multiprocessors that a process sees which is started with these variables."""
    done = subprocess.run(
        [sys.executable, "-c", _COUNT],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout)


def mps(
    backend: MpsPercentage, machine: Machine, count: Callable[[Mapping[str, str]], int] = client
) -> Line:
    """MPS is started, processes beside each other see the multiprocessors of their quotas, and MPS
    is stopped."""
    name = f"{backend.name}: start, quota, count, stop"
    probe = backend.probe()
    if not probe.available:
        return Line(name, "absent", probe.why)
    half = machine.chunks // 2
    plan = QuotaPlan.divide(
        backend.name, machine, {"sim": half // 2, "policy": machine.chunks - half}
    )
    lanes = [share.lane for share in plan.shares]
    with backend.apply(plan) as applied, ThreadPoolExecutor() as pool:
        given = [{**os.environ, **applied.environment(lane)} for lane in lanes]
        seen = dict(zip(lanes, pool.map(count, given), strict=True))
        daemon = applied.daemon
        owned = daemon.owned
    wrong = [s.lane for s in plan.shares if abs(seen[s.lane] - s.units) > plan.chunk]
    left = owned and daemon.control.answers()
    told = ", ".join(f"{s.lane}: {seen[s.lane]} SMs for {s.units}" for s in plan.shares)
    told += "; the daemon still answers" if left else "; stopped" if owned else "; it was there"
    return Line(name, "fail" if wrong or left else "pass", told)


def green(backend: GreenContexts, machine: Machine) -> Line:
    """Kernels of two green contexts run on SMs of their own, which they are asked for."""
    name = "green contexts are disjoint"
    probe = backend.probe()
    if not probe.available:
        return Line(name, "absent", probe.why)
    if not scan_triton.available():
        return Line(name, "absent", "no Triton, which asks each block for its SM")
    half = machine.chunks // 2
    plan = QuotaPlan.divide("green-context", machine, {"sim": half // 2, "policy": half - 1})
    with backend.apply(plan) as applied:
        seen = {}
        for share in plan.shares:
            with torch.cuda.stream(applied.stream(share.lane)):
                seen[share.lane] = sms_used()
        torch.cuda.synchronize()
        allowed = dict(applied.sms)
    return disjoint(name, seen, allowed)


def disjoint(name: str, seen: Mapping[str, set[int]], allowed: Mapping[str, int]) -> Line:
    """Whether lanes kept to SMs of their own, and to as many as they were given."""
    lanes: Sequence[str] = tuple(seen)
    shared = seen[lanes[0]] & seen[lanes[1]]
    over = [lane for lane in lanes if not 0 < len(seen[lane]) <= allowed[lane]]
    told = ", ".join(f"{lane}: {len(seen[lane])} of {allowed[lane]} SMs" for lane in lanes)
    if shared:
        told += f"; {len(shared)} are shared"
    return Line(name, "fail" if shared or over else "pass", told)


def sms_used(blocks: int = 4096) -> set[int]:
    """The numbers of the SMs that run the blocks of one kernel on the current stream."""
    from bench import gpu_smid

    out = torch.full((blocks,), -1, dtype=torch.int32, device="cuda")
    gpu_smid.numbers[(blocks,)](out, 2000)
    torch.cuda.current_stream().synchronize()
    return set(out.tolist())
