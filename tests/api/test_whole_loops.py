# ruff: noqa: RUF059, B007 (loops as users write them)
"""Whole training loops in one call: the first trip is watched, later ones are scheduled."""

from __future__ import annotations

import gymnasium
import pytest
import torch
from torch import nn

import rose_compiler
from rose_compiler.api import trips
from rose_compiler.ir import facts, interp
from rose_compiler.sim import ShardedEnv, TorchCartPole
from rose_compiler.testing.capturing import difference


class Physics:
    """A simulator of the user's own, in torch."""

    def __init__(self, n=3):
        self.x = torch.zeros(n)
        self.steps = 0

    def step(self, action):
        self.x = self.x * 0.9 + action
        self.steps += 1
        return self.x, -self.x.abs(), self.x > 2


class Env(gymnasium.Env):
    """One number that an action moves."""

    observation_space = gymnasium.spaces.Box(-9, 9, (2,))
    action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def __init__(self):
        self.x = torch.zeros(2).numpy()

    def reset(self, *, seed=None, options=None):
        self.x = self.x * 0
        return self.x.copy(), {}

    def step(self, action):
        self.x = self.x * 0.9 + action
        return self.x.copy(), float(-abs(self.x).sum()), False, False, {}


def parts(seed=0):
    torch.manual_seed(seed)
    net = nn.Linear(2, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.05)


def online(net, optimizer, env, obs, steps, log):
    """Off-policy in shape: the outermost loop steps the simulator itself."""
    for step in range(steps):
        with torch.no_grad():
            action = torch.tanh(net(torch.as_tensor(obs, dtype=torch.float32)))
        obs, reward, ended, cut, info = env.step(action.numpy())
        log.append(reward)
        loss = net(torch.as_tensor(obs, dtype=torch.float32)).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return obs


def inlined(net, optimizer, sim, obs, iterations, log):
    for _ in range(iterations):
        total = torch.zeros(3)
        for t in range(4):
            action = net(torch.stack([obs, obs], -1)).sum(-1)
            obs, reward, done = sim.step(action.detach())
            total = total + action * 0.1
        optimizer.zero_grad()
        total.pow(2).sum().backward()
        optimizer.step()
        log.append(float(total.detach().sum()))
    return obs


def supervised(net, optimizer, data, epochs, log):
    for _ in range(epochs):
        for x in data:
            loss = (net(x) - x).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        log.append(float(loss.detach()))


def one_iteration(net, optimizer, env, obs, steps, log):
    """Rollout and update are loops of their own: one iteration, not a whole training."""
    kept = []
    for t in range(steps):
        with torch.no_grad():
            action = torch.tanh(net(torch.as_tensor(obs, dtype=torch.float32)))
        obs, reward, ended, cut, info = env.step(action.numpy())
        kept.append(torch.as_tensor(obs, dtype=torch.float32))
    for epoch in range(3):
        optimizer.zero_grad()
        net(torch.stack(kept)).pow(2).sum().backward()
        optimizer.step()
    return obs


@pytest.fixture
def interpreted(monkeypatch):
    """Counts the trips of loops that the reference interpreter runs node by node."""
    trips = []
    graph = interp.Interpreter.trip

    def trip(self, loop, number, inputs):
        trips.append(loop.name)
        return graph(self, loop, number, inputs)

    monkeypatch.setattr(interp.Interpreter, "trip", trip)
    return trips


def compare(fn, make, again=0):
    """Both runs end in the same; the compiled function."""
    compiled = rose_compiler.compile(fn, numerics="bitwise", tune=False)
    eager, found = [], []
    for how, ends in ((fn, eager), (compiled, found)):
        torch.manual_seed(1)
        args = make()
        for _ in range(1 + again):
            ends.append(how(*args))
        ends += [list(args[0].parameters()), args[-1]]
        close = getattr(args[2], "close", None)
        if close is not None:
            close()
    assert difference(eager, found) is None
    compiled.close()
    return compiled


def test_a_loop_that_steps_the_simulator_itself(interpreted):
    def make():
        net, optimizer = parts()
        env = Env()
        return net, optimizer, env, env.reset()[0], 30, []

    compare(online, make)
    assert len(interpreted) <= 2  # the trip that is watched: the loop around it and its own


def test_a_loop_around_a_simulator_that_is_inlined(interpreted):
    def make():
        return *parts(), Physics(), torch.ones(3), 30, []

    compiled = compare(inlined, make)
    assert len(interpreted) <= 6  # one trip, with the four inside it
    assert "for_t" in compiled.ir("captured")


def test_a_loop_over_data_is_cut_in_its_first_call_only(interpreted):
    def make():
        return *parts(), [torch.randn(2) for _ in range(3)], 20, []

    compiled = compare(supervised, make, again=2)
    assert not compiled._last.iterations.sure
    interpreted.clear()
    compiled = compare(supervised, make)
    # two trips with three inside each: a loss is first not there, then it is
    assert len(interpreted) <= 8


def test_one_iteration_is_not_cut():
    def make():
        net, optimizer = parts()
        env = Env()
        return net, optimizer, env, env.reset()[0], 5, []

    compiled = compare(one_iteration, make, again=3)
    assert compiled._last.iterations.loops == ()


def rollout_of_shards(net, optimizer, envs, obs, iterations, log):
    for _ in range(iterations):
        for t in range(3):
            with torch.no_grad():
                action = torch.tanh(net(torch.as_tensor(obs, dtype=torch.float32)))
            obs, reward, ended, cut, info = envs.step(action.numpy())
        optimizer.zero_grad()
        net(torch.as_tensor(obs, dtype=torch.float32)).pow(2).sum().backward()
        optimizer.step()
        log.append(float(reward.sum()))
    return obs


def test_a_loop_around_shards(interpreted):
    def make():
        net, optimizer = parts()
        envs = ShardedEnv([Env, Env], hosts="inline")
        return net, optimizer, envs, envs.reset(seed=1)[0], 12, []

    compare(rollout_of_shards, make)
    assert len(interpreted) <= 8  # two trips, as above


def test_a_whole_training_may_be_called_again():
    def make():
        torch.manual_seed(3)
        sim = TorchCartPole(3)
        net = nn.Linear(sim.obs_dim, sim.act_dim)
        return net, torch.optim.SGD(net.parameters(), lr=0.1), sim, sim.reset()[0], 4, []

    def train(net, optimizer, sim, obs, iterations, log):
        for _ in range(iterations):
            for t in range(3):
                obs, reward, ended, cut, info = sim.step(net(obs).detach())
            optimizer.zero_grad()
            net(obs).pow(2).sum().backward()
            optimizer.step()
            log.append(reward.sum())
        return obs

    compiled = compare(train, make, again=2)
    assert compiled._last.iterations.sure


def after_a_warm_up(net, optimizer, env, obs, steps, log):
    """Nothing is learned at first; every seventh step is looked at."""
    loss = None
    for step in range(steps):
        if step < 3:
            action = torch.rand(2) - 0.5
        else:
            with torch.no_grad():
                action = torch.tanh(net(torch.as_tensor(obs, dtype=torch.float32)))
        obs, reward, ended, cut, info = env.step(action.numpy())
        if step >= 5:
            loss = net(torch.as_tensor(obs, dtype=torch.float32)).pow(2).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % 7 == 6:
            last = loss.detach()
            log.append((step, float(last), reward))
    if steps > 10:
        log.append(float(last))
    return obs


def test_what_first_runs_later_is_watched_then(interpreted):
    def make():
        net, optimizer = parts()
        env = Env()
        return net, optimizer, env, env.reset()[0], 30, []

    compiled = compare(after_a_warm_up, make)
    assert "first_run" not in compiled.ir("captured")
    codes = {remark.code for remark in compiled._last.unit.watch.remarks}
    assert not codes & {"never-run", "unknown-effects"}


def test_what_never_ran_is_held_back():
    def make():
        net, optimizer = parts()
        env = Env()
        return net, optimizer, env, env.reset()[0], 4, []

    compiled = compare(after_a_warm_up, make)
    assert "first_run" in compiled.ir("captured")
    assert "never-run" in compiled.explain()


class Sums:
    def __init__(self):
        self.loss = 0
        self.best = None


def sums_from_zero(net, optimizer, env, obs, steps, sums):
    """The sum is a number at first, then a tensor that is added to in place."""
    for step in range(steps):
        obs, reward, ended, cut, info = env.step(obs)
        loss = net(torch.as_tensor(obs, dtype=torch.float32)).pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        before = sums.loss
        sums.loss += loss.detach()
        if sums.best is None or reward > sums.best:
            sums.best = reward
        other = torch.ones(2)
        reward = float(before) + float(other.sum())
    return obs, reward


def test_an_attribute_that_becomes_a_tensor_is_seen_to():
    def make():
        net, optimizer = parts()
        env = Env()
        return net, optimizer, env, env.reset()[0], 12, Sums()

    compiled = compare(sums_from_zero, make)
    unit = compiled._last.unit
    read = [n for n in unit.program.nodes() if n.name.startswith("before")]
    assert [facts.get(n).alias for n in read] == [("sums.loss",)]


def test_tuning_takes_a_tenth_of_a_loop_of_known_length_at_most():
    compiled = rose_compiler.compile(online)
    net, optimizer = parts()
    compiled(net, optimizer, gymnasium.vector.SyncVectorEnv([Env]), torch.zeros(1, 2), 60, [])
    chooser = compiled._last.unit.tuning()._chooser
    assert chooser.budget_trips == 6
    assert chooser.settled
    assert chooser.trips <= 6
    compiled(net, optimizer, gymnasium.vector.SyncVectorEnv([Env]), torch.zeros(1, 2), 30, [])
    assert chooser.budget_trips == 9, "another call's trips come on top"
    compiled.close()


def test_what_a_run_switches_on_is_off_behind_it():
    """Steps are fused while a schedule runs, with lanes or without; the optimizer is as before."""
    for fn, env in ((online, gymnasium.vector.SyncVectorEnv([Env])), (supervised, None)):
        compiled = rose_compiler.compile(fn, tune=False)
        net, optimizer = parts()
        data = [torch.ones(2)] * 2
        args = (data, 4, []) if env is None else (env, torch.zeros(1, 2), 4, [])
        for _ in range(2):
            compiled(net, optimizer, *args)
        assert "rt.fuse(optimizer)" in compiled.source
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
        compiled.close()


def test_a_loop_goes_through_its_items_themselves_in_all_of_its_batches(monkeypatch):
    """An iterator around that of the batch before would be one deeper with each batch."""
    handed, further = [], trips.Batch.further

    def noted(batch, items, *rest):
        handed.append(items)
        return further(batch, items, *rest)

    monkeypatch.setattr(trips.Batch, "further", noted)
    monkeypatch.setattr(trips.Batch, "takes", lambda batch, values: batch._trips < 3)
    data, results = [torch.ones(2) * (k % 3) for k in range(30)], []
    for fn in (one_by_one, rose_compiler.compile(one_by_one, tune=False)):
        net, optimizer = parts()
        results.append((fn(net, optimizer, data), net.weight))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert len(handed) > 6
    assert len({id(items) for items in handed}) == 1


def one_by_one(net, optimizer, data):
    seen = 0
    for x in data:
        optimizer.zero_grad()
        (net(x) - x).pow(2).sum().backward()
        optimizer.step()
        seen = seen + 1
    return seen
