"""Lower bounds: critical path, work over capacity, ResMII and RecMII."""

from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest
import torch.fx as fx

from rose_compiler.base.machine import Machine
from rose_compiler.ir.cycles import max_ratio_cycle
from rose_compiler.ir.parse import parse
from rose_compiler.tune.bounds import bound, longest_path
from rose_compiler.tune.nest import Cost, Costs, Nest, Step

TWO = Machine("two cores", 2)

TEXT = """
@op(reads=["params"], writes=[])
def act(obs, params): ...

@op(reads=["params"], writes=[])
def critic(obs, params): ...

@op(kind="step", reads=["env"], writes=["env"])
def step(action, env): ...

@op(reads=["log"], writes=["log"])
def note(log, value): ...

@op(reads=["params"], writes=["params"])
def update(obs, params): ...

def ppo(obs0, *, params, env, log):
    for t, obs in rollout(0, 8, 1, obs=obs0):
        a = act(obs, params)
        v = critic(obs, params)
        note(log, v)
        r = step(a, env)
        yield r
    done = update(rollout.obs, params)
    return done
"""


def busy(seconds: float) -> Cost:
    return Cost(seconds, seconds)


def nest(*, lane: str = "") -> Nest:
    what = "submit" if lane else "run"
    body = (
        Step("run", "rollout/a"),
        Step("run", "rollout/v"),
        Step("run", "rollout/note"),
        Step(what, "rollout/r", lane),  # type: ignore[arg-type]
        *([Step("wait", "rollout/r", lane, stage=1)] if lane else []),
    )
    return Nest("", (Step("loop", "rollout", inner=Nest("rollout", body, 8)), Step("run", "done")))


COSTS = Costs(
    {
        "rollout/a": busy(1.0),
        "rollout/v": busy(4.0),
        "rollout/note": busy(0.5),
        "rollout/r": busy(2.0),
        "done": busy(3.0),
    }
)


def test_the_recurrence_is_simulator_and_policy() -> None:
    found = bound(parse(TEXT), nest(lane="shard:0"), COSTS, TWO)
    (interval,) = found.intervals
    assert interval.loop == "rollout"
    assert interval.rec_mii == pytest.approx(3.0)
    assert interval.recurrence is not None
    assert set(interval.recurrence.keys) == {"rollout/a", "rollout/r"}
    assert interval.recurrence.distance == 1
    assert interval.resources == {"coordinator": 5.5, "shard:0": 2.0, "cores": 3.75}
    assert interval.res_mii == 5.5
    assert (interval.mii, interval.tightest) == (5.5, "coordinator")


def test_the_bound_is_the_larger_of_path_and_work() -> None:
    program = parse(TEXT)
    found = bound(program, nest(), COSTS, TWO)
    # eight turns of the recurrence, then the update; the critic hangs off it
    assert found.critical_s == pytest.approx(8 * 3.0 + 3.0)
    assert found.work_s == pytest.approx((8 * 7.5 + 3.0) / 2)
    assert found.seconds == found.work_s
    wide = bound(program, nest(), COSTS, Machine("many", 64))
    assert wide.seconds == wide.critical_s
    assert wide.path == ("rollout", "done")


def test_an_order_of_effects_is_a_recurrence_too() -> None:
    slow = Costs({**COSTS.by_key, "rollout/note": busy(9.0)})
    (interval,) = bound(parse(TEXT), nest(), slow, TWO).intervals
    assert interval.recurrence is not None
    assert interval.recurrence.keys == ("rollout/note",)
    assert interval.rec_mii == 9.0
    assert interval.tightest == "coordinator"


def nodes(count: int) -> list[fx.Node]:
    graph = fx.Graph()
    return [graph.placeholder(f"n{k}") for k in range(count)]


def test_a_longer_distance_divides_the_latency() -> None:
    a, b, c = nodes(3)
    latency = {a: 3.0, b: 1.0, c: 4.0}
    edges = [(a, b, 0), (b, a, 1), (b, c, 0), (c, a, 3)]
    found = max_ratio_cycle(edges, latency.__getitem__)
    assert found is not None
    cycle, seconds, distance = found
    assert (set(cycle), seconds, distance) == ({a, b}, 4.0, 1)
    edges[1] = (b, a, 4)
    found = max_ratio_cycle(edges, latency.__getitem__)
    assert found is not None
    assert (set(found[0]), found[1], found[2]) == ({a, b, c}, 8.0, 3)
    assert max_ratio_cycle([(a, b, 0), (b, c, 0)], latency.__getitem__) is None
    assert max_ratio_cycle([], latency.__getitem__) is None


@pytest.mark.parametrize("seed", range(30))
def test_the_ratio_is_that_of_the_best_of_all_cycles(seed: int) -> None:
    draw = random.Random(seed)
    made = nodes(7)
    latency = {n: draw.choice([0.0, 1.0, 2.5, 7.0]) for n in made}
    edges = []
    for a, b in itertools.product(range(7), repeat=2):
        if draw.random() < 0.3:
            edges.append((made[a], made[b], 0 if a < b else draw.choice([1, 2, 3])))
    graph = nx.DiGraph()
    for u, v, distance in edges:
        graph.add_edge(u, v, distance=distance)
    ratios = []
    for cycle in nx.simple_cycles(graph):
        pairs = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
        ratios.append(
            sum(latency[n] for n in cycle) / sum(graph.edges[p]["distance"] for p in pairs)
        )
    found = max_ratio_cycle(edges, latency.__getitem__)
    best = max(ratios, default=0.0)
    assert (0.0 if found is None else found[1] / found[2]) == pytest.approx(best)


def test_the_longest_path_has_its_nodes_in_order() -> None:
    a, b, c, d = nodes(4)
    latency = {a: 1.0, b: 5.0, c: 2.0, d: 1.0}
    seconds, chain = longest_path([a, b, c, d], [(a, b), (a, c), (b, d), (c, d)], latency.get)  # type: ignore[arg-type]
    assert (seconds, chain) == (7.0, [a, b, d])
    assert longest_path([], [], latency.get) == (0.0, [])  # type: ignore[arg-type]
