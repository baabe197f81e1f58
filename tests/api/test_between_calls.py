"""What changes between calls: noticed, captured anew once, and said."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_file

import rose_compiler
from rose_compiler.sim import ShardedEnv
from tests.api.loops import Drift, Training, iteration

SCALE = 1.0


def scaled(x: Any) -> Any:
    return x * SCALE


class Config:
    """What source treats as constant."""

    def __init__(self) -> None:
        self.steps = 3
        self.clip = True


class Policy(nn.Module):
    """A policy that can be traced, or one whose dropout can't."""

    dropout = True

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5) if self.dropout else nn.Identity()
        self.active: nn.Module = nn.Tanh()
        self.scale = 1.5

    def forward(self, x: Any) -> Any:
        return self.drop(self.active(self.body(x)) * self.scale)

    def act(self, x: Any) -> Any:
        return self(x).tanh()


def work(policy: Any, config: Any, out: Any, x: Any, y: Any) -> Any:
    for t in range(config.steps):
        with torch.no_grad():
            x = scaled(policy.act(x)) + y
        if config.clip:
            x = x.clamp(-1, 1)
        out[t] = x
    return x


class Bench:
    """The arguments of :func:`work`, and what can happen to them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.policy = Policy().eval()
        self.config = Config()
        self.out = torch.zeros(4, 5, 3)
        self.x = torch.randn(5, 3)
        self.y = torch.randn(5, 3)

    def run(self, fn: Any) -> Any:
        return fn(self.policy, self.config, self.out, self.x, self.y)


def shape(b: Bench) -> None:
    b.x, b.y, b.out = b.x[:4], b.y[:4], b.out[:, :4].clone()


def dtype(b: Bench) -> None:
    b.x, b.y = b.x.double(), b.y.double()
    b.policy.double()
    b.out = b.out.double()


def requires_grad(b: Bench) -> None:
    b.x = b.x.clone().requires_grad_()


def aliasing(b: Bench) -> None:
    b.x = b.out[3]


def mode(b: Bench) -> None:
    b.policy.train()


def hook(b: Bench) -> None:
    b.policy.register_forward_hook(lambda module, given, out: out + 1)


def inner_hook(b: Bench) -> None:
    b.policy.body.register_forward_pre_hook(lambda module, given: (given[0] * 2,))


def rebound_forward(b: Bench) -> None:
    b.policy.forward = lambda x: x * 3  # type: ignore[method-assign]


def rebound_method(b: Bench) -> None:
    b.policy.act = types.MethodType(lambda self, x: self.body(x) * 5, b.policy)  # type: ignore[method-assign]


def rebound_class_method(b: Bench) -> None:
    Policy.act = lambda self, x: self.body(x) * 7  # type: ignore[method-assign]


def rebound_global(b: Bench) -> None:
    globals()["SCALE"] = 0.25


def rebound_helper(b: Bench) -> None:
    globals()["scaled"] = lambda_free


def lambda_free(x: Any) -> Any:
    return x - 1


def folded_count(b: Bench) -> None:
    b.config.steps = 2


def folded_flag(b: Bench) -> None:
    b.config.clip = False


def swapped_net(b: Bench) -> None:
    b.policy.body = nn.Linear(3, 3).eval()


def other_activation(b: Bench) -> None:
    b.policy.active = nn.ReLU()


def attribute_of_a_module(b: Bench) -> None:
    b.policy.scale = 0.5


def another_policy(b: Bench) -> None:
    b.policy = Policy().eval()


def another_policy_in_training(b: Bench) -> None:
    b.policy = Policy()


def another_policy_with_a_hook(b: Bench) -> None:
    b.policy = Policy().eval()
    hook(b)


def rebound_class_forward(b: Bench) -> None:
    Policy.forward = lambda self, x: self.body(x) * 7  # type: ignore[method-assign]


def other_net(b: Bench) -> None:
    b.policy.body = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))  # type: ignore[assignment]


def other_class(b: Bench) -> None:
    class Other(Policy):
        def act(self, x: Any) -> Any:
            return self.body(x)

    b.policy = Other().eval()


def shared_weights(b: Bench) -> None:
    b.policy.drop = b.policy.body  # type: ignore[assignment]


def no_grad_outside(b: Bench) -> None:
    torch.set_grad_enabled(False)


def default_dtype(b: Bench) -> None:
    torch.set_default_dtype(torch.float64)


def default_device(b: Bench) -> None:
    torch.set_default_device("meta")


def hook_of_all(b: Bench) -> None:
    module_file.register_module_forward_hook(lambda module, given, out: out + 1)


#: What changes, and a word that the remark has to say; None where nothing has to be captured anew.
CHANGES: dict[Callable[[Bench], None], str | None] = {
    shape: "x",
    dtype: "x",
    requires_grad: "x",
    aliasing: "x",
    mode: "policy",
    hook: "policy",
    inner_hook: "policy",
    rebound_forward: "policy",
    rebound_method: "act",
    rebound_class_method: "act",
    rebound_global: "SCALE",
    rebound_helper: "scaled",
    folded_count: "config.steps",
    folded_flag: "config.clip",
    rebound_class_forward: "policy",
    swapped_net: None,
    another_policy: None,
    another_policy_in_training: "policy",
    another_policy_with_a_hook: "policy",
    other_activation: "policy",
    attribute_of_a_module: "policy",
    other_net: "policy",
    other_class: "policy",
    shared_weights: "policy",
    no_grad_outside: "grad mode",
    default_dtype: "default dtype",
    default_device: "default device",
    hook_of_all: "hooks for all modules",
}


#: Changes that both runs see at once.
SHARED = (
    *(rebound_class_method, rebound_class_forward, rebound_global, rebound_helper),
    hook_of_all,
)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    act, forward, helper = Policy.act, Policy.forward, scaled
    yield
    Policy.act, Policy.forward = act, forward  # type: ignore[method-assign]
    globals().update(SCALE=1.0, scaled=helper)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    module_file._global_forward_hooks.clear()


def recaptures(fast: Any) -> list[str]:
    return [r.why for r in fast._log if r.code == "re-captured"]


@pytest.mark.parametrize("dropout", [True, False], ids=["opaque", "traced"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)
def test_a_change_is_noticed_once_and_said(
    change: Callable[[Bench], None], dropout: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "dropout", dropout)
    plain, bench = Bench(), Bench()
    fast = rose_compiler.compile(work, numerics="bitwise", tune=False)
    for _ in range(2):
        plain.run(work)
        bench.run(fast)
    assert recaptures(fast) == []
    torch.manual_seed(4)
    change(plain)
    before = recaptures(fast)
    if change not in SHARED:
        torch.manual_seed(4)
        change(bench)
    torch.manual_seed(5)
    expected = [plain.run(work) for _ in range(2)]
    torch.manual_seed(5)
    found = [bench.run(fast) for _ in range(2)]
    for a, b in zip(expected, found, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert torch.equal(plain.out, bench.out)
    word = CHANGES[change]
    if word is None:
        assert recaptures(fast) == before
    else:
        assert len(recaptures(fast)) == 1, "captured anew once"
        assert word in recaptures(fast)[0]
    bench.run(fast)
    assert len(recaptures(fast)) == (0 if word is None else 1)
    fast.close()


class Counting(Policy):
    """Counts its calls, and sums up what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return super().forward(x) + self.calls


def test_what_a_module_does_to_itself_during_a_call_is_no_change() -> None:
    results = []
    for compiled in (False, True):
        bench = Bench()
        torch.manual_seed(1)
        bench.policy = Counting().eval()
        fast = rose_compiler.compile(work, numerics="bitwise", tune=False) if compiled else work
        for _ in range(4):
            bench.run(fast)
        if compiled:
            assert recaptures(fast) == []
        bench.policy.calls = 0
        results.append((bench.run(fast), bench.policy.calls))
        if compiled:
            assert len(recaptures(fast)) <= 1
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == 3


def test_attributes_that_no_method_reads_are_nobodys_business() -> None:
    bench = Bench()
    fast = rose_compiler.compile(work, tune=False)
    for step in range(4):
        bench.policy.global_step = step  # type: ignore[assignment]
        bench.run(fast)
    assert recaptures(fast) == []


def test_going_back_finds_the_first_capture_again() -> None:
    bench = Bench()
    fast = rose_compiler.compile(work, tune=False)
    for steps in (3, 2, 3, 2, 3):
        bench.config.steps = steps
        bench.run(fast)
    assert len(recaptures(fast)) == 1
    fast.close()


def test_more_than_eight_captures_warn_with_the_culprit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose_compiler.api.compiled.MAX_KEPT", 11)
    bench = Bench()
    bench.out = torch.zeros(20, 5, 3)
    fast = rose_compiler.compile(work, tune=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in range(1, 10):
            bench.config.steps = steps
            bench.run(fast)
    bench.config.steps = 10
    with pytest.warns(
        UserWarning, match=r"'work' anew 9 times.*config\.steps \(9 times\)"
    ) as caught:
        bench.run(fast)
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning points at the user's call"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in (11, 12, 13, 3):  # and no more than so many are kept, as their programs are
            bench.config.steps = steps
            assert torch.equal(bench.run(fast), bench.run(work))
    assert len(fast._specializations) == 11
    assert "11 makes of arguments, it runs as written for all others" in " ".join(recaptures(fast))
    fast.close()


def test_other_shards_are_captured_anew() -> None:
    training = Training()
    fast = rose_compiler.compile(iteration, numerics="bitwise", tune=False)
    training.run(fast, 2)
    training.close()
    training.envs = ShardedEnv.split([Drift] * 8, shards=4, hosts="thread")
    training.obs = torch.as_tensor(training.envs.reset(seed=0)[0], dtype=torch.float32)
    training.run(fast, 2)
    assert len(recaptures(fast)) == 1
    assert "envs" in recaptures(fast)[0]
    training.close()
    fast.close()
