"""Talking to the MPS control daemon: one command, one answer, never without a time limit."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rose_compiler.base.errors import QuotaError, fail, register

register(
    "quota-mps-absent",
    QuotaError,
    "no MPS control daemon answers",
    "start one with `nvidia-cuda-mps-control -d`, or let the package start its own",
)
register(
    "quota-mps-timeout",
    QuotaError,
    "the MPS control daemon did not answer in time",
    "look into control.log and server.log of the daemon, and end it by hand if it hangs",
)
register(
    "quota-mps-refused",
    QuotaError,
    "the MPS control daemon refused a command",
    "the daemon's answer says why; quotas can also be had through another back end",
)

BINARY = "nvidia-cuda-mps-control"
_ABSENT = "Cannot find MPS control daemon process"
_REFUSED = re.compile(r"\b(fail(ed|ure)?|error|invalid|unknown|not (found|supported))\b", re.I)
_PARTITION = re.compile(r"(GPU-[^\s/]+/\S+)")


@dataclass(frozen=True)
class Control:
    """One daemon, told from others by its pipe directory; None for the driver's default.

    ``binary`` is the control program, ``timeout`` the seconds that any answer may take.
    """

    pipe: Path | None = None
    log: Path | None = None
    binary: str = BINARY
    timeout: float = 5.0

    def variables(self) -> dict[str, str]:
        """What leads this program, and clients, to the daemon."""
        found = {}
        if self.pipe is not None:
            found["CUDA_MPS_PIPE_DIRECTORY"] = str(self.pipe)
        if self.log is not None:
            found["CUDA_MPS_LOG_DIRECTORY"] = str(self.log)
        return found

    def process_environment(self) -> Mapping[str, str]:
        """The caller's environment, led to the daemon."""
        return {**os.environ, **self.variables()}

    def ask(self, command: str) -> str:
        """The daemon's answer.

        Raises ``QuotaError``: ``quota-mps-absent``, ``quota-mps-timeout`` or
        ``quota-mps-refused``.
        """
        try:
            done = subprocess.run(
                [self.binary],
                input=command + "\n",
                env=self.process_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self.timeout,
            )
        except FileNotFoundError as error:
            raise fail("quota-mps-absent", f"{self.binary} is not installed") from error
        except OSError as error:
            raise fail("quota-mps-absent", f"{self.binary} can't be run", found=error) from error
        except subprocess.TimeoutExpired as error:
            raise fail(
                "quota-mps-timeout",
                f"no answer to `{command}`",
                expected=f"one within {self.timeout:g} s",
            ) from error
        answer = done.stdout.strip()
        if _ABSENT.lower() in answer.lower():
            raise fail("quota-mps-absent", f"`{command}` was not delivered", found=answer)
        if done.returncode or _REFUSED.search(answer):
            found = answer or f"exit status {done.returncode}"
            raise fail("quota-mps-refused", f"`{command}` was refused", found=found)
        return answer

    def answers(self) -> bool:
        """Whether a daemon is there and answers; a hanging one raises ``quota-mps-timeout``."""
        try:
            self.servers()
        except QuotaError as error:
            if error.code == "quota-mps-absent":
                return False
            raise
        return True

    def servers(self) -> list[int]:
        """Process ids of the servers; none before the first client."""
        return self._numbers("get_server_list")

    def server_status(self, server: int) -> str:
        """``ACTIVE``, ``INITIALIZING``, ``FAULT`` or what else the server says of itself."""
        return self.ask(f"get_server_status {server}")

    def clients(self, server: int) -> list[int]:
        """Process ids of a server's clients."""
        return self._numbers(f"get_client_list {server}")

    def all_clients(self) -> dict[int, int]:
        """Every client, and the server it talks to."""
        return {client: server for server in self.servers() for client in self.clients(server)}

    def start_server(self, uid: int | None = None) -> None:
        """Start a server for a user, this one by default, before its first client asks for it."""
        self.ask(f"start_server -uid {os.getuid() if uid is None else uid}")

    def terminate_client(self, server: int, client: int) -> None:
        """End a client's work in order. A client killed with work in flight is undefined."""
        self.ask(f"terminate_client {server} {client}")

    def add_partition(self, device: str, chunks: int) -> str:
        """Make a static partition; its identifier, for ``CUDA_MPS_SM_PARTITION``."""
        command = f"sm_partition add {device} {chunks}"
        answer = self.ask(command)
        found = _PARTITION.search(answer)
        if found is None:
            raise fail("quota-mps-refused", f"`{command}` named no partition", found=answer)
        return found[1]

    def remove_partition(self, device: str, partition: str) -> None:
        """Give a partition's SMs back."""
        self.ask(f"sm_partition rm {device} {partition}")

    def quit(self) -> None:
        """End the daemon. Only for one that was started here, and after its clients are gone."""
        self.ask("quit")

    def _numbers(self, command: str) -> list[int]:
        answer = self.ask(command)
        words = answer.split()
        if not all(word.isdigit() for word in words):
            raise fail(
                "quota-mps-refused",
                f"the answer to `{command}` can't be read",
                expected="process ids",
                found=answer,
            )
        return [int(word) for word in words]
