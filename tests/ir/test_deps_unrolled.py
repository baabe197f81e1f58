"""Dependences of random programs against the pairs that an unrolled run finds in conflict."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, is_call


@dataclass
class Op:
    """One operation of a random body: accesses as (write, state, index or None)."""

    accesses: list[tuple[bool, str, tuple[int, int] | None]]
    uses: list[int]  # earlier operations, or carried values as -1, -2
    alloc: bool = False


@dataclass
class Body:
    start: int
    step: int
    trips: int
    ops: list[Op]
    nexts: list[int] = field(default_factory=list)
    factor: int = 1

    def values(self) -> range:
        return range(self.start, self.start + self.step * self.trips, self.step)


FLAT = ["s", "s.a", "s.b", "s.a.c", "r", "host", "rng:torch"]
INDEXED = ["q", "w"]


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    step = draw(st.sampled_from([1, 1, 2, -1, -2]))
    trips = draw(st.integers(1, 4))
    start = draw(st.integers(2, 5)) + (0 if step > 0 else -step * (trips - 1))
    factor = draw(st.sampled_from([1, 1, 2]))
    count = draw(st.integers(1, 5))
    ops: list[Op] = []
    for n in range(count):
        accesses: list[tuple[bool, str, tuple[int, int] | None]] = []
        for _ in range(draw(st.integers(0, 3))):
            write = draw(st.booleans())
            if draw(st.booleans()):
                accesses.append((write, draw(st.sampled_from(FLAT)), None))
            else:
                # one kind of index an axis and state: a shift of the loop's index, or a constant
                index = (draw(st.integers(-2, 2)), draw(st.integers(0, 1)))
                state = draw(st.sampled_from(INDEXED))
                accesses.append((write, state, draw(st.sampled_from([index, index, None]))))
        allocs = [k for k, op in enumerate(ops) if op.alloc]
        if allocs and draw(st.booleans()):
            accesses.append((draw(st.booleans()), f"%{draw(st.sampled_from(allocs))}", None))
        if draw(st.integers(0, 9)) == 0:
            accesses.append((True, "*", None))
        uses = draw(st.lists(st.integers(-2, n - 1), max_size=2, unique=True))
        ops.append(Op(accesses, uses, alloc=draw(st.integers(0, 4)) == 0))
    nexts = [draw(st.integers(-2, count - 1)) for _ in range(2)]
    # what is handed on must not be an instance, which would no longer be private
    nexts = [-1 if k >= 0 and ops[k].alloc else k for k in nexts]
    for op in ops:
        op.uses = [k for k in op.uses if k < 0 or not ops[k].alloc]
    return Body(start, step, trips, ops, nexts, factor)


def text_of(body: Body) -> str:
    lines = []
    roots = ["s", "r", "q", "w"]
    for n, op in enumerate(body.ops):
        entries: dict[bool, list[str]] = {False: [], True: []}
        unknown = False
        instances = []
        for write, state, index in op.accesses:
            if state == "*":
                unknown = True
            elif state.startswith("%"):
                instances.append(f"o{state[1:]}")
                entries[write].append(f"o{state[1:]}")
            elif index is None:
                entries[write].append(state)
            else:
                t = "t" if body.factor == 1 else f"{body.factor} * t"
                entries[write].append(f"{state}[{t} + {index[0]}, {index[1]}]")
        signature = f"reads={entries[False]!r}, writes={entries[True]!r}"
        params = ["t", *roots, *dict.fromkeys(instances), *(f"u{k}" for k in range(len(op.uses)))]
        lines.append(f"@op({'' if unknown else signature})")
        lines.append(f"def op{n}({', '.join(params)}): ...")
    stop = body.start + body.step * body.trips
    lines.append("def f(x0, *, s, r, q, w):")
    lines.append(f"    for t, c1, c2 in L({body.start}, {stop}, {body.step}, c1=x0, c2=x0):")
    name = {-1: "c1", -2: "c2"}
    for n, op in enumerate(body.ops):
        instances = [f"o{a[1][1:]}" for a in op.accesses if a[1].startswith("%")]
        args = ["t", *roots, *dict.fromkeys(instances), *(name.get(k, f"o{k}") for k in op.uses)]
        born = ": state" if op.alloc else ""
        lines.append(f"        o{n}{born} = op{n}({', '.join(args)})")
    lines.append(f"        yield {', '.join(name.get(k, f'o{k}') for k in body.nexts)}")
    lines.append("    return x0")
    return "\n".join(lines)


def below(a: str, b: str) -> bool:
    return a == b or b.startswith(a + ".")


def definers(body: Body, use: int) -> set[int]:
    """The operations whose results a value may be; -1 is the one that the carried ones begin as."""
    found: set[int] = set()
    seen: set[int] = set()
    stack = [use]
    while stack:
        at = stack.pop()
        if at >= 0:
            found.add(at)
        elif at not in seen:
            seen.add(at)
            found.add(-1)
            stack.append(body.nexts[-at - 1])
    return found


def handed_on_to_unknown(body: Body) -> set[int]:
    """What an unknown operation made, or was handed, which any of them may change from then on."""
    unknown = [(n, op) for n, op in enumerate(body.ops) if any(a[1] == "*" for a in op.accesses)]
    made = {n for n, op in unknown if not op.alloc}
    return made.union(*(definers(body, k) for _, op in unknown for k in op.uses))


def unrolled(body: Body) -> Iterator[tuple[int, int, int, int, str]]:
    """``(operation, trip, later operation, its trip, kind)`` of all pairs that must keep order."""
    retained = {
        int(state[1:])
        for op in body.ops
        if any(a[1] == "*" for a in op.accesses)
        for _, state, _ in op.accesses
        if state.startswith("%")
    }
    retained |= {n for n, op in enumerate(body.ops) if any(a[1] == "*" for a in op.accesses)}
    changed = handed_on_to_unknown(body)
    run: list[tuple[int, int, list[tuple[bool, object, object]], set[tuple[int, int]]]] = []
    carried: list[tuple[int, int] | None] = [None, None]
    for trip, t in enumerate(body.values()):
        for n, op in enumerate(body.ops):
            touched: list[tuple[bool, object, object]] = []
            for write, state, index in op.accesses:
                if state == "*":
                    touched += [(False, "*", None), (True, "*", None)]
                elif state.startswith("%"):
                    # a new instance a trip, unless somebody may have kept the old one
                    born = None if int(state[1:]) in retained else trip
                    touched.append((write, (state, born), None))
                else:
                    place = None if index is None else (body.factor * t + index[0], index[1])
                    touched.append((write, state, place))
            if not any(state == "*" for _, state, _ in op.accesses):
                read = set().union(*(definers(body, k) for k in op.uses)) & changed
                touched += [(False, (f"value {definer}", None), None) for definer in read]
            makers = {carried[-k - 1] if k < 0 else (k, trip) for k in op.uses}
            for _, state, _ in op.accesses:
                if state.startswith("%"):
                    makers.add((int(state[1:]), trip))
            run.append((n, trip, touched, {m for m in makers if m is not None}))
        carried = [carried[-k - 1] if k < 0 else (k, trip) for k in body.nexts]
    for (a, i, left, _), (b, j, right, makers) in itertools.combinations(run, 2):
        if (a, i) in makers:
            yield a, i, b, j, "value"
        for (w1, s1, p1), (w2, s2, p2) in itertools.product(left, right):
            if not (w1 or w2) or not meet(s1, s2, i, j):
                continue
            if s1 == s2 and p1 is not None and p2 is not None and p1 != p2:
                continue
            yield a, i, b, j, ("output" if w2 else "flow") if w1 else "anti"


def meet(a: object, b: object, i: int, j: int) -> bool:
    if "*" in (a, b):
        # what only lives for a trip is out of reach of calls of other trips
        other = b if a == "*" else a
        return not (isinstance(other, tuple) and other[1] is not None) or i == j
    if isinstance(a, tuple) or isinstance(b, tuple):
        return a == b
    assert isinstance(a, str)
    assert isinstance(b, str)
    return below(a, b) or below(b, a)


@settings(max_examples=400)
@given(bodies())
def test_edges_are_the_pairs_that_an_unrolled_run_finds(body: Body) -> None:
    p = parse(text_of(body))
    loop = LoopView(p.find("L"))
    number = {n: int(n.name[1:]) for n in loop.graph.nodes if is_call(n)}
    predicted = set()
    for e in Dependences(p).edges(loop.graph):
        for i, j in itertools.product(range(body.trips), repeat=2):
            if e.applies(j - i):
                predicted.add((number[e.src], i, number[e.dst], j, e.kind))
    assert predicted == set(unrolled(body))


# nested loops and branches: what they hide may only add dependences


@st.composite
def nests(draw: st.DrawFn) -> tuple[str, list[object]]:
    """The text of a nest, and its structure: operations, loops and branches."""
    lines: list[str] = []
    ops: list[str] = []

    def block(depth: int, indices: tuple[str, ...]) -> list[object]:
        found: list[object] = []
        for _ in range(draw(st.integers(1, 3))):
            pad = "    " * (depth + 1)
            what = draw(st.integers(0, 3)) if depth < 3 else 0
            if what <= 1 or (not indices and what == 3):
                n = len(ops)
                accesses = []
                for _ in range(draw(st.integers(1, 2))):
                    at = tuple(
                        draw(st.sampled_from([*indices, *(f"{i} + 1" for i in indices), "0", "1"]))
                        for _ in range(draw(st.integers(0, 2)))
                    )
                    accesses.append((draw(st.booleans()), draw(st.sampled_from("qw")), at))
                entries = [
                    [s + (f"[{', '.join(at)}]" if at else "") for w, s, at in accesses if w == way]
                    for way in (False, True)
                ]
                params = ", ".join(("q", "w", *indices))
                ops.append(
                    f"@op(reads={entries[0]!r}, writes={entries[1]!r})\ndef op{n}({params}): ..."
                )
                lines.append(f"{pad}o{n} = op{n}({params})")
                found.append((f"o{n}", accesses))
            elif what == 2:
                name = f"t{len(lines)}"
                lines.append(f"{pad}for {name} in L{name}(0, 3, 1):")
                inside = block(depth + 1, (*indices, name))
                lines.append(f"{pad}    yield ()")
                found.append((f"L{name}", name, inside))
            else:
                at = len(lines)
                lines.append(f"{pad}if {indices[-1]}:")
                inside = block(depth + 1, indices)
                lines.append(f"{pad}    b{at} = 1")
                lines.append(f"{pad}else:")
                lines.append(f"{pad}    b{at} = 2")
                found.append((f"b{at}", None, inside))
        return found

    structure = block(0, ())
    text = "\n".join([*ops, "def f(*, q, w):", *lines, "    return 0"])
    return text, structure


def touches(tree: object, env: dict[str, int]) -> Iterator[tuple[bool, str, tuple[int, ...]]]:
    assert isinstance(tree, tuple)
    if len(tree) == 2:
        for write, state, at in tree[1]:
            yield write, state, tuple(eval(i, {}, env) for i in at)
    elif tree[1] is None:
        for inner in tree[2]:
            yield from touches(inner, env)
    else:
        for value in range(3):
            for inner in tree[2]:
                yield from touches(inner, {**env, tree[1]: value})


def clash(a: tuple[bool, str, tuple[int, ...]], b: tuple[bool, str, tuple[int, ...]]) -> bool:
    overlap = all(i == j for i, j in zip(a[2], b[2], strict=False))
    return (a[0] or b[0]) and a[1] == b[1] and overlap


@settings(max_examples=150)
@given(nests())
def test_nests_keep_every_pair_that_an_unrolled_run_finds(
    nest: tuple[str, list[object]],
) -> None:
    p = parse(nest[0])
    deps = Dependences(p)
    by_name = {n.name: n for n in p.nodes() if n.op == "call_function"}

    def node_of(tree: object) -> object:
        assert isinstance(tree, tuple)
        name = tree[0]
        if name.startswith("b"):
            pick = by_name.get(name)
            return pick.args[0] if pick is not None and pick.args else None
        return by_name[name]

    def check(block: list[object], index: str | None, env: dict[str, int]) -> None:
        trips = range(3) if index else range(1)
        runs = [(k, t) for t in trips for k in range(len(block))]
        for (a, i), (b, j) in itertools.combinations(runs, 2):
            ea = list(touches(block[a], {**env, **({index: i} if index else {})}))
            eb = list(touches(block[b], {**env, **({index: j} if index else {})}))
            if any(clash(x, y) for x in ea for y in eb):
                src, dst = node_of(block[a]), node_of(block[b])
                if src is None or dst is None:
                    continue
                assert any(e.kind != "value" for e in deps.between(src, dst, distance=j - i)), (
                    nest[0],
                    src,
                    dst,
                    j - i,
                )
        for tree in block:
            assert isinstance(tree, tuple)
            if len(tree) == 2:
                continue
            if tree[1] is None:
                check(tree[2], None, env if not index else {**env, index: 1})
            else:
                for value in trips:
                    check(tree[2], tree[1], {**env, **({index: value} if index else {})})

    check(nest[1], None, {})
