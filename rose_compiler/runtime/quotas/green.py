"""Quotas by green contexts: streams that run on SMs of their own, in one process.

Two contexts made one after the other by a number of SMs may overlap. Disjoint ones come from one
split: the device is cut into its least groups once, every lane gets whole groups of that cut.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any, Self

import torch

from rose_compiler.base.errors import QuotaError, fail, register
from rose_compiler.base.quota import Backend, QuotaPlan
from rose_compiler.runtime.quotas.base import Probe, check_backend

register(
    "quota-green",
    QuotaError,
    "green contexts could not be made as planned",
    "plan for the groups that the message counts, or use percentages",
)

_NEEDED = (
    "cuDeviceGetDevResource",
    "cuDevSmResourceSplitByCount",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxStreamCreate",
    "cuGreenCtxDestroy",
)


class GreenContexts:
    """Disjoint green contexts from one split, through ``cuda.bindings``.

    ``driver`` stands in for ``cuda.bindings.driver``, which is looked for by default.
    """

    name: Backend = "green-context"

    def __init__(self, driver: Any = None, device: int = 0) -> None:
        self._driver = driver
        self._device = device
        self._lasting: dict[tuple[tuple[str, int], ...], AppliedGreen] = {}

    def probe(self) -> Probe:
        """Needs a CUDA build of torch and a ``cuda.bindings`` with green contexts."""
        if self._driver is None and not torch.backends.cuda.is_built():
            return Probe(False, "this build of torch has no CUDA")
        driver = self._find_driver()
        if driver is None:
            return Probe(False, "the package cuda.bindings (cuda-python) is not installed")
        missing = [name for name in _NEEDED if not hasattr(driver, name)]
        if missing:
            return Probe(False, f"this cuda.bindings has no {missing[0]}")
        if self._driver is None and not torch.cuda.is_available():
            return Probe(False, "there is no CUDA device")
        return Probe(True, "disjoint contexts from one split")

    def apply(self, plan: QuotaPlan) -> AppliedGreen:
        """Split the device and make a context and a stream for each lane.

        Raises ``QuotaError`` (``quota-green``) if the split has fewer groups than the plan gives
        away, or the driver reports an error. Some 132-SM boards split into 15 groups of 8.
        """
        check_backend(plan, self.name)
        driver = self._find_driver()
        if driver is None:
            raise fail("quota-green", "the package cuda.bindings is not installed")
        applied = AppliedGreen(plan, driver)
        try:
            applied.make(self._device)
        except BaseException:
            applied.close()
            raise
        return applied

    def lasting(self, plan: QuotaPlan) -> AppliedGreen:
        """As :meth:`apply`, but made once for the same shares, and left alone until the process
        ends: for streams that torch's tensors are used on.

        As such a tensor is freed, torch's allocator records events on the streams that it was used
        on, and a stream whose context is gone refuses that (``CUDA_ERROR_STREAM_DETACHED``). A
        context with nothing to run costs no SM.
        """
        key = tuple((share.lane, share.units) for share in plan.shares)
        found = self._lasting.get(key)
        if found is None:
            found = self._lasting[key] = self.apply(plan)
        return found

    def groups(self, chunk: int) -> int:
        """How many groups of so many SMs the device splits into: 15 on some boards where 16 would
        fit. Raises ``QuotaError`` (``quota-green``) where the driver reports an error."""
        driver = self._find_driver()
        if driver is None:
            raise fail("quota-green", "the package cuda.bindings is not installed")
        return _split(driver, self._device, chunk)[2]

    def _find_driver(self) -> Any:
        if self._driver is not None:
            return self._driver
        try:
            return importlib.import_module("cuda.bindings.driver")
        except ImportError:
            return None


class AppliedGreen:
    """A context and a stream for each lane. ``handles`` are ``CUstream`` by lane."""

    def __init__(self, plan: QuotaPlan, driver: Any) -> None:
        self.plan = plan
        self.handles: dict[str, Any] = {}
        self.sms: dict[str, int] = {}
        self._driver = driver
        self._contexts: list[Any] = []
        self._index = 0

    def make(self, index: int) -> None:
        """Split once, then hand out whole groups."""
        driver, chunk = self._driver, self.plan.chunk
        device, groups, count = _split(driver, index, chunk)
        self._index = index
        needed = self.plan.given // chunk
        if count < needed:
            raise fail(
                "quota-green",
                f"the device splits into {count} groups of {chunk} SMs",
                expected=f"the {needed} that the plan gives away",
            )
        taken = 0
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        for share in self.plan.shares:
            mine = groups[taken : taken + share.units // chunk]
            taken += len(mine)
            descriptor = _call(driver, "cuDevResourceGenerateDesc", mine, len(mine))
            context = _call(driver, "cuGreenCtxCreate", descriptor, device, flags)
            self._contexts.append(context)
            stream = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            self.handles[share.lane] = _call(driver, "cuGreenCtxStreamCreate", context, stream, 0)
            self.sms[share.lane] = sum(group.sm.smCount for group in mine)

    def stream(self, lane: str) -> torch.cuda.ExternalStream:
        """The lane's stream, for torch."""
        self.plan.share(lane)
        return torch.cuda.ExternalStream(int(self.handles[lane]), device=self._index)

    def environment(self, lane: str) -> dict[str, str]:
        """Nothing: the streams live in this process."""
        return self.plan.environment(lane)

    def started(self, lane: str, pid: int) -> None:
        """Nothing to do."""

    def check(self) -> None:
        """Nothing can go away."""

    def replan(self, plan: QuotaPlan) -> None:
        """Raises ``QuotaError`` (``quota-fixed``): a stream keeps its SMs."""
        check_backend(plan, self.plan.backend)
        raise fail("quota-fixed", "a green context keeps the SMs that it was made with")

    def close(self) -> None:
        """Destroy the contexts, last made first. Their streams must be idle, and no tensor left
        that was used on one (see :meth:`GreenContexts.lasting`)."""
        while self._contexts:
            with suppress(QuotaError):
                _call(self._driver, "cuGreenCtxDestroy", self._contexts.pop())
        self.handles.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _split(driver: Any, index: int, chunk: int) -> tuple[Any, Any, int]:
    """The device, and the groups of so many SMs that all of it splits into, with their number."""
    _call(driver, "cuInit", 0)
    device = _call(driver, "cuDeviceGet", index)
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = _call(driver, "cuDeviceGetDevResource", device, kind)
    wanted = whole.sm.smCount // chunk
    groups, count, _ = _call(driver, "cuDevSmResourceSplitByCount", wanted, whole, 0, chunk)
    return device, groups, int(count)


def _call(driver: Any, function: str, *arguments: Any) -> Any:
    status, *values = getattr(driver, function)(*arguments)
    if int(status):
        raise fail("quota-green", f"{function} failed", found=status)
    return values[0] if len(values) == 1 else tuple(values)
