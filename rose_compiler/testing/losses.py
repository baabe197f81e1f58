"""Random updates of a policy and a critic, as text: losses, each with a ``backward`` behind it.

:func:`functions` writes a module with a function ``main(net, opt, cfg, obs, action, old, log)``;
:func:`as_traced` lets what Inductor would compile run as it was traced, since compiling takes
seconds. All is float64, so that another order of rounding is told from another computation.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from rose_compiler.runtime import gradients, graphs
from rose_compiler.testing.program_pool import Draw

HEADER = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.actor = nn.Linear(3, 2)
        self.critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.logstd = nn.Parameter(torch.zeros(2))
        self.double()

    def value(self, obs):
        return self.critic(obs).squeeze(-1)

    def evaluate(self, obs, action):
        mean = self.actor(obs)
        dist = torch.distributions.Normal(mean, self.logstd.exp().expand_as(mean))
        return dist.log_prob(action).sum(-1), dist.entropy().sum(-1), self.value(obs)


def decayed(net):
    return sum(p.pow(2).sum() for p in net.critic.parameters())


"""
#: Statements that make what a loss is made of, each with the terms that it allows.
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("mean = net.actor(o)", ("mean.pow(2).mean()", "F.mse_loss(mean, a)", "(mean * a).sum()")),
    (
        "value = net.value(o)",
        (
            "(value - q).pow(2).mean()",
            "F.smooth_l1_loss(value, q)",
            "value.clamp(-1, cfg.clip).mean()",
        ),
    ),
    (
        "logp, entropy, v = net.evaluate(o, a)",
        ("-(logp * q).mean()", "-cfg.entropy * entropy.mean()", "(v - q).pow(2).mean()"),
    ),
    (
        "ratio = (net.evaluate(o, a)[0] - q).exp()",
        ("torch.max(-ratio, -ratio.clamp(1 - cfg.clip, 1 + cfg.clip)).mean()", "ratio.log().sum()"),
    ),
    (
        "with torch.no_grad():\n    target = net.value(o + 1) * 0.9",
        ("(net.value(o) - target).pow(2).mean()", "(net.logstd.sum() * target).mean()"),
    ),
    ("noise = torch.randn(len(o), 2, dtype=o.dtype)", ("(net.actor(o) + noise).pow(2).mean()",)),
    ("kept = torch.where(q > 0, q, -q)", ("(net.value(o) * kept).mean()",)),
    ("pass", ("decayed(net)", "net.logstd.exp().sum()", "(net.actor(o) * net.logstd).sum()")),
)
#: Statements between a loss and its ``backward``.
BETWEEN = (
    "opt.zero_grad()",
    "opt.zero_grad()",
    "opt.zero_grad()",
    "log.append(loss.item())",
    "log.append(float(loss.detach() * 2))",
    "log.append(float(torch.rand(())))",
    "kl = loss.detach() + 1; log.append(float(kl))",
    "log.append(float(net.logstd.sum()))",
    "log.append(float(net.logstd.grad.sum()) if net.logstd.grad is not None else 0.0)",
    "extra = loss * 2; log.append(float(extra))",
    "net.logstd.data.mul_(0.5)",
    "log.append(float(cfg.clip))",
    "cfg.clip *= 0.75",
    "log.append(float(q.sum())); q = q * 0.5",
    "old += 0.125",
)
#: Statements behind a ``backward``.
BEHIND = (
    "opt.step()",
    "opt.step()",
    "opt.step()",
    "nn.utils.clip_grad_norm_(net.parameters(), 0.5)",
    "log.append(loss.item())",
    "twice = loss * 2; log.append(twice.item())",
    "log.append(float(net.logstd.grad.sum()) if net.logstd.grad is not None else 0.0)",
    "for p in net.actor.parameters(): p.data.mul_(0.75)",
    "net.logstd.data.add_(0.125)",
    "cfg.clip *= 0.5",
    "opt.param_groups[0]['lr'] *= 0.75",
    "opt.zero_grad()",
    "opt.zero_grad(set_to_none=False)",
    "net.logstd.grad = None",
    "log.append(float(torch.rand(())))",
)
_HEADS = (
    ("for k in range(2):", "o, a, q = obs, action, old"),
    ("for k in range(3):", "o, a, q = obs[k : k + 4], action[k : k + 4], old[k : k + 4]"),
    (
        "for rows in torch.randperm(8).split(4):",
        "o, a, q = obs[rows], action[rows], old[rows]",
    ),
)
_ADAM = "torch.optim.Adam"


@st.composite
def functions(draw: Draw) -> str:
    """The text of a module with a function ``main(net, opt, cfg, obs, action, old, log)``."""

    def some(options: Any, least: int, most: int) -> list[Any]:
        return draw(st.lists(st.sampled_from(options), min_size=least, max_size=most))

    def loss(name: str) -> list[str]:
        lines, terms = [], []
        for part, allowed in some(PARTS, 1, 3):
            if part not in lines:
                lines.append(part)
            terms.append(draw(st.sampled_from(allowed)))
        weights = [draw(st.sampled_from(("", "0.5 * ", "cfg.entropy * "))) for _ in terms]
        whole = " + ".join(f"{w}{t}" for w, t in zip(weights, terms, strict=True))
        lines += some(("log.append(float(torch.rand(())))", "net.logstd.data.add_(0.125)"), 0, 1)
        return [*lines, f"{name} = {whole}"]

    def between() -> list[str]:
        return some(BETWEEN, 0, 3)

    head, batch = draw(st.sampled_from(_HEADS))
    inner = [batch, *loss("loss"), *between()]
    rare = draw(st.sampled_from(("",) * 12 + ("retain_graph=True",)))
    if draw(st.integers(0, 5)) == 5:  # a second one, in front of, or behind the first's backward
        second = [line for line in loss("other") if line != "pass"]
        if draw(st.booleans()):
            inner += [*second, *between(), f"loss.backward({rare})", "other.backward()"]
        else:
            inner += [f"loss.backward({rare})", *second, *between(), "other.backward()"]
    else:
        inner.append(f"loss.backward({rare})")
    inner += some(BEHIND, 1, 4)
    if draw(st.integers(0, 9)) == 9:
        at = draw(st.integers(1, len(inner)))
        inner.insert(at, "if len(log) > 6:\n    break")
    returned = draw(st.sampled_from(("None", "None", "loss.item()", "loss.detach()", "loss")))
    lines = [head, *_indented(inner), f"return {returned}"]
    made = draw(st.sampled_from((_ADAM, "torch.optim.SGD")))
    body = "\n".join(_indented(lines))
    header = f"{HEADER}OPTIMIZER = {made}\n\n\n"
    return f"{header}def main(net, opt, cfg, obs, action, old, log):\n    loss = None\n{body}\n"


def _indented(lines: list[str]) -> list[str]:
    return ["    " + row for line in lines for row in line.splitlines()]


def arguments(module: types.ModuleType) -> Callable[[], tuple[Any, ...]]:
    """What makes equal, fresh arguments for ``main``."""

    def make() -> tuple[Any, ...]:
        net = module.Net()
        generator = torch.Generator().manual_seed(1)
        given = [torch.randn(8, k, generator=generator).double() for k in (3, 2)]
        opt = module.OPTIMIZER(net.parameters(), lr=1e-2)
        cfg = types.SimpleNamespace(clip=0.2, entropy=0.01)
        return net, opt, cfg, *given, torch.full((8,), -0.5).double(), []

    return make


@contextlib.contextmanager
def as_traced() -> Iterator[None]:
    """Let what would be compiled run as the graph that Inductor would be given, and let it pay, as
    what TorchScript runs does."""

    def built(function: Callable[..., list[Tensor]], given: list[Tensor]) -> Any:
        with torch.no_grad():
            return make_fx(function)(*given)

    with (
        mock.patch.object(gradients, "_built", built),
        mock.patch.object(graphs, "built", built),
        mock.patch.object(graphs, "PAYS", float("inf")),
        mock.patch.object(gradients, "PAYS", float("inf")),
        mock.patch.object(gradients, "_known_losses", {}),
        mock.patch.object(graphs, "_known_graphs", {}),
    ):
        yield
