"""Schedules with device streams: the same bits, nothing unordered, two streams busy at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import rose_compiler
from bench.gpu_loops import Size, Training, iteration
from rose_compiler.base.decision import Decision
from rose_compiler.base.gpu import GpuRun, VirtualGpu
from rose_compiler.base.machine import load_machine
from rose_compiler.ir import facts
from rose_compiler.ir.parse import parse
from rose_compiler.passes.stream_work import device_of
from rose_compiler.runtime.recording import RaceFound, RecordingStreams
from rose_compiler.runtime.support import Runtime
from rose_compiler.runtime.virtual import VirtualDevice, Work
from tests.api import stream_loop
from tests.api.stream_loop import Policy, World, rollout

SIZE = Size(8, 4, 8)


@contextmanager
def compiled(fn: Any, tmp_path: Path, streams: Any = None, **options: Any) -> Iterator[Any]:
    """A function by a schedule with streams, planned for a device that is not there."""
    path = tmp_path / "decision.json"
    Decision(streams=True, **options).save(path)
    made = rose_compiler.compile(fn, tune=path, numerics="bitwise", backend="virtual:h200")
    if streams is not None:
        made._runtime = Runtime(streams=streams)
    yield made
    made.close()


def trained(fn: Any, iterations: int = 3) -> dict[str, torch.Tensor]:
    training = Training(fn, "cpu", SIZE)
    for _ in range(iterations):
        training.step()
    return training.tensors()


def differing(fn: Any) -> list[str]:
    wanted, found = trained(iteration), trained(fn)
    return [name for name in wanted if not torch.equal(wanted[name], found[name])]


def test_ppo_on_streams_trains_the_same_and_nothing_is_unordered(tmp_path: Path) -> None:
    streams = RecordingStreams()
    with compiled(iteration, tmp_path, streams) as made:
        with streams:
            assert differing(made) == []
        streams.check()
        assert len({stream for stream, _ in streams.issued}) >= 2
        told = made.explain(width=200)
        assert "runs on lane 'stream:" in told
        assert "gpu_loops.py" in told
        assert 'lane("stream:' in made.ir()
        assert 'rt.lane("stream:' in made.source
    with compiled(iteration, tmp_path, overlap=True, fuse=True) as made:  # on the CPU's one stream
        assert differing(made) == []


class NoWait(RecordingStreams):
    """No stream but the coordinator's waits for anything."""

    def wait(self, stream: int, event: dict[int, int]) -> None:
        if stream == 0:
            super().wait(stream, event)


class NoJoin(RecordingStreams):
    """The coordinator's stream waits for nothing."""

    def wait(self, stream: int, event: dict[int, int]) -> None:
        if stream != 0:
            super().wait(stream, event)


class NoRecord(RecordingStreams):
    """No tensor is recorded on another stream than its own."""

    def keep(self, tensor: torch.Tensor, stream: int) -> None:
        pass


@pytest.mark.parametrize(
    "streams", [NoWait(), NoJoin(), NoRecord()], ids=lambda s: type(s).__name__
)
def test_what_is_left_out_is_found(tmp_path: Path, streams: RecordingStreams) -> None:
    with compiled(iteration, tmp_path, streams) as made:
        with streams:
            trained(made, 2)
        with pytest.raises(RaceFound):
            streams.check()


# On a GPU that is not there, in real time.


class Kernels:
    """Launches a kernel a call, named and numbered."""

    def __init__(self, device: VirtualDevice) -> None:
        self.device = device
        self.counts: dict[str, itertools.count[int]] = {}

    def __call__(self, name: str) -> None:
        number = next(self.counts.setdefault(name, itertools.count()))
        self.device.launch(Work(3e-3, demand=50, name=f"{name} {number}"))


def on_the_device(tmp_path: Path | None) -> tuple[GpuRun, torch.Tensor, torch.Tensor]:
    """Two rollouts on the virtual device, as written or by the schedule with streams."""
    with (
        VirtualDevice(VirtualGpu(load_machine("h200"))) as device,
        mock.patch.object(stream_loop, "TOLD", [Kernels(device)]),
    ):
        policy, world, values = Policy(), World(), torch.zeros(4)
        obs = torch.ones(3)
        if tmp_path is None:
            for _ in range(2):
                obs = rollout(policy, world, values, obs)
        else:
            with compiled(rollout, tmp_path, device) as made:
                for _ in range(2):
                    obs = made(policy, world, values, obs)
        device.synchronize(device.current())
        return device.record_of_run, obs, values


def beside(run: GpuRun, a: str, b: str) -> int:
    """How many kernels of one name are resident together with one of another."""
    times = [(name, run.start[name], run.end[name]) for name in run.start]
    return sum(
        any(n.startswith(b) and s < end and start < e for n, s, e in times)
        for name, start, end in times
        if name.startswith(a)
    )


def test_two_streams_are_resident_at_once_on_a_virtual_gpu(tmp_path: Path) -> None:
    plain, *wanted = on_the_device(None)
    found, *got = on_the_device(tmp_path)
    assert all(map(torch.equal, wanted, got))
    assert len(plain.start) == len(found.start) == 24
    assert beside(plain, "value", "a") == 0
    # the first of two runs is captured and runs in program order
    assert beside(found, "value", "a") == 4


# Which schedules are tried.


def test_the_tuner_tries_streams_where_there_is_a_device() -> None:
    def tried(backend: str) -> list[bool]:
        made = rose_compiler.compile(iteration, numerics="bitwise", backend=backend)
        Training(made, "cpu", SIZE).step()
        found = made._last.unit.tuning()._chooser.candidates
        made.close()
        return [one is not None and one.streams for one in found]

    assert not any(tried("auto"))
    wanted = tried("virtual:h200")
    assert any(wanted)
    assert not all(wanted[1:])


def test_the_device_is_the_one_that_tensors_lie_on() -> None:
    def found(*devices: str) -> str:
        program = parse("def f(x, y):\n    return x\n")
        params = [n for n in program.graph.nodes if n.op == "placeholder"]
        for node, device in zip(params, devices, strict=True):
            facts.put(node, spec=facts.Spec("tensor", "torch.Tensor", (2,), "float32", device))
        return device_of(program)

    assert found("cpu", "cuda:1") == "cuda:1"
    assert found("cpu", "cpu") == ""
    assert found("cuda:0", "cuda:1") == ""
    assert found("mps:0", "cpu") == ""
