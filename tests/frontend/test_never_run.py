"""Arms that have not run on the first trip: known where the source tells all, else "everything"."""

from __future__ import annotations

import _heapq
import collections
import random
from dataclasses import dataclass

import pytest
import torch

import rose_compiler
from rose_compiler.base.errors import DeclarationError
from rose_compiler.frontend.capture import capture
from rose_compiler.ir import interp
from rose_compiler.ir.ops import LOOP
from rose_compiler.ir.program import LoopView, is_call, op_of
from rose_compiler.testing.capturing import difference, first_trip, shuffle, values_of


class Env:
    """Opaque to nobody: makes `if` a branch."""

    def shards(self):
        return [self]

    num_envs = 1
    native_async = False

    def __init__(self):
        self.x = torch.zeros(2)

    def step(self, action):
        self.x = self.x + action
        return self.x.clone(), 1.0, False, False, {}


def quiet(env, n, log, x):
    """The arm of a branch: only prints and counts."""
    count = 0
    for i in range(n):
        obs, *_ = env.step(x)
        if i > 50:
            obs, *_ = env.step(x)
            print("late", i, obs)
            log.append(float(obs.sum()))
        if i > 60:
            count += 1
            print("later", count)
            for _ in range(2):
                log.append(count)
        x = x + obs * 0.1
    return x, count


def effects(program, text):
    found = [op for op in program.ops.by_name.values() if any(text in line for line in op.source)]
    assert len(found) == 1, [op.source for op in found]
    return found[0].signature


def test_an_arm_that_prints_touches_the_host_only():
    trip = first_trip(quiet, Env(), 4, [], torch.ones(2))
    program = trip.captured.program
    later = effects(program, "'later'")
    assert set(later.writes) <= {"host", "log"}
    assert not [r for r in trip.log if r.code == "never-run" and "later" in str(r)]


def reader(env, n, log, x):
    """What only unrun statements share: a view of a buffer, written through it."""
    buffer = env.x
    out = x * 0
    for i in range(n):
        if i > 50:
            with torch.no_grad():
                view = buffer[1:]
            view.add_(1)
            log.append(i)
        out = out + buffer
        y = x * 2
    return out, y


@pytest.mark.parametrize("fn", [quiet, reader], ids=lambda f: f.__name__)
def test_orders_that_are_legal_before_an_arm_ran_stay_right_when_it_runs(fn, capsys):
    """The program that was watched for four trips runs for seventy, in other orders."""

    def make(n):
        return Env(), n, [], torch.ones(2)

    args = make(70)
    eager = (fn(*args), args[2])
    trip = first_trip(fn, *make(4))
    program = trip.captured.program
    for number in range(6):
        shuffle(program, random.Random(number))
        args = make(70)
        found = capture(fn, args, {})
        result = interp.run(program, values_of(found, args, {}), found.program.objects)
        assert difference(eager, (result, args[2])) is None


def trains_later(net, optimizer, env, n, x):
    for i in range(n):
        obs, *_ = env.step(x)
        if i > 50:
            optimizer.zero_grad()
            net(obs).sum().backward()
            optimizer.step()
    return obs


def test_an_arm_that_trains_is_waited_for():
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trip = first_trip(trains_later, net, optimizer, Env(), 4, torch.ones(2))
    assert effects(trip.captured.program, "backward").writes is None
    assert any(r.code == "never-run" for r in trip.log)


@dataclass
class Config:
    steps: int = 3
    envs: int = 2

    @property
    def batch(self):
        """Rows of one update."""
        return self.steps * self.envs

    @property
    def twice(self):
        return 2 * self.batch


class Trainer:
    def __init__(self):
        self.config = Config()


def counted(trainer, x):
    for _ in range(trainer.config.steps):
        x = x + 1
    for _ in range(trainer.config.batch):
        x = x * 2
    for _ in range(trainer.config.twice):
        x = x - 1
    return x


def grows(trainer, x):
    for _ in range(trainer.config.batch):
        x = x + 1
    trainer.config.steps += 1
    return x


def stops(program):
    return [LoopView(n).bounds[1] for n in program.graph.nodes if is_call(n, LOOP)]


def test_trip_counts_from_configuration_are_constants():
    program = capture(counted, (Trainer(), torch.zeros(1)), {}).program
    assert stops(program) == [3, 6, 12]


def test_a_count_that_the_function_changes_is_none():
    program = capture(grows, (Trainer(), torch.zeros(1)), {}).program
    assert not isinstance(stops(program)[0], int)
    assert op_of(stops(program)[0]).source == ("stop = trainer.config.batch",)


def test_configuration_changed_between_calls_is_seen():
    compiled = rose_compiler.compile(counted, tune=False)
    trainer = Trainer()
    for steps in (3, 3, 5, 5):
        trainer.config.steps = steps
        assert torch.equal(compiled(trainer, torch.zeros(1)), counted(trainer, torch.zeros(1)))
    compiled.close()


def numbers(d, log):
    for key in d:
        value = d[key]
        log.append(value.item())
        log.append(value.tolist())
        print(value.item(), value)
    return log


def test_numbers_out_of_what_has_no_known_type(capsys):
    trip = first_trip(numbers, {"a": torch.ones(1), "b": torch.zeros(1)}, [])
    assert not [r for r in trip.log if r.code == "unknown-effects"]


def pushes(items, queue, x):
    y = x + 1
    _heapq.heappush(items, 3)
    queue.rotate(1)
    z = x * 2
    return y, z


def test_functions_in_c_can_be_declared():
    rose_compiler.declare(_heapq.heappush, reads=["arg0"], writes=["arg0"])
    rose_compiler.declare(collections.deque.rotate, reads=["self"], writes=["self"])
    trip = first_trip(pushes, [1, 5], collections.deque([1, 2]), torch.zeros(2))
    assert effects(trip.captured.program, "heappush").writes == ("heap",)
    assert effects(trip.captured.program, "rotate").declared
    assert not [r for r in trip.log if r.code == "unknown-effects"]


def test_a_declaration_of_a_function_in_c_is_checked():
    with pytest.raises(DeclarationError, match="names no parameter"):
        rose_compiler.declare(_heapq.heappop, reads=["nothing"], writes=[])
    with pytest.raises(DeclarationError, match="no function"):
        rose_compiler.declare(3, reads=[], writes=[])
