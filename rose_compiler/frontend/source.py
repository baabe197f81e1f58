"""A function's source as an ``ast`` tree with the line numbers of the user's file."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import reprlib
import sys
import sysconfig
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rose_compiler.base.errors import SourceLocation, fail
from rose_compiler.frontend.modes import undecorated
from rose_compiler.ir.block import is_made
from rose_compiler.ir.facts import Context


@dataclass(frozen=True)
class FunctionSource:
    """One Python function: its tree, its file and what its free names stand for.

    ``closure`` maps free variables to their cells, which are read anew whenever they are needed: a
    closure may be rebound later. ``bound`` is the object a method is bound to, ``contexts`` are the
    modes that decorators like ``@torch.no_grad()`` put around the body.
    """

    fn: types.FunctionType
    node: ast.FunctionDef
    filename: str
    bound: Any = None
    contexts: tuple[Context, ...] = ()

    @property
    def globals(self) -> dict[str, Any]:
        return self.fn.__globals__

    @property
    def closure(self) -> dict[str, types.CellType]:
        return dict(zip(self.fn.__code__.co_freevars, self.fn.__closure__ or (), strict=True))

    @property
    def owner(self) -> str | None:
        """The class that the function was defined in, which mangles names like ``__x``."""
        parts = self.fn.__qualname__.split(".")
        return parts[-2] if len(parts) > 1 and parts[-2] != "<locals>" else None

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
        raise fail("capture-class", f"{name} is a class", where=_where_defined(fn))
    if isinstance(fn, (staticmethod, classmethod)):
        fn = fn.__func__
    bound = None
    if isinstance(fn, types.MethodType):
        bound, fn = fn.__self__, fn.__func__
    if isinstance(fn, functools.partial):
        raise fail(
            "capture-not-callable",
            f"a functools.partial of {getattr(fn.func, '__name__', 'a callable')!r} is no function",
            help="write a function that passes these arguments",
        )
    if isinstance(
        fn, (types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType)
    ):
        raise fail("capture-builtin", f"{name} is built in")
    if not isinstance(fn, types.FunctionType):
        article = "an" if type(fn).__name__[:1].lower() in "aeiou" else "a"
        raise fail(
            "capture-not-callable",
            f"{article} {type(fn).__name__} is no function",
            expected="a Python function, a bound method or a closure",
            found=reprlib.repr(fn) if isinstance(fn, str | int | float | types.NoneType) else None,
            help="compile one of its methods: `rose_compiler.compile(x.method)`"
            if callable(fn)
            else None,
        )
    return fn, bound


def _where_defined(cls: type) -> SourceLocation | None:
    try:
        return SourceLocation(inspect.getfile(cls), inspect.getsourcelines(cls)[1])
    except (OSError, TypeError):
        return None


def read(fn: Any) -> FunctionSource:
    """The source of a function, a bound method or a closure.

    Raises:
        CaptureError: for a builtin, lambda, class, generator or coroutine function, and for a
            function whose source can't be found.
    """
    function, bound = function_of(fn)
    function, contexts = undecorated(function)
    code = function.__code__
    where = SourceLocation(code.co_filename, code.co_firstlineno)
    if function.__name__ == "<lambda>":
        raise fail("capture-lambda-fn", "a lambda has no statements to compile", where=where)
    if (
        inspect.isgeneratorfunction(function)
        or inspect.iscoroutinefunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        suspends = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)
        found = tree(function)
        parts = [] if found is None else [p for p in ast.walk(found) if isinstance(p, suspends)]
        if parts:
            first = min(parts, key=lambda p: p.lineno)
            where = SourceLocation(code.co_filename, first.lineno, first.col_offset)
        what = f"{function.__qualname__} is a generator or coroutine function"
        raise fail("capture-generator-fn", what, where=where)
    node = tree(function)
    if not isinstance(node, ast.FunctionDef):
        raise fail(
            "capture-no-source", f"the source of {function.__qualname__} can't be read", where=where
        )
    return FunctionSource(function, node, code.co_filename, bound, contexts)


@functools.lru_cache(maxsize=2048)
def _parse_code(code: types.CodeType, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    linecache.checkcache(code.co_filename)
    try:
        lines, first = inspect.getsourcelines(code)
    except (OSError, TypeError):
        return None
    # a block around it, instead of less indentation: the text in strings stays as it is
    indented = lines[0][:1].isspace()
    text = ("if True:\n" if indented else "") + "".join(lines)
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    found = tree.body[0]
    if indented and isinstance(found, ast.If):
        found = found.body[0]
    if not isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef)) or found.name != name:
        return None
    ast.increment_lineno(found, max(first, 1) - (2 if indented else 1))
    return found


def tree(function: types.FunctionType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The tree of a plain function; ``None`` if its source can't be read."""
    if is_made(function):
        return None
    # not by its __name__: functools.wraps gives a wrapper the name of what it wraps
    return _parse_code(function.__code__, function.__code__.co_name)


_LIBRARY = tuple(
    sorted(
        {
            p
            for key in ("stdlib", "platstdlib", "purelib", "platlib")
            if (p := sysconfig.get_path(key))
        }
    )
)
#: All of this package but what tests compile: it may lie in a clone, beside the user's own code.
_OWN = ("api", "base", "codegen", "frontend", "ir", "kernels", "passes", "runtime", "sim", "tune")
_PACKAGES = ("torch", "numpy", "gymnasium", "envpool", *(f"rose_compiler.{p}" for p in _OWN))
# plain tensor code, written to be inlined
_INLINED = "rose_compiler.sim.torch_envs"


def is_user_code(function: Callable[..., Any]) -> bool:
    """Whether inlining may enter a function: neither standard library nor an installed package.

    Torch-native simulators of :mod:`rose_compiler.sim` count as user code.
    """
    module = getattr(function, "__module__", "") or ""
    if module == _INLINED:
        return True
    code = getattr(function, "__code__", None)
    if code is None or module in sys.builtin_module_names:
        return False
    # functools.wraps gives a wrapper of a library's the module of the user's function
    return not _in_packages(module) and not _is_library_file(code.co_filename)


def is_user_type(cls: type) -> bool:
    """Whether a class was written by the user."""
    return _is_user_type(cls)


@functools.lru_cache(maxsize=4096)
def _is_user_type(cls: Any) -> bool:
    module = cls.__module__ or ""
    if module == _INLINED:
        return True
    if module in sys.builtin_module_names or module == "builtins" or _in_packages(module):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or not _is_library_file(file)


def is_user_module(module: types.ModuleType) -> bool:
    """Whether a module was written by the user."""
    file = getattr(module, "__file__", None)
    return file is not None and not _in_packages(module.__name__) and not _is_library_file(file)


def _in_packages(module: str) -> bool:
    return any(module == p or module.startswith(p + ".") for p in _PACKAGES)


def _is_library_file(filename: str) -> bool:
    if filename.startswith("<") and not linecache.getlines(filename):
        return True
    return (
        any(filename.startswith(p + "/") for p in _LIBRARY)
        or "site-packages" in filename
        or "<frozen" in filename
    )


def arguments(spec: ast.arguments) -> tuple[ast.arg, ...]:
    """All parameters of a function."""
    more = (spec.vararg, spec.kwarg)
    given = (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)
    return (*given, *(a for a in more if a is not None))
