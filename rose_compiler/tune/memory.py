"""What a schedule needs of memory beyond program order, and what the whole then peaks at.

Only what passes put into a program is counted: copies, lists of values that live over a loop, their
joined batches, whole draws, second versions of values that a later trip still uses. The rest is in
what an iteration in program order was measured to take. Sizes are those of tensors and arrays as
seen on the first trip. Emitted code keeps its variables until they are assigned again, so a piece
is there from where it is made to the end of the iteration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from rose_compiler.base.errors import SourceLocation
from rose_compiler.base.recurrence import Recurrence
from rose_compiler.base.sizes import show_bytes
from rose_compiler.ir import facts
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.ops import (
    APPEND,
    CONCAT,
    DRAW,
    FREEZE,
    JOIN_ROWS,
    MERGE,
    RANDN,
    SNAPSHOT,
    VERSION,
)
from rose_compiler.ir.program import (
    Program,
    body_of,
    is_call,
    is_item,
    is_structure,
    op_of,
    output_node,
)
from rose_compiler.ir.scope import Scope

_SIZES = {
    1: ("bool", "int8", "uint8"),
    2: ("float16", "bfloat16", "int16", "uint16"),
    4: ("float32", "int32", "uint32"),
    8: ("float64", "int64", "uint64", "complex64"),
    16: ("complex128",),
}
_BYTES = {name: size for size, names in _SIZES.items() for name in names}
#: Where memory is counted: the process, which holds arrays and the CPU's tensors, or a device.
PROCESS = "process"


@dataclass(frozen=True)
class Piece:
    """Bytes that a schedule adds in ``place``: from the operation ``since`` of the outermost body
    to the end of the iteration, or only while that runs (``passing``). ``arrays`` is what of it
    are numpy's arrays."""

    what: str
    bytes: int
    since: str
    place: str = PROCESS
    passing: bool = False
    arrays: int = 0
    where: SourceLocation | None = None

    def __str__(self) -> str:
        line = "" if self.where is None else f" ({self.where})"
        while_ = " while it runs" if self.passing else ""
        return f"{show_bytes(self.bytes)}: {self.what}{while_}{line}"


@dataclass(frozen=True)
class Stretch:
    """Operations of the outermost body, one after the other, and the peak while they ran: bytes by
    place."""

    keys: tuple[str, ...]
    peak: Mapping[str, int]


def added(captured: Program, scheduled: Program) -> tuple[Piece, ...]:
    """What a schedule of ``captured`` adds, in the order of the program."""
    return tuple(_Adder(captured, scheduled).pieces())


def peaks(
    stretches: Sequence[Stretch], pieces: Sequence[Piece], order: Sequence[str]
) -> dict[str, int]:
    """The peak by place of an iteration that adds ``pieces`` to what was measured.

    ``order`` are the names of the outermost body's operations with the pieces; those that were not
    measured count to the last one before them that was.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for k, stretch in enumerate(stretches):
        for key in stretch.keys:
            first.setdefault(key, k)
            last[key] = k
    at: dict[str, int] = {}
    behind = 0
    for name in order:
        at[name] = first.get(name, behind)
        behind = max(behind, last.get(name, behind))
    found: dict[str, int] = {}
    for k, stretch in enumerate(stretches):
        for place, bytes_ in stretch.peak.items():
            here = sum(
                p.bytes
                for p in pieces
                if p.place == place
                and (at.get(p.since, 0) == k if p.passing else at.get(p.since, 0) <= k)
            )
            found[place] = max(found.get(place, 0), bytes_ + here)
    return found


class _Adder:
    def __init__(self, captured: Program, scheduled: Program) -> None:
        self.known = {node.name for node in captured.nodes() if is_call(node)}
        self.program = scheduled
        self.scope = Scope(scheduled)
        self.trips: dict[fx.Node, int] = {}  # of lists: their entries
        for node in scheduled.nodes():
            if is_call(node, JOIN_ROWS):
                rows = _rows(facts.get(node).spec)
                for source in self.scope.origins(node.args[0]):  # type: ignore[arg-type]
                    self.trips[source] = rows

    def pieces(self) -> Iterator[Piece]:
        """All that is added."""
        for top in self.program.root.graph.nodes:
            for node in _below(top):
                if is_call(node) and not is_structure(node):
                    for piece in self._of(node, top.name):
                        if piece.bytes:
                            yield piece

    def _of(self, node: fx.Node, since: str) -> Iterator[Piece]:
        spec = facts.get(node).spec
        made = self._made(node, spec)
        if made is not None:
            what, kind, count = made
            yield _piece(node, what, kind, count, since)
        if _collected(node) and (trips := self._collects(node)):
            yield _piece(node, f"{node.name}, of all {trips} trips", spec, 1 - 1 / trips, since)
            if inside := _inside(node):
                place = next((n for n, _ in _places(spec)), PROCESS)
                where = facts.get(node).origin.where
                yield Piece(f"inside {node.name}", inside, since, place, True, 0, where)
        recurrence = op_of(node).attributes.get("recurrence")
        if isinstance(recurrence, Recurrence):
            yield _tried(node, recurrence, since)
        if versions := self._versions(node):
            what = f"{node.name}, kept {'a trip' if versions == 1 else f'{versions} trips'} longer"
            yield _piece(node, what, spec, versions, since)

    def _made(self, node: fx.Node, spec: Spec | None) -> tuple[str, Spec | None, float] | None:
        """What a node makes that program order does not, its type, and how many of it there are."""
        if is_call(node, VERSION):
            # the next trip's is made while this one's may still be read
            return f"copies of {node.args[0]}, of two trips", spec, 2
        if is_call(node, FREEZE):
            return f"{node.args[0]} as it was, of two trips", spec, 2
        if is_call(node, SNAPSHOT):
            if any(is_call(u, APPEND) for u in node.users):
                return None  # counted with the list
            return f"a copy of {node.args[0]}", spec, 1
        if is_call(node, CONCAT):
            return f"{node.name}, joined from its parts", spec, 1
        if is_call(node, MERGE):
            return f"{node.name}, merged from its shards' results", spec, 1
        if (is_call(node, RANDN) or is_call(node, DRAW)) and node.name not in self.known:
            return f"{node.name}, drawn whole", spec, 1
        if is_call(node, JOIN_ROWS):
            return f"{node.name}, the values of all trips", spec, 1
        if is_call(node, APPEND):
            return self._kept(node)
        return None

    def _kept(self, node: fx.Node) -> tuple[str, Spec | None, float] | None:
        """What a list that a pass has made holds by the end of its loop, beyond what the loop's own
        variables hold."""
        items, value = node.args[0], node.args[1]
        assert isinstance(items, fx.Node)
        sources = [s for s in self.scope.origins(items) if s in self.trips]
        if not sources or not isinstance(value, fx.Node):
            return None
        spec = facts.get(value).spec
        trips = self.trips[sources[0]] // max(1, _rows(spec))
        copied = is_call(value, SNAPSHOT)
        if not copied and any(not name.startswith("%") for name in self.scope.aliases(value)):
            return None  # it lies in memory that is there anyway
        return f"{sources[0].name}, of {trips} trips", spec, trips if copied else trips - 1

    def _collects(self, node: fx.Node) -> int:
        """The trips whose values an operation computes at once."""
        for used in node.all_input_nodes:
            if is_call(used, JOIN_ROWS):
                for source in self.scope.origins(used.args[0]):  # type: ignore[arg-type]
                    entries = [
                        n
                        for n in self.program.nodes()
                        if is_call(n, APPEND) and source in self.scope.origins(n.args[0])  # type: ignore[arg-type]
                    ]
                    if entries:
                        rows = _rows(facts.get(entries[0].args[1]).spec)  # type: ignore[arg-type]
                        return self.trips.get(source, 0) // max(1, rows)
                continue
            whole = _whole(used)
            if whole is not None and _collected(whole) and (trips := self._collects(whole)):
                return trips
        return 0

    @staticmethod
    def _versions(node: fx.Node) -> int:
        """How many older versions of a value are still used when the next one is made."""
        slot = facts.get(node).slot
        if slot is None or slot.lane:  # what a lane makes is taken in when it is used
            return 0
        found = 0
        for user in node.users:
            other = facts.get(user).slot
            if other is not None:
                # by when it is used there, this many newer ones have been made
                found = max(found, other.stage - slot.stage - (other.order < slot.order))
        return found


def _whole(node: fx.Node) -> fx.Node | None:
    if is_item(node):
        node = node.args[0]  # type: ignore[assignment]
    return node if is_call(node) else None


def _collected(node: fx.Node) -> bool:
    """Whether a node computes for all trips what stood in a loop."""
    if not is_call(node) or op_of(node).kind != "graph":
        return False
    return "defer" in facts.get(node).origin.passes


def _rows(spec: Spec | None) -> int:
    return facts.rows_of(spec) or 0


def _inside(node: fx.Node) -> int:
    """Bytes of what a traced operation computes on the way to its results, at its peak. Names are
    taken again as soon as nothing uses their value any more."""
    body = op_of(node).body
    if body is None:
        return 0
    rows = next((n for a in node.args if isinstance(a, fx.Node) and (n := _rows(_spec(a)))), 0)
    nodes = [n for n in body.graph.nodes if n.op in ("call_function", "call_method")]
    seen = next(
        (n for p in body.graph.nodes if p.op == "placeholder" and (n := _rows(_spec(p)))), rows
    )
    scale = rows / seen if seen else 1.0
    last = {used: k for k, n in enumerate(body.graph.nodes) for used in n.all_input_nodes}
    at = {n: k for k, n in enumerate(body.graph.nodes)}
    results = set(output_node(body.graph).all_input_nodes)
    live: dict[fx.Node, int] = {}
    peak = 0
    for one in nodes:
        if one not in results and not is_item(one):
            live[one] = sum(b for _, b in _places(_spec(one)))
        peak = max(peak, sum(live.values()))
        for used in [u for u in live if last.get(u, at[u]) <= at[one]]:
            del live[used]
    return round(peak * scale)


def _spec(node: fx.Node) -> Spec | None:
    return facts.get(node).spec


def _below(top: fx.Node) -> Iterator[fx.Node]:
    """A node of the outermost body and all inside it."""
    yield top
    if is_structure(top):
        for argument in top.args:
            if isinstance(argument, fx.Node) and argument.op == "get_attr":
                for node in body_of(top, argument).graph.nodes:
                    yield from _below(node)


def _places(spec: Spec | None) -> Iterator[tuple[str, int]]:
    """Where the parts of a value of this type lie, and their bytes."""
    if spec is None:
        return
    if spec.kind in ("tuple", "dict"):
        for item in spec.items:
            yield from _places(item)
    elif spec.kind in ("tensor", "array"):
        size = math.prod(spec.shape) * _BYTES.get(spec.dtype, 0)
        yield (PROCESS if spec.device in ("", "cpu") else spec.device), size


def _piece(node: fx.Node, what: str, spec: Spec | None, count: float, since: str) -> Piece:
    where = facts.get(node).origin.where
    parts = list(_places(spec))
    total = round(sum(size for _, size in parts) * count)
    arrays = round(_arrays(spec) * count)
    place = next((name for name, _ in parts), PROCESS)
    return Piece(what, total, since, place, False, arrays, where)


def _tried(node: fx.Node, of: Recurrence, since: str) -> Piece:
    """What a recurrence stores for the columns that are computed both ways, once, when it was
    compiled."""
    rows = [s for n in (node, *node.users) if (s := facts.get(n).spec) is not None and s.dtype]
    place, row = next(iter(_places(rows[0] if rows else None)), (PROCESS, 0))
    if place != PROCESS:
        return Piece("", 0, since, place)
    size = math.prod(rows[0].shape) if rows else 0
    trips = len(of.trips) + sum(of.ends)
    count = len({part.inputs[s.source] for part in of.parts or (of,) for s in part.stores})
    bytes_ = count * trips * (row // max(1, size)) * of.tried(size)
    what = f"columns of {node.name} computed both ways, once"
    return Piece(what, bytes_, since, place, True, 0, facts.get(node).origin.where)


def _arrays(spec: Spec | None) -> int:
    if spec is None:
        return 0
    if spec.kind in ("tuple", "dict"):
        return sum(map(_arrays, spec.items))
    return sum(size for _, size in _places(spec)) if spec.kind == "array" else 0
