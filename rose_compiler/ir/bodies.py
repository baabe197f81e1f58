"""Bodies of loops and branches as things that are copied, hung elsewhere and handed values.

Helpers of the rewriter; nothing else changes a graph with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.fx as fx

from rose_compiler.ir import facts, program
from rose_compiler.ir.body import Body
from rose_compiler.ir.builder import settle_target
from rose_compiler.ir.ops import BRANCH, BREAK_IF, CONTINUE_IF, LOOP, STATE, OpTable
from rose_compiler.ir.program import BranchView, LoopView, Program, Value, is_call


def modules(root: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """All graph modules of a program, outermost first."""
    yield root
    for _, child in program.children(root):
        yield from modules(child)


def owner(of: Program, graph: fx.Graph) -> fx.Node | None:
    """The loop or branch that a body belongs to; ``None`` for the root graph.

    Raises:
        ValueError: when the graph belongs to no body of the program.
    """
    if graph is of.graph:
        return None
    for module in modules(of.root):
        for node, child in program.children(module):
            if child.graph is graph:
                return node
    raise ValueError("the graph is no body of this program")


def graphs_of(owner: fx.Node) -> tuple[fx.Graph, ...]:
    """The body of a loop, or both arms of a branch.

    Raises:
        TypeError: when the node is neither.
    """
    if is_call(owner, LOOP):
        return (LoopView(owner).graph,)
    if is_call(owner, BRANCH):
        return BranchView(owner).then.graph, BranchView(owner).orelse.graph
    raise TypeError(f"{owner} is no loop and no branch")


def captured_params(owner: fx.Node, graph: fx.Graph) -> list[fx.Node]:
    """The placeholders of captured values in one body."""
    before = 1 + len(LoopView(owner).carried_init) if is_call(owner, LOOP) else 0
    return program.placeholders(graph)[before:]


def captured_param(owner: fx.Node, outer: fx.Node, graph: fx.Graph) -> fx.Node:
    """The placeholder that stands for a captured value in one body.

    Raises:
        KeyError: when it is not captured.
    """
    for param, value in zip(captured_params(owner, graph), owner.args[3], strict=True):  # type: ignore[arg-type]
        if value is outer:
            return param
    raise KeyError(f"{owner} does not capture {outer}")


def add_placeholder(graph: fx.Graph, name: str) -> fx.Node:
    """One more placeholder, behind those there are."""
    params = program.placeholders(graph)
    first = next(iter(graph.nodes))
    with graph.inserting_after(params[-1]) if params else graph.inserting_before(first):
        param = graph.placeholder(name)
    settle_target(param)
    return param


def stand_for(param: fx.Node, outer: fx.Node) -> None:
    """Give a captured placeholder the facts of the value it stands for."""
    known = facts.get(outer)
    facts.put(
        param,
        role="captured",
        state=known.state,
        spec=known.spec,
        alias=known.alias,
        borrowed=known.borrowed,
        maybe_unbound=known.maybe_unbound,
    )


def captures(owner: fx.Node, value: fx.Node) -> bool:
    """Whether a node is a loop or branch that captures a value."""
    structure = is_call(owner, LOOP) or is_call(owner, BRANCH)
    return structure and any(n is value for n in owner.args[3])  # type: ignore[union-attr]


def sync(owner: fx.Node) -> None:
    """Let captured placeholders below a node stand for what is captured now."""
    if not (is_call(owner, LOOP) or is_call(owner, BRANCH)):
        return
    for graph in graphs_of(owner):
        for outer in owner.args[3]:  # type: ignore[union-attr]
            param = captured_param(owner, outer, graph)  # type: ignore[arg-type]
            before = facts.get(param).state
            stand_for(param, outer)  # type: ignore[arg-type]
            after = facts.get(param).state
            for user in param.users:
                # an object that several paths lead to may have the name of another one
                if is_call(user, STATE) and facts.get(user).state == f"{before}.{user.args[1]}":
                    facts.put(user, state=f"{after}.{user.args[1]}")
                if captures(user, param):
                    sync(user)


def add_carried_placeholder(loop: LoopView, init: Value, name: str) -> fx.Node:
    """The placeholder of one more carried value, the last; its next value is still to be given."""
    with loop.graph.inserting_after([loop.index, *loop.carried][-1]):
        param = loop.graph.placeholder(name)
    settle_target(param)
    body, bounds, carried, captured = loop.node.args
    loop.node.args = (body, bounds, (*carried, init), captured)  # type: ignore[misc]
    known = facts.get(init) if isinstance(init, fx.Node) else facts.Facts()
    facts.put(param, role="carried", alias=known.alias, borrowed=known.borrowed)
    return param


def hand_on(loop: LoopView, value: Value) -> None:
    """Append a next carried value to a body's output."""
    output = program.output_node(loop.graph)
    output.args = ((*output.args[0], value),)  # type: ignore[misc]


def merge_captured(owner: fx.Node) -> None:
    """Let each captured value have one placeholder."""
    captured: tuple[fx.Node, ...] = tuple(owner.args[3])  # type: ignore[arg-type]
    for graph in graphs_of(owner):
        first: dict[fx.Node, fx.Node] = {}
        for param, outer in zip(captured_params(owner, graph), captured, strict=True):
            kept = first.setdefault(outer, param)
            if kept is not param:
                param.replace_all_uses_with(kept)
                graph.erase_node(param)
                for user in list(kept.users):
                    if is_call(user, LOOP) or is_call(user, BRANCH):
                        merge_captured(user)
    owner.args = (*owner.args[:3], tuple(dict.fromkeys(captured)))


def drop_unused_captured(owner: fx.Node) -> bool:
    """Let a loop or branch capture only what its bodies use; whether that changed anything."""
    used: set[fx.Node] = set()
    for graph in graphs_of(owner):
        for param, outer in zip(captured_params(owner, graph), owner.args[3], strict=True):  # type: ignore[arg-type]
            if param.users:
                used.add(outer)
    kept = tuple(n for n in owner.args[3] if n in used)  # type: ignore[union-attr]
    if len(kept) == len(owner.args[3]):  # type: ignore[arg-type]
        return False
    for graph in graphs_of(owner):
        for param, outer in zip(captured_params(owner, graph), owner.args[3], strict=True):  # type: ignore[arg-type]
            if outer not in used:
                graph.erase_node(param)
    owner.args = (*owner.args[:3], kept)
    return True


def exits(graph: fx.Graph) -> list[fx.Node]:
    """The exits of a loop in its body and in branches there."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if is_call(node, BREAK_IF) or is_call(node, CONTINUE_IF):
            found.append(node)
        elif is_call(node, BRANCH):
            for arm in graphs_of(node):
                found += exits(arm)
    return found


def attach(module: torch.nn.Module, wanted: str, child: fx.GraphModule) -> str:
    """Hang a body below a graph module under a name that is free; the name."""
    name, n = wanted, 0
    while hasattr(module, name):
        n += 1
        name = f"{wanted}_{n}"
    module.add_module(name, child)
    return name


def states(of: Program) -> set[str]:
    """The names of all states that some node stands for."""
    return {name for node in of.nodes() if (name := facts.get(node).state)}


def fresh_state(of: Program, wanted: str, taken: frozenset[str] = frozenset()) -> str:
    """A name for a new instance that no state has yet."""
    used = states(of) | taken
    name, n = wanted, 0
    while name in used:
        n += 1
        name = f"{wanted}_{n}"
    return name


def renamed_state(name: str, renamed: Mapping[str, str]) -> str:
    """A state's name where states are replaced by others, those below them included."""
    for old, new in renamed.items():
        if name == old or name.startswith(old + "."):
            return new + name[len(old) :]
    return name


def rename(node: fx.Node, renamed: Mapping[str, str]) -> None:
    """Let a node stand for, and its value alias, the states that replace others."""
    known = facts.get(node)
    alias = tuple(dict.fromkeys(renamed_state(a, renamed) for a in known.alias))
    state = renamed_state(known.state, renamed)
    if alias != known.alias or state != known.state:
        facts.put(node, alias=alias, state=state)


def copied(
    module: fx.GraphModule, of: Program, renamed: Mapping[str, str], pass_name: str
) -> fx.GraphModule:
    """A copy of a body and the bodies below it; instances born in it are new ones."""
    renamed = dict(renamed)
    for node in module.graph.nodes:
        state = facts.get(node).state
        if node.op == "call_function" and state.startswith("%") and "." not in state:
            renamed[state] = fresh_state(of, state, frozenset(renamed.values()))
    holder = torch.nn.Module()
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            child = getattr(module, str(node.target))
            holder.add_module(str(node.target), copied(child, of, renamed, pass_name))
        new[node] = graph.node_copy(node, lambda n: new[n])
        facts.copy(node, new[node], pass_name=pass_name)
        rename(new[node], renamed)
    return Body(holder, graph)


def copy_program(program: Program) -> Program:
    """A program that passes may rewrite, over the same operations and objects."""
    copy = Program(
        program.name,
        program.root,
        OpTable(dict(program.ops.by_name)),
        program.value_params,
        program.state_params,
        program.stage,
        program.objects,
    )
    copy.root = copied(program.root, program, {}, "")
    return copy
