"""Random off-policy updates, as text: losses of an actor that go through a critic whose own update
drops what they add to its gradients, and what may look at these in between.

:func:`functions` writes a module with a function ``main(a, xs, n)``.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from rose_compiler.testing.program_pool import Draw

HEADER = """
import torch
from torch import nn


class Agent:
    def __init__(self, shared):
        torch.manual_seed(1)
        self.actor = nn.Linear(3, 2)
        self.critic = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        self.temp = nn.Parameter(torch.ones(1))
        of_critic = [*self.critic.parameters()]
        if shared == 1:
            of_critic.append(self.actor.bias)
        self.c_opt = torch.optim.Adam(of_critic[shared == 2 :], lr=0.01)
        self.a_opt = torch.optim.SGD(self.actor.parameters(), lr=0.01)
        self.t_opt = torch.optim.Adam([self.temp], lr=0.01)
        self.seen = []
        self.kept = None


"""
_CRITIC = (
    "seen = torch.cat([x, a.actor(x).detach()], 1)\n"
    "l1 = (a.critic(seen) - x.sum(1, keepdim=True)).square().mean()"
)
_ACTOR = "l2 = -a.critic(torch.cat([x, torch.tanh(a.actor(x))], 1)).mean()"
#: Updates: a loss, then what is done with it.
UPDATES = (
    (_CRITIC, "a.c_opt.zero_grad()", "l1.backward()", "a.c_opt.step()"),
    (_CRITIC, "a.c_opt.zero_grad()", "l1.backward()", "a.c_opt.step()"),
    (_ACTOR, "a.a_opt.zero_grad()", "l2.backward()", "a.a_opt.step()"),
    (_ACTOR, "a.a_opt.zero_grad()", "l2.backward()", "a.a_opt.step()"),
    (_ACTOR, "l2.backward()"),
    ("l3 = (a.actor(x) * a.temp).mean()", "a.t_opt.zero_grad()", "l3.backward()", "a.t_opt.step()"),
)
#: What may stand between: some of it looks at gradients, or leaves the trip.
BETWEEN = (
    "nn.utils.clip_grad_norm_(a.critic.parameters(), 0.5)",
    "a.seen.append([None if p.grad is None else p.grad.clone() for p in a.critic.parameters()])",
    "a.c_opt.zero_grad(set_to_none=False)",
    "a.kept = a.critic[0].weight.grad",
    "a.seen.append(a.temp.grad)",
    "a.critic.zero_grad()",
    "if k == 2:\n    break",
    "if k % 2:\n    continue",
    "if k % 2:\n    a.c_opt.zero_grad()",
)
HEADS = (
    *("for k in range(n):",) * 3,
    "for k in range(3, 3 + 2 * n, 2):",
    "for k in range(n, 0, -1):",
    "for k, x in enumerate(xs[:n]):",
)


@st.composite
def functions(draw: Draw) -> str:
    """The text of a module with a function ``main(a, xs, n)``."""
    body: list[str] = []
    for number in range(draw(st.integers(1, 3))):
        lines = list(draw(st.sampled_from(UPDATES)))
        if not draw(st.integers(0, 3)):
            lines.insert(draw(st.integers(0, len(lines))), draw(st.sampled_from(BETWEEN)))
        if not draw(st.integers(0, 6)):
            lines.pop(draw(st.integers(1, len(lines) - 1)))
        inside = draw(st.integers(0, 9))
        if inside == 8:
            lines = ["if k % 2 == 0:", *_indented(lines)]
        elif inside == 9:
            lines = [f"for j{number} in range({draw(st.integers(0, 3))}):", *_indented(lines)]
        body += lines
    lines = ["x = xs[0]", "l1 = l2 = l3 = None", draw(st.sampled_from(HEADS))]
    lines += _indented([*body, "x = x * 1.01"])
    shared = f"SHARED = {draw(st.sampled_from((0, 0, 1, 2)))}\nTRIPS = {draw(st.integers(1, 5))}"
    text = "\n".join(_indented([*lines, "return x"]))
    return f"{HEADER}{shared}\n\n\ndef main(a, xs, n):\n{text}\n"


def _indented(lines: list[str]) -> list[str]:
    return ["    " + row for line in lines for row in line.splitlines()]


def arguments(module: types.ModuleType) -> Callable[[], tuple[Any, ...]]:
    """What makes equal, fresh arguments for ``main``."""

    def make() -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(2)
        xs = [torch.randn(4, 3, generator=generator) for _ in range(6)]
        return module.Agent(module.SHARED), xs, module.TRIPS

    return make
