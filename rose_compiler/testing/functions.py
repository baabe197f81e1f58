"""Random small Python functions, as text, to compare their captured forms with.

The text uses what training loops use: nested loops over ranges and containers, counters, ``break``
and ``continue``, flags, branches, tuple, chained and subscript targets, attributes, helpers that
are inlined, and calls of a declared component, which make loops and branches structure.
"""

from __future__ import annotations

import itertools
import linecache
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

HEADER = """
from rose_compiler.frontend import components


def tick(log, value):
    log.append(value)
    return value + 1


components.record(tick, ["log"], ["log"])


def plain(log, value):
    log.append(-value)
    return value - 1


def early(x, y=2):
    if x > y:
        return x
    if x == y:
        z = x * 2
        return z + y
    return y


def two(x, obj):
    obj.n += 1
    a = x + obj.n
    return a, x


class Part:
    def __init__(self, items):
        self.items = items
        self.k = 0

    def touch(self, by):
        self.k += by
        if len(self.items) < 6:
            self.items.append(self.k)
        return self.k


class Thing:
    def __init__(self):
        self.n = 1
        self.items = [3, 1, 2]
        self.flag = True
        self.t = torch.zeros(4)
        self.row = self.t[1:3]
        self.parts = [Part(self.items), Part([7])]
        self.current = self.parts[0]
        self.held = None

    def bump(self, by=1):
        self.n += by
        if self.n > 5:
            self.items[0] += 1
            return self.n
        return by

    def walk(self, log, k):
        for i in range(k):
            self.n += tick(log, i)
            if self.n > 9:
                break
        return self.n


"""
NAMES = ("a", "b", "c", "d")


@st.composite
def expressions(draw: Any, depth: int = 2) -> str:
    """The text of an integer expression."""
    kinds = ["name", "constant", "item", "attribute"]
    if depth:
        kinds += ["binary", "binary", "call", "if", "method", "length", "compare", "walrus"]
    kind = draw(st.sampled_from(kinds))
    inner = expressions(depth=depth - 1) if depth else st.just("1")
    if kind == "name":
        return draw(st.sampled_from(NAMES))
    if kind == "constant":
        return str(draw(st.integers(-3, 4)))
    if kind == "item":
        return f"xs[{draw(st.sampled_from(('0', '1', '-1', 'a % 3')))}]"
    if kind == "attribute":
        return draw(st.sampled_from(("obj.n", "obj.items[1]", "obj.flag")))
    if kind == "length":
        return draw(st.sampled_from(("len(xs)", "sum(xs)", "max(xs)", "sum(v for v in xs)")))
    if kind == "walrus":
        return f"({draw(st.sampled_from(NAMES))} := {draw(inner)})"
    if kind == "if":
        return f"({draw(inner)} if {draw(inner)} > {draw(inner)} else {draw(inner)})"
    if kind == "compare":
        return f"({draw(inner)} < {draw(inner)} < {draw(inner)})"
    if kind == "call":
        call = draw(
            st.sampled_from(
                (
                    "tick(log, {})",
                    "plain(log, {})",
                    "early({})",
                    "early({}, y={})",
                    "early(y={}, x={})",
                )
            )
        )
        return str(call.format(*(draw(inner) for _ in range(call.count("{}")))))
    if kind == "method":
        return draw(st.sampled_from(("obj.bump()", f"obj.bump({draw(inner)})", "obj.walk(log, 2)")))
    op = draw(st.sampled_from(("+", "-", "*", "//", "%")))
    return f"({draw(inner)} {op} {draw(inner)})"


@st.composite
def statements(draw: Any, depth: int, loop: bool, fresh: Any) -> list[str]:
    """The lines of a few statements."""
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 4 if depth > 1 else 2))):
        lines += draw(statement(depth, loop, fresh))
    return lines


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


_SIMPLE = (
    "{n} = {e}",
    "{n} = {e}",
    "{n} += {e}",
    "{n}, {m} = {m}, {e}",
    "{n} = {m} = {e}",
    "xs[{k}] = {e}",
    "xs[{k}] += {e}",
    "obj.n = {e}",
    "obj.n -= {e}",
    "obj.items[1], {n} = {e}, {e}",
    "{n}, {m} = two({e}, obj)",
    "{n}, *rest = xs",
    "({n}, {m}), obj.flag = ({e}, {e}), {e}",
    "log.append({e})",
    "tick(log, {e})",
    "{n} = tick(log, {e})",
    "log.append(f'{{{n}}}') if {e} > 0 else log.append({e})",
    "len(xs) < 6 and xs.append({e})",
    "assert {e} < 50, 'too big'",
    "{n} = [i * {m} for i in xs][-1]",
    "obj.bump({e})",
    "del {n}",
    "pass",
    "obj.t[{k}] = {e}",
    "obj.row += {e}",
    "t[1:] += {e}",
    "t[{k}] = obj.t.sum()",
    "obj.t = obj.t + {e}",
    "{n} = int(obj.row.sum()) + int(t[0]) % 5",
    "view = t[1:]; view.mul_(2); {n} = int(t.sum()) % 7",
    "obj.held = t; obj.held[0] = {e}; {n} = int(t[0]) % 5",
    "obj.held = xs; obj.held[0] = {e}",
    "{n} = obj.current.touch({e}) % 9",
    "obj.current = obj.parts[{e} % 2]",
    "obj.parts[0].items[0] = {e}",
    "{n} = obj.parts[1].k",
    "ys = xs; ys[{k}] = {e}",
    "ys = obj.parts[0].items; ys[0] = {e}",
    "{n} = random.randint(0, 3)",
    "{n} = int(torch.randint(0, 4, (1,)))",
)


@st.composite
def statement(draw: Any, depth: int, loop: bool, fresh: Any) -> list[str]:
    """The lines of one statement."""
    kinds = ["simple"] * 4
    if depth:
        kinds += ["if", "if", "for", "for", "while", "with", "try"]
    if loop:
        kinds += ["exit"]
    kind = draw(st.sampled_from(kinds))
    body = statements(depth - 1, loop, fresh) if depth else None
    op = draw(st.sampled_from((">", "<", "==", "%")))
    test = f"{draw(expressions(depth=1))} {op} {draw(expressions(depth=0))}"
    if kind == "if":
        lines = [f"if {test}:", *_indented(draw(body))]
        if draw(st.booleans()):
            lines += ["else:", *_indented(draw(body))]
        return lines
    if kind in ("for", "while"):
        inside = draw(statements(depth - 1, True, fresh))
        return draw(_loop(kind, inside, fresh))
    if kind == "with":
        return ["with torch.no_grad():", *_indented(draw(body))]
    if kind == "try":
        safe = [
            line
            for line in draw(statements(0, False, fresh))
            if "tick" not in line and "walk" not in line
        ]
        return [
            "try:",
            *_indented(safe or ["pass"]),
            "except ZeroDivisionError as error:",
            *_indented([f"{draw(st.sampled_from(NAMES))} = len(str(error))"]),
        ]
    if kind == "exit":
        word = draw(st.sampled_from(("break", "continue")))
        return [f"if {test}:", f"    {word}"] if draw(st.integers(0, 5)) else [word]
    form = draw(st.sampled_from(_SIMPLE))
    n, m = draw(st.sampled_from(NAMES)), draw(st.sampled_from(NAMES))
    k = draw(st.sampled_from(("0", "1", "-1")))
    parts = form.split("{e}")
    text = parts[0] + "".join(draw(expressions()) + p for p in parts[1:])
    return [
        text.replace("{n}", n)
        .replace("{m}", m)
        .replace("{k}", k)
        .replace("{{", "{")
        .replace("}}", "}")
    ]


@st.composite
def _loop(draw: Any, kind: str, inside: list[str], fresh: Any) -> list[str]:
    if kind == "while":
        counter = f"w{next(fresh)}"
        head = draw(
            st.sampled_from(
                (f"{counter} < 3", f"{counter} < 2 and {draw(expressions(depth=0))} < 9")
            )
        )
        return [f"{counter} = 0", f"while {head}:", f"    {counter} += 1", *_indented(inside)]
    n = draw(st.sampled_from(NAMES))
    header = draw(
        st.sampled_from(
            (
                "range(3)",
                "range(len(xs))",
                "range(0, 5, 2)",
                "range(4, 0, -2)",
                "reversed(range(3))",
                "reversed(range(0, len(xs), 2))",
                "range(a % 4)",
                "range(b % 3, -2, -1)",
                "list(xs)",
                "[1, 2]",
                "enumerate([5, 6])",
                "zip([1, 2], [3, 4])",
            )
        )
    )
    pair = header.startswith(("enumerate", "zip"))
    target = f"{n}, {draw(st.sampled_from(NAMES))}" if pair else n
    if draw(st.integers(0, 8)) == 0 and not pair:
        target = draw(st.sampled_from(("obj.n", "xs[0]")))
        header = header.replace("xs", "obj.items")
    lines = [f"for {target} in {header}:", *_indented(inside)]
    if draw(st.integers(0, 8)) == 0 and not any("tick" in i or "walk" in i for i in inside):
        lines += ["else:", f"    {n} = 7"]
    return lines


@st.composite
def functions(draw: Any) -> str:
    """The text of a module with a function ``main(a, b, xs, log, obj, t)``."""
    fresh = itertools.count()
    body = draw(statements(3, False, fresh))
    returned = draw(st.sampled_from(("a, b", "a, b, c", "{'a': a, 'xs': xs}", "c", "obj.n")))
    start = draw(st.sampled_from(([], ["c, d = 3, -1"], ["c, d = 3, -1"], ["c = d = 0"])))
    lines = [*start, *body, f"return {returned}"]
    return (
        "import random\n\nimport torch\n"
        + HEADER
        + "def main(a, b, xs, log, obj, t):\n"
        + "\n".join(_indented(lines))
    ) + "\n"


def load(text: str, path: Path) -> types.ModuleType:
    """The module of a text, written to ``path`` so that its source can be read."""
    path.write_text(text)
    linecache.checkcache(str(path))
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def arguments(module: types.ModuleType) -> Callable[[], tuple[Any, ...]]:
    """What makes equal, fresh arguments for ``main``."""
    return lambda: (1, 2, [4, 2, 3], [], module.Thing(), torch.arange(4.0))
