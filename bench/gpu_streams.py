"""Streams on the device: they overlap, and torch's CUDA sanitizer finds what is done wrong.

The sanitizer watches a process from its start, so each of these runs in one of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bench.gpu_lines import Line

SANITIZER_ERROR = "CSAN detected a possible data race"
#: How much longer two streams may take than one before they don't overlap.
OVERLAPPED = 1.5

_COMMON = """
import time
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


def work(x, cycles=50_000_000):
    torch.cuda._sleep(cycles)
    return x * 2


streams = Faulty("cuda")
"""

# "{fault}" is the step that is left out, empty for the proper run.
_RACE = (
    _COMMON
    + """
lane = StreamLane("stream:side", streams)
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
)

_OVERLAP = (
    _COMMON
    + """
lanes = [StreamLane(f"stream:{{k}}", streams) for k in range(2)]
given = [torch.ones(1 << 10, device="cuda") for _ in lanes]


def spent(count):
    torch.cuda.synchronize()
    started = time.perf_counter()
    tasks = [lanes[k].submit(0, work, given[k], 200_000_000) for k in range(count)]
    total = sum(task.wait().sum() for task in tasks)
    torch.cuda.synchronize()
    assert int(total) == 2048 * count
    return time.perf_counter() - started


spent(2)
print("ratio by hand", spent(2) / spent(1))
"""
)

# What the compiler itself puts on streams.
_EMITTED = """
import time
import torch
from bench.gpu_loops import Sleeper, both, on_streams

device = "cuda"
x = torch.ones(1 << 10, device=device)
given = (Sleeper(200_000_000), Sleeper(200_000_000), x)
fast = on_streams(both, device)


def spent(fn):
    torch.cuda.synchronize()
    started = time.perf_counter()
    total = fn(*given).sum()
    torch.cuda.synchronize()
    assert int(total) == 4096
    return time.perf_counter() - started


for fn in (both, fast, fast):
    spent(fn)
assert 'rt.lane("stream:' in fast.source, fast.explain()
print("ratio compiled", 2 * spent(fast) / spent(both))
fast.close()
"""

_COMPILED = """
import torch
from bench.gpu_loops import Size, Training, iteration, on_streams

step = on_streams(iteration, "cuda")
training = Training(step, "cuda", Size(64, 4, 16))
for _ in range(3):
    training.step()
torch.cuda.synchronize()
assert 'rt.lane("stream:' in step.source, step.explain()
step.close()
print("done")
"""

#: Runs a script under the sanitizer; what it printed.
Run = Callable[[str], str]


def sanitized(script: str) -> str:
    """Run a script in a process that the sanitizer watches; both of its outputs."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.stdout + done.stderr


def overlap(run: Run = sanitized) -> Line:
    """Two calls that the compiler puts on two streams take little longer than one, so do two lanes
    that are fed by hand, and the sanitizer has nothing against either."""
    name = "streams of the compiler, and by hand, overlap, under the sanitizer"
    text = run(_EMITTED + _OVERLAP.format(fault=""))
    if SANITIZER_ERROR in text:
        return Line(name, "fail", "reported as a race")
    told = [line.split() for line in text.splitlines() if line.startswith("ratio ")]
    if len(told) < 2:
        return Line(name, "fail", _last(text))
    ratios = {f"{' '.join(words[1:-1])}, ratio": float(words[-1]) for words in told}
    status = "pass" if max(ratios.values()) < OVERLAPPED else "fail"
    each = ", ".join(f"{ratio:.2f} ({name.split(',')[0]})" for name, ratio in ratios.items())
    return Line(name, status, f"two take as long as one times {each}", ratios)


def sanitizer(run: Run = sanitized) -> Line:
    """Each planted fault, a missing wait and a missing ``record_stream``, is reported; the same
    work done properly is not, nor is a compiled training on streams. Their processes run side by
    side."""
    name = "missing wait and record_stream are caught, a compiled training is clean"
    faults = ("wait", "record_stream")
    scripts = {fault: _RACE.format(fault=fault) for fault in ("", *faults)}
    scripts["compiled"] = _COMPILED
    with ThreadPoolExecutor() as pool:
        made = pool.map(run, scripts.values())
        texts = dict(zip(scripts, made, strict=True))
    for what, key in (("proper work", ""), ("a compiled training", "compiled")):
        if "done" not in texts[key].split() or SANITIZER_ERROR in texts[key]:
            return Line(name, "fail", f"{what}: {_last(texts[key])}")
    missed = [fault for fault in faults if SANITIZER_ERROR not in texts[fault]]
    told = f"not caught: {', '.join(missed)}" if missed else "both caught; proper work is clean"
    return Line(name, "fail" if missed else "pass", told)


def _last(text: str) -> str:
    """The last line of what a process printed."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "nothing was printed"
