"""Reads that a component does not declare: seen on the first call, and added with a remark."""

from __future__ import annotations

import inspect
import linecache
from typing import Any

import numpy as np
import pytest
import torch

import rose_compiler
from rose_compiler.frontend import states
from rose_compiler.ir.deps import Dependences
from rose_compiler.ir.program import is_call, op_of
from tests.samples import torch_ppo


class Reader:
    """A component that reads more than it declares."""

    def __init__(self) -> None:
        self.scale = torch.ones(2)
        self.shift = torch.ones(2)
        self.log: list[float] = []

    @rose_compiler.component(reads=["self.scale"], writes=["self.log"])
    def act(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(1.0)
        return x * self.scale + self.shift


def moves(reader, x):  # type: ignore[no-untyped-def]
    for _ in range(3):
        x = reader.act(x)
        reader.shift.add_(1)
    return x


def test_an_undeclared_read_is_added_with_a_remark() -> None:
    compiled = rose_compiler.compile(moves, tune=False)
    eager, reader = Reader(), Reader()
    x, y = torch.ones(2), torch.ones(2)
    for _ in range(3):
        x, y = moves(eager, x), compiled(reader, y)
        assert torch.equal(x, y)
    assert reader.log == eager.log
    text = compiled.explain()
    compiled.close()
    assert "observed-effect" in text
    assert "reads reader.shift" in " ".join(text.split())
    assert '"@reader.shift"' in compiled.ir("captured")


def test_what_was_added_is_told_once() -> None:
    compiled = rose_compiler.compile(moves, tune=False)
    compiled(Reader(), torch.ones(2))
    compiled.close()
    remarks = [r for r in compiled._log if r.code == "observed-effect"]
    assert [r.why for r in remarks] == [
        "`act` was seen to do more than was known: it reads reader.shift"
    ]


def test_what_reads_more_than_was_known_may_record_from_it(monkeypatch) -> None:
    """Were its inputs all that an operation records from, an undeclared parameter would be left."""
    monkeypatch.setattr(states, "uses", lambda node, signature, record: ("x",))
    compiled = rose_compiler.compile(moves, tune=False)
    reader = Reader()
    reader.scale.requires_grad_()
    compiled(reader, torch.ones(2))
    compiled.close()
    act = next(line for line in compiled.ir("captured").splitlines() if "@reader.shift" in line)
    assert 'records=["*"]' in act


class Hoards:
    """What its methods read, torch does not see: each declares to read nothing."""

    def __init__(self) -> None:
        self.table = np.zeros(2)
        self.whole = np.zeros(4)
        self.part = self.whole[2:]
        self.tensor = torch.zeros(2)
        self.level = 0.0
        self.history: list[float] = []
        self.known = {"last": 0.0}
        self.net = torch.nn.Linear(2, 1).double()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.0)
        self.out = torch.zeros(8, 7, dtype=torch.float64)

    @rose_compiler.component(reads=["self.net.params"], writes=[])
    def act(self, obs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.tanh(obs.sum(1, keepdim=True))

    @rose_compiler.component(reads=[], writes=["self.out"])
    def numpy_buffer(self, t: int) -> None:
        self.out[t, 0] = float(self.table[1])

    @rose_compiler.component(reads=[], writes=["self.out"])
    def overlapping_view(self, t: int) -> None:
        self.out[t, 1] = float(self.part[1])

    @rose_compiler.component(reads=[], writes=["self.out"])
    def tensor_by_numpy(self, t: int) -> None:
        self.out[t, 2] = float(self.tensor.numpy()[1])

    @rose_compiler.component(reads=[], writes=["self.out"])
    def attribute(self, t: int) -> None:
        self.out[t, 3] = self.level

    @rose_compiler.component(reads=[], writes=["self.out"])
    def items_of_a_list(self, t: int) -> None:
        self.out[t, 4] = self.history[-1]

    @rose_compiler.component(reads=[], writes=["self.out"])
    def items_of_a_dict(self, t: int) -> None:
        self.out[t, 5] = self.known["last"]

    @rose_compiler.component(reads=[], writes=["self.out"])
    def settings_of_an_optimizer(self, t: int) -> None:
        self.out[t, 6] = self.optimizer.param_groups[0]["lr"]


def hoarding(hoards, envs, obs):  # type: ignore[no-untyped-def]
    for t in range(8):
        action = hoards.act(obs)
        hoards.METHOD(t)
        hoards.table[1] = t + 1.0
        hoards.whole[3] = t + 1.0
        hoards.tensor[1] = t + 1.0
        hoards.level = t + 1.0
        hoards.history.append(t + 1.0)
        hoards.known["last"] = t + 1.0
        hoards.optimizer.param_groups[0]["lr"] = t + 1.0
        obs, _, _, _, _ = envs.step(action)
    return obs


READS = {
    "numpy_buffer": "hoards.table",
    "overlapping_view": "hoards.whole",
    "tensor_by_numpy": "hoards.tensor",
    "attribute": "hoards.level",
    "items_of_a_list": "hoards.history",
    "items_of_a_dict": "hoards.known",
    "settings_of_an_optimizer": "hoards.optimizer",
}


@pytest.mark.parametrize("method", READS)
def test_an_undeclared_read_that_torch_does_not_see_is_added(method: str) -> None:
    """Without it, what writes the state could go in front of what reads it."""
    text = inspect.getsource(hoarding).replace("METHOD", method)
    file, namespace = f"<hoarding {method}>", dict[str, Any]()
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), namespace)
    compiled = rose_compiler.compile(namespace["hoarding"], tune=False)
    hoards = Hoards()
    hoards.history.append(0.0)
    envs = torch_ppo.TorchShards(4, 2, dtype=torch.float64, limit=100)
    obs = torch.zeros(4, 3, dtype=torch.float64)
    compiled(hoards, envs, obs)
    program = compiled._last.unit.program
    compiled.close()
    node = next(n for n in program.nodes() if is_call(n) and op_of(n).name == method)
    assert READS[method] in {e.state for e in Dependences(program).effects(node)}
    added = [w for r in compiled._log if r.code == "observed-effect" for w in [r.why]]
    assert any(f"`{method}` was seen" in w and READS[method] in w for w in added), added


def test_what_nothing_writes_is_not_added() -> None:
    compiled = rose_compiler.compile(moves, tune=False)
    reader = Reader()
    reader.unused = [1.0]  # type: ignore[attr-defined]
    compiled(reader, torch.ones(2))
    compiled.close()
    assert "reader.unused" not in compiled.ir("captured")
