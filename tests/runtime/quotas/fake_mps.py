"""A control program that answers as NVIDIA's is documented to, or misbehaves as it is told.

Its state is a folder, ``FAKE_MPS``: ``mode`` says how to misbehave, ``commands`` is the transcript,
``clients`` the clients that are connected.
"""

from __future__ import annotations

import sys
from pathlib import Path

SCRIPT = """#!{python}
import os, signal, sys, time
state = {state!r}
mode = open(os.path.join(state, "mode")).read().strip()
pipe = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", os.path.join(state, "default"))
alive = os.path.join(pipe, "alive")
def note(text):
    with open(os.path.join(state, "commands"), "a") as file:
        file.write(text + "\\n")
arguments = sys.argv[1:]
if arguments:
    bounded = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" in os.environ
    note("start " + " ".join(arguments) + (" bounded" if bounded else ""))
    if mode == "fails to start":
        print("An instance of this daemon is already running"); sys.exit(1)
    if mode != "never answers":
        open(alive, "w").write("static" if "-S" in arguments else "plain")
    if mode == "ignores quit":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("daemon ready", flush=True)
    deadline = time.time() + 120
    while time.time() < deadline:
        if mode != "ignores quit" and mode != "never answers" and not os.path.exists(alive):
            sys.exit(0)
        time.sleep(0.01)
    sys.exit(3)
command = sys.stdin.read().strip()
if mode == "hangs":
    note(command); time.sleep(30)
if not os.path.exists(alive):
    print("Cannot find MPS control daemon process"); sys.exit(1)
note(command)
clients = open(os.path.join(state, "clients")).read().split()
words = command.split()
if command == "get_server_list":
    print("4711" if clients or mode == "garbled" else "", end="")
    if mode == "garbled": print(" and more")
elif words[0] == "get_server_status":
    print("ACTIVE")
elif words[0] == "get_client_list":
    print("\\n".join(clients))
elif words[0] == "start_server":
    if mode == "refuses": print("Failed to start server: permission denied")
elif words[0] == "terminate_client":
    open(os.path.join(state, "clients"), "w").write(" ".join(c for c in clients if c != words[2]))
elif words[:2] == ["sm_partition", "add"]:
    if open(alive).read() != "static":
        print("Error: static partitioning is not enabled")
    elif mode == "refuses":
        print("Failed to create partition: not enough free chunks")
    elif mode == "odd answer":
        print("ok")
    else:
        count = open(os.path.join(state, "commands")).read().count("sm_partition add")
        print("Partition %s/p%d created" % (words[2], count))
elif words[:2] == ["sm_partition", "rm"]:
    pass
elif command == "quit":
    if mode != "ignores quit": os.remove(alive)
else:
    print("Unknown command"); sys.exit(1)
"""


class Fake:
    """The program and its state. ``daemon()`` makes one answer at the default place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.binary = folder / "nvidia-cuda-mps-control"
        self.binary.write_text(SCRIPT.format(python=sys.executable + " -S", state=str(folder)))
        self.binary.chmod(0o755)
        (folder / "default").mkdir()
        self.mode("works")
        self.clients()
        (folder / "commands").write_text("")

    def mode(self, text: str) -> None:
        """How to misbehave."""
        (self.folder / "mode").write_text(text)

    def clients(self, *pids: int) -> None:
        """Who is connected."""
        (self.folder / "clients").write_text(" ".join(map(str, pids)))

    def daemon(self, kind: str = "plain") -> None:
        """A daemon of somebody else's answers."""
        (self.folder / "default" / "alive").write_text(kind)

    @property
    def foreign(self) -> bool:
        """Whether that daemon still answers."""
        return (self.folder / "default" / "alive").exists()

    @property
    def commands(self) -> list[str]:
        """The transcript, without the questions that only look whether somebody answers."""
        lines = (self.folder / "commands").read_text().splitlines()
        return [line for line in lines if line != "get_server_list"]
