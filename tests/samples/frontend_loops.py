"""Functions of loops.

The code is as users write it, not as this project does.
PYTEST_DONT_REWRITE: a rewritten `assert` has another message than the one captured from source.
"""

# ruff: noqa

from __future__ import annotations

import random

import numpy as np
import torch


def ranges(a, b, c):
    seen = []
    for i in range(a):
        for j in range(a, b):
            for k in range(b, a - 5, -c):
                seen.append((i, j, k))
    for i in reversed(range(a, b, c)):
        seen.append(i)
    for i in reversed(range(7)):
        seen.append(i)
    for i in range(5, 0, -2):
        seen.append(i)
    return seen


def bounds_are_read_once(n):
    seen = []
    m = n
    for i in range(m):
        m = 0
        seen.append(i)
    return seen, m


def loop_variable_rebound(n):
    seen = []
    for i in range(n):
        seen.append(i)
        i = i * 10
        seen.append(i)
    return seen, i


def other_iterables(xs, d):
    out = []
    for i, (a, b) in enumerate(zip(xs, xs[1:])):
        out.append((i, a - b))
    for key, value in d.items():
        out.append((key, value))
    for c in "ab":
        out.append(c)
    for x in (y * 2 for y in xs):
        out.append(x)
    return out


def while_on_a_counter(n):
    i = total = 0
    while i < n:
        i += 1
        if i == 2:
            continue
        total += i
    return i, total


def while_true(xs):
    i = 0
    while True:
        if i >= len(xs):
            break
        if xs[i] < 0:
            i += 1
            continue
        xs[i] = 0
        i += 1
    return i


def exits_deep_in_ifs(xs):
    out = []
    for i in range(len(xs)):
        if xs[i] > 0:
            if xs[i] > 5:
                out.append("big")
                break
            elif xs[i] == 3:
                out.append("three")
                continue
            out.append("small")
        else:
            out.append("none")
            if i == 0:
                continue
            out.append("late")
        out.append(i)
    return out


def flag_and_break(n):
    done = False
    total = 0
    for e in range(n):
        for i in range(n):
            total += i
            if total > 7:
                done = True
                break
        if done:
            break
    return total, e, i


def loop_else(xs, y):
    for x in xs:
        if x == y:
            where = "found"
            break
    else:
        where = "missing"
    n = 0
    while n < 2:
        n += 1
    else:
        n = 10
    return where, n


def with_in_a_loop(xs):
    out = []
    for i in range(len(xs)):
        with torch.no_grad():
            if xs[i] < 0:
                break
            out.append(torch.is_grad_enabled())
        out.append(torch.is_grad_enabled())
    return out


def loop_in_branch(flag, n):
    total = 0
    if flag > 0:
        for i in range(n):
            total += i
    else:
        for i in range(n):
            total -= i
    return total


def progress(iterable):
    yield from iterable


def wrapped_iteration(n):
    out = []
    for i in progress(range(n)):
        out.append(i)
    return out


def draws(n):
    a = torch.randn(3)
    b = np.random.rand(2)
    c = random.random()
    for _ in range(n):
        a = a + torch.rand(3) * random.random()
    return a, b, c


CASES = {
    "ranges": (ranges, lambda: (2, 4, 2)),
    "ranges empty": (ranges, lambda: (0, -3, 1)),
    "bounds once": (bounds_are_read_once, lambda: (3,)),
    "loop variable rebound": (loop_variable_rebound, lambda: (3,)),
    "other iterables": (other_iterables, lambda: ([3, 1, 2], {"a": 1, "b": 2})),
    "while": (while_on_a_counter, lambda: (4,)),
    "while true": (while_true, lambda: ([1, -1, 2],)),
    "deep exits": (exits_deep_in_ifs, lambda: ([-1, 1, 3, -2, 9, 1],)),
    "flag and break": (flag_and_break, lambda: (5,)),
    "flag and no break": (flag_and_break, lambda: (2,)),
    "flag, no trip": (flag_and_break, lambda: (0,)),
    "loop else": (loop_else, lambda: ([1, 2], 2)),
    "loop else missing": (loop_else, lambda: ([1, 2], 3)),
    "with in loop": (with_in_a_loop, lambda: ([1, 2, -1, 3],)),
    "loop in branch": (loop_in_branch, lambda: (1, 3)),
    "loop in other branch": (loop_in_branch, lambda: (0, 3)),
    "wrapped": (wrapped_iteration, lambda: (3,)),
    "draws": (draws, lambda: (3,)),
}
