"""Factories, calls and exceptions as bytes.

cloudpickle carries functions and classes of the caller's ``__main__`` by value and gives a class
that comes back its old identity, so that ``except MyError`` matches an exception of a worker.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from rose_compiler.base.errors import RoseError, RuntimeFault, SourceLocation, fail, register

register(
    "host-exception",
    RuntimeFault,
    "an exception raised in a host process can't be carried over to the caller",
    "make the exception picklable: pass all constructor arguments on to `super().__init__`",
)
register(
    "host-pickle",
    RuntimeFault,
    "an argument or a result of a call to a host process can't be pickled",
    "pass plain data (numbers, arrays, dicts), or keep the component in a thread host",
)

_DEPTH = 8


def dump_factory(factory: Callable[[], Any], name: str) -> bytes:
    """Pickle a component's factory.

    Raises ``FactoryError`` that names the captured variable which can't be pickled.
    """
    try:
        return bytes(cloudpickle.dumps(factory))
    except Exception as error:
        raise _factory_error(factory, name, error) from error


def dump_call(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Pickle a call. Raises ``RuntimeFault`` if an argument can't be pickled."""
    try:
        return bytes(cloudpickle.dumps((method, args, kwargs)))
    except Exception as error:
        raise unpicklable_argument(method, error) from error


def unpicklable_argument(method: str, error: Exception) -> RoseError:
    """The error of an argument that can't travel."""
    return fail("host-pickle", f"an argument of {method}() can't be pickled: {_brief(error)}")


def dump_result(method: str, value: Any) -> bytes:
    """Pickle a result, by reference where possible. Raises ``RuntimeFault`` if it can't be."""
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:  # a class's `__reduce__` may raise anything; cloudpickle has the last word
        try:
            return bytes(cloudpickle.dumps(value))
        except Exception as error:
            raise unpicklable_result(method, value, error) from error


def unpicklable_result(method: str, value: Any, error: Exception) -> RoseError:
    """The error of a result that can't travel."""
    what = f"the result of {method}(), a {_type_name(value)}, can't be pickled: {_brief(error)}"
    return fail("host-pickle", what)


def dump_exception(error: BaseException) -> bytes:
    """An exception with its formatted traceback; without the object where it can't be pickled."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        blob = bytes(cloudpickle.dumps(error))
    except Exception:  # what it holds may raise anything; its text travels all the same
        blob = b""
    return pickle.dumps((blob, _type_name(error), _brief(error), text))


def load_exception(payload: bytes, name: str, pid: int) -> BaseException:
    """The exception that a worker sent, its traceback there added as a note."""
    blob, kind, brief, text = pickle.loads(payload)
    error: BaseException
    try:
        error = pickle.loads(blob)
    except Exception:
        # many exceptions pickle well and fail to unpickle, their __init__ wanting more arguments
        error = fail(
            "host-exception",
            f"{kind} was raised in the host {name!r} and can't be pickled",
            found=brief,
        )
    error.add_note(f"raised in the host {name!r} (process {pid}):\n{text}")
    return error


def _type_name(value: object) -> str:
    kind = type(value)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return module + kind.__qualname__


def _brief(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _factory_error(factory: object, name: str, error: Exception) -> RoseError:
    culprit = _culprit(factory)
    where = None
    if culprit is None:
        what = f"the factory of {name!r} can't be pickled: {_brief(error)}"
    else:
        holder, path, value = culprit
        what = f"the factory of {name!r} can't be pickled: {path} is a {_type_name(value)}"
        if holder is not None:
            code = holder.__code__
            where = SourceLocation(code.co_filename, code.co_firstlineno)
            what = (
                f"the factory of {name!r} can't be pickled: {path} of {holder.__qualname__} "
                f"is a {_type_name(value)}"
            )
    return fail("host-factory-pickle", what, where=where, found=_brief(error))


def _culprit(factory: object) -> tuple[types.FunctionType | None, str, object] | None:
    """The innermost captured thing that can't be pickled: (function around it, name, value)."""
    holder: types.FunctionType | None = None
    path = ""
    value = factory
    for _ in range(_DEPTH):
        for kind, name, inner in _parts(value):
            if _pickles(inner):
                continue
            if isinstance(value, types.FunctionType | functools.partial):
                holder, path = value if isinstance(value, types.FunctionType) else None, ""
            if not path:
                path = f"{kind} {name!r}" if kind else name
            elif name:
                path += name if name.startswith("[") else f".{name}"
            value = inner
            break
        else:
            break
    return (holder, path, value) if path else None


def _parts(value: object) -> Iterator[tuple[str, str, object]]:
    """What a pickle of ``value`` would hold: (what it is, its name, the object)."""
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield "captured variable", name, cell.cell_contents
            except ValueError:  # the variable is not bound yet
                continue
        for name in inspect.getclosurevars(value).globals:
            yield "global variable", name, value.__globals__[name]
        signature = value.__code__.co_varnames[: value.__code__.co_argcount]
        defaults = value.__defaults__ or ()
        for name, inner in zip(signature[len(signature) - len(defaults) :], defaults, strict=True):
            yield "default of parameter", name, inner
        for name, inner in (value.__kwdefaults__ or {}).items():
            yield "default of parameter", name, inner
    elif isinstance(value, types.MethodType):
        yield "", "", value.__self__
        yield "", "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", "", value.func
        for i, inner in enumerate(value.args):
            yield "partial argument", str(i), inner
        for name, inner in value.keywords.items():
            yield "partial argument", name, inner
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield "", f"[{key!r}]", inner
    elif isinstance(value, list | tuple | set | frozenset):
        for i, inner in enumerate(value):
            yield "", f"[{i}]", inner
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(
        value, type | types.ModuleType
    ):
        for name, inner in vars(value).items():
            yield "attribute", name, inner


def _pickles(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # whatever it raises is what is looked for
        return False
    return True
