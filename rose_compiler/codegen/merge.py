"""Neighbouring blocks of the user's statements as one function, loops and branches included.

Where nothing is scheduled, a call an operation would make emitted code slower than the statements
were. What is merged is compiled under the user's file with the user's lines. Variables keep their
names where two scopes do not use one name for different values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch.fx as fx

from rose_compiler.codegen.module import class_of, is_block
from rose_compiler.codegen.nests import Statements
from rose_compiler.codegen.rename import CannotMerge
from rose_compiler.codegen.schedule import Action, Body, Schedule, acts, is_pick
from rose_compiler.codegen.states import States
from rose_compiler.codegen.suites import Modes, action_modes, common_modes
from rose_compiler.codegen.ticks import Ticks
from rose_compiler.ir import facts
from rose_compiler.ir.block import make_block_function
from rose_compiler.ir.contexts import region_of
from rose_compiler.ir.effects import EVERYTHING
from rose_compiler.ir.ops import BRANCH, LOOP, Signature
from rose_compiler.ir.program import BranchView, LoopView, is_call, is_exit, op_of

#: What statements must share to stand in one function: file, globals and class; and, of those that
#: may tell where they stand, as a log does, the user's function.
Home = tuple[str, int, str | None, CodeType | None]


_TOLD = frozenset(("host", EVERYTHING))


@dataclass(frozen=True)
class Merged:
    """A run of actions as one function."""

    actions: tuple[Action, ...]
    function: FunctionType
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    modes: Modes


class Merger:
    """Merges the actions of bodies in which nothing is scheduled."""

    def __init__(
        self,
        plan: Schedule,
        states: States,
        unset: frozenset[fx.Node],
        apart: Collection[str] = (),
        ticks: Ticks | None = None,
    ) -> None:
        """``unset`` are the values that may be unbound, ``apart`` the labels of loops to leave."""
        self.plan, self.states, self.unset = plan, states, unset
        self.apart = frozenset(apart)
        self.ticks = ticks

    def units(self, body: Body) -> Iterator[Action | Merged]:
        """The actions of a body, in order, runs of them merged."""
        run: list[Action] = []
        home: Home | None = None
        region: int | None = None
        for action in body.actions:
            found = self._home(action.node)
            modes = action_modes(action.node)
            # a function that begins or ends within a region of autocast would cut it in two
            here = region if modes is None else region_of(modes)
            apart = region is not None and here != region
            both = self._together([home, found])
            if both == () or apart:
                yield from self._flush(run, home)
                run, home, region = [], None, None
                both = found
            if both == ():
                yield action
                continue
            run.append(action)
            home = both  # type: ignore[assignment]
            region = here
        yield from self._flush(run, home)

    def _home(self, node: fx.Node) -> Home | tuple[()] | None:
        """Where a node's statements are at home; ``()``: it has none; None: anywhere."""
        if is_call(node, LOOP):
            view = LoopView(node)
            if view.label in self.apart or (not view.bounds and view.index.users):
                return ()
            if len(view.bounds) == 3 and not _builtin_range(view.graph):
                return ()
            return self._one(view.graph, inside=True)
        if is_call(node, BRANCH):
            arms = (BranchView(node).then, BranchView(node).orelse)
            return self._together([self._one(a.graph, inside=False) for a in arms])
        if not is_call(node):
            return None
        op = op_of(node)
        if not is_block(op) or len(node.args) != len(op.attributes["inputs"]):
            return ()
        known = op.attributes
        told = known.get("within") if _tells(op.signature) else None
        return known["filename"], id(known["globals"]), class_of(known), told

    def _of(self, run: list[Action]) -> Home | None:
        """The home of a part of a run, which has one if the run has."""
        return self._together([self._home(a.node) for a in run]) or None

    def _one(self, graph: fx.Graph, *, inside: bool) -> Home | tuple[()] | None:
        """The home of all of a body. An exit belongs into the function of its loop."""
        homes: list[Home | tuple[()] | None] = []
        if self.plan.bodies[graph].scheduled:
            return ()
        for node in graph.nodes:
            if not acts(node):
                continue
            if is_exit(node):
                if not inside:
                    return ()
                continue
            if is_call(node, BRANCH) and inside:
                arms = (BranchView(node).then, BranchView(node).orelse)
                homes += [self._one(a.graph, inside=True) for a in arms]
            else:
                homes.append(self._home(node))
        return self._together(homes)

    @staticmethod
    def _together(homes: list[Home | tuple[()] | None]) -> Home | tuple[()] | None:
        made: Home | None = None
        for home in homes:
            if home is None:
                continue
            if not home:
                return ()
            if made is None:
                made = home
            elif home[:3] != made[:3] or None is not home[3] is not made[3] is not None:
                return ()
            else:
                made = (*made[:3], made[3] or home[3])
        return made

    def _flush(self, run: list[Action], home: Home | None) -> Iterator[Action | Merged]:
        """A run, merged as far as that can be done and is of use."""
        ends = [k for k, a in enumerate(run) if is_call(a.node)]
        if home is None or not ends:
            yield from run
            return
        first, last = ends[0], ends[-1] + 1
        yield from run[:first]
        yield from self._merged(run[first:last], home)
        yield from run[last:]

    def _merged(self, run: list[Action], home: Home) -> Iterator[Action | Merged]:
        structured = any(is_call(a.node, LOOP) or is_call(a.node, BRANCH) for a in run)
        if not structured and sum(is_call(a.node) for a in run) < 2:
            yield from run
            return
        try:
            yield self._merge(run, home[3])
        except Refused as refused:
            at = next(k for k, a in enumerate(run) if a.node is refused.node)
            yield from self._flush(run[:at], self._of(run[:at]))
            yield run[at]
            yield from self._flush(run[at + 1 :], self._of(run[at + 1 :]))

    def _merge(self, run: list[Action], told: CodeType | None) -> Merged:
        known = _attributes(run)
        modes = common_modes(a.node for a in run)
        made = Statements(self.states, self.unset, run, modes, self.ticks)
        for action in run:
            try:
                made.action(action.node)
            except CannotMerge as error:
                raise Refused(action.node) from error
        made.finish()
        members = {a.node for a in run}
        outputs = tuple(n for n in made.results() if _used_outside(n, members))
        variables = made.variables.of
        function = make_block_function(
            self.plan.program.name,
            made.statements,
            tuple(made.inputs.values()),
            tuple(variables[n] for n in outputs),
            known["filename"],
            known["globals"],
            maybe_unbound={name for n, name in made.inputs.items() if n in self.unset},
            constants=made.constants,
            owner=class_of(known),
            within=told or known.get("within"),
        )
        return Merged(tuple(run), function, tuple(made.inputs), outputs, modes)


class Refused(Exception):
    """One node of a run keeps the run from being merged."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(node.name)
        self.node = node


def _tells(signature: Signature) -> bool:
    """Whether an operation may ask which function it stands in: whoever writes logs does."""
    writes = signature.writes
    return writes is None or signature.reads is None or not _TOLD.isdisjoint(writes)


def _used_outside(node: fx.Node, members: set[fx.Node]) -> bool:
    # a pick of a pick is made where its source is
    direct = [u for u in node.users if not is_pick(u)]
    return any(u not in members for u in direct)


def _blocks(graph: fx.Graph) -> Iterator[dict[str, Any]]:
    for node in graph.nodes:
        if is_call(node, LOOP):
            yield from _blocks(LoopView(node).graph)
        elif is_call(node, BRANCH):
            yield from _blocks(BranchView(node).then.graph)
            yield from _blocks(BranchView(node).orelse.graph)
        elif is_call(node) and is_block(op_of(node)):
            yield op_of(node).attributes


def _attributes(run: list[Action]) -> dict[str, Any]:
    """The attributes of the first block of a run."""
    for action in run:
        node = action.node
        if is_call(node, LOOP):
            found = next(_blocks(LoopView(node).graph), None)
        elif is_call(node, BRANCH):
            view = BranchView(node)
            found = next((b for a in (view.then, view.orelse) for b in _blocks(a.graph)), None)
        else:
            found = op_of(node).attributes if is_call(node) else None
        if found is not None:
            return found
    raise AssertionError("a run without blocks")


def _builtin_range(graph: fx.Graph) -> bool:
    return all(known["globals"].get("range", range) is range for known in _blocks(graph))


def place_of(merged: Merged) -> tuple[Any, str]:
    """The first line of what was merged, and the lines it spans as text."""
    places = [w for a in merged.actions if (w := facts.get(a.node).origin.where) is not None]
    if not places:
        return None, ""
    last = max((s.end_lineno or 0 for s in _statements(merged)), default=0)
    first = min(p.line for p in places)
    return places[0], f"lines {first} to {last}" if last > first else ""


def _statements(merged: Merged) -> Iterator[Any]:
    for action in merged.actions:
        if is_call(action.node) and is_block(op_of(action.node)):
            yield from op_of(action.node).attributes["stmts"]
        elif is_call(action.node, LOOP):
            for known in _blocks(LoopView(action.node).graph):
                yield from known["stmts"]
        elif is_call(action.node, BRANCH):
            view = BranchView(action.node)
            for arm in (view.then, view.orelse):
                for known in _blocks(arm.graph):
                    yield from known["stmts"]
