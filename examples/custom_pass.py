"""A pass of your own, run on a program that is only text and on a real loop.

    python examples/custom_pass.py

A pass asks what the dependences forbid, and the answer is the diagnostic: `why(...)` is None, or a
blocker with a code, the states involved and the user's lines. Changes go through the rewriter, so
the result is verified, and recorded under the pass's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch import nn

import rose_compiler
from rose_compiler.ir.deps import title, why
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import LoopView, is_call, op_of
from rose_compiler.ir.rewriter import Rewriter
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.pipeline import pipeline
from rose_compiler.sim import TorchCartPole


@dataclass(frozen=True)
class StoresLast(rose_compiler.Pass):
    """Put stores into a buffer behind the last operation of their trip."""

    name = "stores-last"
    root: str = "buf"  # an option: the object whose tensors are the buffer

    def run(self, loop: LoopView, rewrite: Rewriter) -> None:
        """Called with each loop, innermost first."""
        for store in list(self.stores(loop)):
            later = list(loop.graph.nodes)
            later = [n for n in later[later.index(store) + 1 :] if is_call(n)]
            if all(n in set(self.stores(loop)) for n in later):
                continue  # nothing but stores behind it
            blockers = (why(rewrite.deps, store, other) for other in later)
            blocker = next((b for b in blockers if b is not None), None)
            if blocker is not None:
                rewrite.missed(store, blocker)
            elif rewrite.spend():
                rewrite.applied(store, f"{title(store)} comes last in {loop.label}")
                rewrite.move(store, after=later[-1])

    def stores(self, loop: LoopView) -> Iterator[fx.Node]:
        """Operations of the loop that write parts of the buffer and nothing else."""
        for node in loop.graph.nodes:
            writes = op_of(node).signature.writes if is_call(node) else None
            if writes and all(str(w).startswith(f"{self.root}.") for w in writes):
                yield node


TEXT = """
@op(kind="component", reads=["params"], writes=[])
def act(obs, params): ...

@op(kind="step", reads=["env"], writes=["env"],
    attributes={"step": {"env": "env", "action": "action"}})
def env_step(action, env): ...

@op(reads=[], writes=["buf.obs[t]"], results=0)
def store(buf, t, obs): ...

@op(reads=[], writes=["buf.last"], results=0)
def note(buf, obs): ...

@op(reads=["buf.last"], writes=[])
def look(buf): ...

def rollout(obs0, *, params, env, buf):
    for t, obs in steps(0, 128, 1, obs=obs0):
        store(buf, t, obs)
        note(buf, obs)
        seen = look(buf)
        action = act(obs, params)
        stepped = env_step(action, env)
        yield stepped[0]
    return steps.obs
"""


def on_text() -> None:
    """Run the pass on a program that was never captured: its signatures say what is allowed."""
    program = parse(TEXT)
    history = PassManager([StoresLast()]).run(program)
    print("after the pass:\n")
    text = dump(program)
    print(text[text.index("def rollout") :])
    print("remarks:\n")
    print(history.remarks.render(100))


class Buffer:
    """Preallocated observations of one rollout."""

    def __init__(self, steps: int, envs: int) -> None:
        self.obs = torch.zeros(steps, envs, 4)


def rollout(policy: nn.Module, sim: TorchCartPole, buf: Buffer, obs: torch.Tensor) -> torch.Tensor:
    """A loop as one would write it."""
    for t in range(64):
        buf.obs[t] = obs
        with torch.no_grad():
            action = policy(obs)
        obs, _, _, _, _ = sim.step(action)
    return obs


def on_a_loop() -> None:
    """Run the pass in a real compilation, among the package's own; the results stay the same."""
    results = []
    for fn in (
        rollout,
        rose_compiler.compile(rollout, tune=False, passes=pipeline([StoresLast()])),
    ):
        torch.manual_seed(0)
        sim, policy, buf = TorchCartPole(8), nn.Linear(4, 1), Buffer(64, 8)
        obs, _ = sim.reset()
        for _ in range(3):
            obs = fn(policy, sim, buf, obs)
        results.append((obs, buf.obs))
    print("passes that ran:", ", ".join(name for name, _ in fn.history), "\n")
    print(fn.explain())
    equal = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    print(f"\nas eager, bit for bit: {equal}")
    fn.close()


if __name__ == "__main__":
    on_text()
    print("\n" + "-" * 100 + "\n")
    on_a_loop()
