"""Whether two programs are the same program, apart from names and from what a dump leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.dump_ops import told_attributes
from rose_compiler.ir.ops import BRANCH, LOOP, Op
from rose_compiler.ir.program import BranchView, LoopView, Program, is_call, placeholders


class _Differs(Exception):
    pass


def difference(a: Program, b: Program) -> str | None:
    """The first difference between two programs, None when they are isomorphic.

    Compared are structure, operations with their signatures and bodies, constants and facts. Not
    compared: node names, the order of captured values, captured values that nobody uses,
    implementations, and the facts ``spec``, ``cost`` and ``origin``.
    """
    try:
        _Comparison().programs(a, b)
    except _Differs as found:
        return str(found)
    return None


def _told(node: fx.Node) -> facts.Facts:
    known = replace(facts.get(node), spec=None, cost=None, origin=facts.Origin())
    if known.role == "captured":
        # it stands for the outer value, whose facts are compared
        known = replace(known, alias=(), borrowed=False, maybe_unbound=False, note="")
    return replace(known, loop=None) if known.loop and not is_call(node, LOOP) else known


class _Comparison:
    def __init__(self) -> None:
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.ops: dict[Op, Op] = {}

    def same(self, a: Any, b: Any, what: str) -> None:
        if a != b:
            raise _Differs(f"{what}: {a!r} and {b!r}")

    def programs(self, a: Program, b: Program) -> None:
        for name in ("name", "stage", "value_params", "state_params"):
            self.same(getattr(a, name), getattr(b, name), name)
        first, second = placeholders(a.graph), placeholders(b.graph)
        self.same(len(first), len(second), "parameters")
        for p, q in zip(first, second, strict=True):
            self.pair(p, q)
        self.bodies(a.root, b.root)

    def pair(self, a: fx.Node, b: fx.Node) -> None:
        self.nodes[a] = b
        self.same(_told(a), _told(b), f"facts of {a} and {b}")

    def bodies(self, a: fx.GraphModule, b: fx.GraphModule) -> None:
        """Compare two bodies whose placeholders are paired."""
        skipped = ("placeholder", "get_attr")
        first = [n for n in a.graph.nodes if n.op not in skipped]
        second = [n for n in b.graph.nodes if n.op not in skipped]
        self.same([n.op for n in first], [n.op for n in second], "kinds of nodes")
        for p, q in zip(first, second, strict=True):
            self.targets(p, q)
            if is_call(p, LOOP):
                self.loop(LoopView(p), LoopView(q))
            elif is_call(p, BRANCH):
                self.branch(BranchView(p), BranchView(q))
            else:
                self.values(p.args, q.args, f"arguments of {p}")
                self.values(p.kwargs, q.kwargs, f"keywords of {p}")
            self.pair(p, q)

    def targets(self, a: fx.Node, b: fx.Node) -> None:
        if not (isinstance(a.target, Op) and isinstance(b.target, Op)):
            self.same(a.target, b.target, f"what {a} calls")
        elif a.target in self.ops:
            self.same(self.ops[a.target], b.target, f"what {a} calls")
        else:
            self.ops[a.target] = b.target
            self.operations(a.target, b.target)

    def operations(self, a: Op, b: Op) -> None:
        if "builtin" in (a.kind, b.kind):
            self.same(a, b, "operations")
        self.same(a.signature, b.signature, "signatures")
        self.same((a.kind, a.source), (b.kind, b.source), f"kind or source of {a.name}")
        self.same(told_attributes(a), told_attributes(b), f"attributes of {a.name}")
        self.same(a.body is None, b.body is None, f"body of {a.name}")
        if a.body is not None and b.body is not None:
            _Traced(self, a.body, b.body).compare()

    def values(self, a: Any, b: Any, what: str) -> None:
        if isinstance(a, fx.Node):
            self.same(self.nodes.get(a), b, what)
        elif isinstance(a, tuple | list) and isinstance(b, tuple | list):
            self.same((isinstance(a, tuple), len(a)), (isinstance(b, tuple), len(b)), what)
            for x, y in zip(a, b, strict=True):
                self.values(x, y, what)
        elif isinstance(a, dict) and isinstance(b, dict):
            self.same(list(a), list(b), what)
            self.values(tuple(a.values()), tuple(b.values()), what)
        elif isinstance(a, slice) and isinstance(b, slice):
            self.values((a.start, a.stop, a.step), (b.start, b.stop, b.step), what)
        else:
            # by text, since nan differs from itself and 1 equals True
            self.same((type(a), repr(a)), (type(b), repr(b)), what)

    def loop(self, a: LoopView, b: LoopView) -> None:
        self.values(a.bounds, b.bounds, f"bounds of {a.node}")
        self.values(a.carried_init, b.carried_init, f"initial values of {a.node}")
        for p, q in zip((a.index, *a.carried), (b.index, *b.carried), strict=True):
            self.pair(p, q)
        self.captured(a.captured_params, a.captured, b.captured_params, b.captured)
        self.bodies(a.body, b.body)

    def branch(self, a: BranchView, b: BranchView) -> None:
        self.values(a.pred, b.pred, f"predicate of {a.node}")
        for x, y in ((a.then, b.then), (a.orelse, b.orelse)):
            inner, other = placeholders(x.graph), placeholders(y.graph)
            self.captured(tuple(inner), a.captured, tuple(other), b.captured)
            self.bodies(x, y)

    def captured(
        self,
        params: tuple[fx.Node, ...],
        outer: tuple[fx.Node, ...],
        others: tuple[fx.Node, ...],
        other_outer: tuple[fx.Node, ...],
    ) -> None:
        by_outer = dict(zip(other_outer, others, strict=True))
        for param, value in zip(params, outer, strict=True):
            if param.users:
                self.same(self.nodes[value] in by_outer, True, f"{param} is captured")
                self.pair(param, by_outer[self.nodes[value]])


class _Traced:
    """Two bodies of traced operations, side by side."""

    def __init__(self, base: _Comparison, a: fx.GraphModule, b: fx.GraphModule) -> None:
        self.base, self.a, self.b = base, a, b

    def compare(self) -> None:
        same, first, second = self.base.same, list(self.a.graph.nodes), list(self.b.graph.nodes)
        same([n.op for n in first], [n.op for n in second], "kinds of nodes of a traced body")
        for p, q in zip(first, second, strict=True):
            if p.op == "get_attr":
                left, right = getattr(self.a, str(p.target)), getattr(self.b, str(q.target))
                same((left.dtype, left.device), (right.dtype, right.device), f"type of {p}")
                same(bool(torch.equal(left, right)), True, f"{p} is the same constant")
            elif p.op != "placeholder":
                same(p.target, q.target, f"what {p} calls")
            self.base.values(p.args, q.args, f"arguments of {p}")
            self.base.values(p.kwargs, q.kwargs, f"keywords of {p}")
            self.base.nodes[p] = q
