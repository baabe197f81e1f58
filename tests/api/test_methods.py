"""Methods: compiled from an object, and as a decorator in their class."""

from __future__ import annotations

import torch

import rose_compiler
from rose_compiler.api.probing import EXACT_TRIALS, TRIALS, trials


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


def test_small_batches_are_probed_more_often_where_every_bit_counts() -> None:
    assert trials(4, exact=False) == TRIALS
    assert trials(4, exact=True) == EXACT_TRIALS
    assert trials(32, exact=True) == 16
    assert trials(100_000, exact=True) == TRIALS
