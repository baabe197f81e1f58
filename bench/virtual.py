"""Predicted against virtual real time: ``python -m bench.virtual``.

Rollouts and updates run through the executor's stream lanes on the virtual H200, which takes as
long as a device would; the host reads the observations of each step, as training loops do. What
that takes by the clock is compared with the same program in simulated time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table

from rose_compiler.base.gpu import Group, Kernel, VirtualGpu, simulate_gpu
from rose_compiler.base.machine import load_machine
from rose_compiler.runtime.support import Runtime
from rose_compiler.runtime.virtual import VirtualDevice, VirtualEvent, Work

MACHINE = load_machine("h200")
ACT = Work(12e-3, demand=100, serial=0.2, bandwidth=0.5, grain=2.0)
STEP = Work(18e-3, demand=70, serial=0.3, bandwidth=0.2)
UPDATE = Work(60e-3, demand=132, serial=0.05, bandwidth=0.6)
#: The lane of a program, and the stream that it becomes: they are made in this order.
STREAMS = {"act": "stream1", "step": "stream2"}


@dataclass(frozen=True)
class Program:
    """A rollout of some steps over one or two shards, then an update."""

    name: str
    shards: int
    steps: int = 12
    gpu: VirtualGpu = field(default_factory=lambda: VirtualGpu(MACHINE))

    def kernels(self) -> list[Kernel]:
        """The program for simulated time."""
        found: list[Kernel] = []

        def add(name: str, lane: str, work: Work, after: Sequence[str]) -> str:
            stream = STREAMS.get(lane, "stream0")
            found.append(
                Kernel(
                    name,
                    stream,
                    work.work_s,
                    work.demand,
                    tuple(after),
                    work.serial,
                    work.bandwidth,
                    grain=work.grain,
                )
            )
            return name

        ready: list[list[str]] = [[] for _ in range(self.shards)]
        for t in range(self.steps):
            for g in range(self.shards):
                acted = add(f"act {t} {g}", "act", ACT, ready[g])
                ready[g] = [add(f"step {t} {g}", "step", STEP, [acted])]
        add("update", "", UPDATE, [name for names in ready for name in names])
        return found

    def predicted(self) -> float:
        """Seconds of an iteration in simulated time."""
        return simulate_gpu(self.kernels(), self.gpu).makespan

    def measured(self) -> float:
        """Seconds of an iteration by the clock."""
        with VirtualDevice(self.gpu) as device:
            runtime = Runtime(streams=device)
            act, step = runtime.lane("stream:act"), runtime.lane("stream:step")
            began = perf_counter()
            pending: list[VirtualEvent | None] = [None] * self.shards
            for _ in range(self.steps):
                for g in range(self.shards):
                    if (stepped := pending[g]) is not None:
                        device.reach(stepped)  # the host reads the observations
                    act.submit(0, device.launch, ACT)
                    with device.use(step.stream):  # type: ignore[attr-defined]
                        device.wait(step.stream, device.record(act.stream))  # type: ignore[attr-defined]
                        device.launch(STEP)
                    pending[g] = device.record(step.stream)  # type: ignore[attr-defined]
            for event in pending:
                device.reach(event)  # type: ignore[arg-type]
            device.launch(UPDATE)
            device.synchronize(device.current())
            took = perf_counter() - began
            runtime.close()
        return took


def programs() -> list[Program]:
    """What is compared."""
    turns = (Group("policy", "policy"), Group("sim", "sim"))
    lanes = {"stream1": "policy", "stream2": "sim"}
    quotas = (Group("policy", "policy", 80), Group("sim", "sim", 48))
    return [
        Program("one shard", 1),
        Program("two shards on streams", 2),
        Program("two shards, processes that take turns", 2, gpu=VirtualGpu(MACHINE, turns, lanes)),
        Program("two shards, percentages", 2, gpu=VirtualGpu(MACHINE, quotas, lanes, mps=True)),
        Program(
            "two shards, simulator first", 2, gpu=VirtualGpu(MACHINE, priority={"stream2": -1})
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 where a prediction is off by more than 5%."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--iterations", type=int, default=5)
    options = parser.parse_args(argv)
    table = Table("program", "predicted, ms", "by the clock, ms", "off by")
    worst = 0.0
    for program in programs():
        predicted = program.predicted()
        took = median(program.measured() for _ in range(options.iterations))
        off = took / predicted - 1
        worst = max(worst, abs(off))
        table.add_row(program.name, f"{1e3 * predicted:.1f}", f"{1e3 * took:.1f}", f"{off:+.1%}")
    Console().print(table)
    return int(worst > 0.05)


if __name__ == "__main__":
    raise SystemExit(main())
