"""Captured functions do what the functions do: values, states, exceptions, generators.

PYTEST_DONT_REWRITE: a rewritten `assert` has another message than the one captured from source.
"""

from __future__ import annotations

import contextlib
import functools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rose_compiler.frontend.capture import capture
from rose_compiler.ir.ops import BRANCH
from rose_compiler.ir.program import is_call, op_of
from rose_compiler.testing.capturing import assert_same, first_trip

# -- assignments ---------------------------------------------------------------------------------


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


# -- names that may be unbound --------------------------------------------------------------------


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


# -- loops ----------------------------------------------------------------------------------------


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
    for i, (a, b) in enumerate(zip(xs, xs[1:])):  # noqa: B905
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


def star_and_dict_calls(xs, d):
    return pair(*xs), pair(**d), max(*xs, *xs), dict(**d, z=1)


# -- expressions ----------------------------------------------------------------------------------


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


# -- calls ----------------------------------------------------------------------------------------


def pair(x, y=2, *, z=3):
    return x, y, z


def log(xs, value):
    xs.append(value)
    return value


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


def mutable_default(x, acc=[]):  # noqa: B006
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


# -- methods, closures, globals ----------------------------------------------------------------------


class Counter:
    step_size = 2

    def __init__(self):
        self.n = 0
        self.items = []
        self.config = SimpleNamespace(limit=3, deep=SimpleNamespace(k=1))
        self.__private = 5

    def bump(self):
        self.n += self.step_size
        return self.n

    @property
    def double(self):
        return self.n * 2

    @staticmethod
    def static(x):
        return x + 1

    @classmethod
    def make(cls):
        return cls.step_size

    def private(self):
        self.__private += 1
        return self.__private

    def run(self, n):
        for i in range(n):
            self.bump()
            if self.n > self.config.limit:
                self.items.append((i, self.double))
            self.config.deep.k += self.static(i)
            self.last = i
        return self.last, self.n, self.make(), self.private()

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None


class Child(Counter):
    def bump(self):
        return super().bump() + 1

    def run(self, n):
        return super().run(n), self.bump()


def closure_over(n):
    scale = 3
    items = [n]

    def inner(x):
        items.append(x * scale)
        return len(items), items[-1]

    return inner


def rebound_closure():
    n = 1

    def bump():
        nonlocal n
        n += 1

    def inner(k):
        seen = []
        for _ in range(k):
            bump()
            seen.append(n)
        return seen

    return inner


GLOBAL = 1


def bump_global():
    global GLOBAL
    GLOBAL += 1


def reads_rebound_global(k):
    seen = []
    for _ in range(k):
        bump_global()
        seen.append(GLOBAL)
    return [s - seen[0] for s in seen]


def self_changing(obj, k):
    seen = []
    for w in obj.workers:
        w.touch(obj)
        seen.append(obj.level)
        if obj.level > 2:
            seen.append("high")
    return seen


class Worker:
    def touch(self, owner):
        owner.level += 1
        setattr(owner, "named", owner.level)  # noqa: B010


def reads_named(obj):
    for w in obj.workers:
        w.touch(obj)
    return obj.named


# -- modes, exceptions --------------------------------------------------------------------------------


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


def draws(n):
    a = torch.randn(3)
    b = np.random.rand(2)  # noqa: NPY002
    c = random.random()
    for _ in range(n):
        a = a + torch.rand(3) * random.random()
    return a, b, c


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


def static_configuration(cfg, x):
    if cfg.kind == "a" and not cfg.off:
        y = x + cfg.deep.k
    else:
        y = x - 1
    if cfg.none is None:
        y += 1
    if isinstance(cfg.items, list):
        y += len(cfg.items)
    return y * cfg.factor


def config():
    return SimpleNamespace(
        kind="a", off=False, deep=SimpleNamespace(k=4), none=None, items=[1], factor=2.5
    )


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
    "stars": (star_and_dict_calls, lambda: ([1, 2], {"x": 1, "y": 3})),
    "conditional": (conditional, lambda: (2,)),
    "conditional negative": (conditional, lambda: (-2,)),
    "conditional statement": (conditional_statement, lambda: (6, [])),
    "chained comparison": (chained_comparison, lambda: (1, [])),
    "formatted": (formatted, lambda: (6, [])),
    "sliced": (sliced, lambda: ([1, 2, 3, 4], [])),
    "evaluation order": (evaluation_order, lambda: ([1], Counter())),
    "defaults": (defaults_and_keywords, lambda: (7,)),
    "early returns": (early_returns, lambda: (3,)),
    "falls through": (falls_through, lambda: ([],)),
    "recursion": (recursion, lambda: (5,)),
    "return in helper's loop": (calls_it, lambda: ([1, 3, 5],)),
    "decorated": (calls_decorated, lambda: (torch.ones(2, requires_grad=True),)),
    "mutable default": (calls_mutable_default, lambda: (1,)),
    "shadowing": (shadowing, lambda: (2,)),
    "varargs": (calls_varargs, lambda: (2,)),
    "self changing": (
        self_changing,
        lambda: (SimpleNamespace(level=1, workers=[Worker(), Worker()]), 0),
    ),
    "set by name": (reads_named, lambda: (SimpleNamespace(level=1, named=0, workers=[Worker()]),)),
    "rebound global": (reads_rebound_global, lambda: (3,)),
    "modes": (modes, lambda: (torch.ones(2, 2, requires_grad=True),)),
    "other contexts": (other_contexts, lambda: ([],)),
    "handles": (handles, lambda: ([1], 0)),
    "handles error": (handles, lambda: ([1], 3)),
    "raises": (raises_late, lambda: ([], 2)),
    "raises not": (raises_late, lambda: ([], 9)),
    "divides": (divides, lambda: ([1, 2, 0, 3],)),
    "draws": (draws, lambda: (3,)),
    "matches": (matches, lambda: ((1, 2),)),
    "matches dict": (matches, lambda: ({"k": 2},)),
    "imports": (imports, lambda: (4,)),
    "in place": (in_place_tensors, lambda: (torch.arange(4.0),)),
    "static": (static_configuration, lambda: (config(), 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name):
    fn, make = CASES[name]
    assert_same(fn, make)


@pytest.mark.parametrize("kind", [Counter, Child])
def test_methods(kind):
    assert_same(lambda_of("run"), lambda: (kind(), 4))


def lambda_of(name):
    return {"run": run_method}[name]


def run_method(obj, n):
    return obj.run(n)


@pytest.mark.parametrize("kind", [Counter, Child])
def test_bound_method(kind):
    from rose_compiler.ir import interp

    eager, other = kind(), kind()
    expected = eager.run(4)
    found = capture(other.run, (4,), {})
    assert interp.run(found.program, {"n": 4}) == expected
    assert vars(eager) == vars(other)


def test_closure():
    from rose_compiler.ir import interp

    eager, other = closure_over(1), closure_over(1)
    expected = [eager(2), eager(3)]
    program = capture(other, (2,), {}).program
    assert [interp.run(program, {"x": x}) for x in (2, 3)] == expected


def test_closure_rebound_by_a_sibling():
    from rose_compiler.ir import interp

    eager, other = rebound_closure(), rebound_closure()
    expected = eager(3)
    assert interp.run(capture(other, (3,), {}).program, {"k": 3}) == expected


def test_keyword_and_default_arguments():
    assert_same(pair, lambda: (1,), lambda: {"z": 5})
    assert_same(pair, lambda: (1, [2]))


def test_counter_and_static_ifs_are_told_apart():
    """A configuration test leaves no branch behind."""
    program = first_trip(static_configuration, config(), 1).captured.program
    assert not any(is_call(n, BRANCH) for n in program.nodes())
    text = "\n".join(line for n in program.nodes() if is_call(n) for line in op_of(n).source)
    assert "x - 1" not in text and "x + cfg.deep.k" in text
