"""Compiled against eager on a device: bits, checking mode, components in processes, the profile."""

from __future__ import annotations

import re
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

import rose_compiler
from bench.gpu_lines import Line
from bench.gpu_loops import Size, Training, iteration, on_streams, train
from rose_compiler.sim import TorchPendulum

SMALL = Size(64, 8, 32)


def compiled_equals_eager(device: str, *, streams: bool = False) -> Line:
    """The compiled torch-native PPO leaves the same bits as the eager one, by the schedule that is
    taken untuned or by the one with ``streams``; a compiler that rewrote nothing fails."""
    on = " on streams" if streams else ""
    name = f"compiled PPO{on} equals eager, bit for bit"
    eager = train(iteration, device, 4)
    if streams:
        compiled = on_streams(iteration, device, numerics="bitwise")
    else:
        compiled = rose_compiler.compile(iteration, numerics="bitwise", tune=False)
    found = train(compiled, device, 4)
    rewritten = passes_applied(compiled.explain(width=100))
    compiled.close()
    wrong = [key for key in eager if not torch.equal(eager[key], found[key])]
    if wrong:
        return Line(name, "fail", f"differs in {', '.join(wrong)}")
    if not rewritten or (streams and "streams" not in rewritten):
        return Line(name, "fail", "nothing was rewritten, so nothing was compared")
    what = ", ".join(sorted(rewritten))
    return Line(name, "pass", f"{len(eager)} tensors, 4 iterations, rewritten by {what}")


def passes_applied(explained: str) -> set[str]:
    """The passes of the pipeline that rewrote something, from what ``explain()`` says."""
    applied = explained.partition("Applied (")[2].partition("\n\n")[0]
    return set(re.findall(r"^  \w+ \[(\w+)\]", applied, re.MULTILINE)) - {"promote", "trace"}


def checked(device: str, size: Size = SMALL) -> Line:
    """Checking mode, which raises, finds nothing: what was rewritten with close numerics agrees
    operation by operation, and lanes that are delayed at random leave the same bits."""
    name = "checking mode finds nothing wrong"
    compiled = rose_compiler.compile(iteration, check=True)
    training = Training(compiled, device, size)
    for _ in range(3):
        training.step()
    compiled.close()
    return Line(name, "pass", "3 iterations, none of whose operations differed")


class Scorer:
    """A component for a process of its own: it scores observations where they lie."""

    def __init__(self, observations: int, device: str) -> None:
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(observations, 32), nn.Tanh(), nn.Linear(32, 1))
        self.net.to(device)

    def score(self, obs: torch.Tensor) -> torch.Tensor:
        """A score for each row, (rows,)."""
        with torch.no_grad():
            return self.net(obs).flatten()


def scored(env: Any, scorer: Any, actions: torch.Tensor, steps: int) -> torch.Tensor:
    """Steps whose observations are scored in another process while the simulator goes on."""
    total = torch.zeros(actions.shape[0], device=actions.device)
    obs, _reward, _terminated, _truncated, _info = env.step(actions)
    for _ in range(steps):
        score = scorer.score(obs)
        obs, _reward, _terminated, _truncated, _info = env.step(actions)
        total = total + score
    return total


def in_a_process(device: str) -> Line:
    """A component in a process of its own answers as one in this process does, its tensors handed
    over by handle on a GPU."""
    name = "a component in a process equals one here"

    def simulator() -> TorchPendulum:
        torch.manual_seed(0)
        return TorchPendulum(16, device=device)

    actions = torch.linspace(-1, 1, 16, device=device)[:, None]
    here = simulator()
    scorer = Scorer(here.obs_dim, device)
    wanted = [scored(here, scorer, actions, 4) for _ in range(3)]
    with ExitStack() as stack:
        far = stack.enter_context(
            rose_compiler.hosted(partial(Scorer, here.obs_dim, device), timeout=60.0)
        )
        step = rose_compiler.compile(scored, numerics="bitwise", tune=False)
        stack.callback(step.close)
        there = simulator()
        found = [step(there, far, actions, 4) for _ in range(3)]
        missed = [remark.why for remark in far.rose_remarks]
    same = all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    if not same:
        return Line(name, "fail", "scores differ")
    how = "; ".join(missed) or ("tensors by handle" if device != "cpu" else "shared memory")
    return Line(name, "fail" if missed else "pass", how)


def profiled(device: str, size: Size = SMALL) -> Line:
    """The profile of a compiled training has kernels in it."""
    name = "kernels in the profile of a compiled training"
    compiled = rose_compiler.compile(iteration, tune=False)
    training = Training(compiled, device, size)
    for _ in range(6):
        training.step()
    timeline = compiled.profile.timeline
    compiled.close()
    parts = [a for a in (timeline.activity if timeline else ()) if a.device.startswith("cuda")]
    busy = sum(a.share * (a.end_s - a.start_s) for a in parts)
    if busy <= 0.0:
        return Line(name, "fail", "the profile has no kernel")
    whole = sum(a.end_s - a.start_s for a in parts)
    share = busy / whole
    return Line(name, "pass", f"{share:.0%} of the SMs active", {"activity": share})
