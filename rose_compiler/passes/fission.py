"""The mechanics of loop fission: inputs are kept, one call computes, a second loop stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from rose_compiler.ir import bodies, facts
from rose_compiler.ir.facts import LoopFacts
from rose_compiler.ir.ops import APPEND, JOIN_ROWS, NEW_LIST, PIECE, SNAPSHOT, SPLIT_ROWS, STATE
from rose_compiler.ir.program import LoopView, Value, is_call, is_item, is_state, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.recurrence import items
from rose_compiler.passes.tiling import with_rows


@dataclass(frozen=True)
class Fission:
    """What leaves a loop: ``batched`` is computed in one call, ``replayed`` once a trip behind it,
    both in program order; ``kept`` are the values that the loop has to keep for them."""

    batched: tuple[fx.Node, ...] = ()
    replayed: tuple[fx.Node, ...] = ()
    kept: tuple[fx.Node, ...] = ()
    copied: frozenset[fx.Node] = frozenset()
    trips: int = 0

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (*self.batched, *self.replayed)


def values_of_trip(node: fx.Node, loop: LoopView) -> Iterator[fx.Node]:
    """The values of a trip that an operation takes, the index left out."""
    captured = {*loop.captured_params, loop.index}
    for used in node.all_input_nodes:
        if used not in captured and not is_state(used):
            yield used


def batch_rows(node: fx.Node) -> int | None:
    """The rows of one trip of an operation's batch."""
    axes = op_of(node).signature.separable()
    for name, value in zip(op_of(node).signature.params, node.args, strict=True):
        if name in axes and isinstance(value, fx.Node) and (n := rows_known(value)) is not None:
            return n
    return None


def rows_known(value: fx.Node) -> int | None:
    """How many rows a value has as a batch, ``None`` where that is not known."""
    return facts.rows_of(facts.get(value).spec)


def _keeps(node: fx.Node) -> bool:
    """Whether an operation puts a value where it stays, for whoever comes later to write it."""
    return is_call(node) and not {"keeps", "retains"}.isdisjoint(op_of(node).attributes)


@dataclass
class Splitter:
    """Takes fissions out of one loop; :meth:`run` does all of it."""

    loop: LoopView
    found: list[Fission]
    rewrite: Rewriter
    lists: dict[fx.Node, fx.Node] = field(default_factory=dict)
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
    parts: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def run(self) -> None:
        """Keep the inputs, call once behind the loop, then go through the trips again."""
        behind = self.loop.node.next
        order = {n: k for k, n in enumerate(self.loop.graph.nodes)}
        for plan in self.found:
            for value in plan.kept:
                self._keep(value, plan, order)
        for plan in self.found:
            for node in plan.batched:
                self._call(node, behind)
        self._replay(
            behind, sorted((n for f in self.found for n in f.replayed), key=order.__getitem__)
        )
        gone = {n for f in self.found for n in f.nodes}
        for node in reversed(list(self.loop.graph.nodes)):
            if node in gone or (is_item(node) and node.args[0] in gone):
                self.rewrite.erase(node)

    def _keep(self, value: fx.Node, plan: Fission, order: dict[fx.Node, int]) -> None:
        if value in self.lists:
            return
        made = self.rewrite.call(
            NEW_LIST, before=self.loop.node, like=self.loop.node, name=f"kept_{value.name}"
        )
        self.rewrite.set_facts(
            made, state=bodies.fresh_state(self.rewrite.program, f"%{made.name}")
        )
        self.lists[value] = made
        users = [n for n in plan.nodes if value in n.all_input_nodes]
        at = min(users, key=lambda n: order[n])
        entry = value
        if value in plan.copied:
            spec = facts.get(value).spec
            entry = self.rewrite.call(SNAPSHOT, value, before=at, like=at, spec=spec)
        self.rewrite.call(APPEND, made, entry, before=at, like=at)

    def _joined(self, value: fx.Node, behind: fx.Node, like: fx.Node) -> fx.Node:
        if value not in self.whole:
            rows = rows_known(value)
            trips = next(f.trips for f in self.found if value in f.kept)
            spec = with_rows(facts.get(value).spec, (rows or 0) * trips)
            self.whole[value] = self.rewrite.call(
                JOIN_ROWS, self.lists[value], before=behind, like=like, spec=spec
            )
        return self.whole[value]

    def _call(self, node: fx.Node, behind: fx.Node) -> None:
        args: list[Value] = []
        for used in node.args:
            if isinstance(used, fx.Node) and used in self.lists:
                args.append(self._joined(used, behind, node))
            elif isinstance(used, fx.Node) and used in self.whole:
                args.append(self.whole[used])
            else:
                args.append(self._outside(used, behind))
        trips = next(f.trips for f in self.found if node in f.nodes)
        rows = (batch_rows(node) or 0) * trips
        spec = with_rows(facts.get(node).spec, rows)
        made = self.rewrite.call(
            op_of(node), *args, before=behind, like=node, name=node.name, spec=spec
        )
        self.whole[node] = made
        for picked in items(node):
            position = picked.args[1]
            assert isinstance(position, int)
            one = self.rewrite.item(made, position)
            self.rewrite.set_facts(one, spec=with_rows(facts.get(picked).spec, rows))
            self.whole[picked] = one

    def _outside(self, used: Value, behind: fx.Node) -> Value:
        if not isinstance(used, fx.Node):
            return used
        if is_call(used, STATE):
            root = self.loop.outer(used.args[0])  # type: ignore[arg-type]
            known = facts.get(used)
            return self.rewrite.call(
                STATE, root, used.args[1], before=behind, name=used.name, state=known.state
            )
        return self.loop.outer(used)

    def _replay(self, behind: fx.Node, nodes: list[fx.Node]) -> None:
        if not nodes:
            return
        for node in nodes:
            for used in values_of_trip(node, self.loop):
                if used in nodes or used in self.parts:
                    continue
                rows = self.lists.get(used)
                whole = self._joined(used, behind, node) if rows is not None else self.whole[used]
                counted = rows if rows is not None else next(iter(self.lists.values()))
                self.parts[used] = self.rewrite.call(
                    SPLIT_ROWS, whole, counted, before=behind, like=node, name=f"{used.name}_rows"
                )
        known = self.loop.facts
        label = f"{known.label or self.loop.node.name}_late"
        body = self.rewrite.new_loop(
            before=behind,
            bounds=self.loop.bounds,
            known=LoopFacts("range", label, known.index),
            like=self.loop.node,
        )
        start, _, step = self.loop.bounds
        made: dict[fx.Node, Any] = {self.loop.index: body.index}
        for used, parts in self.parts.items():
            spec = facts.get(used).spec
            made[used] = body.call(PIECE, parts, body.index, start, step, name=used.name, spec=spec)
            if any(map(_keeps, nodes)):
                # pieces share their memory, and the count of its writes, with all others
                made[used] = body.call(SNAPSHOT, made[used], name=used.name, spec=spec)
        for node in nodes:
            if is_item(node):
                made[node] = body.item(made[node.args[0]], node.args[1], node.name)  # type: ignore[index, arg-type]
                continue
            args = [
                made[a] if isinstance(a, fx.Node) and a in made else self._outside(a, behind)
                for a in node.args
            ]
            old = facts.get(node)
            made[node] = body.call(
                op_of(node), *args, like=node, name=node.name, spec=old.spec, alias=old.alias
            )
        body.close()
