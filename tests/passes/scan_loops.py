"""Loops over time as published code has them: what ``test_scan_loops`` compiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

T = 20
SCALE = 0.5


def cleanrl(buf: Any, k: Any, value: Tensor, done: Tensor) -> Any:
    """CleanRL: a first trip of its own, a number to start with, two targets, values of (1, n)."""
    value = value.reshape(1, -1)
    advantages = torch.zeros_like(buf.rewards)
    lastgaelam: Any = 0
    for t in reversed(range(T)):
        if t == T - 1:
            nextnonterminal = 1.0 - done
            nextvalues = value
        else:
            nextnonterminal = 1.0 - buf.dones[t + 1]
            nextvalues = buf.values[t + 1]
        delta = buf.rewards[t] + k.gamma * nextvalues * nextnonterminal - buf.values[t]
        advantages[t] = lastgaelam = delta + k.gamma * k.lam * nextnonterminal * lastgaelam
    return advantages, advantages + buf.values, lastgaelam


def shifted(buf: Any, k: Any, value: Tensor, done: Tensor) -> Any:
    """The next value handed on from trip to trip, masks of booleans."""
    advantage = torch.zeros_like(value)
    following = value
    for t in range(T - 1, -1, -1):
        alive = (~buf.mask[t]).float()
        delta = buf.rewards[t] + k.gamma * following * alive - buf.values[t]
        advantage = delta + k.gamma * k.lam * alive * advantage
        buf.out[t] = advantage + buf.values[t]
        following = buf.values[t]
    return advantage, following


def returns(buf: Any, k: Any, value: Tensor, done: Tensor) -> Any:
    """Discounted returns, the index counted down by hand."""
    ret = value
    for i in range(T):
        step = T - 1 - i
        ret = SCALE * buf.rewards[step] + k.gamma * ret * (1.0 - buf.dones[step])
        buf.out[step] = ret
    return ret


def through_a_buffer(buf: Any, k: Any, value: Tensor, done: Tensor) -> Any:
    """Returns that hang on the row that the trip before has stored."""
    for t in reversed(range(T)):
        following = value if t == T - 1 else buf.out[t + 1]
        buf.out[t] = buf.rewards[t] + k.gamma * following * (1 - buf.dones[t])
    return buf.out


def vtrace(buf: Any, k: Any, value: Tensor, done: Tensor) -> Any:
    """V-trace (IMPALA, equation 1), importance weights computed on the way."""
    acc = torch.zeros_like(value)
    following = value
    with torch.no_grad():
        for t in reversed(range(T)):
            rho = torch.clamp(torch.exp(buf.logratio[t]), max=1.0)
            delta = rho * (buf.rewards[t] + k.gamma * following - buf.values[t])
            acc = delta + k.gamma * rho * acc
            buf.out[t] = acc + buf.values[t]
            following = buf.values[t]
    return acc


def episodes(buf: Any, k: Any, value: Tensor, done: Tensor) -> Any:
    """Returns and lengths of episodes so far, in place and by masks."""
    total = torch.zeros_like(value)
    length = torch.zeros_like(value)
    for t in range(T):
        total += buf.rewards[t]
        length = length + 1
        buf.out[t] = total
        buf.more[t] = length
        total *= 1.0 - buf.dones[t]
        length = torch.where(buf.mask[t], torch.zeros_like(length), length)
    return total, length


def any_length(buf: Any, k: Any, value: Tensor, done: Tensor) -> Any:
    """A number of trips that is read off a tensor."""
    steps = buf.rewards.shape[0]
    advantages = torch.zeros_like(buf.rewards)
    last: Any = 0.0
    for t in reversed(range(steps)):
        following = value if t == steps - 1 else buf.values[t + 1]
        delta = buf.rewards[t] + k.gamma * following * (1 - buf.dones[t]) - buf.values[t]
        last = delta + k.gamma * k.lam * (1 - buf.dones[t]) * last
        advantages[t] = last
    return advantages, last


def both_ends(buf: Any, k: Any, value: Tensor, done: Tensor) -> Any:
    """Trips at both ends that are not like the others."""
    steps = len(buf.rewards)
    total = value
    for t in range(steps):
        if t > 0:
            total = total * buf.values[t - 1]
        if t < steps - 1:
            total = total - buf.values[t + 1]
        buf.out[t] = total
    return total


LOOPS = (any_length, both_ends, cleanrl, shifted, returns, through_a_buffer, vtrace, episodes)


def in_numpy(buf: Any, k: Any, value: Any, done: Any) -> Any:
    """Advantages over numpy's arrays, of one axis or more."""
    advantages = np.zeros_like(buf.rewards)
    last: Any = 0.0
    for t in reversed(range(T)):
        if t == T - 1:
            alive = 1.0 - done
            following = value
        else:
            alive = 1.0 - buf.dones[t + 1]
            following = buf.values[t + 1]
        delta = buf.rewards[t] + k.gamma * following * alive - buf.values[t]
        last = delta + k.gamma * k.lam * alive * last
        advantages[t] = last
    return advantages, advantages + buf.values, last


def divided(buf: Any, k: Any, value: Any, done: Any) -> Any:
    """Masks by ``where``, a number over an array, and a mask of booleans as numbers."""
    ret = value.copy()
    for t in range(T - 1, -1, -1):
        ret = np.where(buf.mask[t], value, k.gamma * ret + k.lam / buf.more[t])
        ret = ret - buf.mask[t].astype(np.float32) * buf.values[t]
        buf.out[t] = ret
    return ret


def summed(buf: Any, k: Any, value: Any, done: Any) -> Any:
    """In place, and what is handed on is a row."""
    total = value.copy()
    before = value
    for t in range(T):
        total += buf.rewards[t] * before
        before = buf.values[t]
        buf.out[t] = total
    return total, before
