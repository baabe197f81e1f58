"""The examples run from an empty folder, as a newcomer runs them, and say what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(name: str, folder: Path, *arguments: str) -> str:
    """Run an example; what it printed. It leaves no process and nothing on standard error."""
    marker = f"EXAMPLE_OF_TEST={uuid.uuid4()}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ROSE_")}
    # rich asks for the width; one thread each, since tests run beside others
    environment |= dict([marker.split("=")], COLUMNS="120", OMP_NUM_THREADS="1")
    environment["ROSE_CACHE"] = "0"  # an earlier run's schedule would leave nothing to try
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stderr == ""
    assert descendants(marker) == []
    return done.stdout


def descendants(marker: str) -> list[str]:
    """Command lines of living processes whose environment holds the marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().decode().replace("\0", " "))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


@pytest.mark.timeout(300)
def test_ppo_mujoco(tmp_path: Path) -> None:
    printed = run(
        "ppo_mujoco.py",
        tmp_path,
        "--quick",
        "--seeds",
        "2",
        "--iterations",
        "8",
        "--out",
        "curves.png",
    )
    for part in (
        "captured: the rollout",
        "stepped = env_step(",
        "emitted: the rollout",
        "env.step(",  # the user's line beside the emitted one
        "compiled.explain()",
        "Applied (",
        "work on one core",
    ):
        assert part in printed, part
    for row in ("E0", "E1", "compiled", "bound"):
        assert re.search(rf"│ {row} +│ +[\d,]+ │", printed), f"no row {row}\n{printed[-3000:]}"
    for training in ("eager, seed 1", "compiled, seed 1", "eager, seed 2", "compiled, seed 2"):
        assert training in printed
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000


@pytest.mark.timeout(300)
def test_whole_loop(tmp_path: Path) -> None:
    printed = run("whole_loop.py", tmp_path, "--iterations", "12")
    assert "parameters equal bit for bit: True" in printed
    # its trips hand on what was observed, and what the simulator keeps in attributes
    assert re.search(r"for t, obs, state\w*, steps\w*, restarts\w* in for_t\(", printed)


@pytest.mark.timeout(300)
def test_custom_pass(tmp_path: Path) -> None:
    printed = run("custom_pass.py", tmp_path)
    assert printed.count("comes last in") == 2  # on text and on the loop
    assert "[effects-conflict]" in printed
    assert "as eager, bit for bit: True" in printed


@pytest.mark.timeout(300)
def test_whole_loop_is_tuned_trip_by_trip(tmp_path: Path) -> None:
    printed = run("whole_loop.py", tmp_path, "--iterations", "200")
    assert re.search(r"^\W*program order +[1-9]", printed, re.MULTILINE)
