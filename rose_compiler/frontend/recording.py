"""What each operation records autograd graphs from, as the first trip showed."""

from __future__ import annotations

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.frontend.effects_val import IMMUTABLE
from rose_compiler.frontend.names import PARTS, StateNames
from rose_compiler.frontend.record import Record
from rose_compiler.ir import facts
from rose_compiler.ir.effects import EVERYTHING, GLOBAL_STATES, parse_entry
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.ops import UNBOUND, Signature
from rose_compiler.ir.program import is_state, op_of

_ANYTHING = (EVERYTHING,)
_NO_GRAPH = (*IMMUTABLE, np.ndarray, type(UNBOUND))


def uses(node: fx.Node, signature: Signature, record: Record) -> tuple[str, ...]:
    """The entries of :attr:`~rose_compiler.ir.ops.Signature.records` of one operation.

    What it recorded only counts where somebody can go back through it: where a result or a state
    may lead there. What is no tensor and no parameter of a module may hold any tensor.
    """
    writes = any(not _global(w) for w in signature.writes or ())
    if not record.recorded.get(node, False) and not (writes and node in record.recorded):
        return ()
    op = op_of(node)
    if op.kind != "block" or "backward" in op.attributes.get("calls", ()):
        return _ANYTHING  # a backward that records uses all that its graph has saved
    found: dict[str, None] = {}
    types = record.types[node]
    for k, (name, argument) in enumerate(zip(signature.params, node.args, strict=True)):
        if not isinstance(argument, fx.Node) or is_state(argument):
            continue
        kinds = {combination[k] for combination in types}
        tensors = [t for t in kinds if t is not None and issubclass(t, torch.Tensor)]
        if not all(t in tensors or (t is not None and issubclass(t, _NO_GRAPH)) for t in kinds):
            return _ANYTHING
        if tensors and not _whole_numbers(facts.get(argument).spec):
            found[name] = None
    args = dict(zip(signature.params, node.args, strict=True))
    for text in dict.fromkeys((*(signature.reads or ()), *(signature.writes or ()))):
        if _global(text):
            continue
        entry = parse_entry(text)
        owner = args.get(entry.root)
        state = entry.absolute
        if state is None and isinstance(owner, fx.Node) and is_state(owner):
            state = ".".join((facts.get(owner).state, *filter(None, (entry.path,))))
        if state is None:
            return _ANYTHING
        part = _part_of_module(state, record.names)
        argument = "." not in state and state in record.names.tensors
        if part is None and not argument:
            return _ANYTHING
        if argument or part == "params":
            found[text] = None
    return tuple(found)


def _part_of_module(state: str, names: StateNames) -> str | None:
    """Which part of a module a state is, ``None`` for a state of another kind."""
    for part in PARTS:
        top, named, _ = f"{state}.".partition(f".{part}.")
        if named and top in names.modules:
            return part
    return None


def _global(text: str) -> bool:
    return text.startswith("rng:") or text in GLOBAL_STATES


def _whole_numbers(spec: Spec | None) -> bool:
    """Whether a value is a tensor of a type that has no gradients."""
    return spec is not None and spec.dtype.startswith(("int", "uint", "bool"))
