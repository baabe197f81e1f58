"""What parts of graphs that stand in front of a loop would take on each of its trips."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch.fx as fx

from rose_compiler.base.marks import key_of
from rose_compiler.base.profile import Profile
from rose_compiler.base.remarks import Remark
from rose_compiler.ir.deps import place, title
from rose_compiler.ir.keys import nodes_by_key
from rose_compiler.ir.ops import BRANCH, LOOP
from rose_compiler.ir.program import Program, body_of, is_call, is_item, op_of, placeholders

PASS = "hoist"


def spared(program: Program, profile: Profile) -> Iterator[Remark]:
    """A remark on each part that ``hoist`` has cut off a graph, with its time on the trips of the
    loops that use it, less that of the one time it runs, as the gain predicted from ``profile``."""
    times = {one.op: one for one in profile.ops}
    trips = {one.loop: one.trips for one in profile.loops}
    iterations = max(1, len(profile.iteration_s))
    for key, node in nodes_by_key(program).items():
        known = times.get(key)
        if known is None or not op_of(node).attributes.get("once"):
            continue
        each = _uses(node, tuple(key.split("/")[:-1]), trips)
        if each is None:
            continue
        gain = known.mean_s * known.count / iterations * (each - 1)
        where = place(node)
        yield Remark(
            "note",
            PASS,
            (where,) if where else (),
            "spared",
            f"{title(node)} takes {1e3 * known.mean_s:.3g} ms, and its values are used on "
            f"{each:.3g} trips",
            gain=gain,
        )


def _uses(node: fx.Node, path: tuple[str, ...], trips: Mapping[str, float]) -> float | None:
    """On how many trips of the loops around its users a value is used; ``None`` if that was not
    seen."""
    found: list[float] = []
    for user in node.users:
        if is_item(user):
            inner = _uses(user, path, trips)
            found += [] if inner is None else [inner]
        elif is_call(user, LOOP) or is_call(user, BRANCH):
            within = (*path, user.name) if is_call(user, LOOP) else path
            times = trips.get(key_of(path, user.name)) if is_call(user, LOOP) else 1.0
            for param in _captured(user, node):
                inner = _uses(param, within, trips)
                if inner is not None and times is not None:
                    found.append(times * inner)
        elif user.op == "call_function":
            found.append(1.0)
    return max(found, default=None)


def _captured(owner: fx.Node, value: fx.Node) -> Iterator[fx.Node]:
    """The placeholders of a captured value in the bodies of a loop or branch."""
    captured = owner.args[3]
    assert isinstance(captured, tuple)
    for attribute in (n for n in owner.all_input_nodes if n.op == "get_attr"):
        params = placeholders(body_of(owner, attribute).graph)[-len(captured) :]
        for param, outer in zip(params, captured, strict=True):
            if outer is value:
                yield param
