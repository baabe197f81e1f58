"""Emits loops: plain ones, and those whose trips overlap."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import torch.fx as fx

from rose_compiler.codegen.operations import Operations
from rose_compiler.codegen.schedule import Action, Body, source_of, uses_of
from rose_compiler.codegen.scopes import Scope, Spread
from rose_compiler.ir import facts
from rose_compiler.ir.program import LoopView, is_item
from rose_compiler.ir.scope import nodes_in


class Function(Operations):
    """The whole function."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._promised: dict[str, list[fx.Node]] = {}  # next carried values by their variable
        self._around: list[tuple[LoopView, str]] = []  # loops around the text, with their counters

    def started(self) -> str:
        return self._around[-1][1]

    def handed_out(self) -> list[str]:
        return [self.variables[p] for p in self._around[-1][0].carried]

    def loop(self, action: Action, scope: Scope) -> None:
        self.loop_text(action, scope)
        self.picked(action.node, scope)

    def loop_text(self, action: Action, scope: Scope) -> None:
        view = LoopView(action.node)
        body = self.plan.bodies[view.graph]
        refs = self.refs(action.node, scope, action)
        where = facts.get(action.node).origin.where
        self.check(action.node, view.bounds, refs)
        self._bind(view, body, action, scope)
        inside = self.scope_of(body)
        threads = view.facts.threads or None
        before = ""
        if threads is not None:
            before = self.names.fresh("threads")
            self.writer.line(f"{before} = rt.set_threads({threads})")
            self.writer.open("try:")
        self._initial(view, inside, refs)
        counter = ""
        index = self.body_index(view.graph)
        if body.depth:
            counter = self.bodies[index].trips or self.names.fresh("started")
            self.bodies[index] = replace(self.bodies[index], trips=counter, depth=body.depth)
            self.writer.line(f"{counter} = 0")
        self._around.append((view, counter))
        with self.writer.block(self._head(view, refs), where):
            self.mark(self.ticks.trip(view.node))
            self.actions(body, inside)
            start = len(self.writer.lines)
            self._end_of_trip(view, body, inside)
            end = textwrap.dedent("\n".join(self.writer.lines[start:]))
            self.bodies[index] = replace(self.bodies[index], end=end)
            if counter:
                self.writer.line(f"{counter} += 1")
        if isinstance(inside, Spread) and body.depth:
            with self.writer.block(f"if {counter}:"):
                self._epilogue(body, inside)
        self._around.pop()
        if threads is not None:
            self.writer.close()
            with self.writer.block("finally:"):
                self.writer.line(f"rt.set_threads({before})")
        self.named(view.node, len(view.carried))

    # -- variables

    def _bind(self, view: LoopView, body: Body, action: Action, scope: Scope) -> None:
        """Give the placeholders of the body and the results of the loop their variables."""
        for param, outer in zip(view.captured_params, view.captured, strict=True):
            self.variables[param] = self.ref(outer, scope, action)
        picks = [u for u in view.node.users if is_item(u)]
        if self.plan.bodies[action.node.graph].scheduled:
            # later trips may read copies of the results, by variables that are known already
            for pick in picks:
                param = view.carried[pick.args[1]]  # type: ignore[index]
                self.variables.setdefault(param, self.name(pick))
        if not body.scheduled:
            self._share(view, action, scope)
        for param in (view.index, *view.carried):
            self.name(param)
        for pick in picks:
            self.variables[pick] = self.variables[view.carried[pick.args[1]]]  # type: ignore[index]

    def _share(self, view: LoopView, action: Action, scope: Scope) -> None:
        """Let one variable hold a carried value before, in and behind the loop, where none of its
        other readers would notice; so the loop reads as the user wrote it."""
        made = (v for v in nodes_in(view.carried_next) if v.op.startswith("call_"))
        if any(v in self.variables for v in made):
            return  # emitted once before
        given: set[str] = set()
        outer = self.plan.bodies[action.node.graph]
        for k, (param, init) in enumerate(zip(view.carried, view.carried_init, strict=True)):
            if (
                isinstance(init, fx.Node)
                and not outer.scheduled
                and facts.get(init).role not in ("captured", "state", "index")
                and self.states.name(init) is None
                and param not in self.variables
                and init in self.variables
                and self.variables[init] not in given
                and _dead_behind(init, action.node)
                and self._keeps(self.variables[init], k, view.node)
            ):
                self.variables[param] = self.variables[init]
                given.add(self.variables[init])
        for param in view.carried:
            self.name(param)
        position = {n: k for k, n in enumerate(view.graph.nodes)}
        nexts = list(view.carried_next)
        for param, value in zip(view.carried, nexts, strict=True):
            if not isinstance(value, fx.Node) or value in self.variables or nexts.count(value) > 1:
                continue
            source = source_of(value)
            if value.graph is not view.graph or source.op == "placeholder":
                continue
            if all(position[u] <= position[source] for u in uses_of(param)):
                self.variables[value] = self.variables[param]
                self._promised.setdefault(self.variables[param], []).append(value)

    def _keeps(self, variable: str, k: int, loop: fx.Node) -> bool:
        """Whether result ``k`` of a loop may stay in a variable: nothing else is made in it, in the
        same body, while that result is needed."""
        position = {n: at for at, n in enumerate(loop.graph.nodes)}
        picks = [u for u in loop.users if is_item(u) and u.args[1] == k]
        uses = [u for p in picks for u in uses_of(p)]
        for value in self._promised.get(variable, ()):
            if value.graph is not loop.graph or value in picks:
                continue
            made = position[source_of(value)]
            if made > position[loop] and any(u.op == "output" or position[u] > made for u in uses):
                return False
        return True

    def _initial(self, view: LoopView, inside: Scope, refs: dict[fx.Node, str]) -> None:
        """In front of the loop: first carried values, and copies that don't exist yet."""
        printer = self.module.printer
        self.assign_all(
            (self.variables[p], printer.value(init, refs))
            for p, init in zip(view.carried, view.carried_init, strict=True)
        )
        if not isinstance(inside, Spread):
            return
        for carried in inside.carried.values():
            for other in (*([carried.next] if carried.next else []), *carried.older):
                self.writer.line(f"{other} = {carried.variable}")
        unset = inside.initial()
        if unset:
            self.writer.line(" = ".join((*unset, "None")))

    def _head(self, view: LoopView, refs: dict[fx.Node, str]) -> str:
        printer, index = self.module.printer, self.variables[view.index]
        kind = len(view.bounds)
        if kind == 1:
            return f"for {index} in {printer.value(view.bounds[0], refs)}:"
        if kind == 3:
            start, stop, step = (printer.value(b, refs) for b in view.bounds)
            if step != "1":
                return f"for {index} in range({start}, {stop}, {step}):"
            return f"for {index} in range({stop if start == '0' else f'{start}, {stop}'}):"
        if view.index.users:
            return f"for {index} in {self.module.count()}():"
        return "while True:"

    # -- ends of trips

    def _end_of_trip(self, view: LoopView, body: Body, inside: Scope, epilogue: int = 0) -> None:
        if not isinstance(inside, Spread):
            self.assign_all(
                (self.variables[p], self.value(v, inside, None))
                for p, v in zip(view.carried, view.carried_next, strict=True)
            )
            return
        if epilogue == 0 or epilogue < body.depth:  # nothing reads copies behind the last trip
            for name, source in inside.copies():
                self.writer.line(f"{name} = {source}")
        updates = inside.updates()
        for stage in sorted({c.stage for c in updates}):
            if stage < epilogue:
                continue
            pairs = [
                (c.variable, inside.following(c) or self.value(c.value, inside, None))
                for c in updates
                if c.stage == stage
            ]
            trips = stage if not epilogue else stage - epilogue + 1
            if trips > (1 if epilogue else 0):
                counter = self.started()
                with self.writer.block(
                    f"if {counter}:" if trips == 1 else f"if {counter} >= {trips}:"
                ):
                    self.assign_all(pairs)
            else:
                self.assign_all(pairs)

    def _epilogue(self, body: Body, inside: Spread) -> None:
        """Finish what the last trips have begun."""
        assert body.loop is not None
        for trip in range(1, body.depth + 1):
            self.mark(self.ticks.trip(body.loop.node))
            self.actions(body, inside, trip)
            self._end_of_trip(body.loop, body, inside, trip)


def _dead_behind(node: fx.Node, user: fx.Node) -> bool:
    """Whether ``user``, and it once only, is the last to use a value."""
    uses = list(uses_of(node))
    if any(u.op == "output" for u in uses) or node.graph is not user.graph:
        return False
    position = {n: k for k, n in enumerate(node.graph.nodes)}
    if any(position[u] > position[user] for u in uses):
        return False
    times = 0

    def count(used: fx.Node) -> fx.Node:
        nonlocal times
        times += used is node or source_of(used) is node
        return used

    fx.node.map_arg(user.args, count)
    return times == 1
