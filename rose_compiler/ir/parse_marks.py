"""Marks of a dump, read from syntax trees: ``call(...) @ lane("sim", order=3) @ facts(...)``."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from rose_compiler.base.errors import nearest
from rose_compiler.ir.contexts import CONTEXTS
from rose_compiler.ir.facts import REGION, Context, LoopFacts, Slot
from rose_compiler.ir.parse_expr import Expressions, Reader, is_strings

_KINDS = ("lane", "facts", "under", "loop", "index")


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda found: type(found) is kind


_FACTS: dict[str, Callable[[Any], bool]] = {
    "alias": is_strings,
    "borrowed": _is(bool),
    "maybe_unbound": _is(bool),
    "note": _is(str),
}
_SLOT: dict[str, Callable[[Any], bool]] = {"stage": _is(int), "order": _is(int)}
_LOOP: dict[str, Callable[[Any], bool]] = {
    "kind": lambda found: found in ("range", "iter", "while"),
    "label": _is(str),
    "index": _is(str),
    "wrapper": _is(str),
    "threads": _is(int),
    "has_exit": _is(bool),
}


def read_context(expr: ast.expr, reader: Reader) -> Context:
    """``no_grad()``, ``autocast("cpu", torch.bfloat16)`` and the like."""
    if not (isinstance(expr, ast.Call) and isinstance(expr.func, ast.Name)):
        raise reader.error(expr, "a context must read `name(arguments)`")
    if expr.func.id not in CONTEXTS:
        raise reader.error(
            expr,
            f"unknown context {expr.func.id!r}{nearest(expr.func.id, CONTEXTS)}",
            code="parse-unknown-name",
        )
    args, words = Expressions(reader).arguments(expr)
    region = words.pop(REGION, 0)
    if type(region) is not int or region < 0:
        raise reader.error(expr, "the number of a region is a whole one", found=repr(region))
    return Context(expr.func.id, (*args, *words.items()), region)


@dataclass
class Marks:
    """The marks behind one expression, by kind."""

    reader: Reader
    calls: dict[str, ast.Call] = field(default_factory=dict)

    def facts(self, context: tuple[Context, ...], allowed: tuple[str, ...]) -> dict[str, Any]:
        """What they say about a node, as arguments of :func:`facts.put`; ``context`` is the one
        that holds where it stands. Kinds outside ``allowed`` are errors."""
        for kind, call in self.calls.items():
            if kind not in allowed:
                raise self.reader.error(call, f"the mark {kind!r} can't stand here")
        found: dict[str, Any] = self._facts("facts")
        if "under" in self.calls:
            call = self.calls["under"]
            if call.keywords:
                raise self.reader.error(call, "`under` takes contexts only")
            context += tuple(read_context(a, self.reader) for a in call.args)
        if context:
            found["context"] = context
        if "lane" in self.calls:
            call = self.calls["lane"]
            lane = "" if not call.args else Expressions(self.reader).constant(call.args[0])
            if len(call.args) > 1 or type(lane) is not str:
                raise self.reader.error(call, "`lane` takes one name")
            found["slot"] = Slot(lane, **self._words(call, _SLOT))
        return found

    def index(self) -> dict[str, Any]:
        """What they say about the index of a loop."""
        return self._facts("index")

    def loop(self, default: LoopFacts) -> LoopFacts:
        """What they say about a loop, on top of what its header shows."""
        call = self.calls.get("loop")
        if call is None:
            return default
        if call.args:
            raise self.reader.error(call, "`loop` takes keywords only")
        return replace(default, **self._words(call, _LOOP))

    def _facts(self, kind: str) -> dict[str, Any]:
        call = self.calls.get(kind)
        return {} if call is None else read_facts(call, self.reader)

    def _words(self, call: ast.Call, known: dict[str, Callable[[Any], bool]]) -> dict[str, Any]:
        return read_words(call, known, self.reader)


def read_words(
    call: ast.Call, known: dict[str, Callable[[Any], bool]], reader: Reader
) -> dict[str, Any]:
    """The keyword arguments of a mark, checked."""
    found: dict[str, Any] = {}
    for word in call.keywords:
        name = word.arg
        if name is None or name in found or name not in known:
            raise reader.error(call, f"unknown argument {name!r}{nearest(str(name), known)}")
        found[name] = Expressions(reader).constant(word.value)
        if not known[name](found[name]):
            raise reader.error(call, f"{name}= has a wrong value", found=repr(found[name]))
    return found


def read_facts(
    call: ast.Call, reader: Reader, more: dict[str, Callable[[Any], bool]] | None = None
) -> dict[str, Any]:
    """``facts(alias=[...], borrowed=True, note="...")`` as arguments of :func:`facts.put`."""
    if call.args:
        raise reader.error(call, "`facts` takes keywords only")
    found = read_words(call, _FACTS | (more or {}), reader)
    if "alias" in found:
        found["alias"] = tuple(found["alias"])
    return found


def parameter_facts(arg: ast.arg, reader: Reader, role: str) -> dict[str, Any]:
    """What the annotation of a parameter of the program says about it."""
    note = arg.annotation
    found: dict[str, Any] = {"state": arg.arg} if role == "state" else {}
    if note is None:
        return found
    if not (
        isinstance(note, ast.Call) and isinstance(note.func, ast.Name) and note.func.id == "facts"
    ):
        raise reader.error(arg, "an annotation of a parameter must read `facts(...)`")
    more = {"state": _is(str)} if role == "state" else {}
    return found | read_facts(note, reader, more)


def split_marks(expr: ast.expr, reader: Reader) -> tuple[ast.expr, Marks]:
    """An expression without the marks behind it, and the marks."""
    marks = Marks(reader)
    while isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.MatMult):
        mark = expr.right
        if not (
            isinstance(mark, ast.Call)
            and isinstance(mark.func, ast.Name)
            and mark.func.id in _KINDS
            and mark.func.id not in marks.calls
        ):
            raise reader.error(
                mark, "behind `@` stands a mark, each once", expected=", ".join(_KINDS)
            )
        marks.calls[mark.func.id] = mark
        expr = expr.left
    return expr, marks
