"""Checks that need a CUDA device, as one script: ``python -m bench.gpu_check [--json FILE]``.

It takes less than six minutes and needs torch, rich and this package, no gymnasium. Each check is
one line: ``pass``, ``fail``, or ``absent`` where the machine has none of what it is about.
The checks that plant a fault run in a process of their own under torch's CUDA sanitizer: the
planted fault must be reported, and the same work done properly must not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from rich.console import Console
from rich.table import Table

import rose_compiler
from bench import gpu_lines
from bench.gpu_lines import Line
from bench.gpu_loops import Size, iteration, measure, train
from rose_compiler.base.machine import Machine
from rose_compiler.runtime.events import StreamLane, TorchStreams
from rose_compiler.runtime.quotas import (
    GreenContexts,
    MpsPartition,
    MpsPercentage,
    all_backends,
    devices,
)

SANITIZER_ERROR = "CSAN detected a possible data race"
#: Seconds after which no further check is begun: the whole takes less than six minutes.
LIMIT_S = 300.0
#: Seconds that the workload is tuned for, and measured for.
WORKLOAD_S = 45.0


def compiled_equals_eager(device: str) -> Line:
    """The compiled torch-native PPO leaves the same bits as the eager one."""
    eager = train(iteration, device, 4)
    compiled = rose_compiler.compile(iteration, numerics="bitwise", tune=False)
    found = train(compiled, device, 4)
    compiled.close()
    wrong = [name for name in eager if not torch.equal(eager[name], found[name])]
    text = f"differs in {', '.join(wrong)}" if wrong else f"{len(eager)} tensors, 4 iterations"
    return Line("compiled PPO equals eager, bit for bit", "fail" if wrong else "pass", text)


def streams_overlap(device: str) -> Line:
    """Two stream lanes that each wait on the device take little longer than one."""
    streams = TorchStreams(device)
    lanes = [StreamLane(f"stream:{k}", streams) for k in range(2)]
    cycles = 200_000_000

    def spent(used: list[StreamLane]) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for lane in used:
            lane.submit(0, torch.cuda._sleep, cycles)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    spent(lanes)
    one, both = spent(lanes[:1]), spent(lanes)
    ratio = both / one
    status = "pass" if ratio < 1.5 else "fail"
    return Line("two streams overlap", status, f"both take {ratio:.2f} times as long as one")


# Run in a process of its own, since the sanitizer watches a process from its start. "{fault}" is
# the step that is left out, empty for the proper run.
_RACE = """
import torch
from rose_compiler.runtime.events import StreamLane, TorchStreams

fault = {fault!r}


class Faulty(TorchStreams):
    def wait(self, stream, event):
        if fault != "wait":
            super().wait(stream, event)

    def keep(self, tensor, stream):
        if fault != "record_stream":
            super().keep(tensor, stream)


streams = Faulty("cuda")
lane = StreamLane("stream:side", streams)


def work(x):
    torch.cuda._sleep(50_000_000)
    return x * 2


x = torch.ones(1 << 20, device="cuda")
task = lane.submit(0, work, x)
if fault == "record_stream":
    del x  # the allocator may hand out its memory again while the side stream still reads it
    y = torch.zeros(1 << 20, device="cuda")
    y.add_(1)
else:
    y = task.wait()
    y.add_(1)
torch.cuda.synchronize()
print("done")
"""


def sanitizer(fault: str) -> Line:
    """A planted missing ``fault`` is reported by the CUDA sanitizer."""

    def reported(planted: str) -> bool:
        done = subprocess.run(
            [sys.executable, "-c", _RACE.format(fault=planted)],
            env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return SANITIZER_ERROR in done.stdout + done.stderr

    planted, proper = reported(fault), reported("")
    status = "pass" if planted and not proper else "fail"
    return Line(
        f"missing {fault} is caught",
        status,
        f"planted: {'caught' if planted else 'not caught'}; "
        f"proper: {'reported as a race' if proper else 'clean'}",
    )


def workload(device: str, size: Size, seconds: float, names: tuple[str, ...] = ()) -> Line:
    """The workload as written, by torch.compile, with streams by hand, and compiled: ratios of
    medians, and SM activity before and after. It fails where compiled is slower than as written."""
    found = measure(device, size, seconds, names)
    base = found["as written"]
    told = []
    for name, one in found.items():
        text = f"{name} {one.ms:.2f} ms ({base.ms / one.ms:.2f}x"
        told.append(text + (")" if one.activity is None else f", {one.activity:.0%} of the SMs)"))
    mine = found["compiled"].ms
    status = "pass" if base.ms / mine >= 0.98 else "fail"
    return Line("the workload, compiled against others", status, "; ".join(told))


def _machine() -> Machine:
    return devices()[0].machine()


#: In this order: MPS is started before CUDA is initialized in this process.
CHECKS: dict[str, Callable[[], Line]] = {
    "mps-percentage: start, quota, count, stop": lambda: gpu_lines.mps(MpsPercentage(), _machine()),
    "mps-partition: start, quota, count, stop": lambda: gpu_lines.mps(MpsPartition(), _machine()),
    "compiled PPO equals eager, bit for bit": lambda: compiled_equals_eager("cuda"),
    "two streams overlap": lambda: streams_overlap("cuda"),
    "missing wait is caught": lambda: sanitizer("wait"),
    "missing record_stream is caught": lambda: sanitizer("record_stream"),
    "kernels seen, and SM activity as NVML says": gpu_lines.activity,
    "a CUDA graph replays the same bits": gpu_lines.cuda_graph,
    "Triton kernels against their reference": lambda: gpu_lines.triton_kernels("cuda"),
    "green contexts are disjoint": lambda: gpu_lines.green(GreenContexts(), _machine()),
    "the workload, compiled against others": lambda: workload(
        "cuda", Size(4096, 32, 512), WORKLOAD_S
    ),
}


def check(limit_s: float = LIMIT_S) -> list[Line]:
    """All lines; ``absent`` for those that need a CUDA device without one. A check that would begin
    after ``limit_s`` seconds fails."""
    started = time.perf_counter()
    lines = []
    for name, run in CHECKS.items():
        if not torch.cuda.is_available():
            lines.append(Line(name, "absent", "no CUDA device"))
            continue
        if time.perf_counter() - started > limit_s:
            lines.append(Line(name, "fail", f"no time is left after {limit_s:g} s"))
            continue
        try:
            lines.append(run())
        except Exception as error:  # one check that breaks must not hide the others
            lines.append(Line(name, "fail", f"{type(error).__name__}: {error}"))
    return [compiled_on_cpu(), *gpu_lines.levers(all_backends()), *lines]


def compiled_on_cpu() -> Line:
    """The same comparison on the CPU, so that the script itself is tested everywhere."""
    line = compiled_equals_eager("cpu")
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
    lines = check()
    table = Table("check", "status", "detail", title=machine())
    for line in lines:
        table.add_row(line.check, line.status, line.detail)
    Console().print(table)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"machine": machine(), "lines": [asdict(line) for line in lines]}, file, indent=2
            )
    return int(any(line.status == "fail" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
