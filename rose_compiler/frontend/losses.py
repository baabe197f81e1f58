"""Statements that compute a loss, traced to one graph up to the ``backward`` behind them."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend.graphs import is_tensor_item, names_of
from rose_compiler.frontend.record import Record
from rose_compiler.frontend.trace import Traced, trace
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.effects import RNG_TORCH, related
from rose_compiler.ir.facts import Context, Spec
from rose_compiler.ir.losses import Loss, Place, records, with_backward
from rose_compiler.ir.ops import BRANCH, LOOP, STATE, Op, Signature
from rose_compiler.ir.program import Program, is_call, is_exit, is_item, is_state, op_of

_NO_GRAD = ("no_grad", "inference_mode")
#: What may write a parameter and leaves it the tensor that it is.
_IN_PLACE = frozenset({"optimizer", "backward"})


def trace_losses(program: Program, record: Record) -> dict[str, Loss | Blocker]:
    """The losses of a program that can be one graph, and why the others can't, by the name of the
    ``backward``'s operation."""
    found: dict[str, Loss | Blocker] = {}
    deps = Dependences(program)
    for graph in program.graphs():
        for node in graph.nodes:
            if is_backward(node) and node in record.examples:
                found[op_of(node).name] = _Tracer(program, record, deps, node).loss()
    return found


def is_backward(node: fx.Node) -> bool:
    """Whether a node goes backward from a loss."""
    if not is_call(node) or op_of(node).kind != "block":
        return False
    return "backward" in op_of(node).attributes.get("calls", ())


class _Tracer:
    def __init__(
        self, program: Program, record: Record, deps: Dependences, backward: fx.Node
    ) -> None:
        self.program = program
        self.record = record
        self.deps = deps
        self.backward = backward

    def loss(self) -> Loss | Blocker:
        """The graph of the loss, or why there is none."""
        loss = _plain_backward(self.backward)
        if loss is None:
            return _no("only `loss.backward()` of a variable, without arguments, is looked at")
        if _modes(self.backward):
            return Blocker("mode-change", "its backward runs under a mode of its own")
        run = self._run(loss)
        if isinstance(run, Blocker):
            return run
        blocker = self._rebound(run)
        if blocker is not None:
            return blocker
        return self._traced(run, loss)

    def _run(self, loss: fx.Node) -> list[fx.Node] | Blocker:
        """What the loss is computed by, and what else is computed from that before it is gone
        backward from."""
        front = []
        for node in self.backward.graph.nodes:
            if node is self.backward:
                break
            front.append(node)
        members: set[fx.Node] = set()
        wanted = {_maker(loss)}
        for node in reversed(front):
            if node not in wanted:
                continue
            if self._fits(node):
                members.add(node)
                wanted.update(_maker(a) for a in node.all_input_nodes)
            elif records(facts.get(node).spec):
                return self._unfit(node)
        if _maker(loss) not in members:
            return _no("the loss is not computed in front of it by torch alone")
        for node in front:
            behind = any(_maker(a) in members for a in node.all_input_nodes)
            if behind and node not in members and self._fits(node):
                members.add(node)
        # a view that others use too stays a view, and a slice of this trip's keeps its numbers out
        while True:
            left = [n for n in members if self._shared(n, members) or _by_number(n, members)]
            if not left:
                break
            members.difference_update(left)
        ordered = [n for n in front if n in members]
        if _maker(loss) not in members:
            return Blocker("may-alias", "the loss shares memory with what others use")
        for node in ordered:
            for used in node.all_input_nodes:
                inside = _maker(used) in members
                if not inside and not is_state(used) and records(facts.get(used).spec):
                    return _no(f"`{used.name}` brings a graph from elsewhere")
        return ordered

    def _fits(self, node: fx.Node) -> bool:
        """Whether an operation may be part of the graph: torch only, nothing written, no draw
        other than one that its trace must show not to happen."""
        if not is_call(node) or node not in self.record.examples:
            return False
        op = op_of(node)
        signature = op.signature
        if op.kind != "block" or signature.reads is None or signature.writes is None:
            return False
        if any(w != RNG_TORCH for w in signature.writes) or "host" in signature.reads:
            return False
        if any(r.startswith("rng:") and r != RNG_TORCH for r in signature.reads):
            return False
        if any(c.kind not in _NO_GRAD for c in _modes(node)):
            return False
        spec = facts.get(node).spec
        if spec is None:
            return False
        results = spec.items if signature.results > 1 else (spec,)
        return all(_is_torch(s) for s in results)

    def _unfit(self, node: fx.Node) -> Blocker:
        op = op_of(node) if is_call(node) else None
        if op is None or is_call(node, LOOP) or is_call(node, BRANCH):
            return _no("a part of the loss is computed by a loop, a branch or another trip")
        source = op.source[0].splitlines()[0] if op.source else op.name
        return Blocker("not-traceable", f"`{source}` is more than torch operations on values")

    def _shared(self, node: fx.Node, members: set[fx.Node]) -> bool:
        alias = facts.get(node).alias
        if not alias:
            return False
        outside = [u for u in _users(node) if u not in members and u is not self.backward]
        return bool(outside)

    def _rebound(self, run: list[fx.Node]) -> Blocker | None:
        """Why tensors that the graph is handed could be other ones on the next trip."""
        handed = {facts.get(a).state for n in run for a in n.all_input_nodes if is_state(a)}
        reads = {
            e.state
            for n in run
            for e in self.deps.effects(n)
            if not e.write and any(related(e.state, h) for h in handed)
        }
        for graph in self.program.graphs():
            for node in graph.nodes:
                if node in run or not _is_operation(node):
                    continue
                calls = op_of(node).attributes.get("calls", frozenset())
                if op_of(node).kind == "block" and calls and set(calls) <= _IN_PLACE:
                    continue
                for effect in self.deps.effects(node):
                    # an item that is stored leaves the tensor around it what it is
                    if not effect.write or effect.region is not None or "grads" in effect.state:
                        continue
                    below = [r for r in reads if related(r, effect.state)]
                    if below:
                        why = f"it reads {below[0]}, which `{_first(node)}` writes"
                        return Blocker("reads-loop-state", why)
        return None

    def _traced(self, run: list[fx.Node], loss: fx.Node) -> Loss | Blocker:
        members = set(run)
        results = self._results(run)
        for node in results:
            spec = facts.get(node).spec
            if spec is None or (spec.kind != "tensor" and not is_tensor_item(node)):
                return Blocker("not-traceable", f"`{node.name}` is no tensor and is used behind it")
        inputs: dict[fx.Node, tuple[Place, Any]] = {}
        states: dict[fx.Node, Any] = {}
        for node in run:
            example = self.record.examples[node]
            for k, (argument, value) in enumerate(zip(node.args, example.args, strict=True)):
                if not isinstance(argument, fx.Node):
                    continue
                if is_state(argument):
                    states[argument] = value
                elif _maker(argument) not in members and argument not in inputs:
                    inputs[argument] = (op_of(node).name, k), value
        with torch.enable_grad():
            traced = trace(
                _function(run, list(inputs), states, [loss, *results]),
                tuple(value for _, value in inputs.values()),
                lifted=dict(self.record.names.tensors),
                names=names_of(list(inputs)),
                roots=tuple(states.values()),
            )
        if isinstance(traced, Blocker):
            return traced
        return self._made(run, traced, [place for place, _ in inputs.values()], results)

    def _results(self, run: list[fx.Node]) -> list[fx.Node]:
        """Values that others use: items instead of tuples."""
        members = set(run)
        found: dict[fx.Node, None] = {}
        for node in run:
            for user in node.users:
                if is_item(user):
                    if any(u not in members and u is not self.backward for u in user.users):
                        found[user] = None
                elif user not in members and user is not self.backward:
                    found[node] = None
        return list(found)

    def _made(
        self, run: list[fx.Node], traced: Traced, places: list[Place], results: list[fx.Node]
    ) -> Loss | Blocker:
        if traced.draws:
            return Blocker("draw-order", "it draws random numbers")
        if not traced.pure:
            return Blocker("not-pure", "it writes tensors of its own in place")
        if any(traced.output_aliases):
            return Blocker("may-alias", "a result shares memory with what it is computed from")
        back = op_of(self.backward)
        order = [a for a in traced.arguments if not isinstance(a, str)]
        paths = [a for a in traced.arguments if isinstance(a, str)]
        lifted = traced.lifted
        # `@` entries name states of the program; others are rooted at parameters, which change
        gone = [
            e
            for e in (*(back.signature.reads or ()), *(back.signature.writes or ()))
            if not e.startswith(("@", "rng:"))
        ]
        if back.signature.reads is None or back.signature.writes is None or gone:
            return Blocker("unknown-effects", "what its backward touches is not known by name")
        signature = Signature(
            f"{_stem(self.backward)}_and_gradients",
            traced.inputs,
            tuple(dict.fromkeys((*lifted, *back.signature.reads))),
            back.signature.writes,
            results=len(results),
            may_raise=True,
        )
        lines = tuple(line for n in (*run, self.backward) for line in op_of(n).source)
        op = Op(
            signature,
            with_backward(traced.gm.forward),
            kind="loss",
            body=traced.gm,
            source=lines,
            attributes={
                "checks": tuple(traced.checks),
                "fused": (*(op_of(n).name for n in run), back.name),
            },
        )
        return Loss(
            tuple(op_of(n).name for n in run),
            back.name,
            op,
            tuple(places[a] for a in order),
            tuple(paths),
            tuple(_place(n) for n in results),
        )


def _plain_backward(node: fx.Node) -> fx.Node | None:
    """The value of ``x`` in ``x.backward()``."""
    op = op_of(node)
    try:
        (statement,) = ast.parse("\n".join(op.source)).body
    except (SyntaxError, ValueError):
        return None
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or call.args or call.keywords:
        return None
    function = call.func
    if not isinstance(function, ast.Attribute) or function.attr != "backward":
        return None
    if not isinstance(function.value, ast.Name):
        return None
    given = dict(zip(op.signature.params, node.args, strict=True))
    loss = given.get(function.value.id)
    return loss if isinstance(loss, fx.Node) and not is_state(loss) else None


def _function(
    run: list[fx.Node], inputs: list[fx.Node], states: dict[fx.Node, Any], results: list[fx.Node]
) -> Callable[..., tuple[Any, ...]]:
    """The run as one Python function of its inputs, the loss first among its results.

    What runs without grad is handed detached values, so that its results have no graph either.
    """

    def run_all(*values: Any) -> tuple[Any, ...]:
        env: dict[fx.Node, Any] = {**states, **dict(zip(inputs, values, strict=True))}

        def get(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            if argument in env:
                return env[argument]
            assert is_item(argument)
            return operator.getitem(get(argument.args[0]), argument.args[1])

        for node in run:
            arguments = [get(a) for a in node.args]
            if any(c.kind in _NO_GRAD for c in _modes(node)):
                arguments = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments]
            env[node] = op_of(node)(*arguments)
        return tuple(get(n) for n in results)

    return run_all


def _is_operation(node: fx.Node) -> bool:
    structure = is_call(node, LOOP) or is_call(node, BRANCH) or is_exit(node)
    return is_call(node) and not structure and not is_call(node, STATE)


def _modes(node: fx.Node) -> list[Context]:
    """The modes that a node runs under; phases only name a stretch of code."""
    return [c for c in facts.get(node).context if c.kind != "phase"]


def _is_torch(spec: Spec) -> bool:
    return spec.kind == "tensor" or spec.type_name.startswith("torch.distributions")


def _by_number(node: fx.Node, members: set[fx.Node]) -> bool:
    """Whether an operation is handed a number from outside, and what it makes has no graph."""
    if records(facts.get(node).spec):
        return False
    given = [a for a in node.all_input_nodes if not is_state(a) and _maker(a) not in members]
    return any((spec := facts.get(a).spec) is None or spec.kind == "scalar" for a in given)


def _users(node: fx.Node) -> list[fx.Node]:
    """Who uses a node or a part of it."""
    return [x for u in node.users for x in (_users(u) if is_item(u) else [u])]


def _maker(node: fx.Node) -> fx.Node:
    while is_item(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _place(node: fx.Node) -> Place:
    if is_item(node):
        position = node.args[1]
        assert isinstance(position, int)
        return op_of(_maker(node)).name, position
    return op_of(node).name, None


def _first(node: fx.Node) -> str:
    source = op_of(node).source
    return source[0].splitlines()[0] if source and source[0] else op_of(node).name


def _stem(backward: fx.Node) -> str:
    loss = op_of(backward).signature.params
    return loss[0] if loss else "loss"


def _no(why: str) -> Blocker:
    return Blocker("unsupported-shape", why)
