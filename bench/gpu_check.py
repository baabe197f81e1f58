"""Checks that need a CUDA device, as one script: ``python -m bench.gpu_check [--json FILE]``.

It takes less than six minutes and needs torch, rich and this package, no gymnasium and no network.
Each check is one line: ``pass``, ``fail``, or ``absent`` where the machine has none of what it is
about. Nothing here needs a device to be imported; without one the lines that do read ``absent``.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from bench import gpu_equal, gpu_graphs, gpu_lanes, gpu_lines, gpu_streams
from bench.gpu_lines import Line
from bench.gpu_loops import WORKLOADS, Measured, Size, measure
from rose_compiler.base.machine import Machine
from rose_compiler.runtime.quotas import (
    GreenContexts,
    MpsPartition,
    MpsPercentage,
    all_backends,
    devices,
)

#: Seconds for all checks: the whole takes less than six minutes.
LIMIT_S = 350.0
#: Seconds that a workload is tuned for at most; it is measured for half as long.
WORKLOAD_S = 8.0
#: What the lines that are not in :data:`CHECKS` take: the levers, and the same on the CPU.
OTHERS_S = 10.0


@dataclass(frozen=True)
class Check:
    """One line of the table: it is begun only if so many seconds are left."""

    seconds: float
    run: Callable[[], Line]


def workload(
    name: str, device: str, size: Size, seconds: float, names: tuple[str, ...] = ()
) -> Line:
    """A workload as written, by torch.compile, with hand-written streams, compiled on streams
    whether that wins or not, and compiled: ratios of medians, and SM activity before and after. It
    fails where compiled is slower than as written."""
    return compared(f"workload: {name}", measure(device, size, seconds, names))


def compared(name: str, found: Mapping[str, Measured]) -> Line:
    """What the variants of a workload come to."""
    base = found["as written"]
    told, values = [], {}
    for variant, one in found.items():
        text = f"{variant} {one.ms:.2f} ms ({base.ms / one.ms:.2f}x"
        told.append(text + (")" if one.activity is None else f", {one.activity:.0%} of the SMs)"))
        values[f"{variant}, ms"] = one.ms
        values[f"{variant}, times as written"] = base.ms / one.ms
        if one.activity is not None:
            values[f"{variant}, SM activity"] = one.activity
    mine = found["compiled"]
    if base.activity is not None and mine.activity is not None:
        told.append(f"SM activity {100 * (mine.activity - base.activity):+.1f} points")
    status = "pass" if base.ms / mine.ms >= 0.98 else "fail"
    return Line(name, status, "; ".join(told), values)


def _machine() -> Machine:
    return devices()[0].machine()


#: MPS first, since it is started before CUDA is initialized in this process, then what says most.
#: Their seconds add up to less than the limit. They are an estimate: 6 s for a process with torch
#: and CUDA, those of one line side by side; 2 to 4 s for a kernel that Triton compiles; 15 to 20 s
#: for networks that Inductor does; and what is tuned and measured.
CHECKS: dict[str, Check] = {
    "mps-percentage: start, quota, count, stop": Check(
        15, lambda: gpu_lines.mps(MpsPercentage(), _machine())
    ),
    "mps-partition: start, quota, count, stop": Check(
        15, lambda: gpu_lines.mps(MpsPartition(), _machine())
    ),
    "compiled PPO equals eager, bit for bit": Check(
        10, lambda: gpu_equal.compiled_equals_eager("cuda")
    ),
    "compiled PPO on streams equals eager, bit for bit": Check(
        10, lambda: gpu_equal.compiled_equals_eager("cuda", streams=True)
    ),
    "kernels in the profile of a compiled training": Check(8, lambda: gpu_equal.profiled("cuda")),
    "kernels seen, and SM activity as NVML says": Check(6, gpu_lines.activity),
    **{
        f"workload: {name}": Check(35, partial(workload, name, "cuda", size, WORKLOAD_S))
        for name, size in WORKLOADS.items()
    },
    "streams of the compiler, and by hand, overlap, under the sanitizer": Check(
        15, gpu_streams.overlap
    ),
    "green contexts are disjoint": Check(8, lambda: gpu_lines.green(GreenContexts(), _machine())),
    "a CUDA graph replays the same bits": Check(4, gpu_graphs.replays),
    "workload: fused losses and graphs, with and without CUDA graphs": Check(
        30, partial(gpu_graphs.with_and_without, Size(1024, 16, 256), 4.0)
    ),
    "Triton kernels against their reference": Check(10, lambda: gpu_lines.triton_kernels("cuda")),
    "quotas of SMs for streams are measured and decided on": Check(
        25, partial(gpu_lanes.quotas, 20.0)
    ),
    "missing wait and record_stream are caught, a compiled training is clean": Check(
        20, gpu_streams.sanitizer
    ),
    "a component in a process equals one here": Check(15, lambda: gpu_equal.in_a_process("cuda")),
    "checking mode finds nothing wrong": Check(15, lambda: gpu_equal.checked("cuda")),
    "lanes keep to the SMs of streams that they are lent": Check(
        6, lambda: gpu_lanes.lent(GreenContexts(), _machine())
    ),
    "device times of lanes in the profile": Check(8, gpu_lanes.device_times),
    "a capture that fails leaves nothing behind": Check(4, gpu_graphs.healed),
}


def check(limit_s: float = LIMIT_S) -> list[Line]:
    """All lines; ``absent`` for those that need a CUDA device without one. A check for which not
    enough of ``limit_s`` seconds is left fails."""
    started = time.perf_counter()
    lines = []
    for name, one in CHECKS.items():
        if not torch.cuda.is_available():
            lines.append(Line(name, "absent", "no CUDA device"))
            continue
        began = time.perf_counter()
        left = limit_s - OTHERS_S - (began - started)
        if left < one.seconds:
            lines.append(Line(name, "fail", f"{max(0.0, left):.0f} s are left for it"))
            continue
        try:
            line = one.run()
        except Exception as error:  # one check that breaks must not hide the others
            line = Line(name, "fail", f"{type(error).__name__}: {error}")
        lines.append(replace(line, seconds=time.perf_counter() - began))
    return [compiled_on_cpu(), *gpu_lines.levers(all_backends()), *lines]


def compiled_on_cpu() -> Line:
    """The same comparison on the CPU, so that the script itself is tested everywhere."""
    line = gpu_equal.compiled_equals_eager("cpu")
    return Line("the same on the CPU", line.status, line.detail)


def machine() -> str:
    """The machine in one line."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"
    return f"{gpu}, torch {torch.__version__}, Python {platform.python_version()}"


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 when a line failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", help="write the lines there too")
    options = parser.parse_args(argv)
    started = time.perf_counter()
    lines = check()
    seconds = time.perf_counter() - started
    table = Table("check", "status", "detail", title=machine())
    for line in lines:
        table.add_row(line.check, line.status, line.detail)
    Console().print(table)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            found = {"machine": machine(), "seconds": seconds, "lines": [asdict(x) for x in lines]}
            json.dump(found, file, indent=2)
    return int(any(line.status == "fail" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
