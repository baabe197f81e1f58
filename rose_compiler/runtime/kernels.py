"""How busy a GPU was over time: kernels as torch.profiler saw them, checked against NVML.

The share of SMs that a kernel keeps busy follows from its grid: with fewer blocks than SMs, blocks
over SMs; with more than fit at once, its last wave is partly empty, and w waves keep w / ceil(w)
busy. Kernels that overlap add up, to 1 at most. Nothing here needs a GPU to be imported.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rose_compiler.base.profile import Activity

#: Warps of one SM where the device does not say (compute capability 8.0 and 9.0).
WARPS = 64


@dataclass(frozen=True)
class Kernel:
    """One kernel, copy or fill on a device: when it ran, and the share of SMs it kept busy.
    ``launched_s`` is when the call began that launched it, where the trace says so."""

    name: str
    device: int
    stream: int
    start_s: float
    end_s: float
    share: float
    launched_s: float | None = None


def parse_kernels(trace: Mapping[str, Any], warps: int = WARPS) -> list[Kernel]:
    """The kernels of a trace that ``torch.profiler`` exported, by start.

    Times are seconds of the Unix clock where the trace has ``baseTimeNanoseconds``, which newer
    versions write; else whatever its ``ts`` count from. ``warps`` is how many an SM holds.
    """
    base = float(trace.get("baseTimeNanoseconds", 0)) * 1e-9
    found = []
    launches = {
        event["args"]["correlation"]: base + float(event["ts"]) * 1e-6
        for event in trace.get("traceEvents", ())
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
        and "correlation" in (event.get("args") or {})
    }
    for event in trace.get("traceEvents", ()):
        kind = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or kind not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        known = event.get("args") or {}
        start = base + float(event["ts"]) * 1e-6
        found.append(
            Kernel(
                str(event.get("name", "")),
                int(known.get("device", 0)),
                int(known.get("stream", event.get("tid", 0)) or 0),
                start,
                start + float(event.get("dur", 0.0)) * 1e-6,
                sm_share(known, warps) if kind == "kernel" else 0.0,
                launches.get(known.get("correlation")),
            )
        )
    return sorted(found, key=lambda k: k.start_s)


def sm_share(known: Mapping[str, Any], warps: int = WARPS) -> float:
    """The mean share of SMs that a kernel keeps busy, from what the profiler says of its launch.

    A launch of which nothing is said counts as all of them.
    """
    blocks = known.get("blocks per SM")
    if blocks is None:
        return 1.0
    blocks = float(blocks)
    at_once = _blocks_at_once(known, blocks, warps)
    if blocks <= 1.0:
        return max(0.0, blocks)
    waves = blocks / at_once
    return waves / math.ceil(waves) if waves > 1.0 else 1.0


def _blocks_at_once(known: Mapping[str, Any], blocks: float, warps: int) -> float:
    """How many of its blocks an SM holds at once."""
    limits = known.get("occupancy")
    if isinstance(limits, Mapping) and limits.get("activeBlocksPerMultiprocessor"):
        return float(limits["activeBlocksPerMultiprocessor"])
    block = known.get("block")
    occupancy = known.get("est. achieved occupancy %")
    if not block or not occupancy:
        return max(1.0, blocks)
    of_block = math.ceil(math.prod(int(b) for b in block) / 32)
    # the estimate is min(blocks, blocks at once) * warps of a block / warps of an SM, in percent
    held = float(occupancy) / 100 * warps / max(1, of_block)
    return max(1.0, round(held)) if held < blocks * 0.99 else max(1.0, blocks)


def busy_sms(
    kernels: Sequence[Kernel], start_s: float, end_s: float, device: int = 0
) -> list[Activity]:
    """The SMs' activity from ``start_s`` to ``end_s``, by a sweep over begins and ends.

    A copy keeps no SM busy, and something resident all the same.
    """
    edges: list[tuple[float, float, int]] = []
    for kernel in kernels:
        left, right = max(start_s, kernel.start_s), min(end_s, kernel.end_s)
        if kernel.device == device and left < right:
            edges += [(left, kernel.share, 1), (right, -kernel.share, -1)]
    found: list[Activity] = []
    at, share, resident = start_s, 0.0, 0
    name = f"cuda:{device}"
    for time_, change, count in [*sorted(edges), (end_s, 0.0, 0)]:
        if time_ > at:
            busy = min(1.0, max(0.0, share))
            found.append(Activity(at, time_, name, busy, resident > 0))
            at = time_
        share, resident = share + change, resident + count
    return found


class KernelTrace:
    """Records the kernels of a ``with`` block by torch.profiler; nothing without a CUDA device.

    ``kernels`` has them behind the block, times as ``perf_counter`` counts. ``why`` says why there
    are none.
    """

    def __init__(self, available: Callable[[], bool] = torch.cuda.is_available) -> None:
        self.kernels: list[Kernel] = []
        self.why: str | None = None if available() else "there is no CUDA device"
        self._profiler: Any = None

    def __enter__(self) -> KernelTrace:
        if self.why is None:
            # the clocks are read together: the profiler's is the Unix clock
            self._ahead = time.time() - time.perf_counter()
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            )
            self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._profiler is None:
            return
        torch.cuda.synchronize()
        self._profiler.__exit__(*error)
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "trace.json"
                self._profiler.export_chrome_trace(str(path))
                trace = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RuntimeError) as failure:
            self.why = f"the profiler's trace can't be read: {failure}"
            return
        finally:
            self._profiler = None
        self.take(trace, self._ahead)

    def take(self, trace: Mapping[str, Any], ahead: float, warps: int | None = None) -> None:
        """Take the kernels of a trace, whose clock is ``ahead`` of ``perf_counter``."""
        if warps is None:
            warps = _warps_of_device()
        found = parse_kernels(trace, warps)
        if not any(k.share for k in found):
            self.why = "the profiler saw no kernel"
            return
        if "baseTimeNanoseconds" not in trace:
            self.why = "the profiler does not say what its times count from"
            return
        self.kernels = [
            replace(
                k,
                start_s=k.start_s - ahead,
                end_s=k.end_s - ahead,
                launched_s=None if k.launched_s is None else k.launched_s - ahead,
            )
            for k in found
        ]


def _warps_of_device() -> int:
    with suppress(AttributeError, RuntimeError, AssertionError):
        known = torch.cuda.get_device_properties(torch.cuda.current_device())
        return int(known.max_threads_per_multi_processor) // 32
    return WARPS


@dataclass(frozen=True)
class Check:
    """What NVML says of a stretch of time: the share of SMs busy, and by which of its counters.

    ``source`` is ``gpm`` (the share of time and SMs with a warp on them) or ``utilization`` (the
    share of time in which some kernel ran, however small).
    """

    share: float
    source: str


class Nvml:
    """NVML's view of one device over a ``with`` block; ``check`` behind it, or ``why`` not.

    GPM needs a device that has it (Hopper and newer), and two samples more than 100 ms apart.
    Elsewhere the plain utilization is read at the end. ``module`` is ``pynvml``.
    """

    #: Seconds between two GPM samples at least.
    LEAST_S = 0.1

    def __init__(self, device: int = 0, module: Any = None) -> None:
        self.device = device
        self.check: Check | None = None
        self.why: str | None = None
        self._module = module
        self._handle: Any = None
        self._first: Any = None
        self._since = 0.0

    def __enter__(self) -> Nvml:
        if self._module is None:
            try:
                import pynvml  # optional
            except ImportError:
                self.why = "nvidia-ml-py is not installed"
                return self
            self._module = pynvml
        nv = self._module
        try:
            nv.nvmlInit()
            self._handle = nv.nvmlDeviceGetHandleByIndex(self.device)
            if _supported(nv.nvmlGpmQueryDeviceSupport(self._handle)):
                self._first = nv.nvmlGpmSampleAlloc()
                nv.nvmlGpmSampleGet(self._handle, self._first)
        except Exception as error:  # NVMLError, or an old module without GPM
            if self._handle is None:
                self.why = f"NVML can't be used: {error}"
            self._first = None
        self._since = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        nv = self._module
        if nv is None or self._handle is None:
            return
        try:
            if self._first is not None and time.perf_counter() - self._since >= self.LEAST_S:
                self.check = Check(self._gpm(), "gpm")
            else:
                rates = nv.nvmlDeviceGetUtilizationRates(self._handle)
                self.check = Check(float(rates.gpu) / 100, "utilization")
        except Exception as failure:  # NVMLError, which only the module that was found can name
            self.why = f"NVML can't be used: {failure}"
        finally:
            with suppress(Exception):
                if self._first is not None:
                    nv.nvmlGpmSampleFree(self._first)
            with suppress(Exception):
                nv.nvmlShutdown()

    def _gpm(self) -> float:
        nv = self._module
        last = nv.nvmlGpmSampleAlloc()
        try:
            nv.nvmlGpmSampleGet(self._handle, last)
            asked = nv.c_nvmlGpmMetricsGet_t()
            asked.version = nv.NVML_GPM_METRICS_GET_VERSION
            asked.numMetrics = 1
            asked.sample1, asked.sample2 = self._first, last
            asked.metrics[0].metricId = getattr(nv, "NVML_GPM_METRIC_SM_UTIL", 2)
            nv.nvmlGpmMetricsGet(asked)
            if getattr(asked.metrics[0], "nvmlReturn", 0) != 0:
                raise RuntimeError(f"GPM answers {asked.metrics[0].nvmlReturn}")
            return float(asked.metrics[0].value) / 100
        finally:
            nv.nvmlGpmSampleFree(last)


def _supported(answer: Any) -> bool:
    """What ``nvmlGpmQueryDeviceSupport`` answers: a structure, or a number in older modules."""
    return bool(getattr(answer, "isSupportedDevice", answer))


def compared(activity: Sequence[Activity], why: str | None, nvml: Nvml) -> str:
    """One line on what the kernels say, what NVML says, and whether that is the same."""
    if not activity:
        return f"no kernels: {why}"
    whole = sum(a.end_s - a.start_s for a in activity)
    share = sum(a.share * (a.end_s - a.start_s) for a in activity) / whole
    said = f"kernels keep {share:.0%} of the SMs busy"
    if nvml.check is None:
        return f"{said}; {nvml.why}"
    word = "agrees" if agrees(activity, nvml.check) else "does not agree"
    what = "of the SMs busy" if nvml.check.source == "gpm" else "of the time with some kernel"
    return f"{said}; NVML ({nvml.check.source}) {word}: {nvml.check.share:.0%} {what}"


def agrees(activity: Iterable[Activity], check: Check, tolerance: float = 0.1) -> bool:
    """Whether kernels and NVML tell the same: within ``tolerance`` of all SMs for GPM; for plain
    utilization, that the time with something resident is no less than NVML saw, by as much."""
    parts = list(activity)
    whole = sum(a.end_s - a.start_s for a in parts)
    if whole <= 0:
        return False
    if check.source == "gpm":
        mine = sum(a.share * (a.end_s - a.start_s) for a in parts) / whole
        return abs(mine - check.share) <= tolerance
    resident = sum(a.end_s - a.start_s for a in parts if a.resident) / whole
    return abs(resident - check.share) <= tolerance
