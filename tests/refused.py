"""Functions that capture refuses, as a user might write them, the line at fault marked."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import rose_compiler
from tests.api.loops import Training

#: What runs into an error, by its code.
TRIGGERS: dict[str, Callable[[], object]] = {}


def triggers(code: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register a function that runs into the error."""

    def keep(trigger: Callable[[], object]) -> Callable[[], object]:
        TRIGGERS[code] = trigger
        return trigger

    return keep


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
    return map(lambda y: y - x, net(x))  # here  # noqa: C417


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
