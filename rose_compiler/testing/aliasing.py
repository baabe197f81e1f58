"""Random functions, as text, whose statements read and write the same memory under many names."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

HEADER = """
import numpy as np
import torch


class Cell:
    def __init__(self, items):
        self.items = items
        self.k = 1

    def bump(self, by):
        self.k += by
        self.items[0] += by
        return self.k

    @property
    def total(self):
        return self.k + sum(self.items)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.scale = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.inner(x) * self.scale


class Sim:
    num_envs = 1
    native_async = False

    def __init__(self):
        self.x = torch.zeros(2)

    def shards(self):
        return [self]

    def step(self, action):
        self.x = self.x * 0.5 + action
        return self.x.clone(), float(self.x.sum()), False, False, {}


class World:
    def __init__(self):
        self.sim = Sim()
        torch.manual_seed(3)
        self.whole = torch.arange(8.0)
        self.left, self.right = self.whole[:4], self.whole[4:]
        self.array = self.right.numpy()
        self.cells = [Cell([1, 2]), Cell([3])]
        self.first = self.cells[0]
        self.items = self.first.items
        self.table = {"a": self.left, "b": [0]}
        self.kept = None
        self.slot = None
        self.net = Net()
        self.tied = Net()
        self.tied.inner.weight = self.net.inner.weight
        self.both = [*self.net.parameters(), self.tied.scale]
        self.optimizer = torch.optim.SGD(self.both, lr=0.1)

    def write(self, i, x):
        self.whole[i] = x
        return self

    def swap(self):
        self.first = self.cells[1]


def fill(target, x):
    target[0] = x


def total(values):
    return float(sum(v.sum() for v in values))


"""
_SGD = "torch.optim.SGD"
#: Statements that leave a number in ``{r}``.
READS = (
    "{r} = float(w.left[{i}])",
    "{r} = float(w.right.sum())",
    "{r} = float(w.whole[{i} + 4])",
    "{r} = float(w.array[{i}])",
    "{r} = float(view.sum())",
    "{r} = float(w.table['a'][{i}])",
    "{r} = w.first.k",
    "{r} = w.items[0] + len(w.items)",
    "{r} = w.cells[1].total",
    "{r} = sum(box) + len(box)",
    "{r} = w.table['b'][0]",
    "{r} = -1.0 if w.kept is None else float(w.kept.sum())",
    "{r} = -1 if w.slot is None else len(w.slot)",
    "{r} = float(w.net(ones).sum())",
    "{r} = float(w.tied.inner.weight.sum())",
    "{r} = total(p.data for p in w.net.parameters())",
    "{r} = total([p.grad for p in w.both if p.grad is not None])",
    "{r} = float(copy[{i}])",
    "{r} = float(torch.rand(1))",
    "{r} = float(np.random.rand())",
)
#: Statements that change something.
WRITES = (
    "w.left[{i}] = {x}",
    "w.right += {x}",
    "w.whole[{i}] = {x}",
    "w.array[{i}] = {x}",
    "view *= {x}",
    "view = w.right[1:]",
    "view = w.left",
    "copy = w.left.clone()",
    "copy[{i}] = {x}",
    "w.table['a'][{i}] = {x}",
    "w.first.bump({i})",
    "w.cells[{i} % 2].k = {x}",
    "w.cells[0].items.append({i})",
    "w.items[0] = {x}",
    "w.swap()",
    "w.write({i}, {x})",
    "fill(w.right, {x})",
    "fill(box, {i})",
    "box = w.items",
    "box = [{i}]",
    "box.append({i})",
    "w.table['b'] = box",
    "w.table['b'][0] = {i}",
    "w.kept = view",
    "w.kept = w.whole[2:6]",
    "w.kept = None",
    "w.slot = box",
    "w.slot = [{i}, {i}]",
    "w.net.scale.data += {x}",
    "w.tied.inner.weight.data[0, 0] = {x}",
    "w.net(ones).sum().backward()",
    "(w.tied(ones) ** 2).sum().backward()",
    "w.optimizer.step()",
    "w.optimizer.zero_grad()",
    "w.net.zero_grad()",
    "for p, q in zip(w.net.parameters(), w.tied.parameters()): q.data.mul_(0.5).add_(p.data)",
    "w.tied.load_state_dict(w.net.state_dict())",
)


_HALF = 'with torch.autocast("cpu", dtype=torch.bfloat16): '
#: Statements of one region of `autocast`, which casts a weight once; the last leaves a number.
HALF = (
    _HALF + "{r} = float(w.net(ones).sum())",
    _HALF + "{r} = float(w.net(ones).sum()); w.tied.inner.weight.data += {x}",
    _HALF + "w.net(ones).sum().backward(); w.optimizer.step(); {r} = float(w.tied(ones).sum())",
    _HALF + "w.net.inner.weight.data *= {x}; {r} = float(w.net(ones).sum() + w.tied(ones).sum())",
    _HALF + "{r} = float(w.net(ones).sum()); w.swap(); {r} += float(w.net(ones * {x}).sum())",
)


@st.composite
def functions(draw: Any) -> str:
    """The text of a module with a function ``main(w, ones)`` of many small statements."""
    lines = ["box = [5]", "view = w.whole[1:3]", "copy = w.left.clone()"]
    results: list[str] = []
    kinds = (READS, WRITES, HALF) if draw(st.integers(0, 3)) == 3 else (READS, WRITES)

    def straight(count: int, indent: str) -> None:
        for _ in range(count):
            form = draw(st.sampled_from(draw(st.sampled_from(kinds))))
            name = f"r{len(results)}"
            if "{r}" in form:
                results.append(name)
            i = draw(st.sampled_from(("0", "1", "2", "t" if indent else "3")))
            text = form.replace("{r}", name).replace("{i}", i)
            lines.append(indent + text.replace("{x}", str(draw(st.integers(2, 9)))))

    straight(draw(st.integers(2, 8)), "")
    if draw(st.booleans()):
        lines.append("for t in range(3):")
        straight(draw(st.integers(2, 6)), "    ")
    straight(draw(st.integers(2, 8)), "")
    lines.append(f"return [{', '.join([*results, 'sum(box)', 'float(view.sum())'])}]")
    body = "\n".join(f"    {line}" for line in lines)
    return f"{HEADER}def main(w, ones):\n{body}\n"


@st.composite
def trainings(draw: Any) -> str:
    """The text of a module with a function ``main(w, ones)`` that is a whole training: a loop
    over iterations that steps a simulator and trains, with arms that first run on a later trip."""
    lines = ["box = [5]", "view = w.whole[1:3]", "copy = w.left.clone()", "log = []", "late = None"]

    def straight(indent: str) -> None:
        for _ in range(draw(st.integers(1, 4))):
            form = draw(st.sampled_from(READS if draw(st.booleans()) else WRITES))
            text = form.replace("{r}", "r")
            text = text.replace("{i}", draw(st.sampled_from(("0", "1", "t % 3"))))
            lines.append(indent + text.replace("{x}", str(draw(st.integers(2, 9)))))
            if "{r}" in form:
                lines.append(f"{indent}log.append(r)")

    def arm(indent: str) -> None:
        test = draw(st.sampled_from(("t > 2", "t % 3 == 1", "t == 4", "len(log) > 9", "late")))
        lines.append(f"{indent}if {test}:")
        straight(indent + "    ")
        more = (
            "obs = w.sim.step(obs * 0.5)[0]",
            "late = t",
            "print(t, 'late')",
            "late = obs.sum()",
        )
        for extra in draw(st.lists(st.sampled_from(more), max_size=2)):
            lines.append(f"{indent}    {extra}")
        if draw(st.booleans()):
            lines.append(f"{indent}else:")
            straight(indent + "    ")

    if draw(st.booleans()):  # a rollout of several steps, which something can run beside
        lines += ["obs = ones[0]", "for t in range(6):", "    for k in range(3):"]
        straight("        ")
        lines.append("        obs, reward, _, _, _ = w.sim.step(obs * 0.5 + k)")
        straight("        ")
    else:
        lines.append("for t in range(8):")
        lines.append("    obs, reward, _, _, _ = w.sim.step(ones[0])")
    for _ in range(draw(st.integers(2, 4))):
        (arm if draw(st.booleans()) else straight)("    ")
    lines.append("    w.net(obs).sum().backward()")
    lines.append("    w.optimizer.step()")
    lines.append("    log.append((reward, float(obs.sum())))")
    straight("")
    lines.append("return [log, sum(box), float(view.sum()), late]")
    body = "\n".join(f"    {line}" for line in lines)
    header = HEADER.replace(_SGD, draw(st.sampled_from((_SGD, "torch.optim.Adam"))))
    return f"{header}def main(w, ones):\n    t = 0\n{body}\n"


def arguments(module: types.ModuleType) -> Callable[[], tuple[Any, ...]]:
    """What makes equal, fresh arguments for ``main``."""
    return lambda: (module.World(), torch.ones(1, 2))
