"""Effects of calls whose author declared them."""

from __future__ import annotations

import ast
import types
from typing import TYPE_CHECKING, Any

from rose_compiler.frontend import components
from rose_compiler.frontend.effects_val import FRESH, Val
from rose_compiler.ir.effects import GLOBAL_STATES

if TYPE_CHECKING:
    from rose_compiler.frontend.effects_expr import ExpressionWalker as Walker


def declared_call(
    walker: Walker,
    node: ast.AST,
    target: Any,
    declared: components.Declaration,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
) -> Val:
    """A call whose author stated its effects."""
    if declared is components.HOSTED:
        return _hosted_call(walker, receiver, [*positional, *keywords.values()])
    names = components.declared_names(target)
    owner = getattr(target, "__self__", None)
    bound = owner is not None and not isinstance(owner, types.ModuleType)
    values = (
        dict(zip(names, [receiver, *positional] if bound else positional, strict=False)) | keywords
    )
    values |= {f"arg{k}": v for k, v in enumerate(positional) if f"arg{k}" not in values}
    walker.out.calls.add("declared")
    walker.out.may_raise = True
    for write, entries in ((False, declared.reads), (True, declared.writes)):
        if entries is None:
            return walker.unknown(
                f"`{target.__name__}` (its declaration leaves effects open)", node
            )
        for text in entries:
            for entry in _declared_entries(walker, text, values):
                (walker.out.writes if write else walker.out.reads).setdefault(entry)
                if write:
                    walker.out.deep.add(entry)
    if components.simulator_of_step(target) is not None:
        walker.out.calls.add("step")
        return FRESH  # what it may overwrite later is said of steps in general
    places = frozenset(p for v in values.values() for p in v.all_places)
    return Val(places)


def _hosted_call(walker: Walker, receiver: Val, given: list[Val]) -> Val:
    """A call of a component in a host: it reads what it is given and changes the component."""
    walker.out.calls.add("declared")
    walker.out.may_raise = True
    for value in (receiver, *given):
        for place in value.all_places:
            walker.out.reads.setdefault(place)
    for place in receiver.all_places:
        walker.out.writes.setdefault(place)
        walker.out.deep.add(place)
    if getattr(receiver.obj, "hosts", "") != "process":
        # it lives in this process, whose generators and output are its own too
        for state in GLOBAL_STATES:
            walker.out.reads.setdefault(state)
            walker.out.writes.setdefault(state)
    return FRESH  # results are copied out of the host's memory


def _declared_entries(walker: Walker, text: str, values: dict[str, Val]) -> list[str]:
    """A declared entry in terms of the operation's own parameters."""
    if text.startswith("rng:") or text in ("host", "*"):
        return [text]
    head, bracket, index = text.partition("[")
    root, _, path = head.partition(".")
    value = values.get(root, FRESH)
    found = []
    for place in value.all_places:
        axes = [_declared_axis(a.strip(), values) for a in index.rstrip("]").split(",")]
        region = f"[{', '.join(axes)}]" if bracket and any(a != ":" for a in axes) else ""
        below = f".{path}" if path else ""
        if "[" in place or place not in value.places:  # an index says nothing of a view
            region = ""
        found.append(place + below + region)
    return found


def _declared_axis(text: str, values: dict[str, Val]) -> str:
    if text.isdigit():
        return text
    value = values.get(text)
    return value.index if value is not None and value.index else ":"
