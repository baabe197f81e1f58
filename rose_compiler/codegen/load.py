"""Turns emitted text into a callable whose lines tracebacks and debuggers can show."""

from __future__ import annotations

import builtins
import linecache
import symtable
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

from rose_compiler.base.errors import RoseError, fail
from rose_compiler.codegen.emit import Emitted
from rose_compiler.codegen.timed import Timer, timed


def load(
    emitted: Emitted, *, edit: str | Path | None = None, timer: Timer | None = None
) -> Callable[..., Any]:
    """Compile emitted code; its function ``run(rt, *values, *states)``.

    With ``edit``, what :func:`edited` makes of that file is compiled in its place. With ``timer``,
    statements that belong to a line of the user's report how long they took.

    Raises:
        ConfigError: when the file has no function ``run`` or can't be compiled.
    """
    if edit is not None:
        emitted = edited(emitted, edit)
    source, filename = emitted.source, emitted.filename
    namespace: dict[str, Any] = {**emitted.namespace, "__name__": f"rose_compiler.{emitted.name}"}
    if timer is not None:
        namespace |= timer.namespace()
    text = source if timer is None else timed(emitted, timer)
    try:
        exec(compile(text, filename, "exec", dont_inherit=True), namespace)
    except SyntaxError as error:
        raise _unusable(filename, f"line {error.lineno}: {error.msg}") from error
    run = namespace.get("run")
    if not isinstance(run, FunctionType):
        raise _unusable(filename, "no function `run`")
    if not emitted.edited:
        # without a time of its own, an entry stays until it is removed
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        if timer is None:
            weakref.finalize(run, linecache.cache.pop, filename, None).atexit = False
    return run


def edited(emitted: Emitted, path: str | Path) -> Emitted:
    """Emitted code with the text of a file in place of its own, in the same namespace.

    A file that does not exist yet is written with the emitted text first. A file whose first line
    says that it is a copy of another program's code is left alone: ``emitted`` itself is returned.

    Raises:
        ConfigError: when the file can't be read or written, is no Python, or uses a name that
            neither it nor the program has.
    """
    path = Path(path)
    try:
        if not path.exists():
            path.write_text(emitted.source, encoding="utf-8")
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unusable(str(path), str(error)) from error
    if copied_from(source) not in ("", emitted.name):
        return emitted
    try:
        table = symtable.symtable(source, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
        raise _unusable(str(path), line) from error
    own = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    known = {*emitted.namespace, *dir(builtins), *own}
    missing = sorted(set(_globals(table)) - known)
    if missing:
        raise _unusable(
            str(path), f"it uses {', '.join(missing)}, which the program as it is now has not"
        )
    return replace(emitted, source=source, filename=str(path), places={}, edited=True)


def copied_from(source: str) -> str:
    """The name of the program that a text was emitted for; empty where it does not say."""
    head = source.partition("\n")[0]
    if not head.startswith("# ") or "ROSE_EDIT" not in head:
        return ""
    return head[2:].partition(",")[0]


def _globals(table: symtable.SymbolTable) -> Iterator[str]:
    """The names that a text takes from its module."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals(child)


def _unusable(filename: str, found: str) -> RoseError:
    return fail(
        "config-knob",
        f"the edited code in {filename} can't be used",
        expected="the module that the compiler emitted, edited, with its function `run`",
        found=found,
        help="leave ROSE_EDIT unset to run the emitted code; a file that is not there gets a copy",
    )
