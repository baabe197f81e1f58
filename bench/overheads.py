"""What the compiler costs: `python -m bench.overheads`.

Capture and passes for PPO (shape c with a short rollout: the program is the same, and what
training itself takes stays small beside it), the guard check of a call, and the round trip of an
empty task on each kind of lane, idle and beside a lane that is busy in Python. Beside each stands
the figure it should stay under.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from tempfile import NamedTemporaryFile
from time import perf_counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import rose_compiler
from bench import measure
from bench.handoff import Nothing, Still
from bench.loops import SHAPES, iteration, make
from rose_compiler.api.observing import Observer
from rose_compiler.frontend.capture import capture
from rose_compiler.frontend.record import Recorder
from rose_compiler.ir import interp
from rose_compiler.runtime.hosts import ProcessHost
from rose_compiler.runtime.support import Runtime
from rose_compiler.sim import ShardedEnv
from rose_compiler.testing.capturing import values_of

SHAPE = "c"
STEPS = 4


def compile_costs(repeats: int) -> dict[str, float]:
    """Seconds of what a compiled function does once, medians.

    `capture`: the first call, without the training iteration that it is. `passes`: building one
    schedule, passes, verification and emission, in the second call. `guards`: the check of one
    call.
    """
    found: dict[str, list[float]] = {"capture": [], "passes": [], "guards": []}
    setup = make(replace(SHAPES[SHAPE], num_steps=STEPS, epochs=1, minibatches=1))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other wherever a core is taken
    try:
        setup.run(iteration)
        eager = np.median([_seconds(lambda: setup.run(iteration)) for _ in range(2 * repeats)])
        for _ in range(repeats):
            compiled = rose_compiler.compile(iteration, tune=False)
            first, second, *steady = (
                _seconds(lambda fn=compiled: setup.run(fn))  # type: ignore[misc]
                for _ in range(2 + repeats)
            )
            found["capture"].append(first - float(eager))
            found["passes"].append(second - float(np.median(steady)))
            args = (
                *(setup.agent, setup.optimizer, setup.envs, setup.buf, setup.cfg, setup.log),
                *(setup.next_obs, setup.next_done),
            )
            found["guards"] += _times(lambda fn=compiled, a=args: fn._find(a, {}), 300)  # type: ignore[misc]
            compiled.close()
    finally:
        torch.set_num_threads(threads)
        setup.close()
    return {name: float(np.median(values)) for name, values in found.items()}


def profiling_cost(pairs: int, shape: str = SHAPE) -> tuple[measure.Estimate, measure.Estimate]:
    """How many times as long a profiled iteration takes as one that is not.

    Both run in turn, in program order and in the default schedule. Their iteration is an eighth of
    the shape's, with minibatches of the same size: neighbours then lie close enough together that
    what disturbs one mostly disturbs both.
    """
    found = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cfg = SHAPES[shape]
    cfg = replace(cfg, num_steps=cfg.num_steps // 8, minibatches=max(1, cfg.minibatches // 8))
    setup = make(cfg)
    try:
        for decision in (rose_compiler.Decision(), None):
            with NamedTemporaryFile("w", suffix=".json") as file:
                if decision is not None:
                    decision.save(file.name)
                compiled = rose_compiler.compile(iteration, tune=bool(decision) and file.name)
            for _ in range(6):
                setup.run(compiled)
            plain: list[float] = []
            profiled: list[float] = []
            for k in range(pairs):
                for ask in (0, 1) if k % 2 else (1, 0):
                    compiled.profile_next(ask)
                    seconds = _seconds(lambda fn=compiled: setup.run(fn))  # type: ignore[misc]
                    (profiled if ask else plain).append(seconds)
            found.append(measure.ratio(profiled, plain))
            compiled.close()
    finally:
        torch.set_num_threads(threads)
        setup.close()
    return found[0], found[1]


def observing_cost(pairs: int, shape: str = SHAPE) -> measure.Estimate:
    """How many times as long the first iteration takes as an eager one: run operation by operation,
    recorded, its components observed; without capture and tracing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    setup = make(replace(SHAPES[shape], num_steps=32))
    eager, observed = [], []

    def first(*args: Any) -> Any:
        captured = capture(iteration, args, {})
        observer = Observer(captured.program, Recorder(captured.program))
        values = values_of(captured, args, {})
        start = perf_counter()
        result = interp.run(captured.program, values, hooks=observer)
        observed.append(perf_counter() - start)
        return result

    try:
        setup.run(iteration)
        for _ in range(pairs):
            eager.append(_seconds(lambda: setup.run(iteration)))
            setup.run(first)
    finally:
        torch.set_num_threads(threads)
        setup.close()
    return measure.ratio(observed, eager)


def _seconds(call: Callable[[], Any]) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def _times(call: Callable[[], Any], count: int, warm_up: int = 100) -> list[float]:
    for _ in range(warm_up):
        call()
    return [_seconds(call) for _ in range(count)]


def _nothing() -> None:
    """A task that does nothing."""


@contextmanager
def round_trips() -> Iterator[tuple[Runtime, dict[str, Callable[[], Any]]]]:
    """A runtime, and for each kind of lane a call that hands it an empty task and waits for it."""
    with ExitStack() as stack:
        host = ProcessHost(Nothing)
        stack.callback(host.close)
        env = ShardedEnv([Still], hosts="process")
        stack.callback(env.close)
        env.reset()
        shard, action = env.shards()[0], np.zeros((1, 6), np.float32)
        runtime = Runtime(hosts={"nothing": host})
        stack.callback(runtime.close)
        serial = Runtime(serial=True)
        inline, thread = serial.lane("thread:0"), runtime.lane("thread:0")
        process, stepping = runtime.lane("host:nothing"), runtime.lane("shard:0")
        yield (
            runtime,
            {
                "inline": lambda: inline.submit(0, _nothing).wait(),
                "thread": lambda: thread.submit(0, _nothing).wait(),
                "process": lambda: process.submit(0, "call").wait(),  # type: ignore[arg-type]
                "process, a step of 1 environment": lambda: stepping.step(0, shard, action).wait(),
            },
        )
        runtime.drain()


def handoffs(count: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round trip by kind of lane, `idle` and `busy`."""
    found: dict[str, dict[str, list[float]]] = {}
    with round_trips() as (runtime, calls):
        for kind, call in calls.items():
            found[kind] = {"idle": _times(call, count)}
        running = True

        def spin() -> None:
            n = 0
            while running:
                n += 1

        task = runtime.lane("thread:busy").submit(0, spin)
        try:
            for kind, call in calls.items():
                found[kind]["busy"] = _times(call, count)
        finally:
            running = False
            task.wait()
    return found


#: Seconds each cost should stay under: the median of a hand-off, the whole of a compilation.
FIGURES = {
    "inline": 20e-6,
    "thread": 60e-6,
    "process": 100e-6,
    "capture and passes": 2.0,
    "guards": 100e-6,
    "profiling": 0.03,
    "observing": 5.0,
}


def _microseconds(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


def main(argv: list[str] | None = None) -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(prog="bench.overheads", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repeats: a smoke test")
    args = parser.parse_args(argv)
    console = Console()
    if console.width < 110:
        console = Console(width=110)

    once = Table(title=f"compiling PPO, shape {SHAPE}", title_justify="left")
    for name in ("cost", "median", "to stay under"):
        once.add_column(name, justify="left" if name == "cost" else "right")
    if hasattr(rose_compiler, "compile"):
        costs = compile_costs(1 if args.quick else 5)
        total = costs["capture"] + costs["passes"]
        once.add_row("capture, recording and tracing", f"{costs['capture']:.2f} s", "")
        once.add_row("passes and emission of a schedule", f"{costs['passes']:.2f} s", "")
        once.add_row("both", f"{total:.2f} s", f"{FIGURES['capture and passes']:.0f} s")
        guards = f"{_microseconds(FIGURES['guards'])} µs"
        once.add_row("guard check of a call", f"{_microseconds(costs['guards'])} µs", guards)
        most = f"{100 * FIGURES['profiling']:.0f}%"
        for what, cost in zip(
            ("program order", "the default schedule"),
            profiling_cost(3 if args.quick else 300),
            strict=True,
        ):
            shown = f"{100 * (cost.median - 1):+.1f}% [{100 * (cost.low - 1):+.1f}, "
            shown += f"{100 * (cost.high - 1):+.1f}]"
            once.add_row(f"profiling an iteration, {what}", shown, most)
        seen = observing_cost(3 if args.quick else 15)
        most = f"{FIGURES['observing']:.0f}x"
        once.add_row(
            "the first iteration, recorded and observed, to an eager one", f"{seen}x", most
        )
    else:
        once.add_row("capture and passes", "-", f"{FIGURES['capture and passes']:.0f} s")
        once.add_row("guard check of a call", "-", f"{_microseconds(FIGURES['guards'])} µs")
    console.print(once)

    trips = Table(title="round trip of an empty task, µs", title_justify="left")
    trips.add_column("lane")
    for name in ("idle", "p99", "mean", "beside Python", "p99", "mean", "median to stay under"):
        trips.add_column(name, justify="right")
    for kind, by_load in handoffs(300 if args.quick else 4000).items():
        cells = []
        for load in ("idle", "busy"):
            times = by_load[load]
            cells += [_microseconds(float(np.quantile(times, q))) for q in (0.5, 0.99)]
            # a rare wait for a whole turn of the other thread shows in the mean alone
            cells.append(_microseconds(float(np.mean(times))))
        trips.add_row(kind, *cells, _microseconds(FIGURES[kind]) if kind in FIGURES else "")
    console.print(trips)
    console.print(measure.machine(), highlight=False)


if __name__ == "__main__":
    main()
