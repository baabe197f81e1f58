"""What calls of well-known callables read and write.

:func:`effects_of_callable` answers for a live Python callable (a function, class, bound method or
callable object as resolved at capture time), :func:`effects_of_method` for a method of a value of
which only the type is known. Both answer ``None`` for a callable they do not know: the caller then
assumes that it reads and writes everything. A method that a subclass overrides, or that an instance
replaces, is unknown: only the library's own function objects are in the tables.

A :class:`KnownEffects` names memory in terms of the call, as *places*:

============== =====================================================================
``self``       the receiver and everything below it
``arg<i>``     positional argument ``i`` (0-based, receiver not counted)
``kw_<name>``  a keyword argument
``rng:torch``  and the other process-wide states of :mod:`rose_compiler.ir.effects`
============== =====================================================================

A place may be narrowed by ``#part``: ``#params``, ``#buffers``, ``#grads`` (the ``.grad`` of the
parameters, or of the tensors that an argument holds), ``#mode`` (``training``, ``requires_grad``),
``#graph`` (the ``.grad`` of every leaf of a tensor's autograd graph, see :func:`graph_leaves`) and
``#optimizer`` (the optimizer that a learning-rate schedule drives). :func:`split_place` takes a
place apart.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rose_compiler.frontend import (
    known_amp,
    known_libs,
    known_numpy,
    known_objects,
    known_python,
    known_torch,
)
from rose_compiler.frontend.known_base import (
    CALLABLE_RULES,
    CALLABLES,
    METHOD_RULES,
    METHODS,
    Answer,
    CallShape,
    KnownEffects,
    shifted,
    split_place,
)

__all__ = [
    "KnownEffects",
    "effects_of_callable",
    "effects_of_method",
    "graph_leaves",
    "split_place",
]

for _table in (known_python, known_numpy, known_torch, known_objects, known_libs, known_amp):
    _table.register()


def effects_of_callable(
    obj: Any,
    bound_self: Any = None,
    arg_types: Sequence[type | None] = (),
    kwarg_types: Mapping[str, type | None] | None = None,
) -> KnownEffects | None:
    """What a call of ``obj`` reads and writes, ``None`` if that isn't known.

    Args:
        obj: the callable itself: a function, class, callable object or bound method.
        bound_self: the live receiver when ``obj`` is a method; taken from ``obj`` if left out.
        arg_types: types of the positional arguments, ``None`` where unknown; receiver not counted.
        kwarg_types: types of the keyword arguments.
    """
    call = CallShape(tuple(arg_types), dict(kwarg_types or {}), bound_self)
    found = CALLABLES.get(id(obj))
    if found is None and isinstance(obj, types.FunctionType):
        # torch wraps some of its own functions once its compiler has been imported
        inner = getattr(obj, "_torchdynamo_orig_callable", None) or getattr(
            obj, "__wrapped__", None
        )
        if str(obj.__globals__.get("__name__")).startswith("torch."):
            obj = obj if inner is None else inner
            found = CALLABLES.get(id(obj))
    if found is not None and found[0] is obj:
        return found[1](call)
    if isinstance(obj, functools.partial):
        return _of_partial(obj, call)
    receiver = getattr(obj, "__self__", None)
    if bound_self is None and receiver is not None and not isinstance(receiver, types.ModuleType):
        bound_self = receiver
    if bound_self is not None:
        name = getattr(obj, "__name__", "")
        if isinstance(bound_self, type):
            return None  # a class method: none of the tables has any
        call = replace(call, receiver=bound_self)
        return _of_method(type(bound_self), name, obj, call)
    if obj is not None and not isinstance(
        obj, type | types.FunctionType | types.BuiltinFunctionType
    ):
        if _is_method_descriptor(obj) and call.positional and call.positional[0] is not None:
            return _of_descriptor(obj, call)
        call = replace(call, receiver=obj)
        answer = _of_method(type(obj), "__call__", None, call)
        if answer is not None:
            return answer
    for rule in CALLABLE_RULES:
        answer = rule(obj, call)
        if answer is not None:
            return answer
    return None


def effects_of_method(
    receiver_type: type,
    name: str,
    arg_types: Sequence[type | None] = (),
    kwarg_types: Mapping[str, type | None] | None = None,
) -> KnownEffects | None:
    """What ``x.name(...)`` reads and writes for a value ``x`` of exactly ``receiver_type``."""
    call = CallShape(tuple(arg_types), dict(kwarg_types or {}))
    return _of_method(receiver_type, name, None, call)


def _of_method(owner: type, name: str, bound: Any, call: CallShape) -> Answer:
    if not name:
        return None
    resolved = getattr(owner, name, None)
    instance = getattr(call.receiver, "__dict__", None) if call.receiver is not None else None
    replaced = isinstance(instance, dict) and name in instance
    if resolved is None and not replaced:
        return None
    if not replaced:
        for base in owner.__mro__:
            rule = METHODS.get((base, name))
            if rule is not None:
                if getattr(base, name, None) is not resolved:
                    return None  # overridden between the library's class and this one
                if bound is not None and not _binds(bound, resolved):
                    return None
                return rule(call)
    function = instance[name] if replaced and instance else resolved
    for method_rule in METHOD_RULES:
        answer = method_rule(owner, name, function, call)
        if answer is not None:
            return answer
    return None


def _binds(bound: Any, resolved: Any) -> bool:
    """Whether a bound method is the one its type resolves to."""
    function = getattr(bound, "__func__", None)
    if function is None:
        return True  # a method of a built-in type: can't be replaced on the instance
    return function is resolved


def _is_method_descriptor(obj: Any) -> bool:
    return isinstance(obj, types.MethodDescriptorType | types.WrapperDescriptorType)


def _of_descriptor(obj: Any, call: CallShape) -> Answer:
    """An unbound built-in method, called with its receiver first: ``str.upper(x)``."""
    owner = call.positional[0]
    assert owner is not None
    name = str(obj.__name__)
    if getattr(owner, name, None) is not obj:
        return None
    inner = _of_method(owner, name, None, replace(call, positional=call.positional[1:]))
    return None if inner is None else shifted(inner)


def _of_partial(obj: functools.partial[Any], call: CallShape) -> Answer:
    """A partial is known when what it binds are immutable values, which no effect can touch."""
    bound = [*obj.args, *obj.keywords.values()]
    if any(not isinstance(v, int | float | bool | str | None | torch.dtype) for v in bound):
        return None
    count = len(obj.args)
    inner = effects_of_callable(
        obj.func,
        None,
        [*map(type, obj.args), *call.positional],
        {**{k: type(v) for k, v in obj.keywords.items()}, **call.keywords},
    )
    if inner is None or count == 0:
        return inner

    def move(place: str) -> str:
        root, part = split_place(place)
        if root.startswith("arg") and root[3:].isdigit():
            root = f"arg{max(int(root[3:]) - count, 0)}"
        return f"{root}#{part}" if part else root

    return replace(
        inner,
        reads=tuple(map(move, inner.reads)),
        writes=tuple(map(move, inner.writes)),
        alias=tuple(map(move, inner.alias)),
        retains=tuple(map(move, inner.retains)),
    )


def graph_leaves(root: torch.Tensor) -> list[torch.Tensor]:
    """The leaf tensors whose ``.grad`` ``root.backward()`` adds to, each once, in graph order."""
    if root.grad_fn is None:
        return [root] if root.requires_grad else []
    leaves: dict[int, torch.Tensor] = {}
    seen = {root.grad_fn}
    queue = [root.grad_fn]
    while queue:
        node = queue.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            leaves[id(variable)] = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                queue.append(following)
    return list(leaves.values())
