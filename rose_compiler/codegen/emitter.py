"""What all parts of an emitted function share: variables, sites, modes, order of actions."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch.fx as fx

from rose_compiler.base.faultmap import Body as FaultBody
from rose_compiler.base.faultmap import Issue, Level, Site
from rose_compiler.codegen.expressions import quoted
from rose_compiler.codegen.merge import Merged, Merger
from rose_compiler.codegen.module import Module
from rose_compiler.codegen.schedule import Action, Body, Schedule, is_pick
from rose_compiler.codegen.scopes import Scope, Spread
from rose_compiler.codegen.states import States
from rose_compiler.codegen.suites import Suite, context_of
from rose_compiler.codegen.suites import text as mode_text
from rose_compiler.codegen.ticks import Ticks
from rose_compiler.codegen.unbound import maybe_unbound
from rose_compiler.codegen.writer import Writer
from rose_compiler.ir import facts
from rose_compiler.ir.facts import Context
from rose_compiler.ir.ops import LOOP, SHARD, STATE
from rose_compiler.ir.program import LoopView, is_call, op_of, placeholders


class Emitter(ABC):
    """What all parts of the emitted function share: variables, sites, modes, the text so far."""

    def __init__(
        self, plan: Schedule, module: Module, tick: Callable[[int], object] | None = None
    ) -> None:
        self.plan, self.module = plan, module
        self.names = module.names
        self.writer = Writer()
        self.variables: dict[fx.Node, str] = {}
        program = plan.program
        params = (*program.value_params, *program.state_params)
        for node, param in zip(placeholders(program.graph), params, strict=True):
            self.variables[node] = self.names.fresh(param, exact=True)
        self.states = States(plan, module.names)
        self.unset = maybe_unbound(plan.program)
        apart = {v.label for v in plan.program.loops() if v.facts.threads}
        self.ticks = Ticks(plan, tick)
        self.tick = "" if tick is None else module.bind(tick, "tick")
        self.merger = Merger(plan, self.states, self.unset, apart, self.ticks)
        self.sites: list[Site] = []
        self.bodies: list[FaultBody] = []
        self.open: list[Context] = []  # the modes that the text being written stands under
        self._site_of: dict[fx.Node, int] = {}
        self._body_of: dict[fx.Graph, int] = {}
        self._tasks: dict[fx.Node, str] = {}
        self._lanes: dict[str, str] = {}
        self.around: tuple[Level, ...] = ()
        self._quiet = False

    # -- names

    def name(self, node: fx.Node) -> str:
        """The variable that holds a node's value."""
        if node not in self.variables:
            self.variables[node] = self.names.fresh(_called(node))
        return self.variables[node]

    def task(self, node: fx.Node) -> str:
        """The variable that holds a task under way."""
        if node not in self._tasks:
            self._tasks[node] = self.names.fresh(f"{op_of(node).name}_task")
        return self._tasks[node]

    def lane(self, lane: str) -> str:
        """The variable that holds a lane."""
        if lane not in self._lanes:
            self._lanes[lane] = self.names.fresh(lane, exact=True)
        return self._lanes[lane]

    def ref(self, node: fx.Node, scope: Scope, at: Action | None) -> str:
        """How an action reads a value or a state."""
        found = self.states.name(node)
        if found is not None:
            return found
        if is_call(node, STATE):
            root, path = node.args
            assert isinstance(root, fx.Node)
            return f"rt.state({self.ref(root, scope, at)}, {quoted(str(path))})"
        if is_call(node, SHARD):
            env, index = node.args
            text = self.module.printer.value(index, self.refs(node, scope, at))
            assert isinstance(env, fx.Node)
            return f"rt.shard({self.ref(env, scope, at)}, {text})"
        return scope.ref(node, at)

    def refs(self, node: fx.Node, scope: Scope, at: Action | None) -> dict[fx.Node, str]:
        """References to all that a node uses."""
        return {n: self.ref(n, scope, at) for n in node.all_input_nodes if n.op != "get_attr"}

    def value(self, item: Any, scope: Scope, at: Action | None) -> str:
        """A value, or a nest of them, as text."""
        used: list[fx.Node] = []
        fx.node.map_arg(item, used.append)
        return self.module.printer.value(item, {n: self.ref(n, scope, at) for n in used})

    # -- what the fault map knows

    def body_index(self, graph: fx.Graph) -> int:
        if graph not in self._body_of:
            self._body_of[graph] = len(self.bodies)
            self.bodies.append(FaultBody())
        return self._body_of[graph]

    def site(self, action: Action, body: Body) -> int:
        """The number of an operation in the fault map."""
        node = action.node
        if node not in self._site_of:
            issue = next(a for a in body.actions if a.node is node and a.what != "await")
            writes: tuple[str, ...] = ()
            if not self.plan.plain:
                writes = tuple(e.state for e in self.plan.deps.effects(node) if e.write)
            site = Site(
                _title(node),
                self.body_index(body.graph),
                issue.position,
                issue.stage,
                issue.order,
                issue.lane,
                writes,
                facts.get(node).origin.where,
            )
            self._site_of[node] = len(self.sites)
            self.sites.append(site)
        return self._site_of[node]

    @contextmanager
    def at(self, action: Action, body: Body, epilogue: int) -> Iterator[None]:
        """Lines written inside belong to an action."""
        before = self.around
        if not self.plan.plain and action.what != "copy":
            level = Level(self.site(action, body), action.stage, action.order, epilogue)
            self.around = self.writer.levels = (*before, level)
        try:
            yield
        finally:
            self.around = self.writer.levels = before

    # -- actions

    def actions(self, body: Body, scope: Scope, epilogue: int = 0) -> None:
        """Write the actions of a body in issue order; in an epilogue, those still to be done."""
        suite = Suite(self)
        units = body.actions if body.scheduled else self.merger.units(body)
        for action in units:
            if isinstance(action, Merged):
                suite.enter(0, action.modes)
                with self.at(action.actions[0], body, epilogue):
                    self.merged(action, scope)
                continue
            if action.stage < epilogue:
                continue
            trips = action.stage
            if epilogue:  # those of the first stage are known to have begun there
                trips = action.stage - epilogue + 1 if action.stage > epilogue else 0
            suite.enter(trips, context_of(action))
            start = len(self.writer.lines)
            with self.at(action, body, epilogue):
                self.action(action, body, scope)
            if body.scheduled and not epilogue:
                self._again(action, body, start)
            self.mark(self.ticks.of(action))
        suite.leave()

    def mark(self, index: int | None) -> None:
        """Write a tick, in a function that is to be profiled."""
        if index is not None and not self._quiet:
            self.writer.line(f"{self.tick}({index})")

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """What is written inside runs on another thread: without ticks, which are the
        coordinator's."""
        before = self._quiet, self.merger
        self._quiet = True
        self.merger = Merger(self.plan, self.states, self.unset, self.merger.apart)
        try:
            yield
        finally:
            self._quiet, self.merger = before

    def _again(self, action: Action, body: Body, start: int) -> None:
        """Keep the lines of an action, to be run behind a fault if they were still to come."""
        site = -1 if action.what == "copy" else self.site(action, body)
        lines = textwrap.dedent("\n".join(self.writer.lines[start:])).splitlines()
        for context in reversed(self.open):
            lines = [
                f"with {mode_text(context, self.module.printer)}:",
                *(f"    {line}" for line in lines),
            ]
        index = self.body_index(body.graph)
        issue = Issue(site, action.stage, action.order, "\n".join(lines))
        known = self.bodies[index]
        if all(i.order != issue.order for i in known.issues):
            self.bodies[index] = replace(known, issues=(*known.issues, issue))

    @abstractmethod
    def action(self, action: Action, body: Body, scope: Scope) -> None:
        """Write one action."""

    @abstractmethod
    def merged(self, unit: Merged, scope: Scope) -> None:
        """Write a run of actions that were merged."""

    @abstractmethod
    def started(self) -> str:
        """The variable that counts the trips of the innermost loop."""

    def scope_of(self, body: Body) -> Scope:
        if body.scheduled:
            return Spread(self.variables, body, self.names, self.name, self.task)
        return Scope(self.variables)


def _called(node: fx.Node) -> str:
    """What a value is called: by its own name, or by the variable that it is the last value of."""
    if not is_pick(node) or not node.name.startswith("getitem"):
        return node.name
    source, position = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(position, int)
    if is_call(source, LOOP):
        return LoopView(source).carried[position].name
    return f"{_called(source)}_{position}"


def _title(node: fx.Node) -> str:
    if is_call(node, LOOP):
        return LoopView(node).label
    return op_of(node).name if is_call(node) else node.name
