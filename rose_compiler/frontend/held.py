"""What states hold references to: reading them may read what was put there.

``self.obs = next_obs`` stores a reference. Who reads ``self.obs`` later reads the memory that
``next_obs`` has: a simulator's buffer, say, that its next step overwrites. So the states that a
stored value may share memory with are read by whoever reads the attribute, and written by whoever
changes its contents in place.
"""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.frontend.effects_val import Effects
from rose_compiler.ir import facts
from rose_compiler.ir.effects import EVERYTHING, parse_entry, related
from rose_compiler.ir.program import Program, is_state, op_of
from rose_compiler.ir.scope import Scope

_MAX_ROUNDS = 10


def add_held(program: Program, found: dict[fx.Node, Effects]) -> None:
    """Add to operations the effects on what the states hold that they touch."""
    scope = Scope(program)
    written_values = _written_values(found, scope)
    inside = {s for node, e in found.items() for s in _states(node, e.inside, scope)}
    holds: dict[str, dict[str, None]] = {}
    for node, effects in found.items():
        keeps: list[tuple[str, str]] = []
        for holders, values in effects.kept:
            for holder in holders:
                root = parse_entry(holder).root
                argument = _argument(node, root)
                if argument is not None and not is_state(argument) and holder == root:
                    keeps += [
                        (root, r) for v in values if _is_value(node, r := parse_entry(v).root)
                    ]
            for state in _states(node, holders, scope):
                held = holds.setdefault(state, {})
                held.update(dict.fromkeys(_states(node, values, scope)))
                _join(node, values, state, written_values, inside, scope)
        if keeps:
            op_of(node).attributes["keeps"] = tuple(dict.fromkeys(keeps))
    _close(holds)
    if not holds:
        return
    for node, effects in found.items():
        changed = _states(node, effects.inside, scope)
        for state in _states(node, effects.reads, scope):
            for other in _held_by(holds, state):
                effects.reads.setdefault(f"@{other}")
        for state in changed:
            for other in _held_by(holds, state):
                effects.reads.setdefault(f"@{other}")
                effects.writes.setdefault(f"@{other}")


def _held_by(holds: dict[str, dict[str, None]], state: str) -> list[str]:
    """What a state, or one above or below it, holds references to."""
    if state == EVERYTHING:
        return []
    return [o for holder, held in holds.items() if related(holder, state) for o in held]


def _close(holds: dict[str, dict[str, None]]) -> None:
    """What is held by what is held is held too."""
    for _ in range(_MAX_ROUNDS):
        changed = False
        for state, held in holds.items():
            held.pop(state, None)
            for other in list(held):
                for holder, more in list(holds.items()):
                    if related(holder, other) and holder != state:
                        new = [m for m in more if m not in held and m != state]
                        held.update(dict.fromkeys(new))
                        changed |= bool(new)
        if not changed:
            return


def _join(
    node: fx.Node,
    values: frozenset[str],
    state: str,
    written: set[fx.Node],
    inside: set[str],
    scope: Scope,
) -> None:
    """A stored value is the same thing as the attribute, where either is changed in place."""
    for text in values:
        argument = _argument(node, parse_entry(text).root)
        if argument is None or is_state(argument):
            continue
        for definer in scope.definers(argument):
            if definer in written or any(related(state, i) for i in inside):
                alias = dict.fromkeys([*facts.get(definer).alias, state])
                facts.put(definer, alias=tuple(alias))


def _written_values(found: dict[fx.Node, Effects], scope: Scope) -> set[fx.Node]:
    """The makers of values that some operation changes in place."""
    written: set[fx.Node] = set()
    for node, effects in found.items():
        for text in effects.writes:
            argument = _argument(node, parse_entry(text).root)
            if argument is not None and not is_state(argument):
                written.update(scope.definers(argument))
    return written


def _states(node: fx.Node, entries: object, scope: Scope) -> list[str]:
    """The states that entries of an operation name, directly or as aliases of its values."""
    states: dict[str, None] = {}
    for text in entries:  # type: ignore[attr-defined]
        entry = parse_entry(text)
        if entry.absolute is not None:
            states[entry.absolute] = None
            continue
        argument = _argument(node, entry.root)
        if argument is None:
            continue
        if is_state(argument):
            below = f".{entry.path}" if entry.path else ""
            states[facts.get(argument).state + below] = None
        else:
            states.update(dict.fromkeys(scope.aliases(argument)))
    return [s for s in states if not s.startswith("%")]


def _argument(node: fx.Node, param: str) -> fx.Node | None:
    params = op_of(node).signature.params
    if param not in params:
        return None
    found = node.args[params.index(param)]
    return found if isinstance(found, fx.Node) else None


def _is_value(node: fx.Node, param: str) -> bool:
    argument = _argument(node, param)
    return argument is not None and not is_state(argument)
