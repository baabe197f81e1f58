"""Effects of calls that the tables know, translated to the places of one block."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import batchnorm, dropout, instancenorm

from rose_compiler.frontend import known
from rose_compiler.frontend.attributes import NOT_STATIC
from rose_compiler.frontend.effects_val import CONTAINERS, Val, grads_of, iterated, joined
from rose_compiler.ir.effects import GLOBAL_STATES, related

if TYPE_CHECKING:
    from rose_compiler.frontend.effects_expr import ExpressionWalker as Walker
    from rose_compiler.frontend.known_base import KnownEffects


def apply(
    walker: Walker,
    effects: KnownEffects,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
) -> Val:
    """Translate the places of a known call; a value with what the result may share memory with."""
    out = walker.out
    out.calls.add(effects.kind)
    out.may_raise |= effects.may_raise
    out.backward |= effects.kind == "backward"

    def value_of(root: str) -> Val | None:
        if root == "self":
            return receiver
        if root.startswith("arg"):
            index = int(root[3:])
            return positional[index] if index < len(positional) else None
        return keywords.get(root[3:]) if root.startswith("kw_") else None

    for write, places in ((False, effects.reads), (True, effects.writes)):
        for place in places:
            root, part = known.split_place(place)
            if root in GLOBAL_STATES or root.startswith("rng:"):
                (out.writes if write else out.reads).setdefault(root)
                continue
            value = value_of(root)
            if value is None:
                continue
            if part == "" and not _narrowed(value, effects):
                if write:
                    of_items = value.type in CONTAINERS or bool(effects.retains)
                    walker.write_inside(value, items=root == "self" and of_items)
                else:
                    walker.read(value)
                continue
            for entry in expand(walker, value, part, effects):
                (out.writes if write else out.reads).setdefault(entry)
    if isinstance(receiver.obj, torch.nn.Module) and effects.kind == "module":
        _assume_training(walker, receiver.obj)
    for place in effects.retains:
        value = value_of(known.split_place(place)[0])
        if value is not None:
            walker.keep(receiver.all_places, value)
    aliased = [value_of(known.split_place(p)[0]) for p in effects.alias]
    found = [v for v in aliased if v is not None]
    return Val(
        frozenset(p for v in found for p in v.all_places),
        NOT_STATIC,
        None,
        modules=tuple(m for v in found for m in v.modules),
    )


def _narrowed(value: Val, effects: KnownEffects) -> bool:
    """Whether "all of it" means the tensors of a module: its other attributes are not touched."""
    return isinstance(value.obj, torch.nn.Module) and effects.kind == "module"


def expand(walker: Walker, value: Val, part: str, effects: KnownEffects) -> list[str]:
    """The effect entries of one part (``params``, ``grads``, ...) of a value."""
    names, entry = walker.around.names, walker.around.entry
    obj = value.obj
    if part == "":
        parts = ("params", "buffers", "mode")
        return [entry(s) for p in parts for s in names.part(obj, p)]
    if isinstance(obj, torch.optim.Optimizer):
        owned = [p for group in obj.param_groups for p in group["params"]]
        return [entry(s) for s in names.cover(owned, part)]
    if part == "graph":
        return []  # found from the program: see backward.py
    if part == "optimizer":
        return [entry(name) for name in names.optimizers]
    if isinstance(obj, torch.nn.Module):
        return [entry(s) for s in names.part(obj, part)]
    if value.modules:
        return [entry(s) for m in value.modules for s in names.part(m, part)]
    if part == "grads":
        return [grads_of(p) for p in value.all_places]
    if part == "mode" and not value.static:
        # all tensors of a root, which others read one by one: no part of a name covers theirs
        return [p if "." in p else f"{p}.{part}" for p in value.places] + list(value.shares)
    return [f"{p}.{part}" for p in value.places] + list(value.shares)


def _assume_training(walker: Walker, module: torch.nn.Module) -> None:
    """Where the program switches to training, what a forward does in that mode counts always."""
    trained = walker.around.trained
    for inner in module.modules() if trained else ():
        modes = walker.around.names.part(inner, "mode")
        if not any(related(m, t) for m in modes for t in trained):
            continue
        if isinstance(inner, (batchnorm._NormBase, instancenorm._InstanceNorm)):
            for state in walker.around.names.part(inner, "buffers"):
                walker.out.writes.setdefault(walker.around.entry(state))
        elif isinstance(inner, dropout._DropoutNd) and inner.p > 0:
            walker.out.reads.setdefault("rng:torch")
            walker.out.writes.setdefault("rng:torch")


def structured(
    target: Any, name: str, receiver: Val, positional: Sequence[Val], found: Val
) -> Val | None:
    """Results whose parts are worth telling apart: parameter lists, zips, dictionaries."""
    if target is zip:
        return Val(type=zip, each=Val(type=tuple, items=tuple(iterated(v) for v in positional)))
    if target is enumerate and positional:
        pair = (Val(type=int), iterated(positional[0]))
        pending = positional[0].pending
        return Val(type=enumerate, each=Val(type=tuple, items=pair), pending=pending)
    if target in (list, tuple, reversed, sorted, set) and positional:
        inner = positional[0]
        kind = target if isinstance(target, type) else list
        items = inner.items if target in (list, tuple) and isinstance(inner.items, tuple) else None
        return Val(type=kind, items=items, each=iterated(inner), modules=inner.modules)
    if receiver.type in (dict, collections.OrderedDict, collections.defaultdict):
        return _of_dict(name, receiver)
    return None


PARAMETERS = ("parameters", "named_parameters", "buffers", "named_buffers", "state_dict")


def parameters(walker: Walker, module: torch.nn.Module, name: str) -> Val:
    """``module.parameters()`` and the like: tensors of the module, told from those of others."""
    names, entry = walker.around.names, walker.around.entry
    part = "buffers" if "buffers" in name else "params"
    parts = ("params", "buffers") if name == "state_dict" else (part,)
    places = frozenset(entry(s) for p in parts for s in names.part(module, p))
    kind = torch.nn.Parameter if part == "params" else torch.Tensor
    tensor = Val(places, NOT_STATIC, kind, loaded=False)
    if name == "state_dict":
        return Val(places, NOT_STATIC, dict, loaded=False, each=Val(type=str))
    if name.startswith("named_"):
        return Val(each=Val(type=tuple, items=(Val(type=str), tensor)), modules=(module,))
    return Val(each=tensor, modules=(module,))


def _of_dict(name: str, receiver: Val) -> Val | None:
    if isinstance(receiver.items, dict):
        inner = joined(list(receiver.items.values()))
    elif receiver.each is not None:
        inner = Val(receiver.places)
    else:
        inner = Val(receiver.all_places)
    if name == "keys":
        return Val(type=type({}.keys()), each=Val())
    if name == "values":
        return Val(type=type({}.values()), each=inner)
    if name == "items":
        return Val(type=type({}.items()), each=Val(type=tuple, items=(Val(), inner)))
    return None
