"""What of a body may run on streams of a device beside the coordinator's, and what that weighs.

Weights stand in for times, which nobody knows before a schedule runs on the device: they tell a
network's forward pass from the store of a row, no more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import networkx as nx
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.deps import TOGETHER, Dependences, Edge, place, title
from rose_compiler.ir.effects import EVERYTHING, HOST
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.ops import BRANCH, LOADS, LOOP, STORES
from rose_compiler.ir.program import (
    LoopView,
    Program,
    is_call,
    is_hosted,
    is_item,
    is_state,
    is_structure,
    op_of,
)
from rose_compiler.ir.recorded import records
from rose_compiler.passes.base import TRIVIAL
from rose_compiler.passes.overlap import kinds
from rose_compiler.passes.place import TRAINING
from rose_compiler.passes.recurrence import is_step

#: A device that is only planned for: the program's tensors lie elsewhere.
VIRTUAL = "virtual:"
#: Kinds of devices that have streams and an allocator that knows of them.
STREAMED = frozenset({"cuda", "xpu"})
#: What the operations of a lane have to weigh: around each an event is recorded and waited for.
WORTH = 4
#: What a torch call weighs that does much at once, or the call of a module, and any other call.
HEAVY, LIGHT = 4, 1
#: What a training step or a simulator's weighs.
WHOLE = 16
_LARGE = frozenset(
    {"addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "einsum", "linear", "matmul", "mm"}
    | {"scaled_dot_product_attention"}
)
#: Kinds of operations that a lane can run, and kinds of calls that keep one from it.
_RUNS = frozenset({"block", "graph", "component"})
_STAYS = TRAINING | {"step", "reset", "log", "clock", "missed"}
_CONTAINERS = frozenset({"builtins.list", "builtins.set", "collections.deque"})


def weight(node: fx.Node) -> int:
    """What an operation weighs beside others, that of all trips of a loop or both arms of a branch
    counted once; 0 for what does nothing on a device."""
    if is_call(node, LOOP):
        return sum(map(weight, LoopView(node).graph.nodes))
    if not is_call(node):
        return 0
    op, called = op_of(node), kinds(node)
    if is_step(node) or called & (TRAINING | {"step"}):
        return WHOLE
    if is_call(node, BRANCH):
        return HEAVY if called else LIGHT
    if op.kind == "builtin" or op.name in TRIVIAL or {LOADS, STORES} & set(op.attributes):
        return 0
    if op.body is not None:
        return weight_of(op.body)
    if called & {"module", "component", "scan"}:
        return HEAVY
    return max(1, len(op.source)) * LIGHT


def weight_of(body: fx.GraphModule) -> int:
    """What a traced graph weighs."""
    found = 0
    for node in body.graph.nodes:
        if node.op in ("call_function", "call_method") and not is_item(node):
            name = node.target if isinstance(node.target, str) else node.target.__name__
            found += HEAVY if name in _LARGE else LIGHT
    return found


def why_not(node: fx.Node, deps: Dependences, device: str) -> Blocker | None:
    """Why an operation can't be queued on a stream of its own, or None.

    Its order is for the dependences to say. The coordinator itself runs its Python, so what matters
    is which memory its kernels may touch: arguments are kept until they are through, and nothing
    else is let go without a write that waits for them.
    """
    at = place(node)
    where = (at,) if at else ()

    def blocked(code: str, why: str, allow: str | None = None) -> Blocker:
        return Blocker(code, f"{title(node)} {why}", allow, where=where)

    if not is_call(node) or is_structure(node) or is_hosted(node):
        return blocked("unsupported-shape", "is no operation that a stream can run")
    op = op_of(node)
    if records(node):
        return blocked(
            "grad-graph",
            "records gradients, and backward would go on along the streams of its graph",
            "`with torch.no_grad():` around it, if no gradient is wanted",
        )
    if deps.casts.keeps(node):
        return blocked("mode-change", TOGETHER)
    if op.kind not in _RUNS or kinds(node) & _STAYS:
        return blocked("opaque-call", "steps, trains or reaches outside of the process")
    if {LOADS, STORES} & set(op.attributes):
        return blocked("unsupported-shape", "does nothing on a device")
    for effect in deps.effects(node):
        if effect.state == EVERYTHING:
            return blocked(
                "unknown-effects",
                "is known nothing of: it may touch everything",
                "declare its reads and writes with `rose_compiler.component` or `declare`",
            )
        if effect.state == HOST:
            return blocked("opaque-call", "reaches outside of the process")
    given = [s for n in node.all_input_nodes if not is_state(n) for s in _specs_of(n, deps)]
    if any(map(_opaque, given)):
        return blocked("opaque-call", "is handed an object whose tensors can't be kept alive")
    known = [*given, *(s for s in (facts.get(node).spec,) if s is not None)]
    if not device.startswith(VIRTUAL) and not any(_on(s, device) for s in known):
        return blocked("no-lane", f"has no tensor on {device}")
    return None


def device_of(program: Program) -> str:
    """The one device with streams that a program's values lie on; empty for none, or several."""
    found = {name for name in devices_of(program) if name.partition(":")[0] in STREAMED}
    return found.pop() if len(found) == 1 else ""


def devices_of(program: Program) -> set[str]:
    """All devices that a program's values were seen on; empty text for what lies on none."""
    return {name for node in program.nodes() for name in _devices(facts.get(node).spec)}


def _devices(spec: Spec | None) -> Iterator[str]:
    if spec is not None:
        yield spec.device
        for item in spec.items:
            yield from _devices(item)


def _specs_of(node: fx.Node, deps: Dependences) -> Iterator[Spec]:
    """The type of a value, if it is known where it is used or where it is made."""
    for found in (node, deps.scope.resolve(node)):
        if isinstance(found, fx.Node) and (spec := facts.get(found).spec) is not None:
            yield spec
            return


def _opaque(spec: Spec) -> bool:
    held = spec.kind == "object" and spec.type_name not in _CONTAINERS
    return held or any(map(_opaque, spec.items))


def _on(spec: Spec, device: str) -> bool:
    return spec.device == device or any(_on(s, device) for s in spec.items)


# -- which operations


def leading(edges: Sequence[Edge]) -> list[Edge]:
    """The dependences along which something is handed on."""
    return [e for e in edges if e.kind in ("value", "flow", "control", "record")]


def cycle(
    nodes: Sequence[fx.Node], edges: Sequence[Edge], worth: int = WORTH
) -> frozenset[fx.Node]:
    """The heaviest recurrence of a body: it decides how fast trips follow each other. Empty where
    none weighs that much."""
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from((e.src, e.dst) for e in leading(edges))
    best: frozenset[fx.Node] = frozenset()
    for found in nx.strongly_connected_components(graph):
        turns = len(found) > 1 or any(graph.has_edge(n, n) for n in found)
        if turns and sum(map(weight, found)) > sum(map(weight, best)):
            best = frozenset(found)
    return best if sum(map(weight, best)) >= worth else frozenset()


def longest_path(nodes: Sequence[fx.Node], edges: Sequence[Edge]) -> set[fx.Node]:
    """The heaviest chain of operations of one trip, each waiting for the one before."""
    before: dict[fx.Node, list[fx.Node]] = {n: [] for n in nodes}
    for edge in edges:
        if not edge.least and edge.src is not edge.dst:
            before[edge.dst].append(edge.src)
    total: dict[fx.Node, int] = {}
    via: dict[fx.Node, fx.Node | None] = {}
    for node in nodes:  # in program order: what a node waits for stands in front of it
        via[node] = max(before[node], key=total.__getitem__, default=None)
        last = via[node]
        total[node] = weight(node) + (0 if last is None else total[last])
    found: set[fx.Node] = set()
    at = max(nodes, key=lambda n: total[n], default=None)
    while at is not None:
        found.add(at)
        at = via[at]
    return found


def untied(node: fx.Node, nodes: Collection[fx.Node], edges: Sequence[Edge]) -> list[fx.Node]:
    """The nodes that neither wait for this one in the same trip nor are waited for by it."""
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from((e.src, e.dst) for e in edges if not e.least)
    tied = {node, *nx.ancestors(graph, node), *nx.descendants(graph, node)}
    return [n for n in nodes if n not in tied]


def source(node: Any) -> Any:
    """The operation that a pick, or a pick of a pick, takes a part of."""
    while is_item(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def groups(members: Sequence[fx.Node], edges: Sequence[Edge]) -> list[list[fx.Node]]:
    """Operations that wait for each other, through picks of results too, in one group each; the
    heaviest group first."""
    graph = nx.Graph()
    graph.add_nodes_from(members)
    inside = set(members)
    for edge in edges:
        ends = source(edge.src), source(edge.dst)
        if all(n in inside for n in ends):
            graph.add_edge(*ends)
    found = [[n for n in members if n in part] for part in nx.connected_components(graph)]
    return sorted(found, key=lambda part: -sum(map(weight, part)))


def by_group(steps: Sequence[fx.Node], edges: Sequence[Edge]) -> list[list[fx.Node]]:
    """The operations on the way from steps to steps, apart for each group of shards that are
    advanced together; what leads to all steps belongs to none. Empty where there is one group."""
    before: dict[fx.Node, list[fx.Node]] = {}
    for edge in edges:
        if edge.kind == "value":
            before.setdefault(edge.dst, []).append(edge.src)
    leads: dict[fx.Node, list[fx.Node]] = {}  # to which steps
    for step in steps:
        seen = {step, *steps}
        todo = [step]
        while todo:
            for node in before.get(todo.pop(), ()):
                if node not in seen:
                    seen.add(node)
                    todo.append(node)
                    leads.setdefault(node, []).append(step)
    own = {n: to for n, to in leads.items() if len(to) < len(steps)}
    graph = nx.Graph()
    graph.add_nodes_from(steps)
    graph.add_edges_from((to[0], other) for to in own.values() for other in to)
    parts = list(nx.connected_components(graph))
    if len(parts) < 2:
        return []
    return [[n for n, to in own.items() if to[0] in part] for part in parts]
