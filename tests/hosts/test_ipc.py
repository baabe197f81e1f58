"""CUDA tensors by handle: agreed on first, copied and waited for, or through memory of the host.

There is no device here, so the calls into CUDA are stood in for; what is tested is their order and
what happens where one of them is refused.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose_compiler.runtime.hosts import arrays, hosted, ipc, served
from rose_compiler.runtime.hosts.hosted import Hosted


class Stored:
    """A tensor in memory behind a handle."""

    def __init__(self, number: int, log: list[str]) -> None:
        self.number, self.log, self.device = number, log, "cuda:0"

    def clone(self) -> Stored:
        self.log.append("copy")
        return self

    def __int__(self) -> int:
        return self.number


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of the device, and devices whose identity is their number."""
    asked: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: asked.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda k: SimpleNamespace(uuid=f"GPU-{k}", name="")
    )
    return asked


def rebuild(log: list[str], number: int = ipc._NUMBER) -> Any:
    return (lambda: Stored(number, log), ())


def test_a_copy_is_complete_before_anything_is_answered(log: list[str]) -> None:
    ipc.opened(rebuild(log))
    assert log == ["copy", "wait"]


def test_a_handle_is_made_when_the_tensor_is_written(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.multiprocessing import reductions

    monkeypatch.setattr(reductions, "reduce_tensor", lambda t: log.append("handle"))
    ipc.handle(torch.zeros(1))
    assert log == ["wait", "handle"]


def test_what_the_other_process_has_against_it(log: list[str]) -> None:
    assert ipc.why_not((0, "GPU-0", rebuild(log))) is None
    assert ipc.why_not((0, "GPU-7", rebuild(log))) == "device 0 is GPU-0 there and GPU-7 here"
    assert "something else" in str(ipc.why_not((0, "GPU-0", rebuild(log, 3))))

    def refuse() -> Any:
        raise RuntimeError("invalid device context")

    assert "invalid device context" in str(ipc.why_not((0, "GPU-0", (refuse, ()))))


class Echo:
    """Gives back what it gets."""

    def echo(self, value: Any) -> Any:
        return value


@pytest.fixture
def component(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A component whose arguments seem to lie on a device; its host is taken for a process."""
    monkeypatch.setattr(hosted, "_device", lambda found: "cuda:0" if found else None)
    monkeypatch.setattr(hosted, "ProcessHost", hosted.InlineHost)
    monkeypatch.setattr(hosted.InlineHost, "submit_raw", lambda h, p, w: h.submit("raw", p), False)

    def share(host: Any, method: str, size: int, *args: Any) -> tuple[Any, None]:
        memory = bytearray(max(size, 1))
        host.call(method, memory, *args)
        return memory, None

    monkeypatch.setattr(hosted.InlineHost, "share", share, raising=False)
    return hosted.hosted(Echo, host="inline", name="echo")


def test_it_is_agreed_on_once_and_refused_with_a_remark(
    component: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    offers: list[Any] = []

    def offer(device: Any) -> Any:
        offers.append(device)
        return object(), (0, "GPU-0", None)

    monkeypatch.setattr(ipc, "offer", offer)
    monkeypatch.setattr(ipc, "why_not", lambda made: "device 0 is GPU-0 there and GPU-1 here")
    x = torch.arange(3.0)
    for _ in range(3):
        assert torch.equal(component.echo(x), x)
    assert offers == ["cuda:0"]
    (remark,) = component.rose_remarks
    assert (remark.code, "GPU-1 here" in remark.why) == ("not-available", True)


def test_a_process_that_can_not_share_its_memory(
    component: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offer(device: Any) -> Any:
        raise RuntimeError("operation not supported")

    monkeypatch.setattr(ipc, "offer", offer)
    x = torch.arange(3.0)
    assert torch.equal(component.echo(x), x)
    assert "operation not supported" in component.rose_remarks[0].why


def test_both_sides_use_handles_once_agreed(
    component: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[bool] = []
    dump = arrays.dump

    def watched(value: Any, *, detach: bool = False, by_handle: bool = False) -> Any:
        used.append(by_handle)
        return dump(value, detach=detach, by_handle=by_handle)

    monkeypatch.setattr(served.arrays, "dump", watched)
    monkeypatch.setattr(ipc, "offer", lambda device: (object(), (0, "GPU-0", None)))
    monkeypatch.setattr(ipc, "why_not", lambda made: None)
    x = torch.arange(3.0)
    assert torch.equal(component.echo(x), x)
    component.echo(x)
    # the argument once without, then with; the answer; and another call
    assert used == [False, True, True, True, True]
    assert not component.rose_remarks


def test_a_host_in_this_process_opens_no_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "_device", lambda found: "cuda:0" if found else None)
    monkeypatch.setattr(ipc, "offer", lambda device: pytest.fail("it would be refused"))
    with hosted.hosted(Echo, host="thread") as far:
        assert torch.equal(far.echo(torch.ones(2)), torch.ones(2))
        assert not far.rose_remarks
