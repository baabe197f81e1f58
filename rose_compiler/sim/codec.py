"""A shard's infos as bytes, on their way from a worker process."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from rose_compiler.sim.tables import Schema, Table

_PICKLED = 0xFFFF
_LIMIT = 256


class InfoCodec:
    """Packs infos, and only the first table of each schema is pickled.

    One codec packs and another one unpacks, in the same order.
    """

    def __init__(self) -> None:
        self._numbers: dict[Schema, int] = {}
        self._schemas: list[Schema] = []

    def pack(self, infos: Any) -> bytes:
        """Infos as bytes, empty for empty infos."""
        if not infos:
            return b""
        if isinstance(infos, Table):
            number = self._numbers.get(infos.schema)
            if number is not None:
                blocks = [block.tobytes() for block in infos.blocks]
                return b"".join([number.to_bytes(2, "little"), *blocks])
            numbered = len(self._numbers) < _LIMIT
            if numbered:
                self._numbers[infos.schema] = len(self._numbers)
            content: Any = infos.schema, infos.blocks, numbered
        else:
            content = infos
        return _PICKLED.to_bytes(2, "little") + pickle.dumps(content, pickle.HIGHEST_PROTOCOL)

    def unpack(self, data: bytes) -> Any:
        """What :meth:`pack` was given; arrays may be read-only."""
        if not data:
            return {}
        number = int.from_bytes(data[:2], "little")
        if number == _PICKLED:
            content = pickle.loads(memoryview(data)[2:])
            if not isinstance(content, tuple):
                return content
            schema, blocks, numbered = content
            if numbered:
                self._schemas.append(schema)
            return Table(schema, blocks)
        schema = self._schemas[number]
        blocks = []
        start = 2
        for dtype, shape, size in schema.shapes:
            blocks.append(np.ndarray(shape, dtype, data, start))
            start += size
        return Table(schema, blocks)
