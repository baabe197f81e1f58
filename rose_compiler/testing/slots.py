"""Runs a scheduled program by its slots, with steps on lanes finishing at random moments.

The reference executor runs program order and never looks at slots. This one runs each body as its
slots say: by emitted trip, stage and order; what is on a lane runs at a random moment between its
place and the first operation that depends on it. Whatever a schedule must not change can therefore
be compared with the reference.
"""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.contexts import entered
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.interp import Environment, Hooks, Interpreter, Outcome, resolve
from rose_compiler.ir.ops import STATE
from rose_compiler.ir.program import LoopView, Program, is_call, is_item, op_of

Pending = tuple[fx.Node, int]


def run(
    program: Program,
    args: Mapping[str, Any] | Sequence[Any],
    objects: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
) -> Any:
    """Run a scheduled program; ``seed`` decides when work on lanes is done."""
    live = program.objects if objects is None else objects
    values = [args[n] for n in program.value_params] if isinstance(args, Mapping) else list(args)
    states = [live[n] for n in program.state_params]
    return SlotInterpreter(program, seed).root(program, [*values, *states])


class SlotInterpreter(Interpreter):
    """Executes loop bodies by their slots. ``overlaps`` counts operations run beside a lane."""

    def __init__(self, program: Program, seed: int) -> None:
        super().__init__(Hooks())
        self.deps = Dependences(program)
        self.random = random.Random(seed)
        self.overlaps = 0

    def _loop(self, node: fx.Node, env: Environment) -> tuple[Any, ...]:
        view = LoopView(node)
        nodes = [n for n in view.graph.nodes if facts.get(n).slot is not None]
        if not nodes:
            return super()._loop(node, env)
        return _Body(self, view, nodes, env).run()


class _Trip(dict[fx.Node, Any]):
    """The values of one program trip; carried values, picks and states are found when asked for."""

    def __init__(self, body: _Body, number: int) -> None:
        super().__init__()
        self.body = body
        self.number = number

    def __missing__(self, node: fx.Node) -> Any:
        body = self.body
        if node in body.position:
            k = body.position[node]
            if self.number == 0:
                return body.init[k]
            if self.number - 1 in body.handed:
                return body.handed[self.number - 1][k]
            return body.of._read(body.trips[self.number - 1], body.view.carried_next[k])
        if is_item(node):
            return operator.getitem(self[node.args[0]], node.args[1])  # type: ignore[index]
        if is_call(node, STATE):
            return resolve(self[node.args[0]], node.args[1])  # type: ignore[index, arg-type]
        raise AssertionError(f"{node} of trip {self.number} is used before it has run")


class _Body:
    def __init__(
        self, of: SlotInterpreter, view: LoopView, nodes: list[fx.Node], env: Environment
    ) -> None:
        self.of, self.view = of, view
        self.nodes = sorted(nodes, key=lambda n: facts.get(n).slot.order)  # type: ignore[union-attr]
        self.stage = {n: facts.get(n).slot.stage for n in nodes}  # type: ignore[union-attr]
        self.bounds = of._read(env, view.bounds)
        self.init = of._read(env, view.carried_init)
        self.captured = of._read(env, view.captured)
        self.position = {p: k for k, p in enumerate(view.carried)}
        self.trips: list[_Trip] = []
        self.handed: dict[int, tuple[Any, ...]] = {}  # by trips that end at an exit
        self.lanes: dict[str, list[Pending]] = {}
        self.edges: dict[fx.Node, list[Any]] = {}
        for edge in of.deps.edges(view.graph):
            src = edge.src
            while is_item(src) and src not in self.stage:  # it is there when its source is
                src = src.args[0]  # type: ignore[assignment]
            self.edges.setdefault(edge.dst, []).append(edge._replace(src=src))

    def run(self) -> tuple[Any, ...]:
        emitted, ended = 0, False
        indices = _indices(self.bounds)
        while not ended or emitted < len(self.trips) + max(self.stage.values()):
            if not ended:
                try:
                    self._enter(next(indices))
                except StopIteration:
                    ended = True
                    continue
            for node in self.nodes:
                trip = emitted - self.stage[node]
                outcome = self._issue(node, trip) if 0 <= trip < len(self.trips) else None
                if outcome is not None:
                    self.handed[trip] = outcome.values
                    ended |= outcome.how == "break"
                    break
            emitted += 1
        for lane in self.lanes.values():
            while lane:
                self._finish(lane)
        last = _Trip(self, len(self.trips))
        self.trips.append(last)
        return tuple(last[p] for p in self.view.carried)

    def _enter(self, index: Any) -> None:
        self.of.held.at(facts.get(self.view.node).context)
        trip = _Trip(self, len(self.trips))
        trip[self.view.index] = index
        trip.update(zip(self.view.captured_params, self.captured, strict=True))
        self.trips.append(trip)

    def _issue(self, node: fx.Node, trip: int) -> Outcome | None:
        for lane in self.lanes.values():
            while any(self._waits(node, trip, *one) for one in lane):
                self._finish(lane)
        slot, outcome = facts.get(node).slot, None
        assert slot is not None
        if slot.lane:
            self.lanes.setdefault(slot.lane, []).append((node, trip))
        else:
            busy = any(self.lanes.values())
            self.of.overlaps += busy and is_call(node)
            outcome = self._execute(node, trip)
        for lane in self.lanes.values():
            if lane and self.of.random.random() < 0.3:
                self._finish(lane)
        return outcome

    def _waits(self, node: fx.Node, trip: int, on: fx.Node, of: int) -> bool:
        return any(e.src is on and e.applies(trip - of) for e in self.edges.get(node, ()))

    def _finish(self, lane: list[Pending]) -> None:
        self._execute(*lane.pop(0))

    def _execute(self, node: fx.Node, trip: int) -> Outcome | None:
        env = self.trips[trip]
        with entered(facts.get(self.view.node).context):
            outcome = self.of._node(node, env)
        overlap = outcome is not None and any(self.stage.values())
        assert not overlap, f"{op_of(node).name} leaves a loop whose trips overlap"
        return outcome


def _indices(bounds: tuple[Any, ...]) -> Iterator[Any]:
    if len(bounds) == 3:
        return iter(range(*bounds))
    return iter(bounds[0]) if bounds else itertools.count()
