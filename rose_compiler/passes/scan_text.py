"""A recurrence as text, one statement for each value that is stored or handed on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rose_compiler.base.recurrence import Input, Recurrence

_INFIX = {
    "add": ("+", 1),
    "sub": ("-", 1),
    "mul": ("*", 2),
    "truediv": ("/", 2),
    "lt": ("<", 0),
    "le": ("<=", 0),
    "gt": (">", 0),
    "ge": (">=", 0),
    "eq": ("==", 0),
    "ne": ("!=", 0),
    "and_": ("&", 0),
    "or_": ("|", 0),
}
_HIGH = 9


def shown(of: Recurrence, arguments: Sequence[str]) -> Iterator[str]:
    """The lines; ``arguments`` are the names of the operation's arguments, carried ones first."""

    def name(one: Input) -> str:
        return ".".join((arguments[one.argument], *one.path))

    def row(source: int, offset: int) -> str:
        shift = "" if not offset else f" {'-' if offset < 0 else '+'} {abs(offset)}"
        return f"{name(of.inputs[source])}[t{shift}]"

    def text(k: int, within: int = 0) -> str:
        item = of.items[k]
        if item.kind == "number":
            return repr(item.number)
        if item.kind == "input":
            return name(of.inputs[item.source])
        if item.kind == "row":
            return row(item.source, item.offset)
        if item.kind == "carried" and item.source < of.handed:
            return arguments[item.source]
        if item.kind == "carried":
            return row(*of.seeds[item.source - of.handed])
        if item.function in _INFIX:
            sign, level = _INFIX[item.function]
            left, right = text(item.args[0], level), text(item.args[1], level + 1)
            whole = f"{left} {sign} {right}"
            return f"({whole})" if level < within else whole
        if item.function in ("neg", "invert"):
            return ("-" if item.function == "neg" else "~") + text(item.args[0], _HIGH)
        return f"{item.function.strip('_')}({', '.join(text(a) for a in item.args)})"

    yield f"for t in range({of.start}, {of.stop}, {of.step}), all at once:"
    handed = dict(zip(of.following[: of.handed], arguments, strict=False))
    for last, target in handed.items():
        yield f"    {target} = {text(last)}"
    for store in of.stores:
        value = handed.get(store.value) or text(store.value)
        yield f"    {row(store.source, store.offset)} = {value}"
