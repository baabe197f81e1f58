"""Every error a user can meet, met: one shape, in the user's words, with a way out."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rose_compiler
from rose_compiler.base import errors
from rose_compiler.base.errors import CATALOGUE, RoseError
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
from tests.samples.part import Part

ROOT = Path(__file__).resolve().parents[1]
TRIGGERS: dict[str, Callable[[], object]] = {}


def triggers(code: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register a function that runs into the error."""

    def keep(trigger: Callable[[], object]) -> Callable[[], object]:
        TRIGGERS[code] = trigger
        return trigger

    return keep


# -- capture: functions as a user might write them, the line at fault marked


def return_in_loop(net: Any, x: Any) -> Any:
    for _ in range(3):
        if x.sum() > 1:
            return x  # here
        x = net(x)
    return x


def try_around_policy(net: Any, x: Any) -> Any:
    try:  # here
        return net(x)
    except ValueError:
        return x


def asks_locals(net: Any, x: Any) -> Any:
    return net(locals()["x"])  # here


def execs(net: Any, x: Any) -> Any:
    exec("y = x")  # here
    return net(x)


def evals(net: Any, x: Any) -> Any:
    return net(eval("x"))  # here


def enters_by_hand(net: Any, x: Any) -> Any:
    torch.no_grad().__enter__()  # here
    return net(x)


def starts_a_thread(net: Any, x: Any) -> Any:
    threading.Thread(target=print).start()  # here
    return net(x)


def asks_the_clock(net: Any, x: Any) -> Any:
    for _ in range(3):
        if time.time() > 5:  # here
            x = net(x)
    return x


def rebinds_the_policy(net: Any, x: Any) -> Any:
    for _ in range(3):
        x = net(x)
        net = torch.nn.Linear(2, 2)  # here
    return x


def defines_a_function(net: Any, x: Any) -> Any:
    def twice(y: Any) -> Any:  # here
        return net(net(y))

    return twice(x)


def has_a_lambda(net: Any, x: Any) -> Any:
    return sorted(net(x), key=lambda y: -y.sum())  # here


COUNT = 0


def counts_globally(net: Any, x: Any) -> Any:
    global COUNT  # here
    COUNT += 1
    return net(x)


def _counter() -> Any:
    count = 0

    def counts_outside(net: Any, x: Any) -> Any:
        nonlocal count  # here
        count += 1
        return net(x)

    return counts_outside


def shrinks_what_it_walks(net: Any, x: Any) -> Any:
    queue = [1, 2, 3]
    for item in queue:
        queue.remove(item)  # here
    return net(x)


def returns_inside_try(net: Any, x: Any) -> Any:  # here
    x = net(x)
    try:
        return x / 2
    except ValueError:
        return x


def yields(net: Any, x: Any) -> Any:
    yield net(x)  # here


CAPTURED: dict[str, Any] = {
    "capture-return-in-loop": return_in_loop,
    "capture-try-around-component": try_around_policy,
    "capture-locals": asks_locals,
    "capture-exec": execs,
    "capture-eval": evals,
    "capture-manual-enter": enters_by_hand,
    "capture-thread": starts_a_thread,
    "capture-wall-clock-branch": asks_the_clock,
    "capture-rebind-component": rebinds_the_policy,
    "capture-nested-def": defines_a_function,
    "capture-lambda": has_a_lambda,
    "capture-global": counts_globally,
    "capture-nonlocal": _counter(),
    "capture-mutate-iterated": shrinks_what_it_walks,
    "capture-unsupported": returns_inside_try,
    "capture-generator-fn": yields,
}
for _code, _fn in CAPTURED.items():
    TRIGGERS[_code] = functools.partial(
        lambda fn: rose_compiler.compile(fn)(torch.nn.Linear(2, 2), torch.zeros(1, 2)), _fn
    )


@triggers("capture-no-source")
def _no_source() -> object:
    space: dict[str, Any] = {}
    exec("def f(x):\n    return x", space)
    return rose_compiler.compile(space["f"])


@triggers("capture-builtin")
def _builtin() -> object:
    return rose_compiler.compile(len)


@triggers("capture-lambda-fn")
def _lambda() -> object:
    return rose_compiler.compile(lambda x: x)


@triggers("capture-class")
def _class() -> object:
    return rose_compiler.compile(Training)


@triggers("capture-not-callable")
def _value() -> object:
    return rose_compiler.compile(torch.zeros(100))


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


# -- the tests


def test_every_code_has_a_test_that_meets_it() -> None:
    """Here, or in the tests of the part that raises it, by its code."""
    for module in pkgutil.walk_packages(rose_compiler.__path__, "rose_compiler."):
        try:
            importlib.import_module(module.name)
        except ImportError:
            continue
    apart = {Path(__file__).name, "test_errors.py", "test_cli.py"}
    texts = [p.read_text() for p in (ROOT / "tests").rglob("test_*.py") if p.name not in apart]
    named = {code for code in CATALOGUE if any(code in text for text in texts)}
    sources = (ROOT / "rose_compiler").rglob("*.py")
    source = "".join(p.read_text() for p in sources if p.name != "catalogue.py")
    raised = {code for code in CATALOGUE if f'"{code}"' in source}
    assert raised - set(TRIGGERS) - named == set()
    assert set(TRIGGERS) <= set(CATALOGUE), "a code that does not exist is tested"


@functools.cache
def internal_classes() -> frozenset[str]:
    """Names of the package's classes that no user has heard of."""
    public = {name for name in dir(errors) if isinstance(getattr(errors, name), type)}
    public |= {*rose_compiler.__all__, "ShardedEnv", "Compiled", "QuotaPlan"}
    found = set()
    for path in (ROOT / "rose_compiler").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.add(node.name)
    words = {"Shape", "Line", "Part", "Loop", "Branch", "Machine", "Activity", "Window"}
    return frozenset(found - public - words - set(dir(torch.nn)))


@pytest.mark.parametrize("code", sorted(TRIGGERS))
def test_the_message(code: str) -> None:
    with pytest.raises(RoseError) as caught:
        TRIGGERS[code]()
    error = caught.value
    assert error.code == code, error
    text = str(error)
    assert text.startswith(f"[{code}] ")
    assert len(error.what) > 8, error
    assert isinstance(error, CATALOGUE[code].error)
    assert error.help, "no way out is named"
    assert len(text) < 1500, "a message, not a dump"
    assert " at 0x" not in text
    own = f"{error.what} {error.expected} {error.found} {error.help}"  # not the user's line
    found = set(re.findall(r"\b_?[A-Z]\w+", own)) & internal_classes()
    assert not found, f"{found} in: {text}"


def texts_of_errors() -> dict[str, str]:
    """What is written of every message in the package, by where: the catalogue's, and the literal
    parts of what is handed to ``fail`` and ``register``."""
    found = {f"catalogue {c}": f"{e.description} {e.help}" for c, e in CATALOGUE.items()}
    for path in sorted((ROOT / "rose_compiler").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id not in ("fail", "register"):
                continue
            given = [*node.args[1:], *(k.value for k in node.keywords)]
            inner = [i for g in given for i in ast.walk(g) if isinstance(i, ast.Constant)]
            text = " ".join(i.value for i in inner if isinstance(i.value, str))
            found[f"{path.relative_to(ROOT)}:{node.lineno}"] = text
    return found


def test_no_message_names_an_internal_class() -> None:
    found = texts_of_errors()
    assert len(found) > 2 * len(CATALOGUE), "calls of `fail` are seen"
    named = {
        where: words
        for where, text in found.items()
        if (words := set(re.findall(r"\b_?[A-Z]\w+", text)) & internal_classes())
    }
    assert named == {}


@pytest.mark.parametrize("code", sorted(CAPTURED))
def test_a_refusal_points_at_the_line(code: str) -> None:
    fn = CAPTURED[code]
    with pytest.raises(RoseError) as caught:
        TRIGGERS[code]()
    lines, first = inspect.getsourcelines(fn)
    line = first + next(k for k, text in enumerate(lines) if "# here" in text)
    assert caught.value.where is not None
    assert (caught.value.where.file, caught.value.where.line) == (__file__, line)


@pytest.mark.parametrize("code", ["parse-syntax", "parse-unknown-op", "parse-unknown-name"])
def test_an_error_in_a_dump_has_its_line(code: str) -> None:
    with pytest.raises(RoseError, match=r"at fn\.py:4: ") as caught:
        TRIGGERS[code]()
    assert caught.value.code == code


def divides(agent: Any, optimizer: Any, envs: Any, buffer: Any, obs: Any) -> Any:
    for t in range(4):
        with torch.no_grad():
            action = agent.actor(obs)
        obs, _, _, _, _ = envs.step(action.numpy())
        obs = torch.as_tensor(obs, dtype=torch.float32)
        buffer.rewards[t] = torch.as_tensor(1 // buffer.left, dtype=torch.float32)
        buffer.left -= 1
    return obs


def test_a_traceback_through_emitted_code_shows_the_users_line() -> None:
    training = Training()
    fast = rose_compiler.compile(divides, tune=False)
    training.buffer.left = 6  # type: ignore[attr-defined]
    training.run(fast)
    with pytest.raises(ZeroDivisionError) as caught:
        training.run(fast)
    shown = "".join(traceback.format_exception(caught.value))
    line = 1 + next(
        k for k, t in enumerate(Path(__file__).read_text().splitlines()) if "1 // buffer.left," in t
    )
    assert f'File "{__file__}", line {line}' in shown
    assert "buffer.rewards[t] = torch.as_tensor(1 // buffer.left" in shown
    assert f"test_error_tour.py:{line}" in shown, "the note says which operation it was"
    fast.close()
    training.close()
