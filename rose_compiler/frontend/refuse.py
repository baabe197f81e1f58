"""Constructs that can't be compiled soundly, found before anything runs."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

from rose_compiler.base.errors import fail
from rose_compiler.frontend.source import FunctionSource

_THREADS = (
    "threading",
    "multiprocessing",
    "queue",
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
    "time_ns",
    "perf_counter_ns",
    "monotonic_ns",
}

Resolve = Callable[[ast.expr], Any]


def check(
    source: FunctionSource, resolve: Resolve, is_component: Resolve, *, inlined: bool = False
) -> None:
    """Refuse a function that holds a construct of LOOPS "refused".

    Args:
        source: the function.
        resolve: gives the live object behind an expression, or ``None``.
        is_component: whether an expression names a policy, simulator or trainer.
        inlined: whether the function is entered from another one; ``return`` in a loop then only
            keeps it from being inlined.

    Raises:
        CaptureError: naming line, construct and the way out.
    """
    _Checker(source, resolve, is_component).run()


class _Checker(ast.NodeVisitor):
    def __init__(self, source: FunctionSource, resolve: Resolve, is_component: Resolve) -> None:
        self.source = source
        self.resolve = resolve
        self.is_component = is_component
        self.loops: list[ast.For | ast.While] = []

    def run(self) -> None:
        for statement in self.source.node.body:
            self.visit(statement)

    def refuse(self, code: str, what: str, node: ast.AST) -> None:
        raise fail(code, what, where=self.source.where(node))

    def visit_Yield(self, node: ast.Yield) -> None:
        self.refuse("capture-yield", "`yield` in a compiled function", node)

    def visit_YieldFrom(self, node: ast.YieldFrom) -> None:
        self.refuse("capture-yield", "`yield from` in a compiled function", node)

    def visit_Await(self, node: ast.Await) -> None:
        self.refuse("capture-await", "`await` in a compiled function", node)

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self.refuse("capture-await", "`async for` in a compiled function", node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self.refuse("capture-await", "`async with` in a compiled function", node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.refuse("capture-lambda", "`lambda` in a compiled function", node)

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

    def visit_Try(self, node: ast.Try) -> None:
        for part in ast.walk(node):
            if isinstance(part, ast.Call) and self.is_component(part.func):
                self.refuse(
                    "capture-try-around-component",
                    f"`try` around `{ast.unparse(part.func)}(...)`",
                    node,
                )
        self.generic_visit(node)

    def visit_TryStar(self, node: ast.TryStar) -> None:
        self.visit_Try(node)  # type: ignore[arg-type]

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("__enter__", "__exit__"):
            self.refuse("capture-manual-enter", f"`{node.func.attr}` called by hand", node)
        target = self.resolve(node.func)
        if isinstance(node.func, ast.Name) and target is not None:
            name = getattr(target, "__name__", "")
            if target in (locals, vars) or name in ("locals",):
                self.refuse("capture-locals", f"`{node.func.id}()` in a compiled function", node)
            if target is exec:
                self.refuse("capture-exec", "`exec` in a compiled function", node)
            if target is eval:
                self.refuse("capture-eval", "`eval` in a compiled function", node)
        module = getattr(target, "__module__", None) or ""
        owner = getattr(getattr(target, "__self__", None), "__class__", None)
        owner_module = getattr(owner, "__module__", "") or ""
        for candidate in (module, owner_module):
            if any(candidate == m or candidate.startswith(m + ".") for m in _THREADS):
                self.refuse(
                    "capture-thread", f"`{ast.unparse(node.func)}` in a compiled function", node
                )
        self.generic_visit(node)

    def _loop(self, node: ast.For | ast.While) -> None:
        self.loops.append(node)
        for child in ast.iter_child_nodes(node):
            self.visit(child)
        self.loops.pop()

    def visit_For(self, node: ast.For) -> None:
        if isinstance(node.iter, ast.Name):
            for part in _walk(node.body):
                if mutates(part, node.iter.id):
                    self.refuse(
                        "capture-mutate-iterated",
                        f"`{node.iter.id}` is changed while the loop of line {node.lineno} "
                        "iterates over it",
                        part,
                    )
        self._loop(node)

    def visit_While(self, node: ast.While) -> None:
        self._clock_branch(node.test)
        self._loop(node)

    def visit_If(self, node: ast.If) -> None:
        self._clock_branch(node.test)
        self.generic_visit(node)

    def _clock_branch(self, test: ast.expr) -> None:
        for part in ast.walk(test):
            if isinstance(part, ast.Call):
                target = self.resolve(part.func)
                if (
                    getattr(target, "__module__", None) == "time"
                    and getattr(target, "__name__", "") in _CLOCKS
                ):
                    self.refuse(
                        "capture-wall-clock-branch", f"a branch on `{ast.unparse(part)}`", test
                    )


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


def mutates(node: ast.AST, name: str) -> bool:
    """Whether a node changes the length of the container called ``name``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return (
            isinstance(node.func.value, ast.Name)
            and node.func.value.id == name
            and node.func.attr in _MUTATORS
        )
    if isinstance(node, ast.Delete):
        return any(
            isinstance(t, ast.Subscript) and isinstance(t.value, ast.Name) and t.value.id == name
            for t in node.targets
        )
    return False


def _walk(statements: Iterable[ast.stmt]) -> Iterable[ast.AST]:
    for statement in statements:
        yield from ast.walk(statement)
