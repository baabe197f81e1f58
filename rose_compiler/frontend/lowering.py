"""Statements of a function -> operations of a loop-nested program, one statement at a time."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from rose_compiler.base.errors import fail
from rose_compiler.frontend import components, liveness, rewrite_ast, saving, slots
from rose_compiler.frontend.calls import Bound
from rose_compiler.frontend.core import maybe_unbound, names_of_tuple
from rose_compiler.frontend.loops import LoopLowering
from rose_compiler.frontend.scope import Missing, Scope, Static
from rose_compiler.ir.ops import UNBOUND
from rose_compiler.ir.program import Builder, is_call, op_of

STEP_RESULTS = 5  # observation, reward, terminated, truncated, infos


class Lowering(LoopLowering):
    """Lowers statements into a builder. One instance a captured function."""

    # -- statements ----------------------------------------------------------------------------

    def statements(
        self, statements: Sequence[ast.stmt], scope: Scope, builder: Builder, live_out: set[str]
    ) -> None:
        """Lower a list of statements; ``live_out`` are the names read after it."""
        live = liveness.live_between(statements, live_out)
        for position, statement in enumerate(statements):
            if rewrite_ast.exits(statement):
                rest = list(statements[position + 1 :])
                self.exit(statement, rest, scope, builder, live_out)
                if isinstance(statement, (ast.Break, ast.Continue)):
                    return
                continue
            self.statement(statement, scope, builder, live[position])

    def statement(self, node: ast.stmt, scope: Scope, builder: Builder, live: set[str]) -> None:
        if isinstance(node, ast.If):
            self.lower_if(node, scope, builder, live)
        elif isinstance(node, (ast.For, ast.While)):
            self.lower_loop(node, scope, builder, live)
        elif isinstance(node, ast.With):
            self.lower_with(node, scope, builder, live)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)):
            self.simple(node, scope, builder, live)
        elif self.bound_without_operation(node, scope):
            return
        elif not isinstance(node, (ast.Pass, ast.Break, ast.Continue)):
            self.refuse_rebinding(node, scope)
            if isinstance(node, (ast.Try, ast.TryStar)) and self.structural([node], scope):
                raise fail(
                    "capture-try-around-component",
                    "`try` around a call that leads to a policy, simulator or trainer",
                    where=scope.source.where(node),
                )
            self.blocks.emit([node], scope, builder, live)

    def bound_without_operation(self, node: ast.stmt, scope: Scope) -> bool:
        """Whether a statement only changes what names stand for."""
        if isinstance(node, ast.Delete):
            return self.unbind(node, scope)
        return isinstance(node, (ast.Import, ast.ImportFrom)) and self.bind_import(node, scope)

    def simple(self, node: ast.stmt, scope: Scope, builder: Builder, live: set[str]) -> None:
        """An assignment or an expression: calls that matter become operations of their own."""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        self.refuse_rebinding(node, scope)
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return
        if isinstance(node, ast.Assign) and self.put_away(node, scope, builder, live):
            return
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and self.bind_directly(node, scope):
            return
        if isinstance(node, ast.Assign) and self.bind_parallel(node, scope, builder):
            return
        if isinstance(node, ast.AugAssign) and not self.surely_bound(node.target, scope):
            # the target's own value is read before the right side is evaluated
            self.blocks.emit([node], scope, builder, live)
            return
        first, *rest = saving.in_two(node, scope)
        if rest:  # what is saved, and its writing
            self.simple(first, scope, builder, live | set(liveness.assigned([first])))
            self.simple(rest[0], scope, builder, live)
            return
        value: ast.expr = node.value  # type: ignore[attr-defined]
        wanted = _targets(node)
        own = isinstance(value, ast.Call) and not self.steps(value, scope)
        # the result of a call in a host is unpacked behind it: nobody may wait for it before
        own = own and not self.hosted(value, scope)
        if isinstance(value, ast.Call) and own and self.declared(value, scope):
            self.lower_component(value, scope, builder, node, live)
            return
        replaced, binding = self.hoist_calls(value, scope, builder, wanted)
        if binding is None:
            replaced, binding = self._lifted(replaced, scope, builder)
        if isinstance(node, ast.Expr):
            if binding is None and not isinstance(replaced, ast.Name):
                made: ast.stmt = ast.copy_location(ast.Expr(replaced), node)
                marks = saving.marks(made, scope)
                self.blocks.emit([made], scope, builder, live, attributes=marks)
            return
        if (
            isinstance(node, ast.Assign)
            and binding is not None
            and self.unpack(node.targets, binding.value, scope, builder)
        ):
            return
        if replaced is not value:
            node = copy.copy(node)
            node.value = replaced  # type: ignore[attr-defined]
        self.blocks.emit([node], scope, builder, live)

    def _lifted(
        self, expression: ast.expr, scope: Scope, builder: Builder
    ) -> tuple[ast.expr, Bound | None]:
        """An expression without the attributes it reads first; its binding if it is one."""
        made = self.lift_reads(expression, scope, builder)
        if made is expression or not isinstance(made, ast.Name):
            return made, None
        return made, Bound(scope.bindings[made.id])

    def put_away(self, node: ast.Assign, scope: Scope, builder: Builder, live: set[str]) -> bool:
        """Assign attributes inside a loop: the values first, then each put in its place."""
        found = slots.spelled_targets(node.targets, scope) if self.loops else None
        if found is None:
            return False
        targets, stores = found
        direct = isinstance(node.value, ast.Name) and len(stores) == len(targets) == 1
        if direct and self.timeless(node.value, scope) and isinstance(targets[0], ast.Name):
            self.blocks.store(stores[0][0], node.value.id, scope, builder)  # type: ignore[attr-defined]
            return True
        made = copy.copy(node)
        made.targets = targets
        self.simple(made, scope, builder, live | {name for _, name in stores})
        for target, name in stores:
            self.blocks.store(target, name, scope, builder)
            scope.bindings.pop(name, None)
        return True

    def surely_bound(self, target: ast.expr, scope: Scope) -> bool:
        """Whether a target is a variable that has a value."""
        if not isinstance(target, ast.Name):
            return False
        return self.timeless(ast.copy_location(ast.Name(target.id, ast.Load()), target), scope)

    def bind_parallel(self, node: ast.Assign, scope: Scope, builder: Builder) -> bool:
        """``a, b = f(x), g(y)``: an operation each, evaluated before any name is bound."""
        names = names_of_tuple(node.targets[0]) if len(node.targets) == 1 else None
        if (
            names is None
            or not isinstance(node.value, ast.Tuple)
            or len(names) != len(node.value.elts)
        ):
            return False
        if any(isinstance(e, (ast.Starred, ast.NamedExpr)) for e in ast.walk(node.value)):
            return False
        made = [
            self.argument(e, scope, builder, each)
            for e, each in zip(node.value.elts, names, strict=True)
        ]
        for each, binding in zip(names, made, strict=True):
            scope.bindings[each] = binding
        return True

    def unpack(
        self, targets: Sequence[ast.expr], binding: Any, scope: Scope, builder: Builder
    ) -> bool:
        """Bind plain names to what an inlined call gave, without an operation."""
        if isinstance(binding, tuple):
            for target in targets:
                names = names_of_tuple(target)
                if names is None or len(names) != len(binding):
                    return False
            for target in targets:
                for each, value in zip(names_of_tuple(target) or (), binding, strict=True):
                    scope.bindings[each] = value
            return True
        if isinstance(binding, fx.Node) and is_call(binding) and op_of(binding).kind == "step":
            flat = [_spread(t, STEP_RESULTS) for t in targets]
            if all(flat):
                for name, part in (pair for pairs in flat for pair in pairs or ()):
                    if isinstance(part, int):
                        scope.bindings[name] = builder.item(binding, part, name=name)
                    else:
                        items = [builder.item(binding, k) for k in part]
                        scope.bindings[name] = self.blocks.listed(
                            name, items, targets[0], scope, builder
                        )
                return True
        if maybe_unbound(binding) or not all(isinstance(t, ast.Name) for t in targets):
            return False
        for target in targets:
            scope.bindings[target.id] = binding  # type: ignore[attr-defined]
        return True

    def bind_directly(self, node: ast.Assign | ast.AnnAssign, scope: Scope) -> bool:
        """Constants, other names and live objects are bound without an operation."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [t.id for t in targets if isinstance(t, ast.Name)]
        if len(names) != len(targets):
            return False
        assert node.value is not None
        value = scope.fold(node.value)
        if isinstance(value, Missing):
            if isinstance(node.value, ast.Name):
                value = scope.lookup(node.value.id)
                if isinstance(value, Missing) or maybe_unbound(value):
                    return False
            else:
                value = scope.static(node.value)
                if value is None:
                    return False
            if isinstance(value, Static) and not self.may_stand_for(value, names, scope, node):
                return False
        for each in names:
            scope.bindings[each] = value
        return True

    def may_stand_for(self, static: Static, names: list[str], scope: Scope, node: ast.stmt) -> bool:
        """Whether variables may stand for a live object: not if a loop hands them on."""
        if not static.root or isinstance(static.value, super):
            return False
        carried = {n for f in self.loops if f.scope is scope for n in f.carried}
        if not carried & set(names):
            return True
        if components.is_component(static.value):
            raise fail(
                "capture-rebind-component",
                f"`{names[0]}` is rebound inside a loop",
                where=scope.source.where(node),
                found=type(static.value).__name__,
            )
        return False

    def bind_import(self, node: ast.Import | ast.ImportFrom, scope: Scope) -> bool:
        """Modules that are loaded already are bound without an operation."""
        found: dict[str, Any] = {}
        for alias in node.names:
            if isinstance(node, ast.Import):
                full = alias.name if alias.asname else alias.name.split(".")[0]
                value = sys.modules.get(full) if alias.name in sys.modules else None
            else:
                module = sys.modules.get(node.module or "") if not node.level else None
                value = getattr(module, alias.name, None)
            name = alias.asname or alias.name.split(".")[0]
            if value is None or scope.stores(name):
                return False
            found[name] = value
        for name, value in found.items():
            scope.bindings[name] = self.session.root(name, value)
        return True

    def unbind(self, node: ast.Delete, scope: Scope) -> bool:
        """``del a, b`` of names that are surely bound needs no operation."""
        names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        if len(names) != len(node.targets) or len(set(names)) != len(names):
            return False
        if any(maybe_unbound(scope.bindings.get(n, UNBOUND)) for n in names):
            return False
        for each in names:
            scope.bindings[each] = UNBOUND
        return True


def _spread(target: ast.expr, count: int) -> list[tuple[str, int | range]] | None:
    """The variables that a flat tuple of targets binds when it takes ``count`` items apart, each
    with the position of its item, or those of the items in its list."""
    if not isinstance(target, (ast.Tuple, ast.List)):
        return None
    found: list[tuple[str, int | range]] = []
    behind = 0
    for number, each in enumerate(target.elts):
        if isinstance(each, ast.Starred) and isinstance(each.value, ast.Name):
            left = count - len(target.elts) + 1
            found.append((each.value.id, range(number, number + left)))
            behind = left - 1
        elif isinstance(each, ast.Name):
            found.append((each.id, number + behind))
        else:
            return None
    starred = any(isinstance(part, range) for _, part in found)
    fits = len(found) <= count + 1 if starred else len(found) == count
    return found if fits else None


def _targets(node: ast.stmt) -> tuple[str, ...]:
    """The names that a statement assigns, when it assigns nothing else."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return ()
    target = node.targets[0]
    return (target.id,) if isinstance(target, ast.Name) else tuple(names_of_tuple(target) or ())
