# ruff: noqa: RUF059, B007, B905 (loops as users write them)
"""The rest of the language around simulators and trainers does what it does eagerly."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.testing.capturing import assert_same, difference


class Env:
    num_envs = 1
    native_async = False

    def shards(self):
        return [self]

    def __init__(self):
        self.x = torch.zeros(2)
        self.n = 0

    def step(self, a):
        self.x = self.x * 0.9 + a
        self.n += 1
        return self.x.clone(), float(self.x.sum()), self.n % 5 == 4, False, {}


class Man:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("in")
        return self

    def __exit__(self, *e):
        self.log.append("out")
        return False


class Swallow:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("in")
        return self

    def __exit__(self, *e):
        self.log.append(str(e[1]))
        return True


CASES = []


def case(f):
    CASES.append(f)
    return f


@case
def for_else_plain(net, opt, env, x, log):
    for i in range(4):
        if i == log.__len__() + 9:
            break
    else:
        log.append("else")
    for i in range(4):
        if i == 2:
            break
    else:
        log.append("no")
    return i


@case
def for_else_env(net, opt, env, x, log):
    for i in range(9):
        obs, r, d, *_ = env.step(x)
        if d:
            break
    else:
        log.append("never done")
    for i in range(2):
        obs, r, d, *_ = env.step(x)
        if r > 100:
            break
    else:
        obs, r, d, *_ = env.step(x * 2)
        log.append("else")
    return obs, i


@case
def for_else_train(net, opt, env, x, log):
    for e in range(5):
        loss = (net(x) - x).pow(2).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if loss < 0.01:
            log.append(e)
            break
    else:
        log.append("not converged")
    while e < 8:
        e += 1
        obs, *_ = env.step(x)
        if e == 20:
            break
    else:
        log.append("end")
    return e


@case
def flag_break(net, opt, env, x, log):
    stop = False
    for e in range(4):
        for b in range(3):
            loss = (net(x) - x * b).pow(2).sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
            log.append(float(loss.detach()))
            if loss > 3 and e == 1:
                stop = True
                break
        if stop:
            break
        obs, *_ = env.step(x)
    return stop, e, b


@case
def while_budget(net, opt, env, x, log):
    budget = 13.0
    used = 0
    while used < budget:
        obs, r, d, *_ = env.step(x)
        used += 1 + (2 if d else 0)
        if d:
            continue
        log.append(used)
    return used


@case
def while_true(net, opt, env, x, log):
    tries = 0
    while True:
        obs, r, d, *_ = env.step(x)
        tries += 1
        if r > 4:
            break
        log.append(r)
    return tries, obs


@case
def enum_zip(net, opt, env, x, log):
    acts = [x, x * 2, x * 3]
    names = ("a", "b", "c")
    for k, (n, a) in enumerate(zip(names, acts)):
        obs, r, d, *_ = env.step(a)
        log.append((k, n, r))
    for k, a in enumerate(acts, start=3):
        obs, *_ = env.step(a * k)
    for (n, a), b in zip(zip(names, acts), reversed(acts)):
        obs, *_ = env.step(a + b)
        log.append(n)
    return obs, k


@case
def maybe_unbound(net, opt, env, x, log):
    for i in range(3):
        obs, r, d, *_ = env.step(x)
        if r > 1e9:
            late = obs
    log.append("before")
    return late


@case
def maybe_unbound2(net, opt, env, x, log):
    for i in range(0):
        y = env.step(x)
    print(y)


@case
def maybe_unbound3(net, opt, env, x, log):
    for i in range(6):
        obs, r, d, *_ = env.step(x)
        if d:
            last = obs
        if i > 4:
            log.append(last)
    return last


def gen(env, x, n):
    total = 0
    for i in range(n):
        obs, r, *_ = env.step(x)
        total += r
        yield obs, total


@case
def generators(net, opt, env, x, log):
    g = gen(env, x, 5)
    first, t = next(g)
    for obs, total in g:
        loss = net(obs).sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.append(total)
    for obs, total in gen(env, x, 3):
        o2, *_ = env.step(obs)
        log.append(total)
    return next(g, None)


@case
def managers(net, opt, env, x, log):
    with Man(log) as m:
        obs, *_ = env.step(x)
        m.log.append("mid")
    with Man(log), torch.no_grad():
        y = net(x)
        loss = y.requires_grad
    with Swallow(log):
        raise ValueError("x")
    with contextlib.nullcontext():
        z = x + 1
    return obs, y, loss, z


@case
def managers_train(net, opt, env, x, log):
    for i in range(3):
        with Man(log):
            loss = net(x).sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
        obs, *_ = env.step(x)
    return loss


@case
def swallow_env(net, opt, env, x, log):
    for i in range(4):
        with Swallow(log):
            obs, r, d, *_ = env.step(x)
            if i == 2:
                raise RuntimeError("boom")
            log.append(i)
    return obs


def closure_maker():
    lr = 0.1

    def scale(v):
        return v * lr

    def setlr(v):
        nonlocal lr
        lr = v

    return scale, setlr


SCALE, SETLR = closure_maker()


@case
def closures(net, opt, env, x, log):
    for i in range(4):
        obs, *_ = env.step(SCALE(x))
        SETLR(0.1 * i)
        log.append(float(SCALE(x).sum()))
    SETLR(0.1)
    return obs


G = 2


def bump():
    global G
    G += 1


@case
def late_globals(net, opt, env, x, log):
    for i in range(3):
        obs, *_ = env.step(x * G)
        bump()
        log.append(G)
    return obs


@case
def else_with_an_outer_break(net, opt, env, x, log):
    for i in range(4):
        for j in range(3):
            obs, r, d, *_ = env.step(x)
            if r > 9:
                break
        else:
            log.append(i)
            if i == 2:
                break
            continue
        log.append("over")
    else:
        log.append("all")
    return i, j, obs


def make():
    global G
    G = 2
    SETLR(0.1)
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.1), Env(), torch.ones(2), []


@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
def test_captured(fn):
    assert_same(fn, make)


def ended(fn):
    """How a run ended, and what it left behind."""
    arguments = make()
    torch.manual_seed(5)
    try:
        return fn(*arguments), arguments
    except UnboundLocalError as error:
        return type(error), arguments


@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
def test_scheduled(fn):
    compiled = rose_compiler.compile(fn, numerics="bitwise", tune=False)
    for number in range(3):
        assert difference(ended(fn), ended(compiled)) is None, f"call {number}"
    compiled.close()


def test_what_is_not_assigned_raises_as_it_does_eagerly():
    eager = assert_same(maybe_unbound, make)
    assert isinstance(eager.error, UnboundLocalError)
