"""How the actions of a body name values: directly, or as they were some trips ago.

In a body whose stages spread over several trips, a value that is made in emitted trip ``e`` and
used ``d`` trips later is read from a copy that is handed down at the end of each trip. A carried
value is updated where all its readers expect it: at the end of the trip, or right where the next
one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch.fx as fx

from rose_compiler.base.errors import VerifyError, fail
from rose_compiler.codegen.names import Names
from rose_compiler.codegen.schedule import Action, Body, source_of, uses_of
from rose_compiler.ir import facts
from rose_compiler.ir.ops import SHARD, STATE
from rose_compiler.ir.program import LoopView, Value, is_call

#: The trip and place at which the values handed into a body are there.
START = (0, -1)


class Scope:
    """Names for one body. This one is for bodies that run in program order."""

    def __init__(self, variables: dict[fx.Node, str]) -> None:
        self.variables = variables

    def ref(self, node: fx.Node, at: Action | None) -> str:
        """How an action reads a value; without an action, behind all of them."""
        return self.variables[node]

    def made(self, node: fx.Node) -> tuple[str, ...]:
        """Further variables that take over a value as soon as it is made."""
        return ()


@dataclass
class Carried:
    """One carried value of a spread body. ``variable`` holds it for program trip ``e - stage`` in
    emitted trip ``e``; ``next`` has the value of one trip later from where it is made."""

    param: fx.Node
    value: Value
    variable: str
    stage: int
    at: int
    early: bool = False  # all readers come after the next value is made: one variable is enough
    copy: str = ""  # the variable of its value for another carried value
    next: str = ""
    older: list[str] = field(default_factory=list)


class Spread(Scope):
    """Names for a body whose actions may belong to different trips."""

    def __init__(
        self,
        variables: dict[fx.Node, str],
        body: Body,
        names: Names,
        name: Callable[[fx.Node], str],
        task: Callable[[fx.Node], str],
    ) -> None:
        super().__init__(variables)
        self.body, self.names, self.name, self.task = body, names, name, task
        self.issued = {a.node: a for a in body.actions if a.what != "await"}
        self.kept: dict[fx.Node, list[str]] = {}
        self.carried: dict[fx.Node, Carried] = {}
        self._after: dict[fx.Node, list[str]] = {}
        if body.loop is not None:
            self._carry(body.loop)
        for action in self.issued.values():
            for node in _read(action.node):
                self.ref(node, action)

    # -- carried values

    def _carry(self, loop: LoopView) -> None:
        params = list(loop.carried)
        for param, value in zip(params, loop.carried_next, strict=True):
            stage, at = self._handed_on(param, value, loop, set())
            if self.body.once:  # nobody reads what the only trip hands on
                stage, at = self.body.depth, -1
            self.carried[param] = Carried(param, value, self.variables[param], stage, at)
        for carried in self.carried.values() if not self.body.once else ():
            users = list(uses_of(carried.param))
            delays = {self._delay(carried, u) for u in users if u.op != "output"}
            if carried.param in self.body.copied:
                delays.add(1 + self.body.copied[carried.param][0] - carried.stage)
                carried.copy = self.names.fresh(f"{carried.variable}_copy")
            copied = not carried.copy and any(u.op == "output" for u in users)
            if any(d < 0 for d in delays):
                raise broken(carried.param, "is read before it is made")
            made = isinstance(carried.value, fx.Node) and (
                source_of(carried.value) in self.body.available or carried.value in self.body.copied
            )
            if made and not copied and delays <= {0}:
                assert isinstance(carried.value, fx.Node)
                carried.early = True
                self._make_in_place(carried, carried.value)
                continue
            if 0 in delays:
                if not isinstance(carried.value, fx.Node) or carried.at < 0:
                    raise broken(carried.param, "is passed on through a body that is spread")
                carried.next = self.names.fresh(f"{carried.variable}_next")
                self._after.setdefault(carried.value, []).append(carried.next)
            carried.older = [
                self.names.fresh(f"{carried.variable}_prev")
                for _ in range(max(delays, default=1) - 1)
            ]

    def _make_in_place(self, carried: Carried, value: fx.Node) -> None:
        """Let the next value be made in the variable of the carried one, if that has no other."""
        alone = sum(c.value is value for c in self.carried.values()) == 1
        if alone and value not in self.body.copied:
            made_in = self.variables.setdefault(value, carried.variable)
            if made_in == carried.variable:
                return
        self._after.setdefault(value, []).append(carried.variable)

    def _handed_on(
        self, param: fx.Node, value: Value, loop: LoopView, seen: set[fx.Node]
    ) -> tuple[int, int]:
        """The stage and place at which the next value is there."""
        if not isinstance(value, fx.Node) or param in seen:
            return START
        source = source_of(value)
        if source in self.body.available:
            return self.body.available[source]
        if value in self.body.copied:
            return self.body.copied[value]
        if value in loop.carried:
            further = loop.carried_next[loop.carried.index(value)]
            stage, _ = self._handed_on(value, further, loop, {*seen, param})
            return stage, -1
        return START

    def _delay(self, carried: Carried, user: fx.Node) -> int:
        return 1 + self.issued[user].stage - carried.stage

    # -- references

    def ref(self, node: fx.Node, at: Action | None) -> str:
        if node in self.carried:
            return self._carried_ref(self.carried[node], at)
        source = source_of(node)
        if source not in self.body.available:
            if self.body.loop is not None and node is self.body.loop.index and at is not None:
                return self._older(node, at.stage) if at.stage else self.variables[node]
            return self.variables[node]
        stage, order = self.body.available[source]
        if at is None:
            return self.variables[node]
        if (source, at.node) in self.body.passed:
            return self._in_task(node)
        behind = at.stage - stage
        if behind < 0 or (behind == 0 and at.order <= order):
            raise broken(at.node, f"is issued before {source}, which it uses, is there")
        if behind == 0 or (behind == 1 and at.order < order):
            return self.name(node)
        return self._older(node, behind)

    def _in_task(self, node: fx.Node) -> str:
        """A result, or a part of it, that has not arrived yet."""
        if node in self.issued:
            return self.task(node)
        assert isinstance(node.args[0], fx.Node)
        return f"{self._in_task(node.args[0])}[{node.args[1]}]"

    def _older(self, node: fx.Node, trips: int) -> str:
        kept = self.kept.setdefault(node, [])
        while len(kept) < trips:
            kept.append(self.names.fresh(f"{self.name(node)}_prev"))
        return kept[trips - 1]

    def _carried_ref(self, carried: Carried, at: Action | None) -> str:
        if self.body.once:
            return carried.variable
        if at is None or carried.early:
            if at is not None and at.order <= carried.at:
                raise broken(at.node, f"is issued before the next {carried.param} is there")
            return carried.variable
        delay = 1 + at.stage - carried.stage
        if delay == 0:
            if at.order <= carried.at:
                raise broken(at.node, f"is issued before the next {carried.param} is there")
            return carried.next
        return carried.variable if delay == 1 else carried.older[delay - 2]

    def made(self, node: fx.Node) -> tuple[str, ...]:
        return tuple(self._after.get(node, ()))

    # -- what the loop does around its actions

    def initial(self) -> list[str]:
        """Variables that must exist before the first trip, beside the carried ones."""
        found = []
        for node, copies in self.kept.items():
            stage = self.body.available.get(source_of(node), START)[0]
            found += [self.variables[node], *copies] if stage else copies[:-1]
        made = {c.variable for c in self.carried.values()}
        return [name for name in dict.fromkeys(found) if name not in made]

    def copies(self) -> list[tuple[str, str]]:
        """(variable, source) at the end of each emitted trip, in this order."""
        found: list[tuple[str, str]] = []
        for node, older in self.kept.items():
            found += _handed_down([self.variables[node], *older])
        for carried in self.carried.values():
            found += _handed_down([carried.variable, *carried.older])
        return found

    def updates(self) -> list[Carried]:
        """The carried values that are updated at the end of a trip."""
        return [c for c in self.carried.values() if not c.early and c.value is not c.param]

    def following(self, carried: Carried) -> str | None:
        """The variable that holds the next value of a carried one, if that is a copy."""
        value = carried.value
        if isinstance(value, fx.Node) and value in self.body.copied:
            return self.carried[value].copy
        return None


def _read(node: fx.Node) -> Iterator[fx.Node]:
    """What a node uses; of an object below another, that other one."""
    for used in node.all_input_nodes:
        if is_call(used, STATE) or is_call(used, SHARD):
            yield from _read(used)
        elif used.op != "get_attr":
            yield used


def _handed_down(variables: list[str]) -> list[tuple[str, str]]:
    pairs = list(zip(variables[1:], variables, strict=False))
    return pairs[::-1]


def broken(node: fx.Node, what: str) -> VerifyError:
    """The error of a schedule that breaks a dependence."""
    error = fail("verify-scheduled", f"{node} {what}", where=facts.get(node).origin.where)
    assert isinstance(error, VerifyError)
    return error
