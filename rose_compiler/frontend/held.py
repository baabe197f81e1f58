"""What states hold references to: reading them may read what was put there.

``self.obs = next_obs`` stores a reference. Who reads ``self.obs`` later reads the memory that
``next_obs`` has: a simulator's buffer, say, that its next step overwrites. So the states that a
stored value may share memory with are read by whoever reads the attribute, and written by whoever
changes its contents in place.
"""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.frontend.effects_val import Effects
from rose_compiler.frontend.groups import Groups
from rose_compiler.frontend.names import StateNames
from rose_compiler.ir import facts
from rose_compiler.ir.effects import EVERYTHING, ITEMS, parse_entry, related
from rose_compiler.ir.ops import LOOP
from rose_compiler.ir.program import LoopView, Program, is_call, is_item, is_state, op_of
from rose_compiler.ir.scope import Scope, nodes_in

_MAX_ROUNDS = 10


def add_held(program: Program, found: dict[fx.Node, Effects], names: StateNames) -> None:
    """Add to operations the effects on what the states hold that they touch."""
    _share_what_is_kept(program, found, names)
    _share_containers(program, found, names)
    scope = Scope(program)
    written_values = _written_values(found, scope)
    inside = {s for node, e in found.items() for s in states_of(node, e.inside, scope)}
    deep = {s for node, e in found.items() for s in states_of(node, e.deep, scope)}
    holds: dict[str, dict[str, None]] = {}
    for node, effects in found.items():
        keeps: list[tuple[str, str]] = []
        retains: dict[str, None] = {}
        for holders, values in effects.kept:
            roots = [parse_entry(v).root for v in sorted(values)]
            retains.update(dict.fromkeys(r for r in roots if _argument(node, r) is not None))
            for holder in holders:
                root = parse_entry(holder).root
                argument = _argument(node, root)
                if argument is not None and not is_state(argument):
                    keeps += [(root, r) for r in roots if _argument(node, r) is not None]
            for state in states_of(node, holders, scope):
                held = holds.setdefault(state, {})
                held.update(dict.fromkeys(states_of(node, values, scope)))
                # what is put into a container is an item of it, and no other name for it
                item = not effects.inside.isdisjoint(holders)
                _join(node, values, state, written_values, deep if item else inside, scope)
        if keeps:
            op_of(node).attributes["keeps"] = tuple(dict.fromkeys(keeps))
        if retains:
            op_of(node).attributes["retains"] = tuple(retains)
        if items := _only_items(node, effects):
            op_of(node).attributes["items"] = items
    _close(holds)
    if not holds:
        return
    for node, effects in found.items():
        changed = states_of(node, effects.deep, scope)
        for state in states_of(node, effects.reads, scope):
            for other in _held_by(holds, state):
                effects.reads.setdefault(f"@{other}")
        for state in changed:
            for other in _held_by(holds, state):
                effects.reads.setdefault(f"@{other}")
                effects.writes.setdefault(f"@{other}")


def _only_items(node: fx.Node, effects: Effects) -> tuple[str, ...]:
    """Parameters that are containers which get or lose items: no item is changed."""
    whole = {parse_entry(text).root for text in effects.deep}
    found = (parse_entry(text).root for text in effects.inside if text not in effects.deep)
    return tuple(sorted({r for r in found if r not in whole and _argument(node, r) is not None}))


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
        for origin in scope.origins(argument):
            if origin in written or any(related(state, i) for i in inside):
                alias = dict.fromkeys([*facts.get(origin).alias, state])
                facts.put(origin, alias=tuple(alias))


def _written_values(found: dict[fx.Node, Effects], scope: Scope) -> set[fx.Node]:
    """The makers of values that some operation changes in place."""
    written: set[fx.Node] = set()
    for node, effects in found.items():
        for text in effects.writes:
            argument = _argument(node, parse_entry(text).root)
            if argument is not None and not is_state(argument):
                written.update(scope.origins(argument))
    return written


def _share_what_is_kept(program: Program, found: dict[fx.Node, Effects], names: StateNames) -> None:
    """Put one ``alias`` on values that may be the same thing where one of them is changed in place.

    A list goes on holding what was appended, whatever item is taken out of it on which trip; the
    first trip need not have shown that. Members of a group are nodes and names of containers that
    a root leads to.
    """
    scope = Scope(program)
    containers = names.containers()
    groups: Groups[fx.Node | str] = Groups()
    deep: set[fx.Node | str] = set()

    def members(node: fx.Node, places: object) -> list[fx.Node | str]:
        """The values, and the containers below roots, that entries of an operation name."""
        here: dict[fx.Node | str, None] = {}
        for text in sorted(places):  # type: ignore[call-overload]
            argument = _argument(node, parse_entry(text).root)
            if argument is not None and not is_state(argument):
                here.update(dict.fromkeys(scope.origins(argument)))
        states = [s for s in states_of(node, places, scope) if s in containers]
        here.update(dict.fromkeys(sorted(states)))
        return list(here)

    for node, effects in found.items():
        deep.update(members(node, effects.deep))
        for holders, values in effects.kept:
            groups.join_all([*members(node, holders), *members(node, values)])
        outputs = op_of(node).attributes.get("outputs", ())
        for k, name in enumerate(outputs):
            held = members(node, effects.results.get(name, ()))
            for target in result_nodes(node, k, len(outputs)) if held else ():
                groups.join_all([target, *held])
    for node in program.nodes():
        if is_call(node, LOOP) and LoopView(node).facts.kind == "iter":
            loop = LoopView(node)
            for source in nodes_in(loop.bounds):
                here = list(scope.origins(source)) if not is_state(source) else []
                if is_state(source) and facts.get(source).state in containers:
                    groups.join(facts.get(source).state, loop.index)
                groups.join_all([loop.index, *here])
    position = {node: number for number, node in enumerate(program.nodes())}
    taken = {node.name for node in position}
    for group in groups.all():
        nodes = [m for m in group if isinstance(m, fx.Node)]
        nodes.sort(key=lambda n: position[n])
        if not nodes or not any(m in deep for m in group):
            continue
        shared = dict.fromkeys(a for n in nodes for a in facts.get(n).alias)
        shared.update(dict.fromkeys(m for m in group if isinstance(m, str)))
        if not shared:
            shared = {f"%{free_name(nodes[0].name, taken)}": None}
        for each in nodes:
            facts.put(each, alias=tuple(shared))


def _share_containers(program: Program, found: dict[fx.Node, Effects], names: StateNames) -> None:
    """Put one ``alias`` on values that may be the same container where it gets or loses items: on
    which trips they are one need not have shown on the first. A tuple only holds what is put in."""
    scope = Scope(program)
    containers = names.containers()
    groups: Groups[fx.Node | str] = Groups()
    changed: set[fx.Node | str] = set()

    def members(node: fx.Node, places: object) -> list[fx.Node | str]:
        here: dict[fx.Node | str, None] = {}
        for text in sorted(places):  # type: ignore[call-overload]
            argument = _argument(node, parse_entry(text).root)
            if argument is not None and not is_state(argument):
                here.update(dict.fromkeys(o for o in scope.origins(argument) if _may_hold(o)))
        here.update(dict.fromkeys(s for s in states_of(node, places, scope) if s in containers))
        return list(dict.fromkeys(m for each in here for m in tuples.get(each, (each,))))

    tuples: dict[fx.Node | str, list[fx.Node | str]] = {}
    for node, effects in found.items():
        changed.update(members(node, effects.inside))
        for holders, values in effects.kept:
            kept = members(node, values)
            groups.join_all([*members(node, holders), *kept] if kept else [])
        outputs = op_of(node).attributes.get("outputs", ())
        for k, name in enumerate(outputs):
            held = members(node, effects.results.get(name, ()))
            for target in result_nodes(node, k, len(outputs)) if held else ():
                spec = facts.get(target).spec
                if spec is not None and spec.kind == "tuple":
                    tuples[target] = held
                elif _may_hold(target):
                    groups.join_all([target, *held])
    for loop in program.loops() if tuples else ():
        for source in nodes_in(loop.bounds):
            held = [m for o in scope.origins(source) for m in tuples.get(o, ())]
            groups.join_all([loop.index, *held])
    position = {node: number for number, node in enumerate(program.nodes())}
    taken = {node.name for node in position}
    taken |= {a[1:].partition(".")[0] for n in position for a in facts.get(n).alias}
    for group in groups.all():
        nodes = sorted((m for m in group if isinstance(m, fx.Node)), key=lambda n: position[n])
        if not nodes or changed.isdisjoint(group):
            continue
        shared = dict.fromkeys(a for n in nodes for a in facts.get(n).alias)
        states = [m for m in group if isinstance(m, str)]
        if states:  # it has a name already
            shared = dict.fromkeys([a for a in shared if not a.endswith(f".{ITEMS}")])
            shared.update(dict.fromkeys(states))
        else:
            shared[f"%{free_name(nodes[0].name, taken)}.{ITEMS}"] = None
        for each in nodes:
            facts.put(each, alias=tuple(shared))
    for holder, held in tuples.items():
        assert isinstance(holder, fx.Node)
        more = (a for m in held for a in ([m] if isinstance(m, str) else facts.get(m).alias))
        facts.put(holder, alias=tuple(dict.fromkeys([*facts.get(holder).alias, *more])))


def _may_hold(node: fx.Node) -> bool:
    """Whether a value may be a container, or hold one."""
    spec = facts.get(node).spec
    return spec is None or spec.kind in ("object", "dict", "tuple")


def share_statically(node: fx.Node, effects: Effects, program: Program) -> None:
    """Let the results of an operation that never ran alias every state that they may be part of:
    nobody has seen which."""
    scope = Scope(program)
    outputs = op_of(node).attributes.get("outputs", ())
    for k, name in enumerate(outputs):
        states = sorted(states_of(node, effects.results.get(name, ()), scope))
        for target in result_nodes(node, k, len(outputs)) if states else ():
            alias = dict.fromkeys([*facts.get(target).alias, *states])
            facts.put(target, alias=tuple(alias))


def free_name(stem: str, taken: set[str]) -> str:
    """A name that nothing has yet; it counts as taken from then on."""
    n = 1
    while f"{stem}_{n}" in taken:
        n += 1
    taken.add(f"{stem}_{n}")
    return f"{stem}_{n}"


def result_nodes(node: fx.Node, position: int, results: int) -> list[fx.Node]:
    """The nodes that stand for one result of an operation."""
    if results == 1:
        return [node, *(u for u in node.users if is_item(u))]
    return [u for u in node.users if is_item(u) and u.args[1] == position]


def states_of(node: fx.Node, entries: object, scope: Scope) -> list[str]:
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
