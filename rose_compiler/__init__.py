"""A compiler for embodied reinforcement learning: ``rose_compiler.compile(fn)``."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rose_compiler.api import Compiled, compile
    from rose_compiler.base.decision import Decision
    from rose_compiler.base.errors import RoseError
    from rose_compiler.base.knobs import knobs
    from rose_compiler.base.phases import phase
    from rose_compiler.base.remarks import Blocker, Remark
    from rose_compiler.frontend.declare import component, declare, loop
    from rose_compiler.passes.base import Pass
    from rose_compiler.runtime.hosts.making import hosted

# Where each public name lives. They are imported when first used: a host process imports this
# package too, and needs none of the compiler.
_PUBLIC = {
    "compile": "rose_compiler.api",
    "Compiled": "rose_compiler.api",
    "component": "rose_compiler.frontend.declare",
    "declare": "rose_compiler.frontend.declare",
    "phase": "rose_compiler.base.phases",
    "hosted": "rose_compiler.runtime.hosts.making",
    "loop": "rose_compiler.frontend.declare",
    "knobs": "rose_compiler.base.knobs",
    "Decision": "rose_compiler.base.decision",
    "RoseError": "rose_compiler.base.errors",
    "Blocker": "rose_compiler.base.remarks",
    "Remark": "rose_compiler.base.remarks",
    "Pass": "rose_compiler.passes.base",
}

__all__ = [
    "Blocker",
    "Compiled",
    "Decision",
    "Pass",
    "Remark",
    "RoseError",
    "compile",
    "component",
    "declare",
    "hosted",
    "knobs",
    "loop",
    "phase",
]


def __getattr__(name: str) -> Any:
    home = _PUBLIC.get(name)
    if home is None:
        raise AttributeError(f"module 'rose_compiler' has no attribute {name!r}")
    with _same_draws():
        value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


@contextmanager
def _same_draws() -> Iterator[None]:
    """Leave Python's and numpy's generators as they are: a library may draw when it is imported,
    and a program that has seeded them draws what it would without this package."""
    drawn, numpy = random.getstate(), sys.modules.get("numpy.random")
    kept = None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(drawn)
        if numpy is not None:
            numpy.set_state(kept)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
