"""Constructs that can't be compiled soundly, found before anything runs."""

from __future__ import annotations

import ast
import datetime
import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from rose_compiler.base.errors import fail
from rose_compiler.frontend import liveness
from rose_compiler.frontend.kept import kept, seen_later
from rose_compiler.frontend.source import FunctionSource

_THREADS = (
    "threading",
    "_thread",
    "multiprocessing",
    "queue",
    "_queue",
    "concurrent.futures",
    "asyncio",
    "torch.multiprocessing",
    "subprocess",
)
_CLOCKS = {
    "time",
    "monotonic",
    "perf_counter",
    "process_time",
    "thread_time",
    "time_ns",
    "perf_counter_ns",
    "monotonic_ns",
    "process_time_ns",
}
_FRAMES = (locals, sys._getframe, inspect.currentframe, inspect.stack)

#: What calls a function that it is handed before it returns, and what takes all items of an
#: iterator that calls one.
_CALLING = (max, min, sorted, functools.reduce)
_TAKING = (list, tuple, set, dict, sum, max, min, sorted, any, all)

Resolve = Callable[[ast.expr], Any]


def check(source: FunctionSource, resolve: Resolve, is_component: Resolve) -> None:
    """Refuse a function that holds a construct which can't be compiled soundly.

    Args:
        source: the function.
        resolve: gives the live object behind an expression, or ``None``.
        is_component: whether an expression names a policy, simulator or trainer.

    Raises:
        CaptureError: naming line, construct and the way out.
    """
    _Checker(source, resolve, is_component).run()


class _Checker(ast.NodeVisitor):
    def __init__(self, source: FunctionSource, resolve: Resolve, is_component: Resolve) -> None:
        self.source = source
        self._resolve = resolve
        self.is_component = is_component
        self.imported = _imported(source.node)
        self.loops: list[ast.For | ast.While] = []
        self.timed = self._timed_names()
        self.kept = {id(node): rebound for node, rebound in kept(source.node)}
        #: variables of the function, and the lambdas that are called while their statement runs
        self.variables = set(liveness.assigned(source.node.body)) | {
            a.arg for a in ast.walk(source.node.args) if isinstance(a, ast.arg)
        }
        self.called_at_once = {
            id(found)
            for call in ast.walk(source.node)
            if isinstance(call, ast.Call)
            for found in self._called_by(call)
        }

    def run(self) -> None:
        for statement in self.source.node.body:
            self.visit(statement)

    def resolve(self, expression: ast.expr) -> Any:
        """The live object behind an expression, or ``None``; what the function imports included."""
        if isinstance(expression, ast.Name) and expression.id in self.imported:
            return self.imported[expression.id]
        if isinstance(expression, ast.Attribute):
            owner = expression.value
            while isinstance(owner, ast.Attribute):
                owner = owner.value
            if isinstance(owner, ast.Name) and owner.id in self.imported:
                return getattr(self.resolve(expression.value), expression.attr, None)
        return self._resolve(expression)

    def refuse(self, code: str, what: str, node: ast.AST) -> None:
        raise fail(code, what, where=self.source.where(node))

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """One that is called while its statement runs is part of that statement; so may be one that
        takes no variable of the function, which then is as good as one defined outside."""
        odd = ast.NamedExpr | ast.Yield | ast.YieldFrom | ast.Await
        if any(isinstance(part, odd) for part in ast.walk(node)):
            self.refuse("capture-lambda", "a `lambda` that binds or yields in", node)
        taken = liveness.reads(node) & self.variables
        if taken and id(node) not in self.called_at_once:
            what = f"a `lambda` that may be kept, and reads `{min(taken)}` when it is called,"
            self.refuse("capture-lambda", f"{what} in a compiled function", node)
        self.generic_visit(node)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        if names := seen_later(node) & self.kept.get(id(node), set()):
            what = f"a generator that is kept, and reads `{min(names)}` when its items are taken,"
            self.refuse("capture-lambda", f"{what} in a compiled function", node)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.refuse("capture-nested-def", f"`def {node.name}` in a compiled function", node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.refuse("capture-nested-def", f"`async def {node.name}` in a compiled function", node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.refuse("capture-nested-def", f"`class {node.name}` in a compiled function", node)

    def visit_Global(self, node: ast.Global) -> None:
        self.refuse("capture-global", f"`global {', '.join(node.names)}`", node)

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self.refuse("capture-nonlocal", f"`nonlocal {', '.join(node.names)}`", node)

    def visit_Return(self, node: ast.Return) -> None:
        if self.loops:
            self.refuse("capture-return-in-loop", "`return` inside a loop", node)
        self.generic_visit(node)

    def visit_Try(self, node: ast.Try | ast.TryStar) -> None:
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and self.is_component(part.func):
                what = f"`try` around `{ast.unparse(part.func)}(...)`"
                self.refuse("capture-try-around-component", what, node)
        self.generic_visit(node)

    def visit_TryStar(self, node: ast.TryStar) -> None:
        self.visit_Try(node)

    def _called_by(self, call: ast.Call) -> list[ast.expr]:
        """The lambdas that a call calls before it returns."""
        target = self.resolve(call.func)
        given = [*call.args, *(k.value for k in call.keywords)]
        found: list[ast.expr] = []
        if any(target is f for f in _TAKING):  # all items, of an iterator too
            for value in given:
                if isinstance(value, ast.Call) and self.resolve(value.func) in (map, filter):
                    found += value.args[:1]
        sorts = isinstance(call.func, ast.Attribute) and call.func.attr == "sort"
        maps = _in_modules(target, ("torch.utils._pytree",))
        if sorts or maps or any(target is f for f in _CALLING):
            found += given
        return [value for value in found if isinstance(value, ast.Lambda)]

    # -- calls ---------------------------------------------------------------------------------

    def visit_Call(self, node: ast.Call) -> None:
        called = ast.unparse(node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("__enter__", "__exit__"):
            self.refuse("capture-manual-enter", f"`{called}` called by hand", node)
        target = self.resolve(node.func)
        bare_vars = target is vars and not node.args
        if any(target is f for f in _FRAMES) or bare_vars:
            self.refuse("capture-locals", f"`{called}()` in a compiled function", node)
        if target is exec:
            self.refuse("capture-exec", "`exec` in a compiled function", node)
        if target is eval:
            self.refuse("capture-eval", "`eval` in a compiled function", node)
        if _in_modules(target, _THREADS):
            self.refuse("capture-thread", f"`{called}` in a compiled function", node)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call) and self.resolve(call.func) is torch.set_grad_enabled:
            what = f"`{ast.unparse(call)}` without `with`: the mode outlives the statement"
            self.refuse("capture-manual-enter", what, node)
        self.generic_visit(node)

    # -- loops ---------------------------------------------------------------------------------

    def _loop(self, node: ast.For | ast.While) -> None:
        self.loops.append(node)
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        self.loops.pop()

    def visit_For(self, node: ast.For) -> None:
        for container in _iterated(node.iter):
            for part in _walk(node.body):
                if mutates(part, container):
                    self.refuse(
                        "capture-mutate-iterated",
                        f"`{container}` is changed while the loop of line {node.lineno} "
                        "iterates over it",
                        part,
                    )
        self._loop(node)

    def visit_While(self, node: ast.While) -> None:
        self._clock_branch(node.test)
        self._loop(node)

    # -- the wall clock ------------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> None:
        self._clock_branch(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._clock_branch(node.test)
        self.generic_visit(node)

    def _clock_branch(self, test: ast.expr) -> None:
        for part in ast.walk(test):
            is_name = isinstance(part, ast.Name) and part.id in self.timed
            if is_name or self._is_clock(part):
                what = f"a branch on the clock, by `{ast.unparse(part)}`"
                self.refuse("capture-wall-clock-branch", what, test)

    def _is_clock(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        target = self.resolve(node.func)
        name = getattr(target, "__name__", "")
        if getattr(target, "__module__", None) == "time":
            return name in _CLOCKS
        owner = getattr(target, "__self__", None)
        # by identity: an array compares its elements
        of_dates = owner is datetime.datetime or owner is datetime.date
        return of_dates and name in ("now", "utcnow", "today")

    def _timed_names(self) -> set[str]:
        """Variables whose value hangs on the clock."""
        timed: set[str] = set()
        before = -1
        while len(timed) != before:
            before = len(timed)
            for part in ast.walk(self.source.node):
                if not isinstance(part, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                    continue
                value = part.value
                if value is None:
                    continue
                if any(self._is_clock(p) for p in ast.walk(value)) or liveness.reads(value) & timed:
                    timed |= _plain_targets(part)
        return timed


def _imported(function: ast.FunctionDef) -> dict[str, Any]:
    """What names that a function imports stand for, of what is loaded already."""
    found: dict[str, Any] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Import):
            for alias in node.names:
                full = alias.name if alias.asname else alias.name.split(".")[0]
                found[alias.asname or full] = sys.modules.get(full)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            module = sys.modules.get(node.module or "")
            for alias in node.names:
                found[alias.asname or alias.name] = getattr(module, alias.name, None)
    return {name: value for name, value in found.items() if value is not None}


def _plain_targets(node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _in_modules(target: Any, modules: tuple[str, ...]) -> bool:
    """Whether a callable, or the object that it is a method of, comes from one of the modules."""
    owner = type(getattr(target, "__self__", None))
    for found in (getattr(target, "__module__", None), getattr(owner, "__module__", None)):
        name = found if isinstance(found, str) else ""
        if any(name == m or name.startswith(m + ".") for m in modules):
            return True
    return False


_MUTATORS = {
    "append",
    "extend",
    "insert",
    "remove",
    "pop",
    "popitem",
    "clear",
    "update",
    "add",
    "discard",
    "setdefault",
    "appendleft",
    "popleft",
}
_THROUGH = ("enumerate", "zip", "reversed", "iter")
_VIEWS = ("items", "keys", "values")


def _iterated(expression: ast.expr) -> list[str]:
    """The containers that a loop iterates over, as they are written: names and attribute paths."""
    if isinstance(expression, (ast.Name, ast.Attribute)):
        return [ast.unparse(expression)]
    if not isinstance(expression, ast.Call):
        return []
    function = expression.func
    if isinstance(function, ast.Name) and function.id in _THROUGH:
        return [c for a in expression.args for c in _iterated(a)]
    if isinstance(function, ast.Attribute) and function.attr in _VIEWS and not expression.args:
        return _iterated(function.value)
    return []


def mutates(node: ast.AST, container: str) -> bool:
    """Whether a node changes the length of the container that is written so."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _MUTATORS and ast.unparse(node.func.value) == container
    if isinstance(node, ast.Delete):
        return any(
            isinstance(t, ast.Subscript) and ast.unparse(t.value) == container for t in node.targets
        )
    return False


def _walk(statements: Iterable[ast.stmt]) -> Iterable[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)
