"""Iterators that do something when their next item is taken: generators, loaders, progress bars."""

from __future__ import annotations

import ast
import types
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from rose_compiler.frontend import effects_call, source
from rose_compiler.frontend.effects_val import Effects, Val, iterated, joined
from rose_compiler.frontend.known_libs import LOGGERS

if TYPE_CHECKING:
    from rose_compiler.frontend.effects_expr import ExpressionWalker as Walker

_GENERATORS = ("rng:torch", "rng:numpy", "rng:python")


def generator(walker: Walker, nested: Walker, tree: ast.FunctionDef) -> Val:
    """A generator of the user's: what its body does happens when items are taken."""
    inside, outer = Effects(), walker.around.out
    walker.around.out = inside
    nested.yielded = []
    try:
        nested.statements(tree.body)
    finally:
        walker.around.out = outer
    held = frozenset(p for v in nested.bindings.values() for p in v.all_places)
    return Val(held, type=types.GeneratorType, each=joined(nested.yielded), pending=inside)


def pending(walker: Walker, value: Val, node: ast.AST) -> Effects | None:
    """What taking an item of a value does besides reading the value; ``None``: nothing."""
    if value.pending is not None:
        return value.pending
    if value.static and isinstance(value.obj, DataLoader):
        return _loader(walker, value.obj, node)
    if value.static and isinstance(value.obj, types.GeneratorType):
        return of_code(value.obj.gi_code)
    return None


def of_code(code: types.CodeType) -> Effects | None:
    """Generators of progress bars and loggers write to the host, and do nothing else."""
    name = code.co_filename.replace("/", ".")
    if any(f"site-packages.{package}." in name for package in LOGGERS):
        return Effects(reads={"host": None}, writes={"host": None})
    return None


def iterator(walker: Walker, target: Any, positional: list[Val], node: ast.AST) -> Val | None:
    """``iter``, ``enumerate``, ``zip`` or ``reversed`` of something that has pending effects."""
    effects = Effects()
    found = False
    for value in positional:
        inner = pending(walker, value, node)
        if inner is not None:
            effects.add(inner)
            found = True
    if not found and target is not iter:
        return None
    for value in positional:
        walker.read(value)
    each = iterated(positional[0])
    if target is enumerate:
        each = Val(type=tuple, items=(Val(type=int), each))
    elif target is zip:
        each = Val(type=tuple, items=tuple(iterated(v) for v in positional))
    places = frozenset(p for v in positional for p in v.all_places)
    kind = positional[0].type if target is iter else target
    return Val(places, type=kind, each=each, pending=effects if found else None)


def advance(walker: Walker, value: Val, node: ast.AST) -> Val:
    """``next(value)``."""
    effects = pending(walker, value, node)
    walker.read(value)
    walker.write_inside(value)
    if effects is not None:
        walker.out.add(effects)
        return iterated(value)
    kind = value.type
    if kind is None or kind is types.GeneratorType or source.is_user_type(kind):
        return walker.unknown("`next`", node)
    if kind.__module__ != "builtins" and not kind.__module__.startswith(
        ("itertools", "collections")
    ):
        return walker.unknown(f"`next` of a {kind.__name__}", node)
    return iterated(replace(value, loaded=True))


def _loader(walker: Walker, loader: DataLoader[Any], node: ast.AST) -> Effects:
    """A data loader: draws the order, reads the dataset; with workers it does so elsewhere."""
    effects, outer = Effects(), walker.around.out
    walker.around.out = effects
    for state in _GENERATORS:
        effects.reads.setdefault(state)
        effects.writes.setdefault(state)
    try:
        loaded = walker.live(loader, frozenset())
        walker.read(loaded)
        walker.write_inside(loaded)
        if type(loader.sampler) not in (RandomSampler, SequentialSampler):
            walker.unknown("a sampler", node)
        collate = loader.collate_fn
        if source.is_user_code(collate):
            effects_call.user_call(walker, node, "collate_fn", collate, Val(), [Val()], {}, False)
        get = getattr(loader.dataset, "__getitem__", None)
        if isinstance(get, types.MethodType) and source.is_user_code(get):
            receiver = walker.live(loader.dataset, frozenset())
            name = "dataset[...]"
            effects_call.user_call(walker, node, name, get, receiver, [Val(type=int)], {}, False)
        elif (type(loader.dataset).__module__ or "").split(".")[0] != "torch":
            walker.unknown("a dataset", node)
    finally:
        walker.around.out = outer
    return effects
