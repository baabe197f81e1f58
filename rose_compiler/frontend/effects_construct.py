"""Effects of making an object of a class of the user's."""

from __future__ import annotations

import ast
import inspect
import types
from typing import TYPE_CHECKING

from rose_compiler.frontend import effects_call, source
from rose_compiler.frontend.attributes import NOT_STATIC
from rose_compiler.frontend.effects_val import Val

if TYPE_CHECKING:
    from rose_compiler.frontend.effects_expr import ExpressionWalker as Walker


def construct(
    walker: Walker,
    node: ast.Call,
    name: str,
    cls: type,
    positional: list[Val],
    keywords: dict[str, Val],
    starred: bool,
) -> Val:
    """A new object of a class of the user's: its ``__init__`` is walked; it holds its arguments."""
    held = frozenset(p for v in (*positional, *keywords.values()) for p in v.all_places)
    made = Val(held, NOT_STATIC, cls)
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        items = tuple(positional) if not keywords and not starred else None
        return Val(held if items is None else frozenset(), NOT_STATIC, cls, items=items)
    init = inspect.getattr_static(cls, "__init__", None)
    if type(cls) is not type or inspect.getattr_static(cls, "__new__", None) is not _OBJECT_NEW:
        return walker.unknown(f"`{name}`", node)
    if isinstance(init, types.FunctionType):
        if source.tree(init) is None and hasattr(cls, "__dataclass_fields__"):
            after = inspect.getattr_static(cls, "__post_init__", None)
            if after is None:
                return made
            return walker.unknown(f"`{name}` (its `__post_init__`)", node)
        effects_call.user_call(
            walker, node, name, init, Val(type=cls), positional, keywords, starred, True
        )
        return made
    return made if init is object.__init__ else walker.unknown(f"`{name}`", node)


_OBJECT_NEW = inspect.getattr_static(object, "__new__")
