"""The device checks say ``absent`` where there is no device, and judge what they are told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu_check, gpu_equal, gpu_lanes, gpu_lines, gpu_streams
from bench.gpu_loops import Camera, Measured, Size, Training, by_hand, iteration
from rose_compiler.base.machine import load_machine
from rose_compiler.base.profile import Span, Timeline
from rose_compiler.runtime.events import TorchStreams
from rose_compiler.runtime.kernels import Check, Kernel
from rose_compiler.runtime.quotas import Device, MpsPartition, MpsPercentage, Probe
from tests.runtime.quotas.fake_mps import Fake

GPU = Device("GPU-1234", "NVIDIA H200", (9, 0), 132, 4.8e12, 13010)
H200 = load_machine("h200")


def test_lines_without_a_device(tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "lines.json"
    assert gpu_check.main(["--json", str(path)]) == 0
    lines = json.loads(path.read_text())["lines"]
    status = {line["check"]: line["status"] for line in lines}
    assert lines[0]["status"] == "pass"  # the same on the CPU
    assert [status[name] for name in gpu_check.CHECKS] == ["absent"] * len(gpu_check.CHECKS)
    assert {n for n in status if n.startswith("lever")} >= {"lever cores", "lever NVML GPM"}


def test_a_check_that_breaks_is_a_failed_line(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def broken() -> gpu_check.Line:
        raise RuntimeError("no luck")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_lines, "levers", lambda _: [])
    monkeypatch.setattr(gpu_check, "compiled_on_cpu", lambda: gpu_check.Line("cpu", "pass", ""))
    monkeypatch.setattr(gpu_check, "CHECKS", {"broken": gpu_check.Check(10, broken)})
    assert gpu_check.check()[1] == gpu_check.Line("broken", "fail", "RuntimeError: no luck")
    assert gpu_check.check(limit_s=19.0)[1].detail == "9 s are left for it"


def test_the_plan_of_all_lines_fits_the_limit() -> None:
    planned = sum(one.seconds for one in gpu_check.CHECKS.values())
    assert planned + gpu_check.OTHERS_S <= gpu_check.LIMIT_S


def test_it_runs_without_gymnasium() -> None:
    code = (
        "import sys; sys.modules['gymnasium'] = None; sys.modules['mujoco'] = None\n"
        "from bench.gpu_loops import iteration, train; import bench.gpu_check\n"
        "print(len(train(iteration, 'cpu', 1)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "14", done.stderr


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return Fake(tmp_path)


def rounded(environment: Mapping[str, str], lost: int = 0) -> int:
    """What a process under MPS would see of 132 SMs."""
    if "CUDA_MPS_SM_PARTITION" in environment:
        return 32
    percentage = int(environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"])
    return 132 * percentage // 100 // 8 * 8 - lost


def test_mps_is_held_against_what_processes_see(fake: Fake) -> None:
    backend = MpsPercentage(str(fake.binary), lambda: [GPU], timeout=60.0, grace=0.2)
    line = gpu_lines.mps(backend, H200, rounded)
    assert line.status == "pass", line
    assert line.detail.endswith("stopped")
    assert gpu_lines.mps(backend, H200, partial(rounded, lost=24)).status == "fail"
    old = Device("GPU-1", "old", (3, 5), 15, None, 13010)
    line = gpu_lines.mps(MpsPartition(str(fake.binary), lambda: [old]), H200, rounded)
    assert line.status == "absent"


def test_green_contexts_are_judged_by_the_sms_that_ran() -> None:
    allowed = {"a": 16, "b": 8}
    judge = partial(gpu_lines.disjoint, "green", allowed=allowed)
    assert judge({"a": set(range(16)), "b": set(range(16, 24))}).status == "pass"
    assert judge({"a": set(range(16)), "b": {15, 16}}).status == "fail"
    assert judge({"a": set(range(17)), "b": {20}}).status == "fail"
    assert judge({"a": set(), "b": {20}}).status == "fail"
    assert gpu_lines.green(Lacking(), H200).status == "absent"  # type: ignore[arg-type]


class Lacking:
    """A back end that the machine does not have."""

    name = "green-context"

    def probe(self) -> Probe:
        return Probe(False, "there is none")


def test_kernels_are_held_against_nvml() -> None:
    kernels = [Kernel("matmul", 0, 7, 0.0, 0.8, 1.0)]
    trace = SimpleNamespace(kernels=kernels, why=None)

    def status(check: Any, seen: Any = trace) -> str:
        nvml = SimpleNamespace(check=check, why="none")
        return gpu_lines.judged("activity", seen, nvml, 0.0, 1.0).status

    assert status(Check(0.8, "gpm")) == "pass"
    assert status(Check(0.4, "gpm")) == "fail"
    assert status(None) == "absent"
    assert status(Check(0.8, "gpm"), SimpleNamespace(kernels=[], why="nothing")) == "fail"


def test_the_hand_written_variant_trains_the_same() -> None:
    def trained(fn: Any) -> dict[str, torch.Tensor]:
        training = Training(fn, "cpu", Size(8, 4, 8))
        for _ in range(3):
            training.step()
        return training.tensors()

    written, by_streams = trained(iteration), trained(partial(by_hand, TorchStreams("cpu")))
    assert all(torch.equal(value, by_streams[name]) for name, value in written.items())


def test_the_workload_is_one_line_of_ratios() -> None:
    size = Size(8, 2, 8, Camera)
    line = gpu_check.workload("seen", "cpu", size, 0.2, ("as written", "compiled"))
    assert line.status in ("pass", "fail")
    assert line.values["as written, times as written"] == 1.0
    assert "compiled" in line.detail
    found = {"as written": Measured(10.0, 0.25), "compiled": Measured(8.0, 0.5)}
    line = gpu_check.compared("x", found)
    assert (line.status, line.values["compiled, SM activity"]) == ("pass", 0.5)
    assert line.detail.endswith("SM activity +25.0 points")
    assert gpu_check.compared("x", {**found, "compiled": Measured(12.0, None)}).status == "fail"


def test_pictures_show_where_the_rod_is() -> None:
    camera = Camera(2)
    camera.state = torch.tensor([[0.0, 0.0], [torch.pi / 2, 8.0]])
    rods, moving = camera.observe(camera.state).unflatten(1, (2, 32, 32)).unbind(1)
    assert rods[0, 16, 28] > 0.9 > 0.1 > rods[0, 16, 4]  # up: along y
    assert rods[1, 28, 16] > 0.9 > 0.1 > rods[1, 4, 16]  # to the side: along x
    assert not moving[0].any()
    assert torch.equal(moving[1], rods[1])


def test_streams_are_judged_by_what_the_sanitizer_prints() -> None:
    race = f"blah\n{gpu_streams.SANITIZER_ERROR}\n"
    both = "ratio compiled 1.10\nratio by hand {}"
    line = gpu_streams.overlap(lambda _: both.format("1.20"))
    assert (line.status, line.values["compiled, ratio"]) == ("pass", 1.1)
    assert gpu_streams.overlap(lambda _: both.format("1.90")).status == "fail"
    assert gpu_streams.overlap(lambda _: f"{both.format('1.1')}\n{race}").status == "fail"
    assert gpu_streams.overlap(lambda _: "ratio compiled 1.1\nError: none").detail == "Error: none"

    def runs(script: str) -> str:
        return race if "fault = 'wait'" in script or "fault = 'record_stream'" in script else "done"

    assert gpu_streams.sanitizer(runs).status == "pass"
    told = gpu_streams.sanitizer(lambda _: "done").detail
    assert told == "not caught: wait, record_stream"
    assert "proper work" in gpu_streams.sanitizer(lambda _: race).detail
    dirty = gpu_streams.sanitizer(lambda s: race if s == gpu_streams._COMPILED else runs(s))
    assert (dirty.status, "a compiled training" in dirty.detail) == ("fail", True)


def test_the_scripts_of_the_sanitizer_run(capsys: pytest.CaptureFixture[str]) -> None:
    for fault in ("", "wait", "record_stream"):
        compile(gpu_streams._RACE.format(fault=fault), "race", "exec")
        compile(gpu_streams._OVERLAP.format(fault=fault), "overlap", "exec")
    code = gpu_streams._COMPILED.replace('"cuda"', '"cpu"').replace("torch.cuda", "torch.cpu")
    exec(compile(code, "compiled", "exec"), {})
    assert capsys.readouterr().out == "done\n"
    code = gpu_streams._EMITTED.replace('"cuda"', '"cpu"').replace("torch.cuda", "torch.cpu")
    exec(compile(code, "emitted", "exec"), {})
    assert capsys.readouterr().out.startswith("ratio ")


def test_equality_holds_here_and_nothing_rewritten_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    line = gpu_equal.compiled_equals_eager("cpu", streams=True)
    assert line.status == "pass"
    assert "streams" in line.detail
    assert gpu_equal.checked("cpu", Size(8, 2, 8)).status == "pass"
    assert gpu_equal.in_a_process("cpu").status == "pass"
    assert "no kernel" in gpu_equal.profiled("cpu", Size(8, 2, 8)).detail
    monkeypatch.setenv("ROSE_FUEL", "0")
    assert "nothing was rewritten" in gpu_equal.compiled_equals_eager("cpu").detail


def test_lanes_are_held_against_what_they_were_lent() -> None:
    line = gpu_lines.disjoint("x", {"a": {0, 1}, "b": {2, 3}}, {"a": 2, "b": 2})
    told = gpu_lanes.returned(line, {"a": set(range(8)), "b": set(range(8))}, {"a": 2, "b": 2})
    assert (told.status, told.detail.endswith("on their own 8, 8")) == ("pass", True)
    assert gpu_lanes.returned(line, {"a": {0, 1}}, {"a": 2}).status == "fail"


@pytest.mark.parametrize(
    ("start", "end", "status"), [(0.2, 1.1, "pass"), (0.9, 1.9, "fail"), (0.0, 2.0, "fail")]
)
def test_device_times_tell_what_ran_together(start: float, end: float, status: str) -> None:
    spans = Span("a", "", 0.0, 1.0), Span("x", "", 0.0, 0.1), Span("b", "stream:b", start, end)
    assert gpu_lanes.told(Timeline(spans)).status == status
    assert gpu_lanes.told(Timeline(spans[:2])).status == "fail"
    assert gpu_lanes.told(None).status == "fail"


def test_a_decision_on_quotas_is_read_from_what_is_explained() -> None:
    won = "  applied [quota] SMs by green contexts (a 64 of 128): 1.2 times the speed"
    assert gpu_lanes.decided(f"x\n{won}", True).status == "pass"
    assert gpu_lanes.decided(won, False).status == "fail"
    assert gpu_lanes.decided("green contexts are passed over: none", True).status == "absent"
    assert gpu_lanes.decided("", True).detail == "nothing was decided in time"
    here = gpu_lanes.quotas(0.01, "cpu", 8)
    assert (here.status, here.detail) == ("fail", "nothing was decided in time")
    assert gpu_lanes.device_times("cpu").detail.startswith("no kernels")


def test_a_lever_that_raises_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> str:
        raise RuntimeError("not permitted")

    levers = {"a": lambda: "there", "b": refused}
    monkeypatch.setattr(gpu_lines, "DEVICE_LEVERS", levers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = {line.check: line for line in gpu_lines.levers([])}
    assert found["lever a"].status == "pass"
    assert (found["lever b"].status, found["lever b"].detail) == (
        "absent",
        "RuntimeError: not permitted",
    )


@pytest.mark.gpu
def test_on_a_device() -> None:
    assert [line for line in gpu_check.check() if line.status == "fail"] == []
