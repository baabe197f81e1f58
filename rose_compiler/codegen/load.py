"""Turns emitted text into a callable whose lines tracebacks and debuggers can show."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from rose_compiler.base.errors import fail
from rose_compiler.codegen.emit import Emitted


def load(emitted: Emitted, *, edit: str | Path | None = None) -> Callable[..., Any]:
    """Compile emitted code; its function ``run(rt, *values, *states)``.

    With ``edit``, the text of that file is compiled in its place, with the same namespace; a file
    that does not exist yet is written with the emitted text first.

    Raises:
        ConfigError: when the file has no function ``run`` or can't be compiled.
    """
    source, filename = emitted.source, emitted.filename
    if edit is not None:
        path = Path(edit)
        if not path.exists():
            path.write_text(source, encoding="utf-8")
        source, filename = path.read_text(encoding="utf-8"), str(path)
    namespace: dict[str, Any] = {**emitted.namespace, "__name__": f"rose_compiler.{emitted.name}"}
    try:
        exec(compile(source, filename, "exec", dont_inherit=True), namespace)
    except SyntaxError as error:
        raise _unusable(filename, f"line {error.lineno}: {error.msg}") from error
    run = namespace.get("run")
    if not isinstance(run, FunctionType):
        raise _unusable(filename, "no function `run`")
    if edit is None:
        # without a time of its own, an entry stays until it is removed
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        weakref.finalize(run, linecache.cache.pop, filename, None).atexit = False
    return run


def _unusable(filename: str, found: str) -> Exception:
    return fail(
        "config-knob",
        f"the edited code in {filename} can't be used",
        expected="the module that the compiler emitted, edited, with its function `run`",
        found=found,
        help="leave ROSE_EDIT unset to run the emitted code; a file that is not there gets a copy",
    )
