"""Functions whose statements, expressions and exceptions capture has to keep.

The code is as users write it, not as this project does.
PYTEST_DONT_REWRITE: a rewritten `assert` has another message than the one captured from source.
"""

# ruff: noqa

from __future__ import annotations

from types import SimpleNamespace

import torch


def chained_and_mixed(obj, xs):
    a = b = 3
    obj.x, xs[0], (c, *rest) = 1, 2, (4, 5, 6)
    xs[1] = obj.y = last = a + c
    (d, [e, f]), g = (1, [2, 3]), 4
    return a, b, c, rest, last, d, e, f, g


def swap(a, b):
    a, b = b, a
    a, b = b + 1, a * 2
    return a, b


def parallel_uses_old_values(x):
    a, b = x, 1
    for _ in range(4):
        a, b = b, a + b
    return a, b


def augmented(obj, xs, t):
    total = 0
    for i in range(4):
        total += i
        obj.count += total
        xs[i % 2] -= 1
        obj.inner["k"] *= 2
        t[i] += total
        t *= 2
    total **= 2
    return total


def augmented_list_is_in_place(xs):
    ys = xs
    ys += [1]
    return ys, xs, ys is xs


def annotated(x):
    a: int = x
    b: float
    b = a / 2
    return a, b


def walrus(xs):
    if (n := len(xs)) > 2:
        m = n * 2
    else:
        m = -n
    total = 0
    while (total := total + 1) < 5:
        pass
    ys = [last := v for v in xs]
    return n, m, total, ys, last, (z := 4) + z


def walrus_beside_a_call(x):
    return pair(x, (y := x + 1)), y


def deletion(xs):
    a = 1
    del a
    del xs[0], xs[-1]
    a = 2
    return a


def asserts(x):
    assert x > 1, f"{x} is too small"
    return x


def nested_tuples(p):
    (a, (b, c)), d = p
    return [(a, b), {"c": (c, d)}]


def comprehension_names_are_its_own(xs):
    i = 10
    a = [i for i in xs]
    b = {k: v for k, v in enumerate(xs)}
    c = sum(i * i for i in xs)
    return i, a, b, c


def comprehension_name_bound_later(xs):
    a = [i for i in xs]
    for i in range(2):
        a.append(i)
    return a


def no_trip_leaves_unbound(n):
    for i in range(n):
        x = i
    return x


def unbound_on_one_way(flag):
    if flag > 0:
        x = 1
    return x


def unbound_but_not_read(n):
    for i in range(n):
        if i > 0:
            y = x + 1
        x = i
    return y


def unbound_copied(flag):
    if flag > 0:
        x = 1
    y = x
    return 3


def read_before_assignment(n):
    y = x + 1
    x = n
    return y


def loop_variable_afterwards(n):
    i = -1
    for i in range(n):
        pass
    return i


def deleted_in_a_loop(n):
    x = 0
    for i in range(n):
        x = x + 1
        if i == 1:
            del x
    return x


def conditional(x):
    y = 1 if x > 0 else -1
    z = (x and y) or 5
    return y, z, "a" if x == 2 else "b" if x == 3 else "c"


def conditional_statement(x, xs):
    xs.append(1) if x > 0 else xs.append(2)
    x > 5 and xs.append(3)


def chained_comparison(x, xs):
    return 0 < x < log(xs, 5) < log(xs, 0) < log(xs, 9)


def formatted(x, xs):
    return f"{log(xs, 1)} {x:>4} {log(xs, 2)!r:{x}}"


def sliced(xs, ys):
    return xs[log(ys, 1) : log(ys, 3)], xs[:: log(ys, 2)]


def evaluation_order(xs, obj):
    a = xs[0] + log(xs, 100) + xs[0] + len(xs)
    b = [len(xs), log(xs, 1), len(xs), obj.bump(), obj.n]
    c = {len(xs): log(xs, 2), obj.bump(): len(xs)}
    d = (obj.n, obj.bump(), obj.n)
    obj.n += obj.bump()
    xs[len(xs) - 1] = log(xs, 7)
    return a, b, c, d, pair(*[len(xs)], y=log(xs, 3)), xs[log(xs, 0)]


def matches(p):
    match p:
        case (a, b):
            return a + b
        case {"k": v}:
            r = v
        case _:
            r = None
    return r


def imports(x):
    import math
    from os import path as p

    return math.sqrt(x), p.join("a", "b")


def in_place_tensors(t):
    view = t[1:]
    view += 1
    t[0] = view.sum()
    other = t.clone()
    other.mul_(2)
    t.copy_(other)
    return view


def handles(xs, k):
    try:
        y = xs[k]
    except IndexError as error:
        y = str(error)
    finally:
        xs.append("f")
    try:
        z = int("4")
    except ValueError:
        z = 0
    else:
        z += 1
    return y, z


def raises_late(xs, k):
    for i in range(5):
        xs.append(i)
        if i == k:
            raise ValueError(f"at {i}")
    return xs


def divides(xs):
    total = 0
    for i in range(len(xs)):
        total += 10 // xs[i]
        xs[i] = -1
    return total


def pair(x, y=2, *, z=3):
    return x, y, z


def log(xs, value):
    xs.append(value)
    return value


class Tally:
    def __init__(self):
        self.n = 0

    def bump(self):
        self.n += 2
        return self.n


CASES = {
    "chained": (chained_and_mixed, lambda: (SimpleNamespace(), [0, 0])),
    "swap": (swap, lambda: (1, [2])),
    "parallel": (parallel_uses_old_values, lambda: (0,)),
    "augmented": (
        augmented,
        lambda: (SimpleNamespace(count=1, inner={"k": 1}), [1, 2], torch.ones(4)),
    ),
    "augmented list": (augmented_list_is_in_place, lambda: ([0],)),
    "annotated": (annotated, lambda: (3,)),
    "walrus": (walrus, lambda: ([1, 2, 3],)),
    "walrus short": (walrus, lambda: ([1],)),
    "walrus beside a call": (walrus_beside_a_call, lambda: (1,)),
    "deletion": (deletion, lambda: ([1, 2, 3],)),
    "assert": (asserts, lambda: (2,)),
    "assert fails": (asserts, lambda: (0,)),
    "nested tuples": (nested_tuples, lambda: (((1, (2, 3)), 4),)),
    "comprehension": (comprehension_names_are_its_own, lambda: ([1, 2],)),
    "comprehension later": (comprehension_name_bound_later, lambda: ([1, 2],)),
    "no trip": (no_trip_leaves_unbound, lambda: (0,)),
    "one trip": (no_trip_leaves_unbound, lambda: (1,)),
    "unbound way": (unbound_on_one_way, lambda: (0,)),
    "bound way": (unbound_on_one_way, lambda: (1,)),
    "unbound not read": (unbound_but_not_read, lambda: (3,)),
    "unbound not read once": (unbound_but_not_read, lambda: (1,)),
    "unbound copied": (unbound_copied, lambda: (0,)),
    "read before": (read_before_assignment, lambda: (0,)),
    "loop variable": (loop_variable_afterwards, lambda: (3,)),
    "loop variable no trip": (loop_variable_afterwards, lambda: (0,)),
    "deleted in loop": (deleted_in_a_loop, lambda: (1,)),
    "deleted in loop, read": (deleted_in_a_loop, lambda: (3,)),
    "deleted in loop, end": (deleted_in_a_loop, lambda: (2,)),
    "conditional": (conditional, lambda: (2,)),
    "conditional negative": (conditional, lambda: (-2,)),
    "conditional statement": (conditional_statement, lambda: (6, [])),
    "chained comparison": (chained_comparison, lambda: (1, [])),
    "formatted": (formatted, lambda: (6, [])),
    "sliced": (sliced, lambda: ([1, 2, 3, 4], [])),
    "evaluation order": (evaluation_order, lambda: ([1], Tally())),
    "handles": (handles, lambda: ([1], 0)),
    "handles error": (handles, lambda: ([1], 3)),
    "raises": (raises_late, lambda: ([], 2)),
    "raises not": (raises_late, lambda: ([], 9)),
    "divides": (divides, lambda: ([1, 2, 0, 3],)),
    "matches": (matches, lambda: ((1, 2),)),
    "matches dict": (matches, lambda: ({"k": 2},)),
    "imports": (imports, lambda: (4,)),
    "in place": (in_place_tensors, lambda: (torch.arange(4.0),)),
}
