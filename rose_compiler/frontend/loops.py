"""Loops: bounds, carried variables, early exits."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from rose_compiler.base.errors import fail
from rose_compiler.frontend import liveness, rewrite_ast
from rose_compiler.frontend.scope import Missing, Scope
from rose_compiler.ir import facts
from rose_compiler.ir.ops import BREAK_IF, UNBOUND
from rose_compiler.ir.program import Builder

if TYPE_CHECKING:
    from rose_compiler.frontend.capture import Lowering


@dataclass
class LoopFrame:
    """The innermost loop being lowered: what an exit has to hand out, and its body."""

    carried: tuple[str, ...]
    builder: Builder


@dataclass(frozen=True)
class RangeBounds:
    """``range(start, stop, step)`` as expressions; ``backward`` for ``reversed``."""

    start: ast.expr
    stop: ast.expr
    step: ast.expr
    backward: bool = False
    label: str = ""
    wrapper: ast.Call | None = None


class LoopLowering:
    """The part of lowering that deals with loops."""

    def lower_loop(
        self: Lowering, node: ast.For | ast.While, scope: Scope, builder: Builder, live: set[str]
    ) -> None:
        """One ``for`` or ``while`` statement."""
        if node.orelse:
            if self.structural([node], scope):
                raise fail(
                    "capture-unsupported",
                    "`else` of a loop around a component call",
                    where=scope.source.where(node),
                    help="set a flag before the `break` and test it after the loop",
                )
            self.blocks.emit([node], scope, builder, live)
            return
        bounds = self.range_bounds(node.iter, scope) if isinstance(node, ast.For) else None
        if bounds is None and not self.structural([node], scope):
            self.blocks.emit([node], scope, builder, live)
            return
        if bounds is not None and not isinstance(node.target, ast.Name):  # type: ignore[union-attr]
            bounds = None
        if bounds is not None and bounds.wrapper is not None and not self.structural([node], scope):
            self.blocks.emit([node], scope, builder, live)
            return
        if any(_has_deep_exit(s) for s in node.body):
            if not self.structural([node], scope):
                self.blocks.emit([node], scope, builder, live)
                return
        self.structured_loop(node, bounds, scope, builder, live)

    def range_bounds(self: Lowering, expression: ast.expr, scope: Scope) -> RangeBounds | None:
        """The bounds of ``range``, seen through ``reversed``, a progress bar and ``rose_compiler.loop``."""
        if not isinstance(expression, ast.Call):
            return None
        target = scope.static(expression.func)
        value = target.value if target is not None else None
        if value is range and not expression.keywords and 1 <= len(expression.args) <= 3:
            args = expression.args
            zero, one = rewrite_ast.constant(0, expression), rewrite_ast.constant(1, expression)
            if len(args) == 1:
                return RangeBounds(zero, args[0], one)
            return RangeBounds(args[0], args[1], args[2] if len(args) == 3 else one)
        if value is reversed and len(expression.args) == 1:
            inner = self.range_bounds(expression.args[0], scope)
            if inner is None or inner.backward or inner.wrapper is not None:
                return None
            return RangeBounds(inner.start, inner.stop, inner.step, True, inner.label)
        if getattr(value, "__rose_loop__", False) and len(expression.args) == 2:
            inner = self.range_bounds(expression.args[1], scope)
            label = scope.fold(expression.args[0])
            if inner is None or not isinstance(label, str):
                return None
            return RangeBounds(
                inner.start, inner.stop, inner.step, inner.backward, label, inner.wrapper
            )
        return None

    def structured_loop(
        self: Lowering,
        node: ast.For | ast.While,
        bounds: RangeBounds | None,
        scope: Scope,
        builder: Builder,
        live: set[str],
    ) -> None:
        """A loop node with its body lowered in place."""
        where = scope.source.where(node)
        if isinstance(node, ast.For) and bounds is not None:
            given = [
                self.argument(e, scope, builder) for e in (bounds.start, bounds.stop, bounds.step)
            ]
            if bounds.backward:
                given = self.reverse(given, node, scope, builder)
            arguments = tuple(self.as_value(g, scope, builder) for g in given)
            kind = "range"
        elif isinstance(node, ast.For):
            iterable = self.argument(node.iter, scope, builder)
            arguments, kind = (self.as_value(iterable, scope, builder),), "iter"
        else:
            arguments, kind = (), "while"
        targets = liveness.assigned(node.target) if isinstance(node, ast.For) else []
        stored = [n for n in liveness.assigned(node.body) if n not in targets]
        test_reads = liveness.reads(node.test) if isinstance(node, ast.While) else set()
        head = liveness.live_in(node.body, live | test_reads) | test_reads
        carried = [n for n in stored if n in head or n in live] + [n for n in targets if n in live]
        before = dict(scope.bindings)
        init = tuple(self.as_value(scope.bindings.get(n, UNBOUND), scope, builder) for n in carried)
        child = Builder(builder)
        index_name = (
            targets[0] if len(targets) == 1 and isinstance(node.target, ast.Name) else "trip"
        )  # type: ignore[union-attr]
        index = child.placeholder(index_name, "index")
        for name, first in zip(carried, init, strict=True):
            parameter = child.placeholder(name, "carried")
            if maybe_unbound(first):
                facts.put(parameter, maybe_unbound=True)
            scope.bindings[name] = parameter
        for name in stored:
            if name not in carried:
                scope.bindings.pop(name, None)
        self.loops.append(LoopFrame(tuple(carried), child))
        try:
            if isinstance(node, ast.For):
                if isinstance(node.target, ast.Name):
                    scope.bindings[node.target.id] = index
                else:
                    item = self.temp("item")
                    scope.bindings[item] = index
                    unpack = ast.Assign([node.target], rewrite_ast.name(item, node))
                    unpack = ast.fix_missing_locations(ast.copy_location(unpack, node))
                    body_live = liveness.live_in(node.body, head | live)
                    self.blocks.emit([unpack], scope, child, body_live | set(targets))
                    scope.bindings.pop(item)
            else:
                self.while_test(node, scope, child)
            self.statements(node.body, scope, child, set(carried))
        finally:
            self.loops.pop()
        outputs = tuple(
            self.as_value(scope.bindings.get(n, UNBOUND), scope, child) for n in carried
        )
        label = (bounds.label if bounds is not None else "") or _label(node)
        has_exit = any(
            n.op == "call_function" and getattr(n.target, "name", "") in ("break_if", "continue_if")
            for n in child.graph.nodes
        )
        known = facts.LoopFacts(kind, label, index_name, "", has_exit)
        made = builder.loop(
            child,
            outputs,
            arguments,
            init,
            known,
            origin=facts.Origin(where, self.inline_chain),
            context=self.contexts,
        )
        scope.bindings = {k: v for k, v in before.items() if k not in stored and k not in targets}
        for position, name in enumerate(carried):
            result = builder.item(made, position, name=name)
            if maybe_unbound(init[position]):
                facts.put(result, maybe_unbound=True)
            scope.bindings[name] = result

    def reverse(
        self: Lowering, given: list[Any], node: ast.For, scope: Scope, builder: Builder
    ) -> list[Any]:
        """The bounds of the same range, walked backwards."""
        if all(isinstance(g, int) for g in given):
            backward = range(*given)[::-1]
            return [backward.start, backward.stop, backward.step]
        names = [self.temp("bound") for _ in given]
        for name, value in zip(names, given, strict=True):
            scope.bindings[name] = value
        results = [self.temp("bound") for _ in given]
        whole = self.temp("range")
        text = (
            f"{whole} = range({', '.join(names)})[::-1]\n"
            f"{', '.join(results)} = ({whole}.start, {whole}.stop, {whole}.step)"
        )
        statements = ast.parse(text).body
        for statement in statements:
            for part in ast.walk(statement):
                if hasattr(part, "lineno"):
                    ast.copy_location(part, node)
        self.blocks.emit(statements, scope, builder, set(results))
        for name in names:
            scope.bindings.pop(name, None)
        return [scope.bindings.pop(r) for r in results]

    def while_test(self: Lowering, node: ast.While, scope: Scope, child: Builder) -> None:
        """The condition of a ``while`` at the head of its body."""
        known = scope.fold(node.test)
        if not isinstance(known, Missing) and known:
            return
        test, _ = self.hoist_calls(node.test, scope, child)
        stop = self.temp("stop")
        negated = ast.copy_location(ast.UnaryOp(ast.Not(), test), node)
        self.blocks.emit([rewrite_ast.assign(stop, negated, node)], scope, child, {stop})
        self.emit_exit(BREAK_IF, scope.bindings.pop(stop), node, scope, child)


def maybe_unbound(binding: Any) -> bool:
    """Whether a binding can be ``UNBOUND`` when it is used."""
    return binding is UNBOUND or (isinstance(binding, fx.Node) and facts.get(binding).maybe_unbound)


def _label(node: ast.For | ast.While) -> str:
    if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
        return f"for_{node.target.id}"
    return "for_items" if isinstance(node, ast.For) else "while_loop"


def _has_deep_exit(statement: ast.stmt) -> bool:
    """Whether a ``break`` or ``continue`` stands where it can't be turned into a flag."""
    if not rewrite_ast.exits(statement):
        return False
    return rewrite_ast.flag_exits([statement], "_b", "_c") is None
