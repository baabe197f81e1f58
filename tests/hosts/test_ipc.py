"""CUDA tensors by handle: agreed on first, copied and waited for, or through memory of the host.

There is no device here, so the calls into CUDA are stood in for; what is tested is their order and
what happens where one of them is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rose_compiler.runtime.hosts import arrays, hosted, ipc
from rose_compiler.runtime.hosts.host import InlineHost
from rose_compiler.runtime.hosts.hosted import Hosted
from rose_compiler.runtime.hosts.making import hosted as make
from rose_compiler.runtime.hosts.pending import begin


class Stored:
    """A tensor in memory behind a handle."""

    def __init__(self, number: int) -> None:
        self.number, self.device = number, "cuda:0"

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


def rebuild(number: int = ipc._NUMBER) -> Any:
    return (lambda: Stored(number), ())


def test_a_handle_is_made_when_the_tensor_is_written(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.multiprocessing import reductions

    monkeypatch.setattr(reductions, "reduce_tensor", lambda t: log.append("handle"))
    ipc.handle(torch.zeros(1))
    assert log == ["wait", "handle"]


def test_what_the_other_process_has_against_it(log: list[str]) -> None:
    assert ipc.why_not((0, "GPU-0", rebuild())) is None
    assert ipc.why_not((0, "GPU-7", rebuild())) == "device 0 is GPU-0 there and GPU-7 here"
    assert "something else" in str(ipc.why_not((0, "GPU-0", rebuild(3))))

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
    monkeypatch.setattr(hosted, "ProcessHost", InlineHost)
    monkeypatch.setattr(InlineHost, "submit_raw", lambda h, p, w: h.submit("raw", p), False)

    def share(host: Any, method: str, size: int, *args: Any) -> tuple[Any, None]:
        memory = bytearray(max(size, 1))
        host.call(method, memory, *args)
        return memory, None

    monkeypatch.setattr(InlineHost, "share", share, raising=False)
    return make(Echo, host="inline", name="echo")


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


#: Buffers behind the handles of this process, which opens its own.
BUFFERS: list[Any] = []


def rebuilt(number: int) -> Any:
    return BUFFERS[number]


@pytest.fixture
def far(component: Hosted, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hosted, list[str]]]:
    """Tensors of int64 seem to lie on a device, whose memory is that of the host; what is asked
    of the device."""
    asked: list[str] = []
    known = arrays.layout_of

    def layout_of(array: Any) -> Any:
        made = known(array)
        return replace(made, device="cuda:0") if made.dtype == "int64" else made

    def handle(buffer: Any) -> Any:
        asked.append("handle")
        BUFFERS.append(buffer)
        return (rebuilt, (len(BUFFERS) - 1,))

    def allocate(size: int, device: str) -> Any:
        asked.append(f"allocate {size}")
        return torch.zeros(size, dtype=torch.uint8)

    monkeypatch.setattr(arrays, "layout_of", layout_of)
    monkeypatch.setattr(ipc, "allocate", allocate)
    monkeypatch.setattr(ipc, "handle", handle)
    monkeypatch.setattr(ipc, "settle", lambda device: asked.append("settle"))
    monkeypatch.setattr(ipc, "offer", lambda device: (object(), (0, "GPU-0", None)))
    monkeypatch.setattr(ipc, "why_not", lambda made: None)
    yield component, asked
    BUFFERS.clear()


def test_one_buffer_a_place_is_made_once_and_used_again(far: tuple[Hosted, list[str]]) -> None:
    component, asked = far
    for k in range(6):
        near, there = torch.full((2,), float(k)), torch.arange(k, k + 6).reshape(2, 3)
        got = component.echo({"near": near, "there": there, "empty": torch.zeros(0, 3).long()})
        assert torch.equal(got["near"], near)
        assert torch.equal(got["there"], there)
        assert got["there"].data_ptr() != there.data_ptr()
        assert got["empty"].shape == (0, 3)
    # two places, for arguments and for results
    assert asked.count("handle") == 4
    assert asked.count("allocate 64") == 4
    assert asked.count("settle") == 6 * 4  # each side when it has written, and when it has read
    assert not component.rose_remarks
    kept = component.echo(torch.arange(3))
    component.echo(torch.arange(7, 10))
    component.echo(torch.arange(7, 10))
    assert kept.tolist() == [0, 1, 2]  # a result is a copy: its place is written anew
    before = asked.count("handle")
    component.echo(torch.arange(100))  # a larger one replaces the buffers of its place
    assert asked.count("handle") == before + 2
    assert "allocate 832" in asked


def test_what_was_written_for_a_call_can_be_read_back(far: tuple[Hosted, list[str]]) -> None:
    component, _ = far
    pending = begin(component.echo, ((torch.arange(4), torch.ones(2)),))
    one, other = component._memory.written(pending.place, pending.call.layouts)
    assert (one.tolist(), other.tolist()) == ([0, 1, 2, 3], [1.0, 1.0])
    assert pending.result()[0].tolist() == [0, 1, 2, 3]


def test_memory_is_pinned_where_a_driver_is_in_use_and_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []
    status = [0]

    def register(address: int, size: int, flags: int) -> int:
        asked.append(("pin", size))
        return status[0]

    driver = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: asked.append(("unpin", 0))
    )
    memory = bytearray(4096)
    assert ipc.pinned(memory) is None  # nothing runs on a device here
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    assert ipc.pinned(None) is None
    made = ipc.pinned(memory)
    assert asked == [("pin", 4096)]
    del made
    assert asked[1:] == [("unpin", 0)]
    status[0] = 1
    assert ipc.pinned(memory) is None
    assert len(asked) == 3


def test_memory_of_the_host_is_pinned_where_handles_are_refused(
    component: Hosted, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(ipc, "offer", lambda device: (object(), (0, "GPU-0", None)))
    monkeypatch.setattr(ipc, "why_not", lambda made: "not here")
    monkeypatch.setattr(ipc, "pinned", lambda memory: pinned.append(len(memory or b"")))
    component.echo(torch.ones(3))
    component.echo(torch.ones(100))
    assert len([size for size in pinned if size]) >= 3  # both directions, and the larger ones


def test_a_host_in_this_process_opens_no_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "_device", lambda found: "cuda:0" if found else None)
    monkeypatch.setattr(ipc, "offer", lambda device: pytest.fail("it would be refused"))
    with make(Echo, host="thread") as far:
        assert torch.equal(far.echo(torch.ones(2)), torch.ones(2))
        assert not far.rose_remarks
