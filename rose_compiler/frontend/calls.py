"""Calls inside statements: simulator steps become operations, helpers and methods are inlined."""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rose_compiler.frontend import components, liveness, refuse, rewrite_ast, source
from rose_compiler.frontend.scope import Missing, Scope, Static, is_scalar
from rose_compiler.ir.ops import UNBOUND
from rose_compiler.ir.program import Builder

if TYPE_CHECKING:
    from rose_compiler.frontend.capture import Lowering

MAX_DEPTH = 8
_LAZY = (
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.BoolOp,
    ast.IfExp,
    ast.Lambda,
)


class CallLowering:
    """The part of lowering that looks into expressions."""

    def hoist_calls(
        self: Lowering, expression: ast.expr, scope: Scope, builder: Builder
    ) -> tuple[ast.expr, Any]:
        """Take the calls that matter out of an expression, in evaluation order.

        Returns the expression with names in their place, and the binding of the whole expression
        when it is one such call (``None`` otherwise).
        """
        if isinstance(expression, ast.Call) and self.matters(expression, scope):
            binding = self.lower_call(expression, scope, builder)
            temp = self.temp("r")
            scope.bindings[temp] = binding
            return rewrite_ast.name(temp, expression), binding
        if not any(
            isinstance(p, ast.Call) and self.matters(p, scope) for p in _eager_parts(expression)
        ):
            return expression, None
        made = copy.copy(expression)
        children = list(_children(made))
        last = max(
            i
            for i, (_, _, child) in enumerate(children)
            if any(isinstance(p, ast.Call) and self.matters(p, scope) for p in _eager_parts(child))
        )
        for position, (field, index, child) in enumerate(children):
            replaced, _ = self.hoist_calls(child, scope, builder)
            if position < last and replaced is child and not _timeless(child):
                # what stands left of a hoisted call is evaluated before it
                temp = self.temp("v")
                scope.bindings[temp] = self.blocks.value(child, scope, builder)
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

    def matters(self: Lowering, call: ast.Call, scope: Scope) -> bool:
        """Whether a call becomes an operation of its own or is inlined."""
        target = scope.static(call.func)
        if target is None:
            return False
        if components.simulator_of_step(target.value) is not None:
            return True
        return self.inlineable(call, target.value, scope) is not None

    def inlineable(
        self: Lowering, call: ast.Call, target: Any, scope: Scope
    ) -> source.FunctionSource | None:
        """The source of a callee that can be entered here."""
        function = components.plain(target)
        if (
            function is None
            or not source.is_user_code(function)
            or components.declared(target) is not None
        ):
            return None
        if len(self.inlining) > MAX_DEPTH or function.__code__ in self.inlining:
            return None
        if any(isinstance(a, ast.Starred) for a in call.args) or any(
            k.arg is None for k in call.keywords
        ):
            return None
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            return None
        if hasattr(function, "__wrapped__"):
            return None
        try:
            found = source.read(target)
        except Exception:  # what can't be read stays a call
            return None
        spec = found.node.args
        if spec.vararg or spec.kwarg or spec.posonlyargs:
            return None
        if any(
            isinstance(p, (ast.Lambda, ast.FunctionDef, ast.Global, ast.Nonlocal))
            for s in found.node.body
            for p in ast.walk(s)
        ):
            return None
        if rewrite_ast.single_exit(found.node.body) is None:
            return None
        return found

    def structural(
        self: Lowering, statements: Sequence[ast.stmt], scope: Scope, seen: set[Any] | None = None
    ) -> bool:
        """Whether statements hold a call that the schedule cares about: a simulator's step, an
        optimizer's step or a ``backward``, also inside functions that can be entered."""
        seen = set() if seen is None else seen
        for statement in statements:
            for part in ast.walk(statement):
                if not isinstance(part, ast.Call):
                    continue
                if isinstance(part.func, ast.Attribute) and part.func.attr == "backward":
                    return True
                target = scope.static(part.func)
                if target is None:
                    continue
                value = target.value
                if components.simulator_of_step(value) is not None or components.is_trainer_call(
                    value
                ):
                    return True
                inner = self.inlineable(part, value, scope)
                if inner is None or inner.fn.__code__ in seen:
                    continue
                seen.add(inner.fn.__code__)
                inner_scope = Scope(inner, self.session)
                parameters = list(inspect.signature(inner.fn).parameters)
                inner_scope.locals = set(parameters) | set(liveness.assigned(inner.node.body))
                if inner.bound is not None and isinstance(part.func, ast.Attribute):
                    owner = scope.static(part.func.value)
                    if owner is not None:
                        inner_scope.bindings[parameters[0]] = owner
                for name, argument in zip(
                    parameters[inner.bound is not None :], part.args, strict=False
                ):
                    known = scope.static(argument)
                    if known is not None:
                        inner_scope.bindings[name] = known
                if self.structural(inner.node.body, inner_scope, seen):
                    return True
        return False

    def lower_call(self: Lowering, call: ast.Call, scope: Scope, builder: Builder) -> Any:
        """An operation for a simulator's step, the body for an inlined function; the binding of its
        result (a tuple of bindings where the callee returns a tuple display)."""
        target = scope.static(call.func)
        assert target is not None
        simulator = components.simulator_of_step(target.value)
        if simulator is not None:
            return self.lower_step(call, scope, builder)
        inner = self.inlineable(call, target.value, scope)
        assert inner is not None
        return self.inline(call, inner, scope, builder)

    def lower_step(self: Lowering, call: ast.Call, scope: Scope, builder: Builder) -> Any:
        """``env.step(action)`` as a step operation over (action, env)."""
        assert isinstance(call.func, ast.Attribute)
        env_static = scope.static(call.func.value)
        assert env_static is not None
        names: list[str] = []
        made = copy.copy(call)
        made.args = []
        for argument in call.args:
            temp = self.temp("action")
            scope.bindings[temp] = self.blocks.value(
                self.hoist_calls(argument, scope, builder)[0], scope, builder
            )
            names.append(temp)
            made.args.append(rewrite_ast.name(temp, argument))
        env_name = self.temp("env")
        scope.bindings[env_name] = env_static
        made.func = ast.copy_location(
            ast.Attribute(rewrite_ast.name(env_name, call), "step", ast.Load()), call
        )
        result = self.temp("stepped")
        statement = rewrite_ast.assign(result, made, call)
        attributes = {"step": {"env": env_name, "action": names[0] if names else ""}}
        self.blocks.emit(
            [statement],
            scope,
            builder,
            {result},
            kind="step",
            stem="env_step",
            attributes=attributes,
        )
        for each in (*names, env_name):
            scope.bindings.pop(each, None)
        return scope.bindings.pop(result)

    def inline(
        self: Lowering, call: ast.Call, inner: source.FunctionSource, scope: Scope, builder: Builder
    ) -> Any:
        """Lower the callee's statements in place."""
        new = Scope(inner, self.session)
        parameters = list(inspect.signature(inner.fn).parameters.values())
        new.locals = (
            {p.name for p in parameters}
            | set(liveness.assigned(inner.node.body))
            | {rewrite_ast.RETURN_NAME}
        )
        given: dict[str, Any] = {}
        names = [p.name for p in parameters]
        if inner.bound is not None:
            assert isinstance(call.func, ast.Attribute)
            given[names[0]] = scope.static(call.func.value)
            names = names[1:]
        for name, argument in zip(names, call.args, strict=False):
            given[name] = self.argument(argument, scope, builder)
        for keyword in call.keywords:
            given[str(keyword.arg)] = self.argument(keyword.value, scope, builder)
        for parameter in parameters:
            if parameter.name in given:
                continue
            default = parameter.default
            if default is inspect.Parameter.empty:
                given[parameter.name] = UNBOUND
            elif is_scalar(default):
                given[parameter.name] = default
            else:
                given[parameter.name] = Static(
                    default, self.session.root(f"{inner.node.name}_{parameter.name}", default)
                )
        new.bindings.update(given)
        refuse.check(inner, new.resolve, new.resolves_to_component, inlined=True)
        body = rewrite_ast.single_exit(inner.node.body)
        assert body is not None
        outer_contexts, outer_chain = self.contexts, self.inline_chain
        self.inline_chain = (*outer_chain, scope.source.where(call))
        self.inlining.append(inner.fn.__code__)
        try:
            returned = self.inlined_body(body, new, builder)
        finally:
            self.inlining.pop()
            self.contexts, self.inline_chain = outer_contexts, outer_chain
        return returned

    def inlined_body(self: Lowering, body: list[ast.stmt], scope: Scope, builder: Builder) -> Any:
        """The callee's statements; a final ``return a, b`` gives a tuple of bindings."""
        live = {rewrite_ast.RETURN_NAME}
        body = self.take_static_arms(body, scope)
        last = body[-1] if body else None
        if isinstance(last, ast.Assign) and _is_return(last) and isinstance(last.value, ast.Tuple):
            if not any(isinstance(e, ast.Starred) for e in last.value.elts):
                self.statements(body[:-1], scope, builder, liveness.reads(last.value))
                return tuple(self.argument(e, scope, builder) for e in last.value.elts)
        self.statements(body, scope, builder, live)
        found = scope.bindings.get(rewrite_ast.RETURN_NAME)
        return found

    def take_static_arms(self: Lowering, body: list[ast.stmt], scope: Scope) -> list[ast.stmt]:
        """Replace a last ``if`` whose test is known by its arm, so that its return value is seen."""
        while body and isinstance(body[-1], ast.If):
            tests_locals = liveness.reads(body[-1].test) & set(liveness.assigned(body[:-1]))
            known = NOT_KNOWN if tests_locals else scope.fold(body[-1].test)
            if isinstance(known, Missing):
                return body
            arm = body[-1].body if known else body[-1].orelse
            body = [*body[:-1], *arm]
        return body

    def argument(self: Lowering, expression: ast.expr, scope: Scope, builder: Builder) -> Any:
        """The binding of an argument, evaluated here."""
        replaced, binding = self.hoist_calls(expression, scope, builder)
        if binding is not None:
            return binding
        return self.blocks.value(replaced, scope, builder)


NOT_KNOWN = Missing()


def _is_return(statement: ast.Assign) -> bool:
    target = statement.targets[0]
    return isinstance(target, ast.Name) and target.id == rewrite_ast.RETURN_NAME


def _timeless(expression: ast.expr) -> bool:
    """Whether evaluating an expression earlier or later gives the same: a name, a constant."""
    return isinstance(expression, (ast.Name, ast.Constant))


def _children(expression: ast.expr) -> list[tuple[str, int | None, ast.expr]]:
    """Direct subexpressions in evaluation order, with the place to put another one."""
    if isinstance(expression, _LAZY):
        return []
    found: list[tuple[str, int | None, ast.expr]] = []
    if isinstance(expression, ast.Dict):
        for i, (key, value) in enumerate(zip(expression.keys, expression.values, strict=True)):
            if key is not None:
                found.append(("keys", i, key))
            found.append(("values", i, value))
        return found
    for field, value in ast.iter_fields(expression):
        if isinstance(value, ast.expr):
            found.append((field, None, value))
        elif isinstance(value, list):
            for i, item in enumerate(value):
                if isinstance(item, ast.expr):
                    found.append((field, i, item))
                elif isinstance(item, ast.keyword):
                    found.append((field, i, item.value))
    return found


def _eager_parts(expression: ast.expr) -> list[ast.expr]:
    """The expression and all its parts that are surely evaluated, once."""
    parts = [expression]
    for _, _, child in _children(expression):
        parts.extend(_eager_parts(child))
    return parts
