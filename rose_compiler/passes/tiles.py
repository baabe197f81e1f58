"""The mechanics of cutting a recurrence into tiles: clones, slices, joins."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from rose_compiler.ir import facts
from rose_compiler.ir.effects import related
from rose_compiler.ir.ops import CONCAT, MERGE, ROWS, SHARD
from rose_compiler.ir.program import (
    Value,
    is_call,
    is_item,
    is_state,
    maker_of,
    op_of,
    output_node,
)
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.base import erased
from rose_compiler.passes.recurrence import (
    Recurrence,
    env_state,
    items,
    result_name,
)
from rose_compiler.passes.tiling import Span, Tiling, with_rows


class Tiler:
    """Rewrites one recurrence; :meth:`run` does all of it."""

    def __init__(self, found: Recurrence, tiling: Tiling, rewrite: Rewriter) -> None:
        self.found = found
        self.tiling = tiling
        self.rewrite = rewrite
        self.loop = found.loop
        self.env = env_state(found)
        # value of the whole batch -> its part, by group and by shard
        self.group: dict[tuple[fx.Node, int], fx.Node] = {}
        self.shard: dict[tuple[fx.Node, int, int], fx.Node] = {}
        self.cut: dict[tuple[fx.Node, Span], fx.Node] = {}
        self.cycle = {*found.nodes, *(self.loop.carried[k] for k in found.carried)}
        # effects are asked for before anything changes
        scope = rewrite.deps.scope
        written = {e.state for n in self.loop.graph.nodes for e in scope.effects(n) if e.write}
        self.alias: dict[fx.Node, tuple[str, ...]] = {}
        for node in (*self.loop.graph.nodes, *self.loop.node.graph.nodes):
            names = [f"%{d.name}" for d in scope.definers(node)]
            self.alias[node] = (
                *scope.aliases(node),
                *(n for n in names if any(related(n, w) for w in written)),
            )

    def run(self) -> None:
        """Cut the batch: clone the cycle, join what is used whole, drop what is left over."""
        params = self._carry()
        for node in self.found.before:
            for g in range(len(self.tiling.groups)):
                self.group[node, g] = self._clone_group(node, g)
        for g, spans in enumerate(self.tiling.groups):
            for s in range(len(spans)):
                self._step(g, s)
        for node in self.found.after:
            for g, spans in enumerate(self.tiling.groups):
                for s in range(len(spans)):
                    self.shard[node, g, s] = self._clone_shard(node, g, s)
        self._hand_on(params)
        self._join()

    # -- what the trips hand on

    def _carry(self) -> dict[tuple[int, int], fx.Node]:
        """Carry each group's part of the carried values on the cycle."""
        params: dict[tuple[int, int], fx.Node] = {}
        for k in self.found.carried:
            init, whole_param = self.loop.carried_init[k], self.loop.carried[k]
            for g, (lo, hi) in enumerate(self.tiling.spans):
                part = self.rewrite.call(
                    ROWS,
                    init,
                    lo,
                    hi,
                    before=self.loop.node,
                    like=init if isinstance(init, fx.Node) else None,
                    name=f"{whole_param.name}_{g}_first",
                    spec=with_rows(facts.get(whole_param).spec, hi - lo),
                    alias=self.alias.get(init, ()) if isinstance(init, fx.Node) else (),
                )
                param, result = self.rewrite.add_carried(
                    self.loop, part, lambda p: p, name=f"{whole_param.name}_{g}"
                )
                self.rewrite.erase(result)
                self.rewrite.set_facts(param, spec=facts.get(part).spec)
                params[k, g] = param
                self.group[whole_param, g] = param
        return params

    def _hand_on(self, params: dict[tuple[int, int], fx.Node]) -> None:
        for (k, g), param in params.items():
            following = self.loop.carried_next[k]
            assert isinstance(following, fx.Node)
            if (following, g) in self.group:
                part = self.group[following, g]
            else:
                shards = range(len(self.tiling.groups[g]))
                parts = [self.shard[following, g, s] for s in shards]
                # where the shards are: others may use the whole batch further up than its end
                rows = self.tiling.group_rows[g]
                part = self._joined(parts, following, rows, before=following)
                self.group[following, g] = part
            self._set_next(param, part)

    def _set_next(self, param: fx.Node, part: fx.Node) -> None:
        self.rewrite.replace(param, part, users=[output_node(self.loop.graph)])

    # -- clones

    def _clone_group(self, node: fx.Node, g: int) -> fx.Node:
        lo, hi = self.tiling.spans[g]
        mapped = {}
        for used, batched in self._inputs(node):
            if used in self.cycle:
                mapped[used] = self.group[used, g]
            elif batched:
                mapped[used] = self._rows(used, lo, hi, before=node)
        return self._clone(node, mapped, hi - lo, node, g)

    def _step(self, g: int, s: int) -> None:
        step = self.found.step
        lo, hi = self.tiling.groups[g][s]
        index = self._index(g, s)
        env = self.rewrite.call(
            SHARD,
            self._outer(self.found.env),
            index,
            before=self.loop.node,
            like=step,
            name=f"{self.found.env.name}_{index}",
            state=f"{self.env}.shards.{index}",
        )
        action = self.found.action
        assert isinstance(action, fx.Node)
        mapped = {
            action: self._at_shard(action, g, s, before=step),
            self.found.env: self.rewrite.use(env, step.graph),
        }
        self.shard[step, g, s] = self._clone(step, mapped, hi - lo, step, index)

    def _clone_shard(self, node: fx.Node, g: int, s: int) -> fx.Node:
        lo, hi = self.tiling.groups[g][s]
        mapped = {}
        for used, batched in self._inputs(node):
            if used in self.cycle:
                mapped[used] = self._at_shard(used, g, s, before=node)
            elif batched:
                mapped[used] = self._rows(used, lo, hi, before=node)
        clone = self._clone(node, mapped, hi - lo, node, self._index(g, s))
        known = facts.get(clone)
        alias = tuple(self._at_shard_state(a, g, s) for a in known.alias)
        if alias != known.alias:
            self.rewrite.set_facts(clone, alias=alias)
        return clone

    def _index(self, g: int, s: int) -> int:
        """The number of a shard, given that of its group and its place there."""
        return sum(len(spans) for spans in self.tiling.groups[:g]) + s

    def _at_shard_state(self, name: str, g: int, s: int) -> str:
        """Buffers of the whole simulator as those of one shard."""
        if name != self.env and not name.startswith(f"{self.env}."):
            return name
        index = self._index(g, s)
        return f"{self.env}.shards.{index}" + name[len(self.env) :]

    def _clone(
        self, node: fx.Node, mapped: dict[fx.Node, fx.Node], rows: int, before: fx.Node, part: int
    ) -> fx.Node:
        copy = self.rewrite.clone(node, mapped, before=before, name=f"{node.name}_{part}")
        known = facts.get(node)
        cost = None if known.cost is None else known.cost * rows / self.tiling.size
        self.rewrite.set_facts(copy, spec=with_rows(known.spec, rows), cost=cost)
        return copy

    def _inputs(self, node: fx.Node) -> list[tuple[fx.Node, bool]]:
        """The values a node takes, and whether each is given row by row."""
        if is_item(node) or not is_call(node):
            return [(n, True) for n in node.all_input_nodes]
        signature = op_of(node).signature
        axes = signature.separable()
        return [
            (value, axes.get(name) == 0)
            for name, value in zip(signature.params, node.args, strict=True)
            if isinstance(value, fx.Node) and not is_state(value)
        ]

    # -- slices and joins

    def _outer(self, inner: fx.Node) -> Value:
        return self.loop.outer(inner)

    def _at_shard(self, value: fx.Node, g: int, s: int, *, before: fx.Node) -> fx.Node:
        """A shard's part of a value on the cycle."""
        if (value, g, s) in self.shard:
            return self.shard[value, g, s]
        part = self.group[value, g]
        spans = self.tiling.groups[g]
        if len(spans) == 1:
            return part
        start = spans[0][0]
        lo, hi = spans[s]
        return self._rows(part, lo - start, hi - start, before=before, alias=self.alias.get(value))

    def _rows(
        self,
        value: fx.Node,
        lo: int,
        hi: int,
        *,
        before: fx.Node,
        alias: tuple[str, ...] | None = None,
    ) -> fx.Node:
        found = self.cut.get((value, (lo, hi)))
        if found is None:
            found = self.rewrite.call(
                ROWS,
                value,
                lo,
                hi,
                before=before,
                like=before,
                name=f"{value.name}_rows",
                spec=with_rows(facts.get(value).spec, hi - lo),
                alias=self.alias.get(value, ()) if alias is None else alias,
            )
            self.cut[value, (lo, hi)] = found
        return found

    def _joined(
        self, parts: list[fx.Node], like: fx.Node, rows: int, *, before: fx.Node
    ) -> fx.Node:
        if len(parts) == 1:
            return parts[0]
        spec = with_rows(facts.get(like).spec, rows)
        return self.rewrite.call(
            CONCAT, *parts, before=before, like=like, spec=spec, name=f"{like.name}_all"
        )

    # -- who uses whole batches

    def _join(self) -> None:
        """Give whole batches to the users off the cycle; drop the originals nobody needs."""
        step = self.found.step
        order = {n: k for k, n in enumerate(self.loop.graph.nodes)}
        kept = {n for n in self.found.after if is_call(n) and self._stays(n)}
        for node in (*self.found.before, *self.found.after):
            if node in kept or maker_of(node) in kept:
                continue
            for value in (node, *items(node)):
                users = [u for u in value.users if self._outside(u, kept)]
                if users and not (value is node and op_of_results(node) > 1):
                    first = min(users, key=lambda u: order.get(u, len(order)))
                    self.rewrite.replace(value, self._whole(value, first), users=users)
        users = [u for u in step.users if u in kept or u not in self.cycle]
        if users:
            results = [
                self.shard[step, g, s]
                for g, spans in enumerate(self.tiling.groups)
                for s in range(len(spans))
            ]
            merged = self.rewrite.call(
                MERGE, self.found.env, *results, before=step, like=step, spec=facts.get(step).spec
            )
            self.rewrite.replace(step, merged, users=users)
            self._own(merged)
        for node in reversed(self.found.nodes):
            for picked in list(items(node)):
                if not erased(picked) and not picked.users:
                    self.rewrite.erase(picked)
            if not erased(node) and not node.users:
                self.rewrite.erase(node)

    def _stays(self, node: fx.Node) -> bool:
        """Whether an operation behind the step is computed whole as well, from the merged result:
        some result of it that is used off the cycle has no rows."""
        axes = op_of(node).signature.separable()
        values = (node,) if op_of_results(node) == 1 else tuple(items(node))
        return any(
            axes.get(result_name(value)) != 0
            for value in values
            if any(u not in self.cycle for u in value.users)
        )

    def _outside(self, user: fx.Node, kept: set[fx.Node]) -> bool:
        """Whether a user is none of the originals that go away."""
        return (
            user in kept
            or maker_of(user) in kept
            or (user not in self.cycle and not (is_item(user) and maker_of(user) in self.cycle))
        )

    def _whole(self, value: fx.Node, before: fx.Node) -> fx.Node:
        """All rows of a value on the cycle, or of another result of an operation there."""
        parts = []
        for g, spans in enumerate(self.tiling.groups):
            if (value, g) in self.group or (maker_of(value), g) in self.group:
                parts.append(self._part(value, self.group, (g,)))
            else:
                parts += [self._part(value, self.shard, (g, s)) for s in range(len(spans))]
        return self._joined(parts, value, self.tiling.size, before=before)

    def _part(self, value: fx.Node, parts: dict[Any, fx.Node], at: tuple[int, ...]) -> fx.Node:
        if (value, *at) in parts:
            return parts[value, *at]
        of = parts[maker_of(value), *at]
        assert is_item(value)
        position = value.args[1]
        assert isinstance(position, int)
        picked = self.rewrite.item(of, position, f"{value.name}_{'_'.join(map(str, at))}")
        spans = self.tiling.groups[at[0]]
        lo, hi = spans[at[1]] if len(at) > 1 else (spans[0][0], spans[-1][1])
        known = facts.get(value)
        self.rewrite.set_facts(picked, spec=with_rows(known.spec, hi - lo), alias=known.alias)
        return picked

    def _own(self, merged: fx.Node) -> None:
        """What lay in the simulator's buffers lies in the memory of a merge now."""
        todo, seen = [merged], {merged}
        while todo:
            for user in todo.pop().users:
                if user in seen or user.op != "call_function":
                    continue
                seen.add(user)
                todo.append(user)
                known = facts.get(user)
                if any(is_state(n) for n in user.all_input_nodes):
                    continue
                alias = tuple(
                    dict.fromkeys(
                        f"%{merged.name}" if related(a, self.env) else a for a in known.alias
                    )
                )
                if alias != known.alias or known.borrowed:
                    self.rewrite.set_facts(user, alias=alias, borrowed=False)


def op_of_results(node: fx.Node) -> int:
    """How many results a node has; an item is one."""
    return op_of(node).signature.results if is_call(node) else 1
