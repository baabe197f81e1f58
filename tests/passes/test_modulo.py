"""The arithmetic of stages and issue orders, on dependences written by hand."""

from __future__ import annotations

import itertools

import pytest
import torch.fx as fx

from rose_compiler.ir.edges import Edge
from rose_compiler.passes.modulo import Modulo, later_stage, schedule


def nodes(*names: str) -> dict[str, fx.Node]:
    graph = fx.Graph()
    return {name: graph.create_node("call_function", print, name=name) for name in names}


def edge(src: fx.Node, dst: fx.Node, distance: int = 0) -> Edge:
    return Edge(src, dst, "value", None, distance, distance)


def rollout() -> tuple[dict[str, fx.Node], list[Edge]]:
    """act -> step -> obs -> act of the next trip; a value and a reward hang off it."""
    n = nodes("draw", "act", "value", "store_value", "step", "obs", "reward", "store_reward")
    edges = [
        edge(n["draw"], n["draw"], 1),
        edge(n["draw"], n["act"]),
        edge(n["act"], n["value"]),
        edge(n["value"], n["store_value"]),
        edge(n["act"], n["step"]),
        edge(n["step"], n["step"], 1),
        edge(n["step"], n["obs"]),
        edge(n["obs"], n["act"], 1),
        edge(n["step"], n["reward"]),
        edge(n["reward"], n["store_reward"]),
    ]
    return n, edges


def names(modulo: Modulo) -> list[str]:
    return [n.name for n in modulo.order]


def test_what_waits_for_a_step_comes_one_trip_later() -> None:
    n, edges = rollout()
    stage = later_stage(list(n.values()), edges, {n["step"]})
    assert {k for k, v in n.items() if stage[v]} == {"obs", "reward", "store_reward"}


def test_the_step_comes_as_early_as_it_can_and_late_work_of_the_trip_before_comes_first() -> None:
    n, edges = rollout()
    stage = later_stage(list(n.values()), edges, {n["step"]})
    modulo = schedule(list(n.values()), edges, stage, [n["step"]])
    assert names(modulo) == [
        "draw",  # waits for no step: in front of the first wait
        "obs",
        "act",
        "step",
        "reward",
        "store_reward",
        "value",
        "store_value",
    ]
    # the next draw is made before the step is waited for
    beside = [m.name for m in modulo.beside(n["step"])]
    assert beside == ["reward", "store_reward", "value", "store_value", "draw"][: len(beside)]
    assert "store_value" in beside


def test_every_dependence_holds() -> None:
    n, edges = rollout()
    stage = later_stage(list(n.values()), edges, {n["step"]})
    modulo = schedule(list(n.values()), edges, stage, [n["step"]])
    for e in edges:
        src = (stage[e.src], modulo.position(e.src))
        dst = (e.least + stage[e.dst], modulo.position(e.dst))
        assert src < dst, e


def test_late_work_that_the_next_step_needs_comes_in_front_of_it() -> None:
    n, edges = rollout()
    edges.append(edge(n["store_reward"], n["step"], 1))
    stage = later_stage(list(n.values()), edges, {n["step"]})
    modulo = schedule(list(n.values()), edges, stage, [n["step"]])
    order = names(modulo)
    assert order.index("store_reward") < order.index("step")


def test_two_steps_are_issued_in_turn() -> None:
    n = nodes("act0", "act1", "step0", "step1", "obs0", "obs1", "late")
    edges = []
    for g in "01":
        edges += [
            edge(n[f"act{g}"], n[f"step{g}"]),
            edge(n[f"step{g}"], n[f"obs{g}"]),
            edge(n[f"obs{g}"], n[f"act{g}"], 1),
            edge(n[f"act{g}"], n["late"]),
        ]
    steps = [n["step0"], n["step1"]]
    stage = later_stage(list(n.values()), edges, set(steps))
    modulo = schedule(list(n.values()), edges, stage, steps)
    assert names(modulo) == ["obs0", "act0", "step0", "obs1", "act1", "step1", "late"]
    assert [m.name for m in modulo.beside(n["step0"])] == ["obs1", "act1", "step1", "late"]
    assert [m.name for m in modulo.beside(n["step1"])] == ["late", "obs0", "act0", "step0"]


def test_stages_that_break_a_dependence_are_refused() -> None:
    n = nodes("a", "b")
    with pytest.raises(ValueError, match="break"):
        schedule(list(n.values()), [edge(n["a"], n["b"])], {n["a"]: 1, n["b"]: 0}, [])


def test_a_circle_within_a_trip_is_refused() -> None:
    n = nodes("a", "b")
    edges = [edge(n["a"], n["b"]), edge(n["b"], n["a"])]
    with pytest.raises(ValueError, match="wait for each other"):
        schedule(list(n.values()), edges, dict.fromkeys(n.values(), 0), [])


def test_long_chains_do_not_recurse() -> None:
    n = nodes(*(f"n{k}" for k in range(3000)))
    chain = list(n.values())
    edges = [edge(a, b) for a, b in itertools.pairwise(chain)]
    modulo = schedule(chain, edges, dict.fromkeys(chain, 0), [chain[-1]])
    assert modulo.order == tuple(chain)
