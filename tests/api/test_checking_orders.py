"""Checking mode runs the schedule on its lanes too: races and wrong orders are told with lines."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

import rose_compiler
from rose_compiler.api.worlds import Unlike, World, difference
from rose_compiler.base.decision import Decision
from rose_compiler.base.errors import VerifyError
from rose_compiler.ir.deps import Dependences
from rose_compiler.sim import TorchPendulum
from tests.samples import torch_ppo

pytestmark = pytest.mark.usefixtures("one_thread")

# the package has a function of that name
codegen_schedule = sys.modules["rose_compiler.codegen.schedule"]


class Watched(torch_ppo.TorchShards):
    """A simulator whose state can be looked at."""

    @rose_compiler.component(reads=["self"], writes=[])
    def peek(self) -> torch.Tensor:
        return torch.cat([s.simulator.state for s in self.parts]).sum()


class Policy:
    def __init__(self) -> None:
        self.gain = torch.full((3, 1), 0.1, dtype=torch.float64)
        self.seen = torch.zeros(8, dtype=torch.float64)
        self.total = torch.zeros((), dtype=torch.float64)
        self.lock: Any = None

    @rose_compiler.component(reads=["self.gain"], writes=[])
    def act(self, obs: torch.Tensor) -> torch.Tensor:
        return obs @ self.gain

    @rose_compiler.component(reads=[], writes=["self.seen"])
    def note(self, t: int, value: torch.Tensor) -> None:
        self.seen[t] = value

    @rose_compiler.component(reads=[], writes=["self.total"])
    def add(self, reward: torch.Tensor) -> None:
        self.total.add_(reward.sum())

    @rose_compiler.component(reads=[], writes=["host"])
    def log(self, path: str, t: int) -> None:
        with open(path, "a") as file:
            file.write(f"{t}\n")

    @rose_compiler.component(reads=[], writes=["self.gain"])
    def sharpen(self, value: torch.Tensor) -> None:
        self.gain.mul_(1 + 1e-3 * float(value.abs()))


def rollout(policy, envs, obs):  # type: ignore[no-untyped-def]
    for _ in range(8):
        action = policy.act(obs)
        obs, reward, _, _, _ = envs.step(action)
        policy.add(reward)
        policy.sharpen(reward.sum())
    return obs


def peeking(policy, envs, obs):  # type: ignore[no-untyped-def]
    for t in range(8):
        action = policy.act(obs)
        obs, reward, _, _, _ = envs.step(action)
        policy.note(t, envs.peek())
        policy.add(reward)
    return obs


def parts(tmp_path: Any, fn: Any = rollout) -> tuple[Any, Policy, Watched, torch.Tensor]:
    path = tmp_path / "decision.json"
    Decision(late="shadow", lanes="thread").save(path)
    compiled = rose_compiler.compile(fn, tune=path, check=True)
    envs = Watched(8, 4, dtype=torch.float64, limit=100)
    obs = torch.cat([TorchPendulum.observe(s.simulator, s.simulator.state) for s in envs.parts])
    return compiled, Policy(), envs, obs


def several(compiled: Any, policy: Policy, envs: Watched, obs: torch.Tensor) -> None:
    for _ in range(5):
        obs = compiled(policy, envs, obs)


def checked(compiled: Any) -> int:
    return int(compiled._last.unit.orders_checked)


def test_lanes_are_run_and_compared_and_training_goes_on_unchanged(tmp_path: Any) -> None:
    compiled, policy, envs, obs = parts(tmp_path)
    _, other, twins, same = parts(tmp_path)
    for _ in range(3):
        obs = compiled(policy, envs, obs)
        same = rollout(other, twins, same)
    assert checked(compiled) == 2, compiled.explain()
    assert torch.equal(obs, same)
    assert torch.equal(policy.gain, other.gain)
    assert torch.equal(policy.seen, other.seen)
    compiled.close()


def test_a_whole_iteration_of_ppo_is_compared(tmp_path: Any) -> None:
    path = tmp_path / "decision.json"
    Decision(groups=4, late="shadow", defer=True, lanes="thread").save(path)
    compiled = rose_compiler.compile(torch_ppo.iteration, tune=path, check=True)
    setup = torch_ppo.Setup()
    setup.run(compiled, 3)
    assert checked(compiled) == 2, compiled.explain()
    assert "not checked" not in compiled.explain()
    compiled.close()


def test_a_race_is_told_with_the_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emitted code that waits for values only lets ``peek`` run beside the step it follows."""
    compiled, policy, envs, obs = parts(tmp_path, peeking)
    obs = compiled(policy, envs, obs)

    class Careless(Dependences):
        def edges(self, graph: Any) -> Any:
            return tuple(e for e in super().edges(graph) if e.kind == "value")

    monkeypatch.setattr(codegen_schedule, "Dependences", Careless)
    with pytest.raises(VerifyError) as found:
        several(compiled, policy, envs, obs)
    error = found.value
    assert error.code == "check-order-differs"
    assert error.where is not None
    assert error.where.file == __file__
    assert error.where.source.strip() in (
        "policy.note(t, envs.peek())",
        "policy.sharpen(reward.sum())",
        "obs, reward, _, _, _ = envs.step(action)",
        "action = policy.act(obs)",
    )
    compiled.close()


def test_a_wrong_order_is_told(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost dependence between trips: the program in its own order is right, the schedule not."""
    compiled, policy, envs, obs = parts(tmp_path)
    obs = compiled(policy, envs, obs)
    edges = Dependences.edges
    monkeypatch.setattr(
        Dependences,
        "edges",
        lambda self, graph: tuple(
            e for e in edges(self, graph) if "policy.gain" not in str(getattr(e, "state", ""))
        ),
    )
    with pytest.raises(VerifyError) as found:
        compiled(policy, envs, obs)
    assert found.value.code == "check-order-differs"
    assert "its order is wrong" in str(found.value)
    assert found.value.where is not None
    compiled.close()


def test_what_can_not_be_copied_is_said(tmp_path: Any) -> None:
    compiled, policy, envs, obs = parts(tmp_path)
    policy.lock = threading.Lock()
    for _ in range(2):
        obs = compiled(policy, envs, obs)
    assert checked(compiled) == 0
    text = " ".join(compiled.explain().split())
    assert "the order of the lanes was not checked: copying raises TypeError" in text
    compiled.close()


def printing(policy, envs, obs):  # type: ignore[no-untyped-def]
    for t in range(8):
        action = policy.act(obs)
        obs, reward, _, _, _ = envs.step(action)
        print(t, float(reward.sum()))
        policy.add(reward)
    return obs


def test_printing_is_done_once(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    compiled, policy, envs, obs = parts(tmp_path, printing)
    for _ in range(2):
        obs = compiled(policy, envs, obs)
    assert checked(compiled) == 1, compiled.explain()
    assert len(capsys.readouterr().out.splitlines()) == 2 * 8
    compiled.close()


def writing(policy, envs, obs, path):  # type: ignore[no-untyped-def]
    for t in range(8):
        action = policy.act(obs)
        obs, reward, _, _, _ = envs.step(action)
        policy.add(reward)
        policy.log(path, t)
    return obs


def test_files_are_written_once(tmp_path: Any) -> None:
    compiled, policy, envs, obs = parts(tmp_path, writing)
    path = tmp_path / "log.txt"
    for _ in range(2):
        obs = compiled(policy, envs, obs, str(path))
    assert checked(compiled) == 0
    assert len(path.read_text().splitlines()) == 2 * 8
    assert "writes to the outside" in " ".join(compiled.explain().split())
    compiled.close()


class Shares:
    """A copy that keeps the original's memory."""

    def __init__(self) -> None:
        self.data = torch.zeros(3)

    def __deepcopy__(self, memo: Any) -> Shares:
        made = Shares()
        made.data = self.data
        memo[id(self.data)] = self.data
        return made


def test_copies_have_memory_of_their_own_shared_in_the_same_places() -> None:
    class Holder:
        def __init__(self) -> None:
            self.whole = torch.zeros(4)
            self.half = self.whole[:2]
            self.net = torch.nn.Linear(2, 2)
            self.net(torch.ones(1, 2)).sum().backward()

    holder = Holder()
    made = World({}, {"holder": holder}).copied().states["holder"]
    assert difference(holder, made, "holder") is None
    made.half += 1
    assert made.whole.tolist() == [1, 1, 0, 0]
    assert holder.whole.tolist() == [0, 0, 0, 0]
    made.net.weight.grad += 1
    found = difference(holder, made, "holder")
    assert found is not None
    with pytest.raises(Unlike, match=r"a copy shares `shares\.data`"):
        World({}, {"shares": Shares()}).copied()
    views: dict[str, Any] = {"a": np.zeros(4), "net": torch.nn.Linear(2, 2)}
    views["b"] = views["a"][1:]
    views["c"] = torch.from_numpy(views["b"])[::2]
    views["d"] = views["net"].weight.data.t()
    made = World({}, views).copied().states
    made["c"][1] = 7
    assert made["a"].tolist() == [0, 0, 0, 7]
    assert views["a"].tolist() == [0, 0, 0, 0]
    made["d"].fill_(3)
    assert (made["net"].weight == 3).all()
    assert not (views["net"].weight == 3).any()
    with pytest.raises(Unlike, match="has a graph"):
        World({}, {"loss": views["net"](torch.ones(2))}).copied()
