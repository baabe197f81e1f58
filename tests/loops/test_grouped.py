"""GRPO with an accumulated gradient: in the first epoch a group's backward runs while the next one
is collected, with every bit as eager; what keeps it behind is named."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

import rose_compiler
from rose_compiler.base.decision import Decision
from tests.loops import grouped
from tests.loops.aside import Field
from tests.loops.bits import bits, differing, generators
from tests.loops.grouped import GROUPS, SIZE, Setup
from tests.loops.harness import seeded_spaces

ITERATIONS = 4
#: Seconds that a group waits for the backward of the one before, at most.
PATIENCE = 1.0


@contextlib.contextmanager
def compiled(fn: Callable[..., Any], decision: Decision) -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        decision.save(path := Path(folder) / "decision.json")
        made = rose_compiler.compile(fn, numerics="bitwise", tune=path)
    try:
        yield made
    finally:
        made.close()


def trained(fn: Callable[..., Any], make: Callable[[], Setup] = Setup) -> dict[str, Any]:
    """What a run of ``fn`` leaves, as bits."""
    with seeded_spaces():
        setup = make()
        results = [fn(setup) for _ in range(ITERATIONS)]
        found = bits({"results": results, "owned": setup.owned(), "process": generators()})
    setup.close()
    return found


def codes(made: Any) -> set[str]:
    remarks = made._schedule().history.remarks
    return {r.code for r in remarks.missed() if r.pass_name == "accumulate"}


@pytest.mark.parametrize(
    "decision",
    [
        Decision(accumulate=True),
        Decision(accumulate=True, overlap=True, late="shadow", lanes="thread", defer=True),
    ],
)
@pytest.mark.parametrize("fn", [grouped.once, grouped.epochs, grouped.configured])
def test_all_bits_are_eager_s(fn: Callable[..., Any], decision: Decision) -> None:
    plain = trained(fn)
    with compiled(fn, decision) as made:
        assert differing(plain, trained(made)) == []
        applied = made._schedule().history.remarks.applied()
        assert any(r.pass_name == "accumulate" for r in applied), made.explain()


class Waiting(Field):
    """Waits, in the first step of a group, until the gradients of those before have been added."""

    parameter: ClassVar[Any] = None
    seen: ClassVar[list[bool]] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.group = seed or 0
        return super().reset(seed=seed, options=options)

    @rose_compiler.component(reads=["self"], writes=["self"])
    def step(self, action: Any) -> Any:
        if self.count == 0 and self.group and Waiting.parameter is not None:
            until = time.monotonic() + PATIENCE
            while self.added() < self.group and time.monotonic() < until:
                time.sleep(0.001)
            self.seen.append(self.added() >= self.group)
        return super().step(action)

    @staticmethod
    def added() -> int:
        """How many gradients there are in the sum: the first makes it, each other one adds."""
        grad = Waiting.parameter.grad
        return 0 if grad is None else 1 + int(grad._version)


def test_a_backward_runs_while_the_next_group_is_collected() -> None:
    Waiting.seen.clear()
    setup = Setup(Waiting)
    with compiled(grouped.epochs, Decision(accumulate=True)) as made, seeded_spaces():
        made(setup)  # the first call is watched, in program order
        setup.opt.zero_grad()
        Waiting.parameter = setup.policy.log_std
        made(setup)
        Waiting.parameter = None
    setup.close()
    assert len(Waiting.seen) >= (GROUPS - 1) * SIZE
    assert all(Waiting.seen), made.source


@pytest.mark.parametrize(
    ("fn", "code"),
    [
        (grouped.whitened, "whole-collection"),
        (grouped.normalized, "unknown-effects"),
        (grouped.incomplete, "incomplete-group"),
        (grouped.stepped, "parameters-change"),
        (grouped.noisy, "draw-order"),
    ],
)
def test_what_keeps_the_gradient_behind_the_collection(fn: Callable[..., Any], code: str) -> None:
    with compiled(fn, Decision(accumulate=True)) as made:
        setup = Setup()
        made(setup)
        assert codes(made) == {code}, made.explain()
        setup.close()
