"""Calls inside statements: components become operations, helpers and methods are inlined."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rose_compiler.frontend import components, liveness, loop_else, rewrite_ast, slots, source
from rose_compiler.frontend.callee import Callees
from rose_compiler.frontend.core import maybe_unbound
from rose_compiler.frontend.evaluation import children, splits
from rose_compiler.frontend.scalar import is_scalar
from rose_compiler.frontend.scope import Missing, Scope
from rose_compiler.ir.program import Builder


@dataclass(frozen=True)
class Bound:
    """What a call was lowered to: the binding of its result, which may be ``None``."""

    value: Any


class CallLowering(Callees):
    """The part of lowering that looks into expressions."""

    def hoist_calls(
        self,
        expression: ast.expr,
        scope: Scope,
        builder: Builder,
        wanted: tuple[str, ...] = (),
    ) -> tuple[ast.expr, Bound | None]:
        """Take the calls that matter out of an expression, in evaluation order.

        Returns the expression with names in their place, and the binding of the whole expression
        when it is one such call (``None`` otherwise). ``wanted`` are the names that it will have.
        """
        if isinstance(expression, ast.Call) and self.matters(expression, scope):
            binding = self.lower_call(expression, scope, builder, wanted)
            function = expression.func
            stem = function.attr if isinstance(function, ast.Attribute) else "result"
            temp = scope.fresh(stem)
            scope.bindings[temp] = binding
            return rewrite_ast.name(temp, expression), Bound(binding)
        if not self.matter_inside(expression, scope) or not splits(expression):
            return expression, None
        made = copy.copy(expression)
        parts = list(children(made))
        last = max(i for i, (_, _, child) in enumerate(parts) if self.matter_inside(child, scope))
        for position, (field, index, child) in enumerate(parts):
            replaced, _ = self.hoist_calls(child, scope, builder)
            stays = self.timeless(replaced, scope) and (
                field == "func" or not isinstance(replaced, ast.Attribute)
            )
            if position < last and not stays:
                # what stands left of a hoisted call is evaluated before it
                temp = scope.fresh("value")
                scope.bindings[temp] = self.blocks.value(replaced, scope, builder)
                replaced = rewrite_ast.name(temp, child)
            if index is None:
                setattr(made, field, replaced)
            else:
                items = list(getattr(made, field))
                items[index] = (
                    ast.keyword(items[index].arg, replaced)
                    if isinstance(items[index], ast.keyword)
                    else replaced
                )
                setattr(made, field, items)
        return made, None

    def lift_reads(self, expression: ast.expr, scope: Scope, builder: Builder) -> ast.expr:
        """Take reads of attributes that the program assigns out of an expression, where they are
        the first that it does; names stand in their place."""
        names: dict[int, str] = {}
        for part in slots.first_reads(expression, scope) if self.loops else ():
            names[id(part)] = temp = scope.fresh(part.attr.lstrip("_"))
            scope.bindings[temp] = self.blocks.value(part, scope, builder, temp)
        return slots.replaced(expression, names) if names else expression

    def timeless(self, expression: ast.expr, scope: Scope) -> bool:
        """Whether evaluating an expression earlier or later gives the same, and never fails: a
        constant, a variable that is surely bound, a method of one or of a live object."""
        if isinstance(expression, ast.Constant):
            return True
        if isinstance(expression, ast.Attribute):
            found = scope.static(expression)
            if found is not None:
                return callable(found.value)
            return isinstance(expression.value, ast.Name) and self.timeless(expression.value, scope)
        if not isinstance(expression, ast.Name):
            return False
        known = scope.lookup(expression.id)
        return not isinstance(known, Missing) and not maybe_unbound(known)

    def lower_call(
        self,
        call: ast.Call,
        scope: Scope,
        builder: Builder,
        wanted: tuple[str, ...] = (),
    ) -> Any:
        """An operation for a component, the body for an inlined function; the binding of its
        result (a tuple of bindings where the callee returns a tuple display)."""
        target = scope.static(call.func)
        assert target is not None
        if self.steps(call, scope):
            return self.lower_step(call, scope, builder)
        if self.declared(call, scope):
            return self.lower_component(call, scope, builder)
        inner = self.inlineable(call, target.value, scope)
        assert inner is not None
        return self.inline(call, inner, scope, builder, wanted)

    def lower_step(self, call: ast.Call, scope: Scope, builder: Builder) -> Any:
        """``env.step(action)`` as a step operation over (action, env)."""
        assert isinstance(call.func, ast.Attribute)
        env = scope.static(call.func.value)
        assert env is not None
        self.loops_do("steps")
        made = copy.copy(call)
        made.args, names = self._spelled(call.args, ["action"], scope, builder)
        env_name = scope.fresh("env")
        scope.bindings[env_name] = env
        made.func = ast.copy_location(
            ast.Attribute(rewrite_ast.name(env_name, call), "step", ast.Load()), call
        )
        result = scope.fresh("stepped")
        self.blocks.emit(
            [rewrite_ast.assign(result, made, call)],
            scope,
            builder,
            {result},
            kind="step",
            stem="env_step",
            attributes={"step": {"env": env_name, "action": names[0]}},
        )
        for each in (*names, env_name):
            scope.bindings.pop(each, None)
        return scope.bindings.pop(result)

    def lower_component(
        self,
        call: ast.Call,
        scope: Scope,
        builder: Builder,
        statement: ast.stmt | None = None,
        live: set[str] | None = None,
    ) -> Any:
        """A call of a declared component as one operation, its arguments named as the parameters.

        With ``statement`` the whole assignment is the operation, so that each name it binds is a
        result of its own.
        """
        target = scope.static(call.func)
        assert target is not None
        parameters = components.parameters(target.value)
        made = copy.copy(call)
        made.args, names = self._spelled(call.args, parameters, scope, builder)
        values, more = self._spelled(
            [k.value for k in call.keywords], [str(k.arg) for k in call.keywords], scope, builder
        )
        made.keywords = [ast.keyword(k.arg, v) for k, v in zip(call.keywords, values, strict=True)]
        stem = getattr(target.value, "__name__", "component")
        hosted = {"hosted": stem} if components.is_hosted_call(target.value) else {}
        result = ""
        if statement is None:
            result = scope.fresh("result")
            statement, live = rewrite_ast.assign(result, made, call), {result}
        else:
            statement = copy.copy(statement)
            statement.value = made  # type: ignore[attr-defined]
        self.blocks.emit(
            [statement],
            scope,
            builder,
            live or set(),
            kind="component",
            stem=stem,
            attributes={
                "declared": components.declared(target.value),
                "given": {
                    **dict(zip(parameters, names, strict=False)),
                    **{str(k.arg): n for k, n in zip(call.keywords, more, strict=True)},
                },
                **hosted,
            },
        )
        for each in (*names, *more):
            scope.bindings.pop(each, None)
        return scope.bindings.pop(result) if result else None

    def _spelled(
        self,
        arguments: Sequence[ast.expr],
        wanted: Sequence[str],
        scope: Scope,
        builder: Builder,
    ) -> tuple[list[ast.expr], list[str]]:
        """Arguments evaluated to values of their own: the names to pass, each a new variable."""
        made: list[ast.expr] = []
        names: list[str] = []
        for position, argument in enumerate(arguments):
            stem = wanted[position] if position < len(wanted) else f"argument_{position}"
            binding = self.argument(argument, scope, builder, stem)
            name = stem if stem not in scope.bindings else scope.fresh(stem)
            scope.bindings[name] = binding
            names.append(name)
            made.append(rewrite_ast.name(name, argument))
        return made, names

    def inline(
        self,
        call: ast.Call,
        inner: source.FunctionSource,
        scope: Scope,
        builder: Builder,
        wanted: tuple[str, ...] = (),
    ) -> Any:
        """Lower the callee's statements in place."""
        new = self.scope_of(inner)
        new.source = inner = self.prepared(inner, new)
        new.bindings.update(self.arguments_of(call, inner, scope, builder))
        body = rewrite_ast.single_exit(inner.node.body)
        assert body is not None
        outer_contexts, outer_chain = self.contexts, self.inline_chain
        self.inline_chain = (*outer_chain, scope.source.where(call))
        self.contexts = self.entering(inner.contexts)
        self.inlining.append(inner.fn.__code__)
        trained = self.trained
        try:
            made = self.inlined_body(body, new, builder, wanted)
            # `sim.step(action)` of a class of the user's; `algorithm.step(batch)` trains
            is_step = inner.fn.__name__ == "step" and inner.bound is not None and call.args
            if is_step and self.trained == trained:
                self.loops_do("steps")
            return made
        finally:
            self.inlining.pop()
            self.contexts, self.inline_chain = outer_contexts, outer_chain

    def arguments_of(
        self, call: ast.Call, inner: source.FunctionSource, scope: Scope, builder: Builder
    ) -> dict[str, Any]:
        """The bindings of a callee's parameters, evaluated here."""
        parameters = list(inspect.signature(inner.fn).parameters.values())
        given: dict[str, Any] = {}
        names = [p.name for p in parameters]
        if inner.bound is not None:
            given[names[0]] = self.receiver(call, inner, scope)
            names = names[1:]
        for name, argument in zip(names, call.args, strict=False):
            given[name] = self.argument(argument, scope, builder, name)
        for keyword in call.keywords:
            name = str(keyword.arg)
            given[name] = self.argument(keyword.value, scope, builder, name)
        for parameter in parameters:
            if parameter.name not in given:
                default = parameter.default
                given[parameter.name] = (
                    default
                    if is_scalar(default)
                    else self.session.root(f"{inner.node.name}_{parameter.name}", default)
                )
        return given

    def inlined_body(
        self,
        body: list[ast.stmt],
        scope: Scope,
        builder: Builder,
        wanted: tuple[str, ...] = (),
    ) -> Any:
        """The callee's statements; a final ``return a, b`` gives a tuple of bindings."""
        body = loop_else.spelled_out(self.take_static_arms(body, scope), scope.local)
        last = body[-1]
        if isinstance(last, ast.Assign) and _is_return(last):
            parts = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
            if not any(isinstance(p, (ast.Starred, ast.NamedExpr)) for p in ast.walk(last.value)):
                self.statements(body[:-1], scope, builder, liveness.reads(last.value))
                hints = wanted if len(wanted) == len(parts) else ("",) * len(parts)
                made = tuple(
                    self.argument(e, scope, builder, hint or None)
                    for e, hint in zip(parts, hints, strict=True)
                )
                return made if isinstance(last.value, ast.Tuple) else made[0]
        self.statements(body, scope, builder, {rewrite_ast.RETURN_NAME})
        return scope.bindings[rewrite_ast.RETURN_NAME]

    def take_static_arms(self, body: list[ast.stmt], scope: Scope) -> list[ast.stmt]:
        """Replace a last ``if`` whose test is known by its arm: its return value is then seen."""
        while body and isinstance(body[-1], ast.If):
            tests_locals = liveness.reads(body[-1].test) & set(liveness.assigned(body[:-1]))
            known = NOT_KNOWN if tests_locals else scope.fold(body[-1].test)
            if isinstance(known, Missing):
                return body
            arm = body[-1].body if known else body[-1].orelse
            body = [*body[:-1], *arm]
        return body

    def argument(
        self,
        expression: ast.expr,
        scope: Scope,
        builder: Builder,
        name: str | None = None,
    ) -> Any:
        """The binding of an expression, evaluated here; ``name`` is what readers see it called."""
        wanted = (name,) if name else ()
        replaced, binding = self.hoist_calls(expression, scope, builder, wanted)
        if binding is not None:
            return binding.value
        if slots.slot(replaced, scope) is None:
            replaced = self.lift_reads(replaced, scope, builder)
        return self.blocks.value(replaced, scope, builder, name)


NOT_KNOWN = Missing()


def _is_return(statement: ast.Assign) -> bool:
    target = statement.targets[0]
    return isinstance(target, ast.Name) and target.id == rewrite_ast.RETURN_NAME
