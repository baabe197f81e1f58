"""Methods: compiled from an object, and as a decorator in their class."""

from __future__ import annotations

import copy
import pickle
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch

import rose_compiler
from rose_compiler.api import compiled
from rose_compiler.api.turns import Turn
from rose_compiler.frontend.reachable import fields_of
from rose_compiler.frontend.source import is_user_code, is_user_type


class Counter:
    """Adds up what it is given."""

    def __init__(self) -> None:
        self.total = torch.zeros(2)
        self.calls = 0

    def add(self, value: torch.Tensor, times: int = 2) -> torch.Tensor:
        for _ in range(times):
            self.total = self.total + value
        self.calls += 1
        return self.total * 2

    @rose_compiler.compile(tune=False)
    def decorated(self, value: torch.Tensor) -> torch.Tensor:
        self.total = self.total + value
        return self.total * 2


def test_a_bound_method_runs_its_schedule() -> None:
    eager, counter = Counter(), Counter()
    add = rose_compiler.compile(counter.add, tune=False)
    for k in range(3):
        assert torch.equal(eager.add(torch.ones(2) * k), add(torch.ones(2) * k))
    assert torch.equal(eager.total, counter.total)
    assert counter.calls == 3
    assert add._last is not None
    assert add._last.unit.last is not None
    assert "re-captured" not in add.explain()


def test_a_bound_method_takes_keywords() -> None:
    counter = Counter()
    add = rose_compiler.compile(counter.add, tune=False)
    add(value=torch.ones(2), times=3)
    assert counter.total.tolist() == [3.0, 3.0]


def test_a_decorated_method_keeps_objects_apart() -> None:
    first, second = Counter(), Counter()
    for _ in range(2):
        first.decorated(torch.ones(2))
    second.decorated(torch.ones(2))
    assert first.total.tolist() == [2.0, 2.0]
    assert second.total.tolist() == [1.0, 1.0]


@dataclass
class Record:
    """Equal to every other with the same name, and not hashable."""

    name: str
    calls: int = 0

    @rose_compiler.compile(tune=False)
    def count(self) -> int:
        for _ in range(2):
            self.calls += 1
        return self.calls

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self.name == other.name


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0

    count = Record.__dict__["count"]


def test_a_decorated_method_goes_by_the_object_not_by_what_equals_it() -> None:
    for first, second in ((Record("a"), Record("a")), (Slotted(), Slotted())):
        assert [first.count(), first.count(), second.count(), first.count()] == [2, 4, 2, 6]
        assert first.count is first.count


def test_a_decorated_method_keeps_the_objects_that_it_was_called_on_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "MAX_BOUND", 2)
    first, *others = [Record(str(k)) for k in range(4)]
    kept = first.count
    assert [each.count() for each in (*others[:1], first, *others)] == [2, 2, 4, 2, 2]
    assert first.count is not kept
    assert first.count() == 4


class Trainer:
    """Keeps its own compiled iteration, as scripts do."""

    def __init__(self) -> None:
        self.total, self.log = torch.zeros(2), [0.0]
        self.step = rose_compiler.compile(self.iteration, tune=False)

    def iteration(self) -> float:
        for _ in range(3):
            self.total = self.total + 1
        self.log.append(self.total.sum().item())
        return self.log[-1]


def test_an_object_that_keeps_its_compiled_method_is_copied_and_pickled_with_it() -> None:
    trainer = Trainer()
    trainer.step()
    trainer.step()
    for other in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        assert other.step() == 18.0
        assert trainer.log == [0.0, 6.0, 12.0]
    assert trainer.step() == 18.0
    assert "re-captured" not in trainer.step.explain()


def test_nothing_of_the_compiler_itself_is_taken_for_the_users() -> None:
    """Its own state, which changes with each call, would be walked and compared in front of all."""
    step = Trainer().step
    assert [name for name, _ in fields_of(step)] == ["__wrapped__"]
    assert not is_user_type(type(step))
    assert not is_user_code(rose_compiler.compile)


@rose_compiler.compile(tune=False)
def decorated(counter: Counter) -> None:
    for _ in range(2):
        counter.calls += 1


def test_a_decorated_function_is_pickled_by_name() -> None:
    decorated(Counter())
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(decorated) is decorated


class Busy:
    """A component that notes how many are in it at once."""

    def __init__(self) -> None:
        self.inside = self.most = 0

    def work(self) -> None:
        self.inside += 1
        time.sleep(0.01)
        self.most = max(self.most, self.inside)
        self.inside -= 1


def test_calls_from_two_threads_run_one_after_the_other() -> None:
    def iteration(counter: Counter, busy: Busy) -> None:
        for _ in range(2):
            counter.total = counter.total + 1
            busy.work()

    fast, busy = rose_compiler.compile(iteration, tune=False), Busy()
    counters = [Counter() for _ in range(2)]

    def calls(counter: Counter) -> None:
        for _ in range(3):
            fast(counter, busy)

    threads = [threading.Thread(target=calls, args=(c,)) for c in counters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [c.total.tolist() for c in counters] == [[6.0, 6.0]] * 2
    assert busy.most == 1


def test_a_forked_process_makes_lanes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads of those that it finds are the parent's, and would be waited for for ever."""
    fast = rose_compiler.compile(Counter().add, tune=False)
    parents = fast.runtime
    assert fast.runtime is parents
    with monkeypatch.context() as forked:
        forked.setattr("rose_compiler.api.compiled.os.getpid", lambda: -1)
        assert fast.runtime is not parents


class Nested:
    """Calls what is compiled once more from within, where that raises."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.step: Callable[[Nested, int], None] = nested

    def __enter__(self) -> None:
        self.log.append("in")

    def __exit__(self, *exc: object) -> None:
        self.log.append("out")

    def inner(self, depth: int) -> None:
        self.log.append(depth)
        if not depth:
            raise KeyError
        with suppress(KeyError):
            self.step(self, depth - 1)


def nested(run: Nested, depth: int) -> None:
    for _ in range(2):
        with run:
            run.inner(depth)


def test_a_call_from_within_is_none_of_the_one_around_it() -> None:
    eager, run = Nested(), Nested()
    run.step = fast = rose_compiler.compile(nested, tune=False)
    for _ in range(3):
        for each in (eager, run):
            each.step(each, 1)
    assert run.log == eager.log
    assert len(fast._specializations) == 1


def test_nobody_waits_for_a_call_that_waits_for_it() -> None:
    """What a lane's thread runs may call what it is part of."""

    def iteration(counter: Counter, inner: list[threading.Thread]) -> None:
        for _ in range(2):
            counter.calls += 1
            for each in inner:
                each.start()
                each.join(5.0)

    fast, counter = rose_compiler.compile(iteration, tune=False), Counter()
    fast(counter, [])

    class Beside(threading.Thread):
        def start(self) -> None:
            threading.Thread.__init__(self, target=fast, args=(counter, []), name="rose thread:a")
            super().start()

    beside = Beside()
    fast(counter, [beside])
    assert not beside.is_alive()
    assert counter.calls == 2 + 2 + 4


def by_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def by_pool(work: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()


def by_queue(work: Callable[[], None]) -> None:
    done: queue.SimpleQueue[None] = queue.SimpleQueue()
    threading.Thread(target=lambda: done.put(work())).start()
    done.get()


class Asker:
    """Has another thread do a step, and waits for it."""

    def __init__(self, by: Callable[[Callable[[], None]], None]) -> None:
        self.by, self.counter = by, Counter()
        self.step: Callable[..., None] = asking

    def ask(self) -> None:
        self.by(lambda: self.step(self.counter, None))


def asking(counter: Counter, asker: Asker | None) -> None:
    for _ in range(2):
        counter.calls += 1
        counter.total = counter.total * 2 + 1
        if asker is not None:
            asker.ask()


@pytest.mark.parametrize("by", [by_thread, by_pool, by_queue])
def test_a_thread_that_a_call_waits_for_may_call_it_too(
    by: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose_compiler.api.turns.POLL_S", 0.01)
    monkeypatch.setattr("rose_compiler.api.turns.PATIENCE", 2)
    left = []
    for fast in (False, True):
        asker, counter = Asker(by), Counter()
        if fast:
            asker.step = rose_compiler.compile(asking, tune=False)
        for _ in range(2):
            asker.step(counter, asker)
        left.append([(c.calls, c.total.tolist()) for c in (counter, asker.counter)])
    assert left[0] == left[1]
    assert left[0][1][0] == 8


def test_nobody_waits_for_a_call_that_looks_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rose_compiler.api.turns.POLL_S", 0.02)
    turn, held, over = Turn(), threading.Event(), threading.Event()

    def holds() -> None:
        turn.take(wait=True)
        held.set()
        while not over.wait(0.001):
            pass
        turn.give()

    holder = threading.Thread(target=holds)
    holder.start()
    held.wait()
    overdue = threading.Timer(10.0, over.set)
    overdue.start()
    assert not turn.take(wait=True)
    over.set()
    overdue.cancel()
    holder.join()


def test_a_forked_process_waits_for_no_thread_of_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = rose_compiler.compile(Counter().add, tune=False)
    fast(torch.ones(2))
    held, over = threading.Event(), threading.Event()

    def holds() -> None:
        with fast._turn._lock:
            held.set()
            over.wait(10)

    parents = threading.Thread(target=holds)
    parents.start()
    held.wait(10)
    with monkeypatch.context() as forked:
        forked.setattr("rose_compiler.api.compiled.os.getpid", lambda: -1)
        child = threading.Thread(target=fast, args=(torch.ones(2),))
        child.start()
        child.join(5.0)
        assert not child.is_alive()
    over.set()
    parents.join()
