"""Finds the recurrence in a captured loop, or says why there is none."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from rose_compiler.base.recurrence import Input, Item, NotScan, Recurrence, arrange
from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.deps import Dependences, place, title
from rose_compiler.ir.effects import parse_entry, related
from rose_compiler.ir.ops import STATE, UNBOUND
from rose_compiler.ir.program import LoopView, is_call, is_item, is_structure, op_of
from rose_compiler.passes.scan_eval import Statements, outputs_of
from rose_compiler.passes.scan_known import Known
from rose_compiler.passes.scan_text import shown
from rose_compiler.passes.scan_trip import Index, Number, Path, Several, Symbol, Trip, other_form

#: Fewer trips are not worth it: setting up costs about as much as this many.
LEAST = 8
#: Trips at the ends that are left as they are, because tests on the loop variable set them apart.
ENDS = 2
#: Ranges longer than this are not looked at trip by trip.
MOST = 1 << 20

_PLAIN = {operator.add: ast.Add(), operator.sub: ast.Sub(), operator.mul: ast.Mult()}


@dataclass(frozen=True)
class Match:
    """A recurrence, and how many trips in front of it and behind it run as they are."""

    of: Recurrence
    trips: range
    before: int
    after: int

    @property
    def thirds(self) -> tuple[range, range, range]:
        """The trips in front, those at once, those behind."""
        end = len(self.trips) - self.after
        return self.trips[: self.before], self.trips[self.before : end], self.trips[end:]


def candidate(loop: LoopView) -> bool:
    """Whether a loop could be meant as a recurrence: a range by ones that hands something on, of
    statements alone, some of which see the loop variable."""
    if loop.facts.kind != "range" or len(loop.bounds) != 3:
        return False
    calls = [n for n in loop.graph.nodes if n.op == "call_function" and not is_item(n)]
    if any(is_call(n) and op_of(n).kind == "step" for n in calls):
        return False
    if any(type(b) is not int for b in loop.bounds):
        # a loop over minibatches has such bounds too, and stores no rows
        return any(_stated(n) and _stores_rows(n, loop.index) for n in calls)
    return bool(loop.index.users) and any(_stated(n) for n in calls)


def _stated(node: fx.Node) -> bool:
    return is_call(node) and op_of(node).kind == "block" and bool(op_of(node).source)


def _stores_rows(node: fx.Node, index: fx.Node) -> bool:
    writes = op_of(node).signature.writes or ()
    return index in node.args and any(parse_entry(w).index is not None for w in writes)


def match(
    loop: LoopView, deps: Dependences, examples: Mapping[str, Any] | None = None
) -> Match | Blocker:
    """The recurrence that a loop computes. ``examples`` are values of the first trip by name."""
    return _Matcher(loop, deps, examples or {}).run()


class _Matcher:
    def __init__(self, loop: LoopView, deps: Dependences, examples: Mapping[str, Any]) -> None:
        self.loop, self.deps = loop, deps
        self.where: fx.Node = loop.node  # what is being followed
        self.arguments = [*loop.carried, *loop.captured_params]
        self.known = Known(loop, deps, self.arguments, examples)

    def run(self) -> Match | Blocker:
        bounds = [self.known.number(b) for b in self.loop.bounds]
        if None in bounds or bounds[2] == 0:
            why = f"how many trips {self.loop.label} makes is not known before it runs"
            allow = "take the number from a field of an object, which is compared before each call"
            return replace(_blocker("trip-count-unknown", why, self.loop.node), allow=allow)
        trips = range(*bounds)  # type: ignore[arg-type]
        if blocker := self._outside(trips):
            return blocker
        try:
            return self._match(trips)
        except NotScan as stop:
            where = place(self.where)
            return Blocker(stop.code, str(stop), where=(where,) if where else ())

    def _outside(self, trips: range) -> Blocker | None:
        """What is wrong with the loop before its statements are looked at."""
        loop = self.loop
        if exits := bodies.exits(loop.graph):
            return _blocker("early-exit", f"{loop.label} may stop on a value", exits[0])
        if abs(trips.step) != 1:
            return _blocker("unsupported-shape", f"{loop.label} goes by {trips.step}", loop.node)
        if not LEAST <= len(trips) <= MOST:
            return _blocker("too-small", f"{loop.label} makes {len(trips)} trips", loop.node)
        contexts = {facts.get(n).context for n in self._calls()}
        if len(contexts) > 1:
            return _blocker("mode-change", f"modes change inside {loop.label}", loop.node)
        for node in self._calls():
            if is_structure(node) or (is_call(node) and op_of(node).kind != "block"):
                return _blocker("unsupported-shape", f"{title(node)} is in the loop", node)
            if blocker := self._effects(node):
                return blocker
            if _builds_graph(node):
                return _blocker("grad-graph", f"{title(node)} builds an autograd graph", node)
        return None

    def _calls(self) -> Iterator[fx.Node]:
        for node in self.loop.graph.nodes:
            if node.op == "call_function" and not is_item(node) and not is_call(node, STATE):
                yield node

    def _effects(self, node: fx.Node) -> Blocker | None:
        if is_call(node):
            signature = op_of(node).signature
            if signature.reads is None or signature.writes is None:
                why = f"nothing is known of what {title(node)} reads and writes"
                return _blocker("unknown-effects", why, node)
        for effect in self.deps.effects(node):
            if effect.state == "host" or effect.state.startswith("rng:"):
                does = "writes" if effect.write else "reads"
                return _blocker("not-pure", f"{title(node)} {does} {effect.state}", node)
        return None

    def _match(self, trips: range) -> Match:
        sample = trips[len(trips) // 2]
        trip = Trip(self.known.live, sample)
        following = self._follow(trip)
        kept = self._alike(trip, trips)
        self.where = self.loop.node
        before, after = kept.start, len(trips) - kept.stop
        self._conflicts(trip, trips.step)
        for last in self.loop.carried_next:
            spec = facts.get(last).spec if isinstance(last, fx.Node) else None
            if spec is not None and not _has_rows(spec):
                raise other_form(f"what is carried is no tensor, but a {spec.type_name}")
        if before == 0 and not all(map(self._begins_alike, range(len(self.loop.carried)))):
            before = 1
        if before + after > ENDS or len(trips) - before - after < LEAST:
            raise other_form(f"its tests set {before + after} of {len(trips)} trips apart")
        steady = trips[before : len(trips) - after]
        found = trip.recurrence(steady, following)
        if not found.following:
            raise other_form("nothing goes on from trip to trip")
        arrange(found)
        found = replace(found, arrays=self.known.check(found, trip.arrays))
        names = [_label(p) for p in self.arguments]
        parts = self._parts(trips, found, before, after)
        text = [line for part in parts or (found,) for line in shown(part, names)]
        found = replace(found, text=tuple(text), parts=parts)
        computed = any(type(b) is not int for b in self.loop.bounds)
        if computed:
            found = replace(found, bounds=(trips.start, trips.stop, trips.step))
        if computed or parts:
            found = replace(found, ends=(before, after))
        return Match(found, trips, before, after)

    def _parts(
        self, trips: range, middle: Recurrence, before: int, after: int
    ) -> tuple[Recurrence, ...]:
        """All trips as recurrences that go on from one another, those at the ends with one trip
        each; none where there are no such trips, or one can't be followed."""
        ends = (*range(before), *range(len(trips) - after, len(trips)))
        if not ends or any(isinstance(v, type(UNBOUND)) for v in self.loop.carried_init):
            return ()
        made: list[Recurrence] = []
        try:
            for k in ends:
                trip = Trip(self.known.live, trips[k])
                following = self._follow(trip, first=k == 0)
                if any(index.at(trips[k]) < 0 for index in trip.negative):
                    return ()
                self._conflicts(trip, trips.step)
                found = trip.recurrence(trips[k : k + 1], following)
                made.append(replace(found, arrays=middle.arrays))
                arrange(made[-1])
        except NotScan:
            self.where = self.loop.node
            return ()
        return (*made[:before], middle, *made[before:])

    # -- one trip

    def _follow(self, trip: Trip, first: bool = False) -> tuple[int, ...]:
        """Follow a trip's statements; the items of the next carried values. On the ``first`` one
        what a carried value begins with may be no value of the others' type."""
        known: dict[fx.Node, Any] = {self.loop.index: Index(1, 0)}
        count = len(self.loop.carried)
        for k, param in enumerate(self.arguments):
            other = k >= count or (first and not self._begins_alike(k))
            known[param] = Path(k) if other else _Carried(k)
        for node in self.loop.graph.nodes:
            if node.op != "call_function":
                continue
            self.where = node
            if is_item(node):
                known[node] = _part(known[node.args[0]], node.args[1])
            elif is_call(node, STATE):
                base = known[node.args[0]]
                assert isinstance(base, Path)
                names = str(node.args[1]).split(".")
                known[node] = Path(base.argument, (*base.names, *names))
            else:
                known[node] = self._call(trip, node, known)
        self.where = self.loop.node
        return tuple(self._next(trip, v, known) for v in self.loop.carried_next)

    def _next(self, trip: Trip, value: Any, known: dict[fx.Node, Any]) -> int:
        symbol = known[value] if isinstance(value, fx.Node) else Number(value)
        return trip.value(_settled(trip, symbol)).item

    def _call(self, trip: Trip, node: fx.Node, known: dict[fx.Node, Any]) -> Symbol:
        def given(value: Any) -> Symbol:
            symbol = known[value] if isinstance(value, fx.Node) else Number(value)
            return _settled(trip, symbol)

        args = [given(a) for a in node.args]
        if not is_call(node):
            sign = _PLAIN.get(node.target)  # type: ignore[arg-type]
            if sign is None or len(args) != 2:
                raise other_form(f"{title(node)} is in the loop")
            text = ast.BinOp(ast.Name("a", ast.Load()), sign, ast.Name("b", ast.Load()))
            return Statements(trip, dict(zip("ab", args, strict=True)), None).of(text)
        op = op_of(node)
        statements = op.attributes.get("stmts") or ast.parse("\n".join(op.source)).body
        params = op.attributes.get("inputs") or op.signature.params
        space = op.attributes.get("globals")
        inside = Statements(trip, dict(zip(params, args, strict=True)), space)
        before = len(trip.stores), trip.changes
        inside.run(statements)
        changed = (len(trip.stores), trip.changes) != before
        if changed != bool(op.signature.writes):
            raise other_form(f"{title(node)} writes otherwise than by storing a row", "not-pure")
        names = op.attributes.get("outputs")
        if names is None:
            assigned = list(outputs_of(statements))
            names = assigned[-1:] if op.signature.results == 1 else assigned
        if len(names) != op.signature.results:
            raise other_form(f"{title(node)} does not say what it returns")
        found = [self._output(inside, n) for n in names]
        return found[0] if len(found) == 1 else Several(tuple(found))

    @staticmethod
    def _output(inside: Statements, name: str) -> Symbol:
        if name not in inside.names:
            raise other_form(f"`{name}` is not assigned on every trip")
        return inside.names[name]

    # -- all trips

    def _alike(self, trip: Trip, trips: range) -> range:
        """Positions of the trips around the middle whose tests come out as in the middle."""
        least = [-(i.offset) for i in trip.negative]  # sign * t must not be below these

        def like(t: int) -> bool:
            return all(test(t) == outcome for test, outcome in trip.tests) and all(
                trip.sign * t >= low for low in least
            )

        middle = len(trips) // 2
        if not like(trips[middle]):
            raise other_form("an index is negative, which counts from the end")
        low, high = middle, middle
        while low > 0 and like(trips[low - 1]):
            low -= 1
        while high + 1 < len(trips) and like(trips[high + 1]):
            high += 1
        return range(low, high + 1)

    def _conflicts(self, trip: Trip, step: int) -> None:
        """Refuse to read what another trip stores, or what may be the same memory."""
        stored = {s.source: s.offset for s in trip.stores}
        own = {trip.inputs[k] for k in stored}
        for item in trip.items:
            at = stored.get(item.source, item.offset)
            if item.kind == "row" and item.offset not in (at, at - trip.sign * step):
                raise other_form(
                    "it reads rows that another trip stores, other than by what it carries",
                    "reads-loop-state",
                )
        written = {e.state for n in self._calls() for e in self.deps.effects(n) if e.write}
        mine = {name for one in own for name in self._memory(one)}
        mine |= {name for j in trip.inplace for name in self._memory(Input(j))}
        if not written <= mine:
            raise other_form("it writes more than the rows it stores", "not-pure")
        for k, one in enumerate(trip.inputs):
            if k in stored:
                continue
            for name in self._memory(one):
                for other in written:
                    if related(name, other):
                        why = f"it reads {name}, which may be {other}, which it stores to"
                        raise other_form(why, "may-alias")

    def _memory(self, one: Input) -> list[str]:
        """The states that an input may lie in."""
        scope, param = self.deps.scope, self.arguments[one.argument]
        below = "".join(f".{n}" for n in one.path)
        if state := scope.state(param):
            return [state + below]
        names = [f"%{d.name}{below}" for d in scope.definers(param)]
        return [*scope.aliases(param), *names]

    def _begins_alike(self, k: int) -> bool:
        """Whether what the first trip is handed of a carried value is of the type that the others
        are handed."""
        init, last = self.loop.carried_init[k], self.loop.carried_next[k]
        if not isinstance(init, fx.Node):
            return False
        before = facts.get(init).spec
        after = facts.get(last).spec if isinstance(last, fx.Node) else None
        if before is None or after is None:
            return True
        if (before.kind, before.shape) != (after.kind, after.shape):
            return False
        if before.kind == "scalar" and before.type_name != after.type_name:
            return False
        if before.dtype != after.dtype:
            raise other_form(f"what is carried changes from {before.dtype} to {after.dtype}")
        return True


@dataclass(frozen=True)
class _Carried:
    """What a carried value is at the beginning of a trip."""

    position: int


def _settled(trip: Trip, symbol: Any) -> Symbol:
    """A symbol as statements take it: a carried value becomes an item when it is first seen."""

    if isinstance(symbol, _Carried):
        return trip.item(Item("carried", source=symbol.position))
    found: Symbol = symbol
    return found


def _part(symbol: Symbol, position: Any) -> Symbol:
    if isinstance(symbol, Several) and type(position) is int and position < len(symbol.items):
        found: Symbol = symbol.items[position]
        return found
    raise other_form("a part of a value is picked")


def _has_rows(spec: facts.Spec) -> bool:
    """Whether a value is a tensor or an array, or what a row of an array of one axis is."""
    return spec.kind in ("tensor", "array") or spec.type_name in ("numpy.float32", "numpy.float64")


def _label(param: fx.Node) -> str:
    return facts.get(param).state.lstrip("%") or param.name


def _builds_graph(node: fx.Node) -> bool:
    if any(c.kind in ("no_grad", "inference_mode") for c in facts.get(node).context):
        return False
    spec = facts.get(node).spec
    specs = () if spec is None else (spec, *spec.items)
    return any(s.requires_grad for s in specs)


def _blocker(code: str, why: str, node: fx.Node) -> Blocker:
    where = place(node)
    return Blocker(code, why, where=(where,) if where else ())
