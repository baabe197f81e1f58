"""The generator behind :func:`rose_compiler.testing.programs.programs`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.fx as fx
from hypothesis import strategies as st

from rose_compiler.ir import facts
from rose_compiler.ir.facts import Context, LoopFacts
from rose_compiler.ir.ops import APPEND, BREAK_IF, CONTINUE_IF, NEW_LIST, UNBOUND, Op, OpTable
from rose_compiler.ir.program import Builder, Program
from rose_compiler.testing.program_effects import EffectStatements
from rose_compiler.testing.program_ops import OPS, World, fresh_objects, world_ops
from rose_compiler.testing.program_pool import FEATURES as FEATURES
from rose_compiler.testing.program_pool import Draw, Place, Pool, Value


class Generator(EffectStatements):
    """Draws one program. ``world`` is what its operations reach besides their arguments."""

    def __init__(self, draw: Draw, features: frozenset[str], max_depth: int, size: int) -> None:
        self.draw = draw
        self.features = features
        self.max_depth = max_depth
        self.left = size
        self.world = World()
        self.ops: dict[str, Op] = {**OPS, **world_ops(self.world)}
        self.context: tuple[Context, ...] = ()
        self.roots: dict[str, fx.Node] = {}
        self.locals = 0

    def generate(self) -> Program:
        """The program, with values ``a``, ``b`` (integers) and ``x`` (a row)."""
        top = Builder()
        pool = Pool()
        pool.ints = [top.placeholder(name, "value") for name in ("a", "b")]
        pool.rows = [top.placeholder("x", "value")]
        names = tuple(fresh_objects())
        self.roots = {name: top.placeholder(name, "state", state=name) for name in names}
        pool.lists = [self.roots["cells"]]
        pool.grids = [self.roots["grid"]]
        place = Place(top, pool, 0)
        self._statements(place, at_least=4)
        # as much as there is: what nobody looks at can't show a fault
        root = top.finish((*pool.ints[-6:], *pool.rows[-3:]))
        program = Program("generated", root, OpTable(), ("a", "b", "x"), names)
        for node in program.nodes():
            if isinstance(node.target, Op) and node.target.kind != "builtin":
                program.ops.add(node.target)
        return program

    # choices

    def _pick(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    def _chance(self, one_in: int) -> bool:
        return bool(self.draw(st.integers(0, one_in - 1)) == one_in - 1)

    def _types(self, most: int) -> tuple[str, ...]:
        return tuple(self.draw(st.lists(st.sampled_from(["int", "row"]), max_size=most)))

    def _int(self, place: Place) -> Value:
        # recent values first: chains of dependences are what passes trip over
        return self._pick([*place.pool.ints[-1:-6:-1], 3])

    def _row(self, place: Place) -> Value:
        return self._pick([*place.pool.rows[-1:-5:-1], *place.pool.views[-2:]])

    def _some(self, place: Place, kind: str) -> Value:
        """A value that owns its memory, so that it may be carried or returned."""
        if kind == "int":
            return self._int(place)
        return self._pick(place.pool.rows[-1:-5:-1])

    def _index(self, place: Place) -> Value:
        """An index of a list or grid: constant, an affine one of a loop, or one out of data."""
        how = self._pick(["loop", "next", "next", "constant", "data"])
        if how == "data" and place.pool.ints:
            return self._call(place, "small", self._int(place))
        if how == "constant" or not place.pool.indices:
            return self._pick(range(4))
        index = self._pick(place.pool.indices[-2:])
        if how == "loop":
            return index
        return self._operator(place, operator.add, index, self._pick([1, 2]))

    # nodes

    def _call(
        self, place: Place, op: str, *args: Value, as_: str | None = None, **known: Any
    ) -> fx.Node:
        return place.builder.call(self.ops[op], *args, name=as_, context=self.context, **known)

    def _operator(self, place: Place, function: Any, *args: Value) -> fx.Node:
        used = fx.node.map_aggregate(args, place.builder.use)
        node = place.builder.graph.create_node("call_function", function, used, {})
        facts.put(node, context=self.context)
        return node

    def _item(self, place: Place, node: fx.Node, position: int, kind: str) -> fx.Node:
        picked = place.builder.item(node, position)
        (place.pool.ints if kind == "int" else place.pool.rows).append(picked)
        return picked

    # statements

    def _statements(self, place: Place, at_least: int = 1) -> None:
        for _ in range(self.draw(st.integers(at_least, at_least + 3))):
            if self.left <= 0:
                return
            self.left -= 1
            self._pick(self._kinds(place))[1](place)

    def _kinds(self, place: Place) -> Iterator[tuple[str, Callable[[Place], None]]]:
        has, deep = self.features, place.depth >= self.max_depth
        yield "value", self._value
        yield "value", self._value  # twice as likely
        if "store" in has:
            yield "store", self._store
            yield "store", self._store
            yield "load", self._load
            yield "entry", self._entry
            yield "pair", self._pair
            yield "pair", self._pair
        if "draw" in has:
            yield "draw", self._draw
        if "loop" in has and not deep:
            yield "range", self._range
            if "iter" in has:
                yield "iter", self._iter
            if "while" in has:
                yield "while", self._while
        if "branch" in has and not deep:
            yield "branch", self._branch
        if "exit" in has and place.carried is not None:
            yield "exit", self._exit
        if "local" in has:
            yield "local", self._local
        if "view" in has:
            yield "view", self._view
            yield "fresh", self._fresh
        if "simulator" in has:
            yield "step", self._step
        if "host" in has:
            yield "host", self._host
        if "opaque" in has:
            yield "opaque", self._opaque
        if "strange" in has:
            yield "strange", self._strange
        if "gradient" in has:
            yield "gradient", self._gradient
            yield "gradient", self._gradient
        if "context" in has and len(self.context) < 2:
            yield "context", self._with

    def _value(self, place: Place) -> None:
        pool = place.pool
        how = self._pick(["mix", "twist", "blend", "couple", "spread", "weigh", "pair", "odd"])
        if how == "mix":
            pool.ints.append(self._call(place, how, self._int(place), self._int(place)))
        elif how == "twist":
            pool.ints.append(self._call(place, how, self._int(place)))
        elif how == "spread":
            pool.rows.append(self._call(place, how, self._int(place)))
        elif how == "blend":
            pool.rows.append(self._call(place, how, self._row(place), self._row(place)))
        elif how == "couple":
            pool.rows.append(self._call(place, how, self._row(place)))
        elif how == "weigh":
            pool.ints.append(self._call(place, how, self._row(place)))
        elif how == "odd":
            pool.bools.append(self._call(place, how, self._int(place)))
        else:
            node = self._call(place, how, self._int(place))
            for position in self._pick([(0, 1), (1,), (0,)]):
                self._item(place, node, position, "int")

    def _store(self, place: Place) -> None:
        if self._chance(2):
            grid = self._pick(place.pool.grids)
            self._call(place, "store_row", grid, self._index(place), self._row(place))
        else:
            name = self._pick(["store", "add_to"])
            cells = self._cells(place)
            self._call(place, name, cells, self._index(place), self._int(place))

    def _cells(self, place: Place) -> fx.Node:
        if self._chance(4):
            half = place.builder.state(self.roots["bag"], self._pick(["left", "right"]))
            facts.put(half, context=self.context)
            return half
        found = self._pick(place.pool.lists)
        assert isinstance(found, fx.Node)
        return found

    def _load(self, place: Place) -> None:
        pool = place.pool
        how = self._pick(["load", "total", "digest", "load_row", "norm"])
        if how == "load":
            pool.ints.append(self._call(place, how, self._cells(place), self._index(place)))
        elif how == "total":
            pool.ints.append(self._call(place, how, self._cells(place)))
        elif how == "digest":
            pool.ints.append(self._call(place, how, self.roots["bag"]))
        elif how == "load_row":
            grid = self._pick(pool.grids)
            pool.rows.append(self._call(place, how, grid, self._index(place)))
        else:
            pool.ints.append(self._call(place, how, self._pick(pool.grids)))

    def _entry(self, place: Place) -> None:
        how, table = self._pick(["hit", "peek", "remember", "recall"]), self.roots["table"]
        if how == "hit":
            self._call(place, how, table)
        elif how == "remember":
            self._call(place, how, table, self._int(place))
        else:
            place.pool.ints.append(self._call(place, how, table))

    def _draw(self, place: Place) -> None:
        how = self._pick(["roll", "dice", "noise", "throw"])
        if how == "noise":
            place.pool.rows.append(self._call(place, how))
        else:
            root = {"roll": "gen", "throw": "chance"}.get(how)
            handed = [self.roots[root]] if root else []
            place.pool.ints.append(self._call(place, how, *handed))

    def _local(self, place: Place) -> None:
        """Birth of a mutable local, or growth of one."""
        pool = place.pool
        how = self._pick(["list", "grid", "growing", "append"])
        if how == "append" and pool.growing:
            node = place.builder.call(
                APPEND, self._pick(pool.growing), self._int(place), context=self.context
            )
            return
        self.locals += 1
        name = f"local{self.locals}"
        born: dict[str, Any] = {"as_": name, "state": f"%{name}"}
        if how == "list":
            pool.lists.append(self._call(place, "new_cells", self._int(place), **born))
        elif how == "grid":
            pool.grids.append(self._call(place, "new_grid", **born))
        else:
            node = place.builder.call(
                NEW_LIST, name=name, context=self.context, state=born["state"]
            )
            pool.growing.append(node)
            place.builder.call(APPEND, node, self._int(place), context=self.context)
            pool.ints.append(self._call(place, "total", node))

    def _view(self, place: Place) -> None:
        """A row that shares memory with its grid, or a write through one."""
        pool = place.pool
        if not pool.views or self._chance(2):
            grid = self._pick(pool.grids)
            alias = (facts.get(grid).state,)
            pool.views.append(self._call(place, "view_row", grid, self._index(place), alias=alias))
        if self._chance(2):
            self._call(place, "scale", self._pick(pool.views[-3:]))

    def _with(self, place: Place) -> None:
        before = self.context
        self.context = (*before, Context(self._pick(["no_grad", "enable_grad"])))
        place.pool.ints.append(self._call(place, "grad_mode"))
        self._statements(place)
        self.context = before

    # structure

    def _exit(self, place: Place) -> None:
        assert place.carried is not None
        pred = self._call(place, "odd", self._int(place))
        handed = tuple(self._some(place, kind) for kind in place.carried)
        op = self._pick([BREAK_IF, CONTINUE_IF])
        place.builder.call(op, pred, handed, context=self.context)

    def _branch(self, place: Place) -> None:
        bools = place.pool.bools[-3:]
        pred = self._pick(bools) if bools else self._call(place, "odd", self._int(place))
        kinds = self._types(2)
        arms = []
        for _ in range(2):
            arm = place.inside(Builder(place.builder), depth=place.depth + 1)
            if self._chance(4):
                self._statements(arm, at_least=0)
            else:
                self._statements(arm)
            arms.append((arm.builder, tuple(self._some(arm, kind) for kind in kinds)))
        (then, a), (orelse, b) = arms
        node = place.builder.branch(pred, then, a, orelse, b, context=self.context)
        for position, kind in enumerate(kinds):
            self._item(place, node, position, kind)

    def _range(self, place: Place) -> None:
        bounds = self._pick([(0, 3, 1), (0, 4, 1), (1, 4, 2), (3, -1, -1), (0, 1, 1), (0, 0, 1)])
        self._loop(place, "range", bounds, len(range(*bounds)))

    def _iter(self, place: Place) -> None:
        self._loop(place, "iter", (self._call(place, "items", self._int(place)),), 0)

    def _while(self, place: Place) -> None:
        self._loop(place, "while", (), 1)

    def _loop(self, place: Place, kind: str, bounds: tuple[Value, ...], trips: int) -> None:
        # several whole numbers handed down a line come back after two or three trips
        line = self._pick([0, 0, 2, 3])
        kinds = ("int",) * (line + (kind == "while")) + self._types(2 if line else 3)
        late = "unbound" in self.features and self._chance(5)
        inits: list[Value] = [self._some(place, k) for k in kinds]
        if kind == "while":
            inits[0] = 0
        if late:
            kinds, inits = (*kinds, "int"), [*inits, UNBOUND]
        builder = Builder(place.builder)
        body = place.inside(builder, depth=place.depth + 1, carried=kinds)
        label = f"loop{place.depth}"
        index = builder.placeholder("tick" if kind == "while" else "t", "index")
        if kind == "range":
            body.pool.indices.append(index)
        if kind != "while":
            body.pool.ints.append(index)
        params = []
        for position, (k, init) in enumerate(zip(kinds, inits, strict=True)):
            maybe = {"maybe_unbound": True} if init is UNBOUND else {}
            params.append(builder.placeholder(f"c{position}", "carried", **maybe))
            if init is not UNBOUND:
                (body.pool.ints if k == "int" else body.pool.rows).append(params[-1])
        outputs = self._body(body, kind, kinds, params)
        node = place.builder.loop(
            builder,
            outputs,
            bounds,
            tuple(inits),
            LoopFacts(kind, label, index.name, has_exit=_has_exit(builder.graph)),
            context=self.context,
        )
        for position, k in enumerate(kinds):
            if inits[position] is not UNBOUND or trips > 0:
                self._item(place, node, position, k)

    def _body(
        self, body: Place, kind: str, kinds: tuple[str, ...], params: list[fx.Node]
    ) -> tuple[Value, ...]:
        """The statements of a loop's body; the next carried values."""
        following: list[Value] = []
        with self._counted(body, kind, kinds, params) as fixed:
            following += fixed
            self._statements(body)
        free = range(len(following), len(kinds))
        ints = [i for i in free if kinds[i] == "int" and not facts.get(params[i]).maybe_unbound]
        # handed down the line, a value comes back after as many trips as the line is long
        rotate = len(ints) > 1 and not self._chance(3)
        for i in free:
            if rotate and i in ints[1:]:
                following.append(params[ints[ints.index(i) - 1]])
            else:
                following.append(self._some(body, kinds[i]))
        return tuple(following)

    @contextmanager
    def _counted(
        self, body: Place, kind: str, kinds: tuple[str, ...], params: list[fx.Node]
    ) -> Iterator[list[Value]]:
        """Around a body: an endless loop counts in its first carried value and ends by it."""
        if kind != "while":
            yield []
            return
        late = [i for i, p in enumerate(params) if facts.get(p).maybe_unbound]
        done = self._operator(body, operator.ge, params[0], 3)
        handed = [3 if i in late else p for i, p in enumerate(params)]
        body.builder.call(BREAK_IF, done, tuple(handed), context=self.context)
        # an exit that goes on must count as well, or the loop would never end
        count = self._operator(body, operator.add, params[0], 1)
        body.carried = None
        yield [count]


def _has_exit(graph: fx.Graph) -> bool:
    return any(node.target in (BREAK_IF, CONTINUE_IF) for node in graph.nodes)
