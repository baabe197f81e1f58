"""Checks that need a CUDA device, as one script: ``python -m bench.gpu_check [--json FILE]``.

Each check prints one line: ``pass``, ``fail``, or ``absent`` where there is no device for it.
The checks that plant a fault run in a process of their own under torch's CUDA sanitizer: the
planted fault must be reported, and the same work done properly must not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import rose_compiler
from rose_compiler.runtime.events import StreamLane, TorchStreams
from rose_compiler.sim import TorchPendulum

SANITIZER_ERROR = "CSAN detected a possible data race"


@dataclass(frozen=True)
class Line:
    """The outcome of one check."""

    check: str
    status: str
    detail: str


class Policy(nn.Module):
    """Gaussian policy and value function over ``(rows, observations)``."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, actions))
        self.critic = nn.Sequential(nn.Linear(observations, 64), nn.Tanh(), nn.Linear(64, 1))
        self.logstd = nn.Parameter(torch.zeros(1, actions))

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean = self.actor(obs)
        dist = torch.distributions.Normal(mean, self.logstd.exp().expand_as(mean))
        action = dist.sample()
        return action, dist.log_prob(action).sum(1), self.critic(obs).flatten()


def iteration(policy: Any, optimizer: Any, env: Any, buf: Any, cfg: Any, obs: Any) -> Any:
    """One iteration of PPO with one epoch over a simulator made of tensors."""
    for t in range(cfg.steps):
        buf.obs[t] = obs
        with torch.no_grad():
            action, logprob, value = policy.act(obs)
        buf.actions[t] = action
        buf.logprobs[t] = logprob
        buf.values[t] = value
        obs, reward, _terminated, _truncated, _info = env.step(action)
        buf.rewards[t] = reward
    with torch.no_grad():
        last = policy.critic(obs).flatten()
        advantages = torch.zeros_like(buf.rewards)
        gae = torch.zeros_like(last)
        for t in reversed(range(cfg.steps)):
            following = last if t == cfg.steps - 1 else buf.values[t + 1]
            delta = buf.rewards[t] + cfg.gamma * following - buf.values[t]
            gae = delta + cfg.gamma * cfg.lam * gae
            advantages[t] = gae
        returns = advantages + buf.values
    mean = policy.actor(buf.obs)
    dist = torch.distributions.Normal(mean, policy.logstd.exp().expand_as(mean))
    ratio = (dist.log_prob(buf.actions).sum(-1) - buf.logprobs).exp()
    clipped = ratio.clamp(0.8, 1.2)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    loss = loss + 0.5 * ((policy.critic(buf.obs).squeeze(-1) - returns) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return obs, loss.item()


def train(fn: Callable[..., Any], device: str, iterations: int) -> dict[str, torch.Tensor]:
    """Train from a fixed seed; parameters and last observations."""
    torch.manual_seed(0)
    env = TorchPendulum(256, device=device)
    obs, _ = env.reset()
    policy = Policy(obs.shape[1], 1).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    cfg = SimpleNamespace(steps=16, gamma=0.99, lam=0.95)
    zeros = {"device": device}
    buf = SimpleNamespace(
        obs=torch.zeros(cfg.steps, 256, obs.shape[1], **zeros),
        actions=torch.zeros(cfg.steps, 256, 1, **zeros),
        logprobs=torch.zeros(cfg.steps, 256, **zeros),
        values=torch.zeros(cfg.steps, 256, **zeros),
        rewards=torch.zeros(cfg.steps, 256, **zeros),
    )
    for _ in range(iterations):
        obs, _ = fn(policy, optimizer, env, buf, cfg, obs)
    return {**{n: p.detach() for n, p in policy.named_parameters()}, "obs": obs, **vars(buf)}


def compiled_equals_eager(device: str) -> Line:
    """The compiled torch-native PPO leaves the same bits as the eager one."""
    eager = train(iteration, device, 4)
    compiled = rose_compiler.compile(iteration, numerics="bitwise", tune=False)
    found = train(compiled, device, 4)
    compiled.close()
    wrong = [name for name in eager if not torch.equal(eager[name], found[name])]
    text = f"differs in {', '.join(wrong)}" if wrong else f"{len(eager)} tensors, 4 iterations"
    return Line("compiled PPO equals eager, bit for bit", "fail" if wrong else "pass", text)


def streams_overlap(device: str) -> Line:
    """Two stream lanes that each wait on the device take little longer than one."""
    streams = TorchStreams(device)
    lanes = [StreamLane(f"stream:{k}", streams) for k in range(2)]
    cycles = 200_000_000

    def spent(used: list[StreamLane]) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for lane in used:
            lane.submit(0, torch.cuda._sleep, cycles)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    spent(lanes)
    one, both = spent(lanes[:1]), spent(lanes)
    ratio = both / one
    status = "pass" if ratio < 1.5 else "fail"
    return Line("two streams overlap", status, f"both take {ratio:.2f} times as long as one")


# Run in a process of its own, since the sanitizer watches a process from its start. "{fault}" is
# the step that is left out, empty for the proper run.
_RACE = """
import torch
from rose_compiler.runtime.events import StreamLane, TorchStreams

fault = {fault!r}


class Faulty(TorchStreams):
    def wait(self, stream, event):
        if fault != "wait":
            super().wait(stream, event)

    def keep(self, tensor, stream):
        if fault != "record_stream":
            super().keep(tensor, stream)


streams = Faulty("cuda")
lane = StreamLane("stream:side", streams)


def work(x):
    torch.cuda._sleep(50_000_000)
    return x * 2


x = torch.ones(1 << 20, device="cuda")
task = lane.submit(0, work, x)
if fault == "record_stream":
    del x  # the allocator may hand out its memory again while the side stream still reads it
    y = torch.zeros(1 << 20, device="cuda")
    y.add_(1)
else:
    y = task.wait()
    y.add_(1)
torch.cuda.synchronize()
print("done")
"""


def sanitizer(fault: str) -> Line:
    """A planted missing ``fault`` is reported by the CUDA sanitizer."""

    def reported(planted: str) -> bool:
        done = subprocess.run(
            [sys.executable, "-c", _RACE.format(fault=planted)],
            env={**os.environ, "TORCH_CUDA_SANITIZER": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        return SANITIZER_ERROR in done.stdout + done.stderr

    planted, proper = reported(fault), reported("")
    status = "pass" if planted and not proper else "fail"
    return Line(
        f"missing {fault} is caught",
        status,
        f"planted: {'caught' if planted else 'not caught'}; "
        f"proper: {'reported as a race' if proper else 'clean'}",
    )


CHECKS: dict[str, Callable[[], Line]] = {
    "compiled PPO equals eager, bit for bit": lambda: compiled_equals_eager("cuda"),
    "two streams overlap": lambda: streams_overlap("cuda"),
    "missing wait is caught": lambda: sanitizer("wait"),
    "missing record_stream is caught": lambda: sanitizer("record_stream"),
}


def check() -> list[Line]:
    """All lines; ``absent`` for all of them without a CUDA device."""
    lines = [compiled_on_cpu()]
    for name, run in CHECKS.items():
        if not torch.cuda.is_available():
            lines.append(Line(name, "absent", "no CUDA device"))
            continue
        try:
            lines.append(run())
        except Exception as error:  # one check that breaks must not hide the others
            lines.append(Line(name, "fail", f"{type(error).__name__}: {error}"))
    return lines


def compiled_on_cpu() -> Line:
    """The same comparison on the CPU, so that the script itself is tested everywhere."""
    line = compiled_equals_eager("cpu")
    return Line("the same on the CPU", line.status, line.detail)


def machine() -> str:
    """The machine in one line."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"
    return f"{gpu}, torch {torch.__version__}, Python {platform.python_version()}"


def main(argv: list[str] | None = None) -> int:
    """Print the table; the exit status is 1 when a line failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--json", metavar="FILE", help="write the lines there too")
    options = parser.parse_args(argv)
    lines = check()
    table = Table("check", "status", "detail", title=machine())
    for line in lines:
        table.add_row(line.check, line.status, line.detail)
    Console().print(table)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(
                {"machine": machine(), "lines": [asdict(line) for line in lines]}, file, indent=2
            )
    return int(any(line.status == "fail" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
