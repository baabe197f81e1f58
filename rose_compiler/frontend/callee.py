"""Which calls matter, and which functions can be entered."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from typing import Any

import torch

from rose_compiler.base.errors import CaptureError
from rose_compiler.frontend import components, liveness, refuse, rewrite_ast, source
from rose_compiler.frontend.core import Core
from rose_compiler.frontend.evaluation import eager_parts
from rose_compiler.frontend.modes import undecorated
from rose_compiler.frontend.scope import Scope, Static

MAX_DEPTH = 8
#: Objects whose ``step`` advances no simulator; that of the first two trains.
TRAINERS = (
    torch.optim.Optimizer,
    torch.amp.GradScaler,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
)


class Callees(Core):
    """Questions about calls."""

    def matter_inside(self, expression: ast.expr, scope: Scope) -> bool:
        """Whether an expression surely evaluates a call that matters."""
        return any(
            isinstance(p, ast.Call) and self.matters(p, scope) for p in eager_parts(expression)
        )

    def matters(self, call: ast.Call, scope: Scope) -> bool:
        """Whether a call becomes an operation of its own or is inlined."""
        target = scope.static(call.func)
        if target is None:
            return False
        if self.steps(call, scope) or self.declared(call, scope):
            return True
        return self.inlineable(call, target.value, scope) is not None

    def steps(self, call: ast.Call, scope: Scope) -> bool:
        """Whether a call is ``env.step(...)`` of a simulator known at capture."""
        target = scope.static(call.func)
        return (
            target is not None
            and components.simulator_of_step(target.value) is not None
            and isinstance(call.func, ast.Attribute)
            and bool(call.args)
            and not call.keywords
            and not any(isinstance(a, ast.Starred) for a in call.args)
        )

    def declared(self, call: ast.Call, scope: Scope) -> bool:
        """Whether a call is one of a declared component that can be an operation of its own."""
        target = scope.static(call.func)
        return (
            target is not None
            and components.declared(target.value) is not None
            and not any(isinstance(a, ast.Starred) for a in call.args)
            and not any(k.arg is None for k in call.keywords)
        )

    def hosted(self, value: ast.expr, scope: Scope) -> bool:
        """Whether an expression is a call of a component in a host."""
        target = scope.static(value.func) if isinstance(value, ast.Call) else None
        return target is not None and components.is_hosted_call(target.value)

    def trains(self, call: ast.Call, scope: Scope) -> bool:
        """Whether a call is an optimizer's, or a scaler's for one."""
        if not isinstance(call.func, ast.Attribute):
            return False
        owner = scope.static(call.func.value)
        return (
            owner is not None
            and isinstance(owner.value, TRAINERS[:2])
            and call.func.attr in ("step", "zero_grad")
        )

    def inlineable(self, call: ast.Call, target: Any, scope: Scope) -> source.FunctionSource | None:
        """The source of a callee that can be entered here."""
        function = components.plain(target)
        if function is None or components.declared(target) is not None:
            return None
        function, _ = undecorated(function)
        if not source.is_user_code(function) or hasattr(function, "__wrapped__"):
            return None
        if len(self.inlining) > MAX_DEPTH or function.__code__ in self.inlining:
            return None
        if any(isinstance(a, ast.Starred) for a in call.args) or any(
            k.arg is None for k in call.keywords
        ):
            return None
        try:
            found = source.read(target)
        except CaptureError:  # a generator, or what can't be read, stays a call
            return None
        spec = found.node.args
        if spec.vararg or spec.kwarg or spec.posonlyargs:
            return None
        if not self._can_stand_elsewhere(found):
            return None
        if not _binds(found, call):
            return None
        return found

    def _can_stand_elsewhere(self, found: source.FunctionSource) -> bool:
        """Whether a body has one way out and holds nothing that is refused: otherwise it stays a
        call, with the effects of everything it does. So does one that does little but log in the
        name of its caller."""
        code = found.fn.__code__
        known = self._enterable.get(code)
        if known is None:
            inner = Scope(found, self.session)
            inner.locals = set(inspect.signature(found.fn).parameters)
            inner.locals |= set(liveness.assigned(found.node.body))
            known = rewrite_ast.single_exit(found.node.body) is not None
            try:
                refuse.check(found, inner.resolve, inner.resolves_to_component)
            except CaptureError as error:
                if error.code == "capture-manual-enter":
                    raise  # a mode that outlives the call reaches every later operation
                known = False
            self._enterable[code] = known  # whatever calls it in turn
            if known and _speaks_for_caller(found.node):
                calls = [p for p in ast.walk(found.node) if isinstance(p, ast.Call)]
                known = any(self.matters(p, inner) or _of_self(p, found) for p in calls)
            self._enterable[code] = known
        return known

    def structural(
        self,
        statements: Sequence[ast.stmt],
        scope: Scope,
        seen: set[Any] | None = None,
        *,
        steps: bool = False,
    ) -> bool:
        """Whether statements hold a call that the schedule cares about: a simulator's step, an
        optimizer's step or a ``backward``, also inside functions that can be entered. With
        ``steps`` only a simulator's step counts, or what may be one."""
        seen = set() if seen is None else seen
        for statement in statements:
            for part in ast.walk(statement):
                if not isinstance(part, ast.Call):
                    continue
                if isinstance(part.func, ast.Attribute):
                    if part.func.attr == "backward" and not steps:
                        return True
                    owner = scope.static(part.func.value) if steps else None
                    trains = owner is not None and isinstance(owner.value, TRAINERS)
                    if part.func.attr == "step" and steps and not trains:
                        return True
                target = scope.static(part.func)
                if target is None:
                    continue
                value = target.value
                if self.trains(part, scope):
                    if steps:
                        continue
                    return True
                if (
                    components.simulator_of_step(value) is not None
                    or components.declared(value) is not None
                ):
                    return True
                inner = self.inlineable(part, value, scope)
                if inner is None or inner.fn.__code__ in seen:
                    continue
                seen.add(inner.fn.__code__)
                inner_scope = self.scope_of(inner)
                parameters = list(inspect.signature(inner.fn).parameters)
                if inner.bound is not None:
                    owner = self.receiver(part, inner, scope)
                    if owner is not None:
                        inner_scope.bindings[parameters.pop(0)] = owner
                given = [*zip(parameters, part.args, strict=False)]
                given += [(str(k.arg), k.value) for k in part.keywords]
                for name, argument in given:
                    known = scope.static(argument)
                    if known is not None:
                        inner_scope.bindings[name] = known
                if self.structural(inner.node.body, inner_scope, seen, steps=steps):
                    return True
        return False

    def scope_of(self, inner: source.FunctionSource) -> Scope:
        """A scope in which the names of a function are its own, none bound yet."""
        made = Scope(inner, self.session)
        made.locals = set(inspect.signature(inner.fn).parameters)
        made.locals |= set(liveness.assigned(inner.node.body)) | {rewrite_ast.RETURN_NAME}
        return made

    def receiver(self, call: ast.Call, inner: source.FunctionSource, scope: Scope) -> Static | None:
        """What the first parameter of a bound method stands for."""
        target = scope.static(call.func)
        owner = scope.static(call.func.value) if isinstance(call.func, ast.Attribute) else target
        if owner is None:
            return None
        if isinstance(inner.bound, type):
            return Static(inner.bound, "")
        return self.session.static(inner.bound, owner.root, owner.path)


def _speaks_for_caller(node: ast.AST) -> bool:
    """Whether a function logs or warns in the name of who called it."""
    keywords = [k for k in ast.walk(node) if isinstance(k, ast.keyword) and k.arg == "stacklevel"]
    levels = (k.value for k in keywords)
    return any(not isinstance(v, ast.Constant) or v.value != 1 for v in levels)


def _of_self(call: ast.Call, found: source.FunctionSource) -> bool:
    """Whether a method calls another one of its object, or of what that holds."""
    of = call.func
    while isinstance(of, ast.Attribute):
        of = of.value
    first = [a.arg for a in found.node.args.args[:1] if found.bound is not None]
    return isinstance(of, ast.Name) and of.id in first


def _binds(found: source.FunctionSource, call: ast.Call) -> bool:
    """Whether the arguments fit, so that calling does not raise."""
    given: list[Any] = [None] * (len(call.args) + (found.bound is not None))
    try:
        inspect.signature(found.fn).bind(*given, **{str(k.arg): None for k in call.keywords})
    except TypeError:
        return False
    return True
