"""Arms and loops that have never run: what they do is watched when they first do.

A branch on data or on a counter may not take an arm for long: learning that starts after a warm-up,
an evaluation every so many steps. What stands in such an arm was never seen to run, so nothing is
known of its types, its sharing or its graphs. Until it runs, one operation that may touch
everything stands for the whole branch; it executes the branch as captured, and watches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Remark, RemarkLog
from rose_compiler.frontend.record import Record
from rose_compiler.ir import bodies, facts, interp
from rose_compiler.ir.contexts import region_of
from rose_compiler.ir.ops import BRANCH, LOOP, Op, Signature
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    Program,
    is_call,
    op_of,
    output_node,
)
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.scope import nodes_in

PASS = "capture"


def hold_back(
    program: Program,
    original: dict[fx.Node, fx.Node],
    record: Record,
    watch: Callable[[], interp.Hooks],
    log: RemarkLog,
) -> int:
    """Let one operation stand for each branch or loop that holds what never ran and can't be
    understood from its source; how many there are.

    ``original`` leads from the nodes of ``program`` to those that were recorded.
    ``watch`` is asked for hooks when such a part begins to run for the first time.
    """
    ran = {n for n, at in original.items() if at in record.examples}
    rewriter = Rewriter(program, log, PASS)
    held = 0
    for node in list(_outermost(program.graph, ran)):
        at = original[node]
        held += 1
        name = program.ops.fresh("first_run")
        flat = list(dict.fromkeys(nodes_in(node.args)))
        given = [n for n in flat if n.op != "get_attr"]
        inner = [n for n in nodes_in(at.args) if n.op != "get_attr"]
        inner = list(dict.fromkeys(inner))
        new = frozenset(
            n for graph in _bodies(at) for n in _operations(graph) if n not in record.examples
        )
        params = tuple(_names(given))
        op = Op(
            Signature(name, params, None, None, results=_results(node)),
            _runner(at, inner, new, watch),
            kind="component",
            attributes={"maybe_unbound": params},
        )
        rewriter.retarget(node, op, *given)
        # what runs it enters all modes by itself, but none of them ends a region around it
        within = facts.get(at).context if region_of(facts.get(at).context) else ()
        facts.put(node, context=within, loop=None)
        where = facts.get(node).origin.where
        why = "a part that has never run may touch everything until it does; it is watched then"
        log.add(Remark("missed", PASS, () if where is None else (where,), "never-run", why))
    return held


def _runner(
    at: fx.Node,
    inner: list[fx.Node],
    new: frozenset[fx.Node],
    watch: Callable[[], interp.Hooks],
) -> Callable[..., Any]:
    """What executes a branch or loop as captured, and has new parts of it watched."""

    def first_run(*given: Any) -> Any:
        hooks = _Watcher(watch, new)
        results = interp.run_node(at, dict(zip(inner, given, strict=True)), hooks)
        return results if results else None

    return first_run


class _Watcher(interp.Hooks):
    """Watches, from the first new operation on that is reached."""

    def __init__(self, watch: Callable[[], interp.Hooks], new: frozenset[fx.Node]) -> None:
        self.watch = watch
        self.new = new
        self.hooks: interp.Hooks | None = None

    def before(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        if self.hooks is None and node in self.new:
            self.hooks = self.watch()
        if self.hooks is not None:
            self.hooks.before(node, args)

    def after(self, node: fx.Node, args: tuple[Any, ...], result: Any) -> None:
        if self.hooks is not None:
            self.hooks.after(node, args, result)

    def value(self, node: fx.Node, value: Any) -> None:
        if self.hooks is not None:
            self.hooks.value(node, value)

    def error(self, node: fx.Node, error: BaseException) -> None:
        if self.hooks is not None:
            self.hooks.error(node, error)


def _outermost(graph: fx.Graph, ran: set[fx.Node]) -> Iterator[fx.Node]:
    """Branches and loops that hold a part to wait for, outermost first; none inside another."""
    for node in graph.nodes:
        if not (is_call(node, LOOP) or is_call(node, BRANCH)):
            continue
        if _waits(node, ran):
            yield node
            continue
        for inner in _bodies(node):
            yield from _outermost(inner, ran)


def _waits(node: fx.Node, ran: set[fx.Node]) -> bool:
    """Whether an own arm or body never ran, does something that is not understood, and leaves no
    loop around it."""
    if is_call(node, BRANCH) and any(bodies.exits(g) for g in _bodies(node)):
        return False
    for graph in _bodies(node):
        inside = list(_operations(graph))
        if any(n in ran for n in inside):
            continue
        if any(op_of(n).signature.writes is None for n in inside):
            return True
    return False


def _bodies(node: fx.Node) -> list[fx.Graph]:
    if is_call(node, LOOP):
        return [LoopView(node).graph]
    return [BranchView(node).then.graph, BranchView(node).orelse.graph]


def _operations(graph: fx.Graph) -> Iterator[fx.Node]:
    """The operations in a body and below it, built-in ones apart."""
    for node in graph.nodes:
        if is_call(node, LOOP) or is_call(node, BRANCH):
            for inner in _bodies(node):
                yield from _operations(inner)
        elif is_call(node) and op_of(node).kind != "builtin":
            yield node


def _results(node: fx.Node) -> int:
    """How many results the operation has; one comes as a tuple of one, which is then picked."""
    if is_call(node, LOOP):
        return len(LoopView(node).carried_init)
    return len(tuple(output_node(BranchView(node).then.graph).args[0]))  # type: ignore[arg-type]


def _names(given: list[fx.Node]) -> list[str]:
    """Parameter names, each its own."""
    names: list[str] = []
    for node in given:
        name, n = node.name, 1
        while name in names:
            name, n = f"{node.name}_{n}", n + 1
        names.append(name)
    return names
