"""What the first trip showed: types, example values, and who shares memory with whom."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.frontend.components import is_simulator
from rose_compiler.frontend.known import graph_leaves
from rose_compiler.frontend.names import StateNames, array_range, tensor_range
from rose_compiler.ir import facts
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.interp import Hooks
from rose_compiler.ir.ops import UNBOUND
from rose_compiler.ir.program import Program, is_call, is_state, op_of

KEEP = 2  # occurrences of a node whose results are kept, to see sharing across trips
_CONTAINERS = (list, dict, set, collections.deque)


@dataclass
class Example:
    """The arguments of a node's first execution, values cloned, with torch's generator state before it."""

    args: tuple[Any, ...]
    types: tuple[type | None, ...]
    rng: torch.Tensor | None = None


@dataclass
class Record:
    """Everything seen of one program while it ran in program order.

    Results are held strongly until :meth:`release`: as long as a value lives, its address is its own.
    """

    names: StateNames
    examples: dict[fx.Node, Example] = field(default_factory=dict)
    results: dict[fx.Node, list[Any]] = field(default_factory=dict)
    counts: collections.Counter[fx.Node] = field(default_factory=collections.Counter)
    leaves: dict[fx.Node, list[str]] = field(default_factory=dict)

    def release(self) -> None:
        """Forget the values; specs and examples stay."""
        self.results.clear()


class Recorder(Hooks):
    """Hooks for the reference interpreter."""

    def __init__(self, program: Program) -> None:
        self.record = Record(StateNames(program.objects))

    def before(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        seen = self.record.counts[node]
        self.record.counts[node] += 1
        if seen or not is_call(node):
            return
        op = op_of(node)
        if op.kind == "builtin":
            return
        states = [isinstance(a, fx.Node) and is_state(a) for a in node.args]
        kept = tuple(a if state else clone(a) for a, state in zip(args, states, strict=True))
        types = tuple(None if a is UNBOUND else type(a) for a in args)
        rng = torch.get_rng_state() if not torch.is_grad_enabled() else None
        self.record.examples[node] = Example(kept, types, rng)
        if any(".backward(" in line for line in op.source):
            self.record.leaves[node] = self._leaves(args)

    def after(self, node: fx.Node, args: tuple[Any, ...], result: Any) -> None:
        if node not in self.record.results:
            facts.put(node, spec=spec_of(result))
            self.record.results[node] = [result]
        elif len(self.record.results[node]) < KEEP:
            self.record.results[node].append(result)

    def value(self, node: fx.Node, value: Any) -> None:
        if node.op == "placeholder" and facts.get(node).spec is None and not is_state(node):
            if value is not UNBOUND:
                facts.put(node, spec=spec_of(value))

    def _leaves(self, args: tuple[Any, ...]) -> list[str]:
        found: dict[str, None] = {}
        for value in args:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                for name in self.record.names.owners(graph_leaves(value)):
                    found.setdefault(name)
        return list(found)


def clone(value: Any) -> Any:
    """A copy of tensors and arrays in a value, so that later writes do not show."""
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (tuple, list):
        return type(value)(clone(v) for v in value)
    return value


def spec_of(value: Any, depth: int = 0) -> Spec:
    """The type of a value, without the value."""
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        return Spec(
            "tensor",
            name,
            tuple(value.shape),
            str(value.dtype).removeprefix("torch."),
            str(value.device),
            value.requires_grad,
        )
    if isinstance(value, np.ndarray):
        return Spec("array", name, tuple(value.shape), str(value.dtype))
    if value is None:
        return Spec("none", name)
    if isinstance(value, (bool, int, float, complex, str, np.generic)):
        return Spec("scalar", name)
    if isinstance(value, tuple) and depth < 3:
        return Spec("tuple", name, items=tuple(spec_of(v, depth + 1) for v in value))
    if isinstance(value, dict):
        return Spec("dict", name)
    return Spec("object", name)


def memory_of(value: Any, depth: int = 0) -> Iterator[tuple[int, int] | int]:
    """Where a value's memory lies: address ranges of tensors and arrays, identities of containers."""
    if isinstance(value, torch.Tensor):
        found = tensor_range(value)
        if found is not None:
            yield found
    elif isinstance(value, np.ndarray):
        if value.dtype == object:
            yield id(value)
        elif value.size:
            yield array_range(value)
    elif isinstance(value, tuple) and depth < 3:
        for each in value:
            yield from memory_of(each, depth + 1)
    elif isinstance(value, _CONTAINERS) or hasattr(value, "__dict__"):
        yield id(value)
        if depth < 2:
            inner = (
                value.values()
                if isinstance(value, dict)
                else value
                if isinstance(value, (list, tuple))
                else ()
            )
            for each in list(inner)[:64]:
                if isinstance(each, (torch.Tensor, np.ndarray, dict, list)):
                    yield from memory_of(each, depth + 1)
            if (
                not isinstance(value, _CONTAINERS)
                and not isinstance(value, (torch.nn.Module, torch.optim.Optimizer))
                and not is_simulator(value)
            ):
                for each in list(vars(value).values())[:64]:
                    if isinstance(each, (torch.Tensor, np.ndarray)):
                        yield from memory_of(each, depth + 1)


def find_aliases(program: Program, record: Record) -> None:
    """Put ``alias`` facts on every value that was seen to share memory with a state or with another
    value of the program."""
    ranges: list[tuple[int, int, fx.Node]] = []
    objects: dict[int, list[fx.Node]] = {}
    for node, results in record.results.items():
        if is_state(node):
            continue
        states: dict[str, None] = dict.fromkeys(facts.get(node).alias)
        for result in results:
            for where in memory_of(result):
                if isinstance(where, int):
                    objects.setdefault(where, []).append(node)
                    name = record.names.names.get(where)
                    if name is not None:
                        states.setdefault(name)
                else:
                    ranges.append((*where, node))
                    for name in record.names.overlapping(*where):
                        states.setdefault(name)
        if states:
            facts.put(node, alias=tuple(states))
    groups = _Groups()
    for nodes in objects.values():
        for other in nodes[1:]:
            groups.join(nodes[0], other)
    ranges.sort(key=lambda r: r[0])
    open_high, open_node = -1, None
    for low, high, node in ranges:
        if open_node is not None and low < open_high:
            groups.join(open_node, node)
            open_high = max(open_high, high)
        else:
            open_high, open_node = high, node
    position = {node: i for i, node in enumerate(n for g in program.graphs() for n in g.nodes)}
    for members in groups.all():
        members.sort(key=lambda n: position.get(n, 0))
        shared = dict.fromkeys(a for n in members for a in facts.get(n).alias)
        if not shared:
            shared = {f"%{members[0].name}": None}
        for node in members:
            facts.put(node, alias=tuple(shared))


class _Groups:
    """Union-find over nodes."""

    def __init__(self) -> None:
        self.parent: dict[fx.Node, fx.Node] = {}

    def root(self, node: fx.Node) -> fx.Node:
        self.parent.setdefault(node, node)
        while self.parent[node] is not node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def join(self, a: fx.Node, b: fx.Node) -> None:
        self.parent[self.root(b)] = self.root(a)

    def all(self) -> list[list[fx.Node]]:
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.parent:
            found.setdefault(self.root(node), []).append(node)
        return [members for members in found.values() if len(members) > 1]
