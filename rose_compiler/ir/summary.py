"""What nodes and whole bodies read and write, and which instances are private to a trip."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import sympy
import torch.fx as fx

from rose_compiler.ir import extent, facts, program, sym
from rose_compiler.ir.effects import (
    EVERYTHING,
    ITEMS,
    Effect,
    Entry,
    Region,
    parse_entry,
    related,
)
from rose_compiler.ir.ops import BRANCH, LOOP, SHARD, STATE
from rose_compiler.ir.program import BranchView, LoopView, Program, Value, is_call, is_item
from rose_compiler.ir.scope import OUTPUTS, Iteration, Scope, nodes_in, root_of

_ARITHMETIC = "add sub mul truediv floordiv mod pow neg pos abs index"
_LOGIC = "lt le eq ne ge gt not_ truth is_ is_not contains and_ or_ xor invert"
#: Functions without effect that a graph may call besides the operations of its table.
PURE_OPERATORS = frozenset(
    getattr(operator, name) for name in ["getitem", *_ARITHMETIC.split(), *_LOGIC.split()]
)
#: Types whose iteration only reads them.
_PLAIN_ITERABLES = frozenset(
    (
        *("list", "tuple", "dict", "set", "frozenset", "range", "str", "ndarray", "Tensor"),
        *("deque", "dict_keys", "dict_values", "dict_items"),
        *("ModuleList", "ModuleDict", "Sequential", "ParameterList"),
    )
)
#: Kinds of values that nothing changes in place. None is not one: it often stands for what comes.
_CONSTANT = frozenset(("scalar",))
_MAX_NESTING = 10  # of containers in containers
_UNKNOWN = (Effect(False, EVERYTHING), Effect(True, EVERYTHING))


class Summary(Scope):
    """The effects of one program's nodes as it stands."""

    def __init__(self, of: Program) -> None:
        super().__init__(of)
        self._effects: dict[fx.Node, tuple[Effect, ...]] = {}
        self._private: dict[fx.Graph, frozenset[str]] = {}
        self._retained: dict[fx.Graph, frozenset[str]] = {}
        self._written: frozenset[str] = frozenset()
        self._kept: dict[str, tuple[str, ...]] = {}
        self._find_written()
        self._find_kept()

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
            yield from self._reads(nodes_in(branch.pred), states=True)
            yield from self._below(node, branch.then.graph)
            yield from self._below(node, branch.orelse.graph)
        elif program.is_exit(node):
            yield from self._reads(nodes_in(node.args[0]), states=True)
        else:
            if is_call(node):
                yield from self._declared(node)
            elif node.target not in PURE_OPERATORS:
                yield from _UNKNOWN
            # an operator reads what it is given; an operation says which states it reads
            if not (is_call(node) and _unknown(node)):  # which has said that it reads everything
                yield from self._reads(node.all_input_nodes, states=not is_call(node))

    def _reads(self, values: Iterable[fx.Node], *, states: bool = False) -> Iterator[Effect]:
        for value in values:
            if state := self.state(value):
                if states:
                    yield Effect(False, state)
                continue
            for alias in self.aliases(value):
                yield Effect(False, alias, extent.within(self, value, alias))
                yield from self._held(alias)
            if not self._written:
                continue
            for definer in self.definers(value):
                if (name := f"%{definer.name}") in self._written:
                    yield Effect(False, name)
                    yield from self._held(name)

    def apart_from(self, node: fx.Node, others: Iterable[fx.Node]) -> Iterator[Effect]:
        """What an operation would read and write if of its values it were handed only some."""
        yield from self._declared(node)
        yield from self._reads(others)

    def _declared(self, node: fx.Node) -> Iterator[Effect]:
        op = program.op_of(node)
        signature = op.signature
        if _unknown(node):
            yield from _UNKNOWN
        args = dict(zip(signature.params, node.args, strict=False))
        indices: dict[str, sym.Linear | None] = {}
        for write, entries in ((False, signature.reads), (True, signature.writes)):
            for text in entries or ():
                entry = parse_entry(text)
                if entry.index is not None and not indices:
                    indices = {name: self.linear(value) for name, value in args.items()}
                shallow = write and entry.root in op.attributes.get("items", ())
                for state, region in self.targets(entry, args, indices, shallow):
                    saved = not write and region is None and entry.absolute is not None
                    parts = extent.held(self, node, state) if saved else None
                    for part in parts or (region,):
                        yield Effect(write, state, part)
                    yield from self._held(state)
        if op.kind == "step":
            yield from self._outputs(node, args)

    def targets(
        self,
        entry: Entry,
        args: dict[str, Value],
        indices: dict[str, sym.Linear | None],
        shallow: bool = False,
    ) -> Iterator[tuple[str, Region | None]]:
        """The states that an entry of an operation means, each with the part of it."""
        below = f".{entry.path}" if entry.path else ""
        region = self._region(entry, indices)
        if entry.absolute is not None:
            yield entry.absolute, region
            return
        if entry.root not in args:
            yield entry.root + below, region
            return
        for node in nodes_in(args[entry.root]):
            aliases = self._items_of(node) if shallow else self.aliases(node)
            if state := self.state(node):
                yield state + below, region
            elif aliases:
                # a view may start anywhere in the state: its own indices say nothing there
                for alias in aliases:
                    yield alias, extent.within(self, node, alias)
            else:
                definers = self.definers(node)
                # neither do those of a view or of one item of a tuple
                same = definers == (self.resolve(node),)
                for definer in definers:
                    yield f"%{definer.name}{below}", region if same else None

    def _items_of(self, node: fx.Node) -> tuple[str, ...]:
        """The names of a container for which items it holds, where it has such names whatever it
        may be; else all that it may share memory with."""
        aliases = self.aliases(node)
        for origin in self.origins(node):
            known = facts.get(origin).alias
            if known and not any(a.endswith(f".{ITEMS}") for a in known):
                return aliases
        own = tuple(a for a in aliases if a.endswith(f".{ITEMS}"))
        return own or aliases

    def _held(self, state: str) -> Iterator[Effect]:
        """Who touches a container may read all that it keeps."""
        for container, names in self._kept.items():
            if related(container, state):
                for name in names:
                    yield Effect(False, name)

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
        writes = program.op_of(node).signature.writes
        if named is not None:
            written = {named}
        elif writes is not None:
            written = {parse_entry(text).root for text in writes}
        else:
            written = set(args)
        for env in nodes_in([value for name, value in args.items() if name in written]):
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
            for container, names in self._kept.items():
                if root_of(container) not in born:
                    kept |= {root_of(name) for name in names}
            self._private[graph] = frozenset(born - kept)
        return self._private[graph]

    def retained(self, graph: fx.Graph) -> frozenset[str]:
        """The mutable locals that a call with unknown effects in or below a body was handed, or
        made."""
        if graph not in self._retained:
            kept: set[str] = set()
            for node in graph.nodes:
                if is_call(node, LOOP):
                    kept |= self.retained(LoopView(node).graph)
                elif is_call(node, BRANCH):
                    kept |= self.retained(BranchView(node).then.graph)
                    kept |= self.retained(BranchView(node).orelse.graph)
                elif is_call(node) and _unknown(node):
                    for used in (node, *node.all_input_nodes):
                        kept |= {root_of(name) for name in self._names(used)}
            self._retained[graph] = frozenset(kept)
        return self._retained[graph]

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
            for definer in self._may_write(node):
                written.add(name := f"%{definer.name}")
                self._born.setdefault(name, set()).add(definer.graph)
        self._written = frozenset(written)

    def _may_write(self, node: fx.Node) -> Iterator[fx.Node]:
        """Where the values are made that an operation may change in place. One of which nothing is
        known may keep what it is handed and what it makes: any such one may change that then."""
        signature = program.op_of(node).signature
        args = dict(zip(signature.params, node.args, strict=False))
        for text in signature.writes or ():
            yield from self._made(nodes_in(args.get(parse_entry(text).root)))
        if _unknown(node):
            for definer in self._made((node, *node.all_input_nodes)):
                if not self._constant(definer):
                    yield definer

    def _made(self, values: Iterable[fx.Node]) -> Iterator[fx.Node]:
        for value in values:
            if not (self.state(value) or self.aliases(value)):
                yield from self.definers(value)

    def _constant(self, node: fx.Node) -> bool:
        """Whether what a node makes is a number or text."""
        owner = self.owner.get(node.graph)
        if node.op == "placeholder" and owner is not None and is_call(owner, LOOP):
            loop = LoopView(owner)
            if loop.facts.kind == "range" and loop.index is node:
                return True
        spec = facts.get(node).spec
        if spec is not None and spec.kind == "tuple":
            return all(s.kind in _CONSTANT for s in spec.items)
        return spec is not None and spec.kind in _CONSTANT

    def _find_kept(self) -> None:
        """Find what containers keep references to: memory that somebody may still write."""
        found: dict[str, dict[str, None]] = {}
        for node in [n for graph in self.owner for n in graph.nodes if is_call(n)]:
            op = program.op_of(node)
            args = dict(zip(op.signature.params, node.args, strict=False))
            for container, value in op.attributes.get("keeps", ()):
                names: dict[str, None] = {}
                for kept in nodes_in(args.get(value)):
                    for name in self._names(kept):
                        if name in self._born or name in self._written or name[0] != "%":
                            names[name] = None
                for holder in nodes_in(args.get(container)):
                    for name in self._names(holder):
                        found.setdefault(name, {}).update(names)
        for _ in range(_MAX_NESTING):  # what is kept by what is kept is kept too
            more = {n: {m for k in held for m in found.get(k, ())} for n, held in found.items()}
            if all(more[n] <= set(held) for n, held in found.items()):
                break
            for name, inner in more.items():
                found[name].update(dict.fromkeys(sorted(inner)))
        self._kept = {name: tuple(held) for name, held in found.items() if held}


def _unknown(node: fx.Node) -> bool:
    """Whether an operation may read and write anything."""
    signature = program.op_of(node).signature
    return signature.reads is None or signature.writes is None


def _eliminate(effect: Effect, symbol: sympy.Symbol | None) -> Effect:
    """An effect of all trips of a loop: every index that hangs on its symbol covers the axis."""
    if symbol is None or effect.region is None:
        return effect
    axes = tuple(None if i is None or symbol in i.free_symbols else i for i in effect.region.index)
    if axes == effect.region.index:
        return effect
    region = Region(axes) if any(a is not None for a in axes) else None
    return Effect(effect.write, effect.state, region)
