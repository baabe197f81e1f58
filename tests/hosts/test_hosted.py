"""Components in hosts of their own: values, versions of parameters, faults, nothing left behind."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_parts import Learner

from rose_compiler.base.errors import ConfigError, FactoryError, HostDied, HostTimeout, RuntimeFault
from rose_compiler.runtime.hosts import arrays, parameters
from rose_compiler.runtime.hosts.hosted import Hosted
from rose_compiler.runtime.hosts.making import Kind, hosted
from rose_compiler.runtime.hosts.pending import Pending, begin
from rose_compiler.runtime.hosts.places import Places
from rose_compiler.runtime.hosts.process import ProcessHost
from tests.awake import within


@pytest.fixture(scope="module")
def process() -> Iterator[Hosted]:
    with hosted(Learner, name="learner", environment={"ROSE_MARK": "set"}) as made:
        yield made


@pytest.fixture(params=["process", "thread", "inline"])
def learner(request: pytest.FixtureRequest, process: Hosted) -> Iterator[Hosted]:
    if request.param == "process":
        process.forget()
        yield process
        return
    with hosted(Learner, host=request.param) as made:
        yield made


def test_values_come_back_as_they_were(learner: Hosted) -> None:
    value = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "t": (torch.arange(4, dtype=torch.bfloat16), torch.tensor(True)),
        "n": [None, 1.5, "x", np.float32(2), np.zeros((0, 3))],
        "f": np.asfortranarray(np.arange(4.0).reshape(2, 2)),
    }
    for _ in range(4):  # described, then by number, with room for the results by then
        got = learner.echo(value)
        assert got["a"].dtype == np.int16
        assert np.array_equal(got["a"], value["a"])
        assert torch.equal(got["t"][0], value["t"][0])
        assert got["t"][0].dtype is torch.bfloat16
        assert got["t"][1].item() is True
        assert got["n"][:4] == [None, 1.5, "x", np.float32(2)]
        assert got["n"][4].shape == (0, 3)
        assert np.array_equal(got["f"], value["f"])


@pytest.mark.parametrize("kind", ["process", "thread"])
def test_ctrl_c_on_any_line_of_a_call_leaves_both_sides_agreed(kind: Kind) -> None:
    """Where one of them has new memory, or the number of a call, and the other has not, later
    calls would read something else."""
    parts = (Hosted._issue, Hosted._share, Places.grow, Places._new, ProcessHost.share)
    codes = {part.__code__ for part in parts}
    made, lines, size = hosted(Learner, host=kind), 0, 8

    def each(frame: Any, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code not in codes:
            return None
        lines -= event == "line"
        if not lines:
            raise KeyboardInterrupt
        return each

    for line in range(1, 50):
        size, lines = size + 4096, line
        before = sys.gettrace()
        sys.settrace(each)
        try:
            with suppress(KeyboardInterrupt):
                made.echo(np.full(size, line, np.uint8))
        finally:
            sys.settrace(before)
        for value in (np.arange(size).astype(np.uint8), np.arange(3)):
            assert np.array_equal(made.echo(value), value), line
    made.close()


def test_neither_side_sees_what_the_other_does_to_an_array_later(learner: Hosted) -> None:
    mine = np.zeros(3)
    learner.keep(mine)
    mine += 1
    kept = learner.kept()
    assert np.array_equal(kept[0], np.zeros(3))
    kept[0] += 5
    assert np.array_equal(learner.kept()[0], np.zeros(3))


def test_memory_is_shared_once_for_calls_alike(process: Hosted) -> None:
    process.echo(np.zeros(2000))
    process.echo(np.zeros(2000))
    memory, results = process._memory.arguments, process._memory.results
    shared = process._host._shared
    for k in range(6):
        assert process.echo(np.full(2000, float(k)))[3] == k
        assert process.echo(np.full(10, float(k)))[3] == k  # a smaller one uses the same memory
    assert process._memory.arguments is memory
    assert process._memory.results is results
    assert process._host._shared == shared
    sizes = [os.fstat(process._host._child.memory).st_size]
    process.echo(np.zeros(200_000))  # a larger one takes more
    sizes.append(os.fstat(process._host._child.memory).st_size)
    assert sizes[1] > sizes[0]


def test_values_that_grow_with_every_call_leave_no_memory_behind(process: Hosted) -> None:
    with hosted(Learner) as made:  # that has no memory yet
        for k in range(1, 60):
            found = made.echo(np.full(2000 * k, float(k)))
            assert found.shape == (2000 * k,)
            assert (found == k).all()
        status = os.fstat(made._host._child.memory)
    # two places each for arguments and results, half as large again as they have to be
    assert 512 * status.st_blocks <= 4 * 1.5 * found.nbytes + (1 << 20)
    assert status.st_size <= 3 * 4 * 1.5 * found.nbytes, "made anew for each of the calls"
    for k in range(3):  # kept on neither side
        process.echo([k, "x" * 5000])
    assert max(len(call.blob) for call in process._numbers._known) < 5000


def test_a_call_like_an_earlier_one_is_sent_as_a_number(process: Hosted) -> None:
    sent: list[bytes] = []
    submit = process._host.submit_raw
    process._host.submit_raw = lambda payload, what: sent.append(payload) or submit(payload, what)
    try:
        for k in range(3):
            process.echo(np.full((3, 5, 7), float(k)))
    finally:
        del process._host.submit_raw
    assert [len(payload) for payload in sent][1:] == [16, 16]
    assert len(sent[0]) > 16


def test_many_calls_under_way_keep_their_values(process: Hosted) -> None:
    begun = [begin(process.echo, (np.full(50, float(k)),)) for k in range(7)]
    assert all(isinstance(one, Pending) for one in begun)
    assert [one.result()[0] for one in begun] == list(range(7))
    assert begun[3].times is not None
    assert begun[3].times[0] <= begun[3].times[1]


def test_calls_run_with_the_version_they_were_issued_with(learner: Hosted) -> None:
    first = learner.publish({"w": np.full(3, 1.0)})
    early = [begin(learner.slowly, ()) for _ in range(2)] if learner.hosts != "inline" else []
    second = learner.publish({"w": np.full(3, 2.0)})
    late = begin(learner.weight, ())
    third = learner.publish({"w": np.full(3, 3.0)})
    assert (second, third) == (first + 1, first + 2)
    assert [one.result() for one in early] == [1.0] * len(early)
    assert late.result() == 2.0
    assert (late.version, learner.replied) == (second, second)
    assert learner.weight() == 3.0
    assert (learner.version, learner.replied) == (third, third)


def test_a_module_takes_the_parameters_of_another(process: Hosted) -> None:
    net = torch.nn.Linear(2, 2)
    with hosted(lambda: torch.nn.Linear(2, 2), host="thread") as far:
        far.publish(net)
        x = torch.randn(3, 2)
        assert torch.equal(far(x), net(x))
        assert not far(x).requires_grad
        with torch.no_grad():
            net.weight.zero_()
        assert not torch.equal(far(x), net(x))  # not published yet
        far.publish(net)
        assert torch.equal(far(x), net(x))


def test_a_half_written_version_is_never_read() -> None:
    layouts = (arrays.layout_of(np.zeros(4)),)
    memory = bytearray(parameters.PLACES * parameters.place_size(layouts))
    learner = Learner()
    reader = parameters.Reader(memory, ("w",), layouts, learner)
    parameters.store(memory, 1, [np.full(4, 1.0)], layouts)
    reader.take(1)
    assert learner.weight() == 1.0
    start = 1 * parameters.place_size(layouts)  # version 3 goes where version 1 was
    memory[start : start + 8] = (3).to_bytes(8, "little")
    for version in (1, 3):
        with pytest.raises(RuntimeFault) as caught:
            reader.take(version)
        assert caught.value.code == "host-version"
    assert learner.weight() == 1.0

    def half(state: dict[str, Any]) -> None:  # a writer that begins while the component reads
        memory[start : start + 8] = (5).to_bytes(8, "little")

    parameters.store(memory, 3, [np.full(4, 3.0)], layouts)
    learner.load_state_dict = half  # type: ignore[method-assign]
    with pytest.raises(RuntimeFault):
        reader.take(3)


def test_the_environment_is_there_before_the_component(process: Hosted) -> None:
    assert process.variable("ROSE_MARK") == "set"
    assert process.variable("OMP_NUM_THREADS") == "1"
    core = min(os.sched_getaffinity(0))
    with hosted(Learner, cores=[core], threads=3) as bound:
        assert bound.cores() == {core}
        assert bound.variable("OMP_NUM_THREADS") == "3"
        assert bound.module() != "__main__"
        bound.rose_limit(os.sched_getaffinity(0), None)
        assert bound.cores() == os.sched_getaffinity(0)
    assert core in os.sched_getaffinity(0)


def test_an_exception_is_the_original_and_the_host_goes_on(learner: Hosted) -> None:
    with pytest.raises(KeyError, match="gone"):
        learner.fail()
    assert learner.echo(1) == 1


def test_a_killed_process_and_a_fresh_one_with_the_last_version(process: Hosted) -> None:
    process.publish({"w": np.full(3, 7.0)})
    process.keep(1)
    pid = process.pid
    with within(5):
        with pytest.raises(HostDied, match="'learner'"):
            process.die()
        with pytest.raises(HostDied):
            process.weight()
    process.restart()
    assert process.pid != pid
    assert not Path(f"/proc/{pid}").exists()
    assert process.weight() == 7.0
    assert process.kept() == []


def test_a_hanging_process_is_ended_by_the_time_limit(process: Hosted) -> None:
    process.ready()
    process.timeout = 0.2
    try:
        with pytest.raises(HostTimeout, match="sleep"):
            process.sleep(30)
    finally:
        process.timeout = None
        process.restart()


def test_what_holds_a_factory_back_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(FactoryError, match="captured variable 'lock'"):
        hosted(lambda: lock)
    with pytest.raises(ConfigError, match="host='fork'"):
        hosted(Learner, host="fork")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "asked",
    [
        {"environment": {"OMP_NUM_THREADS": 4}},
        {"environment": {"A=B": "c"}},
        {"cores": [-1]},
        {"cores": []},
        {"cores": "0"},
        {"threads": 0},
    ],
)
def test_what_a_process_can_not_be_started_with_is_named(asked: dict[str, Any]) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as caught:
        hosted(Learner, **asked)
    assert str(next(iter(asked))) in str(caught.value)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert os.sched_getaffinity(0)


@pytest.mark.parametrize("name", ["a\0b", "ü" * 200])
def test_any_name_will_do(name: str) -> None:
    with hosted(Learner, name=name) as learner:
        learner.ready()


def test_what_can_not_travel_is_refused(learner: Hosted) -> None:
    with pytest.raises(RuntimeFault, match="argument of echo"):
        learner.echo(threading.Lock())
    with pytest.raises(RuntimeFault, match="result of lock"):
        learner.lock()
    with pytest.raises(RuntimeFault) as caught:
        learner.echo(torch.ones(1, requires_grad=True) * 2)
    assert caught.value.code == "host-graph"
    with pytest.raises(AttributeError):
        learner.missing()
    with pytest.raises(RuntimeFault, match="no tensor"):
        learner.publish({"w": 3})
    assert learner.echo(2) == 2


def test_nothing_is_left_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    descriptors = len(os.listdir("/proc/self/fd"))
    made = hosted(Learner)
    made.publish({"w": np.zeros(3)})
    made.echo(np.zeros(100))
    pid = made.pid
    made.close()
    made.close()
    assert not Path(f"/proc/{pid}").exists()
    assert set(os.listdir("/dev/shm")) <= before
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    with pytest.raises(RuntimeFault):
        made.echo(1)
