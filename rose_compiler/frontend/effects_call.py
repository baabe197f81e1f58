"""Effects of one call inside a block."""

from __future__ import annotations

import ast
import inspect
from typing import TYPE_CHECKING, Any

import torch

from rose_compiler.frontend import components, known, liveness, source
from rose_compiler.frontend.effects_val import (
    FRESH,
    MAX_DEPTH,
    Val,
    from_closure,
    simulator_effects,
)
from rose_compiler.frontend.scope import NOT_STATIC
from rose_compiler.ir.effects import GLOBAL_STATES

if TYPE_CHECKING:
    from rose_compiler.frontend.effects_of import Walker
    from rose_compiler.frontend.known_base import KnownEffects


def call(walker: Walker, node: ast.Call) -> Val:
    """The effects of a call, and what its result may share memory with."""
    starred = any(isinstance(a, ast.Starred) for a in node.args) or any(
        k.arg is None for k in node.keywords
    )
    receiver = FRESH
    target: Any = NOT_STATIC
    name = ast.unparse(node.func)
    if isinstance(node.func, ast.Attribute):
        receiver = walker.expr(node.func.value, load=False)
        if receiver.static:
            found = walker.attribute_object(receiver, node.func.attr)
            target = found
        elif receiver.type is not None:
            target = NOT_STATIC
    else:
        value = walker.expr(node.func, load=False)
        target = value.obj
        receiver = Val(value.places, value.obj, value.type) if callable_object(value.obj) else FRESH
    positional = [walker.expr(a.value if isinstance(a, ast.Starred) else a) for a in node.args]
    keywords = {k.arg or "**": walker.expr(k.value) for k in node.keywords}
    types = tuple(a.type for a in positional)
    keyword_types = {k: v.type for k, v in keywords.items()}
    if target is not NOT_STATIC:
        return static_call(
            walker,
            node,
            name,
            target,
            receiver,
            positional,
            keywords,
            types,
            keyword_types,
            starred,
        )
    if isinstance(node.func, ast.Attribute) and receiver.type is not None:
        effects = known.effects_of_method(receiver.type, node.func.attr, types, keyword_types)
        if effects is not None:
            return apply(
                walker,
                effects,
                receiver,
                positional,
                keywords,
                _method_type(receiver, node.func.attr, effects),
            )
        return walker.unknown(f"`{name}` of a {receiver.type.__name__}", node)
    return walker.unknown(f"`{name}`", node)


def static_call(
    walker: Walker,
    node: ast.Call,
    name: str,
    target: Any,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
    types: tuple[type | None, ...],
    keyword_types: dict[str, type | None],
    starred: bool,
) -> Val:
    """A call of a live object."""
    declared = components.declared(target)
    simulator = components.simulator_of_step(target)
    if declared is not None:
        return declared_call(walker, node, target, declared, receiver, positional, keywords)
    if simulator is not None:
        walker.read(receiver)
        walker.write(receiver)
        for state in simulator_effects(simulator, None):
            walker.out.reads.setdefault(state)
            walker.out.writes.setdefault(state)
        walker.out.calls.add("step")
        return FRESH
    effects = known.effects_of_callable(target, None, types, keyword_types)
    if effects is not None and effects.if_traced and not walker.trust_modules(target):
        effects = None
    if effects is not None:
        return apply(walker, effects, receiver, positional, keywords, _result_type(target, effects))
    if any(target is builtin for builtin in _CONVERSIONS):
        # of a value whose type is not known; conversions are taken to have no effects
        for value in (*positional, *keywords.values()):
            walker.read(value)
        walker.out.may_raise = True
        return Val(type=target if isinstance(target, type) else None)
    function = components.plain(target)
    if function is not None and not starred and source.is_user_code(function):
        return user_call(walker, node, name, target, receiver, positional, keywords)
    if isinstance(target, torch.nn.Module):
        return module_call(walker, node, name, target, receiver, positional, keywords)
    return walker.unknown(f"`{name}`", node)


_CONVERSIONS = (float, int, bool, str, repr, len, abs, round, min, max, sum, sorted, list, tuple)


def module_call(
    walker: Walker,
    node: ast.Call,
    name: str,
    module: torch.nn.Module,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
) -> Val:
    """A module with a forward of the user's own: its source is walked like any function's."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return walker.unknown(f"`{name}` (it has hooks)", node)
    forward = type(module).forward
    if type(module).__call__ is not torch.nn.Module.__call__ or "forward" in vars(module):
        return walker.unknown(f"`{name}`", node)
    if not source.is_user_code(forward):
        return walker.unknown(f"`{name}`", node)
    walker.out.calls.add("module")
    return user_call(walker, node, name, module.forward, receiver, positional, keywords)


def user_call(
    walker: Walker,
    node: ast.Call,
    name: str,
    target: Any,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
) -> Val:
    """Walk the source of a function that the user wrote."""
    function = components.plain(target)
    assert function is not None
    if function.__code__ in walker.chain or len(walker.chain) >= MAX_DEPTH:
        return walker.unknown(f"`{name}` (too deep)", node)
    try:
        inner = source.read(target)
        signature = inspect.signature(function)
    except Exception:  # no source: nothing is known of it
        return walker.unknown(f"`{name}`", node)
    given = [receiver, *positional] if inner.bound is not None else positional
    try:
        bound = signature.bind(*given, **keywords)
    except TypeError:
        walker.out.may_raise = True
        return FRESH
    bindings: dict[str, Val] = {}
    for parameter in signature.parameters.values():
        if parameter.name in bound.arguments:
            value = bound.arguments[parameter.name]
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                parts = value.values() if isinstance(value, dict) else value
                value = Val(frozenset(p for v in parts for p in v.places))
            bindings[parameter.name] = value
        elif parameter.default is not parameter.empty:
            bindings[parameter.name] = Val(obj=parameter.default, type=type(parameter.default))
    nested = type(walker)(
        walker.names,
        function.__globals__,
        bindings,
        walker.out,
        from_closure(inner),
        (*walker.chain, function.__code__),
        walker.leaves,
    )
    # names the callee assigns are local to it from its first line
    for local in set(liveness.assigned(inner.node.body)) - set(bindings):
        nested.bindings.setdefault(local, FRESH)
    nested.statements(inner.node.body)
    places = frozenset(p for v in nested.returned for p in v.places)
    types = {v.type for v in nested.returned}
    return Val(places, NOT_STATIC, types.pop() if len(types) == 1 else None)


_PLAIN_DECORATORS = {
    "torch.no_grad()",
    "torch.inference_mode()",
    "staticmethod",
    "classmethod",
    "torch.no_grad",
    "property",
}


def declared_call(
    walker: Walker,
    node: ast.Call,
    target: Any,
    declared: components.Declaration,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
) -> Val:
    """A call whose author stated its effects."""
    function = components.plain(target)
    assert function is not None
    names = list(inspect.signature(function).parameters)
    bound = getattr(target, "__self__", None) is not None
    values = (
        dict(zip(names, [receiver, *positional] if bound else positional, strict=False)) | keywords
    )
    for write, entries in ((False, declared.reads), (True, declared.writes)):
        if entries is None:
            return walker.unknown(
                f"`{ast.unparse(node.func)}` (its declaration leaves effects open)", node
            )
        for entry in entries:
            root, _, path = entry.partition(".")
            record = walker.out.writes if write else walker.out.reads
            if root.startswith("rng:") or root in ("host", "*"):
                record.setdefault(entry)
                continue
            root, bracket, _ = root.partition("[")
            value = values.get(root, FRESH)
            for place in value.places:
                record.setdefault(
                    place + (f".{path.partition('[')[0]}" if path and not bracket else "")
                )
    places = frozenset(p for v in values.values() for p in v.places)
    return Val(places)


def apply(
    walker: Walker,
    effects: KnownEffects,
    receiver: Val,
    positional: list[Val],
    keywords: dict[str, Val],
    result: type | None,
) -> Val:
    """Translate the places of a known call."""
    walker.out.calls.add(effects.kind)
    if effects.may_raise:
        walker.out.may_raise = True

    def value_of(root: str) -> Val | None:
        if root == "self":
            return receiver
        if root.startswith("arg"):
            index = int(root[3:])
            return positional[index] if index < len(positional) else None
        if root.startswith("kw_"):
            return keywords.get(root[3:])
        return None

    for write, places in ((False, effects.reads), (True, effects.writes)):
        record = walker.out.writes if write else walker.out.reads
        for place in places:
            root, part = known.split_place(place)
            if root in GLOBAL_STATES or root.startswith("rng:"):
                record.setdefault(root)
                continue
            value = value_of(root)
            if value is not None:
                for entry in expand(walker, value, part):
                    record.setdefault(entry)
    places = frozenset(
        p
        for place in effects.alias
        if (v := value_of(known.split_place(place)[0])) is not None
        for p in v.places
    )
    if effects.retains and receiver.places:
        for place in effects.retains:
            value = value_of(known.split_place(place)[0])
            if value is not None:
                walker.read(value)
    return Val(places, NOT_STATIC, result)


def expand(walker: Walker, value: Val, part: str) -> list[str]:
    """The effect entries of one part (``params``, ``grads``, ...) of a value."""
    if part in ("", "mode"):
        return [p + (".mode" if part else "") for p in value.places]
    obj = value.obj
    if isinstance(obj, torch.optim.Optimizer):
        owned = [p for group in obj.param_groups for p in group["params"]]
        return _below(walker.names.owners(owned), part)
    if part == "graph":
        if walker.leaves is not None:
            return _below(walker.leaves, "grads")
        return _below([*walker.names.modules, *walker.names.tensors], "grads")
    if part == "optimizer":
        return [f"@{name}" for name in walker.names.optimizers]
    return [f"{p}.{part}" for p in value.places]


def _below(owners: list[str], part: str) -> list[str]:
    """``part`` of each owner, by the owner's name in the program."""
    return ["*" if o == "*" else f"@{o}.{part}" for o in owners]


def callable_object(obj: Any) -> bool:
    """Whether calling an object calls its class's ``__call__``."""
    return (
        obj is not NOT_STATIC
        and not isinstance(obj, type)
        and hasattr(type(obj), "__call__")
        and not inspect.isroutine(obj)
    )


def _result_type(target: Any, effects: KnownEffects) -> type | None:
    if isinstance(target, type):
        return torch.Tensor if issubclass(target, torch.Tensor) else target
    owner_tensor = getattr(target, "__self__", None)
    if isinstance(owner_tensor, torch.Tensor):
        return _method_type(Val(type=torch.Tensor), getattr(target, "__name__", ""), effects)
    owner = getattr(target, "__self__", None)
    if isinstance(owner, torch.Tensor):
        return _method_type(Val(type=torch.Tensor), getattr(target, "__name__", ""), effects)
    if target in (len, int, round):
        return int
    if target is float:
        return float
    if target is isinstance:
        return bool
    module = getattr(target, "__module__", "") or type(target).__module__
    if (
        effects.kind == "module"
        or module.startswith("torch")
        or (module == "" and "torch" in repr(target))
    ):
        return torch.Tensor
    return None


_SAME_TYPE = {
    "view", "reshape", "flatten", "squeeze", "unsqueeze", "float", "double", "to", "cpu", "cuda", "detach", "clone",
    "mean", "sum", "std", "exp", "log", "tanh", "abs", "clamp", "pow", "mul", "add", "sub", "div", "expand", "expand_as",
    "contiguous", "transpose", "permute", "t", "max", "min", "copy", "astype", "mul_", "add_", "sub_", "div_", "zero_",
    "copy_", "fill_", "clamp_", "normal_", "uniform_", "long", "int", "bool", "half", "any", "all", "argmax", "gather",
}  # fmt: skip


def _method_type(receiver: Val, name: str, effects: KnownEffects) -> type | None:
    if receiver.type is not None and issubclass(receiver.type, torch.Tensor):
        if name == "item":
            return None
        if name == "numpy":
            import numpy as np

            return np.ndarray
        if name in ("max", "min"):
            return None
        return torch.Tensor if name in _SAME_TYPE else None
    if receiver.type is not None and issubclass(receiver.type, torch.distributions.Distribution):
        return torch.Tensor
    if receiver.type is not None and name in ("copy", "astype", "reshape"):
        return receiver.type
    return None
