"""Effects of one call inside a block: what is called, and what the user's own functions do."""

from __future__ import annotations

import argparse
import ast
import inspect
import types
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rose_compiler.frontend import components, effects_iter, known, liveness, source
from rose_compiler.frontend.attributes import NOT_STATIC
from rose_compiler.frontend.effects_construct import construct
from rose_compiler.frontend.effects_declared import declared_call
from rose_compiler.frontend.effects_known import PARAMETERS, apply, parameters, structured
from rose_compiler.frontend.effects_types import (
    by_name,
    elementwise,
    method_type,
    pure_builtin,
    result_type,
)
from rose_compiler.frontend.effects_val import FRESH, MAX_DEPTH, Val, is_immutable, joined
from rose_compiler.frontend.known_modules import has_hooks
from rose_compiler.frontend.modes import undecorated
from rose_compiler.frontend.simulators import hands_out_fresh, simulator_effects

if TYPE_CHECKING:
    from rose_compiler.frontend.effects_expr import ExpressionWalker as Walker


def call(walker: Walker, node: ast.Call) -> Val:
    """The effects of a call, and what its result may share memory with."""
    receiver = FRESH
    name = ast.unparse(node.func)
    if isinstance(node.func, ast.Name) and node.func.id == "super":
        return _super(walker, node)
    if isinstance(node.func, ast.Attribute):
        receiver = walker.expr(node.func.value, load=False)
        target = walker.attribute(node.func).obj if receiver.static else NOT_STATIC
        if isinstance(receiver.obj, super):
            owner: Any = receiver.obj.__self__  # type: ignore[attr-defined]
            receiver = Val(receiver.places, owner, type(owner))
    else:
        value = walker.expr(node.func, load=False)
        target = value.obj
        holder = getattr(target, "__self__", None)
        if holder is not None and not isinstance(holder, (type, types.ModuleType)):
            receiver = walker.live(holder, value.places)
    if target is not NOT_STATIC and _callable_object(target):
        if not isinstance(node.func, ast.Attribute):
            receiver = value  # a name, an item of a container, what a call gave
        else:
            receiver = walker.live(target, receiver.places) if receiver.static else FRESH
    positional, starred = _positional(walker, node)
    keywords = {k.arg or "**": walker.expr(k.value) for k in node.keywords}
    if "**" in keywords:
        inner = keywords.pop("**")
        if isinstance(inner.items, dict):
            keywords |= inner.items
        else:
            starred = True
            keywords["**"] = inner
    _lambdas(walker, node, [*positional, *keywords.values()])
    if target is not NOT_STATIC:
        return static_call(walker, node, name, target, receiver, positional, keywords, starred)
    if isinstance(node.func, ast.Attribute):
        return method_call(walker, node, name, receiver, positional, keywords, starred)
    return walker.unknown(f"`{name}`", node)


def _lambdas(walker: Walker, node: ast.Call, given: list[Val]) -> None:
    """A lambda among the arguments may write what it is called with, and what it reads."""
    arguments = (*node.args, *(k.value for k in node.keywords))
    for found in (a for a in arguments if isinstance(a, ast.Lambda)):
        read = [walker.expr(ast.Name(n, ast.Load())) for n in sorted(liveness.reads(found))]
        for value in (*given, *read):
            if not is_immutable(value):
                walker.write_inside(value)


def _positional(walker: Walker, node: ast.Call) -> tuple[list[Val], bool]:
    """Positional arguments; whether their number is not known."""
    found: list[Val] = []
    starred = False
    for argument in node.args:
        if not isinstance(argument, ast.Starred):
            found.append(walker.expr(argument))
            continue
        inner = walker.expr(argument.value)
        if isinstance(inner.items, tuple):
            found.extend(inner.items)
        else:
            found.append(walker.iterate(inner, argument))
            starred = True
    return found, starred


def _super(walker: Walker, node: ast.Call) -> Val:
    """``super()`` of a method whose receiver is known."""
    if len(node.args) == 2:
        cls, owner = (walker.expr(a, load=False) for a in node.args)
    else:
        cls = walker.name(ast.Name("__class__", ast.Load()))
        owner = next(iter(walker.bindings.values()), FRESH)
    if not owner.static or not isinstance(cls.obj, type) or not isinstance(owner.obj, cls.obj):
        return walker.unknown("`super()`", node)
    return Val(owner.places, super(cls.obj, owner.obj), super, shares=owner.shares)


def static_call(
    walker: Walker,
    node: ast.Call,
    name: str,
    target: Any,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
    starred: bool,
) -> Val:
    """A call of a live object."""
    declared = components.declared(target)
    if declared is not None:
        return declared_call(walker, node, target, declared, receiver, positional, keywords)
    simulator = receiver.obj if components.is_simulator(receiver.obj) else None
    if simulator is not None and components.simulator_of_step(target) is not None:
        walker.read(receiver)
        walker.write_inside(receiver)
        _process_wide(walker, simulator)
        walker.out.calls.add("step")
        walker.out.may_raise = True
        return FRESH
    if isinstance(target, torch.nn.Module):
        return module_call(walker, node, name, target, receiver, positional, keywords)
    if target in (iter, enumerate, zip, reversed) and positional and not starred:
        found = effects_iter.iterator(walker, target, positional, node)
        if found is not None:
            return found
    kinds = tuple(a.type for a in positional)
    # a schedule puts a counting wrapper in the place of an optimizer's step
    own: dict[str, Any] = {}
    if receiver.static and not isinstance(receiver.obj, (type, types.ModuleType)):
        own = getattr(receiver.obj, "__dict__", {})
    holder = receiver.obj if any(v is target for v in own.values()) else None
    effects = known.effects_of_callable(
        target, holder, kinds, {k: v.type for k, v in keywords.items()}
    )
    if effects is not None and not effects.if_traced:
        if simulator is not None and effects.kind == "reset":
            return reset_call(walker, effects, simulator, receiver, positional, keywords)
        if simulator is not None:
            _process_wide(walker, simulator)
        if isinstance(receiver.obj, torch.nn.Module) and target.__name__ in PARAMETERS:
            return parameters(walker, receiver.obj, target.__name__)
        if isinstance(receiver.obj, torch.nn.Module) and target.__name__ == "train":
            walker.around.trained |= set(walker.around.names.part(receiver.obj, "mode"))
        found = apply(walker, effects, receiver, positional, keywords)
        made = structured(target, getattr(target, "__name__", ""), receiver, positional, found)
        kind = result_type(target, effects) or elementwise(target, kinds)
        return made or replace(found.view(kind), modules=found.modules)
    if target is next and positional:
        return effects_iter.advance(walker, positional[0], node)
    if pure_builtin(target):
        made = structured(target, target.__name__, receiver, positional, FRESH)
        places = frozenset(p for v in positional for p in v.all_places)
        return made or Val(
            frozenset() if target in _NEW_VALUES else places,
            NOT_STATIC,
            result_type(target, None),
        )
    if target in (types.SimpleNamespace, argparse.Namespace):
        held = frozenset(p for v in (*positional, *keywords.values()) for p in v.all_places)
        return Val(held, NOT_STATIC, target)
    if isinstance(target, type) and source.is_user_type(target):
        return construct(walker, node, name, target, positional, keywords, starred)
    function = components.plain(target)
    if function is not None:
        return user_call(walker, node, name, target, receiver, positional, keywords, starred)
    if _callable_object(target) and source.is_user_type(type(target)):
        method = inspect.getattr_static(type(target), "__call__", None)
        if isinstance(method, types.FunctionType):
            bound = method.__get__(target)
            return user_call(walker, node, name, bound, receiver, positional, keywords, starred)
    return walker.unknown(f"`{name}`", node)


_NEW_VALUES = (float, int, bool, str, bytes, complex, len, repr, round, abs, hash, sum, any, all)


def _process_wide(walker: Walker, simulator: Any) -> None:
    """The user's own environments may draw from the process's generators."""
    for state in simulator_effects(simulator, None):
        walker.out.reads.setdefault(state)
        walker.out.writes.setdefault(state)


def reset_call(
    walker: Walker,
    effects: known.KnownEffects,
    simulator: Any,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
) -> Val:
    """A simulator's reset: it hands out what its step hands out."""
    _process_wide(walker, simulator)
    apply(walker, effects, receiver, positional, keywords)
    if hands_out_fresh(simulator):
        return FRESH
    return Val(frozenset(f"{p}.outputs" for p in receiver.places))


def method_call(
    walker: Walker,
    node: ast.Call,
    name: str,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
    starred: bool,
) -> Val:
    """A method of a value: by its type, or by the method's name where that tells."""
    assert isinstance(node.func, ast.Attribute)
    attr = node.func.attr
    kinds = tuple(a.type for a in positional)
    keyword_kinds = {k: v.type for k, v in keywords.items()}
    if receiver.type is None:
        effects = by_name(walker.around.changes, attr, kinds, keyword_kinds)
        if effects is None:
            return walker.unknown(f"`{name}`", node)
        return apply(walker, effects, receiver, positional, keywords)
    if receiver.type is type(None):
        walker.out.may_raise = True  # and does, so that nothing further happens
        return FRESH
    effects = known.effects_of_method(receiver.type, attr, kinds, keyword_kinds)
    if effects is not None:
        if _may_be_another(receiver):
            return walker.unknown(f"`{name}` of what may be another {receiver.type.__name__}", node)
        found = apply(walker, effects, receiver, positional, keywords)
        made = structured(None, attr, receiver, positional, found)
        result = method_type(receiver, attr)
        return made or found.view(result)
    kind = receiver.type
    raw = inspect.getattr_static(kind, attr, None)
    if isinstance(raw, classmethod):
        raw, receiver = raw.__func__, Val(obj=kind, type=type(kind))
    elif isinstance(raw, staticmethod):
        function = raw.__func__
        return user_call(walker, node, name, function, FRESH, positional, keywords, starred)
    if isinstance(raw, types.FunctionType) and source.is_user_type(kind):
        return user_call(walker, node, name, raw, receiver, positional, keywords, starred, True)
    return walker.unknown(f"`{name}` of a {kind.__name__}", node)


def _may_be_another(value: Val) -> bool:
    """Whether a value is an optimizer of which only the type is known, or a module that an
    attribute or a container leads to, which may hold another one by then: whose parameters those
    are is not known."""
    if value.type is None or value.modules:
        return False
    if issubclass(value.type, torch.optim.Optimizer):
        return True
    return issubclass(value.type, torch.nn.Module) and any("." in p for p in value.all_places)


def property_call(walker: Walker, node: ast.Attribute, raw: property, base: Val) -> Val:
    """Reading a property that the user wrote."""
    name = f"property `{node.attr}`"
    if not isinstance(raw.fget, types.FunctionType):
        return walker.unknown(name, node)
    return user_call(walker, node, name, raw.fget, base, [], {}, False, True)


def module_call(
    walker: Walker,
    node: ast.AST,
    name: str,
    module: torch.nn.Module,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
) -> Val:
    """A call of a module: by its kind, or by walking a forward of the user's own."""
    inner = getattr(module, "_orig_mod", None)
    if type(module).__name__ == "OptimizedModule" and isinstance(inner, torch.nn.Module):
        inside = walker.live(inner, receiver.places)
        return module_call(walker, node, name, inner, inside, positional, keywords)
    kinds = tuple(a.type for a in positional)
    effects = known.effects_of_callable(
        module, None, kinds, {k: v.type for k, v in keywords.items()}
    )
    walker.out.calls.add("module")
    if effects is not None and not effects.if_traced:
        found = apply(walker, effects, receiver, positional, keywords)
        return found.view(torch.Tensor)
    forward = type(module).forward
    plain = type(module).__call__ is torch.nn.Module.__call__ and "forward" not in vars(module)
    if has_hooks(module):
        return walker.unknown(f"`{name}` (it has hooks)", node)
    if not plain or not isinstance(forward, types.FunctionType):
        return walker.unknown(f"`{name}`", node)
    names, entry = walker.around.names, walker.around.entry
    for state in names.part(module, "mode"):
        walker.out.reads.setdefault(entry(state))
    if forward is torch.nn.Sequential.forward and len(positional) == 1 and not keywords:
        (value,) = positional
        for child in module.children():  # some of them are the user's own
            inside = walker.live(child, receiver.places)
            value = module_call(walker, node, name, child, inside, [value], {})
        return value
    return user_call(walker, node, name, module.forward, receiver, positional, keywords, False)


def user_call(
    walker: Walker,
    node: ast.AST,
    name: str,
    target: Any,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
    starred: bool,
    method: bool = False,
) -> Val:
    """Walk the source of a function that the user wrote; ``method`` passes the receiver to it."""
    function = components.plain(target)
    assert function is not None
    function, _ = undecorated(function)
    if function.__code__ in walker.chain or len(walker.chain) >= MAX_DEPTH:
        return walker.unknown(f"`{name}` (too deep)", node)
    if not source.is_user_code(function):
        return walker.unknown(f"`{name}`", node)
    tree = source.tree(function)
    if not isinstance(tree, ast.FunctionDef):
        return walker.unknown(f"`{name}`", node)
    bound_self = getattr(target, "__self__", None)
    if isinstance(bound_self, type):
        receiver = Val(obj=bound_self, type=type(bound_self))
    given = [receiver, *positional] if method or bound_self is not None else positional
    bindings = _bind(walker, function, given, keywords, starred)
    if bindings is None:
        walker.out.may_raise = True
        return FRESH
    parts = function.__qualname__.split(".")
    nested = type(walker)(
        walker.around,
        function.__globals__,
        bindings,
        _closure(function),
        (*walker.chain, function.__code__),
        parts[-2] if len(parts) > 1 and parts[-2] != "<locals>" else None,
    )
    # names the callee assigns are local to it from its first line
    for local in set(liveness.assigned(tree.body)) - set(bindings):
        nested.bindings.setdefault(local, FRESH)
    if inspect.isgeneratorfunction(function):
        return effects_iter.generator(walker, nested, tree)
    nested.statements(tree.body)
    return joined(nested.returned) if nested.returned else Val(type=type(None))


def _bind(
    walker: Walker,
    function: types.FunctionType,
    given: list[Val],
    keywords: Mapping[str, Val],
    starred: bool,
) -> dict[str, Val] | None:
    """What each parameter stands for; ``None`` if the arguments do not fit."""
    signature = inspect.signature(function)
    bindings: dict[str, Val] = {}
    if starred:
        anything = Val(frozenset(p for v in (*given, *keywords.values()) for p in v.all_places))
        first = given[:1] if given else []
        for position, each in enumerate(signature.parameters):
            bindings[each] = first[0] if position == 0 and first else anything
        return bindings
    try:
        bound = signature.bind(*given, **keywords)
    except TypeError:
        return None
    for parameter in signature.parameters.values():
        if parameter.name in bound.arguments:
            value = bound.arguments[parameter.name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                value = Val(type=tuple, items=tuple(value))
            elif parameter.kind is parameter.VAR_KEYWORD:
                value = Val(type=dict, items=dict(value))
            bindings[parameter.name] = value
        elif parameter.kind is parameter.VAR_POSITIONAL:
            bindings[parameter.name] = Val(type=tuple, items=())
        elif parameter.kind is parameter.VAR_KEYWORD:
            bindings[parameter.name] = Val(type=dict, items={})
        else:
            value = Val(obj=parameter.default, type=type(parameter.default))
            kept = is_immutable(value)  # one list for all calls is a state
            bindings[parameter.name] = value if kept else walker.live(value.obj, frozenset())
    return bindings


def _closure(function: types.FunctionType) -> dict[str, Any]:
    """The free variables of a function as they are now."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found


def _callable_object(obj: Any) -> bool:
    """Whether calling an object calls its class's ``__call__``."""
    return callable(obj) and not isinstance(obj, type) and not inspect.isroutine(obj)
