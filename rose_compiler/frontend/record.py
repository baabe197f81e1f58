"""What the first trip showed: types, example values, and where values lie in memory."""

from __future__ import annotations

import collections
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.fx as fx

from rose_compiler.base import gaps
from rose_compiler.frontend import makes
from rose_compiler.frontend.components import is_component
from rose_compiler.frontend.effects_val import IMMUTABLE
from rose_compiler.frontend.known import graph_leaves
from rose_compiler.frontend.module_modes import Flag, flags
from rose_compiler.frontend.names import StateNames, array_range, tensor_range
from rose_compiler.frontend.numbers import Number
from rose_compiler.frontend.sizes import Vary
from rose_compiler.ir import facts
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.interp import Hooks
from rose_compiler.ir.ops import UNBOUND
from rose_compiler.ir.program import Program, is_call, is_item, is_state, is_structure, op_of

KEEP = 2  # occurrences of a node whose results are kept, to see sharing across trips
_CONTAINERS = (list, dict, set, collections.deque)
_GRAPH_NODES = 2000  # of one autograd graph that are searched for saved tensors


@dataclass
class Example:
    """The arguments of a node's first execution, values cloned, with torch's generator state and
    the modes of modules before it."""

    args: tuple[Any, ...]
    types: tuple[type | None, ...]
    rng: torch.Tensor | None = None
    modes: tuple[Flag, ...] = ()


@dataclass
class Record:
    """Everything seen of one program while it ran in program order.

    Results are held strongly until :meth:`release`: as long as a value lives, its address is its
    own. ``recorded`` has the nodes that recorded an autograd graph, and whether a result may
    lead there; ``types`` has every combination of argument types that was seen, ``leaves`` and
    ``saved`` the states whose gradients a ``backward`` wrote and whose memory its graph had kept,
    ``makes`` every combination of dtypes, devices and trailing sizes of arguments. ``numbers`` are
    those that graphs hold, and ``unsteady`` says which of them no graph may. ``resized_later`` are
    operations, by name, whose graph was handed other sizes when it ran, and which.
    """

    names: StateNames
    examples: dict[fx.Node, Example] = field(default_factory=dict)
    results: dict[fx.Node, list[Any]] = field(default_factory=dict)
    counts: collections.Counter[fx.Node] = field(default_factory=collections.Counter)
    types: dict[fx.Node, dict[tuple[type | None, ...], None]] = field(default_factory=dict)
    recorded: dict[fx.Node, bool] = field(default_factory=dict)
    leaves: dict[fx.Node, dict[str, None]] = field(default_factory=dict)
    saved: dict[fx.Node, dict[str, None]] = field(default_factory=dict)
    makes: dict[fx.Node, dict[tuple[Any, ...], None]] = field(default_factory=dict)
    numbers: list[Number] = field(default_factory=list)
    unsteady: Container[str] = frozenset()
    resized_later: dict[str, str] = field(default_factory=dict)

    def varies(self, node: fx.Node) -> bool:
        """Whether an argument had another dtype, device or number of axes on another trip: what
        tracing drops because it does nothing to the one, such as ``x.float()``, may be needed."""
        return makes.differ(self.makes.get(node, ()), tails=False)

    def reshapes(self, node: fx.Node) -> bool:
        """Whether an argument had other trailing sizes or other keys on another trip, so that what
        is proven of the first one may not hold."""
        return makes.differ(self.makes.get(node, ()), dtypes=False)

    def resized(self, nodes: Iterable[fx.Node]) -> Vary:
        """Which sizes of what some operations were handed differed from trip to trip."""
        nodes = list(nodes)
        found = {makes.resized(self.makes.get(node, ())) for node in nodes}
        if any(op_of(node).name in self.resized_later for node in nodes):
            return "all"
        return "all" if "all" in found else "rows" if "rows" in found else "none"

    def release(self) -> None:
        """Forget the values; specs and examples stay."""
        self.results.clear()

    def let_go(self) -> None:
        """Forget iterators: what a generator has opened ends once nobody holds it any more."""
        for node, found in self.results.items():
            self.results[node] = [None if isinstance(v, Iterator) else v for v in found]

    def add(self, later: Record) -> None:
        """Take over what was seen later, when a part of the program ran for the first time."""
        self.names = later.names
        self.results = later.results
        self.examples = {**later.examples, **self.examples}
        self.counts.update(later.counts)
        for node, types in later.types.items():
            self.types.setdefault(node, {}).update(types)
        for node, seen in later.makes.items():
            self.makes.setdefault(node, {}).update(seen)
        for node, leads in later.recorded.items():
            self.recorded[node] = leads or self.recorded.get(node, False)
        for mine, more in ((self.leaves, later.leaves), (self.saved, later.saved)):
            for node, states in more.items():
                mine.setdefault(node, {}).update(states)

    def moved(self, to: Mapping[fx.Node, fx.Node]) -> Record:
        """The same of a copy of the program."""
        return Record(
            self.names,
            {to[n]: v for n, v in self.examples.items()},
            {to[n]: v for n, v in self.results.items()},
            collections.Counter({to[n]: v for n, v in self.counts.items()}),
            {to[n]: v for n, v in self.types.items()},
            {to[n]: v for n, v in self.recorded.items()},
            {to[n]: v for n, v in self.leaves.items()},
            {to[n]: v for n, v in self.saved.items()},
            {to[n]: v for n, v in self.makes.items()},
            resized_later=self.resized_later,
        )


class Recorder(Hooks):
    """Hooks for the reference interpreter."""

    def __init__(self, program: Program) -> None:
        self.record = Record(StateNames(program.objects))
        self._made = 0
        self._modules = list(
            dict.fromkeys(m for top in self.record.names.modules.values() for m in top.modules())
        )

    def before(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        if not is_call(node) or (op := op_of(node)).kind == "builtin":
            return
        seen = self.record.counts[node]
        self.record.counts[node] += 1
        types = tuple(map(type, args))
        self.record.types.setdefault(node, {}).setdefault(types)
        self.record.makes.setdefault(node, {}).setdefault(tuple(map(makes.of, args)))
        if seen < KEEP and any("backward" in line for line in op.source):
            self._graphs(node, args)
        self._made = graph_nodes_made()
        if seen:
            return
        states = [isinstance(a, fx.Node) and is_state(a) for a in node.args]
        kept = tuple(a if state else _kept(a) for a, state in zip(args, states, strict=True))
        rng = torch.get_rng_state() if not torch.is_grad_enabled() else None
        self.record.examples[node] = Example(kept, types, rng, flags(self._modules))

    def after(self, node: fx.Node, args: tuple[Any, ...], result: Any) -> None:
        if is_call(node) and op_of(node).kind != "builtin" and graph_nodes_made() > self._made:
            leads = self.record.recorded.get(node, False) or may_lead_back(result)
            self.record.recorded[node] = leads
        if facts.get(node).spec is None:
            facts.put(node, spec=spec_of(result))
        if not all(is_item(u) for u in node.users) or not node.users:
            self._keep(node, result)  # the parts of a tuple are told apart

    def value(self, node: fx.Node, value: Any) -> None:
        outside = node.op == "placeholder" and not is_state(node)
        if value is UNBOUND or not (outside or is_item(node)):
            return
        if facts.get(node).spec is None:
            facts.put(node, spec=spec_of(value))
        if not outside:
            maker = node.args[0]
            if isinstance(maker, fx.Node) and not is_structure(maker):
                self._keep(node, value)
        elif facts.get(node).role in ("value", "index"):
            self._keep(node, value)  # what comes from outside may share memory with a state

    def _keep(self, node: fx.Node, result: Any) -> None:
        if node not in self.record.results:
            self.record.results[node] = [result]
        elif len(self.record.results[node]) < KEEP:
            self.record.results[node].append(result)

    def _graphs(self, node: fx.Node, args: tuple[Any, ...]) -> None:
        """What the autograd graphs of the arguments lead to and hold."""
        names = self.record.names
        leaves = self.record.leaves.setdefault(node, {})
        saved = self.record.saved.setdefault(node, {})
        for value in tensors_in(args):
            if not value.requires_grad:
                continue
            leaves.update(dict.fromkeys(names.cover(graph_leaves(value), "grads")))
            for tensor in saved_tensors(value):
                found = tensor_range(tensor)
                if found is not None:
                    saved.update(dict.fromkeys(names.overlapping(*found)))


def _kept(value: Any) -> Any:
    """What stays of an argument as an example: nothing of an iterator, which is none a second time
    and may hold much open."""
    return None if isinstance(value, Iterator) else clone(value)


def graph_nodes_made() -> int:
    """How many nodes of autograd graphs this thread has made: backward goes by that number."""
    return int(torch._C._autograd._get_sequence_nr())


def may_lead_back(value: Any) -> bool:
    """Whether a value may hold a tensor with an autograd graph."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, tuple):
        return any(map(may_lead_back, value))
    return not isinstance(value, (*IMMUTABLE, np.ndarray))


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors in a value that may be a nest of containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict) and depth < 3:
        for each in value.values():
            yield from tensors_in(each, depth + 1)
    elif isinstance(value, (tuple, list)) and depth < 3:
        for each in value:
            yield from tensors_in(each, depth + 1)


# older versions of torch can't show what was packed without unpacking it
_RAW = hasattr(torch._C._autograd.SavedTensor, "data")
_SAVED = "_raw_saved_" if _RAW else "_saved_"


def saved_tensors(root: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a graph keeps for its backward: what a hook of the user's packed as packed,
    since unpacking would call him, and all that a function of his own keeps."""
    seen: set[Any] = set()
    queue = [root.grad_fn]
    while queue and len(seen) < _GRAPH_NODES:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith(_SAVED):
                try:
                    found = getattr(node, name)
                    if _RAW:
                        found = [s.data for s in (found if isinstance(found, tuple) else (found,))]
                except RuntimeError:  # freed by an earlier backward
                    continue
                yield from tensors_in(found)
        yield from tensors_in(getattr(node, "__dict__", None))
        queue.extend(following for following, _ in node.next_functions)


def clone(value: Any) -> Any:
    """A copy of tensors and arrays in a value, so that later writes do not show."""
    if isinstance(value, torch.Tensor):
        return value if value.requires_grad else gaps.like(value.detach().clone(), value)
    if isinstance(value, np.ndarray):
        return gaps.like(value.copy(order="K"), value)
    if type(value) in (tuple, list):
        return type(value)(clone(v) for v in value)
    if type(value) is dict:
        return {k: clone(v) for k, v in value.items()}
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
        entries = type(value) is dict and value.items()
        if entries and all(type(k) is str and _has_rows(v) for k, v in entries):
            return Spec("dict", name, items=tuple(map(spec_of, value.values())), keys=tuple(value))
        return Spec("dict", name)
    return Spec("object", name)


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0


def memory_of(value: Any, depth: int = 0) -> Iterator[tuple[int, int] | int]:
    """Where a value's memory lies: address ranges of tensors and arrays, identities of objects."""
    if value is UNBOUND:  # what stands for all variables that nothing has assigned is nobody's
        return
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
            yield from _memory_inside(value, depth)


def _memory_inside(value: Any, depth: int) -> Iterator[tuple[int, int] | int]:
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        inner = value
    elif not is_component(value):
        inner = getattr(value, "__dict__", {}).values()
    for each in list(inner)[:64]:
        if isinstance(each, (torch.Tensor, np.ndarray, dict, list, tuple)) or (
            hasattr(each, "__dict__") and not callable(each)
        ):
            yield from memory_of(each, depth + 1)
