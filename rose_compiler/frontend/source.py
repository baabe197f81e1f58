"""A function's source as an ``ast`` tree with the line numbers of the user's file."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rose_compiler.base.errors import SourceLocation, fail


@dataclass(frozen=True)
class FunctionSource:
    """One Python function: its tree, its file and what its free names stand for.

    ``closure`` maps free variables to their cells, which are read anew whenever they are needed: a
    closure may be rebound later. ``bound`` is the object a method is bound to.
    """

    fn: types.FunctionType
    node: ast.FunctionDef
    filename: str
    bound: Any = None
    decorators: tuple[str, ...] = ()

    @property
    def globals(self) -> dict[str, Any]:
        return self.fn.__globals__

    @property
    def closure(self) -> dict[str, types.CellType]:
        return dict(zip(self.fn.__code__.co_freevars, self.fn.__closure__ or (), strict=True))

    def where(self, node: ast.AST) -> SourceLocation:
        """The place of a node in the user's file."""
        line = getattr(node, "lineno", self.node.lineno)
        return SourceLocation(self.filename, line, getattr(node, "col_offset", None))


def function_of(fn: Any) -> tuple[types.FunctionType, Any]:
    """The plain function behind a callable, and the object it is bound to.

    Raises:
        CaptureError: for what has no Python function behind it.
    """
    name = getattr(fn, "__qualname__", None) or repr(fn)
    if isinstance(fn, type):
        raise fail("capture-class", f"{name} is a class")
    if isinstance(fn, (staticmethod, classmethod)):
        fn = fn.__func__
    bound = None
    if isinstance(fn, types.MethodType):
        bound, fn = fn.__self__, fn.__func__
    if isinstance(fn, functools.partial):
        raise fail(
            "capture-not-callable",
            f"{fn!r} is a functools.partial",
            help="write a function that passes these arguments",
        )
    if isinstance(
        fn, (types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)
    ):
        raise fail("capture-builtin", f"{name} is built in")
    if not isinstance(fn, types.FunctionType):
        raise fail("capture-not-callable", f"{type(fn).__name__} object {fn!r} is no function")
    return fn, bound


def read(fn: Any) -> FunctionSource:
    """The source of a function, a bound method or a closure.

    Raises:
        CaptureError: for a builtin, lambda, class, generator or coroutine function, and for a function
            whose source can't be found or holds another function.
    """
    function, bound = function_of(fn)
    code = function.__code__
    where = SourceLocation(code.co_filename, code.co_firstlineno)
    if function.__name__ == "<lambda>":
        raise fail("capture-lambda-fn", "a lambda has no statements to compile", where=where)
    if (
        inspect.isgeneratorfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise fail(
            "capture-generator-fn",
            f"{function.__qualname__} is a generator or coroutine function",
            where=where,
        )
    node = _parse(function)
    if node is None:
        raise fail(
            "capture-no-source", f"the source of {function.__qualname__} can't be read", where=where
        )
    decorators = tuple(ast.unparse(d) for d in node.decorator_list)
    return FunctionSource(function, node, code.co_filename, bound, decorators)


@functools.lru_cache(maxsize=512)
def _parse_code(code: types.CodeType, name: str) -> ast.FunctionDef | None:
    linecache.checkcache(code.co_filename)
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        return None
    text = textwrap.dedent("".join(lines))
    indent = len(lines[0]) - len(lines[0].lstrip())
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef) or found.name != name:
        return None
    ast.increment_lineno(found, max(first, 1) - 1)
    for part in ast.walk(found):
        if hasattr(part, "col_offset"):
            part.col_offset += indent
            part.end_col_offset += indent  # type: ignore[attr-defined]
    return found


def _parse(function: types.FunctionType) -> ast.FunctionDef | None:
    return _parse_code(function.__code__, function.__name__)


_LIBRARY = tuple(
    sorted(
        {
            p
            for key in ("stdlib", "platstdlib", "purelib", "platlib")
            if (p := sysconfig.get_path(key))
        }
    )
)
_PACKAGES = ("torch", "numpy", "gymnasium", "envpool", "rose_compiler.sim", "rose_compiler.runtime")


def is_user_code(function: Callable[..., Any]) -> bool:
    """Whether inlining may enter a function: neither standard library nor an installed package.

    Torch-native simulators of :mod:`rose_compiler.sim` count as user code: their steps are plain tensor
    code, written to be inlined.
    """
    module = getattr(function, "__module__", "") or ""
    if module == "rose_compiler.sim.native":
        return True
    code = getattr(function, "__code__", None)
    if code is None or module in sys.builtin_module_names:
        return False
    if any(module == p or module.startswith(p + ".") for p in _PACKAGES):
        return False
    filename = code.co_filename
    if filename.startswith("<") and not linecache.getlines(filename):
        return False
    return (
        not any(filename.startswith(p + "/") for p in _LIBRARY) and "site-packages" not in filename
    )
