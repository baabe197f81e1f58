"""A sound program, and the rule of the verifier that a change of it breaks."""

from __future__ import annotations

import pytest

from rose_compiler.base.errors import VerifyError
from rose_compiler.ir import ops
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import BranchView, LoopView, Program
from rose_compiler.ir.verify import verify

TEXT = """
@op(kind="component", reads=["params"], writes=[], batch={"obs": 0, "return.0": 0}, results=2)
def act(obs, params): ...
@op(kind="step", reads=["env"], writes=["env"], attributes={"step": {"env": "env", "action": "a"}})
def step(a, env): ...
@op(reads=[], writes=["buf.obs[t]"])
def store(buf, t, obs): ...
@op(reads=[], writes=[])
def pick(r): ...
@op(reads=[], writes=[])
def alloc(): ...
@op(kind="graph", reads=["w"], writes=[])
def features(x, w):
    y = torch.nn.functional.linear(x, w)
    return y

def ppo(obs0, *, params, env, buf):
    scratch: state = alloc()
    for t, obs in rollout(0, 8, 1, obs=obs0):
        action, logp = act(obs, params)
        r = step(action, env)
        store(buf, t, obs)
        if logp:
            w = state(params, "w")
            y = features(obs, w)
            nxt = y
        else:
            z = pick(r)
            nxt = z
        break_if(logp, (nxt,))
        yield nxt
    last = rollout.obs
    return last
"""


def program() -> Program:
    return parse(TEXT)


def loop(p: Program) -> LoopView:
    return LoopView(p.find("rollout"))


def branch(p: Program) -> BranchView:
    node = next(n for n in loop(p).graph.nodes if n.target is ops.BRANCH)
    return BranchView(node)


def broken(p: Program, stage: str | None = None) -> str:
    """The rule that a program breaks."""
    with pytest.raises(VerifyError) as caught:
        verify(p, stage)
    message = str(caught.value)
    assert "verify-" in message
    return message.split("rule [")[1].split("]")[0]
