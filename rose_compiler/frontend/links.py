"""Things that several paths lead to: who touches one of the paths touches them all.

A thing has the name of the shortest path to it. Where the walk of a block knows the object, it has
that name; where it only knows a path (`self.parts[i].items`), the thing may have another one.
"""

from __future__ import annotations

import torch.fx as fx

from rose_compiler.frontend.effects_val import Effects, grads_of
from rose_compiler.frontend.held import states_of
from rose_compiler.frontend.names import StateNames
from rose_compiler.ir.scope import Scope


def add_links(found: dict[fx.Node, Effects], names: StateNames, scope: Scope) -> None:
    """Add to operations the effects on the other names of what they touch."""
    if not names.links:
        return
    containers = names.containers()
    for node, effects in found.items():
        for text in list(effects.reads):
            for other in _others(node, text, names, scope):
                effects.reads.setdefault(other)
        for text in list(effects.writes):
            # another item in a list changes no item
            items = text.partition("[")[0] in effects.deep
            for state in states_of(node, [text], scope):
                others = names.linked(state, items=items or state not in containers)
                effects.writes.update(dict.fromkeys(_entries(others)))
        for places in (effects.inside, effects.deep):
            places |= {o for text in sorted(places) for o in _others(node, text, names, scope)}
        for name, held in effects.results.items():
            more = {o for text in held for o in _others(node, text, names, scope)}
            effects.results[name] = held | more


def _others(node: fx.Node, text: str, names: StateNames, scope: Scope) -> list[str]:
    return [e for s in states_of(node, [text], scope) for e in _entries(names.linked(s))]


def _entries(states: list[str]) -> list[str]:
    found = []
    for state in states:
        if state.endswith(".grads") and ".params" in state:
            state = grads_of(state.removesuffix(".grads"))
        found.append("*" if state == "*" else f"@{state}")
    return found
