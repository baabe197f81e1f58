"""Who shares memory with whom, from what a first trip showed."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import torch.fx as fx

from rose_compiler.frontend.groups import Groups
from rose_compiler.frontend.names import StateNames
from rose_compiler.frontend.record import KEEP, Record, memory_of
from rose_compiler.ir import facts
from rose_compiler.ir.effects import ITEMS, OUTSIDE
from rose_compiler.ir.program import Program, is_state

_CONTAINERS = (list, dict, set, collections.deque)


def find_aliases(program: Program, record: Record) -> None:
    """Put ``alias`` facts on every value that was seen to share memory with a state or with
    another value of the program.

    Memory that values share and that no root leads to has a name of its own: ``%name`` where every
    trip makes it anew, ``outside.name`` where one trip gave what an earlier one had given. A list,
    dict, set or deque that no root leads to has one more, ``%name.items``: which items it holds,
    told from their memory.
    """
    ranges: list[tuple[int, int, fx.Node]] = []
    objects: dict[int, list[fx.Node]] = {}
    holders: dict[int, list[fx.Node]] = {}
    for node, results in record.results.items():
        if is_state(node):
            continue
        states: dict[str, None] = dict.fromkeys(facts.get(node).alias)
        for result in results:
            own = set(_local_containers(result, record.names))
            for where in memory_of(result):
                if isinstance(where, int) and where in own:
                    holders.setdefault(where, []).append(node)
                elif isinstance(where, int):
                    objects.setdefault(where, []).append(node)
                    name = record.names.names.get(where)
                    if name is not None:
                        states.setdefault(name)
                else:
                    ranges.append((*where, node))
                    for name in record.names.overlapping(*where):
                        states.setdefault(name)
        if states:
            facts.put(node, alias=tuple(states))
    groups: Groups[fx.Node] = Groups()
    for nodes in objects.values():
        for other in nodes[1:]:
            groups.join(nodes[0], other)
    ranges.sort(key=lambda r: r[0])
    open_high, open_node = -1, None
    for low, high, node in ranges:
        if open_node is not None and low < open_high:
            groups.join(open_node, node)
            open_high = max(open_high, high)
        else:
            open_high, open_node = high, node
    position = {node: i for i, node in enumerate(n for g in program.graphs() for n in g.nodes)}
    taken = {node.name for node in position}
    for members in groups.all():
        members.sort(key=lambda n: position.get(n, 0))
        shared = dict.fromkeys(a for n in members for a in facts.get(n).alias)
        if not shared:  # nodes of different bodies may have one name: no group may take another's
            name, n = members[0].name, 1
            while f"{name}_{n}" in taken:
                n += 1
            taken.add(f"{name}_{n}")
            lasting = any(_same_again(record.results[m]) for m in members)
            shared = {f"{OUTSIDE}.{name}_{n}" if lasting else f"%{name}_{n}": None}
        for node in members:
            facts.put(node, alias=tuple(shared))
    _name_items(holders, position, taken, record)


def _local_containers(value: Any, names: StateNames, depth: int = 0) -> Iterator[int]:
    """The containers in a value that no root leads to, as :func:`memory_of` looks into it."""
    if isinstance(value, _CONTAINERS) and id(value) not in names.names:
        yield id(value)
    if isinstance(value, dict):
        inner: Any = value.values()
    else:
        inner = value if isinstance(value, (list, tuple, collections.deque)) else ()
    for each in list(inner)[:64] if depth < 2 else ():
        yield from _local_containers(each, names, depth + 1)


def _name_items(
    holders: dict[int, list[fx.Node]],
    position: dict[fx.Node, int],
    taken: set[str],
    record: Record,
) -> None:
    """Give containers, and what holds them, a name for which items they hold."""
    groups: Groups[int] = Groups()
    makers: dict[int, dict[fx.Node, None]] = {}
    for node, results in record.results.items():
        mine = [id(r) for r in results if id(r) in holders]  # one that each trip makes anew
        groups.join_all(mine)
        for each in mine:
            makers.setdefault(each, {})[node] = None
    together: dict[int, list[int]] = {}
    for each in holders:
        together.setdefault(groups.root(each), []).append(each)
    for members in together.values():
        inside = sorted({n for m in members for n in holders[m]}, key=lambda n: position.get(n, 0))
        if len(inside) == 1 and not facts.get(inside[0]).alias:
            continue  # it has a name of its own
        name, n = inside[0].name, 1
        while f"{name}_{n}" in taken:
            n += 1
        taken.add(f"{name}_{n}")
        lasting = any(_same_again(record.results[n]) for m in members for n in makers.get(m, ()))
        own = f"{OUTSIDE}.{name}_{n}" if lasting else f"%{name}_{n}"
        for node in inside:
            alias = dict.fromkeys([*facts.get(node).alias, f"{own}.{ITEMS}"])
            facts.put(node, alias=tuple(alias))


def _same_again(results: list[Any]) -> bool:
    """Whether a node gave memory that it had given before: something keeps it that no root leads
    to, and it is no trip's own."""
    if len(results) < KEEP:
        return False
    before, after = (list(memory_of(r)) for r in results)
    for a in before:
        for b in after:
            if a == b or (
                isinstance(a, tuple) and isinstance(b, tuple) and a[0] < b[1] and b[0] < a[1]
            ):
                return True
    return False
