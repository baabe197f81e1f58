"""Runs a function as written and as captured, on equal arguments, and compares all that shows.

What shows is the result or the exception, the arguments afterwards and the process's generators.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.base.remarks import RemarkLog
from rose_compiler.frontend.capture import Captured, capture
from rose_compiler.frontend.record import Record, Recorder
from rose_compiler.frontend.states import refine
from rose_compiler.ir import interp
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.ops import STATE
from rose_compiler.ir.program import Program, is_call


@dataclass
class FirstTrip:
    """What a captured function gave when the reference executor ran it once."""

    captured: Captured
    record: Record
    log: RemarkLog
    result: Any


def values_of(captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call that the program takes as values, by name."""
    bound_self = captured.source.bound
    given = args if bound_self is None else (bound_self, *args)
    bound = captured.signature.bind(*given, **kwargs)
    bound.apply_defaults()
    return {name: bound.arguments[name] for name in captured.values}


def rebound(objects: Mapping[str, Any], old: Sequence[Any], new: Sequence[Any]) -> dict[str, Any]:
    """The live objects of a program, with other arguments in the place of the captured ones."""
    table = {id(a): b for a, b in zip(old, new, strict=True)}
    return {name: table.get(id(value), value) for name, value in objects.items()}


class Watched:
    """A function as it is captured by a call: the program runs once, watched, then again."""

    captured: Captured
    recorder: Recorder

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._args: tuple[Any, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Capture the function for these arguments, and run it in program order."""
        self._args = args
        self.captured = capture(self.fn, args, kwargs)
        program = self.captured.program
        self.recorder = Recorder(program)
        return interp.run(program, values_of(self.captured, args, kwargs), hooks=self.recorder)

    def refined(self, log: RemarkLog | None = None) -> Program:
        """The program, its effects made as narrow as what was seen allows."""
        refine(self.captured.program, self.recorder.record, RemarkLog() if log is None else log)
        return self.captured.program

    def again(self, *args: Any) -> Any:
        """Run the program, as it is by now, on other arguments of the same make."""
        program = self.captured.program
        values = values_of(self.captured, args, {})
        return interp.run(program, values, rebound(program.objects, self._args, args))


def first_trip(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> FirstTrip:
    """Capture ``fn``, run the program once in program order and refine its effects."""
    watched, log = Watched(fn), RemarkLog()
    result = watched(*args, **kwargs)
    watched.refined(log)
    return FirstTrip(watched.captured, watched.recorder.record, log, result)


@dataclass
class Outcome:
    """How one run ended."""

    result: Any
    error: BaseException | None
    arguments: Any
    generators: Any


def both(
    fn: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]],
    kwargs: Callable[[], dict[str, Any]] = dict,
    captured: Callable[..., Any] | None = None,
) -> tuple[Outcome, Outcome]:
    """The outcomes of ``fn(*make(), **kwargs())`` as written and as captured, by ``captured`` where
    it is given."""

    def eager(*args: Any, **named: Any) -> Any:
        return fn(*args, **named)

    def plain(*args: Any, **named: Any) -> Any:
        found = capture(fn, args, named)
        return interp.run(found.program, values_of(found, args, named))

    return _run(eager, make, kwargs), _run(captured or plain, make, kwargs)


def _run(
    how: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]],
    kwargs: Callable[[], dict[str, Any]],
) -> Outcome:
    torch.manual_seed(7)
    np.random.seed(7)  # noqa: NPY002 (the global generator is what is compared)
    random.seed(7)
    args, named = make(), kwargs()
    result, error = None, None
    try:
        result = how(*args, **named)
    except Exception as raised:  # compared, whatever it is
        error = raised
    generators = (
        torch.get_rng_state(),
        np.random.get_state(),  # noqa: NPY002
        random.getstate(),
    )
    return Outcome(copy.copy(result), error, (args, named), generators)


def assert_same(
    fn: Callable[..., Any],
    make: Callable[[], tuple[Any, ...]] = tuple,
    kwargs: Callable[[], dict[str, Any]] = dict,
    captured: Callable[..., Any] | None = None,
) -> Outcome:
    """Assert that a captured function does what the function does; the eager outcome.

    ``captured`` captures and runs it, where that is not done here.

    Raises:
        AssertionError: naming what differs.
    """
    eager, found = both(fn, make, kwargs, captured)
    if repr(eager.error) != repr(found.error):
        raise AssertionError(
            f"eager raised {eager.error!r}, captured {found.error!r}"
        ) from found.error
    for what in ("result", "arguments", "generators"):
        where = difference(getattr(eager, what), getattr(found, what))
        if where is not None:
            raise AssertionError(f"{what} differ{where}")
    return eager


#: Attributes of libraries' objects that hold times of day.
_TIMES = frozenset(("episode_start_time", "time_queue"))


def difference(
    a: Any, b: Any, path: str = "", seen: frozenset[int] = frozenset(), *, rtol: float = 0
) -> str | None:
    """Where two values differ, ``None`` where they are equal bit for bit, times of day aside.

    ``rtol`` is what tensors and numbers may differ by, relative to themselves or to one.
    """
    if id(a) in seen:
        return None
    seen = seen | {id(a)}
    if type(a) is not type(b):
        return f" at {path or 'top'}: {type(a).__name__} and {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        same = same or bool(a.shape == b.shape and torch.allclose(a, b, rtol, rtol, equal_nan=True))
        if same and a.requires_grad != b.requires_grad:
            return f" at {path}: requires_grad"
        return None if same else f" at {path or 'top'}: {a} and {b}"
    if isinstance(a, np.ndarray):
        same = a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
        return None if same else f" at {path or 'top'}: {a} and {b}"
    if isinstance(a, Mapping):
        plain_keys = all(isinstance(k, str | int | tuple) for k in (*a, *b))
        if plain_keys and list(a) != list(b):
            return f" at {path or 'top'}: keys {list(a)} and {list(b)}"
        if not plain_keys:  # by order, as an optimizer's state by its parameters
            return difference(
                list(a.values()), list(b.values()), f"{path}.values()", seen, rtol=rtol
            )
        pairs = [(f"{path}[{k!r}]", a[k], b[k]) for k in a if k not in _TIMES]
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            return f" at {path or 'top'}: {a!r} and {b!r}"
        pairs = [(f"{path}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, torch.nn.Module) or (hasattr(a, "__dict__") and not callable(a)):
        pairs = [(f"{path}", vars(a), vars(b))]
    else:
        try:
            same = bool(a == b) or (a != a and b != b)
            if rtol and isinstance(a, float):
                same = same or math.isclose(a, b, rel_tol=rtol, abs_tol=rtol)
        except Exception:  # what can't be compared is left to the other checks
            same = True
        plain = isinstance(a, int | float | complex | str | bytes | bool | type(None) | set)
        return None if same or not plain else f" at {path or 'top'}: {a!r} and {b!r}"
    for where, x, y in pairs:
        found = difference(x, y, where, seen, rtol=rtol)
        if found is not None:
            return found
    return None


def shuffle(program: Program, generator: random.Random) -> int:
    """Put the operations of every body into a random order that its dependences allow; how many
    stand elsewhere than before."""
    deps = Dependences(program)
    moved = 0
    for graph in program.graphs():
        nodes = [n for n in graph.nodes if n.op == "call_function" and not is_call(n, STATE)]
        if len(nodes) < 2:
            continue
        waits: dict[fx.Node, set[fx.Node]] = {n: set() for n in nodes}
        for edge in deps.edges(graph):
            if edge.applies(0) and edge.src in waits and edge.dst in waits:
                waits[edge.dst].add(edge.src)
        order: list[fx.Node] = []
        while len(order) < len(nodes):
            done = set(order)
            ready = [n for n in nodes if n not in done and waits[n] <= done]
            order.append(generator.choice(ready))
        moved += sum(a is not b for a, b in zip(nodes, order, strict=True))
        end = next(n for n in graph.nodes if n.op == "output")
        for node in order:
            end.prepend(node)
        graph.lint()
    return moved
