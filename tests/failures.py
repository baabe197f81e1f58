"""Calls that run into an error, in declarations, dumps, settings, hosts and simulators."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import numpy as np
import pytest
import torch

import rose_compiler
from rose_compiler.base.machine import load_machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.frontend.declare import component
from rose_compiler.ir import interp
from rose_compiler.ir.dump import dump
from rose_compiler.ir.parse import parse
from rose_compiler.ir.program import is_call
from rose_compiler.ir.verify import verify
from rose_compiler.passes.manager import PassManager
from rose_compiler.passes.pipeline import PIPELINE
from rose_compiler.runtime.hosts import ProcessHost, ThreadHost
from rose_compiler.runtime.hosts.making import hosted
from rose_compiler.runtime.quotas import GreenContexts, devices
from rose_compiler.runtime.quotas.green import AppliedGreen
from rose_compiler.sim import ShardedEnv
from tests.api.loops import Drift, Training, iteration
from tests.refused import TRIGGERS as TRIGGERS
from tests.refused import triggers
from tests.samples.part import Part

# -- declarations


def reward_of(obs: Any, action: Any) -> Any:
    return obs.sum() + action.sum()


@triggers("declare-syntax")
def _declare_syntax() -> object:
    return component(reads=["obs[["], writes=[])(reward_of)


@triggers("declare-unknown-name")
def _declare_name() -> object:
    return component(reads=["observation"], writes=[])(reward_of)


@triggers("declare-target")
def _declare_target() -> object:
    return component(reads=[], writes=[])(torch.zeros(3))


@triggers("declare-conflict")
def _declare_conflict() -> object:
    def reward(obs: Any) -> Any:
        return obs.sum()

    component(reads=["obs"], writes=[])(reward)
    return component(reads=[], writes=["obs"])(reward)


# -- dumps

HEAD = "@op(reads=[], writes=[])\ndef f(x): ...\n"


@triggers("parse-syntax")
def _parse_syntax() -> object:
    return parse(HEAD + "def fn(x):\n    import os\n    return x\n", file="fn.py")


@triggers("parse-unknown-op")
def _parse_op() -> object:
    return parse(HEAD + "def fn(x):\n    y = g(x)\n    return y\n", file="fn.py")


@triggers("parse-unknown-name")
def _parse_name() -> object:
    return parse(HEAD + "def fn(x):\n    y = f(z)\n    return y\n", file="fn.py")


@triggers("parse-unbound")
def _unbound() -> object:
    return interp.run(parse(HEAD + "def fn(x):\n    y = f(x)\n    return y\n"), [1])


@triggers("dump-unprintable")
def _unprintable() -> object:
    program = parse(HEAD + "def fn(x):\n    y = f(x)\n    return y\n")
    call = next(n for n in program.nodes() if is_call(n))
    call.args = (threading.Lock(),)  # type: ignore[assignment]
    return dump(program)


@triggers("verify-captured")
def _verify_captured() -> object:
    text = HEAD + "def fn(x):\n    y = f(x) @ lane(stage=1)\n    return y\n"
    return verify(parse(text))


@triggers("verify-scheduled")
def _verify_scheduled() -> object:
    text = (
        HEAD + '@program(stage="scheduled")\ndef fn(x):\n    for t, a in loop(0, 3, 1, a=x):\n'
        "        b = f(a) @ lane(order=1)\n        c = f(b)\n        yield c\n    return loop.a\n"
    )
    return verify(parse(text))


# -- settings, arguments, and asking too early


@triggers("config-numerics")
def _numerics() -> object:
    return rose_compiler.compile(iteration, numerics="exact")


@triggers("config-knob")
def _knob() -> object:
    return rose_compiler.knobs(serail=True)


@triggers("config-argument")
def _argument() -> object:
    return rose_compiler.compile(iteration, timeout=-1)


@triggers("config-pass")
def _pass() -> object:
    return PassManager(PIPELINE, names=["-hoits"])


@triggers("config-decision")
def _decision() -> object:
    return rose_compiler.compile(iteration, tune="no-such-file.json")


@triggers("not-called")
def _not_called() -> object:
    return rose_compiler.compile(iteration).explain()


@triggers("not-profiled")
def _not_profiled() -> object:
    training = Training()
    fast = rose_compiler.compile(iteration, tune=False)
    training.run(fast)
    training.close()
    fast.close()
    return fast.windows()


@triggers("quota-nvml")
def _nvml() -> object:
    return devices("libnvidia-ml-that-is-not-there.so")


@triggers("quota-green")
def _green() -> object:
    plan = QuotaPlan.divide("green-context", load_machine("h100"), {"policy": 4})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GreenContexts, "_find_driver", lambda self: None)
        return GreenContexts().apply(plan)


@triggers("quota-fixed")
def _replan() -> object:
    plan = QuotaPlan.divide("green-context", load_machine("h100"), {"policy": 4})
    return AppliedGreen(plan, None).replan(plan)


# -- hosts and simulators


def _part(method: str, **options: Any) -> object:
    host = ProcessHost(Part, name="sim", **options)
    try:
        return host.call(method)
    finally:
        host.close()


@triggers("host-died")
def _died() -> object:
    return _part("end")


@triggers("host-pickle")
def _result() -> object:
    return _part("lock")


@triggers("host-graph")
def _graph() -> object:
    with hosted(Part, host="inline") as part:
        return part.step(torch.ones(2, requires_grad=True) * 2)


@triggers("host-parameters")
def _parameters() -> object:
    with hosted(Part, host="inline") as part:
        return part.publish({"a": np.zeros(2)})


@triggers("host-version")
def _version() -> object:
    with hosted(lambda: torch.nn.Linear(1, 1), host="inline") as part:
        part.publish(torch.nn.Linear(1, 1))
        part._version = 5  # as if another thread had published meanwhile
        return part(torch.zeros(1, 1))


@triggers("host-exception")
def _exception() -> object:
    return _part("refuse")


@triggers("host-timeout")
def _timeout() -> object:
    return _part("sleep", timeout=0.3)


@triggers("host-start")
def _start() -> object:
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*_: Any, **__: Any) -> Any:
            raise OSError(12, "Cannot allocate memory")

        patch.setattr(subprocess, "Popen", refuse)
        return ProcessHost(Part, name="sim")


@triggers("host-factory-pickle")
def _factory() -> object:
    lock = threading.Lock()
    return ProcessHost(lambda: lock, name="sim")


@triggers("host-factory-raised")
def _factory_raised() -> object:
    host = ThreadHost(lambda: 1 / 0, name="sim")
    try:
        return host.call("step")
    finally:
        host.close()


@triggers("fault-closed")
def _closed() -> object:
    envs = ShardedEnv.split([Drift] * 2, shards=2, hosts="inline")
    envs.close()
    return envs.step(np.zeros((2, 3), np.float32))


@triggers("sim-shards")
def _shards() -> object:
    return ShardedEnv.split([], shards=2)


@triggers("sim-order")
def _order() -> object:
    envs = ShardedEnv.split([Drift] * 2, shards=2, hosts="inline")
    envs.reset(seed=0)
    return envs.shards()[0].step_wait()


class Breaks(Drift):
    """Fails in its first step."""

    def step(self, action: Any) -> Any:
        raise LookupError("no such joint")


@triggers("sim-recover")
def _unrecoverable() -> object:
    return ShardedEnv.split([Breaks] * 2, shards=1, hosts="process", recover=True)


@triggers("sim-unusable")
def _unusable() -> object:
    envs = ShardedEnv.split([Breaks] * 2, shards=2, hosts="inline")
    envs.reset(seed=0)
    with pytest.raises(LookupError):
        envs.step(np.zeros((2, 3), np.float32))
    return envs.step(np.zeros((2, 3), np.float32))
