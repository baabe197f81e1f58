"""Green contexts against a driver that keeps the books."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose_compiler.base.errors import QuotaError
from rose_compiler.base.machine import Machine, load_machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.runtime.quotas import GreenContexts

H200 = load_machine("h200")


def sm_set(first: int, count: int) -> SimpleNamespace:
    return SimpleNamespace(sm=SimpleNamespace(smCount=count), ids=set(range(first, first + count)))


class Driver:
    """``cuda.bindings.driver`` as far as it is used; results are ``(status, ...)``."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, groups: int = 16, fails: str = "") -> None:
        self.groups, self.fails = groups, fails
        self.splits = 0
        self.alive: list[set[int]] = []

    def _done(self, name: str, *values: Any) -> tuple[Any, ...]:
        return (2 if name == self.fails else 0, *values)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self._done("cuInit")

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return self._done("cuDeviceGet", index)

    def cuDeviceGetDevResource(self, device: int, kind: int) -> tuple[Any, ...]:
        return self._done("cuDeviceGetDevResource", sm_set(0, 132))

    def cuDevSmResourceSplitByCount(self, n: int, whole: Any, flags: int, least: int) -> Any:
        self.splits += 1
        count = min(n, self.groups)
        cut = [sm_set(k * least, least) for k in range(count)]
        rest = sm_set(count * least, 132 - count * least)
        return self._done("cuDevSmResourceSplitByCount", cut, count, rest)

    def cuDevResourceGenerateDesc(self, groups: list[Any], count: int) -> tuple[Any, ...]:
        assert count == len(groups)
        return self._done("cuDevResourceGenerateDesc", set().union(*(g.ids for g in groups)))

    def cuGreenCtxCreate(self, ids: set[int], device: int, flags: int) -> tuple[Any, ...]:
        self.alive.append(ids)
        return self._done("cuGreenCtxCreate", ids)

    def cuGreenCtxStreamCreate(self, context: set[int], flags: int, priority: int) -> Any:
        return self._done("cuGreenCtxStreamCreate", 100 + min(context))

    def cuGreenCtxDestroy(self, context: set[int]) -> tuple[Any, ...]:
        self.alive.remove(context)
        return self._done("cuGreenCtxDestroy")


def plan(**chunks: int) -> QuotaPlan:
    return QuotaPlan.divide("green-context", H200, chunks or {"sim": 4, "net": 12})


def test_contexts_come_from_one_split_and_are_disjoint() -> None:
    driver = Driver()
    with GreenContexts(driver).apply(plan()) as applied:
        assert driver.splits == 1
        assert [len(ids) for ids in driver.alive] == [32, 96]
        assert not driver.alive[0] & driver.alive[1]
        assert applied.sms == {"sim": 32, "net": 96}
        assert applied.handles == {"sim": 100, "net": 132}
        assert applied.environment("sim") == {}
        applied.started("sim", 1)
        applied.check()
    assert driver.alive == []
    applied.close()


def test_a_board_with_fewer_groups_is_told_before_any_context_is_made() -> None:
    driver = Driver(groups=15)
    with pytest.raises(QuotaError, match="splits into 15 groups of 8 SMs"):
        GreenContexts(driver).apply(plan())
    assert driver.alive == []
    GreenContexts(driver).apply(plan(sim=3, net=12)).close()


@pytest.mark.parametrize("call", ["cuInit", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"])
def test_an_error_of_the_driver_leaves_nothing(call: str) -> None:
    driver = Driver(fails=call)
    with pytest.raises(QuotaError, match=f"{call} failed"):
        GreenContexts(driver).apply(plan())
    if call != "cuGreenCtxCreate":  # the failing call's own context is the driver's to undo
        assert driver.alive == []


def test_probing() -> None:
    assert GreenContexts(Driver()).probe().available
    assert "has no cuDeviceGetDevResource" in GreenContexts(SimpleNamespace()).probe().why
    if not torch.backends.cuda.is_built():
        assert "no CUDA" in GreenContexts().probe().why
    other = QuotaPlan.divide("cores", Machine("m", 1), {"a": 1})
    with pytest.raises(QuotaError, match="given to green-context"):
        GreenContexts(Driver()).apply(other)


def test_contexts_that_tensors_are_used_on_are_made_once_and_stay() -> None:
    driver = Driver(groups=15)
    backend = GreenContexts(driver)
    assert backend.groups(8) == 15
    assert driver.alive == []
    applied = backend.lasting(plan(sim=3, net=12))
    assert backend.lasting(plan(sim=3, net=12)) is applied
    assert len(driver.alive) == 2
    assert backend.lasting(plan(sim=4, net=8)) is not applied
    with pytest.raises(QuotaError, match="cuDeviceGet failed"):
        GreenContexts(Driver(fails="cuDeviceGet")).groups(8)
