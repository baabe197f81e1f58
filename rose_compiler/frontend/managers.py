"""Context managers that the user wrote as generators: ``@contextmanager`` functions.

The statements in front of the ``yield`` stand in front of the body, those behind it behind; a
``finally`` around it is done behind the body too, and by whoever runs the program where an
exception leaves it (:mod:`rose_compiler.base.regions`).
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rose_compiler.base.errors import CaptureError
from rose_compiler.base.regions import Region
from rose_compiler.frontend import liveness, refuse, rewrite_ast, source
from rose_compiler.frontend.scope import Scope
from rose_compiler.ir.block import make_block_function
from rose_compiler.ir.program import Builder

if TYPE_CHECKING:
    from rose_compiler.frontend.calls import CallLowering

#: What `contextmanager` puts around a generator function.
_HELPER = contextlib.contextmanager(iter).__code__
_SUSPENDS = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Return)


@dataclass(frozen=True)
class Manager:
    """The generator function behind a context manager, cut at its ``yield``.

    ``first`` is done on the way in, ``value`` is what ``as`` binds, ``last`` is done on the way out
    if the body did not raise, ``always`` behind that and if it did.
    """

    source: source.FunctionSource
    first: list[ast.stmt]
    value: ast.expr | None
    last: list[ast.stmt]
    always: list[ast.stmt]
    after: list[ast.stmt]


def manager_of(call: ast.expr, scope: Scope) -> Manager | None:
    """What a call makes, if it is such a context manager that can be seen through."""
    if not isinstance(call, ast.Call) or any(k.arg is None for k in call.keywords):
        return None
    target = scope.static(call.func)
    if target is None or any(isinstance(a, ast.Starred) for a in call.args):
        return None
    helper: Any = target.value
    bound = None
    if isinstance(helper, types.MethodType):
        helper, bound = helper.__func__, helper.__self__
    if not isinstance(helper, types.FunctionType) or helper.__code__ is not _HELPER:
        return None
    function = helper.__dict__.get("__wrapped__")
    if not isinstance(function, types.FunctionType) or not source.is_user_code(function):
        return None
    node = source.tree(function)
    if not isinstance(node, ast.FunctionDef) or not _fits(function, bound, call, node):
        return None
    found = source.FunctionSource(function, node, function.__code__.co_filename, bound)
    inner = Scope(found, scope.session)
    inner.locals = set(inspect.signature(function).parameters)
    inner.locals |= set(liveness.assigned(node.body))
    try:
        refuse.check(found, inner.resolve, inner.resolves_to_component)
    except CaptureError:
        return None
    return _cut(found)


def _fits(function: types.FunctionType, bound: Any, call: ast.Call, node: ast.FunctionDef) -> bool:
    spec = node.args
    if spec.vararg or spec.kwarg or spec.posonlyargs:
        return False
    given = [None] * (len(call.args) + (bound is not None))
    try:
        inspect.signature(function).bind(*given, **{str(k.arg): None for k in call.keywords})
    except TypeError:
        return False
    return sum(isinstance(n, _SUSPENDS) for n in ast.walk(node)) == 1


def _cut(found: source.FunctionSource) -> Manager | None:
    """The parts of a generator function with one ``yield`` that is a statement of its own."""
    body = found.node.body
    for position, statement in enumerate(body):
        first, rest = body[:position], body[position + 1 :]
        if (value := _yields(statement)) is not None:
            return Manager(found, first, value.value, rest, [], [])
        plain = isinstance(statement, ast.Try) and not statement.handlers and not statement.orelse
        if not plain or (value := _yields(statement.body[0])) is None:  # type: ignore[attr-defined]
            continue
        last, always = statement.body[1:], statement.finalbody  # type: ignore[attr-defined]
        surely = set(inspect.signature(found.fn).parameters)
        for each in first:
            surely |= liveness.definitely_assigned(each)
        wanted = liveness.live_in(always, set()) & set(liveness.assigned(body))
        moved = set(liveness.assigned(last)) | liveness.deleted(first)
        if wanted <= surely and wanted.isdisjoint(moved):
            return Manager(found, first, value.value, last, always, rest)
    return None


def _yields(statement: ast.stmt) -> ast.Yield | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Yield):
        return statement.value
    return None


def lower(
    lowering: CallLowering,
    manager: Manager,
    item: ast.withitem,
    body: Callable[[], None],
    scope: Scope,
    builder: Builder,
) -> None:
    """The statement that enters ``manager``, with ``body`` in the middle."""
    call = item.context_expr
    assert isinstance(call, ast.Call)
    inner = manager.source
    new = lowering.scope_of(inner)
    new.source = prepared = lowering.prepared(inner, new)
    if prepared.node is not inner.node:
        found = _cut(prepared)
        assert found is not None
        manager = found
    new.bindings.update(lowering.arguments_of(call, inner, scope, builder))

    def inside(statements: Sequence[ast.stmt], live: set[str]) -> None:
        chain = lowering.inline_chain
        lowering.inline_chain = (*chain, scope.source.where(call))
        lowering.inlining.append(inner.fn.__code__)
        try:
            lowering.statements(list(statements), new, builder, live)
        finally:
            lowering.inlining.pop()
            lowering.inline_chain = chain

    behind = [*manager.last, *manager.always, *manager.after]
    value = manager.value if item.optional_vars is not None else None
    reads = liveness.reads(manager.value) if manager.value is not None else set()
    inside(manager.first, liveness.live_in(behind, set()) | reads)
    if isinstance(item.optional_vars, ast.Name):
        bound = None if value is None else lowering.argument(value, new, builder)
        scope.bindings[item.optional_vars.id] = bound
    elif manager.value is not None:
        lowering.argument(manager.value, new, builder)
    region = _open(lowering, manager, new, builder) if manager.always else ""
    body()
    inside(manager.last, liveness.live_in([*manager.always, *manager.after], set()))
    if region:
        _call(region, "close", [], manager.always[0], new, builder, lowering)
        new.bindings.pop(region)
    inside(manager.always, liveness.live_in(manager.after, set()))
    inside(manager.after, set())


def _open(lowering: CallLowering, manager: Manager, scope: Scope, builder: Builder) -> str:
    """Have the ``finally`` done where an exception leaves the body; the region's name."""
    names = sorted(liveness.live_in(manager.always, set()))
    names = [n for n in names if n in scope.bindings or n in scope.source.closure]
    last = make_block_function(
        "last",
        tuple(manager.always),
        tuple(names),
        (),
        scope.source.filename,
        scope.source.globals,
        maybe_unbound=(),
        owner=scope.source.owner,
        within=scope.source.fn.__code__,
    )
    region = scope.fresh("region")
    made = Region(last)
    lowering.session.regions.append(made)
    scope.bindings[region] = lowering.session.root(region, made)
    _call(region, "open", names, manager.always[0], scope, builder, lowering)
    return region


def _call(
    region: str,
    method: str,
    names: list[str],
    like: ast.stmt,
    scope: Scope,
    builder: Builder,
    lowering: CallLowering,
) -> None:
    function = ast.Attribute(rewrite_ast.name(region, like), method, ast.Load())
    call = ast.Call(function, [rewrite_ast.name(n, like) for n in names], [])
    statement = ast.fix_missing_locations(ast.copy_location(ast.Expr(call), like))
    lowering.blocks.emit([statement], scope, builder, set())
