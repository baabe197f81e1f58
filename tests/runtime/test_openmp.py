"""Threads that rest give their pool of OpenMP back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from rose_compiler.runtime import openmp
from rose_compiler.runtime.hosts.thread import ThreadHost
from rose_compiler.runtime.lanes import ThreadLane
from tests.awake import until

pytestmark = pytest.mark.skipif(
    "libgomp" not in Path("/proc/self/maps").read_text()
    if Path("/proc/self/maps").exists()
    else True,
    reason="another OpenMP, or none",
)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads rest early, so that tests don't wait."""
    monkeypatch.setattr(openmp, "REST_S", 0.02)


def natives() -> int:
    """Threads of this process, Python's own left out."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


def parallel() -> int:
    """An operation on two threads; how many threads there are then."""
    torch.set_num_threads(2)
    torch.randn(1 << 20).exp_()
    return natives()


class Worker:
    """A component that computes."""

    def run(self) -> int:
        return parallel()


def lane_() -> tuple[Callable[[], int], Any]:
    lane = ThreadLane("test")
    return (lambda: lane.submit(0, parallel).wait()), lane  # type: ignore[no-any-return]


def host_() -> tuple[Callable[[], int], Any]:
    host = ThreadHost(Worker, name="test")
    return (lambda: host.call("run")), host  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [lane_, host_])
def test_a_thread_without_work_keeps_no_pool(make: Any) -> None:
    run, owner = make()
    threads = torch.get_num_threads()
    try:
        parallel()  # here too, as in a training: this thread keeps its own
        before = natives()
        for _ in range(2):  # whoever has rested works again
            assert run() == before + 1
            until(lambda: natives() <= before, pause=0.005)
            assert natives() == before
    finally:
        owner.close()
        torch.set_num_threads(threads)


def test_what_comes_at_once_is_taken_without_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[int] = []
    monkeypatch.setattr(openmp, "rest", lambda: rests.append(1))
    queue: SimpleQueue[int] = SimpleQueue()
    queue.put(1)
    assert openmp.next_of(queue) == 1
    assert not rests
    timer = threading.Timer(5 * openmp.REST_S, queue.put, [2])
    timer.start()
    assert openmp.next_of(queue) == 2
    assert rests == [1]


def test_where_there_is_no_libgomp_it_is_looked_for_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Reading a process's mappings takes half a millisecond, and a thread rests often."""
    asked: list[str] = []
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 00000000 08:01 1  /lib/libc.so.6\n")
    monkeypatch.setattr(openmp, "_found", [])
    monkeypatch.setattr(openmp, "_none", False)
    monkeypatch.setattr(openmp, "Path", lambda path: asked.append(path) or tmp_path / "maps")
    for _ in range(3):
        openmp.rest()
    assert asked == ["/proc/self/maps"]
    asked.clear()
    monkeypatch.setattr(openmp, "_none", False)
    monkeypatch.delitem(openmp.sys.modules, "torch._C")
    openmp.rest()
    openmp.rest()
    assert len(asked) == 2, "torch may bring it later"
