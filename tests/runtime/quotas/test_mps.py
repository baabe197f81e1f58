from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from rose_compiler.base.errors import QuotaError
from rose_compiler.base.machine import load_machine
from rose_compiler.base.quota import QuotaPlan
from rose_compiler.runtime.quotas import Control, Device, MpsDaemon, MpsPartition, MpsPercentage
from tests.runtime.quotas.fake_mps import Fake

UUID = "GPU-1234"
H200 = load_machine("h200")
GPU = Device(UUID, "NVIDIA H200", (9, 0), 132, 4.8e12, 13010)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return Fake(tmp_path)


def control(fake: Fake, timeout: float = 60.0) -> Control:
    return Control(fake.folder / "default", None, str(fake.binary), timeout)


def backend(
    fake: Fake, kind: type[MpsPercentage] = MpsPercentage, gpu: Device = GPU
) -> MpsPercentage:
    return kind(str(fake.binary), lambda: [gpu], timeout=60.0, grace=0.2)


def plan(kind: str = "mps-percentage") -> QuotaPlan:
    return QuotaPlan.divide(kind, H200, {"sim": 4, "net": 12})  # type: ignore[arg-type]


def leftovers() -> set[str]:
    return set(glob.glob("/tmp/rose-mps-*"))


# answers and errors of the control program


def test_every_documented_answer(fake: Fake) -> None:
    one = control(fake)
    assert not one.answers()
    fake.daemon("static")
    assert one.answers()
    assert one.servers() == []
    fake.clients(11, 12)
    assert one.servers() == [4711]
    assert one.server_status(4711) == "ACTIVE"
    assert one.clients(4711) == [11, 12]
    assert one.all_clients() == {11: 4711, 12: 4711}
    one.start_server()
    one.terminate_client(4711, 11)
    assert one.clients(4711) == [12]
    assert one.add_partition(UUID, 4) == f"{UUID}/p1"
    one.remove_partition(UUID, f"{UUID}/p1")
    one.quit()
    assert not one.answers()
    assert fake.commands == [
        "get_server_status 4711",
        "get_client_list 4711",
        "get_client_list 4711",
        f"start_server -uid {os.getuid()}",
        "terminate_client 4711 11",
        "get_client_list 4711",
        f"sm_partition add {UUID} 4",
        f"sm_partition rm {UUID} {UUID}/p1",
        "quit",
    ]


def test_every_documented_error(fake: Fake) -> None:
    with pytest.raises(QuotaError, match="Cannot find MPS control daemon") as caught:
        control(fake).quit()
    assert caught.value.code == "quota-mps-absent"
    fake.daemon()
    with pytest.raises(QuotaError, match="not enabled"):
        control(fake).add_partition(UUID, 4)
    fake.daemon("static")
    fake.mode("refuses")
    with pytest.raises(QuotaError, match="not enough free chunks") as caught:
        control(fake).add_partition(UUID, 400)
    assert caught.value.code == "quota-mps-refused"
    with pytest.raises(QuotaError, match="permission denied"):
        control(fake).start_server(0)
    fake.mode("odd answer")
    with pytest.raises(QuotaError, match="named no partition"):
        control(fake).add_partition(UUID, 4)
    fake.mode("garbled")
    with pytest.raises(QuotaError, match="can't be read"):
        control(fake).servers()
    with pytest.raises(QuotaError, match="Unknown command"):
        control(fake).ask("make coffee")


def test_a_daemon_that_hangs_costs_no_more_than_the_limit(fake: Fake) -> None:
    fake.mode("hangs")
    with pytest.raises(QuotaError, match=r"within 0.3 s") as caught:
        control(fake, timeout=0.3).answers()
    assert caught.value.code == "quota-mps-timeout"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    for binary in ("no-such-program-anywhere", str(tmp_path)):
        with pytest.raises(QuotaError, match="quota-mps-absent"):
            Control(binary=binary).ask("quit")


# a daemon of our own


def test_a_daemon_is_started_privately_and_ended(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a daemon with such a bound would pass it on to every client
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    before = leftovers()
    with MpsDaemon(binary=str(fake.binary), grace=0.2) as daemon:
        assert daemon.owned
        daemon.check()
        pipe = daemon.control.variables()["CUDA_MPS_PIPE_DIRECTORY"]
        assert len(pipe) < 60
        assert daemon.control.answers()
        assert leftovers() - before
    assert fake.commands == ["start -f", "quit"]
    assert leftovers() == before
    daemon.stop()


def test_clients_are_waited_for_then_terminated_before_quit(fake: Fake) -> None:
    with MpsDaemon(binary=str(fake.binary), grace=0.2):
        fake.clients(11)
    assert [c for c in fake.commands if "get_" not in c] == [
        "start -f",
        "terminate_client 4711 11",
        "quit",
    ]


@pytest.mark.parametrize("mode", ["ignores quit", "hangs"])
def test_a_daemon_that_does_not_quit_is_ended(fake: Fake, mode: str) -> None:
    daemon = MpsDaemon(binary=str(fake.binary), grace=0.2, timeout=0.5)
    process = daemon._process
    assert process is not None
    if mode == "ignores quit":
        daemon.stop()
        fake.mode(mode)
        daemon = MpsDaemon(binary=str(fake.binary), grace=0.2, timeout=0.5)
        process = daemon._process
        assert process is not None
    fake.mode(mode)
    daemon.stop()
    assert process.poll() is not None


@pytest.mark.parametrize("mode", ["fails to start", "never answers"])
def test_a_daemon_that_does_not_start_leaves_nothing(fake: Fake, mode: str) -> None:
    before = leftovers()
    fake.mode(mode)
    with pytest.raises(QuotaError, match="quota-mps-start") as caught:
        MpsDaemon(binary=str(fake.binary), start=0.3, grace=0.2)
    if mode == "fails to start":
        assert caught.value.found == "An instance of this daemon is already running"
    assert leftovers() == before


def test_a_daemon_that_dies_is_noticed(fake: Fake) -> None:
    with backend(fake).apply(plan()) as applied:
        applied.check()
        process = applied.daemon._process
        assert process is not None
        process.kill()
        process.wait()
        with pytest.raises(QuotaError, match="daemon ready") as caught:
            applied.check()
        assert caught.value.code == "quota-mps-died"


# plans in force


def test_percentages_reach_the_environment(fake: Fake) -> None:
    with backend(fake).apply(plan()) as applied:
        found = applied.environment("sim")
        assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
        assert found["CUDA_VISIBLE_DEVICES"] == UUID
        assert Path(found["CUDA_MPS_PIPE_DIRECTORY"]).exists()
        applied.started("sim", os.getpid())
        fake.clients(11)
        applied.release(11)
        applied.release(12)
    assert "terminate_client 4711 11" in fake.commands
    assert not Path(found["CUDA_MPS_PIPE_DIRECTORY"]).exists()


def test_partitions_are_made_and_named(fake: Fake) -> None:
    with backend(fake, MpsPartition).apply(plan("mps-partition")) as applied:
        assert applied.environment("net")["CUDA_MPS_SM_PARTITION"] == f"{UUID}/p2"
    assert [c for c in fake.commands if "get_" not in c] == [
        "start -f -S",
        f"sm_partition add {UUID} 4",
        f"sm_partition add {UUID} 12",
        "quit",
    ]


def test_a_refused_partition_leaves_no_daemon(fake: Fake) -> None:
    before = leftovers()
    fake.mode("refuses")
    with pytest.raises(QuotaError, match="not enough free chunks"):
        backend(fake, MpsPartition).apply(plan("mps-partition"))
    assert fake.commands[-1] == "quit"
    assert leftovers() == before


def test_a_daemon_of_somebody_else_is_used_and_not_touched(fake: Fake) -> None:
    fake.daemon("static")
    before = leftovers()
    with backend(fake, MpsPartition).apply(plan("mps-partition")) as applied:
        assert not applied.daemon.owned
        assert "CUDA_MPS_PIPE_DIRECTORY" not in applied.environment("sim")
        applied.check()
    assert fake.foreign
    assert fake.commands == [
        f"sm_partition add {UUID} 4",
        f"sm_partition add {UUID} 12",
        f"sm_partition rm {UUID} {UUID}/p1",
        f"sm_partition rm {UUID} {UUID}/p2",
    ]
    with backend(fake).apply(plan()) as applied:
        applied.replan(plan())
        (fake.folder / "default" / "alive").rename(fake.folder / "away")
        with pytest.raises(QuotaError, match="quota-mps-died"):  # others would start without MPS
            applied.replan(plan())
        (fake.folder / "away").rename(fake.folder / "default" / "alive")
    assert fake.foreign
    assert len(fake.commands) == 4
    assert leftovers() == before


def test_a_plan_of_another_back_end_is_refused(fake: Fake) -> None:
    with pytest.raises(QuotaError, match="given to mps-partition"):
        backend(fake, MpsPartition).apply(plan())


# probing


def test_what_the_machine_lacks_is_said(fake: Fake) -> None:
    assert backend(fake, MpsPartition).probe().available
    older = Device(UUID, "V100", (7, 0), 80, None, 13000)
    assert backend(fake, gpu=older).probe().available
    assert "older than compute capability 8.0" in backend(fake, MpsPartition, older).probe().why
    driver = Device(UUID, "H200", (9, 0), 132, None, 13000)
    assert "CUDA 13.0, and this needs 13.1" in backend(fake, MpsPartition, driver).probe().why
    assert "no GPU" in MpsPercentage(str(fake.binary), list).probe().why
    assert "not installed" in MpsPercentage("no-such-program", lambda: [GPU]).probe().why
