"""Loops: bounds, carried variables, early exits."""

from __future__ import annotations

import ast
import collections
import copy
import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.frontend import components, liveness, rewrite_ast, source
from rose_compiler.frontend.branches import BranchLowering
from rose_compiler.frontend.core import LoopFrame, maybe_unbound
from rose_compiler.frontend.modes import undecorated
from rose_compiler.frontend.scope import Missing, Scope
from rose_compiler.ir import facts
from rose_compiler.ir.ops import BREAK_IF, UNBOUND
from rose_compiler.ir.program import Builder


@dataclass(frozen=True)
class RangeBounds:
    """``range(start, stop, step)`` as expressions; ``backward`` for ``reversed``."""

    start: ast.expr
    stop: ast.expr
    step: ast.expr
    backward: bool = False
    label: str = ""
    wrapper: ast.Call | None = None


_WRAPPERS = (enumerate, zip, reversed, iter, map, filter)
_PLAIN: tuple[Any, ...] = (
    *(list, tuple, dict, set, frozenset, str, bytes, range, collections.deque, np.ndarray),
    *(torch.Tensor, torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict),
    *(torch.nn.ParameterList, type({}.keys()), type({}.values()), type({}.items())),
)


class LoopLowering(BranchLowering):
    """The part of lowering that deals with loops."""

    def lower_loop(
        self, node: ast.For | ast.While, scope: Scope, builder: Builder, live: set[str]
    ) -> None:
        """One ``for`` or ``while`` statement."""
        self.refuse_rebinding(node, scope)
        if isinstance(node, ast.While):
            node = self.counted(node, scope) or node
        bounds = self.range_bounds(node.iter, scope) if isinstance(node, ast.For) else None
        if bounds is None and not self.structural([node], scope):
            self.blocks.emit([node], scope, builder, live)
            return
        if bounds is not None and not isinstance(node.target, ast.Name):  # type: ignore[union-attr]
            bounds = None
        if bounds is not None and bounds.wrapper is not None and not self.structural([node], scope):
            self.blocks.emit([node], scope, builder, live)
            return
        if any(_has_deep_exit(s) for s in node.body) and not self.structural([node], scope):
            self.blocks.emit([node], scope, builder, live)
            return
        self.structured_loop(node, bounds, scope, builder, live)

    def counted(self, node: ast.While, scope: Scope) -> ast.For | None:
        """``while n < limit: ...; n += 1`` as a loop over a range, if nothing else sets ``n`` and
        every trip gets to its end; ``n`` goes on being a variable."""
        test = node.test
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or node.orelse:
            return None
        if not isinstance(test.ops[0], (ast.Lt, ast.LtE)) or not isinstance(test.left, ast.Name):
            return None
        name, limit = test.left.id, test.comparators[0]
        steps = [s for s in node.body if isinstance(s, ast.AugAssign) and _is(s.target, name)]
        if len(steps) != 1 or not isinstance(steps[0].op, ast.Add):
            return None
        others = [s for s in node.body if s is not steps[0]]
        changed = set(liveness.assigned(others))
        step, first = scope.fold(steps[0].value), scope.bindings.get(name)
        if name in changed or liveness.reads(limit) & {*changed, name}:
            return None
        if type(step) is not int or step <= 0 or type(first) is not int:
            return None
        ahead = node.body[: node.body.index(steps[0])]
        if any(rewrite_ast.exits(s) for s in ahead) or not self.whole_number(limit, scope):
            return None
        if isinstance(test.ops[0], ast.LtE):
            limit = ast.BinOp(limit, ast.Add(), rewrite_ast.constant(1, test))
        parts = [rewrite_ast.constant(first, test), limit, rewrite_ast.constant(step, test)]
        call = ast.Call(rewrite_ast.name("range", test), parts, [])
        made = ast.For(rewrite_ast.name(scope.local("trip"), test, store=True), call, node.body, [])
        return ast.fix_missing_locations(ast.copy_location(made, node))

    def guarded(self, body: list[ast.stmt], scope: Scope) -> list[ast.stmt]:
        """A loop's body with what stands behind ``if done: continue`` put under the test, where no
        simulator is stepped there: such a trip then ends where every other one does."""
        for position, node in enumerate(body):
            if not isinstance(node, ast.If) or node.orelse:
                continue
            if not isinstance(node.body[-1], ast.Continue):
                continue
            if not isinstance(scope.fold(node.test), Missing):
                continue
            first, rest = node.body[:-1], self.guarded(body[position + 1 :], scope)
            if not rest or any(rewrite_ast.exits(s) for s in [*first, *rest]):
                return body
            if self.structural(rest, scope, steps=True):
                return body
            made = ast.If(node.test, first, rest)
            if not first:
                made = ast.If(ast.UnaryOp(ast.Not(), node.test), rest, [])
            made = ast.fix_missing_locations(ast.copy_location(made, node))
            return [*body[:position], made]
        return body

    def whole_number(self, expression: ast.expr, scope: Scope) -> bool:
        """Whether an expression is an integer that stays the same: configuration, or an argument
        that is one in every call that is captured like this one."""
        known = scope.fold(expression)
        if not isinstance(known, Missing):
            return type(known) is int
        found = scope.lookup(expression.id) if isinstance(expression, ast.Name) else None
        integers = self.session.integers
        if not isinstance(found, fx.Node) or found.graph is not self.root.graph:
            return False
        return found.op == "placeholder" and found.name in integers

    def range_bounds(self, expression: ast.expr, scope: Scope) -> RangeBounds | None:
        """The bounds of ``range``, seen through ``reversed`` and ``rose_compiler.loop``."""
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
        self,
        node: ast.For | ast.While,
        bounds: RangeBounds | None,
        scope: Scope,
        builder: Builder,
        live: set[str],
    ) -> None:
        """A loop node with its body lowered in place."""
        where = scope.source.where(node)
        iterator: Any = None
        if isinstance(node, ast.For) and bounds is not None:
            given = [
                self.argument(e, scope, builder, name)
                for e, name in (
                    (bounds.start, "start"),
                    (bounds.stop, "stop"),
                    (bounds.step, "step"),
                )
            ]
            if bounds.backward:
                given = self.reverse(given, node, scope, builder)
            arguments = tuple(self.as_value(g, scope, builder) for g in given)
            kind = "range"
        elif isinstance(node, ast.For) and self.advances(node.iter, scope):
            iterator = self.iterator(node.iter, scope, builder)
            arguments, kind = (), "while"
        elif isinstance(node, ast.For):
            iterable = self.argument(node.iter, scope, builder)
            arguments, kind = (self.as_value(iterable, scope, builder),), "iter"
        else:
            arguments, kind = (), "while"
        node = copy.copy(node)
        node.body = self.guarded(node.body, scope)
        targets = liveness.assigned(node.target) if isinstance(node, ast.For) else []
        stored = [n for n in liveness.assigned(node.body) if n not in targets]
        test_reads = liveness.reads(node.test) if isinstance(node, ast.While) else set()
        head = liveness.live_in(node.body, live | test_reads) | test_reads
        carried = [n for n in stored if n in head or n in live] + [n for n in targets if n in live]
        before = dict(scope.bindings)
        init = tuple(
            self.as_output(scope.bindings.get(n, UNBOUND), scope, builder) for n in carried
        )
        child = Builder(builder)
        plain = isinstance(node, ast.For) and isinstance(node.target, ast.Name) and kind != "while"
        index_name = targets[0] if plain else "trip"
        index = child.placeholder(index_name, "index")
        deleted = liveness.deleted(node.body)
        for name, first in zip(carried, init, strict=True):
            parameter = child.placeholder(name, "carried")
            if maybe_unbound(first) or name in deleted:
                facts.put(parameter, maybe_unbound=True)
            scope.bindings[name] = parameter
        for name in stored:
            if name not in carried:
                scope.bindings.pop(name, None)
        self.loops.append(LoopFrame(tuple(carried), child, scope, where))
        try:
            if isinstance(node, ast.For):
                if kind == "while":
                    index = self.next_item(iterator, node, scope, child)
                if isinstance(node.target, ast.Name):
                    scope.bindings[node.target.id] = index
                else:
                    item = scope.fresh("item")
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
            self.as_output(scope.bindings.get(n, UNBOUND), scope, child) for n in carried
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
            if maybe_unbound(init[position]) or name in deleted:
                facts.put(result, maybe_unbound=True)
            scope.bindings[name] = result

    def reverse(self, given: list[Any], node: ast.For, scope: Scope, builder: Builder) -> list[Any]:
        """The bounds of the same range, walked backwards."""
        if all(isinstance(g, int) for g in given):
            backward = range(*given)[::-1]
            return [backward.start, backward.stop, backward.step]
        names = [scope.fresh("bound") for _ in given]
        for name, value in zip(names, given, strict=True):
            scope.bindings[name] = value
        results = [scope.fresh("bound") for _ in given]
        whole = scope.fresh("whole")
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

    def advances(self, expression: ast.expr, scope: Scope) -> bool:
        """Whether taking the next item does more than read a container: generators, progress bars,
        data loaders. It is then an operation of its own."""
        if not isinstance(expression, ast.Call):
            found = scope.static(expression)
            return found is not None and not isinstance(found.value, _PLAIN)
        target = scope.static(expression.func)
        if target is None:
            return False
        if target.value in _WRAPPERS:
            return any(self.advances(a, scope) for a in expression.args)
        function = components.plain(target.value)
        if function is not None and source.is_user_code(function):
            return inspect.isgeneratorfunction(undecorated(function)[0])
        module = getattr(target.value, "__module__", None) or "builtins"
        return module.split(".")[0] not in ("builtins", "numpy", "torch", "itertools", "math")

    def iterator(self, expression: ast.expr, scope: Scope, builder: Builder) -> Any:
        """The iterator of an iterable, as a value."""
        iterable, _ = self.hoist_calls(expression, scope, builder)
        call = ast.Call(rewrite_ast.name("iter", expression), [iterable], [])
        call = ast.copy_location(call, expression)
        return self.blocks.value(call, scope, builder, "iterator")

    def next_item(self, iterator: Any, node: ast.For, scope: Scope, child: Builder) -> Any:
        """Take the next item, and leave the loop where there is none."""
        names = {n: scope.fresh(n) for n in ("iterator", "item", "ended")}
        text = (
            "try:\n    {item} = next({iterator})\n    {ended} = False\n"
            "except StopIteration:\n    {item} = None\n    {ended} = True\n"
        )
        statements = ast.parse(text.format(**names)).body
        for part in ast.walk(statements[0]):
            if hasattr(part, "lineno"):
                ast.copy_location(part, node.iter)
        scope.bindings[names["iterator"]] = iterator
        self.blocks.emit(
            statements,
            scope,
            child,
            {names["item"], names["ended"]},
            stem="next_item",
        )
        item, ended = (scope.bindings.pop(names[n]) for n in ("item", "ended"))
        scope.bindings.pop(names["iterator"])
        facts.put(item, maybe_unbound=False)
        facts.put(ended, maybe_unbound=False)
        self.emit_exit(BREAK_IF, ended, node, scope, child)
        return item

    def while_test(self, node: ast.While, scope: Scope, child: Builder) -> None:
        """The condition of a ``while`` at the head of its body."""
        known = scope.fold(node.test)
        if not isinstance(known, Missing) and known:
            return
        live = set(self.loops[-1].carried) | liveness.live_in(node.body, set())
        stop = self.predicate(node.test, "stop", scope, child, live, negate=True)
        self.emit_exit(BREAK_IF, stop, node, scope, child)


def _is(target: ast.expr, name: str) -> bool:
    return isinstance(target, ast.Name) and target.id == name


def _label(node: ast.For | ast.While) -> str:
    if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
        return f"for_{node.target.id}"
    return "for_items" if isinstance(node, ast.For) else "while_loop"


def _has_deep_exit(statement: ast.stmt) -> bool:
    """Whether a ``break`` or ``continue`` stands where it can't be turned into a flag."""
    if not rewrite_ast.exits(statement):
        return False
    return rewrite_ast.flag_exits([statement], "_b", "_c") is None
