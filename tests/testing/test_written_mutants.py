"""Planted faults that random programs meet too seldom, each with a program written for it.

As in ``test_mutants.py``, a mutant lets one question of a pass answer "nothing against it". Its
program then differs from eager order, or breaks a rule of the verifier. Where nothing is planted
the pass says why it leaves the program alone, and the program runs as it did.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rose_compiler.base.decision import Decision
from rose_compiler.ir import interp
from rose_compiler.ir.parse import parse
from rose_compiler.ir.verify import verify
from rose_compiler.passes import fuse_graphs, hoist_draws, late, tile_batch, tiles
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.fuse import Fuse
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.runtime import graphs, inductor
from rose_compiler.runtime.support import Runtime
from rose_compiler.testing import rollouts, slots
from rose_compiler.testing.lanes import execute
from rose_compiler.testing.rollouts import SIGNATURES, Rollout
from tests.passes.texts import changed

CONTEXT = PassContext(
    options=Decision(groups=2, late="shadow", lanes="native"),
    asynchronous=frozenset({"envs"}),
    shards={"envs": (2, 2)},
)
HEAD = """
def rollout(obs0, h0, total0, *, envs, log, gain, buf_obs, buf_action, buf_value, buf_extra):"""
BODY = """
    for t, obs, h in trips(0, 4, 1, obs=obs0, h=h0):
        acted = act(obs, h)
        action = acted[0] @ facts(alias=["%action"])
        hidden = acted[1]
        extra = acted[2]
        a_np = to_array(action) @ facts(alias=["%action"])
        r = step(a_np, envs)
        x, reward, ended, cut, infos = unpack(r)
        next_obs = to_obs(x)
        store_obs(buf_obs, t, obs)
        note(log, reward)
        yield next_obs, hidden
    return trips.obs, trips.h
"""


def written(*changes: tuple[str, str], text: str = SIGNATURES + HEAD + BODY) -> Rollout:
    """The rollout above with parts of its text replaced."""
    return Rollout(changed(text, changes), (2, 2), lends=False)


def differs(rollout: Rollout) -> tuple[str, set[str]]:
    """How the program that the passes make of a rollout differs from it, empty where it does not;
    the codes of what the passes left alone."""
    program = rollout.program()
    before = rollout.run(interp.run, program)
    try:
        history = PassManager(PIPELINE, verify=1).run(program, CONTEXT)
        verify(program)
    except Exception as error:
        return f"{type(error).__name__}: {error}", set()
    codes = {r.code for r in history.remarks.missed()}
    if rollout.run(interp.run, program) != before:
        return "program order", codes
    for seed in range(3):

        def run(p: Any, values: Any, objects: Any, seed: int = seed) -> Any:
            return slots.run(p, values, objects, seed=seed)

        if rollout.run(run, program) != before:
            return f"order {seed} of the lanes", codes
    return "", codes


@dataclass(frozen=True)
class Written:
    """A planted fault, the rollout that finds it, and the code that the rule gives where it holds.
    ``code`` is empty where the fault is in a rewrite and not in a question about one."""

    name: str
    rollout: Rollout
    code: str
    plant: Callable[[pytest.MonkeyPatch], None]


def nothing_against(of: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(of, name, lambda *args, **kwargs: None)


def _turned_round(patch: pytest.MonkeyPatch) -> None:
    joined = tiles.Tiler._joined
    patch.setattr(
        tiles.Tiler,
        "_joined",
        lambda self, parts, *rest, **kw: joined(self, parts[::-1], *rest, **kw),
    )


def _drawn_early(patch: pytest.MonkeyPatch) -> None:
    draw = hoist_draws.draw_before

    def early(noise: Any, node: Any, rewrite: Any) -> Any:
        return draw(noise, next(n for n in node.graph.nodes if n.op == "call_function"), rewrite)

    patch.setattr(hoist_draws, "draw_before", early)


def _steps_turned_round(patch: pytest.MonkeyPatch) -> None:
    index = tiles.Tiler._index
    patch.setattr(tiles.Tiler, "_index", lambda self, g, s: 1 - index(self, g, s))


#: The step also counts into the log, which all shards share.
COUNTING = (
    (
        'reads=["envs"], writes=["envs"], attributes',
        'reads=["envs", "log"], writes=["envs", "log"], attributes',
    ),
    (
        "def step(action, envs)",
        "def step(action, envs, log)",
    ),
    ("r = step(a_np, envs)", "r = step(a_np, envs, log)"),
)

MUTANTS = [
    Written(
        "tile_batch: an action is written in place",
        written(("        a_np = to_array", "        halve(action)\n        a_np = to_array")),
        "may-alias",
        nothing_against(tile_batch, "_written_in_place"),
    ),
    Written(
        "tile_batch: a step that touches what shards share",
        written(*COUNTING),
        "not-pure",
        nothing_against(tile_batch, "_step_alone"),
    ),
    Written("tile_batch: tiles joined in another order", written(), "", _turned_round),
    Written("tile_batch: tiles step each other's shards", written(), "", _steps_turned_round),
    Written(
        "hoist_draws: drawn at the start of the trip",
        written(
            (
                "acted = act(obs, h)",
                "stop = over(t)\n        break_if(stop, (obs, h))\n        acted = gauss(obs, h)",
            ),
        ),
        "",
        _drawn_early,
    ),
    Written(
        "late: the next item is taken ahead of late work",
        written(
            ("for t, obs, h in trips(0, 4, 1,", "for row, obs, h in trips(buf_value,"),
            (
                "store_obs(buf_obs, t, obs)",
                "reward_t = view(reward)\n        store_value(buf_value, 0, reward_t)",
            ),
            ("note(log, reward)", "note(log, row)"),
        ),
        "effects-conflict",
        nothing_against(late, "_head_waits"),
    ),
]


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is handed a log counts into it."""

    def step(action: Any, envs: Any, log: list[Any] | None = None) -> Any:
        if log is not None:
            log.append(1.0)
        return envs.step(action)

    monkeypatch.setitem(rollouts.BIND, "step", step)


@pytest.mark.parametrize("planted", MUTANTS, ids=lambda m: m.name)
def test_a_planted_fault_is_found(planted: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    found, codes = differs(planted.rollout)
    assert found == ""
    assert not planted.code or planted.code in codes
    with monkeypatch.context() as patch:
        planted.plant(patch)
        found, _ = differs(planted.rollout)
    assert found, "it passes"


DRAWING = """
@op(kind="graph", reads=["rng:torch"], writes=["rng:torch"], may_raise=False)
def drawing(x):
    a = torch.rand_like(x)
    b = a + x
    c = torch.tanh(b)
    d = c * 2.0
    e = torch.tanh(d)
    f = e + 1.0
    return f

def iteration(x):
    y = drawing(x)
    return y
"""


def test_a_compiled_graph_that_draws_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying it out draws as well, so the numbers of the training are others then."""

    def run() -> tuple[Any, bool]:
        program = parse(DRAWING)
        context = PassContext(options=Decision(compile=True))
        history = PassManager([Fuse()], verify=1).run(program, context)
        with torch.random.fork_rng(devices=[]), contextlib.closing(Runtime()) as runtime:
            torch.manual_seed(4)
            found = execute(program, {"x": torch.ones(3)}, {}, runtime)
        return found.tolist(), bool(history.rewrites["fuse"])

    def traced(function: Any, given: Any) -> Any:
        with torch.no_grad():
            return inductor.make_fx(function)(*given)

    monkeypatch.setattr(graphs, "built", traced)
    monkeypatch.setattr(graphs, "PAYS", float("inf"))
    plain, applied = run()
    assert not applied
    monkeypatch.setattr(fuse_graphs, "_blocked", lambda node: None)
    found, applied = run()
    assert applied
    assert found != plain
