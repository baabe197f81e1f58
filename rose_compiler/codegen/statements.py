"""Straight-line nodes of a program back to statements: the user's own, with names that fit."""

from __future__ import annotations

import ast
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch.fx as fx

from rose_compiler.codegen.expressions import Printer
from rose_compiler.codegen.names import stem
from rose_compiler.codegen.rename import CannotMerge, Renamer
from rose_compiler.codegen.schedule import Action, is_pick
from rose_compiler.codegen.states import States
from rose_compiler.codegen.suites import Modes
from rose_compiler.codegen.ticks import Ticks
from rose_compiler.codegen.variables import Variables, read_globals
from rose_compiler.ir import facts
from rose_compiler.ir.block import assigned_names
from rose_compiler.ir.facts import Context
from rose_compiler.ir.ops import BRANCH, LOOP, SHARD, STATE, UNBOUND
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    Value,
    is_call,
    op_of,
)

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


def _bind(thing: Any, name: str) -> str:
    raise CannotMerge(f"{name} has no name in the user's module")


class Straight(ABC):
    """The body of one merged function.

    ``inputs`` are the values from outside with their parameters, ``constants`` further names and
    what they stand for, ``statements`` what was written.
    """

    def __init__(
        self,
        states: States,
        unset: frozenset[fx.Node],
        run: list[Action],
        modes: Modes,
        ticks: Ticks | None = None,
    ) -> None:
        self.states, self.unset = states, unset
        self.inputs: dict[fx.Node, str] = {}
        self.constants: dict[str, Any] = {}
        self.statements: list[ast.stmt] = []
        self.variables = Variables(_reserved(a.node for a in run))
        self.ticks = ticks
        self._tick = ""
        if ticks is not None and ticks.call is not None:
            self._tick = self.variables.unused("_rose_tick")
            self.constants[self._tick] = ticks.call
        self.variables.begin(run[0].node.graph)
        self.home = run[0].node.graph
        self.line = next((w.line for a in run if (w := facts.get(a.node).origin.where)), 1)
        self._printer = Printer(_bind)
        self._made: list[fx.Node] = []
        self._carried: list[list[str]] = []  # the carried variables of the loops around
        self._open: list[Context] = list(modes)
        self._base = len(modes)
        self._into: list[list[ast.stmt]] = [self.statements]

    # -- text

    def results(self) -> Iterator[fx.Node]:
        """The values made at the top of the function, that may be used behind it."""
        yield from (n for n in self._made if n.graph is self.home)

    def _write(self, stmt: ast.stmt) -> None:
        self._into[-1].append(self._here(stmt))

    def _mark(self, index: int | None) -> None:
        """Write a tick, in a function that is to be profiled."""
        if index is not None:
            call = ast.Call(ast.Name(self._tick, ast.Load()), [ast.Constant(index)], [])
            self._write(ast.Expr(call))

    def _here(self, tree: Any) -> Any:
        for node in ast.walk(tree):
            if isinstance(node, ast.expr | ast.stmt) and not hasattr(node, "lineno"):
                node.lineno = node.end_lineno = self.line
                node.col_offset = node.end_col_offset = 0
        return tree

    def _assign(self, pairs: list[tuple[str, ast.expr]]) -> None:
        """Assign at the same time; what has its value already is left out."""
        left = [(n, v) for n, v in pairs if not (isinstance(v, ast.Name) and v.id == n)]
        if not left:
            return
        targets: list[ast.expr] = [ast.Name(n, ast.Store()) for n, _ in left]
        values = [v for _, v in left]
        if len(left) == 1:
            self._write(ast.Assign([targets[0]], values[0]))
        else:
            self._write(
                ast.Assign([ast.Tuple(targets, ast.Store())], ast.Tuple(values, ast.Load()))
            )

    def _unassign(self, name: str) -> None:
        self._write(ast.Assign([ast.Name(name, ast.Store())], ast.Constant(None)))
        self._write(ast.Delete([ast.Name(name, ast.Del())]))

    # -- values

    def _variable(self, node: fx.Node, text: str = "") -> str:
        """The variable of a value; one from outside becomes a parameter."""
        found = self.variables.of.get(node)
        if found is None:
            if is_call(node, STATE) or is_call(node, SHARD):
                if self.states.name(node) is None:
                    raise CannotMerge(f"{node.name} may be another object each time")
            elif node.graph is not self.home:
                raise CannotMerge(f"{node.name} is not there yet")
            text = text or stem(node.name)
            free = text not in self.variables.given and text not in self.variables.reserved
            name = text if free else self.variables.unused(text)
            found = self.inputs[node] = self.variables.hold(name, node)
        return found

    def _value(self, item: Value) -> ast.expr:
        """A value as an expression."""
        if isinstance(item, fx.Node):
            return ast.Name(self._variable(item), ast.Load())
        if isinstance(item, type(UNBOUND)):
            raise CannotMerge("an unbound variable is used")
        if isinstance(item, _PLAIN):
            return ast.Constant(item)
        name = self.variables.unused("constant")
        self.constants[name] = item
        return ast.Name(name, ast.Load())

    def _sure(self, *values: Value) -> None:
        """Refuse to copy what may be unbound: an assignment would raise where nothing is read."""
        for value in values:
            if isinstance(value, fx.Node) and value in self.unset:
                raise CannotMerge(f"{value.name} may be unbound")

    # -- actions

    @abstractmethod
    def action(self, node: fx.Node) -> None:
        """Write what a node does."""

    def _block(self, node: fx.Node) -> None:
        op, variables = op_of(node), self.variables
        known = op.attributes
        stmts = [copy.deepcopy(s) for s in known["stmts"]]
        stored = assigned_names(stmts)
        # one assignment reads all of its operands before it writes
        single = len(stmts) == 1 and _plain_assignment(stmts[0])
        names: dict[str, str | ast.expr] = {}
        taken: set[str] = set()
        for name, arg in zip(known["inputs"], node.args, strict=True):
            names[name] = self._input(name, arg, node, name in stored, taken)
        results = _results(node)
        if set(known["outputs"]) - stored:
            raise CannotMerge(f"{node.name} hands an input on")
        for name, result in zip(known["outputs"], results, strict=True):
            if name not in names:
                if result is not None:
                    made = variables.target(result, name, node, including=single)
                else:
                    made = variables.pick(name, node, including=single)
                if made in taken or made in names.values():
                    made = variables.unused(name)
                names[name] = made
            variables.hold(str(names[name]), None)
        for name in sorted(stored - set(names)):
            free = variables.free(name, node, including=False)
            names[name] = name if free and name not in names.values() else variables.unused(name)
            variables.hold(str(names[name]), None)
        for stmt in stmts:
            self._into[-1].append(Renamer(names).visit(stmt))
            self.line = stmt.end_lineno or self.line
        for name, result in zip(known["outputs"], results, strict=True):
            if result is not None:
                self._result(result, str(names[name]))
        if len(results) > 1 and any(not is_pick(u) for u in node.users):
            raise CannotMerge(f"the results of {node.name} are used as one")

    def _input(
        self, name: str, arg: Value, node: fx.Node, written: bool, taken: set[str]
    ) -> str | ast.expr:
        """What stands for an input of a block. ``written``: its statements assign it anew."""
        variables = self.variables
        if isinstance(arg, fx.Node):
            found = self._variable(arg, name)
            if not written:
                return found
            holder = arg if arg.graph is node.graph else None
            alone = sum(a is arg for a in node.args) == 1
            ours = holder is not None and variables.free(found, node)
            if ours and alone and found not in taken:
                taken.add(found)
                variables.hold(found, None)
                return found
            self._sure(arg)
        elif not isinstance(arg, type(UNBOUND)) and not written:
            return self._here(self._value(arg))
        target = variables.unused(name)
        taken.add(target)
        if isinstance(arg, type(UNBOUND)):
            self._unassign(target)
        else:
            self._assign([(target, self._value(arg))])
        return target

    def _result(self, node: fx.Node, name: str) -> None:
        """A value is made, and the parts of it that somebody picks."""
        self.variables.hold(name, node)
        self._made.append(node)
        for pick in node.users:
            if is_pick(pick) and pick not in self.variables.of:
                part = self.variables.target(pick, stem(pick.name), node, including=False)
                index = ast.Constant(pick.args[1])  # type: ignore[arg-type]
                value = ast.Subscript(ast.Name(name, ast.Load()), index, ast.Load())
                self._assign([(part, value)])
                self._result(pick, part)

    def _plain(self, node: fx.Node) -> None:
        refs = {n: self._variable(n) for n in node.all_input_nodes}
        text = self._printer.plain(node, refs)
        if node.kwargs or any(not isinstance(r, str) for r in refs.values()):
            raise CannotMerge(f"{node.name} has keywords")
        value = ast.parse(text, mode="eval").body
        for part in ast.walk(value):
            if isinstance(part, ast.Name) and part.id not in refs.values():
                raise CannotMerge(f"{part.id} has another meaning in the user's module")
            for place in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
                part.__dict__.pop(place, None)
        name = self.variables.target(node, stem(node.name), node)
        self._assign([(name, value)])
        self._result(node, name)


def _results(node: fx.Node) -> list[fx.Node | None]:
    """The node of each result of an operation; None for one that nobody uses."""
    count = op_of(node).signature.results
    if count == 1:
        return [node]
    found: list[fx.Node | None] = [None] * count
    for user in node.users:
        if is_pick(user):
            position = user.args[1]
            assert isinstance(position, int)
            if found[position] is not None:
                raise CannotMerge(f"result {position} of {node.name} is picked twice")
            found[position] = user
    return found


def _plain_assignment(stmt: ast.stmt) -> bool:
    if not isinstance(stmt, ast.Assign):
        return False
    walrus = any(isinstance(n, ast.NamedExpr) for n in ast.walk(stmt.value))
    targets = [e for t in stmt.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return not walrus and all(isinstance(t, ast.Name) for t in targets)


def _reserved(nodes: Iterator[fx.Node]) -> set[str]:
    """Names that stand for something outside of all statements of the nodes."""
    found = {"range"}
    for node in nodes:
        if is_call(node, LOOP):
            found |= _reserved(n for n in LoopView(node).graph.nodes)
        elif is_call(node, BRANCH):
            view = BranchView(node)
            found |= _reserved(n for a in (view.then, view.orelse) for n in a.graph.nodes)
        elif is_call(node) and "stmts" in op_of(node).attributes:
            known = op_of(node).attributes
            own = assigned_names(known["stmts"])
            found |= read_globals(known["stmts"], known["inputs"], own)
    return found
