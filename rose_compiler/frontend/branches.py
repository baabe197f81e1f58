"""``if``, ``with``, ``break`` and ``continue``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from typing import Any

import torch.fx as fx

from rose_compiler.base.errors import fail
from rose_compiler.frontend import liveness, managers, rewrite_ast, saving
from rose_compiler.frontend.calls import CallLowering
from rose_compiler.frontend.core import maybe_unbound
from rose_compiler.frontend.modes import context_of, context_of_instance
from rose_compiler.frontend.scope import Missing, Scope
from rose_compiler.frontend.source import FunctionSource
from rose_compiler.ir import facts
from rose_compiler.ir.ops import BREAK_IF, CONTINUE_IF, UNBOUND, Op
from rose_compiler.ir.program import Builder


class BranchLowering(CallLowering):
    """The part of lowering that deals with branches, modes and exits."""

    def lower_if(self, node: ast.If, scope: Scope, builder: Builder, live: set[str]) -> None:
        """One arm where the test is known, a block or a branch otherwise."""
        known = scope.fold(node.test)
        if not isinstance(known, Missing):
            self.statements(node.body if known else node.orelse, scope, builder, live)
            return
        self.refuse_rebinding(node, scope)
        body = [part for s in node.body for part in saving.in_two(s, scope, named=True)]
        if len(body) > len(node.body):
            node = ast.copy_location(ast.If(node.test, body, node.orelse), node)
        if not self.structural([node], scope) and not self.saves(node.body, scope):
            self.blocks.emit([node], scope, builder, live)
            return
        inside = liveness.live_in(node.body, live) | liveness.live_in(node.orelse, live)
        pred = self.predicate(node.test, "pred", scope, builder, inside)
        pieces = [(b, s) for b in (True, False) for s in self.segments(_arm(node, b), scope)]
        saved = {id(p[0]): self.saved_by(p[0], scope) for taken, p in pieces if taken}
        if len(pieces) <= 1 + bool(node.orelse) and not any(saved.values()):
            self.one_branch(node, pred, scope, builder, live)
            return
        # each piece under the test for itself: what one of them does holds up no other
        name = scope.fresh("pred")
        scope.bindings[name] = pred
        following = live
        after: list[set[str]] = []
        for _, piece in reversed(pieces):
            after.append(following)
            following = liveness.live_in(piece, following) | following
        for (taken, piece), needed in zip(pieces, reversed(after), strict=True):
            test = rewrite_ast.name(name, node.test)
            made = ast.If(test, piece, []) if taken else ast.If(test, [ast.Pass()], piece)
            made = ast.fix_missing_locations(ast.copy_location(made, piece[0]))
            if (inner := saved.get(id(piece[0]))) is not None:
                self.save_under(name, piece[0].value, inner, scope, builder)  # type: ignore[attr-defined]
            elif self.structural(piece, scope):
                self.one_branch(made, pred, scope, builder, needed)
            else:
                marks = saving.marks(piece[0], scope) if len(piece) == 1 else {}
                self.blocks.emit([made], scope, builder, needed, attributes=marks)
        scope.bindings.pop(name)

    def segments(self, statements: list[ast.stmt], scope: Scope) -> list[list[ast.stmt]]:
        """An arm cut at its loops and branches, and at calls that lead to some."""
        found: list[list[ast.stmt]] = []
        open_run = False
        for statement in statements:
            cut = isinstance(statement, (ast.If, ast.For, ast.While)) or (
                isinstance(statement, (ast.Assign, ast.Expr))
                and isinstance(statement.value, ast.Call)
                and self.matters(statement.value, scope)
                and not self.steps(statement.value, scope)
                and self.structural([statement], scope)
            )
            cut = cut or saving.writes_out(statement, scope)
            cut = cut or self.saved_by(statement, scope) is not None
            if cut or not open_run:
                found.append([statement])
            else:
                found[-1].append(statement)
            open_run = not cut
        return found

    def saves(self, statements: list[ast.stmt], scope: Scope) -> bool:
        """Whether an arm makes a snapshot and then writes it out: two things, for the second one
        may go on beside whatever changes what was copied."""
        if len(statements) > 1 and any(saving.writes_out(s, scope) for s in statements):
            return True
        return any(self.saved_by(s, scope) for s in statements)

    def saved_by(self, statement: ast.stmt, scope: Scope) -> FunctionSource | None:
        """The function that a statement calls and that can be entered, if it does nothing but make
        values and write them to files."""
        call = statement.value if isinstance(statement, ast.Expr) else None
        target = scope.static(call.func) if isinstance(call, ast.Call) else None
        if not isinstance(call, ast.Call) or target is None:
            return None
        inner = self.inlineable(call, target.value, scope)
        if inner is None or any(self.matter_inside(a, scope) for a in _given(call)):
            return None
        new, body = self.scope_of(inner), inner.node.body
        plain = all(isinstance(s, (ast.Assign, ast.Expr)) for s in body)
        if not plain or not any(saving.writes_out(s, new) for s in body):
            return None
        return None if self.structural(body, new) else inner

    def save_under(
        self,
        test: str,
        call: ast.Call,
        inner: FunctionSource,
        scope: Scope,
        builder: Builder,
    ) -> None:
        """Lower a call under a test that has a name: its arguments and the callee's statements each
        under the test, so that what is saved and its writing are two operations there too."""
        given: dict[int, Any] = {}
        for argument in _given(call):
            if isinstance(argument, ast.Constant | ast.Name) and self.timeless(argument, scope):
                continue
            name = scope.fresh("given")
            scope.locals.add(name)
            made = _under(test, rewrite_ast.assign(name, argument, argument))
            self.blocks.emit([made], scope, builder, {name})
            given[id(argument)] = scope.bindings[name]
        new = self.scope_of(inner)
        new.source = inner = self.prepared(inner, new)
        new.bindings.update(self.arguments_of(_without(call, given), inner, scope, builder))
        names = list(inspect.signature(inner.fn).parameters)[inner.bound is not None :]
        for name, argument in (
            *zip(names, call.args, strict=False),
            *((str(k.arg), k.value) for k in call.keywords),
        ):
            if id(argument) in given:
                new.bindings[name] = given[id(argument)]
        own = new.fresh(test)
        new.bindings[own] = scope.bindings[test]
        outer_contexts, outer_chain = self.contexts, self.inline_chain
        self.inline_chain = (*outer_chain, scope.source.where(call))
        self.contexts = self.entering(inner.contexts)
        self.inlining.append(inner.fn.__code__)
        try:
            body = [s for s in inner.node.body if not _is_text(s)]
            pieces = [p for s in body for p in saving.in_two(s, new, named=True)]
            for k, piece in enumerate(pieces):
                live = liveness.live_in(pieces[k + 1 :], set())
                marks = saving.marks(piece, new)
                self.blocks.emit([_under(own, piece)], new, builder, live, attributes=marks)
        finally:
            self.inlining.pop()
            self.contexts, self.inline_chain = outer_contexts, outer_chain

    def one_branch(
        self, node: ast.If, pred: fx.Node, scope: Scope, builder: Builder, live: set[str]
    ) -> None:
        """One branch operation with the arms lowered in place."""
        before = dict(scope.bindings)
        arms: list[tuple[Builder, dict[str, Any]]] = []
        for body in (node.body, node.orelse):
            arm = Builder(builder)
            scope.bindings = dict(before)
            self.statements(body, scope, arm, live)
            arms.append((arm, dict(scope.bindings)))
        changed = [
            n
            for n in dict.fromkeys([*arms[0][1], *arms[1][1]])
            if n in live and arms[0][1].get(n, UNBOUND) is not arms[1][1].get(n, UNBOUND)
        ]
        outputs = []
        for arm, after in arms:
            scope.bindings = after
            outputs.append(
                tuple(self.as_output(after.get(n, UNBOUND), scope, arm) for n in changed)
            )
        made = builder.branch(
            pred, arms[0][0], outputs[0], arms[1][0], outputs[1], **self.known(node, scope)
        )
        scope.bindings = before
        for each in dict.fromkeys([*arms[0][1], *arms[1][1]]):
            if each in live and each not in changed:
                scope.bindings[each] = arms[0][1].get(each, UNBOUND)
        for position, each in enumerate(changed):
            result = builder.item(made, position, name=each)
            if any(maybe_unbound(o[position]) for o in outputs):
                facts.put(result, maybe_unbound=True)
            scope.bindings[each] = result

    def predicate(
        self,
        test: ast.expr,
        stem: str,
        scope: Scope,
        builder: Builder,
        live: set[str],
        *,
        negate: bool = False,
    ) -> fx.Node:
        """A test as an operation of its own; names in ``live`` that it assigns are bound."""
        expression, _ = self.hoist_calls(test, scope, builder)
        if negate:
            expression = ast.copy_location(ast.UnaryOp(ast.Not(), expression), test)
        name = scope.fresh(stem)
        statement = rewrite_ast.assign(name, expression, test)
        self.blocks.emit([statement], scope, builder, {name} | live)
        found: fx.Node = scope.bindings.pop(name)
        return found

    def lower_with(self, node: ast.With, scope: Scope, builder: Builder, live: set[str]) -> None:
        """The body under torch's modes, or one block for any other context manager."""
        if len(node.items) > 1 and any(
            managers.manager_of(i.context_expr, scope) for i in node.items
        ):
            inner = ast.With(node.items[1:], node.body)
            node = ast.With(node.items[:1], [ast.copy_location(inner, node)])
            node = ast.copy_location(node, inner)
        manager = managers.manager_of(node.items[0].context_expr, scope)
        named = node.items[0].optional_vars
        if manager is not None and (named is None or isinstance(named, ast.Name)):
            self.refuse_rebinding(node, scope)
            body = node.body
            managers.lower(
                self,
                manager,
                node.items[0],
                lambda: self.statements(body, scope, builder, live),
                scope,
                builder,
            )
            return
        contexts: list[facts.Context] = []
        for item in node.items:
            context = self.known_context(item.context_expr, scope)
            if context is None or item.optional_vars is not None:
                self.refuse_rebinding(node, scope)
                self.blocks.emit([node], scope, builder, live)
                return
            contexts.append(context)
        outer = self.contexts
        self.contexts = self.entering(contexts)
        try:
            self.statements(node.body, scope, builder, live)
        finally:
            self.contexts = outer

    def known_context(self, expression: ast.expr, scope: Scope) -> facts.Context | None:
        """A thread-local mode with static arguments, or ``None`` for any other context manager."""
        if not isinstance(expression, ast.Call):
            existing = scope.static(expression)
            return None if existing is None else context_of_instance(existing.value)
        target = scope.static(expression.func)
        if target is None:
            return None
        args = [scope.fold(a) for a in expression.args]
        keywords = [(k.arg or "", scope.fold(k.value)) for k in expression.keywords]
        if any(isinstance(a, Missing) for a in args) or any(
            isinstance(v, Missing) or not k for k, v in keywords
        ):
            return None
        return context_of(target.value, tuple(args), tuple(keywords))

    def exit(
        self,
        node: ast.stmt,
        rest: list[ast.stmt],
        scope: Scope,
        builder: Builder,
        live_out: set[str],
    ) -> None:
        """A statement that may leave the loop: flags, then the exit itself."""
        frame = self.loops[-1]
        if isinstance(node, (ast.Break, ast.Continue)):
            op = BREAK_IF if isinstance(node, ast.Break) else CONTINUE_IF
            self.emit_exit(op, True, node, scope, builder)
            return
        if isinstance(node, ast.If):
            known = scope.fold(node.test)
            if not isinstance(known, Missing):
                arm = node.body if known else node.orelse
                live = liveness.live_in(rest, live_out)
                self.statements(arm, scope, builder, live | set(frame.carried))
                return
        broke, continued = scope.fresh("broke"), scope.fresh("continued")
        flagged = rewrite_ast.flag_exits([node], broke, continued)
        if flagged is None:
            raise fail(
                "capture-unsupported",
                "`break` or `continue` out of a construct that can't be split",
                where=scope.source.where(node),
            )
        live = liveness.live_in(rest, live_out) | set(frame.carried) | {broke, continued}
        uses = liveness.assigned(flagged)
        for flag in (broke, continued):
            scope.locals.add(flag)
            scope.bindings[flag] = False
        for position, statement in enumerate(flagged):
            after = liveness.live_in(flagged[position + 1 :], live)
            self.statement(statement, scope, builder, after)
        for flag, op in ((broke, BREAK_IF), (continued, CONTINUE_IF)):
            if flag in uses:
                self.emit_exit(op, scope.bindings[flag], node, scope, builder)
            scope.bindings.pop(flag)

    def emit_exit(self, op: Op, pred: Any, node: ast.AST, scope: Scope, builder: Builder) -> None:
        """The exit operation, with what the loop hands out there."""
        frame = self.loops[-1]
        if frame.builder is not builder:
            raise fail(
                "capture-unsupported",
                "`break` or `continue` inside a branch around a component call",
                where=scope.source.where(node),
                help="set a flag in the branch and break on it after the branch",
            )
        carried = tuple(
            self.as_output(scope.bindings.get(n, UNBOUND), scope, builder) for n in frame.carried
        )
        builder.call(op, pred, carried, **self.known(node, scope))


def _arm(node: ast.If, taken: bool) -> list[ast.stmt]:
    return node.body if taken else node.orelse


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring; ``x = 1`` has a constant, too."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _under(test: str, statement: ast.stmt) -> ast.If:
    """A statement under a test that has a name."""
    made = ast.If(rewrite_ast.name(test, statement), [statement], [])
    return ast.fix_missing_locations(ast.copy_location(made, statement))


def _given(call: ast.Call) -> list[ast.expr]:
    """The arguments of a call, in the order in which they are evaluated."""
    return [*call.args, *(k.value for k in call.keywords)]


def _without(call: ast.Call, given: Mapping[int, Any]) -> ast.Call:
    """A call with nothing in the place of some of its arguments."""

    def plain(argument: ast.expr) -> ast.expr:
        return rewrite_ast.constant(None, argument) if id(argument) in given else argument

    keywords = [ast.keyword(k.arg, plain(k.value)) for k in call.keywords]
    return ast.copy_location(ast.Call(call.func, [plain(a) for a in call.args], keywords), call)
