"""Work that no training waits for runs on threads beside it: every bit as eager, both at once."""

from __future__ import annotations

import contextlib
import io
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

import rose_compiler
from rose_compiler.runtime.support import Runtime
from tests.loops import aside
from tests.loops.aside import ITERATIONS, Field, Setup
from tests.loops.bits import bits, differing, generators
from tests.loops.harness import seeded_spaces

#: Seconds that something waits for the training to go on, at most.
PATIENCE = 0.3
#: Set whenever a training environment has stepped.
TRAINED = threading.Event()


class Training(Field):
    """Says when it steps."""

    @rose_compiler.component(reads=["self"], writes=["self"])
    def step(self, action: Any) -> Any:
        TRAINED.set()
        return super().step(action)


class Waiting(Field):
    """Waits in the first step of an episode until a training environment steps, and notes whether
    one did. Only one of two waits."""

    seen: ClassVar[list[bool]] = []

    @rose_compiler.component(reads=["self"], writes=["self"])
    def step(self, action: Any) -> Any:
        if self.count == 0 and not self.on_main():
            TRAINED.clear()
            self.seen.append(TRAINED.wait(PATIENCE))
        return super().step(action)

    def on_main(self) -> bool:
        return threading.current_thread() is threading.main_thread()


@contextlib.contextmanager
def compiled(fn: Callable[..., Any], **options: Any) -> Iterator[Any]:
    made = rose_compiler.compile(fn, numerics="bitwise", tune=False, **options)
    made._runtime = Runtime(trace=True)
    try:
        yield made
    finally:
        made.close()


def trained(fn: Callable[..., Any], make: Callable[[], Setup]) -> tuple[dict[str, Any], Setup]:
    """What a run of ``fn`` leaves, as bits."""
    random.seed(0)
    with seeded_spaces(), contextlib.redirect_stdout(io.StringIO()) as printed:
        setup = make()
        result = fn(ITERATIONS, setup)
        owned = {"result": result, "owned": setup.owned(), "process": generators()}
        return bits({**owned, "printed": printed.getvalue()}), setup


@contextlib.contextmanager
def both(fn: Callable[..., Any], make: Callable[[], Setup] = Setup) -> Iterator[tuple[Any, Any]]:
    """A training as written and compiled, with the same bits: the compiled function, its set-up."""
    plain, first = trained(fn, make)
    with compiled(fn) as made:
        found, second = trained(made, make)
        assert differing(plain, found) == []
        yield made, second
    first.close()
    second.close()


def test_an_evaluation_runs_while_the_next_iteration_collects() -> None:
    Waiting.seen.clear()
    with both(aside.evaluated, lambda: Setup(Training, Waiting)) as (made, _):
        assert any(Waiting.seen), made.source
        assert "on lane 'thread:" in made.explain()


class Slow:
    """Takes its time to be pickled, until the training goes on."""

    seen: ClassVar[list[bool]] = []

    def __reduce__(self) -> Any:
        if threading.current_thread() is not threading.main_thread():
            TRAINED.clear()
            self.seen.append(TRAINED.wait(PATIENCE))
        return Slow, ()


def test_a_checkpoint_is_written_while_the_next_iteration_collects(tmp_path: Path) -> None:
    Slow.seen.clear()
    folders = iter((tmp_path / "eager", tmp_path / "compiled"))

    def make() -> Setup:
        folder = next(folders)
        folder.mkdir()
        return Setup(Training, folder=folder, extra=Slow())

    with both(aside.checkpointed, make) as (made, _):
        assert any(Slow.seen), made.source
        for it in range(ITERATIONS):
            one, other = (
                torch.load(tmp_path / name / f"{it}.pt", weights_only=False)
                for name in ("eager", "compiled")
            )
            assert differing(bits(one), bits(other)) == []


def test_lines_are_printed_in_order_beside_the_training() -> None:
    with both(aside.logged, lambda: Setup(Training)) as (made, _):
        assert "on lane 'thread:" in made.explain(), made.source
        assert "submit(" in made.source
