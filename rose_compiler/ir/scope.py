"""What the nodes of nested graphs mean to each other: owners, aliases, index values and effects.

A body sees outer values through captured placeholders. A :class:`Scope` follows these chains for
one program as it stands; a program that is changed needs a new one.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import sympy
import torch.fx as fx

from rose_compiler.ir import facts, program, sym
from rose_compiler.ir.effects import EVERYTHING, Effect, Entry, Region, parse_entry
from rose_compiler.ir.ops import BRANCH, BREAK_IF, CONTINUE_IF, LOOP, SHARD, STATE
from rose_compiler.ir.program import BranchView, LoopView, Program, Value, is_call, is_item

#: Below the state of a simulator: the buffers that its step hands out.
OUTPUTS = "outputs"
#: Functions without effect that a graph may call besides the operations of its table.
PURE_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("getitem", "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs"),
        *(
            "lt",
            "le",
            "eq",
            "ne",
            "ge",
            "gt",
            "not_",
            "truth",
            "is_",
            "is_not",
            "contains",
            "index",
        ),
        *("and_", "or_", "xor", "invert"),
    )
)
_ARITHMETIC = {operator.add: ast.Add, operator.sub: ast.Sub, operator.mul: ast.Mult}
#: Types whose iteration only reads them.
_PLAIN_ITERABLES = frozenset(
    (
        *("list", "tuple", "dict", "set", "frozenset", "range", "str", "ndarray", "Tensor"),
        *("deque", "dict_keys", "dict_values", "dict_items"),
        *("ModuleList", "ModuleDict", "Sequential", "ParameterList"),
    )
)


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
    """Resolves names, aliases and effects of one program as it stands."""

    def __init__(self, of: Program) -> None:
        self.program = of
        self.owner: dict[fx.Graph, fx.Node | None] = {}
        self.iteration: dict[fx.Graph, Iteration] = {}
        self._params: dict[fx.Node, _Param] = {}
        self._linear: dict[fx.Node, sym.Linear | None] = {}
        self._ranges: dict[sympy.Symbol, tuple[int | None, int | None]] = {}
        self._alias: dict[fx.Node, tuple[str, ...]] = {}
        self._effects: dict[fx.Node, tuple[Effect, ...]] = {}
        self._born: dict[str, set[fx.Graph]] = {}
        self._private: dict[fx.Graph, frozenset[str]] = {}
        self._written: frozenset[str] = frozenset()
        self._enter(of.root, None, frozenset())
        self._find_written()

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
            found = dict.fromkeys(facts.get(node).alias)
            seen = {node}
            stack = list(self._sources(node))
            while stack:
                at = stack.pop()
                if at in seen:
                    continue
                seen.add(at)
                if state := self.state(at):
                    found[state] = None
                else:
                    found.update(dict.fromkeys(facts.get(at).alias))
                    stack += self._sources(at)
            self._alias[node] = tuple(found)
        return self._alias[node]

    def _sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """The nodes that a value is handed over from, unchanged."""
        param = self._params.get(node)
        if param is not None:
            yield from nodes_in(param.outer)
            if param.role == "carried":
                yield from self._handed(param.owner, param.position)
        elif is_item(node) and isinstance(node.args[0], fx.Node):
            of, position = node.args[0], node.args[1]
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

    def definers(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The nodes whose results a value may be, through captures, carries and items."""
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
            elif is_item(at) and isinstance(at.args[0], fx.Node):
                stack.append(at.args[0])
            elif param is None or param.role != "captured":
                found[at] = None
        return tuple(found)

    # -- effects

    def effects(self, node: fx.Node) -> tuple[Effect, ...]:
        """What a node reads and writes, in the order of its signature; see ``deps.effects_of``."""
        if node not in self._effects:
            self._effects[node] = tuple(dict.fromkeys(self._find_effects(node)))
        return self._effects[node]

    def _find_effects(self, node: fx.Node) -> Iterator[Effect]:
        if node.op == "placeholder":
            yield from self._head_effects(node)
        elif node.op != "call_function" or is_item(node) or is_call(node, STATE):
            return
        elif is_call(node, LOOP):
            loop = LoopView(node)
            yield from self._reads(nodes_in(loop.bounds), states=True)
            yield from self._below(node, loop.graph)
        elif is_call(node, BRANCH):
            branch = BranchView(node)
            yield from self._reads(nodes_in(branch.pred))
            yield from self._below(node, branch.then.graph)
            yield from self._below(node, branch.orelse.graph)
        elif program.is_exit(node):
            yield from self._reads(nodes_in(node.args[0]))
        else:
            if is_call(node):
                yield from self._declared(node)
            elif node.target not in PURE_OPERATORS:
                yield from _UNKNOWN
            yield from self._reads(node.all_input_nodes)

    def _reads(self, values: Iterable[fx.Node], *, states: bool = False) -> Iterator[Effect]:
        for value in values:
            if state := self.state(value):
                if states:
                    yield Effect(False, state)
                continue
            for alias in self.aliases(value):
                yield Effect(False, alias)
            if not self._written:
                continue
            for definer in self.definers(value):
                if (name := f"%{definer.name}") in self._written:
                    yield Effect(False, name)

    def _declared(self, node: fx.Node) -> Iterator[Effect]:
        op = program.op_of(node)
        signature = op.signature
        if signature.reads is None or signature.writes is None:
            yield from _UNKNOWN
        args = dict(zip(signature.params, node.args, strict=False))
        indices: dict[str, sym.Linear | None] = {}
        for write, entries in ((False, signature.reads), (True, signature.writes)):
            for text in entries or ():
                entry = parse_entry(text)
                if entry.index is not None and not indices:
                    indices = {name: self.linear(value) for name, value in args.items()}
                for state, region in self._targets(entry, args, indices):
                    yield Effect(write, state, region)
        if op.kind == "step":
            yield from self._outputs(node, args)

    def _targets(
        self, entry: Entry, args: dict[str, Value], indices: dict[str, sym.Linear | None]
    ) -> Iterator[tuple[str, Region | None]]:
        below = f".{entry.path}" if entry.path else ""
        region = self._region(entry, indices)
        if entry.absolute is not None:
            yield entry.absolute, region
            return
        if entry.root not in args:
            yield entry.root + below, region
            return
        for node in nodes_in(args[entry.root]):
            aliases = self.aliases(node)
            if state := self.state(node):
                yield state + below, region
            elif aliases:
                # a view may start anywhere in the state: its own indices say nothing there
                for alias in aliases:
                    yield alias, None
            else:
                for definer in self.definers(node):
                    yield f"%{definer.name}{below}", region

    def _region(self, entry: Entry, indices: dict[str, sym.Linear | None]) -> Region | None:
        if entry.index is None:
            return None
        axes: list[sympy.Expr | None] = []
        for text in entry.index:
            form = None if text is None else sym.affine_linear(text, indices)
            low = None if form is None else form.interval(self._ranges)[0]
            # a negative index counts from the end, so it may name any element
            axes.append(None if form is None or low is None or low < 0 else form.expr())
        return Region(tuple(axes)) if any(a is not None for a in axes) else None

    def _outputs(self, node: fx.Node, args: dict[str, Value]) -> Iterator[Effect]:
        """A step overwrites the buffers that earlier steps on this simulator handed out."""
        step = program.op_of(node).attributes.get("step") or {}
        named = step.get("env") if isinstance(step, dict) else None
        candidates = [args.get(named)] if named else list(args.values())
        for env in nodes_in(candidates):
            if not (state := self.state(env)):
                continue
            yield Effect(True, f"{state}.{OUTPUTS}")
            shard = self.resolve(env)
            if isinstance(shard, fx.Node) and is_call(shard, SHARD) and len(shard.args) == 2:
                whole, index = self.state(shard.args[0]), shard.args[1]  # type: ignore[arg-type]
                rows = Region((sympy.Integer(index),)) if type(index) is int else None
                yield Effect(True, f"{whole}.{OUTPUTS}", rows)

    def _head_effects(self, node: fx.Node) -> Iterator[Effect]:
        """Taking the next item of an iterator that the user made may do anything."""
        owner = self.owner.get(node.graph)
        if owner is None or not is_call(owner, LOOP) or LoopView(owner).facts.kind != "iter":
            return
        if LoopView(owner).index is not node:
            return
        for source in nodes_in(LoopView(owner).bounds):
            yield from self._reads([source], states=True)
            spec = facts.get(source).spec
            if (
                spec is not None
                and spec.kind == "object"
                and (spec.type_name.rsplit(".", 1)[-1] not in _PLAIN_ITERABLES)
            ):
                yield from _UNKNOWN

    def _below(self, owner: fx.Node, graph: fx.Graph) -> Iterator[Effect]:
        """The effects of a body as its owner has them: its index and its own instances left out."""
        symbol = self.iteration.get(graph, Iteration()).symbol
        private = self.private(graph)
        for node in graph.nodes:
            for effect in self.effects(node):
                if effect.state.startswith("%") and root_of(effect.state) in private:
                    continue
                yield _eliminate(effect, symbol)

    # -- instances

    def private(self, graph: fx.Graph) -> frozenset[str]:
        """The mutable locals born in a body that no trip hands on and no callee may have kept."""
        if graph not in self._private:
            born = {
                name
                for name, where in self._born.items()
                if all(self.within(g, graph) for g in where)
            }
            handed = list(nodes_in(program.output_node(graph).args))
            for at in self.exits(graph):
                handed += nodes_in(at.args[1])
            kept = {root_of(name) for node in handed for name in self._names(node)}
            kept |= self.retained(graph)
            self._private[graph] = frozenset(born - kept)
        return self._private[graph]

    def retained(self, graph: fx.Graph) -> set[str]:
        """The mutable locals that a call with unknown effects in or below a body was handed."""
        kept: set[str] = set()
        for node in graph.nodes:
            if is_call(node, LOOP):
                kept |= self.retained(LoopView(node).graph)
            elif is_call(node, BRANCH):
                kept |= self.retained(BranchView(node).then.graph)
                kept |= self.retained(BranchView(node).orelse.graph)
            elif is_call(node) and node.all_input_nodes:
                signature = program.op_of(node).signature
                if signature.reads is None or signature.writes is None:
                    for used in node.all_input_nodes:
                        kept |= {root_of(name) for name in self._names(used)}
        return kept

    def _names(self, node: fx.Node) -> Iterator[str]:
        """The states, pseudo-states of written values included, that a node leads to."""
        if state := self.state(node):
            yield state
            return
        yield from self.aliases(node)
        for definer in self.definers(node):
            yield f"%{definer.name}"

    def _find_written(self) -> None:
        """Find the values that some operation writes in place: their readers then count as such."""
        written: set[str] = set()
        for node in [n for graph in self.owner for n in graph.nodes if is_call(n)]:
            signature = program.op_of(node).signature
            args = dict(zip(signature.params, node.args, strict=False))
            for text in signature.writes or ():
                for value in nodes_in(args.get(parse_entry(text).root)):
                    if self.state(value) or self.aliases(value):
                        continue
                    for definer in self.definers(value):
                        written.add(name := f"%{definer.name}")
                        self._born.setdefault(name, set()).add(definer.graph)
        self._written = frozenset(written)


_UNKNOWN = (Effect(False, EVERYTHING), Effect(True, EVERYTHING))


def _eliminate(effect: Effect, symbol: sympy.Symbol | None) -> Effect:
    """An effect of all trips of a loop: every index that hangs on its symbol covers the axis."""
    if symbol is None or effect.region is None:
        return effect
    axes = tuple(None if i is None or symbol in i.free_symbols else i for i in effect.region.index)
    if axes == effect.region.index:
        return effect
    region = Region(axes) if any(a is not None for a in axes) else None
    return Effect(effect.write, effect.state, region)
