"""Where a component lives: in the caller's thread, in a thread of its own, or in a process.

All three take a factory, build the component from it in place, and run its methods in the order
in which they were submitted:

>>> host = InlineHost(list, name="numbers")
>>> host.call("append", 3)
>>> ticket = host.submit("count", 3)
>>> host.wait(ticket)
1
>>> host.close()

Importing this package loads neither torch nor numpy: a worker process imports it to start.
"""

from __future__ import annotations

from rose_compiler.runtime.hosts.host import Host, InlineHost, Ticket
from rose_compiler.runtime.hosts.process import ProcessHost
from rose_compiler.runtime.hosts.thread import ThreadHost

__all__ = ["Host", "InlineHost", "ProcessHost", "ThreadHost", "Ticket"]
