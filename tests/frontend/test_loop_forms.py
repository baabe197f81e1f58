"""Loops that are written otherwise than as a range, and exits that leave no loop."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
import torch

from rose_compiler.base.errors import CaptureError
from rose_compiler.frontend.capture import capture
from rose_compiler.ir.program import is_exit
from rose_compiler.testing.capturing import assert_same


class Counter(gym.Env[Any, Any]):
    """Counts its steps."""

    def __init__(self) -> None:
        self.count = 0

    def step(self, action: Any) -> Any:
        self.count += int(action)
        return self.count, 0.5 * self.count, False, False, {}


class Config:
    total = 11
    frames = 3
    share = 0.5


config = Config()


def budget(env, log, n):
    used = 0
    while used < n:
        obs, reward, *_ = env.step(used)
        log.append((obs, reward))
        used += 2
    return used, log


def up_to(env, log, n):
    log.append("begin")
    t = 1
    while t <= config.total:
        obs, *_, info = env.step(t)
        t += config.frames
        if obs % 2:
            continue
        log.append((t, info))
    return t, log


def left(env, log, n):
    t = 0
    while t < n:
        t += 1
        obs, *_ = env.step(t)
        if obs > 12:
            break
    return t, log


def warmed_up(env, log, n):
    for t in range(n):
        obs, reward, _, _, _ = env.step(t)
        if obs < 4:
            log.append("early")
            continue
        log.append(obs)
        if reward > 6:
            continue
        log.append(reward)
    return log, t


def skipped(env, log, n):
    for t in range(n):
        if t % 3 == 1:
            continue
        obs, *rest = env.step(t)
        log.append((obs, rest))
    return log


def inside(env, log, n):
    for t in range(n):
        if t > 1:
            if t % 2:
                continue
            log.append(t)
        env.step(t)
    return log


FORMS = {budget: 0, up_to: 0, left: 1, warmed_up: 0, skipped: 1, inside: 1}


@pytest.mark.parametrize("fn", FORMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("n", [0, 1, 9])
def test_equals_eager(fn: Any, n: int) -> None:
    if n or fn is not warmed_up:  # its loop variable would not be bound
        assert_same(fn, lambda: (Counter(), [], n))


@pytest.mark.parametrize("fn", FORMS, ids=lambda f: f.__name__)
def test_only_what_leaves_a_loop_is_an_exit(fn: Any) -> None:
    program = capture(fn, (Counter(), [], 9), {}).program
    assert sum(is_exit(n) for n in program.nodes()) == FORMS[fn]
    assert all(loop.facts.kind == "range" for loop in program.loops())


def other_limit(env, log, n):
    t, limit = 0, n
    while t < limit:
        env.step(t)
        t += 1
        limit -= 1
    return t


def other_step(env, log, n):
    t = 0
    while t < n:
        env.step(t)
        t += 1
        if t == 3:
            t += 2
    return t


def of_a_half(env, log, n):
    t = 0
    while t < n * config.share:
        env.step(t)
        t += 1
    return t


@pytest.mark.parametrize("fn", [other_limit, other_step, of_a_half], ids=lambda f: f.__name__)
def test_what_is_no_range_stays_a_test(fn: Any) -> None:
    assert_same(fn, lambda: (Counter(), [], 8))
    program = capture(fn, (Counter(), [], 8), {}).program
    assert [loop.facts.kind for loop in program.loops()] == ["while"]


def timed_by_import(env, log, n):
    import time
    from time import perf_counter as clock

    start = clock()
    for t in range(n):
        if time.time() - start > 3600:
            log.append(t)
    return log


def test_a_clock_imported_inside_is_a_clock() -> None:
    with pytest.raises(CaptureError, match="clock"):
        capture(timed_by_import, (Counter(), [], 3), {})


def kept_by_break(env, log, n):
    for _ in range(2):
        if n > 99:
            last = len(log)
        if config.frames < 5:  # is folded
            break
        last = 7
    return last


def kept_by_continue(env, log, n):
    for k in range(2):
        if n > 99:
            last = k
        with torch.no_grad():
            if config.frames < 5:
                continue
            last = 7
    return last


def kept_in_try(env, log, n):
    for k in range(2):
        if n > 99:
            last = k
        try:
            if n < config.total:
                break
            last = 7
        finally:
            log.append(k)
    return last


@pytest.mark.parametrize("fn", [kept_by_break, kept_by_continue, kept_in_try])
def test_what_an_exit_needs_is_live(fn: Any) -> None:
    """A value that every way but the exit replaces is still the one behind the loop."""
    assert_same(fn, lambda: (Counter(), [], 100))
