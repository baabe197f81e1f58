from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_compiler.base.errors import QuotaError
from rose_compiler.base.gpu import Kernel, simulate_gpu
from rose_compiler.base.machine import Machine, load_machine
from rose_compiler.base.quota import ANY_DEVICE, BY_PROCESS, QuotaPlan, Share

H200 = load_machine("h200")
TWO = Machine("two", cores=2)
UUID = "GPU-0d6c2d24"


def plan(backend: str = "mps-percentage", **chunks: int) -> QuotaPlan:
    return QuotaPlan.divide(backend, H200, chunks or {"sim": 4, "net": 12})  # type: ignore[arg-type]


def test_percentages_come_to_the_chunks_when_rounded_down() -> None:
    for chunks in range(1, 17):
        one = plan(a=chunks)
        exact = H200.sms * one.percentage("a") / 100
        assert int(exact) // H200.chunk == chunks


def test_environment_and_commands_of_each_back_end() -> None:
    by_percentage = plan().on(UUID)
    assert by_percentage.environment("sim") == {
        "CUDA_VISIBLE_DEVICES": UUID,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
    }
    assert by_percentage.daemon_arguments() == ("-d",)
    assert [c.split()[0] for c in by_percentage.daemon_commands()] == ["start_server"]

    by_partition = plan("mps-partition").on(UUID)
    assert by_partition.daemon_arguments() == ("-d", "-S")
    assert by_partition.daemon_commands() == (
        f"sm_partition add {UUID} 4",
        f"sm_partition add {UUID} 12",
    )
    assert by_partition.environment("net", f"{UUID}/b")["CUDA_MPS_SM_PARTITION"] == f"{UUID}/b"
    with pytest.raises(QuotaError, match="sm_partition add"):
        by_partition.environment("net")

    green = plan("green-context")
    assert (green.environment("sim"), green.daemon_commands()) == ({}, ())
    assert green.daemon_arguments() == ()
    assert {share.process for share in green.shares} == {"main"}

    cores = QuotaPlan.divide("cores", TWO, {"sim": 1, "net": 1})
    assert cores.environment("sim")["OMP_NUM_THREADS"] == "1"
    assert [share.cores for share in cores.shares] == [(0,), (1,)]


def test_a_plan_without_a_device_names_none() -> None:
    assert plan().device == ANY_DEVICE
    assert "CUDA_VISIBLE_DEVICES" not in plan().environment("sim")
    assert ANY_DEVICE in plan("mps-partition").daemon_commands()[0]


@pytest.mark.parametrize(
    ("code", "shares"),
    [
        ("quota-overcommitted", [Share("a", 64, "p"), Share("b", 72, "q")]),
        ("quota-granularity", [Share("a", 20, "p")]),
        ("quota-minimum", [Share("a", 0, "p")]),
        ("quota-minimum", [Share("a", 4, "p")]),
        ("quota-plan", [Share("a", 8, "p"), Share("a", 8, "p")]),
        ("quota-plan", [Share("a", 8, "p"), Share("b", 16, "p")]),
    ],
)
def test_a_plan_that_can_not_be_had_is_refused(code: str, shares: list[Share]) -> None:
    with pytest.raises(QuotaError, match=code):
        QuotaPlan("mps-percentage", H200, tuple(shares))


def test_what_else_is_refused() -> None:
    many = tuple(Share(f"l{k}", 8, f"p{k}") for k in range(3))
    few = replace(H200, max_clients=2)
    with pytest.raises(QuotaError, match="quota-clients"):
        QuotaPlan("mps-percentage", few, many)
    with pytest.raises(QuotaError, match="did you mean 'mps-partition'"):
        plan("mps-partitions")
    with pytest.raises(QuotaError, match="has no SMs"):
        QuotaPlan.divide("mps-percentage", TWO, {"a": 1})
    with pytest.raises(QuotaError, match="did you mean 'sim'"):
        plan().environment("sin")
    for wrong in ({"device": 3}, {"predicted_s": "a"}, {"before_s": [1.0]}):
        with pytest.raises(QuotaError, match="quota-plan"):
            QuotaPlan.from_dict({**plan().to_dict(), **wrong})
    for cores in ((0,), (0, 0)):
        with pytest.raises(QuotaError, match="quota-"):
            QuotaPlan("cores", TWO, (Share("a", 2, "a", cores),))
    for cores in ((-1,), (2,)):  # counted from the end, -1 would be a core of somebody else's
        with pytest.raises(QuotaError, match="no such core"):
            QuotaPlan("cores", TWO, (Share("a", 1, "a", cores),))
    with pytest.raises(QuotaError, match="no whole number"):
        QuotaPlan("cores", TWO, (Share("a", 1.0, "a", (0,)),))  # type: ignore[arg-type]
    with pytest.raises(QuotaError, match="does not divide a GPU"):
        QuotaPlan.divide("cores", TWO, {"a": 1}).virtual_gpu()


def test_lanes_of_a_process_count_once() -> None:
    both = QuotaPlan.divide(
        "mps-percentage", H200, {"a": 10, "b": 10}, process={"a": "p", "b": "p"}
    )
    assert both.given == 80
    with pytest.raises(QuotaError, match="quota-overcommitted"):
        QuotaPlan.divide("green-context", H200, {"a": 10, "b": 10})


def test_explain_says_who_gets_what_and_why() -> None:
    made = QuotaPlan.divide(
        "mps-percentage",
        H200,
        {"sim": 4, "net": 12},
        why={"net": "critical"},
        before_s=2.0,
        predicted_s=1.6,
        notes=("static partitions: absent",),
    )
    assert made.explain().splitlines() == [
        "quotas on NVIDIA H200 by mps-percentage: 128 of 132 SMs, in chunks of 8",
        "  sim    32 SMs,  24%",
        "  net    96 SMs,  73%  critical",
        "  predicted: 2 s an iteration without, 1.6 s with it (1.25x)",
        "  static partitions: absent",
    ]
    assert "no lane has a quota" in QuotaPlan("mps-percentage", H200).explain()


def test_a_plan_divides_the_virtual_gpu_as_its_back_end_would() -> None:
    kernels = [Kernel("x", "sim", 1.0, 64), Kernel("y", "net", 1.0, 96)]
    for backend in ("mps-percentage", "mps-partition", "green-context"):
        gpu = plan(backend).virtual_gpu()
        assert gpu.mps == (backend in BY_PROCESS)
        done = simulate_gpu(kernels, gpu)
        assert done.end == pytest.approx({"x": 2.0, "y": 1.0})


def test_a_file_that_is_no_plan_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    good = plan().to_dict()
    for data in ([], {}, {**good, "format": 2}, {**good, "more": 1}, {**good, "shares": [{}]}):
        file.write_text(json.dumps(data))
        with pytest.raises(QuotaError, match="quota-file"):
            QuotaPlan.load(file)
    file.write_text("{")
    with pytest.raises(QuotaError, match="quota-file"):
        QuotaPlan.load(file)
    file.write_text(json.dumps({**good, "machine": {**good["machine"], "sms": 64}}))
    with pytest.raises(QuotaError, match="quota-overcommitted"):
        QuotaPlan.load(file)


@st.composite
def divisions(draw: st.DrawFn) -> tuple[str, Machine, dict[str, int]]:
    backend = draw(st.sampled_from(["mps-percentage", "mps-partition", "green-context", "cores"]))
    machine = Machine(
        "m",
        cores=draw(st.integers(1, 8)),
        sms=draw(st.integers(8, 140)),
        sm_granularity=draw(st.sampled_from([1, 2, 4, 8])),
    )
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5))
    return backend, machine, {f"l{k}": count for k, count in enumerate(counts)}


@given(divisions())
def test_a_plan_is_whole_chunks_never_over_committed_or_refused(
    given_: tuple[str, Machine, dict[str, int]],
) -> None:
    backend, machine, chunks = given_
    size = 1 if backend == "cores" else machine.chunk
    capacity = machine.cores if backend == "cores" else machine.sms
    fits = min(chunks.values()) >= 1 and sum(chunks.values()) * size <= capacity
    if not fits:
        with pytest.raises(QuotaError):
            QuotaPlan.divide(backend, machine, chunks)  # type: ignore[arg-type]
        return
    made = QuotaPlan.divide(backend, machine, chunks)  # type: ignore[arg-type]
    assert made.given <= made.capacity
    assert all(share.units % made.chunk == 0 and share.units > 0 for share in made.shares)
    if backend == "mps-percentage":
        assert sum(machine.sms * made.percentage(lane) // 100 // size for lane in chunks) <= (
            machine.chunks
        )
    assert QuotaPlan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    assert pickle.loads(pickle.dumps(made)) == made


def test_save_and_load(tmp_path: Path) -> None:
    made = QuotaPlan.divide("cores", TWO, {"a": 2}, notes=("a note",), before_s=1.0)
    made.save(tmp_path / "plan.json")
    assert QuotaPlan.load(tmp_path / "plan.json") == made
