"""The cycle a stepping loop turns in: simulator, observation, policy, action, simulator.

What lies on it decides how fast trips can follow each other; what hangs off it is late work.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import networkx as nx
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir.ops import Op
from rose_compiler.ir.program import (
    LoopView,
    Value,
    is_call,
    is_item,
    is_state,
    op_of,
    state_name,
)


def is_step(node: fx.Node) -> bool:
    """Whether the node advances a simulator."""
    return is_call(node) and op_of(node).kind == "step"


def step_position(op: Op, role: str) -> int:
    """Where a step operation takes its ``"env"`` or its ``"action"``.

    Raises:
        KeyError: when the operation does not say.
    """
    names = op.attributes["step"]
    return op.signature.params.index(names[role])


@dataclass(frozen=True)
class Recurrence:
    """One step of a loop and the operations between two calls of it.

    ``before`` leads, in one trip, from the carried values to the step's action; ``after`` from
    the step's result to the next carried values; both in program order, items of tuples included.
    ``carried`` holds the positions of the loop's carried values on the cycle.
    """

    loop: LoopView
    step: fx.Node
    before: tuple[fx.Node, ...]
    after: tuple[fx.Node, ...]
    carried: tuple[int, ...]

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All of it, in program order."""
        return (*self.before, self.step, *self.after)

    @property
    def env(self) -> fx.Node:
        """The simulator, as the step is given it."""
        found = self.step.args[step_position(op_of(self.step), "env")]
        assert isinstance(found, fx.Node)
        return found

    @property
    def action(self) -> Value:
        """The action the step is given."""
        return self.step.args[step_position(op_of(self.step), "action")]


def value_graph(loop: LoopView) -> nx.DiGraph:
    """Who hands values to whom in one body, carried values included."""
    graph = nx.DiGraph()
    for node in loop.graph.nodes:
        if node.op == "call_function":
            graph.add_node(node)
            for source in node.all_input_nodes:
                if not is_state(source):
                    graph.add_edge(source, node)
    for param, following in zip(loop.carried, loop.carried_next, strict=True):
        if isinstance(following, fx.Node):
            graph.add_edge(following, param)
    return graph


def recurrence(loop: LoopView) -> Recurrence | Blocker:
    """The cycle through the one step of a loop's own body, or why there is none."""
    steps = [n for n in loop.graph.nodes if is_step(n)]
    if not steps:
        return Blocker("unsupported-shape", "no simulator is stepped in the loop's own body")
    if len(steps) > 1:
        return Blocker("unsupported-shape", f"the loop steps a simulator {len(steps)} times a trip")
    step = steps[0]
    op = op_of(step)
    roles = op.attributes.get("step")
    if not isinstance(roles, dict) or not {"env", "action"} <= set(roles):
        return Blocker("opaque-call", f"{op.name} does not say which argument is the simulator")
    env = step.args[step_position(op, "env")]
    if not isinstance(env, fx.Node) or not is_state(env):
        return Blocker("opaque-call", f"the simulator that {op.name} steps is no known state")
    graph = value_graph(loop)
    if step not in graph:
        return Blocker("unsupported-shape", f"{op.name} takes no value of the loop")
    cycle: set[fx.Node] = set()
    for component in nx.strongly_connected_components(graph):
        if step in component:
            cycle = component
    below = _same_trip(graph, loop, step)
    ordered = [n for n in loop.graph.nodes if n in cycle and n.op == "call_function"]
    return Recurrence(
        loop,
        step,
        tuple(n for n in ordered if n is not step and n not in below),
        tuple(n for n in ordered if n in below),
        tuple(i for i, param in enumerate(loop.carried) if param in cycle),
    )


def _same_trip(graph: nx.DiGraph, loop: LoopView, start: fx.Node) -> set[fx.Node]:
    """What uses ``start``'s value in the trip that makes it, directly or through others."""
    carried = set(loop.carried)
    found: set[fx.Node] = set()
    todo = [start]
    while todo:
        for user in graph.successors(todo.pop()):
            if user not in carried and user not in found:
                found.add(user)
                todo.append(user)
    return found


def result_name(node: fx.Node) -> str:
    """How a signature names the value of a node: ``return.0``, ``return.1``, ..."""
    return f"return.{node.args[1]}" if is_item(node) else "return.0"


def items(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that pick one result of ``node``."""
    for user in list(node.users):
        if user.op == "call_function" and user.target is operator.getitem:
            yield user


def env_state(found: Recurrence) -> str:
    """The name of the stepped simulator's state."""
    return state_name(found.env)
