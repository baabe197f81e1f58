"""The user's own statements, in the place of a graph that was not proven for the sizes or types at
hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.fx as fx

from rose_compiler.frontend.makes import of, told
from rose_compiler.frontend.record import Record
from rose_compiler.frontend.trace import Traced
from rose_compiler.ir import facts
from rose_compiler.ir.interp import resolve
from rose_compiler.ir.program import Program, op_of
from rose_compiler.ir.scope import root_of
from rose_compiler.ir.sizes import Known, Sizes, refused

#: Statements as a function of their inputs, for the objects behind the states that they use.
Function = Callable[[dict[fx.Node, Any]], Callable[..., tuple[Any, ...]]]
#: The same for some of their results, by number, of some of their inputs; None if these are not
#: enough. What it gives takes the inputs by number.
Some = Callable[[Sequence[int], Collection[int]], Function | None]


class Handed(NamedTuple):
    """What a traced operation is handed: ``names`` of its parameters, the argument of the traced
    function that each is (by its number among those, and an item of it), and how many arguments
    the function has."""

    traced: Traced
    names: Sequence[str]
    sources: Sequence[tuple[int, int | None]]
    inputs: int

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

    def positions(self) -> list[int] | None:
        """Where the function's own arguments are among the operation's, if they all are."""
        at = {a: k for k, (a, item) in enumerate(self._arguments()) if item is None}
        if self.traced.draws and len(self.names) > len(self.traced.arguments):
            return None  # random numbers were drawn in front of it
        return [at[k] for k in range(self.inputs)] if at.keys() >= set(range(self.inputs)) else None

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
    """

    def __init__(
        self,
        run: Function | None,
        states: Mapping[fx.Node, str],
        program: Program,
        names: Iterable[str],
        record: Record,
    ) -> None:
        self.run, self.states, self.names = run, dict(states), tuple(names)
        self.objects, self.seen = program.objects, record.resized_later

    def __call__(self, *args: Any) -> Any:
        for name in self.names:
            self.seen.setdefault(name, ", ".join(map(told, map(of, args))))
        if self.run is None:
            return refused(*args)
        found = {node: _object(self.objects, path) for node, path in self.states.items()}
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
    some: Some | None = None,
) -> Sizes:
    """What an operation was proven for, and what runs instead: an error where the statements lack
    an argument, or an object is not found by its name. ``whole``: it returns all results, as a
    tuple. ``some`` stands in for parts of it."""
    paths = {node: facts.get(node).state or "" for node in states}
    at = handed.positions()
    found = at is not None and all(
        _is_at(program.objects, paths[node], value) for node, value in states.items()
    )

    def run(objects: dict[fx.Node, Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            made = function(objects)(*(args[k] for k in at or ()))
            return made if whole else made[0]

        return call

    names = [op_of(n).name for n in nodes]
    stop = Otherwise(None, paths, program, names, record)
    made = Otherwise(run, paths, program, names, record) if found else stop

    def parts(results: Sequence[int], params: Sequence[str]) -> Otherwise | None:
        at = handed.numbers(params)
        function = None if some is None or at is None else some(results, at)
        if function is None or not found:
            return None

        def run(objects: dict[fx.Node, Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                made = function(objects)(dict(zip(at or (), args, strict=True)))
                return made if len(results) > 1 else made[0]

            return call

        return Otherwise(run, paths, program, names, record)

    return Sizes(handed.known(), made, stop, parts=None if handed.traced.draws else parts)


def _object(objects: Mapping[str, Any], path: str) -> Any:
    root = root_of(path)
    rest = path[len(root) + 1 :]
    return resolve(objects[root], rest) if rest else objects[root]


def _is_at(objects: Mapping[str, Any], path: str, value: Any) -> bool:
    try:
        return _object(objects, path) is value
    except (AttributeError, LookupError, TypeError, ValueError):
        return False
