"""Each rule of the virtual GPU, by its number in the module's documentation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose_compiler.base.errors import ConfigError, QuotaError, VerifyError
from rose_compiler.base.gpu import GpuRun, Group, Kernel, VirtualGpu, simulate_gpu
from rose_compiler.base.machine import Machine, known_machines, load_machine

GPU = Machine("gpu", cores=4, sms=128, sm_granularity=8, slice_s=2e-3, switch_s=0.0)
NEAR = 1e-9


def run(*kernels: Kernel, **options: object) -> GpuRun:
    machine = options.pop("machine", GPU)
    return simulate_gpu(kernels, VirtualGpu(machine, **options))  # type: ignore[arg-type]


def two_processes(**options: object) -> dict[str, object]:
    groups = (Group("sim", "p"), Group("net", "q"))
    return {"groups": groups, "lanes": {"a": "sim", "b": "net"}, **options}


# 1. streams


def test_1_a_stream_is_in_order_and_waits_for_events() -> None:
    done = run(Kernel("x", "a", 2, 8), Kernel("y", "a", 1, 8), Kernel("z", "b", 1, 8, ("x",)))
    assert (done.start["y"], done.end["y"]) == (2, 3)
    assert (done.start["z"], done.end["z"]) == (2, 3)
    with pytest.raises(VerifyError, match="verify-deadlock"):
        run(Kernel("x", "a", 1, 8, ("y",)), Kernel("y", "a", 1, 8))


# 2. response


def test_2_fewer_sms_slow_the_parallel_part_alone() -> None:
    half = Machine("half", cores=1, sms=32)
    assert run(Kernel("x", "a", 10, 64), machine=half).makespan == pytest.approx(20)
    assert run(Kernel("x", "a", 10, 64, serial=0.4), machine=half).makespan == pytest.approx(16)
    assert Kernel("x", "a", 1, 64, serial=0.4).speed(200) == 1.0
    assert Kernel("x", "a", 1, 64).speed(0) == 0.0


# 3. sharing in one process


def test_3_kernels_share_in_proportion_and_leave_no_sm_idle() -> None:
    done = run(Kernel("x", "a", 1, 128), Kernel("y", "b", 1, 128))
    assert done.end == {"x": 2, "y": 2}
    # 32 SMs are enough for y, 96 are left for x
    fits = run(Kernel("x", "a", 1, 96), Kernel("y", "b", 1, 32))
    assert fits.end == {"x": 1, "y": 1}
    assert fits.activity == pytest.approx(1.0)
    assert run(Kernel("x", "a", 1, 64)).activity == pytest.approx(0.5)


def test_3_priorities_are_served_first() -> None:
    done = run(Kernel("x", "a", 1, 96), Kernel("y", "b", 1, 96), priority={"a": -1})
    assert done.end["x"] == 1
    # y had the 32 SMs left for a second, then all it can use
    assert done.end["y"] == pytest.approx(1 + (1 - 32 / 96))
    blocked = run(Kernel("x", "a", 1, 128), Kernel("y", "b", 1, 64), priority={"a": -1})
    assert blocked.end == {"x": 1, "y": 2}


def test_3_long_kernels_hold_up_short_ones() -> None:
    done = run(Kernel("x", "a", 1, 128, grain=3.0), Kernel("y", "b", 1, 128))
    assert done.end["x"] == pytest.approx(4 / 3)  # three quarters of the SMs
    assert done.end["y"] == pytest.approx(2)
    fits = run(Kernel("x", "a", 1, 96, grain=3.0), Kernel("y", "b", 1, 32))
    assert fits.end == {"x": 1, "y": 1}


def test_3_the_gaps_of_one_are_filled_by_others() -> None:
    both = [Kernel("x", "a", 1, 128, serial=0.5), Kernel("y", "b", 1, 128, serial=0.5)]
    shared = run(*both).makespan
    # never better than without any wait, and better than half the SMs each; by mean value analysis
    # of two customers, half of whose time is service, it would be 1.25
    assert 1.0 < shared < Kernel("x", "a", 1, 128, serial=0.5).speed(64) ** -1
    assert shared == pytest.approx(1.25, rel=0.06)
    apart = run(
        *both,
        groups=(Group("p", sms=64, exclusive=True), Group("q", sms=64, exclusive=True)),
        lanes={"a": "p", "b": "q"},
    )
    assert apart.makespan == pytest.approx(1.5)  # nobody fills the gaps of exclusive SMs


# 4. time slicing


def test_4_processes_take_turns_without_mps() -> None:
    kernels = [Kernel("x", "a", 1, 32), Kernel("y", "b", 1, 32)]
    alone = run(*kernels)
    assert alone.makespan == 1
    turns = run(*kernels, **two_processes())
    assert turns.end == {"x": 2, "y": 2}
    assert turns.activity == pytest.approx(alone.activity / 2)


def test_4_a_switch_costs_time_only_while_there_are_others() -> None:
    slow = Machine("slow", cores=1, sms=128, slice_s=2e-3, switch_s=1e-3)
    done = run(Kernel("x", "a", 1, 32), Kernel("y", "b", 2, 32), machine=slow, **two_processes())
    assert done.end["x"] == pytest.approx(3.0)
    assert done.end["y"] == pytest.approx(4.0)


def test_4_turns_are_what_slices_one_after_the_other_come_to() -> None:
    machine = Machine("m", cores=1, sms=128, slice_s=0.01, switch_s=0.002)
    left = {"x": 0.5, "y": 1.0}
    now, ends = 0.0, {}
    while left:  # the slices themselves, one after the other
        for name in list(left):
            used = min(machine.slice_s, left[name])
            now += used + (machine.switch_s if len(left) > 1 else 0.0)
            left[name] -= used
            if left[name] <= 1e-12:
                del left[name]
                ends[name] = now
    done = run(Kernel("x", "a", 0.5), Kernel("y", "b", 1.0), machine=machine, **two_processes())
    assert done.end == pytest.approx(ends, rel=0.03)


# 5. MPS


def test_5_with_mps_processes_share() -> None:
    kernels = [Kernel("x", "a", 1, 64), Kernel("y", "b", 1, 64)]
    assert run(*kernels, **two_processes(mps=True)).end == {"x": 1, "y": 1}


def test_5_a_cap_is_rounded_down_to_chunks_and_has_no_effect_without_mps() -> None:
    groups = (Group("sim", "p", 31), Group("net", "q"))
    options = {"groups": groups, "lanes": {"a": "sim", "b": "net"}}
    capped = run(Kernel("x", "a", 1, 48), mps=True, **options)
    assert capped.makespan == 2  # 24 SMs of 48
    assert run(Kernel("x", "a", 1, 48), **options).makespan == 1


def test_5_caps_may_add_up_to_more_than_there_is() -> None:
    groups = (Group("sim", "p", 96), Group("net", "q", 96))
    done = run(
        Kernel("x", "a", 1, 96),
        Kernel("y", "b", 1, 96),
        groups=groups,
        lanes={"a": "sim", "b": "net"},
        mps=True,
    )
    assert done.makespan == pytest.approx(96 / 64)


def test_5_mps_serves_a_limited_number_of_processes() -> None:
    small = Machine("small", cores=1, sms=8, max_clients=2)
    groups = tuple(Group(f"g{k}", f"p{k}") for k in range(3))
    VirtualGpu(small, groups)
    with pytest.raises(QuotaError, match="quota-clients"):
        VirtualGpu(small, groups, mps=True)


# 6. exclusive groups


def test_6_exclusive_sms_are_nobody_elses() -> None:
    options = {
        "groups": (Group("green", sms=32, exclusive=True),),
        "lanes": {"a": "green"},
    }
    done = run(Kernel("x", "a", 1, 64), Kernel("y", "b", 1, 128), **options)
    assert done.end["x"] == 2
    assert done.end["y"] == pytest.approx(128 / 96)
    assert run(Kernel("y", "b", 1, 128), **options).makespan == pytest.approx(128 / 96)


def test_6_exclusive_groups_must_fit() -> None:
    too_much = (Group("g", sms=96, exclusive=True), Group("h", sms=40, exclusive=True))
    with pytest.raises(QuotaError, match="quota-overcommitted"):
        VirtualGpu(GPU, too_much)
    apart = (
        Group("g", "p", sms=96, exclusive=True),
        Group("h", "q", sms=40, exclusive=True),
    )
    VirtualGpu(GPU, apart)  # in turns, each has the device to itself
    with pytest.raises(QuotaError, match="quota-overcommitted"):
        VirtualGpu(GPU, apart, mps=True)
    with pytest.raises(QuotaError, match="quota-minimum"):
        VirtualGpu(GPU, (Group("g", sms=4),))


def test_6_who_has_no_sm_left_is_told() -> None:
    options = {"groups": (Group("all", sms=128, exclusive=True),), "lanes": {"a": "all"}}
    with pytest.raises(QuotaError, match="quota-minimum"):
        run(Kernel("y", "b", 1, 8), **options)


# 7. memory


def test_7_bandwidth_slows_those_that_ask_for_the_most() -> None:
    done = run(
        Kernel("x", "a", 1, 32, bandwidth=0.8),
        Kernel("y", "b", 1, 32, bandwidth=0.8),
        Kernel("z", "c", 1, 32, bandwidth=0.1),
    )
    assert done.end["z"] == 1
    # 0.45 of the bandwidth each while z runs, half of it afterwards
    assert done.end["x"] == pytest.approx(1 + (1 - 0.45 / 0.8) / (0.5 / 0.8))
    assert run(Kernel("x", "a", 1, 32, bandwidth=1.0)).makespan == 1


def test_7_a_slowed_kernel_asks_for_less() -> None:
    done = run(
        Kernel("x", "a", 1, 128, bandwidth=1.0),
        Kernel("y", "b", 1, 128, bandwidth=1.0),
    )
    assert done.end == {"x": 2, "y": 2}  # half the SMs each: no second loss


# 8. graphics


def test_8_graphics_take_turns_even_under_mps() -> None:
    kernels = [Kernel("x", "a", 1, 32), Kernel("y", "b", 1, 32), Kernel("z", "c", 1, 32)]
    done = run(*kernels, mps=True, graphics=frozenset({"q"}), **two_processes())
    assert done.end == {"x": 2, "z": 2, "y": 2}  # a and c together, then b
    groups = (Group("sim", "p", 128, exclusive=True), Group("net", "q"))
    alone = run(
        Kernel("y", "b", 1, 128),
        groups=groups,
        lanes={"a": "sim", "b": "net"},
        mps=True,
        graphics=frozenset({"q"}),
    )
    assert alone.makespan == 1  # in its turn it has all SMs, whoever owns them


# 9. CPU


def test_9_the_cpu_is_another_pool() -> None:
    done = run(
        Kernel("x", "a", 1, 4, device="cpu"),
        Kernel("y", "b", 1, 4, device="cpu"),
        Kernel("z", "c", 1, 128),
    )
    assert done.end == {"x": 2, "y": 2, "z": 1}
    assert done.activity == pytest.approx(0.5)


def test_activity_of_the_serial_part_is_idle() -> None:
    done = run(Kernel("x", "a", 1, 128, serial=0.25))
    assert done.activity == pytest.approx(0.75)


def test_malformed_kernels_and_lanes_are_refused() -> None:
    with pytest.raises(ValueError, match="shares from 0 to 1"):
        Kernel("x", "a", 1, 8, serial=1.5)
    with pytest.raises(ValueError, match="does not exist"):
        VirtualGpu(GPU, lanes={"a": "nobody"})


@st.composite
def kernel_sets(draw: st.DrawFn) -> list[Kernel]:
    kernels: list[Kernel] = []
    for i in range(draw(st.integers(1, 8))):
        after = draw(st.sets(st.sampled_from(range(i)), max_size=2)) if i else set()
        kernels.append(
            Kernel(
                f"k{i}",
                draw(st.sampled_from("abc")),
                draw(st.integers(0, 16)) / 4,
                draw(st.sampled_from([8.0, 40.0, 64.0, 128.0])),
                tuple(f"k{k}" for k in sorted(after)),
                draw(st.sampled_from([0.0, 0.25, 0.5])),
                draw(st.sampled_from([0.0, 0.3, 0.9])),
                draw(st.sampled_from(["gpu", "gpu", "cpu"])),
                draw(st.sampled_from([0.5, 1.0, 4.0])),
            )
        )
    return kernels


divisions = st.sampled_from(
    [
        {},
        {"mps": True},
        {"priority": {"a": -1}},
        {"groups": (Group("p", "p"), Group("q", "q")), "lanes": {"a": "p", "b": "q"}},
        {
            "groups": (Group("p", "p", 64), Group("q", "q", 96)),
            "lanes": {"a": "p", "b": "q"},
            "mps": True,
        },
        {"groups": (Group("p", sms=40, exclusive=True),), "lanes": {"a": "p"}},
    ]
)


@given(kernel_sets(), divisions)
def test_no_division_makes_a_kernel_faster_than_alone_or_the_gpu_more_than_full(
    kernels: list[Kernel], options: dict[str, object]
) -> None:
    done = run(*kernels, **options)
    for kernel in kernels:
        assert done.end[kernel.name] - done.start[kernel.name] >= kernel.work_s - NEAR
        assert all(done.start[kernel.name] >= done.end[name] - NEAR for name in kernel.after)
    assert all(0 <= i.activity <= 1 + NEAR for i in done.intervals)
    assert all(i.end > i.start for i in done.intervals)


@given(kernel_sets(), divisions)
def test_active_sms_are_conserved_without_contention_for_memory(
    kernels: list[Kernel], options: dict[str, object]
) -> None:
    """The same work keeps the same SM-seconds active, however it is scheduled."""
    still = [replace(k, bandwidth=0.0) for k in kernels]
    done = run(*still, **options)
    work = sum(k.work_s * k.demand * (1 - k.serial) for k in still if k.device == "gpu")
    assert done.activity * done.makespan * GPU.sms == pytest.approx(work)


# descriptions


def test_machines_are_described_by_small_files(tmp_path: Path) -> None:
    assert "h200" in known_machines()
    for name in known_machines():
        machine = load_machine(name)
        assert machine.sms > machine.chunk > 1
        assert machine.bandwidth_bytes_per_s
    h200 = load_machine("H200")
    assert (h200.sms, h200.chunks, h200.chunk) == (132, 16, 8)
    own = tmp_path / "own.json"
    own.write_text('{"name": "own", "cores": 2, "sms": 20, "sm_granularity": 4}')
    assert load_machine(own).chunks == 5


def test_an_unknown_or_broken_description_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'h20'"):
        load_machine("h2o")
    broken = tmp_path / "broken.toml"
    for text in ("sms = ", 'name = "x"', 'name = "x"\ncores = 1\nsms = -1'):
        broken.write_text(text)
        with pytest.raises(ConfigError, match="config-machine"):
            load_machine(broken)
    with pytest.raises(ConfigError, match="config-machine"):
        load_machine(tmp_path / "absent.json")
