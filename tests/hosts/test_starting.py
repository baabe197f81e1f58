"""Components that are still being built: who waits for them, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from host_parts import Making

from rose_compiler.base.errors import HostTimeout
from rose_compiler.base.faultmap import FaultMap
from rose_compiler.runtime import remote, support
from rose_compiler.runtime.hosts.host import within
from rose_compiler.runtime.hosts.hosted import Hosted
from rose_compiler.runtime.hosts.making import hosted
from rose_compiler.runtime.hosts.process import ProcessHost
from rose_compiler.runtime.hosts.thread import ThreadHost

KINDS = pytest.mark.parametrize("kind", ["process", "thread"])


@pytest.fixture
def making(tmp_path: Path) -> Any:
    yield lambda quick=0: Making(tmp_path, quick)
    (tmp_path / "gate").touch()  # no thread may be left


@KINDS
def test_the_time_to_build_a_component_has_an_end(making: Any, kind: Any, tmp_path: Path) -> None:
    made = hosted(making(), host=kind, name="judge", start_timeout=0.2, stateless=True)
    with pytest.raises(HostTimeout, match=r"'judge'.*factory\(\)"):
        made.ready()
    with pytest.raises(HostTimeout, match="'judge'"):
        made.add(1)
    assert len(list(tmp_path.glob("begun*"))) <= 1, "who hangs as it is built is not built again"
    made.close()


@pytest.mark.parametrize("host", [ProcessHost, ThreadHost])
def test_waits_inside_a_block_end_together(host: Any, making: Any) -> None:
    made = host(making(), name="judge")
    ticket = made.submit("add", 1)
    with within(made, 0.2), within(made, None), within(made, 60.0), pytest.raises(HostTimeout):
        made.wait(ticket, 120.0)
    assert made.until is None
    made.close()


def faulted(lane: Any) -> RuntimeError:
    """What an error of the coordinator becomes beside a lane."""
    runtime = support.Runtime()
    runtime._lanes = {lane.name: lane}
    error = RuntimeError("the coordinator's own")
    runtime.fault(error, FaultMap("nowhere", (), (), {}))
    assert not runtime._lanes, "it is left"
    runtime.drain()
    return error


def submitted(component: Hosted) -> Any:
    lane = remote.ComponentLane("host:judge")
    lane.submit(0, lambda: component.add(1))
    return lane


@KINDS
def test_a_fault_does_not_wait_for_what_is_built_anew(
    kind: Any, making: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "GRACE", 0.3)
    component = hosted(making(quick=1), host=kind, name="judge")
    assert component.add(1) == 1
    component.restart()
    error = faulted(submitted(component))
    assert any("host:judge did not come to rest" in n for n in error.__notes__)
    with pytest.raises(HostTimeout, match="'judge'"):
        component.add(1)
    (tmp_path / "gate").touch()
    component.restart()
    assert component.add(1) == 1
    component.close()


def test_a_fault_does_not_wait_for_a_process_that_takes_over(
    making: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "GRACE", 0.3)
    component = hosted(making(quick=1), name="judge", stateless=True)
    component.ready()
    lane = submitted(component)
    component._host.kill()
    faulted(lane)
    assert len(list(tmp_path.glob("begun*"))) <= 2
    (tmp_path / "gate").touch()
    component.restart()
    assert component.add(1) == 1
    component.close()


def test_a_host_lane_does_not_wait_either(making: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "GRACE", 0.3)
    lane = remote.HostLane("host:judge", ThreadHost(making(), name="judge"))
    lane.submit(0, "add", 1)
    error = faulted(lane)
    assert any("did not come to rest" in n for n in error.__notes__)
