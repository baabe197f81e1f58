"""Infos of a usual step as a few arrays: every environment has the same keys of the same types.

A key's *tag* says what its values are: a scalar type, ``(dtype, shape)`` of an array, None for
objects, a dict of tags for a dict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

#: One environment's infos: (its index in the shard, the dict it returned).
Add = tuple[int, dict[str, Any]]

#: Python's own types for which gymnasium makes an array of that type.
SCALARS = (int, float, bool)


def tag_of(key: str, value: Any) -> Any:
    """What kind of value this is to gymnasium's merge of infos."""
    kind = type(value)
    if key == "final_obs":
        return None
    if kind in SCALARS or issubclass(kind, np.number):
        return kind
    if isinstance(value, dict):
        return {}
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape
    return None


def empty(tag: Any, size: int) -> np.ndarray:
    """The array that gymnasium makes for values of this tag, of ``size`` environments."""
    if tag is None:
        return np.full(size, fill_value=None, dtype=object)
    if isinstance(tag, tuple):
        return np.zeros((size, *tag[1]), dtype=tag[0])
    return np.zeros(size, dtype=tag)


class Table:
    """Infos in which every environment has the same keys, each a number or an array of one type.

    The usual case of a step without episode ends, kept as a few arrays: ``blocks`` has one array
    of (keys of one type, environments) for each scalar type, then one for each array key.
    """

    __slots__ = ("blocks", "schema")

    def __init__(self, schema: Schema, blocks: list[np.ndarray]) -> None:
        self.schema = schema
        self.blocks = blocks


@dataclass(frozen=True)
class Schema:
    """The keys of a :class:`Table` in their order, and the tag of each."""

    size: int
    keys: tuple[str, ...]
    tags: tuple[Any, ...]

    @cached_property
    def groups(self) -> list[tuple[type, list[int]]]:
        """Scalar types, each with the places of its keys."""
        found: dict[type, list[int]] = {}
        for i, tag in enumerate(self.tags):
            if isinstance(tag, type):
                found.setdefault(tag, []).append(i)
        return list(found.items())

    @cached_property
    def arrays(self) -> list[int]:
        """The places of keys whose values are arrays."""
        return [i for i, tag in enumerate(self.tags) if not isinstance(tag, type)]

    @cached_property
    def shapes(self) -> list[tuple[np.dtype, tuple[int, ...], int]]:
        """Type, shape and size in bytes of each block."""
        scalars = [(np.dtype(kind), (len(at), self.size)) for kind, at in self.groups]
        arrays = [(self.tags[i][0], (self.size, *self.tags[i][1])) for i in self.arrays]
        return [(d, shape, d.itemsize * math.prod(shape)) for d, shape in scalars + arrays]

    def columns(self, blocks: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Each key's array, a view of its block."""
        out: list[Any] = [None] * len(self.keys)
        for (_, at), block in zip(self.groups, blocks, strict=False):
            for i, row in zip(at, block, strict=True):
                out[i] = row
        for i, block in zip(self.arrays, blocks[len(self.groups) :], strict=True):
            out[i] = block
        return out

    def infos(self, blocks: Sequence[np.ndarray], size: int) -> dict[str, Any]:
        """The infos of ``size`` environments as gymnasium gives them."""
        masks = np.ones((len(self.keys), size), dtype=np.bool_)
        merged: dict[str, Any] = {}
        for key, column, mask in zip(self.keys, self.columns(blocks), masks, strict=True):
            merged[key] = column
            merged[f"_{key}"] = mask
        return merged


#: Schemas by size, keys and types of values; None where infos of these types make no table.
_schemas: dict[Any, Schema | None] = {}


def tabulate(adds: list[Add], size: int) -> Table | None:
    """The table of what a shard's environments returned, or None if they make no table."""
    if len(adds) != size:
        return None
    first = adds[0][1]
    keys = tuple(first)
    kinds = tuple(map(type, first.values()))
    values = []
    for i, (row, info) in enumerate(adds):
        if row != i or tuple(info) != keys or tuple(map(type, info.values())) != kinds:
            return None
        values.append(list(info.values()))
    shapes = tuple((v.dtype, v.shape) for v in values[0] if type(v) is np.ndarray)
    try:
        schema = _schemas[size, keys, kinds, shapes]
    except KeyError:
        schema = _schema(size, keys, values[0])
        if len(_schemas) < 1024:
            _schemas[size, keys, kinds, shapes] = schema
    if schema is None:
        return None
    blocks: list[np.ndarray] = []
    for kind, at in schema.groups:
        if len(at) == len(keys):
            blocks.append(np.array(values, kind).T)
        else:
            blocks.append(np.array([[row[i] for i in at] for row in values], kind).T)
    for i in schema.arrays:
        if any((row[i].dtype, row[i].shape) != schema.tags[i] for row in values):
            return None
        blocks.append(np.stack([row[i] for row in values]))
    return Table(schema, blocks)


def _schema(size: int, keys: tuple[str, ...], values: list[Any]) -> Schema | None:
    tags = tuple(tag_of(key, value) for key, value in zip(keys, values, strict=True))
    for key, tag in zip(keys, tags, strict=True):
        # a key that begins with an underscore may be taken for another one's mask
        if tag is None or isinstance(tag, dict) or key.startswith("_"):
            return None
        if isinstance(tag, tuple) and tag[0].hasobject:
            return None
    return Schema(size, keys, tags) if keys else None
