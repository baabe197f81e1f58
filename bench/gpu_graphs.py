"""Checks of CUDA graphs, by the package's own captures; each answers with one line of the table."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import rose_compiler
from bench.gpu_lines import Line
from bench.gpu_loops import Size, Training, iteration
from rose_compiler.base.decision import Decision
from rose_compiler.runtime.cuda_graphs import Captured, Cuda
from rose_compiler.runtime.inductor import Note

#: Iterations that each form trains for before the two are compared.
ITERATIONS = 4


def replays(device: str = "cuda") -> Line:
    """A captured graph computes what its operations do, for other arguments and stepped parameters,
    captured while another thread launches kernels."""
    name = "a CUDA graph replays the same bits"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    parameters = list(net.parameters())
    done = threading.Event()

    def run(x: Tensor, *_: Tensor) -> list[Tensor]:
        return [net(x)]

    def other() -> None:
        mine = torch.cuda.Stream()
        with torch.cuda.stream(mine):
            x = torch.randn(256, 256, device=device)
            while not done.is_set():
                x = torch.tanh(x)
                mine.synchronize()

    beside = threading.Thread(target=other)
    beside.start()
    same = []
    with torch.no_grad():
        given = [torch.randn(256, 64, device=device), *parameters]
        try:
            graph = Captured(run, given, range(1, len(given)))
        finally:
            done.set()
            beside.join()
        for _ in range(3):
            given[0] = torch.randn(256, 64, device=device)
            found = graph(given)[0].clone()
            same.append(torch.equal(found, net(given[0])))
            for parameter in parameters:
                parameter.mul_(0.9)
        graph.close()
    told = "captured while another thread launched kernels; parameters changed in place"
    return Line(name, "pass" if all(same) else "fail", told)


def healed(device: str = "cuda") -> Line:
    """After a capture that failed, draws and launches go on as if nothing had been."""
    name = "a capture that fails leaves nothing behind"
    x = torch.ones(8, device=device)
    torch.cuda.manual_seed(1)
    wanted = torch.rand(8, device=device)
    torch.cuda.manual_seed(1)
    one = Cuda()
    try:
        one.capture(lambda: [x * float(x.sum())])
    except Exception as error:
        why = str(error).split("\n")[0]
    else:
        return Line(name, "fail", "what the host waits for was captured")
    main = torch.cuda.current_stream() == torch.cuda.default_stream()
    same = torch.equal(torch.rand(8, device=device), wanted)
    again = bool(torch.equal(x + 1, torch.full_like(x, 2.0)))
    status = "pass" if main and same and again and one.broken else "fail"
    return Line(name, status, f"{why}; same draws: {same}, current stream as before: {main}")


def with_and_without(
    size: Size, seconds: float, device: str = "cuda", slower: float = 1 / 0.98
) -> Line:
    """What a schedule fuses, losses and graphs, is replayed and computes what it does otherwise:
    one compiled iteration with replays and without, with the ratio of their medians.

    It fails where nothing was captured, where parameters end up elsewhere, or where it takes more
    than ``slower`` times as long.
    """
    name = "workload: fused losses and graphs, with and without CUDA graphs"
    live, notes = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for graphs in (False, True):
            path = Path(folder) / f"{graphs}.json"
            Decision(fuse=True, compile=True, cuda_graphs=graphs).save(path)
            compiled = rose_compiler.compile(iteration, tune=path)
            live[graphs] = Training(compiled, device, size)
            for _ in range(ITERATIONS):
                live[graphs].step()
            notes[graphs] = [n for n in compiled.runtime.notes if isinstance(n, Note)]
    tensors = [one.tensors() for one in live.values()]
    off = max(float((tensors[0][k] - tensors[1][k]).abs().max()) for k in tensors[0])
    taken: dict[bool, list[float]] = {False: [], True: []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not all(taken.values()):
        for graphs, training in live.items():
            started = time.perf_counter()
            training.step()
            torch.cuda.synchronize()
            taken[graphs].append(time.perf_counter() - started)
    for training in live.values():
        training.fn.close()  # type: ignore[attr-defined]  # a compiled function
    before, after = (1e3 * statistics.median(taken[k]) for k in (False, True))
    captured = [n for n in notes[True] if n.kind == "cuda-graph"]
    told = [f"{n.name}: {n.why or n.gain}" for n in captured]
    kept = sum(not n.why for n in captured)
    status = "pass" if kept and off <= 1e-4 and after <= slower * before else "fail"
    text = f"{before:.2f} ms without, {after:.2f} with ({before / after:.2f}x), off by {off:.2g}"
    return Line(name, status, "; ".join([text, *told]), {"without, ms": before, "with, ms": after})
