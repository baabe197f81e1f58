"""A whole training loop, cut into trips: what is recorded, scheduled and tuned is one iteration."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from rose_compiler.base.errors import SourceLocation
from rose_compiler.frontend.scope import Session
from rose_compiler.ir import bodies, facts
from rose_compiler.ir.ops import BRANCH, BREAK_IF, CONTINUE_IF, LOOP, STATE, OpTable
from rose_compiler.ir.program import Builder, LoopView, Program, is_call, is_state, op_of


@dataclass(frozen=True)
class Iterations:
    """The loops over training iterations of a function, in order.

    ``sure`` unless nothing tells a whole training from one update over a buffer: both are loops
    around an optimizer's step, and no simulator is in sight. Who calls the function again did not
    write the whole training.
    """

    loops: tuple[fx.Node, ...]
    sure: bool = True


def find_iterations(program: Program, session: Session) -> Iterations:
    """The loops over training iterations, when the function was written as the whole of it.

    They are loops of the function's own body that step a simulator and train, on any level below;
    where nothing is seen to train, a single one around loops that step a simulator; with no
    simulator at all, loops that train.
    """
    does = session.loops
    loops = [n for n in program.graph.nodes if is_call(n, LOOP)]
    steps = {n for n in program.nodes() if is_call(n, LOOP) and _does(n, "steps", does)}
    whole = tuple(n for n in loops if n in steps and _does(n, "trains", does))
    if whole:
        return Iterations(whole)
    around = tuple(n for n in loops if any(m in steps for m in LoopView(n).graph.nodes))
    if len(around) == 1 and not session.trains:
        return Iterations(around)
    if steps or any(is_call(n) and op_of(n).kind == "step" for n in program.nodes()):
        return Iterations(())
    return Iterations(tuple(n for n in loops if _does(n, "trains", does)), sure=False)


def _does(loop: fx.Node, what: str, does: Mapping[SourceLocation, set[str]]) -> bool:
    where = facts.get(loop).origin.where
    return where is not None and what in does.get(where, ())


def spans_trips(node: fx.Node) -> bool:
    """Whether several trips of a loop over iterations may be taken together, over a range that no
    trip leaves: it steps a simulator in its own body, so that work of one trip may run beside the
    step of the next, or it evaluates, saves or copies, which may go on while the next trip
    collects, or it resets a simulator, which may begin while the trip in front still trains."""
    view = LoopView(node)
    if len(view.bounds) != 3 or not isinstance(view.bounds[2], int) or bodies.exits(view.graph):
        return False
    if steps_itself(node):
        return True
    parts = [list(_inside(n)) for n in view.graph.nodes]
    stepping = sum(any(op_of(n).kind == "step" for n in part) for part in parts)
    if stepping > 1 or any(_names(n, "save", "deepcopy") for part in parts for n in part):
        return True
    return stepping > 0 and any(is_call(n) and _names(n, "reset") for n in view.graph.nodes)


def steps_itself(node: fx.Node) -> bool:
    """Whether a loop steps a simulator in its own body, as off-policy trainings do."""
    return any(is_call(n) and op_of(n).kind == "step" for n in LoopView(node).graph.nodes)


def _inside(node: fx.Node) -> Iterator[fx.Node]:
    """The calls of operations that a node is, or has in its bodies."""
    if is_call(node, LOOP) or is_call(node, BRANCH):
        for graph in bodies.graphs_of(node):
            for inner in graph.nodes:
                yield from _inside(inner)
    elif is_call(node):
        yield node


def _names(node: fx.Node, *names: str) -> bool:
    """Whether an operation calls something by a name, as ``torch.save`` by that of ``save``."""
    return any(
        isinstance(part, ast.Call)
        and getattr(part.func, "attr", getattr(part.func, "id", "")) in names
        for statement in op_of(node).attributes.get("stmts", ())
        for part in ast.walk(statement)
    )


def trips_of(program: Program, node: fx.Node) -> Program:
    """The body of a loop as a program of its own, for one trip, or for several where
    :func:`spans_trips` says so.

    For one trip its values are the loop's index, then what it carries, then the values it captures;
    it returns the next carried values and, last, whether the loop is to be left. The body stands in
    a loop of one trip, so that its exits keep their meaning. For several there are two values in
    the place of the index, the first index and the end of the range.
    """
    view = LoopView(node)
    several = spans_trips(node)
    root = Builder()
    inputs: dict[fx.Node, fx.Node] = {}
    values: list[str] = []

    def value(param: fx.Node) -> None:
        known = facts.get(param)
        made = root.placeholder(
            param.name,
            "value",
            spec=known.spec,
            alias=known.alias,
            maybe_unbound=known.maybe_unbound,
        )
        inputs[param] = made
        values.append(made.name)

    if several:
        for name in ("first", "end"):
            values.append(root.placeholder(name, "value").name)
        first, end = (n for n in root.graph.nodes)
    else:
        value(view.index)
    for param in view.carried:
        value(param)
    captured = list(zip(view.captured_params, view.captured, strict=True))
    for param, _ in captured:
        if not is_state(param):
            value(param)
    roots: dict[str, fx.Node] = {}
    below: list[tuple[fx.Node, fx.Node]] = []
    for param, outer in captured:
        if not is_state(param):
            continue
        if is_call(outer, STATE):
            below.append((param, outer))
            outer = outer.args[0]  # type: ignore[assignment]
        name = facts.get(outer).state
        if name not in roots:
            roots[name] = root.placeholder(name, "state", state=name)
        if not is_call(param, STATE) and outer is dict(captured).get(param):
            inputs[param] = roots[name]
    for param, outer in below:
        base = roots[facts.get(outer.args[0]).state]  # type: ignore[arg-type]
        made = root.state(base, str(outer.args[1]))
        facts.put(made, state=facts.get(outer).state)
        inputs[param] = made
    body = Builder(root)
    index = body.placeholder(view.index.name if several else "once", "index")
    inner: dict[fx.Node, Any] = {view.index: index} if several else {}
    for param in view.carried:
        known = facts.get(param)
        inner[param] = body.placeholder(
            param.name,
            "carried",
            spec=known.spec,
            alias=known.alias,
            maybe_unbound=known.maybe_unbound,
        )
    given: tuple[Any, ...] = tuple(inputs[p] for p in view.carried)
    bounds: tuple[Any, ...] = (0, 1, 1)
    about = facts.LoopFacts("range", f"{view.label}_trip", "once", "", view.facts.has_exit)
    if several:
        bounds = (first, end, view.bounds[2])
        about = replace(view.facts, label=f"{view.label}_trips")
    else:
        body.placeholder("broke", "carried")
        inner[view.index] = body.use(inputs[view.index])
        given = (*given, False)
    for param in view.captured_params:
        inner[param] = body.use(inputs[param])
    outputs = _copy_body(view, program, body, inner)
    made = root.loop(
        body,
        outputs[: len(given)],
        bounds,
        given,
        about,
        origin=facts.get(node).origin,
        context=facts.get(node).context,
    )
    results = [root.item(made, i, name=p.name) for i, p in enumerate(view.carried)]
    if not several:
        results.append(root.item(made, len(view.carried), name="broke"))
    graph = root.finish(tuple(results))
    return Program(
        program.name,
        graph,
        OpTable(dict(program.ops.by_name)),
        tuple(values),
        tuple(roots),
        objects={name: program.objects[name] for name in roots if name in program.objects},
    )


def _copy_body(
    view: LoopView, program: Program, body: Builder, inner: dict[fx.Node, Any]
) -> tuple[Any, ...]:
    """Copy the operations of a loop's body; the values it hands on, with "not left" last."""
    for old in view.graph.nodes:
        if old.op == "placeholder":
            continue
        if old.op == "output":
            mapped = fx.node.map_arg(old.args[0], lambda n: inner[n])
            return (*mapped, False)
        if old.op == "get_attr":
            child = bodies.copied(getattr(view.body, str(old.target)), program, {}, "")
            body.module.add_module(str(old.target), child)
        new = body.graph.node_copy(old, lambda n: inner[n])
        if is_call(old, BREAK_IF) or is_call(old, CONTINUE_IF):
            pred, carried = new.args
            new.args = (pred, (*carried, is_call(old, BREAK_IF)))  # type: ignore[misc]
        facts.copy(old, new)
        inner[old] = new
    raise AssertionError("a graph without output")
