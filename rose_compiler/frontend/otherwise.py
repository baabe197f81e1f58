"""The user's own statements, in the place of a graph that was not proven for the sizes or types at
hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from rose_compiler.base.drawn import state_before
from rose_compiler.frontend.makes import of, told
from rose_compiler.frontend.record import Record
from rose_compiler.frontend.statements import Midway, Statements
from rose_compiler.frontend.trace import Traced
from rose_compiler.ir import facts
from rose_compiler.ir.interp import resolve
from rose_compiler.ir.program import Program, op_of
from rose_compiler.ir.scope import root_of
from rose_compiler.ir.sizes import Known, Part, Sizes, Whole, refused

#: Statements as a function of their inputs, for the objects behind the states that they use.
Function = Callable[[dict[fx.Node, Any]], Callable[..., tuple[Any, ...]]]


class Handed(NamedTuple):
    """What a traced operation is handed: ``names`` of its parameters, the argument of the traced
    function that each is (by its number among those, and an item of it), how many arguments the
    function has, and how many items those that are tuples."""

    traced: Traced
    names: Sequence[str]
    sources: Sequence[tuple[int, int | None]]
    inputs: int
    lengths: Mapping[int, int] = MappingProxyType({})

    def known(self) -> dict[str, Known]:
        """The sizes and types that the graph was proven for, by parameter."""
        found: dict[str, Known] = {}
        for name, (argument, item) in zip(self.names, self._arguments(), strict=False):
            known = self.traced.known.get(argument)
            if known is not None and item is not None:
                known = dict(known.items).get(item)  # type: ignore[union-attr]  # of a tuple
            if known is not None:
                found[name] = known
        return found

    def positions(self) -> list[int | list[int]] | None:
        """Where the function's own arguments are among the operation's, or all items of one that is
        a tuple; None where one is not there."""
        at = {source: k for k, source in enumerate(self._arguments())}
        found: list[int | list[int]] = []
        for argument in range(self.inputs):
            if (argument, None) in at:
                found.append(at[argument, None])
                continue
            items = [at.get((argument, k)) for k in range(self.lengths.get(argument, 0))]
            if not items or None in items:
                return None
            found.append([k for k in items if k is not None])
        return found

    def noise(self) -> int | None:
        """Where the first of the random numbers is that were drawn in front."""
        count = len(self.traced.arguments)
        return next((k for k, (at, _) in enumerate(self.sources) if at >= count), None)

    def numbers(self, params: Sequence[str]) -> list[int] | None:
        """Which of the function's own arguments some parameters are, -1 for states; None where one
        is no argument of it."""
        at = {
            n: a
            for n, (a, item) in zip(self.names, self._arguments(), strict=False)
            if item is None
        }
        return [at[p] for p in params] if at.keys() >= set(params) else None

    def _arguments(self) -> list[tuple[int, int | None]]:
        of = self.traced.arguments
        given = ((of[k] if k < len(of) else None, item) for k, item in self.sources)
        return [(a if isinstance(a, int) else -1, item) for a, item in given]


class Otherwise:
    """Runs statements on what a graph would be handed, and takes note of it.

    Args:
        run: the statements, as a function of the operation's arguments; None where they can't
            stand in for it.
        states: the nodes of the states that they use, and where the objects are in ``program``.
        names: of the operations that the graph stands for; ``record`` is told that they were.
        noise: which argument is the first of the random numbers that were drawn in front: torch's
            generator is set back, and the statements draw.
    """

    def __init__(
        self,
        run: Function | None,
        states: Mapping[fx.Node, str],
        program: Program,
        names: Iterable[str],
        record: Record,
        noise: int | None = None,
    ) -> None:
        self.run, self.states, self.names = run, dict(states), tuple(names)
        self.objects, self.seen, self.noise = program.objects, record.resized_later, noise

    def __call__(self, *args: Any) -> Any:
        for name in self.names:
            self.seen.setdefault(name, ", ".join(map(told, map(of, args))))
        if self.run is None:
            return refused(*args)
        found = {node: _object(self.objects, path) for node, path in self.states.items()}
        if self.noise is not None:
            if (before := state_before(args[self.noise])) is None:
                return refused(*args)
            torch.set_rng_state(before)
        return self.run(found)(*args)


def sizes(
    program: Program,
    record: Record,
    nodes: Iterable[fx.Node],
    handed: Handed,
    states: Mapping[fx.Node, Any],
    function: Function,
    *,
    whole: bool = True,
    statements: Statements | None = None,
) -> Sizes:
    """What an operation was proven for, and what runs instead: an error where the statements lack
    an argument, or an object is not found by its name. ``whole``: it returns all results, as a
    tuple. ``statements`` stand in for parts of it."""
    paths = {node: facts.get(node).state or "" for node in states}
    at = handed.positions()
    there = all(_is_at(program.objects, paths[node], value) for node, value in states.items())

    def run(objects: dict[fx.Node, Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            made = function(objects)(*(_argument(args, k) for k in at or ()))
            return made if whole else made[0]

        return call

    names = [op_of(n).name for n in nodes]
    stop = Otherwise(None, paths, program, names, record)
    made = stop
    if there and at is not None:
        made = Otherwise(run, paths, program, names, record, handed.noise())

    def parts(part: Part) -> Otherwise | None:
        found = None if statements is None else _part(statements, handed, part)
        if found is None or not there:
            return None
        noise = part.params.index(part.noises[0]) if part.noises else None
        return Otherwise(found, paths, program, names, record, noise)

    return Sizes(handed.known(), made, stop, parts=parts)


def _argument(args: tuple[Any, ...], at: int | list[int]) -> Any:
    """An argument that was handed over, or the tuple of those that are its items."""
    if isinstance(at, int):
        return args[at]
    items = tuple(args[k] for k in at)
    return next((i.items for i in items if isinstance(i, Whole)), items)


def _part(statements: Statements, handed: Handed, part: Part) -> Function | None:
    """The statements in the place of a part of the graph, None where they can't take it: the first
    part does what its results need, and hands on what it has; the next one goes on from there."""
    own = [p for p in part.params if p not in part.made and p not in part.noises]
    given = {p: k for p, k in part.made.items() if p in part.params}
    at, inside = handed.numbers(own), len(part.noises) + part.draws
    total = len(handed.traced.draws)
    if at is None or inside not in (0, total) or (None in part.results and not part.ahead):
        return None
    draws = inside == total if total else None
    wanted = [k for k in part.results if k is not None]
    taken = [k for k in at if k >= 0]
    if None in given.values():
        if part.noises:
            return None  # what was drawn is drawn again, and may be in the middle
    else:
        earlier = [k for k in given.values() if k is not None]
        if statements.lacks(wanted, taken, earlier, draws=draws):
            return None

    def run(objects: dict[fx.Node, Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            by_name = dict(zip(part.params, args, strict=True))
            values = {k: by_name[p] for p, k in zip(own, at, strict=True) if k >= 0}
            made = {k: by_name[p] for p, k in given.items() if k is not None}
            handed_on = (by_name[p] for p, k in given.items() if k is None)
            midway = next((v for v in handed_on if isinstance(v, Midway)), None)
            batch = by_name.get(part.rows or "")
            found = statements.run(
                objects, values, made, midway, part.results, draws=draws, batch=batch
            )
            if found is None:
                return refused(*args)
            return found if len(part.results) > 1 else found[0]

        return call

    return run


def _object(objects: Mapping[str, Any], path: str) -> Any:
    root = root_of(path)
    rest = path[len(root) + 1 :]
    return resolve(objects[root], rest) if rest else objects[root]


def _is_at(objects: Mapping[str, Any], path: str, value: Any) -> bool:
    try:
        return _object(objects, path) is value
    except (AttributeError, LookupError, TypeError, ValueError):
        return False
