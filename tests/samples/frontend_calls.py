"""Functions that call helpers, decorated ones and recursive ones, under modes of torch.

The code is as users write it, not as this project does.
PYTEST_DONT_REWRITE: a rewritten `assert` has another message than the one captured from source.
"""

# ruff: noqa

from __future__ import annotations

import contextlib
import functools

import torch

from tests.samples.frontend_statements import pair


def star_and_dict_calls(xs, d):
    return pair(*xs), pair(**d), max(*xs, *xs), dict(**d, z=1)


def defaults_and_keywords(x):
    a, b, c = pair(x)
    d, e, f = pair(y=x, x=1)
    g = pair(x, z=x)
    return a, b, c, d, e, f, g


def helper_with_early_returns(x):
    if x < 0:
        return "negative"
    if x == 0:
        return "zero"
    y = x * 2
    if y > 10:
        return y
    return y, x


def early_returns(x):
    a = helper_with_early_returns(-1)
    b = helper_with_early_returns(0)
    c = helper_with_early_returns(x)
    d = helper_with_early_returns(x * 10)
    return a, b, c, d


def returns_nothing(xs):
    if len(xs) > 1:
        return
    xs.append(1)


def falls_through(xs):
    return [returns_nothing(xs), returns_nothing(xs), xs]


def factorial(n):
    return 1 if n <= 1 else n * factorial(n - 1)


def recursion(n):
    return factorial(n) + factorial(3)


def returns_in_a_loop(xs):
    for x in xs:
        if x > 2:
            return x
    return None


def calls_it(xs):
    return returns_in_a_loop(xs), returns_in_a_loop([])


@torch.no_grad()
def decorated(x):
    return x * 2


@torch.inference_mode()
def inferred(x):
    return torch.is_inference_mode_enabled(), x * 2


def counted(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return fn(*args, **kwargs)

    wrapper.calls = 0
    return wrapper


@counted
def user_decorated(x, y=1):
    return x + y


def calls_decorated(x):
    a = decorated(x)
    b = x * 2
    flag, c = inferred(x)
    return a, a.requires_grad, b.requires_grad, flag, c * 1, user_decorated(3, y=4)


def mutable_default(x, acc=[]):
    acc.append(x)
    return list(acc)


def calls_mutable_default(x):
    a = mutable_default(x)
    b = mutable_default(x + 1)
    n = len(a)
    mutable_default.__defaults__[0].clear()
    return b[n - 1 :]


def shadowing(x):
    def_ = x
    x = helper_shadows(def_)
    return x, def_


def helper_shadows(x):
    def_ = x * 3
    x = def_ + 1
    i = 5
    return x + i


def varargs(*args, **kwargs):
    return args, kwargs


def calls_varargs(x):
    return varargs(x, 1, a=2), varargs()


def modes(x):
    a = x * 2
    with torch.no_grad():
        b = x * 2
        with torch.enable_grad():
            c = x * 2
        for _ in range(2):
            d = x * 3
    with torch.inference_mode():
        e = x * 2
        inference = e.is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        f = x @ x
    with torch.set_grad_enabled(False):
        g = x + 1
    return [v.requires_grad for v in (a, b, c, d, g)], inference, f.dtype, f


def other_contexts(xs):
    with contextlib.suppress(ValueError):
        xs.append(1)
        raise ValueError
    with contextlib.nullcontext(5) as y:
        xs.append(y)
    return xs


CASES = {
    "stars": (star_and_dict_calls, lambda: ([1, 2], {"x": 1, "y": 3})),
    "defaults": (defaults_and_keywords, lambda: (7,)),
    "early returns": (early_returns, lambda: (3,)),
    "falls through": (falls_through, lambda: ([],)),
    "recursion": (recursion, lambda: (5,)),
    "return in helper's loop": (calls_it, lambda: ([1, 3, 5],)),
    "decorated": (calls_decorated, lambda: (torch.ones(2, requires_grad=True),)),
    "mutable default": (calls_mutable_default, lambda: (1,)),
    "shadowing": (shadowing, lambda: (2,)),
    "varargs": (calls_varargs, lambda: (2,)),
    "modes": (modes, lambda: (torch.ones(2, 2, requires_grad=True),)),
    "other contexts": (other_contexts, lambda: ([],)),
}
