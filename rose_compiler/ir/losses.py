"""A loss and its ``backward`` as one operation: what is known of it, and where it stands."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from rose_compiler.base.ancestors import ancestors
from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.deps import TOGETHER, Dependences, title
from rose_compiler.ir.draws import Noise
from rose_compiler.ir.effects import Effect, conflicts
from rose_compiler.ir.ops import BRANCH, LOOP, STATE, Op
from rose_compiler.ir.program import (
    BranchView,
    LoopView,
    Program,
    children,
    is_call,
    is_exit,
    is_item,
    maker_of,
    op_of,
    output_node,
    placeholders,
)
from rose_compiler.ir.recorded import has_graph
from rose_compiler.ir.unread import backward_without

#: ``(operation, argument, item)``: an argument of an operation, or an item of it.
Input = tuple[str, int, int | None]
#: Attributes of a tensor that know nothing of a graph.
_OF_NUMBERS = frozenset(
    ("item", "tolist", "detach", "data", "shape", "size", "dim", "ndim", "numel", "dtype", "device")
)
#: ``(operation, result)``; ``None`` for the one result there is.
Result = tuple[str, int | None]


@dataclass(frozen=True)
class Loss:
    """The statements that compute a loss, traced to one graph, and the ``backward`` behind them.

    ``run`` are the operations that the graph stands for, in program order, and ``backward`` is the
    one that follows; each is called once in one body. ``op`` computes the graph's results, the loss
    first, and then goes backward through it: its first arguments are values of the program, found
    as arguments of the operations (``inputs``), then come the tensors at the paths ``states`` and
    random numbers (``noises``). ``results`` says of which operations the results behind the loss
    are.
    """

    run: tuple[str, ...]
    backward: str
    op: Op
    inputs: tuple[Input, ...]
    states: tuple[str, ...]
    results: tuple[Result, ...]
    noises: tuple[Noise, ...] = ()


@dataclass(frozen=True)
class Found:
    """Where a loss stands in a program: its nodes, those of its inputs (with the item that is
    taken) and of its results, and what uses a result in front of the backward and can wait."""

    nodes: tuple[fx.Node, ...]
    backward: fx.Node
    inputs: tuple[tuple[fx.Node, int | None], ...]
    results: tuple[fx.Node, ...]
    behind: tuple[fx.Node, ...] = ()


def locate(program: Program, loss: Loss) -> Found | Blocker:
    """The nodes of a loss in a program that passes may have changed since it was traced."""
    backward = next((n for n in program.nodes() if _calls(n, loss.backward)), None)
    if backward is None:
        return Blocker("unsupported-shape", "its backward is gone")
    by_name: dict[str, fx.Node] = {}
    for node in backward.graph.nodes:
        if is_call(node) and op_of(node).name in loss.run:
            by_name[op_of(node).name] = node
    if tuple(by_name) != loss.run:
        return Blocker("unsupported-shape", "an earlier pass has moved a part of the loss")
    nodes = tuple(by_name.values())
    by_name[loss.backward] = backward
    inputs = [(by_name[name].args[k], item) for name, k, item in loss.inputs]
    results = [_result(by_name[name], k) for name, k in loss.results]
    given = [node for node, _ in inputs]
    if not all(isinstance(n, fx.Node) for n in (*given, *results)):
        return Blocker("unsupported-shape", "an earlier pass has changed a part of the loss")
    behind = waiting(program, nodes, backward, draws=bool(loss.noises))
    if isinstance(behind, Blocker):
        return behind
    return Found(nodes, backward, tuple(inputs), tuple(results), behind)  # type: ignore[arg-type]


def _calls(node: fx.Node, name: str) -> bool:
    return is_call(node) and not is_call(node, STATE) and op_of(node).name == name


def _result(node: fx.Node, position: int | None) -> fx.Node | None:
    if position is None:
        return node
    return next((u for u in node.users if is_item(u) and u.args[1] == position), None)


def waiting(
    program: Program, nodes: tuple[fx.Node, ...], backward: fx.Node, *, draws: bool = False
) -> tuple[fx.Node, ...] | Blocker:
    """What stands between operations and the ``backward`` behind them and uses their values, where
    it can wait until that has been; why it, or they, can't.

    ``draws``: whether the operations draw random numbers.
    """
    deps = Dependences(program)
    members = set(nodes)
    reads = [e for n in nodes for e in deps.effects(n) if draws or not e.state.startswith("rng:")]
    last = deps.effects(backward)
    behind: list[fx.Node] = []
    passed: list[fx.Node] = []
    between = False
    for node in backward.graph.nodes:
        if node is backward:
            return _free(deps, behind, passed, last) or tuple(behind)
        between = between or (bool(nodes) and node is nodes[0])
        if not between or node in members or not is_call(node):
            continue
        if is_exit(node):
            return Blocker("early-exit", f"{title(node)} may leave before the backward")
        if deps.casts.keeps(node):
            return Blocker("mode-change", f"{title(node)} stands between and {TOGETHER}")
        makers = {maker_of(a) for a in node.all_input_nodes}
        if makers & members or makers.intersection(behind):
            if is_call(node, LOOP) or is_call(node, BRANCH) or has_graph(facts.get(node).spec):
                return _early(node)
            behind.append(node)
            continue
        passed.append(node)
        for effect in deps.effects(node):
            if any(conflicts(effect, r) for r in reads):
                return Blocker(
                    "draw-order" if effect.state.startswith("rng:") else "effects-conflict",
                    f"{title(node)} stands between and touches {effect.state}, as the loss does",
                )
    return Blocker("unsupported-shape", "its backward does not follow in the same body")


def _free(
    deps: Dependences, behind: list[fx.Node], passed: list[fx.Node], last: Sequence[Effect]
) -> Blocker | None:
    """Why one of the operations that are to wait can't."""
    for node in behind:
        later = [e for p in passed if p > node for e in deps.effects(p)]
        for effect in deps.effects(node):
            if any(conflicts(effect, other) for other in (*later, *last)):
                return _early(node)
    return None


def _early(node: fx.Node) -> Blocker:
    return Blocker(
        "host-read",
        f"{title(node)} uses a value of the loss in front of its backward",
        "use it behind the backward",
    )


def graph_leaving(program: Program, found: Found, result: fx.Node) -> fx.Node | None:
    """Who goes on recording from a result of a loss, keeps it, may look at its graph, or hands it
    out of the program, if anyone."""
    members = {*found.nodes, found.backward}
    reached = {result} if has_graph(facts.get(result).spec) else set()
    before = -1
    while len(reached) != before:
        before = len(reached)
        for graph in program.graphs():
            for node in graph.nodes:
                if node in members or reached.isdisjoint(node.all_input_nodes):
                    continue
                if is_item(node):
                    reached.add(node)
                elif is_call(node, LOOP) or is_call(node, BRANCH):
                    _enter(node, reached)
                elif (
                    _records(node)
                    or not takes_numbers(node, reached)
                    or (node.op == "output" and graph is program.graph)
                ):
                    return node
        for node, body in _bodies(program):
            _leave(node, body, reached)
    return None


def _records(node: fx.Node) -> bool:
    if not is_call(node) or is_exit(node):
        return False
    goes_back = "backward" in op_of(node).attributes.get("calls", ())
    return goes_back or has_graph(facts.get(node).spec)


def takes_numbers(node: fx.Node, values: Collection[fx.Node]) -> bool:
    """Whether an operation takes nothing of values but their numbers: what it does, does not hang
    on whether they have a graph."""
    if not is_call(node) or is_exit(node) or op_of(node).kind in ("graph", "loss", "builtin"):
        return True
    op = op_of(node)
    given = zip(op.signature.params, node.args, strict=False)
    names = {param for param, argument in given if argument in values}
    try:
        read = ast.parse(textwrap.dedent("\n".join(op.source)))
    except SyntaxError:
        return False
    allowed = {id(name) for part in ast.walk(read) for name in _numbers(part)}
    found = [n for n in ast.walk(read) if isinstance(n, ast.Name) and n.id in names]
    return bool(found) and all(id(n) in allowed for n in found)


def _numbers(part: ast.AST) -> list[ast.expr]:
    """The values of which an expression takes the numbers."""
    if isinstance(part, ast.Attribute):
        return [part.value] if part.attr in _OF_NUMBERS else []
    if isinstance(part, ast.Call) and isinstance(part.func, ast.Name):
        return part.args if part.func.id in ("float", "int", "bool", "len") else []
    return [part.left, *part.comparators] if isinstance(part, ast.Compare) else []


def _bodies(program: Program) -> list[tuple[fx.Node, fx.GraphModule]]:
    modules = [g.owning_module for g in program.graphs()]
    return [pair for m in modules if isinstance(m, fx.GraphModule) for pair in children(m)]


def _enter(node: fx.Node, reached: set[fx.Node]) -> None:
    """Follow values into the bodies of a loop or branch."""
    if is_call(node, LOOP):
        view = LoopView(node)
        outer: list[Any] = [*view.carried_init, *view.captured]
        pairs = list(zip(outer, (*view.carried, *view.captured_params), strict=True))
    else:
        branch = BranchView(node)
        arms = (branch.then, branch.orelse)
        pairs = [p for a in arms for p in zip(branch.captured, placeholders(a.graph), strict=True)]
    reached.update(inner for value, inner in pairs if value in reached)


def _leave(node: fx.Node, body: fx.GraphModule, reached: set[fx.Node]) -> None:
    """Follow values out of a body: to the next trip, and to what picks them behind it."""
    exits = [n.args[1] for n in body.graph.nodes if is_exit(n)]
    for values in (*exits, output_node(body.graph).args[0]):
        for position, value in enumerate(tuple(values)):
            if value not in reached:
                continue
            if is_call(node, LOOP):
                reached.add(LoopView(node).carried[position])
            reached.update(u for u in node.users if is_item(u) and u.args[1] == position)


def in_front_of_the_loss(loss: Loss, position: int) -> bool:
    """Whether a result is something the loss is computed from, so that going backward from the loss
    frees its graph."""
    assert loss.op.body is not None
    results = output_node(loss.op.body.graph).args[0]
    assert isinstance(results, tuple | list)
    loss_itself, result = results[0], results[position + 1]
    return isinstance(loss_itself, fx.Node) and result in ancestors([loss_itself])


def with_backward(
    forward: Callable[..., Any], recorded: Collection[int] = (), dropped: int = 0
) -> Callable[..., Any]:
    """The reference of a loss's operation: compute its results, go backward from the first one,
    hand out the others, detached but for those at the positions ``recorded``. The last ``dropped``
    arguments say which gradients are left out (:class:`~rose_compiler.ir.unread.Dropped`)."""

    def run(*args: Any) -> Any:
        given = len(args) - dropped
        loss, *others = forward(*args[:given])
        backward_without(loss, *args[given:])
        freed = tuple(r if k in recorded else r.detach() for k, r in enumerate(others))
        return freed if len(freed) > 1 else freed[0] if freed else None

    return run
