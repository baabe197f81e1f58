"""The order in which operations record autograd graphs.

Backward visits what it reaches in the reverse order of recording, as each thread counts it. So the
operations that use one tensor with a gradient add to that gradient in the reverse of the order that
they ran in, and sums of three floating-point numbers or more hang on it. Operations that share no
such tensor may change places: whatever lies behind them in the graph is visited in the same order.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.effects import EVERYTHING, parse_entry
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import BranchView, LoopView, is_call, is_item, op_of
from rose_compiler.ir.scope import nodes_in, root_of
from rose_compiler.ir.summary import Summary

if TYPE_CHECKING:
    from rose_compiler.ir.edges import Edge


def has_graph(spec: Spec | None) -> bool:
    """Whether a value, or a part of it, has a graph to go back through."""
    return spec is not None and (spec.requires_grad or any(map(has_graph, spec.items)))


def records(node: fx.Node) -> bool:
    """Whether an operation, or one in its bodies, is known to record an autograd graph."""
    if not is_call(node):
        return False
    if is_call(node, LOOP) or is_call(node, BRANCH):
        return any(records(n) for graph in _bodies(node) for n in graph.nodes)
    told = op_of(node).signature.records
    return bool(told) or (told is None and has_graph(facts.get(node).spec))


def goes_back(node: fx.Node) -> bool:
    """Whether an operation, or one in its bodies, goes back through a graph."""
    if not is_call(node):
        return False
    if is_call(node, LOOP) or is_call(node, BRANCH):
        return any(goes_back(n) for graph in _bodies(node) for n in graph.nodes)
    return op_of(node).kind == "loss" or "backward" in op_of(node).attributes.get("calls", ())


def same_graph(node: fx.Node, edges: Iterable[Edge]) -> Iterator[fx.Node]:
    """What has to run on the thread of an operation that records, since it records with the same
    tensors, goes on from what that one has recorded, or goes back through it."""
    for edge in edges:
        ends = picked_from(edge.src), picked_from(edge.dst)
        if edge.kind not in ("record", "value") or node not in ends or ends[0] is ends[1]:
            continue
        other = ends[0] if ends[1] is node else ends[1]
        given = other.op == "placeholder" and has_graph(facts.get(other).spec)
        if records(other) or goes_back(other) or given:
            yield other


def picked_from(node: fx.Node) -> fx.Node:
    """The operation that a value is picked from, or the value itself."""
    while is_item(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


class Order(NamedTuple):
    """``second`` records behind ``first``, ``trips`` (0 or 1) trips of the body's loop later, since
    both use ``tensor``: the name of a state, ``%name`` of a value, or ``*`` for any."""

    first: fx.Node
    second: fx.Node
    tensor: str
    trips: int


class Recorded:
    """Finds the recording operations of one program that have to keep their order."""

    def __init__(self, scope: Summary) -> None:
        self.scope = scope
        self._uses: dict[fx.Node, dict[str, fx.Graph | None]] = {}
        self._plainly: dict[fx.Node, bool] = {}
        self._written: dict[str, list[fx.Node]] | None = None

    def orders(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> Iterator[Order]:
        """What holds between a body's nodes, given in program order; the rest follows from it."""
        found = [n for n in nodes if self.uses(n)]
        by_tensor: dict[str, list[int]] = {}
        for k, node in enumerate(found):
            for tensor in self.uses(node):
                by_tensor.setdefault(tensor, []).append(k)
        anything = by_tensor.get(EVERYTHING, [])
        for tensor, users in by_tensor.items():
            chain = sorted({k for state in _prefixes(tensor) for k in by_tensor.get(state, ())})
            # what may use anything may use what an earlier trip has kept
            homes = {self.uses(found[k])[tensor] for k in users}
            carried = bool(anything) or not self._own(tensor, homes, graph)
            pairs = [(i, j, 0) for i, j in _neighbours(chain, anything)]
            if carried and graph in self.scope.iteration:
                last, first = max((chain[-1], *anything[-1:])), min((chain[0], *anything[:1]))
                pairs.append((last, first, 1))
            for i, j, trips in pairs:
                a, b = found[i], found[j]
                # two that may touch everything wait for each other anyway
                if not (_writes_all(self.scope, a) and _writes_all(self.scope, b)):
                    shared = EVERYTHING in {*self.uses(a), *self.uses(b)}
                    yield Order(a, b, EVERYTHING if shared else tensor, trips)

    def _own(self, tensor: str, homes: set[fx.Graph | None], graph: fx.Graph) -> bool:
        """Whether every trip of a body has a tensor of this name of its own."""
        if root_of(tensor) in self.scope.private(graph):
            return True
        return all(home is not None and self.scope.within(home, graph) for home in homes)

    def uses(self, node: fx.Node) -> dict[str, fx.Graph | None]:
        """The tensors that a recording node uses, each with the body whose trips make it anew, if
        there is one; nothing for a node that records nothing."""
        if node not in self._uses:
            found: dict[str, fx.Graph | None] = {}
            if is_call(node, LOOP) or is_call(node, BRANCH):
                below = [self.uses(n).items() for graph in _bodies(node) for n in graph.nodes]
                pairs = itertools.chain.from_iterable(below)
            else:
                pairs = itertools.chain(self._used(node) if is_call(node) else ())
            for tensor, home in pairs:
                found[tensor] = home if found.get(tensor, home) is home else None
            self._uses[node] = found
        return self._uses[node]

    def _used(self, node: fx.Node) -> Iterator[tuple[str, fx.Graph | None]]:
        signature = op_of(node).signature
        if signature.reads is None or signature.writes is None:
            yield EVERYTHING, None
            return
        if not signature.records:
            if records(node):
                yield EVERYTHING, None
            return
        args = dict(zip(signature.params, node.args, strict=False))
        for text in signature.records:
            entry = parse_entry(text)
            below = f".{entry.path}" if entry.path else ""
            if entry.absolute is not None or entry.root not in args:
                yield entry.absolute or entry.root + below, None
                continue
            for value in nodes_in(args[entry.root]):
                if state := self.scope.state(value):
                    yield state + below, None
                    continue
                definers = self.scope.definers(value)
                if self._graphless(value, definers):
                    continue
                for alias in self.scope.aliases(value):
                    yield alias, None
                once = definers == (self._maker(value),)
                for definer in definers:
                    yield f"%{definer.name}", definer.graph if once else None

    def _graphless(self, value: fx.Node, definers: tuple[fx.Node, ...]) -> bool:
        """Whether nothing that makes a value, or writes into its memory, ever records: whoever
        records with it adds nothing up for it, such as what was collected of a rollout."""
        if self.scope.aliases(value) or not definers or not self._plain(value):
            return False
        return all(map(self._made_plain, definers))

    def _made_plain(self, definer: fx.Node) -> bool:
        if definer not in self._plainly:
            writers = [definer, *self._writers(f"%{definer.name}")]
            ok = self._visible() and self._plain(definer)
            self._plainly[definer] = ok and all(map(_never_records, writers))
        return self._plainly[definer]

    @staticmethod
    def _plain(node: fx.Node) -> bool:
        spec = facts.get(node).spec
        return spec is not None and not has_graph(spec)

    def _writers(self, name: str) -> list[fx.Node]:
        """The operations that may write the memory of this name."""
        if self._written is None:
            self._written = {}
            for node in self.scope.program.nodes():
                if is_call(node) and not (is_call(node, LOOP) or is_call(node, BRANCH)):
                    for effect in self.scope.effects(node):
                        if effect.write:
                            self._written.setdefault(root_of(effect.state), []).append(node)
        return [*self._written.get(root_of(name), ()), *self._written.get(EVERYTHING, ())]

    def _visible(self) -> bool:
        """Whether no statement of the program asks for gradients of a tensor."""
        ops = [op_of(n) for n in self.scope.program.nodes() if is_call(n)]
        return not any("requires_grad" in text for op in ops for text in op.source)

    def _maker(self, value: fx.Node) -> fx.Node | None:
        """The operation that a value is a result of, unless a loop or a branch hands it on."""
        found = self.scope.resolve(value)
        while isinstance(found, fx.Node) and is_item(found):
            source = found.args[0]
            if not isinstance(source, fx.Node) or is_call(source, LOOP) or is_call(source, BRANCH):
                return None
            found = self.scope.resolve(source)
        return found if isinstance(found, fx.Node) else None


def _never_records(node: fx.Node) -> bool:
    """Whether an operation whose statements are known records nothing."""
    if not is_call(node) or is_call(node, LOOP) or is_call(node, BRANCH):
        return False
    op = op_of(node)
    known = op.kind in ("block", "graph", "step", "builtin") and op.signature.writes is not None
    return known and op.signature.records == () and not op.attributes.get("hosted")


def _neighbours(chain: list[int], others: list[int]) -> Iterator[tuple[int, int]]:
    """The pairs of places next to each other among both, one of the chain in each; both sorted."""
    for n, at in enumerate(chain):
        low, high = bisect.bisect_left(others, at), bisect.bisect_right(others, at)
        before = max((*chain[max(n - 1, 0) : n], *others[max(low - 1, 0) : low]), default=None)
        if before is not None:
            yield before, at
        # what comes next in the chain finds what is in front of it by itself
        if high < len(others) and (n + 1 == len(chain) or others[high] < chain[n + 1]):
            yield at, others[high]


def _writes_all(scope: Summary, node: fx.Node) -> bool:
    return any(e.write and e.state == EVERYTHING for e in scope.effects(node))


def _bodies(node: fx.Node) -> list[fx.Graph]:
    if is_call(node, LOOP):
        return [LoopView(node).graph]
    return [BranchView(node).then.graph, BranchView(node).orelse.graph]


def _prefixes(state: str) -> Iterator[str]:
    """A state's name and those of the states that it lies below."""
    yield from itertools.accumulate(state.split("."), lambda a, b: f"{a}.{b}")
