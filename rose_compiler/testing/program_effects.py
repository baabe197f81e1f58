"""Statements of generated programs that do something to the world: gradients, steps, calls whose
effects are drawn or unknown."""

from __future__ import annotations

from typing import Any, Protocol

import torch.fx as fx
from hypothesis import strategies as st

from rose_compiler.ir import facts
from rose_compiler.ir.ops import Op
from rose_compiler.testing.program_pool import Draw, Place, Value
from rose_compiler.testing.program_state import ACCESSES, strange

#: A state, an operation that reads it, and one that writes it.
PAIRS = (
    ("cells", "total", "store"),
    ("cells", "load", "store"),
    ("table", "peek", "hit"),
    ("table", "recall", "remember"),
    ("net", "weight", "update"),
    ("net", "gradient", "zero"),
)


class _Drawing(Protocol):
    draw: Draw
    features: frozenset[str]
    ops: dict[str, Op]
    roots: dict[str, fx.Node]

    def _pick(self, options: Any) -> Any: ...

    def _chance(self, one_in: int) -> bool: ...

    def _statements(self, place: Place, at_least: int = 1) -> None: ...

    def _int(self, place: Place) -> Value: ...

    def _row(self, place: Place) -> Value: ...

    def _call(self, place: Place, op: str, *args: Value, **known: Any) -> fx.Node: ...


class EffectStatements:
    """What :class:`~rose_compiler.testing.program_gen.Generator` draws besides plain statements."""

    def _pair(self: _Drawing, place: Place) -> None:
        """A read and a write of the same state, next to each other: what must not change places."""
        usable = [p for p in PAIRS if p[0] != "net" or "gradient" in self.features]
        root, read, write = self._pick(usable)
        object_ = self.roots[root]
        index = {"load": (0,)}.get(read, ())
        given = {"remember": 1, "store": 2}.get(write, 0)
        how = self._pick(["read", "write", "both"])
        if how != "write":
            place.pool.ints.append(self._call(place, read, object_, *index))
        if how != "read":
            written = [0, self._int(place)] if given == 2 else [self._int(place)] * given
            self._call(place, write, object_, *written)
        if how == "write":
            place.pool.ints.append(self._call(place, read, object_, *index))

    def _fresh(self: _Drawing, place: Place) -> None:
        """A value that is changed in place where it was made."""
        made = self._call(place, "spread", self._pick([*place.pool.ints[:2], 3]))
        self._call(place, "scale", made)
        place.pool.rows.append(made)
        place.pool.ints.append(self._call(place, "weigh", made))

    def _gradient(self: _Drawing, place: Place) -> None:
        """A loss, a way back through one, or something about parameters and gradients."""
        pool, net = place.pool, self.roots["net"]
        # a graph is gone back through once, so on the trip that made it
        losses = [n for n in pool.losses if n.graph is place.builder.graph]
        one = ["forward", "epoch", *["backward"] * 2 * bool(losses), "update", "look", "zero"]
        how = self._pick(one)
        if how == "epoch":  # the same loss on every trip of the loops around
            loss = self._call(place, "forward", pool.rows[0], net)
            self._call(place, "backward", loss, net)
        elif how == "forward":
            pool.losses.append(self._call(place, how, self._row(place), net))
            if self._chance(2):  # something in between that may touch what the graph has saved
                loss = pool.losses[-1]
                self._statements(place, at_least=0)
                if loss in pool.losses:
                    pool.losses.remove(loss)
                    self._call(place, "backward", loss, net)
        elif how == "backward":
            loss = self._pick(losses)
            pool.losses.remove(loss)
            self._call(place, how, loss, net)
        elif how == "look":
            pool.ints.append(self._call(place, self._pick(["gradient", "weight"]), net))
        else:
            self._call(place, how, net)

    def _strange(self: _Drawing, place: Place) -> None:
        """A call whose effects are drawn, or an earlier one once more."""
        known = [name for name in self.ops if name.startswith("strange")]
        if known and self._pick([True, False]):
            name = self._pick(known)
        else:
            subsets = st.lists(st.sampled_from(ACCESSES), max_size=2, unique=True)
            reads = self.draw(subsets)
            writes = [a for a in self.draw(subsets) if a[3] is not None]
            name = f"strange{len(known)}"
            self.ops[name] = strange(name, reads, writes)
        roots = [self.roots[root] for root in self.ops[name].signature.params[1:]]
        place.pool.ints.append(self._call(place, name, self._int(place), *roots))

    def _step(self: _Drawing, place: Place) -> None:
        lent: dict[str, Any] = {"alias": ("sim.outputs",), "borrowed": True}
        sim = self.roots["sim"]
        result = self._call(place, "step", self._int(place), sim, **lent)
        parts = self._call(place, "unpack", result, **lent)
        obs = place.builder.item(parts, 0)
        pool = place.pool
        for position, found in ((1, pool.ints), (2, pool.bools)):
            picked = place.builder.item(parts, position)
            facts.put(picked, alias=(), borrowed=False)
            found.append(picked)
        # handed on as a copy: what a view may be used for is up to `_view`
        pool.rows.append(self._call(place, "blend", obs, obs))

    def _host(self: _Drawing, place: Place) -> None:
        self._call(place, "log", self._int(place))

    def _opaque(self: _Drawing, place: Place) -> None:
        place.pool.ints.append(self._call(place, "meddle", self._int(place)))
