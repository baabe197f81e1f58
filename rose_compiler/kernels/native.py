"""Small C functions, compiled in a process beside this one and kept on disk.

A library's file ends in the digest of what stands before, is private to the user, and gets its name
in one piece. One that can't be trusted is deleted, or left alone where others may have written it.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from rose_compiler.base import knobs

#: Every operation is rounded by itself and none is left out: the bits are those of the text.
FLAGS = (
    *("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fPIC", "-shared", "-x", "c"),
)
#: Seconds after which a compiler is given up.
LIMIT_S = 30.0
_DIGEST = 32


class NotBuilt(Exception):
    """Why there is no library."""


@lru_cache(maxsize=1)
def compiler() -> str | None:
    """The compiler to ask: ``CXX`` or g++, as Inductor does, or another one that there is."""
    if os.name != "posix":
        return None
    for name in (os.environ.get("CXX", ""), "g++", "clang++", "gcc", "clang", "cc"):
        if name and (found := shutil.which(name)):
            return found
    return None


@lru_cache(maxsize=1)
def _machine() -> str:
    """What ``-march=native`` hangs on."""
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.partition(":")[0].strip() in ("flags", "Features"):
                return f"{platform.machine()} {line}"
    return f"{platform.machine()} {platform.processor()} {platform.node()}"


def folder() -> Path | None:
    """Where libraries are kept: below the cache of schedules (``ROSE_CACHE``), or nowhere."""
    cache = knobs.current().cache
    if cache == knobs.OFF:
        return None
    if cache != knobs.AUTO:
        return Path(cache).expanduser() / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return Path(base).expanduser() / "rose_compiler" / "kernels"


class Build:
    """One library in the making.

    ``kept`` loads it if an earlier run has made it; ``start`` lets a process compile it, ``poll``
    looks whether that is done. ``seconds`` is how long it took.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.seconds = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._out = self._scratch = ""

    @property
    def running(self) -> bool:
        """Whether the compiler is at work."""
        return self._process is not None

    def path(self) -> Path | None:
        """The library's place on disk, if libraries are kept."""
        where, found = folder(), compiler()
        if where is None or found is None:
            return None
        changed = os.stat(found).st_mtime_ns
        about = (self.source, " ".join(FLAGS), os.path.realpath(found), str(changed), _machine())
        key = hashlib.sha256("\0".join(about).encode()).hexdigest()
        return where / f"scan-{key[:32]}.so"

    def kept(self) -> Any:
        """The library that an earlier run left, or None."""
        try:
            path = self.path()
            if path is None or not _trusted(path):
                return None
            return ctypes.CDLL(str(path))
        except OSError:
            return None

    def start(self) -> None:
        """Let a process of its own compile the text.

        Raises:
            NotBuilt: where there is no compiler, or no place to write to.
        """
        found = compiler()
        if found is None:
            raise NotBuilt("there is no C compiler")
        try:
            self._scratch = tempfile.mkdtemp(prefix="rose_compiler-")
            text = os.path.join(self._scratch, "scan.c")
            with open(text, "w", encoding="utf-8") as file:
                file.write(self.source)
            self._out = os.path.join(self._scratch, "scan.so")
            with open(os.path.join(self._scratch, "said"), "wb") as said:
                self._process = subprocess.Popen(
                    [found, *FLAGS, "-o", self._out, text],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                )
        except OSError as error:
            self._clear()
            raise NotBuilt(f"the compiler could not be started: {error}") from error
        self._started = time.monotonic()
        atexit.register(self.stop)

    def poll(self, wait: float = 0.0) -> Any:
        """The library, or None while it is compiled; waits so many seconds at most.

        Raises:
            NotBuilt: when the compiler failed, or took too long.
        """
        assert self._process is not None
        try:
            code = self._process.wait(wait) if wait else self._process.poll()
        except subprocess.TimeoutExpired:
            code = None
        self.seconds = time.monotonic() - self._started
        if code is None:
            if self.seconds > LIMIT_S:
                self.stop()
                raise NotBuilt(f"the compiler took more than {LIMIT_S:.0f} s")
            return None
        self._process = None
        try:
            if code:
                raise NotBuilt(f"the compiler failed: {self._said()}")
            library = ctypes.CDLL(self._out)  # stays loaded when the file is gone
            self._keep()
            return library
        except OSError as error:
            raise NotBuilt(f"what was compiled can't be loaded: {error}") from error
        finally:
            self._clear()

    def stop(self) -> None:
        """End the compiler if it is at work; nothing is left behind."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        self._clear()

    def _said(self) -> str:
        with suppress(OSError):
            said = Path(self._scratch, "said").read_text(encoding="utf-8", errors="replace")
            lines = [line for line in said.splitlines() if "error" in line] or said.splitlines()
            if lines:
                return lines[0][:200]
        return "it said nothing"

    def _keep(self) -> None:
        """Put the library where later runs find it; no harm where that can't be done."""
        with suppress(OSError):
            path = self.path()
            if path is None:
                return
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            data = Path(self._out).read_bytes()
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with open(handle, "wb") as file:
                    file.write(data + hashlib.sha256(data).digest())
                os.replace(name, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise

    def _clear(self) -> None:
        atexit.unregister(self.stop)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = ""


def _trusted(path: Path) -> bool:
    """Whether a file is whole and could have been written by this user alone; a broken one is
    deleted."""
    for place in (path.parent, path):
        status = os.lstat(place)
        private = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISLNK(status.st_mode) or status.st_uid != os.getuid() or not private:
            return False
    data = path.read_bytes()
    if hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]:
        return True
    path.unlink()
    return False
