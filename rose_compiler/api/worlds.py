"""The objects of an iteration, copied so that it can be run once more, and compared afterwards."""

from __future__ import annotations

import copy
import random
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend.components import is_hosted
from rose_compiler.frontend.names import StateNames, array_range, memory_range, tensor_range
from rose_compiler.frontend.reachable import fields_of
from rose_compiler.frontend.scalar import is_scalar
from rose_compiler.frontend.source import is_user_type
from rose_compiler.runtime.probe import same_bits

#: Types that are not written in Python and whose copies share nothing with what they are copies of.
_COPIED = frozenset(
    ("torch", "numpy", "builtins", "collections", "mujoco", "random", "_random", "types")
)


class Unlike(Exception):
    """Why there is no copy that behaves as the objects themselves do."""


@dataclass(frozen=True)
class World:
    """The arguments of an iteration and the objects of its states."""

    values: Mapping[str, Any]
    states: Mapping[str, Any]

    def names(self) -> StateNames:
        """The names of everything below both."""
        return StateNames({**self.states, **{f"argument {n}": v for n, v in self.values.items()}})

    def copied(self) -> World:
        """Objects of their own that are equal and share memory among themselves in the same places.

        Raises:
            Unlike: where that can't be had.
        """
        names = self.names()
        for name, thing in names.things():
            _copyable(name, thing)
        try:
            memo = _memory(names)
            made = World(*copy.deepcopy((dict(self.values), dict(self.states)), memo))
        except Unlike:
            raise
        except Exception as error:  # whatever a class of the user's raises
            raise Unlike(f"copying raises {type(error).__name__}: {error}") from None
        other = made.names()
        if _shape(names) != _shape(other):
            raise Unlike("a copy does not share memory in the same places")
        for name, thing in names.things():
            twin = memo.get(id(thing))
            _apart(name, thing, twin)
            if isinstance(thing, torch.Tensor) and thing.is_leaf and thing.grad is not None:
                assert twin is not None
                if names.shared(thing.grad):
                    raise Unlike(f"the gradient of `{name}` shares memory with something")
                twin.grad = copy.deepcopy(thing.grad.detach())
        return made


def _copyable(name: str, thing: Any) -> None:
    if is_hosted(thing):
        raise Unlike(f"`{name}` lives in a host of its own")
    cls = type(thing)
    python = bool(cls.__flags__ & (1 << 9))  # a class statement made it
    if not python and cls.__module__.split(".")[0] not in _COPIED:
        raise Unlike(f"`{name}` is a {cls.__name__}, which is not written in Python")
    if not is_user_type(cls):
        return
    for key, value in fields_of(thing):
        if isinstance(value, weakref.ref):
            raise Unlike(f"`{name}.{key}` is a weak reference")
        if isinstance(value, types.FunctionType) and _closes_over(value):
            raise Unlike(f"`{name}.{key}` is a function that closes over objects")


def _closes_over(function: types.FunctionType) -> bool:
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        if not is_scalar(value) and not isinstance(value, types.FunctionType | type):
            return True
    return False


def _memory(names: StateNames) -> dict[int, Any]:
    """Copies of tensors and arrays, by the identity of the original: what shares bytes there shares
    the same bytes here, whichever library made it."""
    found: list[tuple[int, int, Any, Any]] = []  # extent, device, thing
    for name, thing in names.things():
        if isinstance(thing, torch.Tensor):
            if not thing.is_leaf or type(thing) not in (torch.Tensor, torch.nn.Parameter):
                raise Unlike(f"`{name}` is no plain tensor, or has a graph")
            if tensor_range(thing) is not None:
                storage = thing.untyped_storage()
                low = storage.data_ptr()
                found.append((low, low + storage.nbytes(), thing.device, thing))
        elif type(thing) is np.ndarray and thing.size and thing.dtype != object:
            base = thing
            while isinstance(base.base, np.ndarray):
                base = base.base
            found.append((*array_range(base), torch.device("cpu"), thing))
    found.sort(key=lambda each: (str(each[2]), each[0]))
    memo: dict[int, Any] = {}
    end, group = 0, list[tuple[int, int, Any, Any]]()
    for each in found:
        if group and (each[0] >= end or each[2] != group[0][2]):
            _copy_group(group, end, memo)
            group = []
        end = max(end, each[1]) if group else each[1]
        group.append(each)
    if group:
        _copy_group(group, end, memo)
    return memo


def _copy_group(group: list[tuple[int, int, Any, Any]], end: int, memo: dict[int, Any]) -> None:
    low, _, device, _ = group[0]
    room = torch.empty(end - low, dtype=torch.uint8, device=device)
    twin: Any
    for _, _, _, thing in group:
        if isinstance(thing, np.ndarray):
            at = thing.__array_interface__["data"][0] - low
            twin = np.ndarray(thing.shape, thing.dtype, room.numpy(), at, thing.strides)
            twin[...] = thing
            twin.flags.writeable = thing.flags.writeable
        else:
            at, odd = divmod(thing.data_ptr() - low, thing.element_size())
            if odd:
                raise Unlike("memory that numpy and torch share is not aligned")
            plain = torch.empty(0, dtype=thing.dtype, device=device)
            plain.set_(room.untyped_storage(), at, thing.shape, thing.stride())
            with torch.no_grad():
                plain.copy_(thing)
            if isinstance(thing, torch.nn.Parameter):
                twin = torch.nn.Parameter(plain, thing.requires_grad)
            else:
                twin = plain.requires_grad_(thing.requires_grad)
            if vars(thing):
                twin.__dict__.update(vars(thing))
        memo[id(thing)] = twin


def _apart(name: str, thing: Any, twin: Any) -> None:
    """Refuse a copy that shares memory with the original, by a ``__deepcopy__`` of the user's."""
    mine, other = memory_range(thing), memory_range(twin)
    shares = mine is not None and other is not None and mine[0] < other[1] and other[0] < mine[1]
    if shares or (twin is thing and not isinstance(thing, np.generic)):
        raise Unlike(f"a copy shares `{name}`")


def _shape(names: StateNames) -> list[tuple[str, list[str]]]:
    return [(name, sorted(names.overlapping(low, high))) for low, high, name in names.memory]


@dataclass(frozen=True)
class Generators:
    """Where the process's generators stand."""

    torch: torch.Tensor
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> Generators:
        """Where they stand now."""
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())  # noqa: NPY002

    def restore(self) -> None:
        """Put them back there."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)  # noqa: NPY002
        random.setstate(self.python)

    def differs(self, other: Generators) -> str | None:
        """The first one that stands elsewhere, as the state it is."""
        if not torch.equal(self.torch, other.torch):
            return "rng:torch"
        if not same_bits(tuple(self.numpy), tuple(other.numpy)):
            return "rng:numpy"
        return None if self.python == other.python else "rng:python"


def difference(a: Any, b: Any, path: str) -> tuple[str, Any, Any] | None:
    """Where two values differ first, and both values there; ``None`` where every bit is equal.

    What can't be looked into, such as objects of C code, counts as equal.
    """
    visited: set[tuple[int, int]] = set()
    queue: list[tuple[str, Any, Any]] = [(path, a, b)]
    while queue:
        path, a, b = queue.pop(0)
        if (id(a), id(b)) in visited:
            continue
        visited.add((id(a), id(b)))
        if type(a) is not type(b):
            return path, type(a).__name__, type(b).__name__
        if isinstance(a, torch.Tensor | np.ndarray | np.generic) or is_scalar(a):
            if not same_bits(a, b):
                return path, *_told(a, b)
        elif isinstance(a, dict | list | tuple | set) and len(a) != len(b):
            return path, f"{len(a)} items", f"{len(b)} items"
        if isinstance(a, torch.Tensor) and a.is_leaf:
            queue.append((f"{path}.grad", a.grad, b.grad))
        else:
            queue += _below(path, a, b)
    return None


def _below(path: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(a, torch.Generator):
        yield path, a.get_state(), b.get_state()
    elif isinstance(a, np.random.Generator):
        yield path, repr(a.bit_generator.state), repr(b.bit_generator.state)
    elif isinstance(a, random.Random):
        yield path, repr(a.getstate()), repr(b.getstate())
    elif isinstance(a, torch.optim.Optimizer):
        yield f"{path}.state", list(a.state.values()), list(b.state.values())
        yield f"{path}.param_groups", a.param_groups, b.param_groups
    elif isinstance(a, dict):
        yield from (
            (f"{path}.{k}" if isinstance(k, str) else path, x, y)
            for (k, x), y in zip(a.items(), b.values(), strict=True)
        )
    elif isinstance(a, list | tuple):
        yield from ((path, x, y) for x, y in zip(a, b, strict=True))
    elif not isinstance(a, type | types.FunctionType | types.ModuleType | types.MethodType):
        theirs = dict(fields_of(b))
        for name, value in fields_of(a):
            if name in ("_modules", "_parameters", "_buffers"):
                yield path, value, theirs.get(name)
            elif name in theirs or is_user_type(type(a)):
                yield f"{path}.{name}", value, theirs.get(name)


def _told(a: Any, b: Any) -> tuple[Any, Any]:
    """Two values that differ, or the elements where they differ most."""
    try:
        x, y = torch.as_tensor(a).detach(), torch.as_tensor(b).detach()
        differ = (x != y).nonzero()
        if x.shape != y.shape or not len(differ):
            return a, b
        worst = max(differ[:1000], key=lambda at: float((x - y).abs()[tuple(at)]))
    except (TypeError, RuntimeError, ValueError):
        return a, b
    index = tuple(int(i) for i in worst)
    return f"{float(x[index])} at {list(index)}", float(y[index])
