"""What users say about their code: effects of functions, and names for loops.

Nothing here does anything when nothing is compiled: a declared function is the same function, a
named loop iterates over what it was given. Names for stretches, ``phase``, are in ``base``, where
worker processes find them without loading torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, overload

from rose_compiler.frontend import components

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


@overload
def component(function: F, /) -> F:
    """``@component``: nothing is said of what a call reads and writes."""


@overload
def component(
    *,
    reads: Iterable[str] | None = None,
    writes: Iterable[str] | None = None,
    batch: Mapping[str, int] | None = None,
) -> Callable[[F], F]:
    """``@component(reads=..., ...)``: what is left out is not known."""


def component(
    function: Any = None,
    /,
    *,
    reads: Iterable[str] | None = None,
    writes: Iterable[str] | None = None,
    batch: Mapping[str, int] | None = None,
) -> Any:
    """Make a function or method a component: one operation of the program, never looked into.

    Args:
        reads: what a call reads, ``writes`` what it may change. Entries are rooted at a parameter
            name or ``self`` (``"self.policy.params"``, ``"buf[t]"``), or name a state of the
            process: ``"rng:torch"``, ``"rng:numpy"``, ``"rng:python"``, ``"host"``. ``[]`` means
            nothing; left out, the call is taken to read or write everything.
        writes: see ``reads``. A call that changes more than it says breaks its declaration.
        batch: parameters and results (``"return"``, ``"return.0"``) with the axis along which their
            rows do not mix: calling it with some of the rows gives these rows of the results.

    Raises:
        DeclarationError: for a malformed entry, one that names no parameter, or no function.
    """

    def decorate(target: F) -> F:
        components.record(target, reads, writes, batch)
        return target

    return decorate if function is None else decorate(function)


def declare(
    target: Callable[..., Any],
    *,
    reads: Iterable[str] | None = None,
    writes: Iterable[str] | None = None,
    batch: Mapping[str, int] | None = None,
) -> None:
    """Declare a function or method whose source can't be edited: ``declare(Type.method, ...)``.

    The arguments and errors are those of :func:`component`. Declaring the same thing again with the
    same entries changes nothing. Functions written in C count: their parameters have the names of
    their signature, or ``arg0``, ``arg1`` and so on, and ``self`` for the receiver.
    """
    components.record(target, reads, writes, batch)


def loop(name: str, iterable: Iterable[T]) -> Iterable[T]:
    """Name a loop: ``for k in rose_compiler.loop("denoise", range(steps)): ...``.

    Returns ``iterable`` itself.
    """
    return iterable


loop.__rose_loop__ = True  # type: ignore[attr-defined]
