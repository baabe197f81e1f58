"""Random programs stay the same under every motion that the dependences allow."""

from __future__ import annotations

import random

import torch.fx as fx
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_compiler.base.errors import VerifyError
from rose_compiler.base.remarks import RemarkLog
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.edges import takes_part
from rose_compiler.ir.ops import LOOP
from rose_compiler.ir.program import (
    LoopView,
    Program,
    is_call,
    is_exit,
    is_structure,
    output_node,
)
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.ir.verify import verify
from rose_compiler.passes.hoist import changed_later
from rose_compiler.testing.programs import Generated, programs


def rewriter(program: Program) -> Rewriter:
    return Rewriter(program, RemarkLog(), "motion")


def shuffle(program: Program, draw: random.Random) -> tuple[int, int]:
    """Try motions at random; how many were done, and how many refused."""
    rewrite = rewriter(program)
    done = refused = 0
    for graph in list(program.graphs()):
        nodes = [n for n in graph.nodes if takes_part(n)]
        for _ in range(2 * len(nodes)):
            node, anchor = draw.choice(nodes), draw.choice(nodes)
            try:
                rewrite.move(node, **{draw.choice(("before", "after")): anchor})
            except VerifyError:
                refused += 1
            else:
                done += node is not anchor
    return done, refused


@settings(max_examples=30)
@given(programs(), st.randoms(use_true_random=False))
def test_allowed_moves_change_nothing(generated: Generated, draw: random.Random) -> None:
    before = generated.run_and_snapshot()
    shuffle(generated.program, draw)
    verify(generated.program)
    assert generated.run_and_snapshot() == before


def reorder(graph: fx.Graph, deps: Dependences, draw: random.Random) -> int:
    """Put a body into a random order that its edges allow; how many nodes left their place."""
    nodes = [n for n in graph.nodes if takes_part(n)]
    waits: dict[fx.Node, set[fx.Node]] = {n: set() for n in nodes}
    for edge in deps.edges(graph):
        if edge.applies(0) and edge.src in waits:
            waits[edge.dst].add(edge.src)
    order: list[fx.Node] = []
    while len(order) < len(nodes):
        order.append(draw.choice([n for n in nodes if n not in order and waits[n] <= {*order}]))
    # bodies and states stand anywhere in front of their users
    rest = [n for n in graph.nodes if n.op not in ("placeholder", "output") and n not in waits]
    end = output_node(graph)
    for node in (*rest, *order):
        end.prepend(node)
    return sum(a is not b for a, b in zip(nodes, order, strict=True))


@settings(max_examples=40)
@given(programs(), st.randoms(use_true_random=False))
def test_any_order_that_the_edges_allow_changes_nothing(
    generated: Generated, draw: random.Random
) -> None:
    before = generated.run_and_snapshot()
    program = generated.program
    deps = Dependences(program)
    for graph in list(program.graphs()):
        deps.edges(graph)
    for graph in list(program.graphs()):
        reorder(graph, deps, draw)
    verify(program)
    assert generated.run_and_snapshot() == before


def hoist_all(program: Program) -> int:
    """Hoist whatever may be hoisted, innermost loops first; how many operations were."""
    rewrite = rewriter(program)
    done = 0
    for loop in program.loops():
        for node in list(loop.graph.nodes):
            if not is_call(node) or program_exit(node):
                continue
            # the rewriter looks at the order of operations; the pass, at what becomes of the value
            if changed_later(loop, node, rewrite.deps) is not None:
                continue
            try:
                rewrite.hoist(node, out_of=loop)
            except VerifyError:
                continue
            done += 1
    return done


def program_exit(node: fx.Node) -> bool:
    """Whether a node may leave or end a trip, so that it is part of the loop itself."""
    return is_exit(node) or (is_structure(node) and not is_call(node, LOOP))


@settings(max_examples=50)
@given(programs(without={"gradient"}))  # the pass leaves what records where it is
def test_allowed_hoists_change_nothing(generated: Generated) -> None:
    before = generated.run_and_snapshot()
    hoist_all(generated.program)
    verify(generated.program)
    assert generated.run_and_snapshot() == before


@settings(max_examples=30)
@given(programs())
def test_copies_of_loops_do_what_the_loops_did(generated: Generated) -> None:
    program = generated.program
    before = generated.run_and_snapshot()
    rewrite = rewriter(program)
    for node in [n for n in program.graph.nodes if is_call(n, LOOP)]:
        copy = rewrite.clone(node, {}, before=node)
        rewrite.replace(node, copy)
        rewrite.erase(node)
        assert rewrite.owner(LoopView(copy).graph) is copy
    verify(program)
    assert generated.run_and_snapshot() == before


def test_motions_are_both_done_and_refused() -> None:
    counts = [0, 0, 0, 0]

    @settings(max_examples=30)
    @given(programs(), st.randoms(use_true_random=False))
    def count(generated: Generated, draw: random.Random) -> None:
        done, refused = shuffle(generated.program, draw)
        deps = Dependences(generated.program)
        moved = sum(reorder(g, deps, draw) for g in list(generated.program.graphs()))
        for k, n in enumerate((done, refused, moved, hoist_all(generated.program))):
            counts[k] += n

    count()
    assert min(counts[:3]) > 100
    assert counts[3] > 5
