"""What inline, thread and process hosts have in common, and what each adds."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from host_parts import BadClose, Closing, Part, failing_factory, light

from rose_compiler.base.errors import FactoryError, HostTimeout, RuntimeFault
from rose_compiler.runtime.hosts import InlineHost, ProcessHost, ThreadHost
from tests.awake import within

KINDS: tuple[Any, ...] = (InlineHost, ThreadHost, ProcessHost)


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    hosts: list[Any] = []

    def build(kind: Any, factory: Any = Part, **kwargs: Any) -> Any:
        hosts.append(kind(factory, **kwargs))
        return hosts[-1]

    yield build
    for host in hosts:
        host.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("kind", KINDS)
def test_calls_run_in_order_of_submission(make: Any, kind: Any) -> None:
    host = make(kind, functools.partial(Part, 10))
    tickets = [host.submit("add", i, times=2) for i in range(20)]
    expected = [10 + 2 * sum(range(i + 1)) for i in range(20)]
    assert [host.wait(ticket) for ticket in reversed(tickets)] == expected[::-1]
    assert host.call("nothing") is None
    assert host.call("text") == b"raw \x00 bytes"
    assert host.call("echo", {"a": [1, (2,)]}) == {"a": [1, (2,)]}


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_keeps_its_type_and_the_host_goes_on(make: Any, kind: Any) -> None:
    host = make(kind)
    failed = host.submit("fail", "value")
    after = host.submit("add", 1)
    with pytest.raises(ValueError, match="wrong value"):
        host.wait(failed)
    assert host.wait(after) == 1
    with pytest.raises(AttributeError):
        host.call("no_such_method")
    assert host.call("add", 1) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_close_closes_the_component_and_ends_use(make: Any, kind: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    host = make(kind, functools.partial(Closing, str(path)), name="arm")
    host.call("add", 1)
    host.close()
    host.close()
    assert path.read_text() == "closed\n"
    with pytest.raises(RuntimeFault, match="'arm' was closed"):
        host.call("add", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_what_close_raises_is_raised(kind: Any) -> None:
    host = kind(BadClose)
    host.ready()
    with pytest.raises(OSError, match="can't be closed"):
        host.close()
    host.close()


@pytest.mark.parametrize("kind", [ThreadHost, ProcessHost])
def test_a_factory_that_raises_in_its_host(kind: Any) -> None:
    host = kind(failing_factory, name="arm")
    with pytest.raises(FactoryError, match="'arm' raised KeyError") as caught:
        host.ready()
    assert isinstance(caught.value.__cause__, KeyError)
    assert "no such robot" in str(caught.value)
    with pytest.raises(FactoryError):
        host.call("add", 1)
    host.close()


@pytest.mark.parametrize("kind", [ThreadHost, ProcessHost])
def test_calls_of_two_hosts_run_at_the_same_time(make: Any, kind: Any, tmp_path: Path) -> None:
    first, second = make(kind), make(kind)
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    tickets = [first.submit("meet", *paths), second.submit("meet", *paths[::-1])]
    assert first.wait(tickets[0])
    assert second.wait(tickets[1])


@pytest.mark.parametrize("kind", [ThreadHost, ProcessHost])
def test_time_out(kind: Any) -> None:
    host = kind(Part, name="arm", timeout=0.3)
    host.ready()
    with within(2.5):
        with pytest.raises(HostTimeout, match=r"'arm'.*did not finish sleep\(\)"):
            host.call("sleep", 3.0)
        with pytest.raises(HostTimeout):
            host.call("add", 1)
    host.close()
    assert not host.usable


def test_a_limit_for_one_call(make: Any) -> None:
    host = make(ProcessHost, timeout=0.3)
    assert host.wait(host.submit("sleep", 0.6), timeout=5.0) == 0.6


def test_inline_host_runs_in_the_callers_thread(make: Any) -> None:
    assert make(InlineHost).call("thread") == threading.current_thread().name


def test_thread_host_runs_in_its_own_thread(make: Any) -> None:
    assert make(ThreadHost, name="arm").call("thread") == "rose-arm"


def test_thread_host_limits_torch_in_its_own_thread_only(make: Any) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert make(ThreadHost).call("torch_threads") == 1
        assert torch.get_num_threads() == 2
        later: list[int] = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [2]
        assert make(ThreadHost, torch_threads=None).call("torch_threads") == 2
    finally:
        torch.set_num_threads(before)


def test_thread_host_ends_when_it_is_collected() -> None:
    host = ThreadHost(Part, name="collected")
    host.call("add", 1)
    thread = host._thread
    del host
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_thread_host_lets_go_of_arguments_and_results(make: Any) -> None:
    import weakref

    class Big:
        pass

    host = make(ThreadHost)
    big = Big()
    seen = weakref.ref(big)
    assert host.call("echo", big) is big
    del big
    host.call("add", 1)
    gc.collect()
    assert seen() is None


def test_process_host_ends_when_it_is_collected() -> None:
    host = ProcessHost(Part)
    pid = host.call("pid")
    assert alive(pid)
    del host
    gc.collect()
    assert not alive(pid)


def test_process_host_outlives_the_thread_that_started_it() -> None:
    """The kernel's death signal follows the starting thread, so it must not be asked for here."""
    hosts: list[ProcessHost] = []

    def start() -> None:
        hosts.append(ProcessHost(Part))
        hosts[0].ready()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert hosts[0].call("add", 2) == 2
    hosts[0].close()


def test_a_forked_copy_of_the_parent_leaves_its_workers_alone(make: Any) -> None:
    host = make(ProcessHost)
    host.call("add", 1)
    child = os.fork()
    if child == 0:
        try:
            host.kill()
            host._finalizer()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert host.call("add", 1) == 2


def test_a_worker_loads_only_what_the_factory_needs(make: Any) -> None:
    assert make(ProcessHost, light).call("loaded") == []


def test_a_worker_runs_numeric_libraries_on_one_thread(make: Any) -> None:
    host = make(ProcessHost)
    assert host.call("variable", "OMP_NUM_THREADS") == "1"
    assert host.call("variable", "MKL_NUM_THREADS") == "1"
    other = make(ProcessHost, environment={"OMP_NUM_THREADS": "2", "ROBOT": "arm"})
    assert other.call("variable", "OMP_NUM_THREADS") == "2"
    assert other.call("variable", "ROBOT") == "arm"


def test_shared_memory(make: Any) -> None:
    host = make(ProcessHost)
    first, length = host.share("attach", 8 * 1000, 5)
    assert length == 5
    assert bytes(first) == bytes(8000)
    view = np.frombuffer(first, np.float64)
    view[:] = np.arange(1000)
    host.call("double")
    np.testing.assert_array_equal(view, 2.0 * np.arange(1000))
    second, _ = host.share("attach", 8 * 3, 1)
    other = np.frombuffer(second, np.float64)
    other[:] = 1.0
    host.call("double")
    np.testing.assert_array_equal(other, 2.0)
    np.testing.assert_array_equal(view, 2.0 * np.arange(1000))


def test_large_arguments_and_results_in_flight_do_not_block(make: Any) -> None:
    """Both sides' socket buffers fill: sending must go on reading replies."""
    host = make(ProcessHost, timeout=60.0)
    blob = os.urandom(3_000_000)
    tickets = [host.submit("echo", blob) for _ in range(6)]
    assert all(host.wait(ticket) == blob for ticket in tickets)


def test_sending_to_a_busy_worker_is_limited(make: Any) -> None:
    host = make(ProcessHost, timeout=0.5)
    host.ready()
    host.submit("sleep", 5.0)
    with within(4):
        ticket = host.submit("echo", bytes(16_000_000))  # more than a socket holds
        with pytest.raises(HostTimeout):
            host.wait(ticket)
