"""The statements that a traced operation stands for, run as a whole or in two halves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch.fx as fx

from rose_compiler.ir.program import is_item, op_of

#: Values of nodes: those of states are the objects behind them.
Values = dict[fx.Node, Any]


class Midway:
    """What the first half of some statements has made, in the place of each value from the middle
    of the graph that stands for them; the second half goes on from there.

    ``shape`` is that of a batch that the halves work on, () if none is known: whoever counts the
    rows of a trip asks.
    """

    __slots__ = ("shape", "values")

    def __init__(self, values: Values, shape: tuple[int, ...]) -> None:
        self.values, self.shape = values, shape


class Statements:
    """Statements in their order, by the operations that they were (``nodes``): ``inputs`` are what
    they are handed, ``outputs`` what others use of what they make.

    The nodes may be erased afterwards.
    """

    def __init__(
        self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
    ) -> None:
        known = {*nodes, *inputs}
        self.inputs = tuple(inputs)
        self._uses = {n: [maker(a, known) for a in n.args if isinstance(a, fx.Node)] for n in nodes}
        self._calls = [(n, op_of(n), [picked(a, known) for a in n.args]) for n in nodes]
        self._results = [picked(n, {*nodes}) for n in outputs]
        self._makers = [maker(n, known) for n in outputs]
        self._outputs = tuple(outputs)
        self._draw = {n for n, op, _ in self._calls if _draws(op.signature.writes)}

    def whole(self, states: Values) -> Callable[..., tuple[Any, ...]]:
        """A function of the inputs that returns all outputs, for the objects behind the states."""
        return functools.partial(self._whole, states)

    def _whole(self, states: Values, *values: Any) -> tuple[Any, ...]:
        env = {**states, **dict(zip(self.inputs, values, strict=True))}
        self._run(env, None)
        return tuple(get(env) for get in self._results)

    def lacks(
        self,
        numbers: Iterable[int],
        given: Collection[int],
        made: Collection[int],
        *,
        draws: bool | None,
    ) -> bool:
        """Whether outputs (by number) can't be made of these inputs, and of outputs that were
        ``made`` already, by number too. ``draws``: whether statements that draw are to run, all of
        them, or none may; None where none draws."""
        have = {self.inputs[k] for k in given} | {self._outputs[k] for k in made}
        return self._lacks(self._needed(numbers, have, draws=draws), draws=draws)

    def run(
        self,
        states: Values,
        values: Mapping[int, Any],
        made: Mapping[int, Any],
        midway: Midway | None,
        numbers: Sequence[int | None],
        *,
        draws: bool | None,
        batch: Any = None,
    ) -> tuple[Any, ...] | None:
        """Outputs by number, and :class:`Midway` for each None, from inputs by number, outputs that
        were ``made`` already and what the first half left; None where these are not enough. The
        rows of a ``batch`` are those of a trip."""
        env = {} if midway is None else dict(midway.values)
        env |= {self.inputs[k]: v for k, v in values.items()}
        env |= {self._outputs[k]: v for k, v in made.items() if self._outputs[k] in self._uses}
        wanted = [k for k in numbers if k is not None]
        needed = self._needed(wanted, env, draws=draws)
        if self._lacks(needed, draws=draws):
            return None
        env |= states
        self._run(env, needed)
        results = {k: self._results[k](env) for k in wanted}
        shape = tuple(getattr(batch, "shape", ()))
        left = Midway({n: v for n, v in env.items() if n not in states}, shape)
        return tuple(left if k is None else results[k] for k in numbers)

    def _lacks(self, needed: set[fx.Node], *, draws: bool | None) -> bool:
        return not needed.isdisjoint(self.inputs) or (draws is False and bool(needed & self._draw))

    def _needed(
        self, numbers: Iterable[int], have: Collection[fx.Node], *, draws: bool | None
    ) -> set[fx.Node]:
        """Statements and inputs that outputs need, except for what there is already."""
        needed = {self._makers[k] for k in numbers if self._makers[k] not in have}
        needed |= {n for n in self._draw if n not in have} if draws else set()
        for node, _, _ in reversed(self._calls):
            if node in needed:
                needed.update(n for n in self._uses[node] if n not in have)
        return needed

    def _run(self, env: Values, only: Collection[fx.Node] | None) -> None:
        for node, op, arguments in self._calls:
            if only is None or node in only:
                env[node] = op(*(get(env) for get in arguments))


def _draws(writes: Sequence[str] | None) -> bool:
    return writes is None or any(w.startswith("rng:") for w in writes)


def maker(argument: fx.Node, known: set[fx.Node]) -> fx.Node:
    """The node among the ``known`` ones that :func:`picked` would take an argument from."""
    while argument not in known and is_item(argument):
        argument = argument.args[0]  # type: ignore[assignment]  # an item is one of a node
    return argument


def picked(argument: Any, known: set[fx.Node]) -> Callable[[Values], Any]:
    """How to find an argument among the values of nodes: as that of a node, or as an item of one
    where only that is ``known``; constants are there already."""
    if not isinstance(argument, fx.Node):
        return lambda env: argument
    if argument in known or not is_item(argument):
        return lambda env: env[argument]
    of, position = picked(argument.args[0], known), argument.args[1]
    return lambda env: of(env)[position]
