"""Attributes that a loop reads and assigns become values that its trips hand on.

``self.obs = next_obs`` at the end of a trip and ``self.policy(self.obs)`` at the start of the next:
the object is only a place to keep a reference in. Reads take the value assigned last; a read in
front of the first assignment takes what the trip before assigned, or what the attribute held in
front of the loop. The assignments stay where they are, so that whoever looks at the object at any
other time, after an exception too, finds what eager would have left there.

What remains of an assignment writes the place and not the memory of what was there before: the
state ``trainer.obs`` falls into ``trainer.obs.__slot__`` and ``trainer.obs.__held__``, in the loop
and for the values that it handed on. Everything else that names ``trainer.obs`` means both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch.fx as fx

from rose_compiler.base.remarks import RemarkLog
from rose_compiler.frontend.record import Record
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import title
from rose_compiler.ir.effects import EVERYTHING, parse_entry, related
from rose_compiler.ir.ops import BRANCH, LOADS, LOOP, STORES
from rose_compiler.ir.program import LoopView, Program, Value, is_call, is_state, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.scope import Scope
from rose_compiler.ir.summary import Summary

PASS = "promote"
SLOT, HELD = "__slot__", "__held__"


@dataclass
class _Place:
    """One attribute in one loop: the operations that do nothing but read or assign it."""

    state: str
    loads: list[fx.Node] = field(default_factory=list)
    stores: list[fx.Node] = field(default_factory=list)


def promote(program: Program, record: Record, log: RemarkLog) -> int:
    """Let the passes see what attributes hand from trip to trip; how many attributes there were.

    ``record`` is what was seen of ``program``; it goes on to fit.
    """
    rewriter = Rewriter(program, log, PASS)
    done = 0
    for loop in program.loops():
        for place in list(_places(loop, rewriter.deps.scope)):
            if _only_there(loop, place, rewriter.deps.scope):
                _hand_on(loop, place, rewriter)
                done += 1
    return done


def _inside(graph: fx.Graph, top: fx.Node | None = None) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes of a body and of those below it, each with the node of the body that it is in."""
    for node in graph.nodes:
        yield node, top or node
        if is_call(node, LOOP) or is_call(node, BRANCH):
            for inner in bodies.graphs_of(node):
                yield from _inside(inner, top or node)


def _places(loop: LoopView, scope: Scope) -> Iterator[_Place]:
    """The attributes that a loop's own body assigns by operations of their own."""
    found: dict[str, _Place] = {}
    for node, _ in _inside(loop.graph):
        if not is_call(node):
            continue
        marks = op_of(node).attributes
        for kind in (LOADS, STORES):
            if kind not in marks:
                continue
            state = _attribute(node, marks[kind], scope)
            if not state or not _does_only(node, kind, marks[kind]):
                continue
            place = found.setdefault(state, _Place(state))
            if kind == LOADS:
                place.loads.append(node)
            elif node.graph is loop.graph:
                place.stores.append(node)
    yield from (place for place in found.values() if place.stores)


def _attribute(node: fx.Node, mark: tuple[str, ...], scope: Scope) -> str:
    """The state that the attribute of a marked operation is."""
    params = op_of(node).signature.params
    owner = node.args[params.index(mark[0])] if mark[0] in params else None
    if not isinstance(owner, fx.Node) or not is_state(owner):
        return ""
    return f"{scope.state(owner)}.{mark[1]}"


def _does_only(node: fx.Node, kind: str, mark: tuple[str, ...]) -> bool:
    """Whether an operation was found to touch nothing but its attribute."""
    signature = op_of(node).signature
    entry = f"{mark[0]}.{mark[1]}"
    if kind == LOADS:
        return signature.writes == () and entry in (signature.reads or ())
    if signature.writes != (entry,):
        return False
    value = node.args[signature.params.index(mark[2])] if mark[2] in signature.params else None
    return not isinstance(value, fx.Node) or not is_state(value)


def _only_there(loop: LoopView, place: _Place, scope: Summary) -> bool:
    """Whether nothing else in the loop can assign the attribute, or means a part of what it holds
    without being handed it; and whether every trip ends where its body does."""
    if bodies.exits(loop.graph):
        return False
    known = {*place.loads, *place.stores}
    for node, _ in _inside(loop.graph):
        if is_call(node, LOOP) or is_call(node, BRANCH) or node in known:
            continue
        if any(e.write and e.state == EVERYTHING for e in scope.effects(node)):
            return False
        if any(alias.startswith(f"{place.state}.") for alias in facts.get(node).alias):
            return False
        if not is_call(node):
            continue
        signature = op_of(node).signature
        for write, entries in ((False, signature.reads), (True, signature.writes)):
            for state in _named(node, entries or (), scope):
                below = state.startswith(f"{place.state}.")
                if below or (write and related(state, place.state)):
                    return False
    return True


def _named(node: fx.Node, entries: tuple[str, ...], scope: Scope) -> Iterator[str]:
    """The states that entries name themselves, not by way of a value."""
    args = dict(zip(op_of(node).signature.params, node.args, strict=False))
    for text in entries:
        entry = parse_entry(text)
        owner = args.get(entry.root)
        below = f".{entry.path}" if entry.path else ""
        if entry.absolute is not None:
            yield entry.absolute
        elif entry.root not in args:
            yield entry.root + below
        elif isinstance(owner, fx.Node) and is_state(owner):
            yield scope.state(owner) + below


def _hand_on(loop: LoopView, place: _Place, rewriter: Rewriter) -> None:
    order = {node: number for number, node in enumerate(loop.graph.nodes)}
    tops = dict(_inside(loop.graph))
    stores = sorted(place.stores, key=lambda n: order[n])
    first = next((n for n in place.loads if order[tops[n]] < order[stores[0]]), None)
    where = title(stores[-1])
    held: Value = None
    if first is not None:
        init = _read_before(loop, first, rewriter)
        held, _ = rewriter.add_carried(loop, init, _stored(stores[-1]), name=first.name)
        assert isinstance(held, fx.Node)
        rewriter.set_facts(held, spec=facts.get(first).spec)
    for load in place.loads:
        before = [s for s in stores if order[s] < order[tops[load]]]
        rewriter.replace(load, _stored(before[-1]) if before else held)
        rewriter.erase(load)
    for store in stores:
        op = op_of(store)
        owner, name, _ = op.attributes[STORES]
        # numbered like other statements, so that remarks call it by the statement
        fresh = rewriter.program.ops.fresh("blk")
        made = op.with_signature(name=fresh, writes=(f"{owner}.{name}.{SLOT}",))
        rewriter.retarget(store, made, *store.args)
    _tell_apart(loop, place.state, rewriter)
    rewriter.applied(loop.node, f"{where}: {loop.label} hands {place.state} from trip to trip")


def _stored(store: fx.Node) -> Value:
    op = op_of(store)
    return store.args[op.signature.params.index(op.attributes[STORES][2])]


def _read_before(loop: LoopView, load: fx.Node, rewriter: Rewriter) -> fx.Node:
    """The same read in front of the loop."""
    outside: dict[fx.Node, Value] = {}
    at, graph = {n: n for n in load.all_input_nodes}, load.graph
    while graph is not loop.graph:
        owner = rewriter.owner(graph)
        assert owner is not None
        for inner, seen in at.items():
            param = bodies.captured_params(owner, graph).index(seen)
            at[inner] = owner.args[3][param]  # type: ignore[index, assignment]
        graph = owner.graph
    for inner, seen in at.items():
        outside[inner] = loop.outer(seen)
    return rewriter.clone(load, outside, before=loop.node)


def _tell_apart(loop: LoopView, state: str, rewriter: Rewriter) -> None:
    """Let the values of a loop lie in what the attribute holds, not in the attribute."""
    init = [n for n in loop.carried_init if isinstance(n, fx.Node) and not is_state(n)]
    mine = [n for n in init if PASS in facts.get(n).origin.passes]
    for node in (*mine, *(n for n, _ in _inside(loop.graph))):
        alias = facts.get(node).alias
        if state in alias:
            renamed = tuple(f"{state}.{HELD}" if a == state else a for a in alias)
            rewriter.set_facts(node, alias=renamed)
