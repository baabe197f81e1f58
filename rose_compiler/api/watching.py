"""What an iteration was seen to do, and what follows: effects, graphs, batches."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.fx as fx

from rose_compiler.api.observing import Observer, contradict
from rose_compiler.base import knobs
from rose_compiler.base.remarks import Blocker, RemarkLog
from rose_compiler.frontend.batches import annotate
from rose_compiler.frontend.changes import Changes
from rose_compiler.frontend.closed import tell_closed
from rose_compiler.frontend.first_run import hold_back
from rose_compiler.frontend.graphs import trace_runs
from rose_compiler.frontend.losses import trace_losses
from rose_compiler.frontend.names import StateNames
from rose_compiler.frontend.numbers import Every
from rose_compiler.frontend.promote import promote
from rose_compiler.frontend.record import Record, Recorder
from rose_compiler.frontend.scalar import is_scalar
from rose_compiler.frontend.source import is_user_type
from rose_compiler.frontend.states import refine
from rose_compiler.frontend.unroll import unroll
from rose_compiler.ir import interp
from rose_compiler.ir.bodies import copy_program
from rose_compiler.ir.dump import dump
from rose_compiler.ir.effects import EVERYTHING
from rose_compiler.ir.losses import Loss
from rose_compiler.ir.program import Program, op_of
from rose_compiler.ir.verify import verify

#: How often a program is looked at anew because a part of it ran for the first time, or was handed
#: values of other types.
MAX_LOOKS = 8
#: Changes of numbers that graphs hold after which no graph may hold any: each costs a look.
OFTEN = 5


class Watch:
    """One program as captured, and what was seen of it so far.

    ``program`` is a copy with effects and graphs, for passes to rewrite copies of; ``examples`` are
    values that operations were first called with, ``remarks`` what could not be understood,
    ``kinds`` the types of values that iterations were handed.
    """

    def __init__(self, captured: Program, log: RemarkLog) -> None:
        self.captured = captured
        self.log = log  # of the whole function: what was observed stays true
        self.program = captured
        self.text = ""
        self.examples: dict[str, Any] = {}
        self.remarks = RemarkLog()
        self.held = 0  # branches and loops that wait for a part of theirs to run
        self._record: Record | None = None
        self._later: list[Observer] = []
        self._observed: dict[fx.Node, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._reached: dict[fx.Node, set[str]] = {}
        self.kinds: set[tuple[type, ...]] = set()
        self._attributes: list[tuple[Any, str]] = []
        self._looks = 0
        self._traceable: Record | None = None
        self._losses: dict[str, Loss | Blocker] | None = None
        self.unsteady: set[str] = set()  # numbers that no graph may hold
        self._renumbered: Counter[str] = Counter()
        self._resized: dict[str, str] = {}  # operations whose graph was handed other sizes
        self._resizes = 0  # how many of them are known
        self._numberless = False  # looked at so often that no graph may hold any number

    @property
    def losses(self) -> dict[str, Loss | Blocker]:
        """The graph of each loss that a ``backward`` follows, or why there is none; traced when
        first asked for."""
        if self._losses is None:
            if self._traceable is None:
                return {}
            self._losses = trace_losses(self.program, self._traceable)
        return self._losses

    def renumbered(self, states: Mapping[str, Any]) -> str | None:
        """What a graph holds that is another number or size now, in words. The program is to be
        watched again then; a number that has changed before is held by no graph any more."""
        if len(self._resized) > self._resizes:
            self._resizes = len(self._resized)
            last = [*self._resized.values()][-1]
            return f"a graph was handed other sizes or types than before: {last}"
        numbers = () if self._traceable is None else self._traceable.numbers
        changed = {n.where: told for n in numbers if (told := n.changed(states)) is not None}
        if not changed:
            return None
        self._renumbered.update(list(changed))
        often = self._renumbered.total() > OFTEN
        self._numberless |= self._looks >= MAX_LOOKS
        self.unsteady |= {n.where for n in numbers if often or self._renumbered[n.where] > 1}
        return next(iter(changed.values()))

    def knows(self, values: Mapping[str, Any]) -> bool:
        """Whether values of these types were seen: effects hang on them."""
        return _kinds(values) in self.kinds

    @property
    def settled(self) -> bool:
        """Whether attributes that held numbers or text still do: a sum that starts at 0 may become
        a tensor, which is then added to in place and shared by whoever holds it."""
        if not self._attributes:
            return True
        return all(is_scalar(owner.__dict__.get(name)) for owner, name in self._attributes)

    @property
    def behind(self) -> bool:
        """Whether a part ran for the first time since :attr:`program` was made."""
        return bool(self._later)

    def between(self) -> tuple[Sequence[Observer], bool]:
        """For who asks behind every trip until :meth:`catch_up` or :meth:`run`: what holds
        something once :attr:`behind` is true, and whether :attr:`settled` can change at all."""
        return self._later, bool(self._attributes)

    def run(self, values: Mapping[str, Any], states: Mapping[str, Any]) -> tuple[bool, Any]:
        """Run one iteration in program order, watched: whether :attr:`program` is a new one, and
        the result."""
        last = self._numberless and self._traceable is not None and self._traceable.numbers
        if self._looks >= MAX_LOOKS and not last:
            return False, interp.run(self.captured, values, states)
        self._attributes = list(_changing_scalars(self.captured))
        observer = self._observer()
        result = interp.run(self.captured, values, states, hooks=observer)
        self.kinds.add(_kinds(values))
        self._later.append(observer)
        self.catch_up()
        return True, result

    def catch_up(self) -> None:
        """Make :attr:`program` anew from all that was seen."""
        observers, self._later = self._later, []
        for observer in observers:
            assert observer.recorder is not None
            if self._record is None:
                self._record = observer.recorder.record
            else:
                self._record.add(observer.recorder.record)
        assert self._record is not None
        self._looks += 1
        self._understand(self._record, observers)

    def _observer(self) -> Observer:
        return Observer(self.captured, Recorder(self.captured))

    def _first_run(self) -> Observer:
        """What watches a part that runs for the first time."""
        self._later.append(self._observer())
        return self._later[-1]

    def _observe(self, observers: list[Observer]) -> None:
        """Hold what was seen of operations against what is known, now and on earlier looks."""
        for node, (reads, writes) in self._observed.items():
            known = op_of(node).signature
            if known.reads is not None and known.writes is not None:
                made = replace(known, reads=(*known.reads, *reads), writes=(*known.writes, *writes))
                op_of(node).signature = made
        for observer in observers:
            before = {o.node: op_of(o.node).signature for o in observer.found}
            contradict(self.captured, observer, self.log, self._reached)
            for node, old in before.items():
                new = op_of(node).signature
                if new is not old:
                    reads, writes = self._observed.get(node, ((), ()))
                    more = (new.reads or ())[len(old.reads or ()) :]
                    also = (new.writes or ())[len(old.writes or ()) :]
                    self._observed[node] = ((*reads, *more), (*writes, *also))
        assert self._record is not None
        for node in self._observed:  # who reads more than was known may record from it
            if node in self._record.recorded:
                op_of(node).signature = replace(op_of(node).signature, records=(EVERYTHING,))

    def _understand(self, record: Record, observers: list[Observer]) -> None:
        self.remarks = log = RemarkLog()
        refine(self.captured, record, log)
        tell_closed(self.captured, log)
        self._observe(observers)
        self.program = program = copy_program(self.captured)
        copies = dict(zip(self.captured.nodes(), program.nodes(), strict=True))
        self.held = 0
        if self._looks < MAX_LOOKS:
            original = {copy: node for node, copy in copies.items()}
            self.held = hold_back(program, original, record, self._first_run, log)
        moved = record.moved(copies)
        promote(program, moved, log)
        unroll(program, moved, log)
        self.examples = _examples(moved)
        self._losses = None
        self._traceable = moved
        moved.resized_later = self._resized
        moved.unsteady = Every() if self._numberless else frozenset(self.unsteady)
        trace_runs(program, moved, log)
        annotate(program, moved)
        record.release()
        moved.let_go()
        verify(program)
        self.text = dump(program)
        if knobs.current().remarks and len(log):
            print(log.render(), file=sys.stderr)


def _changing_scalars(program: Program) -> Iterator[tuple[Any, str]]:
    """Attributes of objects of the user's that hold a number or text and may be assigned."""
    known = (op.attributes.get("changes") for op in program.ops.by_name.values())
    changes = next((c for c in known if isinstance(c, Changes)), None)
    if changes is None:
        return
    for _, owner in StateNames(program.objects).things():
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            if is_scalar(value) and is_user_type(type(owner)) and changes.attribute(owner, name):
                yield owner, name


def _kinds(values: Mapping[str, Any]) -> tuple[type, ...]:
    return tuple(map(type, values.values()))


def _examples(record: Record) -> dict[str, Any]:
    """Values that operations were first called with, by the name of the argument's node."""
    found: dict[str, Any] = {}
    for node, example in record.examples.items():
        for argument, value in zip(node.args, example.args, strict=True):
            if isinstance(argument, fx.Node):
                found.setdefault(argument.name, value)
    return found
