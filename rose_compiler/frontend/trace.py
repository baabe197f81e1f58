"""Turns a straight-line Python function over torch tensors into an fx graph of torch calls.

:func:`trace` runs the function once on copies of example values while
:class:`~rose_compiler.frontend.recorder.Recorder` writes down every torch call it makes. The graph
holds the calls that eager execution would have made, so it costs what they cost. It is handed out
only if it then equals the function bit for bit, gradients included, on the examples and on fresh
values; what could make it wrong on other values is a :class:`~rose_compiler.base.remarks.Blocker`.
"""

from __future__ import annotations

import inspect
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard
from unittest import mock

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.audit import Blocked, storage_key
from rose_compiler.frontend.crosscheck import (
    arrays_in,
    crosscheck,
    fixes_sizes,
    generator_states,
    set_generator_states,
    tensors_in,
)
from rose_compiler.frontend.host_calls import Attributes, HostCalls
from rose_compiler.frontend.inputs import Inputs
from rose_compiler.frontend.mentions import Mentions
from rose_compiler.frontend.record import spec_of
from rose_compiler.frontend.recorder import Recorder
from rose_compiler.frontend.sizes import Vary, known_of
from rose_compiler.frontend.unwatched import unwatched
from rose_compiler.ir.contexts import entered
from rose_compiler.ir.facts import Context, Spec
from rose_compiler.ir.program import placeholders
from rose_compiler.ir.raising import may_raise
from rose_compiler.ir.sizes import Known, Laid


@dataclass(frozen=True)
class Traced:
    """A traced function.

    ``gm`` takes the tensors, arrays, numbers and containers among the example arguments, in their
    order, then the lifted tensors; ``inputs`` are the names of these placeholders and
    ``arguments[i]`` is the example argument's position or the lifted tensor's path that belongs to
    placeholder i. It returns what the function returned. Every node has a ``spec`` fact.

    ``outputs`` counts the elements of the returned tuple (1 for anything else), ``output_specs``
    are their types and ``output_aliases`` the placeholders they may share memory with. ``draws``
    and ``checks`` name the nodes that draw random numbers and that may raise for values. A graph
    that is not ``pure`` writes tensors it has made itself, so its nodes keep their order.
    ``mentions`` is what the code that ran reads from Python objects. ``sized``: whether other code
    than torch's read a size, which the graph may hold, ``read``: whether it hangs on any,
    ``fixed``: on one of an array, or on the number of parts of a batch, which stay as they are.
    ``typed``: whether a dtype or device was read, or a conversion dropped; ``laid``: what was read
    of how a tensor lies in memory; ``kinds``: whether the code asks what is None, or of which type.
    ``known`` is what the graph was proven for, by argument; of sizes it leaves out any.
    Call ``gm.forward(...)``: calling the module itself costs 2 µs more.
    """

    gm: fx.GraphModule
    inputs: tuple[str, ...]
    arguments: tuple[int | str, ...]
    outputs: int
    output_specs: tuple[Spec, ...]
    output_aliases: tuple[tuple[str, ...], ...]
    draws: tuple[str, ...]
    checks: tuple[str, ...]
    pure: bool
    contexts: tuple[Context, ...] = ()
    mentions: Mentions = field(default_factory=Mentions)
    sized: bool = False
    read: bool = False
    fixed: bool = False
    typed: bool = False
    laid: Laid = "any"
    kinds: bool = False
    known: Mapping[int, Known] = field(default_factory=dict)

    @property
    def lifted(self) -> dict[str, str]:
        """Placeholder name to path, of the lifted tensors that the graph uses."""
        return {
            n: a for n, a in zip(self.inputs, self.arguments, strict=True) if isinstance(a, str)
        }


def trace(
    fn: Callable[..., Any],
    example_args: Sequence[Any],
    *,
    lifted: Mapping[str, torch.Tensor],
    contexts: tuple[Context, ...] = (),
    names: Sequence[str] | None = None,
    roots: Sequence[Any] = (),
    vary: Vary = "none",
    rows: bool = False,
) -> Traced | Blocker:
    """Trace ``fn(*example_args)`` under ``contexts``.

    Neither arguments, lifted tensors nor generators are changed.

    Args:
        fn: straight-line code; it is called several times.
        example_args: tensors, numpy arrays, Python numbers, tuples, lists and dicts of these; other
            objects are handed through and what is read from them is fixed in the graph.
        lifted: every tensor that ``fn`` may reach otherwise, by path below the states' roots.
        contexts: thread-local modes to call it under.
        names: names for the placeholders of the arguments; by default the parameters'.
        roots: objects that ``fn`` can reach; their Python attributes must come out unchanged.
        vary: sizes of the arguments that may change. The graph then takes those that are read from
            its operands, where it would else be wrong for others.
        rows: whether to put to the test that the graph does for other numbers of rows too.
    """
    tested = rows or vary != "none"
    found = _trace(fn, example_args, lifted, contexts, names, roots, "none", tested)
    if isinstance(found, Traced):
        if vary != "all" and not found.sized:
            return _proven(found, example_args, "rows" if tested else "none")
        if not tested:
            return _proven(found, example_args, "none")
    elif not isinstance(found, FixedSizes):
        return found
    again: Vary = "rows" if vary == "none" else vary
    other = _trace(fn, example_args, lifted, contexts, names, roots, again, True)
    if isinstance(other, Traced):
        return _proven(other, example_args, again)
    # right for these sizes at least, where no others were seen
    return _proven(found, example_args, "none") if vary == "none" and _is_made(found) else other


#: Functions whose results are contiguous, however their inputs lie.
_LIES = frozenset(("linear", "addmm", "mm"))


def _is_made(found: Traced | Blocker) -> TypeGuard[Traced]:
    return isinstance(found, Traced)


def _proven(traced: Traced, example_args: Sequence[Any], free: Vary) -> Traced:
    """A graph with the sizes that it was proven for. Draws have the shape that they had."""
    if traced.draws or traced.fixed:
        free = "none"
    elif not traced.read:
        free = "all"
    asked: dict[str, Any] = {"read": traced.read, "typed": traced.typed, "kinds": traced.kinds}
    filled = _laid_as(traced)
    known = {}
    for node, k in zip(placeholders(traced.gm.graph), traced.arguments, strict=True):
        if isinstance(k, int):
            laid: Laid = "order" if node in filled and traced.laid == "any" else traced.laid
            one = known_of(example_args[k], free, laid=laid, **asked)
            known.update({} if one is None else {k: one})
    return replace(traced, known=known)


def _laid_as(traced: Traced) -> set[fx.Node]:
    """What draws may lie in memory as: what fills it with random numbers may go through it in its
    own order. What a linear layer makes lies in one way whatever it is made of."""
    stack = [n for n in traced.gm.graph.nodes if n.name in traced.draws]
    seen: set[fx.Node] = set()
    while stack:
        for used in stack.pop().all_input_nodes:
            if used not in seen and getattr(used.target, "__name__", "") not in _LIES:
                seen.add(used)
                stack.append(used)
    return seen


@dataclass(frozen=True)
class FixedSizes(Blocker):
    """A graph is right for the sizes that it was traced with alone."""


def _trace(
    fn: Callable[..., Any],
    example_args: Sequence[Any],
    lifted: Mapping[str, torch.Tensor],
    contexts: tuple[Context, ...],
    names: Sequence[str] | None,
    roots: Sequence[Any],
    vary: Vary,
    test_sizes: bool,
) -> Traced | Blocker:
    attributes = Attributes(roots)
    with _generators_restored(), unwatched(lifted.values()):
        traced: Traced | Blocker = Blocker("not-traceable", "no attempt was made")
        for out_of_place in (True, False):
            traced = _record(fn, example_args, lifted, contexts, names, out_of_place, vary)
            if changed := attributes.restore():
                return Blocker("not-pure", f"calling it changes `{changed}`")
            if isinstance(traced, Blocker):
                return traced
            tensors = [lifted[a] for a in traced.arguments if isinstance(a, str)]
            wrong = crosscheck(fn, example_args, traced.gm, traced.arguments, tensors, contexts)
            # random numbers are drawn in front of a graph, in their one shape
            if wrong is None and test_sizes and not traced.draws:
                axes = (0, 1) if vary == "all" else (0,)
                given = traced.gm, traced.arguments, tensors
                if why := fixes_sizes(fn, example_args, *given, contexts, axes):
                    wrong = FixedSizes("not-traceable", f"with other sizes of its inputs {why}")
            attributes.restore()
            if wrong is None:
                return traced
            if isinstance(wrong, FixedSizes):
                return wrong
            if traced.pure and not out_of_place:
                return wrong
            failed = wrong
        return failed


def _record(
    fn: Callable[..., Any],
    example_args: Sequence[Any],
    lifted: Mapping[str, torch.Tensor],
    contexts: tuple[Context, ...],
    names: Sequence[str] | None,
    out_of_place: bool,
    vary: Vary,
) -> Traced | Blocker:
    names = _names(fn, len(example_args)) if names is None else names
    with entered(contexts), _other_generators() as others:
        recorder = Recorder(lifted, out_of_place=out_of_place, vary=vary)
        inputs = Inputs(recorder)
        given = [
            inputs.add(n, v, i) for i, (n, v) in enumerate(zip(names, example_args, strict=True))
        ]
        host = HostCalls()
        try:
            with ExitStack() as stack:
                stack.enter_context(_as_without_modes(recorder))
                stack.enter_context(recorder.audit)
                stack.enter_context(recorder)
                stack.enter_context(host)
                result = fn(*given)
            recorder.check_generator()
            outputs = _output(recorder, result)
        except Blocked as stop:
            return recorder.blocker or stop.blocker
        except Exception as error:
            return recorder.blocker or Blocker(
                "not-traceable", f"calling it raises {type(error).__name__}: {error}"
            )
        if recorder.blocker is not None:
            return recorder.blocker
        if recorder.raised:
            return Blocker("not-traceable", f"`{recorder.raised}` raises, and the code goes on")
        if host.blocker is not None:
            return host.blocker
        if others():
            return Blocker("not-traceable", "it draws from numpy's or Python's generator")
    recorder.graph.output(outputs)
    if host.arrays:
        inputs.read_arrays(example_args)
    _drop_dead(recorder)
    made = _finish(recorder, inputs, result, contexts)
    shapes = [tuple(t.shape) for value in example_args for t in tensors_in(value)]
    shapes += [a.shape for value in example_args for a in arrays_in(value)]
    rows = {shape[0] for shape in shapes if shape}
    parted = any(axis == 0 or size in rows for axis, size in recorder.parted)
    fixed = made.fixed or parted
    return replace(made, mentions=host.mentions, kinds=host.kinds, fixed=fixed)


def _output(recorder: Recorder, value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _output(recorder, v) for k, v in value.items()}
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        items = [_output(recorder, v) for v in value]
        return items if isinstance(value, list) else tuple(items)
    return recorder.operand(value)


def _drop_dead(recorder: Recorder) -> None:
    """Erase nodes that nothing uses and that can't raise for values: metadata reads and picked
    results leave some behind."""
    kept = {*recorder.draws, *recorder.checks}
    if not recorder.pure:
        return
    for node in reversed(recorder.graph.nodes):
        dead = node.op == "call_function" and not node.users and node not in kept
        if dead and not may_raise(node):
            recorder.graph.erase_node(node)


def _finish(
    recorder: Recorder, inputs: Inputs, result: Any, contexts: tuple[Context, ...]
) -> Traced:
    gm = fx.GraphModule(torch.nn.Module(), recorder.graph)
    paths = {node: path for path, node in recorder.lifted_used.items()}
    given = placeholders(recorder.graph)
    results = result if type(result) is tuple else (result,)
    return Traced(
        gm=gm,
        inputs=tuple(n.name for n in given),
        arguments=tuple(
            inputs.placeholders[n] if n in inputs.placeholders else paths[n] for n in given
        ),
        outputs=len(results),
        output_specs=tuple(map(spec_of, results)),
        output_aliases=tuple(_aliases(r, recorder, inputs) for r in results),
        draws=tuple(n.name for n in recorder.draws),
        checks=tuple(n.name for n in recorder.checks),
        pure=recorder.pure,
        sized=recorder.sized,
        read=recorder.read,
        fixed=inputs.fixed,
        typed=recorder.typed,
        laid=recorder.laid,
        contexts=contexts,
    )


def _aliases(value: Any, recorder: Recorder, inputs: Inputs) -> tuple[str, ...]:
    keys = {storage_key(t) for t in _tensors(value)}
    given = [(n, t) for n, ts in inputs.tensors.items() for t in ts]
    given += [(recorder.lifted_used[p].name, recorder.lifted(p)) for p in recorder.lifted_used]
    return tuple(dict.fromkeys(name for name, tensor in given if storage_key(tensor) in keys))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _names(fn: Callable[..., Any], count: int) -> list[str]:
    try:
        found = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        found = []
    return [found[i] if i < len(found) else f"arg{i}" for i in range(count)]


@contextmanager
def _as_without_modes(recorder: Recorder) -> Iterator[None]:
    """Mend what modes don't see or disturb: modules avoid their fused kernels under a mode, and
    ``torch.from_numpy`` does not ask one."""
    original, asks_modes = torch.from_numpy, torch.overrides.has_torch_function
    here = threading.get_ident()

    def from_numpy(array: Any) -> Any:
        if threading.get_ident() != here:
            return original(array)
        with torch._C.DisableTorchFunction():
            return recorder.record(original, "from_numpy", (array,), {})

    def has_torch_function(args: Any) -> bool:
        return threading.get_ident() != here and asks_modes(args)

    with (
        mock.patch.object(torch.overrides, "has_torch_function", has_torch_function),
        mock.patch.object(torch, "from_numpy", from_numpy),
    ):
        yield


@contextmanager
def _generators_restored() -> Iterator[None]:
    states, numpy_state, python_state = generator_states(), _numpy_state(), random.getstate()
    try:
        yield
    finally:
        set_generator_states(states)
        np.random.set_state(numpy_state)  # noqa: NPY002 (the global one is what is meant)
        random.setstate(python_state)


@contextmanager
def _other_generators() -> Iterator[Callable[[], bool]]:
    """Hands out a test whether numpy's or Python's generator has moved since."""
    before = repr(_numpy_state()), random.getstate()
    yield lambda: (repr(_numpy_state()), random.getstate()) != before


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002 (the global one is what is meant)
