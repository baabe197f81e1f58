"""Gradients that ``zero_grad`` drops unread: left out, and nothing that anybody sees changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rose_compiler
from rose_compiler.base.decision import Decision
from rose_compiler.ir import unread
from rose_compiler.passes import drop_gradients
from rose_compiler.testing.losses import as_traced


class Agent:
    """An actor through whose loss gradients reach a critic."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(3, 2), nn.Linear(5, 1)
        self.actor_opt = torch.optim.Adam(self.actor.parameters(), lr=0.01)
        self.critic_opt = torch.optim.Adam(self.critic.parameters(), lr=0.02)
        self.seen: list[Tensor] = []
        self.loss = torch.zeros(())

    def value(self, obs: Tensor) -> Tensor:
        """What the critic says of what the actor does."""
        return self.critic(torch.cat([obs, torch.tanh(self.actor(obs))], 1))


def train_critic(agent: Agent, obs: Tensor) -> None:
    """The critic's own update, which drops what was added to its gradients."""
    loss = (agent.value(obs.roll(1, 0)).detach() + agent.critic(obs.repeat(1, 2)[:, :5])).square()
    loss = loss.mean()
    agent.critic_opt.zero_grad()
    loss.backward()
    agent.critic_opt.step()


def train_actor(agent: Agent, obs: Tensor) -> None:
    """The actor's update, which adds to the critic's gradients."""
    loss = -agent.value(obs).mean()
    agent.actor_opt.zero_grad()
    loss.backward()
    agent.actor_opt.step()


def plain(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(trips):
        train_critic(agent, obs + k)
        loss = -agent.value(obs + k).mean()
        agent.actor_opt.zero_grad()
        loss.backward()
        agent.actor_opt.step()


def delayed(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(trips):
        train_critic(agent, obs + k)
        if k % 2 == 0:
            train_actor(agent, obs + k)


def downwards(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(2 * trips, 0, -2):
        train_critic(agent, obs + k)
        train_actor(agent, obs + k)


def at_once(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(trips):
        train_actor(agent, obs + k)
        train_critic(agent, obs + k)


def clipped(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(trips):
        train_critic(agent, obs + k)
        loss = -agent.value(obs + k).mean()
        agent.actor_opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.critic.parameters(), 0.1)
        agent.actor_opt.step()
        agent.critic_opt.step()


def looked_at(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(trips):
        agent.seen.append(agent.critic.weight.grad.clone() if k else obs)
        train_critic(agent, obs + k)
        train_actor(agent, obs + k)


def seldom(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(trips):
        if k % 3 == 1:
            agent.critic_opt.zero_grad()
        train_actor(agent, obs + k)
        agent.critic_opt.step()


def stopped(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(trips):
        train_critic(agent, obs + k)
        loss = -agent.value(obs + k).mean()
        agent.actor_opt.zero_grad()
        loss.backward()
        agent.actor_opt.step()
        if loss.item() > 100.0 or k == 2:
            break


def to_zero(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(trips):
        agent.critic_opt.zero_grad(set_to_none=False)
        train_actor(agent, obs + k)


def once(agent: Agent, obs: Tensor, trips: int) -> None:
    train_critic(agent, obs)
    train_actor(agent, obs)


def left_between(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(trips):
        train_actor(agent, obs + k)
        if k == 2:
            break
        train_critic(agent, obs + k)


def kept_loss(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(trips):
        train_critic(agent, obs + k)
        agent.loss = -agent.value(obs + k).mean()
        agent.actor_opt.zero_grad()
        agent.loss.backward()
        agent.actor_opt.step()


def held(agent: Agent, obs: Tensor, trips: int) -> None:
    for k in range(trips):
        train_critic(agent, obs + k)
        agent.seen.append(agent.critic.weight.grad)
        train_actor(agent, obs + k)


Loop = Callable[[Agent, Tensor, int], None]


def left(fn: Loop, hook: list[Tensor] | None = None, **options: Any) -> tuple[list[Any], list[str]]:
    """Everything that three calls leave, gradients too, and what the pass has done."""
    agent, obs, found = Agent(), torch.linspace(-1, 1, 12).reshape(4, 3), []
    if hook is not None:
        agent.critic.weight.register_hook(hook.append)
    run: Any = rose_compiler.compile(fn, **options) if options else fn
    for _ in range(3):
        run(agent, obs, 4)
        for net in (agent.actor, agent.critic):
            for p in net.parameters():
                found += [p.detach().clone(), None if p.grad is None else p.grad.clone()]
    found += agent.seen
    remarks = []
    if options:
        told = run.explain(width=200).split("Missed")[0]
        remarks = [line for line in told.splitlines() if "gradients of agent.critic_opt's" in line]
        run.close()
    return copy.deepcopy(found), remarks


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        (x is None and y is None) or (x is not None and y is not None and torch.equal(x, y))
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drop_gradients, "LEAST", 1)


TAKEN = [plain, delayed, downwards, at_once, kept_loss]


@pytest.mark.parametrize("fn", TAKEN)
def test_what_is_dropped_unread_is_not_computed(fn: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    short = []
    backward = torch.Tensor.backward

    def counted(self: Tensor, *args: Any, inputs: Any = None, **rest: Any) -> None:
        short.append(inputs is not None)
        backward(self, *args, inputs=inputs, **rest)

    eager, _ = left(fn)
    monkeypatch.setattr(torch.Tensor, "backward", counted)
    found, remarks = left(fn, tune=False, numerics="bitwise")
    assert remarks
    assert any(short)
    assert same(eager, found)


@pytest.mark.parametrize("fn", TAKEN)
def test_a_loss_in_one_call_leaves_them_out_too(
    fn: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without: list[int] = []
    positions = unread.Dropped.positions

    def counted(self: unread.Dropped, args: Any) -> tuple[int, ...]:
        found = positions(self, args)
        without.append(len(found))
        return found

    monkeypatch.setattr(unread.Dropped, "positions", counted)
    Decision(script=True).save(path := tmp_path / "script.json")
    eager, _ = left(fn)
    with as_traced():
        found, remarks = left(fn, tune=path, numerics="bitwise")
    assert remarks
    assert same(eager, found)
    if fn is not kept_loss:  # an attribute keeps that from being one operation
        assert any(without)
        assert not all(without)  # on the last trip everything is computed


NOT = [clipped, looked_at, seldom, stopped, to_zero, once, left_between]


@pytest.mark.parametrize("fn", NOT)
def test_what_somebody_reads_is_computed(fn: Loop) -> None:
    eager, _ = left(fn)
    found, remarks = left(fn, tune=False, numerics="bitwise")
    assert not remarks
    assert same(eager, found)


def test_who_holds_a_gradient_sees_what_is_added_to_it() -> None:
    assert same(left(held)[0], left(held, tune=False, numerics="bitwise")[0])


class Told(torch.autograd.Function):
    """Tells that it was gone back through."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def _all_but_critic(loss: Callable[[Agent, Tensor], Tensor]) -> bool:
    """Whether only the critic's gradients are left out of a loss."""
    agent, obs = Agent(), torch.ones(4, 3)
    wanted = unread.wanted_of(loss(agent, obs), {id(p): p for p in agent.critic.parameters()})
    return {id(p) for p in wanted} == {id(p) for p in agent.actor.parameters()}


def test_all_is_computed_where_it_would_be_seen_that_a_part_did_not_run() -> None:
    assert _all_but_critic(lambda agent, obs: agent.value(obs).mean())
    assert not _all_but_critic(lambda agent, obs: Told.apply(agent.value(obs)).mean())
    assert not _all_but_critic(
        lambda agent, obs: agent.value(obs).mean() + agent.critic(torch.ones(1, 5)).tanh().sum()
    )
    assert not _all_but_critic(lambda agent, obs: agent.critic(obs.repeat(1, 2)[:, :5]).mean())
    assert not _all_but_critic(
        lambda agent, obs: checkpoint(agent.value, obs.requires_grad_(), use_reentrant=True).mean()
    )


@pytest.mark.parametrize("hold", [lambda grad: grad, lambda grad: grad.view(-1)])
def test_a_gradient_that_is_held_is_told_from_one_that_is_not(hold: Callable[..., Any]) -> None:
    net = nn.Linear(3, 2)
    for _ in range(3):
        net(torch.ones(4, 3)).sum().backward()
        assert not unread._held(net.weight)
        kept = hold(net.weight.grad)
        assert unread._held(net.weight)
        del kept
        assert not unread._held(net.weight)
        net.zero_grad()


def test_a_hook_sees_each_gradient() -> None:
    eager: list[Tensor] = []
    compiled: list[Tensor] = []
    assert same(left(plain, eager)[0], left(plain, compiled, tune=False, numerics="bitwise")[0])
    assert same(list(eager), list(compiled))


def test_nothing_is_left_out_where_operations_may_not_run_ahead() -> None:
    _, remarks = left(plain, tune=False, numerics="bitwise", run_ahead=False)
    assert not remarks


def test_the_test_sees_the_last_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault planted: the last trip, behind which gradients are there to be read, is short too."""
    mended = unread.backward_without

    def always(loss: Tensor, *dropped: Any) -> None:
        mended(loss, *(10**9 if k % 4 == 2 else v for k, v in enumerate(dropped)))

    monkeypatch.setattr(drop_gradients, "backward_without", always)
    assert not same(left(plain)[0], left(plain, tune=False, numerics="bitwise")[0])
