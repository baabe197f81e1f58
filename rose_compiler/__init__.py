"""A compiler for embodied reinforcement learning: ``rose_compiler.compile(fn)``."""

from __future__ import annotations

import importlib
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
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
