"""One name for each mutable thing, whatever paths lead to it."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from rose_compiler.frontend.components import is_hosted, is_simulator
from rose_compiler.frontend.reachable import fields_of
from rose_compiler.frontend.scalar import is_scalar
from rose_compiler.frontend.source import is_user_type

MAX_OBJECTS = 50_000
MAX_LINKS = 500  # of one name; more are taken for everything
MAX_ITEMS = 1000  # of one container; a longer one counts as opaque
_CONTAINERS = (list, dict, set, frozenset, tuple, collections.deque)
_OPAQUE = (type, str, bytes, torch.dtype, torch.device)
_MODULE_FIELDS = frozenset(vars(torch.nn.Module()))
#: Parts of a module that are states of their own.
PARTS = ("params", "buffers", "grads", "mode")


class StateNames:
    """Canonical state names of everything that is reachable from the roots of a program.

    A thing reached by several paths has the name of the shortest, first found; items of a sequence
    have the name of the sequence. Parameters and buffers of a module are named below it as
    ``agent.params.actor.0.weight`` and ``agent.buffers.mean``; wrappers around a simulator share
    the name of the outermost one met first.
    """

    def __init__(self, roots: dict[str, Any]) -> None:
        self.names: dict[int, str] = {}
        self.paths: dict[
            int, str
        ] = {}  # how to reach it from its root, where attributes lead there
        self.memory: list[tuple[int, int, str]] = []  # address range and state
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.opaque: set[str] = set()  # what may hold more than was walked
        # a path to what has another name; true where it is an item of the container named so
        self.links: dict[str, dict[str, bool]] = {}
        # where references hang: what reads one, its key, and the name of what is found there
        self.slots: list[tuple[Callable[[Any], Any], Any, str]] = []
        self.lengths: list[tuple[Any, str]] = []  # of containers that may grow
        self._items: set[tuple[str, int]] = set()
        self._schedulers: set[str] = set()
        self._inside: dict[int, tuple[str, str]] = {}  # submodules: the module named, and the path
        self._keep: list[Any] = []
        self._ranges: tuple[int, np.ndarray, np.ndarray] | None = None
        # a root that is another object is seen elsewhere; a tensor may be pointed at other memory
        self.slots += [(roots.get, n, n) for n, v in roots.items() if isinstance(v, torch.Tensor)]
        self._walk([(name, name, value) for name, value in roots.items()])

    def add(self, name: str, value: Any) -> None:
        """Name one more root and everything below it that has no name yet."""
        self._walk([(name, name, value)])

    def _walk(self, start: list[tuple[str, str | None, Any]]) -> None:
        queue = collections.deque(start)
        while queue:
            name, path, value = queue.popleft()
            if len(self._keep) > MAX_OBJECTS:
                self.opaque.add(name)
                continue
            queue.extend(self._enter(name, path, value))
        for name, optimizer in list(self.optimizers.items()):
            owned = [p for group in optimizer.param_groups for p in group["params"]]
            for number, tensor in enumerate(owned):
                # what an optimizer does to the parameters of modules is known: no link to them
                if id(tensor) not in self.names:
                    self._leaf(f"{name}.params.{number}", None, tensor)

    def _enter(self, name: str, path: str | None, value: Any) -> list[tuple[str, str | None, Any]]:
        if is_scalar(value) or isinstance(value, _OPAQUE) or callable_only(value):
            return []
        if isinstance(value, np.generic) and not isinstance(value, np.void):
            return []  # a number, which nothing changes in place; a record is part of its array
        if id(value) in self.names:
            self._link(name, self.names[id(value)], item=(name, id(value)) in self._items)
            return []
        self.names[id(value)] = name
        self._keep.append(value)
        if path is not None:
            self.paths[id(value)] = path
        if isinstance(value, torch.Tensor):
            self._tensor(name, value)
            return []
        if isinstance(value, np.ndarray):
            self.memory.append((*array_range(value), name))
            return []
        if isinstance(value, torch.nn.Module):
            return self._module(name, path, value)
        if isinstance(value, torch.optim.Optimizer):
            self.optimizers[name] = value
            self.opaque.add(name)
            return []
        if is_hosted(value):
            self.opaque.add(name)
            return []
        if is_simulator(value):
            self._simulator(name, value)
            return []
        if isinstance(value, _CONTAINERS):
            return self._container(name, path, value)
        below = list(fields_of(value))
        if isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            self._schedulers.add(name)  # what it does to its optimizer is known: no link to it
        if not is_user_type(type(value)) and type(value).__module__ not in ("types", "argparse"):
            self.opaque.add(name)
        own, read = getattr(value, "__dict__", {}), functools.partial(getattr, value)
        self.slots += [(own.get if k in own else read, k, f"{name}.{k}") for k, _ in below]
        return [(f"{name}.{k}", _join(path, k), v) for k, v in below]

    def _container(
        self, name: str, path: str | None, value: Any
    ) -> list[tuple[str, str | None, Any]]:
        if len(value) > MAX_ITEMS:
            self.opaque.add(name)
            return []
        # copied at once: another thread, a logger's say, may take items out meanwhile
        pairs = list(value.items()) if isinstance(value, dict) else []
        items = [v for _, v in pairs] if isinstance(value, dict) else list(value)
        self._items |= {(name, id(v)) for v in items}
        self.lengths.append((value, name))
        if not isinstance(value, dict):
            if not isinstance(value, set | frozenset):
                self.slots += [(value.__getitem__, k, name) for k in range(len(items))]
            return [(name, None, v) for v in items]
        below: list[tuple[str, str | None, Any]] = [
            (f"{name}.{k}", _join(path, k), v)
            if isinstance(k, str) and k.isidentifier()
            else (name, None, v)
            for k, v in pairs
        ]
        self.slots += [(value.get, k, b[0]) for (k, _), b in zip(pairs, below, strict=True)]
        return below

    def _simulator(self, name: str, value: Any) -> None:
        self.opaque.add(name)
        inner = value
        while (nested := getattr(inner, "__dict__", {}).get("env")) is not None:
            if not is_simulator(nested) or id(nested) in self.names:
                break
            self.names[id(nested)] = name
            self._keep.append(nested)
            inner = nested

    def _module(
        self, name: str, path: str | None, module: torch.nn.Module
    ) -> list[tuple[str, str | None, Any]]:
        self.modules[name] = module
        self._inside[id(module)] = (name, "")
        below: list[tuple[str, str | None, Any]] = []
        for inner_path, inner in module.named_modules():
            full = _join(path, inner_path) if inner_path else path
            if inner_path and id(inner) not in self.names:
                self.names[id(inner)] = f"{name}.{inner_path}"
                self._inside[id(inner)] = (name, inner_path)
                self._keep.append(inner)
                if full is not None:
                    self.paths[id(inner)] = full
            prefix = f".{inner_path}" if inner_path else ""
            self.slots += [(inner._modules.get, k, name) for k in inner._modules]
            for part, pool in (("params", inner._parameters), ("buffers", inner._buffers)):
                for key, tensor in pool.items():
                    self.slots.append((pool.get, key, f"{name}.{part}{prefix}.{key}"))
                    if tensor is not None:
                        self._leaf(f"{name}.{part}{prefix}.{key}", _join(full, key), tensor)
            own = {k: v for k, v in vars(inner).items() if k not in _MODULE_FIELDS}
            self.slots += [(vars(inner).get, k, f"{name}{prefix}.{k}") for k in own]
            below += [(f"{name}{prefix}.{k}", _join(full, k), v) for k, v in own.items()]
        return below

    def _link(self, name: str, other: str, *, item: bool = False) -> None:
        if other != name and name.rpartition(".")[0] not in self._schedulers:
            known = self.links.setdefault(name, {})
            known[other] = known.get(other, True) and item

    def _leaf(self, name: str, path: str | None, tensor: torch.Tensor) -> None:
        if id(tensor) in self.names:
            self._link(name, self.names[id(tensor)])
        else:
            self.names[id(tensor)] = name
            self._keep.append(tensor)
            if path is not None:
                self.paths[id(tensor)] = path
            self._tensor(name, tensor)

    def _tensor(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor
        found = tensor_range(tensor)
        if found is not None:
            self.memory.append((*found, name))

    # -- questions -----------------------------------------------------------------------------

    def name_of(self, value: Any) -> str | None:
        """The canonical name of a live object, if it is reachable from a root."""
        return self.names.get(id(value))

    def things(self) -> Iterator[tuple[str, Any]]:
        """Every live object that has a name, with it; submodules are part of their module."""
        for value in self._keep:
            inside = self._inside.get(id(value))
            if inside is None or not inside[1]:
                yield self.names[id(value)], value

    def every(self) -> Iterator[tuple[str, Any]]:
        """Every live object that has a name, with it; submodules by names of their own."""
        for value in self._keep:
            yield self.names[id(value)], value

    def attributes(self) -> dict[str, torch.Tensor]:
        """The tensors that attributes lead to from a root, by name: what a name can be read by. The
        items of a sequence have its name."""
        return {name: t for name, t in self.tensors.items() if id(t) in self.paths}

    def path_of(self, value: Any) -> str | None:
        """A root and attributes that lead to a live object, if any do."""
        return self.paths.get(id(value))

    def shared(self, value: Any) -> list[str]:
        """Other states that a live tensor or array shares bytes with."""
        found = memory_range(value)
        own = self.name_of(value)
        return [] if found is None else [n for n in self.overlapping(*found) if n != own]

    def linked(self, state: str, *, items: bool = True) -> list[str]:
        """Other names of what a path leads to, or of what lies below it; without ``items``, of the
        container that it is rather than of what that holds."""
        found: dict[str, None] = {}
        queue = [state]
        while queue and len(found) < MAX_LINKS:
            at = queue.pop()
            for path, others in self.links.items():
                if at == path or path.startswith(f"{at}."):
                    rest = ""
                elif at.startswith(f"{path}."):
                    rest = at[len(path) :]
                else:
                    continue
                for other, is_item in others.items():
                    if is_item and not items and at == path == state:
                        continue
                    name = other + rest
                    if name not in found and name != state:
                        found[name] = None
                        queue.append(name)
        return list(found) if len(found) < MAX_LINKS else ["*"]

    def containers(self) -> frozenset[str]:
        """The names of lists, dicts and sets, which hold references."""
        kinds = (list, dict, set, collections.deque)
        return frozenset(self.names[id(v)] for v in self._keep if isinstance(v, kinds))

    def part(self, value: Any, part: str) -> list[str]:
        """The states that are the ``params``, ``buffers``, ``grads`` or ``mode`` of a live module,
        or the ``grads`` of a tensor."""
        if isinstance(value, torch.Tensor):
            return self.cover([value], part)
        if not isinstance(value, torch.nn.Module):
            name = self.name_of(value)
            return ["*"] if name is None else [f"{name}.{part}"]
        found: dict[str, None] = {}
        inside = self._inside.get(id(value))
        if inside is not None:
            found[_join(f"{inside[0]}.{part}", inside[1]) or ""] = None
        if part in ("params", "grads"):
            found.update(dict.fromkeys(self.cover(value.parameters(), part)))
        elif part == "buffers":
            found.update(dict.fromkeys(self.cover(value.buffers(), part)))
        else:
            for each in value.modules():
                top, path = self._inside.get(id(each), ("*", ""))
                found["*" if top == "*" else _join(f"{top}.{part}", path) or ""] = None
        return _without_covered(found)

    def cover(self, tensors: Iterable[torch.Tensor], part: str = "params") -> list[str]:
        """The fewest states that hold these parameters (or, as part "grads", their gradients)."""
        wanted: dict[str, set[str]] = {}
        found: dict[str, None] = {}
        for tensor in tensors:
            name = self.names.get(id(tensor))
            if name is None:
                found["*"] = None
                continue
            top, middle, _ = name.partition(".params.")
            if middle:
                wanted.setdefault(top, set()).add(name)
            else:
                found[f"{name}.grads" if part == "grads" else name] = None
            for other in self.shared(tensor) if part != "grads" else ():
                found[other] = None
        for top, leaves in wanted.items():
            every = [n for n in self.tensors if n.startswith(f"{top}.params.")]
            for prefix in _prefixes(f"{top}.params", leaves, every):
                found[prefix.replace(".params", f".{part}", 1) if part == "grads" else prefix] = (
                    None
                )
        return _without_covered(found)

    def owners(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        """Names of the modules that hold the tensors, or of those outside any themselves."""
        found: dict[str, None] = {}
        for tensor in tensors:
            name = self.names.get(id(tensor), "*")
            found.setdefault(name.split(".params.")[0].split(".buffers.")[0])
        return list(found)

    def overlapping(self, low: int, high: int) -> list[str]:
        """States whose memory shares a byte with the given address range."""
        if self._ranges is None or self._ranges[0] != len(self.memory):
            ranges = np.array([(a, b) for a, b, _ in self.memory], dtype=np.uint64).reshape(-1, 2)
            self._ranges = (len(self.memory), ranges[:, 0], ranges[:, 1])
        _, lows, highs = self._ranges
        hits = np.nonzero((lows < np.uint64(high)) & (highs > np.uint64(low)))[0]
        return [self.memory[i][2] for i in hits]

    def is_opaque(self, name: str) -> bool:
        """Whether a state may hold things that have no name: they can't be told by identity."""
        return any(name == o or name.startswith(o + ".") for o in self.opaque)


def _join(path: str | None, key: str) -> str | None:
    if path is None or not key:
        return path
    return f"{path}.{key}"


def _prefixes(prefix: str, leaves: set[str], every: list[str]) -> Iterator[str]:
    """The fewest dotted prefixes that cover ``leaves`` and none of ``every`` besides."""
    below = [n for n in every if n.startswith(f"{prefix}.") or n == prefix]
    if all(n in leaves for n in below):
        yield prefix
        return
    depth = prefix.count(".") + 1
    steps = dict.fromkeys(".".join(n.split(".")[: depth + 1]) for n in below)
    for step in steps:
        if step != prefix and any(n == step or n.startswith(f"{step}.") for n in leaves):
            yield from _prefixes(step, leaves, every)


def _without_covered(names: dict[str, None]) -> list[str]:
    return [n for n in names if not any(n != o and n.startswith(f"{o}.") for o in names)]


def memory_range(value: Any) -> tuple[int, int] | None:
    """First and last address of a tensor's or array's bytes; ``None`` for anything else."""
    if isinstance(value, torch.Tensor):
        return tensor_range(value)
    if isinstance(value, np.ndarray) and value.size and value.dtype != object:
        return array_range(value)
    return None


def tensor_range(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and last address of the bytes that a tensor's elements lie in."""
    try:
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None  # no memory of its own (fake, sparse, functional)
    if start == 0 or tensor.numel() == 0:
        return None
    size = tensor.element_size()
    low = start + tensor.storage_offset() * size
    span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return int(low), int(low + (span + 1) * size)


def array_range(array: np.ndarray) -> tuple[int, int]:
    """First and last address of an array's bytes."""
    low, high = np.lib.array_utils.byte_bounds(array)
    return int(low), int(high)


def callable_only(value: Any) -> bool:
    """Whether an object is a plain function or method, which holds no state of its own."""
    return type(value).__name__ in (
        "function",
        "builtin_function_or_method",
        "method",
        "module",
        "ufunc",
    )
