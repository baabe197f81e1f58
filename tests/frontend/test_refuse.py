"""Each construct that can't be compiled is refused, with file, line, construct and the way out."""

from __future__ import annotations

import concurrent.futures
import inspect
import queue
import threading
import time
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

from rose_compiler.base.errors import CaptureError
from rose_compiler.frontend import source
from rose_compiler.frontend.capture import capture

# -- what is refused -------------------------------------------------------------------------------


class Env(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Box(-1, 1, (1,))

    def step(self, action):
        return np.zeros(2), 0.0, False, False, {}

    def reset(self, *, seed=None, options=None):
        return np.zeros(2), {}


def yields(n):
    x = n
    yield x  # here


async def awaits(n):
    await n  # here


def return_in_loop(n):
    for i in range(n):
        if i > 1:
            return i  # here


def try_around_policy(net, x):
    try:  # here
        return net(x)
    except ValueError:
        x = 1


def rollout(env):
    for _ in range(3):
        env.step(1)


def try_around_hidden_simulator(env):
    try:  # here
        rollout(env)
    finally:
        env.close()


def uses_locals(x):
    return locals()["x"]  # here


def uses_bare_vars(x):
    return vars()["x"]  # here


def uses_frames(x):
    return inspect.currentframe()  # here


def uses_exec(x):
    exec("x = 1")  # here


def uses_eval(x):
    return eval("x")  # here


def manual_enter(x):
    torch.no_grad().__enter__()  # here
    return x * 2


def mode_outlives(x):
    torch.set_grad_enabled(False)  # here
    return x * 2


def starts_thread(x):
    threading.Thread(target=print).start()  # here


def makes_queue(x):
    return queue.Queue()  # here


def puts(q):
    q.put(1)  # here


def submits(pool):
    return pool.submit(print)  # here


def clock_branch(deadline):
    if time.time() > deadline:  # here
        return 1
    return 2


def clock_loop(deadline):
    n = 0
    while time.perf_counter() < deadline:  # here
        n += 1
    return n


def clock_variable(n):
    start = time.time()
    elapsed = time.time() - start
    for _ in range(n):
        if elapsed > 3:  # here
            break


def rebinds_policy(obj, n):
    for _ in range(n):
        obj.net = torch.nn.Linear(1, 1)  # here


def rebinds_simulator(env, n):
    for _ in range(n):
        env = Env()  # here
        env.step(1)


def swaps_policy(obj, n):
    net = obj.net
    for _ in range(n):
        net = obj.other  # here
    return net


def nested_def(x):
    def inner():  # here
        return x

    return inner()


def nested_class(x):
    class Inner:  # here
        pass

    return Inner


def keeps_lambda(xs):
    kept = []
    for k in range(2):
        kept.append(lambda x: x * k)  # here  # noqa: B023
    return kept


def hands_out_a_lambda(xs):
    found = map(lambda x: xs.append(x), [1])  # here  # noqa: C417
    return list(found)


def keeps_generators(rows):
    kept = []
    for k in range(2):
        kept.append(x * k for x in rows)  # here
    return [sum(g) for g in kept]


def loops_over_a_generator(rows):
    scale = 1
    total = 0
    for x in zip((x * scale for x in rows), rows, strict=False):  # here
        scale = scale + 1
        total = total + x[0]
    return total


def takes_all_at_once(rows):
    total = 0
    halves = (x / 2 for x in rows)
    for k in range(2):
        total = total + sum(x * k for x in rows)
        pairs = tuple(x * k for x in rows)
        first, second = (x * k for x in rows)
        total = total + pairs[0] + first + second
    return total + sum(halves)


COUNT = 0


def has_global(x):
    global COUNT  # here
    COUNT += x


def make_nonlocal():
    n = 0

    def has_nonlocal(x):
        nonlocal n  # here
        n += x

    return has_nonlocal


def mutates_iterated(xs):
    for x in xs:
        if x > 1:
            xs.append(x - 1)  # here


def mutates_path(obj):
    for i, x in enumerate(obj.items):
        if x > 1:
            del obj.items[i]  # here


def mutates_dict(d):
    for k in d.keys():  # noqa: SIM118
        d.pop(k)  # here


def break_inside_try(env, n):
    for i in range(n):
        try:  # here
            if i > 3:
                break
        except ValueError:
            n = 1
        env.step(1)
    return n


def modules():
    return SimpleNamespace(net=torch.nn.Linear(2, 1), other=torch.nn.Linear(2, 1))


CASES = {
    "yield": (yields, (1,), "capture-generator-fn"),
    "await": (awaits, (1,), "capture-generator-fn"),
    "return in loop": (return_in_loop, (3,), "capture-return-in-loop"),
    "try around a policy": (
        try_around_policy,
        (torch.nn.Linear(1, 1), 1),
        "capture-try-around-component",
    ),
    "try around a rollout": (
        try_around_hidden_simulator,
        (Env(),),
        "capture-try-around-component",
    ),
    "locals": (uses_locals, (1,), "capture-locals"),
    "vars": (uses_bare_vars, (1,), "capture-locals"),
    "frames": (uses_frames, (1,), "capture-locals"),
    "exec": (uses_exec, (1,), "capture-exec"),
    "eval": (uses_eval, (1,), "capture-eval"),
    "manual enter": (manual_enter, (1,), "capture-manual-enter"),
    "mode that outlives": (mode_outlives, (1,), "capture-manual-enter"),
    "thread": (starts_thread, (1,), "capture-thread"),
    "queue": (makes_queue, (1,), "capture-thread"),
    "put": (puts, (queue.Queue(),), "capture-thread"),
    "future": (submits, (concurrent.futures.ThreadPoolExecutor(1),), "capture-thread"),
    "clock": (clock_branch, (1.0,), "capture-wall-clock-branch"),
    "clock loop": (clock_loop, (1.0,), "capture-wall-clock-branch"),
    "clock variable": (clock_variable, (1,), "capture-wall-clock-branch"),
    "rebound policy": (rebinds_policy, (modules(), 2), "capture-rebind-component"),
    "rebound simulator": (rebinds_simulator, (Env(), 2), "capture-rebind-component"),
    "swapped policy": (swaps_policy, (modules(), 2), "capture-rebind-component"),
    "def": (nested_def, (1,), "capture-nested-def"),
    "class inside": (nested_class, (1,), "capture-nested-def"),
    "kept lambda": (keeps_lambda, ([1],), "capture-lambda"),
    "lambda of an iterator": (hands_out_a_lambda, ([1],), "capture-lambda"),
    "kept generator": (keeps_generators, ([1],), "capture-lambda"),
    "generator of a loop": (loops_over_a_generator, ([1],), "capture-lambda"),
    "global": (has_global, (1,), "capture-global"),
    "nonlocal": (make_nonlocal(), (1,), "capture-nonlocal"),
    "mutated list": (mutates_iterated, ([1],), "capture-mutate-iterated"),
    "mutated path": (mutates_path, (SimpleNamespace(items=[1]),), "capture-mutate-iterated"),
    "mutated dict": (mutates_dict, ({},), "capture-mutate-iterated"),
    "break inside try": (break_inside_try, (Env(), 2), "capture-unsupported"),
}


def line_of(fn) -> int:
    """The line marked ``# here``."""
    lines, first = inspect.getsourcelines(fn)
    return first + next(i for i, line in enumerate(lines) if "# here" in line)


@pytest.mark.parametrize("name", CASES)
def test_refused(name):
    fn, args, code = CASES[name]
    with pytest.raises(CaptureError) as caught:
        capture(fn, args, {})
    error = caught.value
    assert error.code == code
    assert error.where is not None
    assert error.where.file == __file__
    assert error.where.line == line_of(fn)
    assert error.help, "no way out is named"
    assert str(error.where) in str(error)
    construct = inspect.getsource(fn)
    quoted = str(error).split("`")
    assert len(quoted) < 2 or quoted[1].split("(")[0].split()[0] in construct


# -- what can't be compiled at all -----------------------------------------------------------------


class Callable:
    def __call__(self):
        return 1


def made_without_source():
    space: dict = {}
    exec("def f(x):\n    return x", space)
    return space["f"]


WHOLE = {
    "builtin": (len, "capture-builtin"),
    "builtin method": ([].append, "capture-builtin"),
    "lambda": (lambda x: x, "capture-lambda-fn"),
    "no source": (made_without_source(), "capture-no-source"),
    "generator": (yields, "capture-generator-fn"),
    "coroutine": (awaits, "capture-generator-fn"),
    "class": (Env, "capture-class"),
    "callable object": (Callable(), "capture-not-callable"),
    "number": (3, "capture-not-callable"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_not_compilable(name):
    fn, code = WHOLE[name]
    with pytest.raises(CaptureError) as caught:
        source.read(fn)
    assert caught.value.code == code
    assert caught.value.help
    if hasattr(fn, "__code__") or isinstance(fn, type):
        assert caught.value.where is not None


# -- what is not refused ---------------------------------------------------------------------------


def logs_the_clock(n):
    start = time.time()
    total = 0
    for i in range(n):
        total += i
        if i % 2 == 0:
            print(total / (time.time() - start + 1e-9))
    return total


def iterates_over_a_copy(xs):
    for x in list(xs):
        if x > 1:
            xs.append(x - 1)
    return xs


def helper_with_lambda(xs):
    return sorted(xs, key=lambda x: -x)


def calls_a_helper_that_would_be_refused(xs):
    return helper_with_lambda(xs), helper_with_try(xs)


def helper_with_try(xs):
    try:
        return xs[10]
    except IndexError:
        return None


def leaves_the_mode(x):
    manual_enter(x)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (logs_the_clock, (3,)),
        (iterates_over_a_copy, ([1, 2],)),
        (calls_a_helper_that_would_be_refused, ([1, 2],)),
        (takes_all_at_once, ([1, 2],)),
    ],
)
def test_not_refused(fn, args):
    capture(fn, args, {})


def test_a_mode_left_by_a_helper_is_refused():
    """It would reach every later operation, whatever lane that runs on."""
    with pytest.raises(CaptureError, match="capture-manual-enter"):
        capture(leaves_the_mode, (1,), {})
