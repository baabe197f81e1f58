"""Loops, branches and exits of a program back to statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch.fx as fx

from rose_compiler.codegen.names import stem
from rose_compiler.codegen.rename import CannotMerge
from rose_compiler.codegen.schedule import acts, is_pick, source_of
from rose_compiler.codegen.statements import Straight
from rose_compiler.codegen.suites import Modes, action_modes
from rose_compiler.ir import contexts, facts
from rose_compiler.ir.ops import BRANCH, BREAK_IF, LOOP, UNBOUND
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    Value,
    is_call,
    is_exit,
    output_node,
    placeholders,
)


class Statements(Straight):
    """The body of one merged function, structure included."""

    def finish(self) -> None:
        """Leave the modes that are open."""
        self._close(self._base)

    def action(self, node: fx.Node) -> None:
        """Write what a node does."""
        self._enter(action_modes(node))
        where = facts.get(node).origin.where
        if where is not None:
            self.line = where.line
        if is_call(node, LOOP):
            self._loop(node)
        elif is_call(node, BRANCH):
            self._branch(node)
        elif is_exit(node):
            self._exit(node)
        elif is_call(node):
            self._block(node)
        else:
            self._plain(node)
        if self.ticks is not None and not is_exit(node):
            self._mark(self.ticks.node(node))

    # -- structure

    def _body(self, graph: fx.Graph, into: list[ast.stmt]) -> None:
        """Write the actions of a body."""
        base, self._base = self._base, len(self._open)
        self._into.append(into)
        for node in graph.nodes:
            if acts(node):
                self.action(node)
        self._close(self._base)
        self._base = base

    def _loop(self, node: fx.Node) -> None:
        view, variables = LoopView(node), self.variables
        bounds = [self._value(b) for b in view.bounds]
        for param, outer in zip(view.captured_params, view.captured, strict=True):
            variables.alias(param, self._variable(outer))
        carried: list[str] = []
        first: list[tuple[str, ast.expr]] = []
        variables.begin(view.graph)
        for param, init in zip(view.carried, view.carried_init, strict=True):
            name = self._carried_variable(param, init, node, carried)
            carried.append(name)
            if isinstance(init, type(UNBOUND)):
                self._unassign(name)
            elif not (isinstance(init, fx.Node) and variables.of.get(init) == name):
                self._sure(init)
                first.append((name, self._value(init)))
        for param, name in zip(view.carried, carried, strict=True):
            variables.hold(name, param)
        index = variables.hold(
            variables.pick(stem(view.index.name), node, including=False), view.index
        )
        self._assign(first)
        for param, value in zip(view.carried, view.carried_next, strict=True):
            self._prefer(value, variables.of[param], view)
        body: list[ast.stmt] = []
        if self.ticks is not None:
            self._into.append(body)
            self._mark(self.ticks.trip(node))
            self._into.pop()
        self._carried.append(carried)
        self._body(view.graph, body)
        self._hand_on(carried, view.carried_next)
        self._into.pop()
        self._carried.pop()
        variables.end()
        here = self._loop_head(view, index, bounds, body or [ast.Pass()])
        self._write(here)
        for position, name in enumerate(carried):
            variables.hold(name, None)
            for pick in node.users:
                if is_pick(pick) and pick.args[1] == position:
                    self._result(pick, name)
        if any(not is_pick(u) for u in node.users):
            raise CannotMerge(f"the results of {node.name} are used as one")

    @staticmethod
    def _loop_head(
        view: LoopView, index: str, bounds: list[ast.expr], body: list[ast.stmt]
    ) -> ast.stmt:
        if not bounds:
            return ast.While(ast.Constant(True), body, [])
        over = bounds[0]
        if len(bounds) == 3:
            over = ast.Call(ast.Name("range", ast.Load()), bounds, [])
        return ast.For(ast.Name(index, ast.Store()), over, body, [])

    def _carried_variable(
        self, param: fx.Node, init: Value, node: fx.Node, given: list[str]
    ) -> str:
        variables = self.variables
        if isinstance(init, fx.Node):
            name = self._variable(init, stem(param.name))
            args = (node.args[1], node.args[2], node.args[3])
            once = sum(n is init for a in args for n in _flat(a)) == 1
            ours = init.graph is node.graph and variables.free(name, node)
            if once and ours and name not in given:
                return name
        name = variables.pick(stem(param.name), node, including=False)
        return name if name not in given else variables.unused(param.name)

    def _prefer(self, value: Value, name: str, view: LoopView) -> None:
        """Let the next value be made in the variable of the carried one, once that is free."""
        if not isinstance(value, fx.Node) or value.graph is not view.graph:
            return
        once = sum(v is value for v in view.carried_next) == 1
        if once and source_of(value).op != "placeholder":
            self.variables.preferred.setdefault(value, name)

    def _hand_on(self, carried: list[str], values: Any) -> None:
        pairs = [(n, v) for n, v in zip(carried, values, strict=True)]
        moving = [
            (n, v)
            for n, v in pairs
            if not (isinstance(v, fx.Node) and self.variables.of.get(v) == n)
        ]
        self._sure(*(v for _, v in moving))
        for name, value in moving:
            if isinstance(value, type(UNBOUND)):
                raise CannotMerge(f"{name} becomes unbound")
        self._assign([(n, self._value(v)) for n, v in moving])

    def _branch(self, node: fx.Node) -> None:
        view, variables = BranchView(node), self.variables
        pred = self._value(view.pred)
        outer_names = [self._variable(o) for o in view.captured]
        count = len(tuple(output_node(view.then.graph).args[0]))  # type: ignore[arg-type]
        picks: list[list[fx.Node]] = [[] for _ in range(count)]
        for user in node.users:
            if not is_pick(user):
                raise CannotMerge(f"the results of {node.name} are used as one")
            picks[user.args[1]].append(user)  # type: ignore[index]
        names: list[str] = []
        for found in picks:
            if found:
                name = variables.target(found[0], stem(found[0].name), node, including=False)
                if found[0] in variables.preferred:
                    name = variables.target(found[0], stem(found[0].name), node)
                names.append(name if name not in names else variables.unused(found[0].name))
            else:
                names.append("")
        arms: list[list[ast.stmt]] = []
        for arm in (view.then, view.orelse):
            for param, name in zip(placeholders(arm.graph), outer_names, strict=True):
                variables.alias(param, name)
            variables.begin(arm.graph)
            written: list[ast.stmt] = []
            self._body(arm.graph, written)
            values = tuple(output_node(arm.graph).args[0])  # type: ignore[arg-type]
            wanted = [(n, v) for n, v in zip(names, values, strict=True) if n]
            self._hand_on([n for n, _ in wanted], [v for _, v in wanted])
            self._into.pop()
            variables.end()
            arms.append(written)
        self._write(ast.If(pred, arms[0] or [ast.Pass()], arms[1]))
        for name, found in zip(names, picks, strict=True):
            for pick in found:
                self._result(pick, name)

    def _exit(self, node: fx.Node) -> None:
        pred, values = node.args[0], tuple(node.args[1])  # type: ignore[arg-type]
        body: list[ast.stmt] = []
        test = self._value(pred)
        self._into.append(body)
        self._hand_on(self._carried[-1], values)
        self._write(ast.Break() if is_call(node, BREAK_IF) else ast.Continue())
        self._into.pop()
        self._write(ast.If(test, body, []))

    # -- modes

    def _enter(self, modes: Modes | None) -> None:
        if modes is None:
            return
        shared = 0
        while shared < min(len(self._open), len(modes)) and self._open[shared] == modes[shared]:
            shared += 1
        if shared < self._base:
            raise CannotMerge("modes around it differ")
        self._close(shared)
        for context in modes[len(self._open) :]:
            name = self.variables.unused(f"_rose_{context.kind}")
            self.constants[name] = contexts.maker(context)
            body: list[ast.stmt] = []
            entered = ast.withitem(ast.Call(ast.Name(name, ast.Load()), [], []))
            self._write(ast.With([entered], body))
            self._into.append(body)
            self._open.append(context)

    def _close(self, size: int) -> None:
        while len(self._open) > size:
            self._open.pop()
            if not self._into.pop():
                raise CannotMerge("nothing stands under a mode")


def _flat(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _flat(item)
