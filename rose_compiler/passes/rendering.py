"""Simulators that render: their contexts belong to the thread that made them.

A renderer of OpenGL (MuJoCo's, for one) makes its context current on the thread of the first frame,
and draws nothing, garbage or an error on another one. Frames may be made in a step or a reset
(`RecordVideo`, pixels as observations). So such a simulator stays on the coordinator, but for one
whose environments live in hosts or processes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir.deps import Dependences, place, title
from rose_compiler.ir.interp import resolve
from rose_compiler.ir.program import Program

_ABSENT = object()
#: Modes that make text, or nothing.
_NO_FRAMES = (None, "ansi")


def why_bound(nodes: Sequence[fx.Node], deps: Dependences) -> Blocker | None:
    """Why operations, which may step, reset or render a simulator, run on one thread alone."""
    known: dict[str, bool] = {}
    for node in nodes:
        for effect in deps.effects(node):
            if effect.state not in known:
                known[effect.state] = renders(deps.program, effect.state)
            if known[effect.state]:
                return Blocker(
                    "opaque-call",
                    f"{title(node)} uses {effect.state}, which renders: its context belongs to the "
                    "thread that made it",
                    'a simulator in a host of its own (`ShardedEnv(..., hosts="process")`), or '
                    "`render_mode=None`",
                    where=(at,) if (at := place(node)) else (),
                )
    return None


def renders(program: Program, state: str) -> bool:
    """Whether a state is, or lies in, a simulator that makes frames where it is called."""
    root, *parts = state.split(".")
    found: Any = program.objects.get(root)
    if _makes_frames(found):
        return True
    for part in parts:
        try:
            found = resolve(found, part)
        except Exception:  # whatever a class of the user's raises
            return False
        if _makes_frames(found):
            return True
    return False


def _makes_frames(env: Any) -> bool:
    if isinstance(env, type) or not callable(_attribute(env, "step")):
        return False
    if (
        _attribute(env, "native_async") is True
        or _attribute(env, "processes", _ABSENT) is not _ABSENT
    ):
        return False
    inner = _attribute(env, "envs")
    each = (env, *(inner if isinstance(inner, list | tuple) else ()))
    return any(_attribute(e, "render_mode") not in _NO_FRAMES for e in each)


def _attribute(value: Any, name: str, other: Any = None) -> Any:
    """An attribute, or ``other``: a class of the user's may raise whatever it likes for one that it
    does not know."""
    try:
        return getattr(value, name, other)
    except Exception:
        return other
