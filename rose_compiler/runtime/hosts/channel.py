"""Frames on a stream socket between a process host and its worker.

A frame is a 16-byte header (operation, sequence number, payload length) and the payload. Requests
are answered in order, one reply each.
"""

from __future__ import annotations

import struct

HEADER = struct.Struct("<BxxxIQ")

# what the parent asks
START, CALL, SHARE, CLOSE, RAW = 1, 2, 3, 4, 5
# how the worker answers: nothing, a pickled value, bytes as they are, an exception
NONE, VALUE, BYTES, ERROR = 16, 17, 18, 19

#: Least size of a read: a reply of the usual size arrives with its header in one system call.
CHUNK = 1 << 16


class Frames:
    """Cuts the bytes that arrive into frames."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Append bytes as they arrived."""
        self._buffer += data

    def take(self) -> tuple[int, int, bytes] | None:
        """The next complete frame as (operation, sequence number, payload), or None."""
        buffer = self._buffer
        if len(buffer) < HEADER.size:
            return None
        op, seq, size = HEADER.unpack_from(buffer)
        end = HEADER.size + size
        if len(buffer) < end:
            return None
        payload = bytes(memoryview(buffer)[HEADER.size : end])
        del buffer[:end]
        return op, seq, payload

    def wanted(self) -> int:
        """How many bytes to read at most: enough for the rest of a frame that has begun."""
        buffer = self._buffer
        if len(buffer) < HEADER.size:
            return CHUNK
        rest = HEADER.size + HEADER.unpack_from(buffer)[2] - len(buffer)
        return max(CHUNK, min(int(rest), 1 << 24))


def frame(op: int, seq: int, payload: bytes) -> bytes:
    """A frame as bytes."""
    return HEADER.pack(op, seq, len(payload)) + payload
