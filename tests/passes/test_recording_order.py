"""Operations that record gradients from one tensor keep their order, in every pass.

Backward adds gradients up in the reverse of the order of recording, so each of these programs has
other bits when a pass moves, cuts or puts on another thread what records. Each is also run with the
rule of that pass taken away, to show that it would notice.
"""

# ruff: noqa: E501 (programs as text have long lines)

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.ir import facts, verify_schedule
from rose_compiler.ir.interp import run
from rose_compiler.ir.parse import parse
from rose_compiler.ir.recorded import Recorded
from rose_compiler.passes import defer, lanes, split, tile_batch
from rose_compiler.passes.base import PassContext
from rose_compiler.passes.defer import Defer
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.split import Split
from tests.loops import actor_critic, harness
from tests.loops.bits import differing
from tests.loops.envs import Reach
from tests.loops.harness import in_shards

ROWS = 8


def eager(fn: Any) -> Any:
    """A compiler that does nothing."""
    return fn


def no_order(*_: Any) -> Iterator[Any]:
    """No operation has to keep its place for what it records."""
    return iter(())


def nothing(*_: Any) -> bool:
    """No operation records anything."""
    return False


class Shard:
    """Rows of a simulator that torch can differentiate."""

    native_async = False

    def __init__(self, first: int, size: int) -> None:
        self.num_envs = size
        self.x = torch.linspace(-1, 1, size * 4).reshape(size, 4) + first

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any, Any, Any]:
        self.x = torch.tanh(self.x.detach() * 0.9 + action) * 3
        ended = torch.zeros(len(self.x), dtype=torch.bool)
        return self.x, self.x.square().sum(1), ended, ended, {}


class Simulator:
    """The whole batch of it."""

    rose_fresh_outputs = True

    def __init__(self) -> None:
        self.size = ROWS // 2
        self.parts = [Shard(k, self.size) for k in range(2)]

    def shards(self) -> list[Shard]:
        return self.parts

    def step(self, action: torch.Tensor) -> tuple[Any, ...]:
        return self.merge(
            [s.step(a) for s, a in zip(self.parts, action.split(self.size), strict=True)]
        )

    def merge(self, results: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        return (*(torch.cat([r[k] for r in results]) for k in range(4)), {})


def through_the_step(envs: Any, model: Any, critic: Any, optimizer: Any, obs: Any) -> Any:
    """The simulator records, and ``model`` records beside it."""
    loss = torch.zeros(())
    for _ in range(4):
        action = model(obs)
        next_obs, reward, _, _, _ = envs.step(action)
        beside = model(obs * 3).cos() * critic(obs)
        loss = loss + reward.mean() + beside.mean()
        obs = next_obs.detach()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return obs, loss.detach()


@rose_compiler.component(reads=["model.params"], writes=[], batch={"obs": 0, "return.0": 0})
def act(model: Any, obs: torch.Tensor) -> torch.Tensor:
    return model(obs)


@rose_compiler.component(reads=[], writes=[], batch={"action": 0, "return.0": 0})
def plain(action: torch.Tensor) -> np.ndarray:
    return action.detach().numpy()


def acts_by_rows(envs: Any, model: Any, critic: Any, optimizer: Any, obs: Any) -> Any:
    """A policy that is promised to work row by row, and records."""
    loss = torch.zeros(())
    for _ in range(3):
        action = act(model, obs)
        next_obs, reward, _, _, _ = envs.step(plain(action))
        reward = torch.as_tensor(reward, dtype=torch.float32)
        loss = loss + (action * reward.unsqueeze(1) + critic(obs)).mean()
        obs = torch.as_tensor(next_obs)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return obs, loss.detach()


def trained(fn: Any, compile: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Everything that three iterations leave."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4 if fn is through_the_step else 2)
    critic = nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.1)
    envs = Simulator() if fn is through_the_step else in_shards([Reach] * ROWS)
    obs = torch.randn(ROWS, 4)
    if fn is acts_by_rows:
        obs = torch.as_tensor(envs.reset(seed=3)[0])
    step, left = compile(fn), []
    for _ in range(3):
        obs, loss = step(envs, model, critic, optimizer, obs)
        left += [obs.clone(), loss]
    for p in (*model.parameters(), *critic.parameters()):
        left += [p.detach().clone(), p.grad.clone()]
    return left


LATE = Decision(late="shadow", lanes="thread")
CONTEXT = PassContext(options=Decision(defer=True), numerics="bitwise")
TILED = Decision(groups=2, lanes="thread")


def compiled(fn: Any, decision: Decision, folder: Path) -> tuple[list[torch.Tensor], Any]:
    decision.save(folder / "decision.json")
    made = []

    def compile(fn: Any) -> Any:
        made.append(rose_compiler.compile(fn, numerics="bitwise", tune=folder / "decision.json"))
        return made[-1]

    left = trained(fn, compile)
    remarks = made[0]._schedule().history.remarks
    made[0].close()
    return left, remarks


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_step_that_records_stays_on_the_thread_of_the_rest(tmp_path, monkeypatch) -> None:
    want = trained(through_the_step, eager)
    found, remarks = compiled(through_the_step, LATE, tmp_path)
    assert same(want, found)
    assert {r.pass_name for r in remarks.missed() if r.code == "grad-graph"} >= {"late", "place"}

    for module in (lanes, verify_schedule):
        monkeypatch.setattr(module, "records", nothing)
    monkeypatch.setattr(Recorded, "orders", no_order)
    found, remarks = compiled(through_the_step, LATE, tmp_path)
    assert "late" in {r.pass_name for r in remarks.applied()}
    assert not same(want, found)


def test_a_policy_that_records_is_not_cut_into_shards(tmp_path, monkeypatch) -> None:
    want = trained(acts_by_rows, eager)
    found, remarks = compiled(acts_by_rows, TILED, tmp_path)
    assert same(want, found)
    assert [r.code for r in remarks.missed() if r.pass_name == "tile_batch"] == ["grad-graph"]

    monkeypatch.setattr(tile_batch, "records", nothing)
    found, remarks = compiled(acts_by_rows, TILED, tmp_path)
    assert "tile_batch" in {r.pass_name for r in remarks.applied()}
    assert not same(want, found)


def test_late_work_keeps_the_order_of_recording(monkeypatch) -> None:
    script = actor_critic.SCRIPTS[0]
    want = harness.eager(script, in_shards).bits
    with harness.compiled(script, LATE) as found:
        assert "late" in harness.applied(found.compiled[0])
    assert not differing(want, found.bits)

    monkeypatch.setattr(Recorded, "orders", no_order)
    with harness.compiled(script, LATE) as found:
        assert "late" in harness.applied(found.compiled[0])
    assert differing(want, found.bits)


SPLIT = """
@op(kind="graph", reads=["w"], writes=[], records=["obs", "w"], results=2)
def act(obs, w):
    h = torch.nn.functional.linear(obs, w)
    first = torch.Tensor.sin(h)
    action = torch.Tensor.tanh(h)
    last = torch.Tensor.cos(h)
    late = first * last
    return action, late

@op(kind="step", reads=["envs"], writes=["envs"], attributes={"step": {"env": "envs", "action": "action"}})
def step(action, envs): ...

@op(reads=["losses"], writes=["losses"], records=["*"], results=0)
def store(losses, action, late): ...

def rollout(obs0, *, agent, envs, losses):
    w = state(agent, "weight")
    for t, obs in trips(0, 3, 1, obs=obs0):
        action, late = act(obs, w)
        store(losses, action, late)
        next_obs = step(action, envs)
        yield next_obs
    return trips.obs
"""
DEFER = """
@op(kind="graph", reads=[], writes=[], batch={"obs": 0, "return.0": 0}, exact=True, may_raise=False)
def critic(obs):
    value = torch.nn.functional.tanh(obs)
    return value

@op(kind="step", reads=["envs"], writes=["envs"], attributes={"step": {"env": "envs", "action": "obs"}})
def step(obs, envs): ...

@op(reads=["losses", "w"], writes=["losses"], records=["w"], results=0)
def store(losses, w, value): ...

@op(reads=["bonuses", "w"], writes=["bonuses"], records=["w"], results=0)
def bonus(bonuses, w, obs): ...

def rollout(obs0, *, agent, envs, losses, bonuses):
    w = state(agent, "weight")
    for t, obs in trips(0, 3, 1, obs=obs0):
        with no_grad():
            value = critic(obs)
        store(losses, w, value)
        bonus(bonuses, w, obs)
        next_obs = step(obs, envs)
        yield next_obs
    return trips.obs
"""
BIND = {
    "step": lambda action, envs: envs(action),
    "store": lambda losses, *values: losses.append(values[0] * values[1]),
    "bonus": lambda bonuses, w, obs: bonuses.append(w * obs.cos()),
}


def gradients(text: str, one: Any = None, context: PassContext = CONTEXT) -> tuple[Any, Any]:
    """What backward leaves after a program, rewritten by a pass, has run; and the remarks."""
    program = parse(text, BIND)
    for node in program.nodes():
        if node.name == "obs":
            facts.put(node, spec=facts.Spec("tensor", "Tensor", (3, 3), "float32", "cpu"))
    remarks = None
    if one is not None:
        remarks = PassManager([one], verify=2).run(program, context).remarks
    torch.manual_seed(0)
    agent = nn.Linear(3, 3, bias=False)
    objects: dict[str, Any] = {"agent": agent, "envs": lambda x: x.detach().sin() * 4}
    objects |= {name: [] for name in ("losses", "bonuses") if name in program.state_params}
    run(program, {"obs0": torch.randn(3, 3)}, objects)
    recorded = [*objects["losses"], *objects.get("bonuses", ())]
    torch.stack(recorded).sum().backward()
    return agent.weight.grad, remarks


@pytest.mark.parametrize(
    ("text", "one", "module"), [(SPLIT, Split(), split), (DEFER, Defer(), defer)]
)
def test_what_records_is_neither_split_nor_deferred(text, one, module, monkeypatch) -> None:
    want, _ = gradients(text)
    found, remarks = gradients(text, one)
    assert torch.equal(want, found)
    assert [r.code for r in remarks.missed()] == ["grad-graph"]

    monkeypatch.setattr(module, "records", nothing)
    monkeypatch.setattr(Recorded, "orders", no_order)
    found, remarks = gradients(text, one)
    assert one.name in {r.pass_name for r in remarks.applied()}
    assert not torch.equal(want, found)
