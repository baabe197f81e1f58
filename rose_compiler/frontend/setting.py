"""How code sets attributes by name, and which names that may be."""

from __future__ import annotations

import ast
import dis
import functools
import types
from collections.abc import Iterable, Iterator

from rose_compiler.frontend import source

SETTERS = frozenset(("setattr", "delattr", "__setattr__", "__delattr__"))
#: Names that lead to all attributes of an object where code looks something up by them, and what
#: runs text.
ANY = frozenset((*SETTERS, "__dict__", "exec", "eval"))
#: What finds a method by its name.
FINDERS = frozenset(("getattr", "attrgetter", "methodcaller", "getattr_static", "__getattribute__"))
_BORN = frozenset(("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__"))
#: Methods and functions that leave the attributes that they are handed as they are.
_READS = frozenset(("get", "items", "keys", "values", "copy", "__contains__", "__getitem__"))
_READERS = frozenset(
    """dict list tuple set frozenset sorted len str repr print iter enumerate zip any all isinstance
    id type dumps pprint pformat deepcopy""".split()  # noqa: SIM905
)
_LITERALS = (ast.Tuple, ast.List, ast.Set)


def parents_of(node: ast.AST) -> dict[ast.AST, ast.AST]:
    """The node around each one below."""
    return {child: each for each in ast.walk(node) for child in ast.iter_child_nodes(each)}


def is_namespace(part: ast.AST) -> bool:
    """Whether an expression is all attributes of an object, or all globals, as a dict."""
    if isinstance(part, ast.Attribute):
        return part.attr == "__dict__" and isinstance(part.ctx, ast.Load)
    called = part.func if isinstance(part, ast.Call) else None
    return isinstance(called, ast.Name) and called.id in ("vars", "globals", "locals")


def owner_of(space: ast.expr) -> ast.expr:
    """Whose attributes a namespace has; the expression itself where that is the module."""
    if isinstance(space, ast.Attribute):
        return space.value
    assert isinstance(space, ast.Call)
    return space.args[0] if space.args else space


def stored_in(space: ast.AST, parents: dict[ast.AST, ast.AST]) -> list[str] | None:
    """The names that code may store under in a namespace which it uses so: none where it only
    reads, ``None`` where they can't be told."""
    if isinstance(space, ast.Call) and getattr(space.func, "id", "") == "locals":
        return []
    around = parents.get(space)
    if isinstance(around, ast.Subscript) and around.value is space:
        if isinstance(around.ctx, ast.Load):
            return []
        key = around.slice
        return [key.value] if isinstance(key, ast.Constant) and type(key.value) is str else None
    if isinstance(around, ast.Attribute):
        return [] if around.attr in _READS else None
    if isinstance(around, ast.Call) and around.func is not space:
        called = around.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return [] if name in _READERS else None
    if isinstance(around, ast.For | ast.comprehension) and around.iter is space:
        return []
    if isinstance(around, ast.keyword) and around.arg is None:
        return []
    return [] if isinstance(around, ast.Compare | ast.Dict | ast.FormattedValue) else None


def names_of(part: ast.expr, node: ast.AST) -> list[str] | None:
    """The names that an expression of a function may stand for; ``None`` if that is not known.

    A variable stands for what is written out where it is bound: in a loop over literals, say.
    """
    if isinstance(part, ast.Constant):
        return [part.value] if isinstance(part.value, str) else None
    if isinstance(part, ast.IfExp):
        return _all([names_of(part.body, node), names_of(part.orelse, node)])
    if not isinstance(part, ast.Name):
        return None
    known: list[list[str] | None] = []
    bound = 0
    for each in ast.walk(node):
        if isinstance(each, ast.For | ast.comprehension):
            if _binds(each.target, part.id):
                known.append(_gone_through(each.target, each.iter, part.id))
        elif isinstance(each, ast.Assign) and _is(each.targets, part.id):
            value = each.value
            known.append(None if isinstance(value, ast.Name) else names_of(value, node))
        elif isinstance(each, ast.arg) and each.arg == part.id:
            return None
        elif isinstance(each, ast.Name) and each.id == part.id:
            bound += isinstance(each.ctx, ast.Store)
    return _all(known) if known and len(known) == bound else None


def _all(parts: Iterable[list[str] | None]) -> list[str] | None:
    found: list[str] = []
    for part in parts:
        if part is None:
            return None
        found += part
    return found


def _is(targets: list[ast.expr], name: str) -> bool:
    return len(targets) == 1 and isinstance(targets[0], ast.Name) and targets[0].id == name


def _binds(target: ast.expr, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(target))


def _gone_through(target: ast.expr, over: ast.expr, name: str) -> list[str] | None:
    """The names among the items of a literal that a variable of a loop stands for."""
    called = over.func if isinstance(over, ast.Call) else None
    if isinstance(called, ast.Attribute) and called.attr == "items":
        if not isinstance(target, ast.Tuple) or not isinstance(called.value, ast.Dict):
            return None
        over, target = called.value, target.elts[0]
    items: list[ast.expr | None] = []
    if isinstance(over, ast.Dict):
        items = [*over.keys]
    elif isinstance(over, _LITERALS):
        items = [*over.elts]
    if isinstance(target, ast.Tuple):
        places = [n for n, e in enumerate(target.elts) if isinstance(e, ast.Name) and e.id == name]
        if len(places) != 1:
            return None
        rows = [e.elts if isinstance(e, ast.Tuple | ast.List) else [] for e in items]
        items = [row[places[0]] if len(row) > places[0] else None for row in rows]
    elif not isinstance(target, ast.Name):
        return None
    texts = [e.value for e in items if isinstance(e, ast.Constant) and isinstance(e.value, str)]
    return texts if texts and len(texts) == len(items) else None


@functools.lru_cache(maxsize=1024)
def inherited(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """The names that methods of the libraries' classes below one of the user's mention, and those
    that they store under once an object is made."""
    mentioned: set[str] = set()
    stored: set[str] = set()
    for base in cls.__mro__:
        package = (base.__module__ or "").partition(".")[0]
        if source.is_user_type(base) or package in ("builtins", "abc", "typing", "enum"):
            continue
        for name, raw in list(vars(base).items()):
            for code in _codes(raw):
                mentioned.update(code.co_names)
                if name not in _BORN:
                    stored.update(_stored(code))
    return frozenset(mentioned), frozenset(stored)


def _codes(raw: object) -> Iterator[types.CodeType]:
    held = [raw]
    if isinstance(raw, property):
        held = [raw.fget, raw.fset, raw.fdel]
    for each in held:
        function = getattr(each, "__func__", getattr(each, "func", each))
        while function is not None:
            code = getattr(function, "__code__", None)
            if isinstance(code, types.CodeType):
                yield code
            function = getattr(function, "__wrapped__", None)


def _stored(code: types.CodeType) -> Iterator[str]:
    for at in dis.get_instructions(code):
        if at.opname in ("STORE_ATTR", "DELETE_ATTR"):
            yield at.argval
