"""Runs of pure torch statements become one traced operation each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Blocker, RemarkLog
from rose_compiler.frontend import otherwise
from rose_compiler.frontend.holding import Unsteady, draws_fixed, hold_numbers
from rose_compiler.frontend.module_modes import as_recorded
from rose_compiler.frontend.record import Record
from rose_compiler.frontend.runs import (
    Run,
    find_runs,
    is_step,
    is_tensor_item,
    worth,
)
from rose_compiler.frontend.statements import Statements
from rose_compiler.frontend.trace import FixedSizes, Traced, trace
from rose_compiler.frontend.varying import why_varying
from rose_compiler.ir import facts
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.effects import RNG_TORCH
from rose_compiler.ir.ops import STATE, Op, Signature
from rose_compiler.ir.program import Program, is_call, is_item, is_state, op_of, output_node
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.sizes import SIZES, Sizes
from rose_compiler.ir.state_node import state_node

PASS = "trace"


def trace_runs(program: Program, record: Record, log: RemarkLog) -> int:
    """Trace what can be traced in the bodies of loops that step a simulator.

    A simulator whose step was inlined counts. Elsewhere the user's statements stay as they are:
    one operation of straight Python costs less than a graph that nothing is done with. Returns the
    number of graphs made.
    """
    made = 0
    for loop in program.loops():
        if not any(is_call(n) and is_step(n) for n in loop.graph.nodes):
            continue
        deps = Dependences(program)
        if any(is_call(n) and why_varying(n, record) for n in loop.graph.nodes):
            _tell_varying(program, find_runs(loop.graph, record, deps, varying=True), record, log)
        for run in find_runs(loop.graph, record, deps):
            made += make_graph(program, run, record, log)
    return made


def _tell_varying(program: Program, runs: list[Run], record: Record, log: RemarkLog) -> None:
    """Say what would be in a graph if its arguments had one type."""
    rewriter = Rewriter(program, log, PASS)
    for node in (n for run in runs for n in run.nodes):
        if (blocker := why_varying(node, record)) is not None:
            rewriter.missed(node, blocker)


def lifted(program: Program) -> set[str]:
    """States whose tensors traced graphs of a program are handed."""
    deps = Dependences(program)
    return {
        effect.state
        for node in program.nodes()
        if is_call(node) and not is_call(node, STATE) and op_of(node).kind == "graph"
        for effect in deps.effects(node)
        if not effect.write
    }


def make_graph(program: Program, run: Run, record: Record, log: RemarkLog) -> int:
    """Replace a run by one graph operation; 0 and a remark when it can't be traced."""
    rewriter = Rewriter(program, log, PASS)
    shortened = list(run.nodes)
    while shortened:
        blocker = _replace(program, Run(shortened), record, rewriter)
        if blocker is None:
            return 1
        if isinstance(blocker, Unsteady | FixedSizes) and len(shortened) > 1:
            half = len(shortened) // 2
            parts = shortened[:half], shortened[half:]
            made = [make_graph(program, Run(p), record, log) for p in parts if worth(p)]
            if not any(made):
                rewriter.missed(shortened[0], blocker)
            return sum(made)
        if blocker.code != "not-traceable" or len(shortened) == 1:
            rewriter.missed(shortened[0], blocker)
            return 0
        # an output that is no tensor belongs to a statement behind the run
        shortened.pop()
    return 0


def _replace(program: Program, run: Run, record: Record, rewriter: Rewriter) -> Blocker | None:
    members = run.members
    outputs = _outputs(run)
    for node in outputs:
        spec = facts.get(node).spec
        if spec is not None and spec.kind != "tensor" and not is_tensor_item(node):
            return Blocker(
                "not-traceable", f"`{node.name}` is no tensor and is used outside the run"
            )
    inputs: list[fx.Node] = []
    states: dict[fx.Node, Any] = {}
    examples: dict[fx.Node, Any] = {}
    for node in run.nodes:
        example = record.examples[node]
        for argument, value in zip(node.args, example.args, strict=True):
            if not isinstance(argument, fx.Node):
                continue
            if is_state(argument):
                states[argument] = value
                continue
            inside = argument in members or (is_item(argument) and argument.args[0] in members)
            if not inside and argument not in examples:
                inputs.append(argument)
                examples[argument] = value
    names, statements = names_of(inputs), Statements(run.nodes, inputs, outputs)
    lifted, vary = record.names.attributes(), record.resized(run.nodes)
    with as_recorded(record.examples[run.nodes[0]].modes):
        traced = trace(
            statements.whole(states),
            tuple(examples[n] for n in inputs),
            lifted=lifted,
            names=names,
            contexts=facts.get(run.nodes[0]).context,
            roots=tuple(states.values()),
            vary=vary,
        )
    if isinstance(traced, Blocker):
        return traced
    if (fixed := draws_fixed(traced, vary)) is not None:
        return fixed
    unsteady = hold_numbers(program, traced, run.nodes[0], list(states.values()), record)
    if unsteady is not None:
        return unsteady
    count = len(traced.arguments)
    sizes = otherwise.sizes(
        program,
        record,
        run.nodes,
        otherwise.Handed(traced, traced.inputs, [(k, None) for k in range(count)], len(inputs)),
        states,
        statements.whole,
        whole=len(outputs) > 1,
        statements=statements,
    )
    _install(program, run, inputs, outputs, traced, sizes, rewriter)
    return None


def _install(
    program: Program,
    run: Run,
    inputs: list[fx.Node],
    outputs: list[fx.Node],
    traced: Traced,
    sizes: Sizes,
    rewriter: Rewriter,
) -> None:
    arguments = [
        state_node(a, rewriter) if isinstance(a, str) else inputs[a] for a in traced.arguments
    ]
    rng = (RNG_TORCH,) if traced.draws else ()
    name = program.ops.fresh(_title(run))
    signature = Signature(
        name,
        traced.inputs,
        (*traced.lifted, *rng),
        rng,
        results=len(outputs),
        may_raise=bool(traced.checks),
    )
    lines = tuple(line for n in run.nodes for line in op_of(n).source)
    op = Op(
        signature,
        whole_or_single(traced.gm),
        kind="graph",
        body=traced.gm,
        source=lines,
        attributes={
            "draws": tuple(traced.draws),
            "checks": tuple(traced.checks),
            SIZES: sizes,
        },
    )
    last = run.nodes[-1]
    node = rewriter.call(op, *arguments, before=last, like=run.nodes[0], name=name)
    facts.put(node, context=facts.get(run.nodes[0]).context, alias=())
    for position, old in enumerate(outputs):
        new = node if len(outputs) == 1 else rewriter.item(node, position)
        facts.put(new, spec=facts.get(old).spec, alias=facts.get(old).alias)
        rewriter.replace(old, new)
    for old in reversed(run.nodes):
        for user in list(old.users):
            rewriter.erase(user)
        rewriter.erase(old)
    rewriter.applied(
        node, f"{len(run.nodes)} statements traced to one graph of {_size(traced.gm)} torch calls"
    )


def _outputs(run: Run) -> list[fx.Node]:
    """Values of the run that are used outside, items instead of tuples."""
    members = run.members
    found: list[fx.Node] = []
    for node in run.nodes:
        for user in node.users:
            if is_item(user):
                if any(u not in members for u in user.users) and user not in found:
                    found.append(user)
            elif user not in members and node not in found:
                found.append(node)
    return found


def names_of(inputs: Sequence[fx.Node]) -> list[str]:
    """Parameter names for the inputs, each once, none private."""
    taken: dict[str, None] = {}
    for node in inputs:
        stem = node.name.lstrip("_") or "x"
        name, n = stem, 1
        while name in taken:
            name, n = f"{stem}_{n}", n + 1
        taken[name] = None
    return list(taken)


def whole_or_single(body: fx.GraphModule) -> Callable[..., Any]:
    """What computes a traced operation: its one result, or all as a tuple."""
    forward = body.forward
    returned = output_node(body.graph).args[0]
    if not isinstance(returned, tuple | list) or len(returned) != 1:
        return forward

    def first(*args: Any) -> Any:
        return forward(*args)[0]

    return first


def _size(gm: fx.GraphModule) -> int:
    return sum(n.op.startswith("call_") for n in gm.graph.nodes)


def _title(run: Run) -> str:
    """A name after the function that the run was inlined from."""
    chain = facts.get(run.nodes[0]).origin.inlined_from
    called = re.findall(r"(\w+)\(", chain[-1].source) if chain else []
    return called[0] if called and called[0].isidentifier() else "graph"
