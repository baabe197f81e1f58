"""What an iteration leaves to run on a device belongs to its own trial."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rose_compiler
from rose_compiler.api import profiling
from rose_compiler.api import unit as module
from rose_compiler.api.awaiting import Awaiting, in_use
from rose_compiler.api.profiling import Instrumented
from rose_compiler.base.machine import detect_cpu
from rose_compiler.ir import facts
from rose_compiler.ir.parse import parse
from rose_compiler.runtime.support import Runtime
from tests.api.loops import Training, iteration

TEXT = """
@op(reads=[], writes=[])
def f(x): ...

@program()
def p(x):
    a = f(x)
    b = f(a)
    return b
"""


class Device:
    """Runs what is issued to it, a second each, once somebody waits; its clock."""

    def __init__(self) -> None:
        self.now, self.queued = 0.0, 0

    def perf_counter(self) -> float:
        self.now += 0.125
        return self.now

    def __call__(self, program: Any) -> None:
        self.now += self.queued
        self.queued = 0


def test_an_iteration_that_is_profiled_lasts_until_the_device_is_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device()

    def issued(x: int) -> int:
        device.queued += 1
        return x

    made = Instrumented(parse(TEXT, {"f": issued}), detect_cpu(), awaiting=device)
    monkeypatch.setattr(profiling, "perf_counter", device.perf_counter)
    device.queued = 7  # from before
    made.run(Runtime(), 1)
    assert made.iteration_s == [2.125]


def test_an_iteration_that_is_compared_lasts_until_the_device_is_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training, device = Training(), Device()
    fast = rose_compiler.compile(iteration, numerics="bitwise")
    training.run(fast, 2)
    unit = fast._last.unit
    chooser: Any = unit.tuning()._chooser
    chooser.trial_s = 3.0
    unit.awaiting = device
    real = module.Unit._bound

    def bound(self: Any, *args: Any) -> Any:
        run = real(self, *args)

        def issued() -> Any:
            device.queued += 1
            return run()

        return issued

    monkeypatch.setattr(module.Unit, "_bound", bound)
    monkeypatch.setattr(module, "time", device)
    device.queued = 7  # from before
    for _ in range(60):
        if chooser.settled:
            break
        training.run(fast)
    trials = [t for c, ts in chooser.trials.items() if chooser.candidates[c] for t in ts]
    assert len(trials) >= 2
    assert {s for trial in trials for s in trial.seconds} == {1.125}
    chooser.adopt(chooser.candidates[1], "enough was seen")
    training.run(fast)
    assert device.queued == 1, "nobody waits any more"
    fast.close()
    training.close()


def test_all_devices_in_use_are_waited_for() -> None:
    program = parse(TEXT)
    a, b = (program.find(name) for name in "ab")
    facts.put(a, spec=facts.Spec("tensor", device="cuda:1"))
    facts.put(b, spec=facts.Spec("tensor", device="cpu"))
    waited: list[str] = []
    awaiting = Awaiting(
        lambda device: waited.append(str(device)),
        lambda: [torch.device("cuda:0"), torch.device("cuda:1")],
    )
    awaiting(program)
    awaiting(program)
    assert waited == ["cuda:1", "cuda:0"] * 2


def seen_on(device: str) -> Any:
    program = parse(TEXT)
    facts.put(program.find("a"), spec=facts.Spec("tensor", device=device))
    return program


@pytest.mark.parametrize("device", ["xla:0", "hpu:0", "privateuseone:0", "cuda:1"])
@pytest.mark.parametrize("kind", [None, "cuda"])
def test_only_what_this_torch_can_wait_for_is_waited_for(
    device: str, kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []
    accelerator = torch.accelerator
    here = None if kind is None else torch.device(kind)
    monkeypatch.setattr(accelerator, "current_accelerator", lambda: here)
    if kind is not None:
        monkeypatch.setattr(accelerator, "synchronize", lambda d: waited.append(str(d)))
    Awaiting(others=list)(seen_on(device))
    assert waited == ([device] if kind is not None and device.startswith(kind) else [])


@pytest.mark.parametrize("books", [True, False])
def test_other_devices_with_memory_of_torch_are_in_use(
    books: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserved(number: int) -> int:
        if not books:
            raise RuntimeError("this allocator has no getDeviceStats")
        return 5 if number == 1 else 0

    for name, value in {
        "is_initialized": lambda: True,
        "current_device": lambda: 2,
        "device_count": lambda: 4,
        "memory_reserved": reserved,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    expected = ["cuda:1", "cuda:2"] if books else ["cuda:2"]
    assert [str(device) for device in in_use()] == expected


def test_nothing_is_started_by_asking() -> None:
    assert in_use() == []
    assert not torch.cuda.is_initialized()
