"""What operations were seen to touch, held against what is known of them.

The first iteration runs operation by operation; the first calls of each component are observed. An
undeclared write contradicts the declaration: anything may have been reordered by it. An undeclared
read is added, and so is whatever was seen of operations that nobody declared. Nothing is removed:
rare paths go unseen.
"""

from __future__ import annotations

import collections
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.api.undeclared import HIDDEN, undeclared
from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.remarks import Remark, RemarkLog
from rose_compiler.frontend.components import function_of
from rose_compiler.frontend.hidden import OUTSIDE, outside_of
from rose_compiler.frontend.names import StateNames
from rose_compiler.frontend.record import Recorder, memory_of
from rose_compiler.frontend.scalar import is_scalar
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.effects import EVERYTHING, Effect, parse_entry, related
from rose_compiler.ir.interp import Hooks
from rose_compiler.ir.ops import UNBOUND, Op
from rose_compiler.ir.program import Program, is_call, is_state, op_of
from rose_compiler.runtime.observe import Range, Seen, Watch

PASS = "observe"
#: Calls of one operation that are observed.
CALLS = 2
#: Calls of library code by which a block is worth observing.
_KNOWN = frozenset({"module", "optimizer", "backward", "step"})
_CONTAINERS = (list, dict, set, tuple, collections.deque, torch.optim.Optimizer)


@dataclass(frozen=True)
class Observation:
    """One observed call: what it was given and what it touched; ``held`` is the memory that
    gradients and optimizers held before it, which may be another one's later."""

    node: fx.Node
    args: tuple[Any, ...]
    seen: Seen
    held: list[tuple[int, int, str]]


def declared(op: Op) -> bool:
    """Whether the user stated what an operation reads and writes."""
    return op.kind == "component" and op.attributes.get("declared") is not None


class Observer(Hooks):
    """Records the first iteration, and observes the first calls of what is worth it.

    With ``every``, all calls of declared components are observed, and nothing is recorded.
    """

    def __init__(self, program: Program, recorder: Recorder | None, *, every: bool = False) -> None:
        self.recorder = recorder
        self.every = every
        self.names = recorder.record.names if recorder else StateNames(program.objects)
        self.found: list[Observation] = []
        self._watch: Watch | None = None
        self._calls: Counter[fx.Node] = Counter()
        self._open: tuple[AbstractContextManager[Seen], Observation] | None = None

    def before(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        if self.recorder is not None:
            self.recorder.before(node, args)
        if self._wanted(node):
            self._calls[node] += 1
            if self._watch is None:
                self._watch = Watch(self.names.things(), self.names.every())
            contents = op_of(node).kind != "block"
            more = [*_own(node, args), *self._outside(node, args)]
            context = self._watch.observing(more, contents=contents)
            held = list(_held(self.names))
            self._open = context, Observation(node, args, context.__enter__(), held)

    def _outside(self, node: fx.Node, args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
        """What a declared component can change that no root leads to."""
        op = op_of(node)
        if not declared(op):
            return
        function = function_of(op.attributes.get("declared"))
        states = [a for n, a in zip(node.args, args, strict=True) if _is_root(n)]
        for name, value in outside_of(function, states[0] if states else None):
            if self.names.name_of(value) is None:
                yield name, value

    def _wanted(self, node: fx.Node) -> bool:
        if not is_call(node) or (op := op_of(node)).kind == "builtin":
            return False
        if self.every:
            return declared(op)
        calls = op.attributes.get("calls", ())
        known = op.kind in ("component", "step") or not _KNOWN.isdisjoint(calls) or _calls_out(op)
        return known and self._calls[node] < CALLS

    def after(self, node: fx.Node, args: tuple[Any, ...], result: Any) -> None:
        self._close()
        if self.recorder is not None:
            self.recorder.after(node, args, result)

    def _close(self) -> Observation | None:
        if self._open is None:
            return None
        context, observation = self._open
        self._open = None
        context.__exit__(None, None, None)
        self.found.append(observation)
        return observation

    def value(self, node: fx.Node, value: Any) -> None:
        if self.recorder is not None:
            self.recorder.value(node, value)

    def error(self, node: fx.Node, error: BaseException) -> None:
        self._close()


def _is_root(argument: Any) -> bool:
    return isinstance(argument, fx.Node) and is_state(argument)


def _calls_out(op: Op) -> bool:
    return any("backward" in line or ".step(" in line for line in op.source)


def _held(names: StateNames) -> Iterator[tuple[int, int, str]]:
    """The memory of gradients and of optimizers' states."""
    for name, tensor in names.tensors.items():
        if tensor.is_leaf and tensor.grad is not None:
            top, middle, path = name.partition(".params.")
            state = f"{top}.grads.{path}" if middle else f"{name}.grads"
            for each in memory_of(tensor.grad):
                if isinstance(each, tuple):
                    yield (*each, state)
    for name, optimizer in names.optimizers.items():
        for value in optimizer.state.values():
            for each in memory_of(dict(value)):
                if isinstance(each, tuple):
                    yield (*each, name)


def _own(node: fx.Node, args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The values a call was handed, by parameter."""
    for name, argument, value in zip(op_of(node).signature.params, node.args, args, strict=True):
        state = isinstance(argument, fx.Node) and is_state(argument)
        if value is not UNBOUND and not state:
            yield f"={name}", value


def contradict(
    program: Program, observer: Observer, log: RemarkLog, seen: dict[fx.Node, set[str]]
) -> None:
    """Hold what was seen against the signatures, and extend them by what they lack.

    ``seen`` has what each operation reached on all looks: what nothing writes matters once
    something does, on a path that has not run yet.

    Raises:
        DeclarationError: for a write that a declaration leaves out.
    """
    deps = Dependences(program)
    added: dict[fx.Node, tuple[set[str], set[str]]] = {}
    for observation in observer.found:
        op = op_of(observation.node)
        if op.signature.reads is None or op.signature.writes is None:
            continue
        effects = deps.effects(observation.node)
        writes, found = lacking(observation, effects, observer.names)
        more = reached(observation, effects, observer.names)
        seen.setdefault(observation.node, set()).update(more)
        if writes and declared(op):
            error = undeclared(observation.node, "writes", *next(iter(writes.items())))
            error.add_note(
                "the iteration ran to its end, in program order: objects are as in eager"
            )
            raise error
        reads = set(found)
        named = {w for w in writes if w != HIDDEN and not w.startswith(("=", OUTSIDE))}
        if reads or named:
            both = added.setdefault(observation.node, (set(), set()))
            both[0].update(reads)
            both[1].update(named)
    writes_ = written(program, deps, (w for _, named in added.values() for w in named))
    for node, states in seen.items():
        known = [e.state for e in deps.effects(node)]
        if EVERYTHING not in known:
            reads = {s for s in states if writes_(s) and not _covered(s, known)}
            if reads:
                added.setdefault(node, (set(), set()))[0].update(reads)
    for node, (reads, named) in added.items():
        _tell(node, reads, named, log)
        op, signature = op_of(node), op_of(node).signature
        op.signature = replace(
            signature,
            reads=(*(signature.reads or ()), *map(_entry, sorted(reads | named))),
            writes=(*(signature.writes or ()), *map(_entry, sorted(named))),
        )


def _entry(state: str) -> str:
    return state if state.startswith("rng:") else f"@{state}"


def _tell(node: fx.Node, reads: set[str], writes: set[str], log: RemarkLog) -> None:
    told = []
    if reads:
        told.append(f"reads {', '.join(sorted(reads))}")
    if writes:
        told.append(f"writes {', '.join(sorted(writes))}")
    where = facts.get(node).origin.where
    log.add(
        Remark(
            "note",
            PASS,
            () if where is None else (where,),
            "observed-effect",
            f"`{op_of(node).name}` was seen to do more than was known: it {' and '.join(told)}",
        )
    )


Lines = dict[str, SourceLocation | None]


def lacking(
    observation: Observation, effects: Iterable[Effect], names: StateNames
) -> tuple[Lines, Lines]:
    """The states that an observed call wrote, and those it read by torch, without an effect that
    says so, with the user's line where it is known."""
    found = _Lacking(observation, list(effects), names)
    writes: Lines = {}
    for state, line in found.writes():
        writes.setdefault(state, line)
    return writes, dict.fromkeys(found.reads())


def reached(observation: Observation, effects: Iterable[Effect], names: StateNames) -> Lines:
    """The states that an observed call could read otherwise, without an effect that says so, by
    the attributes that it reached. It matters where something else writes them."""
    found: Lines = {}
    for state, line in _Lacking(observation, list(effects), names).reached():
        found.setdefault(state, line)
    return found


def written(program: Program, deps: Dependences, more: Iterable[str] = ()) -> Callable[[str], bool]:
    """Whether something in a program that may not touch everything writes a state; ``more`` are
    states that are written too."""
    known = {
        e.state
        for n in program.nodes()
        if is_call(n)
        for e in deps.effects(n)
        if e.write and e.state != EVERYTHING
    }
    known.update(more)
    return lambda state: any(related(state, each) for each in known)


class _Lacking:
    """What an observed call did that the effects known of it don't cover."""

    def __init__(self, of: Observation, effects: list[Effect], names: StateNames) -> None:
        self.of = of
        self.names = names
        self.read = [e.state for e in effects]
        self.written = [e.state for e in effects if e.write]
        op = op_of(of.node)
        self.params = {parse_entry(w).root for w in op.signature.writes or ()}
        self.arguments = [
            (name[1:], where)
            for name, value in _own(of.node, of.args)
            for where in memory_of(value)
            if isinstance(where, tuple)
        ]

    def writes(self) -> Iterator[tuple[str, SourceLocation | None]]:
        """Writes that nothing known covers: the state, and the user's line where it is known."""
        seen = self.of.seen
        for where, line in seen.writes.items():
            for state in self._uncovered(where, self.written, write=True):
                yield state, line
        gradients = self.names.cover(seen.gradients, "grads") if seen.gradients else []
        for state in (*gradients, *(self._changed(n, k) for n, k in seen.changed.items())):
            if state.startswith("="):
                if state[1:].split(".")[0] not in self.params:
                    yield state, None
            elif state.startswith(OUTSIDE):
                if not self._covers_outside(state):
                    yield state, None
            elif not _covered(state, self.written):
                yield state, seen.touched.line_of(*self._owner(state))

    def _covers_outside(self, state: str) -> bool:
        """Whether what is written covers an attribute of a class, by the one object that has it, or
        may be anything."""
        if any(self.names.is_opaque(s) or s == EVERYTHING for s in self.written):
            return True
        cls, _, name = state.removeprefix(OUTSIDE).rpartition(".")
        owners = [
            owner
            for owner, thing in self.names.things()
            if any(c.__name__ == cls for c in type(thing).__mro__)
        ]
        return len(owners) == 1 and _covered(f"{owners[0]}.{name}", self.written)

    def _owner(self, state: str) -> tuple[str, str]:
        """The object and attribute by which a state was reached, if it has a name of its own."""
        for (owner, name), value in self.of.seen.touched.values.items():
            if self.names.name_of(value) == state:
                return owner, name
        owner, _, name = state.rpartition(".")
        return owner, name

    def reached(self) -> Iterator[tuple[str, SourceLocation | None]]:
        """Attributes that the call reached, and what it can read through them without torch, where
        nothing known covers it."""
        touched = self.of.seen.touched
        for (owner, name), value in touched.values.items():
            state = f"{owner}.{name}"
            if name == "training" and isinstance(value, bool):
                found = [f"{owner}.mode"]
            elif is_scalar(value):
                found = [state]
            elif isinstance(value, np.ndarray):
                bounds = memory_of(value)
                found = [
                    s
                    for each in bounds
                    if isinstance(each, tuple)
                    for s in self._uncovered(each, self.read, write=False)
                ]
            elif isinstance(value, _CONTAINERS):
                own = self.names.name_of(value) or state
                found = [own, *self.names.linked(own)]
            else:
                continue
            for each in found:
                if not _covered(each, self.read):
                    yield each, next(iter(touched.lines.get((owner, name), ())), None)

    def reads(self) -> Iterator[str]:
        """Reads of states that nothing known covers."""
        for where in self.of.seen.reads:
            yield from self._uncovered(where, self.read, write=False)

    def _changed(self, name: str, kind: str) -> str:
        if kind == "mode":
            return f"{name}.mode"
        return name

    def _uncovered(self, where: Range, known: list[str], *, write: bool) -> Iterator[str]:
        low, high = where
        states = self.names.overlapping(low, high)
        states += [n for a, b, n in self.of.held if a < high and low < b]
        if states:
            if not any(_covered(s, known) for s in states):
                yield states[0]
            return
        if not write:
            return  # a value, or memory that nothing else can reach
        given = [p for p, (a, b) in self.arguments if a < high and low < b]
        if given:
            if not any(p in self.params for p in given):
                yield f"={given[0]}"
        elif not any(self.names.is_opaque(s) or s == EVERYTHING for s in known):
            yield HIDDEN


def _covered(state: str, known: list[str]) -> bool:
    """Whether an effect on one of the known states covers one on this state; what was seen of a
    whole object may be the part of it that is known."""
    return any(
        k in (EVERYTHING, state) or state.startswith(f"{k}.") or k.startswith(f"{state}.")
        for k in known
    )
