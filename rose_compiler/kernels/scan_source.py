"""The C text of recurrences: one function that runs every trip, a block of columns at a time.

Each item of a trip becomes one statement, in the order and with the roundings of the loop. The
carried values of a block stay in the first-level cache while all trips go over it, so buffers are
read and written once. Blocks are shared out among threads.
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


#: A recurrence and how its arguments lie.
Part = tuple[Recurrence, Layout]


@dataclass(frozen=True)
class Places:
    """What the function is handed for one part: inputs with rows, items by column, items that are
    numbers, each in this order."""

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """The C text, and what the function is handed, part by part."""

    source: str
    parts: tuple[Places, ...]


_HEAD = """\
typedef struct {
  const long *given; const double *numbers;
  long size, block, next; unsigned mode;
} job;
typedef void (*fork_t)(void (*)(void *), void *, unsigned, unsigned);
static void work(void *given) {
  job *const j = given;
  const double *const numbers = j->numbers;
#ifdef __SSE__
  const unsigned before = __builtin_ia32_stmxcsr();
  if (before != j->mode) __builtin_ia32_ldmxcsr(j->mode);
#endif
"""
_TAIL = """\
#ifdef __SSE__
  if (before != j->mode) __builtin_ia32_ldmxcsr(before);
#endif
}
void run(const long *given, const double *numbers, long size, long block, unsigned threads,
         fork_t fork) {
  job j = {given, numbers, size, block, 0, 0};
#ifdef __SSE__
  j.mode = __builtin_ia32_stmxcsr();
  if (threads > 1) { fork(work, &j, threads, 0); return; }
#endif
  work(&j);
}
"""


@lru_cache(maxsize=256)
def text(parts: tuple[Part, ...]) -> Text | None:
    """What to compile for recurrences that go on from one another; ``None`` where a function has
    no form in C with the bits of torch.

    The function is ``run(given, numbers, size, block, threads, fork)``. ``given`` are addresses of
    inputs with rows and the distances of their rows in elements, addresses of values by column,
    all of them part by part, addresses of carried values in front and behind, and start, step and
    trips of each part; ``numbers`` are doubles. Blocks of ``block`` columns, :data:`BLOCK` at most,
    are taken by as many threads, which ``fork`` starts as OpenMP's ``GOMP_parallel`` does; all
    compute in the caller's mode of rounding and of subnormal numbers.
    """
    for of, layout in parts:
        if any(t not in _C_TYPES for _, t in layout.rows) or not _forms(of, layout):
            return None
    (first, layout), (last, _) = parts[0], parts[-1]
    own = _C_TYPES[layout.dtype]
    made = [_arrays(layout) for _, layout in parts]
    count = {name: sum(len(getattr(p, name)) for p in made) for name in ("rows", "columns")}
    lines = []
    at = 0
    for name, length in (
        *(("rows", count["rows"]), ("strides", count["rows"]), ("columns", count["columns"])),
        *(("first", last.handed), ("last", last.handed), ("spans", 0)),
    ):
        lines.append(f"  const long *const {name} = j->given + {at};")
        at += length
    lines += [f"  {own} c{j}[{BLOCK}];" for j in range(last.handed)]
    lines += [
        "  for (;;) {",
        "    const long b = __atomic_fetch_add(&j->next, j->block, __ATOMIC_RELAXED);",
        "    if (b >= j->size) break;",
        "    const long m = j->size - b < j->block ? j->size - b : j->block;",
    ]
    for k in sorted({i.source for i in first.items if i.kind == "carried"} - _seeded(first)):
        lines.append(f"    for (long i = 0; i < m; i++) c{k}[i] = (({own} *)first[{k}])[b + i];")
    for n, (of, layout) in enumerate(parts):
        body = _part(of, layout, own, n, made[: n + 1])
        lines += ["    {", *(f"      {line}" for line in body), "    }"]
    for k in range(last.handed):
        lines.append(f"    for (long i = 0; i < m; i++) (({own} *)last[{k}])[b + i] = c{k}[i];")
    lines.append("  }")
    return Text(_HEAD + "\n".join(lines) + "\n" + _TAIL, tuple(made))


def _seeded(of: Recurrence) -> set[int]:
    return set(range(of.handed, len(of.following)))


def _arrays(layout: Layout) -> Places:
    """What the function is handed for one part."""
    return Places(
        tuple(sorted(dict(layout.rows))),
        tuple(k for k, by_column in layout.fixed if by_column),
        tuple(k for k, by_column in layout.fixed if not by_column),
    )


def _part(of: Recurrence, layout: Layout, own: str, number: int, places: list[Places]) -> list[str]:
    """The trips of one part over a block of columns; what it is handed comes behind what those
    before it are."""
    *before, mine = places
    at = [sum(len(getattr(p, f)) for p in before) for f in ("rows", "columns", "numbers")]
    whole = "int" if own == "float" else "long long"  # truth values as wide as the numbers
    fixed, types = dict(layout.fixed), dict(layout.rows)

    def c_type(k: int) -> str:
        return whole if layout.kinds[k] == "bool" else own

    def row(source: int, offset: int) -> str:
        n = at[0] + mine.rows.index(source)
        return f"({_C_TYPES[types[source]]} *)rows[{n}] + (t + {offset}) * strides[{n}] + b"

    start, step, trips = (f"spans[{3 * number + k}]" for k in range(3))
    lines = []
    for n, k in enumerate(mine.numbers):
        lines.append(f"const {c_type(k)} v{k} = ({c_type(k)})numbers[{at[2] + n}];")
    for n, k in enumerate(mine.columns):
        held = "unsigned char" if layout.kinds[k] == "bool" else own
        lines.append(f"const {held} *q{k} = (const {held} *)columns[{at[1] + n}] + b;")
    for k in sorted(_seeded(of)):
        source, offset = of.seeds[k - of.handed]
        lines += [
            f"{own} c{k}[{BLOCK}];",
            f"{{ const long t = {start}; const {own} *s = {row(source, offset)};",
            f"  for (long i = 0; i < m; i++) c{k}[i] = s[i]; }}",
        ]
    lines.append(f"for (long k = 0; k < {trips}; k++) {{")
    lines.append(f"  const long t = {start} + k * {step};")
    touched = {(i.source, i.offset) for i in of.items if i.kind == "row"}
    touched |= {(s.source, s.offset) for s in of.stores}
    for source, offset in sorted(touched):
        held = _C_TYPES[types[source]]
        lines.append(f"  {held} *{_place(source, offset)} = {row(source, offset)};")
    # no two trips of the inner loop touch the same memory: what is stored is read nowhere else
    lines += [
        "#if defined(__clang__)",
        "#pragma clang loop vectorize(assume_safety)",
        "#else",
        "#pragma GCC ivdep",
        "#endif",
        "  for (long i = 0; i < m; i++) {",
    ]
    for k, item in enumerate(of.items):
        if k in fixed:
            if fixed[k]:
                lines.append(f"    const {c_type(k)} v{k} = q{k}[i];")
            continue
        if item.kind == "row":
            kept = _C_TYPES[types[item.source]] if layout.kinds[k] == "other" else c_type(k)
            lines.append(f"    const {kept} v{k} = {_place(item.source, item.offset)}[i];")
        elif item.kind == "carried":
            lines.append(f"    const {own} v{k} = c{item.source}[i];")
        elif item.kind == "call" and layout.kinds[k] != "other":
            computed = _call(item.function, item.args, layout, own, of.arrays)
            lines.append(f"    const {c_type(k)} v{k} = {computed};")
    lines += [f"    {_place(s.source, s.offset)}[i] = v{s.value};" for s in of.stores]
    lines += [f"    c{j}[i] = v{k};" for j, k in enumerate(of.following)]
    lines += ["  }", "}"]
    return lines


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


def _call(function: str, args: tuple[int, ...], layout: Layout, own: str, arrays: bool) -> str:
    names = [f"v{a}" for a in args]
    if function == "truediv" and layout.kinds[args[0]] == "number" and not arrays:
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
