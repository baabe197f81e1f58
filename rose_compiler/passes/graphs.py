"""Parts of traced operations: some of their results, the rest, or all without their draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.fx as fx

from rose_compiler.base.remarks import Blocker
from rose_compiler.ir import facts
from rose_compiler.ir.checks import is_check
from rose_compiler.ir.draws import take_draws
from rose_compiler.ir.effects import RNG_TORCH, parse_entry
from rose_compiler.ir.ops import Op, Signature
from rose_compiler.ir.program import Program, is_call, op_of, output_node, placeholders
from rose_compiler.ir.raising import may_raise
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.separable import any_rows, row_axes
from rose_compiler.ir.sizes import SIZES, Part, of_part
from rose_compiler.ir.slice import draws_random, writes_in_place


def part(
    program: Program,
    of: Op,
    body: fx.GraphModule,
    name: str,
    axes: Mapping[str, int],
    known: Mapping[str, int] | None = None,
    results: Sequence[int | None] | None = None,
    *,
    made: Mapping[str, int | None] | None = None,
    noises: Sequence[str] = (),
    alone: bool = True,
    ahead: bool = True,
    told: tuple[str, int | None] | None = None,
) -> Op:
    """An operation with ``body``, made of the traced operation ``of``.

    ``results`` says which result of ``of`` each result of the body is; ``None`` for one that is a
    value in the middle of it. Left out, they are the same ones. ``made`` says it of placeholders
    that another part makes. ``noises`` are random numbers that are drawn in front: for
    other sizes it draws itself, ``alone``: nobody draws in between. ``ahead`` and ``told`` are for
    other sizes (:class:`~rose_compiler.ir.sizes.Part`, :func:`~rose_compiler.ir.sizes.of_part`).

    ``axes`` are the batch axes of the body's placeholders, by name; those of its results are proven
    anew, except for the ``known`` ones. Its effects are those of the original as far as the body
    has the parameters that they are rooted at.
    """
    axes = {n.name: axes[n.name] for n in placeholders(body.graph) if n.name in axes}
    loose = any_rows(body, axes)
    body = untupled(body if isinstance(loose, Blocker) else loose)
    params = tuple(n.name for n in placeholders(body.graph))
    drawn = any(draws_random(n) for n in body.graph.nodes)
    checks = tuple(n.name for n in body.graph.nodes if is_check(n))
    lineage = _lineage(of, results or range(len(results_of(body))))
    asked = Part(
        params,
        lineage[1],
        _handed(of, made or {}, params),
        tuple(p for p in (*of.attributes.get("noises", ()), *noises) if p in params),
        len(_draws(body)),
        ahead,
        next((p for p in params if axes.get(p) == 0), None),
    )
    alone = alone and RNG_TORCH in (of.signature.writes or ())
    rng = (RNG_TORCH,) if drawn or (alone and asked.noises) else ()
    reads = tuple(
        r for r in of.signature.reads or () if r != RNG_TORCH and parse_entry(r).root in params
    )
    batch = row_axes(body, axes) or (axes if known else {})
    batch |= known or {}
    signature = Signature(
        program.ops.fresh(name),
        params,
        (*reads, *rng),
        rng,
        results=len(results_of(body)),
        batch=tuple(batch.items()) if batch else None,
        exact=of.signature.exact,
        may_raise=bool(checks),
    )
    found = {"draws": _draws(body), "checks": checks}
    attributes = of.attributes | {k: v for k, v in found.items() if v or k in of.attributes}
    if axes and not batch and "rows" in attributes:
        attributes["rows"] = dict(axes)  # for passes that take a draw out and try again
    separable = frozenset(n for n in batch if n in params)
    if (sizes := of_part(of, body, separable, lineage[0], asked, told)) is not None:
        attributes[SIZES] = sizes
    attributes |= {"part_of": lineage, "made": asked.made, "noises": asked.noises}
    return Op(
        signature,
        body.forward,
        kind="graph",
        body=body,
        source=of.source,
        attributes=attributes,
    )


def _lineage(of: Op, results: Sequence[int | None]) -> tuple[Op, tuple[int | None, ...]]:
    """The captured operation that a part stems from, and which of its results the part makes."""
    root, positions = of.attributes.get("part_of", (of, None))
    if positions is None:
        return root, tuple(results)
    return root, tuple(None if k is None else positions[k] for k in results)


def _handed(
    of: Op, made: Mapping[str, int | None], params: tuple[str, ...]
) -> dict[str, int | None]:
    """The parameters that other parts make, by the numbers of results of the captured operation."""
    _, positions = of.attributes.get("part_of", (of, None))
    mapped = {p: k if k is None or positions is None else positions[k] for p, k in made.items()}
    known = {**of.attributes.get("made", {}), **mapped}
    return {p: k for p, k in known.items() if p in params}


def told_by(passed: Iterable[fx.Node]) -> tuple[str, int | None] | None:
    """A value from the middle of a graph that is a tensor, by its name, and its rows: another part
    sees by it whether the one that makes it ran the user's statements."""
    for node in passed:
        spec = facts.get(node).spec
        if spec is not None and spec.kind == "tensor":
            return node.name, facts.rows_of(spec)
    return None


def draw_alone(node: fx.Node, rewrite: Rewriter) -> None:
    """Let nobody draw between the random numbers that an operation is handed and itself."""
    op = op_of(node)
    reads, writes = op.signature.reads or (), op.signature.writes or ()
    if not op.attributes.get("noises") or RNG_TORCH in writes:
        return
    retire(rewrite.program, node)
    rng = (RNG_TORCH,)
    rewrite.retarget(
        node, op.with_signature(reads=(*reads, *rng), writes=(*writes, *rng)), *node.args
    )


def retire(program: Program, node: fx.Node) -> None:
    """Free the name of the operation that a node calls, if no other node calls it: a part of it
    takes its place."""
    op = op_of(node)
    if not any(is_call(n, op) for n in program.nodes() if n is not node):
        del program.ops.by_name[op.name]


def results_of(body: fx.GraphModule) -> tuple[Any, ...]:
    """What a body returns: its one result, or the items of its tuple."""
    outputs = output_node(body.graph).args[0]
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def tupled(body: fx.GraphModule) -> fx.GraphModule:
    """The body with a tuple as its output, of one if it has one result."""
    if isinstance(output_node(body.graph).args[0], tuple | list):
        return body
    return keep_results(body, [0])


def untupled(body: fx.GraphModule) -> fx.GraphModule:
    """The body with its result itself as its output, if it has only one."""
    outputs = output_node(body.graph).args[0]
    if not isinstance(outputs, tuple | list) or len(outputs) != 1:
        return body
    graph = fx.Graph()
    (result,) = graph.graph_copy(body.graph, {})  # type: ignore[misc]
    graph.output(result)
    return fx.GraphModule(body, graph)


def _draws(body: fx.GraphModule) -> tuple[str, ...]:
    return tuple(n.name for n in body.graph.nodes if draws_random(n))


def axes_of_results(body: fx.GraphModule, axes: Mapping[str, int]) -> dict[str, int]:
    """The batch axes of a drawing body's results, by ``"return.<k>"``: those of the body that is
    handed its draws."""
    draws = _draws(body)
    if not draws or any(facts.get(n).spec is None for n in body.graph.nodes if n.name in draws):
        return {}
    taken = take_draws(body, draws)
    if isinstance(taken, Blocker):
        return {}
    names = {n.name for n in placeholders(taken.gm.graph)}
    axes = {name: axis for name, axis in axes.items() if name in names}
    return row_axes(taken.gm, axes | {noise.name: 0 for noise in taken.noises if noise.shape})


def keep_results(body: fx.GraphModule, kept: Sequence[int]) -> fx.GraphModule:
    """A copy of a body that returns some of its results only. Checks, draws, writes and what may
    raise for values stay."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(body.graph, copies)
    results = results_of(body)
    graph.output(tuple(fx.node.map_arg(results[k], lambda n: copies[n]) for k in kept))
    for node in reversed(list(graph.nodes)):
        fixed = is_check(node) or draws_random(node) or writes_in_place(node) or may_raise(node)
        if not node.users and not fixed and node.op != "output":
            graph.erase_node(node)
    return fx.GraphModule(body, graph)


def without_checks(op: Op) -> Callable[..., Any]:
    """What an operation computes, without the nodes that look at values and may raise."""
    if op.body is None or op.impl is None or not any(map(is_check, op.body.graph.nodes)):
        return op
    graph = fx.Graph()
    graph.output(graph.graph_copy(op.body.graph, {}))
    for node in list(graph.nodes):
        if is_check(node) and not node.users:
            graph.erase_node(node)
    module = fx.GraphModule(op.body, graph)
    return first_of(module) if op.signature.results == 1 else module.forward


def first_of(module: fx.GraphModule) -> Callable[..., Any]:
    """A body with one result as a function that returns this result, however the body does."""
    forward: Callable[..., Any] = module.forward
    tuple_of_one = isinstance(output_node(module.graph).args[0], tuple | list)
    return (lambda *args: forward(*args)[0]) if tuple_of_one else forward


def named_axes(node: fx.Node) -> dict[str, int]:
    """The batch axes of a traced operation by the names of its body's placeholders."""
    op = op_of(node)
    assert op.body is not None
    # a draw keeps the whole from being proven; its parts may be
    axes = op.signature.separable() or op.attributes.get("rows", {})
    names = [n.name for n in placeholders(op.body.graph)]
    return {
        inner: axes[param]
        for inner, param in zip(names, op.signature.params, strict=True)
        if param in axes
    }


def result_specs(node: fx.Node) -> dict[int, Any]:
    """What is known of the types of an operation's results."""
    spec = facts.get(node).spec
    if op_of(node).signature.results == 1:
        return {0: spec} if spec is not None else {}
    found = dict(enumerate(spec.items)) if spec is not None and spec.items else {}
    for user in node.users:
        known = facts.get(user).spec
        if known is not None and isinstance(user.args[1], int):
            found[user.args[1]] = known
    return found
