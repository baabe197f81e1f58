"""Components for the tests of hosts, importable in worker processes without what tests load."""

from __future__ import annotations

import mmap
import os
import pathlib
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

from rose_compiler.base.errors import fail


class Refusing(Exception):
    """Pickles well and fails to unpickle."""

    def __init__(self, one: str, two: int) -> None:
        super().__init__(one)
        self.two = two


class Part:
    """A component with state that shows order, and every way to fail."""

    def __init__(self, start: int = 0) -> None:
        self.value = start
        self.closed_into: Any = None
        self.memory: mmap.mmap | None = None

    def add(self, amount: int, *, times: int = 1) -> int:
        self.value += amount * times
        return self.value

    def nothing(self) -> None:
        return None

    def text(self) -> bytes:
        return b"raw \x00 bytes"

    def echo(self, value: Any) -> Any:
        return value

    def fail(self, what: str) -> None:
        if what == "value":
            raise ValueError("wrong value")
        if what == "refusing":
            raise Refusing("no way", 2)
        if what == "exit":
            sys.exit(4)
        if what == "unpicklable":
            error = RuntimeError("holds a lock")
            error.lock = threading.Lock()  # type: ignore[attr-defined]
            raise error

    def lock(self) -> Any:
        return threading.Lock()

    def pid(self) -> int:
        return os.getpid()

    def loaded(self) -> list[str]:
        return [name for name in ("torch", "numpy", "gymnasium") if name in sys.modules]

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def die(self, number: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), number)
        time.sleep(30)

    def leave(self, status: int) -> None:
        os._exit(status)

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def meet(self, mine: str, other: str) -> bool:
        """Whether the other call runs while this one does."""
        pathlib.Path(mine).touch()
        deadline = time.monotonic() + 20
        while not pathlib.Path(other).exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def thread(self) -> str:
        return threading.current_thread().name

    def torch_threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def attach(self, memory: mmap.mmap, length: int) -> int:
        self.memory = memory
        return length

    def double(self) -> None:
        view = np.frombuffer(self.memory, np.float64)  # type: ignore[arg-type]
        view *= 2

    def fork_and_die(self) -> None:
        """End, leaving a child behind that holds this process's descriptors."""
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        os._exit(7)


class Closing(Part):
    """Writes a file when it is closed."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def close(self) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("closed\n")


class BadClose(Part):
    def close(self) -> None:
        raise OSError("can't be closed")


def light() -> LightPart:
    return LightPart()


class LightPart:
    """Says what its process has loaded; this module has loaded numpy."""

    def loaded(self) -> list[str]:
        return [name for name in ("torch", "gymnasium") if name in sys.modules]


def failing_factory() -> Part:
    raise KeyError("no such robot")


def dying_factory() -> Part:
    os._exit(9)


def sleeping_factory() -> Part:
    time.sleep(60)
    return Part()


class Making:
    """A factory that takes until ``gate`` is there, the first ``quick`` times excepted."""

    def __init__(self, folder: pathlib.Path, quick: int = 0) -> None:
        self.folder, self.quick = folder, quick

    def __call__(self) -> Part:
        begun = len(list(self.folder.glob("begun*")))
        (self.folder / f"begun{begun}").touch()
        while begun >= self.quick and not (self.folder / "gate").exists():
            time.sleep(0.01)
        return Part()


class Learner:
    """A component that takes parameters, and keeps what it is told to."""

    def __init__(self) -> None:
        self._w: Any = None
        self._kept: list[Any] = []

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._w = state["w"]

    def weight(self) -> float:
        return float(self._w[0])

    def slowly(self) -> float:
        time.sleep(0.02)
        return self.weight()

    def echo(self, value: Any) -> Any:
        return value

    def keep(self, value: Any) -> None:
        self._kept.append(value)

    def kept(self) -> list[Any]:
        return self._kept

    def forget(self) -> None:
        self._kept = []

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def cores(self) -> set[int]:
        return os.sched_getaffinity(0)

    def module(self) -> str:
        return type(self).__module__

    def lock(self) -> Any:
        return threading.Lock()

    def fail(self) -> None:
        raise KeyError("gone")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Counter:
    """Adds up, and dies in the middle of a call when it is told to by a file, which it removes; or
    hangs, if the file says so."""

    def __init__(self, trap: str = "") -> None:
        self._trap = pathlib.Path(trap) if trap else None
        self.total = np.zeros(3)
        self.scale = 1.0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale = float(state["w"][0])

    def get_state(self) -> dict[str, Any]:
        return {"total": self.total}

    def set_state(self, state: dict[str, Any]) -> None:
        self.total = state["total"].copy()

    def _fall(self) -> None:
        if self._trap is not None and self._trap.exists():
            how = self._trap.read_text()
            self._trap.unlink()
            if how == "hang":
                time.sleep(30)
            os.kill(os.getpid(), signal.SIGKILL)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def add(self, amount: Any) -> Any:
        self._fall()
        self.total = self.total + self.scale * np.asarray(amount)
        return self.total

    def scaled(self, amount: Any) -> Any:
        """Keeps nothing."""
        self._fall()
        return self.scale * np.asarray(amount)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def cores(self) -> set[int]:
        return os.sched_getaffinity(0)


class Stubborn(Counter):
    """Can't take its state back."""

    def set_state(self, state: dict[str, Any]) -> None:
        raise ValueError("not this state")


class Tuner:
    """Loads parameters, and changes them by itself."""

    def __init__(self) -> None:
        self.w = np.zeros(1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w = state["w"].copy()

    def train(self) -> Any:
        self.w = self.w + 1
        return self.w

    def get_state(self) -> Any:
        return self.w

    def set_state(self, state: Any) -> None:
        self.w = state

    def missing_host(self) -> None:
        raise fail("host-died", "another host is gone")

    def late_host(self) -> None:
        raise fail("host-timeout", "another host is late")


class Interrupted(Counter):
    """Has the caller told by Ctrl-C while it takes its state back."""

    def set_state(self, state: dict[str, Any]) -> None:
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(30)
