"""Functions over objects, closures and globals.

The code is as users write it, not as this project does.
PYTEST_DONT_REWRITE: a rewritten `assert` has another message than the one captured from source.
"""

# ruff: noqa

from __future__ import annotations

from types import SimpleNamespace


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
        setattr(owner, "named", owner.level)


def reads_named(obj):
    for w in obj.workers:
        w.touch(obj)
    return obj.named


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
    "self changing": (
        self_changing,
        lambda: (SimpleNamespace(level=1, workers=[Worker(), Worker()]), 0),
    ),
    "set by name": (reads_named, lambda: (SimpleNamespace(level=1, named=0, workers=[Worker()]),)),
    "rebound global": (reads_rebound_global, lambda: (3,)),
    "static": (static_configuration, lambda: (config(), 1)),
}
