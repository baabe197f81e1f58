"""Sample programs with everything bound, in the form that capture and tracing leave them in.

``ppo()`` is the rollout that the passes are measured on: a policy, a simulator made of shards, and
late work of every sort behind them. Each call builds fresh objects, so that two runs compare.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.fx as fx
import torch.nn.functional as F

from rose_compiler.base.errors import SourceLocation
from rose_compiler.frontend.record import spec_of
from rose_compiler.ir import facts
from rose_compiler.ir.facts import Context, LoopFacts, Origin, Spec
from rose_compiler.ir.interp import resolve
from rose_compiler.ir.ops import Op, OpTable, Signature
from rose_compiler.ir.program import Builder, Program
from rose_compiler.testing.toys import ACT, OBS, ToyAgent, ToyBuffers, ToyEnvs

FILE = "ppo.py"
NO_GRAD = (Context("no_grad"),)


@dataclass
class Sample:
    """A program, its value arguments by name, and what passes are told about its simulator."""

    program: Program
    args: dict[str, Any]
    shards: dict[str, tuple[int, ...]]
    steps: int
    objects: dict[str, Any] = field(default_factory=dict)

    def observed(self) -> dict[str, Any]:
        """Copies of everything that a run of the program changes."""
        found = {"rng": torch.get_rng_state(), "log": list(self.objects["log"])}
        found["envs"] = copy.deepcopy(self.objects["envs"].state())
        for name, value in vars(self.objects["buf"]).items():
            found[f"buf.{name}"] = value.clone()
        return found


class BodyTypes(fx.Interpreter):
    """Notes the type of every value of a graph."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            facts.put(n, spec=spec_of(value))
        return value


def graph_op(
    name: str,
    fn: Callable[..., Any],
    params: tuple[str, ...],
    results: int,
    *,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    batch: dict[str, int] | None = None,
    source: tuple[str, ...] = (),
    examples: tuple[Any, ...] = (),
) -> Op:
    """A traced operation out of a function of tensors, as ``frontend.trace`` makes them: with the
    type of every value as seen on ``examples``."""
    body = fx.symbolic_trace(fn)
    if examples:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            BodyTypes(body).run(*examples)
    signature = Signature(
        name,
        params,
        reads,
        writes,
        results=results,
        batch=None if batch is None else tuple(batch.items()),
        exact=True,
    )
    return Op(signature, body, kind="graph", body=body, source=source)


def _act(obs, w0, b0, w1, b1, logstd, v0, c0, v1, c1):  # type: ignore[no-untyped-def]
    mean = F.linear(torch.tanh(F.linear(obs, w0, b0)), w1, b1)
    std = torch.exp(logstd.expand_as(mean))
    action = torch.normal(mean, std)
    logprob = (
        -((action - mean) ** 2) / (2 * std**2) - std.log() - math.log(math.sqrt(2 * math.pi))
    ).sum(1)
    entropy = (0.5 + 0.5 * math.log(2 * math.pi) + torch.log(std)).sum(1)
    value = F.linear(torch.tanh(F.linear(obs, v0, c0)), v1, c1)
    return action, logprob, entropy, value


WEIGHTS = {
    "w0": "actor.0.weight",
    "b0": "actor.0.bias",
    "w1": "actor.2.weight",
    "b1": "actor.2.bias",
    "logstd": "logstd",
    "v0": "critic.0.weight",
    "c0": "critic.0.bias",
    "v1": "critic.2.weight",
    "c1": "critic.2.bias",
}


def _store(name: str) -> Callable[..., None]:
    def store(buf: Any, t: int, value: Any) -> None:
        getattr(buf, name)[t] = value

    return store


def _store_value(buf: Any, t: int, value: Any) -> None:
    buf.values[t] = value.flatten()


def _store_rewards(buf: Any, t: int, reward: Any) -> None:
    buf.rewards[t] = torch.as_tensor(reward, dtype=torch.float32)


def _episodes(log: list[float], infos: dict[str, Any]) -> None:
    if "episode" in infos:
        for i in np.flatnonzero(infos["_episode"]):
            log.append(float(infos["episode"]["r"][i]))


def block(
    name: str,
    fn: Callable[..., Any],
    params: tuple[str, ...],
    source: tuple[str, ...],
    *,
    results: int = 1,
    reads: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    batch: dict[str, int] | None = None,
) -> Op:
    """A block of the user's statements."""
    signature = Signature(
        name,
        params,
        reads,
        writes,
        results=results,
        batch=None if batch is None else tuple(batch.items()),
        exact=None if batch is None else True,
    )
    return Op(signature, fn, source=source)


def step_op(name: str = "step") -> Op:
    """A simulator's step: ``envs.step(action)``."""
    signature = Signature(name, ("action", "envs"), ("envs",), ("envs",))
    return Op(
        signature,
        lambda action, envs: envs.step(action),
        kind="step",
        source=("envs.step(action)",),
        attributes={"step": {"env": "envs", "action": "action"}},
    )


def ppo_ops(n: int, agent: ToyAgent) -> dict[str, Op]:
    """The operations of a rollout of ``n`` environments, by name."""
    weights = [resolve(agent, path) for path in WEIGHTS.values()]
    ops = [
        graph_op(
            "act",
            _act,
            ("obs", *WEIGHTS),
            4,
            reads=(*WEIGHTS, "rng:torch"),
            writes=("rng:torch",),
            batch={"obs": 0, "return.0": 0, "return.1": 0, "return.2": 0, "return.3": 0},
            source=("action, logprob, _, value = agent.get_action_and_value(obs)",),
            examples=(torch.zeros(n, OBS), *weights),
        ),
        block(
            "to_numpy",
            lambda action: action.cpu().numpy(),
            ("action",),
            ("a_np = action.cpu().numpy()",),
            batch={"action": 0, "return.0": 0},
        ),
        step_op(),
        block(
            "unpack",
            lambda r: tuple(r),
            ("r",),
            ("next_obs, reward, terminated, truncated, infos = r",),
            results=5,
            batch={"r": 0, "return.0": 0, "return.1": 0, "return.2": 0, "return.3": 0},
        ),
        block(
            "to_obs",
            lambda next_obs: torch.as_tensor(next_obs, dtype=torch.float32),
            ("next_obs",),
            ("obs = torch.as_tensor(next_obs, dtype=torch.float32)",),
            batch={"next_obs": 0, "return.0": 0},
        ),
        block(
            "to_done",
            lambda a, b: torch.as_tensor(np.logical_or(a, b), dtype=torch.float32),
            ("terminated", "truncated"),
            ("done = torch.as_tensor(np.logical_or(terminated, truncated), ...)",),
            batch={"terminated": 0, "truncated": 0, "return.0": 0},
        ),
        block(
            "log_episodes",
            _episodes,
            ("log", "infos"),
            ('if "episode" in infos: ...',),
            results=0,
            reads=("log",),
            writes=("log", "host"),
        ),
    ]
    stores = {"obs": "obs", "dones": "done", "actions": "action", "logprobs": "logprob"}
    for name, value in stores.items():
        ops.append(
            block(
                f"store_{name}",
                _store(name),
                ("buf", "t", value),
                (f"buf.{name}[t] = {value}",),
                results=0,
                writes=(f"buf.{name}[t]",),
            )
        )
    for name, fn, value, text in (
        ("values", _store_value, "value", "value.flatten()"),
        ("rewards", _store_rewards, "reward", "torch.as_tensor(reward, dtype=torch.float32)"),
    ):
        ops.append(
            block(
                f"store_{name}",
                fn,
                ("buf", "t", value),
                (f"buf.{name}[t] = {text}",),
                results=0,
                writes=(f"buf.{name}[t]",),
            )
        )
    return {op.name: op for op in ops}


def _at(line: int) -> Origin:
    return Origin(SourceLocation(FILE, line))


def _tensor(*shape: int, dtype: str = "float32") -> Spec:
    return Spec("tensor", "Tensor", shape, dtype, "cpu")


def _array(*shape: int, dtype: str = "float32") -> Spec:
    return Spec("array", "ndarray", shape, dtype)


def ppo(
    shards: tuple[int, ...] = (3, 3, 2, 2),
    steps: int = 6,
    *,
    hidden: int = 8,
    lends: bool = False,
    seed: int = 0,
) -> Sample:
    """One PPO rollout. ``lends``: the simulator hands out its own observation buffers."""
    n = sum(shards)
    agent_object = ToyAgent(hidden, seed)
    simulator = ToyEnvs(shards, lends=lends)
    ops = ppo_ops(n, agent_object)
    top = Builder()
    obs0 = top.placeholder("obs0", "value", spec=_tensor(n, OBS))
    done0 = top.placeholder("done0", "value", spec=_tensor(n))
    agent, envs, buf, log = (
        top.placeholder(name, "state", state=name) for name in ("agent", "envs", "buf", "log")
    )
    body = Builder(top)
    t = body.placeholder("t", "index", spec=Spec("scalar", "int"))
    obs = body.placeholder("obs", "carried", spec=_tensor(n, OBS))
    done = body.placeholder("done", "carried", spec=_tensor(n))

    def call(name: str, line: int, *args: Any, **known: Any) -> fx.Node:
        return body.call(ops[name], *args, origin=_at(line), **known)

    def result(of: fx.Node, position: int, name: str, spec: Spec, **known: Any) -> fx.Node:
        node = body.item(of, position, name)
        facts.put(node, spec=spec, **known)
        return node

    call("store_obs", 2, buf, t, obs)
    call("store_dones", 3, buf, t, done)
    weights = [body.state(agent, path) for path in WEIGHTS.values()]
    acted = call("act", 5, obs, *weights, context=NO_GRAD)
    action = result(acted, 0, "action", _tensor(n, ACT))
    logprob = result(acted, 1, "logprob", _tensor(n))
    value = result(acted, 3, "value", _tensor(n, 1))
    call("store_actions", 6, buf, t, action)
    call("store_logprobs", 7, buf, t, logprob)
    call("store_values", 8, buf, t, value)
    array = call("to_numpy", 9, action, spec=_array(n, ACT))
    borrowed = {"alias": ("envs.outputs",), "borrowed": True} if lends else {}
    stepped = call("step", 9, array, envs, spec=Spec("tuple", "tuple"), **borrowed)
    parts = call("unpack", 9, stepped, **borrowed)
    next_obs = result(parts, 0, "next_obs", _array(n, OBS), **borrowed)
    reward = result(parts, 1, "reward", _array(n, dtype="float64"), **borrowed)
    terminated = result(parts, 2, "terminated", _array(n, dtype="bool"), **borrowed)
    truncated = result(parts, 3, "truncated", _array(n, dtype="bool"), **borrowed)
    infos = result(parts, 4, "infos", Spec("dict", "dict"), **borrowed)
    call("store_rewards", 10, buf, t, reward)
    following = call("to_obs", 11, next_obs, spec=_tensor(n, OBS), **borrowed)
    ended = call("to_done", 12, terminated, truncated, spec=_tensor(n))
    call("log_episodes", 13, log, infos)
    loop = top.loop(
        body,
        (following, ended),
        (0, steps, 1),
        (obs0, done0),
        LoopFacts("range", "rollout", "t"),
        origin=_at(1),
    )
    last_obs = top.item(loop, 0, "last_obs")
    last_done = top.item(loop, 1, "last_done")
    root = top.finish((last_obs, last_done))
    table = OpTable()
    for op in ops.values():
        table.add(op)
    objects = {
        "agent": agent_object,
        "envs": simulator,
        "buf": ToyBuffers(steps, n),
        "log": [],
    }
    program = Program(
        "ppo", root, table, ("obs0", "done0"), ("agent", "envs", "buf", "log"), objects=objects
    )
    args = {"obs0": torch.as_tensor(simulator.reset()), "done0": torch.zeros(n)}
    return Sample(program, args, {"envs": shards}, steps, objects)
