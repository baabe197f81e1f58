"""Statements that compute a loss, traced to one graph up to the ``backward`` behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.frontend import otherwise
from rose_compiler.frontend.graphs import names_of
from rose_compiler.frontend.holding import draws_fixed, hold_numbers
from rose_compiler.frontend.loss_run import (
    CONTAINERS,
    NO_GRAD,
    contains,
    done_outside,
    first_line,
    lists_of,
    loss_of,
    modes_of,
    run_function,
    stem_of,
    without_grad,
)
from rose_compiler.frontend.rebinding import writes_in_place
from rose_compiler.frontend.record import Record
from rose_compiler.frontend.runs import is_tensor_item
from rose_compiler.frontend.trace import Traced, trace
from rose_compiler.frontend.tuples import opened_tuples
from rose_compiler.frontend.varying import why_varying
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.draws import differs, take_draws
from rose_compiler.ir.effects import RNG_TORCH, related
from rose_compiler.ir.facts import Spec
from rose_compiler.ir.losses import Input, Loss, Result, with_backward
from rose_compiler.ir.ops import BRANCH, LOOP, STATE, Op, Signature
from rose_compiler.ir.program import (
    Program,
    is_call,
    is_exit,
    is_item,
    is_state,
    maker_of,
    op_of,
)
from rose_compiler.ir.recorded import has_graph
from rose_compiler.ir.sizes import SIZES

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
        self.lists: set[fx.Node] = set()

    def loss(self) -> Loss | Blocker:
        """The graph of the loss, or why there is none."""
        loss = loss_of(self.backward)
        if loss is None:
            return _no("only `loss.backward()`, without arguments, is looked at")
        if modes_of(self.backward):
            return Blocker("mode-change", "its backward runs under a mode of its own")
        run = self._run()
        if isinstance(run, Blocker):
            return run
        blocker = self._rebound(run)
        if blocker is not None:
            return blocker
        return self._traced(run, loss)

    def _run(self) -> list[fx.Node] | Blocker:
        """What the loss is computed by, and what else is computed from that before it is gone
        backward from."""
        front = []
        for node in self.backward.graph.nodes:
            if node is self.backward:
                break
            front.append(node)
        self.lists = lists_of(front)
        members: set[fx.Node] = set()
        ends = {maker_of(a) for a in self.backward.all_input_nodes if has_graph(facts.get(a).spec)}
        wanted = set(ends)
        for node in reversed(front):
            if node not in wanted and not self._filled(node) & wanted:
                continue
            if self._fits(node):
                members.add(node)
                wanted.update(maker_of(a) for a in node.all_input_nodes)
            elif has_graph(facts.get(node).spec) or node not in wanted:
                return self._unfit(node)
        if not ends or not ends <= members:
            return _no("the loss is not computed in front of it by torch alone")
        others = _leading_to_backwards(front)
        for node in front:
            behind = any(maker_of(a) in members for a in node.all_input_nodes)
            if not behind or node in members or node in others:
                continue
            if self._fits(node) and not contains(node):
                members.add(node)
        # a view that others use too stays a view; what differs from trip to trip by a number, or
        # not at all, stays outside
        while True:
            left = [n for n in members if self._shared(n, members) or self._outside(n, members)]
            if not left:
                break
            members.difference_update(left)
        ordered = [n for n in front if n in members]
        if not ends <= members:
            return Blocker("may-alias", "the loss shares memory with what others use")
        for made in self.lists & members:
            if not set(made.users) <= members:
                return _no(f"`{made.name}` is used by more than the loss")
        for node in ordered:
            for used in node.all_input_nodes:
                inside = maker_of(used) in members
                if not inside and not is_state(used) and has_graph(facts.get(used).spec):
                    return _no(f"`{used.name}` brings a graph from elsewhere")
        return ordered

    def _fits(self, node: fx.Node) -> bool:
        """Whether an operation may be part of the graph: torch only, nothing written, no draw
        other than one that its trace must show not to happen."""
        if not is_call(node) or node not in self.record.examples:
            return False
        if why_varying(node, self.record) is not None:
            return False
        op = op_of(node)
        signature = op.signature
        if op.kind != "block" or signature.reads is None or signature.writes is None:
            return False
        lists = op.attributes.get("items", ()) if self._filled(node) else ()
        if any(w != RNG_TORCH and w not in lists for w in signature.writes):
            return False
        if "host" in signature.reads:
            return False
        if any(r.startswith("rng:") and r != RNG_TORCH for r in signature.reads):
            return False
        if any(c.kind not in NO_GRAD for c in modes_of(node)):
            return False
        if signature.results == 0:
            return bool(lists)
        spec = facts.get(node).spec
        if spec is None:
            return False
        results = spec.items if signature.results > 1 else (spec,)
        if without_grad(node):
            return all(s.kind == "tensor" for s in results)
        return all(_is_torch(s) or s.type_name in CONTAINERS for s in results)

    def _filled(self, node: fx.Node) -> set[fx.Node]:
        """The lists of the loss itself that an operation puts items into."""
        if not self.lists or not _is_operation(node):
            return set()
        op = op_of(node)
        given = dict(zip(op.signature.params, node.args, strict=False))
        items = {given.get(name) for name in op.attributes.get("items", ())}
        if not items <= self.lists:
            return set()
        return items  # type: ignore[return-value]  # nodes, as the lists are

    def _outside(self, node: fx.Node, members: set[fx.Node]) -> bool:
        return node not in self.lists and not self._filled(node) and done_outside(node, members)

    def _unfit(self, node: fx.Node) -> Blocker:
        if (blocker := why_varying(node, self.record)) is not None:
            return blocker
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
                if writes_in_place(op_of(node)):
                    continue
                into_items = writes_in_place(op_of(node), items=True)
                for effect in self.deps.effects(node):
                    # an item that is stored leaves the tensor around it what it is
                    if not effect.write or effect.region is not None or "grads" in effect.state:
                        continue
                    if into_items and effect.state in self.record.names.tensors:
                        continue
                    below = [r for r in reads if related(r, effect.state)]
                    if below:
                        why = f"it reads {below[0]}, which `{first_line(node)}` writes"
                        return Blocker("reads-loop-state", why)
        return None

    def _traced(self, run: list[fx.Node], loss: Callable[..., Any]) -> Loss | Blocker:
        members = set(run)
        results = self._results(run)
        for node in results:
            spec = facts.get(node).spec
            if spec is None or (spec.kind != "tensor" and not is_tensor_item(node)):
                return Blocker("not-traceable", f"`{node.name}` is no tensor and is used behind it")
        inputs: dict[fx.Node, tuple[str, int, Any]] = {}
        states: dict[fx.Node, Any] = {}
        for node in (*run, self.backward):
            example = self.record.examples[node]
            for k, (argument, value) in enumerate(zip(node.args, example.args, strict=True)):
                if not isinstance(argument, fx.Node):
                    continue
                if argument in members:
                    continue
                if is_state(argument):
                    states[argument] = value
                elif maker_of(argument) not in members and argument not in inputs:
                    inputs[argument] = op_of(node).name, k, value
        vary = self.record.resized((*run, self.backward))
        function = run_function(run, list(inputs), self.backward, loss, results)
        with torch.enable_grad():
            traced = trace(
                function(states),
                tuple(value for _, _, value in inputs.values()),
                lifted=self.record.names.attributes(),
                names=names_of(list(inputs)),
                roots=tuple(states.values()),
                vary=vary,
                rows=True,  # a batch of episodes, say, may have another size on the next call
            )
        if isinstance(traced, Blocker):
            return traced
        if (fixed := draws_fixed(traced, vary)) is not None:
            return fixed
        given = list(states.values())
        unsteady = hold_numbers(self.program, traced, self.backward, given, self.record)
        if unsteady is not None:
            return unsteady
        return self._made(run, traced, list(inputs.values()), results, states, function)

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
        self,
        run: list[fx.Node],
        traced: Traced,
        given: list[tuple[str, int, Any]],
        results: list[fx.Node],
        states: dict[fx.Node, Any],
        function: otherwise.Function,
    ) -> Loss | Blocker:
        if not traced.pure:
            return Blocker("not-pure", "it writes tensors of its own in place")
        if any(traced.output_aliases):
            return Blocker("may-alias", "a result shares memory with what it is computed from")
        values = [
            self.record.names.tensors[a] if isinstance(a, str) else given[a][2]
            for a in traced.arguments
        ]
        drawn = take_draws(traced.gm, traced.draws)
        if isinstance(drawn, Blocker):
            return drawn
        if traced.draws and (differing := differs(traced.gm, drawn, values)):
            return differing
        opened = opened_tuples(drawn.gm, values)
        if isinstance(opened, Blocker):
            return opened
        back = op_of(self.backward)
        inputs: list[Input] = []
        paths: list[str] = []
        lifted: list[str] = []
        for name, (position, item) in zip(opened.names, opened.sources, strict=False):
            if position >= len(traced.arguments):
                continue  # a random number
            argument = traced.arguments[position]
            if isinstance(argument, str):
                paths.append(argument)
                lifted.append(name)
            else:
                inputs.append((*given[argument][:2], item))
        # `@` entries name states of the program; others are rooted at parameters, which change
        gone = [
            e
            for e in (*(back.signature.reads or ()), *(back.signature.writes or ()))
            if not e.startswith(("@", "rng:"))
        ]
        if back.signature.reads is None or back.signature.writes is None or gone:
            return Blocker("unknown-effects", "what its backward touches is not known by name")
        signature = Signature(
            f"{stem_of(self.backward)}_and_gradients",
            opened.names,
            tuple(dict.fromkeys((*lifted, *back.signature.reads))),
            back.signature.writes,
            results=len(results),
            may_raise=True,
        )
        lines = tuple(line for n in (*run, self.backward) for line in op_of(n).source)
        lengths = {k: len(v) for k, (_, _, v) in enumerate(given) if type(v) is tuple}
        at = otherwise.Handed(traced, opened.names, opened.sources, len(given), lengths)
        every = (*run, self.backward)
        sizes = otherwise.sizes(self.program, self.record, every, at, states, function)
        op = Op(
            signature,
            with_backward(opened.gm.forward),
            kind="loss",
            body=opened.gm,
            source=lines,
            attributes={
                "checks": tuple(traced.checks),
                "fused": (*(op_of(n).name for n in run), back.name),
                SIZES: sizes,
            },
        )
        return Loss(
            tuple(op_of(n).name for n in run),
            back.name,
            op,
            tuple(inputs),
            tuple(paths),
            tuple(_place(n) for n in results),
            drawn.noises,
        )


def _leading_to_backwards(nodes: list[fx.Node]) -> set[fx.Node]:
    """What the losses are computed from that are gone backward from among these operations."""
    found = {n for n in nodes if is_backward(n)}
    for node in reversed(nodes):
        if node in found:
            found.update(maker_of(a) for a in node.all_input_nodes)
    return found


def _is_operation(node: fx.Node) -> bool:
    structure = is_call(node, LOOP) or is_call(node, BRANCH) or is_exit(node)
    return is_call(node) and not structure and not is_call(node, STATE)


def _is_torch(spec: Spec) -> bool:
    return spec.kind == "tensor" or spec.type_name.startswith("torch.distributions")


def _users(node: fx.Node) -> list[fx.Node]:
    """Who uses a node or a part of it."""
    return [x for u in node.users for x in (_users(u) if is_item(u) else [u])]


def _place(node: fx.Node) -> Result:
    if is_item(node):
        position = node.args[1]
        assert isinstance(position, int)
        return op_of(maker_of(node)).name, position
    return op_of(node).name, None


def _no(why: str) -> Blocker:
    return Blocker("unsupported-shape", why)
