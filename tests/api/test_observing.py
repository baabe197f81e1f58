"""Declarations against what a component was seen to do on the first call."""

from __future__ import annotations

import linecache
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rose_compiler
from rose_compiler.base.errors import DeclarationError

HIDDEN = torch.zeros(2)
TABLE = np.zeros(2)
COUNTS: list[int] = []


class Policy:
    """A component with all kinds of state; each method is declared to write nothing."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.seen = torch.zeros(4)
        self.table = np.zeros(4)
        self.history: list[float] = []
        self.calls = 0
        self.draws = np.random.default_rng(0)
        self.optimizer = torch.optim.Adam(self.net.parameters(), fused=True)

    @rose_compiler.component(reads=["self"], writes=[])
    def counts(self, x: Any) -> Any:
        self.calls += 1
        return x + 1

    @rose_compiler.component(reads=["self"], writes=[])
    def views(self, x: Any) -> Any:
        self.seen[1:3].data.add_(1)
        return x + 1

    @rose_compiler.component(reads=["self"], writes=[])
    def numpy_buffer(self, x: Any) -> Any:
        self.table[2] = 5.0
        return x + 1

    @rose_compiler.component(reads=["self"], writes=[])
    def numpy_of_tensor(self, x: Any) -> Any:
        self.seen.numpy()[0] = 5.0
        return x + 1

    @rose_compiler.component(reads=["self"], writes=[])
    def container(self, x: Any) -> Any:
        self.history.append(1.0)
        return x + 1

    @rose_compiler.component(reads=["self"], writes=[])
    def normalizes(self, x: Any) -> Any:
        return self.norm(x)

    @rose_compiler.component(reads=["self"], writes=[])
    def mode(self, x: Any) -> Any:
        self.net.eval()
        return x + 1

    @rose_compiler.component(reads=["self"], writes=["self.net.grads"])
    def trains(self, x: Any) -> Any:
        self.net(x).sum().backward()
        self.optimizer.step()
        return x + 1

    @rose_compiler.component(reads=["self"], writes=[])
    def draws_torch(self, x: Any) -> Any:
        return x + torch.rand(2)

    @rose_compiler.component(reads=["self"], writes=[])
    def draws_numpy(self, x: Any) -> Any:
        return x + float(np.random.rand())  # noqa: NPY002

    @rose_compiler.component(reads=["self"], writes=[])
    def draws_python(self, x: Any) -> Any:
        return x + random.random()

    @rose_compiler.component(reads=["self"], writes=[])
    def draws_own(self, x: Any) -> Any:
        return x + float(self.draws.random())

    @rose_compiler.component(reads=["self"], writes=[])
    def argument(self, x: Any) -> Any:
        x.add_(1)
        return x.clone()

    cache: dict[str, Any] = {}  # noqa: RUF012 (of the class, by intention)

    @rose_compiler.component(reads=["self"], writes=[])
    def numpy_global(self, x: Any) -> Any:
        TABLE[0] += 1
        return x + 1

    @rose_compiler.component(reads=["self"], writes=[])
    def list_by_helper(self, x: Any) -> Any:
        count()
        return x + 1

    @rose_compiler.component(reads=["self"], writes=[])
    def of_the_class(self, x: Any) -> Any:
        self.cache["last"] = object()
        return x + 1

    @rose_compiler.component(reads=["self"], writes=[])
    def hidden(self, x: Any) -> Any:
        HIDDEN.add_(1)
        return x + 1


def count() -> None:
    COUNTS.append(1)


def line_of(method: str, text: str) -> int:
    """The line of this file in a method that holds a text."""
    code = getattr(Policy, method).__code__
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(k + 1 for k in range(code.co_firstlineno, len(lines)) if text in lines[k])


def run(method: str) -> None:
    """Compile a loop that calls one method, and call it once."""
    name = f"loop_{method}"
    source = (
        f"def {name}(policy, x):\n    for _ in range(3):\n        x = policy.{method}(x * 1.0)\n"
    )
    namespace: dict[str, Any] = {}
    file = f"<observing {method}>"
    text = source + "    return x\n"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), namespace)
    compiled = rose_compiler.compile(namespace[name], tune=False)
    try:
        compiled(Policy(), torch.ones(3, 2))
    finally:
        compiled.close()


@pytest.mark.parametrize(
    ("method", "writes", "text"),
    [
        ("counts", "self.calls", "self.calls += 1"),
        ("views", "self.seen", "data.add_"),
        ("numpy_buffer", "self.table", "self.table[2] = 5.0"),
        ("numpy_of_tensor", "self.seen", "self.seen.numpy()"),
        ("container", "self.history", "self.history.append"),
        ("normalizes", "self.norm.buffers", "self.norm(x)"),
        ("mode", "self.net.mode", None),
        ("trains", "self.net.params", "optimizer.step"),
        ("draws_torch", "rng:torch", None),
        ("draws_numpy", "rng:numpy", None),
        ("draws_python", "rng:python", None),
        ("draws_own", "self.draws", "self.draws.random"),
        ("argument", "'x'", "x.add_(1)"),
    ],
)
def test_an_undeclared_write_is_an_error(method: str, writes: str, text: str | None) -> None:
    with pytest.raises(DeclarationError) as found:
        run(method)
    error = found.value
    assert error.code == "declare-contradicted"
    assert f"`{method}`" in str(error)
    assert error.help is not None
    assert writes in error.help, error.help
    assert error.where is not None
    if text is not None:
        assert error.where.file == __file__
        assert error.where.line == line_of(method, text)


def test_the_iteration_ran_and_a_second_call_is_refused_too() -> None:
    policy = Policy()
    compiled = rose_compiler.compile(counting, tune=False)
    for calls in (3, 6):
        with pytest.raises(DeclarationError, match=r"policy\.calls") as found:
            compiled(policy, torch.ones(3, 2))
        assert policy.calls == calls, "the whole iteration ran"
        assert any("ran to its end" in note for note in found.value.__notes__)
    compiled.close()


def counting(policy, x):  # type: ignore[no-untyped-def]
    for _ in range(3):
        x = policy.counts(x)
    return x


def test_memory_that_nothing_leads_to_is_named_so() -> None:
    with pytest.raises(DeclarationError, match="none of its arguments leads to"):
        run("hidden")


@pytest.mark.parametrize(
    ("method", "state"),
    [
        ("numpy_global", f"{__name__}.TABLE"),
        ("list_by_helper", f"{__name__}.COUNTS"),
        ("of_the_class", "Policy.cache"),
    ],
)
def test_what_modules_and_classes_hold_is_named(method: str, state: str) -> None:
    with pytest.raises(DeclarationError, match="none of its arguments leads to") as found:
        run(method)
    assert f"`{method}` writes `{state}`" in str(found.value)
    assert "hand the state in as an argument" in str(found.value)


def test_what_the_class_of_one_object_holds_may_be_declared_by_the_object() -> None:
    class Single(Policy):
        @rose_compiler.component(reads=["self"], writes=["self.cache"])
        def keeps(self, x: Any) -> Any:
            self.cache["last"] = object()
            return x + 1

    def keeping(policy, x):  # type: ignore[no-untyped-def]
        for _ in range(3):
            x = policy.keeps(x)
        return x

    compiled = rose_compiler.compile(keeping, tune=False)
    assert compiled(Single(), torch.ones(2)).tolist() == [4, 4]
    compiled.close()


def test_the_message_names_component_state_line_and_declaration() -> None:
    with pytest.raises(DeclarationError) as found:
        run("views")
    text = str(found.value)
    assert "`views` writes `policy.seen`" in text
    assert "called at <observing views>:3" in text
    assert "declare what it does: writes=['self.seen']" in text


class Twins:
    """Two networks that share a weight; one may be written by the name of the other."""

    def __init__(self) -> None:
        self.one, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.other.weight = self.one.weight

    @rose_compiler.component(reads=["self"], writes=["self.one.params"])
    def rightly(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.other.weight.mul_(0.5)
        return x + 1

    @rose_compiler.component(reads=["self"], writes=["self.one.params"])
    def wrongly(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.other.bias.mul_(0.5)
        return x + 1


def rightly(twins, x):  # type: ignore[no-untyped-def]
    for _ in range(2):
        x = twins.rightly(x)
    return x


def wrongly(twins, x):  # type: ignore[no-untyped-def]
    for _ in range(2):
        x = twins.wrongly(x)
    return x


def test_a_shared_parameter_is_one_state_under_two_names() -> None:
    rose_compiler.compile(rightly, tune=False)(Twins(), torch.ones(2))
    with pytest.raises(DeclarationError, match=r"self\.other\.params\.bias"):
        rose_compiler.compile(wrongly, tune=False)(Twins(), torch.ones(2))


class Watched:
    """Notes what watches it while it runs."""

    def __init__(self) -> None:
        self.scale = 2.0
        self.seen: list[tuple[bool, bool]] = []

    @rose_compiler.component(reads=["self"], writes=["self.seen"])
    def forward(self, x: Any) -> Any:
        hooked = "__getattribute__" in vars(Watched)
        self.seen.append((torch._C._len_torch_dispatch_stack() > 0, hooked))
        return x * self.scale


def forwards(watched: Any, x: Any) -> Any:
    for _ in range(2):
        x = watched.forward(x)
    return x


def test_nothing_is_watched_behind_the_first_iteration() -> None:
    compiled = rose_compiler.compile(forwards, tune=False)
    watched = Watched()
    for _ in range(3):
        compiled(watched, torch.ones(2))
    compiled.close()
    assert watched.seen == [(True, True)] * 2 + [(False, False)] * 4
