"""What the nodes of nested graphs mean to each other: owners, states, aliases and index values.

A body sees outer values through captured placeholders. A :class:`Scope` follows these chains for
one program as it stands; a program that is changed needs a new one.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import sympy
import torch.fx as fx

from rose_compiler.ir import facts, program, sym
from rose_compiler.ir.effects import parse_entry
from rose_compiler.ir.ops import (
    BRANCH,
    BREAK_IF,
    CONTINUE_IF,
    LOOP,
    PIECE,
    ROWS,
    SPLIT_ROWS,
)
from rose_compiler.ir.program import BranchView, LoopView, Program, Value, is_call, is_item

#: Below the state of a simulator: the buffers that its step hands out.
OUTPUTS = "outputs"
_ARITHMETIC = {operator.add: ast.Add, operator.sub: ast.Sub, operator.mul: ast.Mult}
#: Operations whose result is a view of their first argument.
_VIEWS = (ROWS, PIECE, SPLIT_ROWS)


@dataclass(frozen=True)
class Iteration:
    """How a loop counts: its symbol (``None`` unless it is a range), constant step, the least and
    greatest index, and the number of trips, each ``None`` where unknown."""

    symbol: sympy.Symbol | None = None
    step: int | None = None
    low: int | None = None
    high: int | None = None
    trips: int | None = None


@dataclass(frozen=True)
class _Param:
    role: str
    owner: fx.Node
    outer: Value  # what a captured placeholder stands for; the initial value of a carried one
    position: int


def nodes_in(value: Value) -> Iterator[fx.Node]:
    """The nodes in a value that may be a nest of tuples, lists, dicts and constants."""
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from nodes_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from nodes_in(item)
    elif isinstance(value, slice):
        yield from nodes_in((value.start, value.stop, value.step))


def root_of(state: str) -> str:
    """The root of a state's dotted name."""
    return state.split(".", 1)[0]


class Scope:
    """Resolves names, aliases and index values of one program as it stands."""

    def __init__(self, of: Program) -> None:
        self.program = of
        self.owner: dict[fx.Graph, fx.Node | None] = {}
        self.iteration: dict[fx.Graph, Iteration] = {}
        self._params: dict[fx.Node, _Param] = {}
        self._linear: dict[fx.Node, sym.Linear | None] = {}
        self._ranges: dict[sympy.Symbol, tuple[int | None, int | None]] = {}
        self._alias: dict[fx.Node, tuple[str, ...]] = {}
        self._born: dict[str, set[fx.Graph]] = {}
        self._enter(of.root, None, frozenset())

    # -- structure

    def _enter(self, module: fx.GraphModule, owner: fx.Node | None, taken: frozenset[str]) -> None:
        graph = module.graph
        self.owner[graph] = owner
        if owner is not None and is_call(owner, LOOP):
            taken = self._enter_loop(LoopView(owner), taken)
        elif owner is not None:
            params = program.placeholders(graph)
            for k, (p, outer) in enumerate(zip(params, BranchView(owner).captured, strict=False)):
                self._params[p] = _Param("captured", owner, outer, k)
        for node in graph.nodes:
            state = facts.get(node).state
            if state.startswith("%") and node.op == "call_function":
                self._born.setdefault(root_of(state), set()).add(graph)
            for alias in facts.get(node).alias:  # memory without an alloc of its own in the program
                if alias.startswith("%"):
                    self._born.setdefault(root_of(alias), set()).add(graph)
        for node, child in program.children(module):
            self._enter(child, node, taken)

    def _enter_loop(self, loop: LoopView, taken: frozenset[str]) -> frozenset[str]:
        for k, p in enumerate(loop.carried):
            self._params[p] = _Param("carried", loop.node, loop.carried_init[k], k)
        for k, (p, outer) in enumerate(zip(loop.captured_params, loop.captured, strict=False)):
            self._params[p] = _Param("captured", loop.node, outer, k)
        self.iteration[loop.graph] = Iteration()
        if loop.facts.kind != "range" or len(loop.bounds) != 3:
            return taken
        # nested loops may use one name twice, and then need two symbols
        name, n = loop.index.name, 1
        while name in taken:
            n += 1
            name = f"{loop.index.name}_{n}"
        symbol = sym.index_symbol(name)
        it = self._range(loop, symbol)
        self.iteration[loop.graph] = it
        self._ranges[symbol] = (it.low, it.high)
        self._linear[loop.index] = sym.Linear(0, ((symbol, 1),))
        return taken | {name}

    def _range(self, loop: LoopView, symbol: sympy.Symbol) -> Iteration:
        start, stop, step = loop.bounds
        if type(step) is not int or step == 0:
            return Iteration(symbol)
        first, last = self.interval(start), self.interval(stop)
        trips = None
        if type(start) is int and type(stop) is int:
            trips = len(range(start, stop, step))
        if step > 0:
            high = None if last[1] is None else last[1] - 1
            return Iteration(symbol, step, first[0], high, trips)
        low = None if last[0] is None else last[0] + 1
        return Iteration(symbol, step, low, first[1], trips)

    def loop_of(self, graph: fx.Graph) -> fx.Graph | None:
        """The innermost loop body around (or equal to) a graph."""
        at: fx.Graph | None = graph
        while at is not None and at not in self.iteration:
            owner = self.owner[at]
            at = None if owner is None else owner.graph
        return at

    def within(self, graph: fx.Graph, outer: fx.Graph) -> bool:
        """Whether ``graph`` is ``outer`` or lies in it."""
        at: fx.Graph | None = graph
        while at is not None and at is not outer:
            owner = self.owner[at]
            at = None if owner is None else owner.graph
        return at is outer

    def resolve(self, value: Value) -> Value:
        """What a value seen through captured placeholders is, where it is defined."""
        while isinstance(value, fx.Node):
            param = self._params.get(value)
            if param is None or param.role != "captured":
                break
            value = param.outer
        return value

    # -- values

    def interval(self, value: Value) -> tuple[int | None, int | None]:
        """Least and greatest value of an integer, each ``None`` where unknown."""
        form = self.linear(value)
        return (None, None) if form is None else form.interval(self._ranges)

    def linear(self, value: Value) -> sym.Linear | None:
        """An integer as a linear form in the indices of the loops around it, if it is one."""
        if type(value) is int:
            return sym.Linear(value)
        value = self.resolve(value)
        if not isinstance(value, fx.Node):
            return sym.Linear(value) if type(value) is int else None
        if value not in self._linear:
            found = None
            kind = _ARITHMETIC.get(value.target) if value.op == "call_function" else None  # type: ignore[arg-type]
            if kind is not None and len(value.args) == 2:
                left, right = (self.linear(a) for a in value.args)
                if left is not None and right is not None:
                    found = sym.combine(kind, left, right)
            self._linear[value] = found
        return self._linear[value]

    def state(self, node: fx.Node) -> str:
        """The name of the state a node stands for, empty for a value."""
        found = self.resolve(node)
        name = facts.get(found).state if isinstance(found, fx.Node) else ""
        return name or facts.get(node).state

    def aliases(self, node: fx.Node) -> tuple[str, ...]:
        """The states that a value may share memory with."""
        if node not in self._alias:
            found: dict[str, None] = {}
            seen: set[fx.Node] = set()
            stack = [node]
            while stack:
                at = stack.pop()
                if at in seen:
                    continue
                seen.add(at)
                if at is not node and (state := self.state(at)):
                    found[state] = None
                    continue
                known = facts.get(at)
                found.update(dict.fromkeys(known.alias))
                if known.borrowed and not known.alias:
                    found.update(dict.fromkeys(self._lent_by(at)))
                stack += self._sources(at)
            self._alias[node] = tuple(found)
        return self._alias[node]

    def _lent_by(self, node: fx.Node) -> Iterator[str]:
        """The buffers that a borrowed value lives in: those of the states its maker writes."""
        for maker in self.definers(node):
            if not is_call(maker):
                continue
            signature = program.op_of(maker).signature
            args = dict(zip(signature.params, maker.args, strict=False))
            for text in signature.writes or ():
                for owner in nodes_in(args.get(parse_entry(text).root)):
                    if state := self.state(owner):
                        yield f"{state}.{OUTPUTS}"

    def _sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that a value is handed over from, unchanged."""
        param = self._params.get(node)
        if param is not None:
            yield from nodes_in(param.outer)
            if param.role == "carried":
                yield from self._handed(param.owner, param.position)
        elif any(is_call(node, view) for view in _VIEWS):
            yield from nodes_in(node.args[:1])
        elif is_item(node) and isinstance(node.args[0], fx.Node):
            of, position = self.resolve(node.args[0]), node.args[1]
            if not isinstance(of, fx.Node):
                return
            if is_call(of, LOOP) and isinstance(position, int):
                yield from nodes_in(LoopView(of).carried_init[position : position + 1])
                yield from self._handed(of, position)
            elif is_call(of, BRANCH) and isinstance(position, int):
                for arm in (BranchView(of).then, BranchView(of).orelse):
                    outputs = program.output_node(arm.graph).args[0]
                    yield from nodes_in(outputs[position : position + 1])  # type: ignore[index]

    def _handed(self, owner: fx.Node, position: int) -> Iterator[fx.Node]:
        """What the trips of a loop hand on at a carried position, by their end or an exit."""
        graph = LoopView(owner).graph
        yield from nodes_in(LoopView(owner).carried_next[position : position + 1])
        for at in self.exits(graph):
            yield from nodes_in(at.args[1][position : position + 1])  # type: ignore[index]

    def exits(self, graph: fx.Graph) -> list[fx.Node]:
        """The exits of a loop that stand in its body or in branches there."""
        found: list[fx.Node] = []
        for node in graph.nodes:
            if is_call(node, BREAK_IF) or is_call(node, CONTINUE_IF):
                found.append(node)
            elif is_call(node, BRANCH):
                view = BranchView(node)
                found += [*self.exits(view.then.graph), *self.exits(view.orelse.graph)]
        return found

    def origins(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """Like :meth:`definers`, but one result of an operation is told from its others."""
        return self._ends(node, items=False)

    def definers(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes whose results a value may be, through captures, carries and items."""
        return self._ends(node, items=True)

    def _ends(self, node: fx.Node, *, items: bool) -> tuple[fx.Node, ...]:
        found: dict[fx.Node, None] = {}
        seen: set[fx.Node] = set()
        stack = [node]
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            sources = list(self._sources(at))
            param = self._params.get(at)
            if sources:
                stack += sources
            elif items and is_item(at) and isinstance(at.args[0], fx.Node):
                stack.append(at.args[0])
            elif param is None or param.role != "captured":
                found[at] = None
        return tuple(found)
