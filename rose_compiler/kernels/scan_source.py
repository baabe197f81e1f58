"""The C text of a recurrence: one function that runs every trip, a block of columns at a time.

Each item of a trip becomes one statement, in the order and with the roundings of the loop. The
carried values of a block stay in the first-level cache while all trips go over it, so buffers are
read and written once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rose_compiler.base.recurrence import LOGIC, SAME, Recurrence, Type

#: Columns whose carried values are held at a time.
BLOCK = 1024

_C_TYPES = {
    "float32": "float",
    "float64": "double",
    "bool": "unsigned char",
    "uint8": "unsigned char",
    "int8": "signed char",
    "int16": "short",
    "int32": "int",
    "int64": "long long",
}
_INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "and_": "&",
    "or_": "|",
}


@dataclass(frozen=True)
class Layout:
    """How the arguments of one recurrence lie in memory.

    ``dtype`` is that of the recurrence, ``kinds`` the type of each item. ``rows`` are the types of
    elements of the inputs, by position, that rows are read from or stored to. ``fixed`` says of
    each item that is the same on all trips whether it is one number (false) or one a column (true).
    """

    dtype: str
    kinds: tuple[Type, ...]
    rows: tuple[tuple[int, str], ...]
    fixed: tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class Text:
    """The C text, and what the function is handed: inputs with rows, items by column, items that
    are numbers, each in this order."""

    source: str
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    numbers: tuple[int, ...]


@lru_cache(maxsize=256)
def text(of: Recurrence, layout: Layout) -> Text | None:
    """What to compile; ``None`` where a function has no form in C with the bits of torch.

    The function is ``run(rows, strides, columns, numbers, first, last, start, step, trips, size)``:
    pointers to inputs with rows and the distance of their rows in elements, pointers to values by
    column, numbers as doubles, pointers to carried values in front and behind.
    """
    if any(t not in _C_TYPES for _, t in layout.rows) or not _forms(of, layout):
        return None
    own = _C_TYPES[layout.dtype]
    whole = "int" if own == "float" else "long long"  # truth values as wide as the numbers
    fixed = dict(layout.fixed)
    types = dict(layout.rows)
    rows = tuple(sorted(types))
    columns = tuple(k for k, by_column in layout.fixed if by_column)
    numbers = tuple(k for k, by_column in layout.fixed if not by_column)
    carried = range(len(of.following))

    def c_type(k: int) -> str:
        return whole if layout.kinds[k] == "bool" else own

    lines = [
        "void run(char *const *rows, const long *strides, char *const *columns,",
        "         const double *numbers, char *const *first, char *const *last,",
        "         long start, long step, long trips, long size) {",
        *(f"  {own} c{j}[{BLOCK}];" for j in carried),
        *(f"  const {c_type(k)} v{k} = ({c_type(k)})numbers[{n}];" for n, k in enumerate(numbers)),
        f"  for (long b = 0; b < size; b += {BLOCK}) {{",
        f"    const long m = size - b < {BLOCK} ? size - b : {BLOCK};",
    ]
    for n, k in enumerate(columns):
        held = "unsigned char" if layout.kinds[k] == "bool" else own
        lines.append(f"    const {held} *q{k} = (const {held} *)columns[{n}] + b;")
    for j in carried:
        lines.append(f"    for (long i = 0; i < m; i++) c{j}[i] = (({own} *)first[{j}])[b + i];")
    lines += ["    for (long k = 0; k < trips; k++) {", "      const long t = start + k * step;"]
    places = {(i.source, i.offset) for i in of.items if i.kind == "row"}
    places |= {(s.source, s.offset) for s in of.stores}
    for source, offset in sorted(places):
        n, held = rows.index(source), _C_TYPES[types[source]]
        at = f"({held} *)rows[{n}] + (t + {offset}) * strides[{n}] + b"
        lines.append(f"      {held} *{_place(source, offset)} = {at};")
    # no two trips of the inner loop touch the same memory: what is stored is read nowhere else
    lines += [
        "#if defined(__clang__)",
        "#pragma clang loop vectorize(assume_safety)",
        "#else",
        "#pragma GCC ivdep",
        "#endif",
        "      for (long i = 0; i < m; i++) {",
    ]
    for k, item in enumerate(of.items):
        if k in fixed:
            if fixed[k]:
                lines.append(f"        const {c_type(k)} v{k} = q{k}[i];")
            continue
        if item.kind == "row":
            kept = _C_TYPES[types[item.source]] if layout.kinds[k] == "other" else c_type(k)
            lines.append(f"        const {kept} v{k} = {_place(item.source, item.offset)}[i];")
        elif item.kind == "carried":
            lines.append(f"        const {own} v{k} = c{item.source}[i];")
        elif item.kind == "call" and layout.kinds[k] != "other":
            made = _call(item.function, item.args, layout, own)
            lines.append(f"        const {c_type(k)} v{k} = {made};")
    lines += [f"        {_place(s.source, s.offset)}[i] = v{s.value};" for s in of.stores]
    lines += [f"        c{j}[i] = v{k};" for j, k in enumerate(of.following)]
    lines += ["      }", "    }"]
    for j in range(of.handed):
        lines.append(f"    for (long i = 0; i < m; i++) (({own} *)last[{j}])[b + i] = c{j}[i];")
    lines += ["  }", "}", ""]
    return Text("\n".join(lines), rows, columns, numbers)


def _place(source: int, offset: int) -> str:
    return f"r{source}_{offset}" if offset >= 0 else f"r{source}_m{-offset}"


def _forms(of: Recurrence, layout: Layout) -> bool:
    """Whether every function that is left has a form here.

    ``maximum`` and ``minimum`` have none: which zero torch returns of two hangs on the place. Nor
    have ``exp``, ``sqrt`` and their like, whose last bits are those of torch's own library.
    """
    fixed = dict(layout.fixed)
    for k, item in enumerate(of.items):
        if layout.kinds[k] == "other" and (k in fixed or item.kind == "call"):
            return False
        if item.kind != "call" or k in fixed:
            continue
        if item.function in ("clamp_min", "clamp_max"):
            if layout.kinds[item.args[1]] != "number":
                return False
        elif item.function not in (*_INFIX, *SAME, *LOGIC, "neg", "where", "float"):
            return False
    return True


def _call(function: str, args: tuple[int, ...], layout: Layout, own: str) -> str:
    names = [f"v{a}" for a in args]
    if function == "truediv" and layout.kinds[args[0]] == "number":
        # torch divides a number by a tensor as the product with the reciprocal
        return f"(({own})1 / {names[1]}) * {names[0]}"
    if function in _INFIX:
        return f"{names[0]} {_INFIX[function]} {names[1]}"
    if function == "invert":
        return f"{names[0]} ^ 1"
    if function == "neg":
        return f"-{names[0]}"
    if function == "where":
        return f"{names[0]} ? {names[1]} : {names[2]}"
    if function == "float":
        return f"({own}){names[0]}"
    if function in SAME:
        return names[0]
    x, bound = names
    sign = "<" if function == "clamp_min" else ">"
    # of equals torch returns x; a missing bound makes every value a missing one
    return f"{x} != {x} ? {x} : ({bound} != {bound} || {x} {sign} {bound}) ? {bound} : {x}"
