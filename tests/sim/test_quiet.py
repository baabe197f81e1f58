"""MuJoCo's warnings are held back while environments are built, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rose_compiler.sim import quiet_mujoco

NOISE = b"WARNING: compiler attribute 'x' is deprecated\n\n"
ROOT = str(Path(__file__).resolve().parent.parent.parent)


def test_only_mujocos_lines_are_held_back(capfd: Any) -> None:
    with quiet_mujoco():
        os.write(2, NOISE)
        os.write(2, b"something else\n")
        assert capfd.readouterr().err == ""
    assert capfd.readouterr().err == "\nsomething else\n"
    with quiet_mujoco():
        os.write(2, NOISE)
    assert capfd.readouterr().err == ""


def test_an_exception_passes_and_output_returns(capfd: Any) -> None:
    def fail() -> None:
        with quiet_mujoco():
            os.write(2, b"before the end\n")
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "before the end\nafter\n"


def test_nested_and_from_several_threads(capfd: Any) -> None:
    def work() -> None:
        for _ in range(50):
            with quiet_mujoco(), quiet_mujoco():
                os.write(2, NOISE)

    before = len(os.listdir("/proc/self/fd"))
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.write(2, b"end\n")
    assert capfd.readouterr().err == "end\n"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("hosts", ["inline", "thread", "process"])
def test_building_halfcheetah_prints_nothing(hosts: str, tmp_path: Path) -> None:
    script = f"""
import gymnasium
from rose_compiler.sim import ShardedEnv
make = lambda: gymnasium.make("HalfCheetah-v5")
env = ShardedEnv([[make, make], make], hosts={hosts!r})
env.reset(seed=0)
env.close()
print("end")
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
        check=False,
    )
    assert (done.stdout, done.stderr) == ("end\n", "")


def test_without_a_descriptor_nothing_happens(tmp_path: Path) -> None:
    script = """
import os
os.close(2)
from rose_compiler.sim import quiet_mujoco
with quiet_mujoco():
    pass
print("end")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": ROOT},
        check=False,
    )
    assert done.stdout == "end\n"
