"""Everything that goes wrong in or around a worker ends in one clear error, and nothing stays."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from host_parts import Closing, Part, dying_factory, sleeping_factory

from rose_compiler.base.errors import FactoryError, HostDied, HostTimeout, RuntimeFault
from rose_compiler.runtime.hosts import ProcessHost
from rose_compiler.runtime.hosts.channel import Frames
from rose_compiler.runtime.hosts.process import abandon_all
from tests.awake import until, within

HERE = Path(__file__).parent


def gone(pid: int, seconds: float = 5.0) -> bool:
    def ended() -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        return state == "Z" and not Path(f"/proc/{pid}/task/{pid}/children").exists()

    return until(ended, seconds)


@pytest.mark.parametrize(
    ("method", "arguments", "how"),
    [
        ("die", (), "was ended by SIGKILL while it ran die()"),
        ("die", (signal.SIGTERM,), "was ended by SIGTERM while it ran die()"),
        ("leave", (3,), "exited with status 3 while it ran leave()"),
        ("leave", (0,), "exited with status 0 while it ran leave()"),
    ],
)
def test_a_worker_that_ends_in_a_call(method: str, arguments: Any, how: str) -> None:
    host = ProcessHost(Part, name="arm")
    host.ready()
    pid = host.pid
    with within(5):
        first, second = host.submit(method, *arguments), host.submit("add", 1)
        with pytest.raises(HostDied) as caught:
            host.wait(first)
        assert f"the host 'arm' (process {pid}) {how}" in str(caught.value)
        with pytest.raises(HostDied):
            host.wait(second)
        with pytest.raises(HostDied):
            host.call("add", 1)
    host.close()
    assert gone(pid)


def test_a_worker_killed_from_outside_while_it_waits() -> None:
    host = ProcessHost(Part)
    host.ready()
    os.kill(host.pid, signal.SIGKILL)
    with pytest.raises(HostDied, match="SIGKILL"):
        host.call("add", 1)


def test_a_worker_whose_child_keeps_the_socket_open() -> None:
    host = ProcessHost(Part)
    host.ready()
    with within(5), pytest.raises(HostDied, match="status 7"):
        host.call("fork_and_die")


def test_replies_sent_before_the_end_arrive() -> None:
    host = ProcessHost(Part)
    host.ready()
    first, second = host.submit("add", 5), host.submit("leave", 1)
    time.sleep(0.3)
    assert host.wait(first) == 5
    with pytest.raises(HostDied):
        host.wait(second)


def test_a_factory_that_ends_the_process() -> None:
    host = ProcessHost(dying_factory, name="arm")
    with pytest.raises(RuntimeFault, match=r"'arm' exited with status 9 as it started"):
        host.ready()


def test_a_factory_that_takes_too_long() -> None:
    host = ProcessHost(sleeping_factory, start_timeout=0.5)
    pid = host.pid
    with pytest.raises(HostTimeout, match=r"factory\(\)"):
        host.ready()
    assert gone(pid)


def test_an_exception_that_does_not_unpickle_is_named() -> None:
    host = ProcessHost(Part, name="arm")
    with pytest.raises(RuntimeFault, match=r"host_parts.Refusing was raised in the host 'arm'"):
        host.call("fail", "refusing")
    with pytest.raises(RuntimeFault, match="RuntimeError was raised"):
        host.call("fail", "unpicklable")
    assert host.call("add", 1) == 1
    host.close()


def test_an_exception_brings_its_traceback_along() -> None:
    host = ProcessHost(Part)
    with pytest.raises(ValueError, match="wrong value") as caught:
        host.call("fail", "value")
    assert "host_parts.py" in caught.value.__notes__[0]
    assert 'raise ValueError("wrong value")' in caught.value.__notes__[0]
    with pytest.raises(SystemExit):
        host.call("fail", "exit")
    assert host.call("add", 1) == 1
    host.close()


def test_a_result_that_does_not_pickle() -> None:
    host = ProcessHost(Part)
    with pytest.raises(RuntimeFault, match=r"result of lock\(\), a _thread.lock"):
        host.call("lock")
    with pytest.raises(RuntimeFault, match=r"argument of echo\(\)"):
        host.call("echo", threading.Lock())
    assert host.call("add", 1) == 1
    host.close()


def lambda_with_lock() -> Any:
    lock = threading.Lock()
    return lambda: (lock, Part())[1]


def lambda_with_nested_lock() -> Any:
    config = {"robots": [{"lock": threading.Lock()}]}
    return lambda: (config, Part())[1]


def list_of_factories() -> Any:
    inner = lambda_with_lock()
    return lambda: [inner, Part][1]()


def default_argument() -> Any:
    def build(start: int = 0, guard: Any = threading.Lock()) -> Part:  # noqa: B008
        return Part(start)

    build.__module__ = "__main__"  # pickled by value, as a function of a script is
    return build


def partial_argument() -> Any:
    return functools.partial(Part, threading.Lock())


class Holder:
    def __init__(self) -> None:
        self.guard = threading.Lock()

    def build(self) -> Part:
        return Part()


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        (lambda_with_lock(), "captured variable 'lock' of lambda_with_lock.<locals>.<lambda>"),
        (lambda_with_nested_lock(), "captured variable 'config'['robots'][0]['lock'] of"),
        (list_of_factories(), "captured variable 'lock' of lambda_with_lock.<locals>.<lambda>"),
        (partial_argument(), "partial argument '0' is a _thread.lock"),
        (default_argument(), "default of parameter 'guard' of default_argument.<locals>.build"),
        (Holder().build, "attribute 'guard' is a _thread.lock"),
    ],
)
def test_a_factory_that_does_not_pickle(factory: Any, named: str) -> None:
    with pytest.raises(FactoryError) as caught:
        ProcessHost(factory, name="arm")
    assert "the factory of 'arm' can't be pickled: " + named in str(caught.value)
    if "lambda" in named or "build" in named:
        assert "test_process_faults.py:" in str(caught.value)


SCRIPT_WITHOUT_GUARD = """
import os, signal, sys, threading, time
from rose_compiler.runtime.hosts import ProcessHost

class MyError(ValueError):
    def __init__(self, text):
        super().__init__(text)

class Robot:
    def fail(self):
        raise MyError("mine")
    def pid(self):
        return os.getpid()
    def sleep(self):
        time.sleep(60)

print("main", flush=True)
host = ProcessHost(lambda: Robot(), name="robot")
print("pid", host.call("pid"), flush=True)
try:
    host.call("fail")
except MyError as error:
    print("caught", error, flush=True)
"""


def run(script: str, tmp_path: Path, **kwargs: Any) -> subprocess.Popen[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT_WITHOUT_GUARD + script)
    root = str(HERE.parent.parent)
    environment = {**os.environ, "PYTHONPATH": root}
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment,
        **kwargs,
    )


def worker_pid(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines[0] == "main\n"
    assert lines[2] == "caught mine\n"  # the class of the script, not a copy of it
    return int(lines[1].split()[1])


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    """The rest of the output; ``communicate`` would miss what ``readline`` has buffered."""
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    process.wait(20)
    return out, err


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    process = run("print('end', flush=True)", tmp_path)
    pid = worker_pid(process)
    assert (*finish(process), process.returncode) == ("end\n", "", 0)
    assert gone(pid)


def test_the_worker_dies_with_a_killed_parent(tmp_path: Path) -> None:
    process = run("host.call('sleep')", tmp_path)
    pid = worker_pid(process)
    time.sleep(0.2)
    process.kill()
    process.wait()
    assert gone(pid)


def test_the_worker_dies_with_a_parent_that_started_it_in_a_thread(tmp_path: Path) -> None:
    """No death signal from the kernel there: the worker must notice by itself, inside a call."""
    script = """
hosts = []
thread = threading.Thread(target=lambda: hosts.append(ProcessHost(lambda: Robot())))
thread.start()
thread.join()
print(hosts[0].call("pid"), flush=True)
hosts[0].call("sleep")
"""
    process = run(script, tmp_path)
    worker_pid(process)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    time.sleep(0.2)
    process.kill()
    process.wait()
    assert gone(pid)


def test_ctrl_c_in_the_parent(tmp_path: Path) -> None:
    """The terminal sends it to the whole group: the worker ignores it, the parent raises."""
    process = run("host.call('sleep')", tmp_path, start_new_session=True)
    pid = worker_pid(process)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, err = finish(process)
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    assert gone(pid)


def test_ctrl_c_while_the_worker_starts(tmp_path: Path) -> None:
    script = """
host = ProcessHost(lambda: Robot())
try:
    print("starting", flush=True)
    time.sleep(2)
except KeyboardInterrupt:
    print("alive" if host.call("pid") == host.pid else "?", flush=True)
"""
    process = run(script, tmp_path, start_new_session=True)
    worker_pid(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "starting\n"
    os.killpg(process.pid, signal.SIGINT)
    assert finish(process) == ("alive\n", "")


def test_workers_busy_at_exit_are_ended_together(tmp_path: Path) -> None:
    script = """
hosts = [ProcessHost(lambda: Robot()) for _ in range(3)]
print(*[h.call("pid") for h in hosts], flush=True)
for h in hosts:
    h.submit("sleep")
"""
    process = run(script, tmp_path)
    worker_pid(process)
    assert process.stdout is not None
    pids = [int(text) for text in process.stdout.readline().split()]
    with within(5):
        _, err = finish(process)
    assert err == ""
    assert all(gone(pid) for pid in pids)


def test_ctrl_c_within_a_message_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a request, or of an answer, would be taken for the beginning of the next one."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    hosts = [ProcessHost(Part) for _ in range(2)]
    for host in hosts:
        host.ready()
    busy = hosts[0].submit("sleep", 600.0)
    monkeypatch.setattr(
        hosts[0], "_poll", SimpleNamespace(modify=lambda *_: None, poll=interrupted)
    )
    with pytest.raises(KeyboardInterrupt):
        hosts[0].submit("echo", b"x" * (1 << 23))  # more than fits between two processes
    monkeypatch.undo()
    asked = hosts[1].submit("add", 1)
    monkeypatch.setattr(Frames, "feed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hosts[1].wait(asked)
    monkeypatch.undo()
    for host, ticket in zip(hosts, (busy, asked), strict=True):
        for use in (partial(host.wait, ticket), partial(host.call, "add", 1)):
            with pytest.raises(HostDied, match="an interrupt had cut a message"):
                use()
        assert gone(host.pid)


def test_a_forked_copy_of_the_caller_holds_no_worker_up(tmp_path: Path) -> None:
    """It has the socket open too, so that closing it here is not the end of it."""
    host = ProcessHost(functools.partial(Closing, str(tmp_path / "closed")))
    host.ready()
    held = os.dup(host._child.sock.fileno())  # as a process has it that was forked meanwhile
    try:
        abandon_all([host])
        assert (tmp_path / "closed").exists()  # else it was killed for taking too long
    finally:
        os.close(held)
