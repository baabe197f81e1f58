"""Sharded simulators in scripts of their own: no guard, Ctrl-C, a parent that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from failing import HOSTS, gone

from tests.awake import within

SCRIPT = """
import os, sys, time
import numpy as np, gymnasium
from gymnasium import spaces
from rose_compiler.sim import ShardedEnv

class Fallen(RuntimeError):
    pass

class Robot(gymnasium.Env):
    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Box(-1, 1, (1,))
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        if action[0] > 0.5:
            raise Fallen("down")
        if action[0] < -0.5:
            os.write(1, b"stepping\\n")
            time.sleep(60)
        return np.ones(2, np.float32), 1.0, False, False, {"pid": os.getpid()}
    def close(self):
        os.write(1, b"closed\\n")  # in one piece: the workers close at the same time

env = ShardedEnv([lambda: Robot(), lambda: Robot()], hosts=HOSTS)
env.reset(seed=1)
print(*env.step(np.zeros((2, 1), np.float32))[4]["pid"], flush=True)
"""


def start(hosts: str, rest: str, tmp_path: Path) -> tuple[subprocess.Popen[str], list[int]]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("HOSTS", repr(hosts)) + rest)
    process = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
    )
    assert process.stdout is not None
    return process, [int(text) for text in process.stdout.readline().split()]


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = process.stdout.read(), process.stderr.read()
    process.wait(20)
    return out, err


@pytest.mark.parametrize("hosts", HOSTS)
def test_a_script_without_a_guard(hosts: str, tmp_path: Path) -> None:
    rest = """
try:
    env.step(np.ones((2, 1), np.float32))
except Fallen as error:
    print("caught", error, flush=True)
env.close()
"""
    process, workers = start(hosts, rest, tmp_path)
    out, err = finish(process)
    # the environments of threads and processes close while the script prints
    assert out.count("closed\n") == 2
    assert out.replace("closed\n", "") == "caught down\n"
    assert err == ""
    if hosts == "process":
        assert all(gone(pid) for pid in workers)


@pytest.mark.parametrize("hosts", HOSTS)
def test_ctrl_c_in_a_step(hosts: str, tmp_path: Path) -> None:
    rest = """
try:
    env.step(np.array([[0.0], [-1.0]], np.float32))
except KeyboardInterrupt:
    print("interrupted", flush=True)
try:
    env.step(np.zeros((2, 1), np.float32))
except Exception as error:
    print(type(error).__name__, flush=True)
"""
    process, workers = start(hosts, rest, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "stepping\n"
    os.killpg(process.pid, signal.SIGINT)
    with within(8):
        out, err = finish(process)
    assert out.replace("closed\n", "") == "interrupted\nRuntimeFault\n"
    assert err == ""
    if hosts == "process":
        assert all(gone(pid) for pid in workers)


def test_workers_die_with_a_killed_parent(tmp_path: Path) -> None:
    process, workers = start("process", "env.step(-np.ones((2, 1), np.float32))", tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "stepping\n"
    process.kill()
    process.wait()
    assert all(gone(pid) for pid in workers)
