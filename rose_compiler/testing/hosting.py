"""Random iterations that call a component in a host of its own, as source.

:func:`functions` writes a module with a function ``iteration(it, policy, opt, data, scorer, log)``;
:func:`world` makes what it is called with, around a live hosted :class:`Scorer`.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from rose_compiler.testing.program_pool import Draw


class Scorer:
    """Scores the parameters that were handed over last, and takes its time at random."""

    def __init__(self) -> None:
        self.net = nn.Linear(3, 2)
        # their sum is not zero: where it is, what a fault adds may cancel
        self.inputs = torch.linspace(-1, 2, 12).reshape(4, 3)
        self.calls = 0
        self.draw = random.Random(0)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over parameters."""
        self.net.load_state_dict(state)

    def score(self, scale: float) -> float:
        """A number that hangs on the parameters and on how many calls there were."""
        time.sleep(self.draw.choice((0, 0, 0.001, 0.002)))
        self.calls += 1
        with torch.no_grad():
            return float(self.net(self.inputs).sum()) * scale + self.calls


_TRAIN = """for i in range(2):
    loss = (policy(data[i]) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()"""
_PLAIN = (
    _TRAIN,
    "policy.weight.data.mul_(0.5)",
    "log.append(float(torch.rand(1)))",
    "policy.bias.data.add_(torch.rand(2))",
    "log.append(float(policy.weight.detach().sum()))",
    "scorer.publish(policy)",
    "scorer.publish(policy)",
)


@st.composite
def functions(draw: Draw) -> str:
    """The text of a module with a function ``iteration(it, policy, opt, data, scorer, log)``."""
    lines, scores = ["scorer.publish(policy)"], 0
    for _ in range(draw(st.integers(4, 9))):
        kind = draw(st.integers(0, 3))
        if kind == 0:
            scores += 1
            lines.append(f"s{scores} = scorer.score({draw(st.sampled_from((0.5, 1.0, 2.0)))})")
        elif kind == 1 and scores:
            lines.append(f"log.append(s{draw(st.integers(1, scores))})")
        elif kind == 2 and draw(st.integers(0, 2)) == 0:
            inner = ["scorer.publish(policy)"] * draw(st.integers(0, 1)) + ["c = scorer.score(3.0)"]
            inner += [draw(st.sampled_from(("log.append(c)", "log.append((it, c))")))]
            lines.append("if it % 2 == 0:\n" + _indented(inner))
        else:
            lines.append(draw(st.sampled_from(_PLAIN)))
    lines += [f"log.append(s{k})" for k in range(1, scores + 1)]
    head = "def iteration(it, policy, opt, data, scorer, log):"
    return f"import torch\n\n\n{head}\n{_indented(lines)}\n"


def _indented(lines: list[str]) -> str:
    return "\n".join("    " + row for line in lines for row in line.splitlines())


def world(scorer: Any) -> tuple[Any, ...]:
    """Policy, optimizer, data, the hosted scorer and a log, from one seed."""
    scorer.ready()  # in a thread, it draws from this process's generator as it is built
    torch.manual_seed(3)
    policy = nn.Linear(3, 2)
    opt = torch.optim.SGD(policy.parameters(), lr=0.05)
    return policy, opt, torch.randn(2, 8, 3), scorer, []


def seen(given: tuple[Any, ...]) -> Any:
    """What an iteration leaves behind, to be compared."""
    policy, _, _, _, log = given
    params = [p.detach().flatten().tolist() for p in policy.parameters()]
    return params, list(log), torch.get_rng_state().tolist()
