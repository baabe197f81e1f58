"""What a checkpoint writes, and how much that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.effects import HOST, ITEMS, parse_entry, related
from rose_compiler.ir.interp import resolve
from rose_compiler.ir.ops import SAVES
from rose_compiler.ir.program import Program, is_call, is_state, op_of

#: Parts of a module's state, in the names of states.
_PARTS = ("params", "buffers")
#: What never changes.
_FIXED = (str, bytes, int, float, PurePath, type(None))


def only_saved(state: str, members: Sequence[fx.Node], deps: Dependences) -> dict[fx.Node, fx.Node]:
    """Of each operation that touches a state, and does so only by what it writes to a file, that
    value; nothing if one touches it otherwise."""
    found: dict[fx.Node, fx.Node] = {}
    for node in members:
        if not any(related(e.state, state) for e in deps.effects(node)):
            continue
        name = op_of(node).attributes.get(SAVES) if is_call(node) else None
        if name is None:
            return {}
        value = node.args[op_of(node).signature.params.index(name)]
        if not isinstance(value, fx.Node):
            return {}
        others = [n for n in node.all_input_nodes if n is not value]
        if _otherwise(node, name, others, deps) or (is_state(value) and not _freezes(value, deps)):
            return {}
        if not is_state(value) and any(
            related(e.state, state) for e in deps.scope.apart_from(node, others)
        ):
            return {}
        found[node] = value
    return found


def _freezes(value: fx.Node, deps: Dependences) -> bool:
    """Whether a state is an object that pickling asks for its parts and for nothing else: a module
    or an optimizer, saved whole. Without the program's objects it is taken to be one."""
    found = _object(deps.scope.state(value), deps)
    return not deps.program.objects or isinstance(found, (torch.nn.Module, torch.optim.Optimizer))


def _otherwise(node: fx.Node, name: str, others: Sequence[fx.Node], deps: Dependences) -> bool:
    """Whether an operation that writes an object, handed to it under ``name``, to a file reads or
    writes anything but that, files, and what never changes, such as the path: what else the object
    leads to would be pickled as it is at another time."""
    signature = op_of(node).signature
    if signature.reads is None or signature.writes is None:
        return True
    args = dict(zip(signature.params, node.args, strict=True))
    if any(parse_entry(text).root == name for text in signature.writes):
        return True
    for text in (*signature.reads, *signature.writes):
        entry = parse_entry(text)
        if entry.root in (name, HOST):
            continue
        states = [s for s, _ in deps.scope.targets(entry, args, {}, False)]
        if not all(isinstance(_object(s, deps), _FIXED) for s in states):
            return True
    return any(deps.scope.aliases(n) for n in others if not is_state(n))


def _object(state: str, deps: Dependences) -> Any:
    """The object that a state stands for, as it is now; no object of the program's where it is not
    known."""
    root, _, path = state.partition(".")
    try:
        found = deps.program.objects[root]
        return resolve(found, path) if path else found
    except (AttributeError, LookupError, TypeError):
        return Ellipsis


def parts(value: fx.Node, program: Program, deps: Dependences) -> list[torch.Tensor] | None:
    """The tensors of the program's objects that a value holds, as they are now; None where they are
    not known."""
    found: dict[int, torch.Tensor] = {}
    states = (deps.scope.state(value),) if is_state(value) else deps.scope.aliases(value)
    for state in states:
        if state.endswith(f".{ITEMS}"):
            continue  # what a container holds is told by itself
        held = _held(state, program)
        if held is None:
            return None
        found.update((id(tensor), tensor) for tensor in held)
    return list(found.values())


def _held(state: str, program: Program) -> list[torch.Tensor] | None:
    """The tensors that a state stands for."""
    root, *path = state.split(".")
    if root not in program.objects:
        return None
    k = next((k for k, part in enumerate(path) if part in _PARTS), len(path))
    try:
        owner = program.objects[root]
        owner = resolve(owner, ".".join(path[:k])) if path[:k] else owner
    except (AttributeError, LookupError, TypeError):
        return None
    if isinstance(owner, torch.nn.Module):
        name = ".".join(path[k + 1 :])
        named = [*owner.named_parameters(), *owner.named_buffers()]
        return [t for n, t in named if f"{n}.".startswith(f"{name}." if name else "")]
    return list(_tensors(owner.state)) if isinstance(owner, torch.optim.Optimizer) else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
