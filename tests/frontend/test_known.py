"""Tables of known callables: what they say, and that no override is taken for the original."""

from __future__ import annotations

import collections
import copy
import functools
import logging
import math
import random
import time
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose_compiler.frontend.known import (
    KnownEffects,
    effects_of_callable,
    effects_of_method,
    graph_leaves,
    split_place,
)

T, A = Tensor, np.ndarray


def known(obj: Any, *types: type, receiver: Any = None, **keywords: type) -> KnownEffects:
    found = effects_of_callable(obj, receiver, types, keywords)
    assert found is not None, obj
    return found


def method(owner: type, name: str, *types: type, **keywords: type) -> KnownEffects:
    found = effects_of_method(owner, name, types, keywords)
    assert found is not None, (owner, name)
    return found


class TestTorch:
    @pytest.mark.parametrize(
        "function", [torch.tanh, torch.add, F.linear, F.mse_loss, torch.softmax, torch.where]
    )
    def test_pure_functions(self, function: Any) -> None:
        found = known(function, T, T, T)
        assert found.pure
        assert found.alias == ()

    def test_views(self) -> None:
        assert known(torch.reshape, T, tuple).alias == ("arg0",)
        assert known(torch.as_tensor, A).alias == ("arg0",)
        assert known(torch.from_numpy, A).alias == ("arg0",)
        assert method(T, "detach").alias == ("self",)
        assert method(T, "float").alias == ("self",)
        assert method(T, "view", int).alias == ("self",)
        assert method(T, "clone").alias == ()

    def test_writes(self) -> None:
        assert known(torch.add, T, T, out=T).writes == ("kw_out",)
        assert known(torch.relu_, T).writes == ("arg0",)
        assert method(T, "add_", T).writes == ("self",)
        assert method(T, "copy_", T).writes == ("self",)
        assert known(F.relu, T, inplace=bool).writes == ("arg0",)
        assert set(known(F.batch_norm, T, T, T).writes) == {"arg1", "arg2"}

    def test_draws(self) -> None:
        for found in (
            known(torch.randn, int),
            known(torch.normal, T, T),
            known(F.dropout, T),
            known(torch.randperm, int),
            method(T, "normal_"),
            method(torch.distributions.Normal, "sample"),
        ):
            assert found.kind == "draw"
            assert "rng:torch" in found.writes
        assert known(torch.manual_seed, int).writes == ("rng:torch",)
        assert "kw_generator" in known(torch.randn, int, generator=torch.Generator).writes

    def test_host_reads(self) -> None:
        assert method(T, "item").host_read
        assert method(T, "numpy").host_read
        assert known(float, T).host_read
        assert not method(T, "add", T).host_read

    def test_autograd(self) -> None:
        found = method(T, "backward")
        assert found.kind == "backward"
        assert found.writes == ("self#graph",)
        a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
        leaves = graph_leaves(((a * b).exp() + a.detach() * c.detach()).sum())
        assert {id(x) for x in leaves} == {id(a), id(b)}
        assert graph_leaves(torch.ones(2)) == []

    def test_clipping(self) -> None:
        assert known(nn.utils.clip_grad_norm_, list, float).writes == ("arg0#grads",)

    def test_subclass_of_tensor(self) -> None:
        class Tracked(Tensor):
            def add(self, *args: Any, **kwargs: Any) -> Any:
                print("side effect")
                return super().add(*args, **kwargs)

        assert effects_of_method(Tracked, "add", [T]) is None
        assert effects_of_method(Tracked, "mul", [T]) is None

    def test_hooks_on_tensors_are_unknown(self) -> None:
        assert effects_of_method(T, "register_hook", [type(print)]) is None
        assert effects_of_method(T, "apply_", [type(print)]) is None


class TestModules:
    def net(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh())

    def test_call(self) -> None:
        found = known(self.net(), T)
        assert found.kind == "module"
        assert found.reads == ("self",)
        assert found.writes == ()
        assert not found.if_traced

    def test_modes(self) -> None:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout())
        assert set(known(net, T).writes) == {"self#buffers", "rng:torch"}
        assert known(net.eval, receiver=net).writes == ("self#mode",)
        net.eval()
        assert known(net, T).writes == ()

    def test_in_place_activation_writes_what_reaches_it(self) -> None:
        assert known(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 3)), T).writes == ("arg0",)
        assert known(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), T).writes == ()

    def test_own_forward_holds_if_traced(self) -> None:
        class Mine(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x

        assert known(Mine(), T).if_traced
        assert known(nn.Sequential(Mine()), T).if_traced

    def test_hooks(self) -> None:
        net = self.net()
        handle = net[0].register_forward_hook(lambda *args: None)
        assert effects_of_callable(net, None, [T]) is None
        handle.remove()
        assert effects_of_callable(net, None, [T]) is not None

    def test_global_hooks(self) -> None:
        handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
        try:
            assert effects_of_callable(self.net(), None, [T]) is None
        finally:
            handle.remove()

    def test_overridden_call(self) -> None:
        class Mine(nn.Linear):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return super().__call__(*args, **kwargs)

        assert effects_of_callable(Mine(3, 3), None, [T]) is None

    def test_replaced_forward(self) -> None:
        net = self.net()
        net[0].forward = lambda x: x  # type: ignore[method-assign]
        assert known(net, T).if_traced

    def test_overridden_eval(self) -> None:
        class Mine(nn.Linear):
            def eval(self) -> Any:
                return self

        net = Mine(3, 3)
        assert effects_of_callable(net.eval, net) is None

    def test_constructors_draw(self) -> None:
        assert known(nn.Linear, int, int).kind == "draw"


class TestOptimizers:
    def test_step(self) -> None:
        net = nn.Linear(3, 3)
        optimizer = torch.optim.Adam(net.parameters())
        found = known(optimizer.step, receiver=optimizer)
        assert found.kind == "optimizer"
        assert "self#params" in found.writes
        assert "self#grads" in found.reads
        assert known(optimizer.zero_grad, receiver=optimizer).writes == ("self#grads",)

    def test_step_behind_a_schedule(self) -> None:
        optimizer = torch.optim.Adam(nn.Linear(3, 3).parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert known(optimizer.step, receiver=optimizer).kind == "optimizer"
        assert "self#optimizer" in known(schedule.step, receiver=schedule).writes

    def test_hooks(self) -> None:
        optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters())
        optimizer.register_step_pre_hook(lambda *args: None)
        assert effects_of_callable(optimizer.step, optimizer) is None

    def test_closure(self) -> None:
        optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters())
        assert effects_of_callable(optimizer.step, optimizer, [type(print)]) is None

    def test_overridden_step(self) -> None:
        class Mine(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                print("side effect")
                return super().step(closure)

        optimizer = Mine(nn.Linear(3, 3).parameters())
        assert effects_of_callable(optimizer.step, optimizer) is None

    def test_replaced_step(self) -> None:
        optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters())
        step = optimizer.step
        optimizer.step = functools.wraps(step)(lambda: step())  # type: ignore[method-assign]
        assert effects_of_callable(optimizer.step, optimizer) is None

    def test_schedule_that_calls_the_user(self) -> None:
        optimizer = torch.optim.SGD(nn.Linear(3, 3).parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
        assert effects_of_callable(schedule.step, schedule) is None


class TestDistributions:
    def test_library(self) -> None:
        normal = torch.distributions.Normal
        assert known(normal, T, T).alias == ("arg0", "arg1")
        assert method(normal, "log_prob", T).writes == ()

    def test_own(self) -> None:
        class Mine(torch.distributions.Normal):
            def sample(self, *args: Any) -> Any:
                return self.loc

        assert effects_of_method(Mine, "sample") is None
        assert effects_of_callable(Mine, None, [T, T]) is None


class TestNumpy:
    def test_functions(self) -> None:
        assert known(np.clip, A, float, float).pure
        assert known(np.logical_or, A, A).pure
        assert known(np.asarray, A).alias == ("arg0",)
        assert known(np.add, A, A, out=A).writes == ("kw_out",)
        assert known(np.copyto, A, A).writes == ("arg0",)
        assert known(np.add.at, A, A, A).writes == ("arg0",)
        assert known(np.linalg.norm, A).writes == ()

    def test_methods(self) -> None:
        assert method(A, "sort").writes == ("self",)
        assert method(A, "fill", float).writes == ("self",)
        assert method(A, "reshape", int).alias == ("self",)
        assert method(A, "copy").alias == ()
        assert method(A, "astype", type).alias == ()
        assert method(A, "astype", type, copy=bool).alias == ("self",)
        assert method(np.float64, "item").pure

    def test_random(self) -> None:
        assert known(np.random.rand, int).writes == ("rng:numpy",)
        assert set(known(np.random.shuffle, A).writes) == {"rng:numpy", "arg0"}
        assert known(np.random.seed, int).writes == ("rng:numpy",)
        generator = np.random.default_rng(0)
        assert known(generator.normal).writes == ("self",)
        assert set(known(generator.shuffle, A).writes) == {"self", "arg0"}

    def test_subclass(self) -> None:
        class Mine(np.ndarray):
            def sort(self, *args: Any, **kwargs: Any) -> None:
                print("side effect")

        assert effects_of_method(Mine, "sort") is None

    def test_callbacks(self) -> None:
        assert effects_of_callable(np.apply_along_axis, None, [type(lambda: 0), int, A]) is None
        assert effects_of_callable(np.vectorize(len)) is None


class TestPython:
    def test_builtins(self) -> None:
        for function in (len, abs, sum, float, int, isinstance, sorted, range, zip, enumerate):
            assert known(function, list).pure
        assert known(max, int, int).alias == ()
        assert known(max, list).alias == ("arg0",)
        assert known(print, str).writes == ("host",)
        assert known(math.sqrt, float).pure
        assert known(", ".join, list).pure
        assert known(str.upper, str).pure

    def test_code_of_the_user_may_run(self) -> None:
        class Mine:
            def __len__(self) -> int:
                print("side effect")
                return 0

        assert effects_of_callable(len, None, [Mine]) is None
        assert effects_of_callable(sorted, None, [list], {"key": type(lambda: 0)}) is None
        assert effects_of_callable(map, None, [type(lambda: 0), list]) is None
        assert effects_of_callable(lambda: 0) is None
        assert effects_of_callable(eval, None, [str]) is None

    def test_containers(self) -> None:
        items: list[int] = []
        assert known(items.append, T).writes == ("self",)
        assert known(items.append, T).retains == ("arg0",)
        assert known(items.pop).alias == ("self",)
        assert method(dict, "get", str).writes == ()
        assert method(dict, "update", dict).writes == ("self",)
        assert method(collections.deque, "append", float).writes == ("self",)
        assert method(collections.OrderedDict, "popitem").writes == ("self",)
        assert method(set, "add", int).writes == ("self",)
        assert method(collections.defaultdict, "items").writes == ()

    def test_subclasses_of_containers(self) -> None:
        class Mine(list):  # type: ignore[type-arg]
            def append(self, value: Any) -> None:
                print("side effect")

        assert effects_of_callable(Mine().append, None, [int]) is None
        assert effects_of_method(Mine, "append", [int]) is None
        assert method(Mine, "clear").writes == ("self",)

    def test_random_and_clock(self) -> None:
        assert known(random.random).writes == ("rng:python",)
        assert set(known(random.shuffle, list).writes) == {"rng:python", "arg0"}
        assert known(random.Random(0).random).writes == ("self",)
        assert known(time.time).kind == "clock"
        assert known(time.perf_counter).reads == ("host",)

    def test_logging(self) -> None:
        assert known(logging.info, str).kind == "log"
        assert known(logging.getLogger("x").warning, str).writes == ("host",)

    def test_copies(self) -> None:
        assert known(copy.deepcopy, nn.Linear).alias == ()
        assert known(copy.copy, list).alias == ("arg0",)

    def test_partial(self) -> None:
        assert known(functools.partial(torch.clamp, min=0.0), T).pure
        assert effects_of_callable(functools.partial(torch.add, torch.ones(2)), None, [T]) is None


class TestSimulators:
    def test_vector_environment(self) -> None:
        env = gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
        found = known(env.step, A)
        assert found.kind == "step"
        assert found.writes == ("self",)
        assert found.alias == ("self",)
        assert known(env.reset).kind == "reset"
        assert known(env.action_space.sample).writes == ("self",)
        assert "host" in known(env.close).writes
        env.close()

    def test_own_environment(self) -> None:
        class Mine(gymnasium.vector.VectorEnv):  # type: ignore[type-arg]
            def step(self, actions: Any) -> Any:
                print("side effect")

        assert effects_of_method(Mine, "step", [A]) is None
        assert effects_of_method(Mine, "reset") is not None

    def test_envpool(self) -> None:
        envpool = pytest.importorskip("envpool")
        env = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=2)
        assert known(env.step, A).kind == "step"
        assert known(env.send, A).kind == "step"
        assert known(env.recv).kind == "step"


def test_places() -> None:
    assert split_place("self#grads") == ("self", "grads")
    assert split_place("arg0") == ("arg0", "")


def test_every_torch_function_written_by_schema() -> None:
    """In-place names and operators that write an argument must never count as pure."""
    for name in dir(torch.Tensor):
        if name.endswith("_") and not name.startswith("_"):
            found = effects_of_method(T, name, [T])
            assert found is None or found.writes, name
